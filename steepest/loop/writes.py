"""A check that a loop undoes its own writes to trained parameters."""

from __future__ import annotations

from typing import Any

import torch

from steepest.core.models.write_check import WriteCheck
from steepest.core.tensors.shared_memory import forget_writes
from steepest.loop.unseen import Unseen

_FIRST_TURNS, _FIRST_READS = 8, 16
_address_of = torch._C.TensorBase.data_ptr  # a loop's own reading of addresses is watched
_ROUNDINGS = 64  # by which a value that was changed and changed back may differ, relative to its tensor's largest

#: All weights, a copy of them where they are compared, and the versions of parameters, before a turn.
Before = tuple[torch.Tensor, torch.Tensor | None, list[int]]


class LoopWrites(WriteCheck):
    """A check around each turn of a user's loop: writes to trained parameters have to be undone before a step.

    Sharpness-aware minimisation does so. What it leaves of roundings is undone. Weights are compared with a copy
    in the first turns, in which a loop that writes is found out, and from the first turn on in which it did. They
    are also where the loop reads what lets it write without that being counted (`.data`, say): the first times,
    and then now and then, since one that averages weights reads it in each turn.
    A turn is between `begin` and `end`, not in a context: one is entered in each step.
    """

    def __init__(self, unseen: Unseen) -> None:
        super().__init__()
        self._unseen = unseen
        self._read: torch.Tensor | None = None  # a copy of the weights from before that was read
        self._reads = 0  # turns in which it was
        self._turns = 0
        self._writes = False  # whether a trained parameter was ever written to, or is to be

    def expect(self) -> None:
        """Expect that the loop writes to trained parameters, and undoes that; as it tries values, say."""
        self._writes = True

    @property
    def compares(self) -> bool:
        """Whether the next turn is compared with a copy, see `WriteCheck.compares`."""
        return self._writes or self._turns < _FIRST_TURNS or super().compares

    def begin(self) -> Before:
        """Begin a turn; return the state of the parameters before it."""
        values = self._values
        before = values.clone() if self.compares else None
        self._unseen.look = self._look if before is None else None
        self._passes += 1
        self._turns += 1
        return values, before, [parameter._version for parameter in self._parameters]

    def end(self, begun: Before) -> str | None:
        """End a turn that has `begun`: undo, as far as values are known, what it has left in a parameter.

        Return the name of the first parameter that had changed, or None.
        """
        values, before, versions = begun
        if self._unseen.look is None and before is None:
            before, self._read = self._read, None
        self._unseen.look = None
        before = before if values is self._values else None  # other weights have come meanwhile
        name = self._find(versions, before)
        if name is not None:
            self._writes = True
            if before is not None:
                name = self._left(before)
            self._put_back()
            if before is not None:
                self._values.copy_(before)
                forget_writes(self._values)
        return name

    def _look(self, tensor: Any) -> None:
        """Keep the weights if a tensor that is read lies in them."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return
        if not 0 <= _address_of(tensor) - _address_of(self._values) < self._values.nbytes:
            return
        self._unseen.look = None
        self._reads += 1
        if self._reads <= _FIRST_READS or self._reads & (self._reads - 1) == 0:
            self._read = self._values.clone()

    def _left(self, before: torch.Tensor) -> str | None:
        """Return the name of the first parameter that differs by more than roundings, or None."""
        raw = before.view(torch.uint8)
        for (name, view), parameter in zip(self._views.items(), self._parameters, strict=True):
            start = view.data_ptr() - self._values.data_ptr()
            was = raw[start : start + view.nbytes].view(view.dtype).view(view.shape)
            now = parameter.detach()
            if now.shape != was.shape or now.dtype != was.dtype:
                return name
            largest = was.abs().max() if was.numel() else was.sum()
            allowed = _ROUNDINGS * torch.finfo(was.dtype).eps * (largest + 1)
            if not bool(((now - was).abs() <= allowed).all()):
                return name
        return None
