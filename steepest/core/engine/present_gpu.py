"""The GPU to which `.cuda()` moves, and on which streams are made: each thread has one, by default the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def choose_gpu(device: torch.device) -> None:
    """Make a GPU that of the calling thread; nothing for "cpu", and for "cuda" without a number."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def chosen_gpu() -> torch.device | None:
    """Return the GPU of the calling thread; None in a process that uses none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def differ(devices: Sequence[torch.device]) -> bool:
    """Return whether these are several GPUs, between which a thread changes."""
    return len({device for device in devices if device.type == "cuda"}) > 1
