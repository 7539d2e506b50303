"""An optimizer that projects parameters after each step, such as clamping them to a range."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch

from steepest.core.optim.torch_without_compiler import take_step

#: Changes values of a parameter, a part of it perhaps, in place; called with its name and the values.
Projection = Callable[[str, torch.Tensor], object]


class Projected(torch.optim.Optimizer):
    """Another optimizer, with a function that changes the updated parameters after each step.

    Args:
        groups: whose "params" are (name, tensor) pairs.
        maker: the other optimizer's class, and keyword arguments for its constructor.
        project: the function.
    """

    takes_names = True

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        maker: tuple[type[torch.optim.Optimizer], dict[str, Any]],
        project: Projection,
    ) -> None:
        groups = [{**group, "params": list(group["params"])} for group in groups]
        # names alone: what an optimizer keeps is handed over where a server is replaced, tensors too
        self._names = tuple(name for group in groups for name, _ in group["params"])
        tensors = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
        super().__init__([{**group} for group in tensors], {})
        cls, arguments = maker
        self._own = cls(tensors, **arguments)
        self.param_groups, self.state = self._own.param_groups, self._own.state
        self.defaults = {"maker": maker, "project": project}
        self._project = project

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str], project: Projection
    ) -> Projected:
        """Return an optimizer that a user made, with a projection; `names`: by the parameters' ids."""
        allowed = inspect.signature(type(optimizer).__init__).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in allowed.values())
        arguments = {k: v for k, v in optimizer.defaults.items() if anything or k in allowed}
        groups = [
            {**group, "params": [(names.get(id(p), ""), p) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        one = cls(groups, (type(optimizer), arguments), project)
        one.state.update(optimizer.state)
        return one

    @staticmethod
    def describe(defaults: Mapping[str, Any]) -> str:
        """Return the name of the optimizer's class."""
        made, arguments = defaults["maker"]
        describe = getattr(made, "describe", None)
        return str(made.__name__ if describe is None else describe(arguments))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step the optimizer, and project the parameters that it has updated; a closure is not called."""
        take_step(self._own)
        parameters = (p for group in self._own.param_groups for p in group["params"])
        for name, parameter in zip(self._names, parameters, strict=True):
            if parameter.grad is not None:
                self._project(name, parameter)
        return None
