"""The first step and name in which two runs differ, and by how much: decisions over what probes have noted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from steepest.testing.verification.records import Run, StepRecord
from steepest.testing.verification.summaries import TensorSummary

Values = np.ndarray[Any, np.dtype[np.float64]]

#: How far a step may be from that of another division of the batch, by rounding alone, relative to what moves; and by
#: what this grows in each step. A unit of rounding of float32 is 1e-7: gradients in which terms cancel have more.
_ROUNDING = {"double": 1e-8, "single": 1e-4, "low": 3e-2}
_GROWTH, _MOST = 1.3, 2e-2
#: Gradients below this part of the largest are noise of rounding, of which Adam makes steps as of any other.
_NOISE = 1e-5
#: Of reports, such as an accuracy, in which a sample may change sides by rounding.
_OF_REPORTS = 3e-3


@dataclass(frozen=True)
class Difference:
    """What differs first.

    Attributes:
        step: the number of the step, from 1; 0 for none.
        what: "samples", "settings", "losses", "gradients", "weights", "optimizer_state", "buffers", "gathered",
            "draws", "rows", "reports" or "steps".
        name: of the tensor, the setting or the report.
        here, there: the value in the first run, and in the second.
        size: the relative size of the difference; NaN where the values are not numbers.
        worker: the worker's index; None for all workers.
        ratio: the second value divided by the first, if all elements have one ratio; otherwise NaN.
    """

    step: int
    what: str
    name: str = ""
    here: str = ""
    there: str = ""
    size: float = math.nan
    worker: int | None = None
    ratio: float = math.nan


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other.

    Attributes:
        first: None where they are equal.
        same_bits: whether all bits are.
        distances: the largest distance of values that are equal up to rounding, by name.
        each_once: whether the samples of each step are the same; None where they cannot be told apart.
        buffers: the first buffer that differs where everything else is equal; None if there is none.
        missing: the row of reports that lacks a killed worker's part, lost on its way; None if there is none.
    """

    first: Difference | None
    same_bits: bool = False
    distances: Mapping[str, float] = ()  # type: ignore[assignment]
    each_once: bool | None = None
    buffers: Difference | None = None
    missing: int | None = None


def precision_of(run: Run) -> str:
    """Return "low", "single" or "double": how finely a run's parameters are rounded, at worst."""
    if (run.facts is not None and run.facts.low_precision) or run.notes("autocast"):
        return "low"
    steps = [s for life in run.lives for s in life.steps[:1]]
    eps = max((t.eps for s in steps for t in s.weights.values()), default=0.0)
    return "low" if eps > 1e-5 else "single" if eps > 1e-10 else "double"


def tolerance(precision: str, step: int) -> float:
    """Return how far rounding may have moved a step's values by then."""
    base = _ROUNDING[precision]
    return max(base, min(base * _GROWTH ** (step - 1), _MOST))


def whole_and_parts(
    whole: Run, parts: Run, noisy: Iterable[str] = (), *, gradients: bool = True
) -> Comparison:
    """Compare a run of one process with one whose batches are divided.

    Args:
        whole: of one worker.
        parts: of several, each of which has a part of each batch.
        noisy: names of reports that no two runs have in common.
        gradients: whether those with which steps begin are compared; a plain script clips them before, workers
            after.
    """
    one = whole.in_order(0)
    several = {worker: parts.in_order(worker) for worker in parts.workers}
    different = _lengths(whole, parts)
    first_end = math.inf if different is None else different.step
    precision, noise = precision_of(whole), _Noise(whole)
    distances = {"weights": 0.0, "losses": 0.0}
    each_once: bool | None = True
    buffers: Difference | None = None
    for step in sorted(one):
        if step > first_end:
            break
        own = [records[step] for records in several.values() if step in records]
        if not own:
            continue
        limit = tolerance(precision, step)
        each_once = _and(each_once, _same_samples(one[step], own))
        difference = (
            _settings(one[step], own)
            or _losses(one[step], own, limit, distances)
            or (_gradients(one[step], own, limit) if gradients else None)
            or _weights(one[step], own[0], noise, limit, distances)
            or _optimizer_state(one[step], own[0], limit)
            or _gathered(one[step], own, max(_OF_REPORTS, 10 * limit))
        )
        buffers = buffers or _buffers(one[step], own, 10 * limit)
        if difference is not None:
            return Comparison(difference, each_once=each_once)
    if different is not None:
        return Comparison(different, each_once=each_once)
    limit = max(_OF_REPORTS, _ROUNDING[precision])
    first = _reports(whole.reports, parts.reports, limit, frozenset(noisy))
    if whole.tables and parts.tables:
        first = first or tables_apart(whole, parts, 10 * tolerance(precision, whole.length))
    return Comparison(first, False, distances, each_once, buffers)


