"""A stand-in for NCCL's process groups over Gloo: order and calls; tensors of a device are exchanged as copies."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from steepest.core.transport.router import Router
from steepest.strategies.process_groups import nccl_groups
from steepest.strategies.process_groups.group import GroupPlace, ProcessGroup, Ways
from steepest.strategies.process_groups.torch_groups import GlooBackend, KeyStore, TorchGroup


class _Work:
    """An operation of Gloo on a thread of its own, of which NCCL's way of waiting is used."""

    def __init__(self, work: Any, tensors: list[torch.Tensor], near: list[torch.Tensor]) -> None:
        self._work, self._over = work, False
        self._tensors, self._near = tensors, near

    def is_completed(self) -> bool:
        self._over = self._over or self._work.is_completed()
        return self._over

    def wait(self) -> None:
        assert self._over, "it would wait without a limit, and could not be interrupted"
        self._work.wait()
        for tensor, copy in zip(self._tensors, self._near, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)


class _Group:
    """What `ProcessGroupNCCL` is asked for; `abort` has it forget its connections."""

    def __init__(self, store: KeyStore, place: GroupPlace, host: str) -> None:
        self._make = partial(GlooBackend(host).make, store, place)
        self._group: Any = None
        self.aborted = 0

    def _begin(self, name: str, tensors: list[torch.Tensor], *more: Any) -> _Work:
        near = [tensor.cpu() for tensor in tensors]
        return _Work(getattr(self._group, name)(near, *more), tensors, near)

    def allreduce(self, tensors: list[torch.Tensor]) -> _Work:
        return self._begin("allreduce", tensors)

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        return self._begin("reduce", tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        return self._begin("broadcast", tensors, options)

    def allgather(self, found: list[list[torch.Tensor]], own: list[torch.Tensor]) -> _Work:
        near = [tensor.cpu() for tensor in found[0]]
        work = self._group.allgather([near], [tensor.cpu() for tensor in own])
        return _Work(work, found[0], near)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._group = self._make()

    def abort(self) -> None:
        self.aborted += 1
        self._group = None


class StandInBackend(nccl_groups.NcclBackend):
    """NCCL's, on a device or in the memory of the host, where tensors are copied instead.

    Args:
        host: at which a member listens.
        gpu: what its GPU is called.
        device: where its tensors lie.
    """

    def __init__(self, host: str, gpu: str, device: torch.device) -> None:
        super().__init__(device)
        self._host, self._gpu = host, gpu
        self.made: list[_Group] = []

    def inside(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._device.type == "cpu" else super().inside()

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self._device.type == "cpu" else super().near(tensor)

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

    def check(self, router: Router, home: torch.device) -> None:
        assert dist.is_gloo_available()

    def join(self, place: GroupPlace, ways: Ways) -> ProcessGroup:
        assert ways.router.transport is not None
        gpu = f"GPU-{0 if self.shared else place.rank}"
        return TorchGroup(
            place, ways, StandInBackend(ways.router.transport.listens_at or "", gpu, place.home)
        )
