"""Strategies that change between two steps, among the same workers: real ones, and simulated ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    LocalStrategy,
    ParameterServerStrategy,
    RunConfig,
    TorchModel,
)
from steepest.core.engine.replica_states import mean_states
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster, linear_model_creator, replay
from tests.reference import Task, difference, same_bits, samples, sgd

pytestmark = pytest.mark.long
simulated = pytest.mark.usefixtures("simulated")

PATH = [
    "ps",
    AllreduceStrategy(chunk_bytes=64),
    "simple",
    ParameterServerStrategy(num_servers=2, chunk_bytes=32),
    AllreduceStrategy(data_plane="gloo", sharded=True, chunk_bytes=64),
    "allreduce",
]


def net() -> nn.Module:
    # no bias before the normalisation: its gradient is rounding errors alone, which Adam makes large
    return nn.Sequential(
        nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 2)
    ).double()


TASK = Task(
    net,
    lambda module: torch.optim.Adam(module.parameters(), lr=0.01, amsgrad=True),
    samples(30),
    batch_size=4,
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95),
)


def pids(trainer: DistributedSGD) -> list[int]:
    return trainer.foreach_worker(lambda view: view.pid)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("workers", "path"),
    [
        pytest.param(1, PATH[:2], marks=pytest.mark.full),
        (2, PATH),
        pytest.param(3, PATH[:2], marks=pytest.mark.full),
    ],
)
def test_switching_equals_not_switching(workers: int, path: list[Any]) -> None:
    """Optimizer state, running means, schedule, random state and the place in the epoch go on."""
    with DistributedSGD(TASK.creator(), num_workers=workers, strategy=path[0], seed=3) as trainer:
        before = pids(trainer)
        trainer.fit(steps=4, progress=False)
        for strategy in path[1:]:
            trainer.set_strategy(strategy)
            assert trainer.stats().step == 4 * path.index(strategy)
            assert trainer.step().step == 4 * path.index(strategy) + 1
            trainer.fit(steps=3, progress=False)
        assert pids(trainer) == before
        state = trainer.state_dict()
    again = InProcessCluster(TASK.creator(), num_workers=workers, seed=3)
    again.step(4 * len(path))
    assert difference(again.weights(), {name: state[name] for name in again.weights()}) < 1e-15
    means = [
        again.wait(
            worker.at_version(0, 4 * len(path), lambda replicas: replicas.models[0].state()),
            "the buffers",
        )
        for worker in again.workers
    ]
    mean = mean_states(means, [1.0] * workers)
    assert difference(mean, {name: state[name] for name in mean}) < 1e-15


@simulated
def test_asynchronous_and_back() -> None:
    creator = linear_model_creator(samples=48)
    with DistributedSGD(creator, num_workers=2, run_config=RunConfig(keep_log=True)) as trainer:
        trainer.fit(steps=3, progress=False)
        weights = trainer.weights()
        trainer.set_strategy("async")
        assert same_bits(trainer.weights(), weights)
        assert trainer.fit(steps=4, progress=False).step == 7
        assert trainer.stats().version == 14
        weights = trainer.weights()
        trainer.set_strategy("ps")
        assert same_bits(trainer.weights(), weights)
        trainer.step()
        assert same_bits(replay(trainer.log(), creator), trainer.weights())


@simulated
@pytest.mark.parametrize("servers", [None, 1])
def test_local_training_and_back(servers: int | None, tmp_path: Any) -> None:
    """With an averaging after each batch it is synchronous training, momentum and schedule included."""
    task = Task(
        optimizer=sgd(momentum=0.9),
        data=samples(40),
        learning_rate=lambda step: 0.1 * 0.9**step,
        batch_size=4,
    )
    local = LocalStrategy(sync_every=1, num_servers=servers)
    with DistributedSGD(task.creator(), num_workers=2) as trainer:
        trainer.fit(steps=4, progress=False)
        trainer.set_strategy(local)
        trainer.fit(steps=3, progress=False)
        trainer.save(tmp_path)
        trainer.set_strategy("allreduce")
        trainer.fit(steps=3, progress=False)
        assert difference(trainer.weights(), task.train(2, 10)) < 1e-12
        trainer.set_strategy(local)
        trainer.restore(tmp_path)
        trainer.fit(steps=3, progress=False)
        assert difference(trainer.weights(), task.train(2, 10)) < 1e-12


@simulated
def test_a_checkpoint_of_local_training_goes_on_to_the_bit(tmp_path: Any) -> None:
    """Each worker's own optimizer and the outer one are in it; and at another number of workers the mean."""
    strategy = LocalStrategy(sync_every=2, outer_momentum=0.5)
    task = Task(
        optimizer=lambda module: torch.optim.Adam(module.parameters(), lr=0.01), data=samples(64)
    )
    with DistributedSGD(task.creator(), num_workers=2, strategy=strategy) as trainer:
        trainer.fit(steps=3, progress=False)
        trainer.save(tmp_path)
        trainer.fit(steps=3, progress=False)
        expected = trainer.weights()
        trainer.restore(tmp_path)
        trainer.fit(steps=3, progress=False)
        assert same_bits(trainer.weights(), expected)
    with DistributedSGD(task.creator(), num_workers=3, strategy="ps") as trainer:
        trainer.restore(tmp_path)
        assert trainer.step().step == 4


