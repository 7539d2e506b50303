"""Buffers that forward passes change by a worker's own samples: a loop that reads them differs from one process."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

_PASSES = 2  # in training that are looked at


def tell_of_own_buffers(modules: Sequence[torch.nn.Module], known: Collection[str] = ()) -> None:
    """Warn, in the first forward passes of training, of floating point buffers that a user's modules change there.

    Those of torch's own modules are left out: BatchNorm does not read its running statistics while it trains.

    Args:
        modules: that a loop trains.
        known: buffers of which the user has said what is kept of them, see `steepest.prepare`.
    """
    for at, each in enumerate(modules):
        before = f"{at}." if len(modules) > 1 else ""
        names = {name for name, _ in _own(each) if before + name not in known}
        if names and not hasattr(each, "_orig_mod"):  # a compiled one would be compiled anew
            _watch(each, names)


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating point buffers of a module's parts that are no classes of torch's, by name."""
    for path, part in module.named_modules():
        if type(part).__module__.partition(".")[0] != "torch":
            for name, buffer in part.named_buffers(path, recurse=False):
                if buffer.is_floating_point():
                    yield name, buffer


def _watch(module: torch.nn.Module, names: Collection[str]) -> None:
    before: dict[str, tuple[int, int]] = {}
    seen = 0

    def begin(module: torch.nn.Module, _: Any) -> None:
        before.update((name, (id(value), value._version)) for name, value in _own(module))

    def end(module: torch.nn.Module, _: Any, __: Any) -> None:
        nonlocal seen
        now = dict(_own(module))
        changed = [n for n in names if n in now and before.get(n) != (id(now[n]), now[n]._version)]
        seen += module.training
        if seen >= _PASSES or (module.training and changed):
            for each in handles:
                each.remove()
        if module.training and changed:
            warnings.warn(
                f"a forward pass changes the buffer {min(changed)!r} by each worker's own samples alone: if what "
                "is trained depends on it, the result is not that of one process; change it by what "
                "steepest.gather returns, and see prepare(..., buffers=) for what is kept of it",
                stacklevel=2,
            )

    handles = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
