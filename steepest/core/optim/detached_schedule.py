"""Schedulers that were made for the user's optimizer, and run with a rebuilt one."""

from __future__ import annotations

import copy
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from steepest.core.optim.several import ONE_SCHEDULE
from steepest.errors import ConfigurationError
from steepest.validation import require_count


def check_scheduler(scheduler: Any, what: str) -> None:
    """Check that a scheduler depends on the step alone.

    Args:
        scheduler: any object.
        what: the beginning of the error's message if it is no scheduler.

    Raises:
        ConfigurationError: it is no scheduler of torch's, or needs a metric.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            f"{type(scheduler).__name__} needs a metric: give steepest.ReduceOnPlateau to "
            "fit(callbacks=) instead"
        )
    if isinstance(scheduler, (list, tuple)):
        raise ConfigurationError(f"{what}: {ONE_SCHEDULE}")
    if not isinstance(scheduler, LRScheduler):
        raise ConfigurationError(
            f"{what}: give one of torch.optim.lr_scheduler, or a function of the step as "
            "learning_rate="
        )


class DetachedSchedule:
    """A scheduler without its optimizer, which can be pickled; a factory, as `lr_scheduler=` takes.

    Args:
        scheduler: any of torch.optim.lr_scheduler that depends on the step alone, also one that
            consists of others, before its first step.
        every: training steps from one of its steps to the next.
        within: training steps after which the count of `every` starts again; None for never.
        keep: objects to which the scheduler's functions belong, and that are not copied.

    Raises:
        ConfigurationError: it is no scheduler, or needs a metric.

    Example:
        >>> import torch
        >>> parameters = [torch.nn.Parameter(torch.zeros(1))]
        >>> first = torch.optim.SGD(parameters, lr=1.0)
        >>> schedule = DetachedSchedule(torch.optim.lr_scheduler.ExponentialLR(first, gamma=0.5))
        >>> other = torch.optim.SGD(parameters, lr=1.0)
        >>> again = schedule(other)
        >>> other.step(); again.step()
        >>> other.param_groups[0]["lr"], first.param_groups[0]["lr"]
        (0.5, 1.0)
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        every: int = 1,
        within: int | None = None,
        keep: tuple[Any, ...] = (),
    ) -> None:
        check_scheduler(scheduler, f"the scheduler is a {type(scheduler).__name__}")
        require_count("every", every)
        self._every, self._within = every, within
        self._keep = keep
        self._groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in scheduler.optimizer.param_groups
        ]  # as the scheduler's first values have changed them
        self._scheduler = self._copy(scheduler, scheduler.optimizer, self)

    def _copy(self, scheduler: LRScheduler, old: Any, new: Any) -> LRScheduler:
        """Return a copy of a scheduler that has another object for its optimizer."""
        replaced = {id(old): new, **{id(kept): kept for kept in self._keep}}
        return copy.deepcopy(scheduler, replaced)

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        """Return a copy for an optimizer with as many parameter groups, which get the scheduler's values."""
        LambdaLR(optimizer, lambda step: 1.0)  # schedulers warn of an optimizer that had none
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(values))
        scheduler = self._copy(self._scheduler, self, optimizer)
        return scheduler if self._every == 1 else _Every(scheduler, self._every, self._within)


class _Every(LRScheduler):
    """A scheduler that is stepped once in several steps."""

    def __init__(self, scheduler: LRScheduler, every: int, within: int | None) -> None:
        self.optimizer = scheduler.optimizer
        self._scheduler, self._every, self._within, self._steps = scheduler, every, within, 0

    def step(self, epoch: int | None = None) -> None:
        """Count a step, and step the scheduler if it is due."""
        self._steps += 1
        counted = self._steps if self._within is None else (self._steps - 1) % self._within + 1
        if counted % self._every == 0:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and the scheduler's state."""
        return {"steps": self._steps, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._steps = state_dict["steps"]
        self._scheduler.load_state_dict(state_dict["scheduler"])
