"""Optimizers whose step evaluates the loss as often as it likes, such as L-BFGS: every worker takes the same steps."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from steepest.loop.losses import Losses


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step has to be given what computes the loss."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class ByClosure:
    """Such an optimizer, which steps in each worker, on values of the worker's own.

    Args:
        optimizer: the user's.

    Attributes:
        updates: the optimizer that servers have in its place: it adds to the weights what they have changed by.
        aside: by parameter, the values that are tried; while a step is under way, otherwise empty.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        self.updates = torch.optim.SGD(groups, lr=1.0)
        self.aside: dict[torch.Tensor, torch.Tensor] = {}
        self._before: dict[str, Any] | None = None  # its state before the step that is under way

    def state(self) -> dict[str, Any]:
        """Return its state after the last step that is committed."""
        return self.optimizer.state_dict() if self._before is None else self._before

    def end_step(self) -> None:
        """Note that the last step is committed."""
        self._before = None

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that it updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(
        self, evaluate: Callable[[], torch.Tensor], put_back: Callable[[], None]
    ) -> torch.Tensor:
        """Step, and leave in the gradients by how much the weights are to become smaller; return the first loss.

        Args:
            evaluate: returns the loss of all workers, and leaves the gradients of its mean.
            put_back: makes parameters views of the job's weights again.
        """
        step: Any = type(self.optimizer).step
        self._before = copy.deepcopy(self.optimizer.state_dict())
        self.aside = {p: p.detach().clone() for p in self.parameters}
        self.lay_out()
        try:
            found: torch.Tensor = step(self.optimizer, evaluate)
            tried = {p: p.detach() for p in self.aside}
        finally:
            self.aside = {}
            put_back()
        for parameter, values in tried.items():
            parameter.grad = parameter.detach() - values
        return found

    def lay_out(self) -> None:
        """Have parameters be the values that are tried."""
        for parameter, values in self.aside.items():
            parameter.data = values

    def lay_aside(self) -> None:
        """Keep the values that are tried, where others are about to use the parameters."""
        self.aside = {parameter: parameter.data for parameter in self.aside}


class Averaging(Protocol):
    """What is asked of the gatherings of a loop."""

    def average(self, loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean of all workers' losses, and leave those of gradients in the parameters."""
        ...


class Trying(Protocol):
    """What is asked of a loop whose optimizer tries values."""

    trying: ByClosure | None  # whose step is under way
    losses: Losses

    @property
    def gatherer(self) -> Averaging:
        """What takes the means over workers."""
        ...

    @property
    def counts(self) -> bool:
        """Whether the loop's steps count."""
        ...

    def check_may_step(self) -> None:
        """Check that the loop is where it may take a step; else ConfigurationError."""
        ...

    def end_trial(self) -> None:
        """Note that no values are tried any more."""
        ...


def step_by_closure(loop: Trying, by: ByClosure, push: Callable[[], None]) -> Callable[..., Any]:
    """Return the `step` of an optimizer that evaluates the loss as often as it likes.

    Args:
        loop: whose optimizer it is.
        by: the optimizer.
        push: pushes what the step has left in the gradients, and returns when that is committed.
    """

    def step(closure: Callable[[], Any]) -> Any:
        vars(by.optimizer)["_opt_called"] = True  # else a scheduler would warn
        if not loop.counts:
            with torch.enable_grad():
                loss = closure()
            push()
            return loss
        loop.check_may_step()
        loop.trying = by
        loss = by.step(partial(_evaluated, loop, by, closure), loop.end_trial)
        del loop.losses.found[1:]
        push()
        by.end_step()
        return loss

    step.__dict__["_wrapped_by_lr_sched"] = True  # else a scheduler would warn, or wrap it
    return step


def _evaluated(loop: Trying, by: ByClosure, closure: Callable[[], Any]) -> torch.Tensor:
    """Evaluate the loss; return its mean over the workers by weight, and leave the gradients' means."""
    with torch.enable_grad():
        loss = torch.as_tensor(closure()).detach()
    return loop.gatherer.average(loss, by.parameters)
