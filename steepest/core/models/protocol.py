"""The class of models: what the engine calls, and checks of what models return."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from steepest.core.data.protocol import Indices, Source
from steepest.core.messages.fields import StepDigest
from steepest.core.models.metric_states import MetricState
from steepest.core.models.scalars import as_number, describe
from steepest.core.optim.arriving import ArrivingState
from steepest.core.optim.portable import Record
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout
from steepest.errors import ModelError

_HEAVIEST = 1e90  # weight of a batch; `messages.fields.HEAVIEST` bounds the sum of several


class Ready(Protocol):
    """A callback of `Model.compute_gradients`: a gradient, or a part of one, is written."""

    def __call__(self, entry: int, weight: float, present: bool, chunk: int | None = None) -> None:
        """Take a gradient that is written.

        Args:
            entry: index of the layout's entry.
            weight: summed sample weight of the batch.
            present: whether there is a gradient at all.
            chunk: for an entry that lies in several chunks, the one whose part is written; None for
                all.
        """


class Share(NamedTuple):
    """The numbers of samples of a batch, and of the update that it is part of."""

    samples: int  # of the next batch, as the job has divided its data
    # of all batches whose mean gradient is one update; 0 if that is known only at the commit, which then multiplies
    # the mean by its samples if the model sums over samples
    whole: int


class Where(NamedTuple):
    """The place of a batch in a job's data."""

    step: int  # the number of steps before
    epoch: int | None  # None if the data choose their own batches
    part: tuple[int, int]  # its number among the batches of the step, and their number
    # parts of the epoch's permutation that the step takes
    ranges: tuple[tuple[int, int], ...] = ()
    is_last: bool = False  # whether the step is the last one of its epoch
    has_more: bool = False  # whether the replica has further batches in the step
    empty: bool = False  # whether it has no samples in the step
    leased: bool = False  # whether steps come in any order

    def follows(self, before: Where) -> bool:
        """Return whether the batch may come right after `before`, if all earlier steps are committed."""
        if self.leased or self.step > before.step:
            return True
        # without these conditions the part of another worker, whose number this one now has, would pass
        same = before.has_more and self.step == before.step and self.ranges == before.ranges
        return same and self.part == (before.part[0] + 1, before.part[1])


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of one batch on one replica.

    Attributes:
        loss: mean over the batch.
        weight: of the batch in means; the number of samples unless the model says otherwise.
        samples: number of samples.
        metrics: means over the batch, by name, each a number as `steepest.core.models.scalars.as_number`
            takes it.
        weights: in means, of those metrics that have another weight than the batch.
    """

    loss: float
    weight: float
    samples: int
    metrics: Mapping[str, Any]
    weights: Mapping[str, Any] = field(default_factory=dict)


def checked_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics by name as plain floats (`as_number`), NaN and infinity included.

    Raises:
        ModelError: a value is no number.
    """
    if not isinstance(metrics, Mapping):
        raise ModelError(f"metrics are {describe(metrics)}: return a dict of numbers by name")
    numbers = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ModelError(
                f"a metric is named {name!r:.200}, {describe(name)}: name each by a string"
            )
        if (number := as_number(value)) is None:
            raise ModelError(
                f"metric {name!r} is {describe(value)}: return a real number, a NumPy scalar or a "
                "tensor without "
                "dimensions"
            )
        numbers[name] = number
    return numbers


def validate_computed(computed: Any) -> Computed:
    """Return a model's result with plain numbers; ModelError: it is no `Computed`, or has a value that is no number."""
    if not isinstance(computed, Computed):
        raise ModelError(
            f"the model computed {describe(computed)}: return a steepest.core.models.protocol.Computed"
        )
    plain = type(computed.loss) is type(computed.weight) is float and type(computed.samples) is int
    if (
        plain
        and 0 <= computed.weight <= _HEAVIEST
        and computed.samples >= 0
        and computed.metrics == {}
    ):
        return computed  # as those of our own adapters are
    loss, samples = map(as_number, (computed.loss, computed.samples))
    if loss is None:
        raise ModelError(
            f"the loss is {describe(computed.loss)}: return the batch's mean as a number"
        )
    weight = checked_weight(computed.weight)
    if samples is None or not 0 <= samples < math.inf or samples != int(samples):
        raise ModelError(f"the batch has {computed.samples!r:.200} samples: return how many it has")
    metrics = checked_metrics(computed.metrics)
    weights = {name: checked_weight(computed.weights[name]) for name in computed.weights}
    if unknown := weights.keys() - metrics.keys():
        raise ModelError(f"there is a weight of {min(unknown)!r}, which is no metric: leave it out")
    return Computed(loss, weight, int(samples), metrics, weights)


