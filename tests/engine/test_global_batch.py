"""A global batch of one size, however many workers there are: each update is that of one process with all of it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    IndexedStream,
    LocalStrategy,
    ParameterServerStrategy,
    RunConfig,
    SimpleStrategy,
)
from steepest.core.config.job import JobConfig
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.commit_log import CommitLog
from steepest.core.models.torch import TorchModel
from steepest.errors import ConfigurationError
from steepest.testing import Fault, InProcessCluster, replay
from tests.engine.equivalence_tasks import TASKS, run, weighted_mse, weighted_samples
from tests.modes import check, trained
from tests.pairs import grid
from tests.reference import Task, Weights, difference, same_bits, samples, sgd

STEPS = 12
GLOBAL = 11
STRATEGIES = {
    "ps": ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    "allreduce": AllreduceStrategy(chunk_bytes=64),
    "groups": AllreduceStrategy(data_plane="gloo", chunk_bytes=64),
    "simple": SimpleStrategy(),
    "local": LocalStrategy(sync_every=3, chunk_bytes=48),
    "backup": ParameterServerStrategy(num_servers=2, chunk_bytes=64, backup_workers=1),
}


def serially(task: Task, size: int, steps: int) -> Weights:
    """Trains in this process, with so many samples in each step."""
    return replace(task, batch_size=size).train(1, steps)


def global_batches(log: CommitLog) -> list[list[tuple[int, int]]]:
    """The samples of each commit, as sorted (epoch, place in its permutation)."""
    found = []
    for part in log.parts:
        assert part.plan is not None
        for commit in part.commits:
            places = [p for push in commit.pushes for p in part.plan.places(push.share, *part.cuts)]
            found.append(sorted((e, i) for e, begin, end in places for i in range(begin, end)))
    return found


def expected_batches(count: int, size: int, steps: int) -> list[list[tuple[int, int]]]:
    """What one process takes, with so many samples in each step."""
    positions = map(SamplePlan(count, size, seed=0).position, range(steps))
    return [[(at.epoch, i) for span in at.ranges for i in range(*span)] for at in positions]


def logged(name: str, task: Task, workers: int, **options: Any) -> InProcessCluster:
    """A job that keeps its log."""
    return InProcessCluster(
        task.creator(), num_workers=workers, strategy=STRATEGIES[name], keep_log=True, **options
    )


@pytest.mark.few(2)
@grid(strategy=["ps", "allreduce", "simple"], workers=[1, 2, 3, 4], devices=[1, 2], name=TASKS)
def test_equals_serial_training(strategy: str, workers: int, devices: int, name: str) -> None:
    task = replace(TASKS[name], data=samples(29))
    cluster = run(
        task, STEPS, workers, devices, strategy=STRATEGIES[strategy], global_batch_size=GLOBAL
    )
    assert cluster.job.global_batch == GLOBAL
    assert difference(cluster.weights(), serially(task, GLOBAL, STEPS)) < 1e-12


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_share_weighs_what_its_samples_weigh(workers: int) -> None:
    data = weighted_samples([1.0, 0.0, 0.0, 2.0, 7.0, 0.25, 0.0, 2.5, 0.5, 1.0, 0.125, 6.0])
    task = Task(optimizer=sgd(momentum=0.9), data=data, loss=weighted_mse, batch_size=1)
    cluster = run(task, STEPS, workers, strategy=STRATEGIES["ps"], global_batch_size=5)
    assert difference(cluster.weights(), serially(task, 5, STEPS)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ps", "allreduce", "local", "backup"])
@pytest.mark.parametrize(("workers", "devices", "accumulate"), [(1, 1, 1), (2, 2, 1), (3, 1, 2)])
def test_the_size_that_the_models_make_changes_no_bit(
    name: str, workers: int, devices: int, accumulate: int
) -> None:
    task = Task(optimizer=sgd(momentum=0.9), data=samples(29))
    options: dict[str, Any] = {"devices_per_worker": devices, "accumulate": accumulate}
    plain = logged(name, task, workers, **options)
    size = plain.job.shares * devices * accumulate * task.batch_size
    held = logged(name, task, workers, **options, global_batch_size=size)
    assert held.job.global_batch == plain.job.global_batch
    assert held.job.micro_batches == plain.job.micro_batches == accumulate
    for cluster in (plain, held):
        trained(cluster, STEPS)
    check(held, task)
    if name != "backup":  # which takes the gradients that come first
        assert same_bits(held.weights(), plain.weights())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ps", "allreduce", "local", "backup"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_log_replayed_gives_the_weights_of_the_run_bit_for_bit(name: str, workers: int) -> None:
    task = Task(optimizer=sgd(momentum=0.9), data=samples(29))
    cluster = logged(name, task, workers, global_batch_size=GLOBAL)
    trained(cluster, STEPS)
    log = check(cluster, task)
    if name != "backup":
        rounds = cluster.job.strategy.updates
        assert global_batches(log) == expected_batches(29, GLOBAL * rounds, STEPS)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_no_batch_is_larger_than_the_models_and_all_are_of_one_size(
    workers: int, accumulate: int
) -> None:
    seen: list[int] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(len(target))
        return nn.functional.mse_loss(output, target)

    task = Task(data=samples(2 * 26), loss=loss, batch_size=5)
    cluster = logged("ps", task, workers, accumulate=accumulate, global_batch_size=26)
    trained(cluster, 2)
    assert sum(seen) == 2 * 26
    assert max(seen) <= task.batch_size
    assert max(seen) - min(seen) <= 1
    fewest = -(-26 // (workers * task.batch_size))
    assert cluster.job.micro_batches == max(accumulate, fewest)
    assert len(seen) == 2 * workers * cluster.job.micro_batches


def test_a_round_of_local_training_has_as_many_batches_of_that_size_as_it_has_updates() -> None:
    task = Task(optimizer=sgd(), data=samples(64))
    strategy = LocalStrategy(sync_every=4)
    for workers in (1, 2, 3):
        cluster = InProcessCluster(
            task.creator(), num_workers=workers, strategy=strategy, global_batch_size=8
        )
        assert [result.samples for result in trained(cluster, 2)] == [32, 32]
    alone = run(task, 2, strategy=strategy, global_batch_size=8)
    assert difference(alone.weights(), serially(task, 8, 8)) < 1e-12


# -- data -------------------------------------------------------------------------------------------


class Batches:
    """A stream of batches."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        yield samples(2)


