"""Nothing but the owner's thread writes what is known of a job, whoever calls, and whatever dies meanwhile."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from steepest import Callback, DistributedSGD, FailureConfig, StepResult
from steepest.runtime.cluster import Cluster
from steepest.runtime.context import JobContext
from steepest.runtime.deaths import Deaths
from steepest.runtime.learning_rates import LearningRates
from steepest.runtime.owner import Owner
from steepest.runtime.recovery.growth import Growth
from steepest.runtime.recovery.joining import Joining
from steepest.runtime.recovery.leaving import Leaving
from steepest.runtime.recovery.observation import Observation
from steepest.runtime.recovery.starting import Reserve, Starting
from steepest.runtime.recovery.supervisor import Supervisor
from steepest.runtime.recovery.wishes import Wishes
from steepest.runtime.state.snapshots import Snapshots
from steepest.runtime.state.transfer import StateTransfer
from tests.reference import Task, samples
from tests.simulation.run import Simulation, run_config
from tests.simulation.virtual_primitives import Thread

TASK = Task(data=samples(24))
STATE = [
    *(
        JobContext,
        Cluster,
        Deaths,
        Growth,
        StateTransfer,
        Joining,
        LearningRates,
        Leaving,
        Observation,
    ),
    *(Reserve, Snapshots, Starting, Supervisor, Wishes),
]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where another thread has set an attribute of the job's state, while it had an owner."""
    owners: list[Owner] = []
    found: list[str] = []
    start = Owner.start

    def starting(self: Owner) -> None:
        start(self)
        owners.append(self)

    def setting(self: Any, name: str, value: object) -> None:
        if owners and not owners[-1].is_mine:
            where = traceback.extract_stack()[-2]
            found.append(f"{type(self).__name__}.{name} at {where.filename}:{where.lineno}")
        object.__setattr__(self, name, value)

    monkeypatch.setattr(Owner, "start", starting)
    for each in STATE:
        monkeypatch.setattr(each, "__setattr__", setting)
    return found


class Busy(Callback):
    """Calls all that may be called while workers train, and has another thread do so too."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.threads: list[Any] = []

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        trainer.weights(), trainer.stats(), trainer.log(), trainer.learning_rate
        if result.step == 6:
            thread = Thread(target=lambda: trainer.resize(3))
            thread.start()
            self.threads.append(thread)
        if result.step == 9:
            trainer.set_learning_rate(0.02)
            (victim,) = [p for p in self.simulation.living() if "worker 1" in str(p)]
            self.simulation.world.kill(victim, "it was killed. connection error code 2.")

    def on_epoch_end(self, trainer: DistributedSGD, result: StepResult) -> None:
        trainer.evaluate(samples(5))


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_only_the_owner_writes(strategy: str, writes: list[str], tmp_path: Path) -> None:
    simulation = Simulation(4)
    config = run_config(keep_log=True, failure=FailureConfig(patience=60.0))
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=config) as trainer,
    ):
        busy = Busy(simulation)
        trainer.fit(epochs=4, callbacks=[busy], progress=False)
        for thread in busy.threads:
            thread.join()
        trainer.save(tmp_path / "all")
        trainer.set_weights(trainer.weights())
        trainer.load_state_dict(trainer.state_dict())
        trainer.set_strategy("allreduce" if strategy == "ps" else "ps")
        trainer.restore(tmp_path / "all")
        trainer.foreach_worker(lambda view: view.index)
        trainer.warmup()
        trainer.resize(1)
        assert trainer.step().step == trainer.stats().step
    assert writes == []


def test_another_thread_that_writes_is_found(writes: list[str]) -> None:
    """So the test above can fail."""
    with Simulation(5).running(), DistributedSGD(TASK.creator(), 1, run_config=run_config()) as sgd:
        sgd._supervisor.replaced += 1
    assert len(writes) == 1
    assert writes[0].startswith("Supervisor.replaced at ")
    assert threading.current_thread() is threading.main_thread()
