"""Callbacks of `fit`, and the progress bar, which is one."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from tqdm import tqdm

from steepest.observe.results import StepResult


class Run(Protocol):
    """What a callback is given: the trainer."""

    num_workers: int
    num_servers: int


class Callback:
    """Called by `fit`; override what you need.

    `on_step` is called for each committed step, in order, while workers already go on; they pause at the
    end of an epoch only if some callback overrides `on_epoch_end`, so that it may evaluate or save.
    """

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        """Training begins; `steps` will be taken."""

    def on_step(self, sgd: Any, result: StepResult) -> None:
        """A step was committed."""

    def on_epoch_end(self, sgd: Any, result: StepResult) -> None:
        """An epoch ended with this step; workers are idle."""

    def on_fit_end(self, sgd: Any) -> None:
        """Training ended, also by an error."""


class ProgressBar(Callback):
    """A live line: loss, metrics, samples per second, workers, servers."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._samples = 0
        self._began = 0.0
        self._drawn = 0.0

    def on_fit_begin(self, sgd: Run, steps: int) -> None:
        """Draws the bar."""
        self._samples = 0
        self._began = time.monotonic()
        self._drawn = 0.0
        self._bar = tqdm(total=steps, unit="step", dynamic_ncols=True, file=sys.stderr)

    def on_step(self, sgd: Run, result: StepResult) -> None:
        """Moves it on."""
        self._samples += result.samples
        self._bar.update(1)
        now = time.monotonic()
        if now - self._drawn >= 0.1:  # formatting costs more than a small step
            self._drawn = now
            self._describe(sgd, result, now)
        self._last = result

    def _describe(self, sgd: Run, result: StepResult, now: float) -> None:
        shown = {"loss": f"{result.loss:.4f}"}
        shown |= {name: f"{value:.3f}" for name, value in result.metrics.items()}
        shown["samples/s"] = f"{self._samples / max(now - self._began, 1e-9):.0f}"
        shown["workers"] = str(sgd.num_workers)
        shown["servers"] = str(sgd.num_servers)
        self._bar.set_postfix(shown, refresh=False)

    def on_fit_end(self, sgd: Run) -> None:
        """Leaves the last line standing."""
        if self._bar is not None:
            if self._samples:
                self._describe(sgd, self._last, time.monotonic())
            self._bar.close()
            self._bar = None
