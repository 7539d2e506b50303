"""The current GPU of each thread, which `.cuda()` and new streams use: by default the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steepest.errors import ConfigurationError


def gpu_of(index: int) -> torch.device:
    """Return a GPU that this process sees.

    Args:
        index: the number of the GPU, modulo the number of GPUs.

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
    """Make a GPU the calling thread's current one; do nothing for "cpu", and for "cuda" without a number."""
    if device.type != "cpu" and device.index is not None:
        torch.get_device_module(device).set_device(device)


def chosen_gpu() -> torch.device | None:
    """Return the calling thread's current GPU; None in a process that uses none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def differ(devices: Sequence[torch.device]) -> bool:
    """Return whether these are several GPUs, between which a thread changes."""
    return len({device for device in devices if device.type != "cpu"}) > 1
