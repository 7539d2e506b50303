"""`enumerate` and `zip` that count the batches before the one with which a worker enters a pass.

Python's own would begin at 0 there, while the others are at a later batch. For the function's thread they are
replaced while it enters, and no longer. They look at the loop, so that tqdm and the like may be around the loader,
or around them.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop


_enumerate, _zip = enumerate, zip  # Python's own
_END = object()


_entering: dict[int, UserLoop] = {}  # by thread


class _Enumerate(enumerate[Any]):
    """As `enumerate`, counting the batches that were passed by."""

    _loop: UserLoop
    _before = 0

    def __new__(cls, iterable: Iterable[Any], start: int = 0) -> Any:
        loop = _entering.get(get_ident())
        if loop is None:
            return _enumerate(iterable, start)
        made = super().__new__(cls, iterable, start)
        made._loop = loop
        return made

    def __next__(self) -> tuple[int, Any]:
        passed_by = self._loop.entry.passed_by
        number, value = super().__next__()
        self._before += self._loop.entry.passed_by - passed_by
        return number + self._before, value


class _Zip(zip):  # type: ignore[type-arg]  # it cannot be subscripted
    """As `zip`: what is beside the loader goes on by as many as the batches that were passed by."""

    _loop: UserLoop
    _iterators: list[Iterator[Any]]
    _strict: bool

    def __new__(cls, *iterables: Iterable[Any], strict: bool = False) -> Any:
        loop = _entering.get(get_ident())
        if loop is None:
            return _zip(*iterables, strict=strict)
        made: Any = super().__new__(cls)
        made._loop, made._strict = loop, strict
        made._iterators = [iter(each) for each in iterables]
        return made

    def __next__(self) -> tuple[Any, ...]:
        values: list[Any] = []
        moved: list[int] = []  # by each, the loop: the batches that were passed by
        for each in self._iterators:
            before = self._loop.entry.passed_by
            values.append(next(each, _END))
            moved.append(self._loop.entry.passed_by - before)
            if values[-1] is _END and not self._strict:
                break
        for at in range(len(values)):
            for _ in range(sum(moved) - moved[at]):
                values[at] = next(self._iterators[at], _END)
        ends = [each is _END for each in values]
        if self._strict and any(ends) and not all(ends):
            raise ValueError("zip(..., strict=True) of iterables of different lengths")
        if not values or any(ends):
            raise StopIteration
        return tuple(values)


def begin(loop: UserLoop) -> None:
    """Have `enumerate` and `zip` count for a loop that enters, on the thread of its function, which this is."""
    _entering[get_ident()] = loop
    vars(builtins).update(enumerate=_Enumerate, zip=_Zip)


def end(loop: UserLoop) -> None:
    """Note that a loop has entered, or has ended."""
    if _entering.get(get_ident()) is loop:
        del _entering[get_ident()]
    if not _entering:
        vars(builtins).update(enumerate=_enumerate, zip=_zip)
