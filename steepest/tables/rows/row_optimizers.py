"""Optimizers of rows: each updates the rows of one push, and no others.

A row's slots lie beside its values. What torch does to a whole parameter in each step, momentum's decay or
weight decay, is done to a row when it is pushed. Learning rates may be given anew with each push.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from steepest.errors import ConfigurationError
from steepest.tables.rows.kernels import Floats, Int32s, inlined, kernel
from steepest.validation import require_count, require_number, require_positive


@inlined
def _prepare(row: Floats, gradient: Floats, common: Floats, out: Floats) -> None:
    """Write a row's clipped gradient, with weight decay, to `out`."""
    decay, most = common[1], common[2]
    for column in range(len(out)):
        out[column] = gradient[column]
    if most > 0:
        total = most - most  # a zero of the rows' dtype
        for column in range(len(out)):
            total += out[column] * out[column]
        norm = np.sqrt(total)
        if norm > most:
            scale = most / norm
            for column in range(len(out)):
                out[column] *= scale
    if decay != 0:
        for column in range(len(out)):
            out[column] += decay * row[column]


@kernel
def _sgd(rows: Floats, numbers: Int32s, gradients: Floats, common: Floats, own: Floats) -> None:
    dim = gradients.shape[1]
    rate = common[0]
    change = np.empty(dim, rows.dtype)
    for at in range(len(numbers)):
        if numbers[at] >= 0:
            row = rows[numbers[at]]
            _prepare(row, gradients[at], common, change)
            for column in range(dim):
                row[column] -= rate * change[column]


@kernel
def _momentum(
    rows: Floats, numbers: Int32s, gradients: Floats, common: Floats, own: Floats
) -> None:
    dim = gradients.shape[1]
    rate, momentum, nesterov = common[0], own[0], own[1] != 0
    change = np.empty(dim, rows.dtype)
    for at in range(len(numbers)):
        if numbers[at] >= 0:
            row = rows[numbers[at]]
            _prepare(row, gradients[at], common, change)
            for column in range(dim):
                buffer = momentum * row[dim + column] + change[column]
                row[dim + column] = buffer
                step = change[column] + momentum * buffer if nesterov else buffer
                row[column] -= rate * step


@kernel
def _adagrad(rows: Floats, numbers: Int32s, gradients: Floats, common: Floats, own: Floats) -> None:
    dim = gradients.shape[1]
    rate, eps = common[0], own[0]
    change = np.empty(dim, rows.dtype)
    for at in range(len(numbers)):
        if numbers[at] >= 0:
            row = rows[numbers[at]]
            _prepare(row, gradients[at], common, change)
            for column in range(dim):
                total = row[dim + column] + change[column] * change[column]
                row[dim + column] = total
                row[column] -= rate * (change[column] / (np.sqrt(total) + eps))


@kernel
def _row_wise_adagrad(
    rows: Floats, numbers: Int32s, gradients: Floats, common: Floats, own: Floats
) -> None:
    dim = gradients.shape[1]
    rate, eps, share = common[0], own[0], own[1]
    change = np.empty(dim, rows.dtype)
    for at in range(len(numbers)):
        if numbers[at] >= 0:
            row = rows[numbers[at]]
            _prepare(row, gradients[at], common, change)
            total = rate - rate
            for column in range(dim):
                total += change[column] * change[column]
            row[dim] += total * share
            step = rate / (np.sqrt(row[dim]) + eps)
            for column in range(dim):
                row[column] -= step * change[column]


@kernel
def _adam(rows: Floats, numbers: Int32s, gradients: Floats, common: Floats, own: Floats) -> None:
    dim = gradients.shape[1]
    rate, first, second, eps = common[0], own[0], own[1], own[2]
    change = np.empty(dim, rows.dtype)
    for at in range(len(numbers)):
        if numbers[at] >= 0:
            row = rows[numbers[at]]
            _prepare(row, gradients[at], common, change)
            for column in range(dim):
                gradient = change[column]
                mean = row[dim + column] + (gradient - row[dim + column]) * first
                square = row[2 * dim + column]
                square += (gradient * gradient - square) * second
                row[dim + column], row[2 * dim + column] = mean, square
                row[column] -= rate * (mean / (np.sqrt(square) + eps))


@kernel
def _ftrl(rows: Floats, numbers: Int32s, gradients: Floats, common: Floats, own: Floats) -> None:
    dim = gradients.shape[1]
    rate, beta, l1, l2 = common[0], own[0], own[1], own[2]
    zero = rate - rate
    change = np.empty(dim, rows.dtype)
    for at in range(len(numbers)):
        if numbers[at] >= 0:
            row = rows[numbers[at]]
            _prepare(row, gradients[at], common, change)
            for column in range(dim):
                gradient = change[column]
                square = row[dim + column]
                total = square + gradient * gradient
                pull = row[2 * dim + column]
                pull += gradient - (np.sqrt(total) - np.sqrt(square)) / rate * row[column]
                row[dim + column], row[2 * dim + column] = total, pull
                over = max(abs(pull) - l1, zero)
                over = -over if pull > 0 else over
                row[column] = over / ((beta + np.sqrt(total)) / rate + l2)


