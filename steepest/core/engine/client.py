"""The client: the driver's role, which asks for steps, reads the state and installs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from steepest.core.engine.commit_log import Commit
from steepest.core.engine.optimizer_records import checked_state_size, state_fields, state_tensor
from steepest.core.engine.shared_state import SharedState
from steepest.core.messages.driver import (
    AskForSteps,
    AuditDifference,
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
from steepest.core.messages.fields import RateChanges
from steepest.core.messages.gradients import Weights
from steepest.core.messages.message import COORDINATOR, Kind, Message, Peer, Send, server_peer
from steepest.core.messages.schema import Body
from steepest.core.messages.snapshots import (
    Install,
    Installed,
    Options,
    Put,
    PutReceived,
    PutState,
    Read,
    ReadOn,
    Refused,
    ReplaceState,
    SnapshotEnd,
    StateTensor,
)
from steepest.core.optim.portable import Record
from steepest.core.status import Status
from steepest.core.system import system
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    ShutdownError,
    described_by,
    listed,
    raised_by_user,
)

T = TypeVar("T")
Holders = Sequence[Sequence[int]]
#: What a client hears of the steps that it has asked for, and of the processes that take them.
Outcome = Result | Failure | WorkerLost | AuditDifference | PeerLostError | ProtocolError
_ASKS = 16  # of which the coordinator may still refuse some


@dataclass(frozen=True, order=True)
class Position:
    """The generation and version of a job, which only grow."""

    generation: int
    version: int


@dataclass
class _Reading:
    """A read that some servers have not answered yet."""

    future: Future[SharedState]
    snapshot: SharedState
    weights: torch.Tensor  # those that have come; empty if they are not read
    awaited: set[int]  # servers that have not sent everything
    # By (chunk, parameter, key, start), so that a message that comes twice changes nothing.
    records: dict[tuple[Any, ...], Record | None] = field(default_factory=dict)  # None once taken
    held: list[Peer] | None = None  # servers that wait for `take`; None where none has to
    began: dict[int, float] = field(default_factory=dict)  # when the first part of each server came

    def note_part(self, server: int) -> None:
        """Note that a part of a server's comes."""
        began = self.began.setdefault(server, system().now())
        self.snapshot.seconds = max(self.snapshot.seconds, system().now() - began)


@dataclass
class _Installation:
    """A state that is being installed: first its parts are put on servers, then it is ordered."""

    future: Future[Position]
    version: int
    unacknowledged: set[int]  # numbers of messages
    anew: bool = False
    state: dict[str, Any] | None = None