def checked_weight(value: Any) -> float:
    """Return a batch's weight as a float.

    Raises:
        ModelError: it is negative, no number, or too large to be summed and squared.
    """
    weight = as_number(value)
    if weight is None or not 0 <= weight <= _HEAVIEST:
        shown = describe(value) if weight is None else weight
        raise ModelError(
            f"the loss weighs {shown}: return a weight of zero or more, and at most {_HEAVIEST:g}"
        )
    return weight


class PastShare(NamedTuple):
    """A replica's share of a step of the job.

    Attributes:
        batches: the samples of each of its batches; empty if it had no samples.
        samples: of the whole step.
        before: steps of the same epoch before it.
    """

    batches: Sequence[Indices]
    samples: int
    before: int


class Model(ABC):
    """One replica of a model, of any framework.

    A subclass sets the attributes without a value, and defines the abstract methods. The methods below them are
    optional: none does anything here.

    A model is made by the user's `model_creator(worker_index, device_index)`; the library then
    binds it to flat vectors and calls it from one thread.

    Attributes:
        batch_size: samples per replica and step.
        data: the training data.
        layout: the places of all parameters in the flat vector, frozen ones included.
        optimizer_spec: the recipe of the optimizer, which servers rebuild over their chunks.
        optimizer_state: the state of the optimizer before the first step, None for none; set to None when
            servers, or the worker's own optimizer, have it.
        clip_norm: the greatest norm of its gradients, if the strategy sets none; None for any.
        notice: a text for its user, logged when the model is made, and when worker 0's evaluation has changed it.
        merging: how replicas' values of some of its buffers are merged, by names that `state` has: "mean", or
            "first" for worker 0's value.
        hyper: the hyperparameters of the last gradient's update, by parameter group, those that differ from
            `optimizer_spec`; None if the schedule sets all.
        clip_step: the greatest norm of the last gradient's update; None for the strategy's.
        digest: values that must be the same on all workers in the last gradient's update; None if the model has
            not seen the update, and its other values do not count. If every worker contributes to each update, an
            update with different digests, `hyper` or `clip_step` is an error.
        overflowed: whether the last gradient has overflowed, because the loss was multiplied by too large a factor.
            If every worker contributes to each update, the update is left out if one gradient has overflowed.
        may_take_back: whether gradients may change after the model has called `ready` for them. It may then take
            them back before `compute_gradients` returns, and calls `ready` for every entry again.
        take_back: while such a model computes, and calls of `ready` can be undone, a function that undoes all of
            them; else None.
        reduced: the dtype in which it computes, if that is less precise than its parameters'.
        attend: for tests: called with router, peer and role of each server and worker that is hosted.
    """

    batch_size: int
    data: Source
    layout: ParameterLayout
    optimizer_spec: OptimizerSpec

    optimizer_state: ArrivingState | None = None
    clip_norm: float | None = None
    notice: str = ""
    merging: Mapping[str, str] = MappingProxyType({})
    hyper: list[dict[str, Any]] | None = None
    clip_step: float | None = None
    digest: StepDigest | None = None
    overflowed: bool = False
    may_take_back: bool = False
    take_back: Callable[[], None] | None = None
    reduced: torch.dtype | None = None
    attend: Callable[[Any, Any, Any], None] | None = None

    @abstractmethod
    def bind(self, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Move the parameters into flat vectors laid out by `layout`.

        The parameters' present values are written to `weights`; from then on those that are trained
        are views of it, and `compute_gradients` writes to `gradients`. Frozen parameters are the
        replica's own and stay where they are, so that the model may write to them; `load_state`
        takes their values from `weights`.

        Args:
            weights: uint8, `layout.nbytes` long, on the replica's device.
            gradients: the same.
        """

    @abstractmethod
    def move(self, weights: torch.Tensor) -> None:
        """Make the trained parameters views of another vector, which holds their values.

        Called after `bind`.

        Args:
            weights: as in `bind`. Other processes may share it: the model must not write to it.
        """

    @abstractmethod
    def relayout(self, cut: ChunkSpec) -> None:
        """Plan `layout` again, cut into other chunks; `bind` is called next.

        Parameters stay in the same order; those of `cut.unfrozen` are trained from now on.
        """

    @abstractmethod
    def compute_gradients(self, batch: Any, ready: Ready, metrics: bool) -> Computed:
        """Compute the gradient of the mean loss over a batch, and write it to the gradient vector.

        Args:
            batch: as `data` yields it.
            ready: called once for each trainable entry (or each chunk of it) as soon as its
                gradient is written; zeros, and ``present=False``, for an entry without one.
            metrics: whether to compute metrics, too.
        """

    @abstractmethod
    def evaluate(self, batch: Any) -> Computed:
        """Return loss and metrics of one batch, in evaluation mode; nothing changes."""

    @abstractmethod
    def source(self, data: Any, batch_size: int) -> Source:
        """Return a source of batches over other data of the same kind, for `evaluate`."""

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """Return CPU copies of the values that the replica itself changes, by name.

        They are buffers, such as running means, and the frozen parameters whose values are not
        those in `weights`. Called before `bind`, too: for a model without any of these, no worker
        is asked for its own state when a snapshot is taken.
        """

    @abstractmethod
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the values that `state` returned.

        Frozen parameters that it does not name get those in `weights`.
        """

    # -- what it may do besides ----------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Note that `evaluate` is about to be called for each batch of a worker's part of a data set."""

    def metric_states(self) -> Mapping[str, MetricState]:
        """Return, by name, what metrics have accumulated since an evaluation began that are no means over batches."""
        return {}

    def metric_values(self, parts: Sequence[Mapping[str, MetricState]]) -> dict[str, float]:
        """Return the values of metrics over all samples of an evaluation, of which the model has seen some.

        Args:
            parts: what `metric_states` has returned on each worker, by rank.
        """
        return {}

    def unfrozen(self) -> frozenset[str]:
        """Return the names of frozen parameters that were unfrozen, and are not trained in `layout` yet."""
        return frozenset()

    def expect(self, share: Share | None) -> None:
        """Take the numbers of samples of the next batch, computed or evaluated, to weigh it.

        Called before each batch; with None if the data choose their own batches, whose number of
        samples only the batch itself shows.
        """

    def take_place(self, where: Where, replica: int, replicas: int) -> None:
        """Take the place of the next batch, or of an empty one if the replica has no samples in a step.

        Args:
            where: the place.
            replica: the model's number among all replicas of the job.
            replicas: their number.
        """

    def go_on(self, version: int) -> None:
        """Note that all weights of a version are here, while no step is computed.

        Called if every worker contributes to each version, which is then the number of steps committed.
        """

    def go_on_by_itself(self) -> None:
        """Note that the worker, with an optimizer of its own, has made an update with the model's last gradient."""

    def go_on_together(self, version: int) -> None:
        """Note that all weights of a version are here, and a round of the workers' own updates is about to begin.

        It may wait for other models.
        """

    def begin_round(self, number: int, given_up: int | None) -> None:
        """Note that a round of own updates begins; called if workers do not wait for each other.

        A model that overrides this restores its buffers itself.

        Args:
            number: of rounds that the worker began before.
            given_up: the first of the rounds that were given up: they are not part of the weights, and their samples
                are leased anew, or in this round. None if none were.
        """

    def decided_before(self, number: int) -> None:
        """Note that all rounds before the present one are decided on."""

    def end_round(self, epoch: int | None) -> None:
        """Note that a round is decided on, and new weights are here.

        Args:
            epoch: of the job by now; None if the data choose their own batches.
        """

    @property
    def notes(self) -> Sequence[tuple[int, float, dict[str, float]]]:
        """The reports that no committed update has carried to the driver: (number, weight in means, values by name)."""
        return ()

    def left_out(self) -> None:
        """Note that the last gradient's update was left out, because a gradient has overflowed or is not finite."""

    def meet(
        self,
        member: Any,
        wait: Callable[[Callable[[], bool]], None],
        share_of: Callable[[int], PastShare | None],
    ) -> None:
        """Take the means to gather values of all workers; called when the workers are known, or have changed.

        Args:
            member: a `steepest.strategies.collectives.members.MemberCollective`.
            wait: returns when the given function returns True; messages arrive meanwhile.
            share_of: returns the replica's share of a step of the job; None if it is not known.
        """

    def forget_gathered(self) -> None:
        """Drop all gathered values: the job goes on with other state, perhaps of an earlier step."""

    def use_reader(self, read: Callable[[], list[Record]]) -> None:
        """Take a function that reads the optimizer's state; called when the processes are known, or have changed.

        Args:
            read: returns the optimizer's state of dense parameters, at one version: the worker's own if it has an
                optimizer, else the servers'. Messages arrive meanwhile; it raises if a wait in the middle of a step
                has to end.
        """

    @property
    def sums_samples(self) -> bool:
        """Whether its updates are sums over their samples instead of means."""
        return False

    def reseat(self) -> str | None:
        """Put back the parameters that a user's function has replaced; return the name of one, or None."""
        return None


def overrides(model: Model, method: str) -> bool:
    """Return whether a model overrides one of the optional methods of `Model`."""
    return getattr(type(model), method) is not getattr(Model, method)