@kernel
def _sgd_everywhere(values: Floats, slots: Floats, gradients: Floats, common: Floats) -> None:
    rate = common[0]
    for at in range(len(values)):
        values[at] -= rate * gradients[at]


@kernel
def _adagrad_everywhere(values: Floats, slots: Floats, gradients: Floats, common: Floats) -> None:
    rate, eps = common[0], common[1]
    for at in range(len(values)):
        gradient = gradients[at]
        total = slots[at] + gradient * gradient
        slots[at] = total
        values[at] -= rate * (gradient / (np.sqrt(total) + eps))


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """How a push changes rows; one of the classes below.

    Attributes:
        lr: the learning rate of pushes that come without one.
        weight_decay: times the row is added to its gradient when it is pushed (L2).
        clip_norm: gradients of rows with a greater Euclidean norm are scaled down to it, before weight decay.
        follows: index of a parameter group of the model's optimizer: in each update `lr` is multiplied by
            that group's present learning rate over its first one, whether a schedule or a user has
            changed it. None for a rate that stays.
    """

    lr: float = 1e-2
    weight_decay: float = 0.0
    clip_norm: float | None = None
    follows: int | None = None

    def __post_init__(self) -> None:
        self._require("lr", "weight_decay")
        if self.follows is not None:
            require_count(f"{type(self).__name__}(follows)", self.follows, 0)
        if self.clip_norm is not None:
            require_positive(f"{type(self).__name__}(clip_norm)", self.clip_norm)

    def _require(self, *names: str) -> None:
        for name in names:
            require_number(f"{type(self).__name__}({name})", getattr(self, name))

    def slots(self, dim: int) -> int:
        """Return how many numbers a row of `dim` values has beside them."""
        return len(self.first_slots(dim))

    def first_slots(self, dim: int) -> list[float]:
        """Return the slots of a new row of `dim` values."""
        return self._first_slots(dim)

    def update(
        self,
        rows: Floats,
        numbers: Int32s,
        gradients: Floats,
        version: int,
        learning_rate: float | None = None,
    ) -> None:
        """Update rows in place.

        Args:
            rows: (capacity, dim + slots).
            numbers: (n,), of the rows to update, distinct; those below 0 are left out.
            gradients: (n, dim), of the rows' dtype, read-only.
            version: the number of the update, from 1 on.
            learning_rate: instead of `lr`.
        """
        rate = self.lr if learning_rate is None else learning_rate
        rate, own = self._terms(rate, version, gradients.shape[1])
        common = np.array([rate, self.weight_decay, self.clip_norm or 0.0], rows.dtype)
        self._kernel()(rows, numbers, gradients, common, np.array(own, rows.dtype))

    def update_everywhere(
        self, values: Floats, slots: Floats, gradients: Floats, learning_rate: float | None = None
    ) -> bool:
        """Update all rows in place as `update` does, if that leaves those alone that have no gradient.

        A loop over elements is several times as fast as one over rows.

        Args:
            values, gradients: (n, dim), contiguous.
            slots: (n, k), contiguous.
            learning_rate: instead of `lr`.

        Returns:
            Whether the rows are updated.
        """
        rate = self.lr if learning_rate is None else learning_rate
        run, own = self._everywhere()
        if run is None or self.clip_norm is not None or self.moves_by_itself:
            return False
        common = np.array([rate, own], values.dtype)
        run(values.reshape(-1), slots.reshape(-1), gradients.reshape(-1), common)
        return True

    def takes_rate(self) -> bool:
        """Return whether a factor of an update is one of `lr`, rather than of its gradients."""
        return True

    @property
    def moves_by_itself(self) -> bool:
        """Whether a push changes a row also where the row's gradient is all zeros."""
        return bool(self.weight_decay)

    # what each optimizer has of its own: slots, the rate and numbers for its kernel, and the kernel

    def _first_slots(self, dim: int) -> list[float]:
        raise NotImplementedError

    def _terms(self, rate: float, version: int, dim: int) -> tuple[float, list[float]]:
        raise NotImplementedError

    def _kernel(self) -> Any:
        raise NotImplementedError

    def _everywhere(self) -> tuple[Any, float]:
        """Return the kernel of `update_everywhere` with a number for it; None where there is none."""
        return None, 0.0


