"""The replicas of one worker: copies of a model whose gradients are added up before they leave."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from steepest.core.data.sampler import SamplePlan, even_share
from steepest.core.data.sources import batch_size_of
from steepest.core.engine.batch_loader import BatchLoader
from steepest.core.engine.exchange import Companion, Exchange
from steepest.core.engine.gradient_sum import NOTHING, ChunkReady, GradientSum
from steepest.core.engine.host_copies import copies_for
from steepest.core.engine.present_gpu import choose_gpu, differ
from steepest.core.engine.sample_places import Place, SamplePlaces
from steepest.core.engine.spans import RoleSpans, SpanKind
from steepest.core.messages.fields import RateChanges
from steepest.core.messages.means import Measured, mean_metrics
from steepest.core.models.metric_states import MetricState
from steepest.core.models.protocol import (
    Computed,
    Model,
    PastShare,
    Share,
    overrides,
    validate_computed,
)
from steepest.core.models.write_check import refusal
from steepest.core.optim.portable import Record
from steepest.core.optim.spec import ScheduleState
from steepest.core.protocol.commit_rules import (
    NO_NORM,
    CommitAll,
    CommitRule,
    knows_norms,
    leases_samples,
    pushes_per_update,
)
from steepest.core.system import system
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.layout import Entry, ParameterLayout
from steepest.core.tensors.shared_memory import allocate, forget_writes, make_writable
from steepest.errors import ConfigurationError, ModelError

if TYPE_CHECKING:
    from steepest.core.data.streams import StreamPlace

#: The results of batches, and the seconds for loading and for computing them.
Batches = tuple[list[Computed], float, float]

#: State of a worker's own optimizer by "parameter/key", the keys of plain values, and the
#: state of its schedule.
InnerOptimizerState = tuple[dict[str, torch.Tensor], list[str], ScheduleState | None]

#: Flat vectors for weights and for gradients, which processes of the same host may read in place.
Memory = tuple[torch.Tensor, torch.Tensor]

CPU = torch.device("cpu")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The result of one step on one worker."""

    loss: float  # mean over its replicas, by weight
    weight: float  # of its samples in means
    samples: int
    metrics: dict[str, float]  # means, by name
    timings: dict[str, float]  # seconds, by what they were spent on
    weights: Mapping[str, float]  # in means, of those metrics that have their own


@dataclass(frozen=True, slots=True)
class EvaluatedPart:
    """The result of one worker's part of an evaluation."""

    result: WorkerResult
    states: Mapping[str, MetricState]  # of metrics that are no means over batches, by name


def memory_for(layout: ParameterLayout) -> Memory:
    """Return host memory for the weights and gradients of replicas that will be made.

    Its pages are allocated already, which may take longer than copying to them.
    """
    return layout.allocate(), allocate(layout.nbytes).zero_()


def drop(entry: int, weight: float, present: bool, chunk: int | None = None) -> None:
    """Drop a gradient: the `ready` of a warm-up."""


def _memory_on(home: torch.device, layout: ParameterLayout) -> Memory:
    """Return new memory for weights and gradients, on the device `home`."""
    if home.type == "cpu":
        return layout.allocate(), allocate(layout.nbytes)
    return layout.allocate().to(home), layout.allocate().to(home)


class WaitsInShare(NamedTuple):
    """How a share of replicas that `delays` lets messages move."""

    arrive: Callable[[], None]  # returns when the weights of its version are here
    poll: Callable[[], None]  # between two batches, without waiting


@dataclass(frozen=True)
class WorkShare:
    """The part of each step's work that is a worker's."""

    first_index: int  # of its first replica among all replicas of the job
    shares: int  # in a step, one for each worker's gradient that makes it
    seed: int
    accumulate: int = 1  # micro-batches of each replica, one after the other, for one gradient
    # gradients of each replica in a step, see `steepest.strategies.local_sgd.replicas`
    updates: int = 1
    updates_of_step: int = 1  # of each replica in a step, in all of its shares
    varies: bool = False  # whether `accumulate` may change with the job's size
    rule: CommitRule = field(default_factory=CommitAll)
    workers: int = 1  # of the job


def _places(share: WorkShare, models: int) -> SamplePlaces:
    """Return the places of a worker's batches."""
    return SamplePlaces(models, share.shares, share.accumulate * share.updates)


