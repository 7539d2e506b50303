"""The Model protocol: what the engine asks of a model, and what it checks of its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from steepest.data.sources import Source
from steepest.errors import ModelError
from steepest.models.scalars import as_number, describe
from steepest.optim.spec import OptimizerSpec
from steepest.tensors.layout import Cut, ParameterLayout

_HEAVIEST = 1e90  # batch: far below `messages.fields.HEAVIEST`, since a push has the sum of several


class Ready(Protocol):
    """Called by `Model.compute_gradients` as soon as an entry's gradient, or a part, is in the gradient buffer."""

    def __call__(self, entry: int, weight: float, present: bool, chunk: int | None = None) -> None:
        """Takes an entry's index and the summed sample weight of the batch.

        Args:
            present: whether there was a gradient at all.
            chunk: of an entry that lies in several, the one whose part is written; None for all of them.
        """


#: Called by `Model.compute_gradients` before it uses an entry's weights, or with None before it uses any:
#: returns when they are here.
Arrive = Callable[[int | None], None]


@dataclass(frozen=True, slots=True)
class Computed:
    """What one replica got from one batch.

    Attributes:
        loss: mean over the batch.
        weight: what the batch weighs; the number of samples unless the model says otherwise.
        samples: number of samples.
        metrics: means over the batch, each a number as `steepest.models.scalars.as_number` takes it.
    """

    loss: float
    weight: float
    samples: int
    metrics: Mapping[str, Any]


def checked_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as plain floats, NaN and infinity as they are.

    Args:
        metrics: by name, each a number as `steepest.models.scalars.as_number` takes it.

    Raises:
        ModelError: they are anything else; names the metric and its type.
    """
    if not isinstance(metrics, Mapping):
        raise ModelError(f"metrics are {describe(metrics)}: return a dict of numbers by name")
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ModelError(f"a metric is named {name!r:.200}, {describe(name)}: name each by a string")
        if (number := as_number(value)) is None:
            raise ModelError(
                f"metric {name!r} is {describe(value)}: return a real number, a NumPy scalar or a tensor without "
                "dimensions"
            )
        found[name] = number
    return found


def checked(computed: Any) -> Computed:
    """Return what a model says that it computed as plain numbers.

    Raises:
        ModelError: it is no `Computed`, or one of its numbers is none.
    """
    if not isinstance(computed, Computed):
        raise ModelError(f"the model computed {describe(computed)}: return a steepest.models.protocol.Computed")
    loss, samples = map(as_number, (computed.loss, computed.samples))
    if loss is None:
        raise ModelError(f"the loss is {describe(computed.loss)}: return the batch's mean as a number")
    weight = checked_weight(computed.weight)
    if samples is None or not 0 <= samples < math.inf or samples != int(samples):
        raise ModelError(f"the batch has {computed.samples!r:.200} samples: return how many it has")
    return Computed(loss, weight, int(samples), checked_metrics(computed.metrics))


def checked_weight(value: Any) -> float:
    """Return what a batch weighs as a number whose sums, and the squares of these, are numbers too.

    Raises:
        ModelError: it is negative, too large or no number.
    """
    weight = as_number(value)
    if weight is None or not 0 <= weight <= _HEAVIEST:
        given = describe(value) if weight is None else weight
        raise ModelError(f"the loss weighs {given}: return a weight of zero or more, and at most {_HEAVIEST:g}")
    return weight


@runtime_checkable
class Model(Protocol):
    """One replica of a model, of any framework.

    A model is made by the user's `model_creator(worker_index, device_index)`; the library then binds it
    to flat buffers and calls it from one thread.
    """

    #: samples per replica and step
    batch_size: int
    #: where training batches come from
    data: Source

    @property
    def layout(self) -> ParameterLayout:
        """The flat view over all parameters, frozen ones included."""

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer, as a recipe that servers rebuild over their chunks."""

    def bind(self, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Moves the parameters into flat buffers laid out by `layout`.

        The parameters' present values are written to `weights`; from then on those that are trained are views
        of it, and `compute_gradients` writes to `gradients`. Frozen ones are the replica's own and stay where they
        are, so that the model may write to them; `load_state` takes their values from `weights`.

        Args:
            weights: uint8, `layout.nbytes` long, on the replica's device.
            gradients: the same.
        """

    def move(self, weights: torch.Tensor) -> None:
        """After `bind`: trained parameters are views of this vector from now on, which holds their values.

        Args:
            weights: as in `bind`. Others may share it: the model must not write to it.
        """

    def relayout(self, cut: Cut) -> None:
        """Plans `layout` anew, in the same order, cut into other chunks; `bind` follows."""

    def compute_gradients(
        self, batch: Any, ready: Ready, metrics: bool, arrive: Arrive = lambda entry: None
    ) -> Computed:
        """Computes the gradient of the mean loss over one batch into the gradient buffer.

        Calls `arrive` with a trainable entry before it uses its weights, or with None before it uses any; they may
        be on their way until it returns. Calls `ready` once for each trainable entry, as soon as its gradient is
        written: zeros, and False, for one that has none.
        """

    def evaluate(self, batch: Any) -> Computed:
        """Loss and metrics of one batch, in evaluation mode, changing nothing."""

    def source(self, data: Any, batch_size: int) -> Source:
        """A source of batches over other data of the same kind, for `evaluate`."""

    def state(self) -> dict[str, torch.Tensor]:
        """CPU copies of what the replica itself changes, by name.

        Buffers, such as running means; and those frozen parameters whose values are not those in `weights`.
        """

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Sets what `state` returns; frozen parameters that it does not name take their values in `weights`."""