@dataclass(frozen=True, kw_only=True)
class SGD(RowOptimizer):
    """`torch.optim.SGD`; with momentum, a slot for each value, which decays when its row is pushed.

    Attributes:
        momentum: from 0 to 1; 0 for none.
        nesterov: whether it is Nesterov's.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("SGD(momentum)", self.momentum, 0.0, 1.0)
        if self.nesterov and not self.momentum:
            raise ConfigurationError("SGD(nesterov=True) without momentum: give a momentum above 0")

    @property
    def moves_by_itself(self) -> bool:
        """Whether there is weight decay, or momentum."""
        return bool(self.momentum) or super().moves_by_itself

    def _first_slots(self, dim: int) -> list[float]:
        return [0.0] * dim if self.momentum else []

    def _terms(self, rate: float, version: int, dim: int) -> tuple[float, list[float]]:
        return rate, [self.momentum, float(self.nesterov)]

    def _kernel(self) -> Any:
        return _momentum if self.momentum else _sgd

    def _everywhere(self) -> tuple[Any, float]:
        return _sgd_everywhere, 0.0


@dataclass(frozen=True, kw_only=True)
class Adagrad(RowOptimizer):
    """`torch.optim.Adagrad`: a slot for each value, the sum of its squared gradients.

    Attributes:
        initial_accumulator_value: of these sums, before the first push.
        eps: added to the root of the sum, by which a gradient is divided.
    """

    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("initial_accumulator_value", "eps")

    def _first_slots(self, dim: int) -> list[float]:
        return [self.initial_accumulator_value] * dim

    def _terms(self, rate: float, version: int, dim: int) -> tuple[float, list[float]]:
        return rate, [self.eps]

    def _kernel(self) -> Any:
        return _adagrad

    def _everywhere(self) -> tuple[Any, float]:
        return (_adagrad_everywhere if self.eps else None), self.eps  # 0 over 0 is NaN


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(Adagrad):
    """FBGEMM's exact row-wise Adagrad: one slot, the sum of the mean squared gradients of the row."""

    eps: float = 1e-8

    def _first_slots(self, dim: int) -> list[float]:
        return [self.initial_accumulator_value]

    def _terms(self, rate: float, version: int, dim: int) -> tuple[float, list[float]]:
        return rate, [self.eps, 1.0 / dim]

    def _kernel(self) -> Any:
        return _row_wise_adagrad

    def _everywhere(self) -> tuple[Any, float]:
        return None, 0.0


@dataclass(frozen=True, kw_only=True)
class Adam(RowOptimizer):
    """`torch.optim.SparseAdam` (lazy Adam): two slots for each value.

    As there, the correction of the bias counts all updates, not those of a row.

    Attributes:
        betas: how much the means of gradients and of their squares keep of themselves in an update.
        eps: added to the root of the mean of squares, by which the mean gradient is divided.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("eps")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigurationError(
                f"Adam(betas={self.betas!r}): give two numbers from 0 to below 1"
            )

    @property
    def moves_by_itself(self) -> bool:
        """Return True: means of earlier gradients move a row."""
        return True

    def _first_slots(self, dim: int) -> list[float]:
        return [0.0] * 2 * dim

    def _terms(self, rate: float, version: int, dim: int) -> tuple[float, list[float]]:
        first, second = self.betas
        corrected = rate * math.sqrt(1.0 - second**version) / (1.0 - first**version)
        return corrected, [1.0 - first, 1.0 - second, self.eps]

    def _kernel(self) -> Any:
        return _adam


@dataclass(frozen=True, kw_only=True)
class FTRL(RowOptimizer):
    """FTRL-proximal (McMahan et al., "Ad click prediction", 2013): two slots for each value.

    A value is what its slots say from its first update on, whatever it began with: let tables begin
    with `Zeros()`, as the paper does.

    Attributes:
        lr: the paper's alpha.
        beta, l1, l2: as in the paper; with `l1`, values whose gradients cancel out are exactly 0.
        initial_accumulator_value: of the sums of squared gradients.
    """

    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("beta", "l1", "l2", "initial_accumulator_value")
        require_positive("FTRL(lr)", self.lr)

    def takes_rate(self) -> bool:
        """Return False: all values of a row are proportional to `lr`, those that it has too."""
        return False

    @property
    def moves_by_itself(self) -> bool:
        """Return True: the first push makes values what the slots say."""
        return True

    def _first_slots(self, dim: int) -> list[float]:
        return [self.initial_accumulator_value] * dim + [0.0] * dim

    def _terms(self, rate: float, version: int, dim: int) -> tuple[float, list[float]]:
        return rate, [self.beta, self.l1, self.l2]

    def _kernel(self) -> Any:
        return _ftrl


def require_optimizer(name: str, optimizer: object) -> RowOptimizer:
    """Return an optimizer of rows; ConfigurationError: it is none; names the counterpart of one of torch's."""
    if isinstance(optimizer, RowOptimizer):
        return optimizer
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    ours = {"SparseAdam": "Adam", "AdamW": "Adam"}.get(kind.__name__, kind.__name__)
    known = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "FTRL")
    advice = (
        f"give {ours}(...) of steepest.tables"
        if ours in known
        else (f"give one of {', '.join(known)} of steepest.tables")
    )
    raise ConfigurationError(
        f"optimizer={kind.__module__}.{kind.__name__} for table {name!r}: a table's rows are updated "
        f"row by row, where they lie; {advice}"
    )
