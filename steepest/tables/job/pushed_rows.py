"""The gradients of rows that workers push to one server: staged, and their weighted mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from steepest.core.engine.chunk_store import GradientStore
from steepest.core.messages.message import PushId
from steepest.core.optim.spec import Hyperparameters
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.memory import sum_of_squares
from steepest.errors import ConfigurationError, ProtocolError
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.gradients import RowGradients, weighted
from steepest.tables.rows.hashing import Bools
from steepest.tables.rows.row_optimizers import RowOptimizer
from steepest.tables.rows.shard import UPDATES_BETWEEN_EVICTIONS
from steepest.validation import require_number

log = logging.getLogger(__name__)


class _HeldGroup(NamedTuple):
    """The shards of one group of tables."""

    names: list[str]  # of its tables
    optimizer: RowOptimizer
    shards: dict[int, TableChunk]  # by number, ascending
    holds: Bools  # (shards,), which of all shards these are


class RowGradientStore(GradientStore):
    """Takes the gradients of all shards of tables that one server shares with the same others.

    A worker pushes them together, see `PushForm`. Each shard's rows count updates by themselves: one for each commit,
    whether that changes rows or not.

    Args:
        shards: in the order of their chunks.
        dealing: of tables into chunks.
        rates: learning rates of the parameter groups of the model's optimizer, as it was made; NaN for
            a group that has none.

    Attributes:
        means: by group, of staged pushes; None before `reduce`, and where no push has a row of the group.
    """

    def __init__(
        self, shards: Sequence[TableChunk], dealing: Dealing, rates: Sequence[float] = ()
    ) -> None:
        super().__init__(shards[0].chunk)
        self.means: list[RowGradients | None] = [None] * len(dealing.groups)
        self._shards = shards
        self._dealing, self._form, self._rates = dealing, dealing.push_form, rates
        self._groups = []
        for number, tables in enumerate(dealing.groups):
            held = {
                dealing.shard_of(shard.chunk.index): shard
                for shard in shards
                if dealing.group_of(shard.chunk.index) == number
            }
            holds = np.zeros(dealing.num_shards, np.bool_)
            holds[[*held]] = True
            names = [table.name for table in tables]
            self._groups.append(_HeldGroup(names, tables[0].optimizer, held, holds))
        self._looks: list[TableChunk] = []  # shards to look through for rows whose life has ended
        self._told: set[str] = set()  # the tables of which it is logged that they are full

    def fits(self, size: int, codec: Codec | None) -> bool:
        """Return whether a payload may have the size of gradients of some rows."""
        return self._form.fits(size)

    def codec_of(self, payload: torch.Tensor | None, codec: Codec | None) -> Codec | None:
        """Return None: rows travel as they are.

        Raises:
            ProtocolError: a row that these shards cannot have, or one named twice.
        """
        if payload is not None:
            try:
                for number, part in enumerate(self._unpacked(payload)):
                    of = self._groups[number]
                    part.require(of.names, of.holds, self._dealing.spreads[number])
            except ConfigurationError as error:
                names = ", ".join(self._dealing.name(shard.chunk.index) for shard in self._shards)
                raise ProtocolError(f"gradients of rows of {names:.200}: {error}") from error
        return None

    def _unpacked(self, payload: torch.Tensor) -> list[RowGradients]:
        return self._form.unpack(payload.numpy())

    def release(self, payload: torch.Tensor | None) -> None:
        """Keep no memory: pushes differ in size, so that one's memory rarely fits the next."""

    def drop_mean(self) -> None:
        """Forget the means that `reduce` formed."""
        self.means = [None] * len(self._groups)

    def check(self, push: PushId) -> float:
        """Return the sum of the squares of one staged gradient, see `GradientStore.check`."""
        staged = self.staged[push]
        if staged.payload is None:
            return 0.0
        factor = staged.unit / staged.total if staged.total else 1.0
        return self._squares_of(self._unpacked(staged.payload)) * (factor * factor)

    @staticmethod
    def _squares_of(gradients: Iterable[RowGradients | None]) -> float:
        return math.fsum(
            sum_of_squares(torch.from_numpy(part.gradients.reshape(-1)))
            for part in gradients
            if part is not None
        )

    def reduce(self, chosen: Iterable[PushId]) -> None:
        """Form the weighted means of staged pushes, added up in the given order."""
        pushes = [self.staged[push] for push in chosen]
        total = math.fsum(push.total for push in pushes)
        parts: list[tuple[list[RowGradients], float]] = []
        for push in pushes:
            if push.payload is not None and push.unit and total:
                parts.append((self._unpacked(push.payload), push.unit / total))
        for number in range(len(self._groups)):
            mine = [(of[number], factor) for of, factor in parts if len(of[number])]
            rows, factors = [part for part, _ in mine], [factor for _, factor in mine]
            self.means[number] = weighted(rows, factors) if rows else None

    def squares(self) -> float:
        """Return the sum of the squares of the means; not finite when an element is not."""
        return self._squares_of(self.means)

    def clip(self, factor: float) -> None:
        """Multiply the means by a factor, in memory of their own, because payloads must not change."""
        if factor != 1.0:
            self.means = [None if mean is None else mean.times(factor) for mean in self.means]

    def culprits(self, chosen: Iterable[PushId]) -> list[tuple[int, str]]:
        """Return (worker, table) of NaN and infinity, see `GradientStore.culprits`."""
        culprits = []
        for push in chosen:
            if (payload := self.staged[push].payload) is not None:
                culprits += [(push.worker, name) for name in self._not_finite(payload)]
        return culprits or [(-1, self._groups[self._not_finite_group()].names[0])]

    def _not_finite(self, payload: torch.Tensor) -> list[str]:
        """Return the names of tables that have NaN or infinity in a push."""
        names = []
        for number, rows in enumerate(self._unpacked(payload)):
            bad = ~np.isfinite(rows.gradients).all(axis=1)
            names += [self._groups[number].names[table] for table in np.unique(rows.tables[bad])]
        return names

    def _not_finite_group(self) -> int:
        """Return the first group whose mean is not finite, or 0."""
        bad = (
            at for at, mean in enumerate(self.means) if not math.isfinite(self._squares_of([mean]))
        )
        return next(bad, 0)

    def apply(
        self, hyper: Sequence[Hyperparameters], rate: float, buffer: torch.Tensor | None = None
    ) -> None:
        """Update the rows of the means by their tables' own optimizer, and drop the means.

        Rows for which a table has no room are left out, counted, and logged once.

        Args:
            hyper: of the model's optimizer, by parameter group; tables may follow a learning rate.
            rate: factor of the learning rate.
            buffer: None.

        Raises:
            ConfigurationError: a learning rate that a table follows is no finite number from 0, which
                is kept as `raised`; no row has changed.
        """
        means, self.means = self.means, [None] * len(self._groups)
        version = self._shards[0].rows.version + 1
        rates = [
            1.0 if mean is None else rate * self._followed(of.optimizer, hyper)
            for of, mean in zip(self._groups, means, strict=True)
        ]
        for number, mean in enumerate(means):
            if mean is not None:
                self._update(number, mean, version, rates[number])
        for shard in self._shards:
            shard.rows.version = version  # also of those without a row in this commit
            if version % UPDATES_BETWEEN_EVICTIONS == 0:
                shard.rows.evict(version)
        for shard in self._looks:
            shard.rows.end_lives(version)
        self._looks = []

    def _update(self, number: int, mean: RowGradients, version: int, rate: float) -> None:
        """Update the rows of one group."""
        of, lr = self._groups[number], None
        if not of.optimizer.takes_rate():
            mean = mean.times(rate)
        elif rate != 1.0:
            lr = of.optimizer.lr * rate
        order, begins = self._dealing.deal(number, mean.tables, mean.ids)
        mean = mean if order is None else mean.taken(order)
        bounds = begins.tolist()
        for shard, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                rows = of.shards[shard].rows
                rows.push_checked(mean.taken(slice(begin, end)), version, lr)
                self._tell_of_full_tables(of, shard)

    def note_time(self, seconds: int) -> None:
        """Note the time of the commit that is applied next."""
        self._looks = [shard for shard in self._shards if shard.rows.note_time(seconds)]

    def _followed(self, optimizer: RowOptimizer, hyper: Sequence[Hyperparameters]) -> float:
        """Return the present learning rate over the one of the beginning, of the group that tables follow."""
        if (group := optimizer.follows) is None:
            return 1.0
        try:
            own = self._rates[group]
            return (
                require_number(f"lr of parameter group {group}", hyper[group].get("lr", own)) / own
            )
        except ConfigurationError as error:  # of the user's schedule
            self.raised = error
            raise

    def _tell_of_full_tables(self, of: _HeldGroup, shard: int) -> None:
        """Log, once, that a table has no room for more rows."""
        held = of.shards[shard]
        full = held.rows.counts["refused_full"]
        if not full.any():
            return
        for number in np.flatnonzero(full):
            table = held.rows.tables[number]
            if table.name not in self._told:
                self._told.add(table.name)
                log.warning(
                    "table %r is full in %s: the gradients of ids without a row are dropped; raise "
                    "capacity=%s, or give eviction=LRU() or LFU()",
                    table.name, self._dealing.name(held.chunk.index), table.capacity,
                )  # fmt: skip
