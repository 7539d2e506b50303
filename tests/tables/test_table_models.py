"""Models with many tables in jobs: shared, grouped and unused ones, empty bags, scaled losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steepest.core.engine.job import ModelCreator
from steepest.tables.modules.collection import EmbeddingCollection
from steepest.tables.modules.embedding import Embedding, EmbeddingBag
from steepest.tables.modules.torch_model import TorchModel
from steepest.tables.rows.row_optimizers import Adagrad
from steepest.testing import InProcessCluster
from tests.modes import mode, trained
from tests.reference import difference, same_bits, samples, sgd
from tests.table_tasks import described, rows_of, same_rows

STEPS = 5
COUNT = 37


def data() -> tuple[Tensor, ...]:
    """Two lists of ids, with 0 for none, and one id of each sample; and targets."""
    generator = torch.Generator().manual_seed(3)
    first, second, third = (
        torch.randint(0, 9, (COUNT, width), generator=generator) for width in (4, 2, 1)
    )
    return first, second, third[:, 0] * 2**40, samples(COUNT)[1]


class Many(nn.Module):
    """A collection in which features share a table, a bag with padding, a table in two modules, and one unused."""

    def __init__(self) -> None:
        super().__init__()
        words = described("words", optimizer=Adagrad(lr=0.1))
        places = described("places", optimizer=Adagrad(lr=0.1))
        people = described("people", 2)
        self.collection = EmbeddingCollection(
            {"title": words, "text": words, "place": places}, mode="sum"
        )
        self.bags = EmbeddingBag(people, mode="mean", padding_idx=0)
        self.again = Embedding(places)
        self.unused = Embedding(described("unused", 5))
        self.head = nn.Linear(3 + 3 + 3 + 2 + 3, 2, dtype=torch.float64)

    def forward(self, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        """Return (B, 2)."""
        found = self.collection({"title": first, "text": second, "place": third})
        parts = [*found.values(), self.bags(second), self.again(third // 2)]
        return self.head(torch.tanh(torch.cat(parts, 1)))


def creator(batch_size: int, **settings: Any) -> ModelCreator:
    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            Many(),
            loss=nn.functional.mse_loss,
            data=data(),
            batch_size=batch_size,
            optimizer=sgd(),
            table_shards=3,
            **settings,
        )

    return create


def run(name: str, workers: int, batch_size: int, **settings: Any) -> InProcessCluster:
    options = {key: settings.pop(key) for key in ("devices_per_worker",) if key in settings}
    strategy = mode(name, 2)
    made = creator(batch_size, **settings)
    cluster = InProcessCluster(made, num_workers=workers, strategy=strategy, **options)
    trained(cluster, STEPS)
    return cluster


def state_of(cluster: InProcessCluster) -> dict[str, Tensor]:
    """Dense weights, and the values of rows."""
    rows = {name: v for name, v in rows_of(cluster).items() if name.endswith("/values")}
    return cluster.weights() | {name: value for name, value in rows.items() if value.numel()}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sync", "allreduce"])
def test_many_tables_are_the_same_on_many_workers(name: str) -> None:
    alone = state_of(run("sync", 1, 12))
    together = state_of(run(name, 3, 2, devices_per_worker=2))
    assert len(alone) > 6
    assert difference(together, alone) < 1e-12


def test_gradients_of_rows_are_those_of_the_loss_that_is_not_scaled() -> None:
    plain, scaled = run("sync", 2, 4), run("sync", 2, 4, loss_scale=1024.0)
    assert same_bits(plain.weights(), scaled.weights())
    assert same_rows(rows_of(scaled), rows_of(plain))


def test_a_table_that_no_batch_uses_has_no_rows() -> None:
    rows = rows_of(run("copies", 2, 4))
    counts = [len(rows[f"tables/{shard}/ids"]) for shard in range(9)]
    assert all(counts[:6])
    assert counts[6:] == [0, 0, 0]
    assert {tuple(rows[f"tables/{shard}/updates"].tolist()) for shard in range(9)} == {(STEPS,)}
