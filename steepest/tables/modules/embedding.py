"""Modules whose weights are rows of tables: a forward pass pulls only the rows of its batch.

They are used as torch's of the same names. Rows are no parameters of the module: an optimizer of the
table's updates them with what a backward pass pushes.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steepest.errors import ConfigurationError
from steepest.tables.rows.checks import require_ids
from steepest.tables.rows.gradients import longest
from steepest.tables.rows.hashing import Distinct
from steepest.tables.rows.kernels import Floats, Int32s, Int64s, read_only
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.pooling import Bags
from steepest.tables.rows.replicated import TOUCHED, first_values, replicated, require_range
from steepest.tables.rows.table import Table, merged
from steepest.tables.rows.texts import text_ids
from steepest.validation import require_choice


class RowSource(Protocol):
    """Where modules get rows, and send gradients; `steepest.tables.rows.local.LocalRows` is one."""

    def place(self, table: Table) -> tuple[int, int]:
        """Return the number of a table's group, whose rows travel together, and its number there."""

    def distinct(self, group: int, tables: Int32s, ids: Int64s) -> Distinct:
        """Return the distinct ones of the (table, id) of a batch, (n,), in an order that suits `pull`."""

    def pull(self, group: int, tables: Int32s, ids: Int64s, training: bool) -> Floats:
        """Return the values of distinct rows, (m, dim); `training` where gradients will come."""

    def push(
        self,
        group: int,
        tables: Int32s,
        ids: Int64s,
        gradients: Floats,
        sightings: Int32s,
        lives: Int32s | None = None,
    ) -> None:
        """Take the summed gradients of distinct ids, (n, dim), and how often each was in the batch.

        Args:
            lives: (n,), see `steepest.tables.rows.gradients.RowGradients`.
        """


#: What modules look up: ids, or for tables with `hash` an array or lists of texts.
TextsOrIds = Tensor | np.ndarray[Any, Any] | Sequence[Any]
P = ParamSpec("P")
R = TypeVar("R")
Module = TypeVar("Module", bound="TableModule")
Source = TypeVar("Source", bound=RowSource)


class _PushedRows(torch.autograd.Function):
    """Rows whose gradient is pushed."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        values: Tensor,
        source: RowSource,
        group: int,
        keys: Distinct,
        lives: Int32s | None,
    ) -> Tensor:
        ctx.source, ctx.group, ctx.keys, ctx.lives = source, group, keys, lives
        return values.view_as(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        keys = ctx.keys
        gradients = np.ascontiguousarray(gradient.detach().cpu().numpy())
        lives = () if ctx.lives is None else (ctx.lives,)
        ctx.source.push(ctx.group, keys.tables, keys.ids, gradients, keys.counts, *lives)
        return None, None, None, None, None, None


class _Pool(torch.autograd.Function):
    """Sums or means of bags on the CPU; unlike torch's, its backward pass sorts no ids."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, bags: Bags) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.bags = bags
        return torch.from_numpy(bags.pool(rows.detach().numpy()))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (rows,) = ctx.saved_tensors
        upstream = np.ascontiguousarray(gradient.detach().numpy())
        of_rows = torch.from_numpy(ctx.bags.row_gradients(upstream, len(rows)))
        if not ctx.needs_input_grad[1]:
            return of_rows, None, None
        of_weights = ctx.bags.weight_gradients(upstream, rows.detach().numpy())
        return of_rows, torch.from_numpy(of_weights), None


