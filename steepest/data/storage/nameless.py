"""Files without a name: the system removes them when the process that has them open ends."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

# what Linux answers for a file system that cannot have files without a name; old kernels say EISDIR
_NOT_HERE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


def nameless_file(directory: str) -> int:
    """Return the descriptor of a new file that no name leads to; OSError: the directory takes none.

    On Linux the file never has a name, so that a process killed in here leaves nothing behind. Where
    the system or the file system cannot do that, the name is taken away at once.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
    descriptor, name = tempfile.mkstemp(prefix="steepest-rows-", dir=directory)
    os.unlink(name)
    return descriptor
