"""ParameterLayout: whatever the parameters, every element lies in one chunk, and chunks are well formed."""

from __future__ import annotations

import math
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.tensors.layout import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Chunk,
    Entry,
    ParameterLayout,
)
from steepest.errors import ConfigurationError, ModelError

Parameter = tuple[str, tuple[int, ...], torch.dtype, bool]

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
MEGABYTE = 1 << 20
ALIGNMENT = 64
PAGE = mmap.PAGESIZE

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
kinds = st.tuples(shapes, st.sampled_from(FLOATS), st.booleans())
parameter_lists = st.lists(kinds, max_size=12).map(
    lambda drawn: [
        (f"p{i}", shape, dtype, trainable) for i, (shape, dtype, trainable) in enumerate(drawn)
    ]
)
chunk_sizes = st.sampled_from((None, 1, 8, 24, 64, 100, 256, 300, 1000, 4096))


def floats(
    *sizes: int, dtype: torch.dtype = torch.float32, trainable: bool = True
) -> list[Parameter]:
    return [(f"p{i}", (size,), dtype, trainable) for i, size in enumerate(sizes)]


def bytes_of(layout: ParameterLayout) -> list[int]:
    return [chunk.nbytes for chunk in layout.chunks]


def kind_of(chunk: Chunk | Entry) -> tuple[bool, torch.dtype]:
    return chunk.trainable, chunk.dtype


@given(parameter_lists, chunk_sizes, st.booleans(), st.booleans())
def test_every_element_lies_in_exactly_one_slice(
    parameters: list[Parameter], chunk_bytes: int | None, split: bool, aligned: bool
) -> None:
    layout = ParameterLayout.plan(
        parameters, split_tensors=split, chunk_bytes=chunk_bytes, aligned=aligned
    )
    assert not aligned or not any(entry.offset % ALIGNMENT for entry in layout.entries)
    assert all(chunk.slices for chunk in layout.chunks)
    seen: list[list[int]] = [[0] * entry.numel for entry in layout.entries]
    for chunk in layout.chunks:
        for piece in chunk.slices:
            assert piece.start < piece.stop
            for element in range(piece.start, piece.stop):
                seen[piece.entry][element] += 1
    assert all(count == 1 for counts in seen for count in counts)


@given(parameter_lists, chunk_sizes, st.booleans())
def test_entries_keep_names_shapes_and_kinds(
    parameters: list[Parameter], chunk_bytes: int | None, split: bool
) -> None:
    layout = ParameterLayout.plan(parameters, split_tensors=split, chunk_bytes=chunk_bytes)
    found = {entry.name: (entry.shape, entry.dtype, entry.trainable) for entry in layout.entries}
    assert found == {
        name: (shape, dtype, trainable) for name, shape, dtype, trainable in parameters
    }
    assert layout.index == {entry.name: i for i, entry in enumerate(layout.entries)}
    for entry in layout.entries:
        assert entry.numel == math.prod(entry.shape)
        assert entry.nbytes == entry.numel * entry.dtype.itemsize


@given(parameter_lists, chunk_sizes, st.booleans(), st.booleans())
def test_chunks_are_contiguous_ordered_and_of_one_kind(
    parameters: list[Parameter], chunk_bytes: int | None, split: bool, aligned: bool
) -> None:
    layout = ParameterLayout.plan(
        parameters, split_tensors=split, chunk_bytes=chunk_bytes, aligned=aligned
    )
    unit = ALIGNMENT if aligned else 1
    end = 0
    for index, chunk in enumerate(layout.chunks):
        assert chunk.index == index
        assert end <= chunk.start < chunk.stop <= layout.nbytes
        assert chunk.start % chunk.dtype.itemsize == 0 == chunk.nbytes % chunk.dtype.itemsize
        position = chunk.start
        for piece in chunk.slices:
            entry = layout.entries[piece.entry]
            assert kind_of(entry) == kind_of(chunk)
            begin = entry.offset + piece.start * entry.dtype.itemsize
            assert position <= begin < position + unit, "a gap or an overlap"
            position = entry.offset + piece.stop * entry.dtype.itemsize
        assert position <= chunk.stop < position + unit
        first_of_kind = index == 0 or kind_of(layout.chunks[index - 1]) != kind_of(chunk)
        if first_of_kind or aligned:
            assert chunk.start % ALIGNMENT == 0
        else:
            assert chunk.start == end
        end = chunk.stop
    assert layout.nbytes % ALIGNMENT == 0
    assert layout.nbytes - end < ALIGNMENT


