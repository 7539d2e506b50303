"""Workers and servers of a job on virtual time: what they wait for, how long they work, what they send.

The library's own `Coordinator` and commit rule decide what they are told, and when, by its own messages; the job's
`Topology` says which server holds a chunk, which workers it is sent to, and in how many bytes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from steepest.cli.planning.events import ModelledProcess, Task
from steepest.cli.planning.profile import CodecCosts, Profile
from steepest.core.engine.job import Job
from steepest.core.messages.gradients import (
    CommitOrder,
    Discard,
    PushStaged,
    Report,
    VersionStaged,
)
from steepest.core.messages.membership import Lease
from steepest.core.messages.message import Kind, Message, Peer, server_peer, worker_peer
from steepest.core.tensors.half_precision import narrow_size
from steepest.core.tensors.layout import ParameterLayout

#: Passes over memory in which a worker with weights of its own forms what it pushes, and takes new weights in.
_PASSES = 3
#: Of the passes of workers that do not wait for each other.
_LEAST_VARIATION = 0.05
_LEAST_PACE = 0.25  # times what a pass usually takes


class SendingSchedule(NamedTuple):
    """When new weights leave servers and when a worker uses them, if all workers contribute to each update.

    The library's own schedule is the default; the others are for comparisons with other systems.

    Attributes:
        streams: whether the new weights of a chunk leave as soon as its gradients are added up, rather than when
            the update is committed.
        installs: whether weights that came early are used from the commit on only, of which each worker gets a
            message.
    """

    streams: bool = False
    installs: bool = False


#: A chunk's result leaves at once, as in systems that know of no commit (ps-lite, BytePS, Horovod, Ray SGD).
STREAMED = SendingSchedule(streams=True)
#: Weights leave early, and are installed at the commit.
STAGED = SendingSchedule(streams=True, installs=True)


class ModelledPush(NamedTuple):
    """One chunk of a gradient on its way, or several without a gradient."""

    worker: int
    sequence: int
    pulled: int  # the version from which it was computed
    chunks: tuple[int, ...]
    size: int  # bytes on the way; 0 without a gradient


class Sizes:
    """The bytes in which a job's chunks travel, what packing them takes, and when passes need and complete them."""

    def __init__(self, job: Job, profile: Profile) -> None:
        self._topology, layout = job.topology, job.description.layout
        codec, self._pull_dtype = self._topology.wire_formats
        self._hosts, self._holders = self._topology.hosts, self._topology.holders
        self.chunks = layout.chunks
        self.plain = [chunk.nbytes for chunk in layout.chunks]
        self._packed = [None if codec is None else codec.size(layout, c) for c in layout.chunks]
        pulled = self._topology.pull_codec
        self._changes = [None if pulled is None else pulled.size(layout, c) for c in layout.chunks]
        self._everywhere = codec is not None and codec.everywhere
        # (seconds, chunk) by time: when its gradient is complete
        self.ready = _held_back(_by_time(layout, profile.ready), self._holders, profile)
        self.codec = CodecCosts() if codec is None else profile.codec_costs(codec)
        self.pull_codec = CodecCosts() if pulled is None else profile.codec_costs(pulled)

    def is_packed(self, worker: int, chunk: int) -> bool:
        """Return whether a worker pushes a chunk in the form of the job's codec."""
        return self._packed[chunk] is not None and (
            self._everywhere
            or any(not self._hosts.beside(worker, server) for server in self._holders[chunk])
        )

    def pushed(self, worker: int, chunk: int) -> int:
        """Return the bytes of a push of a chunk."""
        packed = self._packed[chunk]
        return packed if packed is not None and self.is_packed(worker, chunk) else self.plain[chunk]

    def pulled(self, reader: int, server: int, chunk: int, changes: int) -> int:
        """Return the bytes of a chunk's weights after so many changes, from a server to a worker."""
        size, held = self.plain[chunk], self.chunks[chunk]
        if self._hosts.beside(reader, server):
            return size
        narrow = narrow_size(held.dtype, size, self._pull_dtype)
        packed = changes * (self._changes[chunk] or size)
        return packed if packed < size else narrow or size


