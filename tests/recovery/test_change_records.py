"""Each change of a job's processes leaves one record, by which a reader tells why the job stood still."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from steepest import Callback, DistributedSGD, FailureConfig, ParameterServerStrategy, StepResult
from tests.reference import Task, samples
from tests.simulation.run import Simulation, run_config

TASK = Task(data=samples(24))
PARTS = ("cause", "seen", "decision", "processes", "seconds", "repeated")


class At(Callback):
    """Does something once, at a step."""

    def __init__(self, step: int, do: Callable[[], Any]) -> None:
        self.step, self.do = step, do

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step == self.step:
            self.step, do = -1, self.do
            do()


def parts_of(line: str) -> dict[str, str]:
    """Return a record's parts by name; "what" is what stands before them."""
    what, *rest = line.split(" | ")
    return {"what": what, **dict(part.split(": ", 1) for part in rest)}


def records(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    lines = [r.getMessage() for r in caplog.records if r.name == "steepest.changes"]
    found = [parts_of(line) for line in lines]
    assert all(list(each) == ["what", *PARTS] for each in found), lines
    return found


def kill(simulation: Simulation, *names: str) -> None:
    for victim in [p for p in simulation.living() if any(name in str(p) for name in names)]:
        simulation.world.kill(victim, "it was killed. connection error code 2.")


def test_a_set_back_a_strategy_and_a_size_leave_a_record_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "steepest.changes")
    simulation = Simulation(1)
    config = run_config(failure=FailureConfig(snapshot_every=10_000, patience=60.0))
    strategy = ParameterServerStrategy(num_servers=2)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=config) as trainer,
    ):
        trainer.fit(
            steps=12, callbacks=[At(9, lambda: kill(simulation, "server 1"))], progress=False
        )
        trainer.set_strategy("allreduce")
        trainer.resize(3)
        events = [event for event in trainer.stats().events if event.record]
        rows = trainer.history.events
    death, strategies, size = records(caplog)
    assert re.fullmatch(r"change 1 at step (9|1\d)", death["what"])
    assert re.fullmatch(r"server 1 on \S+ \(.*by a signal.*\) died", death["cause"])
    assert death["seen"] == "1 of 4 processes dead; the newest state is lost"
    assert death["decision"].endswith("with the driver's copy")
    steps = int(death["what"].rpartition(" ")[2])
    assert death["repeated"] == f"{steps} steps, {steps * 4} samples"
    assert strategies["what"] == "change 2 at step 12"
    assert strategies["cause"] == "allreduce instead of ps was asked for"
    assert strategies["processes"] == "2 workers, 2 servers, allreduce"
    assert size["cause"] == "3 workers instead of 2 are wanted"
    assert size["decision"] == "1 worker joins, with the processes' own state"
    for each in (death, strategies, size):
        seconds = dict(part.rsplit(" ", 1) for part in each["seconds"].split(", "))
        known = ["seeing", "starting", "taking stock", "applying"]
        assert [*seconds] == [*known, "in all"]
        assert sum(float(seconds[name]) for name in known) <= float(seconds["in all"]) + 0.03
    lines = [r.getMessage() for r in caplog.records if r.name == "steepest.changes"]
    assert [event.record for event in events] == lines
    assert [row["record"] for row in rows if "record" in row] == lines
    assert [event.kind for event in events][1:] == ["changed", "resized"]


def test_a_successor_that_joins_leaves_a_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "steepest.changes")
    simulation = Simulation(2)
    config = run_config(failure=FailureConfig(patience=600.0))
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 3, strategy="ps", run_config=config) as trainer,
    ):
        trainer.fit(
            steps=12, callbacks=[At(5, lambda: kill(simulation, "worker 2"))], progress=False
        )
    (joined,) = records(caplog)
    assert re.fullmatch(r"a successor joins at step [4-9]", joined["what"])
    assert joined["cause"].startswith("worker 2 on ")
    assert joined["repeated"] == "0 steps, 0 samples"


@pytest.mark.few(1)
@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_three_that_die_together_are_counted_and_named(
    patience: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "steepest.changes")
    simulation = Simulation(3, cpus=(8,))
    config = run_config(failure=FailureConfig(patience=patience))
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 4, strategy="allreduce", run_config=config) as trainer,
    ):
        trainer.fit(
            steps=20,
            callbacks=[At(8, lambda: kill(simulation, "worker 1", "worker 2", "worker 3"))],
            progress=False,
        )
        while trainer.num_workers < 4:
            trainer.step()
        assert trainer.stats().replaced == 3
    causes = " ".join(each["cause"] for each in records(caplog))
    for name in ("worker 1", "worker 2", "worker 3"):
        assert f"{name} on " in causes
