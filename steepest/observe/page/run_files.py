"""A run's files, read for its page: whole rows are used, whatever else is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steepest.errors import ConfigurationError
from steepest.observe.history_file import HISTORY, RECORD, read_rows
from steepest.observe.job_record import FORMAT
from steepest.observe.page.run_view import RunView
from steepest.storage.places import ObjectUrl, StoragePlace, place_of


def read_run(run: str | Path) -> RunView:
    """Return a run as its page shows it.

    Args:
        run: a directory of `Checkpoints`, or its URL; or a file such as ``history.jsonl``.

    Raises:
        ConfigurationError: there is no such run, or it is of another version.
    """
    folder, name = _place(run)
    view = RunView(_title(folder, name))
    try:
        _add(view, folder, name)
    except OSError as error:
        raise ConfigurationError(
            f"{run}: there is no run: {_why(error)}; give a directory of Checkpoints in which fit has kept "
            "a checkpoint, or its history.jsonl"
        ) from error
    try:
        if name == HISTORY:
            _add(view, folder, RECORD)
    except FileNotFoundError:
        view.notes.append(
            f"there is no {RECORD} beside the history, so nothing is known of single workers"
        )
    except OSError as error:
        view.notes.append(f"{RECORD} cannot be read: {_why(error)}")
    return view


def _place(run: str | Path) -> tuple[StoragePlace, str]:
    """Return the folder of a run, and its file's name."""
    place = place_of(run)
    if isinstance(place, ObjectUrl) or place.is_dir():
        return place, HISTORY
    return place.parent, place.name


def _title(folder: StoragePlace, name: str) -> str:
    here = folder if isinstance(folder, ObjectUrl) else folder.resolve()
    return here.name if name == HISTORY else name


def _add(view: RunView, folder: StoragePlace, name: str) -> None:
    """Add the rows of a file; note how many lines are none."""
    rows = torn = 0
    for row in read_rows(folder, name):
        if row is None or not _is_whole(row):
            torn += 1
            continue
        if row["kind"] == "job" and row.get("format") != FORMAT:
            wrote = f"steepest {row.get('steepest') or 'of an unknown version'}"
            raise ConfigurationError(
                f"{folder}: {wrote} wrote this run, in format {row.get('format')!r:.20}, and this version knows "
                f"format {FORMAT}: show it with the version that wrote it"
            )
        try:
            view.add(row)
            rows += 1
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
        ):  # some part of it is of another type
            torn += 1
    if torn and not rows:
        raise ConfigurationError(
            f"{folder / name}: none of its {torn} lines is a row of a history: give a directory of "
            "Checkpoints, or its history.jsonl"
        )
    if torn:
        what = "1 line is" if torn == 1 else f"{torn} lines are"
        view.notes.append(f"{name}: {what} not whole, as after a crash, and left out")


def _is_whole(row: dict[str, Any]) -> bool:
    """Return whether a row has what each row has, of the right types."""
    numbers = (row["time"], row["step"])
    return isinstance(row["kind"], str) and all(
        isinstance(each, (int, float)) and not isinstance(each, bool) for each in numbers
    )


def _why(error: OSError) -> str:
    return error.strerror or str(error)
