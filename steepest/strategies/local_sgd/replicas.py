"""Local SGD: updates by each worker's own optimizer, then one of the difference they made."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from steepest.core.engine.gradient_sum import NOTHING, ChunkReady
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
from steepest.core.engine.sample_places import Place
from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.models.protocol import (
    Model,
    overrides,
)
from steepest.core.optim.portable import Record
from steepest.core.optim.spec import OptimizerSpec, Schedule, ScheduleState
from steepest.core.protocol.commit_state import with_rates
from steepest.core.protocol.push_tracking import clip_factor
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.memory import sum_of_squares
from steepest.core.tensors.shared_memory import allocate
from steepest.strategies.local_sgd.own_weights import OwnWeights, is_own_weight


@dataclass(frozen=True)
class _Before:
    """A worker's own state before a share."""

    number: int  # of the share
    round: int  # how many rounds the worker had begun before
    optimizer: list[Record]
    schedule: ScheduleState | None
    own: OwnWeights
    # of each model, where a share may be begun before it is known what the one before came to
    buffers: list[Tensors | None]


class LocalReplicas(Replicas):
    """Replicas whose share of a step is `updates` batches, with an update after each.

    They push the difference between the weights that they began with and those that they ended
    with, of which the servers make one update of their own (the outer one). Then the worker has the
    weights that it began with again, until those of the next version have come, so that a step that
    fails, or is left out because of NaN or infinity, leaves no trace. State of the inner optimizer
    stays with its worker.

    Of a layout in several fragments each step exchanges one, in turn. In the others the worker goes
    on from weights of its own, which are state as that of its optimizer is (`OwnWeights`).

    Where shares are leased, the lease says which fragment is pushed; but one that the worker has not pushed for
    long comes first. When others have changed weights of which it has yet to push changes, it adds what they have
    changed to its own weights.

    With `delay` it goes on from what it has pushed, too, for so many batches of the next share, and
    takes the new weights in then: between the two, pushes and weights travel while it computes. A
    share is begun before it is known whether the one before was committed; where it was left out,
    the share is begun anew from where that one began.

    References: Stich 2019, Local SGD Converges Fast and Communicates Little, arXiv:1805.09767;
    Douillard et al. 2023, DiLoCo, arXiv:2311.08105; Douillard et al. 2025, Streaming DiLoCo,
    arXiv:2501.18512.

    Args:
        models, devices, share, memory: see `Replicas`.
        spec: the inner optimizer.
        updates_before: returns the number of updates of each weight before a step.
        clip_norm: the greatest norm of a batch's gradient; None for any.
        delay: batches of a share before it takes in the weights of its version.
        blend: the part of the worker's own weights in what it goes on with then.
    """

    def __init__(  # noqa: PLR0913 - what the strategy and the model say
        self,
        models: Sequence[Model],
        devices: Sequence[torch.device],
        spec: OptimizerSpec,
        share: WorkShare,
        *,
        updates_before: Callable[[int], int],
        clip_norm: float | None,
        memory: Memory | None = None,
        delay: int = 0,
        blend: float = 0.0,
    ) -> None:
        super().__init__(models, devices, share, memory)
        self._accumulate = share.accumulate
        self._updates = share.updates
        self._updates_of_step = share.updates_of_step
        self._updates_before = updates_before
        self._clip_norm = clip_norm
        self._schedule = Schedule(spec)
        self._spec = spec
        self._delay, self._blend = delay, blend
        self.delays = delay > 0
        # the servers' weights, as far as they are taken in
        self._base = self.layout.allocate()
        # whether the next ones are those to which the worker's own weights, as they were loaded, belong
        self._base_is_due = True
        # where new ones arrive, and what is pushed of them, while a share is computed
        self._arrivals, self._difference = self.weights, self._sum
        if delay:
            self._arrivals = self.weights.clone()
            self._difference = allocate(self.layout.nbytes).zero_()
        self._shown: dict[int, torch.Tensor] = {}  # frozen chunks, as the last ones that arrived
        chunks = [self.layout.chunks[index] for index in self._dense]
        self._held = {
            chunk.index: ServerChunk(
                chunk, self.layout, spec, self.layout.chunk_view(self.weights, chunk.index)
            )
            for chunk in chunks
        }
        if (arriving := models[0].optimizer_state) is not None:
            self._load(disassemble(self.layout, arriving.state, arriving.plain))
        self._followers = [each for each in models if overrides(each, "go_on_by_itself")]
        rounds = [each for each in models if overrides(each, "begin_round")]
        self._of_rounds = rounds if self.leases_samples else []
        self._own_weights = OwnWeights()
        self._before: _Before | None = None  # the last share
        # the one before that, until it is known to be committed; None without a delay
        self._earlier: _Before | None = None
        self._pushed = -1  # number of the last share that was pushed
        # whether it is open, where shares are leased, if the last one counts
        self._is_open = False
        self._rounds = 0  # that were begun
        self._given_up: int | None = None  # number of the first of these that models have to undo
        self._computing = False
        self._is_void = False  # whether the share is computed from one that was left out
        self._has_come = False  # whether all weights of the share's version are here

    @property
    def _dense(self) -> list[int]:
        """The chunks of weights that are trained; rows of tables are the servers' alone."""
        shards = self.layout.opaque_chunks
        return [index for index in self.layout.trainable_chunks if index not in shards]

    @property
    def may_take_back(self) -> bool:
        """Return False: gradients become updates here at once."""
        return False

    def _of_update(self, places: Sequence[Place]) -> Sequence[Place]:
        """Return a batch's own places: it is an update of the worker's own optimizer."""
        return places

    @property
    def said(self) -> dict[str, Any]:
        """The models' settings without those for the worker's own optimizer."""
        return {**super().said, "hyper": None, "clip": None, "digest": None}

    def require_norm(self) -> None:
        """Check nothing: each worker clips its own updates."""

    @property
    def arrivals(self) -> torch.Tensor:
        """The flat vector to which new weights are written; with a delay, models compute with another one."""
        return self._arrivals

    def weights_changed(self) -> None:
        """Let the models compute with the weights that have arrived, unless a share goes on from its own."""
        if self._base_is_due and not self._computing:
            self._base.copy_(self._arrivals)
            self._base_is_due = False
        if self.delays and not self._computing:
            for chunk in self.layout.chunks:
                arrived = self.layout.chunk_view(self._arrivals, chunk.index)
                if not chunk.trainable:  # models may have changed theirs since it was installed
                    shown = self._shown.get(chunk.index)
                    if shown is not None and torch.equal(shown, arrived):
                        continue
                    self._shown[chunk.index] = arrived.clone()
                self.layout.chunk_view(self.weights, chunk.index).copy_(arrived)
        super().weights_changed()

    def adopt(self, weights: torch.Tensor) -> bool:
        """Return False: each worker's weights are its own."""
        return False

    def meets_before(self, step: int) -> bool:
        """Return whether a step is the first of an epoch, so that models see the servers' weights before it."""
        plan = self.batches.places.plan
        if self.leases_samples or not self._followers or plan is None or not step:
            return False
        if not (self.delays or self._own_weights.values):
            return False
        return plan.position(step).epoch != plan.position(step - 1).epoch

    def _meet(self, step: int) -> None:
        """Let models that wait for others after an epoch go on, before the worker's own weights are laid out."""
        if self.meets_before(step):
            for model in self._followers:
                model.go_on_together(step)

    def compute(
        self,
        number: int,
        chunk_ready: ChunkReady,
        metrics: bool,
    ) -> WorkerResult:
        """Make one share's updates, and push their difference; the weights are those from before afterwards.

        Its arguments are those of `Replicas.compute`.
        """
        self._has_come = not self.delays
        if not self.places(number):
            self._tell_place((number, 0, 0), empty=True)
        self._meet(self.batches.places.step_of(number))
        self._begin(number)
        self._begin_round()
        if self.leases_samples and not self.delays:
            self._own_weights = self._shift(self._own_weights)
        if (
            not (self.leases_samples and self.delays)
            or self._base_is_due
            or not self._own_weights.values
        ):
            self._base.copy_(self.weights)
            self._base_is_due = False
        self._computing, self._is_void = True, False
        try:
            while (result := self._train(number, metrics)) is None:
                self._begin_anew(number)
            turn = self.batches.places.step_of(number)
            if self.leases_samples:
                self.fragment = turn = self._own_turn(result.weight)
            self._exchange_fragment(turn, result.weight, chunk_ready)
            self._companion.end_share(chunk_ready, self._update_at)
            self._pushed = number
        except BaseException:
            self._set_buffers(self._present)
            raise
        finally:
            self.weights.copy_(self._base)
            self._computing = not self._has_come
            self.weights_changed()
            self._computing = False
        return result

    def _train(self, number: int, metrics: bool) -> WorkerResult | None:
        """Make a share's updates from the worker's own weights; None if the share that it began from was left out."""
        parts: list[Batches] = []
        self._own_weights.write(self.layout, self.weights)
        self._copy_to_devices()
        self._update_at, self._takes_in_at = 0, self._delay
        if (
            self._updates < self._updates_of_step
        ):  # so many batches of the fastest, in which others compute fewer
            scaled = -(-self._delay * self.leased_shares // self._updates_of_step)
            self._takes_in_at = min(scaled, self.leased_shares - 1)
        for share in range(number, number + self.leased_shares):
            if not self._train_share(share, parts, metrics):
                return None
        return summarize_batches(parts)

    def _train_share(self, number: int, parts: list[Batches], metrics: bool) -> bool:
        """Make the updates of one share, and add their results; False if the share that it began from was left out."""
        step = self.batches.places.step_of(number)
        first = self._updates_before(step)
        # where workers get as many shares as they compute in time, each is one update of the step
        of_step = self._updates_of_step if self._updates < self._updates_of_step else 0
        first += number % self.batches.places.shares * of_step // self.batches.places.shares
        for update in range(self._updates):
            at, self._update_at = self._update_at, self._update_at + 1
            if at == self._takes_in_at and not self._take_in():
                return False
            micros = range(update * self._accumulate, (update + 1) * self._accumulate)
            places = [place for place in self.places(number) if place[2] in micros]
            if places:
                try:
                    parts.append(self._compute_each(places, self._hold_gradient, metrics))
                    self._update(first + update, step)
                except BaseException:
                    # told once the step before is known to be committed
                    if at < self._takes_in_at and not self._take_in():
                        return False
                    raise
            if self.waits is not None:
                self.waits.poll()
        return True

    def _take_in(self) -> bool:
        """Wait for the weights of the share's version, and go on with them; False if its beginning is void."""
        if self.delays:
            if self.waits is not None:
                self.waits.arrive()
            self._has_come = True
            if self._is_void:
                return False
            self._earlier = None
            for model in self._of_rounds:
                model.decided_before(self._present.round)
            if self.leases_samples:
                self._add_what_others_changed()
        for index in self._own_weights.sent:
            dtype = self.layout.chunks[index].dtype
            arrived, base, now = (
                self.layout.chunk_view(vector, index)
                for vector in (self._arrivals, self._base, self.weights)
            )
            if self.delays:
                base.copy_(arrived)
            if self._blend:
                own = now.view(dtype)
                torch.lerp(base.view(dtype), own, self._blend, out=own)
            else:
                now.copy_(base)
        if self._own_weights.sent or self.delays:
            self._copy_to_devices()
        return True

    def _shift(self, own: OwnWeights) -> OwnWeights:
        """Return the worker's own weights plus the changes of others since those that it began from."""
        shifted = own.onto(self.layout, self._base, self._arrivals)
        if self._before is not None:  # a share that is left out is undone to these
            before = self._before.own.onto(self.layout, self._base, self._arrivals)
            self._before = replace(self._before, own=before)
        return shifted

    def _add_what_others_changed(self) -> None:
        """Add other workers' changes, in the middle of a share, to the weights whose changes are not pushed."""
        self._own_weights = self._shift(self._own_weights)
        for index in self._dense:
            dtype = self.layout.chunks[index].dtype
            arrived, base, now = (
                self.layout.chunk_view(vector, index).view(dtype)
                for vector in (self._arrivals, self._base, self.weights)
            )
            if index not in self._own_weights.sent and not torch.equal(arrived, base):
                now.add_(arrived - base)
                base.copy_(arrived)

    def _begin_anew(self, number: int) -> None:
        """Begin a share where the previous one began, which was left out."""
        before, earlier = self._present, self._earlier
        assert earlier is not None, "a share that was left out is known"
        self._set_buffers(before)
        self._restore(earlier)
        self._before = replace(
            before, optimizer=earlier.optimizer, schedule=earlier.schedule, own=earlier.own
        )
        self._given_up = before.round
        self._begin_round()
        self._earlier, self._pushed, self._is_void = None, -1, False
        self.weights.copy_(self._base)

    def _own_turn(self, weight: float) -> int:
        """Return the fragment to be pushed after a leased share, whose samples have this weight.

        It is the one whose turn it is, unless another has waited twice as long as its turn takes: a worker whose leases
        come in step with the turns would push the same fragment again and again.
        """
        since, count = self._own_weights.since, self.layout.fragments
        of_fragments = map(self.layout.of_fragment, range(count))
        waited = [max((since.get(i, 0.0) for i in chunks), default=0.0) for chunks in of_fragments]
        longest = waited.index(max(waited))
        overdue = waited[longest] + weight >= 2 * count * weight and waited[longest] > 0
        return longest if self.turn is None or overdue else self.turn % count

    def _exchange_fragment(self, turn: int, weight: float, chunk_ready: ChunkReady) -> None:
        """Push a fragment's change since its last exchange, and keep the weights of the others.

        Args:
            turn: the fragment.
            weight: of the samples of this share.
            chunk_ready: takes the chunks.
        """
        exchanged = self.layout.of_fragment(turn)
        own, goes_on = self._own_weights, self.delays or self._blend > 0
        for index in reversed(self._dense):
            total = own.weight_of(index, weight)
            if index in exchanged and total:
                self._push_difference(index, total, chunk_ready)
            else:
                chunk_ready(index, NOTHING, 0.0, 0.0, frozenset())
        kept = [index for index in self._dense if goes_on or index not in exchanged]
        sent = exchanged if goes_on else ()
        self._own_weights = own.after(self.layout, self.weights, weight, kept, sent)

    def _begin(self, number: int) -> None:
        """Save the worker's own state, or restore it if a share is computed again; no gradient is kept."""
        for held in self._held.values():
            held.drop_mean()  # of a batch in which the model raised
        before, earlier = self._before, self._earlier
        if before is not None and number == before.number:
            self._go_back(before)
        elif earlier is not None and number == earlier.number:
            self._before, self._earlier = earlier, None
            self._go_back(earlier)
        else:
            records = self.own_records()
            buffers = self._buffers() if self.delays else []
            own, schedule = self._own_weights, self._schedule.state()
            self._before = _Before(number, self._rounds, records, schedule, own, buffers)
            self._earlier = before if self.delays else None
            self._rounds += 1
        self._is_open = self.leases_samples

    @property
    def _present(self) -> _Before:
        """The worker's own state before the present share."""
        assert self._before is not None, "a share was begun"
        return self._before

    def _begin_round(self) -> None:
        """Tell models that follow rounds that one begins, and which ones they have to undo first."""
        for model in self._of_rounds:
            model.begin_round(self._present.round, self._given_up)
        self._given_up = None

    def _go_back(self, before: _Before) -> None:
        """Set all of the worker's own state back to that before a share, which begins again."""
        self._restore(before)
        self._set_buffers(before)
        self._given_up = (
            before.round if self._given_up is None else min(self._given_up, before.round)
        )

    def _restore(self, before: _Before) -> None:
        """Set the worker's own state, except buffers, back to that before a share."""
        self._load(before.optimizer)
        self._schedule.load_state(before.schedule)
        self._own_weights = before.own

    def _buffers(self) -> list[Tensors | None]:
        """Return each model's buffers; None for a model that undoes a round by itself."""
        return [None if overrides(m, "begin_round") else Tensors(m.state()) for m in self.models]

    def _set_buffers(self, before: _Before) -> None:
        """Set the models' buffers to those before a share, as far as these are kept."""
        for model, state in zip(self.models, before.buffers, strict=False):
            if state is not None:
                model.load_state(state)

    def left_out(self) -> None:
        """Set the worker's own state back to that before the last share that was pushed; calls may repeat."""
        if self._computing:
            earlier = self._earlier
            self._is_void |= earlier is not None and earlier.number == self._pushed
            return
        kept = (each for each in (self._before, self._earlier) if each is not None)
        before = next((each for each in kept if each.number == self._pushed), None)
        if before is not None:
            self._restore(before)
            self._before = self._earlier = None
            self._is_open = False

    def decided(self, *, counts: bool, again: bool = False) -> None:
        """Keep the changes of the last leased share, or undo them; calls may repeat."""
        if self._computing:
            self._is_void |= not counts and self._earlier is not None
            return
        if not self._is_open:
            return
        if (earlier := self._earlier) is not None:
            # the last share was given up before it was known what the one before it came to
            self._go_back(earlier if again and not counts else self._present)
            if not counts:
                self._restore(earlier)
            self._before = self._earlier = None
        elif not counts:
            before, given_up = self._present, self._given_up
            self._go_back(before)
            self._given_up = self._given_up if again else given_up
            self._before = None
        self._is_open = False

    def settle(self, ledger: Sequence[int]) -> None:
        """Undo leased shares that are not in the servers' weights; these replicas take no more steps."""
        following, *missing = ledger
        for before in (each for each in (self._earlier, self._before) if each is not None):
            if before.number >= following or before.number in missing:
                self._go_back(before)
                self._before = self._earlier = None
                break
            for model in self._of_rounds:
                model.decided_before(before.round + 1)
        self._is_open = False

    def go_on(self, version: int) -> None:
        """Tell models of a commit, or of the decision on a leased share."""
        places = self.batches.places
        undecided = self._is_open or self._given_up is not None
        super().go_on(version)
        for model in () if undecided else self._of_rounds:
            step = places.step_of(version)
            model.end_round(None if places.plan is None else places.plan.position(step).epoch)

    def take_over(self, other: Replicas) -> None:
        """Continue with the models of earlier replicas, whose undecided leased share was given up."""
        super().take_over(other)
        if isinstance(other, LocalReplicas):
            self._rounds, self._given_up = other._rounds, other._given_up
            if other._is_open and other._before is not None:
                earliest = other._earlier or other._before
                self._given_up = min(
                    earliest.round, other._rounds if other._given_up is None else other._given_up
                )

    def take_servers_weights(self, names: Collection[str]) -> None:
        """Forget the worker's own weights of some parameters, which have been set."""
        self._own_weights = self._own_weights.without(self.layout, names)
        if (before := self._before) is not None:
            self._before = replace(before, own=before.own.without(self.layout, names))
        self._earlier = None

    def _hold_gradient(
        self, index: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> None:
        """Keep a chunk of an inner gradient (see `ChunkReady`), as its mean, until the backward pass has ended."""
        held = self._held[index]
        if not unit:
            return
        held.mean, held.absent = payload.view(held.chunk.dtype), absent
        if unit != total:
            held.mean.div_(total / unit)

    def _update(self, at: int, step: int) -> None:
        """Apply the gradients that are kept, as update number `at`, which is one of step `step`."""
        clip = self.models[0].clip_step or self._clip_norm
        if clip is not None:
            self._clip(clip)
        said = self.models[0].hyper
        changed = with_rates(self._schedule.at(at) if said is None else said, self.rates, step)
        hyper = self._spec.hyperparameters(changed)
        for held in self._held.values():
            held.apply(hyper, 1.0)
        self.weights_changed()
        for model in self._followers:
            model.go_on_by_itself()

    def _clip(self, greatest: float) -> None:
        """Clip the gradients of an update, those of rows too, by their norm together."""
        means = [held.mean for held in self._held.values() if held.mean is not None]
        squares = [*map(sum_of_squares, means), self._companion.squares()]
        factor = clip_factor(math.sqrt(math.fsum(squares)), greatest)
        for mean in means if factor != 1.0 else ():
            mean.mul_(factor)
        self._companion.scale(factor)

    def _push_difference(self, index: int, weight: float, chunk_ready: ChunkReady) -> None:
        """Push the weights before minus the weights now of a chunk; `weight` is that of the samples behind it."""
        dtype = self.layout.chunks[index].dtype
        base, now, difference = (
            self.layout.chunk_view(vector, index).view(dtype)
            for vector in (self._base, self.weights, self._difference)
        )
        torch.sub(base, now, out=difference)
        chunk_ready(index, difference.view(torch.uint8), weight, weight, frozenset())

    # -- the inner optimizer's state -----------------------------------------------------------

    def _records(self) -> list[Record]:
        """Return the inner optimizer's state of all chunks; the tensors are not copied."""
        return [
            (index, description, value)
            for index, held in self._held.items()
            for description, value in held.state()
        ]

    def own_records(self) -> list[Record]:
        """Return copies of the inner optimizer's present state; see `Replicas`."""
        return [
            (index, description, value.clone()) for index, description, value in self._records()
        ]

    def _load(self, records: Sequence[Record]) -> None:
        """Set the inner optimizer's state to copies of some records."""
        for held in self._held.values():
            held.clear_state()
        for index, description, value in records:
            self._held[index].load_state(description, value.clone())
        for held in self._held.values():
            held.end_state()

    def inner_state(self, step: int) -> InnerOptimizerState:
        """Return the inner optimizer's and schedule's state, and weights of the worker's own; see `Replicas`.

        A share that was computed for a later step does not count, nor does a leased one that is not committed.
        """
        kept = (each for each in (self._earlier, self._before) if each is not None)
        later = (each for each in kept if self.batches.places.step_of(each.number) >= step)
        before = (
            (self._before if self._is_open else None) if self.leases_samples else next(later, None)
        )
        if before is not None:
            records, schedule, own = before.optimizer, before.schedule, before.own
        else:
            records, schedule, own = self._records(), self._schedule.state(), self._own_weights
        if self.leases_samples and not self._base_is_due:
            own = own.onto(self.layout, self._base, self.weights)
        state, plain = assemble(self.layout, records)
        tensors = {name: value.clone() for name, value in state.items()}
        return tensors | own.state(self.layout), plain, schedule

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
        self._base_is_due = True
        self._schedule.load_state(schedule)
        self._before = self._earlier = None
        self._is_open = False
