"""Workers of different speeds, scripted in rounds of virtual time: who waits for whom, and who does not."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.messages.driver import Result
from steepest.core.messages.message import Kind, Message, server_peer
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster, InProcessTransport
from tests.modes import MODES, check, counters, make, mode, shares
from tests.random_examples import SEEDS, runs
from tests.reference import Task, samples, sgd

TASK = Task(optimizer=sgd(momentum=0.9), data=samples(36))
ROUNDS = 6000
SLOW, FAST = 200, 20


def transport(cluster: InProcessCluster, worker: int) -> InProcessTransport:
    found = cluster.worker_routers[worker].transport
    assert isinstance(found, InProcessTransport)
    return found


class Watch:
    """Counts commits as the coordinator sends them, and holds every GRANT against the bound."""

    def __init__(
        self, cluster: InProcessCluster, lead: int | None, scripts: list[list[int]]
    ) -> None:
        self.clocks = dict.fromkeys(range(len(cluster.workers)), 0)
        self.leads: list[int] = []
        self._cluster = cluster
        self._lead = lead
        self._scripts = [cycle(script) for script in scripts]
        cluster.network.filter = self

    def __call__(self, message: Message) -> list[Message]:
        if message.kind is Kind.COMMIT and message.target == server_peer(1):
            for worker, _, _ in message.body.pushes:
                self.clocks[worker] += 1
        if message.kind in (Kind.GRANT, Kind.LEASE):
            assert message.target is not None
            worker = message.target.index
            transport(self._cluster, worker).every = next(self._scripts[worker])
            self.leads.append(self.clocks[worker] - min(self.clocks.values()))
            if self._lead is not None:
                assert self.leads[-1] <= self._lead
        return [message]


SPEEDS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=2, max_size=4)


@pytest.mark.long
@runs(25)
@given(scripts=SPEEDS, lead=st.integers(0, 3), shuffle=st.none() | SEEDS)
def test_nobody_is_further_ahead_than_the_bound_and_nobody_waits_for_ever(
    scripts: list[list[int]], lead: int, shuffle: int | None
) -> None:
    strategy = ParameterServerStrategy(mode="ssp", staleness=lead, num_servers=2, chunk_bytes=128)
    workers = len(scripts)
    cluster = InProcessCluster(
        TASK.creator(),
        num_workers=workers,
        strategy=strategy,
        shuffle=shuffle,
        keep_log=True,
        step_timeout=1e9,
    )
    watch = Watch(cluster, lead, scripts)
    results = cluster.step(5) + cluster.step(3)
    assert [type(result) for result in results] == [Result] * 8
    log = check(cluster, TASK)
    assert sorted(shares(log)) == list(range(8 * workers))
    assert Counter(watch.clocks) == Counter(commit.pushes[0].worker for commit in log.commits)
    assert max(watch.clocks.values()) - min(watch.clocks.values()) <= lead + 1


@pytest.mark.few(2)
@pytest.mark.parametrize("lead", [0, 1, 4])
def test_the_bound_is_reached_by_who_is_faster(lead: int) -> None:
    strategy = ParameterServerStrategy(mode="ssp", staleness=lead, num_servers=2, chunk_bytes=128)
    cluster = InProcessCluster(TASK.creator(), num_workers=3, strategy=strategy)
    watch = Watch(cluster, lead, [[1], [1], [50]])
    cluster.step(10)
    assert max(watch.leads) == lead


@pytest.mark.long
@runs(12)
@given(scripts=SPEEDS, name=st.sampled_from(["sync", "backup", "async", "async-drop"]))
def test_every_mode_ends_its_steps_at_any_speeds(scripts: list[list[int]], name: str) -> None:
    cluster = make(name, TASK, len(scripts), step_timeout=1e9)
    watch = Watch(cluster, None, scripts)
    if name == "sync":  # whose workers get no GRANT of their own
        for worker, script in enumerate(scripts):
            transport(cluster, worker).every = script[0]
    results = cluster.step(6)
    assert [type(result) for result in results] == [Result] * 6
    log = check(cluster, TASK)
    assert Counter(watch.clocks) == Counter(
        push.worker for commit in log.commits for push in commit.pushes
    )


# -- one of three is ten times slower -------------------------------------------------------------


def pace(name: str, durations: list[int], **settings: Any) -> tuple[int, dict[int, int], list[int]]:
    """Updates in so many rounds by workers whose gradients take so many rounds each; by whom, of which shares."""
    strategy = mode(name, 2, chunk_bytes=1 << 20, **settings)
    cluster = InProcessCluster(
        TASK.creator(),
        num_workers=len(durations),
        strategy=strategy,
        keep_log=True,
        step_timeout=1e9,
    )
    watch = Watch(cluster, None, [[1]] * len(durations))

    def latency(message: Message) -> int:
        assert message.source is not None
        return durations[message.source.index] if message.kind in (Kind.PUSH, Kind.REPORT) else 0

    cluster.network.latency = latency
    cluster.client.ask(10_000, True)
    cluster.network.run_until(lambda: cluster.network.rounds >= ROUNDS, "so many rounds")
    if name.startswith("ssp"):
        assert max(watch.leads) == MODES[name].staleness
    return counters(cluster)["committed"], dict(watch.clocks), shares(cluster.log())


@pytest.mark.long
def test_asynchronous_training_hardly_notices_a_slow_worker() -> None:
    healthy, *_ = pace("async", [FAST, FAST])
    alone, *_ = pace("async", [SLOW])
    updates, by, _ = pace("async", [FAST, FAST, SLOW])
    assert healthy > 200
    assert alone > 10
    assert abs(updates - (healthy + alone)) <= 0.1 * healthy
    assert by[0] + by[1] >= 0.9 * healthy
    assert by[2] >= 0.8 * alone


@pytest.mark.long
def test_synchronous_training_falls_to_the_pace_of_the_slowest() -> None:
    healthy, *_ = pace("sync", [FAST, FAST])
    alone, *_ = pace("sync", [SLOW])
    versions, by, _ = pace("sync", [FAST, FAST, SLOW])
    assert healthy > 100
    assert versions <= 1.1 * alone
    assert versions <= 0.2 * healthy
    assert len(set(by.values())) == 1


@pytest.mark.full
@pytest.mark.long
def test_a_backup_worker_keeps_the_pace_of_the_healthy() -> None:
    healthy, *_ = pace("sync", [FAST, FAST])
    versions, by, committed = pace("backup", [FAST, FAST, SLOW])
    assert versions >= 0.9 * healthy
    assert set(range(max(committed) - 3)) <= set(
        committed
    )  # others take the samples of who is late at once
    assert by[0] + by[1] >= 1.8 * versions


@pytest.mark.parametrize("name", ["ssp-0", "ssp-2"])
def test_under_a_bound_the_slowest_sets_the_pace_and_others_stay_near(name: str) -> None:
    alone, *_ = pace("async", [SLOW])
    updates, by, _ = pace(name, [FAST, FAST, SLOW])
    lead = MODES[name].staleness
    assert lead is not None
    assert by[2] <= 1.1 * alone
    assert max(by.values()) - by[2] in (lead, lead + 1)
    assert 3 * by[2] <= updates <= 3 * by[2] + 2 * (lead + 1)


@pytest.mark.full
@pytest.mark.long
def test_stale_gradients_of_a_slow_worker_are_dropped_and_cost_the_healthy_nothing() -> None:
    healthy, *_ = pace("async-drop", [FAST, FAST], staleness=3)
    updates, by, committed = pace("async-drop", [FAST, FAST, SLOW], staleness=3)
    assert healthy > 200
    assert by[2] == 0
    assert abs(updates - healthy) <= 0.1 * healthy
    # nor do its samples wait for ever: others take what it could not bring in
    assert set(range(max(committed) - 60)) <= set(committed)