class _Touched(torch.autograd.Function):
    """The rows of a replicated table; the gradient shows which of them a batch had, see `TOUCHED`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        zeros = ids[(gradient[ids] == 0).all(1)]
        if len(zeros):
            gradient = gradient.clone()
            gradient[zeros, 0] = TOUCHED
        return gradient, None


def left_to_python(function: Callable[P, R]) -> Callable[P, R]:
    """Have `torch.compile` call a function as it is; do not import its compiler for that."""

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        compiler = sys.modules.get("torch._dynamo")
        chosen = function if compiler is None else compiler.disable(function)
        return chosen(*arguments, **named)

    return call


class TableModule(nn.Module):
    """A module that needs rows; `connect` gives it their source."""

    def __init__(self, tables: Sequence[Table]) -> None:
        """Take the tables that it uses; ConfigurationError: two of one name differ, or one is no `Table`."""
        super().__init__()
        for table in tables:
            if not isinstance(table, Table):
                raise ConfigurationError(
                    f"table={table!r:.80}: give a Table, such as Table('users', 16)"
                )
        self.tables = merged(tables)
        self._source: RowSource | None = None
        self._trains = True
        self._places: dict[str, tuple[int, int]] = {}
        self._held: dict[str, str] = {}  # of replicated tables, the attribute that has the rows

    def connect(self, source: RowSource) -> None:
        """Use rows of a source from now on; ConfigurationError: it does not have these tables."""
        served = [table for table in self.tables if table.name not in self._held]
        self._places = {table.name: source.place(table) for table in served}
        self._source = source

    def hold(self, rows: Mapping[str, nn.Parameter]) -> None:
        """Use parameters, (num_embeddings, dim), as the rows of tables from now on, by their names."""
        for table in self.tables:
            if table.name in rows and table.name not in self._held:
                # names of tables may have what those of parameters may not
                name = f"rows_of_{re.sub(r'[^0-9A-Za-z_]', '_', table.name)}"
                while name in self._parameters:
                    name += "_"
                self.register_parameter(name, rows[table.name])
                self._held[table.name] = name

    def held(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are the rows of tables, by the tables' names."""
        parameters = {name: self._parameters[own] for name, own in self._held.items()}
        return {name: rows for name, rows in parameters.items() if rows is not None}

    def drop_held(self) -> None:
        """Do nothing: there are no such parameters."""
        for name in self._held.values():
            del self._parameters[name]
        self._held = {}

    def requires_grad_(self: Module, requires_grad: bool = True) -> Module:
        """Set whether what this module looks up trains rows; return this module.

        Without it no gradient of the rows is pushed, so that none is made, changed or counted; ids
        without a row have their first values. `requires_grad_` of a module around this one does not
        reach rows on servers, because they are no parameters.
        """
        self._trains = requires_grad
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles, which lack the source: a copy has to be connected anew."""
        return self.__dict__ | {"_source": None}

    def extra_repr(self) -> str:
        """Return the tables' names and dimensions."""
        return ", ".join(f"{table.name}: {table.dim}" for table in self.tables)

    def _look_up(
        self, wanted: Sequence[tuple[Table, Tensor]], lives: Sequence[int] | None = None
    ) -> list[_Found]:
        """Return rows of ids (n,) of tables, by group: pulled together, as are their gradients pushed.

        Args:
            lives: for each pair of a table and ids, the seconds for which the rows stay; None for the table's own.
        """
        trains = self._trains and torch.is_grad_enabled()
        look_ups = []
        places = {}
        for at, (table, ids) in enumerate(wanted):
            if table.name in self._held:
                look_ups.append(_Found([at], *self._look_up_held(table, ids, trains)))
            else:
                places[at] = self._place(table)
        for group in dict.fromkeys(group for group, _ in places.values()):
            assert self._source is not None
            of = [at for at, (other, _) in places.items() if other == group]
            sizes = [wanted[at][1].shape[0] for at in of]
            numbers = np.repeat(np.array([places[at][1] for at in of], np.int32), sizes)
            keys = self._source.distinct(group, numbers, _joined_ids([wanted[at] for at in of]))
            values = torch.from_numpy(self._source.pull(group, keys.tables, keys.ids, trains))
            values = values.to(wanted[of[0]][1].device)
            if trains:
                anchor = torch.empty(0, requires_grad=True)
                of_keys = None
                if lives is not None:
                    each = np.repeat(np.array([lives[at] for at in of], np.int32), sizes)
                    of_keys = longest(each, keys.inverse, len(keys.ids))
                values = cast(
                    Tensor,
                    _PushedRows.apply(anchor, values, self._source, group, keys, of_keys),  # type: ignore[no-untyped-call]
                )
            look_ups.append(_Found(of, values, torch.from_numpy(keys.inverse).to(values.device)))
        return look_ups

    def _place(self, table: Table) -> tuple[int, int]:
        """Return a table's `RowSource.place`; ConfigurationError: there is no source."""
        if self._source is None:
            raise ConfigurationError(
                f"{type(self).__name__}({self.extra_repr()}) has no rows: a trainer gives it some "
                "when the job begins; for a loop of your own call steepest.connect(module) before"
            )
        return self._places[table.name]

    def _look_up_held(self, table: Table, ids: Tensor, trains: bool) -> tuple[Tensor, Tensor]:
        """Return all rows of a replicated table, and of each id (n,) its row."""
        rows = cast(Tensor, getattr(self, self._held[table.name]))
        numbers = torch.from_numpy(np.array(_joined_ids([(table, ids)]))).to(rows.device)
        if not trains:
            return rows.detach(), numbers
        if table.optimizer.moves_by_itself:
            rows = cast(Tensor, _Touched.apply(rows, numbers))  # type: ignore[no-untyped-call]
        return rows, numbers


