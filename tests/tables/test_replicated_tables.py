"""Tables that workers hold like dense weights do what the same tables on servers do, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steepest import (
    DistributedSGD,
    LocalStrategy,
    ParameterServerStrategy,
    Table,
    TorchModel,
)
from steepest.core.engine.job import ModelCreator
from steepest.errors import CheckpointError, ConfigurationError, ModelRaisedError
from steepest.tables import FTRL, SGD, Adagrad, Adam, Constant, RowWiseAdagrad, Zeros
from steepest.tables.modules.collection import EmbeddingCollection
from steepest.tables.modules.embedding import Embedding, EmbeddingBag, hold_replicated
from steepest.tables.modules.row_rule import RowRule
from steepest.tables.rows.replicated import REPLICATED_BYTES, TOUCHED, first_values, replicated
from steepest.tables.rows.row_optimizers import RowOptimizer
from steepest.tables.rows.shard import TableShard
from steepest.testing import InProcessCluster, replay
from tests.modes import mode
from tests.step_calls import calls_of
from tests.table_jobs import trainer

USERS, ITEMS, COUNT = 30, 20, 36


class Tastes(nn.Module):
    """A table in two modules, one in a collection; some gradients of rows are zeros."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        users = Table("users", 4, **{"num_embeddings": USERS} | settings)
        items = Table("it/ems", 4, **{"num_embeddings": ITEMS} | settings)
        self.users, self.again = Embedding(users), EmbeddingBag(users)
        self.items = EmbeddingCollection({"bought": items, "seen": items}, mode="sum")
        self.head = nn.Linear(4, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        found = self.items({"bought": items, "seen": items[:, :1]})
        both = self.users(users) * found["bought"] + found["seen"]
        scores: Tensor = self.head(torch.relu(both + self.again((users[:, None] + 1) % USERS)))
        return scores[:, 0]


def tastes(rate: float = 0.1, momentum: float = 0.0, **settings: Any) -> ModelCreator:
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randint(0, USERS // 2, (COUNT,), generator=generator),
        torch.randint(0, ITEMS, (COUNT, 3), generator=generator),
        torch.randn(COUNT, generator=generator),
    )

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            Tastes(**settings),
            loss=nn.functional.mse_loss,
            data=data,
            batch_size=6,
            optimizer=lambda module: torch.optim.SGD(
                module.parameters(), lr=rate, momentum=momentum
            ),
            learning_rate=lambda step: rate / (1 + step),
            table_shards=3,
        )

    return create


def everything(sgd: DistributedSGD) -> dict[str, Tensor]:
    """The weights of the dense layer, and what the job answers for all ids of both tables."""

    def looked_up(model: TorchModel) -> dict[str, Tensor]:
        with torch.no_grad():
            items = torch.arange(ITEMS)[:, None]
            return {
                "users": model.module.users(torch.arange(USERS)),
                "it/ems": model.module.items({"bought": items, "seen": items})["bought"],
            }

    dense = {name: value for name, value in sgd.weights().items() if name.startswith("head")}
    answers: dict[str, Tensor] = sgd.for_model(looked_up)
    for name, values in answers.items():
        table = sgd.export_table(name)
        asked = table.ids < len(values)
        assert torch.equal(table.values[asked], values[table.ids[asked]])
    return dense | answers


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(strategy: str | None, steps: int = 5, **settings: Any) -> dict[str, Tensor]:
    with trainer(tastes(**settings), strategy) as sgd:
        for _ in range(steps):
            sgd.step()
        return everything(sgd)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [None, "allreduce"])
@pytest.mark.parametrize(
    "optimizer",
    [
        Adagrad(lr=0.3, follows=0),
        RowWiseAdagrad(lr=0.3, clip_norm=0.1),
        Adam(lr=0.1),
        pytest.param(SGD(lr=0.1, momentum=0.9, weight_decay=0.1), marks=pytest.mark.long),
        pytest.param(SGD(lr=0.1), marks=pytest.mark.long),
    ],
)
def test_workers_hold_the_rows_that_servers_would_have(
    strategy: str | None, optimizer: RowOptimizer
) -> None:
    held, served = (
        trained(strategy, optimizer=optimizer, replicate=replicate) for replicate in (True, False)
    )
    assert same(held, served)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_tables_in_one_chunk_with_dense_layers_train_as_apart_from_them(workers: int) -> None:
    chosen = tastes(optimizer=Adagrad(lr=0.3, follows=0), momentum=0.9)
    jobs = [
        InProcessCluster(
            chosen,
            num_workers=workers,
            strategy=ParameterServerStrategy(num_servers=2, chunk_bytes=size),
        )
        for size in (None, 64)
    ]
    assert [len(job.job.description.layout.trainable_chunks) for job in jobs] == [1, 3]
    for job in jobs:
        job.step(5)
    one, other = (job.weights() for job in jobs)
    assert same(one, other)


