"""Rows by how often they were pushed, older pushes counting less."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from steepest.errors import ConfigurationError
from steepest.tables.rows.eviction import LFU
from steepest.tables.rows.initial import Zeros
from steepest.tables.rows.scores import Scores
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.state import TableState
from tests.table_tools import ids_of, push, same, table

HALF = 64
ONE = np.zeros(1, np.int32)


def aged(**settings: Any) -> Any:
    return table(initial=Zeros(), **({"capacity": 12, "eviction": LFU(half_life=HALF)} | settings))


def weight(version: int, half_life: int = HALF) -> Fraction:
    """What a sighting at a version weighs."""
    return Fraction(half_life + version % half_life, half_life) * 2 ** (version // half_life)


def score(pushes: list[tuple[int, int]], half_life: int = HALF) -> int:
    """The score after (version, sightings) of pushes."""
    scores = np.zeros(1, np.int64)
    for version, sightings in pushes:
        seen = np.array([sightings], np.int32)
        Scores([half_life]).grow(ONE, ONE, seen, version, scores)
    return int(scores[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_a_full_table_loses_the_row_of_the_least_weight(seed: int) -> None:
    """As a dict of exact fractions says; some moves to another shard on the way."""
    random = np.random.default_rng(seed)
    shard = TableShard([aged()])
    weights: dict[int, Fraction] = {}
    for version in range(1, 300):
        ids = np.unique(random.integers(version // 8, version // 8 + 30, 4))
        seen = random.integers(1, 9, len(ids)).astype(np.int32)
        push(shard, ids, version, sightings=seen)
        excess = len(weights.keys() | set(ids.tolist())) - 12
        others = sorted((value, id) for id, value in weights.items() if id not in ids)
        for _, id in others[: max(excess, 0)]:
            del weights[id]
        for id, count in zip(ids.tolist(), seen.tolist(), strict=True):
            weights[id] = weights.get(id, Fraction(0)) + count * weight(version)
        assert ids_of(shard) == sorted(weights)
        if version % 90 == 0:
            state = shard.export()
            again = TableShard([aged()])
            again.load([TableState.of_arrays(state.arrays())], version)
            assert same(again.export(), state)
            shard = again


def test_what_was_much_asked_for_once_makes_room() -> None:
    plain, ageing = (TableShard([aged(capacity=2, eviction=LFU(half))]) for half in (None, 10))
    for shard in (plain, ageing):
        push(shard, [1], 1, sightings=np.array([50], np.int32))
        push(shard, [2], 100, sightings=np.array([2], np.int32))
        push(shard, [3], 101)
    assert (ids_of(plain), ids_of(ageing)) == ([1, 3], [2, 3])


def test_scores_compare_as_exact_weights_and_only_grow() -> None:
    random = np.random.default_rng(0)
    for half_life in (1, 3, 1000, 2**30):
        found = []
        for _ in range(200):
            versions = np.sort(random.integers(1, 40 * half_life, random.integers(1, 6))).tolist()
            seen = (2 ** random.uniform(0, 30, len(versions))).astype(int).tolist()
            pushes = list(zip(versions, seen, strict=True))
            exact = sum((count * weight(at, half_life) for at, count in pushes), Fraction(0))
            found.append((exact, score(pushes, half_life)))
            assert score(pushes, half_life) >= score(pushes[:-1], half_life) > -1
        found.sort()
        for (exact, mine), (others, theirs) in pairwise(found):
            if others > exact * (1 + Fraction(1, 2**26)):
                assert mine < theirs


def test_a_state_of_another_policy_has_scores_of_its_last_pushes() -> None:
    before = TableShard([table(initial=Zeros())])
    push(before, [1, 2], 1, sightings=np.array([9, 1], np.int32))
    push(before, [2], 500)
    for state in (before.export(), _of_half_life(5, before), _of_half_life(5000, before)):
        shard = TableShard([aged()])
        shard.load([state], 500)
        expected = [score([(1, 9)]), score([(500, 2)])]
        assert shard.export().scores.tolist() == expected
    kept = TableShard([aged(capacity=1)])
    kept.load([before.export()], 500)
    assert ids_of(kept) == [2]


def _of_half_life(half_life: int, shard: TableShard) -> TableState:
    other = TableShard([aged(eviction=LFU(half_life=half_life))])
    other.load([shard.export()], 500)
    return other.export()


@pytest.mark.parametrize("half_life", [0, -1, 1.5, True, 2**30 + 1])
def test_half_lives_are_counts_of_updates(half_life: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"half_life.*: give"):
        LFU(half_life=half_life)
