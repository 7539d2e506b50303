"""Rows of embedding tables in a user's own loop: the worker's thread pulls them; gradients wait for the step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from steepest.core.engine.generators import HeldGenerators

if TYPE_CHECKING:
    from steepest.tables.modules.embedding import RowSource
    from steepest.tables.rows.hashing import Distinct
    from steepest.tables.rows.kernels import Floats, Int32s, Int64s
    from steepest.tables.rows.table import Table

_SMALL = 1e-6  # that torch's clipping adds to a norm


class _SentRows(NamedTuple):
    """The arguments of `RowSource.push`."""

    group: int
    tables: Int32s
    ids: Int64s
    gradients: Floats
    sightings: Int32s
    lives: Int32s | None

    def times(self, factor: float) -> _SentRows:
        """Return the same with its gradients multiplied."""
        return self._replace(gradients=self.gradients * self.gradients.dtype.type(factor))


class Errand:
    """What the user's thread has the worker's thread do, which knows how to receive messages.

    Args:
        work: returns what the user's function waits for; again, where it has raised because a step was given up.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._held: HeldGenerators | None = None  # as they were when it was done in vain

    def run(self) -> Any:
        """Do it; generators are as before afterwards."""
        try:
            result = self._work()
        except BaseException:
            self._held = self._held or HeldGenerators()
            raise
        if self._held is not None:
            self._held.go_on()
        return result


class LoopRows:
    """A source of rows for one loop, see `steepest.tables.modules.embedding.RowSource`.

    Gradients of several backward passes before a step are pushed at that step, as those of parameters are; with
    `zero_grad()` they are gone.

    Args:
        ask: gives an errand to the worker's thread, and returns what comes of it.

    Attributes:
        source: of which they are; None before `use`.
    """

    def __init__(self, ask: Callable[[Errand], Any]) -> None:
        self._ask = ask
        self.source: Any = None
        self._kept: list[_SentRows] = []  # of the step in progress
        self._sent: list[_SentRows] = []  # of the last step
        self._held: Sequence[torch.nn.Parameter] = ()

    def use(self, source: RowSource) -> LoopRows:
        """Use another source from now on; return this one."""
        self.source = source
        return self

    def clear(self) -> None:
        """Forget the gradients since the last step."""
        self._kept = []
        for rows in self._held:
            rows.grad = None

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients since the last step."""
        return bool(self._kept)

    def gradients(self) -> list[torch.Tensor]:
        """Return the sum of the gradients of each group's rows since the last step."""
        from steepest.tables.rows.gradients import RowGradients, added

        by_group: dict[int, list[RowGradients]] = {}
        for each in self._kept:
            own = RowGradients(each.tables, each.ids, each.gradients, each.sightings)
            by_group.setdefault(each.group, []).append(own)
        return [torch.from_numpy(added(each).gradients) for each in by_group.values()]

    def rescale(self, factor: float) -> None:
        """Multiply the gradients since the last step by a factor."""
        self._kept = [each.times(factor) for each in self._kept]
        for rows in self._held:
            if rows.grad is not None:
                rows.grad.mul_(factor)

    def send(self, factor: float = 1.0, *, again: bool = False) -> None:
        """Push the gradients since the last step, times a factor; `again`: those of the last step once more."""
        if not again:
            self._kept, self._sent = [], self._kept
        for each in self._sent:
            self.source.push(*(each if factor == 1.0 else each.times(factor)))

    def place(self, table: Table) -> tuple[int, int]:
        """Return the number of a table's group, and the table's number in it."""
        place: tuple[int, int] = self.source.place(table)
        return place

    def distinct(self, group: int, tables: Int32s, ids: Int64s) -> Distinct:
        """Return the distinct ones of the (table, id) of a batch."""
        distinct: Distinct = self.source.distinct(group, tables, ids)
        return distinct

    def pull(self, group: int, tables: Int32s, ids: Int64s, training: bool) -> Floats:
        """Return the values of rows."""

        def pull() -> Floats:
            rows: Floats = self.source.pull(
                group, tables, ids, training
            )  # another one by then, perhaps
            return rows

        rows: Floats = self._ask(Errand(pull))
        return rows

    def push(
        self,
        group: int,
        tables: Int32s,
        ids: Int64s,
        gradients: Floats,
        sightings: Int32s,
        lives: Int32s | None = None,
    ) -> None:
        """Keep gradients up to the step."""
        self._kept.append(_SentRows(group, tables, ids, gradients, sightings, lives))

    def follow(
        self,
        *owners: torch.nn.Module | torch.optim.Optimizer,
        held: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        """Have `zero_grad` of a module, or an optimizer, forget gradients of rows, too; `held`: rows in weights."""
        self._held = held
        for each in owners:
            owner: Any = each
            owner.zero_grad = partial(_zero_grad, self, owner.zero_grad)


def _zero_grad(rows: LoopRows, own: Callable[..., None], *arguments: Any, **named: Any) -> None:
    rows.clear()
    own(*arguments, **named)


#: Rows in this process, by the parameters of their modules.
_alone: Any = WeakTensorKeyDictionary()


def clip_alone(parameters: Any, most: float) -> torch.Tensor:
    """Clip gradients, those of rows in this process included, outside of a job as torch does; return the norm."""
    every = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    sources = list({id(_alone[each]): _alone[each] for each in every if each in _alone}.values())
    if not sources:
        return torch.nn.utils.clip_grad_norm_(every, most)
    of_rows = [each for rows in sources for each in rows.gradients()]
    gradients = [each.grad for each in every if each.grad is not None]
    norm = torch.nn.utils.get_total_norm([*gradients, *of_rows])
    torch.nn.utils.clip_grads_with_norm_(every, most, norm)
    if (factor := most / (float(norm) + _SMALL)) < 1:
        for rows in sources:
            rows.rescale(factor)
    return norm


def connect_alone(
    modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Give modules with tables rows in this process, which change with each step of the optimizer.

    Those that have rows already, as of `steepest.connect`, keep them.
    """
    embedding = sys.modules.get("steepest.tables.modules.embedding")
    if embedding is None or len(optimizers) != 1:
        return
    for module in modules:
        if not embedding.tables_of(module) or embedding.is_connected(module):
            continue
        local = embedding.LocalRows(embedding.tables_of(module))
        rows = LoopRows(Errand.run).use(local)
        embedding.connect(module, rows)
        for parameter in module.parameters():
            _alone[parameter] = rows
        rows.follow(module, *optimizers)
        optimizers[0].register_step_post_hook(partial(_step_rows, rows, local))


def _step_rows(rows: LoopRows, local: Any, *_: Any) -> None:
    rows.send()
    local.step()
