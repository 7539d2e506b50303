"""A collective over a process group of torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from steepest.errors import DeadlineError, PeerLostError
from steepest.strategies.collectives.protocol import Collective


class TorchCollective(Collective):
    """A `Collective` over a process group that sends and receives on the CPU, such as Gloo's.

    A message is bytes alone there: members do not compare what it is of.

    Args:
        group: a process group; `abort` drops it, which closes its connections if nothing else here
            holds it.
        deadline: of each wait, in seconds.

    Example:
        >>> store = torch.distributed.HashStore()
        >>> group = torch.distributed.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))
        >>> TorchCollective(group, deadline=10.0).broadcast(torch.ones(2), root=0)
        tensor([1., 1.])
    """

    def __init__(self, group: Any, deadline: float) -> None:
        super().__init__(group.rank(), group.size(), deadline)
        self._group = group
        self._aborted = ""

    def _send(self, memory: torch.Tensor, to: int, what: str) -> _TorchWork:
        return self._begin("send", memory, to)

    def _receive(self, memory: torch.Tensor, source: int, what: str) -> _TorchWork:
        return self._begin("recv", memory, source)

    def _begin(self, what: str, memory: torch.Tensor, other: int) -> _TorchWork:
        if self._aborted:
            raise PeerLostError(f"the collective was aborted: {self._aborted}")
        try:
            return _TorchWork(self, getattr(self._group, what)([memory], other, 0), other)
        except RuntimeError as error:
            raise PeerLostError(f"member {other} is gone: {error}") from error

    def abort(self, reason: str) -> None:
        """End every operation in progress; the other members see the connection close."""
        self._aborted = self._aborted or reason
        self._group = None


class _TorchWork:
    def __init__(self, member: TorchCollective, work: Any, other: int) -> None:
        self._member, self._work, self._other = member, work, other

    def wait(self) -> None:
        member = self._member
        try:
            self._work.wait(timedelta(seconds=member.deadline))
        except RuntimeError as error:
            if "imed out" in str(error):
                raise DeadlineError(
                    f"member {member.rank} waited {member.deadline:g} s in vain for a message by "
                    f"member {self._other}"
                ) from error
            raise PeerLostError(f"member {self._other} is gone: {error}") from error
