"""Metrics of TorchMetrics in evaluations and own loops: those of one process on all samples, whoever dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torchmetrics = pytest.importorskip("torchmetrics", reason="pip install 'steepest[metrics]'")

from sklearn.metrics import roc_auc_score  # noqa: E402
from torchmetrics import MeanMetric  # noqa: E402
from torchmetrics.classification import BinaryAUROC  # noqa: E402
from torchmetrics.wrappers import MultitaskWrapper  # noqa: E402

import steepest  # noqa: E402
from steepest import (  # noqa: E402
    AllreduceStrategy,
    DistributedSGD,
    EarlyStopping,
    EvaluationResult,
    ParameterServerStrategy,
    TorchModel,
)
from steepest.adapters.torchmetrics import Calibration, NormalizedEntropy  # noqa: E402
from tests.jobs_on_processes import CONFIG  # noqa: E402
from tests.simulated_programs import quiet  # noqa: E402
from tests.simulation.run import Simulation, run_config  # noqa: E402

_DRAWN = torch.Generator().manual_seed(0)
X = torch.randn(41, 3, generator=_DRAWN, dtype=torch.float64)
Y = (X.sum(dim=1) + torch.randn(41, generator=_DRAWN, dtype=torch.float64) > 0).long()
FEW = (X[:2], torch.tensor([0, 1]))
STRIKES: list[Callable[[], object]] = []  # what happens when a worker reads `HeldOut` samples
STRATEGIES = [ParameterServerStrategy(num_servers=2, chunk_bytes=16), AllreduceStrategy()]


class Auc(BinaryAUROC):
    """Of logits; TorchMetrics guesses, batch by batch, whether scores are logits."""

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        super().update(output.sigmoid(), target)


class HeldOut(Dataset[Any]):
    """The first samples of `X`; somebody may die while they are read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if STRIKES and index >= self._count // 2:
            STRIKES.pop()()
        return X[index], Y[index]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(output, target.double())


def creator(worker_index: int, device_index: int) -> TorchModel:
    return TorchModel(
        network(),
        loss=loss,
        data=(X, Y),
        batch_size=4,
        metrics={
            "auc": Auc(),
            "ne": NormalizedEntropy(),
            "calibration": Calibration(),
            "mean": lambda output, target: output.mean(),
        },
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.5),
    )


def of_one_process(module: nn.Module, count: int) -> dict[str, float]:
    with torch.no_grad():
        output, target = module(X[:count]), Y[:count]
        entropy, calibration = NormalizedEntropy(), Calibration()
        entropy.update(output, target)
        calibration.update(output, target)
        return {
            "auc": roc_auc_score(target, output.sigmoid()),
            "ne": entropy.compute().item(),
            "calibration": calibration.compute().item(),
            "mean": output.mean().item(),
        }


def check(trainer: DistributedSGD, result: EvaluationResult, count: int) -> None:
    module = network()
    module.load_state_dict(trainer.state_dict())
    # scores are float32 in TorchMetrics
    assert result.metrics == pytest.approx(of_one_process(module, count), rel=1e-6)
    assert result.samples == count


@pytest.fixture
def _simulated() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.few(3)
@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_evaluation_is_that_of_one_process(workers: int, strategy: Any) -> None:
    with Simulation(1).running():
        settings = {"strategy": strategy, "run_config": run_config()}
        with DistributedSGD(creator, workers, **settings) as trainer:
            seen = trainer.fit(
                epochs=2,
                progress=False,
                validation=HeldOut(41),
                callbacks=[EarlyStopping("auc", mode="max", patience=5)],
            )
            assert set(seen.metrics) == {"mean"}  # an AUC of some batches is none
            check(trainer, trainer.evaluations[-1], 41)
            for count in (41, 22, 17):
                check(trainer, trainer.evaluate(HeldOut(count)), count)
                check(trainer, trainer.evaluate(HeldOut(count), batch_size=3), count)
            few = trainer.evaluate(FEW, batch_size=1)  # of three workers one has none
            assert few.metrics["auc"] in (0.0, 1.0)
            assert few.samples == 2
            trainer.fit(
                steps=2, progress=False, validation=HeldOut(17), evaluate_every=2, background=True
            )
            check(trainer, trainer.evaluations[-1], 17)


@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_dies_in_the_middle_of_an_evaluation(victim: int, strategy: Any) -> None:
    simulation = Simulation(2)

    def kill() -> None:
        (process,) = (p for p in simulation.living() if f"worker {victim}" in str(p))
        simulation.world.kill(process, "it was killed. connection error code 2.")

    with simulation.running():
        settings = {"strategy": strategy, "run_config": run_config()}
        with DistributedSGD(creator, 3, **settings) as trainer:
            trainer.fit(steps=3, progress=False)
            STRIKES.append(kill)
            result = trainer.evaluate(HeldOut(41))
            assert not STRIKES
            assert trainer.stats().events
            check(trainer, result, 41)


