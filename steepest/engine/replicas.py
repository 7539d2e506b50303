"""The replicas of one worker: several copies of a model, their gradients added up before they leave."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from steepest.compression.codecs import Packer
from steepest.data.sampler import SamplePlan, even_share, step_seed
from steepest.errors import ModelError
from steepest.models.protocol import Arrive, Computed, Model, checked
from steepest.models.write_check import refusal
from steepest.tensors.dtypes import Tensors, merged
from steepest.tensors.layout import ParameterLayout
from steepest.tensors.shared_memory import allocate, forget_writes, make_writable

#: Called when a chunk of the worker's gradient is complete: chunk index, its bytes, unit weight, summed
#: weight of the worker's samples, and the entries for which no replica had a gradient.
ChunkReady = Callable[[int, torch.Tensor, float, float, frozenset[int]], None]

#: What batches gave, and the seconds for loading and computing them.
Batches = tuple[list[Computed], float, float]

#: Flat vectors for weights, and for gradients, which processes of the same host may read there.
Memory = tuple[torch.Tensor, torch.Tensor]

_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What a worker got from one step: means by weight over its replicas, and seconds spent."""

    loss: float
    weight: float
    samples: int
    metrics: dict[str, float]
    timings: dict[str, float]


def memory_for(layout: ParameterLayout) -> Memory:
    """Memory for replicas to be: pages are taken now, which may take longer than copying what will be in them."""
    return layout.allocate(), allocate(layout.nbytes).zero_()


