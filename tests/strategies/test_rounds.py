"""Local SGD in rounds of a quorum of the workers' changes, against the same in plain torch."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from steepest import DistributedSGD
from steepest.core.data.sampler import SamplePlan
from steepest.core.system import system
from steepest.errors import ConfigurationError
from steepest.strategies.delayed_nesterov import DelayedNesterov
from steepest.strategies.local import LocalStrategy
from steepest.testing import InProcessCluster, replay
from tests.modes import check_counts
from tests.pairs import grid
from tests.reference import Task, difference, same_bits, samples
from tests.rounds import OPTIMIZERS, by_hand, run_rounds, simulated, timed
from tests.simulation.run import Simulation


def task_of(optimizer: str, count: int = 50) -> Task:
    return Task(optimizer=OPTIMIZERS[optimizer], data=samples(count), batch_size=2)


@pytest.mark.few(1)
@grid(
    optimizer=OPTIMIZERS,
    size=[(1, 1, 1), (2, 1, 1), (3, 1, 2), (3, 2, 1), (3, 1, 3)],
    grace=[None, 5.0],
    servers=[1, 2],
    shuffle=[None, 1, 2],
    delayed=[None, 3],
)
def test_equals_the_same_by_hand(
    optimizer: str,
    size: tuple[int, int, int],
    grace: float | None,
    servers: int,
    shuffle: int,
    delayed: int | None,
) -> None:
    workers, devices, quorum = size
    task = task_of(optimizer)
    strategy = LocalStrategy(
        sync_every=3,
        quorum=quorum,
        grace=grace,
        outer_lr=0.4,
        outer_momentum=0.5,
        nesterov=delayed is None,
        delayed_nesterov=delayed,
        num_servers=servers,
        chunk_bytes=48,
    )
    cluster = run_rounds(task, workers, 12, strategy, devices_per_worker=devices, shuffle=shuffle)
    log, found = cluster.log(), cluster.weights()
    assert difference(found, by_hand(task, log, strategy)) < 1e-12
    assert same_bits(replay(log, task.creator()), found)
    check_counts(cluster, log)
    shares = sorted(push.share for commit in log.commits for push in commit.pushes)
    assert shares == list(range(12 * workers))


@pytest.mark.few(1)
@grid(
    size=[(1, 1), (2, 1), (3, 1), (3, 2)],
    quorum=[None, 1],
    shuffle=[1, 2],
    paces=[(1.0, 1.0, 1.0), (0.1, 0.3, 0.5), (3.0, 1.0, 2.0)],
)
def test_each_computes_as_much_as_its_pace_allows(
    size: tuple[int, int], quorum: int | None, shuffle: int, paces: tuple[float, ...]
) -> None:
    """The paces are told as the workers' reports come; the log has who computed what."""
    workers, devices = size
    task = replace(task_of("adam", 70), learning_rate=lambda step: 0.02 / (1 + step))
    strategy = LocalStrategy(
        sync_every=5, pace="speed", quorum=quorum, num_servers=2, chunk_bytes=48
    )
    cluster = InProcessCluster(
        task.creator(),
        num_workers=workers,
        devices_per_worker=devices,
        strategy=strategy,
        keep_log=True,
        shuffle=shuffle,
    )
    cluster.coordinator.state.history.paces = told = dict(enumerate(paces[:workers]))
    cluster.coordinator.state.history.add_timings = lambda *_: None  # type: ignore[method-assign]
    results = cluster.step(12)
    assert [result.step for result in results] == list(range(1, 13))
    log, found = cluster.log(), cluster.weights()
    pushes = [push for commit in log.commits for push in commit.pushes]
    fastest = min(told.values())
    for worker, pace in told.items():
        counts = [push.length for push in pushes if push.worker == worker]
        assert max(counts) == round(5 * fastest / pace)
    assert sorted(s for push in pushes for s in push.shares) == list(range(12 * workers * 5))
    assert pickle.loads(pickle.dumps(pushes)) == pushes
    assert difference(found, by_hand(task, log, strategy)) < 1e-12
    assert same_bits(replay(log, task.creator()), found)


@pytest.mark.long
def test_with_all_changes_in_each_round_a_slow_worker_holds_up_nobody() -> None:
    """Once its pace is known: it computes fewer batches."""
    task, seconds = task_of("momentum", 9000), [0.1, 0.1, 0.1, 0.5]
    strategy = LocalStrategy(sync_every=50, pace="speed", num_servers=1)
    create, ends = timed(task, seconds, lambda: system().now())
    _, log = simulated(task, 4, strategy, lambda t, _: t.fit(steps=20, progress=False), create)
    known = [commit for commit in log.commits if {p.worker for p in commit.pushes} == {0, 1, 2, 3}]
    assert len(known) > 15
    assert [p.length for p in known[0].pushes] == [50] * 4
    assert all([p.length for p in commit.pushes] == [50, 50, 50, 10] for commit in known[1:])
    begin = sorted(ends[0])[50]  # all have computed for the first time
    begin, end = max(begin, sorted(ends[3])[50]), min(each[-1] for each in ends)
    done = sum(begin < at <= end for each in ends for at in each)
    assert done >= 0.95 * sum((end - begin) / each for each in seconds)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("seconds", "quorum", "least"),
    [
        ([0.1, 0.1, 0.1, 0.5], 1, 0.95),
        ([0.1, 0.1, 0.1, 0.5], 3, 0.9),  # whom the slow one overtakes waits for the next round
        ([0.2, 0.04], 1, 0.95),
    ],
)
def test_one_slow_worker_holds_up_nobody(seconds: list[float], quorum: int, least: float) -> None:
    """All together compute nearly what each would alone; synchronously they would not."""
    task = task_of("momentum", 3000)
    shares = []
    for steps, needed in ((40, quorum), (12, None)):
        strategy = LocalStrategy(sync_every=5, quorum=needed, num_servers=1)
        create, ends = timed(task, seconds, lambda: system().now())

        def act(trainer: DistributedSGD, simulation: Simulation, steps: int = steps) -> None:
            trainer.fit(steps=steps, progress=False)

        _, log = simulated(task, len(seconds), strategy, act, create)
        assert {push.worker for commit in log.commits for push in commit.pushes} == set(
            range(len(seconds))
        )
        begin, end = max(e[0] for e in ends), min(e[-1] for e in ends)
        done = sum(begin < at <= end for each in ends for at in each)
        shares.append(done / sum((end - begin) / each for each in seconds))
    assert shares[1] < 0.6 < least <= shares[0]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("grace", [None, 0.4])
