"""Jobs with embedding tables whose rows are known in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from steepest import DistributedSGD, ParameterServerStrategy, TorchModel
from steepest.core.engine.job import ModelCreator
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.initial import Constant
from tests.reference import sgd
from tests.simulation.run import Simulation
from tests.table_tools import table

IDS = torch.tensor([5, 9, 5, 2, 7, 5, 1000, 9, 3, 2, 40, 41])  # an epoch of two steps
FIRST, LR = 0.5, 1.5


class Words(nn.Module):
    """Rows of two tables, added up."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        settings = {"initial": Constant(FIRST), "dtype": "float64"} | settings
        self.words = Embedding(table("words", 3, **settings))
        self.others = Embedding(table("others", 3, **settings))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.words(ids).sum(-1) + self.others(ids + 1).sum(-1) + self.bias
        return found


def words(ids: Tensor = IDS, shards: int = 3, **settings: Any) -> ModelCreator:
    """Models whose rows get 1 / 6 of the learning rate, 1, for each time that their id is in a step."""

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            Words(settings),
            loss=lambda output, target: output.mean(),
            data=(ids, torch.zeros(len(ids))),
            batch_size=3,
            optimizer=sgd(),
            table_shards=shards,
        )

    return create


@contextmanager
def trainer(
    create: ModelCreator,
    strategy: Any = None,
    workers: int = 2,
    simulation: Simulation | None = None,
    **settings: Any,
) -> Iterator[DistributedSGD]:
    """A trainer of two workers in a simulation."""
    strategy = strategy or ParameterServerStrategy(num_servers=2)
    with (
        (simulation or Simulation(3)).running(),
        DistributedSGD(create, workers, strategy=strategy, **settings) as found,
    ):
        yield found
