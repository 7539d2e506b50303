"""Local SGD: inner updates on every worker, an outer one of what they changed."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn

from steepest import DistributedSGD, FailureConfig
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Failure, Result
from steepest.errors import ConfigurationError
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster, replay
from tests.pairs import grid
from tests.random_examples import seeds
from tests.reference import OptimizerFactory, Task, Weights, difference, same_bits, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": sgd(),
    "momentum": sgd(momentum=0.9, nesterov=True),
    "adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.01),
}


def make(task: Task) -> nn.Module:
    torch.manual_seed(0)
    return task.module()


def by_hand(
    task: Task,
    workers: int,
    rounds: int,
    outer: LocalStrategy,
    devices: int = 1,
    skipped: Collection[int] = (),
) -> Weights:
    """The same in plain torch, one worker after the other; some rounds are as if they had not been."""
    shared = make(task)
    shared_optimizer = torch.optim.SGD(
        shared.parameters(), outer.outer_lr, momentum=outer.outer_momentum, nesterov=outer.nesterov
    )
    norms: list[float] = []
    copies = [make(task) for _ in range(workers)]
    optimizers = [task.optimizer(module) for module in copies]
    every = outer.sync_every
    parts = workers * devices * every
    plan = SamplePlan(len(task.data[0]), parts * task.batch_size, 0)
    for step in sorted(set(range(rounds)) - set(skipped)):
        change = {name: torch.zeros_like(p) for name, p in shared.named_parameters()}
        total = 0
        for worker, (module, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            module.load_state_dict(shared.state_dict())
            seen = 0
            for update in range(every):
                index = [
                    plan.share(step, (worker * devices + device) * every + update, parts)
                    for device in range(devices)
                ]
                count = sum(map(len, index))
                if not count:
                    continue
                optimizer.zero_grad()
                for part in index:
                    if len(part):
                        x, y = (column[torch.from_numpy(part.copy())] for column in task.data)
                        (task.loss(module(x), y) * (len(part) / count)).backward()
                if outer.clip_norm is not None:
                    norms.append(
                        float(nn.utils.clip_grad_norm_(module.parameters(), outer.clip_norm))
                    )
                optimizer.step()
                seen += count
            total += seen
            for name, parameter in module.named_parameters():
                change[name] += (dict(shared.named_parameters())[name] - parameter).detach() * seen
        for name, parameter in shared.named_parameters():
            parameter.grad = change[name] / total
        shared_optimizer.step()
    assert outer.clip_norm is None or min(norms) < outer.clip_norm < max(norms)
    return {name: p.detach().clone() for name, p in shared.named_parameters()}


def run(
    task: Task, workers: int, rounds: int, strategy: LocalStrategy, **options: Any
) -> InProcessCluster:
    cluster = InProcessCluster(task.creator(), num_workers=workers, strategy=strategy, **options)
    assert [type(result) for result in cluster.step(rounds)] == [Result] * rounds
    return cluster


@pytest.mark.few(1)
@grid(optimizer=OPTIMIZERS, size=[(1, 1), (2, 1), (3, 2)], servers=[None, 2])
def test_equals_the_same_by_hand(
    optimizer: str, size: tuple[int, int], servers: int | None
) -> None:
    workers, devices = size
    task = Task(optimizer=OPTIMIZERS[optimizer], data=samples(50), batch_size=2)
    for config in (
        LocalStrategy(sync_every=3, num_servers=servers, chunk_bytes=48),
        LocalStrategy(
            sync_every=4, outer_lr=0.7, outer_momentum=0.9, nesterov=True, num_servers=servers
        ),
    ):
        found = run(task, workers, 12, config, devices_per_worker=devices).weights()
        assert difference(found, by_hand(task, workers, 12, config, devices)) < 1e-12


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_batchs_gradient_is_clipped_by_itself(workers: int) -> None:
    task = Task(optimizer=sgd(momentum=0.9), data=samples(50), batch_size=2)
    config = LocalStrategy(sync_every=3, clip_norm=0.6, chunk_bytes=48)
    assert (
        difference(run(task, workers, 12, config).weights(), by_hand(task, workers, 12, config))
        < 1e-12
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_averaging_after_every_batch_is_synchronous_training(optimizer: str, workers: int) -> None:
    task = Task(optimizer=OPTIMIZERS[optimizer], data=samples(48), batch_size=2)
    found = run(task, workers, 20, LocalStrategy(sync_every=1)).weights()
    assert difference(found, task.train(workers, 20)) < 1e-12


def test_a_schedule_counts_inner_updates() -> None:
    rates: list[int] = []

    def rate(step: int) -> float:
        rates.append(step)
        return 0.1 / (1 + step)

    task = Task(optimizer=sgd(), data=samples(64), learning_rate=rate)
    cluster = run(task, 2, 2, LocalStrategy(sync_every=3))
    assert {0, 1, 2, 3, 4, 5} <= set(rates)
    assert max(rates) == 5
    constant = run(Task(optimizer=sgd(), data=samples(64)), 2, 2, LocalStrategy(sync_every=3))
    assert difference(cluster.weights(), constant.weights()) > 1e-6


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("hosts", [None, HostMap((0, 0, 1), (0, 0, 1), gathers=True)])
@seeds(1)
def test_two_runs_and_a_replay_have_the_same_bits(hosts: HostMap | None, seed: int) -> None:
    task = Task(optimizer=OPTIMIZERS["adam"], data=samples(50))
    config = LocalStrategy(sync_every=3, outer_momentum=0.5, chunk_bytes=48)
    first = run(task, 3, 10, config, keep_log=True, hosts=hosts)
    second = run(task, 3, 10, config, shuffle=seed, hosts=hosts)
    assert same_bits(first.weights(), second.weights())
    assert same_bits(replay(first.log(), task.creator()), first.weights())
    base = first.snapshot().weights
    for worker in first.workers:
        held = first.wait(
            worker.at_version(0, 10, lambda replicas: replicas.weights.clone()),
            "a worker's weights",
        )
        assert torch.equal(held, base)


class Sick(nn.Module):
    """Raises once, in one of its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2).double()
        self.passes = 0
        self.raises_in = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.raises_in:
            raise ArithmeticError("once")
        return self.inner(x)


