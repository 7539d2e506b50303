"""Windows of logs with offsets: which one a program trains on that goes on from its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steepest.checkpoint import files
from steepest.checkpoint.directory import CheckpointDirectory
from steepest.data.storage.places import place_of
from steepest.errors import CheckpointError, ConfigurationError
from steepest.validation import require_instance


def next_offsets(
    path: str | Path, ends: Mapping[Any, int], begins: Mapping[Any, int] | None = None
) -> dict[Any, tuple[int, int]]:
    """Return the window of a log on which a program trains next, for `OffsetStream`.

    It is the window of the newest checkpoint if its pass has not ended, however far the log is by now. Else it begins
    where that one ended. Each record is then in one pass, whatever ends the program.

    Args:
        path: of `Checkpoints`, which has ``data="new"``.
        ends: by partition, the offset behind its newest record.
        begins: by partition, where it begins if no checkpoint has it; 0 for the others.

    Returns:
        By partition, its first offset, and the one behind its last; they are equal where nothing has come.

    Raises:
        ConfigurationError: `ends` lacks a partition, or a partition ends before the offset at which it begins.
        CheckpointError: no checkpoint in the directory is whole, or the newest has no offsets.

    Example:
        >>> import tempfile
        >>> next_offsets(tempfile.mkdtemp(), {"clicks-0": 120, "clicks-1": 80}, begins={"clicks-1": 50})
        {'clicks-0': (0, 120), 'clicks-1': (50, 80)}
    """
    for name, value in (("ends", ends), ("begins", begins or {})):
        require_instance(name, value, Mapping)
    shelf = CheckpointDirectory(place_of(path), 1)
    newest = next(shelf.newest_first(files.read_apart), None)
    before: dict[str, tuple[int, int]] = {}
    is_over = True
    if newest is not None:
        where, saved = newest
        if "offsets" not in saved.about:
            raise CheckpointError(
                f"the checkpoint at {where} has no offsets: it was trained on other data than an OffsetStream; give "
                "another path, and begin with its weights"
            )
        before = {name: (begin, end) for name, (begin, end) in saved.about["offsets"].items()}
        is_over = files.is_pass_over(saved.about)
    names = {str(partition): partition for partition in ends}
    if missing := [name for name in before if name not in names]:
        raise ConfigurationError(
            f"ends={dict(ends)!r:.200} lacks partition {missing[0]!r}, which the newest checkpoint has: give it, too"
        )
    if not is_over:
        return {names[name]: window for name, window in before.items()}
    window = {}
    for name, partition in names.items():
        begin = before[name][1] if name in before else (begins or {}).get(partition, 0)
        if not begin <= ends[partition]:
            raise ConfigurationError(
                f"partition {partition!r} ends at {ends[partition]!r:.80}, before {begin}, up to which it was trained: "
                "give the log that it was, or other checkpoints"
            )
        window[partition] = (begin, ends[partition])
    return window
