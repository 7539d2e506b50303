"""A program with a logger, started again and again by test_real_loggers.py: KIND FOLDER [STEP OF ITS DEATH]."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steepest import (
    AllreduceStrategy,
    Callback,
    Checkpoints,
    DistributedSGD,
    FailureConfig,
    MLflow,
    StepResult,
    TensorBoard,
    Trackio,
    WandB,
)
from tests.reference import Task, samples
from tests.simulation.run import Simulation, run_config

STEPS = 30
TASK = Task(data=samples(24), batch_size=2, metrics={"first": lambda output, target: output[0, 0]})
LOGGERS: dict[str, Callable[[Path], Callback]] = {
    "tensorboard": lambda folder: TensorBoard(folder / "runs", seconds=0.0),
    "mlflow": lambda folder: MLflow("digits", uri=f"sqlite:///{folder}/mlflow.db", seconds=0.0),
    "wandb": lambda folder: WandB("digits", init={"mode": "offline", "dir": folder}, seconds=0.0),
    "trackio": lambda folder: Trackio("digits", init={"auto_log_cpu": False}, seconds=0.0),
}


class Dying(Callback):
    """Kills a worker after the sixth step, and the driver after another."""

    def __init__(self, simulation: Simulation, last: int) -> None:
        self.simulation, self.last = simulation, last

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step == 6 and self.last and not trainer.history.events:
            (victim,) = (p for p in self.simulation.living() if "worker 1" in str(p))
            self.simulation.world.kill(victim, "it was killed. connection error code 2.")
        if result.step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str, folder: Path, last: int = 0) -> dict[str, Any]:
    """Run the program; return its history's rows, and the ids of runs."""
    simulation = Simulation(7 + last)
    with (
        simulation.running(),
        DistributedSGD(
            TASK.creator(),
            3,
            strategy=AllreduceStrategy(),
            run_config=run_config(failure=FailureConfig(snapshot_every=10_000)),  # of step 0 only
            checkpoints=Checkpoints(folder / "checkpoints", every=5),
        ) as trainer,
    ):
        trainer.fit(
            steps=STEPS,
            callbacks=[LOGGERS[kind](folder), Dying(simulation, last)],
            progress=False,
            validation=samples(17),
            evaluate_every=4,
        )
        trainer.evaluate(samples(9))
        kinds = ("step", "epoch", "evaluation", "event")
        rows = {each: [row["step"] for row in trainer.history.rows(each)] for each in kinds}
        return {"rows": rows, "runs": trainer.history.runs}


if __name__ == "__main__":
    found = main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
    sys.stdout.write(f"\n{json.dumps(found)}\n")
