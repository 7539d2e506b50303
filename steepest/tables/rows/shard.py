"""What one server holds of a group of tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError, ResourcesError
from steepest.tables.rows.admission import Admission
from steepest.tables.rows.capacity import Plan
from steepest.tables.rows.checks import (
    repeated,
    require_gradients,
    require_keys,
    require_out,
    require_sightings,
)
from steepest.tables.rows.cut import RowCut
from steepest.tables.rows.eviction import worn
from steepest.tables.rows.first_values import FirstValues
from steepest.tables.rows.gradients import Bytes, RowGradients
from steepest.tables.rows.hashing import Distinct, salt_of
from steepest.tables.rows.kernels import Floats, Int32s, Int64s, kernel, read_only
from steepest.tables.rows.loading import LoadingRows
from steepest.tables.rows.state import TableState
from steepest.tables.rows.table import Table, require_group, spread_of
from steepest.validation import require_count, require_number

#: Updates after which shards are to be asked to `evict`, again and again.
UPDATES_BETWEEN_EVICTIONS = 1000
_BOUNDLESS = 2**62  # more versions than there can be


@kernel
def _mark(numbers: Int32s, sightings: Int32s, version: int, written: Int64s, seen: Int32s) -> int:
    """Note a push in its rows; where one is in it twice, note nothing and return the place, else -1."""
    before = np.empty(len(numbers), np.int64)
    for at in range(len(numbers)):
        number = numbers[at]
        if number >= 0:
            if written[number] == version:
                for earlier in range(at):
                    if numbers[earlier] >= 0:
                        written[numbers[earlier]] = before[earlier]
                return at
            before[at] = written[number]
            written[number] = version
    for at in range(len(numbers)):
        if numbers[at] >= 0:
            total = np.int64(seen[numbers[at]]) + sightings[at]
            seen[numbers[at]] = min(total, 2**31 - 1)
    return -1


class TableShard(LoadingRows):
    """The rows of some tables of one dimension, dtype and optimizer, or a server's share of them.

    A pull changes nothing: an id without a row has its first values, which are the same each time and on
    every server. A push makes rows, updates, counts and evicts, so that a replay of the pushes
    makes the same state, to the bit. One thread at a time may use it.

    Attributes:
        version: of the last push, `evict` or `end_lives`.
        seed: of first values and of admissions by chance.
        life: a random number, another one after each `load`: versions of one life are of one past.
        counts: by name, an int64 for each table: the ids that were "admitted"; gradients that were "refused" because
            their ids were not, "refused_full" because there was no room for a row, and "ignored" because the table
            is not trainable; rows that were evicted because the table was full ("evicted_full"), by
            `GlobalStepEvict` ("evicted_age"), by `L2WeightEvict` ("evicted_norm"), and because their time to live
            was over ("evicted_ttl").
    """

    def __init__(
        self, tables: Iterable[Table], *, shard: int = 0, num_shards: int = 1, seed: int = 0
    ) -> None:
        """Begin without rows.

        Args:
            tables: the group; a table's number is its place here.
            shard, num_shards: which of how many shards this is: it holds the ids whose `shard_of` it is.
            seed: of first values and of admissions by chance.
        """
        group = require_group(tables)
        spread = spread_of(group, require_count("num_shards", num_shards))
        if not 0 <= require_count("shard", shard, 0) < num_shards:
            raise ConfigurationError(f"shard={shard}: give a number from 0 to {num_shards - 1}")
        one = group[0]
        self.seed = seed
        self.dim, self.dtype, self._optimizer = one.dim, one.form.dtype, one.optimizer
        self._names = [table.name for table in group]
        self._frozen = [number for number, table in enumerate(group) if not table.trainable]
        salts = [salt_of(name, seed) for name in self._names]
        self._first = FirstValues(group, salts)
        self._admission = Admission([table.admission for table in group], salts)
        super().__init__(group, spread, shard, salts)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The group, in order of table numbers."""
        return self._tables

    def pull(
        self,
        tables: npt.ArrayLike,
        ids: npt.ArrayLike,
        out: Floats | None = None,
        *,
        training: bool = False,
    ) -> Floats:
        """Return the values of rows; ids that have none have their table's default, or first values.

        Args:
            tables, ids: (n,), table numbers and ids, which may repeat.
            out: (n, dim), contiguous and of the tables' dtype: where to write the values; without it,
                to a new array.
            training: whether a push of these ids follows: those whose rows it will make have first
                values.

        Returns:
            (n, dim): `out`, if it is given.

        Raises:
            ConfigurationError: an id is negative or no integer, a table is not of the group, or `out` is
                of another shape or dtype.
        """
        numbers_of, checked = require_keys(tables, ids, self._names)
        shape = len(checked), self.dim
        values = np.empty(shape, self.dtype) if out is None else require_out(out, shape, self.dtype)
        found, missing = self._index.find(numbers_of, checked)
        self._blocks.store.gather(found, values)
        if missing:
            at = np.flatnonzero(found < 0)
            values[at] = self._form.received(
                self._first.sent(numbers_of[at], checked[at], training).reshape(-1)
            )
        return values

    def pull_sent(self, tables: Int32s, ids: Int64s, out: Bytes, *, training: bool = False) -> None:
        """Write what `pull` returns as it travels to `out`, (n, `RowFormat.sent_bytes`), contiguous.

        The keys are as `require_keys` returned them. With `training` errors are those of `require_room`, which
        only ids without a row can cause.
        """
        found, missing = self._index.find(tables, ids)
        if missing and training:
            self.require_room(tables, ids)
        found.flags.writeable = False  # as kernels want it, without a copy
        self._blocks.store.send(found, out)
        if missing:
            at = np.flatnonzero(found < 0)
            out[at] = self._first.sent(tables[at], ids[at], training)

    def push(
        self,
        tables: npt.ArrayLike,
        ids: npt.ArrayLike,
        gradients: npt.ArrayLike,
        version: int,
        learning_rate: float | None = None,
        sightings: npt.ArrayLike | None = None,
        *,
        lives: Int32s | None = None,
        strict: bool = True,
    ) -> None:
        """Update rows with their gradients; make the rows of ids that are admitted now.

        Args:
            tables, ids: (n,), distinct.
            gradients: (n, dim), of the tables' dtype.
            version: the number of this update, above the shard's.
            learning_rate: instead of the optimizer's.
            sightings: (n,), how often each id was in the batch; once, if it is not given.
            lives: (n,), int32 of at least 0, see `RowGradients`.
            strict: whether a push for which a table has no room is an error. If not, the first ids in
                the order of the push that fit get rows; the gradients of the others are dropped and
                counted as "refused_full". A table without eviction has room up to its capacity; one
                with eviction, for as many ids of one push as its capacity.

        Raises:
            ConfigurationError: an argument is wrong, or `strict` and a table has no room; nothing has
                changed.
            ResourcesError: the machine has no memory for more rows; nothing has changed.
        """
        numbers_of, checked = require_keys(tables, ids, self._names)
        changes = require_gradients(gradients, len(checked), self.dim, self.dtype)
        if require_count("version", version) <= self.version:
            raise ConfigurationError(
                f"version={version} after {self.version}: each push has a greater version than the last"
            )
        if learning_rate is not None:
            require_number("learning_rate", learning_rate)
        seen = require_sightings(sightings, len(checked))
        self._apply(
            RowGradients(numbers_of, checked, changes, seen, lives), version, learning_rate, strict
        )

    def push_checked(
        self, pushed: RowGradients, version: int, learning_rate: float | None = None
    ) -> None:
        """Push gradients that `RowGradients.require` has checked; do as `push` without `strict`."""
        self._apply(pushed, version, learning_rate, strict=False)

    def _apply(
        self, pushed: RowGradients, version: int, learning_rate: float | None, strict: bool
    ) -> None:
        numbers_of, checked, changes, seen, lives = (
            read_only(pushed.tables, np.int32),
            read_only(pushed.ids, np.int64),
            read_only(pushed.gradients, self.dtype),
            read_only(pushed.sightings, np.int32),
            pushed.lives,
        )
        rows, _ = self._index.find(numbers_of, checked)
        if self._frozen:
            rows = self._leave_frozen(numbers_of, rows)
        at = np.flatnonzero(rows == -1)
        plan = self._plan(numbers_of, checked, seen, rows, at, version, strict)
        before = [(cut, cut.before(rows)) for cut in self._cuts]
        twice = _mark(rows, seen, version, self._blocks.written, self._blocks.sightings)
        if twice >= 0:
            raise repeated(checked[twice], self._names[numbers_of[twice]])
        for cut, copies in before:
            cut.keep(copies)
        self.version = version
        if self._frozen:
            of = numbers_of[rows == -2]
            self.counts["ignored"] += np.bincount(of, minlength=len(self._tables))
        if len(at):
            self._count(numbers_of[at], checked[at], seen[at], plan)
            at = at[plan.admitted]
            mine = numbers_of[at], checked[at], seen[at]
            self._make_room(plan.excess, version)
            rows[at] = self._make(*mine, version)
        keys = numbers_of, checked
        self._blocks.store.update(self._optimizer, rows, keys, changes, version, learning_rate)
        self._lives.renew(rows, numbers_of, lives, self._blocks)
        if self._blocks.scores is not None:
            self._scores.grow(rows, numbers_of, seen, version, self._blocks.scores)

    @property
    def clock(self) -> int:
        """The time at the last push, in whole seconds since the epoch, as `note_time` was told; 0 if it was not."""
        return self._lives.clock

    def note_time(self, seconds: int) -> bool:
        """Note the time of the next push; return whether `end_lives` is to be called after it.

        Args:
            seconds: since the epoch; a time before the last one is taken for that one.
        """
        return self._lives.note_time(seconds)

    def end_lives(self, version: int) -> int:
        """Remove the rows whose time to live is over, see `Table.ttl`; return how many.

        Args:
            version: of now, at least the shard's, which it becomes.
        """
        self.version = require_count("version", version, self.version)
        numbers = self._lives.ended(self._blocks)
        numbers = numbers[~self._are_pinned(numbers)]
        of = self._blocks.tables[numbers]
        self.counts["evicted_ttl"] += np.bincount(of, minlength=len(self._tables))
        self._remove(numbers, version)
        if len(numbers):
            for use in self._uses.values():
                use.forget_free(self._blocks)
        return len(numbers)

    def _leave_frozen(self, tables: Int32s, rows: Int32s) -> Int32s:
        """Return row numbers, but -2 for ids of frozen tables."""
        frozen = np.isin(tables, self._frozen)
        return np.where(frozen, -2, rows).astype(np.int32)

    def _plan(
        self,
        tables: Int32s,
        ids: Int64s,
        sightings: Int32s,
        rows: Int32s,
        at: Int64s,
        version: int,
        strict: bool,
    ) -> Plan:
        """Decide what a push does to ids without rows; change nothing."""
        # at: which are not frozen and have no row. ConfigurationError: an id is there twice, or `strict` and a table
        # has no room.
        nothing = np.zeros(len(self._tables), np.int64)
        if not len(at):
            return Plan(np.zeros(0, np.bool_), nothing, nothing, nothing)
        of, fresh = tables[at], ids[at]
        distinct = Distinct(of, fresh)
        if len(distinct.ids) < len(at):
            twice = int(np.argmax(distinct.counts > 1))
            raise repeated(distinct.ids[twice], self._names[distinct.tables[twice]])
        pinned = self._pins.has(of, fresh)
        admitted = self._admission.admits(of, fresh, sightings[at], version) & ~pinned
        known = self._known(tables, ids, rows)
        if strict:
            wanted = np.bincount(of[admitted], minlength=len(self._tables))
            self._capacities.require(wanted, known, self._taken)
        plan = self._capacities.fit(of, admitted, known, self._taken)
        wanted = plan.wanted + np.bincount(of[pinned], minlength=len(self._tables))
        self._require_memory(wanted - plan.excess)
        return plan._replace(admitted=plan.admitted | pinned, wanted=wanted)

    def _known(self, tables: Int32s, ids: Int64s, rows: Int32s) -> Int64s:
        """Return by table the places of pinned ids, and of other rows (n,) that a push updates; see `Capacities`."""
        others = (rows >= 0) & ~self._pins.has(tables, ids)
        return np.bincount(tables[others], minlength=len(self._tables)) + self._pins.counts

    def require_room(self, tables: npt.ArrayLike, ids: npt.ArrayLike) -> None:
        """Check that a push of ids now would have room; change nothing.

        Tables with an admission filter are left out, since it depends on the push which of its ids they
        admit, and so are frozen ones.

        Args:
            tables, ids: (n,), table numbers and ids, which may repeat.

        Raises:
            ConfigurationError: what `push` with `strict` would raise for want of room, or for such ids.
            ResourcesError: the machine has no memory for more rows.
        """
        if not self._blocks.has_room(np.size(ids)):
            self._require_memory_for(tables, ids)
        told = self._capacities.told
        if not told.any():
            return
        numbers_of, checked = require_keys(tables, ids, self._names)
        asked = np.bincount(numbers_of, minlength=len(self._tables))
        tight = told & (asked > self._capacities.room(self._pins.counts, self._taken))
        tight[self._frozen] = False
        mine = tight[numbers_of]
        if not mine.any():
            return
        distinct = Distinct(numbers_of[mine], checked[mine])
        keys = distinct.tables, distinct.ids
        rows, _ = self._index.find(*keys)
        fresh = (rows < 0) & ~self._pins.has(*keys)
        wanted = np.bincount(distinct.tables[fresh], minlength=len(self._tables))
        self._capacities.require(wanted, self._known(*keys, rows), self._taken)

    def _require_memory_for(self, tables: npt.ArrayLike, ids: npt.ArrayLike) -> None:
        """Check that there is memory for the rows that a push of ids adds, see `require_room`."""
        numbers_of, checked = require_keys(tables, ids, self._names)
        asked = np.array([table.admission is None for table in self._tables])
        asked[self._frozen] = False
        mine = asked[numbers_of]
        distinct = Distinct(numbers_of[mine], checked[mine])
        rows, _ = self._index.find(distinct.tables, distinct.ids)
        wanted = np.bincount(distinct.tables[rows < 0], minlength=len(self._tables))
        excess = (self._alive + wanted - self._capacities.rows).clip(0)
        self._require_memory(wanted - excess)

    def _require_memory(self, added: Int64s) -> None:
        """Check that there is memory for so many more rows of each table; ResourcesError names the tables."""
        try:
            self._blocks.require(int(added.sum()))
        except ResourcesError as error:
            names = ", ".join(repr(self._names[table]) for table in np.flatnonzero(added > 0))
            raise ResourcesError(f"table {names}: {error}") from error

    def _count(self, tables: Int32s, ids: Int64s, sightings: Int32s, plan: Plan) -> None:
        """Count the sightings of ids without rows."""
        self.counts["admitted"] += plan.wanted
        self.counts["refused_full"] += plan.refused
        if self._admission.filters:
            self._admission.count(tables, ids, sightings, plan.admitted)
            others = np.bincount(tables[~plan.admitted], minlength=len(self._tables))
            self.counts["refused"] += others - plan.refused

    def _make(self, tables: Int32s, ids: Int64s, sightings: Int32s, version: int) -> Int32s:
        """Return the numbers of new rows for ids."""
        values = self._first.of_rows(tables, ids)
        first = np.array(self._optimizer.first_slots(self.dim), self.dtype)
        slots = np.broadcast_to(first, (len(ids), len(first)))
        numbers = self._enter((tables, ids), values, slots, np.int64(version), sightings, {})
        self._begin(tables, ids, numbers)
        return numbers

    def evict(self, version: int) -> int:
        """Remove the rows that tables' `evict` names; frozen tables keep theirs.

        It looks at every row: call it now and then, ordered among the pushes.

        Args:
            version: of now, at least the shard's, which it becomes.

        Returns:
            How many rows were removed.
        """
        ways = [
            () if number in self._frozen else table.evict
            for number, table in enumerate(self._tables)
        ]
        if not any(ways):
            return 0
        self.version = require_count("version", version, self.version)
        why = worn(ways, version, self._blocks)
        worn_out = np.flatnonzero(why).astype(np.int32)
        why[worn_out[self._are_pinned(worn_out)]] = 0
        for reason, name in ((1, "evicted_age"), (2, "evicted_norm")):
            numbers = np.flatnonzero(why == reason).astype(np.int32)
            of = self._blocks.tables[numbers]
            self.counts[name] += np.bincount(of, minlength=len(self._tables))
            self._remove(numbers, version)
        for use in self._uses.values():
            use.forget_free(self._blocks)
        return int((why != 0).sum())

    def covers(self, life: int, since: int) -> bool:
        """Return whether it is known what has changed since a version of a life."""
        return life == self.life and self._removals.known_from <= since <= self.version

    def export(self, since: int | None = None) -> TableState:
        """Return copies of all rows, or of what has changed, in order of table and id.

        Args:
            since: a version: only the rows that were written after it, and the ids whose rows were
                removed after it or at it.

        Raises:
            ConfigurationError: it is not known any more which rows were removed since then.
        """
        (state,) = self.pieces(self._blocks.top + 1, since)
        return state.sorted()

    def pieces(self, most: int, since: int | None = None) -> Iterator[TableState]:
        """Yield copies of the rows of now, about `most` at a time, while pushes go on; `since` as for `export`.

        The first one has also what is known of ids without rows.
        """
        rest, rows = self.cut(since)
        piece = rows.take(most)
        while True:
            yield replace(rest, **piece)
            rest, piece = self.nothing(), rows.take(most)
            if not len(piece["ids"]):
                return

    def nothing(self) -> TableState:
        """Return an empty state of these tables."""
        of, ids = np.empty(0, np.int32), np.empty(0, np.int64)
        widths = self.dim, self._optimizer.slots(self.dim)
        values, slots = (np.empty((0, width), self.dtype) for width in widths)
        return TableState(of, ids, values, slots, written=ids, sightings=of)

    def cut(self, since: int | None = None, table: int | None = None) -> tuple[TableState, RowCut]:
        """Return what `export` returns, the rows piece by piece while pushes go on.

        Args:
            since: as for `export`.
            table: a number: only what is known of that table.

        Returns:
            Everything but the rows, as a state; the rows of now, which are copied as they are taken,
            or before they change. Memory is freed when the cut is dropped.

        Raises:
            ConfigurationError: as `export`.
        """
        if since is not None and not self.covers(self.life, since):
            raise ConfigurationError(
                f"export(since={since}): which rows were removed is known from version "
                f"{self._removals.known_from} to {self.version}; export all rows"
            )
        rows = RowCut(self._blocks, self.version, since, table)
        self._cuts.add(rows)
        gone = self._removals.since(_BOUNDLESS if since is None else since)
        lost = self._index.find(gone.tables, gone.ids)[0] < 0
        counted = self._admission.exact()
        removed = gone.tables[lost], gone.ids[lost]
        known: list[Any] = [*counted, *removed]
        if table is not None:
            mine = [counted[0] == table] * len(counted) + [removed[0] == table] * len(removed)
            known = [part[of] for part, of in zip(known, mine, strict=True)]
        names = ("counted_tables", "counted_ids", "counted", "removed_tables", "removed_ids")
        counters = {of: counter.copy() for of, counter in self._admission.counters.items()}
        rest = dict(zip(names, known, strict=True))
        return TableState(**rows.no_rows(), **rest, counters=counters), rows
