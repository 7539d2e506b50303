"""What servers count of embedding tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from steepest.core.engine.server import Server

#: By table: the number of rows, as "rows", and of events, see `TableShard.counts`.
Counts = dict[str, dict[str, int]]


def table_counts(servers: Iterable[Server]) -> Counts:
    """Return the counts of all shards that some servers answer for; copies are not counted."""
    counts = []
    for server in servers:
        for held in (server.chunks[index] for index in sorted(server.answers_for)):
            counts.append(held.counts())
    return added_counts(counts)


def added_counts(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> Counts:
    """Return the sums of several counts."""
    total: dict[str, Counter[str]] = {}
    for part in parts:
        for table, counts in part.items():
            total.setdefault(table, Counter()).update(counts)
    return {table: dict(counts) for table, counts in total.items()}
