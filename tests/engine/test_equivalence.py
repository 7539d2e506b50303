"""Any number of workers, devices and servers equals one process with the whole batch."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from steepest.core.engine.replica_states import mean_states
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy
from steepest.testing import InProcessCluster
from tests.engine.equivalence_tasks import (
    TASKS,
    Sometimes,
    Tied,
    all_but_fixed,
    batch_norm,
    dropout,
    run,
    states,
    weighted_mse,
    weighted_samples,
)
from tests.pairs import grid
from tests.random_examples import seeds
from tests.reference import Task, Weights, difference, perceptron, same_bits, samples, sgd

LONG = 50  # steps of the claim; fewer show the same where the claim is another one
STEPS = 12


@cache
def serial(name: str, replicas: int) -> list[Weights]:
    """The weights before each of the steps and after the last."""
    return TASKS[name].trace(replicas, LONG)


def ps(servers: int, chunk_bytes: int | None = 64) -> ParameterServerStrategy:
    return ParameterServerStrategy(num_servers=servers, chunk_bytes=chunk_bytes)


@pytest.mark.few(1)
@grid(name=TASKS, workers=[1, 2, 3], servers=[1, 2, 3], devices=[1, 2])
def test_parameter_server_equals_serial_training(
    name: str, workers: int, servers: int, devices: int
) -> None:
    cluster = run(TASKS[name], STEPS, workers, devices, strategy=ps(servers))
    assert set(cluster.job.owners) == set(range(servers))
    assert difference(cluster.weights(), serial(name, workers * devices)[STEPS]) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TASKS)
def test_after_fifty_steps_too(name: str) -> None:
    cluster = run(TASKS[name], LONG, 3, 2, strategy=ps(2))
    assert difference(cluster.weights(), serial(name, 6)[LONG]) < 1e-12


@grid(name=TASKS, workers=[1, 2, 3], devices=[1, 2])
def test_simple_strategy_equals_serial_training(name: str, workers: int, devices: int) -> None:
    cluster = run(TASKS[name], STEPS, workers, devices, strategy=SimpleStrategy())
    assert difference(cluster.weights(), serial(name, workers * devices)[STEPS]) < 1e-12


@pytest.mark.parametrize(
    ("workers", "servers", "devices"), [(1, 1, 1), (1, 2, 2), (3, 3, 1), (3, 2, 2)]
)
def test_float32_equals_serial_training_to_rounding_after_one_step(
    workers: int, servers: int, devices: int
) -> None:
    for optimizer in (
        sgd(momentum=0.9),
        lambda module: torch.optim.Adam(module.parameters(), lr=0.01, eps=1e-3),
    ):
        task = Task(lambda: perceptron(torch.float32), optimizer, samples(13, dtype=torch.float32))
        cluster = run(task, 1, workers, devices, strategy=ps(servers))
        assert difference(cluster.weights(), task.train(workers * devices, 1)) < 1e-6


def test_one_worker_takes_the_steps_of_plain_torch_in_float32() -> None:
    task = Task(
        lambda: perceptron(torch.float32), sgd(momentum=0.9), samples(13, dtype=torch.float32)
    )
    assert difference(run(task, LONG).weights(), task.train(1, LONG)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("module", [perceptron, dropout])
@seeds(1)
def test_message_order_changes_no_bit(module: Any, seed: int) -> None:
    task = Task(module, sgd(momentum=0.9))
    weights = run(task, 10, 3, 2, strategy=ps(3)).weights()
    assert same_bits(weights, run(task, 10, 3, 2, strategy=ps(3)).weights())
    for shuffle in range(seed, seed + 5):
        assert same_bits(weights, run(task, 10, 3, 2, strategy=ps(3), shuffle=shuffle).weights())
    assert not same_bits(weights, run(task, 10, 3, 2, strategy=ps(3), seed=1).weights())


@pytest.mark.parametrize(("workers", "devices"), [(1, 1), (3, 1), (1, 3), (2, 2)])
def test_a_loss_may_weigh_its_batch(workers: int, devices: int) -> None:
    data = weighted_samples([1.0, 0.5, 3.0, 2.0, 7.0, 0.25, 1.5, 2.5, 4.0, 1.0, 0.125, 6.0, 1.0])
    task = Task(optimizer=sgd(momentum=0.9), data=data, loss=weighted_mse)
    cluster = run(task, STEPS, workers, devices, strategy=ps(2))
    assert difference(cluster.weights(), task.train(workers * devices, STEPS)) < 1e-12


@pytest.mark.few(2)
@pytest.mark.parametrize(("workers", "devices"), [(4, 1), (1, 4), (2, 2)])
def test_a_batch_of_weight_zero_does_not_count_even_when_its_mean_is_nan(
    workers: int, devices: int
) -> None:
    task = Task(
        optimizer=sgd(momentum=0.9),
        data=weighted_samples([1.0, 0.0, 0.0, 2.0, 0.0, 3.0, 0.0, 0.0]),
        loss=weighted_mse,
        batch_size=1,
    )
    cluster = InProcessCluster(
        task.creator(), num_workers=workers, devices_per_worker=devices, strategy=ps(2)
    )
    results = cluster.step(20)
    assert all(result.loss > 0 for result in results)
    assert difference(cluster.weights(), task.train(4, 20)) < 1e-12


def test_a_step_of_weight_zero_is_committed_and_changes_nothing() -> None:
    task = Task(
        optimizer=sgd(momentum=0.9, weight_decay=0.1),
        data=weighted_samples([0.0] * 8),
        loss=weighted_mse,
    )
    cluster = InProcessCluster(task.creator(), num_workers=2, devices_per_worker=2, strategy=ps(2))
    before = cluster.weights()
    assert [result.version for result in cluster.step(3)] == [1, 2, 3]
    assert same_bits(cluster.weights(), before)
    assert not cluster.snapshot("state").records


@pytest.mark.few(4)
@grid(
    chunk_bytes=[64, None],
    optimizer=[
        all_but_fixed(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        all_but_fixed(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    ],
    size=[(1, 1), (3, 1), (1, 3), (2, 2)],
)
def test_parameters_without_gradient_are_skipped_as_torch_does(
    size: tuple[int, int], optimizer: Any, chunk_bytes: int | None
) -> None:
    task, (workers, devices) = Task(Sometimes, optimizer, batch_size=1), size
    trace = task.trace(workers * devices, STEPS)
    still = [torch.equal(a["extra"], b["extra"]) for a, b in pairwise(trace)]
    assert True in still
    assert False in still
    weights = run(task, STEPS, workers, devices, strategy=ps(2, chunk_bytes)).weights()
    assert difference(weights, trace[-1]) < 1e-12
    for name in ("never", "frozen", "fixed", "empty"):
        assert torch.equal(weights[name], trace[0][name]), name


def test_tied_parameters_are_one() -> None:
    task = Task(Tied, sgd(momentum=0.9))
    cluster = run(task, STEPS, 2, 2, strategy=ps(3))
    assert "decode.weight" not in cluster.weights()
    assert difference(cluster.weights(), task.train(4, STEPS)) < 1e-12


class Sum(nn.Module):
    """Three matrices of any dtypes whose gradients are small integers: every sum is exact."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.ones(3, 2, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ sum((matrix.double() for matrix in self.matrices), torch.zeros(()))


