"""The same program under several strategies: the outcome of each, and which one to take."""

from __future__ import annotations

import csv
import io
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple

from steepest.errors import ConfigurationError
from steepest.observe.page.run_view import RunView

Mode = Literal["min", "max"]
#: Parts of a worker's time; the last is what none of the others covers.
PARTS = ("compute", "data", "wait", "rest")
_COLUMNS = (
    "strategy", "step", "seconds", "samples", "loss", "staleness", "bytes_pushed", "bytes_pulled",
    "compute", "data", "wait", "seed",
)  # fmt: skip
_AFTER_LOSS = (
    "samples/s", "steps", "samples", "training", "pushed per sample", "pulled per sample", "staleness", "how it ended",
)  # fmt: skip
_BLOCKS = 40  # of a run's steps, over which a loss is a mean
_TAIL = 0.1  # the part of a run's steps over which its last loss is a mean
_EQUAL = 0.02  # two losses that differ by less are equal
_CONVERGED = 0.002  # and so are two that differ by less of what the loss has fallen
_APART = 0.05  # a part of the time that is worth a word
_FASTER = 1.05  # by less a strategy is not faster than another


@dataclass(frozen=True)
class TriedStrategy:
    """One run of the program.

    Attributes:
        strategy: its name.
        rows: those of its history, oldest first.
        ended: how it ended, in words.
        failed: whether it ended by an error.
        seed: of the run.
    """

    strategy: str
    rows: Sequence[Mapping[str, Any]]
    ended: str
    failed: bool = False
    seed: int = 0


class Criterion(NamedTuple):
    """The quantity by which strategies are compared: the loss, or a value that the script reports by name.

    Example:
        >>> Criterion.read("accuracy:max"), Criterion.read("val_loss")
        (Criterion(name='accuracy', mode='max'), Criterion(name='val_loss', mode='min'))
    """

    name: str = "loss"
    mode: Mode = "min"

    @classmethod
    def read(cls, text: str) -> Criterion:
        """Return the criterion of a text such as "accuracy:max"; ConfigurationError: it is none."""
        name, _, mode = text.partition(":")
        if not name or mode not in ("", "min", "max"):
            raise ConfigurationError(
                f"--validation {text}: give the name that the script reports, and :max if more of it is better, such "
                "as accuracy:max"
            )
        return cls(name, "max" if mode == "max" else "min")

    def of(self, row: Mapping[str, Any]) -> float:
        """Return the value in a row of a history; NaN where it has none."""
        value = row["loss"] if self == LOSS else (row.get("metrics") or {}).get(self.name)
        return math.nan if value is None else float(value)

    @property
    def sign(self) -> float:
        """1 if less is better, -1 if more is."""
        return 1.0 if self.mode == "min" else -1.0


#: The loss of the batches that are trained on.
LOSS = Criterion()


