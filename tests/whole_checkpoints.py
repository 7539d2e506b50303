"""Checkpoints with the rows of their tables, which a job leaves to its servers to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from steepest.checkpoint import files
from steepest.checkpoint.directory import CheckpointDirectory
from steepest.data.storage.places import StoragePlace
from steepest.errors import CheckpointError
from steepest.tables.files.row_pieces import rows_of_shard
from steepest.tables.files.saved_rows import CheckpointRows, SavedFile
from steepest.tables.rows.state import appended


def all_of(path: StoragePlace) -> files.Checkpoint:
    """The checkpoint at a path, with the rows of those that it continues among its optimizer's state, in order."""
    saved = files.read_apart(path)
    if (rows := saved.saved_rows) is None:
        return saved
    return replace(saved, optimizer=saved.optimizer | rows_by_shard(rows, path), saved_rows=None)


def rows_by_shard(rows: CheckpointRows, path: object) -> dict[str, torch.Tensor]:
    """The rows of a checkpoint by "tables/shard/key"."""

    def read(file: SavedFile) -> Mapping[str, torch.Tensor]:
        try:
            return file.tensors()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"damaged checkpoint at {path}: {file.name}: {error}") from error

    found: dict[str, torch.Tensor] = {}
    for shard, mark in enumerate(rows.marks):
        state = appended(rows_of_shard(rows, shard, 2**15, read)).sorted()
        arrays = {key: torch.from_numpy(array) for key, array in state.arrays().items()}
        about = {"updates": mark.updates, "seed": mark.seed} | (
            {"clock": mark.clock} if mark.clock else {}
        )
        arrays |= {key: torch.tensor([value]) for key, value in about.items()}
        found |= {f"tables/{shard}/{key}": value for key, value in arrays.items()}
    return found


def newest_of(directory: CheckpointDirectory) -> tuple[StoragePlace, files.Checkpoint] | None:
    """The newest whole checkpoint of a job, with its path; None if none was finished."""
    return next(directory.newest_first(all_of), None)
