"""A device of torch's in the memory of the host, "strict", which refuses what a GPU does not forgive.

It computes with the kernels of the CPU, refuses operands of the CPU beside its own, raises where two streams use the
same bytes, one of them to write, without an event or a wait between, and shows garbage for a copy to the host that
nobody has waited for: see `strict_device.cpp`. A C++ compiler makes it once; torch keeps the result with its other
extensions.
"""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

NAME = "strict"
CAN_BE_MADE = sys.platform == "linux" and bool(shutil.which("c++") and shutil.which("ninja"))


@cache
def load() -> Any:
    """Compile the device, register it with torch, and return what counts the bytes that are copied."""
    from torch.utils import cpp_extension

    source = str(Path(__file__).with_name("strict_device.cpp"))
    built = cpp_extension.load("strict_device", [source], extra_cflags=["-O1", "-g0"])
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    facts = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": built.device_count,
        "current_device": built.current_device,
        "set_device": lambda device: built.set_device(torch.device(device).index or 0),
        "device": lambda device: torch.accelerator.device_index(torch.device(device).index),
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, fact in facts.items():
        setattr(module, name, fact)
    torch._register_device_module(NAME, module)
    torch.nn.Module.to = _moving(torch.nn.Module.to)  # type: ignore[method-assign]
    return built


def _moving(to: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Have a module that moves between the device and the host keep its parameters, as with a GPU."""

    def moved(module: torch.nn.Module, *arguments: Any, **named: Any) -> torch.nn.Module:
        device = torch._C._nn._parse_to(*arguments, **named)[0]
        kinds = {each.device.type for each in module.parameters()}
        moves = device is not None and bool(kinds - {device.type})
        torch.__future__.set_swap_module_params_on_conversion(moves)
        try:
            return to(module, *arguments, **named)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return moved


class Copied:
    """Bytes that were copied between the host and devices since it was made."""

    def __init__(self) -> None:
        self._built = load()
        self.to_host, self.to_device = -self._built.to_host(), -self._built.to_device()

    def stop(self) -> None:
        """Count no more."""
        self.to_host += self._built.to_host()
        self.to_device += self._built.to_device()


@contextmanager
def copied() -> Iterator[Copied]:
    """Count what is copied inside of this context; the result is there behind it."""
    found = Copied()
    yield found
    found.stop()
