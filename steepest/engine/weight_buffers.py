"""Where a server's weights lie: as many flat vectors as its readers need, and no more for long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from steepest.tensors.shared_memory import allocate, give_pages_back

#: Commits in which a room was not needed, at least, before its memory is given back.
COMMITS = 256


@dataclass(slots=True, eq=False)
class _Room:
    memory: torch.Tensor
    empty: bool = False  # its pages are the kernel's, until it is written to again

    def has(self, view: torch.Tensor) -> bool:
        return 0 <= view.data_ptr() - self.memory.data_ptr() < self.memory.numel()


class Rooms:
    """Flat vectors; each chunk's bytes lie at its place in one of them, older ones that are still read in others.

    The first that is free is taken, so the last are needed least. A room of shared memory stays mapped when it is
    given back, here and in its readers, but takes no memory; another one is forgotten.

    Args:
        nbytes: of each.
        in_use: whether what lies there is being read, or has yet to be sent.
        first: the vector in which all chunks lie at the beginning, which stays; None to begin without any.
    """

    def __init__(self, nbytes: int, in_use: Callable[[torch.Tensor], bool], first: torch.Tensor | None = None) -> None:
        self._nbytes = nbytes
        self._in_use = in_use
        self._rooms = [] if first is None else [_Room(first)]
        self._stay = len(self._rooms)
        self._needed = self._stay  # so many of them, since the last look
        self._commits = 0

    @property
    def held(self) -> int:
        """Rooms that take memory."""
        return sum(not room.empty for room in self._rooms)

    def of(self, view: torch.Tensor) -> torch.Tensor:
        """The flat vector in which something lies; the first if it lies in none."""
        return next((room.memory for room in self._rooms if room.has(view)), self._rooms[0].memory)

    def free(self, start: int, stop: int) -> torch.Tensor:
        """These bytes of the first room in which nobody is reading them."""
        free = (i for i, room in enumerate(self._rooms) if not self._in_use(room.memory[start:stop]))
        if (index := next(free, None)) is None:
            index = len(self._rooms)
            self._rooms.append(_Room(allocate(self._nbytes)))
        self._needed = max(self._needed, index + 1)
        self._rooms[index].empty = False
        return self._rooms[index].memory[start:stop]

    def look(self) -> bool:
        """Called after each commit: whether it is time to look which rooms were not needed, see `shrink`."""
        self._commits += 1
        return self._commits % COMMITS == 0

    def moved(self, view: torch.Tensor, start: int, stop: int) -> torch.Tensor | None:
        """Where a chunk should lie instead of in a room that was not needed; None if it should stay."""
        needed = self._rooms[: self._needed]
        if any(room.has(view) for room in needed):
            return None
        return next((at for room in needed if not self._in_use(at := room.memory[start:stop])), None)

    def shrink(self, views: Iterable[torch.Tensor], places: Iterable[tuple[int, int]]) -> None:
        """Gives back what was not needed since the last time.

        Args:
            views: what lies there now.
            places: (start, stop) of everything that may have been lent.
        """
        views, places = list(views), list(places)
        for room in reversed(self._rooms[self._needed :]):
            if any(map(room.has, views)) or any(self._in_use(room.memory[start:stop]) for start, stop in places):
                continue
            if not room.empty and give_pages_back(room.memory):
                room.empty = True
            elif not room.empty:
                self._rooms.remove(room)
        self._needed = self._stay
