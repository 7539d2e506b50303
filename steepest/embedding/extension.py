"""How rows of embedding tables attach to the workers of a job."""

from __future__ import annotations

from steepest.engine.exchange import Exchange
from steepest.engine.extension import Extension
from steepest.engine.job import Job
from steepest.messages.message import Send


class EmbeddingRows(Extension):
    """An exchange with rows, where models have tables; what only these need is imported then."""

    def exchange(self, job: Job, worker: int, exchange: Exchange, send: Send) -> Exchange:
        """Return an exchange that pulls and pushes rows, too."""
        if job.tables is None:
            return exchange
        from steepest.embedding.companion import RowCompanion
        from steepest.embedding.exchange import ExchangeWithRows
        from steepest.embedding.row_exchange import RowExchange
        from steepest.tables.compilation import compile_kernels

        compile_kernels(job.tables.tables)  # before the process joins the job
        rows = RowExchange(worker, job.tables, job.holders, send)
        shares = job.strategy.table_staleness
        if shares is not None and job.delays_rows:  # one of the steps goes to the way back
            rows.delayed.delays, shares = True, shares - 1
        return ExchangeWithRows(exchange, rows, RowCompanion(rows, shares, job.shares))
