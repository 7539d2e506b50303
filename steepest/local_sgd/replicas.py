"""Local SGD: updates by each worker's own optimizer, then one of the difference they made."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from steepest.core.engine.chunk_ready import NOTHING, ChunkReady
from steepest.core.engine.local_names import is_own_weight
from steepest.core.engine.optimizer_slices import assemble, disassemble
from steepest.core.engine.replicas import (
    Batches,
    InnerOptimizerState,
    Memory,
    Replicas,
    WorkerResult,
    WorkShare,
    summarize_batches,
)
from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.models.protocol import Arrive, Model, all_here, arriving_with
from steepest.core.optim.portable import Record
from steepest.core.optim.spec import OptimizerSpec, Schedule, ScheduleState
from steepest.core.protocol.push_tracking import clip_factor
from steepest.core.protocol.rates import with_rates
from steepest.core.tensors.squares import sum_of_squares
from steepest.local_sgd.own_weights import OwnWeights


@dataclass(frozen=True)
class _Before:
    """What a worker had of its own before a share."""

    number: int  # of the share
    optimizer: list[Record]
    schedule: ScheduleState | None
    own: OwnWeights


class LocalReplicas(Replicas):
    """Replicas whose share of a step is `updates` batches, with an update after each.

    They push the difference between the weights that they began with and those that they ended
    with, of which the servers make one update of their own (the outer one). Then the worker has the
    weights that it began with again, until those of the next version have come, so that a step that
    fails, or is left out because of NaN or infinity, leaves no trace. State of the inner optimizer
    stays with its worker.

    Of a layout in several fragments each step exchanges one, in turn. In the others the worker goes
    on from weights of its own, which are state as that of its optimizer is (`OwnWeights`).

    References: Stich 2019, Local SGD Converges Fast and Communicates Little, arXiv:1805.09767;
    Douillard et al. 2023, DiLoCo, arXiv:2311.08105; Douillard et al. 2025, Streaming DiLoCo,
    arXiv:2501.18512.

    Args:
        models, devices, share, memory: see `Replicas`.
        spec: the inner optimizer.
        updates_before: returns the number of updates of each weight before a step.
        clip_norm: the greatest norm of a batch's gradient; None for any.
    """

    def __init__(
        self,
        models: Sequence[Model],
        devices: Sequence[torch.device],
        spec: OptimizerSpec,
        share: WorkShare,
        *,
        updates_before: Callable[[int], int],
        clip_norm: float | None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(models, devices, share, memory)
        self._accumulate = share.accumulate
        self._updates = share.updates
        self._updates_before = updates_before
        self._clip_norm = clip_norm
        self._schedule = Schedule(spec)
        self._spec = spec
        self._base = self.layout.allocate()
        chunks = [self.layout.chunks[index] for index in self._dense]
        self._held = {
            chunk.index: ServerChunk(
                chunk, self.layout, spec, self.layout.chunk_view(self.weights, chunk.index), False
            )
            for chunk in chunks
        }
        if (arriving := arriving_with(models[0])) is not None:
            self._load(disassemble(self.layout, arriving.state, arriving.plain))
        self._own_weights = OwnWeights()
        self._before: _Before | None = None  # the last share

    @property
    def _dense(self) -> list[int]:
        """The chunks of weights that are trained; rows of tables are the servers' alone."""
        shards = self.layout.opaque_chunks
        return [index for index in self.layout.trainable_chunks if index not in shards]

    @property
    def may_take_back(self) -> bool:
        """Return False: gradients make updates here at once."""
        return False

    @property
    def _is_update(self) -> bool:
        """True: each batch of a share is an update of the worker's own optimizer."""
        return True

    def adopt(self, weights: torch.Tensor) -> bool:
        """Return False: each worker's weights are its own."""
        return False

    def compute(
        self,
        number: int,
        chunk_ready: ChunkReady,
        metrics: bool,
        arrive: Arrive = all_here,
    ) -> WorkerResult:
        """Make one share's updates, and push their difference; the weights are those from before afterwards."""
        # Arguments: see `Replicas.compute`.
        arrive(None)
        self._begin(number)
        step = self._places.step_of(number)
        first = self._updates_before(step)
        parts: list[Batches] = []
        self._base.copy_(self.weights)
        try:
            self._own_weights.write(self.layout, self.weights)
            for update in range(self._updates):
                micros = range(update * self._accumulate, (update + 1) * self._accumulate)
                places = [place for place in self.places(number) if place[2] in micros]
                if places:
                    hold = self._hold_gradient
                    parts.append(self._compute_each(places, hold, metrics, all_here))
                    self._update(first + update, step)
            result = summarize_batches(parts)
            self._exchange_fragment(step, result.weight, chunk_ready)
            self._companion.end_share(chunk_ready, self._updates)
        finally:
            self.weights.copy_(self._base)
            self.weights_changed()
        return result

    def _exchange_fragment(self, step: int, weight: float, chunk_ready: ChunkReady) -> None:
        """Push what a step's fragment has changed since its last exchange, and keep the weights of the others."""
        # weight: of the samples of this share
        exchanged = self.layout.changed_by(step + 1)
        own = self._own_weights
        for index in reversed(self._dense):
            total = own.weight_of(index, weight)
            if index in exchanged and total:
                self._push_difference(index, total, chunk_ready)
            else:
                chunk_ready(index, NOTHING, 0.0, 0.0, frozenset())
        kept = [index for index in self._dense if index not in exchanged]
        self._own_weights = own.after(self.layout, self.weights, weight, kept, ())

    def _begin(self, number: int) -> None:
        """Save the inner optimizer's state, or restore it where a share is computed again; no gradient is kept."""
        for held in self._held.values():
            held.drop_mean()  # of a batch in which the model raised
        before = self._before
        if before is not None and number == before.number:
            self._restore(before)
        else:
            records = [(index, about, value.clone()) for index, about, value in self._records()]
            self._before = _Before(number, records, self._schedule.state(), self._own_weights)

    def _restore(self, before: _Before) -> None:
        """Set what the worker has of its own to what it was before a share."""
        self._load(before.optimizer)
        self._schedule.load_state(before.schedule)
        self._own_weights = before.own

    def left_out(self) -> None:
        """Set the worker's own state back to that before the last share; calls may repeat."""
        if self._before is not None:
            self._restore(self._before)
            self._before = None

    def take_servers_weights(self, names: Collection[str]) -> None:
        """Forget the worker's own weights of some parameters, which have been set."""
        self._own_weights = self._own_weights.without(self.layout, names)
        if (before := self._before) is not None:
            self._before = replace(before, own=before.own.without(self.layout, names))

    def _hold_gradient(
        self, index: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> None:
        """Keep a chunk of an inner gradient, as its mean, until the backward pass has ended."""
        # arguments: see `ChunkReady`.
        held = self._held[index]
        if not unit:
            return
        held.mean, held.absent = payload.view(held.chunk.dtype), absent
        if unit != total:
            held.mean.div_(total / unit)

    def _update(self, at: int, step: int) -> None:
        """Apply the gradients that are kept, as update number `at`, which is one of step `step`."""
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        changed = with_rates(self._schedule.at(at), self.rates, step)
        hyper = self._spec.hyperparameters(changed)
        for held in self._held.values():
            held.apply(hyper, 1.0)
        self.weights_changed()

    def _clip(self, greatest: float) -> None:
        """Clip the gradients of an update, those of rows too, by their norm together."""
        means = [held.mean for held in self._held.values() if held.mean is not None]
        squares = [*map(sum_of_squares, means), self._companion.squares()]
        factor = clip_factor(math.sqrt(math.fsum(squares)), greatest)
        for mean in means if factor != 1.0 else ():
            mean.mul_(factor)
        self._companion.scale(factor)

    def _push_difference(self, index: int, weight: float, chunk_ready: ChunkReady) -> None:
        """Push the weights before minus the weights now of a chunk."""
        # `weight`: of the samples behind it.
        dtype = self.layout.chunks[index].dtype
        base, now, difference = (
            self.layout.chunk_view(vector, index).view(dtype)
            for vector in (self._base, self.weights, self._sum)
        )
        torch.sub(base, now, out=difference)
        chunk_ready(index, difference.view(torch.uint8), weight, weight, frozenset())

    # -- the inner optimizer's state -----------------------------------------------------------

    def _records(self) -> list[Record]:
        """Return the inner optimizer's state of all chunks; the tensors are not copied."""
        return [
            (index, about, value)
            for index, held in self._held.items()
            for about, value in held.state()
        ]

    def _load(self, records: Sequence[Record]) -> None:
        """Set the inner optimizer's state to copies of some records."""
        for held in self._held.values():
            held.clear_state()
        for index, about, value in records:
            self._held[index].load_state(about, value.clone())
        for held in self._held.values():
            held.end_state()

    def inner_state(self, step: int) -> InnerOptimizerState:
        """Return the inner optimizer's and schedule's state, and weights of the worker's own; see `Replicas`."""
        # A share that was computed for a later step does not count.
        before = self._before
        if before is not None and self._places.step_of(before.number) >= step:
            records, schedule, own = before.optimizer, before.schedule, before.own
        else:
            records, schedule, own = self._records(), self._schedule.state(), self._own_weights
        state, plain = assemble(self.layout, records)
        found = {name: value.clone() for name, value in state.items()}
        return found | own.state(self.layout), plain, schedule

    def load_inner_state(
        self,
        state: Mapping[str, torch.Tensor],
        plain: Sequence[Any],
        schedule: ScheduleState | None,
    ) -> None:
        """Set the state of the inner optimizer and its schedule, as `inner_state` returned it."""
        of_optimizer = {name: value for name, value in state.items() if not is_own_weight(name)}
        self._load(disassemble(self.layout, of_optimizer, plain))
        self._own_weights = OwnWeights.loaded(self.layout, state)
        self._schedule.load_state(schedule)
        self._before = None
