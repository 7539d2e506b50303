"""What loops of users' own cannot do yet is refused before anything runs, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import steepest
from steepest.errors import ConfigurationError
from tests.own_loop_runs import run
from tests.simulated_programs import quiet

pytest.importorskip("numba", reason="embedding tables need it")


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def with_tables() -> None:
    from steepest import Embedding, Table
    from steepest.tables import Adagrad

    table = Table("users", 4, optimizer=Adagrad(lr=0.1))
    model = torch.nn.Sequential(Embedding(table), torch.nn.Linear(4, 1))
    loader: Any = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    steepest.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def test_tables_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Embedding, 'users'.*give torch.nn.Embedding"):
        run(with_tables, 2)
