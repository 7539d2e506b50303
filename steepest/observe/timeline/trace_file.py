"""Trace files: JSON of Chrome's trace format, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from steepest.data.storage.files import open_file
from steepest.errors import ConfigurationError

#: Of what steepest writes into a trace's metadata; another one is refused.
FORMAT = 1


def check_target(path: str | Path) -> Path:
    """Return the path of a trace that is to be written.

    Raises:
        ConfigurationError: it cannot be written there.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigurationError(f"a timeline was given {path!r:.100}: give the path of a file")
    target = Path(path)
    if target.is_dir():
        raise ConfigurationError(f"timeline {target}: that is a directory: give a file's path")
    unfinished = _unfinished(target)
    try:
        unfinished.touch()
        unfinished.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"timeline {target}: it cannot be written there ({error.strerror or error}): give another path"
        ) from error
    return target


def write_trace(
    path: Path, events: Iterable[Mapping[str, Any]], description: Mapping[str, Any]
) -> int:
    """Write a trace, in place of what was there; return the number of events.

    Raises:
        ConfigurationError: it could not be written; what was there stays.
    """
    unfinished, count = _unfinished(path), 0
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            said = json.dumps({"steepest": FORMAT, **description})
            file.write('{"displayTimeUnit": "ms", "otherData": ' + said + ', "traceEvents": [')
            for count, event in enumerate(events, 1):
                file.write(("\n" if count == 1 else ",\n") + json.dumps(event))
            file.write("\n]}\n")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigurationError(
            f"timeline {path}: it could not be written ({error.strerror or error}): give another path"
        ) from error
    return count


def _unfinished(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")


def read_trace(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of a trace, and its metadata.

    Raises:
        ConfigurationError: there is no such file, or it is no whole trace of steepest.
    """
    try:
        with open_file(Path(path)) as file:
            content = json.loads(file.read().decode())
    except OSError as error:
        raise ConfigurationError(
            f"{path}: there is no trace to be read ({error.strerror or error}): give the path of one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is no whole trace: {error}; give a file that `sgd.timeline(...)` or `steepest run "
            "--timeline` has written"
        ) from error
    description = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(description, dict) or "steepest" not in description:
        raise ConfigurationError(
            f"{path} is no trace of steepest: give a file that `sgd.timeline(...)` or `steepest run --timeline` has "
            "written"
        )
    if description["steepest"] != FORMAT:
        raise ConfigurationError(
            f"{path} is a trace of another version of steepest (format {description['steepest']!r:.20}, this one reads "
            f"{FORMAT}): explain it with that version"
        )
    events = content.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(each, dict) for each in events):
        raise ConfigurationError(
            f"{path} is no whole trace: it has no list of events; give a file that `sgd.timeline(...)` or "
            "`steepest run --timeline` has written"
        )
    return events, description
