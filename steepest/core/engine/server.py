"""A server: stages and reduces pushed chunks, and applies the optimizer on COMMIT."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from steepest.core.engine.chunk_store import ChunkStore, GradientStore, HeldChunk
from steepest.core.engine.in_words import pushes_in_words
from steepest.core.engine.incoming_weights import Key
from steepest.core.engine.optimizer_records import checked_state_size
from steepest.core.engine.outgoing_weights import OutgoingWeights
from steepest.core.engine.push_intake import PushIntake
from steepest.core.engine.put_states import PutStates
from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.engine.spans import RoleSpans, SpanKind
from steepest.core.engine.stores import StoreService
from steepest.core.engine.topology import Topology
from steepest.core.messages.gradients import (
    CommitOrder,
    Decision,
    Discard,
    Logged,
    Refresh,
)
from steepest.core.messages.membership import Failed, Members, WorkerEnded, WorkerJoined
from steepest.core.messages.message import (
    COORDINATOR,
    Kind,
    Message,
    Peer,
    Send,
    worker_peer,
)
from steepest.core.messages.snapshots import InstallPut, Snapshot, SnapshotEnd
from steepest.core.messages.users import UserLeft
from steepest.core.optim.portable import Record
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.protocol.decision_log import DecisionLog
from steepest.core.status import Status
from steepest.core.system import system
from steepest.core.tensors.layout import Chunk
from steepest.core.tensors.memory import as_tensor
from steepest.errors import ProtocolError, describe_error, described_by

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RaisedUpdate:
    """A committed update, to `version`, in which the optimizer raised: the server's chunks have no common version.

    Attributes:
        error, traceback, kind: of the exception, see `steepest.errors.describe_error`.
    """

    version: int
    error: str
    traceback: str
    kind: str = ""

    @classmethod
    def of(cls, version: int, error: BaseException) -> RaisedUpdate:
        """Return the update to a version in which the optimizer raised an exception."""
        return cls(version, **describe_error(error))

    def to_coordinator(self, generation: int) -> Failed:
        """Return the message by which the coordinator learns of it."""
        return Failed(generation, 0, self.version, self.error, self.traceback, self.kind)

    def to_reader(self, at: tuple[int, int], sequence: int, *, open_to_all: bool) -> SnapshotEnd:
        """Return the message that a reader is sent instead of weights.

        Args:
            at: generation and version of the server.
            sequence: the request's number.
            open_to_all: whether to add the traceback, which a job's client has from the coordinator.
        """
        why = f"its optimizer raised in the update to version {self.version}: {self.error}"
        described: dict[str, Any] = described_by(self) if open_to_all else {}
        return SnapshotEnd(at[0], sequence, at[1], given_up=why, **described)


@dataclass(frozen=True)
class ServerMode:
    """The differences between modes of training that servers have to know."""

    # each push is kept by itself until COMMIT; else a chunk is reduced as soon as the last member has pushed it
    stages_each: bool = False
    # readers are sent different versions; else all are sent every one
    versions_differ: bool = False
    # each server lives in the process of the worker of its index, which takes its weights
    in_workers: bool = False
    open_to_all: bool = False  # whether processes that are no members may push


class _ReaderPart(NamedTuple):
    """The part of a version that a reader is sent."""

    since: int  # the version that it has
    # the fragments with updates that it was not sent; None for the one whose turn it is
    fragments: Sequence[int] | None = None


class Server:
    """One server's chunks: a role, which is a state machine over messages.

    Used on the thread of the process' router.

    Args:
        index: of the server.
        topology: of the job.
        spec: the optimizer; None to add pushes to the weights.
        weights: uint8, flat, of the layout's size, with the initial values; this server's chunks in
            it are updated in place if that is possible.
        send: sends as the server.
        in_use: returns whether memory is being read by another process, or has yet to be sent.
        own_pending: copies the unsent part of some memory, so that the memory may change; None to
            write new weights elsewhere while the old ones are in use.
        mode: of training.
    """

    def __init__(
        self,
        index: int,
        topology: Topology,
        spec: OptimizerSpec | None,
        weights: torch.Tensor,
        send: Send,
        in_use: Callable[[torch.Tensor], bool] = lambda weights: False,
        *,
        own_pending: Callable[[torch.Tensor], None] | None = None,
        mode: ServerMode = ServerMode(),
    ) -> None:
        # the update in which the optimizer raised, until a whole state is installed
        self.torn: RaisedUpdate | None = None
        self._now, self._since = system().now, system().now()  # when it took its present position
        self._index = index
        self._send = send
        layout, holders, stores = topology.layout, topology.holders, topology.stores
        self._copies = any(len(servers) > 1 for servers in holders)
        self.decisions = DecisionLog()  # the coordinator's, remembered where chunks have copies
        self._codec = topology.wire_formats[0]
        self._hosts = topology.hosts
        self._stages_each, self._versions_differ = mode.stages_each, mode.versions_differ
        self._open_to_all = mode.open_to_all
        self._layout = layout
        # that this server holds, by index
        self.chunks: dict[int, HeldChunk] = {
            chunk.index: _made(chunk, topology, spec, weights)
            for chunk in layout.chunks
            if index in holders[chunk.index]
        }
        # by the first chunk of each push
        self.gradient_stores = _gradient_stores(self.chunks, topology, spec)
        # indices of those whose copies, if any, are on other servers
        self.answers_for = {chunk for chunk in self.chunks if holders[chunk][0] == index}
        self._intake = PushIntake(
            index,
            topology,
            self.gradient_stores,
            self.answers_for,
            send,
            stages_each=mode.stages_each,
            open_to_all=mode.open_to_all,
        )
        self._trainable = self._intake.trainable
        # opaque chunks come last: workers wait for none of them until they ask for rows
        self._in_order = sorted(self._trainable, key=lambda held: held.is_opaque)
        # sends queued bytes without waiting; does nothing unless it is set
        self.flush: Callable[[], None] = lambda: None
        self._spec = spec
        self._base = [hyper for _, hyper in spec.groups] if spec is not None else []
        self._changed = False  # whether a schedule has ever changed hyperparameters
        # of opaque chunks; None without such chunks
        self._service = None if stores is None else stores.serve(index, self.chunks, send)
        self._weights = OutgoingWeights(
            index,
            topology,
            self.chunks,
            weights,
            send,
            in_use=in_use,
            own_pending=own_pending,
            in_workers=mode.in_workers,
        )
        make_way = self._weights.make_way
        self._puts = PutStates(index, self.chunks, send, make_way, checked=mode.open_to_all)
        self._spans: RoleSpans | None = None
        self._commits, self._taking, self._committing = 0, 0.0, 0.0  # seconds, see `spent`
        self._left_out: set[int] = set()  # workers whose last committed push was left out
        # if readers are sent different versions: the version of each fragment's last update, and of each reader
        self._updated = [0] * layout.fragments if mode.versions_differ else None
        self._sent: dict[Peer, int] = {}

    def record(self, spans: RoleSpans | None) -> None:
        """Record what the server does, see `RecordsSpans`."""
        self._spans = self._intake.spans = spans

    @property
    def spent(self) -> tuple[int, int, float, float]:
        """The server's index, its number of commits, and the seconds spent on taking pushes and on commits."""
        return self._index, self._commits, self._taking, self._committing

    def begin_with(self, records: Iterable[Record]) -> None:
        """Set the state of this server's chunks, before the first step; records of other chunks are left out."""
        begun = set()
        for index, description, value in records:
            if index in self.chunks:
                self.chunks[index].load_state(description, value)
                begun.add(index)
        for index in begun:
            self.chunks[index].end_state()

    @property
    def vector(self) -> torch.Tensor:
        """The flat vector (uint8, of the layout's size) in which its first chunk lies."""
        return self._weights.vector

    @property
    def version(self) -> int:
        """The version of the weights: the number of the last commit."""
        return self._intake.version

    @version.setter
    def version(self, version: int) -> None:
        self._intake.version = version

    @property
    def generation(self) -> int:
        """The last generation that the coordinator began."""
        return self._intake.generation

    @property
    def refused(self) -> int:
        """The number of pushes that were dropped."""
        return self._intake.refused

    @property
    def _position(self) -> Key:
        """The generation and version at which this server is."""
        return self.generation, self.version

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return memory for a payload: new, a staging buffer, or the lent payload itself; None for a late push.

        See `Role.destination`.
        """
        if message.kind in (Kind.PUSH, Kind.HOST_PUSH):
            taking = self.gradient_stores.get(message.body.chunk)
            if taking is None or not taking.fits(size, self._codec):
                raise self._unfit(message, size, taking)
            if self._intake.is_late(message.body):
                return None
            if message.payload is not None:
                return as_tensor(message.payload)
            return taking.staging_buffer(size)
        if self._service is not None and message.kind in self._service.kinds:
            return self._service.destination(message, size)
        if message.kind not in (Kind.PUT, Kind.PUT_STATE):
            raise ProtocolError(f"a server takes no payload of {message.kind.name}")
        held = self.chunks.get(message.body.chunk)
        if message.kind is Kind.PUT_STATE:
            size = checked_state_size(message.body, size)
        elif held is None or size != held.chunk.nbytes:
            raise self._unfit(message, size, held)
        self._puts.make_room(size)
        return torch.empty(size, dtype=torch.uint8)

    def _unfit(
        self, message: Message, size: int, held: HeldChunk | GradientStore | None
    ) -> ProtocolError:
        """Return the error of a payload for which there is no place."""
        return ProtocolError(
            f"{message.kind.name} of {size} bytes for chunk {message.body.chunk}, server "
            f"{self._index} expects {held.chunk.nbytes if held else 'none of it'}"
        )

    def handle(self, source: Peer, message: Message) -> None:
        """Act on one message; ProtocolError: it is refused."""
        match message.kind:
            case Kind.PUSH | Kind.HOST_PUSH:
                began = self._now()
                self._intake.stage(source, message.body, message.payload)
                self._taking += self._now() - began
            case Kind.SNAPSHOT:
                self._answer(message.body)
            case Kind.PUT | Kind.PUT_STATE | Kind.REPLACE_STATE:
                self._puts.receive(source, message)
            case _ if isinstance(message.body, Decision):
                self.carry_out(message.body)
            case kind if self._service is not None and kind in self._service.kinds:
                self._service.handle(source, message, self._position)
            case _:
                raise ProtocolError(f"a server does not take {message.kind.name}")

    def _answer(self, order: Snapshot) -> None:
        """Send a SNAPSHOT's reader this server's part of it, or the reason why it gets none."""
        if self.torn is not None:
            self._send_torn(order.reader, order.sequence, self.torn)
            return
        opaque, end = self._weights.answer(order, self._position)
        if opaque and self._service is not None:
            self._service.read(order, opaque, end)
        else:
            self._send(order.reader, end.pack())

    def _send_torn(self, reader: Peer, sequence: int, torn: RaisedUpdate) -> None:
        """Send a reader why it gets no weights."""
        end = torn.to_reader(self._position, sequence, open_to_all=self._open_to_all)
        self._send(reader, end.pack())

    def carry_out(self, decision: Decision) -> None:
        """Act on a decision, and remember it if chunks have copies.

        Raises:
            ProtocolError: it cannot be carried out, and nothing has changed.
        """
        match decision:
            case CommitOrder():
                began = self._now()
                self._commit(decision)
                self._commits += 1
                self._committing += self._now() - began
            case Discard():
                self._discard(decision)
            case Refresh():
                if self._is_now(decision):
                    self._refresh(decision.readers)
            case WorkerEnded():
                self._end_worker(decision)
            case WorkerJoined():
                self._take_in(decision)
            case Members():
                self._begin_generation(decision)
            case InstallPut():
                self._install_between_generations(decision)
        if self._copies:
            self.decisions.hear(decision)

    def lost(self, peer: Peer, reason: str) -> None:
        """Forget the unfinished work of a lost peer; the coordinator decides what the loss means.

        The coordinator is sent USER_LEFT for a parameter server's user, after PUSH_STAGED for each of its
        pushes that had arrived whole.
        """
        if peer.role == "client":  # others neither put nor read
            self._puts.lost(peer)
        if self._service is not None:
            self._service.lost(peer)
        self._intake.forget_early(peer)
        if self._open_to_all and peer.role == "worker":
            self._intake.forget_user(peer.index)
            self._send(COORDINATOR, UserLeft(peer.index).pack())

    def tick(self, now: float) -> None:
        """Tell the stores' service the time."""
        if self._service is not None:
            self._service.tick(now)

    @property
    def service(self) -> StoreService | None:
        """The service of the opaque chunks; None without such chunks."""
        return self._service

    def doing(self) -> Status:
        """Return which pushes the server waits for, see `Role.doing`."""
        version, seconds = self._intake.version + 1, self._now() - self._since
        if self._service is not None and (disk := self._service.doing()).words:
            return disk
        if self.torn is not None:
            return Status(f"is of no version: its optimizer raised {self.torn.error}")
        if not self._trainable:
            return Status("holds no chunk that is trained")
        if self._stages_each:
            come = self._intake.progress.in_words()
            return Status(f"waits for pushes to make version {version}: {come}", seconds)
        if self._intake.progress.version_is_whole:
            return Status(
                f"has reduced version {version}, and waits for COMMIT of the coordinator", seconds
            )
        lacking = {
            held.chunk.index: self._intake.members - held.contributors() for held in self._trainable
        }
        return Status(
            f"waits for pushes of version {version} of {pushes_in_words(lacking)}", seconds
        )

    # -- commit and apply ----------------------------------------------------------------------

    def _commit(self, commit: CommitOrder) -> None:
        """Apply staged pushes as the next version, and send it to its readers.

        Once the optimizer has raised (`torn`) none is applied; a parameter server's users are sent the reason.

        Raises:
            ProtocolError: the commit cannot be applied, and nothing has changed.
        """
        if commit.version <= self._intake.version or commit.generation < self._intake.generation:
            return  # a copy of one that is applied
        hyper = commit.hyper or [{} for _ in self._base]
        self._check_commit(commit, hyper)
        if self._spec is not None and (self._changed or any(hyper)):
            self._changed = True  # what a schedule leaves alone later returns to the recipe's value
            hyper = self._spec.hyperparameters(hyper)
        self._intake.version, self._since = commit.version, self._now()
        contributors = {push.worker for push in commit.pushes}
        self._left_out = (
            self._left_out | contributors if commit.skip else self._left_out - contributors
        )
        self._intake.progress.begin_version()
        workers = ((self._hosts.reader_of(worker), request) for worker, request in commit.readers)
        readers = list(dict.fromkeys(workers))
        changed = self._changed_by(commit)
        parts = [(reader, sequence, self._part_for(reader)) for reader, sequence in readers]
        for held in self._in_order:
            if held.is_opaque:
                self.flush()  # the weights, with which workers go on meanwhile
            if not commit.skip and self.torn is None:
                self._apply(held, commit, hyper)
            for push in commit.pushes:
                if push in held.staged:  # what an aggregator added up is staged as the first push
                    held.forget(push)
            if self.torn is not None:
                continue
            if held.chunk.index in changed:
                self._weights.change(
                    self.chunks[held.chunk.index], commit.version, differ=self._versions_differ
                )
            for reader, sequence, part in parts:
                self._send_part(reader, sequence, held.chunk, part)
        if self.torn is not None and self._open_to_all:
            for reader, sequence in readers:
                self._send_torn(reader, sequence, self.torn)
        self._intake.close(commit.pushes)
        if self._copies:
            self._confirm()
        self._weights.end_commit()
        if self._service is not None:
            self._service.reached(self._position)
        self._intake.stage_early()

    def _changed_by(self, commit: CommitOrder) -> frozenset[int]:
        """Return the chunks that a commit changes, and note the version of its fragments."""
        if self._updated is None or not commit.fragments:
            return self._layout.changed_by(commit.version)
        for fragment in commit.fragments:
            self._updated[fragment % len(self._updated)] = commit.version
        return self._layout.of_fragments(commit.fragments)

    def _part_for(self, reader: Peer) -> _ReaderPart | None:
        """Return the part of this version that a reader is sent; None for the last change.

        The reader counts as having this version from now on.
        """
        if self._updated is None:
            return None
        last, self._sent[reader] = self._sent.get(reader, 0), self.version
        if len(self._updated) == 1:
            return _ReaderPart(last)
        return _ReaderPart(
            last, [part for part, version in enumerate(self._updated) if version > last]
        )

    def _send_part(
        self, reader: Peer, sequence: int, chunk: Chunk, part: _ReaderPart | None
    ) -> None:
        """Send a reader a chunk, if it belongs to the part that the reader is sent."""
        since, fragments = part or (None, None)
        if fragments is None:
            is_sent = chunk.index in self._layout.changed_by(self.version)
        else:
            is_sent = chunk.fragment in fragments
        if is_sent:
            key = self._position, sequence
            skipped = self._is_left_out(reader)
            self._weights.send(
                reader,
                self.chunks[chunk.index],
                *key,
                skipped=skipped,
                fragments=fragments,
                since=since,
            )

    def _is_left_out(self, reader: Peer) -> bool:
        """Return whether a reader's last committed push, or those of its workers, was left out."""
        return reader.index in self._left_out if self._versions_differ else bool(self._left_out)

    def _apply(self, held: GradientStore, commit: CommitOrder, hyper: list[dict[str, Any]]) -> None:
        """Take the optimizer's step of a commit on one chunk."""
        spans, place = self._spans, (-1, commit.version, held.chunk.index)
        began = 0.0 if spans is None else spans.now()
        if commit.clock:
            held.note_time(commit.clock)
        if self._stages_each:
            aggregated = self._hosts.aggregators
            held.reduce(push for push in commit.pushes if push in held.staged or not aggregated)
            if spans is not None:
                spans.add(SpanKind.REDUCE, began, *place)
                began = spans.now()
        held.clip(commit.clip)
        try:
            held.apply(hyper, commit.rate, self._weights.make_way(self.chunks[held.chunk.index]))
        except BaseException as error:
            if held.raised is not error:
                raise
            self.torn = RaisedUpdate.of(self.version, error)
            self._send(COORDINATOR, self.torn.to_coordinator(self._intake.generation).pack())
        if spans is not None:
            spans.add(SpanKind.APPLY, began, *place)

    def _check_commit(self, commit: CommitOrder, hyper: list[dict[str, Any]]) -> None:
        """Check that all of a commit can be applied, before any of it is; ProtocolError otherwise."""
        pushes = commit.pushes
        if (commit.generation, commit.version) != (
            self._intake.generation,
            self._intake.version + commit.made,
        ):
            raise ProtocolError(
                f"COMMIT of {(commit.generation, commit.version)} at generation, version "
                f"{self._position}"
            )
        if not commit.skip and not self._intake.are_whole(pushes):
            raise ProtocolError(
                f"COMMIT of pushes {[*pushes]} that are not whole on server {self._index}"
            )
        pairs = list(zip(self._base, hyper, strict=False))
        known = all(changed.keys() <= base.keys() | {"lr"} for base, changed in pairs)
        if len(hyper) != len(self._base) or not known:
            raise ProtocolError(
                f"COMMIT with hyper={hyper!r:.80}: the optimizer has {len(self._base)} groups"
            )

    def _discard(self, discard: Discard) -> None:
        """Forget pushes, and send the weights as they are to the workers that wait for them."""
        if self._is_now(discard):
            for push in discard.pushes:
                self._intake.forget(push)
            self._refresh(discard.readers)

    def _end_worker(self, ended: WorkerEnded) -> None:
        """Forget the incomplete pushes of a dead worker's life, and refuse later ones of it."""
        if self._is_now(ended):
            for push in ended.pushes:
                self._intake.forget(push)
            self._intake.end_life(ended.worker, ended.life)

    def _take_in(self, joined: WorkerJoined) -> None:
        """Take a worker's pushes from now on, and send the worker all weights."""
        if self._is_now(joined):
            # it may have been missing when the generation began
            self._intake.members |= {joined.worker}
            self._sent[worker_peer(joined.worker)] = self.version
            for held in self.chunks.values():
                self._weights.send(worker_peer(joined.worker), held, self._position, reload=True)
            self._intake.stage_early()

    def _is_now(self, decision: Decision) -> bool:
        """Return whether a decision is of this server's generation and version: any other one is a copy."""
        return (decision.generation, decision.version) == self._position

    def _refresh(self, readers: Sequence[Sequence[int]]) -> None:
        """Send workers the trainable weights as they are; each entry is (worker, request)."""
        for worker, sequence in readers:
            reader = worker_peer(worker)
            part = self._part_for(reader)
            for held in self._trainable:
                self._send_part(reader, sequence, held.chunk, part)

    # -- membership and state ------------------------------------------------------------------

    def _begin_generation(self, begun: Members) -> None:
        """Drop all staged pushes, stage those that came early, and send members all weights if `reload` says so."""
        if (begun.generation, begun.version) <= self._position:
            return  # a copy
        self._intake.generation, self.version = begun.generation, begun.version
        self._since = self._now()
        self._intake.begin_generation(begun.workers)
        self._left_out.clear()
        if self._updated is not None:  # all readers are sent all weights
            self._updated = [begun.version] * len(self._updated)
        self._install(begun.install)
        if begun.reload:
            self._weights.begin_anew()
            readers = map(self._hosts.reader_of, sorted(self._intake.members))
            for reader in dict.fromkeys(readers):
                self._sent[reader] = begun.version
                for held in self.chunks.values():
                    self._weights.send(reader, held, self._position, reload=True)
        if self._service is not None:
            self._service.reached(self._position)
        self._intake.stage_early()

    def _install_between_generations(self, order: InstallPut) -> None:
        """Install states that clients have put; pushes that are staged stay."""
        if (order.generation, order.version) > self._position:
            self.version = order.version
            self._install(order.install)
            self._confirm()

    def _confirm(self) -> None:
        """Tell the coordinator that this server, in another process, knows the version."""
        if self._copies and self._index == 1:
            self._send(COORDINATOR, Logged(self.generation, self.version).pack())

    def _install(self, puts: Iterable[Sequence[Any]]) -> None:
        """Install states that clients have put; each entry is a client's (role, index, request)."""
        for role, index, sequence in puts:
            if self._puts.install(Peer(role, index), sequence):
                self.torn = None