class Client:
    """The driver's role in a job: a state machine over messages.

    Its methods are called on the router's thread. Futures are set there, too.
    """

    def __init__(
        self, layout: ParameterLayout, holders: Holders, num_servers: int, send: Send
    ) -> None:
        # RESULT, FAILURE, WORKER_LOST and DIFFERENCE, the loss of a peer, or that a request for steps was refused, in
        # the order of events, for any thread
        self.outcomes: SimpleQueue[Outcome] = system().queue()
        self.on_outcome: Callable[[], None] = lambda: None  # called after each is added
        # the newest generation and version that the client has heard of
        self.position = Position(0, 0)
        self._now = system().now
        self._since = self._now()  # when a step last ended
        self._layout = layout
        self._holders = holders
        self._servers = num_servers
        self._send = send
        self._requests = 0
        self._reads: dict[int, _Reading] = {}
        self._waiting = 0  # number of the last read that named its version
        self._installs: dict[int, _Installation] = {}
        self._answers: dict[int, Future[Any]] = {}  # of requests that one message answers
        self._asks: deque[int] = deque(maxlen=_ASKS)  # numbers of requests for steps
        self._ended: set[tuple[int, int]] = set()  # (worker, life) of each WORKER_LOST
        self._differed = Position(0, -1)  # of the last DIFFERENCE
        self._failure: PeerLostError | None = None  # after which nothing is answered any more
        # the first coordinator or server whose loss the client has heard of
        self.lost_peer: Peer | None = None
        # the failure by which the servers' chunks are of no version, see `Failure`
        self.torn: Failure | None = None

    def go_on_after(self, before: Client) -> None:
        """Take over what the client before this one has heard of steps, and nobody has taken from it."""
        while not before.outcomes.empty():
            outcome = before.outcomes.get()
            if isinstance(outcome, (Result, AuditDifference)):
                self.outcomes.put(outcome)

    def _tell(self, outcome: Outcome) -> None:
        self.outcomes.put(outcome)
        self.on_outcome()

    def ask(
        self, steps: int, stats: bool, rates: RateChanges = (), generation: int | None = None
    ) -> None:
        """Ask the coordinator for more steps; each ends as one entry of `outcomes`, and so does a refused request.

        After the loss of a server or the coordinator the only entry is that loss.

        Args:
            steps: number of steps.
            generation: the newest that the caller has heard of, which may not have taken all outcomes; None for
                the client's.
            stats: whether results have loss, metrics and timings.
            rates: that hold instead of the schedule's.
        """
        if self._failure is not None:
            while not self.outcomes.empty():  # results of earlier steps, which came after the loss
                self.outcomes.get()
            self._tell(self._failure)
            return
        self._requests += 1
        self._asks.append(self._requests)
        known = self.position.generation if generation is None else generation
        order = AskForSteps(known, self._requests, steps, stats, rates)
        self._send(COORDINATOR, order.pack())

    def revoke(self) -> Future[Position]:
        """Take back the steps that are granted but not committed; return a future of the job's position after that."""
        return self._request(Revoke)

    def stop(self) -> Future[int]:
        """Have workers stop after one of the next steps; return a future of the last version to come."""
        return self._request(Stop)

    def _request(self, make: Callable[[int], Body]) -> Future[Any]:
        """Send the request that `make` returns for its number; return a future of the answer."""
        self._requests += 1
        future: Future[Any] = Future()
        self._answers[self._requests] = future
        self._send(COORDINATOR, make(self._requests).pack())
        return self._unless_failed(future)

    def read(
        self,
        what: str,
        at: int = 0,
        *,
        chunks: Sequence[int] | None = None,
        options: Options | None = None,
        held: bool = False,
    ) -> Future[SharedState]:
        """Read the job's state at one version over all servers.

        Args:
            what: "weights"; "state", which adds the optimizer's and the coordinator's state;
                "standing", the version and the coordinator's state only; or "opaque", the opaque
                chunks only.
            at: the version to wait for; if it has passed, the present one is read. The future of an
                earlier read that named a version and has not been answered is cancelled.
            chunks: those that are wanted; None for all.
            options: how opaque chunks are to be read, as their stores understand it.
            held: whether servers send opaque chunks only as `take` is called.

        Returns:
            A future, which is done when every server has answered.
        """
        self._requests += 1
        if at:
            earlier, self._waiting = self._reads.pop(self._waiting, None), self._requests
            if earlier is not None:
                earlier.future.cancel()
        whole = what in ("weights", "state")
        weights = self._layout.allocate() if whole else None
        state, servers = SharedState(-1, weights), set(range(self._servers))
        read = _Reading(Future(), state, torch.empty(0) if weights is None else weights, servers)
        read.held = [] if held else None
        self._reads[self._requests] = read
        order = Read(self._requests, what, chunks, options, at)
        self._send(COORDINATOR, order.pack())
        return self._unless_failed(read.future)

    def take(self, future: Future[SharedState], options: Options | None = None) -> list[Record]:
        """Return the records of a held read that have come since the last call.

        Each server sends at most two further pieces until the next call. Records that are not taken
        are part of the future's result.

        Args:
            future: of the read.
            options: how servers go on, as their stores understand it.
        """
        records: list[Record] = []
        for sequence, read in self._reads.items():
            if read.future is future:
                records = [record for record in read.records.values() if record is not None]
                read.records = dict.fromkeys(read.records)
                self._go_on(sequence, read, options)
        return records

    def give_up(self, future: Future[SharedState], error: Exception) -> None:
        """Fail a read, unless it is answered; later messages of servers about it are dropped."""
        for sequence, read in list(self._reads.items()):
            if read.future is future:
                del self._reads[sequence]
                self._go_on(sequence, read)
                future.set_exception(error)

    def _go_on(self, sequence: int, read: _Reading, options: Options | None = None) -> None:
        """Have the waiting servers send further pieces of a held read."""
        waiting, read.held = read.held or [], []
        for server in waiting:
            self._send(server, ReadOn(sequence, options).pack())

    def install(
        self,
        version: int,
        weights: torch.Tensor | None,
        records: list[Record] | None,
        state: dict[str, Any] | None = None,
    ) -> Future[Position]:
        """Install weights and state in the job.

        Args:
            version: the number of the weights from now on.
            weights: the flat vector, copied now; None to keep the servers' weights and optimizer
                state.
            records: optimizer state; None to leave it, and the order of samples, as they are.
            state: of the coordinator, or parts of it, see `SharedState`; missing parts begin
                anew, except the schedule, which is stepped to its place.

        Returns:
            A future of the job's position afterwards. It fails with `PeerLostError` if a server or the
            coordinator is lost before the answer, and with `ConfigurationError` if a server refuses
            the state; then no server has installed any of it.
        """
        self._requests += 1
        parts = [] if weights is None else self._puts(weights, records)
        install = _Installation(
            Future(), version, set(range(len(parts))), records is not None, state
        )
        self._installs[self._requests] = install
        for number, (server, part) in enumerate(parts):
            self._send(server_peer(server), part(number))
        if not parts:
            self._order(self._requests, install)
        return self._unless_failed(install.future)

    def _puts(
        self, weights: torch.Tensor, records: list[Record] | None
    ) -> list[tuple[int, Callable[[int], Message]]]:
        """Return the parts of a state: the server of each, and the message by its number."""
        request = self._requests
        parts: list[tuple[int, Callable[[int], Message]]] = []
        for index in (chunk.index for chunk in self._layout.chunks if not chunk.is_opaque):
            view = self._layout.chunk_view(weights, index).clone()
            put = partial(_put, request, index, view)
            parts += [(server, put) for server in self._holders[index]]
        if records is not None:
            for chunk, description, value in records:
                put = partial(_put_state, request, chunk, *state_fields(description, value.clone()))
                parts += [(server, put) for server in self._holders[chunk]]
            replace = partial(_replace_state, request)
            parts += [(server, replace) for server in range(self._servers)]
        return parts

    def declare_lost(self, worker: int, life: int, why: str) -> None:
        """Have the coordinator give up one life of a worker, which is silent or cut off.

        A WORKER_LOST follows in `outcomes`.
        """
        self._send(COORDINATOR, GiveUp(worker, life, why).pack())

    def counters(self) -> Future[Counters]:
        """Return a future of the coordinator's counters."""
        return self._request(ReadCounters)

    def log_page(self, first: int) -> Future[LogPage]:
        """Return a future of some entries of the coordinator's log, from entry `first` on."""
        return self._request(lambda number: ReadLog(number, first))

    def _unless_failed(self, future: Future[T]) -> Future[T]:
        """Return the future, which has failed already if a server or the coordinator is lost."""
        if self._failure is not None:
            self._fail_all(self._failure)
        return future

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return memory for a payload, a part of the vector that is read or new memory; None without a read.

        See `Role.destination`.
        """
        if message.kind not in (Kind.WEIGHTS, Kind.STATE):
            raise ProtocolError(f"a client takes no payload of {message.kind.name}")
        body: Weights | StateTensor = message.body
        read = self._reads.get(body.sequence)
        if read is None or (
            message.source is not None and message.source.index not in read.awaited
        ):
            return None
        if message.source is not None:
            read.note_part(message.source.index)
        if isinstance(body, Weights):
            view = self._layout.chunk_view(read.weights, body.chunk)
            if view.numel() == size:
                return view
        else:
            return torch.empty(checked_state_size(body, size), dtype=torch.uint8)
        raise ProtocolError(
            f"a client takes no {message.kind.name} of {size} bytes for chunk {body.chunk}"
        )

    def handle(self, source: Peer, message: Message) -> None:  # noqa: PLR0915
        """Act on one message; ProtocolError: a client takes no such message."""
        match message.kind:
            case Kind.WORKER_LOST:
                lost: WorkerLost = message.body
                if (life := (lost.worker, lost.life)) not in self._ended:
                    self._ended.add(life)
                    self._move_to(lost)
                    self._tell(lost)
            case Kind.DIFFERENCE:
                difference: AuditDifference = message.body
                place = Position(difference.generation, difference.version)
                if place > self._differed:
                    self._differed = place
                    self._tell(difference)
            case Kind.RESULT:
                self._end_step(message.body)
            case Kind.FAILURE:
                self._end_step(message.body)
            case Kind.WEIGHTS | Kind.STATE | Kind.SNAPSHOT_END:
                number = message.body.sequence
                if number in self._reads:
                    self._take(source, message, self._reads[number])
                elif message.kind is Kind.STATE and message.body.waits:
                    self._send(source, ReadOn(number).pack())  # to its end
            case Kind.PUT_RECEIVED:
                self._acknowledge(source, message.body)
            case Kind.INSTALLED:
                self._move_to(installed := message.body)
                if (install := self._installs.pop(installed.sequence, None)) is not None:
                    install.future.set_result(self.position)
            case Kind.REFUSED:
                self._end_refused(source, message.body)
            case Kind.REVOKED:
                self._move_to(revoked := message.body)
                self._answer(revoked.sequence, self.position)
            case Kind.STOPPED:
                stopped: Stopped = message.body
                known = Position(stopped.generation, self.position.version)
                self.position = max(self.position, known)
                self._answer(stopped.sequence, stopped.limit)
            case Kind.COUNTERS:
                counters: Counters = message.body
                self._answer(counters.sequence, counters)
            case Kind.LOG_PAGE:
                page: LogPage = message.body
                self._answer(page.sequence, page)
            case _:
                raise ProtocolError(f"a client does not take {message.kind.name}")

    def _move_to(self, news: WorkerLost | Installed | Revoked) -> None:
        self.position = max(self.position, Position(news.generation, news.version))

    def _end_step(self, outcome: Result | Failure) -> None:
        position = Position(outcome.generation, outcome.version)
        if position > self.position:  # else it is a copy: a failure begins a generation
            self.position, self._since = position, self._now()
            if isinstance(outcome, Failure) and outcome.reason == "optimizer":
                self.torn = outcome
            self._tell(outcome)

    def _answer(self, sequence: int, answer: Any) -> None:
        if (waiting := self._answers.pop(sequence, None)) is not None:
            waiting.set_result(answer)

    def _take(self, source: Peer, message: Message, read: _Reading) -> None:
        """Take a server's part of a snapshot, or its end."""
        if source.index not in read.awaited:
            return  # a copy
        read.note_part(source.index)
        if message.kind is Kind.WEIGHTS:
            weights: Weights = message.body
            view = self._layout.chunk_view(read.weights, weights.chunk)
            if message.payload is not None and message.payload.data_ptr() != view.data_ptr():
                view.copy_(message.payload)
        elif message.kind is Kind.STATE:
            part: StateTensor = message.body
            key = (part.chunk, part.name, part.key, part.start)
            if key in read.records:
                return  # a copy
            if part.waits:
                if read.held is None:
                    self._send(source, ReadOn(part.sequence).pack())
                else:
                    read.held.append(source)
            read.records[key] = (part.chunk, part.about, state_tensor(part.about, message.payload))
        else:
            self._end_snapshot(source, message.body, read)

    def _end_snapshot(self, source: Peer, end: SnapshotEnd, read: _Reading) -> None:
        """Note that a server sent its part; the last sets the read's future. ProtocolError: versions differ."""
        if read.snapshot.version not in (-1, end.version):
            raise ProtocolError(
                f"versions {read.snapshot.version} and {end.version} in one snapshot"
            )
        if end.given_up:
            error: Exception = DeadlineError(f"{source} gave up a snapshot: {end.given_up}")
            if end.error:
                error = raised_by_user(f"{source}: {end.given_up}", described_by(end))
            self.give_up(read.future, error)
            return
        read.snapshot.version = end.version
        read.snapshot.state |= end.state or {}
        read.awaited.discard(source.index)
        if not read.awaited:
            del self._reads[end.sequence]
            read.snapshot.records += [each for each in read.records.values() if each is not None]
            read.future.set_result(read.snapshot)

    def _acknowledge(self, source: Peer, received: PutReceived) -> None:
        """Note that a server has a part of a state; after the last part order the installation."""
        install = self._installs.get(received.sequence)
        if install is None or received.number not in install.unacknowledged:
            return  # a copy
        install.unacknowledged.discard(received.number)
        if not install.unacknowledged:
            self._order(received.sequence, install)

    def _end_refused(self, source: Peer, refused: Refused) -> None:
        """Fail the future of a refused request."""
        sequence = refused.sequence
        if refused.peer is not None:
            if all(refused.peer.index != worker for worker, _ in self._ended):
                self.lost_peer = self.lost_peer or refused.peer  # else it is replaced
            why = f"nothing was installed: {refused.peer} is gone ({refused.why})"
            error: Exception = PeerLostError(why)
        elif sequence in self._installs:
            why = f"{source} refuses the state, nothing of which is installed: {refused.why}"
            error = ConfigurationError(why)
        else:
            error = ProtocolError(f"{source} refuses a request: {refused.why}")
            if sequence in self._asks:
                self._tell(error)
        if (install := self._installs.pop(sequence, None)) is not None:
            install.future.set_exception(error)
        if (read := self._reads.get(sequence)) is not None:
            self.give_up(read.future, error)
        if (answer := self._answers.pop(sequence, None)) is not None:
            answer.set_exception(error)

    def _order(self, sequence: int, install: _Installation) -> None:
        self._send(
            COORDINATOR, Install(sequence, install.version, install.anew, install.state).pack()
        )

    def lost(self, peer: Peer, reason: str) -> None:
        """Fail all futures, now and later, if a server or the coordinator is lost."""
        if peer.role in ("server", "coordinator") and self._failure is None:
            self._failure = PeerLostError(f"{peer} is gone ({reason})")
            self.lost_peer = self.lost_peer or peer
            self._fail_all(self._failure)
            self._tell(self._failure)

    def close(self) -> None:
        """Fail all futures with `ShutdownError`: no message will arrive any more."""
        self._fail_all(ShutdownError("the trainer is shut down"))

    def _fail_all(self, error: PeerLostError | ShutdownError) -> None:
        """Set an error as the result of all futures; none waits afterwards."""
        reads, self._reads = self._reads, {}
        installs, self._installs = self._installs, {}
        answers, self._answers = self._answers, {}
        futures: list[Future[Any]] = [*(read.future for read in reads.values()), *answers.values()]
        futures += [install.future for install in installs.values()]
        for future in futures:
            future.set_exception(error)

    def tick(self, now: float) -> None:
        """Do nothing: callers, who wait for futures, have deadlines of their own."""

    def doing(self) -> Status:
        """Return which requests of the driver are not answered, see `Role.doing`."""
        words = []
        for read in list(self._reads.values()):
            servers = listed(map(server_peer, sorted(read.awaited)))
            words.append(f"waits for the state that is read of {servers}")
        for install in list(self._installs.values()):
            parts = len(install.unacknowledged)
            who = f"servers to take {parts} parts of" if parts else "the coordinator to install"
            words.append(f"waits for {who} a state")
        if self._answers:
            words.append(f"waits for {len(self._answers)} answers of the coordinator")
        seconds = self._now() - self._since
        known = f"knows of version {self.position.version}; no step has ended for {seconds:.1f} s"
        return Status(listed([known, *words]))


def _put(request: int, chunk: int, payload: torch.Tensor, number: int) -> Message:
    return Put(request, number, chunk).pack(payload)


def _put_state(
    request: int, chunk: int, fields: dict[str, Any], payload: torch.Tensor | None, number: int
) -> Message:
    return PutState(request, chunk, number=number, **fields).pack(payload)


def _replace_state(request: int, number: int) -> Message:
    return ReplaceState(request, number).pack()


def read_log(client: Client, first: int = 0) -> Future[list[Commit]]:
    """Read the coordinator's log, page by page; called on the router's thread.

    Args:
        client: reads.
        first: the entry with which to begin.

    Returns:
        A future of the commits, oldest first; fails with `ConfigurationError` if no log is kept.
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
        if first + len(commits) < page.result().length:
            client.log_page(first + len(commits)).add_done_callback(take)
        else:
            everything.set_result(commits)

    client.log_page(first).add_done_callback(take)
    return everything
