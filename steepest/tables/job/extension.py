"""How embedding tables attach to a job; nothing of tables is imported for models that have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from steepest.core.engine.exchange import Exchange
from steepest.core.engine.extension import Extension
from steepest.core.engine.job import Job
from steepest.core.engine.replicas import Replicas
from steepest.core.engine.stores import OpaqueParts, Stores
from steepest.core.messages.message import Send
from steepest.core.messages.permissions import Line
from steepest.core.messages.schema import Body
from steepest.core.models.protocol import Model
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import ConfigurationError
from steepest.tables.job.job_tables import dealing_of, delays_rows, staleness_of
from steepest.tables.job.row_messages import LINES
from steepest.tables.modules.followed_rates import require_followed

if TYPE_CHECKING:
    from steepest.tables.rows.table import Table


class EmbeddingTables(Extension):
    """Rows of the tables that a model has as `tables`, see `steepest.core.models.protocol.Model`."""

    def opaque(self, model: Model) -> OpaqueParts | None:
        """Return a model's tables."""
        tables = tuple(getattr(model, "tables", ()))
        return ModelTables(tables) if tables else None

    def exchange(
        self, job: Job, worker: int, replicas: Replicas, exchange: Exchange, send: Send
    ) -> Exchange:
        """Return an exchange that pulls and pushes rows, too."""
        if (dealing := dealing_of(job)) is None:
            return exchange
        from steepest.tables.job.companion import RowCompanion
        from steepest.tables.job.exchange import ExchangeWithRows
        from steepest.tables.job.row_exchange import RowExchange
        from steepest.tables.rows.compilation import compile_kernels

        compile_kernels(dealing.tables)  # before the process joins the job
        rows = RowExchange(worker, dealing, job.topology, send)
        shares = staleness_of(job.strategy)
        if shares is not None and delays_rows(job):  # one of the steps goes to the way back
            rows.delayed.delays, shares = True, shares - 1
        return ExchangeWithRows(exchange, rows, RowCompanion(rows, shares, job.shares))


@dataclass(frozen=True)
class ModelTables:
    """The embedding tables of which models use rows, see `steepest.core.engine.stores.OpaqueParts`."""

    tables: tuple[Table, ...]

    @property
    def lines(self) -> Mapping[Line, type[Body]]:
        """The messages about rows."""
        return LINES

    def require(self, strategy: Strategy, spec: OptimizerSpec) -> None:
        """Check that a strategy allows tables, and that the learning rates that they follow exist."""
        if strategy.in_driver:
            raise ConfigurationError(
                f"embedding tables under the strategy {strategy.kind!r}: their rows are pulled "
                "from servers in each step; give strategy='ps', 'allreduce', 'local', 'async' or "
                "'ssp'"
            )
        if strategy.delay or strategy.blend:
            raise ConfigurationError(
                f"delay={strategy.delay} and blend={strategy.blend} with embedding tables: their rows are the "
                "servers' alone, so that a worker has none of its own to go on with; leave both out (fragments= lets "
                "a link carry less at a time), or have tables held by every worker: num_embeddings= and replicate=True"
            )
        for table in self.tables:
            _require_followed(table, strategy, spec)

    def difference(self, other: OpaqueParts) -> str | None:
        """Describe how the tables of another replica differ; None if they agree."""
        assert isinstance(other, ModelTables)
        return _difference(self.tables, other.tables)

    def keeps_state(self, strategy: Strategy) -> bool:
        """Return whether workers push the gradients of rows a step late, see `DelayedRows`."""
        return (staleness_of(strategy) or 0) > 1

    def stores(self, layout: ParameterLayout, seed: int) -> Stores:
        """Return the maker of a job's shards."""
        from steepest.tables.job.table_stores import TableStores
        from steepest.tables.rows.dealing import Dealing

        shards = layout.opaque_chunks
        dealing = Dealing(self.tables, 1, seed, shards[0])
        return TableStores(replace(dealing, num_shards=len(shards) // len(dealing.groups)))


def _require_followed(table: Table, strategy: Strategy, spec: OptimizerSpec) -> None:
    """Check that a table follows a learning rate that servers know, if any; ConfigurationError otherwise."""
    require_followed(table, spec)
    if strategy.local and (group := table.optimizer.follows) is not None:
        raise ConfigurationError(
            f"follows={group} of table {table.name!r} under the strategy {strategy.kind!r}: workers have the schedule "
            "there, and servers update rows; leave it out"
        )


def _difference(first: Sequence[Table], other: Sequence[Table]) -> str | None:
    """Describe how tables differ from others; None if they agree."""
    ours, theirs = ([table.name for table in tables] for tables in (first, other))
    if ours != theirs:
        return f"the embedding tables {ours}, the other has {theirs}"
    for a, b in zip(first, other, strict=True):
        for name in (each.name for each in fields(a)):
            if getattr(a, name) != getattr(b, name):
                own, others = getattr(a, name), getattr(b, name)
                return f"table {a.name!r} with {name}={own!r:.200}, the other has {others!r:.200}"
    return None