def test_tables_that_workers_hold_cost_a_step_no_further_message() -> None:
    cluster = InProcessCluster(tastes(optimizer=Adagrad(lr=0.3)), num_workers=2)
    cluster.step(3)
    calls = calls_of(cluster, 3)
    assert calls["core/engine/push_intake.py:stage"] == 3 * 2
    assert calls["core/engine/outgoing_weights.py:send"] == 3 * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_replay_has_the_rows_of_the_run(name: str) -> None:
    create = tastes(optimizer=Adam(lr=0.1))
    cluster = InProcessCluster(create, num_workers=2, strategy=mode(name), keep_log=True)
    cluster.step(5)
    weights, again = cluster.weights(), replay(cluster.log(), create)
    assert "users.rows_of_users" in weights
    assert same(weights, {name: again[name] for name in weights})


def test_rows_are_parameters_that_the_models_optimizer_does_not_see() -> None:
    with trainer(tastes(optimizer=Adagrad(lr=0.3))) as sgd:
        sgd.step()
        names = sorted(sgd.weights())
        assert names == ["head.bias", "head.weight", "items.rows_of_it_ems", "users.rows_of_users"]
        spec = sgd._training.cluster.job.description.optimizer_spec
        assert [sorted(own) for own, _ in spec.groups] == [["head.bias", "head.weight"]]
        with pytest.raises(ConfigurationError, match=r"'users.rows_of_users' of weights\(\)"):
            sgd.import_table("users", (torch.arange(2), torch.ones(2, 4)))
        with pytest.raises(ConfigurationError, match="there are 'users', 'it/ems'"):
            sgd.export_table("others")


def test_workers_with_an_optimizer_of_their_own_train_rows_by_the_tables() -> None:
    with trainer(tastes(optimizer=Adagrad(lr=0.3)), LocalStrategy(sync_every=2)) as sgd:
        before = everything(sgd)
        sgd.step()
        after = everything(sgd)
    changed = (before["users"] != after["users"]).any(1)
    assert changed.any()
    assert not changed[USERS // 2 + 1 :].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_checkpoint_goes_on_with_tables_wherever_they_are(
    before: bool, after: bool, tmp_path: Path
) -> None:
    how = {"optimizer": Adam(lr=0.1)}
    with trainer(tastes(**how, replicate=before)) as sgd:
        for _ in range(3):
            sgd.step()
        sgd.save(tmp_path)
        for _ in range(2):
            sgd.step()
        expected = everything(sgd)
    with trainer(tastes(**how, replicate=after)) as sgd:
        sgd.restore(tmp_path)
        for _ in range(2):
            sgd.step()
        assert same(everything(sgd), expected)


def test_a_table_grows_and_gets_another_optimizer_with_a_checkpoint_but_loses_no_rows(
    tmp_path: Path,
) -> None:
    with trainer(tastes(optimizer=Adagrad(lr=0.3))) as sgd:
        sgd.step()
        sgd.save(tmp_path)
        expected = everything(sgd)
    longer = tastes(optimizer=SGD(lr=0.3), num_embeddings=USERS + 5)
    with trainer(longer) as sgd:
        first = sgd.export_table("users").values
        sgd.restore(tmp_path)
        assert same(everything(sgd), expected)
        assert torch.equal(sgd.export_table("users").values[USERS:], first[USERS:])
        sgd.step()
    with (
        trainer(tastes(optimizer=SGD(lr=0.3), num_embeddings=USERS - 1)) as sgd,
        pytest.raises(CheckpointError, match="num_embeddings=29: give at least 30"),
    ):
        sgd.restore(tmp_path)


def test_frozen_look_ups_train_no_rows() -> None:
    module = Tastes()
    hold_replicated(module, 0)
    module.users.requires_grad_(False)
    (module.users(torch.tensor([1])) + module.again(torch.tensor([[2]]))).sum().backward()
    gradient = module.users.held()["users"].grad
    assert gradient is not None
    assert gradient.any(1).nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("replicate", [True, False])
def test_ids_beyond_the_range_are_refused_by_name(replicate: bool) -> None:
    with (
        trainer(tastes(num_embeddings=7, replicate=replicate)) as sgd,
        pytest.raises(ModelRaisedError, match=r"ids of table '.*' hold .* num_embeddings=7"),
    ):
        sgd.step()


