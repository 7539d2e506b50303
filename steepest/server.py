"""A server: stages pushed chunks, reduces them, and applies the optimizer when told to commit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steepest.comm.message import COORDINATOR, Kind, Message, Peer, Send, worker_peer
from steepest.errors import ProtocolError
from steepest.model import Chunk, ParameterLayout
from steepest.optimizer import Hyperparameters, OptimizerSpec

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Push:
    """One worker's gradient of one chunk, staged: never changed until its commit is applied.

    The gradient of the worker's batch is ``unit / total * payload``; `total` is the batch's sample weight.
    """

    worker: int
    payload: torch.Tensor | None
    unit: float
    total: float
    absent: frozenset[int]


class ServerChunk:
    """One chunk on its server: weights, optimizer, staged pushes and their weighted mean.

    Args:
        weights: the chunk's bytes; updated in place.
    """

    def __init__(self, chunk: Chunk, layout: ParameterLayout, spec: OptimizerSpec, weights: torch.Tensor) -> None:
        self.chunk = chunk
        self.weights = weights
        self.staged: dict[int, Push] = {}
        self.mean: torch.Tensor | None = None
        self.absent: frozenset[int] = frozenset()
        self._layout = layout
        self._spec = spec
        self._accumulator = torch.empty_like(weights) if chunk.trainable else torch.empty(0, dtype=torch.uint8)
        self._buffers: list[torch.Tensor] = []  # staging memory, all of it
        self._spare: list[torch.Tensor] = []  # what of it is free
        self._names = [layout.entries[piece.entry].name for piece in chunk.slices]
        self._parameters = [torch.nn.Parameter(view) for view in layout.slice_views(chunk, weights)]
        self._optimizer: torch.optim.Optimizer | None = None
        self._groups: list[int] = []
        if chunk.trainable:
            slices = list(zip(self._names, self._parameters, strict=True))
            self._optimizer, self._groups = spec.build(slices)

    def staging_buffer(self) -> torch.Tensor:
        """Memory for one push; free again after its commit."""
        if not self._spare:
            self._buffers.append(torch.empty_like(self.weights))
            return self._buffers[-1]
        return self._spare.pop()

    def release(self, payload: torch.Tensor | None) -> None:
        """Takes back the staging buffer, if it is one, of a push that is done with."""
        if any(payload is buffer for buffer in self._buffers):
            assert payload is not None
            self._spare.append(payload)

    def reduce(self) -> float:
        """Forms the weighted mean of the staged pushes, in the order of the workers.

        Returns:
            The sum of the squares of the mean; not finite when an element is not.
        """
        pushes = [p for _, p in sorted(self.staged.items()) if p.payload is not None and p.unit != 0.0]
        total = math.fsum(push.total for push in self.staged.values())
        if not pushes or total == 0.0:
            self.mean = None
            return 0.0
        self.absent = frozenset.intersection(*(push.absent for push in pushes))
        dtype = self.chunk.dtype
        (first, unit), *rest = [(p.payload.view(dtype), p.unit) for p in pushes if p.payload is not None]
        result = first
        if rest or unit != total:
            result = self._accumulator.view(dtype)
            if all(other == unit for _, other in rest):  # divided by a count: the mean of equal values is that value
                if rest:
                    torch.add(first, rest[0][0], out=result)
                    for gradient, _ in rest[1:]:
                        result.add_(gradient)
                    result.div_(total / unit)
                else:
                    torch.div(first, total / unit, out=result)
            else:
                torch.mul(first, unit / total, out=result)
                for gradient, other in rest:
                    result.add_(gradient, alpha=other / total)
        self.mean = result
        return sum_of_squares(result)

    def culprits(self) -> list[tuple[int, str]]:
        """(worker, parameter) of each staged gradient that holds NaN or infinity."""
        found = []
        for worker, push in sorted(self.staged.items()):
            if push.payload is not None:
                views = self._layout.slice_views(self.chunk, push.payload)
                for name, view in zip(self._names, views, strict=True):
                    if not bool(torch.isfinite(view).all()):
                        found.append((worker, name))
        return found or [(-1, self._names[0])]  # each is finite, only their sum is not

    def apply(self, hyper: Sequence[Hyperparameters], scale: float) -> None:
        """One optimizer step with the mean, and the staged pushes are done with."""
        if self.mean is not None:
            assert self._optimizer is not None
            if scale != 1.0:
                self.mean = torch.mul(self.mean, scale, out=self._accumulator.view(self.chunk.dtype))
            self.set_hyperparameters(hyper)
            views = self._layout.slice_views(self.chunk, self.mean.view(torch.uint8))
            for piece, parameter, view in zip(self.chunk.slices, self._parameters, views, strict=True):
                parameter.grad = None if piece.entry in self.absent else view
            self._step(self._optimizer)
            for parameter in self._parameters:
                parameter.grad = None
        self.discard()

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        """torch's fused SGD cannot begin one parameter's momentum while another's runs; the plain one can."""
        begun = {bool(optimizer.state.get(p)) for p in self._parameters if p.grad is not None}
        fused = [group for group in optimizer.param_groups if group.get("fused")]
        if len(begun) < 2 or not isinstance(optimizer, torch.optim.SGD):
            fused = []
        for group in fused:
            group["fused"] = False
        optimizer.step()
        for group in fused:
            group["fused"] = True

    def discard(self) -> None:
        """Forgets what is staged."""
        for push in self.staged.values():
            self.release(push.payload)
        self.staged.clear()
        self.mean = None

    def set_hyperparameters(self, hyper: Sequence[Hyperparameters]) -> None:
        """Sets what a schedule changed; `hyper` has one entry for each group of the recipe."""
        if self._optimizer is None:
            return
        for index, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            for key, value in hyper[index].items():
                group[key] = tuple(value) if isinstance(value, list) else value

    def state(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """The optimizer's state: (description, tensor) of each slice and key."""
        records: list[tuple[dict[str, Any], torch.Tensor]] = []
        if self._optimizer is None:
            return records
        for piece, name, parameter in zip(self.chunk.slices, self._names, self._parameters, strict=True):
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items()):
                about = {"name": name, "key": key, "start": piece.start, "stop": piece.stop}
                if isinstance(value, torch.Tensor):
                    records.append(({**about, "plain": False}, value))
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    records.append(({**about, "plain": True}, torch.tensor(value, dtype=torch.float64)))
                else:
                    log.debug("optimizer state %s of %s is not saved: %s", key, name, type(value).__name__)
        return records

    def load_state(self, about: dict[str, Any], value: torch.Tensor) -> None:
        """Sets one record of `state`."""
        assert self._optimizer is not None
        for piece, name, parameter in zip(self.chunk.slices, self._names, self._parameters, strict=True):
            if name == about["name"] and piece.start == about["start"]:
                self._optimizer.state[parameter][about["key"]] = value.item() if about["plain"] else value
                return
        raise ProtocolError(f"no slice of {about['name']!r} at {about['start']} in chunk {self.chunk.index}")

    def clear_state(self) -> None:
        """Forgets the optimizer's state."""
        if self._optimizer is not None:
            self._optimizer.state.clear()


