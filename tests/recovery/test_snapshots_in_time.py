"""When copies of a job are asked for, and what becomes of one that came too late: on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steepest import FailureConfig, RunConfig
from steepest.core.engine.client import Position
from steepest.core.engine.job import Job
from steepest.core.engine.shared_state import SharedState
from steepest.core.messages.message import Peer, worker_peer
from steepest.core.tensors.dtypes import Tensors
from steepest.errors import DeadlineError, PeerLostError
from steepest.runtime.state import snapshots
from steepest.runtime.state.job_state import JobState
from steepest.runtime.state.snapshots import Snapshots
from steepest.runtime.worker_state import WorkerState
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.testing import InProcessCluster
from tests.hand_moved_clock import HandMovedClock
from tests.recovery.snapshot_kinds import BUFFERS
from tests.reference import Task


def own_state(seconds: float) -> WorkerState:
    return WorkerState([Tensors()], None, seconds)


class Driver:
    """What `Snapshots` uses of a job; futures, workers' answers and the clock are set by the test."""

    def __init__(
        self, clock: HandMovedClock, monkeypatch: pytest.MonkeyPatch, task: Task, every: int | None
    ) -> None:
        config = AllreduceStrategy()
        self.clock = clock
        self.owner = SimpleNamespace(  # whose waits are over at once
            attend=lambda seconds, calls, number: True,
            is_mine=True,
        )
        self.asked: list[tuple[int, Future[SharedState]]] = []  # versions
        self.workers: list[dict[str, Any]] = []  # calls
        self.versions: list[int | None] = []  # of these calls
        self.position = Position(1, 0)
        self.run_config = RunConfig(failure=FailureConfig(snapshot_every=every))
        self.job: Job = InProcessCluster(task.creator(), num_workers=2, strategy=config).job
        self.actors = {worker_peer(index): object() for index in range(2)}
        self.awaited: set[Peer] = set()
        self.client = SimpleNamespace(read=self._read, position=self.position)
        self.fails = False
        fake = SimpleNamespace(
            wait=lambda calls, seconds: [call for call in calls if call],
            get=lambda calls: [call["state"] for call in calls],
            call=lambda actor, method, *arguments: self._call(*arguments),
        )
        monkeypatch.setattr(snapshots, "runtime", lambda: fake)
        self.snapshots = Snapshots(self, self)  # type: ignore[arg-type]

    def _read(self, what: str, at: int, options: Any) -> Future[SharedState]:
        assert what == "state"
        self.asked.append((at, Future()))
        if self.fails:
            self.asked[-1][1].set_exception(PeerLostError("a server is gone"))
        return self.asked[-1][1]

    def _call(self, generation: int, version: int | None, step: int) -> dict[str, Any]:
        self.workers.append({})
        self.versions.append(version)
        return self.workers[-1]

    def on_router(self, function: Callable[[], Any]) -> Any:
        return function()

    def capture(self, found: SharedState, workers: Any) -> JobState:
        return SimpleNamespace(shared=found, workers=workers, job=self.job)  # type: ignore[return-value]

    def be_at(self, version: int, after: float = 0.0) -> None:
        """Commits up to a version, and lets the driver look for a snapshot."""
        self.clock.seconds += after
        self.client.position = Position(1, version)
        self.snapshots.remember()

    def answer(self, version: int, seconds: float = 0.0, *states: WorkerState | None) -> None:
        """Has the last request answered."""
        for call, state in zip(self.workers[-2:], states, strict=False):
            call["state"] = state
        found = SharedState(version, torch.empty(0), seconds=seconds)
        self.asked[-1][1].set_result(found)


