"""Models of JAX: any number of workers, under any strategy, equals a plain optax loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs JAX: make test-jax")

import jax
import jax.numpy as jnp
import optax
import torch

from steepest.core.strategies.strategy import Strategy
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy
from steepest.testing import InProcessCluster, replay
from tests.jax_tasks import JaxTask, network, with_noise
from tests.pairs import diagonal, mostly_full
from tests.reference import Weights, difference, same_bits

STEPS = 12


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda value: value.ndim > 1, params)


TASKS = {
    "sgd": JaxTask(),
    "nesterov": JaxTask(optimizer=optax.sgd(0.05, momentum=0.9, nesterov=True)),
    "adam": JaxTask(optimizer=optax.adam(optax.cosine_decay_schedule(0.02, 20))),
    "adamw": JaxTask(optimizer=optax.adamw(0.01, weight_decay=0.1, mask=matrices)),
    "lamb": JaxTask(optimizer=optax.lamb(0.02)),
}
STRATEGIES: dict[str, Strategy] = {
    "ps": ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    "copies": ParameterServerStrategy(num_servers=2, replication=2, chunk_bytes=64),
    "allreduce": AllreduceStrategy(chunk_bytes=64),
    "simple": SimpleStrategy(),
}


@cache
def serial(name: str, workers: int) -> Weights:
    return TASKS[name].train(workers, STEPS)


def run(task: JaxTask, workers: int, strategy: Strategy, **options: Any) -> InProcessCluster:
    cluster = InProcessCluster(task.creator(), num_workers=workers, strategy=strategy, **options)
    results = cluster.step(STEPS)
    assert [result.step for result in results] == list(range(1, STEPS + 1))
    return cluster


@diagonal(name=TASKS, workers=[2, 3, 1], strategy=STRATEGIES)
def test_training_equals_a_plain_optax_loop(name: str, workers: int, strategy: str) -> None:
    weights = run(TASKS[name], workers, STRATEGIES[strategy]).weights()
    assert difference(weights, serial(name, workers)) < 1e-12


@diagonal(mode=["ssp", "async"], workers=[1, 2, 3])
def test_asynchronous_training_is_explained_by_its_log(mode: Any, workers: int) -> None:
    strategy = ParameterServerStrategy(mode=mode, num_servers=2, chunk_bytes=64)
    cluster = run(TASKS["adam"], workers, strategy, keep_log=True)
    assert same_bits(replay(cluster.log(), TASKS["adam"].creator()), cluster.weights())
    if workers == 1:
        assert difference(cluster.weights(), serial("adam", 1)) < 1e-12


@pytest.mark.parametrize("workers", mostly_full([1, 2, 3], 1, 2))
def test_rounds_of_one_local_update_equal_a_plain_loop(workers: int) -> None:
    """Means of changes by SGD are the change by the mean gradient."""
    weights = run(TASKS["sgd"], workers, LocalStrategy(sync_every=1, chunk_bytes=64)).weights()
    assert difference(weights, serial("sgd", workers)) < 1e-12
    if workers == 1:  # whatever the optimizer
        weights = run(TASKS["adamw"], workers, LocalStrategy(sync_every=1)).weights()
        assert difference(weights, serial("adamw", workers)) < 1e-12


def test_micro_batches_and_devices_equal_a_larger_batch() -> None:
    options = {"devices_per_worker": 2, "accumulate": 2}
    weights = run(TASKS["nesterov"], 1, STRATEGIES["ps"], **options).weights()
    assert difference(weights, serial("nesterov", 4)) < 1e-12


def test_float32_equals_a_plain_loop_to_rounding() -> None:
    data = tuple(array.astype("float32") for array in TASKS["sgd"].data)
    task = JaxTask(lambda: network("float32"), data=data, x64=False)
    weights = run(task, 2, STRATEGIES["ps"]).weights()
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert difference(weights, task.train(2, STEPS)) < 1e-6


def test_bfloat16_is_trained() -> None:
    data = tuple(array.astype("float32") for array in TASKS["sgd"].data)
    task = JaxTask(lambda: network("bfloat16"), data=data, x64=False)
    weights = run(task, 1, STRATEGIES["ps"]).weights()
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert difference(weights, task.train(1, STEPS)) < 0.02  # rounding differs within XLA


def test_randomness_is_of_the_step_and_the_share() -> None:
    task = replace(TASKS["nesterov"], loss=with_noise)
    first = run(task, 2, STRATEGIES["ps"]).weights()
    for workers, devices, strategy in ((2, 1, "allreduce"), (1, 2, "ps")):
        again = run(task, workers, STRATEGIES[strategy], devices_per_worker=devices).weights()
        assert difference(again, first) < 1e-12
    assert difference(run(task, 2, STRATEGIES["ps"], seed=1).weights(), first) > 1e-3


def test_a_batch_may_weigh_something_else_than_its_samples() -> None:
    """Equal to one process that takes the weighted mean over the whole batch."""
    x, y = TASKS["sgd"].data
    rows = jnp.arange(1.0, 14.0)

    def loss(params: Any, batch: Any) -> Any:
        x, y, rows = batch
        hidden = jnp.tanh(x @ params["0.weight"] + params["0.bias"])
        error = (hidden @ params["2.weight"] + params["2.bias"] - y) ** 2
        return (error.mean(axis=1) * rows).sum() / rows.sum()

    weigh = {"weight": lambda batch: batch[2].sum()}
    task = JaxTask(loss=loss, data=(x, y, jax.device_get(rows)), settings=weigh)
    weights = run(task, 3, STRATEGIES["ps"]).weights()
    assert difference(weights, task.train(3, STEPS)) < 1e-12
