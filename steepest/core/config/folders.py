"""Folders and files that only this user can read."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from steepest.errors import ConfigurationError


def private_folder(base: Path, name: str, what: str) -> Path:
    """Return a folder that only this user can read, created if it is missing.

    Args:
        base: the parent folder, which may be shared by all users.
        name: of the folder; the user's number is appended.
        what: the contents, for the error.

    Raises:
        ConfigurationError: another user owns it, or can read it.
    """
    folder = base / f"{name}-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigurationError(
            f"{folder} is not a directory of this user's that others cannot read: remove it, since {what} are there"
        )
    return folder


def private_file(path: Path, text: str) -> None:
    """Write a file anew that only this user can read."""
    path.unlink(missing_ok=True)
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(opened, "w") as stream:
        stream.write(text)
