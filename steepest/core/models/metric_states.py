"""Metrics of TorchMetrics: what they have accumulated, and one metric of what several workers have."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from steepest.core.models.scalars import as_number, describe
from steepest.core.tensors.dtypes import Tensors
from steepest.errors import ConfigurationError


class MetricState(NamedTuple):
    """What a metric, and each metric in it, has accumulated.

    Attributes:
        updates: by the way to a metric among the modules, how often it was updated.
        tensors: on the CPU, perhaps the metric's own, by "WAY/STATE"; those of a list by "WAY/STATE/NUMBER".
    """

    updates: dict[str, int]
    tensors: Tensors


def is_metric(value: Any) -> bool:
    """Return whether a value is a metric of TorchMetrics, or a collection of them."""
    library = sys.modules.get("torchmetrics")  # a program that has such a metric has imported it
    return library is not None and isinstance(value, (library.Metric, library.MetricCollection))


def state_of(metric: Any) -> MetricState:
    """Return what a metric has accumulated.

    Raises:
        ConfigurationError: a list of it has something else than tensors.
    """
    updates, tensors = {}, Tensors()
    for way, part in _metrics_in(metric):
        updates[way] = part.update_count
        for name, value in part.metric_state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{way}/{name}"] = value.detach().cpu()
                continue
            for number, each in enumerate(_shortened(part, name, value)):
                if not isinstance(each, torch.Tensor):
                    raise ConfigurationError(
                        f"the state {name!r} of the metric {type(part).__name__} has {describe(each)}: tensors, and "
                        "lists of tensors, are merged over workers; compute it on one worker, of gathered outputs"
                    )
                tensors[f"{way}/{name}/{number}"] = each.detach().cpu()
    return MetricState(updates, tensors)


def merged(metric: Any, states: Sequence[MetricState]) -> Any:
    """Return a metric of all samples that several workers' have seen, without a process group of torch.distributed.

    Args:
        metric: a worker's own, which stays as it is.
        states: of all workers, by rank; one that was never updated counts for nothing.

    Raises:
        ConfigurationError: a state is a mean over workers, which samples that do not split evenly make inexact.
    """
    whole = copy.deepcopy(metric)
    whole.reset()
    for way, part in _metrics_in(whole):
        having = [state for state in states if state.updates.get(way)]
        for name in part.metric_state if having else ():
            setattr(part, name, _merged(part, name, [_values(s, way, name) for s in having]))
        part._update_count = sum(state.updates[way] for state in having)
        part.distributed_available_fn = _never  # what follows is computed here, of the whole
    return whole


def values_of(name: str, metric: Any) -> dict[str, float]:
    """Return the values of a metric by name: "NAME", or "NAME/KEY" if it computes several.

    Raises:
        ConfigurationError: it computes something else than numbers.
    """
    computed = metric.compute()
    if isinstance(computed, torch.Tensor) and computed.dim() == 1:
        computed = dict(enumerate(computed))
    several = computed if isinstance(computed, Mapping) else {None: computed}
    numbers = {}
    for key, value in several.items():
        number = as_number(value)
        if number is None:
            raise ConfigurationError(
                f"metric {name!r} computes {describe(value)}: give one that computes a number, a tensor with one "
                "dimension, or a dict of numbers"
            )
        numbers[name if key is None else f"{name}/{key}"] = number
    return numbers


class AccumulatedMetrics:
    """The metrics that one evaluation accumulates, by name."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}

    def begin(self) -> None:
        """Forget what was accumulated."""
        for metric in self._metrics.values():
            metric.reset()
        self._metrics.clear()

    def take(self, values: Any) -> Any:
        """Keep those of a batch's values that are metrics, which the batch has updated; return the others.

        Return what is no mapping as it is: `checked_metrics` refuses it.
        """
        if not isinstance(values, Mapping):
            return values
        self._metrics.update({name: each for name, each in values.items() if is_metric(each)})
        return {name: each for name, each in values.items() if not is_metric(each)}

    def states(self) -> dict[str, MetricState]:
        """Return what was accumulated, by name."""
        return {name: state_of(metric) for name, metric in self._metrics.items()}

    def values(self, parts: Sequence[Mapping[str, MetricState]]) -> dict[str, float]:
        """Return the metrics' values over all that several workers have accumulated."""
        numbers: dict[str, float] = {}
        for name, metric in self._metrics.items():
            whole = merged(metric, [part[name] for part in parts if name in part])
            numbers.update(values_of(name, whole))
        return numbers


def without_metrics(values: Any) -> Any:
    """Return the values of a training step that are no metrics; those forget the batch.

    Return what is no mapping as it is: `checked_metrics` refuses it.
    """
    if not isinstance(values, Mapping):
        return values
    for each in values.values():
        if is_metric(each):
            each.reset()
    return {name: each for name, each in values.items() if not is_metric(each)}


def _metrics_in(metric: Any) -> Iterator[tuple[str, Any]]:
    """Yield each metric in a metric, or in a collection, by the way to it among the modules."""
    library = sys.modules["torchmetrics"]
    for module in metric.modules():
        if isinstance(module, library.MetricCollection):
            module.items(copy_state=False)  # metrics of one compute group have the same state now
    for way, module in metric.named_modules():
        if isinstance(module, library.Metric):
            yield way, module


def _shortened(part: Any, name: str, values: list[Any]) -> list[Any]:
    """Return a list that is going to be concatenated as one tensor, any other as it is."""
    return [_concatenate()(values)] if len(values) > 1 and _is_cat(part, name) else values


def _is_cat(part: Any, name: str) -> bool:
    return part._reductions[name] is _concatenate()


def _concatenate() -> Any:
    return sys.modules["torchmetrics"].utilities.dim_zero_cat


def _values(state: MetricState, way: str, name: str) -> list[torch.Tensor] | torch.Tensor:
    """Return what a state has of one metric's one."""
    key = f"{way}/{name}"
    if key in state.tensors:
        return state.tensors[key]
    parts: list[torch.Tensor] = []
    while (each := state.tensors.get(f"{key}/{len(parts)}")) is not None:
        parts.append(each)
    return parts


def _merged(part: Any, name: str, values: list[Any]) -> Any:
    """Return what several workers have of one state as one."""
    reduction = part._reductions[name]
    if isinstance(part._defaults[name], list):
        parts = [each.to(part.device) for each in _flat(values)]
        return parts if reduction is None or _is_cat(part, name) else reduction(parts)
    if len(values) == 1:
        return values[0].to(part.device)
    if reduction is sys.modules["torchmetrics"].utilities.dim_zero_mean:
        raise ConfigurationError(
            f"the state {name!r} of the metric {type(part).__name__} is a mean over workers, whatever samples they "
            "have had: give a metric whose states are sums, extremes or lists"
        )
    stacked = torch.stack([each.to(part.device) for each in values])
    return stacked if reduction is None else reduction(stacked)


def _flat(values: Sequence[list[torch.Tensor] | torch.Tensor]) -> list[torch.Tensor]:
    """Return lists one behind the other; one that a metric has concatenated itself is a tensor."""
    return [each for part in values for each in (part if isinstance(part, list) else [part])]


def _never() -> bool:
    return False
