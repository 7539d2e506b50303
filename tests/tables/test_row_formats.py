"""Rows in fewer bytes: how numbers lie, how they are rounded, and that chance is the same each time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from steepest.tables.rows.eviction import L2WeightEvict
from steepest.tables.rows.hashing import salt_of, shard_of
from steepest.tables.rows.initial import Normal, Zeros
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.row_formats import TO_NEAREST, RowFormat, as_words
from steepest.tables.rows.row_optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    RowOptimizer,
    RowWiseAdagrad,
)
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.table import Table, groups
from tests.table_tools import ids_of, push, same, table

#: dtype of values, and of slots
FORMATS: list[tuple[str, str | None]] = [
    ("bfloat16", None),
    ("float16", None),
    ("int8", None),
    ("int8", "bfloat16"),
    ("float32", "bfloat16"),
]
MASK = 2**64 - 1


# -- how numbers lie -----------------------------------------------------------------------------


def packed(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rows as they travel, rounded to the nearest."""
    keys = np.zeros(len(values), np.int32), np.arange(len(values))
    return RowFormat(values.shape[1], 0, dtype).packed_values(values, keys, np.zeros(1, np.int64))


def unpacked(sent: np.ndarray, dim: int, dtype: str) -> np.ndarray:
    return RowFormat(dim, 0, dtype).received(sent.reshape(-1))


def test_each_number_of_16_bits_is_what_torch_takes_it_for() -> None:
    words = np.arange(2**16, dtype=np.uint16)
    for dtype, torchs in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        found = unpacked(words.view(np.uint8), 1, dtype)[:, 0]
        expected = torch.from_numpy(words.view(np.int16)).view(torchs).float().numpy()
        assert np.array_equal(found, expected, equal_nan=True)
        kept = packed(found[:, None], dtype).view(np.uint16)[:, 0]
        same_number = np.isnan(expected) | (kept == words)
        assert same_number.all()
        assert np.isnan(unpacked(kept.view(np.uint8), 1, dtype)[np.isnan(expected), 0]).all()


def test_the_nearest_number_of_16_bits_is_torchs() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 100_000, np.uint32)
    bits[:1000] = bits[:1000] & 0xFFFF0000 | 0x8000  # ties
    values = bits[(bits & 0x7F800000) != 0x7F800000].view(np.float32)
    small = random.normal(size=10_000) * 2.0 ** random.integers(-26, 8, 10_000)
    values = np.concatenate([values, small.astype(np.float32)])[:, None]
    for dtype, torchs, most in (
        ("bfloat16", torch.bfloat16, 3.38e38),
        ("float16", torch.float16, 65504),
    ):
        found = unpacked(packed(values, dtype), 1, dtype)
        expected = torch.from_numpy(values).to(torchs).float().numpy()
        fits = abs(values) <= most
        assert np.array_equal(found[fits], expected[fits])
        assert fits.sum() > 10_000
        assert np.isfinite(found[~fits]).all()  # the greatest number, not an infinite one


def test_a_row_of_int8_is_within_half_a_step_of_its_scale() -> None:
    values = np.random.default_rng(0).normal(size=(500, 7)).astype(np.float32)
    values *= np.float32(10.0) ** np.arange(-20, 20, 0.08)[:, None].astype(np.float32)
    found = unpacked(packed(values, "int8"), 7, "int8")
    most = abs(values).max(1, keepdims=True)
    assert (abs(found - values) <= most / 127).all()  # a step is less than 2 / 127
    assert np.array_equal(unpacked(packed(found, "int8"), 7, "int8"), found)
    assert packed(values, "int8").shape == (500, 10)  # seven, one to align, two of the scale
    assert not unpacked(packed(np.zeros((1, 3), np.float32), "int8"), 3, "int8").any()


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float32"])
def test_nan_and_infinity_are_not_hidden(dtype: str) -> None:
    rows = np.array([[1.0, np.nan, 2.0], [np.inf, 1.0, -1.0], [1.0, 2.0, 3.0]], np.float32)
    form = RowFormat(3, 0, dtype, "bfloat16")
    words = np.zeros((3, form.width), np.uint16)
    numbers = np.arange(3, dtype=np.int32)
    for version in (TO_NEAREST, 1):
        keys = np.zeros(3, np.int32), np.arange(3)
        form.pack(rows, numbers, keys, np.zeros(1, np.int64), version, as_words(words))
        found = np.empty_like(rows)
        form.unpack(as_words(words), numbers, found)
        assert np.isfinite(found).all(1).tolist() == [False, False, True]


