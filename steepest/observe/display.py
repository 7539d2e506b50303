"""What `fit` shows while it runs: a live line in a terminal or a notebook, or whole lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from steepest.core.config.run import is_dumb_terminal
from steepest.observe.progress import Callback
from steepest.observe.results import EvaluationResult, StepResult

_WINDOW_SECONDS = 10.0  # over which rates are means
_PAUSE_STEPS = 10  # a pause takes longer than so many steps, and than the window
_LONGEST_SECONDS = 1000 * 3600.0  # beyond which nobody waits for the end

#: Steps that are granted to a run which ends by itself.
ENDLESS = 1 << 40


def display(progress: bool | str) -> list[Display]:
    """Return the callbacks, one or none, that show what `fit` does; `progress`: as of `DistributedSGD.fit`."""
    if progress is True:
        if _in_notebook():
            return [NotebookLine()]
        progress = "bar" if sys.stderr.isatty() and not is_dumb_terminal() else "lines"
    return [] if not progress else [ProgressBar() if progress == "bar" else ProgressLines()]


def _in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class Meter:
    """The figures of one `fit`, which begins at the time `now` (s) and takes `steps` steps."""

    def __init__(self, now: float, steps: int) -> None:
        self.steps = steps
        self.done = 0  # steps committed since the begin; less again when a death has undone some
        self._before = 0  # steps committed before the first one here
        self.evaluation: EvaluationResult | None = None
        self._samples = 0
        self._stale = False
        self._last: StepResult | None = None
        self._began = now
        self._marks = deque([(now, 0, 0)])  # time, samples and steps until then
        self._heard = now  # the time of the last step
        self._paused = False  # whether there was a pause before it

    def add(self, result: StepResult, now: float) -> None:
        """Count a step; one without samples follows a run that has ended by itself."""
        if self._last is not None and not result.samples:
            return
        # Rates leave out a pause before it, such as after a death, and steps that are taken again: what is left to do
        # goes at the pace of before.
        if self._last is None:
            self._before = result.step - 1
        undone = max(self.done - (result.step - self._before - 1), 0)
        gap, self._heard = now - self._heard, now
        self._paused = not self._paused and self._is_pause(gap)  # two in a row are slow steps
        if self._paused or undone:
            late = gap if self._paused else 0.0
            self._marks = deque((at + late, s, done - undone) for at, s, done in self._marks)
        self.done = result.step - self._before
        self._samples += result.samples
        self._stale = self._stale or any(result.staleness)
        self._last = result

    def _is_pause(self, gap: float) -> bool:
        """Return whether the time since the last step was a pause, and no step's."""
        since, _, done = self._marks[0]
        seconds, steps = self._heard - gap - since, self.done - done
        return steps > 0 and gap > max(_WINDOW_SECONDS, _PAUSE_STEPS * seconds / steps)

    def line(self, workers: int, now: float, *, ended: bool = False) -> str:
        """Return the last step's figures, and the rates of the last seconds, in one line."""
        # `ended`: of the whole `fit`.
        last = self._last
        assert last is not None
        while len(self._marks) > 1 and (ended or now - self._marks[1][0] >= _WINDOW_SECONDS):
            self._marks.popleft()
        since, samples, done = (self._began, 0, 0) if ended else self._marks[0]
        seconds = max(now - since, 1e-9)
        self._marks.append((now, self._samples, self.done))
        left = (self.steps - self.done) * seconds / max(self.done - done, 1)
        until = f", {_clock(left)} left" if left < _LONGEST_SECONDS else ""  # a sampler without end
        times = f", took {_clock(seconds)}" if ended else until
        parts = [] if last.epoch is None else [f"epoch {last.epoch}"]
        counted = f" ({self.done}/{self.steps}{times})"
        if self.steps >= ENDLESS:
            counted = f" ({times.removeprefix(', ')})" if ended else ""
        parts += [f"step {last.step}{counted}", f"loss {last.loss:.4f}"]
        parts += [f"{name} {value:.3f}" for name, value in last.metrics.items()]
        if (evaluation := self.evaluation) is not None:
            if not math.isnan(evaluation.loss):  # a loop's own evaluation may have none
                parts += [f"validation loss {evaluation.loss:.4f}"]
            parts += [
                f"validation {name} {value:.3f}" for name, value in evaluation.metrics.items()
            ]
        parts += [f"{(self._samples - samples) / seconds:,.0f} samples/s"]
        parts += [f"{workers} worker{'s' * (workers != 1)}"]
        if self._stale and last.staleness:
            parts += [f"staleness {sum(last.staleness) / len(last.staleness):.1f}"]
        return ", ".join(parts)


