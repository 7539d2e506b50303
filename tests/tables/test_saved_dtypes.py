"""Exports written in fewer bytes: how near their values are, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from steepest import ExportedTable
from steepest.errors import CheckpointError, ConfigurationError

ROWS, DIM = 50, 16


def export(dtype: torch.dtype = torch.float32) -> ExportedTable:
    drawn = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, DIM, generator=drawn, dtype=torch.float64)
    values[0], values[1, 0] = 0.0, 60_000.0  # a row of zeros, one with an outlier
    ids = torch.randperm(10**6, generator=drawn)[:ROWS].sort().values
    return ExportedTable("words", ids, values.to(dtype), version=7, place=[[0, 7, 1]], unknown=0.5)


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("dtype", "share"), [("float16", 0.5), ("bfloat16", 0.5), ("int8", 0.25)])
def test_values_are_rounded_to_the_nearest(
    dtype: str, share: float, own: torch.dtype, tmp_path: Path
) -> None:
    table, path = export(own), tmp_path / "words"
    table.save(path, dtype=dtype)
    saved = load_file(path)
    assert saved["values"].nbytes == share * ROWS * DIM * 4
    found = ExportedTable.load(path)
    values = table.values.float()
    if dtype == "int8":
        assert found.values.dtype is torch.float32
        unit = values.abs().amax(dim=1, keepdim=True) / 127
        assert bool(((found.values - values).abs() <= unit * 0.5001).all())
        assert torch.equal(found.values[0], torch.zeros(DIM))
    else:
        assert torch.equal(found.values, table.values.to(getattr(torch, dtype)))
    assert torch.equal(found.ids, table.ids)
    assert (found.version, found.unknown, found.cursor) == (7, 0.5, table.cursor)
    again = found.look_up(torch.tensor([int(table.ids[3]), 10**7]))
    assert torch.equal(again[0], found.values[3])
    assert again[1].tolist() == [0.5] * DIM


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_an_export_without_rows_is_written_too(dtype: str, tmp_path: Path) -> None:
    empty = ExportedTable("words", torch.empty(0, dtype=torch.int64), torch.empty(0, DIM))
    empty.save(tmp_path / "words", dtype=dtype)
    assert ExportedTable.load(tmp_path / "words").values.shape == (0, DIM)


def test_what_cannot_be_written_so_is_refused(tmp_path: Path) -> None:
    table = export()
    table.values[2, 0] = 1e6
    with pytest.raises(ConfigurationError, match=r"values up to 1e\+06, beyond torch.float16"):
        table.save(tmp_path / "words", dtype="float16")
    table.values[2, 0] = torch.nan
    with pytest.raises(ConfigurationError, match="not finite"):
        table.save(tmp_path / "words", dtype="int8")
    with pytest.raises(ConfigurationError, match="dtype='int4': give one of"):
        table.save(tmp_path / "words", dtype="int4")
    assert not (tmp_path / "words").exists()


def test_a_file_with_other_scales_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "words"
    export().save(path, dtype="int8")
    with safe_open(path, "pt") as file:
        about = file.metadata()
    for scales in (torch.ones(ROWS - 1), torch.zeros(ROWS), torch.ones(ROWS)):
        save_file(load_file(path) | {"scales": scales}, tmp_path / "other", metadata=about)
        with pytest.raises(CheckpointError, match="no whole exported table"):
            ExportedTable.load(tmp_path / "other")
