"""A server: stages pushed chunks, reduces them, and applies the optimizer when told to commit."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from steepest.engine.optimizer_records import checked_state_size, state_fields
from steepest.engine.put_states import PutStates
from steepest.engine.server_chunk import ServerChunk, StagedPush
from steepest.engine.topology import Topology
from steepest.engine.weight_buffers import WeightBuffers
from steepest.errors import ProtocolError
from steepest.messages.gradients import (
    Commit,
    Decision,
    Discard,
    HostPush,
    Logged,
    Push,
    PushStaged,
    Refresh,
    VersionStaged,
    Weights,
)
from steepest.messages.membership import Members, WorkerEnded, WorkerJoined
from steepest.messages.message import COORDINATOR, Kind, Message, Peer, PushId, Send, worker_peer
from steepest.messages.snapshots import InstallPut, Snapshot, SnapshotEnd, StateTensor
from steepest.messages.users import UserLeft
from steepest.optim.spec import OptimizerSpec
from steepest.protocol.decision_log import DecisionLog
from steepest.protocol.push_tracking import MOST_CULPRITS, MOST_PUSHES, ClosedPushes
from steepest.tensors.half_precision import narrow, narrow_size
from steepest.tensors.memory import as_tensor

log = logging.getLogger(__name__)

_DECISIONS: dict[Kind, type[Decision]] = {
    decision.KIND: decision
    for decision in (Commit, Discard, Refresh, WorkerEnded, WorkerJoined, Members, InstallPut)
}


@dataclass(slots=True)
class _Arriving:
    """One push that is being staged: chunks still to come, and what is known of those that came."""

    missing: int
    squares: list[float] = field(default_factory=list)
    culprits: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class ServerMode:
    """What servers do differently in the modes of training.

    Attributes:
        together: every member contributes to every version: pushes are reduced as they arrive.
        in_workers: each server lives in the process of the worker of its index, which takes the
            server's weights there.
        open_to_all: anybody may push, members or not.
        checked: the size of gradients is computed, and with it NaN and infinity are found.
    """

    together: bool = True
    in_workers: bool = False
    open_to_all: bool = False
    checked: bool = True


class Server:
    """One server's chunks: a state machine over messages.

    Args:
        index: of the server.
        topology: of the job.
        spec: the optimizer; None to add what is pushed to the weights.
        weights: the flat vector; this server's chunks in it are read now and updated in place.
        send: how to send.
        in_use: whether somebody may be reading weights where they lie, or has yet to be sent them.
        own_pending: makes copies for those; None to make the new weights elsewhere.
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
        self.version = 0
        self.generation = 0
        self.refused = 0
        self._index = index
        self._send = send
        layout, holders = topology.layout, topology.holders
        self._in_workers = mode.in_workers
        self._holders = holders
        self._copies = any(len(servers) > 1 for servers in holders)
        self.decisions = DecisionLog()
        self._own_pending = own_pending
        self._in_use = in_use
        self._codec, self._pull_dtype = topology.wire_formats
        self._hosts = topology.hosts
        self._host = self._hosts.servers[index]
        self._weight_buffers = WeightBuffers(layout.nbytes, in_use, weights)
        self._narrow_buffers = WeightBuffers(
            layout.nbytes // 2, in_use
        )  # of what workers pull narrow
        self._narrowed: dict[
            int, tuple[tuple[int, int], torch.Tensor]
        ] = {}  # by chunk: of which version, its bytes
        self._together = mode.together
        self._checked = mode.checked
        self._open_to_all = mode.open_to_all
        self._layout = layout
        self._chunks = {
            chunk.index: ServerChunk(
                chunk,
                layout,
                spec,
                layout.chunk_view(weights, chunk.index),
                mode.checked,
                keeps_mean=len(holders[chunk.index]) > 1,
            )
            for chunk in layout.chunks
            if index in holders[chunk.index]
        }
        self._answers_for = {chunk for chunk in self._chunks if holders[chunk][0] == index}
        self._trainable = [chunk for chunk in self._chunks.values() if chunk.chunk.trainable]
        self._base = [dict(hyper) for _, hyper in spec.groups] if spec is not None else []
        self._changed = False  # whether a schedule has changed hyperparameters
        self._members: frozenset[int] = frozenset()
        self._early: list[
            tuple[Peer, Push | HostPush]
        ] = []  # pushes of a generation or version that is not known here yet
        self._early_of: Counter[Peer] = Counter()
        self._arriving: dict[PushId, _Arriving] = {}
        self._done = ClosedPushes()
        self._together_now = _Arriving(len(self._trainable))
        self._puts = PutStates(index, self._chunks, send, self._make_way, checked=mode.open_to_all)
        self._ended: dict[int, int] = {}  # by worker, the last of its lives that are over

    @property
    def chunks(self) -> dict[int, ServerChunk]:
        """What it holds."""
        return self._chunks

    @property
    def vector(self) -> torch.Tensor:
        """The flat vector in which its chunks lie, or the first of them."""
        lying = next(
            (held.weights for held in self._chunks.values() if held.chunk.nbytes), torch.empty(0)
        )
        return self._weight_buffers.of(lying)

    @property
    def weight_buffers_held(self) -> int:
        """Flat vectors that take memory: one, and those that readers need, or needed not long ago."""
        return self._weight_buffers.held + self._narrow_buffers.held

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Where an arriving payload goes: a push into a staging buffer of its chunk, or it stays where it is lent."""
        if message.kind is Kind.PUT_STATE:
            return torch.empty(checked_state_size(message, size), dtype=torch.uint8)
        held = self._chunks.get(message.chunk)
        sizes = [held.chunk.nbytes] if held is not None else []
        is_push = message.kind in (Kind.PUSH, Kind.HOST_PUSH)
        if held is not None and is_push:
            sizes.append((self._codec and self._codec.size(self._layout, held.chunk)) or sizes[0])
        if not (is_push or message.kind is Kind.PUT) or held is None or size not in sizes:
            raise ProtocolError(
                f"{message.kind.name} of {size} bytes for chunk {message.chunk}, server "
                f"{self._index} expects {held.chunk.nbytes if held else 'none of it'}"
            )
        if message.kind is Kind.PUT:
            return torch.empty(size, dtype=torch.uint8)
        if message.generation < self.generation or (
            self._together and message.version < self.version
        ):
            return None  # late: received and dropped
        return (
            as_tensor(message.payload) if message.payload is not None else held.staging_buffer(size)
        )

    def handle(self, source: Peer, message: Message) -> None:
        """Acts on one message."""
        match message.kind:
            case Kind.PUSH:
                self._stage(source, Push.unpack(message))
            case Kind.HOST_PUSH:
                self._stage(source, HostPush.unpack(message))
            case Kind.SNAPSHOT:
                self._snapshot(Snapshot.unpack(message))
            case Kind.PUT | Kind.PUT_STATE | Kind.REPLACE_STATE:
                self._puts.receive(source, message)
            case kind if (decision := _DECISIONS.get(kind)) is not None:
                self.carry_out(decision.unpack(message))
            case _:
                raise ProtocolError(f"a server does not take {message.kind.name}")

    def carry_out(self, decision: Decision) -> None:
        """Act on one of the coordinator's decisions, and remember it where chunks have copies.

        Raises:
            ProtocolError: it cannot be carried out here; nothing has changed.
        """
        match decision:
            case Commit():
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
        """The coordinator decides what a loss means; it is told once all that arrived is staged."""
        self._puts.lost(peer)
        if self._open_to_all and peer.role == "worker":
            for push in [push for push in self._arriving if push.worker == peer.index]:
                self._forget(push)
            self._done.forget(peer.index)
            self._send(COORDINATOR, UserLeft(peer.index).pack())

    def tick(self, now: float) -> None:
        """A server has no deadlines of its own."""

    # -- stage ---------------------------------------------------------------------------------

    def _stage(self, source: Peer, pushed: Push | HostPush) -> None:
        next_one = (
            self._copies and self._together and pushed.pulled == self.version + 1
        )  # elsewhere this is committed
        if pushed.generation > self.generation or (
            next_one and pushed.generation == self.generation
        ):
            self._keep_early(source, pushed)
            return
        held = self._chunks.get(pushed.chunk)
        if held is None or not held.chunk.trainable:
            raise ProtocolError(f"chunk {pushed.chunk} takes no gradients on server {self._index}")
        pushes = self._pushes_of(source, pushed)
        push, covered = pushes[0], frozenset(push.worker for push in pushes)
        reasons = [
            reason
            for push in pushes
            if (reason := self._reason_to_refuse(push, pushed, held)) is not None
        ]
        reason = max(reasons, default=None)
        if reason is not None:
            self.refused += 1
            held.release(pushed.payload)
            if reason:
                raise ProtocolError(
                    f"push of chunk {pushed.chunk} at version {pushed.pulled}: {reason}"
                )
            return
        payload = pushed.payload
        codec = (
            self._codec if payload is not None and payload.numel() != held.chunk.nbytes else None
        )
        if codec is not None and payload is not None:
            codec.check(self._layout, held.chunk, payload)
        if payload is not None and not self._together and pushed.chunk not in self._answers_for:
            payload = held.own(
                payload
            )  # its worker goes on when it has the weights, which come from elsewhere
        absent = frozenset(pushed.absent)
        held.staged[push] = StagedPush(covered, payload, pushed.unit, pushed.total, absent, codec)
        if self._together:
            if held.contributors() >= self._members:
                self._reduce(held)
        else:
            self._count(push, held, pushed.pulled)

    def _keep_early(self, source: Peer, pushed: Push | HostPush) -> None:
        """Keeps a push that overtook the coordinator's word; as many of each sender as two steps have, and copies."""
        served = (
            len(self._hosts.aggregators.get(source.index, ())) if source.role == "aggregator" else 1
        )
        self._early.append((source, pushed))
        self._early_of[source] += 1
        if self._early_of[source] > 4 * len(self._trainable) * served:
            oldest = next(push for peer, push in self._early if peer == source)
            self._early = [(peer, push) for peer, push in self._early if push is not oldest]
            self._early_of[source] -= 1
            self.refused += 1
            if (held := self._chunks.get(oldest.chunk)) is not None:
                held.release(oldest.payload)
            raise ProtocolError(
                f"{source} has pushed more than two steps before this server was told of them: its "
                f"oldest push, of chunk {oldest.chunk} at generation {oldest.generation} and "
                f"version {oldest.pulled}, is dropped"
            )

    def _pushes_of(self, source: Peer, pushed: Push | HostPush) -> list[PushId]:
        """Whose gradient it is: the sender's, or those of workers of its host."""
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

    def _reason_to_refuse(
        self, push: PushId, pushed: Push | HostPush, held: ServerChunk
    ) -> str | None:
        """None to take it; empty when it is merely late; at most once in any case."""
        late = pushed.generation < self.generation or push.incarnation <= self._ended.get(
            push.worker, -1
        )
        if late or push in self._done:
            return ""
        if not self._open_to_all and push.worker not in self._members:
            return f"worker {push.worker} is no member"
        if push in held.staged:
            return "it is staged already"
        if not self._together:
            return self._reason_against_another(push, held)
        if pushed.pulled < self.version:
            return ""
        if pushed.pulled > self.version or push.worker in held.contributors():
            return "out of place"
        return None

    @staticmethod
    def _reason_against_another(push: PushId, held: ServerChunk) -> str | None:
        """Whoever pushes on and on without a commit is refused before the memory is gone."""
        if len(held.staged) < MOST_PUSHES:
            return None
        own = sum(other.worker == push.worker for other in held.staged)
        return (
            None
            if own < MOST_PUSHES
            else f"worker {push.worker} has {own} pushes that are not committed"
        )

    def _reduce(self, held: ServerChunk) -> None:
        """Every member's push of a chunk is there."""
        order = sorted(held.staged)
        now = self._together_now
        held.reduce(order)
        squares = held.squares()
        if not math.isfinite(squares):
            now.culprits += held.culprits(order)
        if held.chunk.index in self._answers_for:
            now.squares.append(squares)
        now.missing -= 1
        if now.missing == 0:
            staged = VersionStaged(self.generation, self.version, *self._squares_and_culprits(now))
            self._send(COORDINATOR, staged.pack())

    def _count(self, push: PushId, held: ServerChunk, pulled: int) -> None:
        """One more chunk of a push is there."""
        arriving = self._arriving.get(push)
        if arriving is None:
            arriving = self._arriving[push] = _Arriving(len(self._trainable))
        squares = held.check(push)
        if not math.isfinite(squares):
            arriving.culprits += held.culprits([push])
        if held.chunk.index in self._answers_for:
            arriving.squares.append(squares)
        arriving.missing -= 1
        if arriving.missing == 0:
            del self._arriving[push]
            about = self._squares_and_culprits(arriving)
            staged = PushStaged(
                self.generation, push.incarnation, push.sequence, pulled, push.worker, *about
            )
            self._send(COORDINATOR, staged.pack())

    def _squares_and_culprits(
        self, arriving: _Arriving
    ) -> tuple[float | None, list[tuple[int, str]]]:
        """Return the sum of the squares of a gradient, None if it is not checked, and who sent NaN."""
        squares = (
            sum(sorted(arriving.squares)) if self._checked else None
        )  # the same in whatever order chunks came
        return squares, arriving.culprits[:MOST_CULPRITS]

    def _forget(self, push: PushId) -> None:
        self._arriving.pop(push, None)
        self._done.add(push)
        for held in self._trainable:
            if push in held.staged:
                held.forget(push)

    # -- commit and apply ----------------------------------------------------------------------

    def _commit(self, commit: Commit) -> None:
        if commit.version <= self.version or commit.generation < self.generation:
            return  # a copy of one that is applied
        pushes = commit.pushes
        hyper = commit.hyper or [{} for _ in self._base]
        self._check_commit(commit, hyper)
        if self._changed or any(
            hyper
        ):  # what a schedule leaves alone returns to the recipe's value
            self._changed = True
            hyper = [{**base, **changed} for base, changed in zip(self._base, hyper, strict=True)]
            hyper = [
                {k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in hyper
            ]
        self.version = commit.version
        self._together_now = _Arriving(len(self._trainable))
        readers = list(
            dict.fromkeys(
                (self._hosts.reader_of(worker), request) for worker, request in commit.readers
            )
        )
        for held in reversed(
            self._trainable
        ):  # first layers first: the next forward pass wants them first
            if not commit.skip:
                if not self._together:
                    held.reduce(
                        push
                        for push in pushes
                        if push in held.staged or not self._hosts.aggregators
                    )
                held.clip(commit.clip)
                held.apply(hyper, commit.rate, self._make_way(held))
            for push in pushes:
                if (
                    push in held.staged
                ):  # what an aggregator added up is staged as the first of them
                    held.forget(push)
            for reader, sequence in readers:
                self._send_weights(reader, held, sequence)
        if not self._together:
            for push in pushes:
                self._done.add(push)
        if self._copies and self._index == 1:  # in another process than the coordinator
            self._send(COORDINATOR, Logged(self.generation, self.version).pack())
        if self._weight_buffers.look():
            self._give_rooms_back()
        self._stage_early()

    def _check_commit(self, commit: Commit, hyper: list[dict[str, Any]]) -> None:
        """Looks whether all of a commit can be applied, before any of it is.

        Raises:
            ProtocolError: it cannot.
        """
        pushes, here = commit.pushes, (self.generation, self.version)
        if (commit.generation, commit.version) != (self.generation, self.version + 1):
            raise ProtocolError(
                f"COMMIT of {(commit.generation, commit.version)} at generation, version {here}"
            )
        missing = self._together and self._together_now.missing > 0
        if (
            not self._together and not self._hosts.aggregators
        ):  # what an aggregator added up is staged as the first of them
            staged = self._trainable[0].staged if self._trainable else dict.fromkeys(pushes)
            missing = any(push in self._arriving or push not in staged for push in pushes)
        if missing and not commit.skip:
            raise ProtocolError(
                f"COMMIT of pushes {[*pushes]} that are not whole on server {self._index}"
            )
        known = len(hyper) == len(self._base) and all(
            changed.keys() <= base.keys() | {"lr"}
            for base, changed in zip(self._base, hyper, strict=True)
        )
        if not known:
            raise ProtocolError(
                f"COMMIT with hyper={hyper!r:.80}: the optimizer has {len(self._base)} groups"
            )

    def _make_way(self, held: ServerChunk) -> torch.Tensor | None:
        """Before weights change: where the new ones go, or None when they may take the place of the old ones."""
        if self._own_pending is not None:
            self._own_pending(held.weights)
            return None
        if not self._in_use(held.weights):
            return None
        return self._weight_buffers.free(held.chunk.start, held.chunk.stop)

    def _give_rooms_back(self) -> None:
        """Frees memory that no reader has needed for a while."""
        chunks = [held.chunk for held in self._chunks.values()]
        for held in self._chunks.values():
            if (
                buffer := self._weight_buffers.moved(
                    held.weights, held.chunk.start, held.chunk.stop
                )
            ) is not None:
                buffer.copy_(held.weights)
                held.move(buffer)
        self._weight_buffers.shrink(
            [held.weights for held in self._chunks.values()], [(c.start, c.stop) for c in chunks]
        )
        self._narrowed.clear()
        sizes = [(c, narrow_size(c.dtype, c.nbytes, self._pull_dtype)) for c in chunks]
        self._narrow_buffers.shrink(
            [], [(c.start // 2, c.start // 2 + size) for c, size in sizes if size]
        )

    def _discard(self, discard: Discard) -> None:
        """Forget pushes; their workers go on with the weights as they are."""
        if self._is_now(discard):
            for push in discard.pushes:
                self._forget(push)
            self._refresh(discard.readers)

    def _end_worker(self, ended: WorkerEnded) -> None:
        """Forget the incomplete pushes of a life of a worker, and refuse those that come yet."""
        if self._is_now(ended):
            self._ended[ended.worker] = ended.life
            for push in ended.pushes:
                self._forget(push)
            own = [
                push
                for push in self._arriving
                if push.worker == ended.worker and push.incarnation <= ended.life
            ]
            for push in own:
                self._forget(push)

    def _take_in(self, joined: WorkerJoined) -> None:
        """Take pushes of a worker from now on, and send it all weights."""
        if self._is_now(joined):
            self._members |= {joined.worker}  # it may have been missing when the generation began
            for held in self._chunks.values():
                self._send_weights(worker_peer(joined.worker), held, reload=True)

    def _is_now(self, decision: Decision) -> bool:
        """Return whether a decision is about this version; otherwise it is a copy, since decisions come in order."""
        return (decision.generation, decision.version) == (self.generation, self.version)

    def _refresh(self, readers: Sequence[Sequence[int]]) -> None:
        """Send workers the trainable weights as they are."""
        for worker, sequence in readers:
            for held in reversed(self._trainable):
                self._send_weights(worker_peer(worker), held, sequence)

    def _send_weights(
        self, reader: Peer, held: ServerChunk, sequence: int = 0, *, reload: bool = False
    ) -> None:
        """Sends a chunk to who gets it from here: from its own process, or else from who answers for it."""
        holders = self._holders[held.chunk.index]
        own = self._in_workers and reader.role == "worker" and reader.index in holders
        if self._index != (reader.index if own else holders[0]):
            return
        chunk, payload = held.chunk.index, self._as_pulled(held, reader)
        self._send(
            reader, Weights(self.generation, sequence, self.version, chunk, reload, payload).pack()
        )

    def _as_pulled(self, held: ServerChunk, reader: Peer) -> torch.Tensor:
        """A chunk's weights as a reader receives them; rounded once for all workers of other hosts."""
        chunk, wire = held.chunk, self._pull_dtype
        if reader.role not in (
            "worker",
            "aggregator",
        ):  # it may be slow, and what changes in place cannot be lent to it
            return held.weights if self._own_pending is None else held.weights.clone()
        size = narrow_size(chunk.dtype, chunk.nbytes, wire)
        if (
            size is None
            or wire is None
            or not chunk.trainable
            or self._hosts.host_of(reader) == self._host
        ):
            return held.weights
        version, narrowed = self._narrowed.get(chunk.index, ((-1, -1), held.weights))
        if version != (self.generation, self.version):
            begin = chunk.start // 2
            narrowed = self._narrow_buffers.free(begin, begin + size)
            if not narrow(held.weights, wire, narrowed):
                narrowed = held.weights
            self._narrowed[chunk.index] = ((self.generation, self.version), narrowed)
        return narrowed

    # -- membership and state ------------------------------------------------------------------

    def _begin_generation(self, begun: Members) -> None:
        if (begun.generation, begun.version) <= (self.generation, self.version):
            return  # a copy
        self.generation, self.version = begun.generation, begun.version
        self._members = frozenset(begun.workers)
        for held in self._trainable:
            held.discard()
        self._arriving.clear()
        self._done.clear()
        self._together_now = _Arriving(len(self._trainable))
        self._install(begun.install)
        if begun.reload:
            for reader in dict.fromkeys(
                self._hosts.reader_of(worker) for worker in sorted(self._members)
            ):
                for held in self._chunks.values():
                    self._send_weights(reader, held, reload=True)
        self._stage_early()

    def _install_between_generations(self, order: InstallPut) -> None:
        """Install what clients have put; pushes that are staged stay."""
        if (order.generation, order.version) > (self.generation, self.version):
            self.version = order.version
            self._install(order.install)

    def _install(self, puts: Iterable[Sequence[Any]]) -> None:
        """Make what clients have put the state; each entry is (role, index, request) of a client."""
        for role, index, sequence in puts:
            self.refused += not self._puts.install(Peer(role, index), sequence)

    def _stage_early(self) -> None:
        early, self._early = self._early, []
        self._early_of.clear()
        for source, push in early:
            try:
                self._stage(source, push)
            except ProtocolError as error:
                log.warning("refused %s from %s: %s", push.KIND.name, source, error)

    def _snapshot(self, order: Snapshot) -> None:
        reader = order.reader
        asked = [held for index, held in self._chunks.items() if index in self._answers_for]
        for held in asked if order.what != "standing" else ():
            if order.chunks is None or held.chunk.index in order.chunks:
                self._send_weights(reader, held, order.sequence)
        if order.what == "state":
            for held in asked:
                for about, value in held.state():
                    part = StateTensor(
                        order.sequence, held.chunk.index, **state_fields(about, value.clone())
                    )
                    self._send(reader, part.pack())
        self._send(
            reader, SnapshotEnd(self.generation, order.sequence, self.version, order.state).pack()
        )
