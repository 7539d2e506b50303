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


#: A callback of `Model.compute_gradients`, called before an entry's weights are used, or with None
#: before any are: returns when they are here.
Arrive = Callable[[int | None], None]


def all_here(entry: int | None) -> None:
    """Return at once: what `Model.compute_gradients` is given as `arrive` if all weights are here."""


class Share(NamedTuple):
    """The numbers of samples of which a gradient is computed, and of which an update is made."""

    samples: int  # of the next batch, as the job has divided its data
    # of all batches whose mean gradient is one update; 0 where that is decided when the update is committed, which is
    # the mean times the samples then, if the model adds them up
    whole: int


class Where(NamedTuple):
    """The place of a batch in a job's data."""

    step: int  # the number of steps before
    epoch: int | None  # None where the data choose their own batches
    part: tuple[int, int]  # which of how many batches of the step it is
    # parts of the epoch's permutation that the step takes
    ranges: tuple[tuple[int, int], ...] = ()
    is_last: bool = False  # whether the step is the last one of its epoch
    has_more: bool = False  # whether the replica has further batches in the step
    empty: bool = False  # whether it has no samples in the step
    leased: bool = False  # whether steps come in any order

    def follows(self, before: Where) -> bool:
        """Return whether the batch may be the next one after another, all steps before it being committed."""
        if self.leased or self.step > before.step:
            return True
        # else the part of another worker, whose number this one has got meanwhile, would pass for the next one
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
    """Return metrics by name as plain floats (`as_number`), NaN and infinity as they are.

    ModelError names what is no number.
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
    """Return a model's result with plain numbers; ModelError: it is no `Computed`, or one of them is none."""
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
        batches: the samples of each of its batches; none where it had no samples.
        samples: of the whole step.
        before: steps of the same epoch before it.
    """

    batches: Sequence[Indices]
    samples: int
    before: int


class Model(ABC):
    """One replica of a model, of any framework.

    A subclass has the attributes without a value, and the abstract methods. Whatever else a model may do it does by
    overriding what stands below them, none of which does anything here.

    A model is made by the user's `model_creator(worker_index, device_index)`; the library then
    binds it to flat vectors and calls it from one thread.

    Attributes:
        batch_size: samples per replica and step.
        data: the training data.
        layout: the places of all parameters in the flat vector, frozen ones included.
        optimizer_spec: the recipe of the optimizer, which servers rebuild over their chunks.
        optimizer_state: the state that the optimizer has before the first step, None for none; set to None when
            servers, or the worker's own optimizer, have it.
        clip_norm: the greatest norm of its gradients, where the strategy says none; None for any.
        notice: what its user should know, which the driver logs once.
        merging: what stands for all replicas' values of some of its buffers, by names that `state` has: "mean", or
            "first" for worker 0's value.
        hyper: the hyperparameters of the last gradient's update, by parameter group, those that differ from
            `optimizer_spec`; None where the schedule says all.
        clip_step: the greatest norm of the last gradient's update; None for the strategy's.
        digest: what all workers' models are to have in common in the last gradient's update; None where the model has
            not seen the update, and nothing that it says counts. Where every worker contributes to each update, one
            whose digests are not alike is an error, and so is one whose `hyper` or `clip_step` are not.
        overflowed: whether the last gradient has overflowed, because the loss was multiplied by too much. Where every
            worker contributes to each update, the update is left out if one of them says so.
        may_take_back: whether it may find late that gradients have changed of which it has said that they are ready. It
            may take them back before `compute_gradients` returns, and calls `ready` for every entry after that.
        take_back: None, but while such a model computes, where calls of `ready` can be undone, a function that undoes
            all of them.
        reduced: the dtype in which it computes, where that is less precise than its parameters'.
        attend: for tests: is called with router, peer and role of each server and worker that is hosted.
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

        Parameters stay in the same order, but for those of `cut.unfrozen`, which are trained from
        now on.
        """

    @abstractmethod
    def compute_gradients(
        self, batch: Any, ready: Ready, metrics: bool, arrive: Arrive = all_here
    ) -> Computed:
        """Compute the gradient of the mean loss over a batch, and write it to the gradient vector.

        Args:
            batch: as `data` yields it.
            ready: called once for each trainable entry (or each chunk of it) as soon as its
                gradient is written; zeros, and ``present=False``, for an entry without one.
            metrics: whether to compute metrics, too.
            arrive: called with a trainable entry before its weights are used, or with None before
                any are. They may be on their way until it returns.
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

    def unfrozen(self) -> frozenset[str]:
        """Return the names of frozen parameters that were unfrozen, and are not trained in `layout` yet."""
        return frozenset()

    def expect(self, share: Share | None) -> None:
        """Take the numbers of samples of the next batch, computed or evaluated, to weigh it.

        Called before each batch; with None where the data choose their own batches, of which only
        the batch itself can say how many samples it has.
        """

    def take_place(self, where: Where, replica: int, replicas: int) -> None:
        """Take the place of the next batch that it computes, or of none where it has no samples in a step.

        Args:
            where: that place.
            replica: the model's number among all replicas of the job.
            replicas: their number.
        """

    def go_on(self, version: int) -> None:
        """Note that all weights of a version are here, while no step is computed.

        Called where every worker contributes to each version, which is then the number of steps committed.
        """

    def go_on_by_itself(self) -> None:
        """Note that the worker, with an optimizer of its own, has made an update with the model's last gradient."""

    def go_on_together(self, version: int) -> None:
        """Note that all weights of a version are here, and a round of the workers' own updates is about to begin.

        It may wait for other models.
        """

    def begin_round(self, number: int, given_up: int | None) -> None:
        """Note that a round of own updates begins, where workers do not wait for each other.

        A model that overrides this sets its buffers back by itself.

        Args:
            number: of the rounds that the worker had begun before.
            given_up: the number of the first of those that were given up: they are no part of the weights, and their
                samples are dealt out anew, or in this round. None if none were.
        """

    def decided_before(self, number: int) -> None:
        """Note that all rounds before one, which goes on, are decided on."""

    def end_round(self, epoch: int | None) -> None:
        """Note that a round is decided on, and new weights are here.

        Args:
            epoch: of the job by now; None where the data choose their own batches.
        """

    @property
    def notes(self) -> Sequence[tuple[int, float, dict[str, float]]]:
        """What no committed update has told the driver: by time its number, its weight in means, values by name."""
        return ()

    def left_out(self) -> None:
        """Note that the last gradient's update was left out, whoever said `overflowed`."""

    def meet(
        self,
        member: Any,
        wait: Callable[[Callable[[], bool]], None],
        share_of: Callable[[int], PastShare | None],
    ) -> None:
        """Take how values of all workers are gathered; called when the workers are known, or have changed.

        Args:
            member: a `steepest.collectives.members.MemberCollective`.
            wait: returns when what it is given returns True, and lets messages come meanwhile.
            share_of: returns the replica's share of a step of the job; None where it is not known.
        """

    def forget_gathered(self) -> None:
        """Drop what was gathered: the job goes on with other state, perhaps of an earlier step."""

    def use_reader(self, read: Callable[[], list[Record]]) -> None:
        """Take what reads the optimizer's state; called when the job's processes are known, or have changed.

        Args:
            read: returns what servers hold of the optimizer's state of dense parameters, at one version; lets messages
                come meanwhile, and may raise what ends a wait in the middle of a step.
        """

    @property
    def sums_samples(self) -> bool:
        """Whether its updates are sums over their samples, where others' are means."""
        return False

    def reseat(self) -> str | None:
        """Put parameters that a user's function has replaced back; return the name of one, or None."""
        return None


def overrides(model: Model, method: str) -> bool:
    """Return whether a model does something in one of the methods that do nothing in `Model`."""
    return getattr(type(model), method) is not getattr(Model, method)
