"""The GPU to which `.cuda()` moves, and on which streams are made: each thread has one, by default the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steepest.errors import ConfigurationError


def gpu_of(index: int) -> torch.device:
    """Return a GPU that this process sees, by its number, counted round and round.

    Args:
        index: the number.

    Raises:
        ConfigurationError: torch sees none.
    """
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    there = torch.get_device_module(kind)
    if not there.is_available():
        raise ConfigurationError(
            f"a model is to be on a GPU, and torch sees no {kind!r} here: give gpu=False, or install a "
            "torch for this machine's GPU, and its driver"
        )
    return torch.device(kind, index % there.device_count())


def choose_gpu(device: torch.device) -> None:
    """Make a GPU that of the calling thread; nothing for "cpu", and for "cuda" without a number."""
    if device.type != "cpu" and device.index is not None:
        torch.get_device_module(device).set_device(device)


def chosen_gpu() -> torch.device | None:
    """Return the GPU of the calling thread; None in a process that uses none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def differ(devices: Sequence[torch.device]) -> bool:
    """Return whether these are several GPUs, between which a thread changes."""
    return len({device for device in devices if device.type != "cpu"}) > 1
