"""The embedding tables of a module, as a model gives them to a job; imports no kernels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from steepest.validation import require_count

if TYPE_CHECKING:
    from steepest.models.embedding import RowSource
    from steepest.tables.hashing import Distinct
    from steepest.tables.kernels import Floats, Int32s, Int64s
    from steepest.tables.table import Table


def tables_in(module: torch.nn.Module) -> tuple[Table, ...]:
    """Return the tables of a module's submodules, each once, or none; ConfigurationError: two of one name differ."""
    embedding = sys.modules.get("steepest.models.embedding")
    return () if embedding is None else embedding.tables_of(module)


def anchor(module: torch.nn.Module, tables: tuple[Table, ...]) -> None:
    """Give a module that has tables, and nothing else to train, a parameter that stays 0."""
    # Versions of weights are counted as parameters travel, so a job needs one that is trained.
    if tables and not any(parameter.requires_grad for parameter in module.parameters()):
        module.register_parameter("anchor", torch.nn.Parameter(torch.zeros(())))


def count_shards(tables: tuple[Table, ...], each: Any) -> int:
    """Return the shards of all groups of a model's tables."""
    # ConfigurationError: `each` group's are no positive integer.
    require_count("table_shards", each)
    if not tables:
        return 0
    from steepest.tables.table import groups

    return int(each) * len(groups(tables))


class ScaledRows:
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
        with torch.autocast(self._device, enabled=False):
            return self._source.pull(group, tables, ids, training)

    def push(
        self, group: int, tables: Int32s, ids: Int64s, gradients: Floats, sightings: Int32s
    ) -> None:
        """Pass on gradients, divided by the scale."""
        if self._scale != 1.0:
            gradients = gradients / gradients.dtype.type(self._scale)
        self._source.push(group, tables, ids, gradients, sightings)
