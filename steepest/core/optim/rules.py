"""Parameters that are updated by rules of their own instead of the model's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, overload

import torch

from steepest.core.optim.torch_without_compiler import take_step


class Rule(Protocol):
    """The update of a parameter that is not in the model's optimizer; hashable, and the same in all processes."""

    @property
    def lr(self) -> float:
        """The learning rate, unless a schedule is followed."""

    @property
    def follows(self) -> int | None:
        """The optimizer's parameter group whose relative learning rate scales `lr`; None to follow none."""

    def prepare(self) -> None:
        """Do slow preparations, such as compilation, before the first update."""

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], factor: float
    ) -> None:
        """Update a parameter in place.

        Args:
            values: of the whole parameter.
            gradient: of its shape; must not be changed.
            state: tensors that the rule keeps for the parameter; empty before the first update.
            factor: of the learning rate.
        """


class Ruled(NamedTuple):
    """A parameter with a rule of its own."""

    name: str
    rule: Rule


class ByRules(torch.optim.Optimizer):
    """Updates whole parameters, each by its rule.

    Args:
        parameters: with their rules.
        first: by parameter, the initial learning rate of the schedule that it follows; its rule's
            if it follows none.
    """

    keeps_gradients = True

    def __init__(
        self, parameters: Sequence[tuple[torch.Tensor, Rule]], first: Sequence[float]
    ) -> None:
        groups = [{"params": [parameter]} for parameter, _ in parameters]
        super().__init__(groups, {})
        for group, (_, rule), rate in zip(self.param_groups, parameters, first, strict=True):
            rule.prepare()
            group |= {"rule": rule, "first": rate, "lr": rate}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient; a closure is not called."""
        for group in self.param_groups:
            (parameter,) = group["params"]
            if parameter.grad is not None:
                factor = 1.0 if group["lr"] == group["first"] else group["lr"] / group["first"]
                group["rule"].update(parameter, parameter.grad, self.state[parameter], factor)
        return None


class WithRules(torch.optim.Optimizer):
    """A torch optimizer, and rules of other parameters, as one optimizer of the parameters of one chunk.

    Args:
        optimizer: torch's; its parameter groups come first.
        rules: of further parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rules: ByRules) -> None:
        groups = [*optimizer.param_groups, *rules.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        optimizer.state = rules.state = self.state
        self.parts = (optimizer, rules)  # which are stepped one after the other
        # steps on many tensors at once change gradients
        self.keeps_gradients = not any(group.get("foreach") for group in optimizer.param_groups)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step both; a closure is not called."""
        for part in self.parts:
            take_step(part)
        return None