def integers(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float64).view(rows, columns) * 7 % 5 - 2


def product_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient does not depend on the weights."""
    return (output * target).sum() / len(target)


@pytest.mark.parametrize(
    ("workers", "servers", "devices"), [(1, 1, 1), (2, 2, 1), (2, 3, 2), (1, 2, 4)]
)
def test_several_dtypes_in_one_model(workers: int, servers: int, devices: int) -> None:
    task = Task(
        lambda: Sum(torch.float64, torch.float32, torch.bfloat16),
        sgd(lr=0.125),
        (integers(8, 3), integers(8, 2)),
        product_mean,
    )
    cluster = run(task, 4, workers, devices, strategy=ps(servers))
    assert same_bits(cluster.weights(), task.train(workers * devices, 4))


@pytest.mark.few(2)
@pytest.mark.parametrize(("workers", "servers", "devices"), [(1, 1, 1), (2, 2, 1), (2, 3, 2)])
def test_an_optimizer_of_whole_matrices_gets_whole_matrices(
    workers: int, servers: int, devices: int
) -> None:
    task = Task(
        lambda: Sum(*[torch.float64] * 3),
        lambda module: torch.optim.Muon(module.parameters(), lr=0.1),
        (integers(8, 3), integers(8, 2)),
        product_mean,
    )
    cluster = run(task, 4, workers, devices, strategy=ps(servers, chunk_bytes=16))
    assert all(len(chunks) == 1 for chunks in cluster.job.description.layout.chunks_of)
    assert len(cluster.job.description.layout.chunks) == 3
    assert same_bits(cluster.weights(), task.train(workers * devices, 4))


def test_one_tensor_over_many_chunks() -> None:
    task = Task(lambda: nn.Linear(3, 700).double(), sgd(momentum=0.9), samples(13, outputs=700))
    cluster = run(task, 5, 2, strategy=ps(3))
    layout = cluster.job.description.layout
    assert len(layout.chunks_of[layout.index["weight"]]) > 200
    assert difference(cluster.weights(), task.train(2, 5)) < 1e-12


def test_metrics_and_loss_are_means_over_the_samples_of_all_replicas() -> None:
    task = Task(
        perceptron, sgd(lr=0.0), metrics={"first": lambda output, target: target[:, 0].mean()}
    )
    cluster = InProcessCluster(task.creator(), num_workers=3, devices_per_worker=2, strategy=ps(2))
    x, y = task.data
    module = perceptron()
    module.load_state_dict(cluster.weights())
    plan = cluster.job.plan()
    for step, result in enumerate(cluster.step(4)):
        share = torch.from_numpy(plan.share(step, 0, 1))
        assert result.samples == len(share)
        assert result.metrics["first"] == pytest.approx(float(y[share, 0].mean()), abs=1e-12)
        expected = nn.functional.mse_loss(module(x[share]), y[share])
        assert result.loss == pytest.approx(float(expected.detach()), abs=1e-12)


class Counter(nn.Module):
    """The gradient of every parameter is -1."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.count.sum()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("workers", "servers", "devices"),
    [(1, 1, 1), (2, 1, 1), (3, 2, 1), (3, 3, 2), (7, 2, 1), (7, 2, 7), (14, 1, 1)],
)
def test_plus_one_n_times_is_n(workers: int, servers: int, devices: int) -> None:
    task = Task(Counter, sgd(lr=1.0), samples(98), lambda output, target: output, batch_size=1)
    weights = run(task, 8, workers, devices, strategy=ps(servers)).weights()
    assert torch.equal(weights["count"], torch.full((5, 7), 8.0, dtype=torch.float64))


