"""A table as a user describes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError
from steepest.tables.rows.admission import CBFFilter, CounterFilter, Filter, ProbabilityFilter
from steepest.tables.rows.checks import require_ids
from steepest.tables.rows.eviction import LFU, LRU, Evict, GlobalStepEvict, L2WeightEvict, Policy
from steepest.tables.rows.hashing import salt_of
from steepest.tables.rows.initial import Initial, Normal
from steepest.tables.rows.lives import seconds_of
from steepest.tables.rows.row_formats import DTYPES, RowFormat
from steepest.tables.rows.row_optimizers import Adagrad, RowOptimizer, require_optimizer
from steepest.tables.rows.spread import Spread, parts_of
from steepest.tables.rows.texts import HASHES, text_ids
from steepest.tables.rows.tiered_rows import bytes_of, rows_in
from steepest.validation import require_count

_MOST_TABLES = 2**15

_GRADIENT_DTYPES = ("bfloat16", "float16", "int8")


@dataclass(frozen=True)
class Table:
    """A table of rows by id; modules with the same description share its rows.

    Attributes:
        name: of the table; what a row begins with depends on it.
        dim: values in a row.
        optimizer: how pushes change rows.
        initial: how rows begin.
        dtype: in which values lie and travel: "float32", "float64", "bfloat16", "float16", or "int8" with a scale
            for each row. Pushes compute in float64 for "float64", else in float32, see
            `steepest.tables.rows.row_formats`; modules get that, and so are gradients.
        slots_dtype: "bfloat16" for the optimizer's slots, rounded as values are; without it, the one in which
            pushes compute.
        capacity: rows that there are at most, over all shards; without it, as many as ids.
        eviction: which row goes when the table is full; without it, a push to a full table is refused.
        admission: which ids get a row; without it, all.
        evict: the rows that `TableShard.evict` removes.
        pinned: ids, or texts of a table with a `hash`, that get a row with their first push, whatever `admission` says,
            and keep it: a place of the capacity is theirs, and no eviction and no `ttl` removes them. Kept as a tuple
            of distinct ids.
        ttl: how long a row stays that no push has, by the coordinator's clock: "90s", "15m", "12h", "7d", "2w",
            or seconds. Its end is seen within a sixteenth of that, or a second.
        directory: of each server's node, in which rows lie that were not used lately; without it, all are in
            memory. The table is a group by itself then.
        memory_rows: rows that are in memory at most, over all shards, where there is a directory.
        memory_bytes: the same in bytes of servers' memory, over all shards: for values and slots of the rows that
            are in memory, and which these are. What is known of every row, on disk too (id, index, version, count
            and place: 58 bytes), is beside it.
        trainable: False for a table whose rows stay as they are: a checkpoint's, say, or first values.
        num_embeddings: ids are from 0 to this number less 1, others are refused; without it, any integers of 63
            bits are.
        replicate: True to have every worker hold all rows, `num_embeddings` of them, like its dense weights,
            so that look-ups ask no server and updates travel with those of the dense layers; False to have
            them on servers. None to choose by size, see `steepest.tables.rows.replicated`; `needs_servers` says why
            a table cannot be replicated.
        gradient_dtype: in which gradients of rows travel to servers, rounded by chance: "bfloat16", "float16" (which
            cuts those beyond 65,504 to that), or "int8" with a scale for each row; None for as they are computed.
        hash: "blake2b" for a table whose ids are texts, of which modules make ids by that hash, see
            `steepest.tables.text_ids`; a checkpoint names it. Tensors of integers are taken for hashes.
        default: the values of an id that has no row and gets none with the present batch: in evaluations,
            in exports, and in training until `admission` lets the id in, or where the table is not
            trainable. Without it such ids have the values with which their rows would begin.

    Example:
        >>> from steepest.tables import Adagrad, Table, Uniform
        >>> users = Table("users", 16, optimizer=Adagrad(lr=0.05), initial=Uniform(-0.1, 0.1))
    """

    name: str
    dim: int
    _: KW_ONLY
    optimizer: RowOptimizer = field(default_factory=Adagrad)
    initial: Initial = field(default_factory=Normal)
    dtype: str = "float32"
    slots_dtype: str | None = None
    capacity: int | None = None
    eviction: Policy | None = None
    admission: Filter | None = None
    evict: tuple[Evict, ...] = ()
    pinned: npt.ArrayLike = ()
    trainable: bool = True
    default: Initial | None = None
    ttl: str | int | None = None
    directory: str | None = None
    memory_rows: int | None = None
    memory_bytes: int | None = None
    num_embeddings: int | None = None
    replicate: bool | None = None
    gradient_dtype: str | None = None
    hash: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"name={self.name!r}: give a table a name")
        require_count(f"dim of table {self.name!r}", self.dim)
        require_optimizer(self.name, self.optimizer)
        self._require("initial", Initial, "Normal(), Uniform() or another of steepest.tables")
        self._require("default", (Initial, type(None)), "Zeros(), Constant() or None, say")
        self._require("eviction", (LRU, LFU, type(None)), "LRU(), LFU() or None")
        filters = (CounterFilter, CBFFilter, ProbabilityFilter, type(None))
        self._require("admission", filters, "CounterFilter(), another of steepest.tables, or None")
        self._require_dtypes()
        self._require("trainable", bool, "True or False")
        if self.capacity is not None:
            require_count(f"capacity of table {self.name!r}", self.capacity)
        elif self.eviction is not None:
            raise ConfigurationError(
                f"eviction={self.eviction} of table {self.name!r} without capacity: give the rows that "
                "it may have"
            )
        if self.ttl is not None:
            seconds_of(f"ttl of table {self.name!r}", self.ttl)
        self._require("directory", (str, type(None)), "the name of a directory, or None")
        self._require_memory()
        self._require_range()
        self._require_pinned()
        kinds: list[type] = [object]
        if isinstance(self.evict, tuple):
            kinds = [type(way) for way in self.evict]
        known: set[type] = {GlobalStepEvict, L2WeightEvict}
        if not set(kinds) <= known or len(set(kinds)) < len(kinds):
            raise ConfigurationError(
                f"evict={self.evict!r:.80} of table {self.name!r}: give a tuple of at most one "
                "GlobalStepEvict and one L2WeightEvict"
            )

    @property
    def needs_servers(self) -> str:
        """Why workers cannot hold the table, in words, or ""."""
        lives = "capacity", "eviction", "admission", "ttl", "default", "directory"
        plain = [name for name in lives if getattr(self, name) is not None]
        if self.num_embeddings is None:
            return "has no num_embeddings to say how many rows there are"
        if plain or self.evict:
            return f"has {', '.join(plain) or 'evict'}, for rows that come and go"
        if not self.trainable:
            return "is not trainable"
        if self.gradient_dtype is not None:
            return (
                f"has gradient_dtype={self.gradient_dtype!r}, for what is pushed to servers of rows"
            )
        if self.dtype not in ("float32", "float64") or self.slots_dtype is not None:
            return f"has dtype={self.dtype!r} and slots_dtype={self.slots_dtype!r}: weights are of float32 or float64"
        return ""

    @property
    def most_rows(self) -> int | None:
        """How many rows there are at most, by `capacity` and `num_embeddings`; None without either."""
        known = [most for most in (self.capacity, self.num_embeddings) if most is not None]
        return min(known, default=None)

    @property
    def life(self) -> int:
        """The seconds for which a row stays that no push has; 0 for ever."""
        return 0 if self.ttl is None else seconds_of("ttl", self.ttl)

    @property
    def form(self) -> RowFormat:
        """How rows lie and travel; its `dtype` is that in which pushes compute, and modules get values."""
        slots = self.optimizer.slots(self.dim)
        return RowFormat(self.dim, slots, self.dtype, self.slots_dtype)

    def _require_range(self) -> None:
        if self.num_embeddings is not None:
            require_count(f"num_embeddings of table {self.name!r}", self.num_embeddings)
        self._require("replicate", (bool, type(None)), "True, False, or None to choose by size")
        if self.replicate and (reason := self.needs_servers):
            raise ConfigurationError(
                f"replicate=True of table {self.name!r}, which {reason}: leave replicate out, or that"
            )

        if self.hash is None:
            return
        if self.hash not in HASHES:
            raise ConfigurationError(
                f"hash={self.hash!r:.80} of table {self.name!r}: give one of {', '.join(map(repr, HASHES))}, or None"
            )
        if self.num_embeddings is not None:
            raise ConfigurationError(
                f"hash={self.hash!r} of table {self.name!r} with num_embeddings={self.num_embeddings}: leave that out, "
                "because hashes are any integers of 63 bits"
            )

    def _require_pinned(self) -> None:
        pinned = np.asarray(self.pinned)
        if pinned.dtype.kind == "U" and self.hash is not None:
            pinned = text_ids(pinned, self.hash)
        ids = np.unique(require_ids(f"pinned ids of table {self.name!r}", pinned)).tolist()
        if self.capacity is not None and len(ids) > self.capacity:
            raise ConfigurationError(
                f"table {self.name!r} has {len(ids)} pinned ids and capacity={self.capacity}: raise it, or pin fewer"
            )
        if self.num_embeddings is not None and ids and ids[-1] >= self.num_embeddings:
            raise ConfigurationError(
                f"table {self.name!r} has num_embeddings={self.num_embeddings} and pins id {ids[-1]}: pin lower ids"
            )
        object.__setattr__(self, "pinned", tuple(ids))

    def _require_dtypes(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigurationError(
                f"dtype={self.dtype!r} of table {self.name!r}: give one of {', '.join(map(repr, DTYPES))}"
            )
        if self.gradient_dtype not in (None, *_GRADIENT_DTYPES) or (
            self.gradient_dtype is not None and self.dtype == "float64"
        ):
            raise ConfigurationError(
                f"gradient_dtype={self.gradient_dtype!r:.80} of table {self.name!r} of {self.dtype}: give one of "
                f"{', '.join(map(repr, _GRADIENT_DTYPES))}, or None; a float64 table's gradients travel as they are"
            )
        if self.slots_dtype not in (None, "bfloat16") or (
            self.slots_dtype is not None and self.dtype == "float64"
        ):
            raise ConfigurationError(
                f"slots_dtype={self.slots_dtype!r} of table {self.name!r} of {self.dtype}: give 'bfloat16', "
                "or None for float32; a float64 table's are float64"
            )

    def _require_memory(self) -> None:
        memory = {"memory_rows": self.memory_rows, "memory_bytes": self.memory_bytes}
        bounds = {name: bound for name, bound in memory.items() if bound is not None}
        for name, bound in bounds.items():
            require_count(f"{name} of table {self.name!r}", bound)
        if len(bounds) != bool(self.directory):
            said = " and ".join(f"{name}={bound}" for name, bound in bounds.items())
            raise ConfigurationError(
                f"directory={self.directory!r} and {said or 'no bound of memory'} of table {self.name!r}: give both, "
                "the directory for rows that are not in memory, and one of memory_rows and memory_bytes, or neither"
            )
        if self.memory_bytes is not None:
            self.rows_in(self.memory_bytes)

    def rows_in(self, memory_bytes: int) -> int:
        """Return how many rows are in memory where a shard has so many bytes for them; ConfigurationError: too few."""
        rows, least = rows_in(memory_bytes, self.form)
        if rows < least:
            raise ConfigurationError(
                f"memory_bytes={self.memory_bytes} of table {self.name!r}, of which a shard has {memory_bytes:,}: "
                f"give {bytes_of(least, self.form):,} or more for each of its shards, see "
                "TorchModel(table_shards=), for rows of which each takes "
                f"{self.form.row_bytes} bytes and some pass through memory"
            )
        return rows

    def _require(self, name: str, kinds: type | tuple[type, ...], wanted: str) -> None:
        if not isinstance(getattr(self, name), kinds):
            raise ConfigurationError(
                f"{name}={getattr(self, name)!r:.80} of table {self.name!r}: give {wanted}"
            )


#: What the tables of a group have in common.
_Kind = tuple[int, str, "str | None", RowOptimizer, "str | None", "str | None"]


def _kind(table: Table) -> _Kind:
    alone = None if table.directory is None else table.name
    sent = table.gradient_dtype
    return table.dim, table.dtype, table.slots_dtype, table.optimizer, sent, alone


def require_group(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Return tables that a shard can hold together; ConfigurationError: none, two of one name, or ones that differ."""
    group = tuple(tables)
    if not 0 < len(group) <= _MOST_TABLES:
        raise ConfigurationError(f"{len(group)} tables: give 1 to {_MOST_TABLES}")
    if len({table.name for table in group}) < len(group):
        raise ConfigurationError(
            f"two tables of one name among {', '.join(table.name for table in group)}: name each otherwise"
        )
    if len({_kind(table) for table in group}) > 1:
        raise ConfigurationError(
            "tables of one group have one dimension, dtype, optimizer and gradient_dtype: split them by `groups`"
        )
    return group