@pytest.mark.few(2)
@pytest.mark.parametrize("raises_in", [7, 8, 9])
def test_a_round_that_failed_leaves_no_trace(raises_in: int) -> None:
    """Neither in the weights nor in any worker's inner optimizer."""
    task = Task(Sick, OPTIMIZERS["adam"], samples(60), batch_size=2)
    config = LocalStrategy(sync_every=3)

    def create(worker_index: int, device_index: int) -> Any:
        model = task.creator()(worker_index, device_index)
        model.module.raises_in = raises_in if worker_index == 1 else -1
        return model

    cluster = InProcessCluster(create, num_workers=2, strategy=config)
    results = cluster.step(6)
    assert [type(result) for result in results] == [Result, Result, Failure]
    assert same_bits(cluster.weights(), run(task, 2, 2, config).weights())
    cluster.step(4)
    assert same_bits(cluster.weights(), run(task, 2, 6, config).weights())


class SickInBackward(nn.Module):
    """Raises once, in one of its backward passes, when the second layer's gradients are done."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.passes = 0
        self.raises_in = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        hidden = self.first(x)
        if self.passes == self.raises_in:
            hidden.register_hook(self.fail)
        return self.second(hidden)

    @staticmethod
    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("once")


def masked(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The mean over the samples that have a target, and their number."""
    there = target[:, 0].isfinite()
    return nn.functional.mse_loss(output[there], target[there]), int(there.sum())


def test_a_backward_pass_that_failed_leaves_no_gradient_to_a_batch_without_weight() -> None:
    """The round is made again, and begins with that batch."""
    x, y = samples(60)
    y[SamplePlan(60, 12, 0).share(2, 3, 6)] = torch.nan  # the first batch of worker 1's third round
    task = Task(SickInBackward, OPTIMIZERS["momentum"], (x, y), masked, batch_size=2)
    config = LocalStrategy(sync_every=3, chunk_bytes=64)

    def create(worker_index: int, device_index: int) -> Any:
        model = task.creator()(worker_index, device_index)
        model.module.raises_in = 8 if worker_index == 1 else -1
        return model

    cluster = InProcessCluster(create, num_workers=2, strategy=config)
    results = cluster.step(6)
    assert [type(result) for result in results] == [Result, Result, Failure]
    cluster.step(1)
    assert same_bits(cluster.weights(), run(task, 2, 3, config).weights())


