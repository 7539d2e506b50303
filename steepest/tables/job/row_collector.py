"""The gradients of rows of one worker, collected batch by batch until they are pushed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from steepest.core.engine.gradient_sum import ChunkReady
from steepest.core.engine.sample_places import Place
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.memory import sum_of_squares
from steepest.tables.job.row_messages import ROW_MEMORY
from steepest.tables.modules.embedding import RowSource
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.gradients import RowGradients, added
from steepest.tables.rows.hashing import Distinct
from steepest.tables.rows.kernels import Floats, Int32s, Int64s
from steepest.tables.rows.push_form import Chance
from steepest.tables.rows.table import Table

#: By batch, its weight, and the gradients of each group of tables.
_Batches = list[tuple[float, list[list[RowGradients]]]]


class RowCollector(RowSource, ABC):
    """A source of rows, which keeps their gradients until a worker pushes them, shard by shard.

    Gradients of several batches are added up as those of parameters are, in units of the first batch with a
    weight.

    Args:
        dealing: of tables into chunks.
        pushed: the chunks whose gradients are pushed together, by the first of them.
    """

    def __init__(self, dealing: Dealing, pushed: Mapping[int, Sequence[int]]) -> None:
        self.dealing = dealing
        self.pushed = [chunk for chunk in pushed if chunk in dealing.chunks]
        first = {chunk: at for at in self.pushed for chunk in pushed[at]}
        shards = range(dealing.num_shards)
        self._firsts = np.array(  # by group and shard
            [
                [first[dealing.chunk(group, at)] for at in shards]
                for group in range(len(dealing.groups))
            ]
        )
        self._frozen = [
            [number for number, table in enumerate(group) if not table.trainable]
            for group in dealing.groups
        ]
        self._batch: list[list[RowGradients]] = [[] for _ in dealing.groups]
        self._batches: _Batches = []
        self._scaled = 0  # number of these batches that `scale` is done with

    def place(self, table: Table) -> tuple[int, int]:
        """Return the number of a table's group, and the table's number in it."""
        return self.dealing.place(table)

    def distinct(self, group: int, tables: Int32s, ids: Int64s) -> Distinct:
        """Return the distinct ones of the (table, id) of a batch, by ascending shard."""
        return Distinct(tables, ids, self.dealing.spreads[group])

    @abstractmethod
    def pull(self, group: int, tables: Int32s, ids: Int64s, training: bool = True) -> Floats:
        """Return the values of distinct rows of a group, (n, dim).

        Args:
            training: whether their gradients will be pushed.
        """

    def push(
        self,
        group: int,
        tables: Int32s,
        ids: Int64s,
        gradients: Floats,
        sightings: Int32s,
        lives: Int32s | None = None,
    ) -> None:
        """Keep the summed gradients of distinct ids, (n, dim), in the present batch, except those of frozen tables."""
        pushed = RowGradients(tables, ids, gradients, sightings, lives)
        if frozen := self._frozen[group]:
            pushed = pushed.taken(~np.isin(tables, frozen))
        self._batch[group].append(pushed)

    def begin_batch(self, place: Place) -> None:
        """Begin the forward pass over the batch of a place."""

    def clear(self) -> None:
        """Forget all gradients: another worker's gradient begins."""
        self._batch = [[] for _ in self.dealing.groups]
        self._batches = []
        self._scaled = 0

    def end_batch(self, weight: float) -> None:
        """Note that a batch is computed, and its weight."""
        if weight:  # a batch without weight may hold NaN: a mean over nothing
            self._batches.append((weight, self._batch))
        self._batch = [[] for _ in self.dealing.groups]

    @abstractmethod
    def begin_share(self, ready: ChunkReady) -> None:
        """Begin a worker's gradient; `ready` is called with that of each shard that can be pushed already."""

    @abstractmethod
    def end_share(self, ready: ChunkReady, updates: int = 1) -> None:
        """End a worker's gradient; `ready` is called with that of each shard that has not been pushed.

        Args:
            updates: that the worker has made of its own weights meanwhile, each a mean of some batches;
                rows get their sum.
        """

    @abstractmethod
    def unpushed(self, step: int) -> Tensors:
        """Return the gradient that no update contains once a number of steps are committed; see `DelayedRows.state`."""

    @abstractmethod
    def push_later(self, gradient: Mapping[str, torch.Tensor]) -> None:
        """Push what `unpushed` returned with the next step, and nothing kept before."""

    def weights(self, updates: int = 1) -> tuple[float, float]:
        """Return the weight of one unit of `gradients`, and of all samples, divided by `updates`."""
        weights = [weight for weight, _ in self._batches]
        return (weights[0] if weights else 0.0), sum(weights) / updates

    def gradients(self) -> list[RowGradients | None]:
        """Return the sum over batches, by group, in units of the first batch's weight."""
        return self._added_up(self._batches)

    def _added_up(self, batches: _Batches) -> list[RowGradients | None]:
        """Return the sum over some batches, by group, in units of the first one's weight."""
        unit = batches[0][0] if batches else 1.0
        sums = []
        for group in range(len(self.dealing.groups)):
            parts = [part.times(w / unit) for w, batch in batches for part in batch[group]]
            sums.append(added(parts) if parts else None)
        return sums

    def squares(self) -> float:
        """Return the sum of the squares of the mean gradient over the batches since `scale`."""
        batches = self._batches[self._scaled :]
        mean = batches[0][0] / math.fsum(w for w, _ in batches) if batches else 0.0
        sums = [part.gradients for part in self._added_up(batches) if part is not None]
        squares = [sum_of_squares(torch.from_numpy(rows.reshape(-1))) for rows in sums]
        return math.fsum(squares) * mean**2

    def scale(self, factor: float) -> None:
        """Multiply the gradients of the batches since the last call by a factor."""
        for weight, batch in self._batches[self._scaled :]:
            scaled = [[part.times(factor) for part in parts] for parts in batch]
            self._batches[self._scaled] = weight, scaled
            self._scaled += 1

    def packed(self, gradients: Sequence[RowGradients | None]) -> dict[int, torch.Tensor]:
        """Return gradients by group as flat bytes, by the first chunk of each push; those without any are left out."""
        parts: dict[int, list[RowGradients | None]] = {}
        for group, total in enumerate(gradients):
            if total is not None:
                owners = self._firsts[group]
                for first, where in self.dealing.parts(
                    group, total.tables, total.ids, owners
                ).items():
                    of = parts.setdefault(first, [None] * len(gradients))
                    of[group] = total.taken(where)
        form, chance = self.dealing.push_form, self.chance()
        return {
            first: torch.from_numpy(form.pack(of, ROW_MEMORY.empty, chance))
            for first, of in parts.items()
        }

    @abstractmethod
    def chance(self) -> Chance:
        """Return the chance by which the present gradients are rounded, if any are."""