def test_a_hundred_times_as_long_as_a_snapshot_took_passes_before_the_next(
    clock: HandMovedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(clock, monkeypatch, Task(), None)
    driver.snapshots.begin()
    driver.clock.seconds += 3.0  # of waiting for servers, which costs nothing
    driver.answer(0, 0.25)
    driver.be_at(5)
    assert driver.snapshots.taken is not None
    driver.be_at(90, after=49.0)
    assert len(driver.asked) == 1
    driver.be_at(95, after=2.0)
    assert [at for at, _ in driver.asked] == [0, 0], "workers have nothing of their own"
    assert not driver.workers
    driver.answer(95)  # in no time
    driver.be_at(95)
    driver.be_at(96, after=0.2)
    assert len(driver.asked) == 2
    driver.be_at(97, after=0.1)
    assert len(driver.asked) == 3


def test_snapshots_of_large_tables_are_told_of_once(
    clock: HandMovedClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(clock, monkeypatch, Task(), 1)
    value = torch.empty(3 << 30, dtype=torch.uint8, device="meta")
    for version in (1, 2):
        driver.be_at(version, after=2.0)
        records = [(0, {"name": "tables/0"}, value)]
        driver.asked[-1][1].set_result(SharedState(version, torch.empty(0), records))
        assert driver.snapshots.taken is not None
    assert caplog.text.count("3.2 GB of the driver's memory") == 1
    assert "replication=2" in caplog.text


def test_what_workers_take_to_copy_their_own_counts_too(
    clock: HandMovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(clock, monkeypatch, BUFFERS, None)
    driver.snapshots.begin()
    driver.clock.seconds += 3.0  # of waiting for a version, which costs nothing
    driver.answer(0, 0.1, own_state(0.1), own_state(0.2))
    driver.be_at(1)
    assert driver.snapshots.taken is not None
    driver.be_at(2, after=39.0)
    assert len(driver.asked) == 1
    driver.be_at(3, after=2.0)
    assert len(driver.asked) == 2
    assert driver.asked[-1][0] > 3 + 1, "workers learn of it before they are there"


def test_workers_that_were_past_the_version_are_told_earlier_the_next_time(
    clock: HandMovedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(clock, monkeypatch, BUFFERS, 1)
    driver.snapshots.begin()
    driver.answer(0, 0.0, own_state(0.0), own_state(0.0))
    driver.be_at(100, after=1.0)
    ahead = []
    for version in (200, 300, 400):
        at = driver.asked[-1][0]
        ahead.append(at - (version - 100))
        driver.answer(at, 0.0, own_state(0.0), None)
        driver.be_at(version - 1)
        driver.be_at(version, after=1.0)
    assert ahead[1] > ahead[0]
    assert ahead[2] > ahead[1]
    taken = driver.snapshots.taken
    assert taken is not None
    assert taken.shared.version == 0, "nothing of these was kept"
    at = driver.asked[-1][0]
    driver.answer(at + 1, 0.0, own_state(0.0), own_state(0.0))  # of servers that were past it
    driver.be_at(401)
    assert driver.snapshots.taken is taken


def test_a_copy_of_another_job_or_of_a_state_that_was_replaced_is_not_kept(
    clock: HandMovedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(clock, monkeypatch, Task(), None)
    driver.snapshots.begin()
    driver.answer(0)
    driver.snapshots.forget()
    assert driver.snapshots.taken is None
    driver.snapshots.begin()
    driver.answer(0)
    assert driver.snapshots.taken is not None
    driver.be_at(3, after=10.0)
    driver.job = InProcessCluster(Task().creator(), num_workers=2).job
    driver.answer(3)
    assert driver.snapshots.taken is not None
    assert driver.snapshots.taken.shared.version == 0
    driver.be_at(4, after=10.0)
    driver.asked[-1][1].set_exception(PeerLostError("a server is gone"))
    assert driver.snapshots.taken.shared.version == 0


def test_rows_that_only_one_disk_has_are_copied_without_waiting_for_the_pace(
    clock: HandMovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, keepers = Driver(clock, monkeypatch, Task(), None), set[object]()
    copies = SimpleNamespace(advance=lambda: True, failed=None, keepers=keepers)
    monkeypatch.setattr(snapshots, "keeps_on_disk", lambda cluster: True)
    monkeypatch.setattr(snapshots, "second_copies", lambda *about: copies)
    monkeypatch.setattr(snapshots, "drop_calls", lambda calls: None)
    keepers.update(driver.actors.values())
    driver.snapshots.begin()
    driver.clock.seconds += 10.0
    driver.answer(0)
    driver.be_at(1, after=1.0)
    assert len(driver.asked) == 1, "the pace: a hundred times ten seconds"
    driver.awaited = {worker_peer(1)}  # it has died, and has no successor yet
    driver.be_at(1)
    assert len(driver.asked) == 2
    driver.actors[worker_peer(1)], driver.awaited = object(), set()
    driver.asked[-1][1].set_exception(PeerLostError("a copy was on its way to a dead process"))
    driver.be_at(1)
    assert len(driver.asked) == 3, "of other processes than the last"
    driver.asked[-1][1].set_exception(DeadlineError("no disk has room"))
    driver.be_at(2)
    driver.be_at(2, after=0.9)
    assert len(driver.asked) == 3, "the pause after a failure that no death explains"
    driver.be_at(3, after=0.2)
    assert len(driver.asked) == 4


def test_the_copy_of_the_state_before_stays_until_that_of_the_new_one_has_come(
    clock: HandMovedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(clock, monkeypatch, Task(), None)
    driver.snapshots.begin()
    driver.answer(0)
    before = driver.snapshots.taken
    driver.fails = True
    assert not driver.snapshots.renew(lambda: None)
    assert driver.snapshots.taken is before
    driver.fails = False
    assert driver.snapshots.renew(lambda: driver.answer(7))
    assert driver.snapshots.taken is not None
    assert driver.snapshots.taken.shared.version == 7


def test_workers_that_have_begun_a_void_step_give_a_copy_of_what_stands_after_it(
    clock: HandMovedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step may last longer than five heartbeats; nobody waits longer than the deadline of a step."""
    driver = Driver(clock, monkeypatch, BUFFERS, None)
    config = driver.run_config
    own, most = own_state(0.0), config.deadlines.step
    assert 5 * config.failure.heartbeat < most

    def wait() -> None:
        driver.clock.seconds += most / 10
        if driver.clock.seconds > 100.0 + 0.8 * most:
            driver.answer(0, 0.0, own, own)

    assert driver.snapshots.renew(wait)
    assert driver.versions == [None, None], "no version that a worker may be past"
    taken, began = driver.snapshots.taken, driver.clock.seconds
    assert taken is not None
    assert not driver.snapshots.renew(
        lambda: setattr(driver.clock, "seconds", driver.clock.seconds + most / 10)
    )
    assert driver.snapshots.taken is taken
    assert driver.clock.seconds < began + 1.2 * most


@pytest.mark.parametrize("every", [0, None])
def test_none_is_asked_for_where_none_is_wanted(
    every: int | None, clock: HandMovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(clock, monkeypatch, Task(), every)
    driver.snapshots.ensure() if every == 0 else driver.snapshots.begin()
    driver.be_at(5, after=10.0)
    assert len(driver.asked) == (0 if every == 0 else 1)
