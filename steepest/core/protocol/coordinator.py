"""The coordinator: decides what is committed. Events in, messages out; no I/O, no tensors.

`Coordinator` stages, commits, drops and refuses. Its two variants know who may push, and what they are granted and
answered: that of a job, with numbered workers (`job_coordinator`), and that of a parameter server by itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from steepest.core.messages import driver
from steepest.core.messages.gradients import (
    CommitOrder,
    Discard,
    PushStaged,
    Report,
    VersionStaged,
)
from steepest.core.messages.message import Kind, Message, Peer, server_peer
from steepest.core.messages.schema import encode_body
from steepest.core.messages.snapshots import Read, Snapshot
from steepest.core.protocol.commit_rules import Staged, Verdict, decided
from steepest.core.protocol.commit_state import CommitState, Outgoing, with_rates
from steepest.core.protocol.push_tracking import (
    MOST_CULPRITS,
    Reports,
    StagedEach,
    StagedTogether,
    UnlikeError,
    agreed,
    clip_factor,
)
from steepest.core.protocol.sample_leases import Ledger
from steepest.core.status import Status
from steepest.errors import ProtocolError, describe_error

#: (worker, sequence) of the workers that are sent new weights, and of the push that these answer;
#: sequence 0 where they answer none.
Readers = list[tuple[int, int]]


@dataclass(frozen=True)
class Updates:
    """How gradients become an update.

    Attributes:
        hyperparameters: returns the hyperparameters of a step that differ from the servers' own, by
            parameter group, unless a worker's report has them.
        nonfinite: "refuse", "skip" or "pass" an update with NaN or infinity.
        clip_norm: the greatest norm of an update's gradient; None for any.
        sums: whether the mean gradient of an update is multiplied by the weight of its samples.
        scale_rate: whether the learning rate is divided by the staleness.
        clock: returns the time in seconds since the epoch, which commits then carry; None if no store needs it.
        groups: the servers' own hyperparameters, by parameter group, for errors.
    """

    hyperparameters: Callable[[int], list[dict[str, Any]]] = lambda step: []
    nonfinite: str = "refuse"
    clip_norm: float | None = None
    sums: bool = False
    scale_rate: bool = False
    clock: Callable[[], float] | None = None
    groups: Sequence[Mapping[str, Any]] = ()


class Made(NamedTuple):
    """The pushes of which a version was made."""

    pushes: tuple[Staged, ...]  # in the order in which they are added up
    reports: Reports  # of these, by worker
    staleness: Mapping[int, int]  # of these, by worker
    norm: float | None  # of the gradient; None where it is not known
    skipped: bool  # whether the version leaves them out, because of NaN or infinity
    versions: Sequence[int]  # how many versions each push completes


class Coordinator(ABC):
    """Decides which staged pushes become versions, and orders reads between them.

    Methods are called on the thread of the process' router, and return the messages to send, in order.

    Args:
        state: versions and staged pushes.
        updates: how gradients become an update.

    Attributes:
        limit: the version up to which steps are granted; 0 if no client asks for steps.
        torn: the fields of a `Failure` once a server's optimizer raised in a committed update, else None. Nothing is
            committed after that.
    """

    def __init__(self, state: CommitState, updates: Updates) -> None:
        self.state = state
        self.limit = 0
        self.torn: Mapping[str, Any] | None = None
        self._updates = updates
        # by client, the number of its last request; a copy of it is not carried out again
        self._requests: dict[Peer, int] = {}
        # by reader, its request to read a version that is not committed yet
        self._waiting: dict[Peer, Read] = {}
        self._now = math.inf  # until the caller first tells the time

    @property
    def version(self) -> int:
        """Number of updates committed."""
        return self.state.version

    @property
    def generation(self) -> int:
        """Number of the present membership."""
        return self.state.generation

    @property
    def logged(self) -> float:
        """The newest version that clients may learn of; infinity for all."""
        return self.state.logged

    @property
    def holding(self) -> frozenset[int]:
        """The servers that hold trainable chunks, whose weights workers wait for after a commit."""
        return self.state.staging.holding

    # -- events --------------------------------------------------------------------------------

    def handle(self, source: Peer, message: Message) -> Outgoing:
        """Act on one message; return the messages to send, see `decide` and `settle`."""
        return self.settle() + self.decide(source, message) + self.settle()

    def decide(self, source: Peer, message: Message) -> Outgoing:
        """Act on one message; return the messages to send, except those that `settle` returns afterwards.

        If this raises, the next `settle` still returns the results of earlier steps. Call `settle` before
        messages of clients and of membership, which may change these results.

        Raises:
            ProtocolError: a kind that no coordinator receives, a sender that may not send it, or
                fields that contradict what is known.
        """
        match message.kind:
            case Kind.VERSION_STAGED | Kind.PUSH_STAGED | Kind.LOGGED if (
                source.index not in self.state.servers
            ):
                raise ProtocolError(f"{source} is not a server of this job")
            case Kind.REPORT | Kind.PUSHED:
                return self._decide() if self._report(source, message) else []
            case Kind.VERSION_STAGED:
                return self._version_staged(source.index, message.body)
            case Kind.PUSH_STAGED:
                return self._push_staged(source.index, message.body)
            case Kind.LOGGED:
                self.state.confirm(message.body.version)
                return self._known()
            case Kind.READ:
                return self._read(source, message.body)
            case Kind.READ_COUNTERS:
                return [(source, self._counters(message.body.sequence).pack())]
            case Kind.READ_LOG:
                return [(source, self._log_page(message.body).pack())]
            case Kind.ASK | Kind.REVOKE | Kind.STOP | Kind.INSTALL:
                return self._request(source, message)
            case _:
                return self._take(source, message)

    def tick(self, now: float) -> Outgoing:
        """Act on the passing of time; `now` is in seconds on the caller's monotonic clock."""
        state, behind = self.state, self.state.schedule_behind
        self._now = now
        out = self.settle() + self._tick()
        if behind:
            out += self._decide() if state.reach_schedule() else []
        return out + self.settle()

    def lost(self, peer: Peer, reason: str) -> Outgoing:
        """Act on the loss of a peer, whose channel closed for `reason`."""
        self._requests.pop(peer, None)
        self._waiting.pop(peer, None)
        return self.settle() + self._lost(peer, reason)

    def _request(self, client: Peer, message: Message) -> Outgoing:
        """Carry out a client's request, unless it is a copy of an earlier one."""
        number: int = message.body.sequence
        if number <= self._requests.get(client, 0):
            return []
        out = self._take(client, message)
        self._requests[client] = number
        return out

    # -- who may push, and the answers to pushes -----------------------------------------------

    @abstractmethod
    def doing(self) -> Status:
        """Return what the coordinator waits for; any thread may call this at any time."""

    def settle(self) -> Outgoing:
        """Return the results of the steps committed since the last call, and count their pushes.

        Only clients wait for these: messages to servers and workers may be sent first.
        """
        return []

    @abstractmethod
    def _take(self, source: Peer, message: Message) -> Outgoing:
        """Act on a message about membership or steps; a client's request comes here once, however often it was sent.

        Raises:
            ProtocolError: this coordinator takes no message of that kind.
        """

    @abstractmethod
    def _report(self, source: Peer, message: Message) -> bool:
        """Stage the report of a push; return whether it may complete one.

        Raises:
            ProtocolError: it contradicts what is known.
        """

    @abstractmethod
    def _lost(self, peer: Peer, reason: str) -> Outgoing:
        """Act on the loss of a peer, whose channel closed for `reason`."""

    def _chosen(self, complete: Sequence[Staged]) -> Verdict:
        """Return which complete pushes, oldest first, make the next version, and which never will."""
        return decided(self.state.rule, self.state.version, self.state.members, complete)

    def _versions_of(self, pushes: Sequence[Staged]) -> Sequence[int]:
        """Return how many versions each push of a commit completes: the last one completes a version."""
        return [*[0] * (len(pushes) - 1), 1]

    def _fragments(self, reports: Reports) -> Sequence[int]:
        """Return the parts of the model that a commit changes, ascending; empty if each version changes all of it."""
        return ()

    def _tick(self) -> Outgoing:
        """Give up overdue steps."""
        return []

    @abstractmethod
    def _is_over(self, worker: int, incarnation: int) -> bool:
        """Return whether the process that made a push has ceased to be a member."""

    @abstractmethod
    def _committed(self, made: Made) -> tuple[Readers, Outgoing]:
        """Note that pushes became the present version.

        Returns:
            The workers that are sent the new weights, and the messages to send after the commit.
        """

    def _known(self) -> Outgoing:
        """Return the answers that waited until another server knew their version."""
        return []

    @abstractmethod
    def _dropped(self, pushes: tuple[Staged, ...]) -> tuple[Readers, Outgoing]:
        """Note that pushes will never be committed; return the same as `_committed`."""

    def _audit(self) -> tuple[Outgoing, bool]:
        """Compare the reports of a staged step; return messages, and whether the step may be committed."""
        return [], True

    @abstractmethod
    def _refuse(
        self, pushes: tuple[Staged, ...], reason: str, details: Mapping[str, Any]
    ) -> Outgoing:
        """Give up pushes that the rule chose for the next version; afterwards they are not staged any more.

        Args:
            pushes: all that were chosen.
            reason: "nonfinite", "schedule", "unlike", or "optimizer" for `torn`.
            details: further fields of the `Failure`.
        """

    # -- reads ---------------------------------------------------------------------------------

    def _read(self, source: Peer, read: Read) -> Outgoing:
        """Order a snapshot between two commits, so that all servers send one version."""
        state = self.state
        if read.at > state.version:
            self._waiting[source] = read
            return []
        results = self.settle()
        passed_on = None if read.what in ("weights", "opaque") else state.recovery_state()
        order = Snapshot(
            *(state.generation, read.sequence, state.version),
            reader=source,
            what=read.what,
            chunks=read.chunks,
            options=read.options,
            state=passed_on,
        )
        orders = [order] * len(state.servers)
        if passed_on is not None:  # the schedule's may be long: one server passes it on
            orders[0] = replace(order, state={**passed_on, **state.schedule_state()})
        return results + [
            (server_peer(server), order.pack())
            for server, order in zip(state.servers, orders, strict=True)
        ]

    def _reads_due(self) -> Outgoing:
        """Order the snapshots whose version has just been committed."""
        ready = {
            peer: read for peer, read in self._waiting.items() if read.at <= self.state.version
        }
        for peer in ready:
            del self._waiting[peer]
        return [order for peer, read in ready.items() for order in self._read(peer, read)]

    def _counters(self, sequence: int) -> driver.Counters:
        """Return the answer to a request for counters."""
        state = self.state
        ledger = state.leases.ledger
        if not state.leases_samples:
            ledger = Ledger(state.step * state.pushes_per_step)
        return driver.Counters(
            state.generation,
            sequence,
            state.version,
            state.step,
            **ledger.counters(),
            **state.history.counters(),
        )

    def _log_page(self, read: driver.ReadLog) -> driver.LogPage:
        """Return the page of the log that a request asks for."""
        return driver.LogPage(read.sequence, **self.state.history.page(read.first))

    # -- stage and commit ----------------------------------------------------------------------

    def _version_staged(self, server: int, staged: VersionStaged) -> Outgoing:
        """Note that a server has reduced the gradients of all members for the next version."""
        if not isinstance(self.state.staging, StagedTogether):
            raise ProtocolError("VERSION_STAGED under a rule that commits pushes one by one")
        if not self.state.is_current(staged.generation, staged.version):
            return []
        self.state.staging.staged(server, staged)
        return self._decide()

    def _push_staged(self, server: int, staged: PushStaged) -> Outgoing:
        """Note that a server has staged a push; discard the push of a process that is no member."""
        state = self.state
        if not isinstance(state.staging, StagedEach):
            raise ProtocolError(
                "PUSH_STAGED under a rule that commits all pushes of a version together"
            )
        if not state.is_current(staged.generation, staged.pulled):
            return []
        if self._is_over(staged.worker, staged.incarnation):
            return state.to_servers(Discard(state.generation, state.version, (staged.push,)))
        state.staging.staged(server, staged)
        return self._decide()

    def _decide(self) -> Outgoing:
        """Commit, drop or refuse every complete push that the rule decides on."""
        state = self.state
        out: Outgoing = []
        while (complete := state.staging.complete()) and state.reach_schedule():
            chosen, late = self._chosen(complete)
            if late:
                out += self._drop(late)
            if not chosen:
                break
            messages, may_commit = self._audit()
            out += messages
            if not may_commit:
                break
            skip = state.staging.overflowed()
            culprits = [] if self._updates.nonfinite == "pass" else state.staging.culprits(chosen)
            if culprits and self._updates.nonfinite == "refuse" and not skip:
                details = {"culprits": culprits[:MOST_CULPRITS]}
                out += self._refuse(chosen, "nonfinite", details)
            else:
                out += self._commit(chosen, skip=skip or bool(culprits))
        return out

    def _commit(self, pushes: tuple[Staged, ...], *, skip: bool) -> Outgoing:
        """Make pushes the next version, or a version that changes nothing (`skip`)."""
        state = self.state
        if (torn := self.torn) is not None:
            return self._refuse(pushes, "optimizer", torn)
        staleness = {push.worker: state.version - push.pulled for push in pushes}
        rate = 1.0 / max(1, *staleness.values()) if self._updates.scale_rate else 1.0
        norm = state.staging.norm(pushes)
        reports = state.staging.take(pushes)
        try:
            own_hyper, own_clip = agreed(reports, self._updates.groups, needs_all=state.needs_all)
            hyper = (
                self._updates.hyperparameters(state.step)
                if own_hyper is None
                else with_rates(own_hyper, state.rates, state.step)
            )
        except UnlikeError as error:
            return self._refuse(pushes, "unlike", {"why": str(error)})
        except BaseException as error:  # noqa: BLE001 - the user's; sent to the driver
            return self._refuse(pushes, "schedule", {**describe_error(error)})
        clip, most = 1.0, own_clip or self._updates.clip_norm
        if most is not None and not skip:
            assert norm is not None, "neither jobs nor reports ask for clipping under such a rule"
            clip = clip_factor(norm, most)
        if self._updates.sums:
            clip *= math.fsum(r.total for r in reports.values() if isinstance(r, Report))
        versions = self._versions_of(pushes)
        made = sum(versions)
        clock = 0 if self._updates.clock is None else int(self._updates.clock())
        entry = self._entry((made, clock), pushes, reports, hyper, rate, skip, clip)
        state.history.add(entry, staleness.values(), skipped=skip)
        state.advance(made)
        readers, answers = self._committed(Made(pushes, reports, staleness, norm, skip, versions))
        results = self.settle() if state.is_witnessed else []
        commit = CommitOrder(
            *(state.generation, state.version, rate, tuple(push.id for push in pushes), readers),
            hyper=hyper if any(hyper) else None,
            skip=skip,
            clip=clip,
            entry=state.log_entry(entry),
            made=made,
            clock=clock,
            fragments=self._fragments(reports),
            results=[encode_body(result) for _, result in results],
        )
        return state.to_servers(commit) + answers + results + self._reads_due()

    def _entry(
        self,
        last: tuple[int, int],
        pushes: Sequence[Staged],
        reports: Reports,
        hyper: list[dict[str, Any]],
        *rest: Any,
    ) -> list[Any]:
        """Return the log's entry of a commit, as `steepest.core.engine.commit_log.Commit.from_entry` takes it.

        Args:
            last: the number of versions that the commit makes, and its clock.
        """
        state, (made, clock) = self.state, last
        entries: list[list[Any]] = []
        for push in pushes:
            share: int | list[int] | None = push.pulled * state.pushes_per_step + push.worker
            report = reports[push.worker]
            if state.leases_samples:
                share = None
                if shares := state.leases.shares_of(push.worker):
                    part = (
                        [report.fragment] if isinstance(report, Report) and report.fragment else []
                    )
                    many = part or len(shares) > 1
                    share = [shares[0], len(shares), *part] if many else shares[0]
            entry: list[Any] = [push.worker, push.incarnation, push.sequence, push.pulled, share]
            if isinstance(report, Report) and report.more:
                entry += report.more
            entries.append(entry)
        more = [] if last == (1, 0) else [made, clock] if clock else [made]
        return [state.version + made, entries, hyper if any(hyper) else None, *rest, *more]

    def _drop(self, pushes: tuple[Staged, ...]) -> Outgoing:
        """Discard pushes that will never be committed; their workers go on with new weights."""
        state = self.state
        state.staging.take(pushes)
        state.history.count_dropped(len(pushes))
        readers, grants = self._dropped(pushes)
        ids = tuple(push.id for push in pushes)
        return state.to_servers(Discard(state.generation, state.version, ids, readers)) + grants