def _clock(seconds: float) -> str:
    return str(tqdm.format_interval(seconds))


class Display(Callback):
    """Base class of displays: a line of figures every `seconds` seconds, by `clock`, and one at the end."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._due = 0.0
        self._meter: Meter | None = None

    def say(self, line: str) -> None:
        """Show a line that stays, before any other."""
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def show(self, line: str, meter: Meter) -> None:
        """Show a line."""
        raise NotImplementedError

    def end(self) -> None:
        """Leave the last line standing."""

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        """Begin to count; the first step is shown at once."""
        self._due = self._clock()
        self._meter = Meter(self._due, steps)

    def on_length(self, sgd: Any, steps: int) -> None:
        """Expect another number of steps."""
        assert self._meter is not None
        self._meter.steps = steps

    def on_step(self, sgd: Any, result: StepResult) -> None:
        """Count the step, and show a line when one is due."""
        assert self._meter is not None
        now = self._clock()
        self._meter.add(result, now)
        if now >= self._due:  # formatting costs more than a small step
            self._due = now + self.seconds
            self.show(self._meter.line(sgd.num_workers, now), self._meter)

    def on_evaluation(self, sgd: Any, result: EvaluationResult) -> None:
        """Show the evaluation's figures from now on."""
        if self._meter is not None:
            self._meter.evaluation = result

    def on_fit_end(self, sgd: Any) -> None:
        """Show the last step, and how long all steps took."""
        meter, self._meter = self._meter, None
        if meter is None:
            return
        try:
            if meter.done:
                self.show(meter.line(sgd.num_workers, self._clock(), ended=True), meter)
        finally:
            self.end()


class ProgressLines(Display):
    """A whole line on stderr every ten seconds, for log files."""

    def __init__(self, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(seconds, clock)

    def show(self, line: str, meter: Meter) -> None:
        """Write the line."""
        self.say(line)


class NotebookLine(Display):
    """A line in the output of a notebook's cell, which is replaced in place."""

    def __init__(self, seconds: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(seconds, clock)
        self._handle: Any = None

    def say(self, line: str) -> None:
        """Show a line above the one that is replaced."""
        from IPython.display import display as show

        show({"text/plain": line}, raw=True)

    def show(self, line: str, meter: Meter) -> None:
        """Replace the line."""
        if self._handle is None:
            from IPython.display import display as show

            self._handle = show({"text/plain": line}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": line}, raw=True)

    def end(self) -> None:
        """Leave the last line standing; the next `fit` begins a line of its own."""
        self._handle = None


class ProgressBar(Display):
    """A live line at the bottom of a terminal, with a bar; what is logged appears above it."""

    def __init__(self, seconds: float = 0.1, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(seconds, clock)
        self._bar: Any = None
        self._open = contextlib.ExitStack()

    def show(self, line: str, meter: Meter) -> None:
        """Draw the line again."""
        if self._bar is None:
            self._bar = tqdm(
                desc=line, total=meter.steps, initial=meter.done, dynamic_ncols=True,
                file=sys.stderr, bar_format="{percentage:3.0f}%|{bar:10}| {desc}",
            )  # fmt: skip
            self._open.callback(self._bar.close)
            self._open.enter_context(logging_redirect_tqdm())
        else:
            self._bar.total, self._bar.n = meter.steps, meter.done
            self._bar.set_description_str(line)

    def end(self) -> None:
        """Leave the last line standing."""
        self._open.close()
        self._bar = None
