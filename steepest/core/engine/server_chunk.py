"""One chunk on its server: its weights, optimizer, staged pushes and their mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from steepest.core.engine.chunk_store import ChunkStore, StagedPush
from steepest.core.engine.generators import about_to_change
from steepest.core.messages.message import PushId
from steepest.core.optim.own_values import OwnValues, is_own, may_be_own
from steepest.core.optim.portable import Packed, check_packed, pack_all, unpack
from steepest.core.optim.rules import WithRules
from steepest.core.optim.spec import Hyperparameters, OptimizerSpec
from steepest.core.optim.torch_without_compiler import take_step
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.half_precision import sum_dtype
from steepest.core.tensors.layout import Chunk, ParameterLayout
from steepest.core.tensors.memory import sum_of_squares
from steepest.errors import ConfigurationError, ProtocolError

#: The key, in a parameter's state, of the weights that workers have been sent.
SENT = "@sent"
#: State of torch's optimizers that has as many elements as its parameter.
_READ_BY_FUSED_KERNELS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "sum")


class ServerChunk(ChunkStore):
    """One chunk on its server: weights, optimizer, staged pushes and their weighted mean.

    Args:
        chunk: of the layout.
        layout: of the model.
        spec: the optimizer; None to add pushes to the weights.
        weights: the chunk's bytes; updated in place, or in memory that `apply` is given.
        keeps_mean: whether payloads may change as soon as their mean is formed, instead of after it is
            applied.
    """

    def __init__(
        self,
        chunk: Chunk,
        layout: ParameterLayout,
        spec: OptimizerSpec | None,
        weights: torch.Tensor,
        keeps_mean: bool = False,
    ) -> None:
        super().__init__(chunk, weights)
        # flat, of the chunk's dtype; None before `reduce`, and if no push has a weight
        self.mean: torch.Tensor | None = None
        # entries of which no push in the mean has a gradient
        self.absent: frozenset[int] = frozenset()
        self._layout = layout
        self._spec = spec
        self._sum: torch.Tensor | None = None  # memory for a mean of several
        wide = sum_dtype(chunk.dtype)
        # the dtype in which gradients are added up, if it is not the chunk's
        self._wide_dtype = None if wide is chunk.dtype else wide
        self._codec_raised: Exception | None = (
            None  # in `reduce`; raised when the update is applied
        )
        self._sum_views: list[torch.Tensor] = []  # the slices in it
        self._names = [layout.entries[piece.entry].name for piece in chunk.slices]
        self._parameters = [
            torch.nn.Parameter(view, requires_grad=chunk.dtype.is_floating_point)
            for view in layout.slice_views(chunk, weights)
        ]
        self._optimizer: torch.optim.Optimizer | None = None
        self._groups: list[int] = []
        # the weights that workers of other hosts have, if these are sent changes in the form of a codec
        self._sent: torch.Tensor | None = None
        self._pull_codec: Codec | None = None
        if chunk.trainable and spec is not None:
            slices = list(zip(self._names, self._parameters, strict=True))
            self._optimizer, self._groups = spec.build(slices)
        self._is_torchs = type(self._optimizer).__module__.startswith("torch.optim")
        self._lends_mean = not keeps_mean and self._leaves_gradients()
        self._own = self._keeps_values(spec)
        self._counts = spec is not None and self._own is not None and bool(spec.own)
        # records of state by slice, of which `end_state` makes state
        self._loading: dict[torch.nn.Parameter, Packed] = {}

    def _leaves_gradients(self) -> bool:
        """Return whether a step leaves gradients, which lie in other processes' memory, unchanged.

        Torch's optimizers do, except for SGD's step on many tensors at once with Nesterov momentum.
        """
        if self._optimizer is None or getattr(self._optimizer, "keeps_gradients", False):
            return True
        at_once = any(group.get("foreach") for group in self._optimizer.param_groups)
        return self._is_torchs and not at_once

    def _keeps_values(self, spec: OptimizerSpec | None) -> OwnValues | None:
        """Return the values that a user's optimizer keeps beside its state; None for optimizers that keep none."""
        known = self._is_torchs or getattr(self._optimizer, "keeps_gradients", False)
        if self._optimizer is None or spec is None or known:
            return None
        return OwnValues(self._optimizer, [spec.groups[at][1] for at in self._groups])

    def fits(self, size: int, codec: Codec | None) -> bool:
        """Return whether a gradient may have `size` bytes, see `GradientStore.fits`."""
        packed = codec.size(self._layout, self.chunk) if codec is not None else None
        return size == self.chunk.nbytes or size == packed

    def codec_of(self, payload: torch.Tensor | None, codec: Codec | None) -> Codec | None:
        """Return the codec of a gradient's payload, see `GradientStore.codec_of`."""
        if payload is None or codec is None:
            return None
        if payload.numel() != codec.size(self._layout, self.chunk):
            return None
        codec.check(self._layout, self.chunk, payload)
        return codec

    def drop_mean(self) -> None:
        """Forget the mean that `reduce` formed."""
        self.mean = None

    @property
    def _accumulator(self) -> torch.Tensor:
        if self._sum is None:
            memory = torch.empty_like(self.weights)
            self._sum = memory.view(self.chunk.dtype)
            self._sum_views = self._layout.slice_views(self.chunk, memory)
        return self._sum

    def check(self, push: PushId) -> float:
        """Return the sum of the squares of one staged gradient, see `GradientStore.check`."""
        staged = self.staged[push]
        if staged.payload is None or not self.chunk.dtype.is_floating_point:
            return 0.0
        try:
            values = self._values(staged)
        except Exception:  # noqa: BLE001 - a user's codec, which raises again in `reduce`
            return 0.0
        factor = staged.unit / staged.total if staged.total else 1.0
        return sum_of_squares(values) * (factor * factor)  # `**` raises on overflow

    def _values(self, push: StagedPush) -> torch.Tensor:
        """Return a payload's elements: half precision as it is, other formats unpacked."""
        assert push.payload is not None
        if push.codec is None:
            return push.payload.view(self.chunk.dtype)
        if push.codec.elements is not None:
            return push.payload.view(push.codec.elements)
        return self._unpacked(
            [push], push.unit, torch.empty_like(self.weights).view(self.chunk.dtype)
        )

    def _unpacked(
        self, pushes: Sequence[StagedPush], total: float, out: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of packed payloads, each times ``unit / total``, written to `out`."""
        out.zero_()
        for codec in dict.fromkeys(push.codec for push in pushes):
            assert codec is not None
            same = [
                (p.payload, p.unit / total)
                for p in pushes
                if p.payload is not None and p.codec is codec
            ]
            codec.add(self._layout, self.chunk, same, out)
        return out

    def reduce(self, chosen: Iterable[PushId]) -> None:
        """Form the weighted mean of staged pushes, added up in the given order, as `mean`.

        The mean may be a payload itself, which then must not change before `apply` (see
        `keeps_mean`). It is None if no push has a gradient with a weight.
        """
        pushes = [self.staged[push] for push in chosen]
        total = math.fsum(push.total for push in pushes)
        pushes = [push for push in pushes if push.payload is not None and push.unit != 0.0]
        if not pushes or total == 0.0:
            self.mean = None
            return
        self.absent = frozenset.intersection(*[push.absent for push in pushes])
        coded = [push for push in pushes if push.codec is not None]
        if packed := [push for push in coded if not _lies_as_elements(push)]:
            try:
                self.mean = self._unpacked(packed, total, self._accumulator)
                for push in pushes:
                    if push not in packed:
                        _add(self.mean, self._values(push), push.unit / total)
                for codec in dict.fromkeys(push.codec for push in packed):
                    assert codec is not None
                    codec.finish(self._layout, self.chunk, self.mean)
            except Exception as error:  # noqa: BLE001 - a user's codec; raised when the update is applied
                self._codec_raised, self.mean = error, self._accumulator.zero_()
            return
        parts = [(self._values(push), push.unit) for push in pushes]
        first, unit = parts[0]
        if len(parts) == 1 and unit == total and self._lends_mean and not coded:
            self.mean = first
            return
        self.mean = self._accumulator
        if self._wide_dtype is None:
            _add_up(parts, total, self.mean)
        else:
            wide = torch.empty_like(self.mean, dtype=self._wide_dtype)
            self.mean.copy_(_add_up(parts, total, wide))

    def squares(self) -> float:
        """Return the sum of the squares of the mean; not finite when an element is not."""
        if self.mean is None or not self.mean.is_floating_point():
            return 0.0
        return sum_of_squares(self.mean)

    def clip(self, factor: float) -> None:
        """Multiply the mean by a factor, in memory of this chunk, because payloads must not change."""
        if self.mean is not None and factor != 1.0:
            self.mean = torch.mul(self.mean, factor, out=self._accumulator)

    def culprits(self, chosen: Iterable[PushId]) -> list[tuple[int, str]]:
        """Return (worker, parameter) of NaN and infinity, see `GradientStore.culprits`."""
        culprits = []
        for push in chosen:
            if self.staged[push].payload is not None:
                payload = self._values(self.staged[push]).to(self.chunk.dtype).view(torch.uint8)
                views = self._layout.slice_views(self.chunk, payload)
                for name, view in zip(self._names, views, strict=True):
                    if not bool(torch.isfinite(view).all()):
                        culprits.append((push.worker, name))
        return culprits or [(-1, self._names[0])]

    def _raise_of_codec(self) -> None:
        """Raise the error of a user's codec in `reduce`, as if it were the optimizer's."""
        if (error := self._codec_raised) is not None:
            self._codec_raised, self.raised = None, error
            raise error

    def apply(
        self, hyper: Sequence[Hyperparameters], rate: float, buffer: torch.Tensor | None = None
    ) -> None:
        """Take one optimizer step with the mean, and drop it, see `GradientStore.apply`."""
        self._raise_of_codec()
        if self.mean is None and not self._counts:
            return
        if self._optimizer is None:
            assert self.mean is not None
            old, new = self.weights, self.weights if buffer is None else buffer
            torch.add(old.view(self.chunk.dtype), self.mean, out=new.view(self.chunk.dtype))
            self.weights = new
            self.mean = None
            return
        if buffer is not None:
            buffer.copy_(self.weights)
            self.move(buffer)
        self.set_hyperparameters(hyper)
        if rate != 1.0:
            own = [group["lr"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * rate
        if self.mean is not None:  # else it counts a step without gradients
            views = self._sum_views
            if self.mean is not self._sum:
                views = self._layout.slice_views(self.chunk, self.mean.view(torch.uint8))
            for piece, parameter, view in zip(
                self.chunk.slices, self._parameters, views, strict=True
            ):
                parameter.grad = None if piece.entry in self.absent else view
        if not self._is_torchs:
            about_to_change()  # it may draw random numbers
        try:
            self._step(self._optimizer)
        except BaseException as error:
            self.raised = error
            raise
        finally:
            for parameter in self._parameters:
                parameter.grad = None
            if rate != 1.0:
                for group, lr in zip(self._optimizer.param_groups, own, strict=True):
                    group["lr"] = lr
            self.mean = None

    def follow(self, codec: Codec) -> None:
        """Send workers changes of the weights in the form of a codec, and keep the weights that they have."""
        if self.chunk.trainable and codec.size(self._layout, self.chunk) is not None:
            self._pull_codec, self._sent = codec, self.weights.clone()

    @property
    def sent(self) -> torch.Tensor | None:
        """The weights that workers of other hosts have, as bytes; None if they have the same."""
        return self._sent

    def change_to_send(self) -> torch.Tensor | None:
        """Return the change that workers of other hosts are sent, once for each version; None for the weights.

        They add it to the weights that they have; the codec's error is part of the next change.
        """
        if self._sent is None or self._pull_codec is None:
            return None
        sent = self._sent.view(torch.float32)
        change = self.weights.view(torch.float32) - sent
        if not math.isfinite(sum_of_squares(change)):
            self._sent.copy_(self.weights)
            return self._sent.clone()
        size = self._pull_codec.size(self._layout, self.chunk)
        assert size is not None
        packed = torch.empty(size, dtype=torch.uint8)
        self._pull_codec.pack(self._layout, self.chunk, change, packed, {})
        self._pull_codec.add(self._layout, self.chunk, [(packed, 1.0)], sent)
        return packed

    def weights_set(self) -> None:
        """Note that other weights were installed, which all workers will be sent."""
        if self._sent is not None:
            self._sent.copy_(self.weights)

    def move(self, buffer: torch.Tensor) -> None:
        """Have the weights lie in other memory, which holds their values already."""
        self.weights = buffer
        for parameter, view in zip(
            self._parameters, self._layout.slice_views(self.chunk, buffer), strict=True
        ):
            parameter.data = view

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step; unfused if only some parameters have momentum, which torch's fused SGD cannot begin for a part."""
        fused: list[dict[str, Any]] = []
        torchs = optimizer.parts[0] if isinstance(optimizer, WithRules) else optimizer
        if torchs.state and isinstance(torchs, torch.optim.SGD):
            own = [parameter for group in torchs.param_groups for parameter in group["params"]]
            begun = {bool(torchs.state.get(p)) for p in own if p.grad is not None}
            if len(begun) > 1:
                fused = [group for group in torchs.param_groups if group.get("fused")]
        for group in fused:
            group["fused"] = False
        try:
            take_step(optimizer)
        finally:
            for group in fused:
                group["fused"] = True

    def set_hyperparameters(self, hyper: Sequence[Hyperparameters]) -> None:
        """Set some hyperparameters of the optimizer, by group of the recipe; others stay as they are."""
        if self._optimizer is None:
            return
        for at, group in enumerate(self._optimizer.param_groups):
            if self._groups[at] < 0:
                continue
            for key, value in hyper[self._groups[at]].items():
                plain = tuple(value) if isinstance(value, list) else value
                if self._own is None:
                    group[key] = plain
                else:
                    self._own.give(at, key, plain)

    def state(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Return the optimizer's state: (description, tensor of the CPU) of each slice and key.

        The description has "name" (of the parameter), "key", "start", "stop" (of the slice) and
        "plain" (whether the tensor stands for a plain value), see `steepest.core.optim.portable.pack`.
        Values that the optimizer keeps in a parameter group, or in itself, are returned for each slice
        of the group.

        Raises:
            ConfigurationError: the optimizer keeps something that cannot be carried.
        """
        records: list[tuple[dict[str, Any], torch.Tensor]] = []
        if self._optimizer is None:
            return records
        groups = self._group_of_slices()
        changed = (
            {} if self._own is None else {at: self._own.changed(at) for at in {*groups} - {-1}}
        )
        for piece, name, parameter, group in zip(
            self.chunk.slices, self._names, self._parameters, groups, strict=True
        ):
            own = changed.get(group, {})
            try:
                packed = pack_all({**self._optimizer.state.get(parameter, {}), **own})
            except TypeError as error:
                raise ConfigurationError(
                    f"{type(self._optimizer).__name__} keeps {error} of {name}, of which it had "
                    "nothing in its first steps: it would be lost in checkpoints and where servers "
                    "change"
                ) from error
            for key, (value, plain) in sorted(packed.items()):
                description = {"name": name, "key": key, "start": piece.start, "stop": piece.stop}
                records.append(({**description, "plain": plain}, value.cpu()))
        if self._sent is not None:
            for piece, name, view in zip(
                self.chunk.slices, self._names, self._sent_views, strict=True
            ):
                description = {"name": name, "key": SENT, "start": piece.start, "stop": piece.stop}
                records.append(({**description, "plain": False}, view.clone()))
        return records

    @property
    def _sent_views(self) -> list[torch.Tensor]:
        """By slice, the weights that workers of other hosts have; empty if they have the same."""
        return [] if self._sent is None else self._layout.slice_views(self.chunk, self._sent)

    def _group_of_slices(self) -> list[int]:
        """Return the index of the optimizer's group that has each slice; -1 for none."""
        assert self._optimizer is not None
        groups = enumerate(self._optimizer.param_groups)
        of = {id(parameter): at for at, group in groups for parameter in group["params"]}
        return [of.get(id(parameter), -1) for parameter in self._parameters]

    def load_state(self, description: dict[str, Any], value: torch.Tensor) -> None:
        """Keep one record of the optimizer's state, see `state`; it takes effect with `end_state`.

        Args:
            value: its tensor, which becomes the optimizer's without a copy.

        Raises:
            ProtocolError: the record is none of this chunk.
        """
        parameter = self.check_state(description, value)
        if description["key"] == SENT:
            for own, view in zip(self._parameters, self._sent_views, strict=bool(self._sent_views)):
                if own is parameter:
                    view.copy_(value.view(view.shape))
            return
        self._loading.setdefault(parameter, {})[description["key"]] = value, description["plain"]

    def end_state(self) -> None:
        """Set the state of which all records have been loaded; see `HeldChunk.end_state`."""
        loading, self._loading = self._loading, {}
        if not loading or self._optimizer is None:
            return
        for parameter, group in zip(self._parameters, self._group_of_slices(), strict=True):
            try:
                values = unpack(self._where_kept(loading.get(parameter, {}), parameter, group))
            except ValueError as error:
                raise ProtocolError(
                    f"optimizer state of chunk {self.chunk.index} that makes no sense: {error}"
                ) from error
            own = {key: value for key, value in values.items() if is_own(key)}
            if own and self._own is not None and group >= 0:
                self._own.load(group, own)
            if len(own) < len(values):
                state = {key: value for key, value in values.items() if key not in own}
                self._optimizer.state[parameter] = state

    def _where_kept(self, loaded: Packed, parameter: torch.nn.Parameter, group: int) -> Packed:
        """Return a slice's loaded state on its weights' device, except step counts that torch keeps on the CPU."""
        if parameter.is_cpu or self._optimizer is None:
            return loaded
        own = self._optimizer.param_groups[group] if group >= 0 else {}
        counts_there = own.get("fused") or own.get("capturable")
        return {
            key: (
                value
                if plain or (key == "step" and not counts_there)
                else value.to(parameter.device),
                plain,
            )
            for key, (value, plain) in loaded.items()
        }

    def check_state(self, description: dict[str, Any], value: torch.Tensor) -> torch.nn.Parameter:
        """Return the slice that a record of `state` belongs to; ProtocolError: this chunk has no such slice."""
        missing = [name for name in ("key", "start", "plain") if name not in description]
        key = str(description.get("key", ""))
        unknown = is_own(key) and (self._own is None or not may_be_own(key))
        try:
            if missing or unknown or self._optimizer is None:
                raise ValueError("it has none such")
            if description["plain"]:
                check_packed(value)
        except ValueError as error:
            raise ProtocolError(
                f"optimizer state {description!r:.200} makes no sense for chunk {self.chunk.index}: {error}"
            ) from error
        for piece, name, parameter in zip(
            self.chunk.slices, self._names, self._parameters, strict=True
        ):
            if name == description["name"] and piece.start == description["start"]:
                if key == SENT and (value.numel(), value.dtype) != (
                    parameter.numel(),
                    parameter.dtype,
                ):
                    break
                if not description["plain"] and key in _READ_BY_FUSED_KERNELS:
                    self._check_form(key, value, parameter, self._optimizer)
                return parameter
        raise ProtocolError(
            f"no slice of {description['name']!r} at {description['start']} in chunk {self.chunk.index}"
        )

    @staticmethod
    def _check_form(
        key: str, value: torch.Tensor, parameter: torch.Tensor, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check that state has its parameter's size and dtype, as fused kernels do not; ProtocolError otherwise."""
        fused = any(group.get("fused") for group in optimizer.param_groups)
        if fused and (value.numel(), value.dtype) != (parameter.numel(), parameter.dtype):
            raise ProtocolError(
                f"optimizer state {key} of {value.numel()} elements and {value.dtype} for a slice "
                f"of {parameter.numel()} and {parameter.dtype}"
            )

    def try_state(self, records: Sequence[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Step a copy of the chunk from some of its records; ProtocolError: that cannot be done."""
        if self._optimizer is None:
            return
        twin = ServerChunk(self.chunk, self._layout, self._spec, self.weights.clone())
        try:
            for description, value in records:
                twin.load_state(description, value.clone())
            twin.end_state()
            twin.mean = torch.zeros_like(twin.weights).view(self.chunk.dtype)
            twin.apply([{} for _ in self._spec.groups] if self._spec is not None else [], 1.0)
        except Exception as error:
            raise ProtocolError(
                f"optimizer state with which no step can be taken: {error}"
            ) from error

    def clear_state(self) -> None:
        """Drop the optimizer's state: the next step is taken as the first one, and workers have the weights."""
        self.weights_set()
        if self._optimizer is not None:
            self._optimizer.state.clear()
            self._loading.clear()
            if self._own is not None:
                self._own.clear()


def _lies_as_elements(push: StagedPush) -> bool:
    """Return whether a payload is a chunk's elements, in its own dtype or a narrower one."""
    return push.codec is None or push.codec.elements is not None


def _add_up(
    parts: Sequence[tuple[torch.Tensor, float]], total: float, out: torch.Tensor
) -> torch.Tensor:
    """Return the sum of gradients, each times its unit, divided by their summed weight `total`, written to `out`."""
    (first, unit), *rest = parts
    if any(other != unit for _, other in rest):
        out.copy_(first).mul_(unit / total)
        for gradient, other in rest:
            _add(out, gradient, other / total)
        return out
    if rest and first.dtype is out.dtype:
        torch.add(first, rest.pop(0)[0], out=out)
    else:
        out.copy_(first)
    for gradient, _ in rest:
        _add(out, gradient)
    # Divided by a count, so that the mean of equal values is that value.
    return out.div_(total / unit) if unit != total else out


def _add(total: torch.Tensor, gradient: torch.Tensor, factor: float = 1.0) -> None:
    """Add a gradient times a factor to a sum; half precision is widened as it is added."""
    total.add_(gradient, alpha=factor) if factor != 1.0 else total.add_(gradient)
