"""A check that a loop does not leave trained parameters as it has written to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from steepest.core.models.write_check import WriteCheck
from steepest.core.tensors.shared_memory import forget_writes
from steepest.errors import ModelError

_FIRST_TURNS = 8
_ROUNDINGS = 64  # by which a value that was changed and changed back may differ, relative to its tensor's largest


class LoopWrites(WriteCheck):
    """A check around each turn of a user's loop, which may write to trained parameters if it undoes that before a step.

    Sharpness-aware minimisation does so. What it leaves of roundings is undone. Weights are compared with a copy in the
    first turns, in which a loop that writes is found out, and from the first turn on in which it did.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turns = 0
        self._writes = False  # whether a trained parameter was ever written to

    @property
    def compares(self) -> bool:
        """Whether the next turn is compared with a copy, see `WriteCheck.compares`."""
        return self._writes or self._turns < _FIRST_TURNS or super().compares

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Run a turn inside of this context."""
        # ModelError, and undo as far as values are known, if a parameter is not what it was.
        values = self._values
        before = values.clone() if self.compares else None
        self._passes += 1
        self._turns += 1
        versions = [parameter._version for parameter in self._parameters]
        try:
            yield
        finally:
            before = before if values is self._values else None  # other weights have come meanwhile
            found = self._find(versions, before)
            if found is not None:
                self._writes = True
                if before is not None:
                    found = self._left(before)
                self._put_back()
                if before is not None:
                    self._values.copy_(before)
                    forget_writes(self._values)
        if found is not None:
            raise ModelError(
                f"the loop has written to the trained parameter {found!r}, which only the optimizer changes, because "
                "the other workers would not see it: undo it before optimizer.step(), as sharpness-aware minimisation "
                "does; give what is done to it after each step to steepest.prepare(..., project=f); or use a "
                "parametrization (torch.nn.utils.parametrize)"
            )

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
