"""Values as a few bytes: tensors, to compare them to the bit and to rounding, and a user's variables."""

from __future__ import annotations

import hashlib
import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

#: Values of a tensor that are kept, evenly spread.
SAMPLE = 256
_MOST = 2000  # entries of a container, and variables of an object, that are looked at
_DEPTH = 4
_LARGE = 1_000_000  # values, of which a variable's digest is made of some


@dataclass(frozen=True)
class TensorSummary:
    """A tensor: its bits as a digest, and some of its values.

    Attributes:
        digest: of all its bytes, its shape and dtype.
        values: at most `SAMPLE`, evenly spread, as float64.
        eps: the unit of rounding of its dtype; 0 for integers.
    """

    digest: str
    values: np.ndarray[Any, np.dtype[np.float64]]
    eps: float


def summary_of(tensor: torch.Tensor) -> TensorSummary:
    """Return the summary of a tensor."""
    flat = tensor.detach().cpu().reshape(-1)
    stride = -(-flat.numel() // SAMPLE) or 1
    values = flat[::stride].to(torch.float64).numpy().copy()
    eps = torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0.0
    return TensorSummary(digest_of_tensor(tensor), values, eps)


@dataclass(frozen=True)
class GatheredValue:
    """What one call of `steepest.gather` returned.

    Attributes:
        digest: of it.
        count: of the numbers in it.
        values: at most `SAMPLE` of these, by their size: workers may be joined in another order.
        line: of the call.
    """

    digest: str
    count: int
    values: np.ndarray[Any, np.dtype[np.float64]]
    line: str


def gathered_value(value: Any, digest: str, line: str) -> GatheredValue:
    """Return what a call returned that has this digest."""
    parts = [each.detach().cpu().reshape(-1) for each in _tensors(value, 0)]
    numbers = [each.to(torch.float64) for each in parts if not each.dtype.is_complex]
    row = torch.cat(numbers).sort().values if numbers else torch.zeros(0, dtype=torch.float64)
    stride = -(-row.numel() // SAMPLE) or 1
    return GatheredValue(digest, row.numel(), row[::stride].numpy().copy(), line)


def state_of(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, TensorSummary]:
    """Return what an optimizer keeps of each parameter, by ``exp_avg of 0.weight``; names are those of ids."""
    summaries: dict[str, TensorSummary] = {}
    order = [id(each) for group in optimizer.param_groups for each in group["params"]]
    for at, kept in optimizer.state_dict()["state"].items():
        for key, value in kept.items():
            of = f"{key} of {names.get(order[at], f'parameter {at}')}"
            if isinstance(value, bool | int | float):
                value = torch.tensor(float(value), dtype=torch.float64)
            for number, each in enumerate(_tensors(value, 0)):
                summaries[f"{of}, {number}" if number else of] = summary_of(each)
    return summaries


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def rows_of(batch: Any, samples: int) -> list[int]:
    """Return a number for each sample of a batch, made of what the batch has of it; none where it has no rows.

    What looks like padding at a sample's end counts for nothing: another batch pads it to another length.
    """
    columns = [each for each in _tensors(batch, 0) if each.dim() and each.shape[0] == samples]
    digests = [hashlib.blake2b(digest_size=8) for _ in range(samples if columns else 0)]
    for column in columns:
        for row, digest in zip(column.detach().cpu(), digests, strict=True):
            digest.update(_without_padding(row).tobytes())
    return [int.from_bytes(each.digest(), "little") for each in digests]


def _without_padding(row: torch.Tensor) -> np.ndarray[Any, Any]:
    if row.dtype in (torch.bfloat16,):
        row = row.float()
    values = np.ascontiguousarray(row.numpy())
    if values.ndim != 1 or values.size < 2 or values[-1] not in (0, 1, -1, -100):
        return values
    kept = np.flatnonzero(~np.isin(values, (0, 1, -1, -100)))
    return values[: kept[-1] + 1] if len(kept) else values[:1]


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        yield torch.from_numpy(np.ascontiguousarray(value))
    elif depth < _DEPTH and isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each, depth + 1)
    elif depth < _DEPTH and isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, depth + 1)


