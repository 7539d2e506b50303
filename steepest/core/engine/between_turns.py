"""How a process' messages move while one of its roles computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BetweenTurns:
    """How a worker has its process' router move bytes during a step, which is one turn of it."""

    pump: Callable[[], None]  # called between pushes, so that bytes move during the backward pass
    # called before a step: other roles finish what others wait for, and their messages leave
    finish: Callable[[], None]
    # has a function called as soon as the process has nothing else to do
    when_idle: Callable[[Callable[[], None]], None]
    # another turn within the step, which begins before all its weights are here; None: when all are
    wait: Callable[[], None] | None
    receive: Callable[[], None]  # another turn within the step, for what its models need
    # another turn within the step, which waits for nothing; None where other processes' turns lie within this one's
    poll: Callable[[], None] | None


@contextlib.contextmanager
def apart_from_models() -> Iterator[None]:
    """Run other code amid a forward pass, without its autocast, inference mode and torch.func transformations."""
    transforms = torch._C._functorch.maybe_current_level() is not None
    with (
        torch.inference_mode(False),
        torch.autocast("cpu", enabled=False),
        torch._C._DisableFuncTorch() if transforms else contextlib.nullcontext(),
    ):
        yield
