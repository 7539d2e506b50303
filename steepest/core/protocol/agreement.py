"""What workers' own loops report of one update: it must be the same, and is compared when the update is committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steepest.core.messages.fields import NO_STEP, RETURNED, StepDigest
from steepest.core.messages.gradients import Report
from steepest.core.protocol.push_tracking import Reports

#: Hyperparameters by parameter group that differ from the optimizer's own; None for those of its schedule.
Hyper = list[dict[str, Any]] | None

_BY_METRIC = (
    "on all workers they have to be the same: gather what they are made of first (steepest.gather), give the scheduler "
    "to steepest.prepare(), and keep what counts for them by steepest.register()"
)
_BY_STEPS = (
    "all workers are to take the same steps: decide by what steepest.gather() returns, and keep counters of your own "
    "by steepest.register()"
)
_BY_PASSES = (
    "the gradients of all workers are to be made of as many: accumulate over equally many batches, or say by "
    "steepest.weight() what the batch weighs"
)
_MOST_SHOWN = 8  # workers that an error names


class UnlikeError(Exception):
    """The reports of one update differ: the text names what differs, each worker's value, and the remedy."""


def agreed(
    reports: Reports, groups: Sequence[Mapping[str, Any]], *, needs_all: bool
) -> tuple[Hyper, float | None]:
    """Return the hyperparameters of an update and its greatest norm, as workers report them; None where none does.

    Args:
        reports: of the update's pushes.
        groups: the optimizer's own hyperparameters, by parameter group, for errors.
        needs_all: whether every worker contributes to each update. Otherwise the first report counts: other workers
            may be in another epoch.

    Raises:
        UnlikeError: every worker contributes to each update, and their reports differ.
    """
    first: Report | None = None
    alike = True
    for report in reports.values():
        if isinstance(report, Report) and (report.digest is not None or report.total):
            first = first or report
            alike = alike and report.digest == first.digest
            alike = alike and report.hyper == first.hyper and report.clip == first.clip
    if first is None:
        return None, None
    if needs_all and not alike:
        _compare({w: r for w, r in reports.items() if isinstance(r, Report)}, groups)
    return first.hyper, first.clip


def _compare(reports: Mapping[int, Report], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise UnlikeError if two reports differ in a field that both have."""
    reports = {w: r for w, r in reports.items() if r.digest is not None or r.total}
    digests = {worker: report.digest for worker, report in reports.items() if report.digest}

    def differ(part: Callable[[StepDigest], Any]) -> bool:
        values = (part(digest) for digest in digests.values())
        return len({each for each in values if each is not None}) > 1

    if differ(lambda digest: digest[:3] if digest.step is not None else None) or differ(
        lambda digest: digest.optimizer
    ):
        values = {worker: _in_words(digest) for worker, digest in digests.items()}
        raise _unlike("the step that they take", values, "is", _BY_STEPS)
    for at in range(max(len(report.hyper or ()) for report in reports.values())):
        own: Mapping[str, Any] = groups[at] if at < len(groups) else {}
        by_worker = {
            worker: report.hyper[at] if report.hyper else {} for worker, report in reports.items()
        }
        for name in dict.fromkeys(name for changed in by_worker.values() for name in changed):
            by_value = {
                worker: changed.get(name, own.get(name)) for worker, changed in by_worker.items()
            }
            if len({*map(repr, by_value.values())}) > 1:
                where = f" of parameter group {at}" if len(groups) > 1 else ""
                raise _unlike(f"{name}{where}", by_value, "has", _BY_METRIC)
    norms = {worker: report.clip for worker, report in reports.items()}
    if len({*norms.values()}) > 1:
        shown = {worker: "no norm" if norm is None else norm for worker, norm in norms.items()}
        raise _unlike("the norm by which gradients are clipped", shown, "has", _BY_METRIC)
    if differ(lambda digest: digest.passes):
        passes = {worker: digest.passes for worker, digest in digests.items()}
        counted = {worker: count for worker, count in passes.items() if count is not None}
        raise _unlike("the number of backward passes in a step", counted, "has", _BY_PASSES)


def _unlike(what: str, values: Mapping[int, Any], verb: str, do: str) -> UnlikeError:
    """Return the error that names workers and their values; of many workers, at most two for each value."""
    by_value: dict[str, list[int]] = {}
    for worker, value in sorted(values.items()):
        by_value.setdefault(str(value), []).append(worker)
    shown = sorted((worker, value) for value, own in by_value.items() for worker in own[:2])
    listed = ", ".join(f"worker {worker} {verb} {value}" for worker, value in shown[:_MOST_SHOWN])
    return UnlikeError(f"workers disagree about {what}: {listed}; {do}")


def _in_words(digest: StepDigest) -> str:
    """Return the position of a loop and the optimizer that it steps, in words."""
    if digest.optimizer == RETURNED:
        return "behind its loop: its function has returned"
    where = f"in epoch {digest.epoch}, batch {digest.batch} of the job"
    if digest.optimizer == NO_STEP:
        return f"{where}, and takes no step there"
    return f"{where}, at its step {digest.step} there, of optimizer {digest.optimizer}"
