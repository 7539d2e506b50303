"""Random calls of a trainer give the steps, weights and checkpoints of one process.

`python -m tests.driver_schedules` interrupts them at random moments while processes die, and shortens what it finds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.driver_runs import Run, Schedule


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


def check(schedule: Schedule) -> None:
    """Run a schedule, and check what must hold."""
    run = Run(schedule)
    try:
        run.run()
    except BaseException:
        print(schedule, "as it ran:", *run.done, sep="\n    ")  # noqa: T201 - shown if the test fails
        raise


@pytest.mark.parametrize("seed", range(5))
def test_calls_that_nothing_strikes_are_those_of_one_process(seed: int) -> None:
    check(Schedule.drawn(seed).undisturbed())