def _joined_ids(wanted: Sequence[tuple[Table, Tensor]]) -> Int64s:
    """Return the ids of several tables one after the other.

    Raises:
        ConfigurationError: a table's ids are no integers, or out of range; the message names the table.
    """
    parts = [np.asarray(ids.detach().cpu()) for _, ids in wanted]
    if all(part.dtype == np.int64 for part in parts):  # one check of all instead of many small ones
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not joined.size or joined.min() >= 0:
            _require_ranges(wanted, parts)
            return read_only(joined, np.int64)
    checked = [
        require_ids(f"ids of table {table.name!r}", part)
        for (table, _), part in zip(wanted, parts, strict=True)
    ]
    _require_ranges(wanted, checked)
    return np.concatenate(checked)


def _require_ranges(wanted: Sequence[tuple[Table, Tensor]], parts: Sequence[Int64s]) -> None:
    for (table, _), part in zip(wanted, parts, strict=True):
        require_range(table, part)


class _Found(NamedTuple):
    """What a look-up found in one group of tables."""

    of: list[int]  # which of the wanted (table, ids) are of the group
    rows: Tensor  # (m, dim), distinct
    inverse: Tensor  # of each id of these, one after the other, its row


def tables_of(module: nn.Module) -> tuple[Table, ...]:
    """Return the tables of a module's submodules, each once; ConfigurationError: two of one name differ."""
    return merged(table for part in _parts(module) for table in part.tables)


@overload
def connect(module: nn.Module) -> LocalRows: ...


@overload
def connect(module: nn.Module, source: Source) -> Source: ...


def connect(module: nn.Module, source: Any = None) -> Any:
    """Connect a module's embeddings to rows, for a loop of one's own in one process.

    `TorchModel` does so by itself.

    Args:
        module: with embeddings among its submodules.
        source: of rows; by default new ones of all the module's tables, in this process.

    Returns:
        The source. Call `step()` of `steepest.tables.LocalRows` where an optimizer's is called.

    Raises:
        ConfigurationError: the source does not have the module's tables, or the module has none.

    Example:
        >>> import torch
        >>> from steepest import Embedding, Table, connect
        >>> users = Embedding(Table("users", 4))
        >>> rows = connect(users)
        >>> users(torch.tensor([7, 2**40])).sum().backward()
        >>> rows.step()
        1
    """
    if not isinstance(module, nn.Module) or next(_parts(module), None) is None:
        raise ConfigurationError(
            f"module={type(module).__name__} has no embedding of steepest among its submodules: "
            "give a torch.nn.Module that has"
        )
    rows = LocalRows(tables_of(module)) if source is None else source
    for part in _parts(module):
        part.connect(rows)
    return rows


def is_connected(module: nn.Module) -> bool:
    """Return whether the embeddings of a module have rows to use."""
    return all(
        part._source is not None or len(part._held) == len(part.tables) for part in _parts(module)
    )


