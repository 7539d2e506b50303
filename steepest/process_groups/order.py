"""Order between the stream on which a GPU's model computes and that of a process group, each of a thread of its own.

What the group has made the host knows to be over, for it has read who has a gradient of it: that needs no event.
"""

from __future__ import annotations

import torch


def made(tensor: torch.Tensor) -> torch.Event | None:
    """Return what is behind all that this thread's stream was given for a tensor's GPU; None on the CPU."""
    if tensor.is_cpu:
        return None
    return torch.accelerator.current_stream(tensor.device).record_event()


def behind(event: torch.Event | None, tensor: torch.Tensor) -> None:
    """Have this thread's stream on a tensor's GPU go on behind an event."""
    if event is not None:
        torch.accelerator.current_stream(tensor.device).wait_event(event)
