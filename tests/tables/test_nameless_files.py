"""Files without a name: nothing is left behind, whenever the process that made them is killed."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from steepest.data.storage.nameless import nameless_file
from steepest.tables.files.row_files import RowFiles


def written_and_read(descriptor: int) -> bytes:
    """Return what a file says that was written a word."""
    try:
        os.pwrite(descriptor, b"word", 0)
        return os.pread(descriptor, 4, 0)
    finally:
        os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs Linux")
def test_the_file_never_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*args: Any, **more: Any) -> None:
        raise AssertionError("a process killed behind this would leave the file")

    monkeypatch.setattr(tempfile, "mkstemp", named)
    assert written_and_read(nameless_file(str(tmp_path / "new"))) == b"word"


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs Linux")
def test_a_file_system_that_knows_only_names_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuses(path: str, flags: int, *args: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return opened(path, flags, *args)

    monkeypatch.setattr(os, "open", refuses)
    assert written_and_read(nameless_file(str(tmp_path))) == b"word"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        nameless_file(str(tmp_path / "file"))


def test_files_of_a_snapshot_that_has_begun_meanwhile_stay(tmp_path: Path) -> None:
    """A process may hear late that the others are not needed."""
    files = RowFiles()
    for number in (-1, 1, 2, 3):
        files.write(number, "rows", 0, b"some", str(tmp_path))
    files.keep_only([1], 2)
    assert [number for number in (-1, 1, 2, 3) if files.names(number)] == [-1, 1, 3]
    files.keep_only([], 3)
    assert [number for number in (-1, 1, 2, 3) if files.names(number)] == [-1]
