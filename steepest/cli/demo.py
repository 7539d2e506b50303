"""The demonstration: handwritten digits, two workers, every strategy, compared with one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler

from steepest.cli.begin import begun
from steepest.core.config.run import RunConfig
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.generators import seed_everything
from steepest.core.engine.job import ModelCreator
from steepest.core.models.protocol import Model
from steepest.core.models.torch import accuracy
from steepest.core.protocol.commit_rules import pushes_per_update
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError
from steepest.runtime.driver.trainer import DistributedSGD
from steepest.strategies.named import as_strategy
from steepest.strategies.names import STRATEGY_NAMES
from steepest.tables.modules.torch_model import TorchModel

Arrays = tuple[torch.Tensor, torch.Tensor]
SEED = 0
WORKERS = 2
BATCH = 32
_WARM_UP = 10  # steps
#: What the table says of a row whose weights were compared with those of the row on processes.
_SAME = {None: "", True: ", the same bits as on processes", False: ", other bits than on processes"}
_ON_RAY = ("ps", "allreduce")  # are trained once more on a Ray of this machine


@dataclass(frozen=True)
class ResultRow:
    """The result of one strategy."""

    strategy: str
    accuracy: float  # on the test data
    samples_per_second: float  # of training; so is seconds
    seconds: float
    # the largest of any weight from training in one process; None for other updates
    difference: float | None
    runtime: str = "processes"  # as of `RunConfig`
    same: bool | None = (
        None  # whether its weights have the same bits as those of the row on processes
    )


def load_digits() -> tuple[Arrays, Arrays]:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels: 1,437 to train, 360 to test.

    Returns:
        ((1437, 1, 8, 8) float64, (1437,) int64), and the same of the test data.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise ConfigurationError(
            "the demo needs scikit-learn's digits: pip install 'steepest[demo]'"
        ) from None
    digits = datasets.load_digits()
    x = torch.from_numpy(digits.data / 16.0).view(-1, 1, 8, 8)
    y = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    train, test = order[:1437], order[1437:]
    return (x[train], y[train]), (x[test], y[test])


def network() -> nn.Module:
    """Return a small convolutional network, in float64 so that rounding hides no difference."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10),
    ).double()  # fmt: skip


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def local_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with smaller steps, for workers that train by themselves between rounds."""
    return torch.optim.SGD(module.parameters(), lr=0.04, momentum=0.9)


def asynchronous_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with slightly smaller steps, for training in which each gradient is an update."""
    return torch.optim.SGD(module.parameters(), lr=0.08, momentum=0.9)


def annealing(steps: int) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    """Return a schedule: the learning rate rises for some of the steps, then falls to a twentieth."""
    return lambda sgd: torch.optim.lr_scheduler.LambdaLR(
        sgd, lambda step: min(1.0, (step + 1) / _WARM_UP) * (1.0 - 0.95 * min(step / steps, 1.0))
    )


def settings(name: str, train: Arrays, epochs: int) -> tuple[ModelCreator, Strategy]:
    """Return the model and the strategy of one row of the table.

    The synchronous strategies share one optimizer. If each worker's gradient is an update, some gradients are many
    updates old when they arrive: gradients are clipped, so that none does much harm, and the learning rate rises
    and falls, so that the first and last ones do least.
    """
    strategy = as_strategy(name)
    if name == "local":
        return model_creator(train, local_optimizer), strategy
    if pushes_per_update(strategy.rule, WORKERS) == 1:
        steps = epochs * SamplePlan(len(train[0]), WORKERS * BATCH, SEED).steps_per_epoch
        creator = model_creator(train, asynchronous_optimizer, annealing(steps))
        return creator, replace(strategy, clip_norm=1.0)
    return model_creator(train), strategy


