"""Rounds of a quorum, of a model in fragments: slow workers and slow links together, against plain torch."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import AllreduceStrategy, DistributedSGD
from steepest.core.data.sampler import SamplePlan
from steepest.core.system import system
from steepest.errors import ConfigurationError
from steepest.strategies.local import LocalStrategy
from steepest.testing import replay
from tests.modes import check_counts
from tests.pairs import grid
from tests.random_examples import seeds
from tests.reference import difference, same_bits
from tests.rounds import OPTIMIZERS, by_hand, check_samples, deep_task, run_rounds, simulated, timed
from tests.simulation.run import Simulation


@pytest.mark.few(1)
@grid(
    optimizer=OPTIMIZERS,
    size=[(1, 1, 1), (2, 1, 2), (3, 2, 1), (3, 1, 2)],
    fragments=[1, 2, 3, 4],
    pace=["equal", "speed"],
    blend=[0.0, 0.25],
    delay=[0, 1, 2],
    servers=[1, 2],
    shuffle=[None, 1, 2],
)
def test_equals_the_same_by_hand(
    optimizer: str,
    size: tuple[int, int, int],
    fragments: int,
    pace: str,
    blend: float,
    delay: int,
    servers: int,
    shuffle: int,
) -> None:
    workers, devices, quorum = size
    task = deep_task(optimizer, 70)
    strategy = LocalStrategy(
        sync_every=3 * fragments,
        fragments=fragments,
        delay=delay,
        quorum=quorum,
        pace=pace,
        blend=blend,
        outer_lr=0.4,
        outer_momentum=0.5,
        nesterov=True,
        num_servers=servers,
        chunk_bytes=32,
    )
    cluster = run_rounds(task, workers, 13, strategy, devices_per_worker=devices, shuffle=shuffle)
    log, found = cluster.log(), cluster.weights()
    assert difference(found, by_hand(task, log, strategy)) < 1e-12
    assert same_bits(replay(log, task.creator()), found)
    check_counts(cluster, log)
    for worker in range(workers):
        turns = [p.fragment for c in log.commits for p in c.pushes if p.worker == worker]
        assert all(
            set(turns[i : i + 3 * fragments]) == set(range(fragments))
            for i in range(len(turns) - 3 * fragments)
        )


def test_with_all_changes_in_each_round_fragments_are_as_without_a_quorum() -> None:
    """To rounding: workers add what others have changed, which is nothing there."""
    task = deep_task("adam", 96)
    strategy = LocalStrategy(sync_every=8, fragments=4, num_servers=1, outer_momentum=0.5)
    found = run_rounds(task, 2, 10, replace(strategy, quorum=2)).weights()
    assert difference(found, run_rounds(task, 2, 10, strategy).weights()) < 1e-12


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("pace", ["equal", "speed"])
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_slow_worker_that_dies_is_replaced_while_the_others_go_on(
    workers: int, delay: int, pace: str
) -> None:
    task = deep_task("adam", 400)
    strategy = LocalStrategy(
        sync_every=8,
        fragments=2,
        quorum=workers - 1,
        grace=0.1,
        pace=pace,
        num_servers=2,
        delay=delay,
    )
    create, _ = timed(task, [0.3, *[0.05] * (workers - 1)], lambda: 0.0)

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        victim = next(each for each in simulation.living() if "worker 0" in str(each))
        simulation.at_event(150, lambda: simulation.world.kill(victim, "it was killed."))
        trainer.fit(steps=30, progress=False)
        assert [event.kind for event in trainer.stats().events] == ["replaced"]

    found, log = simulated(task, workers, strategy, act, create)
    pushes = [push for commit in log.commits for push in commit.pushes]
    assert {push.incarnation for push in pushes if push.worker == 0} == {0, 1}
    assert max(max(commit.staleness) for commit in log.commits) > 0
    check_samples(log)
    assert same_bits(replay(log, task.creator()), found)
    assert difference(found, by_hand(task, log, strategy)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("quorum", [None, 2])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 2), (2, 2)])
def test_a_servers_death_changes_nothing_where_its_chunks_have_copies(
    fragments: int, delay: int, quorum: int | None, seed: int
) -> None:
    """Though workers have begun the next round: they undo what is no part of the weights."""
    task = deep_task("adam", 96)
    strategy = LocalStrategy(
        sync_every=3 * fragments,
        fragments=fragments,
        delay=delay,
        quorum=quorum,
        grace=None if quorum is None else 50.0,
        num_servers=2,
        replication=2,
        chunk_bytes=64,
    )
    moment = random.Random(seed).randrange(30, 260)

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        victim = next(each for each in simulation.living() if "server 1" in str(each))
        simulation.at_event(moment, lambda: simulation.world.kill(victim, "it was killed."))
        trainer.fit(steps=16, progress=False)
        assert [event.kind for event in trainer.stats().events] == ["recovered"]

    found, _ = simulated(task, 2, strategy, act, seed=seed)
    undisturbed, _ = simulated(task, 2, strategy, lambda t, _: t.fit(steps=16, progress=False))
    assert same_bits(found, undisturbed)


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("settings", "least"), [({"quorum": 3}, 0.9), ({"quorum": 1}, 0.95), ({"pace": "speed"}, 0.95)]
)
def test_a_slow_worker_holds_up_nobody(settings: dict[str, Any], least: float) -> None:
    task, seconds = deep_task("momentum", 9000), [0.1, 0.1, 0.1, 0.5]
    strategy = LocalStrategy(sync_every=40, fragments=4, num_servers=1, **settings)
    create, ends = timed(task, seconds, lambda: system().now())
    simulated(task, 4, strategy, lambda t, _: t.fit(steps=40, progress=False), create)
    begin, end = max(each[12] for each in ends), min(each[-1] for each in ends)
    done = sum(begin < at <= end for each in ends for at in each)
    assert done >= least * sum((end - begin) / each for each in seconds)


@pytest.mark.few(1)
@pytest.mark.parametrize("delay", [0, 1])
def test_a_checkpoint_in_the_middle_of_a_cycle_goes_on_exactly(delay: int, tmp_path: Path) -> None:
    task = deep_task("adam")
    strategy = LocalStrategy(
        sync_every=8,
        fragments=4,
        quorum=2,
        grace=50.0,
        num_servers=2,
        replication=2,
        outer_momentum=0.9,
        delayed_nesterov=2,  # some fragments' buffers are saved half full
        blend=0.25,
        delay=delay,
    )
    whole, _ = simulated(task, 2, strategy, lambda t, _: t.fit(steps=9, progress=False))

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        trainer.fit(steps=6, progress=False)
        trainer.save(tmp_path / "saved")

    simulated(task, 2, strategy, act)

    def go_on(trainer: DistributedSGD, simulation: Simulation) -> None:
        trainer.restore(tmp_path / "saved")
        trainer.fit(steps=3, progress=False)

    found, log = simulated(task, 2, strategy, go_on)
    assert same_bits(found, whole)
    assert log.commits[0].before == 12


@pytest.mark.full
def test_workers_come_and_go_and_strategies_follow_each_other() -> None:
    task = deep_task("momentum", 96)
    strategy = LocalStrategy(sync_every=8, fragments=4, quorum=2, num_servers=1)
    create, _ = timed(task, [0.1, 0.02, 0.03, 0.3], lambda: 0.0)

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        trainer.fit(steps=7, progress=False)
        trainer.resize(num_workers=4)
        trainer.fit(steps=7, progress=False)
        for other in (
            replace(strategy, fragments=2, quorum=3, grace=0.1, outer_momentum=0.5),
            replace(strategy, pace="speed", delay=1, outer_momentum=0.5, delayed_nesterov=2),
            replace(strategy, fragments=1, outer_momentum=0.5),
            replace(strategy, delay=1, compression="int8"),
            LocalStrategy(sync_every=4, fragments=2, num_servers=1),
            AllreduceStrategy(),
            strategy,
        ):
            trainer.set_strategy(other)
            trainer.fit(steps=3, progress=False)
        trainer.resize(num_workers=2)
        assert trainer.fit(steps=4, progress=False).step == 39
        with pytest.raises(ConfigurationError, match="quorum=2 with num_workers=1"):
            trainer.resize(num_workers=1)

    _, log = simulated(task, 3, strategy, act, create)
    check_samples(log)


@pytest.mark.few(1)
@pytest.mark.parametrize("delay", [0, 1])
def test_a_round_with_infinity_leaves_no_trace_in_later_ones(delay: int) -> None:
    task = deep_task("adam", 60)
    task.data[1][SamplePlan(60, 8, 0).share(2, 1, 4)[0]] = torch.inf
    strategy = LocalStrategy(
        sync_every=4, fragments=2, delay=delay, quorum=1, nonfinite="skip", num_servers=1
    )
    cluster = run_rounds(task, 2, 9, strategy, shuffle=3)
    log, found = cluster.log(), cluster.weights()
    assert sum(commit.skipped for commit in log.commits) == 1
    assert all(bool(value.isfinite().all()) for value in found.values())
    assert same_bits(replay(log, task.creator()), found)


def test_a_push_carries_one_fragment() -> None:
    task = deep_task("adam", 600)
    whole = run_rounds(task, 2, 2, LocalStrategy(sync_every=8, quorum=2, num_servers=1)).step(2)
    parts = run_rounds(
        task, 2, 2, LocalStrategy(sync_every=8, fragments=4, quorum=2, num_servers=1)
    )
    results = parts.step(8)
    for name in ("bytes_pushed", "bytes_pulled"):
        once = [getattr(result, name) for result in whole]
        assert [4 * getattr(result, name) for result in results] == once * 4


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("pace", ["equal", "speed"])
@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize(("fragments", "delay"), [(2, 2), (1, 3)])
def test_workers_compute_on_before_their_push_is_committed(
    fragments: int, delay: int, spoilt: bool, pace: str, seed: int
) -> None:
    """And the log has all that this depends on; a round that is left out is begun anew by who went on from it."""
    task = deep_task("adam", 300)
    if spoilt:
        task.data[1][SamplePlan(300, 24, 0).share(2, 3, 12)[0]] = torch.inf
    strategy = LocalStrategy(
        sync_every=4 * fragments,
        fragments=fragments,
        delay=delay,
        quorum=2,
        pace=pace,
        nonfinite="skip",
        num_servers=1,
    )
    create, ends = timed(task, [0.1, 0.1, 0.17], lambda: system().now())
    found, log = simulated(
        task, 3, strategy, lambda t, _: t.fit(steps=16, progress=False), create, seed
    )
    assert sum(commit.skipped for commit in log.commits) == spoilt
    check_samples(log)
    assert same_bits(replay(log, task.creator()), found)
    if not spoilt:
        assert difference(found, by_hand(task, log, strategy)) < 1e-12
    # a round of two takes a trip to the server and back, in which all go on; who gets another number of batches may
    # wait for that round
    waits = [b - a >= 0.19 for each in ends for a, b in itertools.pairwise(each[12:36])]
    assert sum(waits) <= (2 if pace == "speed" else 0)


@pytest.mark.long
@seeds(10)
def test_whatever_dies_each_sample_counts_once_and_the_log_has_the_bits(seed: int) -> None:
    """Any settings together, workers of unequal speed, of which some die; also a server whose chunks have copies."""
    draw = random.Random(seed)
    fragments = draw.choice([1, 2, 4])
    of_share = draw.choice([2, 3])
    workers = draw.choice([2, 3])
    strategy = LocalStrategy(
        sync_every=of_share * fragments,
        fragments=fragments,
        delay=draw.randrange(of_share),
        blend=draw.choice([0.0, 0.25]),
        quorum=draw.choice([None, 1, workers - 1, workers]),
        pace="speed",
        num_servers=2,
        replication=draw.choice([1, 2]),
    )
    if strategy.quorum is not None:
        grace = draw.choice([None, 0.2])
        strategy = replace(strategy, grace=grace, pace=draw.choice(["equal", "speed"]))
    task = deep_task("adam", 150)
    seconds = [draw.choice([0.05, 0.1, 0.3]) for _ in range(workers)]
    create, _ = timed(task, seconds, lambda: 0.0)
    victims = [f"worker {draw.randrange(workers)}" for _ in range(draw.randrange(3))]
    server_dies = strategy.replication == 2 and draw.random() < 0.5
    resizes = draw.random() < 0.3

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        def kill(name: str) -> None:
            living = (each for each in simulation.living() if name in str(each))
            if (victim := next(living, None)) is not None:
                simulation.world.kill(victim, "it was killed.")

        at = 0
        for name in [*victims, *(["server 1"] if server_dies else [])]:
            at += draw.randrange(50, 300)
            simulation.at_event(at, lambda name=name: kill(name))
        assert trainer.fit(steps=12, progress=False).step == 12
        if resizes:
            trainer.resize(num_workers=workers + 1)
        assert trainer.fit(steps=12, progress=False).step == 24

    if resizes:
        create, _ = timed(task, [*seconds, 0.1], lambda: 0.0)
    found, log = simulated(task, workers, strategy, act, create, seed)
    check_samples(log)
    if len(log.parts) == 1:
        assert same_bits(replay(log, task.creator()), found)
        assert difference(found, by_hand(task, log, strategy)) < 1e-12
