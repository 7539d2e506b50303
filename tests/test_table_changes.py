"""Rows of jobs that change while they train: in size and strategy, from checkpoints, after servers' deaths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
)
from steepest.checkpoint import files
from steepest.testing.simulation import Simulation, run_config
from tests.pairs import grid
from tests.reference import Task, Weights, difference, same_bits
from tests.simulated_programs import quiet
from tests.table_tasks import (
    OPTIMIZERS,
    clicks,
    in_one_process,
    mostly_long,
    rows_in,
    same_rows,
    table_task,
    table_values,
)

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
    return trainer.weights(), rows_in(files.read(path))


def alike(state: State, other: State) -> bool:
    return same_bits(state[0], other[0]) and same_rows(state[1], other[1])


def trainer_of(workers: int, strategy: Any, task: Task = TASK, **settings: Any) -> DistributedSGD:
    failure = FailureConfig(snapshot_every=settings.pop("snapshot_every", None), patience=math.inf)
    config = run_config(failure=failure)
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


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, STRATEGIES[1]), ids=str)
def test_after_a_servers_death_rows_are_those_of_a_run_in_peace(
    strategy: Any, tmp_path: Path, in_peace: State
) -> None:
    """With copies nothing is lost; without, a job goes on from its last snapshot, to the same bits."""
    role = "server 1" if isinstance(strategy, PS) else "worker 1"
    assert alike(after_a_death(strategy, role, 60, tmp_path / "struck"), in_peace)


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
