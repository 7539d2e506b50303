"""The rows of a shard as they lie in a file, piece by piece: no two of them are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import overload

import numpy as np

from steepest.checkpoint.row_values import wide
from steepest.embedding.row_files import Records
from steepest.errors import ConfigurationError
from steepest.tables.hashing import Distinct
from steepest.tables.state import TableState
from steepest.tables.state_checks import require_number_in, require_sound
from steepest.tables.table import Table

#: What a state has beside `TableState`; the last begins anew.
NO_ARRAYS = ("updates", "seed", "clock", "life")


class RowPieces(Sequence[TableState]):
    """The pieces of a file, each made a state when it is asked for, and kept by nobody.

    Args:
        pieces: of a shard, mapped from a file; the first has all keys, the others arrays of rows.
        no_rows: a state of such tables without rows.

    Attributes:
        version, seed, clock: of the state, which the first piece has.

    Raises:
        ConfigurationError: version, seed or clock are missing; or, when it is asked for, a piece makes no sense.
    """

    def __init__(self, pieces: Iterable[Records], no_rows: TableState) -> None:
        self._pieces = list(pieces)
        self._nothing = replace(no_rows, counters={}).arrays()
        first = {about["key"]: value for about, value in (self._pieces or [[]])[0]}
        known = {name: wide(first[name]) for name in NO_ARRAYS if name in first}
        self.version, self.seed = (require_number_in(name, known) for name in ("updates", "seed"))
        self.clock = require_number_in("clock", known) if "clock" in known else 0

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._pieces)

    @overload
    def __getitem__(self, at: int) -> TableState: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[TableState]: ...

    def __getitem__(self, at: int | slice) -> TableState | Sequence[TableState]:
        """Return a piece."""
        if isinstance(at, slice):
            return [self[each] for each in range(len(self))[at]]
        piece = {about["key"]: value for about, value in self._pieces[at]}
        arrays = {key: wide(value) for key, value in piece.items() if key not in NO_ARRAYS}
        return TableState.of_arrays({**self._nothing, **arrays})

    def __iter__(self) -> Iterator[TableState]:
        """Yield the pieces in order."""
        for at in range(len(self)):
            yield self[at]

    def require_sound(self, tables: Sequence[Table]) -> None:
        """Check all pieces, see `steepest.tables.state_checks.require_sound`, and that no id is in two of them."""
        keys = []
        for piece in self:
            require_sound(piece, tables, self.version)
            keys.append((piece.tables.copy(), piece.ids.copy()))
        of, ids = (np.concatenate(each) for each in zip(*keys, strict=True))
        counts = Distinct(of, ids).counts
        if len(counts) < len(ids):
            raise ConfigurationError(
                f"of {len(ids)} ids of a state only {len(counts)} are distinct"
            )
