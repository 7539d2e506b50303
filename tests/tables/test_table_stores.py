"""Shards of embedding tables keep the contract of chunks on servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from table_tools import ids_of, push, table

from steepest import ParameterServerStrategy
from steepest.core.engine.job import Job
from steepest.core.engine.model_building import build_models
from steepest.core.tensors.layout import Chunk, ElementType
from steepest.errors import ConfigurationError
from steepest.extensions import EXTENSIONS
from steepest.runtime.chunk_transfer import RetainedChunks
from steepest.tables.job.pushed_rows import RowGradientStore
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.gradients import RowGradients
from steepest.tables.rows.initial import Uniform
from steepest.tables.rows.push_form import Chance
from steepest.tables.rows.row_optimizers import Adagrad
from tests.chunk_store_contract import ChunkStoreContract
from tests.table_tasks import table_task

CHUNK = Chunk(3, ElementType.of(torch.float32), True, 64, 64, ())
DIM = 4


class TestShard(ChunkStoreContract):
    dtype = "float32"

    @property
    def dealing(self) -> Dealing:
        settings: Any = {"optimizer": Adagrad(lr=0.5), "initial": Uniform(-1.0, 1.0)}
        return Dealing((table(dim=DIM, dtype=self.dtype, **settings),), 1, 7, 3)

    def make(self) -> RowGradientStore:
        return RowGradientStore([TableChunk(CHUNK, self.dealing)], self.dealing)

    def held(self, store: RowGradientStore) -> TableChunk:
        return store._shards[0]

    def gradient(self, value: float) -> torch.Tensor:
        """The gradient of three rows."""
        ids, ones = np.array([2, 5, 11]), np.ones(3, np.int32)
        values = np.full((3, DIM), value, np.float32)
        rows = RowGradients(np.zeros(3, np.int32), ids, values, ones)
        return torch.from_numpy(
            self.dealing.push_form.pack([rows], lambda n: np.empty(n, np.uint8), Chance(0, 0))
        )


class TestPackedShard(TestShard):
    dtype = "int8"


def test_a_job_of_a_model_with_tables_needs_what_knows_them() -> None:
    for extensions in ((), EXTENSIONS):
        strategy = ParameterServerStrategy()
        creator = table_task().creator()
        _, description = build_models(creator, 0, 1, 0, strategy.cut, extensions=extensions)
        if extensions:
            assert Job(description, strategy, 1, 1, 1, 0, 60.0).stores is not None
        else:
            with pytest.raises(
                ConfigurationError, match="opaque chunks in its layout, and nothing"
            ):
                Job(description, strategy, 1, 1, 1, 0, 60.0)


def test_rows_of_ended_servers_stay_where_they_are_and_copies_are_two() -> None:
    dealing = Dealing((table(),), 1, 0, 0)
    chunk = Chunk(0, ElementType.of(torch.uint8), True, 0, 0, ())

    def server() -> Any:
        return SimpleNamespace(chunks={0: TableChunk(chunk, dealing)}, vector=None)

    ended, first, second = server(), server(), server()
    push(ended.chunks[0].rows, range(5), 1)
    RetainedChunks([ended]).hand_over([first, second], {})
    assert first.chunks[0].rows is ended.chunks[0].rows
    push(first.chunks[0].rows, [3, 7], 2)
    assert ids_of(second.chunks[0].rows) == [*range(5)]
