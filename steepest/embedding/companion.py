"""What replicas of models with embedding tables tell the exchange of their rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from steepest.core.engine.companion import Companion
from steepest.core.engine.gradient_sum import ChunkReady
from steepest.core.engine.sample_places import Place
from steepest.core.models.protocol import Model
from steepest.embedding.look_ahead import LookAhead, TableModel
from steepest.embedding.row_exchange import RowExchange
from steepest.tables.local import LocalRows


class RowCompanion(Companion):
    """Gives models their rows, and has the rows of batches on their way before these are computed."""

    # shares: see `LookAhead`; None to ask for rows in the step alone; step: from one share to its next.

    def __init__(self, rows: RowExchange, shares: int | None, step: int) -> None:
        self.takes_ahead = shares is not None
        self._rows = rows
        self._shares = shares
        self._step = step
        self._models: tuple[TableModel, ...] = ()
        self._ahead: LookAhead | None = None

    def attach(
        self,
        models: Sequence[Model],
        load: Callable[[Place], Any],
        places: Callable[[int], list[Place]],
    ) -> None:
        """Have models use the rows of this worker."""
        self._models = tuple(cast(TableModel, model) for model in models)
        if self._shares is not None:
            self._ahead = LookAhead(self._rows, self._shares, load, places, self._step)
        for model in self._models:
            model.use_rows(self._rows)

    def forget(self) -> None:
        """Forget batches that were looked at."""
        if self._ahead is not None:
            self._ahead.forget()

    def begin_share(self, places: Sequence[Place], ready: ChunkReady) -> None:
        """Ask for rows of shares to come, then push gradients of the step before."""
        # In this order: the small requests would wait behind the gradients.
        if self._ahead is not None and places:
            self._ahead.before(places[0][0], self._models)
        self._rows.begin_share(ready)

    def take(self, place: Place, load: Callable[[Place], Any]) -> Any:
        """Return the batch of a place, perhaps one that was looked at."""
        return load(place) if self._ahead is None else self._ahead.take(place)

    def begin_batch(self, place: Place) -> None:
        """Begin the forward pass over a batch, whose rows may have been asked for already."""
        self._rows.begin_batch(place)

    def end_batch(self, weight: float) -> None:
        """Note that a batch is computed, and what it weighs."""
        self._rows.end_batch(weight)

    def end_share(self, ready: ChunkReady, updates: int = 1) -> None:
        """Push the gradients of rows, or keep them for the next step."""
        self._rows.end_share(ready, updates)

    def look_ahead(self, number: int) -> None:
        """Look at the share after one whose gradient is pushed."""
        if self._ahead is not None:
            self._ahead.after(number, self._models)

    def squares(self) -> float:
        """Return the sum of the squares of the rows' mean gradient over the batches since `scale`."""
        return self._rows.squares()

    def scale(self, factor: float) -> None:
        """Multiply the gradients of rows of the batches since the last call by a factor."""
        self._rows.scale(factor)

    @contextlib.contextmanager
    def rehearsal(self, model: Model) -> Iterator[None]:
        """Have a model use rows of its own meanwhile, as its tables begin."""
        with_rows = cast(TableModel, model)
        with_rows.use_rows(LocalRows(with_rows.tables))
        try:
            yield
        finally:
            with_rows.use_rows(self._rows)
