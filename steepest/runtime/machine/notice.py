"""The notice that this machine will go, in memory which the program and its processes share."""

from __future__ import annotations

import mmap
import os

_GIVEN = b"\x01"


class Notice:
    """Whether this machine was announced to go.

    Args:
        descriptor: of the memory; None makes memory anew.

    Attributes:
        descriptor: which processes that are started inherit.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("steepest notice")
            os.truncate(descriptor, len(_GIVEN))
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, len(_GIVEN))

    @property
    def is_given(self) -> bool:
        """Whether `give` was called, in this process or in one that shares the memory; False once it is closed."""
        return not self._memory.closed and self._memory[:] == _GIVEN

    def give(self) -> None:
        """Announce to all that share the memory that the machine will go; do nothing once it is closed."""
        if not self._memory.closed:
            self._memory[:] = _GIVEN

    def close(self) -> None:
        """Release the memory and its descriptors in this process."""
        self._memory.close()
        os.close(self.descriptor)
