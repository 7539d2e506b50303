"""The client: the driver's end. Asks for steps, reads one version over all servers, installs state."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from steepest.checkpoint.files import Record
from steepest.engine.commit_log import Commit
from steepest.engine.optimizer_records import checked_state_size, state_fields, state_tensor
from steepest.errors import ConfigurationError, PeerLostError, ProtocolError, ShutdownError
from steepest.messages.driver import (
    Ask,
    Counters,
    Failure,
    GiveUp,
    LogPage,
    ReadCounters,
    ReadLog,
    Result,
    Revoke,
    Revoked,
    Stop,
    Stopped,
    WorkerLost,
)
from steepest.messages.gradients import Weights
from steepest.messages.message import COORDINATOR, Kind, Message, Peer, Send, server_peer
from steepest.messages.schema import Body
from steepest.messages.snapshots import (
    Install,
    Installed,
    InstallRefused,
    Put,
    PutReceived,
    PutState,
    Read,
    ReplaceState,
    SnapshotEnd,
    StateTensor,
)
from steepest.tensors.layout import ParameterLayout

T = TypeVar("T")
Holders = Sequence[Sequence[int]]
#: What comes of the steps that a client has asked for, and of the processes that take them.
Outcome = Result | Failure | WorkerLost | PeerLostError


@dataclass
class Snapshot:
    """Everything asked for, at one version.

    Attributes:
        weights: the flat vector.
        records: optimizer state, slice by slice; empty unless asked for.
        state: of the coordinator, with the optimizer's, see `RecoveredState`.
    """

    version: int
    weights: torch.Tensor
    records: list[Record] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Position:
    """Where a job stands: generation and version; it only grows."""

    generation: int
    version: int


@dataclass
class _Read:
    future: Future[Snapshot]
    snapshot: Snapshot
    awaited: set[int]  # servers that have not sent everything
    records: dict[tuple[Any, ...], Record] = field(
        default_factory=dict
    )  # by place: a copy changes nothing


@dataclass
class _Install:
    future: Future[Position]
    version: int
    unacknowledged: set[int]  # numbers of messages
    anew: bool = False
    state: dict[str, Any] | None = None


class Client:
    """A state machine over messages; its methods are called on the router's thread.

    Args:
        layout: of the model.
        holders: the servers of each chunk.
        num_servers: how many there are.
        send: how to send.

    Attributes:
        lost_peer: the first that was lost, as far as the client has heard.
    """

    def __init__(
        self, layout: ParameterLayout, holders: Holders, num_servers: int, send: Send
    ) -> None:
        #: in the order of events; an error stands for the loss of the coordinator or of a server
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.position = Position(0, 0)
        self._layout = layout
        self._holders = holders
        self._servers = num_servers
        self._send = send
        self._requests = 0
        self._reads: dict[int, _Read] = {}
        self._installs: dict[int, _Install] = {}
        self._answers: dict[int, Future[Any]] = {}  # of requests that one message answers
        self._left: set[tuple[int, int]] = (
            set()
        )  # workers and their lives, of which it has heard that they ended
        self._gone: PeerLostError | None = None
        self.lost_peer: Peer | None = None

    def ask(self, steps: int, stats: bool) -> None:
        """Grants that many more steps; each ends as one entry of `outcomes`."""
        if self._gone is not None:
            while (
                not self.outcomes.empty()
            ):  # results of earlier steps, later than the word that somebody is gone
                self.outcomes.get()
            self.outcomes.put(self._gone)
            return
        self._requests += 1
        self._send(COORDINATOR, Ask(self._requests, steps, stats).pack())

    def revoke(self) -> Future[Position]:
        """Takes back what is granted but not committed; the future tells where the job stands then."""
        return self._request(Revoke)

    def stop(self) -> Future[int]:
        """Have workers stop at the end of a step soon; the future holds the last version that will come."""
        return self._request(Stop)

    def _request(self, make: Callable[[int], Body]) -> Future[Any]:
        """Send the coordinator what one message answers, made from its number; the future holds the answer."""
        self._requests += 1
        future: Future[Any] = Future()
        self._answers[self._requests] = future
        self._send(COORDINATOR, make(self._requests).pack())
        return self._unless_gone(future)

    def read(self, what: str) -> Future[Snapshot]:
        """The weights (`what` is "weights") or all state ("state"), at one version over all servers.

        Or, once all of them are there, only which version that is, and the coordinator's state
        ("standing").
        """
        self._requests += 1
        weights = torch.empty(0) if what == "standing" else self._layout.allocate()
        read = _Read(Future(), Snapshot(-1, weights), set(range(self._servers)))
        self._reads[self._requests] = read
        self._send(COORDINATOR, Read(self._requests, what).pack())
        return self._unless_gone(read.future)

    def install(
        self,
        version: int,
        weights: torch.Tensor | None,
        records: list[Record] | None,
        state: dict[str, Any] | None = None,
    ) -> Future[Position]:
        """Makes these the weights, as that version; with `records`, the optimizer's state too, and samples begin anew.

        Args:
            version: from now on.
            weights: flat; None for those that servers have, and their optimizers' state.
            records: optimizer state; None to leave it, and the order of samples, as they are.
            state: of the coordinator, or parts of it, see `RecoveredState`; what is missing begins
                anew, but for the schedule, which then has to find its way.
        """
        self._requests += 1
        parts = [] if weights is None else self._puts(weights, records)
        install = _Install(Future(), version, set(range(len(parts))), records is not None, state)
        self._installs[self._requests] = install
        for number, (server, part) in enumerate(parts):
            self._send(server_peer(server), part(number).pack())
        if not parts:
            self._order(self._requests, install)
        return self._unless_gone(install.future)

    def _puts(
        self, weights: torch.Tensor, records: list[Record] | None
    ) -> list[tuple[int, Callable[[int], Put | PutState | ReplaceState]]]:
        """Return what each server is sent of a state, made from the number by which it is acknowledged."""
        request = self._requests
        parts: list[tuple[int, Callable[[int], Put | PutState | ReplaceState]]] = []
        for chunk, holders in enumerate(self._holders):
            view = self._layout.chunk_view(weights, chunk).clone()
            parts += [
                (server, partial(Put, request, chunk=chunk, payload=view)) for server in holders
            ]
        if records is not None:
            parts += [(server, partial(ReplaceState, request)) for server in range(self._servers)]
            for chunk, about, value in records:
                fields = state_fields(about, value.clone())
                parts += [
                    (server, _state_part(request, chunk, fields)) for server in self._holders[chunk]
                ]
        return parts

    def declare_lost(self, worker: int, life: int, why: str) -> None:
        """Has a worker given up that is silent or cut off; a WORKER_LOST in `outcomes` says when it is."""
        self._send(COORDINATOR, GiveUp(worker, life, why).pack())

    def counters(self) -> Future[Counters]:
        """Ask for the coordinator's counters."""
        return self._request(ReadCounters)

    def log_page(self, first: int) -> Future[LogPage]:
        """Ask for some entries of the coordinator's log, from `first` on."""
        return self._request(lambda number: ReadLog(number, first))

    def _unless_gone(self, future: Future[T]) -> Future[T]:
        """Whoever is gone will not answer: the future fails now."""
        if self._gone is not None:
            self._fail_all(self._gone)
        return future

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Where an arriving payload goes."""
        read = self._reads.get(message.sequence)
        if read is None or (
            message.source is not None and message.source.index not in read.awaited
        ):
            return None  # nobody waits for it any more
        if message.kind is Kind.WEIGHTS and 0 <= message.chunk < len(self._layout.chunks):
            view = self._layout.chunk_view(read.snapshot.weights, message.chunk)
            if view.numel() == size:
                return view
        elif message.kind is Kind.STATE:
            return torch.empty(checked_state_size(message, size), dtype=torch.uint8)
        raise ProtocolError(
            f"a client takes no {message.kind.name} of {size} bytes for chunk {message.chunk}"
        )

    def handle(self, source: Peer, message: Message) -> None:  # noqa: PLR0915 - one case for each kind
        """Acts on one message."""
        match message.kind:
            case Kind.WORKER_LOST:
                lost = WorkerLost.unpack(message)
                if (life := (lost.worker, lost.life)) not in self._left:
                    self._left.add(life)
                    self._move_to(lost)
                    self.outcomes.put(lost)
            case Kind.RESULT:
                self._end_step(Result.unpack(message))
            case Kind.FAILURE:
                self._end_step(Failure.unpack(message))
            case Kind.WEIGHTS | Kind.STATE | Kind.SNAPSHOT_END:
                if message.sequence in self._reads:
                    self._take(source, message, self._reads[message.sequence])
            case Kind.PUT_RECEIVED:
                self._acknowledge(PutReceived.unpack(message))
            case Kind.INSTALLED:
                self._move_to(Installed.unpack(message))
                if (install := self._installs.pop(message.sequence, None)) is not None:
                    install.future.set_result(self.position)
            case Kind.INSTALL_REFUSED:
                refused = InstallRefused.unpack(message)
                self.lost_peer = self.lost_peer or refused.peer
                if (install := self._installs.pop(refused.sequence, None)) is not None:
                    why = f"nothing was installed: {refused.peer} is gone ({refused.why})"
                    install.future.set_exception(PeerLostError(why))
            case Kind.REVOKED:
                self._move_to(revoked := Revoked.unpack(message))
                self._answer(revoked.sequence, self.position)
            case Kind.STOPPED:
                stopped = Stopped.unpack(message)
                self._answer(stopped.sequence, stopped.limit)
            case Kind.COUNTERS:
                counters = Counters.unpack(message)
                self._answer(counters.sequence, counters)
            case Kind.LOG_PAGE:
                page = LogPage.unpack(message)
                self._answer(page.sequence, page)
            case _:
                raise ProtocolError(f"a client does not take {message.kind.name}")

    def _move_to(self, told: WorkerLost | Installed | Revoked) -> None:
        self.position = max(self.position, Position(told.generation, told.version))

    def _end_step(self, outcome: Result | Failure) -> None:
        position = Position(outcome.generation, outcome.version)
        if position > self.position:  # else it is a copy: a failure begins a generation
            self.position = position
            self.outcomes.put(outcome)

    def _answer(self, sequence: int, answer: Any) -> None:
        if (waiting := self._answers.pop(sequence, None)) is not None:
            waiting.set_result(answer)

    def _take(self, source: Peer, message: Message, read: _Read) -> None:
        if source.index not in read.awaited:
            return  # a copy
        if message.kind is Kind.WEIGHTS:
            weights = Weights.unpack(message)
            view = self._layout.chunk_view(read.snapshot.weights, weights.chunk)
            if weights.payload is not None and weights.payload.data_ptr() != view.data_ptr():
                view.copy_(weights.payload)
        elif message.kind is Kind.STATE:
            part = StateTensor.unpack(message)
            place = (part.chunk, part.name, part.key, part.start)
            read.records[place] = (part.chunk, part.about, state_tensor(part.about, part.payload))
        else:
            self._end_snapshot(source, SnapshotEnd.unpack(message), read)

    def _end_snapshot(self, source: Peer, end: SnapshotEnd, read: _Read) -> None:
        if read.snapshot.version not in (-1, end.version):
            raise ProtocolError(
                f"versions {read.snapshot.version} and {end.version} in one snapshot"
            )
        read.snapshot.version = end.version
        read.snapshot.state |= end.state or {}
        read.awaited.discard(source.index)
        if not read.awaited:
            del self._reads[end.sequence]
            read.snapshot.records += read.records.values()
            read.future.set_result(read.snapshot)

    def _acknowledge(self, received: PutReceived) -> None:
        install = self._installs.get(received.sequence)
        if install is None or received.number not in install.unacknowledged:
            return  # a copy
        install.unacknowledged.discard(received.number)
        if not install.unacknowledged:
            self._order(received.sequence, install)

    def _order(self, sequence: int, install: _Install) -> None:
        self._send(
            COORDINATOR, Install(sequence, install.version, install.anew, install.state).pack()
        )

    def lost(self, peer: Peer, reason: str) -> None:
        """A server or the coordinator is gone: whatever waits for it fails, now and later."""
        if peer.role in ("server", "coordinator") and self._gone is None:
            self._gone = PeerLostError(f"{peer} is gone ({reason})")
            self.lost_peer = self.lost_peer or peer
            self._fail_all(self._gone)
            self.outcomes.put(self._gone)

    def close(self) -> None:
        """Nothing will arrive any more."""
        self._fail_all(ShutdownError("the trainer is shut down"))

    def _fail_all(self, error: PeerLostError | ShutdownError) -> None:
        reads, self._reads = self._reads, {}
        installs, self._installs = self._installs, {}
        answers, self._answers = self._answers, {}
        futures: list[Future[Any]] = [*(read.future for read in reads.values()), *answers.values()]
        futures += [install.future for install in installs.values()]
        for future in futures:
            future.set_exception(error)

    def tick(self, now: float) -> None:
        """Deadlines are those of the callers."""


def _state_part(request: int, chunk: int, fields: dict[str, Any]) -> Callable[[int], PutState]:
    return lambda number: PutState(request, chunk, number=number, **fields)


def read_log(client: Client) -> Future[list[Commit]]:
    """All of the coordinator's log, page by page; called on the router's thread.

    Raises:
        ConfigurationError: it keeps none (in the future).
    """
    everything: Future[list[Commit]] = Future()
    commits: list[Commit] = []

    def take(page: Future[LogPage]) -> None:
        if page.exception() is not None:
            everything.set_exception(page.exception())
            return
        entries = page.result().log
        if entries is None:
            everything.set_exception(
                ConfigurationError("no log was kept: give RunConfig(keep_log=True)")
            )
            return
        commits.extend(Commit.from_entry(entry) for entry in entries)
        if len(commits) < page.result().length:
            client.log_page(len(commits)).add_done_callback(take)
        else:
            everything.set_result(commits)

    client.log_page(0).add_done_callback(take)
    return everything