@pytest.mark.long
def test_an_evaluation_on_processes() -> None:
    with DistributedSGD(creator, 2, run_config=CONFIG) as trainer:
        trainer.fit(steps=3, progress=False)
        check(trainer, trainer.evaluate(HeldOut(41)), 41)


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        click, buy = self.score(x).unbind(dim=1)
        return {"click": click, "buy": buy}


class OfTasks(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index], {"click": Y[index], "buy": Y[index] * (X[index, 0] > 0)}


class Tasks(MultitaskWrapper):
    """Of logits."""

    def update(self, output: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
        super().update({task: each.sigmoid() for task, each in output.items()}, target)


def of_tasks(worker_index: int, device_index: int) -> TorchModel:
    return TorchModel(
        TwoTasks(),
        loss=lambda output, target: {task: loss(output[task], target[task]) for task in output},
        data=OfTasks(),
        batch_size=4,
        metrics={"auc": Tasks({"click": BinaryAUROC(), "buy": BinaryAUROC()})},
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.5),
    )


@pytest.mark.usefixtures("_simulated")
def test_metrics_by_task() -> None:
    with Simulation(1).running(), DistributedSGD(of_tasks, 3, run_config=run_config()) as trainer:
        trainer.fit(steps=2, progress=False)
        result, module = trainer.evaluate(OfTasks()), TwoTasks()
        module.load_state_dict(trainer.state_dict())
    with torch.no_grad():
        output = module(X)
    for task, labels in (("click", Y), ("buy", Y * (X[:, 0] > 0))):
        expected = roc_auc_score(labels, output[task].sigmoid())
        assert result.metrics[f"auc/{task}"] == pytest.approx(expected, rel=1e-6)
    assert {"click", "buy"} < set(result.metrics)  # the parts of the loss


# -- loops of one's own ----------------------------------------------------------------------------

GATHERED: list[tuple[int, int, float, float, float]] = []


def evaluating() -> None:
    """A loop that evaluates at the beginning of an epoch, and at its end."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    held_out = DataLoader(HeldOut(22), batch_size=3)
    model, optimizer, loader, held_out = steepest.prepare(model, optimizer, loader, held_out)
    auc, mean = Auc(), MeanMetric()

    def evaluate(epoch: int) -> None:
        auc.reset()
        mean.reset()
        outputs = []
        with torch.no_grad():
            for x, y in held_out:
                outputs.append(model(x))
                auc.update(outputs[-1], y)
                mean.update(outputs[-1])
        whole = steepest.gather({"auc": auc, "mean": mean, "rows": torch.cat(outputs)})
        expected = roc_auc_score(Y[:22], whole["rows"].sigmoid())
        GATHERED.append(
            (
                steepest.rank(),
                epoch,
                whole["auc"].compute().item(),
                expected,
                whole["mean"].compute().item() - whole["rows"].mean().item(),
            )
        )

    for epoch in steepest.epochs(3):
        evaluate(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        evaluate(epoch)
        if steepest.size() > 1 and epoch == 1 and STRIKES:
            STRIKES.pop()()
        steepest.report(auc=steepest.gather(auc).compute())


def check_gathered(workers: int) -> None:
    assert {rank for rank, *_ in GATHERED} == set(range(workers))
    for _, _, auc, expected, difference in GATHERED:
        assert auc == pytest.approx(expected, rel=1e-6)
        assert abs(difference) < 1e-6


@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_gathered_metric_is_that_of_one_process(workers: int) -> None:
    GATHERED.clear()
    with Simulation(1).running():
        steepest.run(evaluating, num_workers=workers, progress=False, run_config=run_config())
    check_gathered(workers)
    assert len(GATHERED) == 6 * workers


@pytest.mark.few(2)
@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize("moment", [100, 160, 220, 280])
def test_a_worker_dies_where_a_loop_evaluates(moment: int) -> None:
    GATHERED.clear()
    simulation = Simulation(moment)

    def strike() -> None:
        victims = [p for p in simulation.living() if "worker" in str(p)]
        simulation.world.kill(victims[moment % 3], "it was killed. connection error code 2.")

    with simulation.running():
        simulation.at_event(moment, strike)
        found = steepest.run(evaluating, num_workers=3, progress=False, run_config=run_config())
        assert found.history.events
    check_gathered(3)


def test_alone_a_metric_is_gathered_as_it_is() -> None:
    metric = Auc()
    metric.update(X[:, 0], Y)
    found = steepest.gather({"auc": metric})["auc"]
    assert found.compute() == metric.compute()
    assert found is not metric
