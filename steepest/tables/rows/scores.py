"""How often rows were pushed, older pushes counting less: scores that are compared at any time as they are.

A sighting weighs twice as much as one a half-life of updates earlier. Instead of making all scores smaller as time
passes, later sightings weigh more (forward decay: Cormode, Shkapenyuk, Srivastava, Xu 2009): so a row's score changes
only when it is pushed, and only grows. Between two powers of two the weight grows in a straight line. A score is
an exponent and 31 bits, of which the first is always set, in one integer, so that integers compare as scores; all is
integer arithmetic, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from steepest.tables.rows.kernels import Int32s, Int64s, inlined, kernel, read_only
from steepest.tables.rows.state import TableState

_BITS = 30
_ONE = 1 << _BITS
_LOW = _ONE - 1
_OFFSET = 64  # so that exponents are positive
_FURTHEST = 62


@inlined
def _packed(exponent: int, mantissa: int) -> int:
    return (exponent << _BITS) | (mantissa - _ONE)


@inlined
def _grown(score: int, sightings: int, half_life: int, version: int) -> int:
    """Return a score with so many sightings at a version more; 0 is the score without any."""
    weight = sightings * (half_life + version % half_life)
    bits, rest = 0, weight
    while rest > 1:
        rest >>= 1
        bits += 1
    exponent = version // half_life + bits + _OFFSET - _BITS
    mantissa = weight << (_BITS - bits) if bits <= _BITS else weight >> (bits - _BITS)
    if score == 0:
        return _packed(exponent, mantissa)
    own_exponent, own = score >> _BITS, (score & _LOW) + _ONE
    if own_exponent >= exponent:
        mantissa = own + (mantissa >> min(own_exponent - exponent, _FURTHEST))
        exponent = own_exponent
    else:
        mantissa += own >> min(exponent - own_exponent, _FURTHEST)
    if mantissa >= 2 * _ONE:
        mantissa >>= 1
        exponent += 1
    return _packed(exponent, mantissa)


@kernel
def _grow(
    numbers: Int32s,
    tables: Int32s,
    sightings: Int32s,
    half_lives: Int64s,
    version: int,
    scores: Int64s,
) -> None:
    for at in range(len(numbers)):
        half_life = half_lives[tables[at]]
        if numbers[at] >= 0 and half_life:
            number = numbers[at]
            scores[number] = _grown(scores[number], np.int64(sightings[at]), half_life, version)


@kernel
def _of_one_time(
    tables: Int32s, sightings: Int64s, written: Int64s, half_lives: Int64s, scores: Int64s
) -> None:
    """Fill in the scores of rows all of whose sightings were with their last push."""
    for at in range(len(scores)):
        half_life = half_lives[tables[at]]
        scores[at] = 0
        if half_life:
            scores[at] = _grown(0, max(sightings[at], 1), half_life, written[at])


class Scores:
    """The scores of a shard's rows, which `Blocks.scores` has.

    Args:
        half_lives: of each table, in updates; 0 for a table whose rows have no score.
    """

    def __init__(self, half_lives: Sequence[int]) -> None:
        self._half_lives: Int64s = read_only(np.array(half_lives), np.int64)

    @property
    def any(self) -> bool:
        """Whether rows of some table have scores."""
        return bool(self._half_lives.any())

    def grow(
        self, numbers: Int32s, tables: Int32s, sightings: Int32s, version: int, scores: Int64s
    ) -> None:
        """Add a push's sightings (n,) to the scores of rows, where a number is not negative."""
        keys = read_only(numbers, np.int32), read_only(tables, np.int32)
        _grow(*keys, read_only(sightings, np.int32), self._half_lives, version, scores)

    def completed(self, state: TableState) -> TableState:
        """Return a state with scores of these half-lives.

        Rows without one have it as if all their sightings had been with their last push; so have all rows of a table
        whose scores are of another half-life.
        """
        if not self.any:
            return state
        most, least = (self._of_one_time(state, one) for one in (False, True))
        scored = state.scores > 0
        other = scored & ((state.scores < least) | (state.scores > most))
        anew = ~scored | np.isin(state.tables, np.unique(state.tables[other]))
        return replace(state, scores=np.where(anew, most, state.scores))

    def _of_one_time(self, state: TableState, one: bool) -> Int64s:
        """Return the scores of rows all of whose sightings, or `one` alone, were with their last push."""
        seen = np.ones_like(state.sightings) if one else state.sightings
        scores = np.empty(len(seen), np.int64)
        arrays = read_only(seen, np.int64), read_only(state.written, np.int64)
        _of_one_time(read_only(state.tables, np.int32), *arrays, self._half_lives, scores)
        return scores