def _made(
    chunk: Chunk, topology: Topology, spec: OptimizerSpec | None, weights: torch.Tensor
) -> HeldChunk:
    """Return what a server holds of a chunk, of the flat vector `weights` or opaque."""
    if chunk.is_opaque:
        assert topology.stores is not None, f"chunk {chunk.index} is opaque: give the server stores"
        return topology.stores.make(chunk)
    layout, copies = topology.layout, len(topology.holders[chunk.index]) > 1
    view = layout.chunk_view(weights, chunk.index)
    # if workers add up gradients, the sum lies in this process, whose worker has its weights of this server alone
    keeps_mean = copies and not topology.hosts.reduces
    held = ServerChunk(chunk, layout, spec, view, keeps_mean=keeps_mean)
    if topology.pull_codec is not None:
        held.follow(topology.pull_codec)
    return held


def _gradient_stores(
    chunks: Mapping[int, HeldChunk], topology: Topology, spec: OptimizerSpec | None
) -> dict[int, GradientStore]:
    """Return what takes the gradients of a server's chunks, by the first chunk of each push."""
    found: dict[int, GradientStore] = {}
    for first, members in topology.pushed.items():
        held = chunks.get(first)
        if isinstance(held, ChunkStore):
            found[first] = held
        elif held is not None:
            assert topology.stores is not None
            found[first] = topology.stores.take([chunks[index] for index in members], spec)
    return found
