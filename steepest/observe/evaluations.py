"""What follows from the evaluations of a `fit`: the best one, an early stop, a lower rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from steepest.errors import ConfigurationError
from steepest.observe.progress import Callback
from steepest.observe.results import EvaluationResult
from steepest.validation import require_choice, require_count, require_number, require_positive

MODES = ("min", "max")


def value_of(result: EvaluationResult, metric: str) -> float:
    """Return the loss or a metric of an evaluation; ConfigurationError: there is no such metric."""
    values = {"loss": result.loss, **result.metrics}
    if metric not in values:
        raise ConfigurationError(f"evaluations have no {metric!r}: give one of {', '.join(values)}")
    return values[metric]


def is_better(value: float, than: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Return whether a metric's value beats `than` (None for no value, or NaN) by more than `min_delta`, at least 0.

    Args:
        mode: "min" if less is better, "max" if more is; NaN is never better.
    """
    if math.isnan(value) or than is None:
        return not math.isnan(value)
    return (than - value if mode == "min" else value - than) > min_delta


def best_of(results: Sequence[EvaluationResult], metric: str, mode: str) -> EvaluationResult | None:
    """Return the first of the best evaluations; None if there is none, or all are NaN."""
    best: EvaluationResult | None = None
    for result in results:
        than = None if best is None else value_of(best, metric)
        if is_better(value_of(result, metric), than, mode):
            best = result
    return best


class _Watching(Callback):
    """Counts evaluations of a `fit` without improvement, among those that the trainer keeps."""

    needs_validation = True

    def __init__(self, metric: str, mode: str, patience: int, min_delta: float) -> None:
        if not isinstance(metric, str):
            raise ConfigurationError(f"metric={metric!r}: give 'loss' or the name of a metric")
        require_choice("mode", mode, MODES)
        require_count("patience", patience, 0)
        require_number("min_delta", min_delta)
        self._metric = metric
        self._mode = mode
        self._patience = patience
        self._min_delta = min_delta

    def _waited(self, sgd: Any, again_after: float = math.inf) -> int:
        """Return how many of this `fit`'s last evaluations brought no improvement; count anew after `again_after`."""
        best, waited = None, 0
        for result in sgd.evaluations:
            if result.step <= sgd.fit_began:
                continue
            waited = 0 if waited >= again_after else waited
            value = value_of(result, self._metric)
            if is_better(value, best, self._mode, self._min_delta):
                best, waited = value, 0
            else:
                waited += 1
        return waited


class EarlyStopping(_Watching):
    """Stops `fit` when evaluations get no better; needs ``fit(validation=)``.

    A program that is started again counts the evaluations from before, and stops where it would
    have stopped.

    Args:
        metric: "loss", or the name of a metric.
        mode: "min" if less is better, "max" if more is.
        patience: evaluations in a row without improvement after which `fit` ends; at least 1.
        min_delta: the least change that counts as an improvement is more than this.

    Raises:
        ConfigurationError: a value is out of range; by `fit` if evaluations have no such metric.
    """

    def __init__(
        self, metric: str = "loss", mode: str = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        super().__init__(metric, mode, patience, min_delta)
        require_count("patience", patience)

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        """Stop at once where the program had stopped before it was started again."""
        self._stop_if_due(sgd)

    def on_evaluation(self, sgd: Any, result: EvaluationResult) -> None:
        """Stop if the evaluation is one too many without improvement."""
        self._stop_if_due(sgd)

    def _stop_if_due(self, sgd: Any) -> None:
        if self._waited(sgd) >= self._patience:
            sgd.stop()


class ReduceOnPlateau(_Watching):
    """Multiplies the learning rate by a factor when evaluations get no better.

    As `torch.optim.lr_scheduler.ReduceLROnPlateau` with ``threshold_mode="abs"`` does; needs
    ``fit(validation=)``. The rate is set by `DistributedSGD.set_learning_rate`, so from the first
    time on the learning rate of a schedule is passed over. A program that is started again counts
    the evaluations from before.

    Args:
        metric: "loss", or the name of a metric.
        mode: "min" if less is better, "max" if more is.
        factor: between 0 and 1.
        patience: evaluations in a row without improvement that are tolerated; the next one reduces
            the rate, and the count begins anew.
        min_delta: the least change that counts as an improvement is more than this.
        min_rate: the rate of no group gets lower.

    Raises:
        ConfigurationError: a value is out of range; by `fit` if evaluations have no such metric.
    """

    def __init__(
        self,
        metric: str = "loss",
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 0.0,
        min_rate: float = 0.0,
    ) -> None:
        super().__init__(metric, mode, patience, min_delta)
        require_number("factor", factor, 0, 1, but=1)
        self._factor = require_positive("factor", factor)
        self._min_rate = min_rate

    def on_evaluation(self, sgd: Any, result: EvaluationResult) -> None:
        """Reduce the rate if the evaluation is one too many without improvement."""
        if self._waited(sgd, again_after=self._patience + 1) > self._patience:
            now = sgd.learning_rate
            least = self._min_rate  # a rate that is lower already stays
            sgd.set_learning_rate([max(rate * self._factor, min(rate, least)) for rate in now])
