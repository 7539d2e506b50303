"""Rows of jobs that change while they train: in size and strategy, from checkpoints, after servers' deaths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    StepResult,
)
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.initial import Zeros
from steepest.tables.rows.row_optimizers import SGD
from tests.inside import replay_state
from tests.pairs import grid
from tests.reference import Task, Weights, difference, same_bits, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config
from tests.table_tasks import (
    OPTIMIZERS,
    clicks,
    described,
    in_one_process,
    mostly_long,
    rows_in,
    same_rows,
    table_task,
    table_values,
)
from tests.whole_checkpoints import all_of

ROWS = OPTIMIZERS["Adam"]
TASK = table_task(data=clicks(61), row_optimizer=ROWS.ours)
PS = ParameterServerStrategy
State = tuple[Weights, dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def state_of(trainer: DistributedSGD, path: Path) -> State:
    """The dense weights, and all that a checkpoint has of rows."""
    trainer.save(path)
    return trainer.weights(), rows_in(all_of(path))


def alike(state: State, other: State) -> bool:
    return same_bits(state[0], other[0]) and same_rows(state[1], other[1])


def trainer_of(workers: int, strategy: Any, task: Task = TASK, **settings: Any) -> DistributedSGD:
    failure = FailureConfig(snapshot_every=settings.pop("snapshot_every", None), patience=math.inf)
    config = run_config(failure=failure, keep_log=settings.pop("keep_log", False))
    return DistributedSGD(task.creator(), workers, strategy=strategy, run_config=config, **settings)


def undisturbed(steps: int, path: Path, workers: int = 2) -> State:
    with Simulation(1).running(), trainer_of(workers, PS(num_servers=2)) as trainer:
        trainer.fit(steps=steps, progress=False)
        return state_of(trainer, path)


@pytest.mark.long
def test_rows_move_as_workers_servers_and_strategies_come_and_go(tmp_path: Path) -> None:
    changes: list[tuple[int, Callable[[DistributedSGD], object]]] = [
        (2, lambda sgd: sgd.resize(num_workers=3)),
        (3, lambda sgd: sgd.resize(num_servers=3)),
        (3, lambda sgd: sgd.set_strategy(AllreduceStrategy())),
        (3, lambda sgd: sgd.resize(num_workers=1)),
        (1, lambda sgd: sgd.resize(num_workers=2)),
        (2, lambda sgd: sgd.set_strategy(PS(num_servers=3, replication=2, chunk_bytes=64))),
        (2, lambda sgd: sgd.resize(num_servers=2)),
        (2, lambda sgd: sgd.set_strategy(AllreduceStrategy(sharded=False))),
        (2, lambda sgd: None),
    ]
    with Simulation(1, (4, 4)).running(), trainer_of(2, PS(num_servers=2)) as trainer:
        for _, change in changes:
            trainer.fit(steps=3, progress=False)
            change(trainer)
        weights, rows = state_of(trainer, tmp_path / "end")
    expected = in_one_process(TASK, ROWS, [(2 * workers, 3) for workers, _ in changes])
    assert difference(weights | table_values(TASK, rows), expected) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (PS(num_servers=2), PS(num_servers=3)),
        pytest.param(PS(num_servers=3, replication=2), AllreduceStrategy(), marks=pytest.mark.long),
        pytest.param(AllreduceStrategy(sharded=False), PS(num_servers=1), marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_goes_on_at_another_number_of_servers(
    first: Any, then: Any, tmp_path: Path
) -> None:
    """With another seed, too: what begins with it is part of the checkpoint."""
    with Simulation(1).running(), trainer_of(2, first) as trainer:
        trainer.fit(steps=3, progress=False)
        trainer.save(tmp_path / "saved")
    with Simulation(2).running(), trainer_of(2, then, seed=7) as trainer:
        trainer.fit(steps=1, progress=False)
        trainer.restore(tmp_path / "saved")
        trainer.fit(steps=7, progress=False)
        state = state_of(trainer, tmp_path / "end")
    assert alike(state, undisturbed(10, tmp_path / "other"))


@pytest.mark.long
def test_a_checkpoint_goes_on_with_other_workers(tmp_path: Path) -> None:
    with Simulation(1).running(), trainer_of(2, PS(num_servers=2)) as trainer:
        trainer.fit(steps=3, progress=False)
        trainer.save(tmp_path / "saved")
    with Simulation(2).running(), trainer_of(3, PS(num_servers=1)) as trainer:
        trainer.restore(tmp_path / "saved")
        trainer.fit(steps=4, progress=False)
        weights, rows = state_of(trainer, tmp_path / "end")
    expected = in_one_process(TASK, ROWS, [(4, 3), (6, 4)])
    assert difference(weights | table_values(TASK, rows), expected) < 1e-12


STRATEGIES = [
    PS(num_servers=2, chunk_bytes=64),
    PS(num_servers=3, replication=2),
    AllreduceStrategy(),
    AllreduceStrategy(replication=2, chunk_bytes=64),
]


def after_a_death(strategy: Any, role: str, moment: int, path: Path) -> State:
    """The state after 12 steps, in the middle of which a process of that role dies."""
    simulation = Simulation(moment)

    def strike() -> None:
        victims = [process for process in simulation.living() if role in str(process)]
        for process in victims[:1]:
            simulation.world.kill(process, "it was killed. connection error code 2.")

    with simulation.running(), trainer_of(2, strategy, snapshot_every=4) as trainer:
        trainer.fit(steps=5, progress=False)
        simulation.at_event(moment, strike)
        trainer.fit(steps=7, progress=False)
        return state_of(trainer, path)


@pytest.fixture(scope="module")
def in_peace(tmp_path_factory: pytest.TempPathFactory) -> State:
    """The state after 12 steps of a job of which no process dies, which has no copies."""
    with quiet():
        return undisturbed(12, tmp_path_factory.mktemp("peace") / "saved")


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, STRATEGIES[1]), ids=str)
def test_after_a_servers_death_rows_are_those_of_a_run_in_peace(
    strategy: Any, tmp_path: Path, in_peace: State
) -> None:
    """With copies nothing is lost; without, a job goes on from its last snapshot, to the same bits."""
    role = "server 1" if isinstance(strategy, PS) else "worker 1"
    assert alike(after_a_death(strategy, role, 60, tmp_path / "struck"), in_peace)


@pytest.mark.few(4)
@pytest.mark.long
@grid(
    strategy=STRATEGIES,
    role=["server 0", "server 1", "worker 0", "worker 1"],
    moment=[5, 40, 150],
)
def test_whoever_dies_when_rows_are_those_of_a_run_in_peace(
    strategy: Any, role: str, moment: int, tmp_path: Path, in_peace: State
) -> None:
    assert alike(after_a_death(strategy, role, moment, tmp_path / "struck"), in_peace)


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("strategy", [PS(num_servers=2), AllreduceStrategy()], ids=str)
def test_rows_stay_when_dense_weights_are_set(strategy: Any, tmp_path: Path) -> None:
    with Simulation(1).running(), trainer_of(2, strategy) as trainer:
        trainer.fit(steps=4, progress=False)
        before = state_of(trainer, tmp_path / "before")
        weights = {name: value + 1 for name, value in trainer.state_dict().items()}
        trainer.load_state_dict(weights)
        after = state_of(trainer, tmp_path / "after")
        assert same_bits(after[0], {name: value + 1 for name, value in before[0].items()})
        assert same_rows(after[1], before[1])
        trainer.load_state_dict(before[0])
        trainer.fit(steps=3, progress=False)
        state = state_of(trainer, tmp_path / "end")
    assert alike(state, undisturbed(7, tmp_path / "other"))


# -- gradients of rows that are pushed a step late ---------------------------------------------------


class Counting(nn.Module):
    """Each update adds one to the sum of all rows, and to the weight."""

    def __init__(self) -> None:
        super().__init__()
        zeros = described("rows", 1, optimizer=SGD(lr=1.0), initial=Zeros())
        self.rows = Embedding(zeros)
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (B,)."""
        return self.rows(ids).squeeze(1) + self.weight


