"""Sums and means over bags of rows, and the gradients of the rows."""

from __future__ import annotations

import numpy as np

from steepest.tables.rows.kernels import Floats, Int32s, Int64s, kernel, read_only


@kernel
def _pool(
    rows: Floats, inverse: Int32s, bounds: Int64s, weights: Floats, mean: bool, pooled: Floats
) -> None:
    for bag in range(len(pooled)):
        target = pooled[bag]
        begin, end = bounds[bag], bounds[bag + 1]
        for at in range(begin, end):
            row = rows[inverse[at]]
            if len(weights):
                weight = weights[at]
                for column in range(len(target)):
                    target[column] += row[column] * weight
            else:
                for column in range(len(target)):
                    target[column] += row[column]
        if mean and end > begin + 1:
            for column in range(len(target)):
                target[column] /= end - begin


@kernel
def _spread(
    gradients: Floats, inverse: Int32s, bounds: Int64s, weights: Floats, mean: bool, sums: Floats
) -> None:
    scaled = np.empty(sums.shape[1], sums.dtype)
    for bag in range(len(gradients)):
        begin, end = bounds[bag], bounds[bag + 1]
        for column in range(len(scaled)):
            scaled[column] = gradients[bag, column]
        if mean and end > begin + 1:
            for column in range(len(scaled)):
                scaled[column] /= end - begin
        for at in range(begin, end):
            target = sums[inverse[at]]
            if len(weights):
                weight = weights[at]
                for column in range(len(scaled)):
                    target[column] += scaled[column] * weight
            else:
                for column in range(len(scaled)):
                    target[column] += scaled[column]


@kernel
def _products(
    gradients: Floats, rows: Floats, inverse: Int32s, bounds: Int64s, products: Floats
) -> None:
    for bag in range(len(gradients)):
        for at in range(bounds[bag], bounds[bag + 1]):
            row = rows[inverse[at]]
            for column in range(len(row)):
                products[at] += gradients[bag, column] * row[column]


class Bags:
    """Which rows are in which bags, as kernels take it.

    Args:
        inverse: (n,), of each id its row.
        bounds: (B + 1,), where each bag begins, and n.
        weights: (n,), of the rows' dtype, or none of them.
        mean: means instead of sums.
    """

    def __init__(self, inverse: Int32s, bounds: Int64s, weights: Floats, mean: bool) -> None:
        self._inverse, self._bounds = read_only(inverse, np.int32), read_only(bounds, np.int64)
        self._weights, self._mean = read_only(weights, weights.dtype), mean

    def pool(self, rows: Floats) -> Floats:
        """Return the sums or means of bags, (B, dim), of rows (m, dim); those of empty bags are 0."""
        pooled = np.zeros((len(self._bounds) - 1, rows.shape[1]), rows.dtype)
        rows = read_only(rows, rows.dtype)
        _pool(rows, self._inverse, self._bounds, self._weights, self._mean, pooled)
        return pooled

    def row_gradients(self, gradients: Floats, count: int) -> Floats:
        """Return the gradients of the rows, (count, dim), from those of the bags, (B, dim)."""
        sums = np.zeros((count, gradients.shape[1]), gradients.dtype)
        values = read_only(gradients, gradients.dtype)
        _spread(values, self._inverse, self._bounds, self._weights, self._mean, sums)
        return sums

    def weight_gradients(self, gradients: Floats, rows: Floats) -> Floats:
        """Return the gradients of the weights, (n,), of sums."""
        products = np.zeros(len(self._inverse), rows.dtype)
        given, rows = read_only(gradients, gradients.dtype), read_only(rows, rows.dtype)
        _products(given, rows, self._inverse, self._bounds, products)
        return products
