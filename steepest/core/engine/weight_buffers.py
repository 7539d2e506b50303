"""The flat vectors of a server's weights: as many as readers need, for as long as they need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

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