@given(st.lists(st.integers(0, 2000), max_size=3), st.sampled_from(FLOATS), st.integers(1, 1500))
def test_split_chunks_are_at_most_of_the_size_asked_for(
    sizes: list[int], dtype: torch.dtype, most: int
) -> None:
    layout = ParameterLayout.plan(floats(*sizes, dtype=dtype), chunk_bytes=most)
    assert all(size <= max(most, dtype.itemsize) for size in bytes_of(layout))


@pytest.mark.parametrize("excess", [4, 60, 64, 2 * MEGABYTE, 4 * MEGABYTE - 4])
def test_no_chunk_exceeds_the_maximum_by_alignment(excess: int) -> None:
    layout = ParameterLayout.plan(floats((40 * MEGABYTE * 2 + excess) // 4))
    assert max(bytes_of(layout)) <= MAX_CHUNK_BYTES
    assert min(bytes_of(layout)) >= MIN_CHUNK_BYTES


@given(parameter_lists, chunk_sizes)
def test_chunks_of_one_kind_are_about_equally_large(
    parameters: list[Parameter], chunk_bytes: int | None
) -> None:
    layout = ParameterLayout.plan(parameters, chunk_bytes=chunk_bytes)
    for kind in {kind_of(chunk) for chunk in layout.chunks}:
        sizes = [chunk.nbytes for chunk in layout.chunks if kind_of(chunk) == kind]
        assert max(sizes) - min(sizes) <= 2 * ALIGNMENT


@given(parameter_lists, chunk_sizes, st.booleans())
def test_backward_order_trainable_first(
    parameters: list[Parameter], chunk_bytes: int | None, split: bool
) -> None:
    layout = ParameterLayout.plan(parameters, split_tensors=split, chunk_bytes=chunk_bytes)
    flags = [entry.trainable for entry in layout.entries]
    assert flags == sorted(flags, reverse=True)
    for kind in {kind_of(entry) for entry in layout.entries}:
        of_kind = [entry for entry in layout.entries if kind_of(entry) == kind]
        numbers = [int(entry.name[1:]) for entry in of_kind]
        assert numbers == sorted(numbers, reverse=True)
        assert [entry.offset for entry in of_kind] == sorted(entry.offset for entry in of_kind)


@given(parameter_lists, chunk_sizes, st.booleans())
def test_chunks_of_lists_the_chunks_of_each_entry(
    parameters: list[Parameter], chunk_bytes: int | None, split: bool
) -> None:
    layout = ParameterLayout.plan(parameters, split_tensors=split, chunk_bytes=chunk_bytes)
    for index, (entry, chunks) in enumerate(zip(layout.entries, layout.chunks_of, strict=True)):
        held = [
            chunk.index for chunk in layout.chunks if any(s.entry == index for s in chunk.slices)
        ]
        assert list(chunks) == held
        assert bool(chunks) == bool(entry.numel)


@given(parameter_lists, chunk_sizes, st.booleans())
def test_views_alias_the_buffer(
    parameters: list[Parameter], chunk_bytes: int | None, split: bool
) -> None:
    layout = ParameterLayout.plan(parameters, split_tensors=split, chunk_bytes=chunk_bytes)
    buffer = layout.allocate()
    assert buffer.dtype is torch.uint8
    assert buffer.tolist() == [0] * layout.nbytes
    for index, entry in enumerate(layout.entries):
        view = layout.entry_view(buffer, index)
        assert (view.shape, view.dtype) == (entry.shape, entry.dtype)
        view.copy_(torch.arange(entry.numel).view(entry.shape) + index)
    for chunk in layout.chunks:
        data = layout.chunk_view(buffer, chunk.index)
        assert data.nbytes == chunk.nbytes
        for piece, view in zip(chunk.slices, layout.slice_views(chunk, data), strict=True):
            entry = layout.entries[piece.entry]
            whole = piece.stop - piece.start == entry.numel
            assert view.shape == (entry.shape if whole else (piece.stop - piece.start,))
            expected = torch.arange(piece.start, piece.stop) + piece.entry
            assert torch.equal(view.flatten(), expected.to(entry.dtype))
            view.zero_()
    assert not buffer.any(), "what the slices zeroed, the entries had written"


@given(parameter_lists, chunk_sizes)
def test_whole_tensor_mode_cuts_at_borders_only(
    parameters: list[Parameter], chunk_bytes: int | None
) -> None:
    layout = ParameterLayout.plan(parameters, split_tensors=False, chunk_bytes=chunk_bytes)
    for chunk in layout.chunks:
        for piece in chunk.slices:
            assert (piece.start, piece.stop) == (0, layout.entries[piece.entry].numel)
        last_of_kind = chunk.index + 1 == len(layout.chunks) or (
            kind_of(layout.chunks[chunk.index + 1]) != kind_of(chunk)
        )
        assert last_of_kind or chunk_bytes is None or chunk.nbytes >= chunk_bytes
    assert all(len(chunks) <= 1 for chunks in layout.chunks_of)


@given(parameter_lists, st.sampled_from((8, 64, 300)), st.integers(1, 7), st.booleans())
def test_deal_is_balanced_by_bytes(
    parameters: list[Parameter], chunk_bytes: int, servers: int, split: bool
) -> None:
    layout = ParameterLayout.plan(parameters, split_tensors=split, chunk_bytes=chunk_bytes)
    owners = layout.assign_servers(servers)
    assert len(owners) == len(layout.chunks)
    loads = [0] * servers
    for chunk, owner in zip(layout.chunks, owners, strict=True):
        loads[owner] += chunk.nbytes
    assert max(loads) - min(loads) <= max(bytes_of(layout), default=0)
    assert owners == layout.assign_servers(servers)


def test_deal_goes_round_so_that_servers_are_busy_together() -> None:
    layout = ParameterLayout.plan(floats(16 * MEGABYTE))
    owners = layout.assign_servers(4)
    assert all({*owners[i : i + 4]} == {0, 1, 2, 3} for i in range(0, len(owners), 4))
    assert layout.assign_servers(1) == (0,) * len(layout.chunks)


def test_some_servers_hold_tables_alone() -> None:
    layout = ParameterLayout.plan(floats(16 * MEGABYTE), opaque_chunks=8)
    owners = layout.assign_servers(4, (1, 3))
    assert [owners[index] for index in layout.opaque_chunks] == [0, 1, 2, 3] * 2
    dense = [owner for index, owner in enumerate(owners) if index not in layout.opaque_chunks]
    assert {*dense} == {1, 3}
    assert abs(dense.count(1) - dense.count(3)) <= 1


@given(parameter_lists, st.booleans())
def test_a_small_model_is_one_chunk_of_each_kind(parameters: list[Parameter], split: bool) -> None:
    layout = ParameterLayout.plan(parameters, split_tensors=split)
    assert layout.nbytes < MIN_CHUNK_BYTES
    expected = {kind_of(entry) for entry in layout.entries if entry.numel}
    assert sorted(map(str, expected)) == sorted(str(kind_of(chunk)) for chunk in layout.chunks)


@pytest.mark.parametrize(("rows", "chunks"), [(100, 1), (MIN_CHUNK_BYTES // 64, 2)])
def test_parameters_apart_join_the_others_where_one_chunk_has_room(rows: int, chunks: int) -> None:
    parameters = [("a", (rows, 16), torch.float32, True), ("b", (3,), torch.float32, True)]
    layout = ParameterLayout.plan(parameters, apart={"a"}, joined=True)
    assert len(layout.chunks) == chunks
    assert len(ParameterLayout.plan(parameters, apart={"a"}).chunks) == 2
    (place,) = (entry.offset for entry in layout.entries if entry.name == "a")
    assert place % ALIGNMENT == 0


@pytest.mark.parametrize("megabytes", [4, 5, 17, 40, 100, 333])
@pytest.mark.parametrize("servers", [1, 2, 3, 4, 6, 12])
def test_servers_hold_equally_much(megabytes: int, servers: int) -> None:
    layout = ParameterLayout.plan(floats(megabytes * 250_000 + 7))
    owners = layout.assign_servers(servers)
    held = [
        sum(c.nbytes for c in layout.chunks if owners[c.index] == server)
        for server in range(servers)
    ]
    assert max(held) - min(held) <= len(layout.chunks) * PAGE


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ([25_000_000], torch.float32),
        ([250_000] * 100, torch.float32),
        ([1_000_000] * 12 + [7], torch.float64),
    ],
)
def test_chunks_of_a_model_of_100_megabytes_are_of_1_to_4(
    sizes: list[int], dtype: torch.dtype
) -> None:
    layout = ParameterLayout.plan(floats(*sizes, dtype=dtype))
    assert all(MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES for size in bytes_of(layout))


@pytest.mark.parametrize("megabytes", [2, 5, 16, 24, 63, 64, 65, 500])
def test_chunks_of_larger_models_stay_within_bounds(megabytes: int) -> None:
    sizes = bytes_of(ParameterLayout.plan(floats(megabytes * MEGABYTE // 4)))
    assert all(MIN_CHUNK_BYTES // 3 - PAGE <= size <= MAX_CHUNK_BYTES for size in sizes)


def test_a_huge_tensor_is_split_unless_tensors_stay_whole() -> None:
    parameters = floats(3, 50_000_000, 3)
    split = ParameterLayout.plan(parameters)
    assert (
        len(split.chunks_of[split.index["p1"]])
        == len(split.chunks)
        >= 200_000_000 // MAX_CHUNK_BYTES
    )
    whole = ParameterLayout.plan(parameters, split_tensors=False)
    assert len(whole.chunks_of[whole.index["p1"]]) == 1


def test_nothing_at_all_is_no_chunk() -> None:
    layout = ParameterLayout.plan([])
    assert (layout.entries, layout.chunks, layout.nbytes, layout.assign_servers(2)) == (
        (),
        (),
        0,
        (),
    )
    empty = ParameterLayout.plan(floats(0, 0))
    assert (len(empty.entries), empty.chunks, empty.chunks_of) == (2, (), ((), ()))
    assert empty.entry_view(empty.allocate(), 1).shape == (0,)


def test_frozen_integers_are_carried_along() -> None:
    layout = ParameterLayout.plan(
        [*floats(5), ("codes", (3,), torch.int8, False), ("mask", (2,), torch.bool, False)]
    )
    buffer = layout.allocate()
    codes = layout.entry_view(buffer, layout.index["codes"])
    codes.copy_(torch.tensor([1, -2, 3]))
    layout.entry_view(buffer, layout.index["mask"]).fill_(True)
    assert codes.tolist() == [1, -2, 3]
    assert [chunk.trainable for chunk in layout.chunks] == [True, False, False]


def test_aliases_are_kept_with_the_first_name() -> None:
    layout = ParameterLayout.plan(floats(2, 3), aliases={"p0": ("tied", "again")})
    assert [entry.aliases for entry in layout.entries] == [(), ("tied", "again")]


def test_a_name_used_twice_is_refused() -> None:
    with pytest.raises(ModelError, match="two parameters are named 'p0'"):
        ParameterLayout.plan(floats(1) + floats(2))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_floating_point_parameters_can_be_trained(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match=f"'p0' is {dtype}: only floating-point"):
        ParameterLayout.plan(floats(1, dtype=dtype))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (floats(4, 6), None),
        (
            [("q0", (4,), torch.float32, True), *floats(4, 6)[1:]],
            "parameter 'p0' has name p0, the other has q0",
        ),
        (floats(5, 6), r"parameter 'p0' has shape (4,), the other has (5,)"),
        (floats(4, 6, dtype=torch.float64), "has dtype torch.float32, the other has torch.float64"),
        (floats(4, 6, trainable=False), "has trainable True, the other has False"),
        ([("a", (1,), torch.float64, True), *floats(4, 6)], "2 parameters, the other has 3"),
    ],
)
def test_difference_says_what_differs(other: list[Parameter], words: str | None) -> None:
    difference = ParameterLayout.plan(floats(4, 6)).difference(ParameterLayout.plan(other))
    assert difference is None if words is None else words in str(difference)


def test_difference_in_number_and_in_chunks() -> None:
    mine = ParameterLayout.plan(floats(40, 60))
    assert (
        mine.difference(ParameterLayout.plan(floats(40, 60)[1:])) == "2 parameters, the other has 1"
    )
    recut = ParameterLayout.plan(floats(40, 60), chunk_bytes=64)
    assert mine.difference(recut) == "the same parameters cut into other chunks"


def test_parameters_are_read_and_written_by_name_or_alias_all_or_none() -> None:
    parameters = [("a", (2,), torch.float64, True), ("b", (3,), torch.float64, False)]
    layout = ParameterLayout.plan(parameters, aliases={"a": ("c",)})
    flat = layout.allocate()
    layout.write(flat, {"c": torch.ones(2), "b": torch.arange(3)})
    assert set(layout.named(flat)) == {"a", "b"}
    assert layout.named(flat)["a"].tolist() == [1, 1]
    for wrong in (
        {"a": torch.zeros(2), "x": torch.zeros(1)},
        {"a": torch.zeros(2), "b": torch.zeros(2)},
    ):
        with pytest.raises(
            ConfigurationError, match=r"no parameter is named 'x'|'b' has shape \(2,\)"
        ):
            layout.write(flat, wrong)
        assert layout.named(flat)["a"].tolist() == [1, 1]
