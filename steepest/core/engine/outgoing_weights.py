"""The weights that a server sends, and the memory that they and their readers need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from steepest.core.engine.chunk_store import HeldChunk
from steepest.core.engine.incoming_weights import Key
from steepest.core.engine.optimizer_records import state_fields
from steepest.core.engine.topology import Topology
from steepest.core.messages.gradients import Weights
from steepest.core.messages.message import Peer, Send
from steepest.core.messages.snapshots import Snapshot, SnapshotEnd, StateTensor
from steepest.core.tensors.half_precision import narrow, narrow_size
from steepest.core.tensors.shared_memory import allocate, give_pages_back

#: The least number of commits in which a vector was not needed before its memory is freed.
COMMITS = 256


@dataclass(slots=True, eq=False)
class _WeightBuffer:
    """One flat vector, and whether its pages are freed until it is written to again."""

    memory: torch.Tensor
    empty: bool = False

    def has(self, view: torch.Tensor) -> bool:
        return 0 <= view.data_ptr() - self.memory.data_ptr() < self.memory.numel()


class WeightBuffers:
    """Flat vectors of one size: each chunk's weights lie in one, old weights that are still read in others.

    The first free vector is taken, so the last ones are needed least. A vector in shared memory stays
    mapped, here and in its readers, when its pages are freed; any other vector is dropped.

    Args:
        nbytes: size of each.
        in_use: returns whether a part of a vector is being read, or has yet to be sent.
        first: the vector in which all chunks lie at the beginning, which is never freed; None to
            begin without any.
    """

    def __init__(
        self, nbytes: int, in_use: Callable[[torch.Tensor], bool], first: torch.Tensor | None = None
    ) -> None:
        self._nbytes = nbytes
        self._in_use = in_use
        self._buffers = [] if first is None else [_WeightBuffer(first)]
        self._stay = len(self._buffers)  # the number of vectors that are never freed
        self._needed = self._stay  # the number of vectors needed since `shrink`
        self._commits = 0

    @property
    def held(self) -> int:
        """The number of vectors that take memory."""
        return sum(not buffer.empty for buffer in self._buffers)

    def of(self, view: torch.Tensor) -> torch.Tensor:
        """Return the vector of which `view` is a part; the first one if there is none."""
        return next(
            (buffer.memory for buffer in self._buffers if buffer.has(view)), self._buffers[0].memory
        )

    def free(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes [start, stop) of the first vector in which they are not in use, or of a new vector."""
        free = (
            i
            for i, buffer in enumerate(self._buffers)
            if not self._in_use(buffer.memory[start:stop])
        )
        if (index := next(free, None)) is None:
            index = len(self._buffers)
            self._buffers.append(_WeightBuffer(allocate(self._nbytes)))
        self._needed = max(self._needed, index + 1)
        self._buffers[index].empty = False
        return self._buffers[index].memory[start:stop]

    def look(self) -> bool:
        """Count a commit, and return whether it is time to call `shrink`."""
        self._commits += 1
        return self._commits % COMMITS == 0

    def moved(self, view: torch.Tensor, start: int, stop: int) -> torch.Tensor | None:
        """Return the bytes [start, stop) to which a chunk's `view` should move, so that its vector can be freed.

        They belong to a vector that was needed since `shrink`; None if the chunk should stay where it is.
        """
        needed = self._buffers[: self._needed]
        if any(buffer.has(view) for buffer in needed):
            return None
        return next(
            (at for buffer in needed if not self._in_use(at := buffer.memory[start:stop])), None
        )

    def shrink(self, views: Iterable[torch.Tensor], spans: Iterable[tuple[int, int]]) -> None:
        """Free vectors not needed since the last call that hold no view and lend no (start, stop) of `spans`."""
        views, spans = list(views), list(spans)
        for buffer in reversed(self._buffers[self._needed :]):
            if any(map(buffer.has, views)) or any(
                self._in_use(buffer.memory[start:stop]) for start, stop in spans
            ):
                continue
            if not buffer.empty and give_pages_back(buffer.memory):
                buffer.empty = True
            elif not buffer.empty:
                self._buffers.remove(buffer)
        self._needed = self._stay


