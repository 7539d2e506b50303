"""The values of ids without rows, as servers compute them, in torch alone: for serving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIT = 2.0**-53
_LN2 = math.log(2.0)
_CONSTANT, _UNIFORM = 0.0, 1.0
_FLOAT16_MOST = 65504.0
_FRACTION = 0x7FFFFF
# fmt: off
_CENTRE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)
_MIDDLE = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)
_FAR = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)
# fmt: on


@dataclass(frozen=True)
class UnknownRows:
    """The values of ids without rows of one table: a function of the id alone, and the bits that servers answer.

    Attributes:
        parameters: of the table's `default`, or its `initial`, see `Initial.parameters`.
        salt: 64 bits of the table's name and the job's seed, see `steepest.tables.hashing.salt_of`.
        dtype: the table's, to which values are rounded.
    """

    parameters: tuple[float, float, float, float, float]
    salt: int
    dtype: str

    @property
    def constant(self) -> float | None:
        """The value that all have; None if they are random."""
        if self.parameters[0] != _CONSTANT:
            return None
        return float(self._rounded(self._constant()).item())

    def values(self, ids: Tensor, dim: int) -> Tensor:
        """Return the values of ids (n,) int64: (n, dim) float64 for "float64", else float32."""
        kind, offset, scale, low, high = self.parameters
        if kind == _CONSTANT:
            return self._rounded(self._constant().to(ids.device)).expand(len(ids), dim)
        columns = [_signed(_GAMMA * (column + 1)) for column in range(dim)]
        counters = _mixed(ids ^ _signed(self.salt))[:, None] + torch.tensor(
            columns, device=ids.device
        )
        bits = _shifted(_mixed(counters), 11).double()
        uniform: Tensor = low + (high - low) * ((bits + 0.5) * _UNIT)
        drawn = uniform if kind == _UNIFORM else _quantile(uniform)
        return self._rounded(offset + scale * drawn)

    def _constant(self) -> Tensor:
        return torch.tensor([[self.parameters[1]]], dtype=torch.float64)

    def _rounded(self, values: Tensor) -> Tensor:
        """Return values (n, dim) float64 to the nearest that the table's dtype has."""
        if self.dtype == "float64":
            return values
        found = values.float()
        if self.dtype == "bfloat16":
            return found.bfloat16().float()
        if self.dtype == "float16":
            return found.clamp(-_FLOAT16_MOST, _FLOAT16_MOST).half().float()
        return _of_bytes(found) if self.dtype == "int8" else found


def _of_bytes(values: Tensor) -> Tensor:
    """Return rows as multiples of the least power of two with which all values fit in a byte."""
    bits = (values.abs().amax(1, keepdim=True) / 127.0).view(torch.int32)
    exponent = (bits >> 23) + (bits & _FRACTION != 0)
    scale = (exponent << 23).to(torch.int32).view(torch.float32)
    whole = (values.double() / scale.double()).round().clamp(-127.0, 127.0)
    return torch.where(scale > 0.0, whole.float() * scale, 0.0)


def _signed(value: int) -> int:
    """Return the signed number of the lowest 64 bits."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Return int64 shifted right as unsigned numbers."""
    shifted: Tensor = (value >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _mixed(value: Tensor) -> Tensor:
    """Return SplitMix64's finalizer, see `steepest.tables.hashing.mix`."""
    value = (value ^ _shifted(value, 30)) * _signed(_FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(_SECOND)
    mixed: Tensor = value ^ _shifted(value, 31)
    return mixed


# As `steepest.tables.initial` has it, operation by operation.


def _log(value: Tensor) -> Tensor:
    fraction, exponent = torch.frexp(value)
    small = fraction < 0.7071067811865476
    fraction = torch.where(small, 2.0 * fraction, fraction)
    exponent = exponent - small.to(exponent.dtype)
    ratio = (fraction - 1.0) / (fraction + 1.0)
    square = ratio * ratio
    total = torch.zeros_like(ratio)
    for odd in range(21, -1, -2):
        total = total * square + 1.0 / odd
    return exponent.double() * _LN2 + 2.0 * ratio * total


def _ratio(x: Tensor, polynomials: Sequence[Sequence[float]]) -> Tensor:
    above, below = polynomials
    top, bottom = torch.full_like(x, above[7]), torch.full_like(x, below[7])
    for degree in range(6, -1, -1):
        top = top * x + above[degree]
        bottom = bottom * x + below[degree]
    return top / bottom


def _root(value: Tensor) -> Tensor:
    """Return square roots of positive numbers to the last bit, which torch's own are not on every machine."""
    # One step of Newton's, with the exact error of the square (Dekker's product).
    root = value.sqrt()
    scaled = root * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - root)
    low = root - high
    square = root * root
    error = ((high * high - square) + 2.0 * high * low) + low * low
    return root + ((value - square) - error) / (2.0 * root)


def _quantile(probability: Tensor) -> Tensor:
    away = probability - 0.5
    centre = away * _ratio(0.180625 - away * away, _CENTRE)
    root = _root(-_log(torch.where(away < 0.0, probability, 1.0 - probability)))
    tail = torch.where(root <= 5.0, _ratio(root - 1.6, _MIDDLE), _ratio(root - 5.0, _FAR))
    return torch.where(away.abs() <= 0.425, centre, torch.where(away < 0.0, -tail, tail))