def size_of(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor's first dimension; 0 if there is none."""
    for each in _tensors(batch, 0):
        if each.dim():
            return int(each.shape[0])
    return 0


@dataclass(frozen=True)
class Variable:
    """The value of one of a user's variables.

    Attributes:
        digest: of it.
        shown: for people.
        kind: what it is: "number", "generator", "state" of something with `state_dict`, "values", or "scheduler"
            for one that the job has.
        type_name: of its class.
    """

    digest: str
    shown: str
    kind: str
    type_name: str


def of_scheduler(scheduler: Any) -> Variable:
    """Return what a scheduler that the job has counts and keeps."""
    state = {k: v for k, v in scheduler.state_dict().items() if isinstance(v, int | float)}
    kind = type(scheduler).__name__
    best = f"best={state['best']:.6g}" if "best" in state else f"step {state.get('last_epoch')}"
    return Variable(repr(sorted(state.items())), best, "scheduler", kind)


class Variables:
    """Reads the variables of a user's functions.

    Args:
        is_known: whether a value is one that the job keeps by itself, such as the model, and is passed over.
        is_own: whether a class is of the user's program.
    """

    def __init__(self, is_known: Callable[[Any], bool], is_own: Callable[[type], bool]) -> None:
        self._is_known, self._is_own = is_known, is_own

    def read(
        self, named: Mapping[str, Any], prefix: str = "", depth: int = 0
    ) -> dict[str, Variable]:
        """Return the variables that can be compared, by name; those of a user's objects as ``self.count``."""
        variables: dict[str, Variable] = {}
        for name, value in list(named.items())[:_MOST]:
            if not isinstance(name, str) or name.startswith("__") or self._is_known(value):
                continue
            if self._is_object(value):
                if depth < _DEPTH:
                    shared = {k: v for k, v in vars(type(value)).items() if _is_plain(v)}
                    variables |= self.read(shared | vars(value), f"{prefix}{name}.", depth + 1)
                continue
            if (one := self._variable(value)) is not None:
                variables[prefix + name] = one
        return variables

    def _is_object(self, value: Any) -> bool:
        if isinstance(value, type | torch.nn.Module | types.FunctionType):
            return False
        kind = type(value)  # not the value's attributes, which may be made when they are asked for
        has_attributes = getattr(kind, "__dictoffset__", 0) != 0
        return has_attributes and self._is_own(kind) and not hasattr(kind, "state_dict")

    def _variable(self, value: Any) -> Variable | None:
        kind = "values"
        if isinstance(value, torch.Tensor) and not value.dim() and value.requires_grad:
            return None  # a loss
        if isinstance(value, bool | int | float | complex | str | np.generic | itertools.count):
            kind = "number"
        elif isinstance(
            value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState
        ):
            kind = "generator"
        elif hasattr(value, "state_dict") and not isinstance(value, type):
            kind = "state"
        digest = hashlib.blake2b(digest_size=8)
        try:
            known = self._feed(value, digest.update, 0)
        except Exception:  # noqa: BLE001 - of a user's object, whatever it does when it is read
            return None
        if not known:
            return None
        shown = repr(value) if kind == "number" else type(value).__name__
        return Variable(digest.hexdigest(), shown[:60], kind, type(value).__name__)

    def _feed(self, value: Any, feed: Callable[[bytes], object], depth: int) -> bool:
        """Feed a digest with a value; return whether there is anything to compare."""
        if depth > _DEPTH:
            return False
        if value is None or isinstance(
            value, bool | int | float | complex | str | bytes | np.generic | itertools.count
        ):
            feed(f"{type(value).__name__}{value!r}".encode())
            return True
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return False
            flat = value.detach().reshape(-1)
            feed(f"{tuple(value.shape)}".encode())
            feed(digest_of_tensor(flat[:: 1 + flat.numel() // _LARGE]).encode())
            return True
        if isinstance(value, np.ndarray):
            feed(f"{value.dtype}{value.shape}".encode())
            if not value.dtype.hasobject:
                flat_values = value.reshape(-1)
                feed(np.ascontiguousarray(flat_values[:: 1 + flat_values.size // _LARGE]).tobytes())
            return not value.dtype.hasobject
        if (state := _generator_state(value)) is not None:
            return self._feed(state, feed, depth + 1)
        if isinstance(value, Mapping):
            return self._feed_all(
                (part for each in list(value.items())[:_MOST] for part in each), feed, depth
            )
        if isinstance(value, list | tuple | deque):
            return self._feed_all(list(value)[-_MOST:], feed, depth)
        if isinstance(value, set | frozenset):
            return self._feed_all(sorted(map(repr, value)), feed, depth)
        return self._feed_object(value, feed, depth)

    def _feed_object(self, value: Any, feed: Callable[[bytes], object], depth: int) -> bool:
        if isinstance(value, type | types.ModuleType | types.FunctionType) or self._is_known(value):
            return False
        if callable(getattr(value, "state_dict", None)):
            return self._feed(value.state_dict(), feed, depth + 1)
        if self._is_own(type(value)) and hasattr(value, "__dict__"):
            return self._feed(vars(value), feed, depth + 1)
        return False

    def _feed_all(self, values: Iterable[Any], feed: Callable[[bytes], object], depth: int) -> bool:
        several = list(values)
        feed(str(len(several)).encode())
        known = [self._feed(each, feed, depth + 1) for each in several]
        return all(known) or any(known)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list | dict | set | deque | itertools.count)


def _generator_state(value: Any) -> Any:
    """Return the state of a random generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return None
