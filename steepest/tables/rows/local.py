"""All tables of one process, in shards of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from steepest.errors import ConfigurationError, NonFiniteError
from steepest.tables.rows.gradients import RowGradients, added
from steepest.tables.rows.hashing import Distinct, deal
from steepest.tables.rows.kernels import Floats, Int32s, Int64s
from steepest.tables.rows.push_form import Chance, GroupForm
from steepest.tables.rows.shard import UPDATES_BETWEEN_EVICTIONS, TableShard
from steepest.tables.rows.table import Table, groups, spread_of
from steepest.validation import require_choice, require_count


class LocalRows:
    """Tables of any shapes in one process: a `RowSource` whose pushes take effect at `step`."""

    def __init__(
        self,
        tables: Iterable[Table],
        *,
        num_shards: int = 1,
        seed: int = 0,
        nonfinite: str = "refuse",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin without rows.

        Args:
            tables: of any shapes; a name may be given twice, with the same description.
            num_shards: of each group of tables.
            seed: of first values and of admissions by chance.
            nonfinite: what `step` does with NaN or infinity in a gradient: "refuse" raises, "skip"
                makes an update that changes nothing, "pass" applies it.
            clock: returns the seconds since the epoch, for tables with a `ttl`.

        Raises:
            ConfigurationError: two tables of one name differ, or an argument is wrong.
        """
        require_choice("nonfinite", nonfinite, ("refuse", "skip", "pass"))
        self._nonfinite, self._clock = nonfinite, clock
        grouped = groups(tables)
        count = require_count("num_shards", num_shards)
        # by group of tables
        self.shards = [
            [TableShard(group, shard=at, num_shards=count, seed=seed) for at in range(count)]
            for group in grouped
        ]
        self._spreads = [spread_of(group, count) for group in grouped]
        self._forms = [GroupForm(group, seed) for group in grouped]
        self._places = {
            table.name: (number, at)
            for number, group in enumerate(grouped)
            for at, table in enumerate(group)
        }
        self._staged: list[list[RowGradients]] = [[] for _ in grouped]
        self.num_shards = count
        self.version = 0  # updates so far

    def place(self, table: Table) -> tuple[int, int]:
        """Return the number of a table's group, and the table's number in it; ConfigurationError: no such table."""
        group, number = self._places.get(table.name, (-1, -1))
        if group < 0 or self.shards[group][0].tables[number] != table:
            raise ConfigurationError(
                f"table {table.name!r} is not among those that there are rows of, "
                f"{', '.join(map(repr, self._places)) or 'none'}: give it to LocalRows"
            )
        return group, number

    def distinct(self, group: int, tables: Int32s, ids: Int64s) -> Distinct:
        """Return the distinct ones of the (table, id) of a batch, by ascending shard."""
        return Distinct(tables, ids, self._spreads[group])

    def pull(self, group: int, tables: Int32s, ids: Int64s, training: bool = False) -> Floats:
        """Return the values of rows, (n, dim), of a group's table numbers and ids, (n,) each.

        Args:
            training: whether gradients of these rows will be pushed; then ConfigurationError: a table has
                no room for them.
        """
        shards = self.shards[group]
        values = np.empty((len(ids), shards[0].dim), shards[0].dtype)
        order, begins = deal(tables, ids, self._spreads[group])
        for at, shard in enumerate(shards):
            part = slice(begins[at], begins[at + 1])
            mine = part if order is None else order[part]
            keys = tables[mine], ids[mine]
            if training:
                shard.require_room(*keys)
            values[mine] = shard.pull(*keys, training=training)
        return values

    def push(
        self,
        group: int,
        tables: Int32s,
        ids: Int64s,
        gradients: Floats,
        sightings: Int32s,
        lives: Int32s | None = None,
    ) -> None:
        """Keep gradients (n, dim) of a group's distinct rows (n,) until `step`.

        Args:
            sightings, lives: (n,), see `RowGradients`.
        """
        self._staged[group].append(RowGradients(tables, ids, gradients, sightings, lives))

    def step(self, learning_rate: float | None = None) -> int:
        """Update rows with the sums of the gradients that were pushed since the last step.

        The rows that tables' `evict` names are removed after each 1,000 updates, and those whose `ttl` is over
        in time, as on servers.

        Args:
            learning_rate: instead of the optimizers'.

        Returns:
            The version that the rows have now.

        Raises:
            NonFiniteError: a gradient holds NaN or infinity, see `nonfinite`. The gradients are
                dropped, and nothing of them is applied.
            ConfigurationError: a table has no room for the rows that are to be made.
        """
        totals = {group: added(staged) for group, staged in enumerate(self._staged) if staged}
        self._staged = [[] for _ in self._staged]
        if self._nonfinite != "pass" and (found := self._not_finite(totals)):
            if self._nonfinite == "refuse":
                raise NonFiniteError(
                    f"the gradient of {', '.join(map(repr, found))} holds NaN or infinity; nothing "
                    "of the step was applied: lower the learning rate, or look at the data and the "
                    'loss; nonfinite="skip" leaves such updates out'
                )
            totals = {}
        self.version += 1
        now, every = int(self._clock()), [shard for shards in self.shards for shard in shards]
        changed = [shard for shard in every if shard.note_time(now)]
        for group, total in totals.items():
            self._update(group, total, learning_rate)
        if self.version % UPDATES_BETWEEN_EVICTIONS == 0:
            for shard in every:
                shard.evict(self.version)
        for shard in changed:
            shard.end_lives(self.version)
        return self.version

    def _not_finite(self, totals: Mapping[int, RowGradients]) -> list[str]:
        """Return the names of the tables with NaN or infinity in a gradient."""
        states = []
        for group, total in totals.items():
            tables = self.shards[group][0].tables
            bad = total.tables[~np.isfinite(total.gradients).all(axis=1)]
            states += [tables[number].name for number in np.unique(bad)]
        return states

    def _update(self, group: int, total: RowGradients, learning_rate: float | None) -> None:
        """Update the rows of one group of tables."""
        shards = self.shards[group]
        total = self._forms[group].as_sent(total, Chance(0, self.version - 1))
        order, begins = deal(total.tables, total.ids, self._spreads[group])
        for at, shard in enumerate(shards):
            part = slice(begins[at], begins[at + 1])
            mine = total.taken(part if order is None else order[part])
            keys = mine.tables, mine.ids, mine.gradients
            shard.push(*keys, self.version, learning_rate, mine.sightings, lives=mine.lives)