class ModelledServer:
    """A server: counts what is pushed, tells the coordinator, applies what is committed and sends new weights."""

    def __init__(
        self,
        index: int,
        job: Job,
        profile: Profile,
        sizes: Sizes,
        process: ModelledProcess,
        schedule: SendingSchedule,
    ) -> None:
        layout, holders = job.description.layout, job.holders
        self.index, self.process = index, process
        self._layout, self._holders, self._costs, self._sizes = (
            layout,
            holders,
            profile.costs,
            sizes,
        )
        self._in_workers = job.servers_in_workers
        self._stages_each = job.stages_each
        self._streams = schedule.streams and not self._stages_each
        self._everyone = [(worker, 0) for worker in range(job.num_workers if self._streams else 0)]
        self._order = [chunk for chunk in layout.trainable_chunks if index in holders[chunk]]
        self._members = job.num_workers
        self._generation = 0
        self._counts: Counter[tuple[int, ...]] = (
            Counter()
        )  # pushes of a version's chunk, or chunks of a push
        self._whole: Counter[int] = Counter()  # by version, the chunks that are reduced
        # by chunk how often it has changed, and by worker and chunk at which of them it was sent last
        self._changes: Counter[int] = Counter()
        self._had: Counter[tuple[int, int]] = Counter()
        self.to_coordinator: Callable[[ModelledProcess, Peer, Message], None]
        self.to_worker: Callable[[ModelledProcess, int, int, int, int, int], None]

    def take_push(self, push: ModelledPush) -> None:
        """Stage a chunk of a gradient, or note that there is none for some chunks."""
        for chunk in push.chunks:
            nbytes = self._sizes.plain[chunk] if push.size else 0
            if not self._stages_each:
                self._reduce(push.pulled, chunk, nbytes)
            else:
                self._count(push, nbytes)

    def _reduce(self, pulled: int, chunk: int, nbytes: int) -> None:
        """Add a chunk up when all members have pushed it; tell the coordinator when all chunks are."""
        self._counts[pulled, chunk] += 1
        if self._counts[pulled, chunk] < self._members:
            return
        del self._counts[pulled, chunk]
        self.process.spend(self._adding(nbytes, self._members) + nbytes * self._costs.checked)
        if self._streams and chunk in self._layout.changed_by(pulled + 1):
            self._apply(chunk)
            self._send(self._everyone, pulled + 1, [chunk])
        self._whole[pulled] += 1
        if self._whole[pulled] == len(self._order):
            del self._whole[pulled]
            staged = VersionStaged(self._generation, pulled, 0.0)
            self.to_coordinator(self.process, server_peer(self.index), staged.pack())

    def _count(self, push: ModelledPush, nbytes: int) -> None:
        """Count a chunk of a push; tell the coordinator when all have arrived."""
        key = push.worker, push.sequence
        self.process.spend(nbytes * self._costs.checked)
        self._counts[key] += 1
        if self._counts[key] == len(self._order):
            del self._counts[key]
            staged = PushStaged(self._generation, 0, push.sequence, push.pulled, push.worker, 0.0)
            self.to_coordinator(self.process, server_peer(self.index), staged.pack())

    def _adding(self, nbytes: int, pushes: int) -> float:
        """Return the seconds of a mean of some pushes: one alone is taken as it is."""
        unpacked = self._sizes.codec.unpacked
        each = unpacked or (self._costs.added if pushes > 1 else 0.0)
        return nbytes * pushes * each

    def handle(self, message: Message) -> None:
        """Carry out a decision of the coordinator."""
        match message.kind:
            case Kind.MEMBERS:
                self._generation = message.body.generation
            case Kind.COMMIT:
                self._commit(message.body)
            case Kind.REFRESH:
                self._send(message.body.readers, message.body.version, self._order)
            case Kind.DISCARD:
                discard: Discard = message.body
                self._send(discard.readers, discard.version, self._order)

    def _commit(self, commit: CommitOrder) -> None:
        """Apply a commit chunk by chunk, and send each to the workers that wait for it."""
        if self._streams:
            return  # done, when each was added up
        changed = self._layout.changed_by(commit.version)
        for chunk in (each for each in self._order if each in changed):
            nbytes = self._sizes.plain[chunk]
            if self._stages_each:
                self.process.spend(self._adding(nbytes, len(commit.pushes)))
            self._apply(chunk)
            self._send(commit.readers, commit.version, [chunk])

    def _apply(self, chunk: int) -> None:
        """Update a chunk."""
        applying = self._costs.applied + self._sizes.pull_codec.packed
        self.process.spend(self._sizes.plain[chunk] * applying)
        self._changes[chunk] += 1

    def _send(self, readers: Sequence[Sequence[int]], version: int, chunks: Sequence[int]) -> None:
        """Send chunks to workers: each from its first holder, or from the server of the worker's own process."""
        for chunk in chunks:
            for reader, _ in readers:
                holders = self._holders[chunk]
                own = self._in_workers and reader in holders
                if self.index == (reader if own else holders[0]):
                    changes = self._changes[chunk] - self._had[reader, chunk]
                    self._had[reader, chunk] = self._changes[chunk]
                    size = self._sizes.pulled(reader, self.index, chunk, changes)
                    self.to_worker(self.process, self.index, reader, version, chunk, size)


