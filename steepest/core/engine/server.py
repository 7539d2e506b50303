"""A server: stages pushed chunks, reduces them, and applies the optimizer on COMMIT."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steepest.core.engine.chunk_store import ChunkStore, StagedPush
from steepest.core.engine.early_pushes import EarlyPushes
from steepest.core.engine.in_words import pushes_in_words
from steepest.core.engine.incoming_weights import Key
from steepest.core.engine.optimizer_records import checked_state_size
from steepest.core.engine.outgoing_weights import OutgoingWeights
from steepest.core.engine.put_states import PutStates
from steepest.core.engine.raised_update import RaisedUpdate
from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.engine.staging_progress import StagingProgress
from steepest.core.engine.topology import Topology
from steepest.core.messages.gradients import (
    CommitOrder,
    Decision,
    Discard,
    HostPush,
    Logged,
    Push,
    PushStaged,
    Refresh,
    VersionStaged,
)
from steepest.core.messages.membership import Members, WorkerEnded, WorkerJoined
from steepest.core.messages.message import (
    COORDINATOR,
    Kind,
    Message,
    MessageKind,
    Peer,
    PushId,
    Send,
    worker_peer,
)
from steepest.core.messages.snapshots import InstallPut, Snapshot
from steepest.core.messages.users import UserLeft
from steepest.core.optim.portable import Record
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.protocol.decision_log import DecisionLog
from steepest.core.protocol.push_tracking import MOST_PUSHES, ClosedPushes
from steepest.core.system import system
from steepest.core.tensors.layout import Chunk
from steepest.core.tensors.memory import as_tensor
from steepest.errors import ProtocolError

log = logging.getLogger(__name__)

_DECISIONS: dict[MessageKind, type[Decision]] = {
    decision.KIND: decision
    for decision in (CommitOrder, Discard, Refresh, WorkerEnded, WorkerJoined, Members, InstallPut)
}


@dataclass(frozen=True)
class ServerMode:
    """What servers do differently in the modes of training."""

    # every member contributes to every version: a chunk is reduced as soon as the last has pushed it
    together: bool = True
    # each server lives in the process of the worker of its index, which takes its weights
    in_workers: bool = False
    open_to_all: bool = False  # whether processes that are no members may push
    checked: bool = True  # whether sums of squares are computed, which show NaN and infinity


class Server:
    """One server's chunks: a role, which is a state machine over messages.

    Used on the thread of the process' router.

    Args:
        index: of the server.
        topology: of the job.
        spec: the optimizer; None to add pushes to the weights.
        weights: uint8, flat, of the layout's size, with the initial values; this server's chunks in
            it are updated in place where that is possible.
        send: sends as the server.
        in_use: returns whether memory is being read by another process, or has yet to be sent.
        own_pending: copies what has not been sent yet of some memory, so that it may change; None
            to write new weights elsewhere while the old ones are in use.
        mode: of training, as far as servers are concerned.
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
        self.version = 0  # of the weights: the number of the last commit
        self.generation = 0  # the last one that the coordinator began
        self.refused = 0  # the number of pushes that were dropped
        # the update in which the optimizer raised, if no whole state was installed since: chunks are of no version
        self.torn: RaisedUpdate | None = None
        self._now, self._since = system().now, system().now()  # when it took its present position
        self._index = index
        self._send = send
        layout, holders, stores = topology.layout, topology.holders, topology.stores
        self._copies = any(len(servers) > 1 for servers in holders)
        # whether workers may have all weights of a version that this server has yet to make
        self._is_passed = self._copies or bool(layout.opaque_chunks) or layout.fragments > 1
        self.decisions = DecisionLog()  # the coordinator's, remembered where chunks have copies
        self._codec = topology.wire_formats[0]
        self._hosts = topology.hosts
        self._together = mode.together
        self._open_to_all = mode.open_to_all
        self._layout = layout
        # that this server holds, by index
        self.chunks: dict[int, ChunkStore] = {
            chunk.index: _made(chunk, topology, spec, weights, checked=mode.checked)
            for chunk in layout.chunks
            if index in holders[chunk.index]
        }
        # indices of those whose copies, if any, are on other servers
        self.answers_for = {chunk for chunk in self.chunks if holders[chunk][0] == index}
        self._trainable = [chunk for chunk in self.chunks.values() if chunk.chunk.trainable]
        # First layers first, which lie in the last chunks: the next forward pass begins with them.
        # Opaque ones last, for which no worker waits before it has asked for something of them.
        last_first = self._trainable[::-1]
        self._in_order = sorted(last_first, key=lambda held: held.is_opaque)
        # sends queued bytes without waiting; does nothing unless it is set
        self.flush: Callable[[], None] = lambda: None
        self._spec = spec
        self._base = [hyper for _, hyper in spec.groups] if spec is not None else []
        self._changed = False  # whether a schedule has ever changed hyperparameters
        self._members: frozenset[int] = frozenset()
        self._done = ClosedPushes()
        self._progress = StagingProgress(len(self._trainable), self.answers_for, mode.checked)
        self._early = EarlyPushes(len(self._trainable))
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
        self._left_out: set[int] = (
            set()
        )  # workers of whose pushes the last committed one was left out
        self._ended: dict[int, int] = {}  # by worker, the incarnation of its last life that is over

    def begin_with(self, records: Iterable[Record]) -> None:
        """Set the state of this server's chunks, before the first step; records of other chunks are left out."""
        begun = set()
        for index, about, value in records:
            if index in self.chunks:
                self.chunks[index].load_state(about, value)
                begun.add(index)
        for index in begun:
            self.chunks[index].end_state()

    @property
    def vector(self) -> torch.Tensor:
        """The flat vector (uint8, of the layout's size) in which its first chunk lies."""
        return self._weights.vector

    @property
    def _position(self) -> Key:
        """The generation and version at which this server is."""
        return self.generation, self.version

    @property
    def weight_buffers_held(self) -> int:
        """The number of flat vectors that take memory: one, and those for readers' old versions."""
        return self._weights.buffers_held

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return memory for a payload: new, a staging buffer, or where it is lent; None for a late push."""
        # See `Role.destination`.
        if message.kind is Kind.PUT_STATE:
            return torch.empty(checked_state_size(message, size), dtype=torch.uint8)
        held = self.chunks.get(message.chunk)
        is_push = message.kind in (Kind.PUSH, Kind.HOST_PUSH)
        takes = held is not None and (
            held.fits(size, self._codec)
            if is_push
            else message.kind is Kind.PUT and size == held.chunk.nbytes
        )
        if held is None or not takes:
            if self._service is not None and message.kind in self._service.kinds:
                return self._service.destination(message, size)
            raise ProtocolError(
                f"{message.kind.name} of {size} bytes for chunk {message.chunk}, server "
                f"{self._index} expects {held.chunk.nbytes if held else 'none of it'}"
            )
        if message.kind is Kind.PUT:
            return torch.empty(size, dtype=torch.uint8)
        late = message.generation < self.generation
        if late or (self._together and message.version < self.version):
            return None
        if message.payload is not None:
            return as_tensor(message.payload)
        return held.staging_buffer(size)

    def handle(self, source: Peer, message: Message) -> None:
        """Act on one message; ProtocolError: it is refused."""
        match message.kind:
            case Kind.PUSH:
                self._stage(source, Push.unpack(message))
            case Kind.HOST_PUSH:
                self._stage(source, HostPush.unpack(message))
            case Kind.SNAPSHOT:
                self._answer(Snapshot.unpack(message))
            case Kind.PUT | Kind.PUT_STATE | Kind.REPLACE_STATE:
                self._puts.receive(source, message)
            case kind if (decision := _DECISIONS.get(kind)) is not None:
                self.carry_out(decision.unpack(message))
            case kind if self._service is not None and kind in self._service.kinds:
                self._service.handle(source, message, self._position)
            case _:
                raise ProtocolError(f"a server does not take {message.kind.name}")

    def _answer(self, order: Snapshot) -> None:
        """Send a SNAPSHOT's reader what this server has of it, or why it gets nothing."""
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
        """Act on a decision, and remember it where chunks have copies."""
        # ProtocolError: it cannot be, and nothing has changed.
        match decision:
            case CommitOrder():
                self._commit(decision)
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
        """Forget what a lost peer had begun; what the loss means is the coordinator's to decide."""
        # The coordinator is sent USER_LEFT for a parameter server's user, after PUSH_STAGED for each of its pushes that
        # had arrived whole.
        if peer.role == "client":  # others neither put nor read
            self._puts.lost(peer)
        if self._service is not None:
            self._service.lost(peer)
        if self._open_to_all and peer.role == "worker":
            for push in self._progress.pushes:
                if push.worker == peer.index:
                    self._forget(push)
            self._done.forget(peer.index)
            self._send(COORDINATOR, UserLeft(peer.index).pack())

    def tick(self, now: float) -> None:
        """Tell the stores' service the time."""
        if self._service is not None:
            self._service.tick(now)

    def doing(self) -> str:
        """Return which pushes are not here yet, in words, see `Role.doing`."""
        version, lasting = self.version + 1, f", for {self._now() - self._since:.1f} s"
        if self.torn is not None:
            return f"is of no version: its optimizer raised {self.torn.error}"
        if not self._trainable:
            return "holds no chunk that is trained"
        if not self._together:
            return (
                f"waits for pushes to make version {version}: {self._progress.in_words()}{lasting}"
            )
        if self._progress.version_is_whole:
            return (
                f"has reduced version {version}, and waits for COMMIT of the coordinator{lasting}"
            )
        lacking = {
            held.chunk.index: self._members - held.contributors() for held in self._trainable
        }
        return f"waits for pushes of version {version} of {pushes_in_words(lacking)}{lasting}"

    # -- stage ---------------------------------------------------------------------------------

    def _stage(self, source: Peer, pushed: Push | HostPush) -> None:
        """Stage a chunk of a gradient, keep it for later, or drop a late one; ProtocolError: it is refused."""
        # The worker has the weights of the next version from servers that were sooner than this one.
        is_next = self._is_passed and self._together and pushed.pulled == self.version + 1
        newer = pushed.generation > self.generation
        is_now = pushed.generation == self.generation
        if newer or (is_now and (is_next or self._may_have_joined(source))):
            self._keep_early(source, pushed)
            return
        held = self.chunks.get(pushed.chunk)
        if held is None or not held.chunk.trainable:
            raise ProtocolError(f"chunk {pushed.chunk} takes no gradients on server {self._index}")
        pushes = self._pushes_of(source, pushed)
        if self._refuses(pushes, pushed, held):
            return
        payload = pushed.payload
        codec = held.codec_of(payload, self._codec)
        self._drop_taken_back(pushes, held)
        if payload is not None and not self._together and pushed.chunk not in self.answers_for:
            # Its worker overwrites it as soon as another server has sent the weights.
            payload = held.own(payload)
        push, workers = pushes[0], frozenset(push.worker for push in pushes)
        absent = frozenset(pushed.absent)
        held.staged[push] = StagedPush(workers, payload, pushed.unit, pushed.total, absent, codec)
        if self._together:
            if held.contributors() >= self._members:
                self._reduce(held)
        else:
            self._count(push, held, pushed.pulled)

    def _may_have_joined(self, source: Peer) -> bool:
        """Return whether a worker may be a member of which this server is not told yet."""
        workers = len(self._hosts.workers)
        known = self._open_to_all or self._together or source.index in self._members
        return self._is_passed and not known and source.role == "worker" and source.index < workers

    def _keep_early(self, source: Peer, pushed: Push | HostPush) -> None:
        """Keep a push until its generation or version begins."""
        # ProtocolError: the oldest of too many is dropped (`EarlyPushes`).
        aggregated = self._hosts.aggregators.get(source.index, ())
        workers = len(aggregated) if source.role == "aggregator" else 1
        oldest = self._early.keep(source, pushed, workers)
        if oldest is not None:
            self.refused += 1
            if (held := self.chunks.get(oldest.chunk)) is not None:
                held.release(oldest.payload)
            raise ProtocolError(
                f"{source} has pushed more than two steps before this server was told of them: its "
                f"oldest push, of chunk {oldest.chunk} at generation {oldest.generation} and "
                f"version {oldest.pulled}, is dropped"
            )

    def _pushes_of(self, source: Peer, pushed: Push | HostPush) -> list[PushId]:
        """Return the pushes of which a message is a chunk."""
        # ProtocolError: its aggregator does not serve these workers.
        if isinstance(pushed, Push):
            return [PushId(source.index, pushed.incarnation, pushed.sequence)]
        pushes = sorted(pushed.pushes)
        served = self._hosts.aggregators.get(source.index, ())
        if not pushes or not all(push.worker in served for push in pushes):
            raise ProtocolError(
                f"{source} pushes for workers {[push.worker for push in pushes]}, it serves "
                f"{served}"
            )
        return pushes

    def _refuses(self, pushes: list[PushId], pushed: Push | HostPush, held: ChunkStore) -> bool:
        """Return whether a chunk is late, which counts and drops it."""
        # ProtocolError: its sender should not have sent it.
        reasons = [self._reason_to_refuse(push, pushed, held) for push in pushes]
        reason = max((reason for reason in reasons if reason is not None), default=None)
        if reason is None and self._is_copy(pushes, held):
            reason = "it is staged already"
        if reason is None:
            return False
        self.refused += 1
        held.release(pushed.payload)
        if reason:
            raise ProtocolError(
                f"push of chunk {pushed.chunk} at version {pushed.pulled}: {reason}"
            )
        return True

    def _reason_to_refuse(
        self, push: PushId, pushed: Push | HostPush, held: ChunkStore
    ) -> str | None:
        """Return why a push is refused: empty where it is late or a copy; None to take it."""
        is_over = push.incarnation <= self._ended.get(push.worker, -1)
        if pushed.generation < self.generation or is_over or push in self._done:
            return ""
        if not self._open_to_all and push.worker not in self._members:
            return f"worker {push.worker} is no member"
        if push < self._progress.newest.get(push.worker, push):
            return ""  # it was taken back
        if not self._together:
            return self._reason_against_another(push, held)
        if pushed.pulled < self.version:
            return ""
        if pushed.pulled > self.version:
            return "out of place"
        return None

    def _is_copy(self, pushes: list[PushId], held: ChunkStore) -> bool:
        """Return whether all of these pushes are staged on a chunk, perhaps within other sums."""
        if not self._together:
            return pushes[0] in held.staged
        known = all(self._progress.newest.get(push.worker) == push for push in pushes)
        return known and held.contributors().issuperset(push.worker for push in pushes)

    @staticmethod
    def _reason_against_another(push: PushId, held: ChunkStore) -> str | None:
        """Return why a worker may not stage one more push: its pushes would fill the memory."""
        if len(held.staged) < MOST_PUSHES:
            return None
        own = sum(other.worker == push.worker for other in held.staged)
        if own < MOST_PUSHES:
            return None
        return f"worker {push.worker} has {own} pushes that are not committed"

    def _drop_taken_back(self, pushes: list[PushId], chunk: ChunkStore) -> None:
        """Drop what is staged of workers' older pushes that are not whole: they have taken them back, see `Push`."""
        # Also the parts of these pushes that a sum on this chunk, or other sums, had before. ProtocolError: an older
        # push is whole, and may be committed already.
        if self._open_to_all:
            return  # a user may send several pushes at a time
        for push in pushes:
            older = self._progress.newest.get(push.worker, push)
            if older != push and self._together:
                for held in self._trainable:
                    self._take_back(push.worker, held)
            elif older != push and self._progress.is_partial(older):
                self._forget(older)
            self._progress.newest[push.worker] = push
            if self._together and chunk.staged:
                self._take_back(push.worker, chunk)

    def _take_back(self, worker: int, held: ChunkStore) -> None:
        """Drop what a worker has staged on a chunk for the next version, alone or in a sum."""
        pushes = [push for push, staged in held.staged.items() if worker in staged.workers]
        if pushes and self._progress.version_is_whole:
            raise ProtocolError(f"worker {worker} has pushed another gradient for this version")
        if pushes and held.contributors() >= self._members:
            self._progress.take_back(held)
            held.drop_mean()
        for push in pushes:
            held.forget(push)

    def _reduce(self, held: ChunkStore) -> None:
        """Reduce a chunk that all members have pushed; after the last, send VERSION_STAGED."""
        found = self._progress.reduce(held)
        if found is not None:
            staged = VersionStaged(self.generation, self.version, *found)
            self._send(COORDINATOR, staged.pack())

    def _count(self, push: PushId, held: ChunkStore, pulled: int) -> None:
        """Count a staged chunk of a push; after the last, send PUSH_STAGED."""
        found = self._progress.count(push, held)
        if found is not None:
            key = (self.generation, push.incarnation, push.sequence, pulled, push.worker)
            self._send(COORDINATOR, PushStaged(*key, *found).pack())

    def _forget(self, push: PushId) -> None:
        """Drop what is staged of a push, and refuse what comes of it later."""
        self._progress.forget(push)
        self._done.add(push)
        for held in self._trainable:
            if push in held.staged:
                held.forget(push)

    # -- commit and apply ----------------------------------------------------------------------

    def _commit(self, commit: CommitOrder) -> None:
        """Apply staged pushes as the next version, and send it to its readers."""
        # ProtocolError: it cannot be, nothing has changed. Once the optimizer has raised (`torn`) none is applied; a
        # parameter server's users are sent why, workers nothing.
        if commit.version <= self.version or commit.generation < self.generation:
            return  # a copy of one that is applied
        hyper = commit.hyper or [{} for _ in self._base]
        self._check_commit(commit, hyper)
        if self._spec is not None and (self._changed or any(hyper)):
            self._changed = True  # what a schedule leaves alone later returns to the recipe's value
            hyper = self._spec.hyperparameters(hyper)
        self.version, self._since = commit.version, self._now()
        contributors = {push.worker for push in commit.pushes}
        self._left_out = (
            self._left_out | contributors if commit.skip else self._left_out - contributors
        )
        self._progress.begin_version()
        workers = ((self._hosts.reader_of(worker), request) for worker, request in commit.readers)
        readers = list(dict.fromkeys(workers))
        changed = self._layout.changed_by(commit.version)
        for held in self._in_order:
            if held.is_opaque:
                self.flush()  # the weights, with which workers go on meanwhile
            if not commit.skip and self.torn is None:
                self._apply(held, commit, hyper)
            for push in commit.pushes:
                if push in held.staged:  # what an aggregator added up is staged as the first push
                    held.forget(push)
            sent = self.torn is None and held.chunk.index in changed
            for reader, sequence in readers if sent else ():
                skipped = self._is_left_out(reader)
                self._weights.send(reader, held, self._position, sequence, skipped=skipped)
        if self.torn is not None and self._open_to_all:
            for reader, sequence in readers:
                self._send_torn(reader, sequence, self.torn)
        if not self._together:
            for push in commit.pushes:
                self._done.add(push)
        if self._copies:
            self._confirm()
        self._weights.end_commit()
        if self._service is not None:
            self._service.reached(self._position)
        self._stage_early()

    def _is_left_out(self, reader: Peer) -> bool:
        """Return whether a reader's last committed push, or those of its workers, was left out."""
        return bool(self._left_out) if self._together else reader.index in self._left_out

    def _apply(self, held: ChunkStore, commit: CommitOrder, hyper: list[dict[str, Any]]) -> None:
        """Take the optimizer's step of a commit on one chunk."""
        if not self._together:
            aggregated = self._hosts.aggregators
            held.reduce(push for push in commit.pushes if push in held.staged or not aggregated)
        held.clip(commit.clip)
        try:
            held.apply(hyper, commit.rate, self._weights.make_way(held))
        except BaseException as error:
            if held.raised is not error:
                raise
            self.torn = RaisedUpdate.of(self.version, error)
            self._send(COORDINATOR, self.torn.to_coordinator(self.generation).pack())

    def _check_commit(self, commit: CommitOrder, hyper: list[dict[str, Any]]) -> None:
        """Check that all of a commit can be applied, before any of it is; ProtocolError otherwise."""
        pushes = commit.pushes
        if (commit.generation, commit.version) != (self.generation, self.version + 1):
            raise ProtocolError(
                f"COMMIT of {(commit.generation, commit.version)} at generation, version "
                f"{self._position}"
            )
        missing = self._together and not self._progress.version_is_whole
        if not self._together and not self._hosts.aggregators:
            # With aggregators, several workers' pushes are staged as the first of them.
            staged = self._trainable[0].staged if self._trainable else dict.fromkeys(pushes)
            missing = any(self._progress.is_partial(p) or p not in staged for p in pushes)
        if missing and not commit.skip:
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
                self._forget(push)
            self._refresh(discard.readers)

    def _end_worker(self, ended: WorkerEnded) -> None:
        """Forget the incomplete pushes of a dead worker's life, and refuse later ones of it."""
        if self._is_now(ended):
            self._ended[ended.worker] = ended.life
            for push in ended.pushes:
                self._forget(push)
            for push in self._progress.pushes:
                if push.worker == ended.worker and push.incarnation <= ended.life:
                    self._forget(push)

    def _take_in(self, joined: WorkerJoined) -> None:
        """Take a worker's pushes from now on, and send the worker all weights."""
        if self._is_now(joined):
            self._members |= {joined.worker}  # it may have been missing when the generation began
            for held in self.chunks.values():
                self._weights.send(worker_peer(joined.worker), held, self._position, reload=True)
            self._stage_early()

    def _is_now(self, decision: Decision) -> bool:
        """Return whether a decision is of this server's generation and version."""
        # They come in order, any other is a copy.
        return (decision.generation, decision.version) == self._position

    def _refresh(self, readers: Sequence[Sequence[int]]) -> None:
        """Send workers the trainable weights as they are; each entry is (worker, request)."""
        for worker, sequence in readers:
            reader = worker_peer(worker)
            skipped = self._is_left_out(reader)
            for held in reversed(self._trainable):
                self._weights.send(reader, held, self._position, sequence, skipped=skipped)

    # -- membership and state ------------------------------------------------------------------

    def _begin_generation(self, begun: Members) -> None:
        """Drop what was staged, stage the generation's early pushes, and send members all weights if it says so."""
        if (begun.generation, begun.version) <= self._position:
            return  # a copy
        self.generation, self.version = begun.generation, begun.version
        self._since = self._now()
        self._members = frozenset(begun.workers)
        for held in self._trainable:
            held.discard()
        self._progress.clear()
        self._left_out.clear()
        self._done.clear()
        self._install(begun.install)
        if begun.reload:
            readers = map(self._hosts.reader_of, sorted(self._members))
            for reader in dict.fromkeys(readers):
                for held in self.chunks.values():
                    self._weights.send(reader, held, self._position, reload=True)
        if self._service is not None:
            self._service.reached(self._position)
        self._stage_early()

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

    def _stage_early(self) -> None:
        """Stage the pushes that came early; those that are still early are kept again."""
        for source, push in self._early.take():
            try:
                self._stage(source, push)
            except ProtocolError as error:
                log.warning("refused %s from %s: %s", push.KIND.name, source, error)


def _made(
    chunk: Chunk,
    topology: Topology,
    spec: OptimizerSpec | None,
    weights: torch.Tensor,
    *,
    checked: bool,
) -> ChunkStore:
    """Return the store of a chunk, of the flat vector `weights` or opaque."""
    if chunk.is_opaque:
        assert topology.stores is not None, f"chunk {chunk.index} is opaque: give the server stores"
        return topology.stores.make(chunk, spec, checked=checked)
    layout, copies = topology.layout, len(topology.holders[chunk.index]) > 1
    view = layout.chunk_view(weights, chunk.index)
    return ServerChunk(chunk, layout, spec, view, checked, keeps_mean=copies)
