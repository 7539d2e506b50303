"""Random schedules over the shards of tables and their files alone, without a job, beside a dict of what rows are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steepest.checkpoint import files
from steepest.core.tensors.layout import Chunk, ElementType
from steepest.data.storage.places import StoragePlace
from steepest.tables.files.imported_rows import imported_rows, load_with_imported
from steepest.tables.files.saved_rows import ShardMark
from steepest.tables.job.restored_shards import RestoredShards, RowsWanted
from steepest.tables.job.row_writer import RowWriter
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.rows.admission import CounterFilter
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.eviction import GlobalStepEvict
from steepest.tables.rows.initial import Constant
from steepest.tables.rows.row_optimizers import SGD, Adagrad, RowOptimizer
from steepest.tables.rows.state import appended
from steepest.tables.rows.table import Table
from tests.checkpoint_contents import content

DIM, FIRST, SEEN, LIVES = 2, 0.5, 2, 1
NAMES = ("a", "b", "c", "counted", "short")
IDS = [*range(12), 2**40, 2**62]
ACTIONS = [
    *(["push"] * 6),
    *(["save"] * 3),
    *(["restore"] * 2),
    "import rows",
    "hand over",
    *(["evict and save"] * 2),
]


@dataclass
class Known:
    """What the dict has of one table."""

    optimizer: RowOptimizer
    rows: dict[int, tuple[Any, Any, int, int]] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)


def described(name: str, optimizer: RowOptimizer) -> Table:
    """A table; "counted" has an admission filter, rows of "short" end."""
    return Table(
        name,
        DIM,
        optimizer=optimizer,
        initial=Constant(FIRST),
        dtype="float64",
        admission=CounterFilter(filter_freq=SEEN) if name == "counted" else None,
        evict=(GlobalStepEvict(steps_to_live=LIVES),) if name == "short" else (),
    )


class Parts(files.RowParts):
    """The rows of shards, which servers write; of those in `since` only what has changed."""

    def __init__(
        self,
        servers: list[list[TableChunk]],
        since: dict[int, tuple[int, int]],
        link: files.BaseLink | None,
    ) -> None:
        self.servers, self.since, self.link = servers, since, link
        self.written: list[dict[str, Any]] = []
        self.marks: dict[int, ShardMark] = {}

    def write_into(self, folder: StoragePlace, stamp: str) -> None:
        for number, server in enumerate(self.servers):
            writer = RowWriter(folder, stamp, number, None)
            for held in server:
                for at, piece in enumerate(held.pieces(base=self.since.get(held.chunk.index))):
                    if not at:
                        first = {about["key"]: value for about, value in piece}
                        self.marks[held.chunk.index] = ShardMark.of(first)
                    writer.put(piece, lambda: None)
            writer.finish(lambda: None)
            assert writer.error is None
            self.written += writer.files

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(())

    def about(self) -> dict[str, Any]:
        marks = [self.marks[chunk] for chunk in sorted(self.marks)]
        base = {}
        if any(mark.since != -1 for mark in marks):
            assert self.link is not None
            base = {"base": vars(self.link)}
        return {"shards": [list(mark) for mark in marks], **base}


class RowStreams:
    """Servers with shards of tables, their checkpoints, and what all rows have to be."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random, self.folder = random.Random(seed), folder
        self.known: dict[str, Known] = {}
        self.saved: list[tuple[Path, dict[str, Known], int]] = []
        self.version = self.count = 0
        self.base: tuple[files.BaseLink, dict[int, tuple[int, int]]] | None = None
        self.done: list[str] = []
        self._begin()

    def _begin(self) -> None:
        """Have other tables, servers and shards; tables of a name that was there may have another optimizer."""
        names = self.random.sample(NAMES, self.random.randint(2, len(NAMES)))
        if self.known and not self.known.keys() & set(names):
            names.append(next(iter(self.known)))  # a checkpoint of no table of the job is refused
        ways: list[RowOptimizer] = [SGD(lr=1.0), Adagrad(lr=0.25)]
        self.tables = tuple(described(name, self.random.choice(ways)) for name in names)
        self.dealing = Dealing(self.tables, self.random.choice([1, 2, 5]), 0, 0)
        self.base = None
        known, self.known = self.known, {}
        for table in self.tables:
            mine = self.known[table.name] = Known(table.optimizer)
            if (was := known.get(table.name)) is None:
                continue
            mine.rows, mine.counted = dict(was.rows), dict(was.counted)
            if type(was.optimizer) is not type(table.optimizer):
                first = np.array(table.optimizer.first_slots(DIM))
                mine.rows = {key: (row[0], first, *row[2:]) for key, row in was.rows.items()}
        self.chunks = [
            TableChunk(Chunk(index, ElementType.of(torch.uint8), True, 0, 0, ()), self.dealing)
            for index in self.dealing.chunks
        ]
        self._deal()
        self.done.append(
            f"{names} in {self.dealing.num_shards} shards of {len(self.servers)} servers"
        )

    def _deal(self) -> None:
        count = self.random.choice([1, 2, 3])
        self.servers = [self.chunks[at::count] for at in range(count)]

    def run(self, actions: int) -> None:
        """Do so many things, and compare after each."""
        for _ in range(actions):
            self.done.append(action := self.random.choice(ACTIONS))
            getattr(self, action.replace(" ", "_"))()
            self.check()

    def push(self) -> None:
        """Update rows of some ids of some tables."""
        self.version += 1
        for table in self.tables:
            known, group = self.known[table.name], self.dealing.place(table)
            ids = self.random.sample(IDS, self.random.randint(0, 6))
            seen = {each: self.random.randint(1, 2) for each in ids}
            gradients = {
                each: np.array([self.random.randint(-8, 8) / 8 for _ in range(DIM)]) for each in ids
            }
            self._push(group, gradients, seen)
            for each in ids:
                self._update(table, known, each, gradients[each], seen[each])
        for held in self.chunks:
            held.rows.version = self.version

    def _push(
        self, group: tuple[int, int], gradients: dict[int, Any], seen: dict[int, int]
    ) -> None:
        ids = np.array(list(gradients), np.int64)
        tables = np.full(len(ids), group[1], np.int32)
        order, begins = self.dealing.deal(group[0], tables, ids)
        for shard in range(self.dealing.num_shards):
            at = np.arange(len(ids)) if order is None else order
            mine = ids[at[begins[shard] : begins[shard + 1]]]
            rows = self.chunks[self.dealing.chunk(group[0], shard)].rows
            if len(mine):
                rows.version = self.version - 1  # the other tables of a group were pushed apart
                rows.push(
                    tables[: len(mine)],
                    mine,
                    np.array([gradients[each] for each in mine.tolist()]),
                    self.version,
                    sightings=[seen[each] for each in mine.tolist()],
                )

    def _update(self, table: Table, known: Known, each: int, gradient: Any, seen: int) -> None:
        if each not in known.rows:
            total = known.counted.pop(each, 0) + seen
            if table.name == "counted" and total < SEEN:
                known.counted[each] = total
                return
            first = np.array(table.optimizer.first_slots(DIM))
            known.rows[each] = np.full(DIM, FIRST), first, 0, 0
        value, slots, _, before = known.rows[each]
        if isinstance(table.optimizer, Adagrad):
            slots = slots + gradient * gradient
            change = table.optimizer.lr * (gradient / (np.sqrt(slots) + table.optimizer.eps))
        else:
            change = gradient
        known.rows[each] = value - change, slots, self.version, before + seen

    def evict(self) -> None:
        """Remove old rows."""
        for held in self.chunks:
            held.rows.evict(self.version)
        if "short" in self.known:
            rows = self.known["short"].rows
            self.known["short"].rows = {
                key: row for key, row in rows.items() if self.version - row[2] <= LIVES
            }

    def evict_and_save(self) -> None:
        """Remove old rows, which an increment has to say."""
        self.evict()
        self.save()

    def hand_over(self) -> None:
        """Send each shard to another server, as a job does that is set back or gets other servers."""
        for at, held in enumerate(self.chunks):
            other = TableChunk(held.chunk, self.dealing)
            for about, value in held.state():
                other.load_state(about, value)
            other.end_state()
            self.chunks[at] = other
        self.base = None  # these are other lives
        self._deal()

    def import_rows(self) -> None:
        """Give rows to ids."""
        table = self.random.choice(self.tables)
        ids = self.random.sample(IDS, 3)
        values = np.array([[self.random.random() for _ in range(DIM)] for _ in ids])
        group, number = self.dealing.place(table)
        order, begins = self.dealing.deal(group, np.full(3, number, np.int32), np.array(ids))
        at = np.arange(3) if order is None else order
        known, first = self.known[table.name], np.array(table.optimizer.first_slots(DIM))
        for shard in range(self.dealing.num_shards):
            mine = at[begins[shard] : begins[shard + 1]]
            if len(mine):
                held = self.chunks[self.dealing.chunk(group, shard)]
                rows = imported_rows(table, (np.array(ids)[mine], values[mine]))
                before, held.rows = held.rows, self.dealing.make(held.chunk.index, held.rows.seed)
                replaced = load_with_imported(held.rows, before, number, rows)
                assert replaced == sum(ids[each] in known.rows for each in mine)
        for each, value in zip(ids, values, strict=True):
            seen = known.rows[each][3] if each in known.rows else 1
            known.counted.pop(each, None)
            known.rows[each] = value, first, self.version, seen
        self.base = None

    def save(self) -> None:
        """Write a checkpoint, perhaps of what has changed since the last one alone."""
        self.count += 1
        link, since = None, dict[int, tuple[int, int]]()
        if self.base is not None and self.random.random() < 0.7:
            link, since = self.base
        parts = Parts(self.servers, since, link)
        place = self.folder / f"{self.count:06d}-step-{self.count}"
        whole = content(step=self.count)
        about = {**whole.about, "tables": self.dealing.description(), "epoch": 0}
        made = files.write(place, replace(whole, about=about, rows=parts))
        now = {held.chunk.index: (held.rows.life, held.rows.version) for held in self.chunks}
        self.base = made, now
        self.saved.append((place, deepcopy(self.known), self.version))

    def restore(self) -> None:
        """Go on from a checkpoint with other tables, shards and servers."""
        if not self.saved:
            return
        place, known, self.version = self.random.choice(self.saved)
        self.known = deepcopy(known)
        self._begin()
        saved = files.read_apart(place).saved_rows
        assert saved is not None
        if self.random.random() < 0.3:  # a function that changes nothing; but counts begin anew
            saved = replace(saved, change=lambda name, rows: {name: rows[rows.ids >= 0]})
            for mine in self.known.values():
                mine.counted = {}
        for server in self.servers:
            restored = RestoredShards()
            chunks = [held.chunk.index for held in server]
            wanted = RowsWanted(-1, chunks, self.dealing, saved)
            answer = restored.read(wanted)
            if answer.elsewhere:
                answer = restored.read(replace(wanted, dealt=True))
            assert not any(answer), (answer, self.done)
            for held in server:
                made = restored.take(-1, held.chunk.index)
                assert made is not None
                held.rows = made
                held.rows.version = self.version

    def check(self) -> None:
        """Compare all rows, counts, versions and slots with those of the dict, to the bit."""
        for group, tables in enumerate(self.dealing.groups):
            shards = range(self.dealing.num_shards)
            state = appended(
                [self.chunks[self.dealing.chunk(group, shard)].rows.export() for shard in shards]
            ).sorted()
            for number, table in enumerate(tables):
                mine = state.only(state.tables == number, state.counted_tables == number)
                known = self.known[table.name]
                assert mine.ids.tolist() == sorted(known.rows), (table.name, self.done)
                counts = dict(zip(mine.counted_ids.tolist(), mine.counted.tolist(), strict=True))
                assert counts == known.counted, (table.name, self.done)
                for at, each in enumerate(mine.ids.tolist()):
                    value, slots, written, seen = known.rows[each]
                    told = (table.name, each, self.done)
                    assert np.array_equal(mine.values[at], value), told
                    assert np.array_equal(mine.slots[at], slots), told
                    assert (mine.written[at], mine.sightings[at]) == (written, seen), told