def sum_of_squares(vector: torch.Tensor) -> float:
    """The sum of squares of a flat vector; infinite or NaN only when an element is."""
    if vector.dtype in (torch.float32, torch.float64):
        result = float(torch.dot(vector, vector))
    else:
        result = float(torch.linalg.vector_norm(vector, dtype=torch.float32)) ** 2
    if math.isfinite(result) or not bool(torch.isfinite(vector).all()):
        return result
    return min(float(torch.linalg.vector_norm(vector, dtype=torch.float64)), 1e154) ** 2  # float32 overflowed


class Server:
    """One server's chunks: a state machine over messages.

    Args:
        index: of the server.
        owners: the server of each chunk, for all chunks of the layout.
        weights: the flat vector; this server's chunks in it are read now and updated in place.
        send: how to send.
        own_pending: called before weights change, so that what is still on its way keeps its value.
    """

    def __init__(
        self,
        index: int,
        layout: ParameterLayout,
        owners: Sequence[int],
        spec: OptimizerSpec,
        weights: torch.Tensor,
        send: Send,
        own_pending: Callable[[], None] = lambda: None,
    ) -> None:
        self.version = 0
        self.generation = 0
        self.refused = 0
        self._index = index
        self._send = send
        self._own_pending = own_pending
        self._layout = layout
        self._chunks = {
            chunk.index: ServerChunk(chunk, layout, spec, layout.chunk_view(weights, chunk.index))
            for chunk in layout.chunks
            if owners[chunk.index] == index
        }
        self._trainable = [chunk for chunk in self._chunks.values() if chunk.chunk.trainable]
        self._groups = len(spec.groups)
        self._base = [dict(hyper) for _, hyper in spec.groups]
        self._changed = False  # whether a schedule has changed hyperparameters
        self._members: frozenset[int] = frozenset()
        self._early: list[tuple[Peer, Message]] = []  # pushes of a generation that is not known here yet
        self._squares = 0.0
        self._reduced = 0
        self._culprits: list[tuple[int, str]] = []
        self._putting: tuple[Peer, int] | None = None  # who puts what follows, and in which request
        self._put: dict[int, torch.Tensor] = {}
        self._put_state: list[tuple[int, dict[str, Any], torch.Tensor]] = []

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Where an arriving payload goes: a push into a staging buffer of its chunk."""
        if message.kind is Kind.STATE:
            return torch.empty(_checked_state_size(message, size), dtype=torch.uint8)
        held = self._chunks.get(message.chunk)
        if message.kind not in (Kind.PUSH, Kind.PUT) or held is None or size != held.chunk.nbytes:
            raise ProtocolError(
                f"{message.kind.name} of {size} bytes for chunk {message.chunk}, server {self._index} expects "
                f"{held.chunk.nbytes if held else 'none of it'}"
            )
        if message.kind is Kind.PUT:
            return torch.empty(size, dtype=torch.uint8)
        if message.generation < self.generation or message.version < self.version:
            return None  # late: received and dropped
        return held.staging_buffer()

    def handle(self, source: Peer, message: Message) -> None:
        """Acts on one message."""
        match message.kind:
            case Kind.PUSH:
                self._stage(source, message)
            case Kind.COMMIT:
                self._commit(message)
            case Kind.MEMBERS:
                self._begin_generation(message)
            case Kind.SNAPSHOT:
                self._snapshot(message)
            case Kind.PUT:
                assert message.payload is not None
                self._begin_put(source, message.sequence)
                self._put[message.chunk] = message.payload
                self._send(source, Message(Kind.END, sequence=message.sequence, chunk=message.chunk))
            case Kind.STATE:
                self._receive_state(source, message)
            case _:
                raise ProtocolError(f"a server does not take {message.kind.name}")

    def lost(self, peer: Peer, reason: str) -> None:
        """The coordinator decides what a loss means."""

    def tick(self, now: float) -> None:
        """A server has no deadlines of its own."""

    # -- stage ---------------------------------------------------------------------------------

    def _stage(self, source: Peer, message: Message) -> None:
        if message.generation > self.generation:
            self._early.append((source, message))  # it overtook the coordinator's word
            return
        held = self._chunks.get(message.chunk)
        if held is None or not held.chunk.trainable:
            raise ProtocolError(f"chunk {message.chunk} takes no gradients on server {self._index}")
        worker = source.index
        late = message.generation < self.generation or message.version < self.version
        if late or message.version > self.version or worker not in self._members or worker in held.staged:
            self.refused += 1  # at most once
            held.release(message.payload)
            if late:
                return
            raise ProtocolError(f"push of chunk {message.chunk} at version {message.version} is out of place")
        absent = frozenset(int(entry) for entry in message.values().get("absent", ()))
        held.staged[worker] = Push(worker, message.payload, message.weight, message.total, absent)
        if held.staged.keys() >= self._members:
            self._reduce(held)

    def _reduce(self, held: ServerChunk) -> None:
        squares = held.reduce()
        if not math.isfinite(squares):
            self._culprits += held.culprits()
        self._squares += squares
        self._reduced += 1
        if self._reduced == len(self._trainable):
            meta: dict[str, Any] = {"squares": self._squares}
            if self._culprits:
                meta = {"culprits": [list(culprit) for culprit in self._culprits]}
            self._send(COORDINATOR, Message(Kind.STAGED, self.generation, version=self.version, meta=meta))

    # -- commit and apply ----------------------------------------------------------------------

    def _commit(self, message: Message) -> None:
        assert message.version == self.version + 1, "the coordinator's commits come in order"
        meta = message.values()
        hyper = meta.get("hyper") or [{} for _ in range(self._groups)]
        if self._changed or any(hyper):  # what a schedule leaves alone returns to the recipe's value
            self._changed = True
            hyper = [{**base, **changed} for base, changed in zip(self._base, hyper, strict=True)]
            hyper = [{k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in hyper]
        self._own_pending()
        self.version = message.version
        self._forget_staged_sums()
        for held in reversed(self._trainable):  # first layers first: the next forward pass wants them first
            held.apply(hyper, message.weight)
            for worker, _ in meta["contributions"]:
                self._send_weights(worker_peer(worker), held)

    def _send_weights(self, reader: Peer, held: ServerChunk, sequence: int = 0, *, reload: bool = False) -> None:
        message = Message(Kind.WEIGHTS, self.generation, sequence=sequence, version=self.version)
        message.meta = {"reload": True} if reload else None
        message.chunk = held.chunk.index
        message.payload = held.weights
        self._send(reader, message)

    def _forget_staged_sums(self) -> None:
        self._squares = 0.0
        self._reduced = 0
        self._culprits = []

    # -- membership and state ------------------------------------------------------------------

    def _begin_generation(self, message: Message) -> None:
        meta = message.values()
        self.generation = message.generation
        self.version = message.version
        self._members = frozenset(meta["workers"])
        for held in self._trainable:
            held.discard()
        self._forget_staged_sums()
        if meta.get("install"):
            self._install()
        if meta["reload"]:
            for worker in sorted(self._members):
                for held in self._chunks.values():
                    self._send_weights(worker_peer(worker), held, reload=True)
        early, self._early = self._early, []
        for source, push in early:
            try:
                self._stage(source, push)
            except ProtocolError as error:
                log.warning("refused %s from %s: %s", push.kind.name, source, error)

    def _begin_put(self, source: Peer, sequence: int) -> None:
        """A new request takes the place of one that was never installed."""
        if self._putting != (source, sequence):
            self._putting = (source, sequence)
            self._put.clear()
            self._put_state.clear()

    def _install(self) -> None:
        """Makes what clients put the state; optimizer state only together with weights of a checkpoint."""
        self._own_pending()
        for index, payload in self._put.items():
            self._chunks[index].weights.copy_(payload)
        if self._put_state:
            for held in self._chunks.values():
                held.clear_state()
            for index, about, value in self._put_state:
                if "name" in about:
                    self._chunks[index].load_state(about, value)
        self._put.clear()
        self._put_state.clear()

    def _snapshot(self, message: Message) -> None:
        meta = message.values()
        reader = Peer(str(meta["reader"][0]), int(meta["reader"][1]))
        for held in self._chunks.values():
            self._send_weights(reader, held, message.sequence)
        if meta["what"] == "state":
            for held in self._trainable:
                for about, value in held.state():
                    self._send(reader, state_message(message.sequence, held.chunk.index, about, value.clone()))
        self._send(reader, Message(Kind.END, self.generation, sequence=message.sequence, version=self.version))

    def _receive_state(self, source: Peer, message: Message) -> None:
        about = dict(message.values())
        value = torch.empty(0) if "name" not in about else state_tensor(about, message.payload)
        if message.chunk >= 0 and message.chunk not in self._chunks:
            raise ProtocolError(f"optimizer state for chunk {message.chunk}, which server {self._index} does not hold")
        self._begin_put(source, message.sequence)
        self._put_state.append((message.chunk, about, value))
        self._send(source, Message(Kind.END, sequence=message.sequence, chunk=message.chunk))


def state_message(sequence: int, chunk: int, about: dict[str, Any], value: torch.Tensor) -> Message:
    """One record of optimizer state as a message."""
    meta = {**about, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    payload = value.contiguous().view(-1).view(torch.uint8) if value.numel() else None
    return Message(Kind.STATE, sequence=sequence, chunk=chunk, meta=meta, payload=payload)


def state_tensor(about: dict[str, Any], payload: torch.Tensor | None) -> torch.Tensor:
    """The tensor of a STATE message."""
    dtype = getattr(torch, str(about["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"optimizer state of unknown dtype {about['dtype']!r}")
    if payload is None:
        return torch.empty(about["shape"], dtype=dtype)
    return payload.view(dtype).view(tuple(about["shape"]))


def _checked_state_size(message: Message, size: int) -> int:
    about = message.values()
    dtype = getattr(torch, str(about.get("dtype")), None)
    shape = about.get("shape")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, list):
        raise ProtocolError("optimizer state without dtype or shape")
    if math.prod(int(n) for n in shape) * dtype.itemsize != size:
        raise ProtocolError(f"optimizer state of shape {shape} and dtype {dtype} in {size} bytes")
    return size
