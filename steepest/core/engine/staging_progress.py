"""How much of each gradient is staged on one server, its sum of squares, and NaN or infinity in it."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import chain

from steepest.core.engine.chunk_store import GradientStore
from steepest.core.messages.message import PushId, worker_peer
from steepest.core.protocol.push_tracking import MOST_CULPRITS
from steepest.errors import listed

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
