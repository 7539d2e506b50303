"""TorchModel for modules that may have embedding tables, whose rows lie on servers; imports no kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from steepest.core.data.protocol import Source
from steepest.core.models import torch as dense
from steepest.core.models.step_size import step_size
from steepest.core.models.torch import LossFunction, Metric
from steepest.core.optim.rules import Ruled
from steepest.core.optim.spec import OptimizerSpec
from steepest.data.sources import as_source
from steepest.tables.modules.followed_rates import require_followed
from steepest.validation import require_count

if TYPE_CHECKING:
    from steepest.tables.modules.embedding import RowSource
    from steepest.tables.rows.hashing import Distinct
    from steepest.tables.rows.kernels import Floats, Int32s, Int64s
    from steepest.tables.rows.table import Table


class TorchModel(dense.TorchModel):
    """One replica: a torch module with its loss, data, batch size and optimizer.

    Either give `loss`, called as ``loss(module(*inputs), target)`` on batches ``(*inputs, target)``; or a module whose
    output has an attribute `loss`, as those of Hugging Face's transformers do; or subclass and write ``loss(batch)``
    and, if wanted, ``metrics(batch)`` for batches of any form. The module may have `steepest.Embedding`,
    `EmbeddingBag` and `EmbeddingCollection` in it.

    The base class, for dense modules alone, has the other arguments, attributes and errors.

    Args:
        module: the network. One with embedding tables and no parameter to train gets a parameter
            "anchor", which stays 0.
        table_shards: parts into which the rows of the module's embedding tables are dealt, of which
            servers hold equally many; at least the number of servers that the job may ever have. Fewer where
            all tables are small: one of less than 32,768 rows at most is one part.
        table_ids: returns the ids that the module will look up for a batch, as tensors in any structure, for rows that
            are asked for before the batch is computed. By default they are found where the batch itself has
            them. Ids that it does not return are right, too: their rows are asked for in the forward pass.

    Attributes:
        tables: of the module's embedding modules, each once, see `steepest.tables.modules.embedding`, but for
            those that are replicated, whose rows are parameters "rows_of_NAME".
        held: the tables that are replicated.

    Raises:
        ConfigurationError: `table_shards` is no positive integer, two tables of one name differ, or a table's
            `memory_bytes` are too few for so many parts.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
        >>> sgd = lambda module: torch.optim.SGD(module.parameters(), lr=0.1)
        >>> model = TorchModel(torch.nn.Linear(3, 2), loss=F.cross_entropy, data=(x, y),
        ...                    batch_size=4, optimizer=sgd)
        >>> [entry.name for entry in model.layout.entries]
        ['bias', 'weight']
    """

    def __init__(  # noqa: PLR0913 - keywords of a user, most of them optional
        self,
        module: torch.nn.Module,
        *,
        data: Any,
        optimizer: Callable[
            [torch.nn.Module], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
        ],
        loss: LossFunction | None = None,
        batch_size: int | None = None,
        metrics: Mapping[str, Metric] | None = None,
        lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        learning_rate: Callable[[int], float] | None = None,
        autocast: torch.dtype | None = None,
        loss_scale: float = 1.0,
        table_shards: int = 8,
        table_ids: Callable[[Any], Any] | None = None,
        reduction: str = "mean",
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        self._table_ids = table_ids
        self.tables: tuple[Table, ...] = ()
        self.held: tuple[Table, ...] = ()
        if isinstance(module, torch.nn.Module) and (tables := _tables_in(module)):
            _anchor(module, tables)
            embedding = sys.modules["steepest.tables.modules.embedding"]
            self.held = embedding.hold_replicated(module, self._seed())
            self.tables = tuple(table for table in tables if table not in self.held)
        self.opaque_chunks = _count_shards(self.tables, table_shards)
        super().__init__(
            module, data=data, optimizer=optimizer, loss=loss, batch_size=batch_size, metrics=metrics,
            lr_scheduler=lr_scheduler, learning_rate=learning_rate, autocast=autocast,
            loss_scale=loss_scale, reduction=reduction, buffers=buffers,
        )  # fmt: skip

    def held_rows(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are the rows of replicated tables."""
        if not self.held:
            return []
        from steepest.tables.modules.embedding import held_rows

        return list(held_rows(self.module).values())

    def _seed(self) -> int:
        """Return the seed of the job for which the model is made."""
        return step_size().seed

    def _read_optimizer(self) -> tuple[torch.optim.Optimizer, OptimizerSpec]:
        """Return the user's optimizer, and its recipe with the rules of replicated tables."""
        if not self.held:
            return super()._read_optimizer()
        from steepest.tables.modules.embedding import held_rows, without_held_rows
        from steepest.tables.modules.row_rule import RowRule

        rows = held_rows(self.module)
        with without_held_rows(self.module):  # the optimizer does not see them, as rows on servers
            chosen, spec = super()._read_optimizer()
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for table in self.held:
            require_followed(table, spec)
        ruled = [Ruled(names[id(rows[table.name])], RowRule(table)) for table in self.held]
        return chosen, replace(spec, ruled=tuple(ruled))

    @staticmethod
    def _as_source(data: Any, batch_size: int | None) -> tuple[Source, int]:
        """Return data, which may be a Ray Dataset, as a source, and the batch size."""
        return as_source(data, batch_size)

    def use_rows(self, source: RowSource) -> None:
        """Make the module's embeddings use the rows of a source."""
        from steepest.tables.modules.embedding import connect

        connect(self.module, _ScaledRows(source, self._loss_scale, self._device.type))

    def table_ids(self, batch: Any) -> Any:
        """Return the object that is searched for the ids of a batch: the batch, or the result of the user's function.

        See `steepest.tables.modules.id_places.IdPlaces`.
        """
        return batch if self._table_ids is None else self._table_ids(batch)


