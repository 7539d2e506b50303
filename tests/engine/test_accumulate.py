"""Gradient accumulation: n micro-batches on each replica are the step of n times as many replicas."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from steepest import DistributedSGD, RunConfig
from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Failure
from steepest.core.models.torch import TorchModel
from steepest.errors import ConfigurationError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy
from steepest.testing import InProcessCluster, replay
from tests.engine.equivalence_tasks import (
    TASKS,
    Sometimes,
    all_but_fixed,
    dropout,
    run,
    weighted_mse,
    weighted_samples,
)
from tests.inside import replicas_of
from tests.modes import EACH, MODES, Moody, check, make, shares, trained
from tests.pairs import grid
from tests.random_examples import seeds
from tests.reference import Task, difference, same_bits, samples, sgd, snapshot

STEPS = 12
STRATEGIES = {
    "ps": ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    "allreduce": AllreduceStrategy(chunk_bytes=64),
    "groups": AllreduceStrategy(data_plane="gloo", chunk_bytes=64),
    "simple": SimpleStrategy(),
}
SIZES = [(1, 1, 2), (1, 2, 2), (1, 1, 5), (2, 1, 3), (2, 2, 2), (3, 1, 2)]


@pytest.mark.few(3)
@grid(strategy=STRATEGIES, size=SIZES, name=TASKS)
def test_equals_serial_training(strategy: str, size: tuple[int, int, int], name: str) -> None:
    workers, devices, accumulate = size
    cluster = run(
        TASKS[name], STEPS, workers, devices, accumulate=accumulate, strategy=STRATEGIES[strategy]
    )
    parts = workers * devices * accumulate
    assert cluster.job.global_batch == parts * 2
    assert difference(cluster.weights(), TASKS[name].train(parts, STEPS)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_random_numbers_are_those_of_as_many_workers(workers: int) -> None:
    task = Task(dropout, sgd(momentum=0.9), samples(31))
    wide = run(task, STEPS, workers * 3, strategy=STRATEGIES["ps"])
    long = run(task, STEPS, workers, accumulate=3, strategy=STRATEGIES["ps"])
    assert difference(long.weights(), wide.weights()) < 1e-12
    both = run(task, STEPS, 1, workers, accumulate=3, strategy=STRATEGIES["ps"])
    assert difference(both.weights(), wide.weights()) < 1e-12


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("workers", "devices", "accumulate"), [(1, 1, 4), (1, 2, 3), (2, 1, 2), (2, 2, 2)]
)
def test_a_loss_may_weigh_its_batch_or_not_at_all(
    workers: int, devices: int, accumulate: int
) -> None:
    data = weighted_samples([1.0, 0.0, 0.0, 2.0, 7.0, 0.25, 0.0, 2.5, 0.5, 1.0, 0.125, 6.0])
    task = Task(optimizer=sgd(momentum=0.9), data=data, loss=weighted_mse, batch_size=1)
    cluster = run(task, STEPS, workers, devices, accumulate=accumulate, strategy=STRATEGIES["ps"])
    plan = cluster.job.plan()
    assert plan is not None
    assert all(float(data[1][plan.share(step, 0, 1), -1].sum()) for step in range(STEPS)), (
        "else serial training fails"
    )
    assert difference(cluster.weights(), task.train(workers * devices * accumulate, STEPS)) < 1e-12


@pytest.mark.parametrize("chunk_bytes", [64, None])
@pytest.mark.parametrize(("workers", "devices", "accumulate"), [(1, 1, 3), (3, 1, 2), (2, 2, 2)])
def test_parameters_without_gradient_are_skipped_as_torch_does(
    workers: int, devices: int, accumulate: int, chunk_bytes: int | None
) -> None:
    task = Task(
        Sometimes, all_but_fixed(torch.optim.AdamW, lr=0.01, weight_decay=0.1), batch_size=1
    )
    strategy = ParameterServerStrategy(num_servers=2, chunk_bytes=chunk_bytes)
    weights = run(task, STEPS, workers, devices, accumulate=accumulate, strategy=strategy).weights()
    assert difference(weights, task.train(workers * devices * accumulate, STEPS)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODES)
@seeds(1)
def test_the_log_replayed_gives_the_weights_of_the_run_bit_for_bit(name: str, seed: int) -> None:
    workers, devices, accumulate = random.Random(seed).choice([(2, 1, 2), (3, 1, 3), (3, 2, 2)])
    task = Task(dropout, lambda module: torch.optim.Adam(module.parameters(), lr=0.01), samples(31))
    cluster = make(name, task, workers, devices, accumulate=accumulate, shuffle=seed)
    trained(cluster, 3)
    trained(cluster, 2)
    log = check(cluster, task)
    assert log.accumulate == accumulate
    assert not same_bits(replay(replace(log, accumulate=1), task.creator()), cluster.weights())


@pytest.mark.parametrize(
    "places", [HostMap((0, 0, 1), (0, 1), gathers=True), HostMap((0, 0, 0), (0, 0), gathers=True)]
)
def test_a_hosts_workers_add_up_what_they_added_up(places: HostMap) -> None:
    task = Task(optimizer=sgd(momentum=0.9))
    cluster = make("sync", task, 3, accumulate=2, hosts=places)
    trained(cluster, STEPS)
    check(cluster, task)
    assert difference(cluster.weights(), task.train(6, STEPS)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EACH)
def test_one_worker_in_any_mode_is_serial_training(name: str) -> None:
    task = TASKS["adamw-groups-schedule"]
    cluster = make(name, task, workers=1, devices=2, accumulate=2)
    trained(cluster, STEPS)
    assert difference(cluster.weights(), task.train(4, STEPS)) < 1e-12


@pytest.mark.parametrize("name", ["sync", "async", "allreduce"])
def test_every_sample_of_an_epoch_counts_once(name: str) -> None:
    task = Task(optimizer=sgd(), data=samples(29))
    cluster = make(name, task, 2, accumulate=3)
    plan = cluster.job.plan()
    assert plan is not None
    assert plan.steps_per_epoch == 3  # of 12, 12 and 5 samples: the last has an empty micro-batch
    results = trained(cluster, 3)
    if name != "async":  # whose steps are the updates of whoever came first
        assert [result.samples for result in results] == [12, 12, 5]
    assert sum(result.samples for result in results) == 29
    assert sorted(shares(check(cluster, task))) == list(range(6))


def test_loss_and_metrics_are_means_over_all_micro_batches() -> None:
    task = Task(
        optimizer=sgd(lr=0.0), metrics={"first": lambda output, target: target[:, 0].mean()}
    )
    cluster = make("sync", task, 2, accumulate=2)
    module = task.module()
    module.load_state_dict(cluster.weights())
    plan = cluster.job.plan()
    assert plan is not None
    for step, result in enumerate(trained(cluster, 4)):
        x, y = (column[torch.from_numpy(plan.share(step, 0, 1))] for column in task.data)
        assert result.metrics["first"] == pytest.approx(float(y[:, 0].mean()), abs=1e-12)
        expected = float(nn.functional.mse_loss(module(x), y).detach())
        assert result.loss == pytest.approx(expected, abs=1e-12)


def test_chunks_leave_during_the_last_backward_pass_only() -> None:
    passes = [0]

    def count(gradient: torch.Tensor) -> torch.Tensor:
        passes[0] += 1
        return gradient

    task = Task(lambda: Moody(count), data=samples(24))
    cluster = make("sync", task, 1, devices=2, accumulate=3)
    replicas = replicas_of(cluster.workers[0])
    layout = replicas.layout
    left: dict[int, int] = {}
    replicas.compute(0, lambda chunk, *_: left.update({chunk: passes[0]}), False)
    assert passes == [6]
    last = {
        c for name in ("last.weight", "last.bias") for c in layout.chunks_of[layout.index[name]]
    }
    first = {
        c for name in ("first.weight", "first.bias") for c in layout.chunks_of[layout.index[name]]
    } - last
    assert first | last == left.keys() == set(range(len(layout.chunks)))
    assert {left[chunk] for chunk in first} == {6}
    assert 5 in {left[chunk] for chunk in last}, (
        "the last layer's leave before the first layer's are computed"
    )
    assert min(left.values()) == 5


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
@seeds(1)
def test_a_micro_batch_that_raises_voids_the_step_which_is_taken_again(
    name: str, seed: int
) -> None:
    calls, when = [0], random.Random(seed).randint(1, 36)

    def raise_once(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == when:
            raise ValueError("no luck today")
        return gradient

    task = Task(lambda: Moody(raise_once), sgd(momentum=0.9), samples(36))
    cluster = make(name, task, 3, accumulate=3)
    kinds = [type(outcome) for _ in range(6) for outcome in cluster.step(1)]
    assert kinds.count(Failure) == 1
    check(cluster, task)
    if name in ("sync", "allreduce"):
        calm = Task(lambda: Moody(lambda gradient: gradient), sgd(momentum=0.9), samples(36))
        assert difference(cluster.weights(), calm.train(9, 5)) < 1e-12


# -- sources of data --------------------------------------------------------------------------------


def of(data: Any, batch_size: int | None = 2) -> Any:
    """A model creator over data of any kind."""

    def create(worker: int, device: int) -> TorchModel:
        torch.manual_seed(0)
        return TorchModel(
            nn.Linear(3, 2).double(),
            loss=nn.functional.mse_loss,
            data=data,
            batch_size=batch_size,
            optimizer=sgd(),
        )

    return create


class Batches:
    """A stream of batches of two samples."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        x, y = samples(36)
        yield from ((x[i : i + 2], y[i : i + 2]) for i in range(0, 36, 2))


