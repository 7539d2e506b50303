"""What a model with embedding tables can do besides."""

from __future__ import annotations

from typing import Any, Protocol

from steepest.embedding.modules import RowSource
from steepest.tables.table import Table


class TableModel(Protocol):
    """A `steepest.core.models.protocol.Model` with tables, for which its layout has opaque chunks."""

    #: of its modules, each once
    tables: tuple[Table, ...]

    def use_rows(self, source: RowSource) -> None:
        """Have the modules pull rows from a source from now on, and push gradients to it."""

    def look_ahead(self, batch: Any) -> None:
        """Run the forward pass over a batch for its look-ups of rows alone."""
