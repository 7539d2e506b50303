"""Batches that are looked at before they are computed, so that their rows are on their way by then.

A model's forward pass over the next batch is run up to its last look-up of rows, which are asked
for and not awaited. Where the pass itself then asks for the same rows, in the same order, they are
those that have come meanwhile; otherwise they are pulled then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from steepest.core.engine.generators import States, restore, states
from steepest.core.engine.sample_places import Place
from steepest.embedding.modules import RowSource
from steepest.embedding.row_exchange import RowExchange
from steepest.tables.table import Table

log = logging.getLogger(__name__)


class TableModel(Protocol):
    """A `steepest.core.models.protocol.Model` with tables, for which its layout has opaque chunks."""

    #: of its modules, each once
    tables: tuple[Table, ...]

    def use_rows(self, source: RowSource) -> None:
        """Have the modules pull rows from a source from now on, and push gradients to it."""

    def look_ahead(self, batch: Any) -> None:
        """Run the forward pass over a batch for its look-ups of rows alone."""


class _LoadedBatch(NamedTuple):
    """A batch, and the generators after it was loaded."""

    batch: Any
    generators: States


class LookAhead:
    """The batches of the next shares of one worker."""

    # shares: that are looked at before the present one is computed; 0: the next one, once that is pushed; step: from
    # one share to its next; load: seeds the generators as for a place's batch, and returns it; called in the order of
    # places.

    def __init__(
        self,
        rows: RowExchange,
        shares: int,
        load: Callable[[Place], Any],
        places: Callable[[int], list[Place]],
        step: int,
    ) -> None:
        self._rows = rows
        self._shares = shares
        self._load = load
        self._places = places
        self._step = step
        self._loaded: dict[Place, _LoadedBatch | BaseException] = {}
        self._is_told = False

    def forget(self) -> None:
        """Forget all batches: the plan of the samples is another one."""
        self._loaded.clear()
        self._rows.forget_looked_at()

    def take(self, place: Place) -> Any:
        """Return the batch of a place, with the generators as they are after loading it."""
        # Raise what loading it ahead raised.
        kept = self._loaded.pop(place, None)
        if kept is None:
            return self._load(place)
        if isinstance(kept, BaseException):
            raise kept
        restore(kept.generators)
        return kept.batch

    def before(self, number: int, models: tuple[TableModel, ...]) -> None:
        """Look at the shares after one that is about to be computed."""
        if self._shares and self._rows.lookups:
            numbers = [number + ahead * self._step for ahead in range(self._shares + 1)]
            self._look(numbers, models, skip=number)

    def after(self, number: int, models: tuple[TableModel, ...]) -> None:
        """Look at the share after one that has been computed; its rows are of the next version."""
        if not self._shares and self._rows.lookups:
            self._look([number + self._step], models, skip=number)

    def _look(self, numbers: list[int], models: tuple[TableModel, ...], skip: int) -> None:
        """Load the batches of some shares, and ask for the rows of all but one share."""
        # Errors are raised later: the data's by `take`, the forward pass' by the pass itself.
        for place in (place for number in numbers for place in self._places(number)):
            if place in self._loaded:
                continue
            try:
                batch = self._load(place)
            except BaseException as error:  # noqa: BLE001 - the user's code may call sys.exit()
                self._loaded[place] = error
                return
            self._loaded[place] = _LoadedBatch(batch, states())
            if place[0] != skip:
                self._look_at(place, batch, models[place[1]])

    def _look_at(self, place: Place, batch: Any, model: TableModel) -> None:
        """Ask for the rows of a batch."""
        try:
            look = partial(model.look_ahead, batch)
            self._rows.look(place, look, later=not self._shares)
        except BaseException as error:  # noqa: BLE001 - the user's code may call sys.exit()
            log.log(
                logging.DEBUG if self._is_told else logging.WARNING,
                "the rows of a batch were not asked for beforehand: %s: %s",
                type(error).__name__, error,
            )  # fmt: skip
            self._is_told = True
