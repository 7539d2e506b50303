"""Ray Tune searches for the best strategy and learning rate; trials that do badly are stopped early.

    python examples/ray_tune.py     # --strategies ps async ssp --rates 1 0.1 0.01 --workers 4

Each trial trains a small network on scikit-learn's digits, and reports an accuracy after each epoch; the
best ones reach 90%.
Needs `pip install 'steepest[demo,tune]'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn
from torch.nn import functional as F

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

from steepest import Callback, DistributedSGD, EvaluationResult, TorchModel, accuracy

EPOCHS = 16
x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
x = x.float() / 16
train, held_out = (x[:1400], y[:1400]), (x[1400:], y[1400:])


class Report(Callback):
    """Report each evaluation to Tune, which may end the trial then."""

    def on_evaluation(self, sgd: DistributedSGD, result: EvaluationResult) -> None:
        tune.report({"accuracy": result.metrics["accuracy"], "loss": result.loss})


def trainable(config: dict[str, Any]) -> None:
    """One trial, in a process of its own; it is the driver of the workers that it starts."""

    def model_creator(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            loss=F.cross_entropy,
            data=train,
            batch_size=32,
            optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=config["lr"]),
            metrics={"accuracy": accuracy},
        )

    with DistributedSGD(model_creator, config["workers"], strategy=config["strategy"]) as sgd:
        sgd.fit(epochs=EPOCHS, validation=held_out, callbacks=[Report()], progress=False)


class Print(tune.Callback):
    """Print a line for each trial that has ended, by itself or by the scheduler."""

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        config, seen = trial.config, trial.last_result
        print(
            f"{config['strategy']:>10}, learning rate {config['lr']:<5g}: accuracy "
            f"{seen['accuracy']:.1%} after {seen['training_iteration']} epochs"
        )


def main(argv: Sequence[str] | None = None) -> tune.ResultGrid:
    """Run all trials, and return their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", nargs="+", default=["allreduce", "local"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.3, 0.03, 0.001])
    parser.add_argument("--workers", type=int, default=2, help="of each trial")
    parser.add_argument("--results", help="where Tune keeps its files; by default ~/ray_results")
    options = parser.parse_args(argv)

    tuner = tune.Tuner(
        # what each trial reserves; as many run at once as the cluster has room for
        tune.with_resources(trainable, DistributedSGD.resources(options.workers)),
        param_space={
            "strategy": tune.grid_search(options.strategies),
            "lr": tune.grid_search(options.rates),
            "workers": options.workers,
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            scheduler=ASHAScheduler(max_t=EPOCHS, grace_period=2, reduction_factor=2),
        ),
        run_config=tune.RunConfig(storage_path=options.results, callbacks=[Print()], verbose=0),
    )
    results = tuner.fit()
    if results.errors:
        raise results.errors[0]
    best = results.get_best_result().config
    print(f"best: strategy={best['strategy']!r}, lr={best['lr']:g}")
    return results


if __name__ == "__main__":
    main()