def test_buffers_are_averaged_over_replicas_by_weight() -> None:
    task = Task(batch_norm, sgd(lr=0.0), samples(12), batch_size=3)
    cluster = run(task, 3, 2, 2, strategy=ps(2))
    found = states(cluster)
    merged = mean_states(found, [3.0, 3.0, 3.0, 1.0])
    for name in ("1.running_mean", "1.running_var"):
        expected = (
            3 * found[0][name] + 3 * found[1][name] + 3 * found[2][name] + found[3][name]
        ) / 10
        assert not torch.equal(found[0][name], found[3][name])
        assert torch.allclose(merged[name], expected, rtol=1e-14)
    assert merged["1.num_batches_tracked"] == 3


def test_the_mean_of_equal_states_is_that_state() -> None:
    state = {"mean": torch.randn(100), "count": torch.tensor(3)}
    for count in (1, 2, 3, 7):
        merged = mean_states([state] * count, [1.0] * count)
        assert torch.equal(merged["mean"], state["mean"])
        assert merged["count"] == 3
    assert torch.equal(mean_states([state] * 2, [0.0, 0.0])["mean"], state["mean"])


def test_warming_up_changes_neither_weights_nor_buffers() -> None:
    task = Task(batch_norm, sgd(momentum=0.9), samples(12))
    cluster = InProcessCluster(task.creator(), num_workers=2, strategy=ps(2))
    before = states(cluster)
    for worker in cluster.workers:
        cluster.wait(worker.at_version(0, 0, lambda replicas: replicas.warmup()), "the warm-up")
    assert all(
        torch.equal(value, a[name])
        for a, b in zip(before, states(cluster), strict=True)
        for name, value in b.items()
    )
    cluster.step(5)
    assert same_bits(cluster.weights(), run(task, 5, 2, strategy=ps(2)).weights())
