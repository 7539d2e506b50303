"""Optimizers that step in each worker, on the mean of all workers' gradients, so that all take the same steps.

These are those whose step evaluates the loss as often as it likes, such as L-BFGS, and those that update a
parameter which another one updates too, with a state of its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from steepest.errors import ConfigurationError

if TYPE_CHECKING:
    from steepest.loop.loop_steps import LoopSteps
    from steepest.loop.user_loop import UserLoop


#: Where an optimizer is to step by gradients that no worker has; takes where that was found.
NO_GRADIENT = (
    "optimizer.step() was called{}, and no parameter has a gradient: call loss.backward() before it, and zero_grad() "
    "before that"
)

#: By which torch's schedulers know a `step()` that they have wrapped, or need not wrap.
SCHEDULED = "_wrapped_by_lr_sched"
#: Its value where the optimizer has an initial_lr from a state that was loaded, and no scheduler.
LOADED = "loaded"


def mark_of(optimizer: torch.optim.Optimizer) -> bool | str:
    """Return the value of `SCHEDULED` for a loop's `step()`, without which schedulers would warn, or wrap it."""
    loaded = any("initial_lr" in group for group in optimizer.param_groups)
    return LOADED if loaded and not hasattr(optimizer.step, SCHEDULED) else True


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's `step` requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def steps_in_workers(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, ByClosure]:
    """Return, by index, the user's optimizers that have to step in each worker.

    Those that have parameters in common, directly or by way of others, have the same optimizer in their place.
    """
    bonds: list[tuple[set[int], list[int]]] = []  # parameters, and the optimizers of them
    for at, each in enumerate(optimizers):
        own = {id(p) for group in each.param_groups for p in group["params"]}
        bound = [bond for bond in bonds if bond[0] & own]
        bonds = [bond for bond in bonds if not bond[0] & own]
        bonds.append(
            (own.union(*(ids for ids, _ in bound)), [*(n for _, ns in bound for n in ns), at])
        )
    by_number: dict[int, ByClosure] = {}
    for _, numbers in bonds:
        if len(numbers) == 1 and not needs_closure(optimizers[numbers[0]]):
            continue
        groups = [
            group["params"] for at in sorted(numbers) for group in optimizers[at].param_groups
        ]
        first = {id(p): at for at in reversed(range(len(groups))) for p in groups[at]}
        disjoint = [[p for p in group if first[id(p)] == at] for at, group in enumerate(groups)]
        updates = torch.optim.SGD([{"params": group} for group in disjoint if group], lr=1.0)
        by_number |= {at: ByClosure(optimizers[at], updates) for at in numbers}
    return dict(sorted(by_number.items()))


class ByClosure:
    """An optimizer that steps in each worker, on the worker's own values.

    Args:
        optimizer: the user's.
        updates: the servers' stand-in for it, which adds the change of the weights to them.

    Attributes:
        aside: by parameter, the values that are tried during a step; otherwise empty.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, updates: torch.optim.Optimizer) -> None:
        self.optimizer, self.updates = optimizer, updates
        self.aside: dict[torch.Tensor, torch.Tensor] = {}
        self._before: dict[str, Any] | None = None  # its state before the step that is under way
        self._set: list[
            dict[str, Any]
        ] = []  # its hyperparameters after the last step of the loop's

    def note(self) -> None:
        """Note the hyperparameters: a worker that takes the place of this one sets them from here on by itself."""
        groups = self.optimizer.param_groups
        self._set = [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def state(self, *, noted: bool) -> dict[str, Any]:
        """Return its state after the last step that is committed; `noted`: with the hyperparameters of `note`."""
        state = self.optimizer.state_dict() if self._before is None else self._before
        if not noted:
            return state
        groups = zip(state["param_groups"], self._set, strict=True)
        return {**state, "param_groups": [{**own, **before} for own, before in groups]}

    def end_step(self, *, left_out: bool) -> None:
        """Note that the last step is committed, or left out: then the state is that of before."""
        if left_out and self._before is not None:
            self.optimizer.load_state_dict(self._before)
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
            loss: torch.Tensor = step(self.optimizer, evaluate)
            tried = {p: p.detach() for p in self.aside}
        finally:
            self.aside = {}
            put_back()
        for parameter, values in tried.items():
            parameter.grad = parameter.detach() - values
        return loss

    def lay_out(self) -> None:
        """Set the parameters to the values that are tried."""
        for parameter, values in self.aside.items():
            parameter.data = values

    def lay_aside(self) -> None:
        """Keep the values that are tried, as the parameters are about to be used for something else."""
        self.aside = {parameter: parameter.data for parameter in self.aside}


def step_by_closure(
    loop: UserLoop, steps: LoopSteps, by: ByClosure, push: Callable[[], None]
) -> Callable[..., Any]:
    """Return the `step` of an optimizer that evaluates the loss as often as it likes.

    Args:
        loop, steps: of the optimizer's user, and the steps of that loop's optimizers.
        by: the optimizer.
        push: pushes the gradients as the step has left them, and returns when they are committed.
    """

    def step(closure: Callable[[], Any] | None = None) -> Any:
        vars(by.optimizer)["_opt_called"] = True  # else a scheduler would warn
        if not loop.counts:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            push()
            return loss
        steps.check_may_step()
        steps.trying = by
        loss = by.step(partial(_evaluated, loop, by, closure), steps.end_trial)
        del loop.weights.losses.found[1:]
        push()
        by.end_step(left_out=steps.is_left_out)
        return None if closure is None else loss

    vars(step)[SCHEDULED] = mark_of(by.optimizer)
    return step


def _evaluated(loop: UserLoop, by: ByClosure, closure: Callable[[], Any] | None) -> torch.Tensor:
    """Evaluate the loss; return its mean over the workers by weight, and leave the gradients' means.

    Without a closure the gradients are there, and the loss is not asked for. ConfigurationError: no worker has
    one.
    """
    loss = torch.zeros(())
    if closure is not None:
        with torch.enable_grad():
            loss = torch.as_tensor(closure()).detach()
        if loop.weights.losses.looks.is_looking:
            loop.weights.losses.end_part()
    mean = loop.gatherer.average(loss, by.parameters)
    if closure is None and all(parameter.grad is None for parameter in by.parameters):
        raise ConfigurationError(NO_GRADIENT.format(""))
    return mean
