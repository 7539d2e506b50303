"""Evaluations that a user's loop asks for: a call with all that it refers to, copied, to be made elsewhere."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from steepest.core.engine.generators import restore, seed_everything, states
from steepest.core.engine.replicas import WorkerResult
from steepest.core.models.protocol import checked_metrics
from steepest.core.models.scalars import describe
from steepest.errors import ConfigurationError
from steepest.loop.user_loop import UserLoop, outside
from steepest.runtime.calls import why_unpicklable
from steepest.runtime.pickling import UserPickler
from steepest.runtime.remote_functions import PickledResult, name_of


@dataclass(frozen=True)
class CopiedCall:
    """A user's function and its arguments as they were after a step; calling it evaluates them.

    Attributes:
        step, epoch: the number of steps committed before, and the epoch.
        name: of the function.
        paths: where the worker looks for modules.
        content: the pickled function and arguments.
    """

    step: int
    epoch: int | None
    name: str
    paths: tuple[str, ...]
    content: PickledResult

    def __call__(self) -> WorkerResult:
        """Return what the function returns, "loss" apart; ConfigurationError: these are no numbers by name."""
        values = self.values()
        loss = values.pop("loss", math.nan)
        return WorkerResult(loss, 1.0, 0, values, {}, {})

    def values(self) -> dict[str, float]:
        """Return what the function returns; random generators go on as if it had not been called."""
        sys.path += [path for path in self.paths if path not in sys.path]
        function, arguments = self.content.value()
        before = states()
        try:
            seed_everything(0)
            with outside(), torch.no_grad():
                values = function(*arguments)
        finally:
            restore(before)
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"steepest.evaluate(): the function {self.name} returned {describe(values)}: return numbers by name, "
                "such as {'accuracy': 0.9}"
            )
        return checked_metrics(values)


def copied(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    at: tuple[int, int] | None = None,
) -> CopiedCall:
    """Return a copy of a call.

    Args:
        function, arguments: that make the call.
        at: step and epoch; None for a copy that stays in this process, and keeps its tensors' devices.

    Raises:
        ConfigurationError: something that the function refers to cannot be copied.
    """
    file = io.BytesIO()
    try:
        _Copier(file, to_cpu=at is not None).dump((function, arguments))
    except Exception as error:  # noqa: BLE001 - the user's objects are pickled by methods of their own
        why = why_unpicklable((function, arguments), error)
        raise ConfigurationError(
            f"steepest.evaluate() cannot copy what {name_of(function)} evaluates: {why}"
        ) from None
    step, epoch = at or (0, None)
    return CopiedCall(
        step, epoch, name_of(function), tuple(sys.path), PickledResult(file.getvalue(), [])
    )


def ask(loop: UserLoop, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Have the worker with rank 0 copy a call at the loop's place, and the driver know of it."""
    if not loop.has_entered:
        raise ConfigurationError(
            "steepest.evaluate() before steepest.epochs(): call it in the loop"
        )
    if tables := loop.prepared.model.tables:
        raise ConfigurationError(
            f"steepest.evaluate() with embedding tables ({tables[0].name!r}), of which the servers have the rows: "
            "evaluate in the loop, on batches of a second loader"
        )
    number = loop.reports.called(loop.place_number)
    if loop.counts and not loop.job.rank:
        copy = copied(function, arguments, (loop.at_step + 1, loop.batches.epoch))
        loop.reports.ask(number, copy.step, copy)


class _Copier(UserPickler):
    """Pickles tensors without the rest of the memory in which they lie."""

    def __init__(self, file: io.BytesIO, *, to_cpu: bool) -> None:
        super().__init__(file, protocol=5)
        self._to_cpu = to_cpu

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return super().reducer_override(obj)
        if isinstance(obj, torch.nn.Parameter):
            return torch.nn.Parameter, (obj.detach(), obj.requires_grad)
        own = obj.detach().to("cpu" if self._to_cpu else obj.device, copy=True)
        return own.__reduce_ex__(5)  # type: ignore[no-untyped-call]