class SentChanges:
    """The changes of a chunk from version to version, which readers add to their weights.

    A reader that has some version is sent all changes since, one after the other, so that it has the
    same bits as every other reader of the version. The last change is always kept, earlier ones while
    all together have fewer bytes than the chunk.

    Args:
        most: bytes of the chunk, which is sent whole if the changes are not fewer; 0 to keep only the
            last change.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._since = -1  # the least version after which all changes are kept
        self._changes: deque[tuple[int, torch.Tensor]] = deque()  # each with the version it makes
        self._nbytes = 0

    def add(self, version: int, packed: torch.Tensor, *, whole: bool = False) -> None:
        """Keep the change that makes a version, uint8, which must not be modified; `whole`: it is the chunk itself."""
        if whole:  # readers of earlier versions cannot add it
            self._changes.clear()
            self._since, self._nbytes = version, 0
            return
        self._changes.append((version, packed))
        self._nbytes += packed.nbytes
        while len(self._changes) > 1 and self._nbytes >= self._most:
            self._since, dropped = self._changes.popleft()
            self._nbytes -= dropped.nbytes

    def after(self, version: int | None) -> torch.Tensor | None:
        """Return the changes after a version, None for the last, as one tensor, uint8; None if they are unknown."""
        if version is None:
            return self._changes[-1][1] if self._changes else None
        if version < self._since:
            return None
        parts = [packed for made, packed in self._changes if made > version]
        return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)


class OutgoingWeights:
    """Sends one server's chunks, and manages the flat vectors in which they lie. Used on the router's thread.

    Within a host, weights are lent where they lie. Before they change, `make_way` therefore returns other memory for
    the new ones if the old ones are being read, or copies the part that has not been sent yet.
    """

    def __init__(
        self,
        index: int,
        topology: Topology,
        chunks: Mapping[int, HeldChunk],  # that the server holds, by index
        # uint8, flat, of the layout's size: where the chunks lie at the beginning
        vector: torch.Tensor,
        send: Send,  # sends as the server
        *,
        # returns whether a part of a vector is being read, or has yet to be sent
        in_use: Callable[[torch.Tensor], bool],
        # copies the unsent part of the vector that new weights replace; None to write elsewhere
        own_pending: Callable[[torch.Tensor], None] | None,
        # server i lives with worker i, which is sent that server's copy of a chunk
        in_workers: bool,
    ) -> None:
        self._index = index
        self._hosts, self._holders = topology.hosts, topology.holders
        self._host = self._hosts.servers[index]
        self._wire_dtype = topology.wire_formats[1]
        self._chunks = chunks
        self._send = send
        self._in_use = in_use
        self._own_pending = own_pending
        self._in_workers = in_workers
        self._buffers = WeightBuffers(topology.layout.nbytes, in_use, vector)
        # What workers of other hosts are sent in half precision, and by chunk: its version, bytes.
        self._narrow_buffers = WeightBuffers(topology.layout.nbytes // 2, in_use)
        self._narrowed: dict[int, tuple[Key, torch.Tensor]] = {}
        # by chunk, what they are sent where they are sent changes
        self._changes: dict[int, SentChanges] = {}

    def change(self, held: HeldChunk, version: int, *, differ: bool) -> None:
        """Note that a chunk has a version's new weights; `differ`: whether workers may have different versions."""
        if (packed := held.change_to_send()) is not None:
            most = held.chunk.nbytes if differ else 0
            changes = self._changes.setdefault(held.chunk.index, SentChanges(most))
            changes.add(version, packed, whole=packed.nbytes == held.chunk.nbytes)

    def begin_anew(self) -> None:
        """Forget earlier changes: all readers will be sent all weights."""
        self._changes.clear()

    @property
    def vector(self) -> torch.Tensor:
        """The flat vector in which the server's first chunk lies."""
        weights = (held.weights for held in self._chunks.values() if held.chunk.nbytes)
        return self._buffers.of(next(weights, torch.empty(0)))

    # -- sending -------------------------------------------------------------------------------

    def send(
        self,
        reader: Peer,
        held: HeldChunk,
        at: Key,
        sequence: int = 0,
        *,
        reload: bool = False,
        skipped: bool = False,
        fragments: Sequence[int] | None = None,
        since: int | None = None,
    ) -> None:
        """Send a reader a chunk at a generation and version, if it gets that from this server.

        Opaque chunks are not sent.

        Args:
            sequence: the request's, or 0.
            reload: whether all chunks are sent, frozen ones too.
            skipped: whether the reader's last push was left out.
            fragments: whose chunks the reader is sent; None for the fragment whose turn it is.
            since: the version that the reader has; None for the one before the last change.
        """
        if held.is_opaque:
            return  # workers ask for what they need
        holders = self._holders[held.chunk.index]
        own = self._in_workers and reader.role == "worker" and reader.index in holders
        if self._index != (reader.index if own else holders[0]):
            return
        if self._hosts.reduces and not own and not reload and reader.role == "worker":
            return  # workers pass on these weights among themselves
        payload = self._as_sent(held, reader, at)
        if not (own or self._is_in_process(reader)):
            payload = payload.cpu()  # what leaves the process lies in the memory of the host
        if held.sent is not None and self._is_far(reader):
            changes = None if reload else self._changes.get(held.chunk.index)
            packed = None if changes is None else changes.after(since)
            payload = held.sent.clone() if packed is None else packed
        generation, version = at
        chunk = held.chunk.index
        key = generation, sequence, version, chunk, reload, skipped
        self._send(reader, Weights(*key, fragments).pack(payload))

    def _is_in_process(self, reader: Peer) -> bool:
        """Return whether a reader is the job's only worker, whose own vector this server updates in place."""
        return self._own_pending is not None and not self._in_workers and reader.role == "worker"

    def _is_far(self, reader: Peer) -> bool:
        """Return whether a reader is a worker, or an aggregator, of another host."""
        return reader.role in ("worker", "aggregator") and self._hosts.host_of(reader) != self._host

    def _as_sent(self, held: HeldChunk, reader: Peer, at: Key) -> torch.Tensor:
        """Return a chunk's weights as a reader receives them, rounded once for all workers of other hosts."""
        chunk, wire_dtype = held.chunk, self._wire_dtype
        if reader.role not in ("worker", "aggregator"):
            # A client may be slow to read; weights that change in place cannot be lent to it.
            return held.weights if self._own_pending is None else held.weights.clone()
        size = narrow_size(chunk.dtype, chunk.nbytes, wire_dtype)
        if size is None or wire_dtype is None or not chunk.trainable:
            return held.weights
        if self._hosts.host_of(reader) == self._host:
            return held.weights
        narrowed_at, narrowed = self._narrowed.get(chunk.index, ((-1, -1), held.weights))
        if narrowed_at != at:
            begin = chunk.start // 2
            narrowed = self._narrow_buffers.free(begin, begin + size)
            if not narrow(held.weights, wire_dtype, narrowed):
                narrowed = held.weights
            self._narrowed[chunk.index] = (at, narrowed)
        return narrowed

    def answer(self, order: Snapshot, at: Key) -> tuple[list[HeldChunk], SnapshotEnd]:
        """Send a SNAPSHOT's reader the dense chunks that this server answers for: weights, optimizer state.

        Returns:
            The opaque chunks whose state is still to be sent, and the message that ends the answer.
        """
        reader, holders = order.reader, self._holders
        asked = [held for i, held in self._chunks.items() if holders[i][0] == self._index]
        wanted = [h for h in asked if order.chunks is None or h.chunk.index in order.chunks]
        for held in wanted if order.what in ("weights", "state") else ():
            self.send(reader, held, at, order.sequence)
        for held in wanted if order.what == "state" else ():
            for description, value in () if held.is_opaque else held.state():
                fields, payload = state_fields(description, value.clone())
                part = StateTensor(order.sequence, held.chunk.index, **fields)
                self._send(reader, part.pack(payload))
        generation, version = at
        end = SnapshotEnd(generation, order.sequence, version, order.state)
        all_state = order.what not in ("weights", "standing")
        return [held for held in wanted if held.is_opaque and all_state], end

    # -- memory --------------------------------------------------------------------------------

    def make_way(self, held: HeldChunk) -> torch.Tensor | None:
        """Return memory of a chunk's size that no process reads, for new weights; None to write them in place."""
        if held.is_opaque:
            return None
        if self._own_pending is not None:
            self._own_pending(held.weights)
            return None
        if not self._in_use(held.weights):
            return None
        return self._buffers.free(held.chunk.start, held.chunk.stop)

    def end_commit(self) -> None:
        """Count a commit; now and then free the memory that no reader has needed for a while."""
        if self._buffers.look():
            self._free_unneeded()

    def _free_unneeded(self) -> None:
        """Move the chunks out of vectors that were not needed of late, and free those vectors."""
        dense = [held for held in self._chunks.values() if not held.is_opaque]
        for held in dense:
            chunk = held.chunk
            buffer = self._buffers.moved(held.weights, chunk.start, chunk.stop)
            if buffer is not None:
                buffer.copy_(held.weights)
                held.move(buffer)
        chunks = [held.chunk for held in dense]
        self._buffers.shrink([held.weights for held in dense], [(c.start, c.stop) for c in chunks])
        self._narrowed.clear()
        sizes = [(c, narrow_size(c.dtype, c.nbytes, self._wire_dtype)) for c in chunks]
        self._narrow_buffers.shrink(
            [], [(c.start // 2, c.start // 2 + size) for c, size in sizes if size]
        )