class Replicas:
    """All replicas of one worker, on its devices.

    On the CPU, replicas share one copy of the weights and compute in turn. On GPUs each has a copy
    on its own device, and the worker has one at `home`: in host memory, or on the first GPU, whose
    replica computes with it. Gradients are added up at `home`, in replica order,
    chunk by chunk, in units of the first replica's weight: ``sum(weight_i * gradient_i) == unit *
    payload``, so that with equal batches (and with one replica always) nothing is multiplied.
    Micro-batches are added up in the same way. Used on the thread of the process' router.

    Args:
        models: one for each device, in order.
        devices: of the models.
        share: of the job's work.
        memory: for weights and gradients, see `memory_for`; used only where `home` is the CPU.
        home: where the worker has its weights and the sum of its gradients, the CPU or the first
            of the devices.

    Attributes:
        delays: whether a share may begin before the weights of its version are here, and wait for them in its middle.
        waits: how it does so; None to begin all shares with their weights.
    """

    delays = False
    waits: WaitsInShare | None = None

    #: how many leased shares `compute` takes together, from its argument on
    leased_shares = 1
    #: which part of the model is pushed of leased shares, modulo their number; None for the one pushed longest ago
    turn: int | None = None
    #: the part that the last leased share has changed
    fragment = 0

    #: records when batches are loaded; None to record nothing
    spans: RoleSpans | None = None

    #: called with each batch that is computed; None in steps that are not audited
    watch: Callable[[Any], None] | None = None

    #: has servers drop the pushed chunks of the present share; None between two shares
    take_back: Callable[[], None] | None = None

    def __init__(
        self,
        models: Sequence[Model],
        devices: Sequence[torch.device],
        share: WorkShare,
        memory: Memory | None = None,
        home: torch.device = CPU,
    ) -> None:
        self._now = system().now
        self.models = tuple(models)
        # those that follow commits; by replica, whether it follows the data
        self._of_commits = [each for each in models if overrides(each, "go_on")]
        self._of_data = [overrides(each, "take_place") for each in models]
        # batch size and data of each model, with which the job divides its samples
        self.settings = [(model.batch_size, model.data) for model in models]
        self.layout = models[0].layout
        # the flat vector of weights, uint8, of the layout's size
        host_memory = memory if home == CPU else None
        self.weights, self._sum = host_memory or _memory_on(home, self.layout)
        self.home = home
        self._memory = self.weights
        accumulate = share.accumulate
        self.first_index = share.first_index
        self.worker = share.first_index // len(models)
        self._take_numbers(share)
        # whether shares come one by one: the next one is not known beforehand
        self.leases_samples = leases_samples(share.rule)
        self.batches = BatchLoader(
            *(self.models, _places(share, len(models)), (share.first_index, self._replicas)),
            leased=self.leases_samples,
            seed=share.seed,
        )
        self._devices = tuple(devices)
        self._changes_gpu = differ(devices)
        if devices[0].type != "cpu":
            choose_gpu(devices[0])  # of this thread, on which the models run
        in_sum = accumulate == 1 and not share.varies  # whether replica 0 writes but once
        scratch = self._sum if in_sum and len(models) == 1 else self.layout.allocate().to(home)
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, device in enumerate(devices):
            # Weights are shared at home; replica 0 writes to the sum itself there, if it writes only once.
            if device == home:
                self._own.append((self.weights, self._sum if index == 0 and in_sum else scratch))
            else:
                self._own.append((self.weights.to(device), self._sum.to(device)))
        for model, (weights, gradients) in reversed(list(zip(models, self._own, strict=True))):
            model.bind(weights, gradients)  # the first replica last: its initial values count
        if self._devices[0] != home:
            self.weights.copy_(self._own[0][0])
        self._copies = copies_for(self._devices, (self.weights, self._sum)) if home == CPU else None
        #: the state to begin with, until the first weights and frozen parameters have come
        self._first: Mapping[str, torch.Tensor] | None = {}
        # where this worker's gradients go; None until a process hosts the worker
        self.exchange: Exchange | None = None
        self._companion = Companion()  # of that exchange
        # learning rates that a user has set, for replicas that have an optimizer
        self.rates: RateChanges = ()

    def _take_numbers(self, share: WorkShare) -> None:
        """Note the consequences of a share's commit rule and of the number of workers."""
        self._replicas = share.workers * len(self.models)
        self._needs_all, self._knows_norms = (
            share.rule.needs_all,
            knows_norms(share.rule, share.workers),
        )
        self._is_update = pushes_per_update(share.rule, share.workers) == 1

    def use_plan(self, plan: SamplePlan | None, seed: int) -> None:
        """Set the sample plan, None for streams, and the seed of the job."""
        if self.batches.use(plan, seed):
            self._companion.forget()

    def use_exchange(self, exchange: Exchange) -> None:
        """Set `exchange`, and tell its companion of the batches from now on."""
        self.exchange, self._companion = exchange, exchange.companion
        self._companion.attach(self.models, self.batches.load, self.places)

    def meet(self, member: Any, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Give models that gather values of all workers their means to do so, see `Model.meet`."""
        for replica, model in enumerate(self.models):
            model.meet(member, wait, partial(self._past_share, replica))

    def forget_gathered(self) -> None:
        """Have models drop the values that they have gathered of all workers."""
        for model in self.models:
            model.forget_gathered()

    def _past_share(self, replica: int, step: int) -> PastShare | None:
        """Return a replica's share of a step; None where it is not known."""
        places, plan = self.batches.places, self.batches.places.plan
        if plan is None or (plan := plan.reaching(step)) is None:
            return None
        number, position = step * places.shares + self.worker, plan.position(step)
        batches = islice(places.indices((number, replica, 0), plan), places.micros)
        before = -(-position.ranges[0][0] // plan.global_batch)
        shares = [each for each in batches if len(each)]
        return PastShare(shares, position.size, before)

    def take_over(self, other: Replicas) -> None:
        """Continue where earlier replicas of the same models were in the data."""
        self.batches.continue_from(other.batches)
        self._first = other._first

    def begin_with(self, state: Mapping[str, torch.Tensor]) -> None:
        """Give every model a state (see `Model.state`).

        It is set again when the first weights have come, which bring installed frozen parameters.
        """
        self._first = state
        for model in self.models:
            model.load_state(state)

    def load_states(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Set what `states` returned."""
        for model, state in zip(self.models, states, strict=True):
            model.load_state(state)

    @property
    def device(self) -> torch.device:
        """The device of the first replica."""
        return self._devices[0]

    def states(self, names: Sequence[str] = ()) -> list[Tensors]:
        """Return each replica's state (see `Model.state`), always with the frozen parameters `names`."""
        states = []
        for model in self.models:
            state = Tensors(model.state())
            for name in names:
                if name not in state and name in self.layout.index:
                    state[name] = (
                        self.layout.entry_view(self.weights, self.layout.index[name]).clone().cpu()
                    )
            states.append(state)
        return states

    def renumber(self, share: WorkShare) -> None:
        """Become another worker's replicas; the weights lie in memory of their own again.

        `accumulate` changes only if it `varies`.
        """
        self.first_index = share.first_index
        self.worker = share.first_index // len(self.models)
        self._take_numbers(share)
        self.batches.divide(_places(share, len(self.models)), (share.first_index, self._replicas))
        if self.weights.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(self.weights)
            self._move(self._memory)

    def adopt(self, weights: torch.Tensor) -> bool:
        """Use a vector of weights (uint8, flat) that other processes write, instead of this worker's own.

        Return whether it is used. The models may write to it, as to their own: writes are private to this
        process, and undone when they have computed.
        """
        if weights.data_ptr() == self.weights.data_ptr():
            return True
        if not make_writable(weights, whole_pages=self.layout.on_pages):
            return False
        self._move(weights)
        return True

    def _move(self, weights: torch.Tensor) -> None:
        """Have the models at home use another flat vector, which holds the weights already."""
        self.weights = weights
        for index, (device, (_, gradients)) in enumerate(
            zip(self._devices, self._own, strict=True)
        ):
            if device == self.home:
                self._own[index] = (weights, gradients)
                self.models[index].move(weights)

    def forget_writes(self) -> None:
        """Undo what the models themselves have written to shared weights."""
        forget_writes(self.weights)

    def refuse_writes(self) -> None:
        """Undo what models wrote to shared weights in a step.

        ModelError names the first trained parameter among them.
        """
        if (changed := forget_writes(self.weights)) and (behind := self.trained_behind(changed[0])):
            raise ModelError(refusal(behind[0].name))

    def trained_behind(self, offset: int) -> list[Entry]:
        """Return the trained entries that end behind an offset in the weights, by their place."""
        behind = (e for e in self.layout.entries if e.trainable and e.offset + e.nbytes > offset)
        return sorted(behind, key=lambda entry: entry.offset)

    @property
    def said(self) -> dict[str, Any]:
        """A model's values for the last gradient's update, as fields of a `Report`; read in each step."""
        model = self.models[0]
        return {
            "hyper": model.hyper,
            "clip": model.clip_step,
            "digest": model.digest,
            "notes": model.notes,
            "overflowed": model.overflowed,  # whether the update is to be left out
        }

    def require_norm(self) -> None:
        """Check that the norm by which the last gradient's update is clipped is known; else ConfigurationError."""
        greatest = self.models[0].clip_step
        if not self._knows_norms and greatest is not None:
            raise ConfigurationError(NO_NORM.format(f"a model with clip_step={greatest}"))

    @property
    def vectors(self) -> list[torch.Tensor]:
        """The flat vectors of weights of which the models' parameters are views."""
        return list({id(weights): weights for weights, _ in self._own}.values())

    @property
    def arrivals(self) -> torch.Tensor:
        """The flat vector to which new weights are written as they arrive."""
        return self.weights

    @property
    def borrows(self) -> bool:
        """Whether the weights lie in memory that another process lends."""
        return self.weights.data_ptr() != self._memory.data_ptr()

    def weights_changed(self) -> None:
        """Copy new weights to the devices; at home the models see them as they are.

        With the first weights all replicas take the frozen parameters that were installed; later they keep
        their own.
        """
        self._copy_to_devices()
        if self._first is not None:
            state, self._first = self._first, None
            for model in self.models:
                model.load_state(state)

    def _copy_to_devices(self) -> None:
        """Have models on other devices compute with the weights as they are now."""
        for device, (weights, _) in zip(self._devices, self._own, strict=True):
            if device != self.home:
                weights.copy_(self.weights, non_blocking=True)

    @property
    def follow_commits(self) -> bool:
        """Whether models are told of commits, see `go_on`."""
        return self._needs_all and bool(self._of_commits)

    def go_on(self, version: int) -> None:
        """Call `Model.go_on` of the models that define it: all weights of a version are here."""
        if self.follow_commits:
            for model in self._of_commits:
                model.go_on(version)

    def places(self, number: int) -> list[Place]:
        """Return the places of a share's batches, in the order in which they are computed."""
        return self.batches.places.of(number)

    def load_ahead(self, number: int) -> None:
        """Load the first batch of a share ahead of time, unless a batch is loaded; `compute` raises what this meets."""
        if not self._companion.takes_ahead:
            self.batches.load_ahead(number)

    def stream_place(self) -> StreamPlace | None:
        """Return where the job is in its pass over a stream; None where that is not known."""
        return self.batches.stream_place

    def continue_streams(self, place: StreamPlace | None) -> None:
        """Set where the job is in its pass over streams that are opened from now on; None to begin them anew."""
        if self.batches.continue_streams(place):
            self._companion.forget()

    def look_ahead(self, number: int) -> None:
        """Have the companion prepare the share after the one whose gradient was pushed."""
        self._companion.look_ahead(number)

    def meets_before(self, step: int) -> bool:
        """Return whether a step may begin only when models have the servers' weights."""
        return False

    def compute(
        self,
        number: int,
        chunk_ready: ChunkReady,
        metrics: bool,
    ) -> WorkerResult:
        """Compute the gradient of one share of the samples.

        Args:
            number: of the share: with n shares in a step, it is part ``number % n`` of step
                ``number // n``.
            chunk_ready: called with each complete chunk during the backward pass: on the router's
                thread, or for a GPU on torch's own while the router's waits for the pass.
            metrics: whether to compute the model's metrics, too.

        Raises:
            ModelError: the model breaks its protocol.
            BaseException: whatever the model raises.
        """
        places = self.places(number)
        if not places:
            self._tell_place((number, 0, 0), empty=True)
            self._nothing(chunk_ready)
        self._companion.begin_share(places, chunk_ready)
        result = summarize_batches([self._compute_each(places, chunk_ready, metrics)])
        self._companion.end_share(chunk_ready)
        return result

    def compute_other(
        self, number: int, chunk_ready: ChunkReady, watch: Callable[[Any], None]
    ) -> float:
        """Compute the gradient of another worker's share as that worker does; return the seconds that it took.

        The next gradient of this worker overwrites it. The models' own state is not restored.

        Args:
            number, chunk_ready: see `compute`.
            watch: called with each batch.
        """
        own, began, first = self.batches, self._now(), self.first_index
        self.first_index = number % own.places.shares * len(self.models)
        self.batches, self.watch = own.of_other(self.first_index), watch
        try:
            self.compute(number, chunk_ready, False)
        finally:
            self.batches, self.first_index, self.watch = own, first, None
        return self._now() - began

    def _tell_place(self, place: Place, *, empty: bool = False) -> None:
        """Call `Model.take_place` with the place of its next batch, if the model defines it."""
        replica = place[1]
        if self._of_data[replica]:
            where = self.batches.places.where(place)
            if empty or self.leases_samples:
                where = where._replace(empty=empty, leased=self.leases_samples)
            self.models[replica].take_place(where, self.first_index + replica, self._replicas)

    def _nothing(self, chunk_ready: ChunkReady) -> None:
        """Call `chunk_ready` without a gradient for the dense chunks of an empty share."""
        for chunk in self.layout.trainable_chunks:
            if not self.layout.chunks[chunk].is_opaque:
                chunk_ready(chunk, NOTHING, 0.0, 0.0, frozenset())

    def _compute_each(
        self, places: Sequence[Place], chunk_ready: ChunkReady, metrics: bool
    ) -> Batches:
        """Compute the gradient of some batches of a share."""
        collector = GradientSum(self.layout, self._sum, len(places), chunk_ready, self._copies)
        results: list[Computed] = []
        companion = self._companion
        loading = computing = self.batches.seconds_ahead = 0.0
        for place in places:
            began, replica = self._now(), place[1]
            if self._changes_gpu:
                choose_gpu(self._devices[replica])
            batch = companion.take(place, self.batches.load)
            if self.watch is not None:
                self.watch(batch)
            loaded = self._now()
            if self.spans is not None:
                self.spans.add(SpanKind.LOAD, began)
            companion.begin_batch(place)
            share = self.batches.places.share_of(place, self._of_update(places))
            self.models[replica].expect(share)
            self._tell_place(place)
            collector.begin(self._own[replica][1])
            with self._lets_take_back(replica, collector if len(places) == 1 else None):
                result = validate_computed(
                    self.models[replica].compute_gradients(batch, collector.ready, metrics)
                )
            results.append(result)
            collector.end(result.weight)
            companion.end_batch(result.weight)
            loading += loaded - began
            computing += self._now() - loaded
        if self._changes_gpu:  # all other calls are of the first model
            choose_gpu(self._devices[0])
        return results, loading + self.batches.seconds_ahead, computing

    @property
    def may_take_back(self) -> bool:
        """Whether a model may take back a gradient before its `compute_gradients` has returned, see `Model`."""
        return self.models[0].may_take_back

    @contextlib.contextmanager
    def _lets_take_back(self, replica: int, collector: GradientSum | None) -> Iterator[None]:
        """Let a model take back its gradient in this context; `collector` is None if the share has other batches."""
        take_back, model = self.take_back, self.models[replica]
        if not model.may_take_back or take_back is None or collector is None:
            yield
            return

        def begin_again() -> None:
            collector.begin_again()
            take_back()

        model.take_back = begin_again
        try:
            yield
        finally:
            model.take_back = None

    def left_out(self) -> None:
        """Tell the model that servers made no update of the last share, which has changed nothing here."""
        self.models[0].left_out()

    def decided(self, *, counts: bool, again: bool = False) -> None:
        """Note whether the last leased share, if there was one, is part of the servers' weights; here, do nothing.

        Args:
            counts: whether it is.
            again: whether it was given up, and is leased anew.
        """

    def settle(self, ledger: Sequence[int]) -> None:
        """Undo leased shares that are not part of the servers' weights; here they have changed nothing.

        Args:
            ledger: the first share that was never leased, and those below that are not committed.
        """

    def inner_state(self, step: int) -> InnerOptimizerState | None:
        """Return the state of the worker's own optimizer after `step` steps; here None, as it has none."""
        return None

    def own_records(self) -> list[Record] | None:
        """Return copies of the present state of the worker's own optimizer; here None, as it has none."""
        return None

    def load_inner_state(
        self,
        state: Mapping[str, torch.Tensor],
        plain: Sequence[Any],
        schedule: ScheduleState | None,
    ) -> None:
        """Set what `inner_state` returned, if the worker has an optimizer of its own."""

    def take_servers_weights(self, names: Collection[str]) -> None:
        """Begin the next share with the servers' weights of some parameters, as shares here always do."""

    def _of_update(self, places: Sequence[Place]) -> Sequence[Place] | None:
        """Return the places of all batches of a share's update: None for a whole step's, empty if unknown."""
        if self._needs_all:
            return None
        return places if self._is_update else ()

    def warmup(self) -> None:
        """Compute one gradient on every replica and drop it; models keep their state."""
        for replica, model in enumerate(self.models):
            shares = [np.arange(min(model.batch_size, model.data.size or 1))]
            batch = next(iter(model.data.open(shares)))
            model.expect(Share(len(shares[0]), len(shares[0])))
            before = model.state()  # such as running means, which a forward pass changes
            with self._companion.rehearsal(model):
                model.compute_gradients(batch, drop, False)
            model.load_state(before)
            self.batches.reopen(replica)

    def evaluate(self, data: Any, batch_size: int | None, part: int, parts: int) -> EvaluatedPart:
        """Return loss and metrics over a part of a data set, computed by the first replica.

        Args:
            data: as `Model.source` takes it.
            batch_size: by default that of a DataLoader, else the model's.
            part: which of `parts` equal ranges.
            parts: number of ranges.

        Raises:
            ConfigurationError: the data are of no supported kind, or have no known length.
        """
        began = self._now()
        if self._changes_gpu:  # a batch on another may have raised
            choose_gpu(self._devices[0])
        model = self.models[0]
        size = batch_size_of(data, batch_size) or model.batch_size
        source = model.source(data, size)
        if source.size is None:
            raise ConfigurationError(
                f"evaluate() was given a {type(data).__name__} of unknown length: give arrays, a "
                "map-style dataset or an IndexedStream"
            )
        begin, end = even_share(source.size, part, parts)
        shares = [np.arange(i, min(i + size, end)) for i in range(begin, end, size)]
        model.begin_evaluation()
        told, results = model.notice, []
        for share, batch in zip(shares, source.open(shares), strict=True):
            model.expect(Share(len(share), len(share)))
            results.append(validate_computed(model.evaluate(batch)))
        if part == 0 and model.notice != told:
            log.warning("%s", model.notice)
        result = _mean(results, {"evaluate": self._now() - began})
        return EvaluatedPart(result, model.metric_states())


def summarize_batches(parts: Sequence[Batches]) -> WorkerResult:
    """Return means by weight over all batches, and the seconds that they took."""
    results, loading, computing = parts[0] if parts else ([], 0.0, 0.0)
    for more, longer, further in parts[1:]:
        results, loading, computing = results + more, loading + longer, computing + further
    return _mean(results, {"data": loading, "compute": computing})


def _mean(results: Sequence[Computed], timings: dict[str, float]) -> WorkerResult:
    """Return the mean loss, weight, number of samples and mean metrics of some batches, by weight."""
    if len(results) == 1 and results[0].weight:
        (only,) = results
        metrics = dict(only.metrics)
        return WorkerResult(only.loss, only.weight, only.samples, metrics, timings, only.weights)
    weight = sum(result.weight for result in results)
    samples = sum(result.samples for result in results)
    results = [result for result in results if result.weight]
    if not results:
        return WorkerResult(0.0, 0.0, samples, {}, timings, {})
    loss = sum(result.loss * result.weight for result in results) / weight
    metrics, weights = mean_metrics(Measured(r.metrics, r.weight, r.weights) for r in results)
    return WorkerResult(loss, weight, samples, metrics, timings, weights)
