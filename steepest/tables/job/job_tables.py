"""The embedding tables of a job; nothing of tables is imported for a job that has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steepest.core.engine.job import Job
from steepest.core.protocol.commit_rules import CommitAll
from steepest.core.strategies.strategy import Strategy

if TYPE_CHECKING:
    from steepest.tables.rows.dealing import Dealing


#: gradients of rows that are not pushed yet
UNPUSHED = "rows"


def dealing_of(job: Job) -> Dealing | None:
    """Return how a job's tables are dealt into chunks; None without tables."""
    if job.stores is None:
        return None
    from steepest.tables.job.table_stores import TableStores

    return job.stores.dealing if isinstance(job.stores, TableStores) else None


def staleness_of(strategy: Strategy) -> int | None:
    """Return by how many updates rows may be older than the weights; None to ask for them in their own step."""
    staleness: int | None = getattr(strategy, "table_staleness", None)
    if staleness is None and not strategy.local and isinstance(strategy.rule, CommitAll):
        return 0  # what the next step computes is known, and from which weights
    return staleness


def delays_rows(job: Job) -> bool:
    """Return whether workers push the gradients of rows a step late, see `DelayedRows`."""
    return job.stores is not None and (staleness_of(job.strategy) or 0) > 1
