"""`plan_tables`: predict the rows of embedding tables, and memory, servers and disk for them, from a sample of ids."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from steepest.cli.planning.distinct import DistinctIds, distinct_ids, hit_share
from steepest.cli.planning.events import Links
from steepest.cli.planning.evictions import CAUSES, evictions_at
from steepest.cli.planning.forecast import in_words
from steepest.cli.planning.id_samples import IdSample, sample_of
from steepest.cli.planning.measuring import RowCosts, measure_rows, sample_ids
from steepest.cli.planning.plan import creator_of
from steepest.cli.planning.quantities import (
    bandwidth_of,
    bytes_of,
    seconds_of,
    size_in_words,
)
from steepest.errors import ConfigurationError
from steepest.tables.rows.row_bytes import RowBytes
from steepest.tables.rows.table import Table, merged
from steepest.validation import require_count, require_number

#: Rows in memory, as shares of all, of which the look-ups found there are told.
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_WANTED = 0.9  # of look-ups, for which the memory is told
_EXAMPLES = 5  # ids of removed rows that are told
_SNAPSHOTS = 2  # copies of a row, of which there are two while a snapshot comes


@dataclass(frozen=True)
class TableForecast:
    """The prediction for one table.

    Attributes:
        sample: of its ids.
        look_ups: of ids in the whole data, one epoch of it.
        rows: distinct ids of the whole data; no more than the table has, by its capacity and
            `num_embeddings`.
        bytes: of a row.
    """

    sample: IdSample
    look_ups: int
    rows: DistinctIds
    bytes: RowBytes

    @property
    def batch_bytes(self) -> tuple[int, int] | None:
        """Bytes of rows that a worker pulls for a batch, and of gradients that it pushes; None without batches."""
        if (rows := self.sample.batch_rows) is None:
            return None
        return round(rows * self.bytes.values), round(rows * self.bytes.pushed)

    @property
    def memory(self) -> int:
        """Bytes of memory with all rows in it."""
        return self.rows.likely * self.bytes.memory

    @property
    def disk(self) -> int:
        """Bytes on servers' disks, of a table with a directory, without snapshots."""
        return self.rows.likely * self.bytes.disk

    @property
    def snapshots(self) -> int:
        """Bytes of snapshots on disks, of a table with a directory, while one is being taken."""
        return 2 * _SNAPSHOTS * self.rows.likely * self.bytes.snapshot

    def hits(self, places: int) -> float:
        """Return the least share of look-ups that find their row in memory, if `places` rows are there."""
        return hit_share(self.sample.first, self.sample.second, self.rows.likely, places)

    @cached_property
    def wanted_places(self) -> int:
        """The number of rows in memory with which nine look-ups in ten find their row there."""
        low, high = 0, self.rows.likely
        while low < high:
            middle = (low + high) // 2
            if self.hits(middle) >= _WANTED:
                high = middle
            else:
                low = middle + 1
        return low

    def memory_with(self, places: int) -> int:
        """Return bytes of memory if `places` rows are there and all others on disk."""
        return self.rows.likely * self.bytes.known_on_disk + places * self.bytes.place


class TableStep(NamedTuple):
    """The prediction of a synchronous step: seconds with some workers and servers, and samples a second of all."""

    workers: int
    servers: int
    seconds: float
    samples_per_second: float


