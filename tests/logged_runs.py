"""A job with a metric, and a logger that keeps in a list what it is given."""

from __future__ import annotations

from typing import Any

from steepest.observe.loggers import Logger, Point
from tests.reference import Task, samples


class Memory(Logger):
    """Logs to a list; may be told to fail."""

    key = "Memory"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.points: list[Point] = []
        self.fails = False

    def open(self, run: str | None, step: int) -> tuple[str, dict[str, int]]:
        if self.fails:
            raise ConnectionError("no route")
        return "here", {}

    def log(self, points: Any) -> None:
        if self.fails:
            raise ConnectionError("no route")
        self.points += points

    @property
    def steps(self) -> list[int]:
        return [point.step for point in self.points if point.kind == "step"]


TASK = Task(data=samples(24), batch_size=2, metrics={"first": lambda output, target: output[0, 0]})
