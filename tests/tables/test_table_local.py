"""Embedding tables under local SGD: a round's gradients of rows reach the servers at its end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steepest.core.data.sampler import SamplePlan
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster
from tests.reference import Task, difference, samples, sgd
from tests.table_jobs import FIRST, IDS, Words
from tests.tables.rows_ahead import Net as Noisy
from tests.tables.rows_ahead import creator, falling, row_of, shards


def quiet() -> Noisy:
    """Without dropout, whose noise differs with the numbers of updates."""
    return Noisy(noise=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("servers", [None, 2])
def test_with_one_update_in_a_round_it_is_synchronous_training(
    workers: int, servers: int | None
) -> None:
    local = InProcessCluster(
        creator(quiet),
        num_workers=workers,
        strategy=LocalStrategy(sync_every=1, num_servers=servers),
    )
    together = InProcessCluster(
        creator(quiet), num_workers=workers, strategy=ParameterServerStrategy(num_servers=2)
    )
    local.step(6)
    together.step(6)
    assert difference(local.weights(), together.weights()) < 1e-6
    for mine, other in zip(
        sorted(shards(local), key=lambda held: held.chunk.index),
        sorted(shards(together), key=lambda held: held.chunk.index),
        strict=True,
    ):
        ours, theirs = mine.rows.export(), other.rows.export()
        assert (ours.ids == theirs.ids).all()
        assert ours.values == pytest.approx(theirs.values, abs=1e-6)


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_get_the_sum_of_a_rounds_updates(workers: int) -> None:
    strategy = LocalStrategy(sync_every=3)
    cluster, modules = falling(None, workers=workers, strategy=strategy)
    cluster.step(4)
    assert row_of(cluster) == -12
    seen = modules[0].seen
    assert seen == [-3.0 * (step // 3) for step in range(12)]  # as of the round's beginning


def test_each_batchs_gradient_is_clipped_together_with_its_rows() -> None:
    """By hand: dense weights change with each clipped gradient, rows by their sum at the round's end."""
    workers, devices, rounds, lr = 2, 2, 3, 0.1
    ids, (_, y) = IDS.repeat(4), samples(48)
    config = LocalStrategy(sync_every=3, clip_norm=9.0, num_servers=2)
    task = Task(lambda: Words({}), sgd(lr), (ids, y[:, 0]), nn.functional.mse_loss)
    cluster = InProcessCluster(
        task.creator(), num_workers=workers, devices_per_worker=devices, strategy=config
    )
    cluster.step(rounds)

    rows = torch.full((2, 1002, 3), FIRST, dtype=torch.float64)
    bias, norms = torch.zeros(1, dtype=torch.float64), []
    parts = workers * devices * 3
    plan = SamplePlan(len(ids), parts * task.batch_size, 0)
    for step in range(rounds):
        change, biases = torch.zeros_like(rows), []
        for worker in range(workers):
            held, own = rows.clone().requires_grad_(), bias.clone().requires_grad_()
            for update in range(3):
                places = [(worker * devices + device) * 3 + update for device in range(devices)]
                index = torch.cat([torch.from_numpy(plan.share(step, p, parts)) for p in places])
                found = held[0][ids[index]].sum(-1) + held[1][ids[index] + 1].sum(-1) + own
                held.grad = own.grad = None
                task.loss(found, y[index, 0]).backward()
                norms.append(float(nn.utils.clip_grad_norm_([held, own], 9.0)))
                assert held.grad is not None
                change += held.grad / workers
                with torch.no_grad():
                    own -= lr * own.grad
            biases.append(own.detach())
        rows -= change
        bias = torch.stack(biases).mean(0)
    assert min(norms) < 9.0 < max(norms)
    assert torch.allclose(cluster.weights()["bias"], bias, rtol=0, atol=1e-12)
    for held in shards(cluster):
        state = held.rows.export()
        expected = rows[torch.from_numpy(state.tables).long(), torch.from_numpy(state.ids)]
        assert torch.allclose(torch.from_numpy(state.values), expected, rtol=0, atol=1e-12)