def test_a_stream_gives_its_batches_one_after_the_other() -> None:
    cluster = InProcessCluster(of(Batches(), None), accumulate=3)
    trained(cluster, 5)
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    optimizer = sgd()(module)
    x, y = samples(36)
    for i in range(0, 30, 6):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x[i : i + 6]), y[i : i + 6]).backward()
        optimizer.step()
    assert difference(cluster.weights(), snapshot(module)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("processes", [0, 2])
def test_a_loaders_own_processes_read_ahead_in_the_same_order(processes: int) -> None:
    dataset = TensorDataset(*samples(13))
    loader = DataLoader(
        dataset,
        batch_size=2,
        num_workers=processes,
        multiprocessing_context="fork" if processes else None,
    )
    cluster = InProcessCluster(of(loader), accumulate=4)
    plain = InProcessCluster(of(samples(13)), accumulate=4)
    trained(cluster, 6)
    trained(plain, 6)
    assert same_bits(cluster.weights(), plain.weights())


# -- on Ray -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [0, -1, True, 1.5, "2", None])
def test_what_is_no_number_of_batches_is_refused(accumulate: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"accumulate={accumulate!r}: give an integer of at least 1"
    ):
        DistributedSGD(Task().creator(), accumulate=accumulate)


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_training_on_ray_and_going_on_with_other_numbers_of_workers_and_batches(
    tmp_path: Path,
) -> None:
    task = Task(optimizer=sgd(momentum=0.9))
    logged = RunConfig(keep_log=True)
    with DistributedSGD(
        task.creator(), 2, accumulate=2, strategy=STRATEGIES["ps"], run_config=logged
    ) as trainer:
        assert trainer.step().samples == trainer.accumulate * 2 * task.batch_size
        trainer.fit(steps=4, progress=False)
        assert same_bits(trainer.weights(), replay(trainer.log(), task.creator()))
        trainer.save(tmp_path)
    with DistributedSGD(task.creator(), 1, accumulate=4, strategy="allreduce") as trainer:
        trainer.restore(tmp_path)
        trainer.fit(steps=5, progress=False)
        assert difference(trainer.weights(), task.train(4, 10)) < 1e-12
