"""What replicas of models with embedding tables tell the exchange of their rows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from steepest.core.engine.exchange import Companion
from steepest.core.engine.generators import States, restore, states
from steepest.core.engine.gradient_sum import ChunkReady
from steepest.core.engine.sample_places import Place
from steepest.core.models.protocol import Model
from steepest.embedding.modules import RowSource
from steepest.embedding.row_exchange import RowExchange
from steepest.tables.local import LocalRows
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
