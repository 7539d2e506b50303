"""One shard of embedding tables on its server: its rows."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from steepest.core.engine.chunk_store import HeldChunk
from steepest.core.tensors.layout import Chunk
from steepest.errors import CheckpointError, ConfigurationError, ProtocolError
from steepest.tables.files.row_pieces import state_of
from steepest.tables.files.row_values import narrow
from steepest.tables.files.saved_rows import ShardMark
from steepest.tables.job.restored_shards import MADE, RestoredShards
from steepest.tables.rows.cut import RowCut
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.state import TableState
from steepest.validation import require_count

log = logging.getLogger(__name__)

#: Commits from one search for rows that tables' `evict` names to the next: it looks at every row.
_PIECE_BYTES = 4 << 20
_KNOWN_BYTES = 28  # of a row, beside values and slots
#: The records of an export of one table.
_Pieces = dict[int, dict[str, torch.Tensor]]  # arrays by key, by where the piece begins
_EXPORTED = ("ids", "values", "removed_ids", "updates", "seed", "life", "since")


class TableChunk(HeldChunk):
    """One shard of a group of tables on its server; `RowGradientStore` takes its gradients.

    Its rows count updates by themselves: one for each commit, whether that changes rows or not.

    Args:
        chunk: of the layout.
        dealing: of tables into chunks.
    """

    def __init__(self, chunk: Chunk, dealing: Dealing) -> None:
        super().__init__(chunk, torch.empty(0, dtype=torch.uint8))
        self._dealing = dealing
        self._name = dealing.name(chunk.index)
        self._tables = dealing.groups[dealing.group_of(chunk.index)]
        self._table_names = [table.name for table in self._tables]
        self.rows = dealing.make(chunk.index)  # of the shard
        self._loaded: _Pieces = {}  # of a state that has come in part
        self.made: RestoredShards | None = None  # of this process

    def move(self, buffer: torch.Tensor) -> None:
        """Do nothing: rows lie in memory of their own."""

    @property
    def directory(self) -> str | None:
        """The directory of rows that are not in memory; None if all are."""
        return self._tables[0].directory

    def counts(self) -> dict[str, dict[str, int]]:
        """Return by table the number of rows, as "rows", and what `TableShard.counts` has."""
        alive = self.rows.rows_of()
        return {
            name: {"rows": int(alive[number])}
            | {what: int(counts[number]) for what, counts in self.rows.counts.items()}
            | self.rows.disk_counts()
            for number, name in enumerate(self._table_names)
        }

    # -- state ---------------------------------------------------------------------------------

    def state(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Return copies of all that is known of the rows, as records, see `HeldChunk.state`."""
        return [record for piece in self.pieces() for record in piece]

    def pieces(
        self, table: int | None = None, base: tuple[int, int] | None = None
    ) -> Iterator[list[tuple[dict[str, Any], torch.Tensor]]]:
        """Yield the rows of now piece by piece, while pushes go on.

        Args:
            table: a number, for the values of this table's rows and the removed ids alone.
            base: life and version: only what has changed since, if that is known. Then there is a
                record "since" with that version.

        Returns:
            An iterator over pieces of some MB: records, as `HeldChunk.state` has them, with the
            places of their rows among all pieces as "start" and "stop". The first piece has all
            keys.
        """
        rows = self.rows
        since = base[1] if base is not None and rows.covers(*base) else None
        rest, cut = rows.cut(since, table)
        scalars = {
            "updates": np.array([rows.version]),
            "life": np.array([rows.life]),
            "seed": np.array([rows.seed]),
        }
        if rows.clock:
            scalars["clock"] = np.array([rows.clock])
        if since is not None:
            scalars["since"] = np.array([since])
        return self._pieces(rest, cut, scalars, _EXPORTED if table is not None else None)

    def _pieces(
        self,
        rest: TableState,
        cut: RowCut,
        scalars: dict[str, npt.NDArray[Any]],
        keys: Collection[str] | None,
    ) -> Iterator[list[tuple[dict[str, Any], torch.Tensor]]]:
        columns = rest.values.shape[1] + rest.slots.shape[1]
        most = max(_PIECE_BYTES // (columns * rest.values.itemsize + _KNOWN_BYTES), 1)
        begin, piece = 0, cut.take(most)
        arrays = {**rest.arrays(), **piece, **scalars}
        while True:
            yield [
                (self._about(key, begin, begin + len(array)), self._narrowed(key, array))
                for key, array in sorted(arrays.items())
                if keys is None or key in keys
            ]
            begin, piece = begin + len(piece["ids"]), cut.take(most)
            if not len(piece["ids"]):
                return
            arrays = piece

    def _narrowed(self, key: str, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return an array of a state in the dtype in which rows lie."""
        one = self._tables[0]
        if key in ("values", "slots"):
            return narrow(
                array, one.dtype if key == "values" else one.slots_dtype or array.dtype.name
            )
        return torch.from_numpy(array)

    def _about(self, key: str, start: int, stop: int) -> dict[str, Any]:
        return {"name": self._name, "key": key, "start": start, "stop": stop, "plain": False}

    def load_state(self, about: dict[str, Any], value: torch.Tensor) -> None:
        """Keep one record of the state, which takes effect with `end_state`.

        Raises:
            ProtocolError: it is none of this shard.
        """
        if about.get("name") != self._name or not isinstance(about.get("key"), str):
            raise ProtocolError(f"a state of {about.get('name')!r:.80} for {self._name}")
        self._loaded.setdefault(about["start"], {})[about["key"]] = value

    def end_state(self) -> None:
        """Make rows of the records that were loaded; ProtocolError: they are not a state of this shard."""
        pieces, self._loaded = self._loaded, {}
        if (stands := pieces.get(0, {}).get(MADE)) is not None:
            assert self.made is not None
            made = self.made.take(self._number_of(stands), self.chunk.index)
            assert made is not None
            self.rows = made
        elif pieces:
            self.rows = self._made_of(pieces)

    def _number_of(self, stands: torch.Tensor) -> int:
        """Return the number of a restore for which this process has made the shard.

        Raises:
            ProtocolError: it has not.
        """
        number = int(stands[0])
        if self.made is None or not self.made.has(number, self.chunk.index):
            raise ProtocolError(f"{self._name} of restore {number} is not in this process")
        return number

    def _made_of(self, pieces: _Pieces) -> TableShard:
        """Return a shard with the rows of pieces, by where these begin; ProtocolError: they make no sense."""
        try:
            mark = ShardMark.of(pieces.get(0, {}))
            shard = self._dealing.make(self.chunk.index, require_count("seed", mark.seed, 0))
            states = (state_of(pieces[begin]) for begin in sorted(pieces))
            shard.load(states, mark.updates, mark.clock)
        except (CheckpointError, ConfigurationError) as error:
            raise ProtocolError(f"{self._name} has a state that makes no sense: {error}") from error
        return shard

    def check_state(self, about: dict[str, Any], value: torch.Tensor) -> None:
        """Check that a record stands for this shard; ProtocolError otherwise: rows themselves come by no message."""
        is_one = value.dtype is torch.int64 and value.shape == (1,)
        if about.get("name") != self._name or about.get("key") != MADE or not is_one:
            raise ProtocolError(f"a state of {about.get('name')!r:.80} for {self._name}")

    def try_state(self, records: Sequence[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Check that this process has made the shard for which a record stands; ProtocolError otherwise."""
        for _, value in records:
            self._number_of(value)

    def take_from(self, other: HeldChunk) -> bool:
        """Take the rows of the same shard."""
        assert isinstance(other, TableChunk)
        self.rows = other.rows
        return True

    def clear_state(self) -> None:
        """Drop all rows."""
        self._loaded = {}
        self.rows = self._dealing.make(self.chunk.index)
