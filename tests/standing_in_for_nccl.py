"""A stand-in for NCCL's process groups over Gloo, and for the GPUs that they want: order and calls, no device."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from steepest.core.transport.router import Router
from steepest.process_groups import nccl_groups
from steepest.process_groups.group import GroupPlace, ProcessGroup, Ways
from steepest.process_groups.torch_groups import GlooBackend, KeyStore, TorchGroup


class _Work:
    """An operation of Gloo on a thread of its own, of which NCCL's way of waiting is used."""

    def __init__(self, work: Any) -> None:
        self._work, self._over = work, False

    def is_completed(self) -> bool:
        self._over = self._over or self._work.is_completed()
        return self._over

    def wait(self) -> None:
        assert self._over, "it would wait without a limit, and could not be interrupted"
        self._work.wait()


class _Group:
    """What `ProcessGroupNCCL` is asked for; `abort` has it forget its connections."""

    def __init__(self, store: KeyStore, place: GroupPlace, host: str) -> None:
        self._make = partial(GlooBackend(host).make, store, place)
        self._group: Any = None
        self.aborted = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._group, name)
        return lambda *arguments: _Work(operation(*arguments))

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._group = self._make()

    def abort(self) -> None:
        self.aborted += 1
        self._group = None


class StandInBackend(nccl_groups.NcclBackend):
    """NCCL's, with copies in the memory of the host for those on a GPU.

    Args:
        host: at which a member listens.
        gpu: which it has.
    """

    def __init__(self, host: str, gpu: str) -> None:
        super().__init__(torch.device("cpu"))
        self._host, self._gpu = host, gpu
        self.made: list[_Group] = []

    def inside(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def _gpu_of(self) -> str:
        return self._gpu

    def _begin(self, store: KeyStore, place: GroupPlace) -> Any:
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        self.made.append(_Group(store, place, self._host))
        return self.made[-1]


class StandInGroups(nccl_groups.NcclGroups):
    """Groups over the stand-in; each member has a GPU for itself, unless they share the first."""

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared

    def check(self, router: Router) -> None:
        assert dist.is_gloo_available()

    def join(self, place: GroupPlace, ways: Ways) -> ProcessGroup:
        assert ways.router.transport is not None
        gpu = f"GPU-{0 if self.shared else place.rank}"
        return TorchGroup(place, ways, StandInBackend(ways.router.transport.listens_at or "", gpu))