def model_creator(
    train: Arrays,
    sgd: Callable[[nn.Module], torch.optim.Optimizer] = optimizer,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
) -> ModelCreator:
    """Return a function that makes a replica's model: the network with its loss, data and metrics.

    Args:
        train: images, labels.
        sgd: makes the optimizer of a module.
        schedule: makes the schedule of an optimizer's learning rate; None for none.
    """

    def create(worker_index: int, device_index: int) -> Model:
        metrics = {"accuracy": accuracy}
        return TorchModel(
            network(),
            loss=F.cross_entropy,
            data=train,
            batch_size=BATCH,
            optimizer=sgd,
            metrics=metrics,
            lr_scheduler=schedule,
        )

    return create


def train_in_one_process(train: Arrays, steps: int) -> dict[str, torch.Tensor]:
    """Return plain PyTorch's weights by name after `steps` batches of `WORKERS * BATCH` images (`train`: with labels).

    Every synchronous strategy must equal them.
    """
    seed_everything(SEED)
    module = network()
    sgd = optimizer(module)
    x, y = train
    plan = SamplePlan(len(x), WORKERS * BATCH, SEED)
    for step in range(steps):
        batch = torch.from_numpy(plan.share(step, 0, 1))
        sgd.zero_grad()
        F.cross_entropy(module(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def run(epochs: int = 8, *, progress: bool = True) -> list[ResultRow]:
    """Train under each strategy, print a table, and return its rows.

    Args:
        epochs: number of epochs under each strategy.
        progress: whether to show progress bars.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """
    train, test = load_digits()
    steps = epochs * SamplePlan(len(train[0]), WORKERS * BATCH, SEED).steps_per_epoch
    print(
        f"{len(train[0])} handwritten digits, {WORKERS} workers, {steps} steps in {epochs} epochs"
    )
    reference = train_in_one_process(train, steps)
    kept: dict[str, dict[str, torch.Tensor]] = {}
    rows = []
    for runtime, names in (("processes", STRATEGY_NAMES), ("ray", _ON_RAY)):
        with begun(runtime):
            for name in names:
                row, weights = _train(name, runtime, (train, test), epochs, progress)
                if name not in ("async", "ssp", "local"):
                    row = replace(row, difference=_difference(weights, reference))
                if runtime == "ray":
                    row = replace(row, same=_difference(weights, kept[name]) == 0)
                kept[name] = weights
                rows.append(row)
    print(table(rows))
    return rows


def _train(
    name: str, runtime: str, data: tuple[Arrays, Arrays], epochs: int, progress: bool
) -> tuple[ResultRow, dict[str, torch.Tensor]]:
    """Return a row without comparisons, and the weights."""
    train, test = data
    print(f"\nstrategy={name!r}, {'Ray' if runtime == 'ray' else runtime}", flush=True)
    began = time.monotonic()
    creator, strategy = settings(name, train, epochs)
    config = RunConfig(runtime=runtime)
    with DistributedSGD(
        creator, num_workers=WORKERS, strategy=strategy, seed=SEED, run_config=config
    ) as sgd:
        sgd.fit(epochs=epochs, progress=progress)
        seen = sgd.evaluate(test).metrics["accuracy"]
        weights = sgd.weights()
        speed = sgd.stats().samples_per_second
    return ResultRow(name, seen, speed, time.monotonic() - began, None, runtime), weights


def _difference(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any weight."""
    return max(float((weights[name] - value).abs().max()) for name, value in others.items())


def table(rows: list[ResultRow]) -> str:
    """Return the closing table as text."""
    lines = [
        "",
        f"{'strategy':<12}{'runs on':<11}{'test accuracy':>13}{'samples/s':>12}{'wall time':>12}"
        f"{'from one process':>20}",
    ]
    lines += [
        f"{row.strategy:<12}{'Ray' if row.runtime == 'ray' else row.runtime:<11}{row.accuracy:>13.1%}"
        f"{row.samples_per_second:>12,.0f}{row.seconds:>10.1f} s"
        + (f"{'(other updates)':>20}" if row.difference is None else f"{row.difference:>20.1e}")
        + _SAME[row.same]
        for row in rows
    ]
    lines.append(
        "wall time includes starting the processes; the last column is the largest difference of a "
        "weight"
    )
    return "\n".join(lines)
