"""Process groups over Gloo of which a member dies, or fails, between two operations, for worker processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from steepest.strategies.process_groups.group import (
    Broadcast,
    Gather,
    GroupPlace,
    ProcessGroup,
    Reduce,
    Ways,
)
from steepest.strategies.process_groups.torch_groups import (
    Backend,
    GlooBackend,
    TorchGroup,
    TorchGroups,
)


class StrikingGroups(TorchGroups):
    """Groups in which one member dies, or fails, once.

    Args:
        folder: an empty one, where that is noted.
        rank: of the member.
        operation: before which of its operations in a group, from 0, that happens.
        dies: whether its process is killed; otherwise the operation raises.
    """

    def __init__(self, folder: Path, rank: int, operation: int, *, dies: bool = True) -> None:
        self.folder, self.rank, self.operation, self.dies = folder, rank, operation, dies

    def join(self, place: GroupPlace, ways: Ways) -> ProcessGroup:
        assert ways.router.transport is not None
        backend = GlooBackend(ways.router.transport.listens_at or "")
        if place.rank != self.rank or list(self.folder.iterdir()):
            return TorchGroup(place, ways, backend)
        return _Doomed(self, place, ways, backend)


class _Doomed(TorchGroup):
    def __init__(
        self, groups: StrikingGroups, place: GroupPlace, ways: Ways, backend: Backend
    ) -> None:
        self._groups, self._left = groups, groups.operation
        super().__init__(place, ways, backend)

    def _exchange(
        self, group: Any, operation: Reduce | Broadcast | Gather
    ) -> list[torch.Tensor] | None:
        if not self._left:
            (self._groups.folder / "struck").touch()
            if self._groups.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a cable was cut")
        self._left -= 1
        return super()._exchange(group, operation)
