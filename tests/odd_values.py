"""Values of JSON with something else in one place."""

from __future__ import annotations

import math
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, "x", "9" * 400, [], {}, [[1]], {"a": {"b": 1}}, -1, 10**400, 1 << 80, 1e308, math.nan, math.inf,
)  # fmt: skip


def mutated(chance: random.Random, value: Any) -> Any:
    """Return a copy of a value with another one in a random place."""
    if not isinstance(value, (dict, list)) or not value or chance.random() < 0.1:
        return chance.choice(ODD)
    other = value.copy()
    place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    other[place] = mutated(chance, value[place])
    return other
