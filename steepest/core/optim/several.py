"""Several torch optimizers over disjoint parameters as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch

from steepest.core.optim.torch_without_compiler import take_step
from steepest.errors import ConfigurationError

#: A group's hyperparameter: the index of its optimizer.
WHICH = "optimizer"

#: What to do if each of several optimizers has a schedule.
ONE_SCHEDULE = (
    "lr_scheduler= makes one scheduler, for one optimizer that has the parameter groups of all: give "
    "each group a function of its own, as in torch.optim.lr_scheduler.LambdaLR(optimizer, [first, "
    "second])"
)

#: An optimizer's class, and keyword arguments for its constructor.
Maker = tuple[type[torch.optim.Optimizer], dict[str, Any]]


class SeveralOptimizers(torch.optim.Optimizer):
    """Several optimizers as one, whose step is a step of each; `groups` have an optimizer's index as "optimizer"."""

    def __init__(self, groups: Iterable[dict[str, Any]], makers: Sequence[Maker]) -> None:
        groups = list(groups)
        super().__init__([{**group} for group in groups], {})
        self.defaults = {"makers": tuple(makers)}
        # the optimizers that have a group here, by index
        self.parts: dict[int, torch.optim.Optimizer] = {}
        for index, (cls, arguments) in enumerate(makers):
            if own := [at for at, group in enumerate(groups) if group[WHICH] == index]:
                optimizer = cls([{**groups[at]} for at in own], **arguments)
                for at, group in zip(own, optimizer.param_groups, strict=True):
                    self.param_groups[at] = group
                self.state.update(optimizer.state)
                optimizer.state = self.state
                self.parts[index] = optimizer

    @classmethod
    def of(cls, optimizers: Sequence[Any]) -> SeveralOptimizers:
        """Return a user's optimizers as one.

        Raises:
            ConfigurationError: one is no optimizer, or two have the same parameter.
        """
        makers, groups, seen = [], [], set[int]()
        for index, optimizer in enumerate(optimizers):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigurationError(
                    f"the optimizer factory returned a list with {type(optimizer).__name__}: "
                    "return a torch.optim.Optimizer, or a list of them"
                )
            allowed = inspect.signature(type(optimizer).__init__).parameters
            anything = any(p.kind is p.VAR_KEYWORD for p in allowed.values())
            arguments = {k: v for k, v in optimizer.defaults.items() if anything or k in allowed}
            makers.append((type(optimizer), arguments))
            for group in optimizer.param_groups:
                both = [p for p in group["params"] if id(p) in seen]
                if both:
                    raise ConfigurationError(
                        f"two optimizers have the same parameter, of shape {tuple(both[0].shape)}: "
                        "give each parameter to one of them"
                    )
                groups.append({**group, WHICH: index})
            seen |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        one = cls(groups, makers)
        for index, part in one.parts.items():
            one.state.update(optimizers[index].state)
            known = vars(part).keys() & vars(optimizers[index]).keys()
            own = {name: vars(optimizers[index])[name] for name in known - vars(one).keys()}
            vars(part).update(own)
        return one

    def __getitem__(self, index: Any) -> Any:
        """Refuse to be one of several optimizers, by ConfigurationError."""
        raise ConfigurationError(f"optimizer[{index!r}]: {ONE_SCHEDULE}")

    @staticmethod
    def describe(defaults: Mapping[str, Any]) -> str:
        """Return the names of the optimizers' classes."""
        return " + ".join(cls.__name__ for cls, _ in defaults["makers"])

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every optimizer; a closure is not called."""
        for optimizer in self.parts.values():
            take_step(optimizer)
        return None


def as_one(optimizer: Any) -> Any:
    """Return several optimizers as one, see `SeveralOptimizers.of`; anything else as it is."""
    several = isinstance(optimizer, (list, tuple)) and optimizer
    return SeveralOptimizers.of(optimizer) if several else optimizer
