"""How many distinct ids there are in data of which a sample is known, and how often the frequent ones are asked for.

The growth curve of distinct ids, D(n) after n look-ups, has the slope f1 / n, where f1 ids were seen once (Good,
"The population frequencies of species and the estimation of population parameters", 1953). So its exponent, in
D ~ n^b, is b = f1 / D at the sample's size, and at half of it that of every second look-up, whose expectation
follows from the counts alone. Three answers come of it:

- at least: the curve of Chao1's number of unseen ids (Chao 1984; Colwell et al., "Models and estimators linking
  individual-based and sample-based rarefaction, extrapolation and comparison of assemblages", 2012, equation 9);
- at most: b stays as it is, which is Heaps' law, exact for power laws as long as few of all ids are known;
- likely: b goes on falling, for each doubling by as much as for the last.

All assume that look-ups are a random sample; data in order of time later have ids that their first part lacks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


class DistinctIds(NamedTuple):
    """How many distinct ids there are: an estimate, and bounds for it."""

    likely: int
    least: int
    most: int

    def at_most(self, limit: int) -> DistinctIds:
        """Return the same numbers, none larger than a limit."""
        return DistinctIds(*(min(each, limit) for each in self))


def distinct_ids(counts: Counts, times: float) -> DistinctIds:
    """Return how many distinct ids data have that are `times` a sample, at least 1.

    Args:
        counts: (n,), how often each id of the sample was seen, from 1.
        times: look-ups of the data over those of the sample.
    """
    known, seen = len(counts), int(counts.sum())
    if not known or times <= 1:
        return DistinctIds(known, known, known)
    once, twice = (int((counts == number).sum()) for number in (1, 2))
    further = seen * (times - 1)
    unseen = once * (once - 1) / (2 * (twice + 1))
    least = float(known)
    if unseen:
        least += unseen * -math.expm1(further * math.log1p(-once / (seen * unseen + once)))
    doublings = math.log(times)
    exponent = once / known
    bent = _falling(exponent, _exponent_at_half(counts), doublings)
    most = min(known * times**exponent, known + further * once / seen)
    most = max(most, least)
    likely = min(max(known * math.exp(bent), least), most)
    return DistinctIds(round(likely), round(least), round(most))


def _exponent_at_half(counts: Counts) -> float:
    """Return the expected exponent of the growth curve of a random half of the look-ups."""
    none = 0.5 ** counts.astype(np.float64)
    return float((counts * none).sum() / (1.0 - none).sum())


def _falling(exponent: float, before: float, logarithm: float) -> float:
    """Return the logarithm of the growth if the exponent goes on falling as over the last doubling, down to 0."""
    fall = max(before - exponent, 0.0) / math.log(2.0)
    until = min(logarithm, exponent / fall) if fall else logarithm
    return exponent * until - fall * until * until / 2


def hit_share(first: Counts, second: Counts, rows: int, places: int) -> float:
    """Return the share of look-ups that find their row in memory, if the most frequent ids have places there.

    Which these are is decided by one half of a sample, and the share is of the other half, so that no id is
    counted because it was frequent by chance. Places that are left are for ids that the first half has not, each
    alike.

    Args:
        first, second: (n,), how often each id was seen in each half; 0 where it was not.
        rows: of the whole data.
        places: rows in memory.
    """
    if places >= rows:
        return 1.0
    total = int(second.sum())
    if not total:
        return 0.0
    known = first > 0
    order = np.argsort(-first[known], kind="stable")
    taken = int(second[known][order][:places].sum())
    left = max(places - int(known.sum()), 0)
    others = max(rows - int(known.sum()), 1)
    return float(min((taken + int(second[~known].sum()) * left / others) / total, 1.0))
