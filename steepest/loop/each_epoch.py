"""Training data that a loop may change between two epochs: each is read once the loop has entered it, as with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from steepest.core.data.protocol import Indices, Source
from steepest.core.engine.generators import restore, states
from steepest.data.drawn import Drawn


class Later:
    """The first batch of an epoch, which is loaded when the loop takes it.

    Args:
        begin: opens the source.

    Attributes:
        rest: the batches after it; None until it is loaded.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self.rest: Iterator[Any] | None = None
        self._batch: Any = None

    def load(self) -> Any:
        """Return the batch, loaded now unless it was before; what loading it raises is raised."""
        if self.rest is None:
            rest = self._begin()
            self._batch, self.rest = next(rest), rest
        return self._batch


class EachEpochSource:
    """A source that is opened anew for each epoch, and begins to read when its first batch is taken.

    `open` yields a `Later`, and then batches of the inner source.

    Args:
        inner: the source of the data.

    Attributes:
        inner: the same; replaced when the user's function begins anew and makes its data once more.
    """

    each_epoch = True
    model_seeds = True  # see `steepest.core.data.protocol.Source`

    def __init__(self, inner: Source) -> None:
        self.inner = inner

    @property
    def size(self) -> int | None:
        """The number of samples in an epoch."""
        return self.inner.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Any]:
        """Return what yields a batch for each share, the first one as `Later`."""
        first = Later(lambda: iter(self.inner.open(shares, prefetch)))

        def parts() -> Iterator[Iterable[Any]]:
            yield (first,)
            if first.rest is None:  # the loop has ended, or had its gradients already
                before = states()
                first.load()
                restore(before)
            assert first.rest is not None
            yield first.rest

        return chain.from_iterable(parts())


def loaded(batch: Any) -> tuple[Any, int | None]:
    """Return a batch that a source gave, and the number of its samples where the source knows it."""
    content = batch.load() if isinstance(batch, Later) else batch
    return (content.batch, content.samples) if isinstance(content, Drawn) else (content, None)