def _tables_in(module: torch.nn.Module) -> tuple[Table, ...]:
    """Return the tables of a module's submodules, each once, or none.

    Raises:
        ConfigurationError: two of one name differ.
    """
    embedding = sys.modules.get("steepest.tables.modules.embedding")
    return () if embedding is None else embedding.tables_of(module)


def _anchor(module: torch.nn.Module, tables: tuple[Table, ...]) -> None:
    """Give a module that has tables, and nothing else to train, a parameter that stays 0."""
    # Versions of weights are counted as parameters travel, so a job needs one that is trained.
    if tables and not any(parameter.requires_grad for parameter in module.parameters()):
        module.register_parameter("anchor", torch.nn.Parameter(torch.zeros(())))


def _count_shards(tables: tuple[Table, ...], each: Any) -> int:
    """Return the shards of all groups of a model's tables.

    Args:
        each: the shards of each group.

    Raises:
        ConfigurationError: it is no positive integer, or a group's memory is too small for so many, or the capacity of
            a part for its pinned ids.
    """
    require_count("table_shards", each)
    if not tables:
        return 0
    from steepest.tables.rows.capacity import Capacities
    from steepest.tables.rows.table import disk_of, groups, shards_for, spread_of

    of_tables, count = groups(tables), shards_for(tables, int(each))
    for group in of_tables:
        spread = spread_of(group, count)
        disk_of(group, spread, 0)
        for shard in range(count if any(table.pinned for table in group) else 0):
            Capacities(group, spread, shard)
    return count * len(of_tables)


class _ScaledRows:
    """Rows whose gradients are those of a loss times `scale`; under autocast of `device` none are pulled."""

    # See `RowSource`.

    def __init__(self, source: RowSource, scale: float, device: str) -> None:
        self._source = source
        self._scale = scale
        self._device = device

    def place(self, table: Table) -> tuple[int, int]:
        """Return the number of a table's group, and the table's number in it."""
        return self._source.place(table)

    def distinct(self, group: int, tables: Int32s, ids: Int64s) -> Distinct:
        """Return the distinct ones of the (table, id) of a batch."""
        return self._source.distinct(group, tables, ids)

    def pull(self, group: int, tables: Int32s, ids: Int64s, training: bool) -> Floats:
        """Return the values of rows; a server of this process may update weights meanwhile."""
        if not torch.is_autocast_enabled(self._device):
            return self._source.pull(group, tables, ids, training)
        with torch.autocast(self._device, enabled=False):
            return self._source.pull(group, tables, ids, training)

    def push(
        self,
        group: int,
        tables: Int32s,
        ids: Int64s,
        gradients: Floats,
        sightings: Int32s,
        lives: Int32s | None = None,
    ) -> None:
        """Pass on gradients, divided by the scale."""
        if self._scale != 1.0:
            gradients = gradients / gradients.dtype.type(self._scale)
        self._source.push(group, tables, ids, gradients, sightings, lives)