@simulated
def test_the_schedule_goes_on_where_it_was() -> None:
    """A step of local training is several updates."""

    def rate(step: int) -> float:
        return 0.1 if step < 3 + 2 * 4 + 1 else 0.0

    task = Task(optimizer=sgd(), data=samples(64), learning_rate=rate)
    with DistributedSGD(task.creator(), num_workers=2) as trainer:
        trainer.fit(steps=3, progress=False)
        trainer.set_strategy(LocalStrategy(sync_every=4))
        trainer.fit(steps=2, progress=False)
        trainer.set_strategy("ps")
        before = trainer.weights()
        trainer.step()
        after = trainer.weights()
        assert difference(after, before) > 0
        trainer.step()
        assert same_bits(trainer.weights(), after)


class Numbers:
    """An endless stream that says how far it was read."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for n in range(1_000):
            yield (
                torch.full((2, 3), float(n), dtype=torch.float64),
                torch.full((2, 2), float(n), dtype=torch.float64),
            )


@simulated
def test_a_stream_goes_on_where_it_was() -> None:
    seen: list[float] = []

    def create(worker_index: int, device_index: int) -> TorchModel:
        class Seen(TorchModel):
            seen: list[float] = []

            def loss(self, batch: Any) -> torch.Tensor:
                self.seen.append(float(batch[0][0, 0]))
                return super().loss(batch)

        return Seen(
            nn.Linear(3, 2).double(),
            loss=nn.functional.mse_loss,
            data=Numbers(),
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=1e-6),
        )

    with DistributedSGD(create, num_workers=2) as trainer:
        trainer.fit(steps=2, progress=False)
        trainer.set_strategy("allreduce")
        trainer.fit(steps=2, progress=False)
        seen = trainer.for_model(lambda model: model.seen)  # type: ignore[attr-defined]
    assert seen == sorted(set(seen))
    assert len(seen) == 4


@simulated
def test_what_is_wrong_is_refused_and_changes_nothing() -> None:
    with DistributedSGD(linear_model_creator(), num_workers=2) as trainer:
        trainer.fit(steps=2, progress=False)
        before = trainer.weights()
        with pytest.raises(ConfigurationError, match=r"strategy='ring'.*'allreduce'"):
            trainer.set_strategy("ring")
        with pytest.raises(ConfigurationError, match="take no worker's gradient"):
            trainer.set_strategy(ParameterServerStrategy(backup_workers=2))
        assert same_bits(trainer.weights(), before)
        assert trainer.step().step == 3
        again = InProcessCluster(linear_model_creator(), num_workers=2)
        again.step(3)
        assert difference(again.weights(), trainer.weights()) < 1e-12
