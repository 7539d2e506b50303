"""A lock on a directory of kept checkpoints: one driver at a time writes there; at a URL it is a lease."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable

from steepest.checkpoint.files import Checkpoints
from steepest.checkpoint.prefix_lease import PrefixLease
from steepest.data.storage.places import ObjectUrl, place_of
from steepest.errors import CheckpointError

log = logging.getLogger(__name__)
_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)
LOCK = "lock"


class DirectoryLock:
    """A lock on a directory, which the kernel releases when this process ends, however it ends.

    It is a lock on the file `lock` there, which names the process that holds it, and is not removed. On
    file systems without locks a warning is logged, and nothing is locked. At a URL it is a `PrefixLease`.
    """

    def __init__(self, policy: Checkpoints | None) -> None:
        self.release: Callable[[], None] = lambda: None  # releases the lock; may be called twice
        # raises CheckpointError if a lease is lost; a lock is not
        self.check: Callable[[], None] = lambda: None
        if policy is None:
            return
        folder = place_of(policy.path)
        if isinstance(folder, ObjectUrl):
            lease = PrefixLease(folder)
            self.release, self.check = lease.release, lease.check
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open(folder / LOCK, "a+b", buffering=0)  # noqa: SIM115 - it is open as long as the lock is held
        except OSError as error:
            raise CheckpointError(f"cannot keep checkpoints in {folder}: {error}") from error
        self.release = file.close
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
            # a child that outlives this process must not keep the lock
            os.register_at_fork(after_in_child=file.close)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(300).decode(errors="replace") or "another driver"
            file.close()
            raise CheckpointError(
                f"cannot keep checkpoints in {folder}: {holder} keeps its own there, and two would "
                "delete each other's; wait for its end or call its shutdown(), or give this run "
                "another path"
            ) from None
        except OSError as error:
            file.close()
            if error.errno not in _UNSUPPORTED:
                raise CheckpointError(f"cannot keep checkpoints in {folder}: {error}") from error
            log.warning(
                "%s is on a file system without locks (%s): let no other driver keep its own there",
                folder,
                error,
            )