@pytest.mark.parametrize("optimizer", [SGD(lr=0.3), Adagrad(lr=0.3), Adagrad(lr=0.3, eps=0.0)])
def test_rows_without_a_gradient_stay_to_the_bit(optimizer: RowOptimizer) -> None:
    table = Table("t", 3, num_embeddings=40, optimizer=optimizer)
    values, gradient = torch.from_numpy(first_values(table, 0)), torch.zeros(40, 3)
    before, state, shard = values.clone(), dict[str, Any](), TableShard([table])
    gradient[[3, 17]] = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    for version, factor in ((1, 1.0), (2, 0.3)):
        RowRule(table).update(values, gradient, state, factor)
        shard.push([0, 0], [3, 17], gradient[[3, 17]].numpy(), version, optimizer.lr * factor)
    assert (values != before).any(1).nonzero().flatten().tolist() == [3, 17]
    assert torch.equal(values, torch.from_numpy(shard.pull([0] * 40, range(40))))


BY_THEMSELVES = [Adam(lr=0.3), SGD(lr=0.3, momentum=0.9), SGD(lr=0.3, weight_decay=0.1), FTRL()]


@pytest.mark.parametrize("optimizer", BY_THEMSELVES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_mark_of_a_row_is_no_gradient(optimizer: RowOptimizer, dtype: str) -> None:
    """Rows of zeros stay, where servers' do, and others move on by themselves."""
    for initial in (Zeros(), Constant(0.5)):
        table = Table("t", 3, num_embeddings=9, optimizer=optimizer, initial=initial, dtype=dtype)
        values, state = torch.from_numpy(first_values(table, 0)), dict[str, Any]()
        shard = TableShard([table])
        pushed = torch.zeros(9, 3, dtype=values.dtype)
        pushed[4] = torch.tensor([0.0, 0.25, -1.0])
        for version in range(1, 5):
            marked = pushed.clone()
            marked[[2, 4], 0] = 3 * TOUCHED / version  # of several workers, weighed
            RowRule(table).update(values, marked, state, 1.0)
            shard.push([0, 0], [2, 4], pushed[[2, 4]].numpy(), version, optimizer.lr)
            assert torch.equal(values, torch.from_numpy(shard.pull([0] * 9, range(9))))
            pushed[4] = 0.0


class Products(nn.Module):
    """Factors of two tables, as generalised matrix factorisation has them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        how = {"num_embeddings": USERS, "initial": Zeros(), "optimizer": Adam(lr=0.1)} | settings
        self.one, self.other = Embedding(Table("a", 4, **how)), Embedding(Table("b", 4, **how))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = (self.one(ids) * self.other(ids)).sum(-1) + self.bias
        return found


@pytest.mark.parametrize("replicate", [True, False])
def test_rows_at_a_saddle_stay_there(replicate: bool) -> None:
    """The gradient of a product of zeros is zero: a row that moved by any little would leave with Adam's speed."""

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            Products(replicate=replicate),
            loss=nn.functional.mse_loss,
            data=(torch.arange(24) % USERS, torch.ones(24)),
            batch_size=6,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )

    with trainer(create) as sgd:
        sgd.fit(steps=6, progress=False)
        for name in "ab":
            assert not sgd.export_table(name).look_up(torch.arange(24)).any()


def test_small_tables_are_held_by_workers_smallest_first() -> None:
    half = REPLICATED_BYTES // 2 // 4
    sizes = {"large": half, "second": half - 1, "first": half - 2}
    tables = [Table(name, 1, num_embeddings=count) for name, count in sizes.items()]
    tables += [Table("unknown", 1), Table("served", 1, num_embeddings=1, replicate=False)]
    tables += [Table("huge", 8, num_embeddings=half, replicate=True)]
    assert [table.name for table in replicated(tables)] == ["second", "first", "huge"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "has no num_embeddings"),
        ({"num_embeddings": 3, "capacity": 2}, "has capacity, for rows that come and go"),
        ({"num_embeddings": 3, "default": Constant(0.0)}, "has default"),
        ({"num_embeddings": 3, "trainable": False}, "is not trainable"),
        ({"num_embeddings": 3, "dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_what_only_servers_can_do_is_not_replicated(settings: Any, message: str) -> None:
    assert replicated([Table("t", 1, **settings)]) == ()
    with pytest.raises(ConfigurationError, match=message):
        Table("t", 1, replicate=True, **settings)
