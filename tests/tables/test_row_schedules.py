"""Random schedules of what happens to rows, in simulations, on processes of this machine, and on Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from steepest.tables.files import row_pieces
from steepest.tables.job import row_writer, table_chunk
from steepest.tables.rows import tiered_rows
from tests.row_schedules import Schedule


# 221: a server dies soon after a worker, whose disk had the rows of the last snapshot too
@pytest.mark.parametrize(
    "seed", [221, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(20))]
)
def test_rows_are_those_of_a_dict_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(table_chunk, "_PIECE_BYTES", 150)
    monkeypatch.setattr(row_pieces, "PIECE_BYTES", 150)
    monkeypatch.setattr(row_writer, "PART_BYTES", 200)
    monkeypatch.setattr(tiered_rows, "_LEAST", 4)
    Schedule(seed, tmp_path, simulated=True).run(12)


@pytest.mark.full
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_so_they_are_with_real_processes(tmp_path: Path, seed: int) -> None:
    Schedule(seed, tmp_path, simulated=False).run(12)


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_so_they_are_on_ray(tmp_path: Path) -> None:
    Schedule(2000, tmp_path, simulated=False).run(8)
