"""A worker's exchange if workers add up gradients among themselves, and each pushes the sum to its own server."""

from __future__ import annotations

from functools import partial

import torch

from steepest.core.engine.exchange import (
    NOTHING_YET,
    Arrived,
    Exchange,
    ExchangeAround,
    Sent,
    WaitUntil,
)
from steepest.core.engine.incoming_weights import Key
from steepest.core.engine.job import Job
from steepest.core.messages.gradients import HostPush, Weights
from steepest.core.messages.membership import Failed, GroupKey
from steepest.core.messages.message import (
    COORDINATOR,
    Kind,
    Message,
    Peer,
    aggregator_peer,
    server_peer,
    worker_peer,
)
from steepest.core.tensors.memory import as_tensor
from steepest.core.transport.router import Router
from steepest.errors import DataPlaneError, ProtocolError, describe_error
from steepest.strategies.process_groups.group import GroupPlace, Groups, ProcessGroup, Program, Ways
from steepest.strategies.process_groups.new_weights import MadeChunk, NewWeights
from steepest.strategies.process_groups.reduction import (
    HandedChunk,
    OwnGradient,
    Reduction,
    Sums,
    event_after,
)

_MOST_KEYS = 4  # of the rendezvous from one member and generation
_MOST_GENERATIONS = 8  # of which keys are kept before they begin here


