"""A process' body that says what its process had imported before it was made."""

from __future__ import annotations

import sys

_BEFORE = frozenset(sys.modules)


class Imported:
    """A body of a process."""

    def before(self, module: str) -> bool:
        """Return whether the process had a module before this one."""
        return module in _BEFORE
