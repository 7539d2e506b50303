"""A run's files, read for its page: whole rows are used, whatever else is in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from steepest.data.storage.places import ObjectUrl, StoragePlace, place_of
from steepest.errors import ConfigurationError
from steepest.observe.history_file import HISTORY, RECORD, GrowingFile, read_rows
from steepest.observe.job_record import FORMAT
from steepest.observe.page.run_view import Known, RunView

_MOST = 1 << 62  # of a step, and of a time
_PAUSE_SECONDS = 0.4  # from one look at a directory to the next
_STORE_SECONDS = 10.0  # likewise of an object store


#: Yields the rows of a file of a run, by its name; OSError: it is not there.
Reader = Callable[[str], Iterable[dict[str, Any] | None]]


def read_run(run: str | Path) -> RunView:
    """Return a run as its page shows it.

    Args:
        run: a directory of `Checkpoints`, or its URL; or a file such as ``history.jsonl``.

    Raises:
        ConfigurationError: there is no such run, or it is of another version.
    """
    folder, _ = _place(run)
    return _view_of(run, lambda name: read_rows(folder, name))


def _view_of(run: str | Path, read: Reader) -> RunView:
    """Return a run whose files are read in a way."""
    folder, name = _place(run)
    view = RunView(_title(folder, name))
    try:
        _add(view, folder / name, read(name))
    except OSError as error:
        raise ConfigurationError(
            f"{run}: there is no run: {_why(error)}; give {_instead(folder)}"
        ) from error
    try:
        if name == HISTORY:
            _add(view, folder / RECORD, read(RECORD))
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


def _instead(folder: StoragePlace) -> str:
    """Return a hint for a folder that is no run's: what to give instead."""
    if isinstance(folder, Path) and (folder.parent / HISTORY).is_file():
        return f"{folder.parent}, the run of which it is a part"
    return "a directory of Checkpoints in which fit has kept a checkpoint, or its history.jsonl"


def _title(folder: StoragePlace, name: str) -> str:
    here = folder if isinstance(folder, ObjectUrl) else folder.resolve()
    return here.name if name == HISTORY else name


def _add(view: RunView, file: StoragePlace, read: Iterable[dict[str, Any] | None]) -> None:
    """Add the rows of a file; note how many lines are none."""
    rows = torn = 0
    for row in read:
        if row is None or not _is_whole(row):
            torn += 1
            continue
        if row["kind"] == "job" and row.get("format") != FORMAT:
            version = str(row.get("steepest") or "of an unknown version")
            wrote = (
                "steepest " + repr(version[:40])[1:-1]
            )  # no control character reaches a terminal
            raise ConfigurationError(
                f"{file}: {wrote} wrote this run, in format {row.get('format')!r:.20}, and this version knows "
                f"format {FORMAT}: show it with the version that wrote it"
            )
        if _try_to_add(view, row):
            rows += 1
        else:
            torn += 1
    if torn and not rows:
        raise ConfigurationError(
            f"{file}: none of its {torn} lines is a row of a history: give a directory of "
            "Checkpoints, or its history.jsonl"
        )
    if torn:
        what = "1 line is" if torn == 1 else f"{torn} lines are"
        view.notes.append(f"{file.name}: {what} not whole, as after a crash, and left out")


def _is_whole(row: dict[str, Any]) -> bool:
    """Return whether a row has what each row has, of the right types."""
    numbers = (row["time"], row["step"])
    whole = (type(each) in (int, float) and -_MOST < each < _MOST for each in numbers)
    return isinstance(row["kind"], str) and all(whole)


def _why(error: OSError) -> str:
    return error.strerror or str(error)


class WatchedRun:
    """A run's files as a page shows them while they grow; they are read when the page is asked for.

    Raises:
        ConfigurationError: see `read_run`.
    """

    def __init__(self, run: str | Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._folder, name = _place(run)
        self._growing: dict[str, GrowingFile] = {}
        if isinstance(self._folder, Path):
            names = {name, RECORD} if name == HISTORY else {name}
            self._growing = {each: GrowingFile(self._folder / each) for each in names}
        self._pause = _PAUSE_SECONDS if self._growing else _STORE_SECONDS
        began = time.monotonic()
        self._view = self._read()
        self._put_off(began)

    def as_json(self, known: Known) -> dict[str, Any]:
        """Return the data of the page."""
        return self.view.as_json(known)

    def stacks(self) -> str:
        """Return a sentence: there is no job to ask."""
        return "this page shows files: a live job's own page has the stacks of its processes"

    def log(self, process: str) -> str:
        """Return a sentence: there is no process to ask."""
        return "this page shows files: a live job's own page has the output of its processes"

    @property
    def view(self) -> RunView:
        """The run as it is now."""
        with self._lock:
            if time.monotonic() >= self._next:
                self._look()
            return self._view

    def _read(self) -> RunView:
        """Read all."""
        for file in self._growing.values():
            file.begin_again()
        return _view_of(self._run, self._rows)

    def _rows(self, name: str) -> Iterable[dict[str, Any] | None]:
        """Return the rows of a file that were not read."""
        return self._growing[name].rows() if self._growing else read_rows(self._folder, name)

    def _look(self) -> None:
        """Read new rows; read all files again if they were written anew or cannot be read in part."""
        began, view, files = time.monotonic(), self._view, self._growing
        try:
            if not files or any(file.is_another() for file in files.values()):
                self._view = self._read()
                self._view.follow(view)
            else:
                for file in filter(lambda file: file.is_there, files.values()):
                    for row in file.rows():
                        if row is not None and _is_whole(row):
                            _try_to_add(view, row)
        except (ConfigurationError, OSError) as error:  # it was removed
            view.notes[:] = [str(error)]
        self._put_off(began)

    def _put_off(self, began: float) -> None:
        """Delay the next read: it comes after a multiple of the time that this one took."""
        now = time.monotonic()
        self._next = now + max(self._pause, 5 * (now - began))


def _try_to_add(view: RunView, row: Mapping[str, Any]) -> bool:
    """Add a row; return whether it was valid."""
    try:
        view.add(row)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # some part of it is of another type, or beyond all measure
        return False
    return True