class Replicas:
    """All replicas of one worker, on its devices.

    On the CPU, replicas share one copy of the weights and compute in turn. On GPUs each has a copy on
    its own device. Gradients are added up in replica order, chunk by chunk, in units of the first
    replica's weight: ``sum(weight_i * gradient_i) == unit * payload``, so that with equal batches (and
    with one replica always) nothing is multiplied. Micro-batches are added up in the same way.

    Args:
        models: one for each device, in order.
        devices: where each computes.
        first_index: index of the first of them among all replicas of the job.
        shares: of a step, one for each worker whose gradient it takes.
        seed: of the job.
        accumulate: micro-batches that each replica computes one after the other for one gradient.
        updates: gradients of a step, see `steepest.engine.local_sgd`.
        leased: whether shares come one by one, so that the next one is not known beforehand.
        memory: for weights and gradients, see `memory_for`.
    """

    def __init__(
        self,
        models: Sequence[Model],
        devices: Sequence[torch.device],
        *,
        first_index: int,
        shares: int,
        seed: int,
        accumulate: int = 1,
        updates: int = 1,
        leased: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self.models = tuple(models)
        self.layout = models[0].layout
        self.weights, self._sum = memory or (self.layout.allocate(), allocate(self.layout.nbytes))
        self._memory = self.weights
        self.first_index = first_index
        self.worker = first_index // len(models)
        self._shares = shares
        self._micros = accumulate * updates
        self.leased = leased
        self._seed = seed
        self._devices = tuple(devices)
        scratch = self._sum if len(models) * accumulate == 1 else self.layout.allocate()
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, device in enumerate(devices):
            if device.type == "cpu":  # weights are shared; replica 0 writes the sum itself, if it writes only once
                self._own.append((self.weights, self._sum if index == 0 and accumulate == 1 else scratch))
            else:
                self._own.append((self.weights.to(device), self._sum.to(device)))
        for model, (weights, gradients) in reversed(list(zip(models, self._own, strict=True))):
            model.bind(weights, gradients)  # the first replica last: its initial values are everybody's
        if self._devices[0].type != "cpu":
            self.weights.copy_(self._own[0][0])
        #: the state to begin with; until the first weights are here, with which frozen parameters come
        self._first: Mapping[str, torch.Tensor] | None = {}
        #: by replica: the share and micro-batch that comes next, and where from
        self._batches: list[tuple[tuple[int, int], Iterator[Any]] | None] = [None] * len(models)
        #: what compression has left out of this worker's gradients; set by who hosts the worker
        self.packer: Packer | None = None
        self._plan: SamplePlan | None = None
        self._sizes = [sum(s.stop - s.start for s in chunk.slices) for chunk in self.layout.chunks]
        self._trainable = [chunk.index for chunk in self.layout.chunks if chunk.trainable]

    def use_plan(self, plan: SamplePlan | None, seed: int) -> None:
        """Sets which samples belong to whom from now on (None when the data are streams, which go on), and the seed."""
        if plan is not None or self._plan is not None:
            self._batches = [None] * len(self.models)
        self._plan = plan
        self._seed = seed

    def use_packer(self, packer: Packer) -> None:
        """Keep the packer of this worker's gradients, which holds what compression has left out so far."""
        self.packer = packer

    def go_on_from(self, other: Replicas) -> None:
        """Goes on, also with the data, where others were that had the same models."""
        self._batches, self._first = other._batches, other._first

    def begin_with(self, state: Mapping[str, torch.Tensor]) -> None:
        """Has every model begin with a state (see `Model.state`), before the first weights are here."""
        self._first = state
        for model in self.models:
            model.load_state(state)

    def states(self, names: Sequence[str] = ()) -> list[Tensors]:
        """Each replica's state (see `Model.state`), with these frozen parameters even where they are as installed."""
        found = []
        for model in self.models:
            state = Tensors(model.state())
            for name in names:
                if name not in state and name in self.layout.index:
                    state[name] = self.layout.entry_view(self.weights, self.layout.index[name]).clone()
            found.append(state)
        return found

    def renumber(self, first_index: int, shares: int) -> None:
        """They are those of another worker, in a job of as many shares; weights are in memory of their own again.

        For the arguments see the class.
        """
        self.first_index, self.worker, self._shares = first_index, first_index // len(self.models), shares
        if self.weights.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(self.weights)
            self._move(self._memory)

    def adopt(self, weights: torch.Tensor) -> bool:
        """Uses a vector that others fill, and share, instead of this worker's own; whether that can be.

        The models may write to it, as they may to their own: what they write is theirs alone, and is forgotten
        when they have computed.

        Args:
            weights: uint8, flat, of the layout's size.
        """
        if weights.data_ptr() == self.weights.data_ptr():
            return True
        if not make_writable(weights, whole_pages=self.layout.on_pages):
            return False
        self._move(weights)
        return True

    def _move(self, weights: torch.Tensor) -> None:
        self.weights = weights
        for index, (device, (_, gradients)) in enumerate(zip(self._devices, self._own, strict=True)):
            if device.type == "cpu":
                self._own[index] = (weights, gradients)
                self.models[index].move(weights)

    def forget_writes(self) -> None:
        """Undoes what the models themselves have written to weights that are shared."""
        forget_writes(self.weights)

    def refuse_writes(self) -> None:
        """Undoes what the models have written to weights that are shared, after a step.

        Raises:
            ModelError: they have changed something.
        """
        if changed := forget_writes(self.weights):
            behind = [e for e in self.layout.entries if e.trainable and e.offset + e.nbytes > changed[0]]
            if behind:
                raise ModelError(refusal(min(behind, key=lambda entry: entry.offset).name))

    def weights_changed(self) -> None:
        """Brings new weights to the devices; on the CPU the models see them as they are.

        With the first ones all replicas take the frozen parameters that were installed; later they keep their own.
        """
        for device, (weights, _) in zip(self._devices, self._own, strict=True):
            if device.type != "cpu":
                weights.copy_(self.weights, non_blocking=True)
        if self._first is not None:
            state, self._first = self._first, None
            for model in self.models:
                model.load_state(state)

    @property
    def _parts(self) -> int:
        """Micro-batches that make one step, those of all workers together."""
        return self._shares * len(self.models) * self._micros

    def _first_part(self, number: int, replica: int) -> int:
        """Where in its step the first micro-batch of one replica lies: in order of worker, device, micro-batch."""
        return (number % self._shares * len(self.models) + replica) * self._micros

    def _next_batch(self, number: int, replica: int, micro: int, count: int) -> Any:
        """One of the `count` micro-batches, none of them empty, of one replica in one share."""
        kept = self._batches[replica]
        if kept is None or (self._plan is not None and kept[0] != (number, micro)):
            first, step = self._first_part(number, replica), number // self._shares
            plan, own = self._plan, self._micros
            shares = iter(()) if plan is None else plan.shares(step, first, self._parts, own)
            kept = ((number, micro), self.models[replica].data.open(shares, prefetch=not self.leased))
        self._batches[replica] = None  # an iterator that raises is of no use any more
        try:
            batch = next(kept[1])
        except StopIteration:
            raise ModelError(
                "the source of the training data ended: its open() must yield a batch for each share"
            ) from None
        # in the next step it is at the same place
        following = (number, micro + 1) if micro + 1 < count else (number + self._shares, 0)
        self._batches[replica] = (following, kept[1])
        return batch

    def _counts(self, number: int) -> list[int]:
        """How many micro-batches each replica has in one share: empty ones come last."""
        if (plan := self._plan) is None:
            return [self._micros] * len(self.models)
        step, parts = number // self._shares, self._parts
        firsts = [self._first_part(number, replica) for replica in range(len(self.models))]
        return [sum(len(plan.share(step, at + m, parts)) > 0 for m in range(self._micros)) for at in firsts]

    def compute(
        self, number: int, chunk_ready: ChunkReady, metrics: bool, arrive: Arrive = lambda entry: None
    ) -> WorkerResult:
        """Computes the gradient of one share of the samples; `chunk_ready` is called during the backward pass.

        Args:
            number: of the share: with n shares in a step, the n-th part ``number % n`` of step ``number // n``.
            chunk_ready: takes each chunk.
            metrics: compute the model's metrics too.
            arrive: returns when the weights of an entry (of all, with None) are here.
        """
        counts = self._counts(number)
        if not any(counts):
            arrive(None)
            self._nothing(chunk_ready)
        batches = [(replica, micro) for replica, count in enumerate(counts) for micro in range(count)]
        return summarize_batches([self._compute_each(number, batches, counts, chunk_ready, metrics, arrive)])

    def _nothing(self, chunk_ready: ChunkReady) -> None:
        for chunk in self._trainable:
            chunk_ready(chunk, _NOTHING, 0.0, 0.0, frozenset())

    def _compute_each(
        self,
        number: int,
        batches: Sequence[tuple[int, int]],
        counts: Sequence[int],
        chunk_ready: ChunkReady,
        metrics: bool,
        arrive: Arrive,
    ) -> Batches:
        """The gradient of some (replica, micro-batch) pairs of a share."""
        step = number // self._shares
        collector = _Collector(self, len(batches), chunk_ready)
        results: list[Computed] = []
        loading = computing = 0.0
        for replica, micro in batches:
            began = time.perf_counter()
            seed_everything(step_seed(self._seed, step, self._first_part(number, replica) + micro))
            batch = self._next_batch(number, replica, micro, counts[replica])
            loaded = time.perf_counter()
            if self._devices[replica].type != "cpu":
                arrive(None)  # then they have been copied to the device
            collector.begin(self._own[replica][1])
            results.append(checked(self.models[replica].compute_gradients(batch, collector.ready, metrics, arrive)))
            arrive(None)
            collector.end()
            loading += loaded - began
            computing += time.perf_counter() - loaded
        return results, loading, computing

    def warmup(self) -> None:
        """Computes one gradient on every replica and throws it away."""
        for replica, model in enumerate(self.models):
            shares = [np.arange(min(model.batch_size, model.data.size or 1))]
            batch = next(iter(model.data.open(shares)))
            before = model.state()  # running means, say, which a forward pass moves on
            model.compute_gradients(batch, lambda *_: None, False)
            model.load_state(before)
            self._batches[replica] = None

    def evaluate(self, data: Any, batch_size: int | None, part: int, parts: int) -> WorkerResult:
        """Loss and metrics over one of `parts` equal ranges of a data set, computed by the first replica."""
        began = time.perf_counter()
        model = self.models[0]
        size = batch_size or model.batch_size
        source = model.source(data, size)
        if source.size is None:
            raise ModelError("evaluate() needs data of known length: give arrays or a map-style dataset")
        begin, end = even_share(source.size, part, parts)
        shares = [np.arange(i, min(i + size, end)) for i in range(begin, end, size)]
        results = [checked(model.evaluate(batch)) for batch in source.open(shares)]
        return WorkerResult(*_mean(results), {"evaluate": time.perf_counter() - began})


def summarize_batches(parts: Sequence[Batches]) -> WorkerResult:
    """Means by weight over all batches, and the seconds that they took."""
    timings = {"data": sum(loading for _, loading, _ in parts), "compute": sum(computing for *_, computing in parts)}
    return WorkerResult(*_mean([result for results, _, _ in parts for result in results]), timings)


class _Collector:
    """Adds the gradients of replicas and micro-batches up chunk by chunk and hands complete chunks on."""

    def __init__(self, replicas: Replicas, count: int, chunk_ready: ChunkReady) -> None:
        self._replicas = replicas
        self._layout = replicas.layout
        self._left = count
        self._chunk_ready = chunk_ready
        self._unit = 0.0  # weight of the first batch that weighed anything, among those that ended
        self._weight = 0.0
        self._total = 0.0  # weight of those that ended
        self._present: set[int] = set()

    def begin(self, gradients: torch.Tensor) -> None:
        """The next batch starts; its replica writes to `gradients`."""
        self._left -= 1
        self._gradients = gradients
        self._missing = list(self._replicas._sizes)

    def end(self) -> None:
        """All of the batch is computed.

        Raises:
            ModelError: `ready` was not called for every trainable parameter.
        """
        for index in self._replicas._trainable:
            if self._missing[index] > 0:
                names = ", ".join(repr(self._layout.entries[s.entry].name) for s in self._layout.chunks[index].slices)
                raise ModelError(
                    f"compute_gradients returned before it had called ready for each of {names:.500}: call it once for "
                    "every trainable parameter"
                )
        self._unit = self._unit or self._weight
        self._total += self._weight

    def ready(self, entry: int, weight: float, present: bool, chunk: int | None = None) -> None:
        """One entry's gradient is written, or its part in a chunk."""
        self._weight = weight
        if present and weight:
            self._present.add(entry)
        chunks = self._layout.chunks_of[entry]
        for index in chunks if chunk is None else (chunk,):
            if len(chunks) == 1:
                self._missing[index] -= self._layout.entries[entry].numel
            else:
                slices = self._layout.chunks[index].slices
                self._missing[index] -= sum(s.stop - s.start for s in slices if s.entry == entry)
            if self._missing[index] == 0:
                self._complete(index)

    def _complete(self, index: int) -> None:
        chunk = self._layout.chunks[index]
        total = self._layout.chunk_view(self._replicas._sum, index).view(chunk.dtype)
        own = self._layout.chunk_view(self._gradients, index).view(chunk.dtype)
        if self._unit:
            if self._weight:  # otherwise it does not count, and may well be NaN: a mean over nothing
                total.add_(own.to(total.device), alpha=self._weight / self._unit)
        elif own.data_ptr() != total.data_ptr():
            total.copy_(own)
        if self._left == 0:
            absent = frozenset(s.entry for s in chunk.slices if s.entry not in self._present)
            unit, weight = self._unit or self._weight, self._total + self._weight
            self._chunk_ready(index, total.view(torch.uint8) if unit else _NOTHING, unit, weight, absent)


def _mean(results: Sequence[Computed]) -> tuple[float, float, int, dict[str, float]]:
    weight = sum(result.weight for result in results)
    samples = sum(result.samples for result in results)
    results = [result for result in results if result.weight]
    if not results:
        return 0.0, 0.0, samples, {}
    loss = sum(result.loss * result.weight for result in results) / weight
    names = sorted({name for result in results for name in result.metrics})
    metrics = {
        name: sum(r.metrics[name] * r.weight for r in results if name in r.metrics)
        / sum(r.weight for r in results if name in r.metrics)
        for name in names
    }
    return loss, weight, samples, metrics


def seed_everything(seed: int) -> None:
    """Seeds torch's, NumPy's and Python's global generators."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def all_states(call: Callable[..., list[list[Tensors]]]) -> list[Tensors]:
    """Each replica's state, all with the same names.

    Args:
        call: calls a function of `Replicas` on all workers, with arguments for it.
    """
    states = [state for part in call(Replicas.states) for state in part]
    names = sorted(set().union(*states))
    if all(len(state) == len(names) for state in states):
        return states
    states = [state for part in call(Replicas.states, names) for state in part]  # not all have changed the same
    return [Tensors((name, state[name]) for name in names) for state in states]


def mean_states(states: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float]) -> Tensors:
    """One state from those of several replicas, see `dtypes.merged`."""
    return Tensors((name, merged([state[name] for state in states], weights)) for name in states[0])
