"""Gradients of rows in fewer bytes: unbiased, the same bits each time, and refused where they do not fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import steepest
from steepest import EmbeddingBag, ParameterServerStrategy, Table, connect
from steepest.core.messages.driver import Failure
from steepest.errors import ConfigurationError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.tables import SGD, Adagrad, Normal
from steepest.tables.modules.embedding import tables_of
from steepest.tables.rows.gradients import RowGradients
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.push_form import Chance, GroupForm
from steepest.testing import InProcessCluster
from tests.inside import replay_state
from tests.reference import same_bits
from tests.table_tasks import rows_of, same_rows

DTYPES = {"bfloat16": 2**-7, "float16": 2**-10, "int8": 2**-6}  # of a value's, or a row's, size


def gradients(values: np.ndarray[Any, Any]) -> RowGradients:
    count = len(values)
    ids = np.arange(count, dtype=np.int64) * 10**12
    return RowGradients(
        np.zeros(count, np.int32), ids, values.astype(np.float32), np.ones(count, np.int32)
    )


@pytest.mark.few(6)
@pytest.mark.parametrize("dim", [1, 5, 16])
@pytest.mark.parametrize("ttl", [None, "1d"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_arrives_is_near_unbiased_and_of_its_chance_alone(
    dtype: str, ttl: str | None, dim: int
) -> None:
    values = np.random.default_rng(dim).normal(size=(9, dim)) * 10.0 ** np.arange(-4, 5)[:, None]
    part, form = gradients(values), GroupForm([Table("t", dim, gradient_dtype=dtype, ttl=ttl)], 3)
    sent = [form.as_sent(part, Chance(1, version)).gradients for version in range(400)]
    largest = np.abs(values).max(1, keepdims=True).clip(2**-12)  # float16 has multiples of 2^-24
    for found in sent:
        assert (np.abs(found - values) <= 1.01 * DTYPES[dtype] * largest).all()
    off = np.abs(np.mean(sent, axis=0) - values) / largest
    assert off.max() < DTYPES[dtype] / 4
    assert np.array_equal(form.as_sent(part, Chance(1, 7)).gradients, sent[7])
    others = Chance(2, 7), Chance(1, 8)
    if dim > 1:
        assert not any(
            np.array_equal(form.as_sent(part, each).gradients, sent[7]) for each in others
        )
    arrived = form.as_sent(part, Chance(0, 0))
    assert np.array_equal(arrived.ids, part.ids)
    assert arrived.sightings.tolist() == part.sightings.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(dtype: str, wrong: float) -> None:
    form = GroupForm([Table("t", 4, gradient_dtype=dtype)], 0)
    values = np.ones((2, 4))
    values[0, 1] = wrong
    arrived = form.as_sent(gradients(values), Chance(0, 0)).gradients
    assert not np.isfinite(arrived[0]).all()
    assert np.isfinite(arrived[1]).all()


class Net(nn.Module):
    def __init__(self, dtype: str | None, spoiled: bool = False) -> None:
        super().__init__()
        how: Any = {"optimizer": SGD(lr=0.1), "initial": Normal(std=0.1), "gradient_dtype": dtype}
        self.bag = EmbeddingBag(Table("t", 16, **how), mode="sum")
        self.out, self.spoiled = nn.Linear(16, 1), spoiled

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.bag(ids)
        return self.out(rows * math.inf if self.spoiled else rows)


IDS = torch.arange(480).reshape(-1, 4) * 7 % 61
TARGETS = torch.linspace(-1, 1, len(IDS))[:, None]


def job(dtype: str | None, strategy: Any, workers: int = 2, spoiled: bool = False) -> Any:
    def create(worker: int, device: int) -> steepest.TorchModel:
        return steepest.TorchModel(
            Net(dtype, spoiled), loss=nn.functional.mse_loss, data=(IDS, TARGETS), batch_size=8,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )  # fmt: skip

    return InProcessCluster(create, num_workers=workers, strategy=strategy, keep_log=True), create


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_job_learns_from_fewer_bytes_and_is_replayed(dtype: str, workers: int) -> None:
    strategy = ParameterServerStrategy(num_servers=2)
    (plain, _), (small, create) = job(None, strategy, workers), job(dtype, strategy, workers)
    wide, narrow = plain.step(6), small.step(6)
    assert narrow[-1].bytes_pushed < (0.75 if dtype != "int8" else 0.6) * wide[-1].bytes_pushed
    assert narrow[-1].loss == pytest.approx(wide[-1].loss, rel=0.02)
    assert narrow[-1].loss != wide[-1].loss
    state = replay_state(small.log(), create)
    assert same_rows({n: v for n, v in state.items() if n.startswith("tables/")}, rows_of(small))


def test_copies_have_the_same_bits_and_a_job_of_one_worker_those_of_one_process() -> None:
    copies, _ = job("int8", AllreduceStrategy(sharded=False), 3)
    again, _ = job("int8", ParameterServerStrategy(num_servers=1), 3)
    for cluster in (copies, again):
        cluster.step(5)
    assert same_bits(rows_of(copies), rows_of(again))


def test_rows_in_one_process_are_rounded_as_a_workers() -> None:
    bag = EmbeddingBag(Table("t", 4, optimizer=SGD(lr=1.0), gradient_dtype="int8"), mode="sum")
    rows = connect(bag, LocalRows(bag.tables, seed=5))
    weights = torch.tensor([[0.1, 0.77, -0.3, 0.5]])
    before = bag(torch.tensor([[7]])).detach()
    (bag(torch.tensor([[7]])) * weights).sum().backward()
    rows.step()
    moved = (before - bag(torch.tensor([[7]]))).detach()
    assert not torch.equal(moved, weights)
    assert torch.allclose(moved, weights, atol=2**-6)


def test_infinity_in_such_a_gradient_is_found_and_the_table_named() -> None:
    cluster, _ = job("int8", ParameterServerStrategy(num_servers=1), spoiled=True)
    (outcome,) = cluster.step(1)
    assert isinstance(outcome, Failure)
    assert outcome.reason == "nonfinite"
    assert {(0, "t"), (1, "t")} <= {*map(tuple, outcome.culprits)}


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"gradient_dtype": "fp8"}, "give one of 'bfloat16', 'float16', 'int8'"),
        ({"gradient_dtype": "int8", "dtype": "float64"}, "a float64 table's gradients travel"),
        (
            {"gradient_dtype": "int8", "replicate": True, "num_embeddings": 9},
            "which has gradient_dtype='int8'",
        ),
    ],
)
def test_it_is_refused_by_name_where_it_does_not_fit(how: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Table("t", 4, optimizer=Adagrad(), **how)


class Clicks(nn.Module):
    def __init__(self, dtype: str | None) -> None:
        super().__init__()
        how: Any = {
            "optimizer": Adagrad(lr=0.1),
            "initial": Normal(std=0.1),
            "gradient_dtype": dtype,
        }
        self.rows = steepest.EmbeddingCollection(
            {name: Table(name, 8, **how) for name in ("user", "item")}
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.rows({"user": ids[:, 0], "item": ids[:, 1]})
        return (found["user"] * found["item"]).sum(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_click_model_ranks_as_well(dtype: str) -> None:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(200, (60_000, 2), generator=random)
    tastes = torch.randn(2, 200, 4, generator=random)
    odds = (tastes[0, ids[:, 0]] * tastes[1, ids[:, 1]]).sum(1)
    clicked = (torch.rand(len(ids), generator=random) < torch.sigmoid(odds)).float()
    areas = []
    for each in (None, dtype):
        module = Clicks(each)
        rows = connect(module, LocalRows(tables_of(module)))
        for part in torch.arange(40_000).split(500):
            loss = nn.functional.binary_cross_entropy_with_logits(module(ids[part]), clicked[part])
            loss.backward()
            rows.step()
        with torch.no_grad():
            order = module(ids[40_000:]).argsort().argsort().double() + 1
        of = clicked[40_000:].bool()
        count = int(of.sum())
        areas.append(float((order[of].sum() - count * (count + 1) / 2) / count / (len(of) - count)))
    assert areas[0] > 0.6
    assert abs(areas[1] - areas[0]) < 0.001
