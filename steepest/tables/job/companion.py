"""The link between replicas of models with embedding tables and the exchange of their rows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from steepest.core.engine.exchange import Companion
from steepest.core.engine.generators import HeldGenerators
from steepest.core.engine.gradient_sum import ChunkReady
from steepest.core.engine.sample_places import Place
from steepest.core.models.protocol import Model
from steepest.tables.job.row_exchange import RowExchange
from steepest.tables.modules.embedding import RowSource
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.table import Table

log = logging.getLogger(__name__)


class TableModel(Protocol):
    """A `steepest.core.models.protocol.Model` with tables, for which its layout has opaque chunks."""

    #: of its modules, each once
    tables: tuple[Table, ...]

    def use_rows(self, source: RowSource) -> None:
        """Make the modules pull rows from a source and push gradients to it."""

    def table_ids(self, batch: Any) -> Any:
        """Return the object that is searched for the ids of a batch: the batch itself by default."""


class _LoadedBatch(NamedTuple):
    """A batch, and the generators after it was loaded."""

    batch: Any
    generators: HeldGenerators


class RowCompanion(Companion):
    """Gives models their rows, and asks for the rows of batches before these are computed.

    The ids of the batches before show where a batch that is computed later has its own, see `IdPlaces`. Its rows are
    asked for and not awaited. Where the forward pass then asks for the same rows, they are those that have come
    meanwhile; otherwise they are pulled then.

    Args:
        rows: that models use.
        shares: how many shares are looked at before the present one is computed; 0: the next one, once that is
            pushed; None: rows are asked for in the step alone.
        step: from one share of the worker to its next.
    """

    def __init__(self, rows: RowExchange, shares: int | None, step: int) -> None:
        self.takes_ahead = shares is not None
        self._rows, self._shares, self._step = rows, shares, step
        self._models: tuple[TableModel, ...] = ()
        self._loaded: dict[Place, _LoadedBatch | BaseException] = {}
        self._is_told = False
        self._batch: Any = None  # the present one

    def attach(
        self,
        models: Sequence[Model],
        load: Callable[[Place], Any],
        places: Callable[[int], list[Place]],
    ) -> None:
        """Make models use the rows of this worker."""
        self._models = tuple(cast(TableModel, model) for model in models)
        self._load, self._places = load, places
        for model in self._models:
            model.use_rows(self._rows)

    def forget(self) -> None:
        """Forget batches that were looked at: the plan of the samples has changed."""
        self._loaded.clear()
        self._rows.forget_looked_at()

    def begin_share(self, places: Sequence[Place], ready: ChunkReady) -> None:
        """Ask for rows of shares to come, then push gradients of the step before."""
        # In this order: the small requests would wait behind the gradients.
        if self._shares and places and self._rows.places.any():
            number = places[0][0]
            numbers = [number + ahead * self._step for ahead in range(self._shares + 1)]
            self._look([place for each in numbers for place in self._places(each)], skip=number)
        self._rows.begin_share(ready)

    def take(self, place: Place, load: Callable[[Place], Any]) -> Any:
        """Return the batch of a place, with the generators as they are after loading it.

        Raises:
            BaseException: what loading it ahead raised.
        """
        loaded = self._loaded.pop(place, None)
        if loaded is None:
            self._batch = load(place)
        elif isinstance(loaded, BaseException):
            raise loaded
        else:
            loaded.generators.go_on()
            self._batch = loaded.batch
        return self._batch

    def begin_batch(self, place: Place) -> None:
        """Begin the forward pass over a batch, whose rows may have been asked for already."""
        model, loaded = self._models[place[1]], self._batch
        searched = None if self._shares is None else partial(model.table_ids, loaded)
        self._rows.begin_batch(place, searched)

    def end_batch(self, weight: float) -> None:
        """Note that a batch is computed, and its weight."""
        self._batch = None
        self._rows.end_batch(weight)
        if self._shares and not self._is_told and self._rows.places.is_given_up():
            self._is_told = True
            log.warning(
                "table_staleness=%d: a batch does not have the ids that the model looks up, so that their rows are "
                "asked for when they are needed; have collate_fn put them into the batch, or give "
                "TorchModel(table_ids=), a function that returns them",
                self._shares,
            )

    def end_share(self, ready: ChunkReady, updates: int = 1) -> None:
        """Push the gradients of rows, or keep them for the next step."""
        self._rows.end_share(ready, updates)

    def look_ahead(self, number: int) -> None:
        """Look at the share after one whose gradient is pushed; its rows are of the next version."""
        if self._shares == 0:
            places = self._places(number + self._step)
            self._look(places if self._rows.places.any() else places[: len(self._models)])

    def squares(self) -> float:
        """Return the sum of the squares of the rows' mean gradient over the batches since `scale`."""
        return self._rows.squares()

    def scale(self, factor: float) -> None:
        """Multiply the gradients of rows of the batches since the last call by a factor."""
        self._rows.scale(factor)

    @contextlib.contextmanager
    def rehearsal(self, model: Model) -> Iterator[None]:
        """Make a model use rows of its own in a block, which begin as its tables do."""
        with_rows = cast(TableModel, model)
        with_rows.use_rows(LocalRows(with_rows.tables))
        try:
            yield
        finally:
            with_rows.use_rows(self._rows)

    def _look(self, places: Sequence[Place], skip: int = -1) -> None:
        """Load the batches of some places, and ask for the rows of those that are of another share than `skip`."""
        # Errors are raised later: the data's by `take`, those of ids by the forward pass itself.
        for place in places:
            if place in self._loaded:
                continue
            try:
                batch = self._load(place)
            except BaseException as error:  # noqa: BLE001 - the user's code may call sys.exit()
                self._loaded[place] = error
                return
            self._loaded[place] = _LoadedBatch(batch, HeldGenerators())
            if place[0] != skip:
                self._look_at(place, batch, self._models[place[1]])

    def _look_at(self, place: Place, batch: Any, model: TableModel) -> None:
        """Ask for the rows of a batch."""
        try:
            self._rows.look(place, model.table_ids(batch), later=not self._shares)
        except BaseException as error:  # noqa: BLE001 - the user's code may call sys.exit()
            log.log(
                logging.DEBUG if self._is_told else logging.WARNING,
                "the rows of a batch were not asked for beforehand: %s: %s",
                type(error).__name__, error,
            )  # fmt: skip
            self._is_told = True
