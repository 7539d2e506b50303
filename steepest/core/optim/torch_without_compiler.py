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
_DISABLED = "__dynamo_disable"  # where torch keeps a function as its compiler leaves it alone
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


def spare_compiler() -> None:
    """From now on, keep optimizers from importing torch's compiler when they are made, cleared, saved or loaded.

    If it is imported for something else, it works as usual.
    """
    for name in (_NAME, "zero_grad", "state_dict", "load_state_dict"):
        plain: Any = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if plain is not None and "torch._dynamo" not in sys.modules:
            vars(plain).setdefault(_DISABLED, _until_imported(plain))


def _until_imported(plain: Any) -> Callable[..., Any]:
    """Return a function that calls `plain`, and disables the compiler for it as soon as that is imported."""

    def run(*arguments: Any, **named: Any) -> Any:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if disable is None:
            return plain(*arguments, **named)
        vars(plain).pop(_DISABLED, None)
        return disable(plain, wrapping=False)(*arguments, **named)

    return run


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
    """Return `step` of torch's optimizers and ours without wrappers; None for others."""
    if not kind.__module__.startswith(("torch.optim.", "steepest.")):
        return None
    step: Any = kind.step
    while getattr(step, "__globals__", None) is vars(torch_optimizer) and hasattr(
        step, "__wrapped__"
    ):
        step = step.__wrapped__
    plain: Callable[[torch.optim.Optimizer], Any] = step
    return plain
