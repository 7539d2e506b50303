"""The coordinator of a training job: numbered workers that join, are replaced and get steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from steepest.core.messages import driver
from steepest.core.messages.fields import MOST
from steepest.core.messages.gradients import Refresh, Report
from steepest.core.messages.membership import (
    Failed,
    Grant,
    Lease,
    Members,
    WorkerEnded,
    WorkerJoined,
)
from steepest.core.messages.message import Kind, Message, Peer, PushId, worker_peer
from steepest.core.messages.snapshots import Install, Installed, Refused
from steepest.core.protocol.audits import Audits
from steepest.core.protocol.commit_rules import Staged, knows_norms
from steepest.core.protocol.commit_state import CommitState, Outgoing
from steepest.core.protocol.coordinator import Coordinator, Made, Readers, Updates
from steepest.core.protocol.push_tracking import Reported, StagedEach, StagedTogether
from steepest.core.status import Status
from steepest.errors import ProtocolError, listed

_AWAITED = "its successor has yet to join"
_MOST_INSTALLS = 64  # states of clients that wait for workers to join


class JobCoordinator(Coordinator):
    """The coordinator of a job: its workers, and the steps that a client asks of them.

    Under a rule by which every member contributes to every version, workers go on by themselves up
    to a limit, each with its own share of the samples. Under any other, each push begins with a
    LEASE of the next free share to its worker.

    Args:
        state: with the indices of the workers that must join before the first step.
        updates: how gradients become an update.
        step_timeout: seconds after which an open step is given up.
        replaces: whether a lost worker is waited for, because another process will join in its
            place; otherwise the loss is a failure.
        reloads: whether each generation begins with all weights, because those of the one before may
            not come any more.
        audits: compares the gradients of audited steps; None if no step is audited.
        replaces_wrong: whether a step is committed only when a worker that computes wrongly has a successor.

    Attributes:
        joined: indices of the workers that have joined and are not lost.
        losses: the workers and servers that are lost and not replaced, each with the reason.
    """

    def __init__(
        self,
        state: CommitState,
        updates: Updates,
        *,
        step_timeout: float,
        replaces: bool = False,
        reloads: bool = False,
        audits: Audits | None = None,
        replaces_wrong: bool = False,
    ) -> None:
        super().__init__(state, updates)
        self.joined: set[int] = set()
        self.losses: dict[Peer, str] = {}
        self._step_timeout = step_timeout
        self._replaces, self._reloads = replaces, reloads
        self._audits, self._replaces_wrong = audits, replaces_wrong
        # after an audit: the generation in which nothing is committed before this worker is replaced
        self._held: tuple[int, int | None] = (-1, None)
        self._incarnations: dict[int, int] = {}  # of each worker that ever joined
        self._begun = False  # whether all workers have been joined at the same time
        self._client: Peer | None = None  # which asked for something last
        # the client that was sent the last failure, and the generation that began with it
        self._last_failure: tuple[Peer | None, int] = (None, 0)
        self._stats = True
        self._installs: list[tuple[Peer, int]] = []  # requests that wait for all workers to join
        # commits whose pushes are not counted yet, with their generation and the version before
        self._unsettled: list[tuple[int, int, Made]] = []
        self._since = math.inf  # when the open version was begun, on the caller's clock

    # -- events --------------------------------------------------------------------------------

    def _take(self, source: Peer, message: Message) -> Outgoing:
        """Act on a message of a worker or client."""
        match message.kind:
            case Kind.JOIN:
                self._require_member(source)
                return self._join(source.index, message.body.incarnation)
            case Kind.FAILED if source.role == "server":
                return self._update_failed(source, message.body)
            case Kind.FAILED:
                self._require_member(source)
                return self._failed(source.index, message.body)
            case Kind.GIVE_UP:
                return self._give_up(message.body)
            case Kind.ASK:
                return self._ask(source, message.body)
            case Kind.REVOKE:
                return self._revoke(source, message.body)
            case Kind.STOP:
                return self._stop(source, message.body)
            case Kind.INSTALL:
                return self._install(source, message.body)
            case _:
                raise ProtocolError(f"the coordinator of a job does not take {message.kind.name}")

    def _report(self, source: Peer, message: Message) -> bool:
        """Stage REPORT of a worker."""
        self._require_member(source)
        if message.kind is not Kind.REPORT:
            raise ProtocolError(f"the coordinator of a job does not take {message.kind.name}")
        state, worker, report = self.state, source.index, message.body
        if not state.is_current(report.generation, report.pulled) or self._is_over(
            worker, report.incarnation
        ):
            return False
        if report.pulled > state.version:
            raise ProtocolError(
                f"REPORT of a push from version {report.pulled}, the newest is {state.version}"
            )
        if report.clip is not None and not knows_norms(state.rule, len(state.members)):
            raise ProtocolError(
                f"REPORT with a greatest norm, {report.clip}, under a rule that knows no norms"
            )
        push = PushId(worker, report.incarnation, report.sequence)
        if (
            isinstance(state.staging, StagedEach)
            and not state.staging.is_closed(push)
            and not state.leases.claim(push)
        ):
            raise ProtocolError(f"REPORT of {push}, for which worker {worker} has no lease")
        state.staging.report(push, report)
        return True

    def _tick(self) -> Outgoing:
        """Give the open step up if it, or a share, is overdue."""
        now = self._now
        if self.state.schedule_behind:
            self._since = math.inf  # no worker is waited for meanwhile
            return []
        leases = self.state.leases
        overdue = leases.overdue(now, self._step_timeout)
        if self._client is None or self.state.version >= self.limit:
            return []
        if not overdue:
            if self._since == math.inf:
                self._since = now
            if now - self._since < self._step_timeout:
                return []
        awaited = [str(peer) for peer in self._awaited(overdue)]
        return self._fail("deadline", {"awaited": awaited, "seconds": self._step_timeout})

    def _awaited(self, overdue: Sequence[int] = ()) -> list[Peer]:
        """Return the workers or servers that the open step waits for; of `overdue` workers if there are any."""
        state, (held, wrong) = self.state, self._held
        if held == state.generation and wrong is not None:
            return [worker_peer(wrong)]
        absent = state.members - self.joined
        busy = state.leases.awaited if state.leases_samples else state.members
        return state.staging.awaited(overdue or sorted(absent or busy))

    def doing(self) -> Status:
        """Return what the open step waits for; seconds are those at the last `tick`."""
        state = self.state
        if absent := state.members - self.joined:
            return Status(f"waits for {listed(map(worker_peer, sorted(absent)))} to join")
        if state.schedule_behind:
            return Status("steps the learning-rate schedule to its place")
        if self._client is None or state.version >= self.limit:
            return Status(f"is asked for no step; version {state.version} is committed")
        seconds = self._now - self._since
        return Status(
            f"waits for {listed(self._awaited())} to make version {state.version + 1}",
            seconds if math.isfinite(seconds) else None,
        )

    def _lost(self, peer: Peer, reason: str) -> Outgoing:
        """Wait for a lost worker's successor, or fail the open step."""
        if peer.role == "worker" and peer.index in self.state.members:
            if self._replaces:
                return self._end(peer.index, reason) if peer.index in self.joined else []
            self.joined.discard(peer.index)
        elif peer.role != "server":
            if peer == self._client:
                self._client = None
            return []
        self.losses[peer] = reason
        if self.state.version < self.limit:
            return self._fail_for_loss()
        return self._begin_generation(reload=False)  # the next ASK fails

    def _require_member(self, peer: Peer) -> None:
        """Raise ProtocolError if a peer is no worker of this job."""
        if peer.index not in self.state.members:
            raise ProtocolError(f"worker {peer.index} is not a member of this job")

    # -- workers that come and go --------------------------------------------------------------

    def _is_over(self, worker: int, incarnation: int) -> bool:
        """Return whether the process that made a push has ceased to be a member."""
        known = worker in self.joined and self._incarnations[worker] == incarnation
        return not (known or self.state.needs_all)

    def _join(self, worker: int, incarnation: int) -> Outgoing:
        """Make a process a member; a generation begins once all workers have joined.

        Unless every worker is needed, a successor joins the present generation while the others go on.
        """
        state = self.state
        known = self._incarnations.get(worker, -1)
        if incarnation < known or (worker in self.joined and known == incarnation):
            return []  # a copy, or of a process that was given up
        self._incarnations[worker] = incarnation
        self.joined.add(worker)
        self.losses.pop(worker_peer(worker), None)
        state.leases.begin(worker, state.version, self.joined)
        if self._begun and not state.needs_all and not self._installs:
            return self._join_running(worker)
        if self.joined < state.members:
            return []
        self._begun = True
        return self._begin_generation(reload=True, again=True) + self._go_on()

    def _join_running(self, worker: int) -> Outgoing:
        """Let a worker join the present generation, while the others go on."""
        state = self.state
        members = Members(state.generation, state.version, sorted(self.joined), reload=True)
        joined = state.to_servers(WorkerJoined(state.generation, state.version, worker))
        return [(worker_peer(worker), members.pack()), *joined, *self._go_on()]

    def _give_up(self, request: driver.GiveUp) -> Outgoing:
        """End the membership of a process whose channel is open, if it still is a member."""
        worker = request.worker
        known = worker in self.joined and self._incarnations[worker] == request.life
        return self._end(worker, request.why) if self._replaces and known else []

    def _end(self, worker: int, reason: str) -> Outgoing:
        """End the membership of a worker's process; another one will join in its place.

        If every member contributes to every version, the open step is void and repeated with the successor. Otherwise
        the other workers go on, and one of them computes the lost worker's share.
        """
        state = self.state
        self.joined.discard(worker)
        incarnation = self._incarnations.get(worker, 0)
        if state.needs_all:
            out = self._begin_generation(reload=False, again=True)
        else:
            state.leases.forget_ahead(worker)
            void, complete = state.staging.end(worker)
            if not complete:
                state.leases.leave(worker)
            ended = WorkerEnded(state.generation, state.version, worker, incarnation, tuple(void))
            out = state.to_servers(ended) + self._go_on()
        if self._client is not None:
            lost = driver.WorkerLost(state.generation, state.version, worker, incarnation, reason)
            out.append((self._client, lost.pack()))
        return out

    def _begin_generation(
        self, *, reload: bool, again: bool = False, anew: bool = False
    ) -> Outgoing:
        """Begin a generation, which voids every staged push; install waiting states if all workers have joined.

        Args:
            reload: whether servers send all weights to all members.
            again: whether steps stay granted, and gradients of the same weights stay valid.
            anew: with `again`, whether gradients are computed anew.
        """
        state = self.state
        state.begin_generation(self.joined)
        if not again:
            self.limit = state.version
        self._since = math.inf
        installs = self._installs if self.joined == state.members else []
        members = Members(
            *(state.generation, state.version, sorted(self.joined)),
            # a worker in the middle of a push may hold older weights
            reload=reload or self._reloads or not state.needs_all,
            install=[(*client, sequence) for client, sequence in installs],
            again=again and not anew and not installs,
        )
        out = state.to_servers(members)
        out += [(worker_peer(worker), members.pack()) for worker in sorted(self.joined)]
        if installs:
            self._installs = []
        for client, sequence in installs:
            installed = Installed(state.generation, sequence, state.version)
            out.append((client, installed.pack()))
        return out

    # -- clients -------------------------------------------------------------------------------

    def _ask(self, client: Peer, request: driver.AskForSteps) -> Outgoing:
        """Grant more steps, unless the client asked before it heard that earlier steps had failed."""
        failed, since = self._last_failure
        if client == failed and request.generation < since:
            return []
        self._client = client
        if self.losses:
            return self._fail_for_loss()
        if self.torn is not None:
            return self._fail("optimizer", self.torn)
        state, per_step = self.state, self.state.versions_per_step
        if self.limit + request.steps * per_step >= MOST:
            raise ProtocolError(f"ASK for {request.steps} steps: give fewer")
        self._stats, state.rates = request.stats, request.rates
        if state.version == self.limit:
            self._since = math.inf  # the clock of a step starts when it is asked for
        self.limit += request.steps * per_step
        self.limit -= self.limit % per_step  # a step that was given up half-way is finished first
        return self._go_on()

    def _revoke(self, client: Peer, request: driver.Revoke) -> Outgoing:
        """Take back all steps that are granted and not committed."""
        self._client = client
        out = self._begin_generation(reload=False)
        revoked = driver.Revoked(self.state.generation, request.sequence, self.state.version)
        return [*out, (client, revoked.pack())]

    def _stop(self, client: Peer, request: driver.Stop) -> Outgoing:
        """Take back the steps that are granted and not begun."""
        state = self.state
        self._client = client
        if not state.leases_samples:
            out = self._begin_generation(reload=False) if state.version < self.limit else []
        else:
            begun = state.version + -(-state.leases.out // state.pushes_per_update)
            self.limit = min(self.limit, begun + -begun % state.versions_per_step)
            out = self._go_on()
        stopped = driver.Stopped(state.generation, request.sequence, self.limit)
        return [*out, (client, stopped.pack())]

    def _install(self, client: Peer, install: Install) -> Outgoing:
        """Continue from a client's state, in a new generation once all workers have joined."""
        if len(self._installs) >= _MOST_INSTALLS:
            raise ProtocolError(f"{_MOST_INSTALLS} states wait for the workers to join")
        self._client = client
        absent = {worker_peer(worker): _AWAITED for worker in self.state.members - self.joined}
        # the successor of one that has been a member comes when the client goes on, which waits for this answer
        if lost := self.losses or (absent if self._begun else {}):
            peer, why = min(lost.items())
            return [(client, Refused(install.sequence, why, peer).pack())]
        self.state.install(install, self.joined)
        self.limit = self.state.version
        self._installs.append((client, install.sequence))
        if self.joined == self.state.members:
            return self._begin_generation(reload=True)
        return []

    # -- going on ------------------------------------------------------------------------------

    def _go_on(self) -> Outgoing:
        """Return the messages that grant steps to workers, or lease them their next shares."""
        state = self.state
        if not self._begun or len(self.joined) < state.rule.needs(len(state.members)):
            return []
        if state.leases_samples:
            readers, leases = self._lease()
            if not readers:
                return leases
            return state.to_servers(Refresh(state.generation, state.version, readers)) + leases
        grant = Grant(state.generation, self.limit, self._stats, state.rates)
        return [(worker_peer(worker), grant.pack()) for worker in sorted(self.joined)]

    def _lease(self) -> tuple[Readers, Outgoing]:
        """Lease shares to idle workers, the slowest first.

        Returns:
            The workers that need new weights, and the messages with the leases. When all granted steps are committed
            every idle worker needs them.
        """
        state = self.state
        granted = self.limit - state.version
        out: Outgoing = []
        chosen = []
        for worker, lease in self._leases(granted):
            chosen.append(worker)
            out.append((worker_peer(worker), lease.pack()))
        idle = () if granted else sorted(self.joined - set(state.leases.busy))
        behind = state.leases.behind([*chosen, *idle], state.version)
        return [(worker, 0) for worker in behind], out

    def _leases(self, granted: int) -> Iterator[tuple[int, Lease]]:
        """Lease free shares of the granted versions to idle workers; yield the workers with their leases."""
        state = self.state
        # if a step is several updates, no more pushes than these need may be on their way
        several = state.versions_per_step > 1 or not granted
        most = granted * state.pushes_per_update if several else math.inf
        for worker, shares, _ in state.leases.lease(self.joined, most, self._now):
            yield worker, self._lease_of(worker, shares)

    def _lease_of(self, worker: int, shares: range) -> Lease:
        """Return the message with a worker's lease."""
        state = self.state
        last = state.leases.last_applied.get(worker, 0)
        return Lease(
            *(state.generation, state.version, shares[0]), stats=self._stats, committed=last
        )

    def _committed(self, made: Made) -> tuple[Readers, Outgoing]:
        """Add pushes to the open step and lease the next shares."""
        state = self.state
        self._unsettled.append((state.generation, state.version - sum(made.versions), made))
        self._since = self._now if state.version < self.limit else math.inf
        out: Outgoing = []
        if not state.leases_samples:
            readers = [(push.worker, 0) for push in made.pushes]
        else:
            state.leases.commit(made.pushes, skipped=made.skipped)
            if state.rule.same_version:  # what the others are computing can only be dropped
                state.leases.give_back(state.leases.busy)
            readers, out = self._lease()
        return readers, out

    def settle(self) -> Outgoing:
        """Add committed pushes to their steps; return the results of whole ones."""
        out: Outgoing = []
        per_step = self.state.versions_per_step
        unsettled, self._unsettled = self._unsettled, []
        for generation, version, made in unsettled:
            self.state.open_step.add_norm(made.norm)
            for (worker, report), versions in zip(made.reports.items(), made.versions, strict=True):
                assert isinstance(report, Report)
                self.state.open_step.add(worker, report, made.staleness[worker])
                if versions:  # pushes may be of the end of one step and the beginning of the next
                    ended, version = version // per_step, version + versions
                    out += self._results(generation, ended, version // per_step)
            self._note_paces(made, version)
        return out

    def _note_paces(self, made: Made, version: int) -> None:
        """Note the pace of the workers whose pushes are part of a version."""
        for worker, report in made.reports.items():
            self._add_timings(worker, report, version)

    def _add_timings(self, worker: int, report: Reported, version: int, shares: int = 1) -> None:
        """Note the pace of a worker whose push, of `shares` shares, is part of a version."""
        if isinstance(report, Report) and report.samples:  # none at an epoch's end, perhaps
            step = (version - 1) // self.state.versions_per_step
            self.state.history.add_timings(worker, report.timings, step, shares)

    def _results(self, generation: int, ended: int, now: int) -> Outgoing:
        """Return the result of the last step if more steps have ended `now` than before (`ended`)."""
        if now == ended:
            return []
        version = now * self.state.versions_per_step
        result = driver.Result(generation, version, now, **self.state.open_step.end(self._stats))
        return [] if self._client is None else [(self._client, result.pack())]

    def _dropped(self, pushes: tuple[Staged, ...]) -> tuple[Readers, Outgoing]:
        """Let the workers of late pushes go on.

        If more steps are to come, their shares become free only after the next leases: otherwise a worker that is too
        slow for a share would get it again and again.
        """
        leases = self.state.leases
        shares = leases.drop(pushes)
        to_lease = self.limit - self.state.version - len(leases.busy)
        later = to_lease >= 2 * len(shares)
        if not later:
            leases.free(shares)
        readers, out = self._lease()
        if later:
            leases.free(shares)
        return readers, out

    def _audit(self) -> tuple[Outgoing, bool]:
        """Compare the gradients of an audited step."""
        state = self.state
        if self._audits is None or not isinstance(state.staging, StagedTogether):
            return [], True
        if self._held[0] == state.generation:
            return [], False
        reports = state.staging.reports()
        finding = self._audits.judge(state.version, reports)
        if finding is None:
            return [], True
        if finding.again:
            begun = self._begin_generation(reload=False, again=True, anew=True)
            return begun + self._go_on(), False
        waits = self._replaces_wrong and finding.worker is not None and self._client is not None
        if waits:
            self._held = state.generation, finding.worker
        life = 0 if finding.worker is None else reports[finding.worker].incarnation
        difference = driver.AuditDifference(
            *(state.generation, state.version, state.step + 1, finding.pairs, finding.why),
            *(finding.worker, life, waits),
        )
        messages = [] if self._client is None else [(self._client, difference.pack())]
        return messages, not waits

    # -- failure -------------------------------------------------------------------------------

    def _refuse(
        self, pushes: tuple[Staged, ...], reason: str, details: Mapping[str, Any]
    ) -> Outgoing:
        """Fail the open step."""
        return self._fail(reason, details)

    def _fail_for_loss(self) -> Outgoing:
        """Fail the open step because of the first loss."""
        peer, why = next(iter(self.losses.items()))
        return self._fail("lost", {"peer": peer, "why": why})

    def _failed(self, worker: int, failed: Failed) -> Outgoing:
        """Fail the open step because a worker's model raised."""
        if failed.generation != self.state.generation:
            return []
        details = {
            "worker": worker,
            "error": failed.error,
            "traceback": failed.traceback,
            "kind": failed.kind,
        }
        # the model may have written to its weights before it raised
        return self._fail("raised", details, reload=True)

    def _update_failed(self, server: Peer, failed: Failed) -> Outgoing:
        """Fail this step and all later ones: a server's optimizer raised in a committed update.

        Other servers have applied it, so the chunks are of no common version. Further such messages are ignored.
        """
        if self.torn is not None:
            return []
        self.torn = {
            "step": (failed.version - 1) // self.state.versions_per_step,
            "peer": server,
            "error": failed.error,
            "traceback": failed.traceback,
            "kind": failed.kind,
        }
        return self._fail("optimizer", self.torn)

    def _fail(self, reason: str, details: Mapping[str, Any], *, reload: bool = False) -> Outgoing:
        """Give the open step up, of which nothing is applied, and begin a generation.

        Args:
            reason, details: fields of the `Failure` that the client is sent.
            reload: whether servers send all weights to all members.
        """
        state = self.state
        out = self._begin_generation(reload=reload)
        if self._client is not None:
            fields = {"step": state.step, "reason": reason, **details}
            failure = driver.Failure(state.generation, state.version, **fields)
            self._last_failure = self._client, state.generation
            out.append((self._client, failure.pack()))
        return out
