"""The losses whose backward pass a user's loop runs, for the job's history; one that is a sum is told from a mean."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from steepest.core.models.sums import summed_by
from steepest.errors import ConfigurationError

_torchs_backward: Any = torch.Tensor.backward


class Averages(Protocol):
    """What is asked of a loop about a loss."""

    @property
    def averaged(self) -> int:
        """The number of samples of which a loss is to be the mean; 0 where it may be something else."""
        ...


class Losses:
    """The losses of a loop.

    Args:
        loop: whose they are.

    Attributes:
        found: those of the last step, or of the step in progress.
    """

    def __init__(self, loop: Averages) -> None:
        self.found: list[torch.Tensor] = []
        self._loop = loop
        self._has_looked = False

    def add(self, loss: torch.Tensor) -> None:
        """Take the loss of a backward pass; ConfigurationError: it adds up samples, and is to be their mean."""
        if not self._has_looked and (samples := self._loop.averaged) > 1:
            self._has_looked = True
            _check_mean(loss, samples)
        self.found.append(loss.detach())


def _check_mean(loss: torch.Tensor, samples: int) -> None:
    """Check, where several workers make an update, that a loss is a mean."""
    if (found := summed_by(loss, samples)) is not None and found[1]:
        raise ConfigurationError(
            f"the loss adds up the samples of its batch ({found[0]}) and is taken for their mean, with which the "
            "updates of two workers would be half as large as those of one: give steepest.prepare(..., "
            "reduction='sum'), or take the mean"
        )


#: Returns the losses of the loop in which the calling thread is; None outside of any.
Here = Callable[[], Losses | None]

_watching: list[Here] = []  # an element for each user's function that runs in this process


@contextlib.contextmanager
def watched(here: Here) -> Iterator[None]:
    """Have the losses of loops see those whose backward pass runs, while any function runs."""
    _watching.append(here)
    if len(_watching) == 1:
        setattr(torch.Tensor, "backward", _backward)  # noqa: B010 - a type checker would refuse it
    try:
        yield
    finally:
        _watching.pop()
        if not _watching:
            setattr(torch.Tensor, "backward", _torchs_backward)  # noqa: B010


@functools.wraps(_torchs_backward)
def _backward(loss: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    losses = _watching[0]() if _watching else None
    if losses is not None and loss.dim() == 0:
        losses.add(loss)
    return _torchs_backward(loss, *arguments, **named)
