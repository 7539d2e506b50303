"""Files that commands write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from steepest.errors import ConfigurationError

_KINDS = (".html", ".csv", ".png")


def write_whole(target: Path, content: bytes) -> None:
    """Write a file atomically; ConfigurationError: it cannot be written."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, target)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigurationError(
            f"--output {target}: it cannot be written there ({error.strerror}): give another path"
        ) from error


def check_outputs(outputs: Sequence[Path]) -> None:
    """Check that each file of results can be created."""
    for output in outputs:
        if output.suffix.lower() not in _KINDS:
            raise ConfigurationError(
                f"--output {output}: give a name that ends with one of {', '.join(_KINDS)}"
            )
        if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
            raise ConfigurationError(
                f"{output}: {output.parent} is no directory that can be written to: make it, or give another path"
            )
        if output.suffix.lower() == ".png" and find_spec("matplotlib") is None:
            raise ConfigurationError(
                f"{output} is drawn with matplotlib, which is not installed: pip install 'steepest[bench]'"
            )
