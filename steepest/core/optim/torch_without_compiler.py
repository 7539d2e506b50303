"""Torch's optimizers without torch's compiler, which making or stepping an optimizer would import.

That import takes 1.6 seconds of processor time in each process, for decorators that only matter to
code that is being compiled.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

_NAME = "add_param_group"
_ADD = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Prevent optimizers that are made inside of this context from importing torch's compiler.

    Nothing else is different. Other threads see the change, too.
    """
    decorated = torch.optim.Optimizer.add_param_group
    if (
        _ADD is None
        or "torch._dynamo" in sys.modules
        or getattr(decorated, "__wrapped__", None) is not _ADD
    ):
        yield
        return
    setattr(torch.optim.Optimizer, _NAME, _ADD)
    try:
        yield
    finally:
        setattr(torch.optim.Optimizer, _NAME, decorated)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer; torch's and ours without the wrappers that profile and compile `step`."""
    hooks = any(getattr(torch_optimizer, name, None) for name in _HOOKS)
    kind: Any = type(optimizer)
    step = _plain_step(kind)
    if hooks or step is None or optimizer.defaults.get("differentiable"):
        optimizer.step()
        return
    with torch.no_grad():
        step(optimizer)


@functools.lru_cache(maxsize=64)
def _plain_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any] | None:
    """Return `step` of torch's optimizers and ours without wrappers; None of others."""
    if not kind.__module__.startswith(("torch.optim.", "steepest.")):
        return None
    step: Any = kind.step
    while getattr(step, "__globals__", None) is vars(torch_optimizer) and hasattr(
        step, "__wrapped__"
    ):
        step = step.__wrapped__
    plain: Callable[[torch.optim.Optimizer], Any] = step
    return plain
