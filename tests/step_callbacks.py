"""Callbacks that do something after given steps: keep results, call functions, raise, kill processes."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from typing import Any

from steepest import (
    Callback,
    DistributedSGD,
    StepResult,
)
from tests.strikes import send_signal


class Stop(Callback):
    """Raises at a step."""

    def __init__(self, step: int, error: type[BaseException] = ZeroDivisionError) -> None:
        self.step = step
        self.error = error

    def on_step(self, sgd: Any, result: StepResult) -> None:
        if result.step == self.step:
            raise self.error


class Watch(Callback):
    """Keeps all results; calls functions after some of the steps."""

    def __init__(self, *functions: tuple[int, Any]) -> None:
        self.functions = dict(functions)
        self.results: list[StepResult] = []

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.results.append(result)
        for step in [step for step in self.functions if step <= result.step]:
            self.functions.pop(step)()

    def sizes(self) -> list[tuple[int, int]]:
        """How many workers took how many steps, one after the other."""
        found = itertools.groupby(result.samples for result in self.results)
        return [(workers, len(list(steps))) for workers, steps in found]


class After(Callback):
    """Does things after some steps, each once."""

    def __init__(self, then: dict[int, Callable[[], object]]) -> None:
        self.then = dict(then)

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.then.pop(result.step, lambda: None)()


class Kill(Callback):
    """Kills processes after some step of those that it sees."""

    def __init__(self, step: int, victims: list[int]) -> None:
        self.step, self.victims = step, victims

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step >= self.step and self.victims:
            send_signal(self.victims.pop(), signal.SIGKILL)
