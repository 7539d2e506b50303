"""Local SGD whose servers send compressed changes of the weights, against the same in plain torch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import DistributedSGD, FailureConfig
from steepest.core.config.compression import Int2, Int4, Int8
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Result
from steepest.errors import ConfigurationError
from steepest.strategies.compression.codecs import make_codec
from steepest.strategies.local import LocalStrategy
from steepest.testing import InProcessCluster, replay
from tests.pairs import grid
from tests.reference import Task, Weights, difference, same_bits, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)
    )


TASK = Task(wide, sgd(0.02, momentum=0.5), samples(96, dtype=torch.float32), batch_size=2)
CHOICES = {"int8": Int8(16), "int4": Int4(16), "int2": Int2(16)}


def run(strategy: LocalStrategy, workers: int, steps: int, **options: Any) -> InProcessCluster:
    cluster = InProcessCluster(TASK.creator(), num_workers=workers, strategy=strategy, **options)
    assert [type(result) for result in cluster.step(steps)] == [Result] * steps
    return cluster


def by_hand(
    strategy: LocalStrategy, workers: int, steps: int, cluster: InProcessCluster
) -> Weights:
    """The same in plain torch; of the cluster is how the model is cut into chunks."""
    layout, codec = cluster.job.description.layout, make_codec(strategy.weights_compression)  # type: ignore[arg-type]
    copies = [TASK.module() for _ in range(workers)]
    optimizers = [TASK.optimizer(module) for module in copies]
    weights, sent, moved = layout.allocate(), layout.allocate(), layout.allocate()
    layout.write(weights, dict(TASK.module().named_parameters()))
    sent.copy_(weights)
    moved.zero_()
    every = strategy.sync_every
    plan = SamplePlan(len(TASK.data[0]), workers * every * TASK.batch_size, 0)
    for step in range(steps):
        mean, now = layout.allocate(), layout.allocate()
        mean.zero_()
        for worker, (module, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            module.load_state_dict(layout.named(sent))
            for update in range(every):
                index = plan.share(step, worker * every + update, workers * every)
                x, y = (column[torch.from_numpy(index.copy())] for column in TASK.data)
                optimizer.zero_grad()
                TASK.loss(module(x), y).backward()
                optimizer.step()
            layout.write(now, dict(module.named_parameters()))
            mean.view(torch.float32).add_(sent.view(torch.float32) - now.view(torch.float32))
        mean.view(torch.float32).div_(workers)
        moved.view(torch.float32).mul_(strategy.outer_momentum).add_(mean.view(torch.float32))
        weights.view(torch.float32).sub_(moved.view(torch.float32))
        for chunk in layout.chunks if codec is not None else ():
            old, new = (
                layout.chunk_view(v, chunk.index).view(torch.float32) for v in (sent, weights)
            )
            packed = torch.empty(codec.size(layout, chunk), dtype=torch.uint8)
            codec.pack(layout, chunk, new - old, packed, {})
            codec.add(layout, chunk, [(packed, 1.0)], old)
        if codec is None:
            sent.copy_(weights)
    return layout.named(weights)


@pytest.mark.few(3)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_equals_the_same_by_hand(choice: str, workers: int) -> None:
    strategy = LocalStrategy(
        sync_every=4, num_servers=2, outer_momentum=0.5, weights_compression=CHOICES[choice]
    )
    steps = 96 // (workers * 8)
    cluster = run(strategy, workers, steps)
    found = cluster.weights()
    plain = by_hand(replace(strategy, weights_compression=None), workers, steps, cluster)
    if workers == 1:  # nothing is sent
        assert difference(found, plain) < 1e-5
        return
    assert difference(found, by_hand(strategy, workers, steps, cluster)) < 1e-5
    assert difference(found, plain) > 2e-5


@pytest.mark.few(1)
@grid(
    choice=CHOICES,
    both=[False, True],
    workers=[2, 3],
    how=[(1, 0, 0.0), (2, 1, 0.0), (3, 1, 0.5)],
    copies=[1, 2],
    hosts=[None, HostMap((0, 1, 1), (0, 1), gathers=True)],
)
def test_two_runs_and_a_replay_have_the_same_bits_and_workers_have_what_was_sent(
    choice: str,
    both: bool,
    workers: int,
    how: tuple[int, int, float],
    copies: int,
    hosts: HostMap | None,
) -> None:
    fragments, delay, blend = how
    strategy = LocalStrategy(
        sync_every=6,
        fragments=fragments,
        delay=delay,
        blend=blend,
        num_servers=2,
        replication=copies,
        compression=CHOICES[choice] if both else None,
        weights_compression=CHOICES[choice],
        chunk_bytes=1024,
    )
    if hosts is not None:
        hosts = replace(hosts, workers=hosts.workers[:workers])
    first = run(strategy, workers, 9, keep_log=True, hosts=hosts)
    second = run(strategy, workers, 9, shuffle=3, hosts=hosts)
    found = first.weights()
    assert same_bits(found, second.weights())
    assert same_bits(replay(first.log(), TASK.creator()), found)
    layout, differs = first.job.description.layout, False
    for server in first.servers:
        for index, held in server.chunks.items():
            assert held.sent is not None
            left = held.weights.view(torch.float32) - held.sent.view(torch.float32)
            differs |= bool(left.any())
            for worker in range(workers):
                near = first.job.places.beside(worker, first.job.holders[index][0])
                arrived = first.workers[worker]._replicas.arrivals
                assert torch.equal(
                    layout.chunk_view(arrived, index), held.weights if near else held.sent
                )
    assert differs


def test_as_few_bytes_come_back_as_the_bits_say() -> None:
    size = sum(p.numel() for p in wide().parameters())
    for choice, bits in (("int8", 8), ("int4", 4), ("int2", 2)):
        strategy = LocalStrategy(sync_every=4, num_servers=1, weights_compression=choice)
        cluster = run(strategy, 2, 2)
        pulled = [result.bytes_pulled for result in cluster.step(3)]
        assert all(size * bits / 8 <= each / 2 <= size * bits / 8 + 80 for each in pulled)


def simulated(strategy: LocalStrategy, act: Any, workers: int = 2) -> Weights:
    simulation = Simulation(1)
    config = run_config(failure=FailureConfig(patience=math.inf))
    with (
        quiet(),
        simulation.running(),
        DistributedSGD(TASK.creator(), workers, strategy=strategy, run_config=config) as trainer,
    ):
        act(trainer, simulation)
        return trainer.weights()


@pytest.mark.few(1)
@pytest.mark.parametrize("delay", [0, 1])
def test_a_checkpoint_has_what_was_sent(delay: int, tmp_path: Path) -> None:
    strategy = LocalStrategy(
        sync_every=8,
        fragments=2,
        delay=delay,
        num_servers=1,
        transport="tcp",
        weights_compression=Int2(16),
    )
    whole = simulated(strategy, lambda trainer, _: trainer.fit(steps=9, progress=False))

    def save(trainer: DistributedSGD, _: Simulation) -> None:
        trainer.fit(steps=5, progress=False)
        trainer.save(tmp_path / "saved")

    simulated(strategy, save)

    def go_on(trainer: DistributedSGD, _: Simulation) -> None:
        trainer.restore(tmp_path / "saved")
        trainer.fit(steps=4, progress=False)

    assert same_bits(simulated(strategy, go_on), whole)

    def go_on_otherwise(trainer: DistributedSGD, _: Simulation) -> None:
        trainer.restore(tmp_path / "saved")
        trainer.set_strategy(replace(strategy, weights_compression=None))
        trainer.fit(steps=2, progress=False)
        trainer.set_strategy(strategy)
        trainer.fit(steps=2, progress=False)
        trainer.resize(num_workers=3)
        trainer.fit(steps=2, progress=False)
        zeros = {name: torch.zeros_like(value) for name, value in trainer.weights().items()}
        trainer.set_weights(zeros)
        assert not any(value.any() for value in trainer.weights().values())
        trainer.fit(steps=1, progress=False)

    simulated(strategy, go_on_otherwise)


def test_a_servers_death_changes_no_bit() -> None:
    strategy = LocalStrategy(
        sync_every=4, num_servers=2, replication=2, transport="tcp", weights_compression=Int4(16)
    )
    whole = simulated(strategy, lambda trainer, _: trainer.fit(steps=12, progress=False))

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        trainer.fit(steps=6, progress=False)
        victim = next(each for each in simulation.living() if "server 1" in str(each))
        simulation.world.kill(victim, "it was killed.")
        trainer.fit(steps=6, progress=False)
        assert len(trainer.stats().events) == 1

    assert same_bits(simulated(strategy, act), whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights_compression": "topk", "num_servers": 1}, "weights_compression='topk'"),
        ({"weights_compression": "int3", "num_servers": 1}, "weights_compression='int3'"),
        ({"weights_compression": "int4"}, "without servers: .* give num_servers=1, say"),
        (
            {"weights_compression": "int4", "num_servers": 1, "wire_dtype": (None, "bf16")},
            "one out",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LocalStrategy(**settings)
