"""Gradients that a replica has on a GPU: copied to the memory of the host while its backward pass goes on."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)


class _BegunCopy(NamedTuple):
    event: torch.Event  # recorded behind the copy
    then: Callable[[], None]


class HostCopies:
    """Copies from a device to the host that end later, in the order in which they were begun.

    They run on a stream of their own, beside the model's. A copy begins after the work that the present stream has
    queued. No GPU has run this yet.

    Args:
        device: of the model.
        memory: flat host vectors that are copied from or to; they are pinned, if the driver allows that.
    """

    def __init__(self, device: torch.device, memory: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._begun: deque[_BegunCopy] = deque()
        for vector in memory:
            if device.type == "cuda" and vector.numel() and _pinned(vector, device):
                weakref.finalize(self, _unpin, vector, device)

    def start(self, out: torch.Tensor, own: torch.Tensor, then: Callable[[], None]) -> None:
        """Begin to copy `own`, on the device, to `out`; neither changes before `then` is called.

        `then` is called by a later `poll` or `finish`, after those of the copies before it.
        """
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            out.copy_(own, non_blocking=True)
            event = self._stream.record_event()
        self._begun.append(_BegunCopy(event, then))

    def poll(self) -> None:
        """Call `then` of the copies that have ended, without waiting."""
        while self._begun and self._begun[0].event.query():
            self._begun.popleft().then()

    def finish(self) -> None:
        """Wait until all copies have ended, and call `then` of each."""
        while self._begun:
            self._begun[0].event.synchronize()
            self._begun.popleft().then()

    def drop(self) -> None:
        """Wait until all copies have ended, and call nothing of them."""
        if self._begun:
            self._stream.synchronize()
            self._begun.clear()


def copies_for(
    devices: Sequence[torch.device], memory: Sequence[torch.Tensor]
) -> HostCopies | None:
    """Return the copies of a worker's gradients from its replica's GPU; None if it has no GPU, or several."""
    if len(devices) != 1 or devices[0].type == "cpu":
        return None
    return HostCopies(devices[0], memory)


def _pinned(vector: torch.Tensor, device: torch.device) -> bool:
    """Pin the pages of a host vector; return whether that succeeded: without it copies block.

    Without `device` the driver would make a context, of some hundred megabytes, on the first GPU.
    """
    with torch.cuda.device(device):
        failed = int(torch.cuda.cudart().cudaHostRegister(vector.data_ptr(), vector.numel(), 0))  # type: ignore[no-untyped-call]
    if failed:
        log.warning("%d bytes could not be pinned (CUDA error %d)", vector.numel(), failed)
        _forget_error(device)
    return not failed


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's last error, which torch would raise after the next kernel, even an unrelated one."""
    with contextlib.suppress(RuntimeError):  # raised after this kernel instead
        torch.zeros(1, device=device)


def _unpin(vector: torch.Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(vector.data_ptr())  # type: ignore[no-untyped-call]