def hold_replicated(module: nn.Module, seed: int) -> tuple[Table, ...]:
    """Give a module's embeddings the rows of replicated tables as parameters; return these tables.

    Args:
        module: with embeddings among its submodules.
        seed: of first values.
    """
    tables = replicated(tables_of(module))
    held = held_rows(module)
    rows = {
        table.name: held[table.name]
        if table.name in held
        else nn.Parameter(torch.from_numpy(first_values(table, seed)))
        for table in tables
    }
    for part in _parts(module):
        part.hold(rows)
    return tables


def held_rows(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are the rows of replicated tables, by the tables' names."""
    return {name: rows for part in _parts(module) for name, rows in part.held().items()}


@contextlib.contextmanager
def without_held_rows(module: nn.Module) -> Iterator[None]:
    """Take rows of replicated tables out of a module's parameters, in a block."""
    parts = [(part, part.held()) for part in _parts(module)]
    for part, _ in parts:
        part.drop_held()
    try:
        yield
    finally:
        for part, rows in parts:
            part.hold(rows)


def _parts(module: nn.Module) -> Iterator[TableModule]:
    return (part for part in module.modules() if isinstance(part, TableModule))


class Embedding(TableModule):
    """`torch.nn.Embedding` with rows of a table, of ids of any size.

    Args:
        table: its rows.
        padding_idx: an id whose embedding is zero and is never trained.

    Attributes:
        embedding_dim: the table's dimension.
    """

    def __init__(self, table: Table, *, padding_idx: int | None = None) -> None:
        super().__init__([table])
        self.embedding_dim = table.dim
        self.padding_idx = require_padding(table, padding_idx)

    @left_to_python
    def forward(self, ids: TextsOrIds) -> Tensor:
        """Return the embeddings of ids, or texts, of any shape: their shape, and the table's dimension."""
        (table,) = self.tables
        ids = _require_tensor(table, ids)
        flat = ids.reshape(-1)
        kept = None if self.padding_idx is None else flat != self.padding_idx
        ((_, rows, inverse),) = self._look_up([(table, flat if kept is None else flat[kept])])
        values = embeddings_apart(rows, inverse)
        if kept is not None:
            values = values.new_zeros(len(flat), table.dim).index_put((kept,), values)
        return values.view(*ids.shape, table.dim)


class EmbeddingBag(TableModule):
    """`torch.nn.EmbeddingBag` with rows of a table, of ids of any size.

    Args:
        table: its rows.
        mode: "mean", "sum" or "max" of a bag's embeddings; an empty bag's are zeros.
        padding_idx: an id that is left out of bags.
        include_last_offset: the last of `offsets` is the number of ids.

    Attributes:
        embedding_dim: the table's dimension.
    """

    def __init__(
        self,
        table: Table,
        *,
        mode: str = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> None:
        super().__init__([table])
        require_choice("mode", mode, ("sum", "mean", "max"))
        self.mode = mode
        self.embedding_dim = table.dim
        self.padding_idx = require_padding(table, padding_idx)
        self.include_last_offset = include_last_offset

    @left_to_python
    def forward(
        self,
        ids: TextsOrIds,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the embeddings of bags, (B, dim).

        Args:
            ids: (B, N), bags of one size; or (n,) with offsets. Or texts.
            offsets: (B,), where each bag begins; or (B + 1,) with `include_last_offset`.
            per_sample_weights: of the shape of ids, with mode "sum".

        Raises:
            ConfigurationError: shapes do not fit.
        """
        (table,) = self.tables
        ids = _require_tensor(table, ids)
        flat, bounds = _bags(ids, offsets, self.include_last_offset)
        weights = per_sample_weights
        if weights is not None:
            if self.mode != "sum" or weights.shape != ids.shape:
                raise ConfigurationError(
                    f"per_sample_weights of shape {tuple(weights.shape)} for ids of shape "
                    f"{tuple(ids.shape)} in mode {self.mode!r}: give one for each id, in mode 'sum'"
                )
            weights = weights.reshape(-1)
        if self.padding_idx is not None:
            kept = flat != self.padding_idx
            before = F.pad(kept.cumsum(0), (1, 0))
            flat, bounds = flat[kept], before[bounds]
            weights = None if weights is None else weights[kept]
        ((_, rows, inverse),) = self._look_up([(table, flat)])
        return pooled_rows(rows, inverse, bounds, self.mode, weights)


def require_padding(table: Table, padding_idx: Any) -> int | None:
    """Return an id that is padding, or None; ConfigurationError: it is no integer."""
    known = padding_idx is None or isinstance(padding_idx, Integral)
    if not known or isinstance(padding_idx, bool):
        raise ConfigurationError(
            f"padding_idx={padding_idx!r:.80} of table {table.name!r}: give an integer or None"
        )
    return cast("int | None", padding_idx)


def _require_tensor(table: Table, ids: Any) -> Tensor:
    """Return ids, or those of texts, as one tensor; ConfigurationError: they are none, or a nested one."""
    if table.hash is not None and not isinstance(ids, Tensor):
        return torch.from_numpy(text_ids(ids, table.hash))
    if not isinstance(ids, Tensor):
        raise ConfigurationError(
            f"ids of table {table.name!r} are a {type(ids).__name__}: give a tensor of integers, or "
            "Table(hash='blake2b') texts"
        )
    if ids.is_nested:
        raise ConfigurationError(
            f"ids of table {table.name!r} are a nested tensor: give it to an EmbeddingCollection, "
            "or its values() with offsets() to an EmbeddingBag"
        )
    return ids


def embeddings_apart(rows: Tensor, inverse: Tensor) -> Tensor:
    """Return the embedding of each id, (n, dim): bags of one."""
    return pooled_rows(rows, inverse, evenly(len(inverse), 1, rows.device), "sum", None)


def pooled_rows(
    rows: Tensor, inverse: Tensor, bounds: Tensor, mode: str, weights: Tensor | None
) -> Tensor:
    """Return the embeddings of bags, (B, dim), of rows (m, dim), by mode "sum", "mean" or "max".

    Args:
        inverse: (n,), of each id its row.
        bounds: (B + 1,), where each bag begins, and the end.
        weights: (n,), or None.
    """
    if mode != "max" and rows.device.type == "cpu":
        scale = rows.new_empty(0) if weights is None else weights
        if scale.dtype != rows.dtype:
            raise ConfigurationError(
                f"per_sample_weights of {scale.dtype}: give them in the dtype of the table, {rows.dtype}"
            )
        bags = Bags(
            inverse.numpy(), bounds.detach().numpy(), scale.detach().numpy(), mode == "mean"
        )
        return cast(Tensor, _Pool.apply(rows, scale, bags))  # type: ignore[no-untyped-call]
    return F.embedding_bag(
        inverse,
        rows,
        bounds.to(inverse.dtype),
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=True,
    )


def _bags(ids: Tensor, offsets: Tensor | None, includes_last: bool) -> tuple[Tensor, Tensor]:
    """Return ids (n,), and where each bag begins, with the end, (B + 1,)."""
    if ids.dim() == 2 and offsets is None:
        count, size = ids.shape
        return ids.reshape(-1), evenly(count, size, ids.device)
    if ids.dim() != 1 or offsets is None or offsets.dim() != 1:
        shape = "none" if offsets is None else f"of shape {tuple(offsets.shape)}"
        raise ConfigurationError(
            f"ids of shape {tuple(ids.shape)}, offsets {shape}: give ids (B, N), or ids (n,) and the "
            "offsets (B,) at which bags begin"
        )
    bounds = offsets if includes_last else F.pad(offsets, (0, 1), value=len(ids))
    ends = bounds.detach().cpu().tolist() if len(bounds) else [-1]
    if ends[0] != 0 or ends[-1] != len(ids) or bool((bounds[1:] < bounds[:-1]).any()):
        wanted = f"from 0 on, ascending, at most {len(ids)}"
        raise ConfigurationError(
            f"offsets={offsets.tolist()[:8]!r:.80} of {len(ids)} ids: give numbers {wanted}"
            + (", the last of them that" if includes_last else "")
        )
    return ids, bounds


@functools.lru_cache(maxsize=16)
def evenly(count: int, size: int, device: torch.device) -> Tensor:
    """Return where bags of one size begin, and the end, (count + 1,); the same tensor each time."""
    return torch.arange(count + 1, device=device) * size
