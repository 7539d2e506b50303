"""Rounds whose servers send compressed changes of the weights: workers at different versions, against plain torch."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import AllreduceStrategy, DistributedSGD
from steepest.core.config.compression import Int2, Int4, Int8
from steepest.core.engine.outgoing_weights import SentChanges
from steepest.strategies.local import LocalStrategy
from steepest.testing import InProcessCluster, replay
from tests.modes import check_counts
from tests.pairs import grid
from tests.random_examples import seeds
from tests.reference import difference, same_bits, sgd
from tests.rounds import by_hand, check_samples, run_rounds, simulated, timed, wide_task
from tests.simulation.run import Simulation

CHOICES = {"int8": Int8(16), "int4": Int4(16), "int2": Int2(16)}


def of_job(cluster: InProcessCluster) -> Any:
    return cluster.job.description.layout


@pytest.mark.few(1)
@grid(
    choice=CHOICES,
    size=[(1, 1), (2, 1), (3, 1), (3, 2)],
    fragments=[1, 2, 4],
    pace=["equal", "speed"],
    delay=[0, 1],
    servers=[1, 2],
    both=[False, True],
    shuffle=[None, 1, 2],
)
def test_equals_the_same_by_hand(
    choice: str,
    size: tuple[int, int],
    fragments: int,
    pace: str,
    delay: int,
    servers: int,
    both: bool,
    shuffle: int,
) -> None:
    workers, quorum = size
    task = replace(wide_task("momentum", 70), optimizer=sgd(0.02, momentum=0.5))
    strategy = LocalStrategy(
        sync_every=3 * fragments,
        fragments=fragments,
        delay=delay,
        quorum=quorum,
        pace=pace,
        outer_lr=0.4,
        outer_momentum=0.5,
        nesterov=True,
        num_servers=servers,
        compression=CHOICES[choice] if both else None,
        weights_compression=CHOICES[choice],
        chunk_bytes=1024,
    )
    cluster = run_rounds(task, workers, 13, strategy, shuffle=shuffle)
    log, found = cluster.log(), cluster.weights()
    assert same_bits(replay(log, task.creator()), found)
    check_counts(cluster, log)
    plain = difference(found, by_hand(task, log, strategy))
    if workers == 1:  # nothing is sent
        assert plain < 1e-5
    elif not both:
        # an element that two ways of adding up round differently is mended in the next round, the last one's is not
        assert difference(found, by_hand(task, log, strategy, of_job(cluster))) < 0.8 * plain
    cluster.network.settle()
    for worker, role in enumerate(cluster.workers if workers > 1 else ()):
        for server in cluster.servers:
            for index, held in server.chunks.items():
                if worker == 0 or not cluster.job.places.beside(worker, server._index):
                    arrived = of_job(cluster).chunk_view(role._replicas.arrivals, index)
                    assert torch.equal(arrived, held.sent)


@pytest.mark.few(1)
@pytest.mark.parametrize(("workers", "delay"), [(2, 2), (3, 0)])
def test_a_late_worker_is_sent_all_changes_and_its_successor_all_weights(
    workers: int, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = wide_task("momentum", 900)
    strategy = LocalStrategy(
        sync_every=8,
        fragments=2,
        quorum=1,
        delay=delay,
        num_servers=2,
        weights_compression=Int8(16),  # three changes are fewer bytes than the weights
        transport="tcp",
    )
    create, _ = timed(task, [0.4, *[0.05] * (workers - 1)], lambda: 0.0)
    many: Counter[int] = Counter()
    after = SentChanges.after

    def counted(self: SentChanges, version: int | None) -> torch.Tensor | None:
        found = after(self, version)
        many[0 if found is None else found.numel() // self._changes[0][1].numel()] += 1
        return found

    monkeypatch.setattr(SentChanges, "after", counted)

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        victim = next(each for each in simulation.living() if "worker 0" in str(each))
        simulation.at_event(200, lambda: simulation.world.kill(victim, "it was killed."))
        trainer.fit(steps=24, progress=False)
        assert [event.kind for event in trainer.stats().events] == ["replaced"]

    found, log = simulated(task, workers, strategy, act, create)
    assert many[0] > 0  # so many that the weights themselves are fewer bytes
    assert many[1] > 0 < many[2] + many[3]
    assert {p.incarnation for c in log.commits for p in c.pushes if p.worker == 0} == {0, 1}
    check_samples(log)
    assert same_bits(replay(log, task.creator()), found)


@pytest.mark.few(1)
@pytest.mark.parametrize("delay", [0, 1])
def test_a_checkpoint_goes_on_exactly(delay: int, tmp_path: Path) -> None:
    """Where every worker's change is in each round, so that both runs are made of the same rounds."""
    task = wide_task("adam")
    strategy = LocalStrategy(
        sync_every=8,
        fragments=4,
        quorum=2,
        grace=50.0,
        num_servers=2,
        replication=2,
        delay=delay,
        compression=Int4(16),
        weights_compression=Int2(16),
        transport="tcp",
    )
    whole, _ = simulated(task, 2, strategy, lambda t, _: t.fit(steps=9, progress=False))

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        trainer.fit(steps=6, progress=False)
        trainer.save(tmp_path / "saved")

    simulated(task, 2, strategy, act)

    def go_on(trainer: DistributedSGD, simulation: Simulation) -> None:
        trainer.restore(tmp_path / "saved")
        trainer.fit(steps=3, progress=False)

    found, _ = simulated(task, 2, strategy, go_on)
    assert same_bits(found, whole)


