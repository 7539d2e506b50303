"""Files without a name, which are gone with the process that has them open, however it ends."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def nameless_file(directory: str) -> int:
    """Return the descriptor of a new file that no name leads to; OSError: the directory takes none."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix="steepest-rows-", dir=directory)
    os.unlink(name)
    return descriptor