@dataclass(frozen=True)
class TablePlan:
    """The predictions for a model's tables.

    Attributes:
        tables: one for each.
        memory: bytes of each server, for rows.
        times: the size of the whole data over that of the sample.
        steps: for each number of workers; none for ids that were given.
    """

    tables: tuple[TableForecast, ...]
    memory: float
    times: float
    steps: tuple[TableStep, ...] = ()

    @property
    def servers(self) -> int:
        """Servers that hold all rows in memory."""
        return self._servers(sum(each.memory for each in self.tables))

    @property
    def servers_with_disk(self) -> int:
        """Servers if nine look-ups in ten are to find their row in memory, and the other rows are on disk."""
        return self._servers(sum(each.memory_with(each.wanted_places) for each in self.tables))

    def _servers(self, nbytes: int) -> int:
        return max(math.ceil(nbytes / self.memory), 1)

    def table(self) -> list[list[str]]:
        """Return the rows of a table, of which the first has the names of its columns."""
        head = [
            "table",
            "seen",
            "distinct",
            "rows",
            "between",
            "bytes a row",
            "in memory",
            "90 % in memory",
            "on disk",
            "a batch",
        ]
        return [head, *(_row(each) for each in self.tables)]

    def step_table(self) -> list[list[str]]:
        """Return the predictions of steps, likewise."""
        rows = [
            [
                f"{each.workers}",
                f"{each.servers}",
                in_words(each.seconds),
                f"{each.samples_per_second:,.0f}",
            ]
            for each in self.steps
        ]
        return [["workers", "servers", "a step", "samples/s"], *rows]

    def hit_table(self) -> list[list[str]]:
        """Return the share of look-ups found in memory by the share of rows there, likewise."""
        head = ["look-ups found with", *(f"{100 * share:g} % of rows" for share in SHARES)]
        return [head] + [
            [
                each.sample.table.name,
                *(f"{100 * each.hits(int(share * each.rows.likely)):.1f} %" for share in SHARES),
            ]
            for each in self.tables
        ]

    def eviction_table(self) -> list[list[str]]:
        """Return what tables' settings remove, likewise; the names of the columns alone if all only grow."""
        head = ["removed", *CAUSES, "rows that stay", "look-ups", "such as"]
        found = [(each.sample.table.name, each.sample.evictions) for each in self.tables]
        return [head] + [
            [
                name,
                *(f"{known.removed[cause]:,}" for cause in CAUSES),
                f"{known.rows:,}",
                f"{100 * known.share:.1f} %",
                ", ".join(map(str, known.ids[:_EXAMPLES])) or "-",
            ]
            for name, known in found
            if known is not None
        ]

    def advice(self) -> list[str]:
        """Return in words what to do."""
        total = sum(each.memory for each in self.tables)
        tier = sum(each.memory_with(each.wanted_places) for each in self.tables)
        disk, snapshots = (
            sum(getattr(each, n) for each in self.tables) for n in ("disk", "snapshots")
        )
        sentences = [
            f"All rows in memory take {size_in_words(total)}: {_counted(self.servers, 'server')} with "
            f"{size_in_words(self.memory)} for rows.",
            f"With nine look-ups in ten found in memory, and the others on disk, {size_in_words(tier)}: "
            f"{_counted(self.servers_with_disk, 'server')}; {size_in_words(disk)} of disk, and up to "
            f"{size_in_words(snapshots)} for snapshots. Settings: "
            + "; ".join(
                f"{each.sample.table.name!r} memory_rows={each.wanted_places:_}"
                for each in self.tables
            )
            + ".",
        ]
        if self.times > 1:
            sentences.append(
                f"The data are {self.times:.3g} times the sample: rows are an estimate, between a bound from below "
                "(Chao1) and Heaps' law; a sample twice as large narrows it."
            )
        return sentences

    def as_json(self) -> str:
        """Return everything as JSON, in bytes and numbers of rows."""
        tables = [
            {
                "name": each.sample.table.name,
                "dim": each.sample.table.dim,
                "seen": int(each.sample.counts.sum()),
                "distinct_seen": len(each.sample.counts),
                "look_ups": each.look_ups,
                "rows": each.rows._asdict(),
                "row_bytes": {**each.bytes._asdict(), "memory": each.bytes.memory},
                "memory_bytes": each.memory,
                "batch_rows": each.sample.batch_rows,
                "batch_bytes": None
                if each.batch_bytes is None
                else dict(zip(("pulled", "pushed"), each.batch_bytes, strict=True)),
                "disk_bytes": each.disk,
                "snapshot_bytes": each.snapshots,
                "hits": [
                    {"rows": places, "share": each.hits(places)}
                    for places in (int(share * each.rows.likely) for share in SHARES)
                ],
                "evictions": None
                if (known := each.sample.evictions) is None
                else {**asdict(known), "ids": known.ids[:_EXAMPLES].tolist()},
                "ninety_percent": {
                    "rows": each.wanted_places,
                    "memory_bytes": each.memory_with(each.wanted_places),
                },
            }
            for each in self.tables
        ]
        whole = {
            "times_the_sample": self.times,
            "server_memory_bytes": self.memory,
            "servers": self.servers,
            "servers_with_disk": self.servers_with_disk,
            "steps": [each._asdict() for each in self.steps],
            "tables": tables,
        }
        return json.dumps(whole, indent=2) + "\n"


