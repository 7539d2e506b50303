"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

from steepest.errors import ConfigurationError


def write_whole(target: Path, content: bytes) -> None:
    """Write a file that is never half there; ConfigurationError: it cannot be written."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, target)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigurationError(
            f"--output {target}: it cannot be written there: {error.strerror}"
        ) from error