def creator(data: Any, batch_size: int | None) -> Any:
    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            nn.Linear(3, 2).double(), loss=nn.functional.mse_loss, data=data, batch_size=batch_size,
            optimizer=sgd(),
        )  # fmt: skip

    return create


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loaders_and_numbered_streams_are_divided_too(workers: int) -> None:
    x, y = data = samples(29)
    loader = DataLoader(TensorDataset(*data), batch_size=2)
    rows = IndexedStream(lambda start: zip(x[start:], y[start:], strict=True), 29, block=29)
    arrays, *others = (
        run_of(source, size, workers) for source, size in ((data, 2), (loader, None), (rows, 2))
    )
    assert same_bits(others[0], arrays)
    assert others[1].keys() == arrays.keys()  # in another order: blocks are shuffled otherwise
    plain = InProcessCluster(creator(rows, 11), global_batch_size=GLOBAL)
    trained(plain, 6)
    assert difference(others[1], plain.weights()) < 1e-12


def run_of(data: Any, batch_size: int | None, workers: int) -> Weights:
    cluster = InProcessCluster(
        creator(data, batch_size), num_workers=workers, global_batch_size=GLOBAL
    )
    trained(cluster, 6)
    return cluster.weights()


def test_data_that_choose_their_own_batches_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="global_batch_size=4 with data that choose"):
        InProcessCluster(creator(Batches(), None), global_batch_size=4)


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "8"])
def test_what_is_no_number_of_samples_is_refused(size: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"global_batch_size={size!r}: give an integer of at least 1"
    ):
        DistributedSGD(Task().creator(), global_batch_size=size)


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_where_each_gradient_is_an_update_it_is_refused(mode: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"global_batch_size=8 under '{mode}': each worker's gradient"
    ):
        DistributedSGD(Task().creator(), 2, strategy=mode, global_batch_size=8)


