"""An exported table as a torch module for inference, which takes what has changed in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steepest.errors import ConfigurationError
from steepest.tables.files.exported_table import ExportedTable
from steepest.validation import require_count

_NO_ID = 2**63 - 1  # in places without an id; if it is one, it is the last of them


class ServedTable(nn.Module):
    """The rows of an exported table by id: ids (...) int64 to embeddings (..., dim).

    Ids without rows have `ExportedTable.unknown`. It is a plain module of buffers, without
    gradients: `torch.export.export` takes it, `state_dict` has its rows.

    Args:
        table: all rows of a table.
        room: rows for which there is memory; by default a quarter more than there are.

    Attributes:
        name: of the table.
        version: the number of updates until the instant of which the rows are.
        cursor: that instant, for ``export_table(name, since=cursor)``.

    Raises:
        ConfigurationError: the table is of changes only, or has more rows than `room`.

    Example:
        >>> import torch
        >>> from steepest import ExportedTable, ServedTable
        >>> table = ExportedTable("words", torch.tensor([3, 8]), torch.tensor([[1.0], [2.0]]))
        >>> served = ServedTable(table)
        >>> served(torch.tensor([8, 3, 5])).flatten()
        tensor([2., 1., 0.])
    """

    ids: Tensor  # (room,) int64, ascending
    values: Tensor  # (room, dim)
    count: Tensor  # int64: how many of these there are

    def __init__(self, table: ExportedTable, room: int | None = None) -> None:
        super().__init__()
        if table.base is not None:
            raise ConfigurationError(
                f"changes of table {table.name!r} alone: give an export without since=, and these to update()"
            )
        if room is not None and require_count("room", room) < len(table):
            raise ConfigurationError(f"room={room} for {len(table)} rows: give at least as many")
        self.name, self.unknown, self.version = table.name, table.unknown, table.version
        self._place: list[list[int]] = []
        self._allocate(len(table) + len(table) // 4 + 64 if room is None else room, table.values)
        self._take(table)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.count)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids of any shape."""
        flat = ids.reshape(-1).to(torch.int64)
        at = torch.searchsorted(self.ids, flat).clamp(max=self.ids.shape[0] - 1)
        known = (self.ids[at] == flat) & (at < self.count)
        dim = self.values.shape[1]
        others = self.values.new_full((1, dim), self.unknown)
        return torch.where(known[:, None], self.values[at], others).reshape(*ids.shape, dim)

    @torch.no_grad()
    def update(self, changes: ExportedTable) -> bool:
        """Take what has changed, in place; nothing may call the module meanwhile.

        Args:
            changes: what ``export_table(name, since=cursor)`` returned: changes, or all rows.

        Returns:
            Whether the rows lie where they did. If not, they needed more than the module had room
            for: programs that were exported of it before do not have them.

        Raises:
            ConfigurationError: they are of another table, or changes since another instant.
        """
        count = len(self)
        now = ExportedTable(
            self.name,
            self.ids[:count],
            self.values[:count],
            version=self.version,
            place=self._place,
        )
        if changes.base is not None and len(changes) and not len(changes.removed):
            at = now.index(changes.ids) - 1
            if changes.base == self._place and bool((at >= 0).all()):  # no row comes or goes
                self.values[at] = changes.values
                self.version, self._place = changes.version, [list(each) for each in changes.place]
                return True
        whole = now.updated(changes)
        stays = len(whole) <= self.ids.shape[0] and whole.values.shape[1] == self.values.shape[1]
        if not stays:
            self._allocate(len(whole) + len(whole) // 4, whole.values)
        self._take(whole)
        return stays

    @property
    def cursor(self) -> str:
        """The instant of which the rows are, see `ExportedTable.cursor`."""
        return ExportedTable(self.name, self.ids[:0], self.values[:0], place=self._place).cursor

    def _allocate(self, room: int, like: Tensor) -> None:
        self.register_buffer("ids", torch.full((room,), _NO_ID))
        self.register_buffer("values", like.new_zeros(room, like.shape[1]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def _take(self, whole: ExportedTable) -> None:
        count = len(whole)
        self.ids[:count], self.values[:count] = whole.ids, whole.values
        self.ids[count:] = _NO_ID
        self.count.fill_(count)
        self.version, self._place = whole.version, [list(each) for each in whole.place]
        self.unknown = whole.unknown