class ModelledWorker:
    """A worker: computes, pushes chunks as they are complete, and goes on when its weights are here."""

    def __init__(
        self,
        index: int,
        job: Job,
        profile: Profile,
        sizes: Sizes,
        process: ModelledProcess,
        schedule: SendingSchedule,
        *,
        serves: bool,
    ) -> None:
        layout, strategy = job.description.layout, job.strategy
        self.index, self.process = index, process
        self._layout, self._sizes, self._profile = layout, sizes, profile
        self._strategy, self._holders = strategy, job.holders
        self._leases_samples = job.leases_samples
        together = job.needs_all and job.num_workers > 1
        self._installs = schedule.streams and schedule.installs and together
        self._trained = layout.trainable_chunks
        self._serves = serves  # its process holds chunks, and others wait for it
        self._ready = sizes.ready
        self._generation = self._limit = self._sequence = 0
        self._lease: Lease | None = None
        # equal workers would stay in step for ever, and find links free that others use meanwhile
        least = 0.0 if job.needs_all else _LEAST_VARIATION
        self._variation = max(profile.variation, least) if job.num_workers > 1 else 0.0
        self._random, self._pace = random.Random(index), 1.0
        self._here = dict.fromkeys(self._trained, 0)  # by chunk, the version of its weights
        self._committed = 0
        self._device = (
            0.0  # when a device that computes beside the thread has done what it was given
        )
        self.to_coordinator: Callable[[ModelledProcess, Peer, Message], None]
        self.to_server: Callable[[ModelledProcess, int, ModelledPush], None]
        self.computed = 0.0  # seconds in which it has computed
        self.beside = 0.0  # of these, other than passes and loading
        self.passes = 0.0  # of these, in passes

    # -- what it is sent -----------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Take a message of the coordinator."""
        match message.kind:
            case Kind.MEMBERS:
                self._generation = message.body.generation
            case Kind.GRANT:
                self._limit = message.body.limit
            case Kind.LEASE:
                self._lease = message.body

    def take_weights(self, version: int, chunk: int, size: int) -> None:
        """Take new weights of a chunk."""
        if size and self._sizes.pull_codec.unpacked:
            self.process.spend(self._sizes.plain[chunk] * self._sizes.pull_codec.unpacked)
        self._here[chunk] = max(self._here[chunk], version)

    def install(self, version: int) -> None:
        """Note that a version is committed; its weights may have come before."""
        self._committed = version

    def _has(self, version: int, chunks: Collection[int]) -> bool:
        if self._installs and self._committed < version:
            return False
        here = self._here
        return all([here[chunk] >= version for chunk in chunks])  # noqa: C419 - half the time of a generator

    # -- what it does --------------------------------------------------------------------------

    def life(self) -> Task:
        """Take steps as long as they are granted."""
        yield lambda: self._generation > 0
        steps = self._leased() if self._leases_samples else self._granted()
        yield from steps

    def _granted(self) -> Task:
        for version in count():
            yield partial(self._may_take, version)
            yield from self._share(version, 1)
            self._report(version)
            if self._profile.loading:
                yield self._profile.loading  # the next batch, while weights are awaited
            if not self._strategy.delay:
                yield partial(self._has_all, version + 1)

    def _may_take(self, version: int) -> bool:
        return self._limit > version

    def _has_all(self, version: int) -> bool:
        """Return whether all weights are here that the update to a version changes."""
        return self._has(version, self._layout.changed_by(version))

    def _leased(self) -> Task:
        while True:
            yield lambda: self._lease is not None and self._has(self._lease.version, self._trained)
            lease, self._lease = self._lease, None
            assert lease is not None
            if self._profile.loading:
                yield self._profile.loading
            yield from self._share(lease.version, lease.count)
            self._report(lease.version)

    def _share(self, version: int, shares: int) -> Task:
        """Compute a share of the samples from the weights of a version, and push the result."""
        self._sequence += 1
        if self._strategy.local:
            yield from self._updates(version, shares * self._strategy.updates_of_share)
            exchanged = self._layout.of_fragment(version)
            for chunk in (each for each in reversed(self._trained) if each in exchanged):
                self._push(version, chunk)
            self._push_nothing(version, exchanged)
            return
        done, self._pace, self._device = 0.0, self._draw(), self.process.cursor
        for at, chunk in self._ready:
            if at > done:
                yield from self._compute(at - done)
                done = at
                self.process.spend(self._profile.costs.alone)
            self._push(version, chunk)
        yield from self._compute(self._profile.seconds - done)

    def _updates(self, version: int, batches: int) -> Task:
        """Make updates of the worker's own weights; with a delay new ones are taken in after so many."""
        profile = self._profile
        for batch in range(batches):
            if batch == self._strategy.delay and version:
                yield partial(self._has_all, version)
            if self._strategy.delay and self._serves:
                yield self.process.has_heard_all
            more, self._pace = profile.loading if batch else 0.0, self._draw()
            updating = profile.nbytes * profile.costs.applied
            self.beside += updating * self._pace
            self.passes -= (more + updating) * self._pace
            yield from self._compute(profile.seconds + more + updating)
        exchanged = self._layout.of_fragment(version)
        nbytes = sum(self._sizes.plain[chunk] for chunk in exchanged)
        forming = _PASSES * nbytes * profile.costs.added
        self.beside += forming * self._pace
        self.passes -= forming * self._pace
        yield from self._compute(forming)

    def _compute(self, seconds: float) -> Task:
        if seconds <= 0:
            return
        took = seconds * self._pace
        self.computed += took
        self.passes += took
        if self._profile.on_device:
            self._device += took
            yield self.process.until(self._device)
        else:  # of the thread, which handles no message before its task waits
            self.process.spend(took)

    def _draw(self) -> float:
        """Return the factor by which the next pass takes longer than usual."""
        if not self._variation:
            return 1.0
        return max(1.0 + self._variation * self._random.gauss(0.0, 1.0), _LEAST_PACE)

    def _push(self, version: int, chunk: int) -> None:
        """Push a chunk to all its holders."""
        if self._sizes.is_packed(self.index, chunk):
            self.process.spend(self._sizes.plain[chunk] * self._sizes.codec.packed)
        size = self._sizes.pushed(self.index, chunk)
        push = ModelledPush(self.index, self._sequence, version, (chunk,), size)
        for server in self._holders[chunk]:
            self.to_server(self.process, server, push)

    def _push_nothing(self, version: int, exchanged: Collection[int]) -> None:
        """Tell the holders of all other chunks that this share does not change these."""
        by_server: dict[int, list[int]] = {}
        for chunk in (each for each in self._trained if each not in exchanged):
            for server in self._holders[chunk]:
                by_server.setdefault(server, []).append(chunk)
        for server, chunks in by_server.items():
            push = ModelledPush(self.index, self._sequence, version, tuple(chunks), 0)
            self.to_server(self.process, server, push)

    def _report(self, version: int) -> None:
        """Tell the coordinator that all is pushed."""
        timings = {"compute": self._profile.seconds, "data": self._profile.loading, "wait": 0.0}
        report = Report(
            *(self._generation, 0, self._sequence, version, 1.0, 1, 0, 0),
            loss=0.0,
            timings=timings,
        )
        self.to_coordinator(self.process, worker_peer(self.index), report.pack())


def _by_time(layout: ParameterLayout, times: Mapping[str, float]) -> list[tuple[float, int]]:
    """Return (seconds, chunk) of all trained chunks, by the time at which the last of their parameters is ready."""
    by_time = []
    for index in layout.trainable_chunks:
        names = [layout.entries[piece.entry].name for piece in layout.chunks[index].slices]
        by_time.append((max(times.get(name, 0.0) for name in names), index))
    return sorted(by_time)


def _held_back(
    ready: list[tuple[float, int]], holders: Sequence[Sequence[int]], profile: Profile
) -> list[tuple[float, int]]:
    """Return the same, with each server's last chunk at the end of the step if a model may take chunks back."""
    if not profile.holds_back:
        return ready
    last = {server: chunk for _, chunk in ready for server in holders[chunk]}
    late = frozenset(last.values())
    return sorted((profile.seconds if chunk in late else at, chunk) for at, chunk in ready)
