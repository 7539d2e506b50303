"""The arrays of a parameter server by name, and as the chunks that servers hold."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from steepest.core.tensors.allocator import Recycler, empty_bytes
from steepest.core.tensors.layout import Chunk, ElementType, ParameterLayout
from steepest.core.tensors.memory import Bytes, address_of, as_array, as_tensor, is_tensor
from steepest.errors import ConfigurationError

if TYPE_CHECKING:
    from steepest.core.optim.spec import OptimizerSpec

#: A NumPy array, a torch tensor (on the CPU), or a dict of them by name.
ArrayTree = Any

_ELEMENTS = {
    name: ElementType(name, itemsize, "float" in name)
    for name, itemsize in (
        ("float64", 8), ("float32", 4), ("float16", 2), ("bfloat16", 2),
        ("int64", 8), ("int32", 4), ("int16", 2), ("int8", 1), ("uint8", 1),
    )
}  # fmt: skip
_OF_NUMPY = {np.dtype(name): element for name, element in _ELEMENTS.items() if name != "bfloat16"}
_ONLY = ""  # the name of an array that was given by itself


@dataclass(frozen=True)
class WantedPart:
    """Elements [start, stop) of a flattened array, and the memory (flat, uint8) for them."""

    start: int
    stop: int
    memory: Bytes


@dataclass(frozen=True)
class Arrays:
    """Names, shapes, dtypes and chunks of one parameter server's arrays, without their values."""

    layout: ParameterLayout  # the arrays as parameters, cut into chunks
    rule: str  # "add", or the optimizer's name and those of its switches that change its state
    # names of the arrays that users see as NumPy arrays; the others are torch tensors
    numpy: frozenset[str]

    @classmethod
    def plan(
        cls, initial: ArrayTree, spec: OptimizerSpec | None, chunk_bytes: int | None
    ) -> Arrays:
        """Return the arrays of a new parameter server, cut into chunks.

        Args:
            initial: the arrays.
            spec: the optimizer of the servers, over parameters of the arrays' names; None where
                updates are added.
            chunk_bytes: size of a chunk; None for the layout's own choice.

        Raises:
            ConfigurationError: something in `initial` is no array, or of a dtype that cannot be
                added; or there is no element at all.
        """
        named = named_arrays(initial, "initial")
        elements = {name: element_type(value, name) for name, value in named.items()}
        if not sum(int(np.prod(value.shape)) for value in named.values()):
            raise ConfigurationError("initial holds no elements: give arrays with at least one")
        layout = ParameterLayout.plan(
            [(name, tuple(value.shape), elements[name], True) for name, value in named.items()],
            split_tensors=spec is None or spec.elementwise,
            together="" if spec is None else spec.together,
            chunk_bytes=chunk_bytes,
            integers=True,
        )
        flags = {} if spec is None else spec.state_flags()
        rule = " ".join(
            ["add" if spec is None else spec.name, *(flag for flag, on in flags.items() if on)]
        )
        return cls(
            layout, rule, frozenset(n for n, v in named.items() if isinstance(v, np.ndarray))
        )

    @property
    def single(self) -> bool:
        """Whether the user gave one array by itself, not in a dict."""
        return _ONLY in self.layout.index

    def bytes_of(self, value: ArrayTree, what: str) -> dict[str, Bytes]:
        """Return the memory (flat, uint8) of arrays by name, not copied where it is contiguous.

        Args:
            value: one array, or a dict of some or all arrays, in the form of `initial`.
            what: the argument's name in error messages.

        Raises:
            ConfigurationError: a name is unknown, or an array has another shape or dtype.
        """
        named = named_arrays(value, what)
        if (_ONLY in named) != self.single:
            raise ConfigurationError(
                f"{what} is {'one array' if _ONLY in named else 'a dict'}, initial was "
                + (
                    "one array"
                    if self.single
                    else "a dict: give a dict with some or all of its names"
                )
            )
        memory = {}
        for name, array in named.items():
            if name not in self.layout.index:
                known = ", ".join(repr(entry.name) for entry in reversed(self.layout.entries[-8:]))
                raise ConfigurationError(
                    f"{what} has {name!r}, which this server does not: it has {known}"
                )
            entry = self.layout.entries[self.layout.index[name]]
            if tuple(array.shape) != entry.shape:
                raise ConfigurationError(
                    f"{what}: {called(name)} has shape {tuple(array.shape)}, not {entry.shape}"
                )
            element = element_type(array, name)
            if element != entry.element:
                raise ConfigurationError(
                    f"{what}: {called(name)} is {element.name}, not {entry.element.name}: convert "
                    "it, so that no precision is lost or gained unseen"
                )
            memory[name] = _flat_bytes(array)
        return memory

    def payload(self, chunk: Chunk, memory: Mapping[str, Bytes]) -> tuple[Bytes | None, list[int]]:
        """Return one chunk of an update, and the entries of the layout in it that the update lacks.

        Args:
            chunk: of the layout.
            memory: flat bytes (uint8) of the update's arrays by name.

        Returns:
            The chunk's bytes: a view where it lies in one array, gathered otherwise, with zeros for
            what the update lacks; None when it lacks all of the chunk.
        """
        names = [self.layout.entries[piece.entry].name for piece in chunk.slices]
        absent = [
            piece.entry
            for piece, name in zip(chunk.slices, names, strict=True)
            if name not in memory
        ]
        if len(absent) == len(names):
            return None, absent
        size = chunk.element.itemsize
        if len(names) == 1:
            piece = chunk.slices[0]
            return memory[names[0]][piece.start * size : piece.stop * size], []
        gathered = np.zeros(chunk.nbytes, dtype=np.uint8)
        at = 0
        for piece, name in zip(chunk.slices, names, strict=True):
            end = at + (piece.stop - piece.start) * size
            if name in memory:
                gathered[at:end] = memory[name][piece.start * size : piece.stop * size]
            at = end
        return gathered, absent

    def request(
        self,
        names: Sequence[str] | None,
        span: tuple[int, int] | None,
        out: ArrayTree | None,
        recycler: Recycler | None = None,
    ) -> tuple[dict[str, WantedPart], ArrayTree]:
        """Return the memory for a pull by array name, and the arrays over it that the user gets.

        Args:
            names: of the arrays; None for all.
            span: elements (begin, end) of the one named array, flattened; None for all elements.
            out: arrays to receive into; None for new ones.
            recycler: gives the memory of new arrays.

        Raises:
            ConfigurationError: a name is unknown, `span` is out of range, or `out` does not fit.
        """
        wanted = (
            [entry.name for entry in reversed(self.layout.entries)]
            if names is None
            else list(names)
        )
        for name in wanted:
            if name not in self.layout.index:
                raise ConfigurationError(f"there is no array named {name!r} on this server")
        if span is not None:
            if len(wanted) != 1 or out is not None:
                raise ConfigurationError("a range needs the name of one array, and no out=")
            entry = self.layout.entries[self.layout.index[wanted[0]]]
            begin, end = _whole(span)
            if not 0 <= begin < end <= entry.numel:
                raise ConfigurationError(
                    f"range {span}: {called(wanted[0])} has elements 0 to {entry.numel}"
                )
            piece = empty_bytes((end - begin) * entry.element.itemsize)
            pulled = self._as_given(wanted[0], piece, (end - begin,))
            return {wanted[0]: WantedPart(begin, end, piece)}, pulled
        if out is not None:
            memory = self.bytes_of(out, "out")
            if (names is not None and memory.keys() != set(wanted)) or (
                names is None and len(memory) != len(wanted)
            ):
                raise ConfigurationError("out= must hold just the arrays that are pulled")
            for name, array in named_arrays(out, "out").items():
                if (
                    memory[name].size and address_of(memory[name]) != address_of(array)
                ) or not _writable(array):
                    raise ConfigurationError(f"out: {called(name)} must be contiguous and writable")
            pulled = out
        else:
            entries = {name: self.layout.entries[self.layout.index[name]] for name in wanted}
            empty = (recycler or Recycler()).empty
            memory = {name: empty(entry.nbytes) for name, entry in entries.items()}
            pulled = {
                name: self._as_given(name, memory[name], entry.shape)
                for name, entry in entries.items()
            }
            pulled = pulled[_ONLY] if self.single else pulled
        sizes = {name: self.layout.entries[self.layout.index[name]].numel for name in wanted}
        return {name: WantedPart(0, sizes[name], memory[name]) for name in wanted}, pulled

    def chunks_for(self, wanted: Mapping[str, WantedPart]) -> set[int]:
        """Return the indices of the chunks that hold a wanted element."""
        return {
            chunk.index
            for chunk in self.layout.chunks
            for piece in chunk.slices
            if (want := wanted.get(self.layout.entries[piece.entry].name)) is not None
            and piece.start < want.stop
            and want.start < piece.stop
        }

    def target(self, chunk: Chunk, wanted: Mapping[str, WantedPart]) -> Bytes | None:
        """Return the wanted memory that a chunk fills; None if only parts of it are wanted."""
        piece = chunk.slices[0]
        want = wanted.get(self.layout.entries[piece.entry].name)
        if (
            len(chunk.slices) > 1
            or want is None
            or piece.start < want.start
            or piece.stop > want.stop
        ):
            return None
        size = chunk.element.itemsize
        return want.memory[(piece.start - want.start) * size : (piece.stop - want.start) * size]

    def scatter(self, chunk: Chunk, payload: Bytes, wanted: Mapping[str, WantedPart]) -> None:
        """Copy the wanted parts of a chunk from its payload to the wanted memory."""
        size, at = chunk.element.itemsize, 0
        for piece in chunk.slices:
            want = wanted.get(self.layout.entries[piece.entry].name)
            if want is not None:
                begin, end = max(piece.start, want.start), min(piece.stop, want.stop)
                if begin < end:
                    source = payload[
                        (at + begin - piece.start) * size : (at + end - piece.start) * size
                    ]
                    want.memory[(begin - want.start) * size : (end - want.start) * size] = source
            at += piece.stop - piece.start

    def _as_given(self, name: str, memory: Bytes, shape: tuple[int, ...]) -> Any:
        """Return memory as an array of the kind, NumPy or torch, that the user gave."""
        element = self.layout.entries[self.layout.index[name]].element
        if name in self.numpy:
            return memory.view(element.name).reshape(shape)
        return as_tensor(memory).view(element.dtype).view(shape)


