"""The pushes that a server receives: which it stages now, keeps for later, or refuses, and which are whole."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from steepest.core.engine.chunk_store import GradientStore, StagedPush
from steepest.core.engine.spans import RoleSpans, SpanKind
from steepest.core.engine.topology import Topology
from steepest.core.messages.gradients import HostPush, Push, PushStaged, VersionStaged
from steepest.core.messages.message import COORDINATOR, Peer, PushId, Send, worker_peer
from steepest.core.protocol.push_tracking import MOST_CULPRITS, MOST_PUSHES, ClosedPushes
from steepest.errors import ProtocolError, listed

#: The sum of squares of a whole gradient, and (worker, parameter) of
#: each NaN or infinity in it.
GradientCheck = tuple[float, list[tuple[int, str]]]


@dataclass(slots=True)
class _StagedChunks:
    """How much of a gradient is staged: of one push, or of all members' pushes of a version."""

    missing: int  # trainable chunks that are not staged yet
    # by chunk: of each staged one that this server answers for
    squares: dict[int, float] = field(default_factory=dict)
    # by chunk: (worker, parameter) of NaN and infinity
    culprits: dict[int, list[tuple[int, str]]] = field(default_factory=dict)


class StagingProgress:
    """The number of staged chunks of each gradient, which shows when it is whole on one server.

    If all members contribute to a version, their gradients count as one: `reduce`. Otherwise each push
    counts by itself: `count`.

    Args:
        chunks: number of the server's trainable chunks.
        answers_for: indices of the chunks whose squares it reports: not of copies.
    """

    def __init__(self, chunks: int, answers_for: Container[int]) -> None:
        self._chunks = chunks
        self._answers_for = answers_for
        self._version = _StagedChunks(chunks)
        self._pushes: dict[PushId, _StagedChunks] = {}
        self.newest: dict[int, PushId] = {}  # by worker, the last push of which a chunk has come

    @property
    def pushes(self) -> list[PushId]:
        """The pushes of which some chunks are staged and others missing."""
        return list(self._pushes)

    def in_words(self) -> str:
        """Return which pushes have come in part; any thread may ask."""
        partial = [
            f"push {push.sequence} of {worker_peer(push.worker)} lacks {progress.missing} of "
            f"{self._chunks} chunks"
            for push, progress in list(self._pushes.items())
        ]
        return listed(partial) or "none has come in part"

    def is_partial(self, push: PushId) -> bool:
        """Return whether some chunks of a push are staged and others missing."""
        return push in self._pushes

    @property
    def version_is_whole(self) -> bool:
        """Whether every chunk of the next version is reduced."""
        return self._version.missing == 0

    def reduce(self, held: GradientStore) -> GradientCheck | None:
        """Form a chunk's mean of all members' pushes; after the last chunk, return the check of the whole mean."""
        order = sorted(held.staged)
        held.reduce(order)
        return self._note(self._version, held, held.squares(), order)

    def take_back(self, held: GradientStore) -> None:
        """Note that a reduced chunk of a version that is not whole lacks a gradient again."""
        self._version.missing += 1
        self._version.squares.pop(held.chunk.index, None)
        self._version.culprits.pop(held.chunk.index, None)

    def count(self, push: PushId, held: GradientStore) -> GradientCheck | None:
        """Note one more staged chunk of a push; after the last chunk, return the check of its gradient."""
        progress = self._pushes.get(push)
        if progress is None:
            progress = self._pushes[push] = _StagedChunks(self._chunks)
        whole = self._note(progress, held, held.check(push), [push])
        if whole is not None:
            del self._pushes[push]
        return whole

    def _note(
        self, progress: _StagedChunks, held: GradientStore, squares: float, pushes: Sequence[PushId]
    ) -> GradientCheck | None:
        """Note one more staged chunk of some pushes; after the last chunk, return the check of the gradient."""
        chunk = held.chunk.index
        if not math.isfinite(squares):
            progress.culprits[chunk] = held.culprits(pushes)
        if chunk in self._answers_for:
            progress.squares[chunk] = squares
        progress.missing -= 1
        if progress.missing:
            return None
        # Sorted, so that the sum is the same in whatever order chunks were staged.
        total = sum(sorted(progress.squares.values()))
        return total, list(chain.from_iterable(progress.culprits.values()))[:MOST_CULPRITS]

    def forget(self, push: PushId) -> None:
        """Forget a push that is dropped."""
        self._pushes.pop(push, None)

    def begin_version(self) -> None:
        """Count the chunks of a new version from none on."""
        self._version = _StagedChunks(self._chunks)

    def clear(self) -> None:
        """Forget all pushes, and begin a version."""
        self.newest.clear()
        self._pushes.clear()
        self.begin_version()


