"""Which steps are audited, which worker computes which samples, and what follows if gradients differ. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from steepest.core.data.sampler import step_seed
from steepest.core.messages.audits import Audited, GradientDigest
from steepest.core.messages.gradients import Report

_AUDITS = 1 << 40  # in place of a replica's index, so that no audit has the seed of a batch


def drawn(seed: int, version: int, share: float) -> int | None:
    """Return a random number if a step is audited, else None; it is the same in each process and after a resume.

    Args:
        seed: of the job.
        version: of the weights from which the step is computed.
        share: of the steps that are audited, 0 to 1.
    """
    number = step_seed(seed, version, _AUDITS)
    return number if number < share * (1 << 63) else None


def other_of(worker: int, workers: int, number: int, attempt: int) -> int:
    """Return the worker whose samples `worker` computes besides its own; the next attempt pairs workers differently.

    Of two workers it is always the other one; a single worker computes its own samples again.

    Example:
        >>> [[other_of(worker, 4, 1, attempt) for worker in range(4)] for attempt in (0, 1)]
        [[2, 3, 0, 1], [3, 0, 1, 2]]
    """
    return (worker + 1 + (number + attempt) % max(workers - 1, 1)) % workers


class _ByWorker(NamedTuple):
    """The digest of a gradient: of one worker's samples, computed by that worker or another one."""

    share: int  # the worker whose samples they are
    worker: int
    audited: Audited
    digest: GradientDigest

    def equals(self, other: _ByWorker) -> bool:
        """Return whether two gradients of the same samples agree: to the bit on like machines, else to rounding."""
        one, two = self.digest, other.digest
        if self.audited.machine and self.audited.machine == other.audited.machine:
            return one.bits == two.bits
        most = max(self.audited.rounding, other.audited.rounding)

        def close(a: float, b: float, norm: float, other_norm: float) -> bool:
            if not math.isfinite(norm + other_norm):
                return math.isfinite(norm) == math.isfinite(other_norm)
            greatest = max(abs(a), abs(b), norm, other_norm)
            return math.isclose(norm, other_norm, rel_tol=most) and abs(a - b) <= most * greatest

        alike = all(map(close, one.sums, two.sums, one.norms, two.norms))
        return alike and len(one.sums) == len(two.sums)


class Finding(NamedTuple):
    """What follows from an audit in which gradients differ."""

    again: bool  # whether the step is computed once more, to find out which worker is wrong
    pairs: tuple[tuple[int, int], ...] = ()  # see `steepest.core.messages.driver.AuditDifference`
    worker: int | None = None
    why: str = ""


AGAIN = Finding(again=True)
_ODD = "it alone has got another result for the samples of worker {}, which two others have computed alike"
_UNSTEADY = "it did not get the same result twice for the samples of worker {}"
_ALL_UNSTEADY = (
    "workers {} did not get the same results twice: if the model is to repeat its results, look for operations that "
    "torch.use_deterministic_algorithms(True) refuses, and random draws other than torch's, NumPy's and Python's "
    "own; else their machines compute wrongly"
)
_UNDECIDED = (
    "both get their own results again, so that it is not known which is wrong: audit with three workers, or run the "
    "step on a third machine{}"
)
_BUFFERS = "; the buffers of the two differ, of which the gradient may depend"
_DATA = (
    "they have read other samples: a data set returns the same for the same index only if what it draws comes from "
    "torch's, NumPy's or Python's generator, and not in worker processes of a DataLoader; else a machine reads wrongly"
)


class Audits:
    """The audits of a job: compares what workers report of a step before it is committed."""

    def __init__(self) -> None:
        self._first: tuple[int, list[_ByWorker], Mapping[int, int]] | None = None
        self._told_of_data = False

    def judge(self, version: int, reports: Mapping[int, Report]) -> Finding | None:
        """Compare the digests that were reported of a step; return None if nothing is to be done.

        If gradients differ for the first time the step must be computed once more: each worker has to get its own
        result again, and the samples of two workers that differ are computed by a third.

        Args:
            version: of the weights from which it was computed.
            reports: of all workers, by index.
        """
        computed = list(_computed(reports))
        first, self._first = self._first, None
        lives = {worker: report.incarnation for worker, report in reports.items()}
        if first is None or first[0] != version:
            if not (pairs := _differing(computed)):
                return None
            if all(a.digest.batches != b.digest.batches for a, b in pairs):
                told, self._told_of_data = self._told_of_data, True
                return None if told else Finding(again=False, pairs=_named(pairs), why=_DATA)
            self._first = version, computed, lives
            return AGAIN
        _, before, then = first
        computed += [each for each in before if lives.get(each.worker) == then[each.worker]]
        if not (pairs := _differing(computed)):
            return None  # the wrong worker has died since
        return Finding(False, _named(pairs), *_culprit(computed, pairs))


def _computed(reports: Mapping[int, Report]) -> Iterator[_ByWorker]:
    for worker, report in reports.items():
        if (audit := report.audit) is not None:
            yield _ByWorker(worker, worker, audit, audit.own)
            yield _ByWorker(audit.other, worker, audit, audit.others)


def _differing(computed: Iterable[_ByWorker]) -> list[tuple[_ByWorker, _ByWorker]]:
    return [(a, b) for a, b in combinations(computed, 2) if a.share == b.share and not a.equals(b)]


def _named(pairs: Iterable[tuple[_ByWorker, _ByWorker]]) -> tuple[tuple[int, int], ...]:
    """Return the two workers of each difference, first the one that the samples belong to."""
    named = (
        (b.worker, a.worker) if a.share == b.worker else (a.worker, b.worker) for a, b in pairs
    )
    return tuple(sorted(set(named)))


def _culprit(
    computed: list[_ByWorker], pairs: list[tuple[_ByWorker, _ByWorker]]
) -> tuple[int | None, str]:
    """Return the worker that computes wrongly, or None if that is not known, and the reason."""
    unsteady = {a.worker: a.share for a, b in pairs if a.worker == b.worker}
    if len(unsteady) == 1:
        ((worker, share),) = unsteady.items()
        return worker, _UNSTEADY.format(share)
    if unsteady:
        return None, _ALL_UNSTEADY.format(" and ".join(map(str, sorted(unsteady))))
    odd: dict[int, int] = {}
    for share in {a.share for a, _ in pairs}:
        by_worker = {each.worker: each for each in computed if each.share == share}
        alone = [
            worker
            for worker, own in by_worker.items()
            if not any(own.equals(each) for w, each in by_worker.items() if w != worker)
        ]
        if len(by_worker) > len(alone) == 1:
            odd[alone[0]] = share
    if len(odd) == 1:
        ((worker, share),) = odd.items()
        return worker, _ODD.format(share)
    unlike = any(a.digest.state != b.digest.state for a, b in pairs)
    return None, _UNDECIDED.format(_BUFFERS if unlike else "")
