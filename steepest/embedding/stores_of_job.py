"""The stores of a job's embedding tables; nothing of tables is imported for a job that has none."""

from __future__ import annotations

from steepest.engine.job import Job
from steepest.engine.stores import Stores


def stores_of(job: Job) -> Stores | None:
    """Return what makes the stores of a job's tables, once their kernels are compiled; None without tables."""
    if job.tables is None:
        return None
    from steepest.embedding.table_stores import TableStores
    from steepest.tables.compilation import compile_kernels

    compile_kernels(job.tables.tables)
    return TableStores(job.tables)