def timed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Minus the mean, which takes some virtual time."""
    pause(0.01)
    return -output.mean()


HYBRID = PS(num_servers=2, replication=2, table_staleness=2)
COUNTED = Task(Counting, sgd(1.0), (torch.arange(96) % 17, torch.zeros(96)), timed)
Change = Callable[[DistributedSGD, Simulation], object]


def kill(role: str, simulation: Simulation) -> None:
    process = next(each for each in simulation.living() if role in str(each))
    simulation.world.kill(process, "it was killed. connection error code 2.")


def counts(trainer: DistributedSGD) -> tuple[float, float]:
    """The sum of all rows, and the weight."""
    rows = trainer.export_table("rows").values.sum()
    return float(rows), float(trainer.weights()["weight"])


class InStep(Callback):
    """Does something once, when step 5 is told, while workers train on."""

    def __init__(self, change: Callable[[], object]) -> None:
        self.change = change
        self.done = False

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step == 5 and not self.done:
            self.done = True
            self.change()


CHANGES: dict[str, tuple[Any, Change]] = {
    "a server dies": (HYBRID, lambda sgd, sim: kill("server 1", sim)),
    "fewer workers": (HYBRID, lambda sgd, sim: sgd.resize(num_workers=2)),
    "set back to a snapshot": (
        AllreduceStrategy(table_staleness=2),
        lambda sgd, sim: kill("worker 1", sim),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CHANGES)
def test_no_gradient_of_rows_is_lost_while_a_job_changes(name: str) -> None:
    strategy, change = CHANGES[name]
    simulation = Simulation(1)
    with (
        simulation.running(),
        trainer_of(3, strategy, COUNTED, snapshot_every=2, keep_log=True) as trainer,
    ):
        in_step = InStep(lambda: change(trainer, simulation))
        trainer.fit(steps=12, callbacks=[in_step], progress=False)
        assert counts(trainer) == pytest.approx((12.0, 12.0))
        events = [event.line for event in trainer.stats().events]
        assert len(events) == 1
        assert "except" not in events[0]
        if "snapshot" not in name:  # after which a log begins anew
            state = replay_state(trainer.log(), COUNTED.creator())
            rows = [value for key, value in state.items() if key.endswith("/values")]
            assert sum(float(value.sum()) for value in rows) == pytest.approx(12.0)


def test_what_is_not_pushed_when_a_fit_is_interrupted_is_pushed_later(tmp_path: Path) -> None:
    """From a checkpoint, by fewer workers, and under another strategy; once."""

    def interrupt() -> None:
        raise InterruptedError

    with Simulation(1).running(), trainer_of(3, HYBRID, COUNTED) as trainer:
        with pytest.raises(InterruptedError):
            trainer.fit(steps=12, callbacks=[InStep(interrupt)], progress=False)
        rows, weight = counts(trainer)
        assert rows == pytest.approx(weight - 1)
        trainer.save(tmp_path / "saved")
        for strategy in (HYBRID, PS(mode="async", num_servers=1), AllreduceStrategy()):
            trainer.restore(tmp_path / "saved")
            trainer.set_strategy(strategy)
            trainer.fit(steps=2, progress=False)
            rows, weight = counts(trainer)
            assert rows == pytest.approx(weight)
            trainer.resize(num_workers=2)


def test_of_a_dead_workers_gradients_of_rows_it_is_said_that_they_are_lost() -> None:
    simulation = Simulation(1)
    with simulation.running(), trainer_of(3, HYBRID, COUNTED) as trainer:
        in_step = InStep(lambda: kill("worker 1", simulation))
        trainer.fit(steps=12, callbacks=[in_step], progress=False)
        assert counts(trainer) == pytest.approx((12.0, 12.0))  # the mean over those that have one
        (event,) = trainer.stats().events
    assert event.line.endswith(
        "no update and no sample is lost, except the gradients of rows of at most one step, which "
        "worker 1 had not pushed"
    )
