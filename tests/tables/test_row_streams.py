"""A thousand random schedules of what rows go through between servers and files, twenty in a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from steepest.tables.files import row_pieces
from steepest.tables.job import row_writer, table_chunk
from tests.row_streams import RowStreams


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(0, 1000, 20))
def test_rows_of_shards_and_files_are_those_of_a_dict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(table_chunk, "_PIECE_BYTES", 150)
    monkeypatch.setattr(row_pieces, "PIECE_BYTES", 150)
    monkeypatch.setattr(row_writer, "PART_BYTES", 200)
    for seed in range(first, first + 20):
        RowStreams(seed, tmp_path / str(seed)).run(25)
