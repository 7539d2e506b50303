"""Callbacks of `fit`: whose begin returned is told of the end, whatever others raise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from steepest import Callback, DistributedSGD, StepResult
from steepest.testing.simulation import Simulation, run_config
from tests.simulated_programs import TASK, quiet


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


class Telling(Callback):
    """Notes what is called, by a name, and raises in one method."""

    def __init__(self, heard: list[str], name: str, raises: str = "") -> None:
        self.heard, self.name, self.raises = heard, name, raises

    def note(self, what: str) -> None:
        self.heard.append(f"{self.name} {what}")
        if what == self.raises:
            raise KeyError(f"{self.name} {what}")

    def on_fit_begin(self, trainer: DistributedSGD, steps: int) -> None:
        self.note("begin")

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.note("step")

    def on_fit_end(self, trainer: DistributedSGD) -> None:
        self.note("end")


@pytest.mark.parametrize(
    ("raising", "error", "calls"),
    [
        ("begin", "b begin", ["a begin", "b begin", "a end"]),
        ("step", "b step", [*(f"{n} begin" for n in "abc"), "a step", "b step", *(f"{n} end" for n in "abc")]),
        ("end", "b end", [*(f"{n} {w}" for w in ("begin", "step", "end") for n in "abc")]),
    ],
)  # fmt: skip
def test_who_has_begun_is_told_of_the_end(raising: str, error: str, calls: list[str]) -> None:
    heard: list[str] = []
    callbacks = [Telling(heard, "a"), Telling(heard, "b", raising), Telling(heard, "c")]
    with (
        Simulation(1).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        with pytest.raises(KeyError, match=error):
            trainer.fit(steps=1, callbacks=callbacks, progress=False)
        assert heard == calls
        step = trainer.stats().step
        assert trainer.fit(steps=2, progress=False).step == step + 2
