"""Products of settings: each pair of values of any two, or each value, in few tests; the whole product on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[Any, ...]


def pairwise(
    axes: Iterable[Iterable[Any]], where: Callable[..., bool] = lambda *row: True
) -> list[tuple[Row, bool]]:
    """Return every row of a product for which `where` holds, each with whether it is one of the chosen.

    The chosen rows contain each pair of values of two axes that any row contains. They are found
    greedily: always the first row with the most pairs that no chosen row contains yet. The same
    arguments give the same rows.

    Example:
        >>> found = pairwise([(1, 2), "ab", "xy"])
        >>> len(found), [row for row, chosen in found if chosen]
        (8, [(1, 'a', 'x'), (1, 'b', 'y'), (2, 'a', 'y'), (2, 'b', 'x')])
    """
    columns = [list(axis) for axis in axes]
    numbers = product(*(range(len(column)) for column in columns))
    rows = {
        row: tuple(column[i] for column, i in zip(columns, row, strict=True)) for row in numbers
    }
    rows = {row: values for row, values in rows.items() if where(*values)}
    pairs = [frozenset(combinations(enumerate(row), 2)) for row in rows]
    bits = {pair: 1 << n for n, pair in enumerate(frozenset().union(*pairs))}
    masks = [sum(bits[pair] for pair in each) for each in pairs]  # sets of pairs as integers
    missing, chosen = sum(bits.values()), set[int]()
    while missing:
        found = [(mask & missing).bit_count() for mask in masks]
        best = found.index(max(found))
        missing &= ~masks[best]
        chosen.add(best)
    return [(values, n in chosen) for n, values in enumerate(rows.values())]


def grid(
    where: Callable[..., bool] = lambda *row: True, **axes: Iterable[Any]
) -> pytest.MarkDecorator:
    """Return the mark that parametrizes a test with the product of these settings, by name, where `where` holds.

    What is not needed for every pair of values is marked `full`, and run by `make test-full` only.
    """
    rows = [
        pytest.param(*row, marks=() if chosen else pytest.mark.full)
        for row, chosen in pairwise(axes.values(), where)
    ]
    return pytest.mark.parametrize(tuple(axes), rows)


def long_grid(*quick: Row, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Return the mark that parametrizes a test, which takes long, with the product of these settings, by name.

    Rows that are given as `quick` are not marked; what else each pair of values needs is marked
    `long`, and the rest `full`.
    """

    def marks(row: Row, chosen: bool) -> Any:
        return () if row in quick else pytest.mark.long if chosen else pytest.mark.full

    rows = [pytest.param(*row, marks=marks(row, on)) for row, on in pairwise(axes.values())]
    return pytest.mark.parametrize(tuple(axes), rows)


def diagonal(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Return the mark that parametrizes a test with the product of these settings, by name.

    Each value of each setting is in one of as many tests as the longest axis has values; the
    others are marked `full`. For tests that start processes, where simulations have the product.
    """
    columns = [list(axis) for axis in axes.values()]
    longest = max(len(column) for column in columns)
    kept = {tuple(n % len(column) for column in columns) for n in range(longest)}
    rows = [
        pytest.param(
            *(column[n] for column, n in zip(columns, row, strict=True)),
            marks=() if row in kept else pytest.mark.full,
        )
        for row in product(*(range(len(column)) for column in columns))
    ]
    return pytest.mark.parametrize(tuple(axes), rows)


def mostly_full(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return values for tests, of which all but those kept are marked `full`."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.full) for value in values
    ]
