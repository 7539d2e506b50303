"""Named parameters as one flat vector, cut into chunks."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from steepest.errors import ConfigurationError, ModelError

if TYPE_CHECKING:
    import torch

MIN_CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 4 << 20
#: The alignment in bytes that the kernels of TensorFlow and XLA want.
ALIGNMENT = 64
# A process' write to borrowed memory hides a whole page from it, see `shared_memory`.
_PAGE = mmap.PAGESIZE
_DIVISIBLE = 12  # chunks: 2, 3, 4 or 6 servers hold equally many


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """The way in which a model is cut into chunks."""

    chunk_bytes: int | None = None  # size of a chunk; None for the layout's own choice
    whole: bool = False  # whether each tensor has to lie in one chunk
    # names of parameters that are trained although the model was made with them frozen
    unfrozen: frozenset[str] = frozenset()
    # parts of the trained parameters, by layer, each of which has chunks of its own
    fragments: int = 1


@dataclass(frozen=True, slots=True)
class ElementType:
    """A dtype by its name in torch, such as "float32", for processes that do without torch.

    Attributes:
        itemsize: bytes of one element.
    """

    name: str
    itemsize: int
    is_floating_point: bool

    @classmethod
    def of(cls, dtype: torch.dtype | ElementType) -> ElementType:
        """Return the element type of a torch dtype."""
        if isinstance(dtype, ElementType):
            return dtype
        return cls(str(dtype).removeprefix("torch."), dtype.itemsize, dtype.is_floating_point)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype; imports torch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


@dataclass(frozen=True, slots=True)
class Entry:
    """One named parameter and its place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    element: ElementType
    trainable: bool
    offset: int = 0  # in bytes
    aliases: tuple[str, ...] = ()  # further names of the same tensor (tied parameters)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        return self.element.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.element.itemsize


#: Of entries that share chunks: whether they are frozen, their element type and fragment, and whether they lie apart.
_Kind = tuple[bool, ElementType, int, bool]


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one entry in one chunk: elements [start, stop) of the flattened entry."""

    entry: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [start, stop) of the flat vector: the unit of transfer, optimizers and checkpoints.

    An opaque chunk has no bytes: it stands for state that servers hold in another form, and
    gradients flow for it as for other chunks. Chunks of one fragment change in the same updates,
    see `ParameterLayout.changed_by`.
    """

    index: int
    element: ElementType
    trainable: bool  # whether gradients flow for it; the others hold frozen parameters
    start: int
    stop: int
    slices: tuple[Slice, ...]
    fragment: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        return self.element.dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    @property
    def is_opaque(self) -> bool:
        """Whether it stands for state outside of the flat vector."""
        return not self.slices


