"""Jobs with models of JAX: checkpoints, deaths, evaluation; simulated, and one on processes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs JAX: make test-jax")

import jax.numpy as jnp
import optax

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
)
from steepest.errors import CheckpointError, ConfigurationError
from steepest.testing import Fault, with_faults
from tests.jax_tasks import JaxTask, output_of, squared_error
from tests.reference import difference, same_bits, samples
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.step_callbacks import After

DATA = tuple(array.numpy() for array in samples(64))


def loss_and_error(params: Any, batch: Any) -> Any:
    x, y = batch
    return squared_error(params, batch), {"error": jnp.abs(output_of(params, x) - y).mean()}


ADAM = JaxTask(optimizer=optax.adam(optax.linear_schedule(0.02, 0.0, 50)), data=DATA)
MOMENTUM = JaxTask(optimizer=optax.sgd(0.02, momentum=0.9), data=DATA, loss=loss_and_error)
PLAIN = JaxTask(optimizer=MOMENTUM.optimizer, data=DATA)
STRATEGIES: list[Any] = [
    ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    AllreduceStrategy(chunk_bytes=64),
]


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    found = Simulation(1)
    with quiet(), found.running():
        yield found


def trainer_of(
    task: JaxTask, strategy: Any, workers: int = 2, audit: float = 0.0
) -> DistributedSGD:
    failure = FailureConfig(patience=math.inf)  # no step with fewer workers
    config = run_config(failure=failure, audit=audit)
    return DistributedSGD(task.creator(), workers, strategy=strategy, run_config=config)


def test_audits_change_no_bit(simulation: Simulation) -> None:
    found = []
    for audit in (0.0, 1.0):
        with trainer_of(MOMENTUM, STRATEGIES[0], audit=audit) as trainer:
            trainer.fit(steps=4, progress=False)
            found.append(trainer.weights())
            assert "difference" not in [event.kind for event in trainer.stats().events]
    assert same_bits(*found)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_a_checkpoint_continues_exactly_under_another_strategy(
    simulation: Simulation, strategy: Any, tmp_path: Path
) -> None:
    with trainer_of(ADAM, strategy) as trainer:
        trainer.fit(steps=6, progress=False)
        trainer.save(tmp_path / "one")
        trainer.fit(steps=6, progress=False)
        straight = trainer.weights()
    assert difference(straight, ADAM.train(2, 12)) < 1e-12
    for workers, other in ((2, strategy), (2, *(s for s in STRATEGIES if s != strategy))):
        with trainer_of(ADAM, other, workers) as trainer:
            trainer.restore(tmp_path / "one")
            trainer.fit(steps=6, progress=False)
            assert difference(trainer.weights(), straight) < 1e-12
            assert same_bits(trainer.weights(), straight) or other != strategy
    said = r"optax\(0.count, 0.mu, 0.nu, 1.count\)"
    with trainer_of(MOMENTUM, strategy) as trainer, pytest.raises(CheckpointError, match=said):
        trainer.restore(tmp_path / "one")


@pytest.mark.parametrize(
    "strategy", [STRATEGIES[0], AllreduceStrategy(replication=2, chunk_bytes=64)]
)
def test_a_worker_dies_and_nothing_is_lost(simulation: Simulation, strategy: Any) -> None:
    def kill() -> None:
        (victim,) = (p for p in simulation.living() if "worker 1" in str(p))
        simulation.world.kill(victim, "it was killed. connection error code 2.")

    with trainer_of(ADAM, strategy, workers=3) as trainer:
        trainer.fit(steps=20, callbacks=[After({7: kill})], progress=False)
        assert trainer.stats().replaced == 1
        assert difference(trainer.weights(), ADAM.train(3, 20)) < 1e-12


def test_a_job_is_resized_evaluated_and_given_weights_and_rates(simulation: Simulation) -> None:
    with trainer_of(MOMENTUM, "ps") as trainer:
        assert trainer.fit(steps=3, progress=False).metrics.keys() == {"error"}
        trainer.resize(num_workers=3)
        trainer.fit(steps=3, progress=False)
        weights = trainer.weights()
        found = trainer.evaluate(DATA)
        model = MOMENTUM.creator()(0, 0)
        vectors = model.layout.allocate(), model.layout.allocate()
        model.bind(*vectors)
        model.layout.write(vectors[0], weights)
        own = model.evaluate(DATA)
        assert (found.loss, found.samples) == (pytest.approx(own.loss), 64)
        assert found.metrics == pytest.approx(own.metrics)
        trainer.set_learning_rate(0.0)
        assert trainer.step().learning_rate == (0.0,)
        assert same_bits(trainer.weights(), weights)
        trainer.set_weights(PLAIN.creator()(0, 0).named(PLAIN.params()))
        assert difference(trainer.weights(), PLAIN.train(2, 0)) == 0
        params = trainer.foreach_model(lambda model: model.params["0.bias"].tolist())
        assert len(params) == 3
        with pytest.raises(ConfigurationError, match="learning rates"):
            trainer.set_learning_rate([0.1, 0.2])


@pytest.mark.usefixtures("machine")
def test_a_worker_of_a_job_on_processes_is_killed(tmp_path: Path) -> None:
    faults = [Fault.kill("worker", 1, step=8)]
    (lives := tmp_path / "lives").mkdir()
    creator = with_faults(PLAIN.creator(), faults, lives=lives)
    with DistributedSGD(creator, num_workers=2) as trainer:
        trainer.fit(steps=5, progress=False)
        threads = trainer.foreach_worker(lambda view: os.environ["PJRT_NPROC"])
        assert threads == ["1", "1"]  # XLA's, as many as a worker has CPUs
        trainer.fit(steps=15, progress=False)
        assert trainer.stats().replaced == 1
        assert difference(trainer.weights(), PLAIN.train(2, 20)) < 1e-12