def test_a_late_worker_that_dies_is_replaced_while_the_others_go_on(
    workers: int, grace: float | None
) -> None:
    task = task_of("adam", 400)
    strategy = LocalStrategy(sync_every=4, quorum=workers - 1, grace=grace, num_servers=2)
    create, _ = timed(task, [0.3, *[0.05] * (workers - 1)], lambda: 0.0)

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        victim = next(each for each in simulation.living() if "worker 0" in str(each))
        simulation.at_event(150, lambda: simulation.world.kill(victim, "it was killed."))
        trainer.fit(steps=30, progress=False)
        assert [event.kind for event in trainer.stats().events] == ["replaced"]

    found, log = simulated(task, workers, strategy, act, create)
    pushes = [push for commit in log.commits for push in commit.pushes]
    assert {push.incarnation for push in pushes if push.worker == 0} == {0, 1}
    assert sorted(push.share for push in pushes) == list(range(30 * workers))
    assert max(max(commit.staleness) for commit in log.commits) > 0
    assert same_bits(replay(log, task.creator()), found)
    assert difference(found, by_hand(task, log, strategy)) < 1e-12


def test_a_round_with_infinity_leaves_no_trace() -> None:
    task = task_of("adam", 60)
    task.data[1][SamplePlan(60, 16, 0).share(1, 5, 8)[0]] = torch.inf
    strategy = LocalStrategy(sync_every=4, quorum=1, nonfinite="skip", num_servers=1)
    cluster = run_rounds(task, 2, 6, strategy, shuffle=3)
    log, found = cluster.log(), cluster.weights()
    assert sum(commit.skipped for commit in log.commits) > 0
    assert same_bits(replay(log, task.creator()), found)
    assert difference(found, by_hand(task, log, strategy)) < 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quorum": 0, "num_servers": 1}, "quorum=0"),
        ({"quorum": 2}, "quorum=2 without servers: .* give num_servers=1, say"),
        ({"grace": 1.0}, "grace=1.0 without quorum: .* give quorum too, or leave grace out"),
        ({"delayed_nesterov": 0, "outer_momentum": 0.9}, "delayed_nesterov=0"),
        ({"delayed_nesterov": 2}, "outer_momentum=0.0: .* give outer_momentum, 0.9 say"),
        (
            {"delayed_nesterov": 2, "outer_momentum": 0.9, "nesterov": True},
            "nesterov=True .* leave nesterov out",
        ),
        ({"pace": "fast"}, "pace='fast'"),
        ({"pace": "speed"}, "pace='speed' without servers: .* give num_servers=1, say"),
        ({"grace": 0.0, "quorum": 1, "num_servers": 1}, "grace=0.0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LocalStrategy(**settings)


def test_delayed_nesterov_of_each_update_is_nesterovs() -> None:
    """In torch's form, whose momentum is applied before it moves."""
    start = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, torchs = (nn.Parameter(start.clone()) for _ in range(2))
    both = (
        (ours, DelayedNesterov([ours], 0.3, 0.9, 1)),
        (torchs, torch.optim.SGD([torchs], 0.3, momentum=0.9, nesterov=True)),
    )
    for _ in range(6):
        for parameter, optimizer in both:
            optimizer.zero_grad()
            (parameter.pow(3) / 3).sum().backward()
            optimizer.step()
    assert difference({"": ours.detach()}, {"": torchs.detach()}) < 1e-14


def test_a_servers_death_loses_nothing_of_delayed_nesterov() -> None:
    task = task_of("momentum", 200)
    strategy = LocalStrategy(
        sync_every=2, quorum=1, num_servers=2, replication=2, outer_momentum=0.8, delayed_nesterov=5
    )
    create, _ = timed(task, [0.1, 0.13], lambda: 0.0)

    def act(trainer: DistributedSGD, simulation: Simulation) -> None:
        trainer.fit(steps=7, progress=False)
        victim = next(each for each in simulation.living() if "server 1" in str(each))
        simulation.world.kill(victim, "it was killed.")
        trainer.fit(steps=7, progress=False)
        assert len(trainer.stats().events) == 1

    found, log = simulated(task, 2, strategy, act, create)
    commits = tuple(commit for part in log.parts for commit in part.commits)
    assert commits[-1].version == sum(len(commit.pushes) for commit in commits) == 28
    assert (
        difference(found, by_hand(task, replace(log.parts[0], commits=commits), strategy)) < 1e-12
    )


def test_a_quorum_above_the_least_number_of_workers_is_refused() -> None:
    strategy = LocalStrategy(quorum=3, num_servers=1)
    with pytest.raises(ConfigurationError, match="quorum=3 with num_workers=2: .* at most 2"):
        DistributedSGD(task_of("adam").creator(), 2, strategy=strategy)