log = logging.getLogger(__name__)


#: A push with its payload.
ArrivedPush = tuple[Push | HostPush, torch.Tensor | None]


class EarlyPushes:
    """Pushes that wait at one server for their generation or version to begin.

    A sender can be ahead by two steps at most, and each message may come twice, so a server keeps
    four times as many pushes of each worker as a step has. More come only from a sender that violates
    the protocol.

    Args:
        chunks: the number of pushes in one worker's step: the server's trainable chunks.
    """

    def __init__(self, chunks: int) -> None:
        self._most = 4 * chunks
        self._pushes: list[tuple[Peer, ArrivedPush]] = []  # in the order of their arrival
        self._counts: Counter[Peer] = Counter()

    def keep(self, source: Peer, pushed: ArrivedPush, workers: int) -> ArrivedPush | None:
        """Keep a sender's push of a chunk for `workers` workers.

        Return its oldest one, which is dropped, if there are too many.
        """
        self._pushes.append((source, pushed))
        self._counts[source] += 1
        if self._counts[source] <= self._most * workers:
            return None
        oldest = next(push for peer, push in self._pushes if peer == source)
        self._pushes = [(peer, push) for peer, push in self._pushes if push is not oldest]
        self._counts[source] -= 1
        return oldest

    def drop(self, peer: Peer) -> list[ArrivedPush]:
        """Remove and return a sender's pushes."""
        dropped = [push for source, push in self._pushes if source == peer]
        self._pushes = [(source, push) for source, push in self._pushes if source != peer]
        del self._counts[peer]
        return dropped

    def take(self) -> list[tuple[Peer, ArrivedPush]]:
        """Remove and return all pushes with their senders, in the order of their arrival."""
        taken, self._pushes = self._pushes, []
        self._counts.clear()
        return taken