def to_the_bit(base: Run, other: Run, noisy: Iterable[str] = ()) -> Comparison:
    """Compare two runs of the same workers, each worker's steps with its own, to the bit."""
    left_out = frozenset(noisy)
    distances = {"weights": 0.0}
    buffers: Difference | None = None
    steps = {w: (base.steps_of(w), other.steps_of(w)) for w in base.workers}
    entered = {id(life.steps[0]) for life in other.lives if life.steps}
    for step in range(1, max(base.length, other.length) + 1):
        for causes, worker in itertools.product((True, False), base.workers):
            own, its = (each.get(step) for each in steps[worker])
            if own is None or its is None:
                if own is not its:
                    here, there = (f"{run.length_of(worker)} steps" for run in (base, other))
                    return Comparison(Difference(step, "steps", "", here, there, worker=worker))
                continue
            if id(its) in entered:
                own = _as_who_enters(own, its)
            buffers = buffers or _same_tensors(own, its, worker, "buffers")
            compare = _same_causes if causes else _same_results
            if (differs := compare(own, its, worker)) is not None:
                return Comparison(differs, buffers=buffers)
    rows = other.missing_reports()
    pairs = enumerate(zip(base.reports, other.reports, strict=False))
    missing = [n for n, (a, b) in pairs if n in rows and _reports([a], [b], 0.0, left_out)]
    reports = [base.reports[n] if n in missing else row for n, row in enumerate(other.reports)]
    first = _reports(base.reports, reports, 0.0, left_out) or tables_apart(base, other, 0.0)
    row = missing[0] if missing else None
    return Comparison(first, first is None, distances, True, buffers, row)


def _as_who_enters(own: StepRecord, its: StepRecord) -> StepRecord:
    """Return a step as a worker that joins there sees it: without earlier batches, and gathers, that had no step."""
    count, gathers = len(its.samples), len(its.gathered)
    samples, gathered = own.samples[-count:], own.gathered[-gathers:]
    return replace(own, samples=samples if count else [], gathered=gathered if gathers else [])


def _same_causes(own: StepRecord, its: StepRecord, worker: int) -> Difference | None:
    step = own.step
    if own.samples != its.samples:
        here, there = len(own.samples), len(its.samples)
        counts = ("", "") if here == there else (str(here), str(there))
        return Difference(step, "samples", "", *counts, worker=worker)
    for at, (ours, theirs) in enumerate(zip(own.settings, its.settings, strict=False)):
        for name in ours:
            if ours[name] != theirs.get(name):
                return _of_setting(step, name, at, ours[name], theirs.get(name), worker)
    if repr(own.losses) != repr(its.losses):
        shown = _shown(own.losses), _shown(its.losses)
        return Difference(step, "losses", "", *shown, _apart_of(own.losses, its.losses), worker)
    return _same_tensors(own, its, worker, "gradients")


def _same_results(own: StepRecord, its: StepRecord, worker: int) -> Difference | None:
    for what in ("weights", "optimizer_state"):
        if (difference := _same_tensors(own, its, worker, what)) is not None:
            return difference
    for here, there in itertools.zip_longest(own.gathered, its.gathered):
        if here is None or there is None or here.digest != there.digest:
            return Difference(own.step, "gathered", (here or there).line, worker=worker)
    if own.drawn != its.drawn:
        return Difference(own.step, "draws", "", worker=worker)
    return None


