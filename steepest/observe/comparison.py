"""The same program under several strategies: what each has come to, and which one to take."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steepest.observe.page.run_view import RunView

#: Parts of a worker's time; the last is what none of the others covers.
PARTS = ("compute", "data", "wait", "rest")
_COLUMNS = (
    "strategy", "step", "seconds", "samples", "loss", "staleness", "bytes_pushed", "bytes_pulled",
    "compute", "data", "wait",
)  # fmt: skip
_HEAD = (
    "strategy", "loss", "samples/s", "steps", "samples", "training", "pushed per sample", "pulled per sample",
    "staleness", "how it ended",
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
    """

    strategy: str
    rows: Sequence[Mapping[str, Any]]
    ended: str
    failed: bool = False


class Outcome:
    """What a trial has come to.

    Args:
        trial: of which it is; its steps need no loss, and may be none.

    Attributes:
        steps, samples: how many were taken, and in all of them.
        seconds: of training, until the last step.
        speed: samples per second, without the first step, which also waits for processes; NaN without a second one.
        loss, doubt: mean of the last tenth of the steps, and the standard error of that mean; NaN without a loss.
        fall: the first step's loss less that mean.
        pushed, pulled: bytes for each sample.
        staleness: mean, in updates.
        parts: seconds for 1,000 samples by part, as `PARTS` has them, means over workers.
    """

    def __init__(self, trial: TriedStrategy) -> None:
        self.strategy, self.ended, self.failed = trial.strategy, trial.ended, trial.failed
        rows = [row for row in trial.rows if row["kind"] == "step" and row["samples"]]
        self.steps, self.samples = len(rows), sum(row["samples"] for row in rows)
        self.seconds = rows[-1]["seconds"] if rows else 0.0
        passed = self.seconds - rows[0]["seconds"] if rows else 0.0
        later = self.samples - rows[0]["samples"] if rows else 0
        self.speed = later / passed if passed > 0 else math.nan
        self._losses: list[tuple[float, float]] = [
            (row["seconds"], row["loss"]) for row in rows if math.isfinite(row["loss"])
        ]
        tail = [loss for _, loss in self._losses[-max(1, math.ceil(_TAIL * len(self._losses))) :]]
        self.loss = _mean(tail)
        spread = sum((loss - self.loss) ** 2 for loss in tail) / max(len(tail) - 1, 1)
        self.fall = self._losses[0][1] - self.loss if self._losses else math.nan
        self.doubt = math.sqrt(spread / len(tail)) if tail else math.nan
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

    def seconds_to(self, loss: float) -> float:
        """Return the seconds of training until some successive steps had so low a loss; infinity for never."""
        size = max(1, len(self._losses) // _BLOCKS)
        for begin in range(0, len(self._losses), size):
            block = self._losses[begin : begin + size]
            if _mean([each for _, each in block]) <= loss:
                return block[-1][0]
        return self.seconds if self.loss <= loss else math.inf


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def recommend(outcomes: Sequence[Outcome]) -> tuple[str | None, str]:
    """Return the strategy to take, None if none has trained, and why, in a few sentences.

    It is the one with the lowest loss at its end. Losses are equal that differ by less than 2 %, by less than twice
    the standard error of their difference, or by less than 0.2 % of what the loss has fallen since the first step: of
    equal ones it is the one that came first to the highest of them.
    """
    trained = [each for each in outcomes if math.isfinite(each.loss) and not each.failed]
    if not trained:
        return None, "None: no strategy has trained with a loss, see how each ended."
    lowest = min(trained, key=lambda each: each.loss)
    equal = [each for each in trained if _is_equal(each, lowest)]
    level = max(each.loss for each in equal)
    best = min(equal, key=lambda each: each.seconds_to(level))
    others = [each for each in trained if each is not best]
    if not others:
        return best.strategy, f"Take {best.strategy}: it is the only one that has trained."
    words = [f"Take {best.strategy}: {_first_reason(best, equal, others, level)}."]
    words += _about_speed(best, others)
    shortest = max(best.steps for best in trained)
    if shortest < _BLOCKS:
        words.append(
            f"But {shortest} steps at most were taken: compare for longer before you rely on it."
        )
    return best.strategy, " ".join(words)


def _is_equal(one: Outcome, other: Outcome) -> bool:
    apart = abs(one.loss - other.loss)
    doubt = 2 * math.hypot(one.doubt, other.doubt)
    return apart <= max(_EQUAL * abs(other.loss), doubt, _CONVERGED * other.fall)


def _first_reason(
    best: Outcome, equal: Sequence[Outcome], others: Sequence[Outcome], level: float
) -> str:
    """Return why it is the best: the same loss sooner, or a lower one."""
    if len(equal) > 1:
        second = min((e for e in equal if e is not best), key=lambda each: each.seconds_to(level))
        names = " and ".join(each.strategy for each in equal if each is not best)
        first, then = best.seconds_to(level), second.seconds_to(level)
        sooner = f"it was at {level:.4g} after {first:.3g} s"
        later = f"{second.strategy} after {then:.3g} s" if math.isfinite(then) else "no other was"
        return f"its loss is as low as that of {names}, and {sooner}, {later}"
    second = min(others, key=lambda each: each.loss)
    return f"its loss at the end is {best.loss:.4g}, that of the next best, {second.strategy}, {second.loss:.4g}"


def _about_speed(best: Outcome, others: Sequence[Outcome]) -> list[str]:
    """Return how fast it is, and where the time of the slower ones goes."""
    known = [each for each in (best, *others) if math.isfinite(each.speed)]
    if best not in known or len(known) < 2:
        return []
    fastest, slowest = max(known, key=lambda e: e.speed), min(known, key=lambda e: e.speed)
    words = []
    if fastest is not best and fastest.speed >= _FASTER * best.speed:
        words.append(
            f"{fastest.strategy} computes {fastest.speed / best.speed:.2g} times as many samples per second, and "
            f"learns less of each: its loss at the end is {fastest.loss:.4g}."
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
        found = [trial.strategy, row["step"], row["seconds"], samples, row["loss"], stale, *sent]
        order = [spent[PARTS.index(name)] for name in _COLUMNS[-3:]]
        yield ["" if each != each else each for each in [*found, *order]]


def table_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the rows of a table for people, of which the first has the names of its columns."""
    return [list(_HEAD), *(_row_of(each) for each in outcomes)]


def _row_of(each: Outcome) -> list[str]:
    if not each.steps:
        return [each.strategy, *["–"] * (len(_HEAD) - 2), each.ended]
    numbers = [f"{each.loss:.4g}", f"{each.speed:,.0f}", f"{each.steps:,}", f"{each.samples:,}"]
    numbers = ["–" if number == "nan" else number for number in numbers]
    sent = [f"{size:,.0f} B" for size in (each.pushed, each.pulled)]
    stale = f"{each.staleness:.2g}" if each.staleness == each.staleness else "–"
    return [each.strategy, *numbers, f"{each.seconds:.1f} s", *sent, stale, each.ended]


def told(
    name: str, about: str, trials: Sequence[TriedStrategy], version: str = ""
) -> dict[str, Any]:
    """Return the data of the page of a comparison, as JSON has them; `version` is steepest's."""
    outcomes = [Outcome(trial) for trial in trials]
    head, *rows = table_of(outcomes)
    runs = []
    for trial, outcome in zip(trials, outcomes, strict=True):
        view = RunView(trial.strategy)
        view.add_all(row for row in trial.rows if row["kind"] != "step" or row["samples"])
        curves = view.told()["curves"] if outcome.steps else None
        runs.append({"strategy": trial.strategy, "curves": curves, "parts": outcome.parts})
    advice = recommend(outcomes)[1]
    return {
        "name": name, "about": about, "made": round(time.time(), 1), "steepest": version, "advice": advice,
        "head": head, "rows": rows, "runs": runs, "parts": list(PARTS),
    }  # fmt: skip


def picture_of(name: str, trials: Sequence[TriedStrategy]) -> bytes:
    """Return the losses and the speeds of a comparison as a PNG; ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    against_time, against_samples, speeds = figure.subplots(1, 3)
    outcomes = [Outcome(trial) for trial in trials]
    for trial, outcome in zip(trials, outcomes, strict=True):
        if not outcome.steps:
            continue
        lines = list(_lines_of(trial))
        losses = [math.nan if line[4] == "" else line[4] for line in lines]
        for axes, column in ((against_time, 2), (against_samples, 3)):
            axes.plot([line[column] for line in lines], losses, label=trial.strategy, linewidth=1)
    bars = [each for each in outcomes if math.isfinite(each.speed)]
    speeds.bar([each.strategy for each in bars], [each.speed for each in bars])
    against_time.set(xlabel="seconds of training", ylabel="loss", title=name)
    against_samples.set(xlabel="samples", ylabel="loss")
    speeds.set(ylabel="samples per second")
    if against_time.lines:
        against_time.legend()
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=120)
    return held.getvalue()