@dataclass(frozen=True)
class ParameterLayout:
    """The places of named parameters in one flat vector, and its chunks.

    Parameters lie in backward order (last layers first), so that the first chunks are complete
    first while the backward pass goes on; grouped by dtype, trainable ones before frozen ones. Each
    group begins on a page of memory, and so does each chunk, unless smaller chunks were asked for.
    Between entries that are to be aligned lie zeros, which belong to chunks but to no slice.

    Attributes:
        entries: the parameters, in the order of their offsets.
        chunks: the chunks, in the same order, which together cover all entries; opaque
            ones come last.
        nbytes: size of the flat vector.

    Example:
        >>> import torch
        >>> layout = ParameterLayout.plan(
        ...     [("a", (2, 3), torch.float32, True), ("b", (3,), torch.float32, True)]
        ... )
        >>> [entry.name for entry in layout.entries], len(layout.chunks), layout.nbytes
        (['b', 'a'], 1, 64)
    """

    entries: tuple[Entry, ...]
    chunks: tuple[Chunk, ...]
    nbytes: int = field(default=0)

    @classmethod
    def plan(  # noqa: PLR0913 - what adapters and settings choose
        cls,
        parameters: Sequence[tuple[str, tuple[int, ...], torch.dtype | ElementType, bool]],
        *,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        split_tensors: bool = True,
        chunk_bytes: int | None = None,
        integers: bool = False,
        aligned: bool = False,
        opaque_chunks: int = 0,
        together: str = "",
        fragments: int = 1,
        apart: Collection[str] = frozenset(),
        joined: bool = False,
    ) -> ParameterLayout:
        """Return the layout of a model's parameters.

        Args:
            parameters: (name, shape, dtype, trainable) in the module's order.
            aliases: further names of tied parameters, by first name.
            split_tensors: whether a tensor may lie in several chunks; False for optimizers that are
                not element-wise.
            chunk_bytes: size of a chunk; by default 1/3 to 4 MB, by the size of the model.
            integers: whether trainable parameters may be integers, which can be added to but have
                no gradient.
            aligned: whether each parameter begins at a multiple of `ALIGNMENT` bytes.
            opaque_chunks: number of chunks that stand for something beside the parameters.
            together: the name of an optimizer that must have all trained parameters in one chunk,
                whatever `chunk_bytes` says; empty for one that need not.
            fragments: parts of the trained parameters, of about equally many bytes, each of whole
                layers; the last layers are the first part.
            apart: names of trained parameters that lie, whole, in chunks apart from the others.
            joined: whether they lie with the others if all of one kind fit into one chunk.

        Raises:
            ModelError: a name occurs twice, or a trainable parameter's dtype is not floating-point;
                with `together`, trained parameters are of several dtypes, or of several fragments;
                there are more fragments than layers.
        """
        seen: set[str] = set()
        kinds: dict[_Kind, list[Entry]] = {}
        parts = _fragments(parameters, fragments, together)
        for name, shape, dtype, trainable in reversed(parameters):
            if name in seen:
                raise ModelError(f"two parameters are named {name!r}: names must be unique")
            seen.add(name)
            if trainable and not dtype.is_floating_point and not integers:
                raise ModelError(
                    f"parameter {name!r} is {dtype}: only floating-point parameters can be trained"
                )
            also, kind = (aliases or {}).get(name, ()), ElementType.of(dtype)
            key = not trainable, kind, parts.get(name, 0), trainable and name in apart
            entry = Entry(name, tuple(shape), kind, trainable, 0, also)
            kinds.setdefault(key, []).append(entry)
        total = sum(entry.nbytes for group in kinds.values() for entry in group)
        if together:
            _require_one_dtype(together, kinds)
            split_tensors, chunk_bytes = False, max(total, 1)
        target = chunk_bytes or min(max(total // 16, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
        entries: list[Entry] = []
        chunks: list[Chunk] = []
        offset = 0
        for (frozen, element, part, is_apart), group in sorted(
            (_joined(kinds, target) if joined else kinds).items(), key=lambda item: item[0][0]
        ):
            begin = _aligned(offset, _PAGE if any(entry.nbytes for entry in group) else ALIGNMENT)
            unit = ALIGNMENT if aligned or _has(group, apart) else element.itemsize
            whole = is_apart or not split_tensors
            placed, borders = _place(group, begin, len(entries), target, unit, whole=whole)
            entries += [entry for _, entry in placed]
            offset = entries[-1].offset + entries[-1].nbytes
            if not whole:
                cuts = _even_cuts(begin, offset, target, unit, 1 if chunk_bytes else _DIVISIBLE)
                borders = list(pairwise(cuts))
            for start, stop in borders:
                slices = _slices(placed, start, stop, element.itemsize)
                chunks.append(Chunk(len(chunks), element, not frozen, start, stop, slices, part))
        end = _aligned(offset, ALIGNMENT)
        floats = ElementType("float32", 4, True)
        for index in range(len(chunks), len(chunks) + opaque_chunks):
            chunks.append(Chunk(index, floats, True, end, end, ()))
        return cls(tuple(entries), tuple(chunks), end)

    @cached_property
    def index(self) -> dict[str, int]:
        """The entry's index by parameter name."""
        return {entry.name: i for i, entry in enumerate(self.entries)}

    @cached_property
    def chunks_of(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the chunks in which each entry lies, by entry."""
        by_entry: list[list[int]] = [[] for _ in self.entries]
        for chunk in self.chunks:
            for piece in chunk.slices:
                by_entry[piece.entry].append(chunk.index)
        return tuple(tuple(chunks) for chunks in by_entry)

    @cached_property
    def chunk_elements(self) -> tuple[int, ...]:
        """The number of elements of each chunk."""
        return tuple(sum(s.stop - s.start for s in chunk.slices) for chunk in self.chunks)

    @cached_property
    def trainable_chunks(self) -> tuple[int, ...]:
        """The indices of the chunks that are trained, opaque ones among them."""
        return tuple(chunk.index for chunk in self.chunks if chunk.trainable)

    @cached_property
    def opaque_chunks(self) -> tuple[int, ...]:
        """The indices of the chunks that are not in the flat vector."""
        return tuple(chunk.index for chunk in self.chunks if chunk.is_opaque)

    @cached_property
    def dense_chunks(self) -> tuple[int, ...]:
        """The indices of the chunks of the flat vector that are trained."""
        return tuple(i for i in self.trainable_chunks if not self.chunks[i].is_opaque)

    @cached_property
    def _by_fragment(self) -> tuple[frozenset[int], ...]:
        """The indices of the chunks of each fragment."""
        trained = [self.chunks[i] for i in self.dense_chunks]
        count = 1 + max((chunk.fragment for chunk in trained), default=0)
        return tuple(
            frozenset(chunk.index for chunk in trained if chunk.fragment == part)
            for part in range(count)
        )

    @property
    def fragments(self) -> int:
        """The number of fragments, at least 1."""
        return len(self._by_fragment)

    def changed_by(self, version: int) -> frozenset[int]:
        """Return the chunks of the flat vector that the update to a version changes: one fragment's, in turn."""
        return self.of_fragment(version - 1)

    def of_fragment(self, turn: int) -> frozenset[int]:
        """Return the chunks of a fragment in the flat vector; `turn` counts modulo the number of fragments."""
        return self._by_fragment[turn % len(self._by_fragment)]

    def of_fragments(self, turns: Iterable[int]) -> frozenset[int]:
        """Return the chunks of the flat vector of some fragments."""
        return frozenset(chunk for turn in turns for chunk in self.of_fragment(turn))

    @cached_property
    def on_pages(self) -> bool:
        """Whether each chunk begins on a page of memory: no page has parts of two chunks."""
        return all(chunk.start % _PAGE == 0 for chunk in self.chunks if not chunk.is_opaque)

    def allocate(self) -> torch.Tensor:
        """Return a zeroed flat vector: uint8, `nbytes` long."""
        import torch

        return torch.zeros(self.nbytes, dtype=torch.uint8)

    def entry_view(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """Return one parameter as a view of a flat vector, in its own shape and dtype."""
        entry = self.entries[index]
        return (
            buffer[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)
        )

    def chunk_view(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """Return one chunk as a uint8 view of a flat vector."""
        chunk = self.chunks[index]
        return buffer[chunk.start : chunk.stop]

    def slice_views(self, chunk: Chunk, data: torch.Tensor) -> list[torch.Tensor]:
        """Return a chunk's slices as views of its bytes: whole tensors in shape, parts flat."""
        views = []
        for piece in chunk.slices:
            entry = self.entries[piece.entry]
            begin = entry.offset + piece.start * entry.element.itemsize - chunk.start
            end = entry.offset + piece.stop * entry.element.itemsize - chunk.start
            view = data[begin:end].view(entry.dtype)
            views.append(
                view.view(entry.shape) if piece.stop - piece.start == entry.numel else view
            )
        return views

    def assign_servers(
        self, num_servers: int, dense: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return the server of each chunk, so that all hold about equally many bytes.

        All servers hold about equally many opaque chunks, too.

        Args:
            num_servers: how many there are.
            dense: the servers that hold the chunks of the flat vector; None for all.
        """
        loads = dict.fromkeys(range(num_servers) if dense is None else dense, 0)
        owners = []
        for chunk in self.chunks:
            server = min(loads, key=loads.__getitem__)
            loads[server] += chunk.nbytes
            owners.append(server)
        for number, index in enumerate(self.opaque_chunks):
            owners[index] = number % num_servers
        return tuple(owners)

    def named(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return copies of a flat vector's parameters by name, first layers first."""
        last_first = reversed(list(enumerate(self.entries)))
        return {entry.name: self.entry_view(buffer, index).clone() for index, entry in last_first}

    def write(self, buffer: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
        """Write parameters by name (or alias) into a flat vector; others are unchanged.

        Raises:
            ConfigurationError: an unknown name or another shape; nothing is written then.
        """
        import torch

        known = {
            name: i for i, entry in enumerate(self.entries) for name in (entry.name, *entry.aliases)
        }
        tensors = {name: torch.as_tensor(value) for name, value in weights.items()}
        for name, value in tensors.items():
            if name not in known:
                raise ConfigurationError(
                    f"no parameter is named {name!r}: there are {', '.join(list(known)[:8])} ..."
                )
            if tuple(value.shape) != (shape := self.entries[known[name]].shape):
                raise ConfigurationError(
                    f"{name!r} has shape {tuple(value.shape)}, the model's has {shape}"
                )
        for name, value in tensors.items():
            self.entry_view(buffer, known[name]).copy_(value)

    def difference(self, other: ParameterLayout) -> str | None:
        """Return in words how another layout differs from this one, or None when they agree."""
        for mine, theirs in zip(self.entries, other.entries, strict=False):
            for attribute in ("name", "shape", "dtype", "trainable"):
                a, b = getattr(mine, attribute), getattr(theirs, attribute)
                if a != b:
                    return f"parameter {mine.name!r} has {attribute} {a}, the other has {b}"
        if len(self.entries) != len(other.entries):
            return f"{len(self.entries)} parameters, the other has {len(other.entries)}"
        return None if self.chunks == other.chunks else "the same parameters cut into other chunks"


def _require_one_dtype(together: str, kinds: Iterable[_Kind]) -> None:
    """Check that trained parameters that one server has to update together have one dtype; ModelError otherwise."""
    dtypes = [each.name for frozen, each, _, is_apart in kinds if not frozen | is_apart]
    if len(dtypes) > 1:
        raise ModelError(
            f"{together} updates each parameter by what all others are like, so that one "
            f"server has to update all at once, but they are of {', '.join(dtypes)}: give "
            "them one dtype, or take another optimizer; norms of all gradients are clipped "
            "by the strategy's clip_norm="
        )


def _fragments(
    parameters: Sequence[tuple[str, tuple[int, ...], torch.dtype | ElementType, bool]],
    count: int,
    together: str,
) -> dict[str, int]:
    """Return by name the fragment of each trained parameter, empty if there is one fragment; see `plan`.

    A layer is a run of parameters whose names differ only in the last part.
    """
    if count == 1:
        return {}
    if together:
        raise ModelError(
            f"fragments={count} with {together}, which updates each parameter by what all others are "
            "like: leave fragments out, or take another optimizer"
        )
    layers: list[tuple[str, list[str], int]] = []
    for name, shape, dtype, trainable in reversed(parameters):
        if not trainable:
            continue
        nbytes = math.prod(shape) * dtype.itemsize
        owner = re.sub(r"[./]?[^./]*$", "", name) or name
        if layers and layers[-1][0] == owner:
            layers[-1] = (owner, [*layers[-1][1], name], layers[-1][2] + nbytes)
        else:
            layers.append((owner, [name], nbytes))
    if count > len(layers):
        raise ModelError(
            f"fragments={count}: the model has {len(layers)} layers with trained parameters, and each "
            f"fragment needs one: give at most {max(len(layers), 1)}"
        )
    total, before, last = max(sum(layer[2] for layer in layers), 1), 0, -1
    fragments: dict[str, int] = {}
    for index, (_, names, nbytes) in enumerate(layers):
        middle = (2 * before + nbytes) * count // (2 * total)
        last = min(max(middle, count - len(layers) + index, last), last + 1, count - 1)
        before += nbytes
        fragments |= dict.fromkeys(names, last)
    return fragments


def _has(group: Iterable[Entry], names: Collection[str]) -> bool:
    """Return whether any entry has one of these names."""
    return any(entry.name in names for entry in group)


def _joined(kinds: Mapping[_Kind, list[Entry]], target: int) -> dict[_Kind, list[Entry]]:
    """Return entries by kind; those that lie apart join the others of their kind if `target` bytes hold them all."""
    joined, step = dict(kinds), _unit(target, 1)
    for frozen, element, part, is_apart in kinds:
        others, own = (frozen, element, part, False), (frozen, element, part, True)
        if is_apart and others in joined:
            both = [*joined[others], *joined[own]]
            if sum(_aligned(entry.nbytes, ALIGNMENT) for entry in both) <= target // step * step:
                del joined[own]
                joined[others] = both
    return joined


def _aligned(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit


def _place(
    group: Sequence[Entry], begin: int, first: int, target: int, unit: int, *, whole: bool
) -> tuple[list[tuple[int, Entry]], list[tuple[int, int]]]:
    """Put entries of one dtype (all trainable or all frozen) one after the other.

    Args:
        group: the entries.
        begin, first: offset and index of the first one.
        target: the least bytes of a chunk, with `whole`.
        unit: bytes at whose multiples entries begin.
        whole: whether tensors stay whole; then a chunk that is not small begins on a page.

    Returns:
        (index, entry with offset) pairs, and with `whole` the (start, stop) of chunks.
    """
    placed: list[tuple[int, Entry]] = []
    borders: list[tuple[int, int]] = []
    left = sum(entry.nbytes for entry in group)
    offset = start = begin
    for index, entry in enumerate(group, start=first):
        begins_chunk, offset = start == offset, _aligned(offset, unit)
        start = offset if begins_chunk else start
        placed.append((index, replace(entry, offset=offset)))
        offset += entry.nbytes
        left -= entry.nbytes
        if whole and offset > start and (offset - start >= target or not left):
            borders.append((start, offset))
            offset = start = (
                _aligned(offset, _PAGE) if left and _unit(target, 1) == _PAGE else offset
            )
    return placed, borders


def _unit(target: int, least: int) -> int:
    """Return the alignment in bytes of the borders of chunks of about `target` bytes."""
    return next((unit for unit in (_PAGE, ALIGNMENT) if target >= 4 * unit), least)


def _even_cuts(start: int, stop: int, target: int, least: int, multiple: int) -> list[int]:
    """Return the borders of pieces of [start, stop) of at most `target` bytes, of equal size up to alignment.

    Args:
        least: the least bytes of a piece: of an element, or those at whose multiples entries begin, so that each piece
            has a part of an entry.
        multiple: if there are at least a third as many pieces, their number is a multiple of this.
    """
    size = stop - start
    if size == 0:
        return []
    unit = _unit(target, least)
    pieces = -(-size // max(target // unit * unit, unit))
    if 3 * pieces >= multiple:
        pieces = -(-pieces // multiple) * multiple
    cuts = {start + -(-(size * i) // (pieces * unit)) * unit for i in range(1, pieces)}
    return [start, *sorted(cut for cut in cuts if start < cut < stop), stop]


def _slices(
    placed: Sequence[tuple[int, Entry]], start: int, stop: int, itemsize: int
) -> tuple[Slice, ...]:
    slices = []
    for index, entry in placed:
        begin, end = max(start, entry.offset), min(stop, entry.offset + entry.nbytes)
        if begin < end:
            slices.append(
                Slice(index, (begin - entry.offset) // itemsize, (end - entry.offset) // itemsize)
            )
    return tuple(slices)