def _same_tensors(own: StepRecord, its: StepRecord, worker: int, what: str) -> Difference | None:
    mine, yours = getattr(own, what), getattr(its, what)
    for name in mine:
        if name not in yours or mine[name].digest != yours[name].digest:
            size = _apart(mine[name].values, yours[name].values) if name in yours else math.nan
            return Difference(own.step, what, name, size=size, worker=worker)
    if extra := yours.keys() - mine.keys():
        return Difference(own.step, what, min(extra), worker=worker)
    return None


def _lengths(whole: Run, parts: Run) -> Difference | None:
    lengths = {worker: len(parts.in_order(worker)) for worker in parts.workers}
    own = len(whole.in_order(0))
    if {*lengths.values()} == {own}:
        return None
    each = ", ".join(f"{n} on worker {w}" for w, n in lengths.items())
    return Difference(min(*lengths.values(), own), "steps", "", f"{own} steps", each)


def _settings(one: StepRecord, own: Sequence[StepRecord]) -> Difference | None:
    for worker, record in enumerate(own):
        for at, (here, there) in enumerate(zip(one.settings, record.settings, strict=False)):
            for name, value in here.items():
                other = there.get(name)
                if _number(value) and other is not None and _number(other):
                    if math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-12):
                        continue
                    ratio = other / value if value else math.nan
                    shown = f"{value:.6g}", f"{other:.6g}"
                    return Difference(
                        one.step, "settings", f"{name}@{at}", *shown, worker=worker, ratio=ratio
                    )
                if value != other:
                    return _of_setting(one.step, name, at, value, other, worker)
    return None


