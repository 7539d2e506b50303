"""Callbacks of `fit`, and the progress bar, which is one of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from tqdm import tqdm

from steepest.observe.results import Event, StepResult


class Run(Protocol):
    """The attributes of the trainer that the progress bar reads."""

    num_workers: int
    num_servers: int


class Callback:
    """Base class of callbacks of `DistributedSGD.fit`; override the methods that you need.

    They are called on the driver, in the thread of `fit`.

    `sgd` is the trainer. Callbacks are called in the order in which they were given. An error that
    one raises ends `fit`, which raises it after `on_fit_end`.
    """

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        """Take note that training begins; `steps` steps will be taken."""

    def on_step(self, sgd: Any, result: StepResult) -> None:
        """Take note of a committed step.

        It is called for each step, in order, while workers compute the next ones.
        """

    def on_event(self, sgd: Any, event: Event) -> None:
        """Take note of a death, a resize or another event of `Stats.events`, each once, in order.

        It is called between two calls of `on_step`, or before `on_fit_end`, while workers may
        compute. Events since the last `fit` come right after `on_fit_begin`.
        """

    def on_length(self, sgd: Any, steps: int) -> None:
        """Take note that this `fit` takes `steps` steps in all, instead of as many as were told before.

        With `epochs=` their number changes when workers come or leave, since a step then covers
        another number of samples. It is called before the next `on_step`.
        """

    def on_epoch_end(self, sgd: Any, result: StepResult) -> None:
        """Take note that an epoch ended with this step.

        Workers are idle: the trainer may evaluate or save. They pause for it only if a callback
        overrides this method.
        """

    def on_fit_end(self, sgd: Any) -> None:
        """Take note that training ended, also by an error."""


class EventFeed:
    """The calls of `Callback.on_event`: once for each event of a job, in order.

    Args:
        events: all events so far, oldest first; grows while processes die and come.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._reported = 0

    def tell(self, sgd: Any, callbacks: Sequence[Callback]) -> None:
        """Call `on_event` of all callbacks for each event since the last call.

        An error of a callback is raised; the event is not reported again.
        """
        while self._reported < len(self._events):
            event = self._events[self._reported]
            self._reported += 1
            for callback in callbacks:
                callback.on_event(sgd, event)


class ProgressBar(Callback):
    """A live line on stderr: loss, metrics, samples per second, workers, servers."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._samples = 0
        self._began = 0.0
        self._drawn = 0.0

    def on_fit_begin(self, sgd: Run, steps: int) -> None:
        """Draw the bar, for `steps` steps."""
        self._samples = 0
        self._began = time.monotonic()
        self._drawn = 0.0
        self._bar = tqdm(total=steps, unit="step", dynamic_ncols=True, file=sys.stderr)

    def on_length(self, sgd: Run, steps: int) -> None:
        """Give the bar another end."""
        self._bar.total = steps
        self._bar.refresh()

    def on_step(self, sgd: Run, result: StepResult) -> None:
        """Move the bar on, and write the step's figures ten times per second at most."""
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
        """Close the bar, and leave its last line standing."""
        if self._bar is not None:
            if self._samples:
                self._describe(sgd, self._last, time.monotonic())
            self._bar.close()
            self._bar = None