class PushIntake:
    """Stages the chunks of gradients that are pushed to one server, and reports whole pushes to the coordinator.

    Used on the thread of the process' router.

    Args:
        index: of the server.
        topology: of the job.
        chunks: that the server holds, by index.
        answers_for: indices of the chunks that this server answers for; it only has copies of the others.
        send: sends as the server.
        stages_each, open_to_all: see `ServerMode`.

    Attributes:
        generation, version: of the server, which sets them.
        refused: the number of pushes that were dropped.
        trainable: the chunks that take gradients.
        members: the workers of the generation.
        progress: how much of each gradient is staged.
        spans: records what is staged and reduced; None to record nothing.
    """

    def __init__(
        self,
        index: int,
        topology: Topology,
        chunks: Mapping[int, GradientStore],
        answers_for: Collection[int],
        send: Send,
        *,
        stages_each: bool,
        open_to_all: bool,
    ) -> None:
        self.generation = self.version = self.refused = 0
        self.trainable = [chunk for chunk in chunks.values() if chunk.chunk.trainable]
        self.members: frozenset[int] = frozenset()
        self.progress = StagingProgress(len(self.trainable), answers_for)
        self._index, self._chunks, self._answers_for, self._send = index, chunks, answers_for, send
        self._codec, self._hosts = topology.wire_formats[0], topology.hosts
        self._stages_each, self._open_to_all = stages_each, open_to_all
        copies = any(len(servers) > 1 for servers in topology.holders)
        # whether workers may have all weights of a version that this server has yet to make
        layout = topology.layout
        self._is_passed = copies or bool(layout.opaque_chunks) or layout.fragments > 1
        self._done = ClosedPushes()
        self._early = EarlyPushes(len(self.trainable))
        self.spans: RoleSpans | None = None
        self._ended: dict[int, int] = {}  # by worker, the incarnation of its last life that is over

    def begin_generation(self, members: Iterable[int]) -> None:
        """Drop what was staged; pushes that came early are staged by `stage_early`."""
        self.members = frozenset(members)
        for held in self.trainable:
            held.discard()
        self.progress.clear()
        self._done.clear()

    def is_late(self, push: Push | HostPush) -> bool:
        """Return whether a push is of a generation, or a version, that is over."""
        late = push.generation < self.generation
        return late or (not self._stages_each and push.pulled < self.version)

    def are_whole(self, pushes: Collection[PushId]) -> bool:
        """Return whether some pushes can be committed, as far as this server knows."""
        if not self._stages_each:
            return self.progress.version_is_whole
        if self._hosts.aggregators:
            return True  # several workers' pushes are staged as the first of them
        staged = self.trainable[0].staged if self.trainable else dict.fromkeys(pushes)
        return not any(self.progress.is_partial(push) or push not in staged for push in pushes)

    def close(self, pushes: Iterable[PushId]) -> None:
        """Refuse later messages of committed pushes, if each push is staged by itself."""
        if self._stages_each:
            for push in pushes:
                self._done.add(push)

    def end_life(self, worker: int, life: int) -> None:
        """Forget the incomplete pushes of a worker's ended life, and refuse later ones of it."""
        self._ended[worker] = life
        for push in self.progress.pushes:
            if push.worker == worker and push.incarnation <= life:
                self.forget(push)

    def forget_user(self, worker: int) -> None:
        """Forget a user that has left, with its incomplete pushes."""
        for push in self.progress.pushes:
            if push.worker == worker:
                self.forget(push)
        self._done.forget(worker)

    def forget_early(self, peer: Peer) -> None:
        """Drop what a lost peer has pushed for a generation or version that has not begun."""
        for push in self._early.drop(peer):
            self._release(*push)

    def _release(self, push: Push | HostPush, payload: torch.Tensor | None) -> None:
        """Give the memory of a dropped push back."""
        if (held := self._chunks.get(push.chunk)) is not None:
            held.release(payload)

    def stage(self, source: Peer, pushed: Push | HostPush, payload: torch.Tensor | None) -> None:
        """Stage a chunk of a gradient, keep it for later, or drop a late one; ProtocolError: it is refused.

        A push of the next version is early: its worker has these weights from servers that were faster than this one.
        """
        is_next = self._is_passed and not self._stages_each and pushed.pulled == self.version + 1
        newer = pushed.generation > self.generation
        is_now = pushed.generation == self.generation
        if newer or (is_now and (is_next or self._may_have_joined(source))):
            self._keep_early(source, pushed, payload)
            return
        held = self._chunks.get(pushed.chunk)
        if held is None or not held.chunk.trainable:
            raise ProtocolError(f"chunk {pushed.chunk} takes no gradients on server {self._index}")
        pushes = self._pushes_of(source, pushed)
        if self._refuses(pushes, pushed, held):
            held.release(payload)
            return
        began = 0.0 if self.spans is None else self.spans.now()
        codec = held.codec_of(payload, self._codec)
        self._drop_taken_back(pushes, held)
        if payload is not None and self._stages_each and pushed.chunk not in self._answers_for:
            # Its worker overwrites it as soon as another server has sent the weights.
            payload = held.own(payload)
        push, workers = pushes[0], frozenset(push.worker for push in pushes)
        absent = frozenset(pushed.absent)
        held.staged[push] = StagedPush(workers, payload, pushed.unit, pushed.total, absent, codec)
        if self._stages_each:
            self._count(push, held, pushed.pulled)
        elif held.contributors() >= self.members:
            self._reduce(held)
        if self.spans is not None:
            place = (push.sequence, pushed.pulled, pushed.chunk, source.index)
            self.spans.add(SpanKind.STAGE, began, *place)

    def _may_have_joined(self, source: Peer) -> bool:
        """Return whether a worker may be a member that this server has not heard of yet."""
        workers = len(self._hosts.workers)
        known = self._open_to_all or not self._stages_each or source.index in self.members
        return self._is_passed and not known and source.role == "worker" and source.index < workers

    def _keep_early(
        self, source: Peer, pushed: Push | HostPush, payload: torch.Tensor | None
    ) -> None:
        """Keep a push until its generation or version begins; ProtocolError: too many, so the oldest is dropped."""
        aggregated = self._hosts.summed_by(source.index)
        workers = len(aggregated) if source.role == "aggregator" else 1
        if (dropped := self._early.keep(source, (pushed, payload), workers)) is not None:
            self.refused += 1
            self._release(*dropped)
            oldest = dropped[0]
            raise ProtocolError(
                f"{source} has pushed more than two steps before this server was told of them: its "
                f"oldest push, of chunk {oldest.chunk} at generation {oldest.generation} and "
                f"version {oldest.pulled}, is dropped"
            )

    def _pushes_of(self, source: Peer, pushed: Push | HostPush) -> list[PushId]:
        """Return the pushes that a chunk belongs to; ProtocolError: its aggregator does not serve these workers."""
        if isinstance(pushed, Push):
            return [PushId(source.index, pushed.incarnation, pushed.sequence)]
        pushes = sorted(pushed.pushes)
        served = self._hosts.summed_by(source.index)
        if not pushes or not all(push.worker in served for push in pushes):
            raise ProtocolError(
                f"{source} pushes for workers {[push.worker for push in pushes]}, it serves "
                f"{served}"
            )
        return pushes

    def _refuses(self, pushes: list[PushId], pushed: Push | HostPush, held: GradientStore) -> bool:
        """Drop and count a chunk if it is late, and return whether it is; ProtocolError: no correct peer sends it."""
        if len(pushes) == 1:
            reason = self._reason_to_refuse(pushes[0], pushed, held)
        else:
            reasons = [self._reason_to_refuse(push, pushed, held) for push in pushes]
            reason = max((reason for reason in reasons if reason is not None), default=None)
        if reason is None and self._is_copy(pushes, held):
            reason = "it is staged already"
        if reason is None:
            return False
        self.refused += 1
        if reason:
            raise ProtocolError(
                f"push of chunk {pushed.chunk} at version {pushed.pulled}: {reason}"
            )
        return True

    def _reason_to_refuse(
        self, push: PushId, pushed: Push | HostPush, held: GradientStore
    ) -> str | None:
        """Return why a push is refused: "" if it is late or a copy; None to take it."""
        is_over = push.incarnation <= self._ended.get(push.worker, -1)
        if pushed.generation < self.generation or is_over or push in self._done:
            return ""
        if not self._open_to_all and push.worker not in self.members:
            return f"worker {push.worker} is no member"
        if push < self.progress.newest.get(push.worker, push):
            return ""  # it was taken back
        if self._stages_each:
            return self._reason_against_another(push, held)
        if pushed.pulled < self.version:
            return ""
        if pushed.pulled > self.version:
            return "out of place"
        return None

    def _is_copy(self, pushes: list[PushId], held: GradientStore) -> bool:
        """Return whether all of these pushes are staged on a chunk, perhaps within other sums."""
        if self._stages_each:
            return pushes[0] in held.staged
        if len(pushes) == 1 and self.progress.newest.get(pushes[0].worker) != pushes[0]:
            return False
        known = all(self.progress.newest.get(push.worker) == push for push in pushes)
        return known and held.contributors().issuperset(push.worker for push in pushes)

    @staticmethod
    def _reason_against_another(push: PushId, held: GradientStore) -> str | None:
        """Return why a worker may not stage one more push, as its pushes would fill the memory; None if it may."""
        if len(held.staged) < MOST_PUSHES:
            return None
        own = sum(other.worker == push.worker for other in held.staged)
        if own < MOST_PUSHES:
            return None
        return f"worker {push.worker} has {own} pushes that are not committed"

    def _drop_taken_back(self, pushes: list[PushId], chunk: GradientStore) -> None:
        """Drop the older pushes of these workers, which have taken them back (see `Push`), alone or within sums.

        Raises:
            ProtocolError: an older push is whole, and may be committed already.
        """
        if self._open_to_all:
            return  # a user may send several pushes at a time
        for push in pushes:
            older = self.progress.newest.get(push.worker, push)
            if older != push and not self._stages_each:
                for held in self.trainable:
                    self._take_back(push.worker, held)
            elif older != push and self.progress.is_partial(older):
                self.forget(older)
            self.progress.newest[push.worker] = push
            if not self._stages_each and chunk.staged:
                self._take_back(push.worker, chunk)

    def _take_back(self, worker: int, held: GradientStore) -> None:
        """Drop a worker's gradient of a chunk for the next version, with the sum that contains it."""
        pushes = [push for push, staged in held.staged.items() if worker in staged.workers]
        if pushes and self.progress.version_is_whole:
            raise ProtocolError(f"worker {worker} has pushed another gradient for this version")
        if pushes and held.contributors() >= self.members:
            self.progress.take_back(held)
            held.drop_mean()
        for push in pushes:
            held.forget(push)

    def _reduce(self, held: GradientStore) -> None:
        """Reduce a chunk that all members have pushed; after the last, send VERSION_STAGED."""
        began = 0.0 if self.spans is None else self.spans.now()
        whole_version = self.progress.reduce(held)
        if self.spans is not None:
            self.spans.add(SpanKind.REDUCE, began, -1, self.version + 1, held.chunk.index)
        if whole_version is not None:
            staged = VersionStaged(self.generation, self.version, *whole_version)
            self._send(COORDINATOR, staged.pack())

    def _count(self, push: PushId, held: GradientStore, pulled: int) -> None:
        """Count a staged chunk of a push; after the last, send PUSH_STAGED."""
        whole_push = self.progress.count(push, held)
        if whole_push is not None:
            key = (self.generation, push.incarnation, push.sequence, pulled, push.worker)
            self._send(COORDINATOR, PushStaged(*key, *whole_push).pack())

    def forget(self, push: PushId) -> None:
        """Drop the staged chunks of a push, and refuse later ones."""
        self.progress.forget(push)
        self._done.add(push)
        for held in self.trainable:
            if push in held.staged:
                held.forget(push)

    def stage_early(self) -> None:
        """Stage the pushes that came early; those that are still early are kept again."""
        for source, (push, payload) in self._early.take():
            try:
                self.stage(source, push, payload)
            except ProtocolError as error:
                log.warning("refused %s from %s: %s", push.KIND.name, source, error)
