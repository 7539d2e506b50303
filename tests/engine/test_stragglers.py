"""Who is slow is told: how much, and since when."""

from __future__ import annotations

import pytest

from steepest.core.protocol.commit_state import CommitHistory
from steepest.observe.results import Straggler, stragglers
from tests.modes import counters, make, trained


def take(history: CommitHistory, timings: dict[int, dict[str, float]], step: int) -> None:
    for worker, each in timings.items():
        history.add_timings(worker, each, step)


def told(history: CommitHistory) -> tuple[Straggler, ...]:
    found = history.counters()
    return stragglers(dict(found["paces"]), dict(found["slow"]))


def test_who_takes_over_twice_as_long_as_the_others_is_a_straggler_until_it_does_not() -> None:
    history = CommitHistory()
    for step in range(10):
        take(history, {worker: {"compute": 0.1} for worker in range(4)}, step)
    assert told(history) == ()
    for step in range(10, 40):
        take(history, {0: {"compute": 0.1}, 1: {"compute": 0.5}, 2: {"compute": 0.1}, 3: {}}, step)
    ((worker, factor, since),) = told(history)
    assert (worker, round(factor, 2)) == (1, 5.0)
    assert since == 12  # a running mean: the second slow step
    for step in range(40, 60):
        take(history, {1: {"compute": 0.1}}, step)
    assert told(history) == ()


def test_a_worker_alone_is_no_straggler() -> None:
    history = CommitHistory()
    take(history, {0: {"compute": 1.0}}, 0)
    assert told(history) == ()
    assert history.paces == {0: 1.0}


@pytest.mark.parametrize("name", ["sync", "async"])
def test_the_coordinator_keeps_the_pace_of_every_worker(name: str) -> None:
    cluster = make(name)
    results = trained(cluster, 9)
    assert {result.samples for result in results} > {1}, "in no step a worker had no samples"
    assert all((result.timings or {})["compute"] >= 0 for result in results)
    paces = dict(counters(cluster)["paces"])
    assert paces.keys() == {0, 1, 2}
    assert all(pace > 0 for pace in paces.values())