# -- how pushes round ----------------------------------------------------------------------------


def mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def drawn(key: int, salt: int, version: int, columns: int) -> list[int]:
    """16 bits for each column."""
    gamma = 0x9E3779B97F4A7C15
    counter = mixed((mixed(key ^ salt ^ 0xE220A8397B1DCDAF) + gamma * version) & MASK)
    draws = []
    for turn in range(1, -(-columns // 4) + 1):
        bits = mixed((counter + gamma * turn) & MASK)
        draws += [(bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]
    return draws[:columns]


def chosen(value: float, kind: str, draw: int) -> float:
    """A number rounded by chance, as its definition says: to the next multiple of a step, down plus what is drawn."""
    if kind == "float32" or value == 0.0:
        return value
    _, exponent = math.frexp(abs(value))
    if kind == "bfloat16":
        step, cut = 2.0 ** (exponent - 8), draw / 2**16
    elif exponent < -13:  # float16 below its least normal number
        step, cut = 2.0**-24, (draw + 0.5) / 2**16
    else:
        step, cut = 2.0 ** (exponent - 11), (draw >> 3) / 2**13
    return math.copysign(step * math.floor(abs(value) / step + cut), value)


def rounded(
    row: np.ndarray, dim: int, kinds: tuple[str, str | None], key: int, salt: int, version: int
) -> list[float]:
    """A row of float32 as it lies after a push."""
    draws = drawn(key, salt, version, len(row))
    values, kind = row[:dim].tolist(), kinds[0]
    if kind == "int8":
        by = 2.0 ** math.ceil(math.log2(max(map(abs, values)) / 127))
        found = [
            by * math.floor(value / by + (draw + 0.5) / 2**16)
            for value, draw in zip(values, draws, strict=False)
        ]
    else:
        found = [chosen(*each) for each in zip(values, [kind] * dim, draws, strict=False)]
    slots = zip(row[dim:].tolist(), draws[dim:], strict=True)
    return found + [chosen(value, kinds[1] or "float32", draw) for value, draw in slots]


OPTIMIZERS: list[RowOptimizer] = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    FTRL(lr=0.3),
]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("kinds", FORMATS, ids=str)
def test_pushes_are_those_of_float32_with_each_result_rounded(
    kinds: tuple[str, str | None],
) -> None:
    """An exact serial reference: rows of float32, which Python rounds after each push."""
    dim, random = 6, np.random.default_rng(0)
    for optimizer in OPTIMIZERS:
        described = table("t", dim, optimizer=optimizer, dtype=kinds[0], slots_dtype=kinds[1])
        shard = TableShard([described], seed=5)
        columns = dim + optimizer.slots(dim)
        rows = np.empty((9, columns), np.float32)
        rows[:, :dim] = shard.pull(np.zeros(9, np.int32), np.arange(9))
        rows[:, dim:] = optimizer.first_slots(dim)
        for version in range(1, 8):
            ids = random.permutation(9)[:5].astype(np.int32)
            gradients = random.normal(size=(5, dim)).astype(np.float32)
            shard.push(np.zeros(5, np.int32), ids, gradients, version)
            optimizer.update(rows, ids, gradients, version)
            for key in ids.tolist():
                salt = salt_of("t", 5)
                rows[key] = rounded(rows[key], dim, kinds, key, salt, version)
        state = shard.export()
        assert state.ids.tolist() == list(range(9))
        assert np.array_equal(state.values, rows[:, :dim])
        assert np.array_equal(state.slots, rows[:, dim:])


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_small_updates_are_not_lost(dtype: str) -> None:
    """3,000 changes of 2^-13 each, of which the nearest number to 1 takes none."""
    shard = TableShard([table("t", 100, initial=Normal(1.0, 0.0), dtype=dtype)])
    for version in range(1, 3001):
        push(shard, [1, 2], version, -(2.0**-13))
    values = shard.pull([0, 0], [1, 2])
    assert abs(values.mean() - (1 + 3000 / 2**13)) < 0.02
    nearest = unpacked(packed(np.full((1, 100), 1 + 2.0**-13, np.float32), dtype), 100, dtype)
    assert dtype == "int8" or (nearest == 1.0).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("kinds", FORMATS, ids=str)
def test_bits_do_not_depend_on_shards_or_on_a_state_between(kinds: tuple[str, str | None]) -> None:
    """As copies, replays and resumed runs need it; pushes are of many rows, so that they take several passes."""
    described = table("t", 5, optimizer=Adam(), dtype=kinds[0], slots_dtype=kinds[1])
    whole = TableShard([described], seed=1)
    parts = [TableShard([described], seed=1, shard=at, num_shards=2) for at in range(2)]
    random = np.random.default_rng(0)
    for version in range(1, 5):
        ids = random.permutation(6000)[:5000]
        gradients = random.normal(size=(5000, 5)).astype(np.float32)
        zeros = np.zeros(5000, np.int32)
        whole.push(zeros, ids, gradients, version)
        of = shard_of(zeros, ids, Spread.evenly(1, 2))
        for at, part in enumerate(parts):
            mine = of == at
            part.push(zeros[mine], ids[mine], gradients[mine], version)
        if version == 2:
            again = TableShard([described], seed=1)
            again.load([whole.export()], 2)
            assert same(again.export(), whole.export())
            whole = again
    again = TableShard([described], seed=1)
    again.load([part.export() for part in parts], 4)
    assert same(again.export(), whole.export())
    other = TableShard([described], seed=2)
    assert not np.array_equal(other.pull([0] * 9, range(9)), whole.pull([0] * 9, range(9)))


@pytest.mark.parametrize("kinds", [*FORMATS, ("float32", None), ("float64", None)], ids=str)
def test_rows_travel_as_they_lie(kinds: tuple[str, str | None]) -> None:
    shard = TableShard([table("t", 5, optimizer=Adam(), dtype=kinds[0], slots_dtype=kinds[1])])
    push(shard, range(0, 40, 2), 1)
    form = shard.tables[0].form
    zeros, ids = np.zeros(60, np.int32), np.arange(60)
    sent = np.empty((60, form.sent_bytes), np.uint8)
    shard.pull_sent(zeros, ids, sent)
    values = shard.pull(zeros, ids)
    assert np.array_equal(form.received(sent.reshape(-1)), values)
    sizes = {"float64": 40, "float32": 20, "bfloat16": 10, "float16": 10, "int8": 8}
    assert form.sent_bytes == sizes[kinds[0]]
    before = values[1]  # of an id without a row
    push(shard, [1], 2, 0.0)
    assert np.array_equal(shard.pull([0], [1])[0], before)  # its row begins with the same bits


def test_rows_below_a_norm_go_whatever_they_lie_in() -> None:
    wears = (L2WeightEvict(l2_weight_threshold=1.0),)
    shard = TableShard([table("t", 4, initial=Zeros(), dtype="bfloat16", evict=wears)])
    push(shard, range(0, 5000, 2), 1, 0.1)
    push(shard, range(1, 5000, 2), 2, 1.0)
    assert shard.evict(2) == 2500
    assert ids_of(shard) == list(range(1, 5000, 2))


def test_a_state_of_float32_is_rounded_to_the_nearest() -> None:
    wide = TableShard([table("t", 3, optimizer=Adagrad())])
    push(wide, range(50), 1)
    state = wide.export()
    narrow = TableShard([table("t", 3, optimizer=Adagrad(), dtype="float16")])
    narrow.load([state], 1)
    assert np.array_equal(
        narrow.export().values, state.values.astype(np.float16).astype(np.float32)
    )
    assert np.array_equal(narrow.export().slots, state.slots)


def test_tables_of_other_formats_are_other_groups() -> None:
    tables = [
        Table(name=f"{dtype}{slots}", dim=4, dtype=dtype, slots_dtype=slots)
        for dtype, slots in [("float32", None), *FORMATS]
    ]
    assert len(groups(tables)) == 6
    rows = LocalRows(tables)
    group, number = rows.place(tables[3])
    assert rows.pull(group, np.array([number]), np.array([7])).dtype == np.float32