def merged(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Return each table once, in order of first sight; ConfigurationError: two of one name differ."""
    found: dict[str, Table] = {}
    for table in tables:
        other = found.setdefault(table.name, table)
        for difference in (known.name for known in fields(table)):
            ours, theirs = getattr(other, difference), getattr(table, difference)
            if ours != theirs:
                raise ConfigurationError(
                    f"table {table.name!r} has {difference}={ours!r:.200} and {difference}={theirs!r:.200}: "
                    "describe it once, or name the other table otherwise"
                )
    return tuple(found.values())


def groups(tables: Iterable[Table]) -> list[tuple[Table, ...]]:
    """Return tables by dimension, dtype and optimizer, in order of first sight.

    Raises:
        ConfigurationError: two of a name differ.
    """
    found: dict[_Kind, list[Table]] = {}
    for table in merged(tables):
        found.setdefault(_kind(table), []).append(table)
    return [tuple(group) for group in found.values()]


def disk_of(group: Sequence[Table], spread: Spread, shard: int) -> tuple[str, int] | None:
    """Return the directory of a shard's rows that are not in memory, and how many are; None where all are.

    Raises:
        ConfigurationError: its share of the table's `memory_bytes` is too small.
    """
    one = group[0]
    if one.directory is None:
        return None
    if one.memory_bytes is not None:
        return one.directory, one.rows_in(one.memory_bytes // int(spread.parts[0]))
    rows = spread.shares(shard, np.array([one.memory_rows], np.int64))
    return one.directory, int(rows[0])


def shards_for(tables: Sequence[Table], most: int) -> int:
    """Return into how many shards each group of some tables is dealt: `most`, or as few as have all their parts."""
    return max(
        min(most, sum(parts_of(table.most_rows, most) for table in group))
        for group in groups(tables)
    )


def spread_of(group: Sequence[Table], num_shards: int) -> Spread:
    """Return how the keys of a group of tables are spread over its shards."""
    begin = salt_of(group[0].name, 0)  # so that small tables of other groups are in other shards
    return Spread.of([table.most_rows for table in group], begin, num_shards)