def _of_setting(
    step: int, name: str, at: int, here: object, there: object, worker: int
) -> Difference:
    """Return the difference of one of the optimizer's settings in its parameter group `at`."""
    return Difference(
        step, "settings", f"{name}@{at}", f"{here!r:.24}", f"{there!r:.24}", worker=worker
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def weights_of(own: Sequence[StepRecord]) -> Values:
    """Return each worker's weight in the step's mean: its samples, or what the user set; 1 where losses are sums."""
    standing_in = [*_standing_in(own)]
    if own[0].sums:
        return np.array([0.0 if each else 1.0 for each in standing_in])
    by_loss = _shares_of_losses(own)
    if by_loss is not None:
        # gradients that are added up of batches whose shares differ, or are said, are multiplied by these already
        said = own[0].weight is not None and own[0].batches > 1
        alike = not said and np.allclose(by_loss, by_loss[:, :1])
        return by_loss[:, 0] if alike else np.full(len(own), 1 / len(own))
    counts = np.array([len(record.samples) or record.batches for record in own], float)
    if not counts.sum():
        counts = np.ones(len(own))
    shares: Values = counts / counts.sum()
    return shares


def _shares_of_losses(own: Sequence[StepRecord]) -> Values | None:
    """Return the weight of each loss in the mean, by worker; None if workers have different numbers of losses."""
    if not own[0].counts or len({len(record.counts) for record in own}) > 1:
        return None
    counts = np.array([record.counts for record in own], float)
    counts[[*_standing_in(own)]] = 0.0
    counts[:, counts.sum(axis=0) == 0] = 1.0
    shares: Values = counts / counts.sum(axis=0)
    return shares


def _standing_in(own: Sequence[StepRecord]) -> Iterator[bool]:
    """Yield for each worker whether its only sample has no weight: a small batch had none for it."""
    seen: set[int] = set()
    for record in own:
        yield (
            len(record.samples) == 1 and 0 not in record.samples and seen.issuperset(record.samples)
        )
        seen |= {*record.samples}


def _losses(
    one: StepRecord, own: Sequence[StepRecord], limit: float, distances: dict[str, float]
) -> Difference | None:
    if any(len(record.losses) != len(one.losses) for record in own) or not one.losses:
        return None
    losses = np.array([record.losses for record in own], float)
    shares = None if own[0].sums else _shares_of_losses(own)
    there = weights_of(own) @ losses if shares is None else (shares * losses).sum(axis=0)
    here = np.array(one.losses, float)
    if np.isnan(here).any() or np.isnan(there).any():
        return None
    size = float(np.abs(there - here).max() / max(np.abs(here).max(), 1e-6))
    if size <= max(limit, 1e-4 if limit >= 1e-4 else limit):
        distances["losses"] = max(distances["losses"], size)
        return None
    return Difference(
        one.step, "losses", "", _shown(here), _shown(there), size, ratio=_ratio(here, there)
    )


def joined(named: Mapping[str, TensorSummary], names: Sequence[str]) -> Values:
    """Return the values of tensors in a row, in an order of their names; missing ones are left out by the caller."""
    return np.concatenate([named[name].values for name in names]) if names else np.zeros(0)


def gradients_of(one: StepRecord, own: Sequence[StepRecord]) -> tuple[Values, Values]:
    """Return the whole batch's gradient, and those of its parts, a row each."""
    names = sorted(one.gradients.keys() | {name for record in own for name in record.gradients})
    sizes = {
        name: len(values.values)
        for record in (one, *own)
        for name, values in record.gradients.items()
    }

    def row(record: StepRecord) -> Values:
        nothing = {name: np.zeros(sizes[name]) for name in names}
        rows = [record.gradients[n].values if n in record.gradients else nothing[n] for n in names]
        return np.concatenate(rows) if rows else np.zeros(0)

    return row(one), np.array([row(record) for record in own])


def _gradients(one: StepRecord, own: Sequence[StepRecord], limit: float) -> Difference | None:
    here, rows = gradients_of(one, own)
    if not here.size or not np.isfinite(here).all() or not np.isfinite(rows).all():
        return None
    there = weights_of(own) @ rows
    norm = float(np.linalg.norm(here))
    size = float(np.linalg.norm(there - here)) / max(
        norm, float(np.linalg.norm(rows)) * 1e-3, 1e-12
    )
    if size <= 10 * limit:
        return None
    return Difference(
        one.step, "gradients", _worst(one.gradients, own), size=size, ratio=_ratio(here, there)
    )


def _worst(named: Mapping[str, TensorSummary], own: Sequence[StepRecord]) -> str:
    """Return the name of the tensor whose gradient is furthest from the mean of its parts."""
    share = weights_of(own)

    def far(name: str) -> float:
        parts = [record.gradients.get(name) for record in own]
        mean = sum(
            (w * part.values for w, part in zip(share, parts, strict=True) if part is not None),
            np.zeros_like(named[name].values),
        )
        return float(np.linalg.norm(mean - named[name].values))

    return max(named, key=far, default="")


class _Noise:
    """Which values of a run's weights are moved by noise of rounding alone."""

    def __init__(self, run: Run) -> None:
        self._first = next((life.first for life in run.lives if life.first), {})
        self._quiet: dict[str, Any] = {}

    def moved(self, name: str, one: StepRecord) -> Any:
        """Return the mask of the values of a tensor that have had a gradient."""
        most = max(
            (float(np.abs(t.values).max(initial=0.0)) for t in one.gradients.values()), default=0.0
        )
        own = one.gradients.get(name)
        values = one.weights[name].values
        loud = np.zeros(len(values), bool) if own is None else np.abs(own.values) > _NOISE * most
        before = self._quiet.get(name)
        # what was noise once stays apart: it has moved the value
        quiet = (np.zeros(len(values), bool) if own is None else ~loud) | (
            before if before is not None else False
        )
        self._quiet[name] = quiet
        return ~quiet

    def movement(self, name: str, one: StepRecord) -> Values:
        """Return how far a tensor has come since the beginning."""
        first = self._first.get(name)
        values = one.weights[name].values
        return (
            values if first is None or len(first.values) != len(values) else values - first.values
        )


def _weights(
    one: StepRecord, own: StepRecord, noise: _Noise, limit: float, distances: dict[str, float]
) -> Difference | None:
    names = [name for name in one.weights if name in own.weights]
    masks = {name: noise.moved(name, one) for name in names}
    apart = {
        name: (own.weights[name].values - one.weights[name].values)[masks[name]] for name in names
    }
    movement = [noise.movement(name, one)[masks[name]] for name in names]
    most = max((float(np.abs(one.weights[n].values).max(initial=0.0)) for n in names), default=0.0)
    eps = max((one.weights[n].eps for n in names), default=0.0)
    moved = math.sqrt(sum(float(each @ each) for each in movement))
    far = math.sqrt(sum(float(each @ each) for each in apart.values()))
    count = sum(each.size for each in movement)
    size = far / max(moved, 100 * eps * most * math.sqrt(max(count, 1)), 1e-300)
    largest = max((float(np.abs(each).max(initial=0.0)) for each in apart.values()), default=0.0)
    if math.isnan(size) or size <= 10 * limit:
        distances["weights"] = max(distances["weights"], largest / max(most, 1e-300))
        return None
    name = max(apart, key=lambda n: float(np.abs(apart[n]).max(initial=0.0)))
    there = np.concatenate([noise.movement(n, one)[masks[n]] + apart[n] for n in names])
    return Difference(
        one.step, "weights", name, size=size, ratio=_ratio(np.concatenate(movement), there)
    )


def _optimizer_state(one: StepRecord, own: StepRecord, limit: float) -> Difference | None:
    """Compare optimizers' states, all tensors of a key together: that of a single tensor may be noise alone."""
    kinds: dict[str, list[str]] = {}
    for name in one.optimizer_state:
        kinds.setdefault(name.split(" of ")[0], []).append(name)
    if lacking := one.optimizer_state.keys() ^ own.optimizer_state.keys():
        return Difference(one.step, "optimizer_state", min(lacking))
    for names in kinds.values():
        here, there = (joined(each.optimizer_state, names) for each in (one, own))
        if here.shape != there.shape or not (np.isfinite(here).all() and np.isfinite(there).all()):
            continue
        size = float(np.linalg.norm(there - here)) / max(float(np.linalg.norm(here)), 1e-12)
        if size > 20 * limit:
            name = max(names, key=lambda n: _far(one.optimizer_state[n], own.optimizer_state[n]))
            return Difference(
                one.step, "optimizer_state", name, size=size, ratio=_ratio(here, there)
            )
    return None


def _far(a: TensorSummary, b: TensorSummary) -> float:
    return float(np.abs(a.values - b.values).max(initial=0.0))


def _gathered(one: StepRecord, own: Sequence[StepRecord], limit: float) -> Difference | None:
    """Compare what was gathered: the number of values and, if it is the same, the values in any order."""
    for worker, record in enumerate(own):
        here, there = len(one.gathered), len(record.gathered)
        if here != there:
            line = (one.gathered or record.gathered)[0].line
            return Difference(
                one.step, "gathered", line, f"{here} calls", f"{there} calls", worker=worker
            )
    for a, b in zip(one.gathered, own[0].gathered, strict=True):
        if a.count != b.count or not np.isfinite(a.values).all():
            continue
        size = float(np.linalg.norm(a.values - b.values)) / max(
            float(np.linalg.norm(a.values)), 1e-12
        )
        if not size <= limit:
            return Difference(one.step, "gathered", a.line, size=size)
    return None


def _buffers(one: StepRecord, own: Sequence[StepRecord], limit: float) -> Difference | None:
    """Compare buffers with the mean of the workers'."""
    shares = weights_of(own) / weights_of(own).sum()
    for name, here in one.buffers.items():
        parts = [record.buffers[name].values for record in own if name in record.buffers]
        if len(parts) < len(own) or any(len(each) != len(here.values) for each in parts):
            return Difference(one.step, "buffers", name)
        there = shares @ np.array(parts)
        size = float(np.linalg.norm(there - here.values))
        size /= max(float(np.linalg.norm(here.values)), 1e-12)
        if size > limit:
            return Difference(one.step, "buffers", name, size=size)
    return None


def _reports(
    here: Sequence[Mapping[str, float]],
    there: Sequence[Mapping[str, float]],
    limit: float,
    left_out: frozenset[str],
) -> Difference | None:
    for at, (own, its) in enumerate(zip(here, there, strict=False)):
        for name in own.keys() | its.keys():
            if name in left_out:
                continue
            a, b = own.get(name, math.nan), its.get(name, math.nan)
            if (
                a == b
                or (math.isnan(a) and math.isnan(b))
                or abs(a - b) <= limit * max(abs(a), abs(b))
            ):
                continue
            size = abs(a - b) / max(abs(a), abs(b), 1e-300)
            return Difference(
                0, "reports", name, f"{a:.6g}", f"{b:.6g}", size, at, b / a if a else math.nan
            )
    if len(here) != len(there):
        return Difference(0, "reports", "", f"{len(here)} reports", f"{len(there)} reports")
    return None


def tables_apart(one: Run, other: Run, limit: float) -> Difference | None:
    """Return a row of a table that differs at the end by more than a limit, relative to the largest value."""
    for name in sorted(one.tables.keys() | other.tables.keys()):
        (ids, rows), (others, its) = (
            run.tables.get(name, (torch.zeros(0), torch.zeros(0))) for run in (one, other)
        )
        if not torch.equal(ids, others):
            lacking = sorted({*ids.tolist()} ^ {*others.tolist()})
            return Difference(0, "rows", f"{name!r}, id {lacking[0]}")
        apart = (rows - its).abs().amax(1) if rows.numel() else torch.zeros(0)
        apart = apart / max(float(rows.abs().max()) if rows.numel() else 0.0, 1e-12)
        if (apart > limit).any():
            at = int(apart.argmax())
            return Difference(0, "rows", f"{name!r}, id {int(ids[at])}", size=float(apart[at]))
    return None


def noisy_reports(one: Run, again: Run) -> set[str]:
    """Return the names of reports whose values differ between two runs of one process, such as times."""
    calls = ([values for life in run.lives for _, values in life.reports] for run in (one, again))
    return {
        name
        for own, its in zip(*calls, strict=False)
        for name in own
        if not math.isclose(own[name], its.get(name, math.nan), rel_tol=_OF_REPORTS)
        and not (math.isnan(own[name]) and math.isnan(its.get(name, math.nan)))
    }


def noisy_variables(one: Run, again: Run, until: float = math.inf) -> set[str]:
    """Return the names of variables that differ between two runs in the steps before their first difference."""
    noisy = set()
    for worker in one.workers:
        first, second = one.steps_of(worker), again.steps_of(worker)
        for step in (each for each in first.keys() & second.keys() if each < until):
            own, its = first[step].variables, second[step].variables
            noisy |= {n for n, v in own.items() if n in its and its[n].digest != v.digest}
    return noisy


def _same_samples(one: StepRecord, own: Sequence[StepRecord]) -> bool | None:
    own = [r for r, stands_in in zip(own, _standing_in(own), strict=True) if not stands_in]
    several = [row for record in own for row in record.samples]
    if 0 in one.samples or 0 in several or not one.samples:
        return None
    return sorted(one.samples) == sorted(several)


def _and(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def _ratio(here: Values, there: Values) -> float:
    """Return the factor from the first to the second; NaN if no single factor fits."""
    square = float(here @ here)
    if not square:
        return math.nan
    ratio = float(here @ there) / square
    left = float(np.linalg.norm(there - ratio * here)) / max(float(np.linalg.norm(there)), 1e-300)
    return ratio if left < 1e-2 else math.nan


def _apart(a: Values, b: Values) -> float:
    if a.shape != b.shape or not a.size:
        return math.nan
    return float(np.abs(a - b).max() / max(float(np.abs(a).max()), 1e-300))


def _apart_of(a: Sequence[float], b: Sequence[float]) -> float:
    return _apart(np.array(a, float), np.array(b, float))


def _shown(losses: Iterable[float]) -> str:
    return ", ".join(f"{each:.6g}" for each in [*losses][:3])