def plan_tables(  # noqa: PLR0913 - keywords of a user, most of them optional
    source: Callable[..., Any] | Mapping[Table, Any],
    *,
    samples: float | None = None,
    memory: str | float = "16GB",
    batches: int = 200,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    workers: Sequence[int] = (1, 2, 4, 8),
    servers: int | None = None,
    bandwidth: str | float = "10Gbit",
    latency: str | float = "50us",
    one_host: bool = False,
) -> TablePlan:
    """Predict the rows of embedding tables in an epoch of the whole data, what they need and remove, and a step's time.

    See `docs/howto/plan.md` for what is estimated, and by whose formulas. Nothing is started.

    Args:
        source: a function without arguments as of `run`, or a `model_creator` as of `DistributedSGD`, which trains
            on this process for some batches; or by `Table` a sample of its ids: an array of integers, or an
            iterable of batches of them.
        samples: of the whole data, one epoch; of ids that were given, look-ups of each table. By default those
            that the model's data have, or the sample.
        memory: bytes of each server for rows: a number, or text such as "16GB".
        batches: of the model, to be counted.
        seed: of the model's data.
        checkpoint: of which to tell what tables remove, in place of the sample; its rows are read.
        workers, servers, bandwidth, latency, one_host: as of `steepest.plan`, for the time of a step under "ps".

    Raises:
        ConfigurationError: an argument is wrong, the model has no tables, or they cannot have the checkpoint's rows.
        CheckpointError: it cannot be read. ModelRaisedError: the model raised.

    Example:
        >>> import numpy as np
        >>> import steepest
        >>> from steepest.tables import Table
        >>> found = steepest.plan_tables({Table("words", 16): np.arange(1000) % 50}, samples=1e6)
        >>> found.tables[0].rows.likely
        50
    """
    bytes_for_rows = bytes_of(memory)
    require_count("batches", batches)
    if isinstance(source, Mapping):
        merged(source)
        parts = [sample_of(table, ids) for table, ids in source.items()]
        return of_samples(parts, None, samples, bytes_for_rows, checkpoint)
    links = Links(bandwidth_of(bandwidth), seconds_of(latency))
    creator = creator_of(source, seed)
    parts, seen, whole = sample_ids(creator, batches=batches, seed=seed)
    wanted = whole if samples is None else samples
    plan = of_samples(parts, seen, wanted, bytes_for_rows, checkpoint)
    costs = measure_rows(creator, batches=batches, seed=seed)
    rows = sum(sum(each.batch_bytes or (0, 0)) for each in plan.tables)
    cores = len(os.sched_getaffinity(0)) if one_host else None
    steps = (
        step_of(costs, rows, count, servers or (1 if one_host else count), links, cores)
        for count in sorted(set(workers))
    )
    return replace(plan, steps=tuple(steps))


def step_of(
    costs: RowCosts, rows: int, workers: int, servers: int, links: Links, cores: int | None
) -> TableStep:
    """Return the prediction of a step.

    All workers load and compute at the same time, then servers take what all have sent. On one host no step takes
    less than all of its processor time on all cores; between hosts a part of all bytes goes over links.

    Args:
        costs: of one worker's batch.
        rows: bytes of rows and of their gradients, of one worker's batch.
        workers, servers: of the job.
        links: between hosts.
        cores: of the one host that all processes share; None for a host for each worker, with servers beside them.
    """
    served = workers * costs.server / servers
    if cores is not None:
        busy = workers * (costs.worker + costs.server) / cores
        seconds = max(costs.worker * max(workers / cores, 1.0) + served, busy)
    else:
        seconds = costs.worker + served
        if workers > 1:
            sent = (rows + 2 * costs.nbytes) * (1 - 1 / workers) * max(workers / servers, 1.0)
            seconds += sent / links.bandwidth + 4 * links.latency  # ask, rows, gradients, weights
    return TableStep(workers, servers, seconds, workers * costs.samples / seconds)


def of_samples(
    parts: Sequence[IdSample],
    seen: int | None,
    whole: float | None,
    memory: float,
    checkpoint: str | os.PathLike[str] | None = None,
) -> TablePlan:
    """Return the plan of tables from samples of their ids; errors are those of `plan_tables`.

    Args:
        parts: one for each table.
        seen: samples of the data in them; None for the most look-ups of a table.
        whole: samples of the whole data; None for as many.
        memory: bytes of each server for rows.
        checkpoint: as of `plan_tables`.
    """
    if seen is None:
        seen = max((int(part.counts.sum()) for part in parts), default=0)
    if not seen or not any(len(part.counts) for part in parts):
        raise ConfigurationError(
            "a sample without ids: give one in which tables are asked for some"
        )
    if whole is not None:
        require_number("samples", whole)
    times = max((whole or seen) / seen, 1.0)
    if checkpoint is not None:
        removed = evictions_at(checkpoint, [part.table for part in parts])
        parts = [replace(part, evictions=removed.get(part.table.name)) for part in parts]
    return TablePlan(tuple(_forecast(part, times) for part in parts), memory, times)


def _forecast(part: IdSample, times: float) -> TableForecast:
    rows, table = distinct_ids(part.counts, times), part.table
    if table.capacity is not None:
        rows = rows.at_most(table.capacity)
    if table.num_embeddings is not None:
        rows = rows.at_most(table.num_embeddings)
    look_ups = round(int(part.counts.sum()) * times)
    return TableForecast(part, look_ups, rows, RowBytes.of(table))


def _row(each: TableForecast) -> list[str]:
    rows = each.rows
    return [
        each.sample.table.name,
        f"{int(each.sample.counts.sum()):,}",
        f"{len(each.sample.counts):,}",
        f"{rows.likely:,}",
        f"{rows.least:,} and {rows.most:,}",
        f"{each.bytes.values} + {each.bytes.slots} + {each.bytes.known}",
        size_in_words(each.memory),
        size_in_words(each.memory_with(each.wanted_places)),
        size_in_words(each.disk),
        _of_batch(each),
    ]


def _of_batch(each: TableForecast) -> str:
    if each.batch_bytes is None:
        return "-"
    pulled, pushed = map(size_in_words, each.batch_bytes)
    return f"{each.sample.batch_rows:,.0f} rows, {pulled} + {pushed}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
