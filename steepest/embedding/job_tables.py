"""The embedding tables of a job; nothing of tables is imported for a job that has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steepest.core.engine.job import Job

if TYPE_CHECKING:
    from steepest.tables.dealing import Dealing


def dealing_of(job: Job) -> Dealing | None:
    """Return how a job's tables are dealt into chunks; None without tables."""
    if job.stores is None:
        return None
    from steepest.embedding.table_stores import TableStores

    return job.stores.dealing if isinstance(job.stores, TableStores) else None


def delays_rows(job: Job) -> bool:
    """Return whether workers push the gradients of rows a step late, see `DelayedRows`."""
    return job.stores is not None and (job.strategy.table_staleness or 0) > 1
