"""Checkpoints while processes die: what is started again ends with the bits of an undisturbed run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steepest import (
    AllreduceStrategy,
    Checkpoints,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
)
from steepest.errors import CheckpointError
from tests.checkpoint_contents import edit
from tests.reference import same_bits
from tests.simulated_programs import TASK, quiet
from tests.simulation.run import Simulation, run_config
from tests.step_callbacks import After

STRATEGIES: list[Any] = [
    ParameterServerStrategy(num_servers=2, chunk_bytes=32),
    AllreduceStrategy(chunk_bytes=32),
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def program(
    simulation: Simulation,
    strategy: Any,
    path: Path | None = None,
    then: dict[int, Callable[[], object]] | None = None,
) -> tuple[Any, list[int]]:
    """Runs the program, as often as it is called; returns its weights, and the steps of its history."""
    failure = FailureConfig(snapshot_every=5, patience=math.inf)  # no step with fewer workers
    checkpoints = None if path is None else Checkpoints(path, every=4, keep=2)
    with (
        simulation.running(),
        DistributedSGD(
            TASK.creator(),
            3,
            strategy=strategy,
            run_config=run_config(failure=failure),
            checkpoints=checkpoints,
        ) as trainer,
    ):
        trainer.fit(steps=30, callbacks=[After(then or {})], progress=False)
        return trainer.weights(), [row["step"] for row in trainer.history.steps]


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_worker_and_then_the_driver_die_while_checkpoints_are_written(
    strategy: Any, tmp_path: Path
) -> None:
    simulation = Simulation(3)

    def kill() -> None:
        (victim,) = (p for p in simulation.living() if "worker 1" in str(p))
        simulation.world.kill(victim, "it was killed. connection error code 2.")

    undisturbed, _ = program(Simulation(1), strategy)
    died = {13: kill, 21: lambda: shutil.copytree(tmp_path / "one", tmp_path / "two")}
    weights, steps = program(simulation, strategy, tmp_path / "one", died)
    assert steps == list(range(1, 31))
    assert same_bits(weights, undisturbed)
    names = [path.name for path in sorted((tmp_path / "one").glob("0*"))]
    assert [name.partition("-")[2] for name in names] == ["step-28", "step-30"]
    began = max(
        int(path.parent.name.split("-")[-1]) for path in (tmp_path / "two").glob("*/manifest.json")
    )
    assert began in (16, 20)
    taken: list[int] = []
    again, steps = program(
        Simulation(5), strategy, tmp_path / "two",
        {step: lambda step=step: taken.append(step) for step in range(1, 31)},  # type: ignore[misc]
    )  # fmt: skip
    assert taken == list(range(began + 1, 31))
    assert steps == list(range(1, 31))
    assert same_bits(again, undisturbed)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"step": 1 << 40}, "'step' is 1099511627776"),
        ({"epoch": 1 << 39}, "'epoch' is 549755813888, which cannot be at step"),
        ({"schedule": "x"}, "'schedule' is 'x'"),
        (
            {"rates": [0.1, 0.2]},
            "learning rates for 2 parameter groups, this job's optimizer has 1",
        ),
        ({"rates": []}, "learning rates for 0 parameter groups"),
        ({"unfrozen": ["nope"]}, "it trains .'nope'., which the model has not"),
    ],
)
def test_a_checkpoint_that_cannot_be_of_this_job_changes_nothing(
    tmp_path: Path, odd: dict[str, Any], why: str
) -> None:
    simulation = Simulation()
    with (
        simulation.running(),
        DistributedSGD(
            TASK.creator(), 2, strategy=STRATEGIES[0], run_config=run_config()
        ) as trainer,
    ):
        trainer.fit(steps=3, progress=False)
        trainer.save(tmp_path / "bad")
        good = trainer.weights()
        edit(tmp_path / "bad", lambda manifest: manifest.update(odd))
        with pytest.raises(CheckpointError, match=why):
            trainer.restore(tmp_path / "bad")
        same_bits(trainer.weights(), good)
        trainer.fit(steps=3, progress=False)
