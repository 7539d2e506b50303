"""First values of rows, from (seed, table's name, id, column) alone.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), here
SplitMix64's function of a counter, has no state: any server makes the same row, whenever it makes
it. Normal numbers are the inverse of their distribution function at uniform ones (Wichura,
algorithm AS 241, 1988), with a logarithm of additions, multiplications and divisions alone, which are
the same bits on every machine, as those of the C library are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from steepest.errors import ConfigurationError
from steepest.tables.rows.hashing import GAMMA, mix
from steepest.tables.rows.kernels import Floats, Int32s, Int64s, inlined, kernel, read_only
from steepest.validation import require_number, require_positive

_CONSTANT, _UNIFORM, _NORMAL = 0.0, 1.0, 2.0
_11 = np.uint64(11)
_UNIT = 2.0**-53
_LN2 = math.log(2.0)


@dataclass(frozen=True)
class Initial:
    """How a table's rows begin; one of the classes below."""

    def parameters(self) -> tuple[float, float, float, float, float]:
        """Return kind, offset, scale, and the range of the uniform numbers, for the kernel."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Initial):
    """Every value is the same.

    Attributes:
        val: that value.
    """

    val: float = 0.0

    def __post_init__(self) -> None:
        require_number("Constant(val)", self.val, -math.inf)

    def parameters(self) -> tuple[float, float, float, float, float]:
        """Return what the kernel needs."""
        return _CONSTANT, self.val, 0.0, 0.0, 1.0


@dataclass(frozen=True)
class Zeros(Initial):
    """Every value is 0."""

    def parameters(self) -> tuple[float, float, float, float, float]:
        """Return what the kernel needs."""
        return _CONSTANT, 0.0, 0.0, 0.0, 1.0


@dataclass(frozen=True)
class Uniform(Initial):
    """Values are uniform from `a` to `b`, as in `torch.nn.init.uniform_`.

    Attributes:
        a, b: the least and the greatest value.
    """

    a: float = 0.0
    b: float = 1.0

    def __post_init__(self) -> None:
        require_number("Uniform(a)", self.a, -math.inf)
        require_number("Uniform(b)", self.b, self.a)

    def parameters(self) -> tuple[float, float, float, float, float]:
        """Return what the kernel needs."""
        return _UNIFORM, self.a, self.b - self.a, 0.0, 1.0


@dataclass(frozen=True)
class Normal(Initial):
    """Values are normal, as those of `torch.nn.Embedding`.

    Attributes:
        mean: of the values.
        std: their standard deviation.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        require_number("Normal(mean)", self.mean, -math.inf)
        require_number("Normal(std)", self.std)

    def parameters(self) -> tuple[float, float, float, float, float]:
        """Return what the kernel needs."""
        return _NORMAL, self.mean, self.std, 0.0, 1.0


@dataclass(frozen=True)
class TruncatedNormal(Initial):
    """Values are normal, given that they are from `a` to `b`, as in `torch.nn.init.trunc_normal_`.

    Attributes:
        mean: of the values, before any is left out.
        std: their standard deviation, likewise.
        a, b: the least and the greatest value.
    """

    mean: float = 0.0
    std: float = 1.0
    a: float = -2.0
    b: float = 2.0
    _widest: ClassVar[float] = 8.0  # standard deviations: beyond, the distribution function is 1

    def __post_init__(self) -> None:
        require_number("TruncatedNormal(mean)", self.mean, -math.inf)
        require_positive("TruncatedNormal(std)", self.std)
        require_number("TruncatedNormal(a)", self.a, -math.inf)
        require_number("TruncatedNormal(b)", self.b, self.a)
        near = self.mean - self._widest * self.std, self.mean + self._widest * self.std
        if self.a == self.b or self.b < near[0] or self.a > near[1]:
            raise ConfigurationError(
                f"TruncatedNormal(a={self.a}, b={self.b}): give a range with a part within "
                f"{self._widest:g} standard deviations of the mean, {near[0]:g} to {near[1]:g}"
            )

    def parameters(self) -> tuple[float, float, float, float, float]:
        """Return what the kernel needs."""
        normal = NormalDist(self.mean, self.std)
        low, high = normal.cdf(self.a), normal.cdf(self.b)
        return _NORMAL, self.mean, self.std, low, high


@inlined
def _log(value: float) -> float:
    """Return the natural logarithm of a number from 2^-54 to 1, to about 1e-15."""
    fraction, exponent = math.frexp(value)  # exact
    if fraction < 0.7071067811865476:
        fraction, exponent = 2.0 * fraction, exponent - 1
    ratio = (fraction - 1.0) / (fraction + 1.0)
    square = ratio * ratio
    total = 0.0
    for odd in range(21, -1, -2):
        total = total * square + 1.0 / odd
    return exponent * _LN2 + 2.0 * ratio * total


@inlined
def _ratio(x: float, above: tuple[float, ...], below: tuple[float, ...]) -> float:
    """Return the ratio of two polynomials of degree seven."""
    top, bottom = above[7], below[7]
    for degree in range(6, -1, -1):
        top = top * x + above[degree]
        bottom = bottom * x + below[degree]
    return top / bottom


# fmt: off
_A = (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
      4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3)
_B = (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
      2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3)
_C = (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
      1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4)
_D = (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
      1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9)
_E = (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
      2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7)
_F = (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
      7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15)
# fmt: on


@inlined
def _quantile(probability: float) -> float:
    """Return the standard normal number that is not exceeded with a probability in (0, 1)."""
    away = probability - 0.5
    if abs(away) <= 0.425:
        return away * _ratio(0.180625 - away * away, _A, _B)
    root = math.sqrt(-_log(probability if away < 0.0 else 1.0 - probability))
    value = _ratio(root - 1.6, _C, _D) if root <= 5.0 else _ratio(root - 5.0, _E, _F)
    return -value if away < 0.0 else value


@kernel
def _fill(
    tables: Int32s, ids: Int64s, salts: Int64s, parameters: Floats, at: Int64s, values: Floats
) -> None:
    for item in range(len(at)):
        place = at[item]
        table = tables[place]
        kind, offset, scale = parameters[table, 0], parameters[table, 1], parameters[table, 2]
        low, span = parameters[table, 3], parameters[table, 4] - parameters[table, 3]
        counter = mix(np.uint64(ids[place]) ^ np.uint64(salts[table]))
        row = values[place]
        for column in range(len(row)):
            if kind == _CONSTANT:
                row[column] = offset
                continue
            counter += GAMMA
            uniform = low + span * ((np.float64(mix(counter) >> _11) + 0.5) * _UNIT)
            if kind == _UNIFORM:
                row[column] = offset + scale * uniform
            else:
                row[column] = offset + scale * _quantile(uniform)


class Beginning:
    """The first values of a group's tables."""

    def __init__(self, initials: Sequence[Initial], salts: Sequence[int]) -> None:
        """Take the way of each table, and its 64 bits from `salt_of`."""
        self._parameters = np.array([way.parameters() for way in initials], np.float64)
        self._salts = np.array(salts, np.uint64).view(np.int64)

    def fill(self, tables: Int32s, ids: Int64s, at: Int64s, values: Floats) -> None:
        """Write first values to the rows `at`, (m,), of ids (n,) and values (n, dim); others stay as they are."""
        _fill(
            read_only(tables, np.int32),
            read_only(ids, np.int64),
            self._salts,
            self._parameters,
            read_only(at, np.int64),
            values,
        )