@pytest.mark.parametrize(("optimizer", "servers"), [("adam", None), ("momentum", 2)])
def test_a_round_that_is_skipped_leaves_no_trace(optimizer: str, servers: int | None) -> None:
    """Neither in the weights nor in any worker's inner optimizer; a replay skips it as well."""
    x, y = samples(60)
    task = Task(optimizer=OPTIMIZERS[optimizer], data=(x, y), batch_size=2)
    config = LocalStrategy(sync_every=3, nonfinite="skip", num_servers=servers, chunk_bytes=48)
    for round_, part in (
        (1, 3),
        (4, 2),
    ):  # batches in the middle of worker 1's round, of worker 0's
        bad = SamplePlan(60, 12, 0).share(round_, part, 6)[0]
        y[bad] = torch.inf
    cluster = run(task, 2, 5, config, keep_log=True)
    cluster.step(1)  # of the next epoch, where nothing is infinite before its third batch
    log = cluster.log()
    skipped = [commit.version - 1 for commit in log.commits if commit.skipped]
    assert skipped[:2] == [1, 4]
    found = cluster.weights()
    assert difference(found, by_hand(task, 2, 6, config, skipped=skipped)) < 1e-12
    assert same_bits(replay(log, task.creator()), found)


def test_uneven_ends_of_epochs_and_more_workers_than_samples() -> None:
    task = Task(optimizer=sgd(momentum=0.5), data=samples(7), batch_size=2)
    config = LocalStrategy(sync_every=2)
    assert difference(run(task, 3, 9, config).weights(), by_hand(task, 3, 9, config)) < 1e-12
    results = InProcessCluster(task.creator(), num_workers=3, strategy=config).step(4)
    assert [result.samples for result in results] == [7] * 4


def test_less_is_sent() -> None:
    task = Task(optimizer=sgd(), data=samples(64), batch_size=2)
    often = InProcessCluster(
        task.creator(), num_workers=2, strategy=ParameterServerStrategy()
    ).step(8)
    rarely = InProcessCluster(
        task.creator(), num_workers=2, strategy=LocalStrategy(num_servers=1)
    ).step(1)
    sent = sum(result.bytes_pushed for result in often)
    assert rarely[0].bytes_pushed * 8 == sent
    assert rarely[0].samples == sum(result.samples for result in often)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 2.5}, r"sync_every=2\.5"),
        ({"outer_lr": 0}, "outer_lr=0: give a positive number"),
        ({"outer_lr": float("nan")}, "outer_lr=nan"),
        ({"outer_lr": True}, "outer_lr=True"),
        (
            {"outer_momentum": 1.0},
            r"outer_momentum=1\.0: give a finite number from 0 to 1, but not 1",
        ),
        ({"nesterov": True}, "nesterov=True with outer_momentum=0"),
        ({"clip_norm": -1}, "clip_norm=-1"),
        ({"num_servers": 0}, "num_servers=0"),
        ({"transport": "ray"}, "transport='ray'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LocalStrategy(**settings)


@pytest.mark.few(1)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_after_a_workers_death_bits_are_the_same_unless_its_optimizer_has_a_state(
    momentum: float,
) -> None:
    simulated = Simulation(1)
    task = Task(optimizer=sgd(0.05, momentum=momentum), data=samples(97), batch_size=2)
    config = run_config(failure=FailureConfig(patience=math.inf))

    def trained(dies: bool) -> Weights:
        strategy = LocalStrategy(sync_every=3, num_servers=2)
        with DistributedSGD(task.creator(), 3, strategy=strategy, run_config=config) as trainer:
            trainer.fit(steps=4, progress=False)
            if dies:
                process = next(each for each in simulated.living() if "worker 1" in str(each))
                simulated.world.kill(process, "it was killed. connection error code 2.")
            trainer.fit(steps=4, progress=False)
            assert len(trainer.stats().events) == dies
            return trainer.weights()

    with quiet(), simulated.running():
        assert same_bits(trained(dies=False), trained(dies=True)) == (not momentum)
