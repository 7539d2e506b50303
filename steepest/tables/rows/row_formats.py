"""Rows in fewer bytes: bfloat16, float16, or int8 with a scale for each row; slots in bfloat16, too.

Pushes compute in float32. What they make is rounded by chance, up or down, in proportion to how near either is: the
mean of many small changes is right, where each alone would be rounded away (Gupta et al., "Deep learning with limited
numerical precision", 2015). Chance is a function of (seed, table's name, id, version, column) alone, so that copies,
replays and resumed runs have the same bits. First values, and rows of a checkpoint, are rounded to the nearest.

The scale of an int8 row is the least power of two with which its values are from -127 to 127. It depends on the row
alone, so that a row that is read and written again is the same bits in every format; and it mostly stays, so that a
push rounds what it has changed, and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from steepest.tables.rows.gradients import Bytes
from steepest.tables.rows.hashing import GAMMA, mix
from steepest.tables.rows.kernels import Floats, Int32s, Int64s, inlined, kernel, read_only

_FLOAT32, _BFLOAT16, _FLOAT16, _INT8 = 0, 1, 2, 3
_KINDS = {"float32": _FLOAT32, "bfloat16": _BFLOAT16, "float16": _FLOAT16, "int8": _INT8}
_TURN = 256  # rows that are read at once
_16, _LOW = np.uint64(16), np.uint64(0xFFFF)
_ROUNDING = np.uint64(0xE220A8397B1DCDAF)  # other chances than those of first values and admissions
_NEAREST = np.int64(-1)
_SEVEN_BITS = np.float32(127.0)
_LARGEST = np.float32(3.4028234663852886e38)  # finite
#: In which values may lie and travel.
DTYPES = ("float32", "float64", "bfloat16", "float16", "int8")
#: The version of no push: rows are rounded to the nearest.
TO_NEAREST = -1


class RowWords(NamedTuple):
    """Rows as kernels take them: the same bytes in units of 16 bits and of 8."""

    words: npt.NDArray[np.uint16]  # (n, width)
    octets: npt.NDArray[np.int8]  # (n, 2 * width)


class RowForm(NamedTuple):
    """How a row lies in words of 16 bits, as kernels take it."""

    values: int  # which of `_KINDS` they are
    slots: int  # likewise
    dim: int
    sent: int  # words of its values, and of their scale, with which it begins


@inlined
def _of_bfloat16(word: int) -> Any:
    return np.uint32(np.int64(word) << 16).view(np.float32)


@inlined
def _of_float16(word: int) -> Any:
    bits = np.int64(word)
    sign, exponent, fraction = (bits & 0x8000) << 16, bits & 0x7C00, bits & 0x3FF
    if exponent == 0:
        small = np.float32(fraction * 2.0**-24)
        return -small if sign else small
    if exponent == 0x7C00:
        return np.uint32(sign | 0x7F800000 | (fraction << 13)).view(np.float32)
    return np.uint32(sign | (((bits & 0x7FFF) << 13) + 0x38000000)).view(np.float32)


@inlined
def _read(words: Any, begin: int, kind: int, target: Any) -> None:
    """Read numbers of a kind from the words of a row."""
    if kind == _BFLOAT16:
        for column in range(len(target)):
            target[column] = _of_bfloat16(words[begin + column])
    elif kind == _FLOAT16:
        for column in range(len(target)):
            target[column] = _of_float16(words[begin + column])
    else:
        for column in range(len(target)):
            low = np.int64(words[begin + 2 * column])
            high = np.int64(words[begin + 2 * column + 1])
            target[column] = np.uint32(low | (high << 16)).view(np.float32)


@kernel
def _unpack(packed: RowWords, form: RowForm, numbers: Int32s, rows: Floats) -> int:
    """Write rows as float32, their values alone if there is no room for slots; leave out numbers below 0."""
    # In turns, a word of each row is read first: these reads wait for memory all at once. Their sum is returned, or the
    # compiler would leave them out.
    read = 0
    for first in range(0, len(numbers), _TURN):
        end = min(first + _TURN, len(numbers))
        for at in range(first, end):
            read += np.int64(packed.words[max(numbers[at], 0), 0])
        for at in range(first, end):
            if numbers[at] < 0:
                continue
            words, target = packed.words[numbers[at]], rows[at]
            if form.values == _INT8:
                octets = packed.octets[numbers[at]]
                scale = _of_bfloat16(words[form.sent - 1])
                for column in range(form.dim):
                    target[column] = np.float32(octets[column]) * scale
            else:
                _read(words, 0, form.values, target[: form.dim])
            _read(words, form.sent, form.slots, target[form.dim :])
    return read


# To round, `draw` is added to what is cut off, and is of 16 random bits, or `_NEAREST`: then ties go to even numbers.


@inlined
def _whole(value: float, draw: int) -> Any:
    """Return a number rounded to a whole one."""
    return np.floor(value + (draw + 0.5) * 2.0**-16) if draw >= 0 else np.rint(value)


@inlined
def _to_bfloat16(value: np.float32, draw: int) -> Any:
    bits = np.int64(np.float32(value).view(np.uint32))
    rounded = bits + (draw if draw >= 0 else 0x7FFF + ((bits >> 16) & 1))
    if (bits & 0x7F800000) == 0x7F800000:  # infinite, or NaN, which stays one
        rounded = (bits | 0x400000) if (bits & 0x7FFFFF) != 0 else bits
    elif (rounded & 0x7F800000) == 0x7F800000:
        rounded = bits
    return rounded >> 16


@inlined
def _to_float16(value: np.float32, draw: int) -> Any:
    bits = np.int64(np.float32(value).view(np.uint32))
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if size >= 0x7F800000:  # infinite, or NaN, which stays one
        return sign | (0x7E00 if size > 0x7F800000 else 0x7C00)
    if size < 0x38800000:  # a multiple of 2^-24
        return sign | np.int64(_whole(abs(np.float64(value)) * 2.0**24, draw))
    rounded = size + (draw >> 3 if draw >= 0 else 0xFFF + ((size >> 13) & 1))
    return sign | (0x7BFF if rounded >= 0x47800000 else (rounded - 0x38000000) >> 13)


@inlined
def _write(words: Any, begin: int, kind: int, source: Any, draws: Int64s) -> None:
    """Write numbers to the words of a row, as those of a kind."""
    if kind == _BFLOAT16:
        for column in range(len(source)):
            words[begin + column] = _to_bfloat16(source[column], draws[column])
    elif kind == _FLOAT16:
        for column in range(len(source)):
            words[begin + column] = _to_float16(source[column], draws[column])
    else:
        for column in range(len(source)):
            bits = np.int64(np.float32(source[column]).view(np.uint32))
            words[begin + 2 * column] = bits & 0xFFFF
            words[begin + 2 * column + 1] = bits >> 16


@inlined
def _write_int8(octets: Any, source: Any, draws: Int64s) -> Any:
    """Write values as multiples of a power of two; return that, as a bfloat16."""
    largest = np.float32(0.0)
    for column in range(len(source)):
        size = abs(source[column])
        if not size <= _LARGEST:  # NaN or infinite: so are all values then, as 0 times NaN is
            octets[: len(source)] = 0
            return 0x7FC0
        largest = max(largest, size)
    bits = np.int64(np.float32(largest / _SEVEN_BITS).view(np.uint32))
    exponent = (bits >> 23) + (1 if (bits & 0x7FFFFF) != 0 else 0)
    scale = np.float64(_of_bfloat16(exponent << 7))
    inverse = 1.0 / scale if scale > 0.0 else 0.0
    for column in range(len(source)):
        whole = _whole(np.float64(source[column]) * inverse, draws[column])
        octets[column] = np.int8(min(max(whole, -127.0), 127.0))
    return exponent << 7


@inlined
def _draw(counter: np.uint64, draws: Int64s) -> None:
    """Fill in 16 random bits for each column."""
    drawn = counter
    for column in range(len(draws)):
        if (column & 3) == 0:
            counter += GAMMA
            drawn = mix(counter)
        draws[column] = np.int64(drawn & _LOW)
        drawn >>= _16


@kernel
def _pack(
    rows: Floats,
    form: RowForm,
    numbers: Int32s,
    tables: Int32s,
    ids: Int64s,
    salts: Int64s,
    version: int,
    packed: RowWords,
) -> None:
    """Write rows of float32 as they lie, rounded by the chance of a version; leave out numbers below 0."""
    draws = np.full(rows.shape[1], _NEAREST)
    for at in range(len(numbers)):
        if numbers[at] < 0:
            continue
        source, words = rows[at], packed.words[numbers[at]]
        if version >= 0:
            salt = np.uint64(salts[tables[at]]) ^ _ROUNDING
            counter = mix(mix(np.uint64(ids[at]) ^ salt) + GAMMA * np.uint64(version))
            _draw(counter, draws)
        values, slots = source[: form.dim], source[form.dim :]
        if form.values == _INT8:
            octets = packed.octets[numbers[at]]
            words[form.sent - 1] = _write_int8(octets, values, draws)
        else:
            _write(words, 0, form.values, values, draws)
        _write(words, form.sent, form.slots, slots, draws[form.dim :])


@kernel
def _copy(packed: RowWords, numbers: Int32s, copies: npt.NDArray[np.uint16]) -> int:
    """Copy the first words of rows, where a number is not negative; see `_unpack` about turns."""
    read, width = 0, copies.shape[1]
    for first in range(0, len(numbers), _TURN):
        end = min(first + _TURN, len(numbers))
        for at in range(first, end):
            read += np.int64(packed.words[max(numbers[at], 0), 0])
        for at in range(first, end):
            if numbers[at] >= 0:
                words, target = packed.words[numbers[at]], copies[at]
                for column in range(width):
                    target[column] = words[column]
    return read


class RowFormat:
    """How the rows of a group of tables lie in memory, and how their values travel.

    Attributes:
        row_bytes: of a row, with its slots.
        width: the same in words of 16 bits, of a packed one.
        sent_bytes: of a row's values, as they travel.
        dtype: in which pushes compute, and in which values are pulled.
        is_packed: whether rows lie in another format than that.
    """

    def __init__(self, dim: int, slots: int, dtype: str, slots_dtype: str | None = None) -> None:
        """Take values of one of `DTYPES` and slots, see `steepest.tables.rows.table.Table`."""
        self.dim, self.slots = dim, slots
        self.dtype = "float64" if dtype == "float64" else "float32"
        self.is_packed = dtype != self.dtype or slots_dtype is not None
        if not self.is_packed:
            size = np.dtype(self.dtype).itemsize
            self.sent_bytes, self.row_bytes = self.dim * size, (self.dim + self.slots) * size
            return
        sent = {"float32": 2 * dim, "int8": (dim + 1) // 2 + 1}.get(dtype, dim)
        slots_kind = slots_dtype or self.dtype
        self._form = RowForm(_KINDS[dtype], _KINDS[slots_kind], dim, sent)
        self.width = sent + slots * (1 if slots_kind == "bfloat16" else 2)
        self.sent_bytes, self.row_bytes = 2 * sent, 2 * self.width

    def unpack(self, packed: RowWords, numbers: Int32s, rows: Floats) -> None:
        """Write rows (n, dim), or with slots (n, dim + slots), as float32; those of numbers below 0 stay."""
        _unpack(packed, self._form, read_only(numbers, np.int32), rows)

    def pack(
        self,
        rows: Floats,
        numbers: Int32s,
        keys: tuple[Int32s, Int64s],
        salts: Int64s,
        version: int,
        packed: RowWords,
    ) -> None:
        """Round rows (n, dim + slots), or their values (n, dim), to where they lie; not those of numbers below 0.

        Args:
            rows: float32.
            numbers: (n,), of the rows in `packed`.
            keys: (n,) each, their table numbers and ids.
            salts: of the tables, see `steepest.tables.rows.hashing.salt_of`.
            version: whose chances round; `TO_NEAREST` for none.
            packed: where rows lie.
        """
        tables, ids = keys
        _pack(
            read_only(rows, np.float32),
            self._form,
            read_only(numbers, np.int32),
            read_only(tables, np.int32),
            read_only(ids, np.int64),
            salts,
            version,
            packed,
        )

    def copy(self, packed: RowWords, numbers: Int32s, sent: Bytes) -> None:
        """Copy values as they travel to `sent`, (n, sent_bytes), where a number is not negative."""
        _copy(packed, read_only(numbers, np.int32), sent.view(np.uint16))

    def packed_values(
        self, values: Floats, keys: tuple[Int32s, Int64s], salts: Int64s
    ) -> npt.NDArray[np.uint8]:
        """Return values (n, dim) as they travel, (n, sent_bytes), rounded to the nearest."""
        words = np.zeros((len(values), self.sent_bytes // 2), np.uint16)
        numbers = np.arange(len(values), dtype=np.int32)
        self.pack(values, numbers, keys, salts, TO_NEAREST, as_words(words))
        return words.view(np.uint8)

    def received(self, sent: Bytes) -> Floats:
        """Return the values (n, dim) that have travelled as so many bytes."""
        if not self.is_packed:
            return sent.view(self.dtype).reshape(-1, self.dim)
        words = read_only(sent.view(np.uint16).reshape(-1, self.sent_bytes // 2), np.uint16)
        values = np.empty((len(words), self.dim), np.float32)
        _unpack(
            RowWords(words, words.view(np.int8)),
            self._form,
            read_only(np.arange(len(words)), np.int32),
            values,
        )
        return values


def as_words(words: npt.NDArray[np.uint16]) -> RowWords:
    """Return rows of 16-bit words as kernels take them."""
    return RowWords(words, words.view(np.int8))
