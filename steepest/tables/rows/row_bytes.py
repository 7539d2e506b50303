"""The memory and disk that rows take."""

from __future__ import annotations

from typing import NamedTuple

from steepest.tables.rows.eviction import LFU
from steepest.tables.rows.push_form import GroupForm
from steepest.tables.rows.table import Table

# Of a row, in memory and on disk, for id, version, count, index and the pages that are not full yet: as measured with
# millions of rows, see `docs/howto/embedding.md`.
_KNOWN, _KNOWN_ON_DISK = 47, 58
_USE, _TTL, _SCORE = 12, 4, 8
_PLACE = 5  # of a row of a table with a directory that is in memory, see `steepest.tables.rows.tiered_rows`
_RECORD, _GAPS = 4, 1.5  # the number of a row in a file; what gaps take
_SNAPSHOT = 28  # of a row in a snapshot, beside values and slots


class RowBytes(NamedTuple):
    """The bytes of a row of a table.

    Attributes:
        values: as they lie.
        slots: of the optimizer.
        known: in memory, beside them, of a table all of whose rows are in memory.
        known_on_disk: in memory, of a row of a table with a directory, wherever its values and slots are.
        place: in memory, of values and slots there, of a table with a directory.
        disk: of a row of such a table in its server's file, at most.
        snapshot: of a row in one copy of a snapshot.
        pushed: of its gradient and its id, on the way from a worker to a server; `values` are on the way back.
    """

    values: int
    slots: int
    known: int
    known_on_disk: int
    place: int
    disk: int
    snapshot: int
    pushed: int

    @classmethod
    def of(cls, table: Table) -> RowBytes:
        """Return the bytes of a table's rows."""
        form, policy = table.form, table.eviction
        slots = form.row_bytes - form.sent_bytes
        more = _USE * (policy is not None) + _TTL * bool(table.life)
        more += _SCORE * (isinstance(policy, LFU) and bool(policy.half_life))
        disk = int(_GAPS * (form.row_bytes + _RECORD))
        snapshot = form.row_bytes + _SNAPSHOT
        place = form.row_bytes + _PLACE
        pushed = GroupForm([table], 0).row_bytes
        known, on_disk = _KNOWN + more, _KNOWN_ON_DISK + more
        return cls(form.sent_bytes, slots, known, on_disk, place, disk, snapshot, pushed)

    @property
    def memory(self) -> int:
        """In memory, all of it, of a table all of whose rows are in memory."""
        return self.values + self.slots + self.known
