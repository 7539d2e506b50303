"""The same function under several strategies in turn, each for a bounded time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from steepest.core.system import system
from steepest.errors import SteepestError
from steepest.loop.run import run
from steepest.observe.comparison import TriedStrategy
from steepest.observe.history import History
from steepest.observe.progress import Callback
from steepest.observe.results import StepResult


class _TimeIsOverError(Exception):
    """Ends a run from within `fit`."""


class _Limit(Callback):
    """Ends a run some seconds after its first step, and keeps its history."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None
        self.history: History | None = None

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        """Keep the history, which is complete when the run has ended."""
        self.history = sgd.history

    def on_step(self, sgd: Any, result: StepResult) -> None:
        """End the run when its time is over."""
        now = system().now()
        if self._until is None:
            self._until = now + self._seconds
        elif now >= self._until:
            raise _TimeIsOverError


def try_strategy(
    function: Callable[[], Any],
    strategy: str,
    seconds: float,
    *,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
    **chosen: Any,
) -> TriedStrategy:
    """Run a function under a strategy until it ends, or its time is over.

    Args:
        function, callbacks: as of `steepest.run`; each run begins anew.
        strategy: its name.
        seconds: of training, counted from the first step.
        seed: as of `steepest.run`.
        chosen: further arguments of `steepest.run`.

    Returns:
        The run and how it ended; an error of the library's, such as that of a strategy which the function's job
        refuses, is told there and not raised.
    """
    limit = _Limit(seconds)
    ended, failed = "by itself", False
    try:
        run(
            function,
            strategy=strategy,
            callbacks=[limit, *callbacks],
            progress=False,
            seed=seed,
            **chosen,
        )
    except _TimeIsOverError:
        ended = f"after {seconds:.3g} s"
    except SteepestError as error:
        ended, failed = f"{type(error).__name__}: {error}", True
    rows = [] if limit.history is None else limit.history[:]
    return TriedStrategy(strategy, rows, ended, failed, seed)