def _whole(span: tuple[int, int]) -> tuple[int, int]:
    """Return (begin, end) as integers; raise ConfigurationError if it is none."""
    try:
        begin, end = span
        return operator.index(begin), operator.index(end)
    except (TypeError, ValueError):
        raise ConfigurationError(f"range {span!r}: give (begin, end), two integers") from None


def named_arrays(value: ArrayTree, what: str) -> dict[str, Any]:
    """Return arrays by name; one that was given by itself has an empty name; `what`: the argument's name in errors.

    Raises:
        ConfigurationError: something is neither a NumPy array nor a tensor, or has no name.
    """
    named = dict(value) if isinstance(value, Mapping) else {_ONLY: value}
    for name, array in named.items():
        if not isinstance(name, str) or (isinstance(value, Mapping) and not name):
            raise ConfigurationError(f"{what} has a key {name!r}: give names as text")
        if not isinstance(array, np.ndarray) and not is_tensor(array):
            raise ConfigurationError(
                f"{what}{f'[{name!r}]' if name else ''} is a {type(array).__name__}: give NumPy "
                "arrays or torch tensors, one or a dict of them"
            )
    return named


def called(name: str) -> str:
    """Return the name of an array in error messages."""
    return repr(name) if name else "the array"


def element_type(array: Any, name: str) -> ElementType:
    """Return the element type of an array or tensor.

    Raises:
        ConfigurationError: it is none that can be added to, or a tensor is sparse or not on the CPU.
    """
    is_torch = is_tensor(array)
    element = (
        _ELEMENTS.get(str(array.dtype).removeprefix("torch."))
        if is_torch
        else _OF_NUMPY.get(array.dtype)
    )
    if element is None:
        raise ConfigurationError(
            f"{called(name)} has dtype {array.dtype}: give a floating-point or integer type "
            f"({', '.join(_ELEMENTS)}) of this machine's byte order"
        )
    if is_torch and array.device.type != "cpu":
        raise ConfigurationError(f"{called(name)} lies on {array.device}: give CPU tensors")
    if is_torch and str(array.layout) != "torch.strided":
        raise ConfigurationError(f"{called(name)} is {array.layout}: give dense tensors")
    return element


def _flat_bytes(array: Any) -> Bytes:
    """Return the memory (flat, uint8) of an array, without a copy if it is contiguous."""
    if is_tensor(array):
        import torch

        # not view(-1), which keeps the strides of no elements and of one
        return as_array(
            array.detach().contiguous().as_strided((array.numel(),), (1,)).view(torch.uint8)
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _writable(array: Any) -> bool:
    """Return whether pulled elements can be written to an array."""
    return is_tensor(array) or array.flags.writeable
