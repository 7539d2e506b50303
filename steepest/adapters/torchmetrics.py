"""Metrics of click-through rates that TorchMetrics lacks: normalised entropy and calibration."""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import Metric


class NormalizedEntropy(Metric):  # type: ignore[misc]
    """The mean log loss, divided by that of predicting the share of positive labels for every sample.

    Below 1 the predictions are worth more than that constant; inf or NaN where all labels are alike. He et al.,
    Practical Lessons from Predicting Clicks on Ads at Facebook, 2014.

    Args:
        from_logits: whether predictions are logits; else they are probabilities.

    Example:
        >>> metric = NormalizedEntropy()
        >>> metric.update(torch.tensor([0.0, 0.0]), torch.tensor([0, 1]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    log_loss: torch.Tensor
    positives: torch.Tensor
    samples: torch.Tensor

    def __init__(self, from_logits: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.from_logits = from_logits
        for name in ("log_loss", "positives", "samples"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Add a batch: predictions and labels of 0 and 1, of one shape."""
        preds, target = _checked(preds, target)
        log_loss = torch.nn.functional.binary_cross_entropy
        if self.from_logits:
            log_loss = torch.nn.functional.binary_cross_entropy_with_logits
        self.log_loss += log_loss(preds, target, reduction="sum")
        self.positives += target.sum()
        self.samples += target.numel()

    def compute(self) -> torch.Tensor:
        """Return the normalised entropy of all samples."""
        share = self.positives / self.samples
        constant = torch.nn.functional.binary_cross_entropy(share, share)
        return self.log_loss / self.samples / constant


class Calibration(Metric):  # type: ignore[misc]
    """The sum of predicted probabilities, divided by the number of positive labels; inf or NaN without any.

    Args:
        from_logits: whether predictions are logits; else they are probabilities.

    Example:
        >>> metric = Calibration()
        >>> metric.update(torch.zeros(4), torch.tensor([0, 0, 0, 1]))
        >>> metric.compute()
        tensor(2., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    predicted: torch.Tensor
    positives: torch.Tensor

    def __init__(self, from_logits: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.from_logits = from_logits
        for name in ("predicted", "positives"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Add a batch: predictions and labels of 0 and 1, of one shape."""
        preds, target = _checked(preds, target)
        self.predicted += (preds.sigmoid() if self.from_logits else preds).sum()
        self.positives += target.sum()

    def compute(self) -> torch.Tensor:
        """Return the calibration over all samples."""
        return self.predicted / self.positives


def _checked(preds: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predictions and labels in float64; ValueError: their shapes differ."""
    if preds.shape != target.shape:
        raise ValueError(
            f"predictions have shape {tuple(preds.shape)}, labels {tuple(target.shape)}: give equal shapes"
        )
    return preds.double(), target.double()