class GroupExchange(ExchangeAround):
    """Hands chunks to a process group instead of servers.

    Weights come as to the inner exchange; those that only other workers' servers make are passed on in the group, and
    delivered as if these servers had sent them. Opaque chunks, of rows of tables, go to servers as without a group:
    each worker has gradients of other rows.

    A group is made for each generation, when its first step begins, and is left when another begins. A gradient that
    may be taken back is added up when it is whole; others chunk by chunk, during the backward pass. The payloads are
    not written to, so that the next generation can push them again.

    Args:
        inner: brings weights, and counts pushes.
        worker: its index, and its rank in groups.
        job: of the worker.
        router: of the process.
        groups: makes process groups.
        home: where the worker has its gradient and its weights.
    """

    def __init__(
        self,
        inner: Exchange,
        worker: int,
        job: Job,
        router: Router,
        groups: Groups,
        home: torch.device,
    ) -> None:
        super().__init__(inner)
        self.kinds = inner.kinds | {Kind.GROUP_KEY}
        self.ready = self._hand_over
        self._worker, self._size, self._seconds = worker, job.num_workers, job.step_timeout
        self._layout, self._holders = job.description.layout, job.holders
        self._passes = job.passes_weights
        self._narrow = job.strategy.reduces_in
        self._checked = job.strategy.nonfinite != "pass" or self._narrow is not None
        self._router, self._groups, self._home = router, groups, home
        self._send = router.sender(worker_peer(worker))
        self._push_sum = router.sender(aggregator_peer(worker))
        self._incarnation = 0
        self._generation = -1  # of the group
        self._group: ProcessGroup | None = None
        self._sums = self._memory()
        self._own: OwnGradient | None = None  # the present one, or the last
        self._now: Reduction | NewWeights | None = None  # what the group does, or did last
        self._made: dict[tuple[int, int], MadeChunk] = {}  # see `NewWeights`
        self._opaque = frozenset(self._layout.opaque_chunks)
        self._count = len(job.topology.pushed)
        # opaque chunks of the present gradient, as `ready` was given them, if it may be taken back
        self._kept: list[tuple[int, torch.Tensor, float, float, frozenset[int]]] = []
        self._missing = 0  # chunks of it that are not ready yet
        self._moved = 0  # bytes that a ring passes on of it: to add up, and to give all the sum
        self._keys: dict[int, list[tuple[str, bytes]]] = {}  # of generations that have not begun

    def _memory(self) -> Sums:
        return Sums(self._layout, self._narrow, self._home)

    def begin_life(self, incarnation: int, wait_until: WaitUntil) -> None:
        """See `Exchange`."""
        super().begin_life(incarnation, wait_until)
        self._incarnation = incarnation

    def begin_generation(self) -> None:
        """Leave the group of the previous generation; the sums that it was forming are void."""
        super().begin_generation()
        if self._group is not None:
            self._group.end()
            # a thread of the old group may still write to the old ones
            self._sums, self._made = self._memory(), {}
        self._group, self._own, self._now = None, None, None

    def begin(self, generation: int, version: int, incarnation: int, *, is_last: bool) -> None:
        """Begin a gradient, and the group of its generation if it is the first there."""
        super().begin(generation, version, incarnation, is_last=is_last)
        if self._group is None or self._generation != generation:
            self._join(generation)
        if self._own is not None and self._own.pulled == version and self._missing:
            self._begin_again(self._own)
        self._missing, self._moved = self._count, 0
        self._kept.clear()
        self._own = OwnGradient(generation, version, incarnation, self.sequence)
        assert self._group is not None
        self._group.run(self._program(self._own))

    def _program(self, own: OwnGradient) -> Program:
        """Return the group's program for a gradient: add it up, then pass on the new weights."""
        arguments = self._layout, self._holders, self._worker
        push = partial(self._pushed, own.generation)
        reduction = Reduction(*arguments, own, self._sums, push, checked=self._checked)
        weights = NewWeights(*arguments, self._size, own, self._sums, self._made, self._brought)

        def run() -> Program:
            self._now = reduction
            yield from reduction.program()
            if self._passes:
                self._now = weights
                yield from weights.program()

        return run()

    def _begin_again(self, before: OwnGradient) -> None:
        """Forget a gradient that was not computed to its end, unless a part of it is added up."""
        if before.chunks and not before.held_back:
            self._tell(
                f"worker {self._worker} computes its gradient from version {before.pulled} again, of which a part "
                "was added to the others' already: take the step again"
            )
        before.cancelled = True

    def _join(self, generation: int) -> None:
        """Join the group of a generation."""
        if self._group is not None:
            self._group.end()
            self._sums, self._made = self._memory(), {}
        self._own, self._generation = None, generation
        place = GroupPlace(generation, self._worker, self._size, self._seconds, self._home)
        send_key, failed = partial(self._send_key, generation), partial(self._fail, generation)
        self._group = self._groups.join(place, Ways(self._router, send_key, failed))
        for key, value in self._keys.pop(generation, ()):
            self._group.take_key(key, value)
        self._keys = {later: keys for later, keys in self._keys.items() if later > generation}

    def hold_back(self) -> None:
        """Add nothing up before `end`: the gradient may be taken back until then."""
        super().hold_back()
        assert self._own is not None
        self._own.held_back = True

    def take_back(self) -> None:
        """Forget the chunks that were ready."""
        super().take_back()
        assert self._own is not None
        self._own.chunks.clear()
        self._own.sequence = self.sequence
        self._missing, self._moved = self._count, 0
        self._kept.clear()

    def _hand_over(
        self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> bool:
        """Hand a complete chunk of the gradient to the group, see `Exchange.ready`."""
        assert self._own is not None
        assert self._group is not None
        self._missing -= 1
        if chunk in self._opaque:
            if self._own.held_back:
                self._kept.append((chunk, payload, unit, total, absent))
            else:
                self.inner.ready(chunk, payload, unit, total, absent)
            return self._missing > 0
        made = event_after(payload)
        self._own.chunks[chunk] = HandedChunk(payload, unit, total, absent, made)
        shares = 1 if len(self._holders[chunk]) == 1 else 2
        spec = self._layout.chunks[chunk]
        size = spec.nbytes // spec.dtype.itemsize * self._sums.dtype(chunk).itemsize
        self._moved += size * shares
        self._group.wake()
        return self._missing > 0

    def end(self) -> Sent:
        """Add up and push the chunks that were held back; return what has travelled.

        Of a ring these are (W - 1) / W of each byte that it passes on: the bytes of a gradient, and once more those of
        which each worker gets the sum.
        """
        for kept in self._kept:
            self.inner.ready(*kept)
        self._kept.clear()
        if self._own is not None and self._group is not None:
            self._own.held_back = False
            self._group.wake()
        sent = super().end()
        moved = self._moved * (self._size - 1) // self._size
        return sent._replace(bytes_pushed=sent.bytes_pushed + moved)

    # -- what comes of the group -----------------------------------------------------------------

    def _pushed(self, generation: int, push: HostPush, payload: torch.Tensor | None) -> None:
        """Push a sum to the own server; called on any thread."""
        self._router.call(partial(self._push, generation, push, payload))

    def _push(self, generation: int, push: HostPush, payload: torch.Tensor | None) -> None:
        if generation == self._generation and self._group is not None:
            self._push_sum(server_peer(self._worker), push.pack(payload))

    def _brought(self, root: int, weights: Weights, payload: torch.Tensor) -> None:
        """Deliver weights of another worker's server as if they had been sent; called on any thread."""
        self._router.call(partial(self._deliver, root, weights, payload))

    def _deliver(self, root: int, weights: Weights, payload: torch.Tensor) -> None:
        if weights.generation == self._generation and self._group is not None:
            self._router.sender(server_peer(root))(worker_peer(self._worker), weights.pack(payload))

    def _note_weights(self, source: Peer, message: Message) -> None:
        """Note that weights have come: of the own server, to be passed on; of others, which were passed on."""
        weights: Weights = message.body
        of_group = weights.generation == self._generation and self._group is not None
        if not of_group or weights.reload or message.payload is None:
            return
        assert self._group is not None
        if source == server_peer(self._worker):
            payload = as_tensor(message.payload)
            made = MadeChunk(payload, weights.skipped, event_after(payload))
            self._made[weights.version, weights.chunk] = made
        else:
            self._sums.lent.discard(weights.chunk)
        self._group.wake()

    def _send_key(self, generation: int, key: str, value: bytes) -> None:
        """Send each other member a key of the rendezvous."""
        body = GroupKey(generation, key, value.hex())
        for other in range(self._size):
            if other != self._worker and generation == self._generation:
                self._send(worker_peer(other), body.pack())

    def _fail(self, generation: int, error: Exception) -> None:
        """Tell the coordinator that a group failed whose generation goes on."""
        if generation != self._generation or self._group is None or self._own is None:
            return
        self._tell(
            f"{self._doing()} the other {self._size - 1} workers failed {self._where()}: {error}; no process "
            "is known to have died: see that the nodes reach each other at all ports, or leave data_plane= out"
        )

    def _tell(self, error: str) -> None:
        """Tell the coordinator that the step cannot go on."""
        assert self._own is not None
        described = describe_error(DataPlaneError(error))
        failed = Failed(self._generation, self._incarnation, self._own.pulled, **described)
        self._send(COORDINATOR, failed.pack())

    def _doing(self) -> str:
        return "adding up gradients with" if self._now is None else self._now.doing

    def _where(self) -> str:
        chunk = -1 if self._now is None else self._now.chunk
        return f"at chunk {chunk}" if chunk >= 0 else "before the first chunk"

    # -- messages --------------------------------------------------------------------------------

    def receive(self, source: Peer, message: Message) -> Arrived:
        """Take a key of the rendezvous, or another message; ProtocolError: no correct process sends it."""
        if message.kind is not Kind.GROUP_KEY:
            arrived = super().receive(source, message)
            if self._passes and message.kind is Kind.WEIGHTS:
                self._note_weights(source, message)
            return arrived
        body: GroupKey = message.body
        try:
            value = bytes.fromhex(body.value)
        except ValueError:
            raise ProtocolError(f"GROUP_KEY with value={body.value!r:.40}: no bytes") from None
        if self._group is not None and body.generation == self._generation:
            self._group.take_key(body.key, value)
        elif body.generation > self._generation:
            self._keep(body.generation, body.key, value)
        return NOTHING_YET

    def _keep(self, generation: int, key: str, value: bytes) -> None:
        """Keep a key of a generation that has not begun here."""
        known = self._keys.setdefault(generation, [])
        if (key, value) in known:
            return  # a copy
        if len(known) >= _MOST_KEYS * self._size:
            raise ProtocolError(f"more keys of generation {generation} than its members have")
        known.append((key, value))
        while len(self._keys) > _MOST_GENERATIONS:
            del self._keys[min(self._keys)]

    def lacks(self, key: Key | None) -> list[str]:
        """Return in words what is awaited, also which chunk is being added up, see `Exchange`."""
        lacking, now = self.inner.lacks(key), self._now
        if isinstance(now, Reduction) and self._group is not None and not self.inner.lacks(None):
            lacking.append(f"the sum of chunk {now.chunk} over all workers")
        return lacking
