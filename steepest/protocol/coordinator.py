"""The coordinator: decides what is committed. Events in, messages out; no I/O, no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from steepest.errors import ProtocolError, describe_error
from steepest.messages import driver
from steepest.messages.fields import MOST
from steepest.messages.gradients import (
    Commit,
    Decision,
    Discard,
    Logged,
    PushStaged,
    Refresh,
    Report,
    VersionStaged,
)
from steepest.messages.membership import (
    Failed,
    Grant,
    Join,
    Lease,
    Members,
    WorkerEnded,
    WorkerJoined,
)
from steepest.messages.message import Kind, Message, Peer, PushId, server_peer, worker_peer
from steepest.messages.snapshots import Install, Installed, InstallRefused, Read, Snapshot
from steepest.optim.spec import Schedule, ScheduleState
from steepest.protocol.commit_rules import CommitRule, Staged
from steepest.protocol.history import History
from steepest.protocol.push_tracking import (
    MOST_CULPRITS,
    Culprits,
    Reports,
    StagedEach,
    StagedTogether,
    Staging,
    clip_factor,
)
from steepest.protocol.sample_leases import Leases, Ledger
from steepest.protocol.step_summary import OpenStep

Outgoing = list[tuple[Peer, Message]]
_MOST_WAITING = 64  # states that wait to be installed

#: Commits from one that tells servers where the schedule stands to the next: what another
#: coordinator may have to go.
SCHEDULE_EVERY = 100


class Coordinator:
    """Membership, versions and commits of one job.

    Under a rule by which every member contributes to every version, workers go on by themselves up
    to a limit, each with its own share of the samples. Under any other, each push begins with a
    GRANT that leases the worker the next free share.

    Args:
        members: indices of the workers that must join before the first step.
        servers: indices of all servers.
        holding: those of them that hold trainable chunks, whose staging is awaited.
        rule: the commit rule.
        hyperparameters: of each step, by parameter group; what differs from the servers' own.
        schedule: that gives them, if it has a state.
        step_timeout: seconds after which an open step is given up.
        nonfinite: "refuse", "skip" or "pass" an update with NaN or infinity.
        clip_norm: the greatest norm of an update's gradient; None for any.
        scale_rate: whether the learning rate is divided by the staleness.
        keep_log: whether to keep every commit, for a replay.
        waits: whether a worker that is lost is waited for, because another one will join in its
            place; otherwise the loss is a failure.
        witnessed: whether servers remember what is decided, so that it outlives this process: a
            client is told of a commit when a server elsewhere has heard of it.
    """

    def __init__(  # noqa: PLR0913 - rules of a job, each a plain value with a name
        self,
        *,
        members: frozenset[int],
        servers: tuple[int, ...],
        holding: frozenset[int],
        rule: CommitRule,
        hyperparameters: Callable[[int], list[dict[str, Any]]],
        step_timeout: float,
        nonfinite: str = "refuse",
        clip_norm: float | None = None,
        scale_rate: bool = False,
        keep_log: bool = False,
        waits: bool = False,
        witnessed: bool = False,
        schedule: Schedule | None = None,
    ) -> None:
        self.version = 0
        self.generation = 0
        self.limit = 0  # in versions
        self.joined: set[int] = set()
        self._lives: dict[int, int] = {}  # the incarnation of each worker
        self.gone: dict[Peer, str] = {}  # members and servers whose channel closed, and why
        self._members = members
        self._servers = servers
        self._rule = rule
        self._hyperparameters = hyperparameters
        self._schedule = schedule
        self._behind = False  # whether the schedule has a long way to the open step
        self._step_timeout = step_timeout
        self._nonfinite = nonfinite
        self._clip_norm = clip_norm
        self._scale_rate = scale_rate
        self._waits = waits
        self._witnessed = witnessed
        self._decisions_told = 0  # that servers were told
        self.logged = (
            0 if witnessed else math.inf
        )  # the last version of which another process has heard
        self._stats = True
        self._client: Peer | None = None
        self._waiting: list[
            tuple[Peer, int]
        ] = []  # clients that installed and wait for the members
        self._asked: dict[Peer, int] = {}  # the last request of each client: none is taken twice
        self._staging: Staging = StagedTogether(holding) if rule.together else StagedEach(holding)
        self._per_step = rule.versions_per_step(max(len(members), 1))  # versions that make one step
        self._pushes = rule.pushes_per_step(max(len(members), 1))  # pushes that make one step
        self._leases = Leases(rule, members)
        self._begun = False  # whether all members were there once
        self._step = OpenStep()
        self._since = math.inf  # when the open version was begun, on the caller's clock
        self._now = math.inf  # until the caller first tells the time
        self._history = History(keep_log)

    # -- events --------------------------------------------------------------------------------

    def handle(self, source: Peer, message: Message) -> Outgoing:
        """Acts on one message; returns what is to be sent.

        Raises:
            ProtocolError: a kind that no coordinator receives.
        """
        match message.kind:
            case Kind.JOIN | Kind.REPORT | Kind.FAILED if not self._is_member(source.index):
                raise ProtocolError(f"worker {source.index} is not a member of this job")
            case Kind.VERSION_STAGED | Kind.PUSH_STAGED | Kind.LOGGED if (
                source.index not in self._servers
            ):
                raise ProtocolError(f"{source} is not a server of this job")
            case Kind.JOIN:
                return self._join(source.index, Join.unpack(message).incarnation)
            case Kind.REPORT:
                return self._report(source.index, Report.unpack(message))
            case Kind.VERSION_STAGED:
                return self._version_staged(source.index, VersionStaged.unpack(message))
            case Kind.PUSH_STAGED:
                return self._push_staged(source.index, PushStaged.unpack(message))
            case Kind.FAILED:
                return self._failed(source.index, Failed.unpack(message))
            case Kind.LOGGED:
                return self._take_note(Logged.unpack(message))
            case Kind.GIVE_UP:
                return self._give_up(driver.GiveUp.unpack(message))
            case Kind.ASK | Kind.REVOKE | Kind.STOP | Kind.INSTALL if (
                message.sequence <= self._asked.get(source, 0)
            ):
                return []  # a copy of one that was taken
            case Kind.ASK:
                return self._ask(source, driver.Ask.unpack(message))
            case Kind.REVOKE:
                return self._revoke(source, driver.Revoke.unpack(message))
            case Kind.STOP:
                return self._stop(source, driver.Stop.unpack(message))
            case Kind.READ:
                return self._read(source, Read.unpack(message))
            case Kind.INSTALL:
                return self._install(source, Install.unpack(message))
            case Kind.READ_COUNTERS:
                return [(source, self._counters(message.sequence).pack())]
            case Kind.READ_LOG:
                asked = driver.ReadLog.unpack(message)
                return [
                    (
                        source,
                        driver.LogPage(asked.sequence, **self._history.page(asked.first)).pack(),
                    )
                ]
            case _:
                raise ProtocolError(f"a coordinator does not take {message.kind.name}")

    def tick(self, now: float) -> Outgoing:
        """Time has passed: gives up what was awaited for too long."""
        self._now = now
        if self._behind:
            self._since = math.inf  # nobody else is waited for
            return self._decide() if self._scheduled() else []
        overdue = self._leases.overdue(now, self._step_timeout)
        if self._client is None or self.version >= self.limit:
            return []
        if not overdue:
            if self._since == math.inf:
                self._since = now
            if now - self._since < self._step_timeout:
                return []
        absent = self._members - self.joined
        workers = overdue or sorted(
            absent or (self._members if self._rule.together else self._leases.busy)
        )
        awaited = [str(peer) for peer in self._staging.awaited(workers)]
        return self._fail("deadline", awaited=awaited, seconds=self._step_timeout)

    def lost(self, peer: Peer, reason: str) -> Outgoing:
        """A peer's channel closed."""
        if peer.role == "worker" and peer.index in self._members:
            if self._waits:
                return self._wait_for(peer.index, reason) if peer.index in self.joined else []
            self.joined.discard(peer.index)
        elif peer.role != "server":
            self._asked.pop(peer, None)
            if peer == self._client:
                self._client = None
            return []
        self.gone[peer] = reason
        if self.version < self.limit:
            return self._fail_for_loss()
        return self._begin_generation(reload=False)  # whoever asks for the next step is told

    def _is_member(self, worker: int) -> bool:
        return worker in self._members

    # -- membership ----------------------------------------------------------------------------

    def _give_up(self, given: driver.GiveUp) -> Outgoing:
        """Do without a worker whose channel is open, if that life of it is still a member."""
        known = (
            self._waits and given.worker in self.joined and self._lives[given.worker] == given.life
        )
        return self._wait_for(given.worker, given.why) if known else []

    def _wait_for(self, worker: int, reason: str) -> Outgoing:
        """A worker is gone, and another one will join in its place.

        Where every member contributes to every version the open step is void, and taken again then.
        Otherwise the others go on, also with what it was at.
        """
        self.joined.discard(worker)
        life = self._lives.get(worker, 0)
        if self._rule.together:
            asked = self.limit - self.version
            out = self._begin_generation(reload=False, again=True)
            self.limit += asked
        else:
            lost, complete = self._staging.end(worker)
            if not complete:
                self._leases.leave(worker)
            ended = WorkerEnded(self.generation, self.version, worker, life, tuple(lost))
            out = self._to_servers(ended) + self._go_on()
        if self._client is not None:
            gone = driver.WorkerLost(self.generation, self.version, worker, life, reason)
            out.append((self._client, gone.pack()))
        return out

    def _join(self, worker: int, incarnation: int) -> Outgoing:
        known = self._lives.get(worker, -1)
        if incarnation < known or (worker in self.joined and known == incarnation):
            return []  # a copy, or one that was given up
        self._lives[worker] = incarnation
        self.joined.add(worker)
        self.gone.pop(worker_peer(worker), None)
        self._leases.begin(worker, self.version, self.joined)
        if self._begun and not self._rule.together and not self._waiting:
            return self._take_in(worker)
        if self.joined < self._members:
            return []
        self._begun = True
        asked = self.limit - self.version  # steps may be asked for before everybody is there
        out = self._begin_generation(reload=True, again=True)
        self.limit += asked
        return out + self._go_on()

    def _take_in(self, worker: int) -> Outgoing:
        """A worker joins while the others are at work, who need not hear of it."""
        members = Members(self.generation, self.version, sorted(self.joined), reload=True)
        joined = self._to_servers(WorkerJoined(self.generation, self.version, worker))
        return [(worker_peer(worker), members.pack()), *joined, *self._go_on()]

    def _begin_generation(self, *, reload: bool, again: bool = False) -> Outgoing:
        """Voids every staged push; servers send all weights (`reload`); gradients of these stay good (`again`)."""
        self.generation += 1
        self.limit = self.version
        self._staging.clear()
        self._since = math.inf
        self._leases.clear(self.joined, self.version)
        reload = (
            reload or not self._rule.together
        )  # who was in the middle of a push may hold older weights
        install = (
            self._to_install() if self.joined == self._members else []
        )  # they wait for the others
        again = again and not install
        members = Members(
            self.generation, self.version, sorted(self.joined), reload, install, again
        )
        out = self._to_servers(members)
        out += [(worker_peer(worker), members.pack()) for worker in sorted(self.joined)]
        return out + (self._tell_installed() if install else [])

    def _to_install(self) -> list[list[Any]]:
        """Return the clients that installed a state and were not answered: (role, index, request)."""
        return [[*client, sequence] for client, sequence in self._waiting]

    def _tell_installed(self) -> Outgoing:
        waiting, self._waiting = self._waiting, []
        return [
            (client, Installed(self.generation, sequence, self.version).pack())
            for client, sequence in waiting
        ]

    def _state(self) -> dict[str, Any]:
        """What another coordinator needs to go on from here, beside the schedule."""
        return {"ledger": self._leases.state(), "history": self._history.counts()}

    def _where_scheduled(self) -> dict[str, ScheduleState]:
        """Where the schedule stands, if it can be told."""
        state = None if self._schedule is None else self._schedule.state()
        return {} if state is None else {"schedule": state}

    def _to_servers(self, decision: Decision) -> Outgoing:
        """Return a decision for every server, with what servers remember of it if they do."""
        if self._witnessed:
            self._decisions_told += 1
            due = isinstance(decision, Commit) and self.version % SCHEDULE_EVERY == 0
            schedule = self._where_scheduled() if due or isinstance(decision, Members) else {}
            remembered: dict[str, Any] = {
                "number": self._decisions_told,
                "state": self._state(),
                **schedule,
            }
            decision = replace(decision, **remembered)
        return [(server_peer(server), decision.pack()) for server in self._servers]

    # -- clients -------------------------------------------------------------------------------

    def _ask(self, source: Peer, asked: driver.Ask) -> Outgoing:
        self._client = source
        self._asked[source] = asked.sequence
        if self.gone:
            return self._fail_for_loss()
        if self.limit + asked.steps * self._per_step >= MOST:
            raise ProtocolError(f"ASK for {asked.steps} steps: give fewer")
        self._stats = asked.stats
        if self.version == self.limit:
            self._since = math.inf  # the clock of a step starts when it is asked for
        self.limit += asked.steps * self._per_step
        self.limit -= (
            self.limit % self._per_step
        )  # a step that was given up half-way is finished first
        return self._go_on()

    def _revoke(self, source: Peer, asked: driver.Revoke) -> Outgoing:
        """Take back all steps that are granted and not committed."""
        self._client = source
        self._asked[source] = asked.sequence
        out = self._begin_generation(reload=False)
        return [
            *out,
            (source, driver.Revoked(self.generation, asked.sequence, self.version).pack()),
        ]

    def _stop(self, source: Peer, asked: driver.Stop) -> Outgoing:
        """Take back the steps that are granted and not begun."""
        self._client = source
        self._asked[source] = asked.sequence
        busy = len(self._leases.busy)
        if self._rule.together:
            out = self._begin_generation(reload=False) if self.version < self.limit else []
        else:
            begun = self.version + (busy if self._per_step > 1 else bool(busy))
            self.limit = min(self.limit, begun + -begun % self._per_step)
            out = self._go_on()
        return [*out, (source, driver.Stopped(self.generation, asked.sequence, self.limit).pack())]

    def _read(self, source: Peer, asked: Read) -> Outgoing:
        """Order a snapshot between two commits, so that all servers send one version."""
        state = None if asked.what == "weights" else self._state()
        order = Snapshot(
            self.generation, asked.sequence, self.version, source, asked.what, asked.chunks, state
        )
        orders = [order] * len(self._servers)
        if state is not None:  # the schedule's may be long, and one server to pass it on is enough
            orders[0] = replace(order, state={**state, **self._where_scheduled()})
        return [
            (server_peer(server), order.pack())
            for server, order in zip(self._servers, orders, strict=True)
        ]

    def _install(self, source: Peer, asked: Install) -> Outgoing:
        if len(self._waiting) >= _MOST_WAITING:
            raise ProtocolError(f"{_MOST_WAITING} states wait for the workers to join")
        self._asked[source] = asked.sequence
        self._client = source
        if self.gone:
            peer, why = next(iter(self.gone.items()))
            return [(source, InstallRefused(asked.sequence, peer, why).pack())]
        self.version = self.limit = asked.version
        self.logged = self.version if self._witnessed else math.inf
        step = asked.version // self._per_step
        if asked.anew:  # a restored run begins its shares at that step
            self._leases.clear(self.joined, self.version)
            self._leases.ledger = Ledger(step * self._pushes)
        if state := asked.state:
            following, *returned = state.get("ledger", [step * self._pushes])
            self._leases.ledger = Ledger(following, returned)
            if "history" in state:
                self._history.load_state(state["history"])
        if self._schedule is not None:
            self._schedule.load_state((state or {}).get("schedule"))
            self._behind = True
        self._history.forget_log()
        self._step.clear()
        self._waiting.append((source, asked.sequence))
        if self.joined == self._members:
            return self._begin_generation(reload=True)
        return []  # the client waits for the members

    def _counters(self, sequence: int) -> driver.Counters:
        step = self.version // self._per_step
        taken = (Ledger(step * self._pushes) if self._rule.together else self._leases.ledger).look()
        return driver.Counters(
            self.generation, sequence, self.version, step, **taken, **self._history.look()
        )

    # -- going on ------------------------------------------------------------------------------

    def _go_on(self) -> Outgoing:
        """Tells workers how far they may go, or what to compute next."""
        if not self._begun or len(self.joined) < self._rule.needs(len(self._members)):
            return []
        if not self._rule.together:
            grants, behind = self._lease()
            if behind:
                readers = [[worker, 0] for worker in behind]
                return self._to_servers(Refresh(self.generation, self.version, readers)) + grants
            return grants
        grant = Grant(self.generation, self.limit, self._stats)
        return [(worker_peer(worker), grant.pack()) for worker in sorted(self.joined)]

    def _lease(self) -> tuple[Outgoing, list[int]]:
        """Leases shares to idle workers, the slowest first; also returns who of them needs new weights.

        When nothing more is to be done, everybody who is idle gets the last weights.
        """
        count = 0 if self.version == self.limit else math.inf  # how many may be busy
        if (
            self._per_step > 1
        ):  # each push is an update, and no more than are to be made may be on their way
            count = self.limit - self.version
        grants: Outgoing = []
        chosen = []
        for worker, share in self._leases.choose(self.joined, count, self._now):
            chosen.append(worker)
            last = self._leases.last.get(worker, 0)
            lease = Lease(self.generation, self.version, share, self._stats, last)
            grants.append((worker_peer(worker), lease.pack()))
        idle = self.joined - set(self._leases.busy) if self.version == self.limit else ()
        return grants, self._leases.behind([*chosen, *sorted(idle)], self.version)

    # -- stage and commit ----------------------------------------------------------------------

    def _report(self, worker: int, report: Report) -> Outgoing:
        if not self._is_current(report.generation, report.pulled) or self._is_over(
            worker, report.incarnation
        ):
            return []
        if report.pulled > self.version:
            raise ProtocolError(
                f"REPORT of a push from version {report.pulled}, the newest is {self.version}"
            )
        push = PushId(worker, report.incarnation, report.sequence)
        if (
            isinstance(self._staging, StagedEach)
            and not self._staging.is_done(push)
            and not self._claim(push)
        ):
            raise ProtocolError(f"REPORT of {push}, for which worker {worker} has no lease")
        self._staging.report(push, report)
        return self._decide()

    def _is_current(self, generation: int, version: int) -> bool:
        """Return whether a push from a version, made in a generation, may still be committed."""
        return generation == self.generation and (
            version == self.version or not self._rule.together
        )

    def _version_staged(self, server: int, staged: VersionStaged) -> Outgoing:
        if not isinstance(self._staging, StagedTogether):
            raise ProtocolError("VERSION_STAGED under a rule that commits pushes one by one")
        if not self._is_current(staged.generation, staged.version):
            return []
        self._staging.staged(server, staged)
        return self._decide()

    def _push_staged(self, server: int, staged: PushStaged) -> Outgoing:
        if not isinstance(self._staging, StagedEach):
            raise ProtocolError(
                "PUSH_STAGED under a rule that commits all pushes of a version together"
            )
        if not self._is_current(staged.generation, staged.pulled):
            return []
        if self._is_over(staged.worker, staged.incarnation):
            return self._to_servers(Discard(self.generation, self.version, (staged.push,)))
        self._staging.staged(server, staged)
        return self._decide()

    def _take_note(self, logged: Logged) -> Outgoing:
        """Take note that a commit outlives this process."""
        if logged.version > self.version:
            raise ProtocolError(f"LOGGED of version {logged.version}, the last is {self.version}")
        self.logged = max(self.logged, logged.version)
        return []

    def _claim(self, push: PushId) -> bool:
        """Whether its worker was asked for a push, and has not reported another one."""
        return self._leases.claim(push)

    def _is_over(self, worker: int, incarnation: int) -> bool:
        """Whether a push was made by a worker that is gone."""
        known = worker in self.joined and self._lives[worker] == incarnation
        return not (known or self._rule.together)

    def _decide(self) -> Outgoing:
        out: Outgoing = []
        members = frozenset(self._members)
        while (ready := self._staging.ready()) and self._scheduled():
            commit, drop = self._rule.decide(self.version, members, ready)
            if drop:
                out += self._drop(drop)
            if not commit:
                break
            culprits = [] if self._nonfinite == "pass" else self._staging.culprits(commit)
            if culprits and self._nonfinite == "refuse":
                return out + self._refuse(commit, culprits[:MOST_CULPRITS])
            out += self._commit(commit, skip=bool(culprits))
        return out

    def _scheduled(self) -> bool:
        """Whether the schedule stands at the open step; towards a far one it goes a part of the way each time."""
        self._behind = self._schedule is not None and not self._schedule.reach(
            self.version // self._per_step
        )
        return not self._behind

    def _commit(self, chosen: tuple[Staged, ...], *, skip: bool) -> Outgoing:
        step = self.version // self._per_step
        try:
            hyper = self._hyperparameters(step)
        except BaseException as error:  # noqa: BLE001 - the user's schedule; sent to the driver with its traceback
            about: dict[str, Any] = {**describe_error(error)}
            return self._fail("schedule", **about)
        staleness = {push.worker: self.version - push.pulled for push in chosen}
        rate = 1.0 / max(1, *staleness.values()) if self._scale_rate else 1.0
        norm = self._staging.norm(chosen)
        clip = (
            1.0
            if norm is None or self._clip_norm is None or skip
            else clip_factor(norm, self._clip_norm)
        )
        self._step.add_norm(norm)
        self._history.add(
            entry := self._entry(chosen, hyper, rate, skip, clip), staleness.values(), skipped=skip
        )
        reports = self._staging.take(chosen)
        self._account(reports, staleness, step)
        self.version += 1
        self._since = self._now if self.version < self.limit else math.inf
        answers, readers = self._answer(chosen, reports)
        pushes = tuple(push.id for push in chosen)
        commit = Commit(
            *(self.generation, self.version, rate, pushes, readers),
            hyper=hyper if any(hyper) else None,
            skip=skip,
            clip=clip,
            entry=entry if self._witnessed and self._history.keeps_log else None,
        )
        out = self._to_servers(commit) + answers
        if self.version % self._per_step == 0:
            out += self._result(step + 1)
        return out

    def _account(self, reports: Reports, staleness: dict[int, int], step: int) -> None:
        """Add what was committed to the step that is being taken."""
        for worker, report in reports.items():
            assert isinstance(report, Report)
            self._step.add(report, staleness[worker])
            self._history.time(worker, report.timings, step)

    def _answer(
        self, chosen: tuple[Staged, ...], reports: Reports
    ) -> tuple[Outgoing, list[list[int]]]:
        """What those whose pushes were committed are told, and who is sent the new weights."""
        if self._rule.together:
            return [], [[push.worker, 0] for push in chosen]
        self._leases.commit(chosen)
        if self._per_step == 1:  # what the others are computing can only be dropped
            self._leases.give_back(self._leases.busy)
        grants, behind = self._lease()
        return grants, [[worker, 0] for worker in behind]

    def _entry(
        self, chosen: Sequence[Staged], hyper: list[dict[str, Any]], *rest: Any
    ) -> list[Any]:
        """One line of the log: version, pushes with their leases, hyperparameters, and the rest of a `Commit`."""
        pushes = []
        for push in chosen:
            own = push.pulled * self._pushes + push.worker
            lease = own if self._rule.together else self._leases.share_of(push.worker)
            pushes.append([push.worker, push.incarnation, push.sequence, push.pulled, lease])
        return [self.version + 1, pushes, hyper if any(hyper) else None, *rest]

    def _result(self, step: int) -> Outgoing:
        """Tells the client of a step that is whole."""
        result = driver.Result(self.generation, self.version, step, **self._step.end(self._stats))
        return [] if self._client is None else [(self._client, result.pack())]

    def _drop(self, pushes: tuple[Staged, ...]) -> Outgoing:
        """Will never be committed: their workers go on with new weights, others take their samples if any will come."""
        self._staging.take(pushes)
        self._history.dropped += len(pushes)
        back = self._leases.drop(pushes)
        others = self.limit - self.version - len(self._leases.busy) >= 2 * len(back)
        for lease in () if others else back:
            self._leases.ledger.give_back(lease)
        grants, behind = self._lease()
        for lease in (
            back if others else ()
        ):  # else who is too slow for a share gets it again and again
            self._leases.ledger.give_back(lease)
        readers = [[worker, 0] for worker in behind]
        discard = Discard(self.generation, self.version, tuple(push.id for push in pushes), readers)
        return self._to_servers(discard) + grants

    def _refuse(self, pushes: tuple[Staged, ...], culprits: Culprits) -> Outgoing:
        """Commit none of these pushes, which hold NaN or infinity."""
        return self._fail("nonfinite", culprits=culprits)

    # -- failure -------------------------------------------------------------------------------

    def _fail_for_loss(self) -> Outgoing:
        peer, why = next(iter(self.gone.items()))
        return self._fail("lost", peer=peer, why=why)

    def _failed(self, worker: int, failed: Failed) -> Outgoing:
        if failed.generation != self.generation:
            return []
        about = {
            "worker": worker,
            "error": failed.error,
            "traceback": failed.traceback,
            "kind": failed.kind,
        }
        return self._fail(
            "raised", reload=True, **about
        )  # the model may have written to its weights before

    def _fail(self, reason: str, *, reload: bool = False, **about: Any) -> Outgoing:
        """Give the open step up: nothing of it is applied, all staged pushes are void; see `Failure` for `about`."""
        out = self._begin_generation(reload=reload)
        if self._client is not None:
            step = self.version // self._per_step
            out.append(
                (
                    self._client,
                    driver.Failure(self.generation, self.version, step, reason, **about).pack(),
                )
            )
        return out
