"""Days of training one after the other: other data, a table added, one renamed, one with another optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steepest import Checkpoints, DistributedSGD, ParameterServerStrategy, TorchModel
from steepest.core.engine.job import ModelCreator
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.initial import Constant
from steepest.tables.rows.row_optimizers import SGD, Adagrad, RowOptimizer
from tests.reference import sgd
from tests.table_jobs import trainer
from tests.table_tools import table

FIRST, DIM = 0.5, 2
Rows = dict[str, dict[int, tuple[Tensor, Tensor]]]


class AddedFeatures(nn.Module):
    """Rows of some tables, added up."""

    def __init__(self, optimizers: Mapping[str, RowOptimizer]) -> None:
        super().__init__()
        about: dict[str, Any] = {"initial": Constant(FIRST), "dtype": "float64"}
        self.features = nn.ModuleDict(
            {
                name: Embedding(table(name, DIM, optimizer=optimizer, **about))
                for name, optimizer in optimizers.items()
            }
        )
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = sum(rows(ids).sum(-1) for rows in self.features.values()) + self.bias
        return found


def creator(optimizers: Mapping[str, RowOptimizer], ids: Tensor, shards: int) -> ModelCreator:
    """Two workers whose step has all samples of a day, a power of two of them, so that means are exact."""

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            AddedFeatures(optimizers),
            loss=lambda output, target: output.mean(),
            data=(ids, torch.zeros(len(ids))),
            batch_size=len(ids) // 2,
            optimizer=sgd(),
            table_shards=shards,
        )

    return create


class Days:
    """The rows that a dict has, and the jobs that are to have them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, Rows()

    def train(
        self,
        optimizers: Mapping[str, RowOptimizer],
        ids: list[int],
        *,
        shards: int,
        servers: int,
        renamed: Mapping[str, str],
    ) -> None:
        """Train a day from the newest checkpoint; `renamed`: new names by old ones."""
        kept = Checkpoints(
            self.folder, every=1, keep=2, increments=2, data="new", rename_tables=dict(renamed)
        )
        strategy = ParameterServerStrategy(num_servers=servers)
        create = creator(optimizers, torch.tensor(ids), shards)
        with trainer(create, strategy, checkpoints=kept) as job:
            before = {renamed.get(name, name): rows for name, rows in self.rows.items()}
            self.rows = {name: dict(before.get(name, {})) for name in optimizers}
            for name, rows in self.rows.items():
                first = torch.tensor(optimizers[name].first_slots(DIM), dtype=torch.float64)
                for each, (value, slots) in rows.items():
                    if len(slots) != len(first):  # of another optimizer
                        rows[each] = value, first
            self.check(job)
            job.fit(epochs=2, progress=False)
            for _ in range(2):
                self.step(optimizers, ids)
            self.check(job)

    def step(self, optimizers: Mapping[str, RowOptimizer], ids: list[int]) -> None:
        """Do to the dict what a step does to rows."""
        for name, optimizer in optimizers.items():
            first = torch.tensor(optimizer.first_slots(DIM), dtype=torch.float64)
            for each, count in Counter(ids).items():
                gradient = torch.full((DIM,), count / len(ids), dtype=torch.float64)
                begun = torch.full((DIM,), FIRST, dtype=torch.float64), first
                value, slots = self.rows[name].get(each, begun)
                change = gradient
                if isinstance(optimizer, Adagrad):
                    slots = slots + gradient * gradient
                    change = optimizer.lr * (gradient / (slots.sqrt() + optimizer.eps))
                self.rows[name][each] = value - change, slots

    def check(self, job: DistributedSGD) -> None:
        """Compare the job's rows and slots with the dict's, to the bit."""
        for name, rows in self.rows.items():
            exported = job.export_table(name)
            assert exported.ids.tolist() == sorted(rows), name
            for each, value in zip(exported.ids.tolist(), exported.values, strict=True):
                assert torch.equal(value, rows[each][0]), (name, each)
            for row in job.describe_rows(name, sorted(rows)):
                assert row.slots is not None
                assert torch.equal(row.slots, rows[row.id][1]), (name, row.id)


def test_each_day_goes_on_from_the_one_before(tmp_path: Path) -> None:
    days, plain, grown = Days(tmp_path), SGD(lr=1.0), Adagrad(lr=0.25)
    for optimizers, ids, shards, servers, renamed in (
        ({"a": plain, "b": grown}, [5, 9, 5, 2, 7, 5, 1000, 9], 3, 2, {}),
        ({"a": plain, "b": grown, "c": grown}, [3, 2, 40, 2**40, 5, 5, 0, 9] * 2, 3, 2, {}),
        ({"c": grown, "b2": grown, "a": plain}, [5, 77, 5, 2], 1, 3, {"b": "b2"}),
        ({"c": grown, "b2": grown, "a": grown}, [8, 9, 5, 2, 2**62, 5, 1000, 9], 5, 1, {}),
    ):
        days.train(optimizers, ids, shards=shards, servers=servers, renamed=renamed)
