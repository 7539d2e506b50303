"""Process groups of torch.distributed's NCCL: tensors are added up on GPUs, where they lie. No GPU has run this yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from steepest.core.config.run import environment
from steepest.core.engine.present_gpu import choose_gpu
from steepest.core.system import system
from steepest.core.transport.router import Router
from steepest.errors import ConfigurationError, DataPlaneError
from steepest.strategies.process_groups.group import GroupPlace, ProcessGroup, Ways
from steepest.strategies.process_groups.torch_groups import KeyStore, TorchGroup, check_process

#: Seconds between two looks whether an operation is over.
_LOOKS = 0.0002

#: NCCL's watchdog ends the whole process where a member dies or is late; without it errors are raised.
_NO_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
_making = system().lock()  # groups are made one at a time in a process, which has one environment


class NcclBackend:
    """NCCL on one GPU, see `Backend`; the few tensors in the host's memory are copied there and back.

    It works on a stream of its own, beside the model's. An operation is awaited by polling its event, so that leaving
    the group aborts the operation. Until all members are connected it cannot be interrupted.

    Args:
        device: the GPU.
    """

    name = "NCCL"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Use the GPU, and a stream of its own on it."""
        choose_gpu(self._device)
        with torch.Stream(self._device):
            yield

    def make(self, store: KeyStore, place: GroupPlace) -> Any:
        """See `Backend`; DataPlaneError: two members share a GPU."""
        self._require_own_gpus(store, place)
        with _making, environment(_NO_WATCHDOG):
            group = self._begin(store, place)
        try:
            group.eager_connect_single_device(self._device)
        except Exception:
            self.leave(group)
            raise
        return group

    def _begin(self, store: KeyStore, place: GroupPlace) -> Any:
        """Return a group of torch's, which is not connected yet."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=place.seconds)
        return dist.ProcessGroupNCCL(store, place.rank, place.size, options)

    def _gpu_of(self) -> str:
        """Return the GPU's name, which is unique among all hosts."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def _require_own_gpus(self, store: KeyStore, place: GroupPlace) -> None:
        """Check that no other member has this GPU, which NCCL would say late and unclearly."""
        own = self._gpu_of()
        store.set(f"gpu {place.rank}", own)
        for rank in range(place.size):
            if rank != place.rank and store.get(f"gpu {rank}").decode() == own:
                raise DataPlaneError(
                    f"workers {min(rank, place.rank)} and {max(rank, place.rank)} share one GPU, which NCCL refuses: "
                    'give each worker a GPU, or data_plane="gloo"'
                )

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the GPU."""
        return tensor.to(self._device)

    def finish(self, work: Any, look: Callable[[], None]) -> None:
        """See `Backend`."""
        while not work.is_completed():
            look()
            system().sleep(_LOOKS)
        work.wait()  # it raises what has failed, and lets this stream go on behind the operation

    def leave(self, group: Any) -> None:
        """Abort operations in progress, here; other members go on waiting until they leave, too."""
        group.abort()


class NcclGroups:
    """Makes groups of NCCL, see `Groups`, on the GPU where the worker has its gradient."""

    def check(self, router: Router, home: torch.device) -> None:
        """Check that this process has what a group needs.

        Raises:
            ConfigurationError: torch has no NCCL; the model is on no GPU; the process is simulated; its
                connections are encrypted, which NCCL's are not.
        """
        if not (dist.is_available() and dist.is_nccl_available()):
            raise ConfigurationError(
                'data_plane="nccl": this torch has no NCCL; install one with CUDA for Linux, give "gloo", or leave '
                "data_plane= out"
            )
        check_process("nccl", router)
        if home.type != "cuda":
            raise ConfigurationError(
                'data_plane="nccl" with models on CPUs: NCCL adds up on GPUs alone; give gpu=True, data_plane="gloo", '
                "or leave data_plane= out"
            )

    def join(self, place: GroupPlace, ways: Ways) -> ProcessGroup:
        """See `Groups`."""
        return TorchGroup(place, ways, NcclBackend(place.home))
