"""Metrics of TorchMetrics over several workers: each equals the same metric of all samples in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

torchmetrics = pytest.importorskip("torchmetrics", reason="pip install 'steepest[metrics]'")

from sklearn.metrics import log_loss, roc_auc_score  # noqa: E402
from torchmetrics import MeanMetric, MetricCollection  # noqa: E402
from torchmetrics.classification import (  # noqa: E402
    BinaryAccuracy,
    BinaryAUROC,
    BinaryPrecision,
    BinaryRecall,
    MultilabelAUROC,
)
from torchmetrics.regression import PearsonCorrCoef  # noqa: E402
from torchmetrics.retrieval import RetrievalNormalizedDCG  # noqa: E402
from torchmetrics.wrappers import MultitaskWrapper  # noqa: E402

from steepest.adapters.torchmetrics import Calibration, NormalizedEntropy  # noqa: E402
from steepest.core.models.metric_states import (  # noqa: E402
    is_metric,
    merged,
    state_of,
    values_of,
)
from steepest.errors import ConfigurationError  # noqa: E402

_DRAWN = torch.Generator().manual_seed(0)
# TorchMetrics takes scores of a batch for logits if one of them is no probability
SCORES = torch.rand(40, generator=_DRAWN, dtype=torch.float64)
LABELS = torch.randint(2, (40,), generator=_DRAWN)
#: Samples by worker, each in batches: uneven parts, one worker without any.
SPLITS = [
    [[13, 13, 14]],
    [[1, 20], [19]],
    [[7, 7, 2], [], [23, 1]],
    [[], [40], []],
]


class Tasks(MultitaskWrapper):
    """Two tasks of the same scores."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update(
            {"click": preds, "skip": 1 - preds}, {"click": target, "skip": (preds > 0.3).long()}
        )


class Ranked(RetrievalNormalizedDCG):
    """Lists of ten samples."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update(preds, target, (preds * 1e6).long() % 4)


class TwoLabels(MultilabelAUROC):
    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update(
            torch.stack([preds, 1 - preds], dim=1), torch.stack([target, 1 - target], dim=1)
        )


METRICS: dict[str, Callable[[], Any]] = {
    "a list": BinaryAUROC,
    "sums": lambda: BinaryAUROC(thresholds=50),
    "a mean": MeanMetric,
    "stacked": PearsonCorrCoef,
    "lists that stay lists": Ranked,
    "tasks": lambda: Tasks({"click": BinaryAUROC(), "skip": BinaryAccuracy()}),
    "a collection": lambda: MetricCollection([BinaryPrecision(), BinaryRecall(), BinaryAUROC()]),
    "several labels": lambda: TwoLabels(2, average=None),
    "normalised entropy": NormalizedEntropy,
    "calibration": Calibration,
}


def update(metric: Any, part: slice) -> None:
    if isinstance(metric, MeanMetric):
        metric.update(SCORES[part])
    elif isinstance(metric, PearsonCorrCoef):
        metric.update(SCORES[part], SCORES[part] + LABELS[part])
    else:
        metric.update(SCORES[part], LABELS[part])


def parts(make: Callable[[], Any], split: list[list[int]]) -> list[Any]:
    """Return workers' metrics after their batches."""
    found, at = [], 0
    for sizes in split:
        metric = make()
        for size in sizes:
            update(metric, slice(at, at + size))
            at += size
        found.append(metric)
    assert at == len(SCORES)
    return found


@pytest.mark.few(20)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", METRICS)
def test_of_several_workers_is_that_of_one_process(name: str, split: list[list[int]]) -> None:
    if name == "stacked" and any(1 in sizes for sizes in split):
        pytest.skip("the library's own Pearson correlation has no value of a batch of one sample")
    whole = METRICS[name]()
    update(whole, slice(0, len(SCORES)))
    expected = values_of(name, whole)
    workers = parts(METRICS[name], split)
    states = [state_of(each) for each in workers]
    own = [copy.deepcopy(each.metric_state) for each in workers if hasattr(each, "metric_state")]
    for metric in workers:
        assert values_of(name, merged(metric, states)) == pytest.approx(expected, rel=1e-6)
    for before, metric in zip(own, workers, strict=False):
        torch.testing.assert_close(metric.metric_state, before)


def test_what_is_merged_is_not_merged_again_by_a_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metric = BinaryAUROC(distributed_available_fn=lambda: pytest.fail("asked for a group"))
    update(metric, slice(0, 40))
    expected = roc_auc_score(LABELS, SCORES)
    assert merged(metric, [state_of(metric)]).compute().item() == pytest.approx(expected)


def test_entropy_and_calibration_are_what_they_are_elsewhere() -> None:
    probabilities = SCORES.sigmoid()
    constant = torch.full_like(probabilities, LABELS.double().mean().item())
    expected = log_loss(LABELS, probabilities) / log_loss(LABELS, constant)
    for metric, scores in (
        (NormalizedEntropy(), SCORES),
        (NormalizedEntropy(from_logits=False), probabilities),
    ):
        metric.update(scores, LABELS.float())
        assert metric.compute().item() == pytest.approx(expected, rel=1e-12)
    metric = Calibration()
    metric.update(SCORES, LABELS)
    expected = (probabilities.mean() / LABELS.double().mean()).item()
    assert metric.compute().item() == pytest.approx(expected, rel=1e-12)
    for each in (NormalizedEntropy(), Calibration()):
        with pytest.raises(ValueError, match=r"shape \(4, 1\), labels \(4,\)"):
            each.update(torch.zeros(4, 1), torch.zeros(4))


def test_what_cannot_be_merged_is_named() -> None:
    averaged = torchmetrics.image.PeakSignalNoiseRatio(data_range=1.0)
    averaged.update(torch.ones(4), torch.zeros(4))
    with pytest.raises(ConfigurationError, match="'data_range' of the metric PeakSignalNoiseRatio"):
        merged(averaged, [state_of(averaged)] * 2)

    class Texts(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("texts", [], dist_reduce_fx=None)

        def update(self) -> None:
            self.texts.append("text")

        def compute(self) -> str:
            return "text"

    texts = Texts()
    texts.update()
    with pytest.raises(ConfigurationError, match="state 'texts' of the metric Texts has"):
        state_of(texts)
    with pytest.raises(ConfigurationError, match="metric 'm' computes"):
        values_of("m", texts)


def test_other_values_are_no_metrics() -> None:
    assert is_metric(BinaryAUROC())
    assert is_metric(MetricCollection([BinaryAUROC()]))
    assert not is_metric(torch.zeros(()))
    assert not is_metric(len)