def test_each_batch_needs_a_sample() -> None:
    expected = "num_workers=3, devices_per_worker=2 and accumulate=2: these compute 12 batches"
    with pytest.raises(ConfigurationError, match=f"global_batch_size=11 with {expected}"):
        DistributedSGD(
            Task().creator(), (3, 9), devices_per_worker=2, accumulate=2, global_batch_size=11
        )


def test_a_range_ends_where_there_are_no_samples_for_more_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chosen = JobConfig(devices_per_worker=2, accumulate=2, global_batch_size=22)
    assert chosen.most_of(5) == 5
    assert not caplog.records
    assert chosen.most_of(64) == 5
    ((name, level, line),) = caplog.record_tuples
    assert (name, level) == ("steepest.core.config.job", logging.WARNING)
    assert "global_batch_size=22 has samples for 5 workers" in line
    assert JobConfig().most_of(64) == 64


@pytest.mark.usefixtures("machine")
def test_a_job_grows_no_further_than_there_are_samples() -> None:
    with DistributedSGD(Task().creator(), num_workers=(1, 8), global_batch_size=2) as trainer:
        assert trainer.num_workers == 2
        assert trainer.fit(steps=3, progress=False).samples == 2
        assert trainer.num_workers == 2


def test_faults_are_counted_by_batches() -> None:
    faults = [Fault.raises("worker", 0, step=1)]
    with pytest.raises(ConfigurationError, match="give accumulate=3"):
        InProcessCluster(Task().creator(), global_batch_size=6, faults=faults)


# -- on Ray -----------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_every_size_takes_the_same_global_batches_in_the_same_order(
    strategy: str, tmp_path: Path
) -> None:
    task = Task(optimizer=sgd(lr=0.05, momentum=0.9), data=samples(50), batch_size=4)
    run_config = RunConfig(keep_log=True)
    with DistributedSGD(
        task.creator(),
        2,
        strategy=STRATEGIES[strategy],
        global_batch_size=12,
        run_config=run_config,
    ) as trainer:
        assert trainer.accumulate == 2
        trainer.fit(steps=3, progress=False)
        trainer.resize(num_workers=3)
        assert trainer.accumulate == 1
        trainer.fit(steps=3, progress=False)
        trainer.save(tmp_path)
        trainer.resize(num_workers=1)
        assert trainer.accumulate == 3
        assert trainer.fit(epochs=1, progress=False).step == 10
        assert "12 samples a step" in trainer.stats().events[-1].line
        assert global_batches(trainer.log()) == expected_batches(50, 12, 10)
        assert same_bits(trainer.weights(), replay(trainer.log(), task.creator()))
        assert difference(trainer.weights(), serially(task, 12, 10)) < 1e-12
        with pytest.raises(ConfigurationError, match="global_batch_size=12 with num_workers=13"):
            trainer.resize(num_workers=13)
        with pytest.raises(ConfigurationError, match="global_batch_size=12 under 'ssp'"):
            trainer.set_strategy("ssp")
        assert (trainer.num_workers, trainer.stats().step) == (1, 10)
        trainer.resize(num_workers=4)
        trainer.restore(tmp_path)
        trainer.fit(steps=4, progress=False)
        assert difference(trainer.weights(), serially(task, 12, 10)) < 1e-12


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_a_death_changes_nothing_of_what_is_learned() -> None:
    task = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(2000), batch_size=1)
    strategy = AllreduceStrategy(replication=2, chunk_bytes=64)
    with DistributedSGD(
        task.creator(), num_workers=3, strategy=strategy, global_batch_size=3
    ) as trainer:
        trainer.fit(steps=20, progress=False)
        os.kill(trainer.foreach_worker(lambda view: view.pid)[1], signal.SIGKILL)
        kinds: list[str] = []
        while "returned" not in kinds:
            trainer.fit(steps=50, progress=False)
            kinds = [event.kind for event in trainer.stats().events]
        assert "left" in kinds
        steps = trainer.fit(steps=10, progress=False).step
        assert trainer.stats().samples == sum(len(b) for b in expected_batches(2000, 3, steps))
        assert difference(trainer.weights(), serially(task, 3, steps)) < 1e-9