@pytest.mark.long
def test_workers_come_and_go_and_weights_are_set() -> None:
    task = wide_task("momentum", 96)
    strategy = LocalStrategy(
        sync_every=4, quorum=2, num_servers=1, weights_compression="int8", transport="tcp"
    )
    create, _ = timed(task, [0.1, 0.02, 0.03, 0.3], lambda: 0.0)

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        trainer.fit(steps=7, progress=False)
        trainer.resize(num_workers=4)
        trainer.fit(steps=7, progress=False)
        for other in (
            replace(strategy, weights_compression=None),
            replace(strategy, pace="speed", weights_compression="int4"),
            replace(strategy, quorum=None),
            strategy,
        ):
            trainer.set_strategy(other)
            trainer.fit(steps=3, progress=False)
        zeros = {name: torch.zeros_like(value) for name, value in trainer.weights().items()}
        trainer.set_weights(zeros)
        assert not any(value.any() for value in trainer.weights().values())
        trainer.fit(steps=1, progress=False)

    _, log = simulated(task, 3, strategy, act, create)
    check_samples(log)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [2, 4])
def test_a_hundredth_of_allreduces_bytes_travels(workers: int) -> None:
    """With the settings and exchanges of `benchmarks.slow_links`, of a batch of one sample."""
    task = replace(wide_task("momentum", 9000), batch_size=1)
    strategy = LocalStrategy(
        sync_every=100,
        fragments=4,
        delay=20,
        num_servers=1,
        quorum=1,
        compression="int4",
        weights_compression="int4",
    )
    sent = []
    for each in (AllreduceStrategy(), strategy):
        cluster = InProcessCluster(task.creator(), num_workers=workers, strategy=each)
        results = cluster.step(8)
        moved = sum(result.bytes_pushed + result.bytes_pulled for result in results)  # type: ignore[union-attr]
        sent.append(moved / sum(result.samples for result in results))  # type: ignore[union-attr]
    assert sent[1] <= sent[0] / 100


def test_changes_are_kept_while_they_are_fewer_bytes_than_the_weights() -> None:
    changes = SentChanges(most=10)
    parts = [torch.full((3,), value, dtype=torch.uint8) for value in range(6)]
    assert changes.after(-1) is None
    for version in (2, 3, 5, 6):
        changes.add(version, parts[version % 6])
    assert changes.after(1) is None  # that of version 2 would be the fourth
    assert changes.after(2).tolist() == [3, 3, 3, 5, 5, 5, 0, 0, 0]  # type: ignore[union-attr]
    assert changes.after(4).tolist() == [5, 5, 5, 0, 0, 0]  # type: ignore[union-attr]
    assert changes.after(5) is parts[0]
    assert changes.after(6) is None
    changes.add(7, torch.zeros(10, dtype=torch.uint8), whole=True)
    assert changes.after(6) is None
    changes.add(8, parts[1])
    assert changes.after(7) is parts[1]
    last = SentChanges(most=0)
    assert last.after(None) is None
    for version in (1, 2):
        last.add(version, parts[version])
        assert last.after(None) is parts[version]
    assert last.after(1) is parts[2]
    assert last.after(0) is None


@pytest.mark.long
@seeds(8)
def test_whatever_dies_the_log_has_the_bits(seed: int) -> None:
    """Any settings together, workers of unequal speed, of which some die; also a server whose chunks have copies."""
    draw = random.Random(seed)
    fragments, workers = draw.choice([1, 2, 4]), draw.choice([2, 3])
    of_share = draw.choice([2, 3])
    strategy = LocalStrategy(
        sync_every=of_share * fragments,
        fragments=fragments,
        delay=draw.randrange(of_share),
        quorum=draw.choice([None, 1, workers]),
        pace="speed",
        num_servers=2,
        replication=draw.choice([1, 2]),
        compression=draw.choice([None, Int8(16)]),
        weights_compression=draw.choice([*CHOICES.values()]),
        chunk_bytes=1024,
        transport="tcp",
    )
    if strategy.quorum is not None:
        strategy = replace(strategy, pace=draw.choice(["equal", "speed"]))
    task = wide_task("adam", 150)
    create, _ = timed(task, [draw.choice([0.05, 0.1, 0.4]) for _ in range(workers)], lambda: 0.0)
    victims = [f"worker {draw.randrange(workers)}" for _ in range(draw.randrange(3))]
    if strategy.replication == 2 and draw.random() < 0.5:
        victims.append("server 1")

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        def kill(name: str) -> None:
            living = (each for each in simulation.living() if name in str(each))
            if (victim := next(living, None)) is not None:
                simulation.world.kill(victim, "it was killed.")

        at = 0
        for name in victims:
            at += draw.randrange(50, 300)
            simulation.at_event(at, lambda name=name: kill(name))
        assert trainer.fit(steps=12, progress=False).step == 12
        assert trainer.fit(steps=12, progress=False).step == 24

    found, log = simulated(task, workers, strategy, act, create, seed)
    check_samples(log)
    if len(log.parts) == 1:
        assert same_bits(replay(log, task.creator()), found)
