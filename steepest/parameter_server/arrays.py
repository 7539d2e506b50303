"""Arrays by name as chunks: what users of a parameter server hold, and how it lies on the servers."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from steepest.errors import ConfigurationError
from steepest.optim.spec import OptimizerSpec
from steepest.tensors.allocator import Recycler
from steepest.tensors.layout import Chunk, ParameterLayout

#: A NumPy array, a torch tensor (on the CPU), or a dict of them by name.
ArrayTree = Any
#: Builds a torch optimizer over the parameters, given in the order of their names.
OptimizerFactory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]

_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip
_FROM_NUMPY = {torch.empty(0, dtype=dtype).numpy().dtype: dtype for dtype in _DTYPES if dtype != torch.bfloat16}
_ONLY = ""  # the name of an array that was given by itself


@dataclass(frozen=True)
class Wanted:
    """Elements [start, stop) of one array, and the memory (flat, uint8) that they go to."""

    start: int
    stop: int
    memory: torch.Tensor


@dataclass(frozen=True)
class Arrays:
    """The arrays of one parameter server: names, shapes, dtypes, chunks; no values.

    Attributes:
        layout: chunks.
        spec: the optimizer; None when updates are added.
        numpy: names of those that are NumPy arrays; the others are torch tensors.
    """

    layout: ParameterLayout
    spec: OptimizerSpec | None
    numpy: frozenset[str]

    @classmethod
    def plan(cls, initial: ArrayTree, optimizer: OptimizerFactory | None, chunk_bytes: int | None) -> Arrays:
        """Lays arrays out.

        Raises:
            ConfigurationError: not arrays, or of a dtype that cannot be added; an optimizer that does not fit.
        """
        named = _named(initial, "initial")
        for name, value in named.items():
            dtype = _tensor_dtype(value, name)
            if optimizer is not None and not dtype.is_floating_point:
                raise ConfigurationError(f"{_called(name)} is {dtype}: only floating-point arrays take an optimizer")
        if not sum(int(np.prod(value.shape)) for value in named.values()):
            raise ConfigurationError("initial holds no elements: give arrays with at least one")
        spec = None
        if optimizer is not None:
            if not callable(optimizer):
                raise ConfigurationError(
                    f"optimizer= is a {type(optimizer).__name__}: give a function that builds a torch optimizer over "
                    "a list of parameters"
                )
            parameters = {
                name: torch.nn.Parameter(torch.zeros(tuple(v.shape), dtype=_tensor_dtype(v, name)))
                for name, v in named.items()
            }
            spec = OptimizerSpec.read(optimizer(list(parameters.values())), {id(p): n for n, p in parameters.items()})
            missing = parameters.keys() - spec.trainable()
            if missing:
                raise ConfigurationError(f"the optimizer leaves out {_called(min(missing))}: build it over all of them")
        layout = ParameterLayout.plan(
            [(name, tuple(v.shape), _tensor_dtype(v, name), True) for name, v in named.items()],
            split_tensors=spec is None or spec.elementwise,
            chunk_bytes=chunk_bytes,
            integers=True,
        )
        return cls(layout, spec, frozenset(n for n, v in named.items() if isinstance(v, np.ndarray)))

    @property
    def single(self) -> bool:
        """Whether one array was given by itself, not in a dict."""
        return _ONLY in self.layout.index

    def bytes_of(self, value: ArrayTree, what: str) -> dict[str, torch.Tensor]:
        """Memory of arrays by name (flat, uint8), not copied where it is contiguous; some names may be left out.

        Raises:
            ConfigurationError: an unknown name, another shape or dtype.
        """
        named = _named(value, what)
        if (_ONLY in named) != self.single:
            raise ConfigurationError(
                f"{what} is {'one array' if _ONLY in named else 'a dict'}, initial was "
                f"{'one array' if self.single else 'a dict: give a dict with some or all of its names'}"
            )
        found = {}
        for name, array in named.items():
            if name not in self.layout.index:
                known = ", ".join(repr(entry.name) for entry in reversed(self.layout.entries[-8:]))
                raise ConfigurationError(f"{what} has {name!r}, which this server does not: it has {known}")
            entry = self.layout.entries[self.layout.index[name]]
            if tuple(array.shape) != entry.shape:
                raise ConfigurationError(f"{what}: {_called(name)} has shape {tuple(array.shape)}, not {entry.shape}")
            dtype = _tensor_dtype(array, name)
            if dtype != entry.dtype:
                raise ConfigurationError(
                    f"{what}: {_called(name)} is {dtype}, not {entry.dtype}: convert it, so that no precision is "
                    "lost or gained unseen"
                )
            found[name] = _flat_bytes(array)
        return found

    def payload(self, chunk: Chunk, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor | None, list[int]]:
        """One chunk of some arrays, and the entries in it that are left out; None when all are.

        A chunk that lies in one array is a view of it; others are gathered.
        """
        names = [self.layout.entries[piece.entry].name for piece in chunk.slices]
        absent = [piece.entry for piece, name in zip(chunk.slices, names, strict=True) if name not in given]
        if len(absent) == len(names):
            return None, absent
        size = chunk.dtype.itemsize
        if len(names) == 1:
            piece = chunk.slices[0]
            return given[names[0]][piece.start * size : piece.stop * size], []
        gathered = torch.zeros(chunk.nbytes, dtype=torch.uint8)
        at = 0
        for piece, name in zip(chunk.slices, names, strict=True):
            end = at + (piece.stop - piece.start) * size
            if name in given:
                gathered[at:end] = given[name][piece.start * size : piece.stop * size]
            at = end
        return gathered, absent

    def request(
        self,
        names: Sequence[str] | None,
        span: tuple[int, int] | None,
        out: ArrayTree | None,
        recycler: Recycler | None = None,
    ) -> tuple[dict[str, Wanted], ArrayTree]:
        """Memory for what is to be pulled, and the same as the user will see it.

        Args:
            names: which arrays; None for all.
            span: elements [begin, end) of the one array that is meant, as if it were flat; None for all.
            out: arrays to write to; None for new ones.
            recycler: where memory for new ones comes from.

        Raises:
            ConfigurationError: an unknown name, a span out of range, an `out` that does not fit.
        """
        wanted = [entry.name for entry in reversed(self.layout.entries)] if names is None else list(names)
        for name in wanted:
            if name not in self.layout.index:
                raise ConfigurationError(f"there is no array named {name!r} on this server")
        if span is not None:
            if len(wanted) != 1 or out is not None:
                raise ConfigurationError("a range needs the name of one array, and no out=")
            entry = self.layout.entries[self.layout.index[wanted[0]]]
            begin, end = _whole(span)
            if not 0 <= begin < end <= entry.numel:
                raise ConfigurationError(f"range {span}: {_called(wanted[0])} has elements 0 to {entry.numel}")
            piece = torch.empty(end - begin, dtype=entry.dtype)
            return {wanted[0]: Wanted(begin, end, _flat_bytes(piece))}, self._as_given(wanted[0], piece)
        if out is not None:
            memory = self.bytes_of(out, "out")
            if (names is not None and memory.keys() != set(wanted)) or (names is None and len(memory) != len(wanted)):
                raise ConfigurationError("out= must hold just the arrays that are pulled")
            for name, array in _named(out, "out").items():
                if (memory[name].numel() and memory[name].data_ptr() != _address(array)) or not _writable(array):
                    raise ConfigurationError(f"out: {_called(name)} must be contiguous and writable")
            pulled = out
        else:
            entries = {name: self.layout.entries[self.layout.index[name]] for name in wanted}
            empty = (recycler or Recycler()).empty
            fresh = {n: empty(entry.nbytes).view(entry.dtype).view(entry.shape) for n, entry in entries.items()}
            memory = {name: _flat_bytes(tensor) for name, tensor in fresh.items()}
            pulled = {name: self._as_given(name, tensor) for name, tensor in fresh.items()}
            pulled = pulled[_ONLY] if self.single else pulled
        sizes = {name: self.layout.entries[self.layout.index[name]].numel for name in wanted}
        return {name: Wanted(0, sizes[name], memory[name]) for name in wanted}, pulled

    def chunks_for(self, wanted: Mapping[str, Wanted]) -> set[int]:
        """The chunks that hold something of it."""
        return {
            chunk.index
            for chunk in self.layout.chunks
            for piece in chunk.slices
            if (want := wanted.get(self.layout.entries[piece.entry].name)) is not None
            and piece.start < want.stop
            and want.start < piece.stop
        }

    def target(self, chunk: Chunk, wanted: Mapping[str, Wanted]) -> torch.Tensor | None:
        """Where a chunk can be received as it is; None when only parts of it are wanted."""
        piece = chunk.slices[0]
        want = wanted.get(self.layout.entries[piece.entry].name)
        if len(chunk.slices) > 1 or want is None or piece.start < want.start or piece.stop > want.stop:
            return None
        size = chunk.dtype.itemsize
        return want.memory[(piece.start - want.start) * size : (piece.stop - want.start) * size]

    def scatter(self, chunk: Chunk, payload: torch.Tensor, wanted: Mapping[str, Wanted]) -> None:
        """Copies what is wanted of a chunk that was received elsewhere."""
        size, at = chunk.dtype.itemsize, 0
        for piece in chunk.slices:
            want = wanted.get(self.layout.entries[piece.entry].name)
            if want is not None:
                begin, end = max(piece.start, want.start), min(piece.stop, want.stop)
                if begin < end:
                    source = payload[(at + begin - piece.start) * size : (at + end - piece.start) * size]
                    want.memory[(begin - want.start) * size : (end - want.start) * size] = source
            at += piece.stop - piece.start

    def _as_given(self, name: str, tensor: torch.Tensor) -> Any:
        return tensor.numpy() if name in self.numpy else tensor


def _whole(span: tuple[int, int]) -> tuple[int, int]:
    try:
        begin, end = span
        return operator.index(begin), operator.index(end)
    except (TypeError, ValueError):
        raise ConfigurationError(f"range {span!r}: give (begin, end), two integers") from None


def _named(value: ArrayTree, what: str) -> dict[str, Any]:
    named = dict(value) if isinstance(value, Mapping) else {_ONLY: value}
    for name, array in named.items():
        if not isinstance(name, str) or (isinstance(value, Mapping) and not name):
            raise ConfigurationError(f"{what} has a key {name!r}: give names as text")
        if not isinstance(array, (np.ndarray, torch.Tensor)):
            raise ConfigurationError(
                f"{what}{f'[{name!r}]' if name else ''} is a {type(array).__name__}: give NumPy arrays or torch "
                "tensors, one or a dict of them"
            )
    return named


def _called(name: str) -> str:
    return repr(name) if name else "the array"


def _tensor_dtype(array: Any, name: str) -> torch.dtype:
    dtype = array.dtype if isinstance(array, torch.Tensor) else _FROM_NUMPY.get(array.dtype)
    if dtype not in _DTYPES:
        raise ConfigurationError(
            f"{_called(name)} has dtype {array.dtype}: give a floating-point or integer type "
            f"({', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}) of this machine's byte order"
        )
    assert isinstance(dtype, torch.dtype)
    if isinstance(array, torch.Tensor) and array.device.type != "cpu":
        raise ConfigurationError(f"{_called(name)} lies on {array.device}: give CPU tensors")
    if isinstance(array, torch.Tensor) and array.layout != torch.strided:
        raise ConfigurationError(f"{_called(name)} is {array.layout}: give dense tensors")
    return dtype


def _flat_bytes(array: Any) -> torch.Tensor:
    """The memory of an array as flat uint8, without a copy if it is contiguous."""
    if isinstance(array, torch.Tensor):
        # not view(-1), which keeps the strides of no elements and of one
        return array.detach().contiguous().as_strided((array.numel(),), (1,)).view(torch.uint8)
    array = np.ascontiguousarray(array)
    if array.flags.writeable:
        return torch.from_numpy(array.reshape(-1).view(np.uint8))
    # Ray's arrays are read-only, which torch does not know; this one is only sent. The view keeps it alive.
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    memory._owner = array
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


def _address(array: Any) -> int:
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data


def _writable(array: Any) -> bool:
    return isinstance(array, torch.Tensor) or array.flags.writeable
