"""The coordinator: decides what is committed. Events in, messages out; no I/O, no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from steepest.errors import ProtocolError, describe_error
from steepest.messages.fields import MOST
from steepest.messages.message import Kind, Message, Peer, server_peer, worker_peer
from steepest.optim.spec import Schedule, ScheduleState
from steepest.protocol.commit_rules import CommitRule, PushId, Staged
from steepest.protocol.history import History
from steepest.protocol.push_tracking import (
    MOST_CULPRITS,
    Report,
    StagedEach,
    StagedTogether,
    Staging,
    clip_factor,
    summarize,
)
from steepest.protocol.sample_leases import Leases
from steepest.protocol.sample_ledger import Ledger

Outgoing = list[tuple[Peer, Message]]
_MOST_WAITING = 64  # states that wait to be installed

#: Commits from one that tells servers where the schedule stands to the next: what another coordinator may have to go.
SCHEDULE_EVERY = 100


class Coordinator:
    """Membership, versions and commits of one job.

    Under a rule by which every member contributes to every version, workers go on by themselves up to a
    limit, each with its own share of the samples. Under any other, each push begins with a GRANT that
    leases the worker the next free share.

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
        waits: whether a worker that is lost is waited for, because another one will join in its place; otherwise the
            loss is a failure.
        witnessed: whether servers remember what is decided, so that it outlives this process: a client is told of a
            commit when a server elsewhere has heard of it.
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
        self._words = 0  # that servers were told
        self.logged = 0 if witnessed else math.inf  # the last version of which another process has heard
        self._stats = True
        self._client: Peer | None = None
        self._waiting: list[tuple[Peer, int]] = []  # clients that installed and wait for the members
        self._asked: dict[Peer, int] = {}  # the last request of each client: none is taken twice
        self._staging: Staging = StagedTogether(holding) if rule.together else StagedEach(holding)
        self._per_step = rule.versions_per_step(max(len(members), 1))  # versions that make one step
        self._pushes = rule.pushes_per_step(max(len(members), 1))  # pushes that make one step
        self._leases = Leases(rule, members)
        self._begun = False  # whether all members were there once
        self._part: list[tuple[Report, int]] = []  # of the step that is being taken: reports, and their staleness
        self._norms: list[float | None] = []  # of the same step: of each update's gradient
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
            case Kind.VERSION_STAGED | Kind.PUSH_STAGED | Kind.LOGGED if source.index not in self._servers:
                raise ProtocolError(f"{source} is not a server of this job")
            case Kind.JOIN:
                return self._join(source.index, message.incarnation)
            case Kind.REPORT:
                return self._report(source.index, message)
            case Kind.VERSION_STAGED | Kind.PUSH_STAGED:
                return self._staged(source.index, message)
            case Kind.FAILED:
                return self._failed(source.index, message)
            case Kind.LOGGED:
                if message.version > self.version:
                    raise ProtocolError(f"LOGGED of version {message.version}, the last is {self.version}")
                self.logged = max(self.logged, message.version)
                return []
            case Kind.GIVE_UP:
                return self._declared(message.values())
            case Kind.ASK | Kind.REVOKE | Kind.STOP | Kind.INSTALL if message.sequence <= self._asked.get(source, 0):
                return []  # a copy of one that was taken
            case Kind.ASK:
                return self._ask(source, message)
            case Kind.REVOKE:
                return self._revoke(source, message)
            case Kind.STOP:
                return self._stop(source, message)
            case Kind.READ:
                return self._read(source, message)
            case Kind.INSTALL:
                return self._install(source, message)
            case Kind.READ_COUNTERS:
                return [(source, Message(Kind.COUNTERS, sequence=message.sequence, meta=self._look()))]
            case Kind.READ_LOG:
                page = self._history.page(int(message.values()["first"]))
                return [(source, Message(Kind.LOG_PAGE, sequence=message.sequence, meta=page))]
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
        workers = overdue or sorted(absent or (self._members if self._rule.together else self._leases.busy))
        awaited = [str(peer) for peer in self._staging.awaited(workers)]
        return self._fail({"reason": "deadline", "awaited": awaited, "seconds": self._step_timeout})

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
            return self._fail(self._loss())
        return self._begin_generation(reload=False)  # whoever asks for the next step is told

    def _is_member(self, worker: int) -> bool:
        return worker in self._members

    # -- membership ----------------------------------------------------------------------------

    def _declared(self, told: dict[str, Any]) -> Outgoing:
        """The client says that a worker is gone, although its channel is open."""
        worker, life = int(told["worker"]), int(told["life"])
        known = self._waits and worker in self.joined and self._lives[worker] == life
        return self._wait_for(worker, str(told["why"])) if known else []

    def _wait_for(self, worker: int, reason: str) -> Outgoing:
        """A worker is gone, and another one will join in its place.

        Where every member contributes to every version the open step is void, and taken again then. Otherwise the
        others go on, also with what it was at.
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
            meta = {"worker": worker, "life": life, "pushes": [list(push) for push in lost]}
            out = self._to_servers(Kind.WORKER_ENDED, meta=meta) + self._go_on()
        if self._client is not None:
            left = {"worker": worker, "why": reason, "life": life}
            out.append((self._client, Message(Kind.WORKER_LOST, self.generation, version=self.version, meta=left)))
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
        meta = {"workers": sorted(self.joined), "reload": True}
        word = Message(Kind.MEMBERS, self.generation, version=self.version, meta=meta)
        joined = self._to_servers(Kind.WORKER_JOINED, meta={"worker": worker})
        return [(worker_peer(worker), word), *joined, *self._go_on()]

    def _begin_generation(self, *, reload: bool, again: bool = False) -> Outgoing:
        """Voids every staged push; servers send all weights (`reload`); gradients of these stay good (`again`)."""
        self.generation += 1
        self.limit = self.version
        self._staging.clear()
        self._since = math.inf
        self._leases.clear(self.joined, self.version)
        reload = reload or not self._rule.together  # who was in the middle of a push may hold older weights
        install = self._to_install() if self.joined == self._members else []  # they wait for the others
        meta = {"workers": sorted(self.joined), "reload": reload, "install": install, "again": again and not install}
        out = self._to_servers(Kind.MEMBERS, meta=meta)
        for worker in sorted(self.joined):
            out.append((worker_peer(worker), Message(Kind.MEMBERS, self.generation, version=self.version, meta=meta)))
        return out + (self._tell_installed() if install else [])

    def _to_install(self) -> list[list[Any]]:
        """Who has put what is to be the state from now on, and in which request."""
        return [[*client, sequence] for client, sequence in self._waiting]

    def _tell_installed(self) -> Outgoing:
        waiting, self._waiting = self._waiting, []
        return [
            (client, Message(Kind.INSTALLED, self.generation, sequence=sequence, version=self.version))
            for client, sequence in waiting
        ]

    def _state(self) -> dict[str, Any]:
        """What another coordinator needs to go on from here, beside the schedule."""
        return {"ledger": self._leases.state(), "history": self._history.counts()}

    def _where_scheduled(self) -> dict[str, ScheduleState]:
        """Where the schedule stands, if it can be told."""
        state = None if self._schedule is None else self._schedule.state()
        return {} if state is None else {"schedule": state}

    def _to_servers(self, kind: Kind, **fields: Any) -> Outgoing:
        if self._witnessed and kind is not Kind.SNAPSHOT:
            self._words += 1
            fields["meta"] = {**fields["meta"], "word": self._words, "state": self._state()}
            if kind is Kind.MEMBERS or (kind is Kind.COMMIT and self.version % SCHEDULE_EVERY == 0):
                fields["meta"] |= self._where_scheduled()
        return [
            (server_peer(server), Message(kind, generation=self.generation, version=self.version, **fields))
            for server in self._servers
        ]

    # -- clients -------------------------------------------------------------------------------

    def _ask(self, source: Peer, message: Message) -> Outgoing:
        self._client = source
        self._asked[source] = message.sequence
        meta = message.values()
        if self.gone:
            return self._fail(self._loss())
        if self.limit + meta["steps"] * self._per_step >= MOST:
            raise ProtocolError(f"ASK for {meta['steps']} steps: give fewer")
        self._stats = bool(meta.get("stats", True))
        if self.version == self.limit:
            self._since = math.inf  # the clock of a step starts when it is asked for
        self.limit += int(meta["steps"]) * self._per_step
        self.limit -= self.limit % self._per_step  # a step that was given up half-way is finished first
        return self._go_on()

    def _revoke(self, source: Peer, message: Message) -> Outgoing:
        """Take back all steps that are granted and not committed."""
        self._client = source
        self._asked[source] = message.sequence
        out = self._begin_generation(reload=False)
        revoked = Message(Kind.REVOKED, self.generation, sequence=message.sequence, version=self.version)
        return [*out, (source, revoked)]

    def _stop(self, source: Peer, message: Message) -> Outgoing:
        """Take back the steps that are granted and not begun."""
        self._client = source
        self._asked[source] = message.sequence
        busy = len(self._leases.busy)
        if self._rule.together:
            out = self._begin_generation(reload=False) if self.version < self.limit else []
        else:
            begun = self.version + (busy if self._per_step > 1 else bool(busy))
            self.limit = min(self.limit, begun + -begun % self._per_step)
            out = self._go_on()
        stopped = Message(Kind.STOPPED, self.generation, sequence=message.sequence, version=self.limit)
        return [*out, (source, stopped)]

    def _read(self, source: Peer, message: Message) -> Outgoing:
        """Orders a snapshot between two commits, so that all servers send one version."""
        wanted = message.values()
        meta = {"reader": [source.role, source.index], "what": wanted.get("what", "weights")}
        if "chunks" in wanted:
            meta["chunks"] = wanted["chunks"]
        if meta["what"] != "weights":
            meta["state"] = self._state()
        out = self._to_servers(Kind.SNAPSHOT, sequence=message.sequence, meta=meta)
        if "state" in meta:  # it may be long, and one server to pass it on is enough
            out[0][1].meta = {**meta, "state": {**meta["state"], **self._where_scheduled()}}
        return out

    def _install(self, source: Peer, message: Message) -> Outgoing:
        if len(self._waiting) >= _MOST_WAITING:
            raise ProtocolError(f"{_MOST_WAITING} states wait for the workers to join")
        self._asked[source] = message.sequence
        self._client = source
        if self.gone:
            return [(source, Message(Kind.INSTALL_REFUSED, sequence=message.sequence, meta=self._loss()))]
        self.version = self.limit = message.version
        self.logged = self.version if self._witnessed else math.inf
        step = message.version // self._per_step
        if message.values().get("anew"):  # a restored run begins its shares at that step
            self._leases.clear(self.joined, self.version)
            self._leases.ledger = Ledger(step * self._pushes)
        if state := message.values().get("state"):
            following, *returned = state.get("ledger", [step * self._pushes])
            self._leases.ledger = Ledger(following, returned)
            if "history" in state:
                self._history.go_on_from(state["history"])
        if self._schedule is not None:
            self._schedule.go_on_from((state or {}).get("schedule"))
            self._behind = True
        self._history.forget_log()
        self._part.clear()
        self._norms.clear()
        self._waiting.append((source, message.sequence))
        if self.joined == self._members:
            return self._begin_generation(reload=True)
        return []  # the client waits for the members

    def _look(self) -> dict[str, Any]:
        """Return the counters."""
        step = self.version // self._per_step
        taken = (Ledger(step * self._pushes) if self._rule.together else self._leases.ledger).look()
        return {"version": self.version, "generation": self.generation, "step": step, **taken, **self._history.look()}

    # -- going on ------------------------------------------------------------------------------

    def _go_on(self) -> Outgoing:
        """Tells workers how far they may go, or what to compute next."""
        if not self._begun or len(self.joined) < self._rule.needs(len(self._members)):
            return []
        if not self._rule.together:
            grants, behind = self._lease()
            if behind:
                readers = [[worker, 0] for worker in behind]
                return self._to_servers(Kind.REFRESH, meta={"readers": readers}) + grants
            return grants
        return [
            (worker_peer(worker), Message(Kind.GRANT, self.generation, version=self.limit, meta={"stats": self._stats}))
            for worker in sorted(self.joined)
        ]

    def _lease(self) -> tuple[Outgoing, list[int]]:
        """Leases shares to idle workers, the slowest first; also returns who of them needs new weights.

        When nothing more is to be done, everybody who is idle gets the last weights.
        """
        count = 0 if self.version == self.limit else math.inf  # how many may be busy
        if self._per_step > 1:  # each push is an update, and no more than are to be made may be on their way
            count = self.limit - self.version
        grants: Outgoing = []
        chosen = []
        for worker, lease in self._leases.choose(self.joined, count, self._now):
            chosen.append(worker)
            meta = {"share": lease, "stats": self._stats, "committed": self._leases.last.get(worker, 0)}
            grants.append((worker_peer(worker), Message(Kind.LEASE, self.generation, version=self.version, meta=meta)))
        idle = self.joined - set(self._leases.busy) if self.version == self.limit else ()
        return grants, self._leases.behind([*chosen, *sorted(idle)], self.version)

    # -- stage and commit ----------------------------------------------------------------------

    def _report(self, worker: int, message: Message) -> Outgoing:
        if message.generation != self.generation or (self._rule.together and message.version != self.version):
            return []  # of a generation or a version that is over
        if self._is_over(worker, message.incarnation):
            return []
        if message.version > self.version:
            raise ProtocolError(f"REPORT of a push from version {message.version}, the newest is {self.version}")
        push = PushId(worker, message.incarnation, message.sequence)
        if isinstance(self._staging, StagedEach) and not self._staging.is_done(push) and not self._claim(push):
            raise ProtocolError(f"REPORT of {push}, for which worker {worker} has no lease")
        self._staging.report(worker, message)
        return self._decide()

    def _staged(self, server: int, message: Message) -> Outgoing:
        if message.generation != self.generation or (self._rule.together and message.version != self.version):
            return []
        if (message.kind is Kind.VERSION_STAGED) != self._rule.together:
            raise ProtocolError(f"{message.kind.name} under a rule that does not commit such")
        if message.kind is Kind.PUSH_STAGED:
            worker = message.values()["worker"]
            if self._is_over(worker, message.incarnation):
                late = [worker, message.incarnation, message.sequence]
                return self._to_servers(Kind.DISCARD, meta={"pushes": [late], "readers": []})
        self._staging.staged(server, message)
        return self._decide()

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
                meta = {"reason": "nonfinite", "culprits": [list(culprit) for culprit in culprits[:MOST_CULPRITS]]}
                return out + self._refuse(commit, meta)
            out += self._commit(commit, skip=bool(culprits))
        return out

    def _scheduled(self) -> bool:
        """Whether the schedule stands at the open step; towards a far one it goes a part of the way each time."""
        self._behind = self._schedule is not None and not self._schedule.reach(self.version // self._per_step)
        return not self._behind

    def _commit(self, chosen: tuple[Staged, ...], *, skip: bool) -> Outgoing:
        step = self.version // self._per_step
        try:
            hyper = self._hyperparameters(step)
        except BaseException as error:  # noqa: BLE001 - the user's schedule; sent to the driver with its traceback
            return self._fail({"reason": "schedule", **describe_error(error)})
        staleness = {push.worker: self.version - push.pulled for push in chosen}
        rate = 1.0 / max(1, *staleness.values()) if self._scale_rate else 1.0
        norm = self._staging.norm(chosen)
        clip = 1.0 if norm is None or self._clip_norm is None or skip else clip_factor(norm, self._clip_norm)
        self._norms.append(norm)
        self._history.add(entry := self._entry(chosen, hyper, rate, skip, clip), staleness.values(), skipped=skip)
        reports = self._staging.take(chosen)
        self._part += [(reports[worker], late) for worker, late in staleness.items()]
        self._history.time({worker: report.meta.get("timings", {}) for worker, report in reports.items()}, step)
        self.version += 1
        self._since = self._now if self.version < self.limit else math.inf
        meta: dict[str, Any] = {"pushes": [list(push.id) for push in chosen]}
        meta |= {"hyper": hyper} if any(hyper) else {}
        meta |= {"entry": entry} if self._witnessed and self._history.keeps_log else {}
        if skip:
            meta["skip"] = True
        if clip != 1.0:
            meta["clip"] = clip
        answers, meta["readers"] = self._answer(chosen, reports)
        out = self._to_servers(Kind.COMMIT, weight=rate, meta=meta) + answers
        if self.version % self._per_step == 0:
            out += self._result(step + 1)
        return out

    def _answer(self, chosen: tuple[Staged, ...], reports: dict[int, Report]) -> tuple[Outgoing, list[list[int]]]:
        """What those whose pushes were committed are told, and who is sent the new weights."""
        if self._rule.together:
            return [], [[push.worker, 0] for push in chosen]
        self._leases.commit(chosen)
        if self._per_step == 1:  # what the others are computing can only be dropped
            self._leases.give_back(self._leases.busy)
        grants, behind = self._lease()
        return grants, [[worker, 0] for worker in behind]

    def _entry(self, chosen: Sequence[Staged], hyper: list[dict[str, Any]], *rest: Any) -> list[Any]:
        """One line of the log: version, pushes with their leases, hyperparameters, and the rest of a `Commit`."""
        pushes = []
        for push in chosen:
            own = push.pulled * self._pushes + push.worker
            lease = own if self._rule.together else self._leases.lease_of(push.worker)
            pushes.append([push.worker, push.incarnation, push.sequence, push.pulled, lease])
        return [self.version + 1, pushes, hyper if any(hyper) else None, *rest]

    def _result(self, step: int) -> Outgoing:
        """Tells the client of a step that is whole."""
        part, norms, self._part, self._norms = self._part, self._norms, [], []
        result = {"step": step, **summarize(part, norms, self._stats)}
        told = Message(Kind.RESULT, self.generation, version=self.version, meta=result)
        return [] if self._client is None else [(self._client, told)]

    def _drop(self, pushes: tuple[Staged, ...]) -> Outgoing:
        """Will never be committed: their workers go on with new weights, others take their samples if any will come."""
        self._staging.take(pushes)
        self._history.dropped += len(pushes)
        back = self._leases.drop(pushes)
        others = self.limit - self.version - len(self._leases.busy) >= 2 * len(back)
        for lease in () if others else back:
            self._leases.ledger.give_back(lease)
        grants, behind = self._lease()
        for lease in back if others else ():  # else who is too slow for a share gets it again and again
            self._leases.ledger.give_back(lease)
        meta = {"pushes": [list(push.id) for push in pushes], "readers": [[worker, 0] for worker in behind]}
        return self._to_servers(Kind.DISCARD, meta=meta) + grants

    def _refuse(self, pushes: tuple[Staged, ...], why: dict[str, Any]) -> Outgoing:
        """They hold NaN or infinity."""
        return self._fail(why)

    # -- failure -------------------------------------------------------------------------------

    def _loss(self) -> dict[str, Any]:
        peer, why = next(iter(self.gone.items()))
        return {"reason": "lost", "peer": [peer.role, peer.index], "why": why}

    def _failed(self, worker: int, message: Message) -> Outgoing:
        if message.generation != self.generation:
            return []
        failure = {**message.values(), "reason": "raised", "worker": worker}
        return self._fail(failure, reload=True)  # the model may have written to its weights before

    def _fail(self, meta: dict[str, Any], *, reload: bool = False) -> Outgoing:
        """Gives the open step up: nothing of it is applied, all staged pushes are void."""
        meta["step"] = self.version // self._per_step
        out = self._begin_generation(reload=reload)
        if self._client is not None:
            out.append((self._client, Message(Kind.FAILURE, self.generation, version=self.version, meta=meta)))
        return out
