"""Copies of a job's state in the driver's memory, for when only dead processes held the newest one."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from steepest.core.engine.client import Client, read_log
from steepest.core.engine.commit_log import Commit
from steepest.core.engine.job import Job
from steepest.core.engine.shared_state import SharedState
from steepest.core.system import system
from steepest.core.tensors.free_memory import free_bytes, warn_if_short
from steepest.errors import DeadlineError, PeerLostError, ShutdownError, SteepestError
from steepest.runtime.calls import drop_calls, raise_remote
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import CallRaisedError, ProcessDiedError, ResultLostError, runtime
from steepest.runtime.owner import Moment, Owner, owned
from steepest.runtime.state.job_state import JobState
from steepest.runtime.state.row_copies import RowCopies, keeps_on_disk, second_copies
from steepest.runtime.state.row_read import ArrivedRows
from steepest.runtime.state.transfer import StateTransfer
from steepest.runtime.worker_state import WorkerState
from steepest.tables.files.saved_rows import TABLES
from steepest.tables.job.row_messages import WRITTEN, RowsToRead

log = logging.getLogger(__name__)

#: A snapshot is taken at most this share of the time, and at most once in so many seconds.
_SHARE = 0.01
_LEAST_SECONDS = 0.25
_PAUSE_SECONDS = 1.0  # from one that has failed to the next
#: Workers are told of a version so long before they come to it; doubled when that was too late.
_NOTICE_SECONDS = 0.05
_MOST_NOTICE_SECONDS = 10.0
_AGAIN_SECONDS = 0.1  # from that to the next try, in which the pace is measured
#: A server copies what may change before it sends any of it, which takes as long as sending.
_COPYING = 2
_LARGE_BYTES = 1 << 30  # of a snapshot, of which the user is told
_HEARTBEATS = 5  # within which a copy of a state that was set is awaited


@dataclass
class _CopyRequest:
    """A copy that was asked for."""

    job: Job
    servers: Future[SharedState]
    workers: Sequence[Any]  # calls that return each one's own state; None if past `version`
    version: int | None  # of all of it; None where workers have no version in common
    read_log: Callable[[], Future[list[Commit]]] | None = None  # since the copy before
    rows: int = 0  # the number under which servers keep rows on disk; 0 where they are sent
    second: Callable[[int, Sequence[str]], RowCopies] | None = None  # has these copied
    log: Future[list[Commit]] | None = None  # asked for when servers have answered
    copies: RowCopies | None = None  # likewise

    def has_come(self) -> bool:
        """Return whether all parts have come, or will not."""
        calls = list(self.workers)
        if not self.servers.done():
            return False
        if self.log is None and self.read_log is not None:
            self.log = self.read_log()
        if self.log is not None and not self.log.done():
            return False
        if self.second is not None and self.copies is None and self.servers.exception() is None:
            self.copies = self.second(self.rows, self._kept_files())
        if self.copies is not None and not self.copies.advance():
            return False
        return len(runtime().wait(calls, 0)) == len(calls)

    def _kept_files(self) -> list[str]:
        """Return the names of the files that servers keep of the rows."""
        written = (r for r in self.servers.result().records if r[1]["key"] == WRITTEN)
        arrived = ArrivedRows.of(self.job.description.layout, written)
        return [file["name"] for file in arrived.files]

    def await_all(self, owner: Owner, seconds: float) -> None:
        """Return when all parts have come, or after a time."""
        until = system().now() + seconds

        def attend(calls: Sequence[Any], number: int | None = None) -> None:
            owner.attend(max(until - system().now(), 0.0), calls=calls, number=number)

        attend([self.servers])
        self.has_come()
        if self.log is not None:
            attend([self.log])
        while self.copies is not None and not self.copies.advance() and system().now() < until:
            attend([*self.copies.calls], 1)
        attend(self.workers)


class Snapshots:
    """Takes, from time to time, a copy of everything that a job's processes hold, while workers train.

    A copy is of one instant: if every worker contributes to each version, workers are told of a
    version that is still to come, and each copies its own state (buffers, residuals of compression,
    its own optimizer's) when it has made that version and before it begins the next step; the
    coordinator orders the servers' part between the same two commits. Under other rules workers have
    no version in common, and each copies its own state between two of its steps at about that time.
    Workers without state of their own are not asked.
    """

    def __init__(self, cluster: Cluster, state: StateTransfer) -> None:
        self.owner = cluster.owner
        self._cluster = cluster
        self._state = state
        self._taken: JobState | None = None
        # the commits that the coordinator's log had, and the client that has read them
        self._commits: list[Commit] = []
        self._reader: Client | None = None
        self._request: _CopyRequest | None = None
        self._due = 0.0  # when the next one may be asked for, see `_may_ask`
        self._asked_of: tuple[Client, set[Any]] | None = None  # for the last one; processes
        self._notice = _NOTICE_SECONDS
        self._costs: deque[float] = deque(maxlen=3)  # of the last snapshots, in seconds
        self._seen = (system().now(), 0)  # when one was asked for last, and the version then
        self._told_of_size = False
        self._number = 0  # of the last snapshot whose rows servers keep on disk
        self._on_disk: list[int] = []  # the number of that which `taken` is a part of, if any
        self._keepers: set[Any] = set()  # the processes that have it
        self._told_of_disk = False
        self._told = False  # whether the user was told that there are none

    @property
    def taken(self) -> JobState | None:
        """The last copy that has come; None before the first, and after `forget`."""
        self._collect()
        return self._taken

    @property
    def _wanted(self) -> bool:
        every = self._cluster.run_config.failure.snapshot_every
        return every != 0 and not self._cluster.job.config.in_driver

    def remember(self) -> None:
        """Ask for a copy if one is due, and keep the one that has come; to be called often."""
        if not self._wanted:
            return
        taken, every = self.taken, self._cluster.run_config.failure.snapshot_every
        if not self._may_ask:
            return
        now, version = system().now(), self._cluster.client.position.version
        if (
            taken is None
            or self._lacks
            or self._is_stale
            or abs(version - taken.shared.version) >= (every or 1)
        ):
            seconds = max(now - self._seen[0], 1e-3)
            pace = max(version - self._seen[1], 0) / seconds  # updates in a second
            self._ask(version + 2 + math.ceil(pace * self._notice))

    def begin(self) -> None:
        """Ask for a copy of the present state if there is none, or perhaps no more; no worker may be training."""
        if not self._wanted:
            return
        if self._lacks and self._may_ask:
            self._ask(self._cluster.client.position.version)

    @property
    def _lacks(self) -> bool:
        """Whether there is no copy, or a process that had rows of the last one on its disk is gone."""
        return self.taken is None or not self._keepers <= self._living()

    @property
    def _is_stale(self) -> bool:
        """Whether the last copy is of another form than the job: steps would be made again in that."""
        if (taken := self._taken) is None:
            return False
        before, job = taken.job, self._cluster.job
        return before.config != job.config or before.shares != job.shares

    @property
    def _may_ask(self) -> bool:
        """Whether a copy may be asked for now: a death or a change ends the pace, and the pause after a failure."""
        cluster = self._cluster
        if self._request is not None or (cluster.awaited and cluster.job.workers_have_state):
            return False  # a dead worker would not answer
        return system().now() >= self._due or self._asked_of != (cluster.client, self._living())

    def _living(self) -> set[Any]:
        """Return the processes with a role, without the dead that are being handled."""
        cluster = self._cluster
        return {actor for peer, actor in cluster.actors.items() if peer not in cluster.awaited}

    @owned(Moment.WHOLE)
    def ensure(self) -> None:
        """Return when there is a copy, or after `heartbeat` seconds; no worker may be training.

        A copy that takes longer, or that a dead process prevents, does not keep training waiting.
        """
        until = system().now() + self._cluster.run_config.failure.heartbeat
        self.begin()
        while self._lacks and (request := self._request) is not None:
            request.await_all(self._cluster.owner, max(until - system().now(), 0.0))
            if not request.has_come():
                return
            self.begin()  # again, if a death has spoilt it

    def ensure_present(self, meanwhile: Callable[[], None]) -> None:
        """Do as `renew`, also under a strategy that needs no copy, unless the last one is of the present state."""
        taken, cluster = self.taken, self._cluster
        if cluster.run_config.failure.snapshot_every == 0:
            return
        here = cluster.job, cluster.client.position.version
        if taken is None or (taken.job, taken.shared.version) != here:
            self._renew(meanwhile)

    def renew(self, meanwhile: Callable[[], None]) -> bool:
        """Take a copy of the state that was set instead of the last one; no worker may be training.

        Returns:
            Whether it has come, within `DeadlineConfig.step` seconds or five times `heartbeat`: a
            worker may be computing a step that is void. If not, the last one is still there.
        """
        self._reader = None  # the coordinator's log begins anew
        return not self._wanted or self._renew(meanwhile)

    def _renew(self, meanwhile: Callable[[], None]) -> bool:
        before, config = self._taken, self._cluster.run_config
        self._ask(self._cluster.client.position.version, stands=True)
        request = self._request
        assert request is not None
        heartbeat = config.failure.heartbeat
        until = system().now() + max(_HEARTBEATS * heartbeat, config.deadlines.step)
        while not request.has_come() and system().now() < until:
            request.await_all(self._cluster.owner, heartbeat / 6)
            meanwhile()
        return self.taken is not before

    def forget(self) -> None:
        """Forget the last copy: another state was set."""
        self._request = self._taken = self._reader = None
        self._keep_rows(0)
        self._due = 0.0

    def _ask(self, version: int, *, stands: bool = False) -> None:
        """Ask servers for their state at a version, and workers that have state of their own.

        Args:
            stands: whether the version is the present one and no step is granted; a step that workers have begun is
                void.
        """
        cluster, job = self._cluster, self._cluster.job
        self._asked_of = cluster.client, self._living()
        together = job.needs_all and not stands
        workers: list[Any] = []
        exactly = None
        if job.workers_have_state:
            exactly = version if together else None
            position = (cluster.client.position.generation, exactly)
            actors = [
                actor for peer, actor in sorted(cluster.actors.items()) if peer.role == "worker"
            ]
            step = job.step_of(version)
            workers = [runtime().call(actor, "own_state", *position, step) for actor in actors]
        kept = keeps_on_disk(cluster)
        self._number += kept
        number = self._number if kept else 0
        options = RowsToRead(keep=number) if kept else None
        servers = cluster.on_router(
            lambda: cluster.client.read("state", exactly or 0, options=options)
        )
        read_log = self._read_log if cluster.run_config.keep_log else None
        second = partial(second_copies, cluster) if kept else None
        self._request = _CopyRequest(job, servers, workers, exactly, read_log, number, second)
        self._seen = (system().now(), cluster.client.position.version)

    def _read_log(self) -> Future[list[Commit]]:
        """Read the new entries of the coordinator's log."""
        cluster, client = self._cluster, self._cluster.client
        if self._reader is not client:  # another coordinator begins another log
            self._reader, self._commits = client, []
        known = len(self._commits)
        commits: Future[list[Commit]]
        try:
            commits = cluster.on_router(lambda: read_log(client, known))
        except (PeerLostError, ShutdownError) as error:  # the job is being put together anew
            commits = Future()
            commits.set_exception(error)
        return commits

    def _collect(self) -> None:
        """Keep the copy that was asked for, or drop its files, when all of it has come or will not."""
        if (request := self._request) is None:
            return
        void = request.job is not self._cluster.job  # its client is gone
        if void or request.has_come():
            self._request = None
            if void or not self._keep(request):
                self._keep_rows(*self._on_disk)

    def _keep(self, request: _CopyRequest) -> bool:
        """Keep a copy if all of it has come, and is of one version; return whether it is kept."""
        now = system().now()
        self._due = now + _PAUSE_SECONDS
        lost = request.servers.cancelled() or request.servers.exception() is not None
        if request.log is not None and self._reader is self._cluster.client:
            lost = lost or request.log.exception() is not None
            if not lost:
                self._commits += request.log.result()
        lost = self._is_disk_at_fault(request) or lost
        if lost or (workers := self._answers(request)) is None:
            return False
        snapshot = request.servers.result()
        own = [each for each in workers if each is not None]
        if len(own) < len(workers) or request.version not in (None, snapshot.version):
            self._due = now + _AGAIN_SECONDS
            self._notice = min(2 * self._notice, _MOST_NOTICE_SECONDS)
            return False
        snapshot.log = list(self._commits) if request.log is not None else None
        self._taken = self._state.capture(snapshot, own)
        self._keep_rows(request.rows)
        self._keepers = set() if request.copies is None else request.copies.keepers
        self._tell_of_size(snapshot)
        if self._cluster.run_config.failure.snapshot_every is not None:
            self._due = now
            return True
        # what it waited for, such as that version, cost nothing
        cost = _COPYING * snapshot.seconds + max((each.seconds for each in own), default=0.0)
        # one that had to wait for a busy process says little of what the others will cost
        self._costs.append(cost)
        self._due = now + max(min(self._costs) / _SHARE, _LEAST_SECONDS)
        return True

    def _keep_rows(self, *numbers: int) -> None:
        """Tell processes to keep only the rows of these snapshots on their disks; 0 is none."""
        known, self._on_disk = self._on_disk, [number for number in numbers if number]
        if known or self._on_disk or self._number:
            actors = dict.fromkeys(self._cluster.actors.values())
            kept = "files.keep_only", self._on_disk, self._number
            drop_calls([runtime().call(actor, "rows", *kept) for actor in actors])

    def _is_disk_at_fault(self, request: _CopyRequest) -> bool:
        """Return whether rows of a snapshot are not on the disks of two processes; log why, once."""
        error = request.servers.exception() if not request.servers.cancelled() else None
        copies = request.copies
        failed = None if copies is None else copies.failed
        if request.rows and isinstance(error, DeadlineError):
            self._tell_of_disk(str(error))
        if isinstance(failed, CallRaisedError):
            self._tell_of_disk(str(failed.cause))
        return failed is not None

    def _tell_of_disk(self, why: str) -> None:
        if not self._told_of_disk:
            log.warning("there is no new snapshot of this job, the last one stays: %s", why)
        self._told_of_disk = True

    def _tell_of_size(self, snapshot: SharedState) -> None:
        """Log, once, that copies take much of the driver's memory, or more than there is."""
        if self._told_of_size:
            return
        values = [(description["name"], value) for _, description, value in snapshot.records]
        rows = sum(value.nbytes for name, value in values if name.startswith(TABLES))
        size = sum(value.nbytes for _, value in values)
        size += 0 if snapshot.weights is None else snapshot.weights.nbytes
        advice = (
            "with replication=2 and FailureConfig(snapshot_every=0) servers keep copies instead; rows of tables with "
            "directory= are copied to servers' disks, if the job has a second process"
        )
        what = "the next copy of the job's state, of which there are two while it comes,"
        self._told_of_size = warn_if_short(size, what, advice, free_bytes())
        if rows >= _LARGE_BYTES and not self._told_of_size:
            self._told_of_size = True
            log.warning(
                "embedding tables take %.1f GB of the driver's memory in each snapshot for recovery, "
                "of which there are two while one comes: %s", rows / 1e9, advice,
            )  # fmt: skip

    def _answers(self, request: _CopyRequest) -> Sequence[WorkerState | None] | None:
        """Return each worker's own state; None if one is dead, or its model cannot tell it."""
        try:
            return runtime().get(request.workers)
        except CallRaisedError as error:
            try:
                raise_remote(error, "a worker", "copy its own state")
            except (PeerLostError, ShutdownError):  # it has another role by now
                return None
            except SteepestError as cause:
                if not self._told:
                    log.warning("there is no snapshot of this job: %s", cause)
                self._told = True
                return None
        except (ProcessDiedError, ResultLostError):
            return None
