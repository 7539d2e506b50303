"""Ray Tune's population-based training: trials go on from checkpoints, their own or those of better trials.

    python examples/ray_tune_population.py     # --rates 1 0.3 0.003 --epochs 12 --workers 4

A trial saves its state after each epoch, and gives Tune the checkpoint. Tune starts it again from there in three
cases: its process has died (`max_failures`), it does worse than others, whose state and learning rate it
takes over (`PopulationBasedTraining`), or it was paused. The first trial's process is killed once, to show it.
Needs `pip install 'steepest[demo,tune]'`.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from torch import nn
from torch.nn import functional as F

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

from steepest import DistributedSGD, TorchModel, accuracy

x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
x = x.float() / 16
train, held_out = (x[:1400], y[:1400]), (x[1400:], y[1400:])


def model_creator(worker_index: int, device_index: int) -> TorchModel:
    return TorchModel(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss=F.cross_entropy,
        data=train,
        batch_size=32,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        metrics={"accuracy": accuracy},
    )


def trainable(config: dict[str, Any]) -> None:
    """One trial, from the checkpoint that Tune has for it, if any."""
    with DistributedSGD(model_creator, config["workers"]) as sgd:
        epoch = 0
        if (kept := tune.get_checkpoint()) is not None:
            with kept.as_directory() as folder:
                sgd.restore(Path(folder) / "state")
                epoch = int((Path(folder) / "epoch").read_text())
        begun = epoch
        sgd.set_learning_rate(config["lr"])  # the state may be of a trial with another one
        while epoch < config["epochs"]:
            sgd.fit(epochs=1, progress=False)
            epoch += 1
            found = sgd.evaluate(held_out)
            if config["dies"] and epoch == 2 and kept is None:
                os.kill(os.getpid(), signal.SIGKILL)  # what was learned in this epoch is lost
            with tempfile.TemporaryDirectory() as folder:
                sgd.save(Path(folder) / "state")
                (Path(folder) / "epoch").write_text(str(epoch))
                tune.report(
                    {"accuracy": found.metrics["accuracy"], "epoch": epoch, "begun": begun},
                    checkpoint=tune.Checkpoint.from_directory(folder),
                )


def main(argv: Sequence[str] | None = None) -> tune.ResultGrid:
    """Run all trials, and return their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[0.3, 0.0003])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="of each trial")
    parser.add_argument("--results", help="where Tune keeps its files; by default ~/ray_results")
    options = parser.parse_args(argv)

    tuner = tune.Tuner(
        tune.with_resources(trainable, DistributedSGD.resources(options.workers)),
        param_space={
            "lr": tune.grid_search(options.rates),
            "dies": tune.sample_from(lambda config: config["lr"] == options.rates[0]),
            "workers": options.workers,
            "epochs": options.epochs,
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            scheduler=PopulationBasedTraining(
                time_attr="epoch",
                perturbation_interval=3,
                hyperparam_mutations={"lr": options.rates},
                quantile_fraction=0.5,
                synch=True,  # all trials of an interval are compared, whichever is first
            ),
        ),
        run_config=tune.RunConfig(
            storage_path=options.results,
            failure_config=tune.FailureConfig(max_failures=2),
            verbose=0,
        ),
    )
    results = tuner.fit()
    if results.errors:
        raise results.errors[0]
    for result in results:
        seen = result.metrics
        print(
            f"learning rate {seen['config']['lr']:<6g}: accuracy {seen['accuracy']:.1%} after epoch "
            f"{seen['epoch']}; its process began after epoch {seen['begun']}"
        )
    return results


if __name__ == "__main__":
    main()
