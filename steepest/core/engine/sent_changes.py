"""The last changes of one chunk's weights that readers are sent in the form of a codec."""

from __future__ import annotations

from collections import deque

import torch


class SentChanges:
    """The changes of a chunk from version to version, each of which readers add to what they have.

    A reader that was sent some version is sent all changes since, one behind the other, so that it has the
    same bits as every other reader of the version. The last one is always kept, earlier ones while all
    together are fewer bytes than the chunk.

    Args:
        most: bytes of the chunk, which a reader is sent as it is where the changes are not fewer; 0 to
            keep the last change alone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._since = -1  # the least version after which all changes are kept
        self._changes: deque[tuple[int, torch.Tensor]] = deque()  # each with the version it makes
        self._nbytes = 0

    def add(self, version: int, packed: torch.Tensor, *, whole: bool = False) -> None:
        """Keep the change that makes a version, uint8, which must not change; `whole`: it is the chunk itself."""
        if whole:  # readers of earlier versions cannot add it
            self._changes.clear()
            self._since, self._nbytes = version, 0
            return
        self._changes.append((version, packed))
        self._nbytes += packed.nbytes
        while len(self._changes) > 1 and self._nbytes >= self._most:
            self._since, dropped = self._changes.popleft()
            self._nbytes -= dropped.nbytes

    def after(self, version: int | None) -> torch.Tensor | None:
        """Return the changes after a version, None for the last, as one tensor, uint8; None if they are unknown."""
        if version is None:
            return self._changes[-1][1] if self._changes else None
        if version < self._since:
            return None
        found = [packed for made, packed in self._changes if made > version]
        return torch.cat(found) if len(found) > 1 else next(iter(found), None)