class _RunOutcome:
    """The outcome of one run, see `Outcome`."""

    def __init__(self, trial: TriedStrategy, by: Criterion) -> None:
        rows = [row for row in trial.rows if row["kind"] == "step" and row["samples"]]
        self.steps, self.samples = len(rows), sum(row["samples"] for row in rows)
        self.seconds = rows[-1]["seconds"] if rows else 0.0
        passed = self.seconds - rows[0]["seconds"] if rows else 0.0
        later = self.samples - rows[0]["samples"] if rows else 0
        self.speed = later / passed if passed > 0 else math.nan
        self._values = [(row["seconds"], value) for row in rows if isfinite(value := by.of(row))]
        if by != LOSS:  # what evaluations found, and what was reported behind the last step
            at = {row["step"]: row["seconds"] for row in rows}
            others = [row for row in trial.rows if row["kind"] in ("evaluation", "report")]
            found = [(at.get(row["step"], self.seconds), by.of(row)) for row in others]
            self._values = sorted([*self._values, *(each for each in found if isfinite(each[1]))])
        count = max(1, math.ceil(_TAIL * len(self._values)))
        tail = [value for _, value in self._values[-count:]]
        self.value = _mean(tail)
        self.doubt = _spread(tail) / math.sqrt(len(tail)) if tail else math.nan
        self.fall = abs(self._values[0][1] - self.value) if self._values else math.nan
        self.pushed = sum(row["bytes_pushed"] for row in rows) / max(self.samples, 1)
        self.pulled = sum(row["bytes_pulled"] for row in rows) / max(self.samples, 1)
        self.staleness = _mean([each for row in rows for each in row["staleness"]])
        known = [
            _mean([(row["timings"] or {}).get(part, 0.0) for row in rows]) for part in PARTS[:-1]
        ]
        step = 1000 * self.steps / max(self.samples, 1)  # steps for 1,000 samples
        whole = passed / max(self.steps - 1, 1)
        self.parts = (
            [step * each for each in (*known, max(0.0, whole - sum(known)))] if rows else []
        )

    def seconds_to(self, value: float, sign: float) -> float:
        """Return the seconds of training until several steps in a row were as good; infinity if there are none."""
        size = max(1, len(self._values) // _BLOCKS)
        for begin in range(0, len(self._values), size):
            block = self._values[begin : begin + size]
            if sign * _mean([each for _, each in block]) <= sign * value:
                return float(block[-1][0])
        return self.seconds if sign * self.value <= sign * value else math.inf


class Outcome:
    """The outcome of a strategy over its runs with different seeds: means, and ranges from the least to the greatest.

    Args:
        trials: its runs, each with a different seed; the steps of a failed run do not count.
        by: what is compared.

    Attributes:
        strategy, ended, failed: as of the trials; it has failed if any has.
        runs: the number of seeds.
        steps, samples: how many were taken, and in all of them.
        seconds: of training, until the last step.
        speed: samples per second, without the first step, which also waits for processes; NaN without a second
            one.
        speeds, values: the least and the greatest of the runs.
        value: what is compared, a mean over the last tenth of the steps that have it; NaN where no step has.
        doubt: its standard error, over the runs if there are several.
        fall: by how much it has changed since the first step.
        pushed, pulled: bytes for each sample.
        staleness: mean, in updates.
        parts: seconds for 1,000 samples by part, as `PARTS` has them, means over workers.
    """

    def __init__(self, trials: Sequence[TriedStrategy], by: Criterion = LOSS) -> None:
        self.by, self.strategy = by, trials[0].strategy
        self.failed = any(trial.failed for trial in trials)
        self.ended = next((each.ended for each in trials if each.failed), trials[-1].ended)
        runs = self._runs = [_RunOutcome(trial, by) for trial in trials]
        self.runs = len(runs)
        self.steps = round(_mean([run.steps for run in runs]))
        self.samples = round(_mean([run.samples for run in runs]))
        self.seconds = _mean([run.seconds for run in runs])
        self.speed, self.value = _mean([r.speed for r in runs]), _mean([r.value for r in runs])
        self.speeds = min(r.speed for r in runs), max(r.speed for r in runs)
        self.values = min(r.value for r in runs), max(r.value for r in runs)
        apart = _spread([run.value for run in runs]) / math.sqrt(len(runs))
        self.doubt = apart if len(runs) > 1 else runs[0].doubt
        self.fall = _mean([run.fall for run in runs])
        self.pushed, self.pulled = _mean([r.pushed for r in runs]), _mean([r.pulled for r in runs])
        self.staleness = _mean([run.staleness for run in runs])
        stepped = [run.parts for run in runs if run.parts]
        self.parts = [_mean(each) for each in zip(*stepped, strict=True)]

    def seconds_to(self, value: float) -> float:
        """Return the seconds of training until it was as good, a median over runs; infinity for never."""
        return statistics.median(run.seconds_to(value, self.by.sign) for run in self._runs)


def outcomes_of(trials: Sequence[TriedStrategy], by: Criterion = LOSS) -> list[Outcome]:
    """Return the outcome of each strategy, in the order of their first trials."""
    of_strategy: dict[str, list[TriedStrategy]] = {}
    for trial in trials:
        of_strategy.setdefault(trial.strategy, []).append(trial)
    return [Outcome(each, by) for each in of_strategy.values()]


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; 0 of a single value."""
    mean = _mean(values)
    return math.sqrt(sum((each - mean) ** 2 for each in values) / max(len(values) - 1, 1))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def recommend(outcomes: Sequence[Outcome]) -> tuple[str | None, str]:
    """Return the strategy to take, None if none has trained, and why, in a few sentences.

    It is the one with the best value at its end. Values count as equal if they differ by less than 2 %, by less
    than twice the standard error of their difference, or by less than 0.2 % of their change since the first step.
    Of strategies with equal values, the one is taken that was the first to reach the worst of these values.
    """
    trained = [each for each in outcomes if isfinite(each.value) and not each.failed]
    if not trained:
        what = "a loss" if not outcomes or outcomes[0].by == LOSS else repr(outcomes[0].by.name)
        return None, f"None: no strategy has trained with {what}, see how each ended."
    sign = trained[0].by.sign
    lowest = min(trained, key=lambda each: sign * each.value)
    equal = [each for each in trained if _is_equal(each, lowest)]
    level = max((each.value for each in equal), key=lambda value: sign * value)
    best = min(equal, key=lambda each: each.seconds_to(level))
    others = [each for each in trained if each is not best]
    if not others:
        return best.strategy, f"Take {best.strategy}: it is the only one that has trained."
    words = [f"Take {best.strategy}: {_first_reason(best, equal, others, level)}."]
    words += _about_speed(best, others)
    if best.runs > 1:
        words.append(f"All are means over {best.runs} seeds.")
    shortest = max(best.steps for best in trained)
    if shortest < _BLOCKS:
        words.append(
            f"But {shortest} steps at most were taken: compare for longer before you rely on it."
        )
    return best.strategy, " ".join(words)


def _is_equal(one: Outcome, other: Outcome) -> bool:
    apart = abs(one.value - other.value)
    doubt = 2 * math.hypot(one.doubt, other.doubt)
    return apart <= max(_EQUAL * abs(other.value), doubt, _CONVERGED * other.fall)


def _first_reason(
    best: Outcome, equal: Sequence[Outcome], others: Sequence[Outcome], level: float
) -> str:
    """Return why it is the best: the same value sooner, or a better one."""
    what, sign = best.by.name, best.by.sign
    if len(equal) > 1:
        second = min((e for e in equal if e is not best), key=lambda each: each.seconds_to(level))
        names = " and ".join(each.strategy for each in equal if each is not best)
        first, then = best.seconds_to(level), second.seconds_to(level)
        as_good = "as low as that of" if sign == 1 else "as high as that of"
        sooner = f"it was at {level:.4g} after {first:.3g} s"
        later = f"{second.strategy} after {then:.3g} s" if isfinite(then) else "no other was"
        return f"its {what} is {as_good} {names}, and {sooner}, {later}"
    second = min(others, key=lambda each: sign * each.value)
    return (
        f"its {what} at the end is {_ranged(best.value, best.values)}, that of the next best, {second.strategy}, "
        f"{_ranged(second.value, second.values)}"
    )


def _ranged(value: float, between: tuple[float, float], form: str = ".4g") -> str:
    """Return a number in words, with the range of the runs over which it is the mean."""
    if not isfinite(value):
        return "–"
    least, most = between
    return f"{value:{form}}" + (f" ({least:{form}} to {most:{form}})" if least < most else "")


def _about_speed(best: Outcome, others: Sequence[Outcome]) -> list[str]:
    """Return how fast it is, and where the time of the slower ones goes."""
    known = [each for each in (best, *others) if isfinite(each.speed)]
    if best not in known or len(known) < 2:
        return []
    fastest, slowest = max(known, key=lambda e: e.speed), min(known, key=lambda e: e.speed)
    words = []
    if fastest is not best and fastest.speed >= _FASTER * best.speed:
        words.append(
            f"{fastest.strategy} computes {fastest.speed / best.speed:.2g} times as many samples per second, and "
            f"learns less of each: its {best.by.name} at the end is {fastest.value:.4g}."
        )
    if slowest is not best and best.speed >= _FASTER * slowest.speed:
        times = f"It computes {best.speed / slowest.speed:.2g} times as many samples per second"
        away = 1 - slowest.parts[0] / sum(slowest.parts) if sum(slowest.parts) else 0.0
        spent = f", whose workers spend {away:.0%} of their time on something else than computing"
        words.append(f"{times} as {slowest.strategy}{spent if away >= _APART else ''}.")
    return words


def csv_of(trials: Sequence[TriedStrategy]) -> str:
    """Return all steps as a table: one line for each, with the samples and seconds of training until then."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for trial in trials:
        writer.writerows(_lines_of(trial))
    return text.getvalue()


def _lines_of(trial: TriedStrategy) -> Iterator[list[Any]]:
    samples = 0
    for row in trial.rows:
        if row["kind"] != "step" or not row["samples"]:
            continue
        samples += row["samples"]
        spent = [(row["timings"] or {}).get(part, "") for part in PARTS[:-1]]
        sent = [row["bytes_pushed"], row["bytes_pulled"]]
        stale = _mean(row["staleness"])
        cells = [trial.strategy, row["step"], row["seconds"], samples, row["loss"], stale, *sent]
        order = [spent[PARTS.index(name)] for name in _COLUMNS[-4:-1]]
        yield ["" if each != each else each for each in [*cells, *order, trial.seed]]


def table_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the rows of a table for people, of which the first has the names of its columns."""
    name = outcomes[0].by.name if outcomes else LOSS.name
    return [["strategy", name, *_AFTER_LOSS], *(_row_of(each) for each in outcomes)]


def _row_of(each: Outcome) -> list[str]:
    if not each.steps:
        return [each.strategy, *["–"] * len(_AFTER_LOSS), each.ended]
    numbers = [_ranged(each.value, each.values), _ranged(each.speed, each.speeds, ",.0f")]
    numbers += [f"{each.steps:,}", f"{each.samples:,}"]
    sent = [f"{size:,.0f} B" for size in (each.pushed, each.pulled)]
    stale = f"{each.staleness:.2g}" if each.staleness == each.staleness else "–"
    return [each.strategy, *numbers, f"{each.seconds:.1f} s", *sent, stale, each.ended]


def page_data(
    name: str,
    description: str,
    trials: Sequence[TriedStrategy],
    version: str = "",
    by: Criterion = LOSS,
) -> dict[str, Any]:
    """Return the data of the page of a comparison, as JSON has them; `version` is steepest's."""
    outcomes = outcomes_of(trials, by)
    head, *rows = table_of(outcomes)
    strategies = [each.strategy for each in outcomes]
    runs = []
    for trial in trials:
        view = RunView(trial.strategy)
        view.add_all(row for row in trial.rows if row["kind"] != "step" or row["samples"])
        curves = view.as_json()["curves"] if _RunOutcome(trial, by).steps else None
        label = trial.strategy + (f", seed {trial.seed}" if len(trials) > len(outcomes) else "")
        runs.append(
            {"strategy": label, "colour": strategies.index(trial.strategy), "curves": curves}
        )
    parts = [{"strategy": each.strategy, "parts": each.parts} for each in outcomes if each.parts]
    return {
        "name": name, "about": description, "made": round(time.time(), 1), "steepest": version,
        "advice": recommend(outcomes)[1], "head": head, "rows": rows, "runs": runs, "spent": parts,
        "parts": list(PARTS), "by": "loss" if by == LOSS else f"metrics/{by.name}",
    }  # fmt: skip


def picture_of(name: str, trials: Sequence[TriedStrategy], by: Criterion = LOSS) -> bytes:
    """Return the losses and the speeds of a comparison as a PNG; ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    against_time, against_samples, speeds = figure.subplots(1, 3)
    outcomes = outcomes_of(trials, by)
    strategies = [each.strategy for each in outcomes]
    for trial in trials:
        rows = [row for row in trial.rows if row["kind"] == "step" and row["samples"]]
        if not rows:
            continue
        label = trial.strategy if trial.seed == trials[0].seed else None  # one of each strategy's
        shown = [(line, by.of(row)) for line, row in zip(_lines_of(trial), rows, strict=True)]
        if by != LOSS:
            shown = [(line, value) for line, value in shown if isfinite(value)]
        drawn = {"label": label, "linewidth": 1, "color": f"C{strategies.index(trial.strategy)}"}
        for axes, column in ((against_time, 2), (against_samples, 3)):
            at = [line[column] for line, _ in shown]
            axes.plot(at, [value for _, value in shown], **drawn)
    bars = [each for each in outcomes if isfinite(each.speed)]
    speeds.bar([each.strategy for each in bars], [each.speed for each in bars])
    against_time.set(xlabel="seconds of training", ylabel=by.name, title=name)
    against_samples.set(xlabel="samples", ylabel=by.name)
    speeds.set(ylabel="samples per second")
    if against_time.lines:
        against_time.legend()
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=120)
    return held.getvalue()
