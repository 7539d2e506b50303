"""The items of a user's iterable in a pass, by number: the same in every process that goes through it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import numpy as np

from steepest.core.data.protocol import Indices
from steepest.core.engine.generators import States, restore, seed_everything, states
from steepest.errors import ConfigurationError

_AT_ONCE = 64  # items that are passed over
_NOTHING = object()


class DataPass:
    """One pass through an iterable; what it yields is taken when it is asked for.

    It begins with all generators seeded, and goes on with them as it left them: what is shuffled in a buffer, say,
    is the same on all workers. Other code does not notice. What is asked for once more, and is no longer kept,
    is found by going through the pass from its beginning.

    Args:
        begin: begins the pass, and returns what yields its items.
        seed: of the generators.
        size: the number of items that are said to come; None if unknown.
        wrong: says what is wrong where there are others, of "more" or "only 7".
        ahead: how many are taken at a time.
        keeps: how many are kept, besides those that were asked for last.
        outside: entered while items are taken.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        seed: int,
        size: int | None,
        wrong: Callable[[str], str],
        *,
        ahead: int = 1,
        keeps: int = 0,
        outside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.keeps, self.ended = keeps, False
        self._start, self._seed, self._size, self._wrong = begin, seed, size, wrong
        self._ahead, self._outside = ahead, outside
        self._items: Iterator[Any] = iter(())
        self._states: States | None = None  # of the generators, as the pass left them
        self._first = 0  # the number of the first item that is kept
        self._kept: list[Any] = []

    def read(self, begin: int, end: int) -> list[Any]:
        """Return the items from `begin` up to `end`; fewer at the end of the pass.

        Raises:
            ConfigurationError: the pass has another number of items than was said.
        """
        if begin < self._first:
            self._first, self._kept, self._states, self.ended = 0, [], None, False
        if self._first + len(self._kept) < end and not self.ended:
            with self._going_on(), self._outside():
                if self._states is None:
                    self._items = self._start()
                self._take(begin, end)
        return self._kept[begin - self._first : end - self._first]

    def _take(self, begin: int, end: int) -> None:
        """Take items up to `end`, and as many more as are taken at a time."""
        count = self._first + len(self._kept)
        until = -(-end // self._ahead) * self._ahead
        if self._size is not None:
            until = min(until, self._size)
        while count < until and not self.ended:
            wanted = min(until - count, max(self._ahead, _AT_ONCE))
            items = list(islice(self._items, wanted))
            self._kept += items
            count += len(items)
            self.ended = len(items) < wanted
            unused = min(len(self._kept) - self.keeps, begin - self._first)
            if unused > self._ahead:
                del self._kept[:unused]
                self._first += unused
        if count == self._size:
            self.ended = True
            if next(self._items, _NOTHING) is not _NOTHING:
                raise ConfigurationError(self._wrong("more"))
        if self.ended and self._size not in (None, count):
            raise ConfigurationError(self._wrong(f"only {count}"))

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Use generators as the pass left them, in this context."""
        before = states()
        try:
            if self._states is None:
                seed_everything(self._seed)
            else:
                restore(self._states)
            yield
            self._states = states()
        finally:
            restore(before)


def runs(share: Indices, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield what follows each other in the numbers of a share, as (pass, begin, end); passes have `size` items.

    Example:
        >>> list(runs(np.array([2, 3, 8, 9, 10]), 10))
        [(0, 2, 4), (0, 8, 10), (1, 0, 1)]
    """
    breaks = np.flatnonzero((np.diff(share) != 1) | (share[1:] % size == 0)) + 1
    for run in np.split(share, breaks):
        number, begin = divmod(int(run[0]), size)
        yield number, begin, begin + len(run)
