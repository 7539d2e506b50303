"""Random examples: how many a property is tried on, and how a failing one is tried again.

No seed is fixed, so each run tries others. What failed is printed: by hypothesis as the arguments
and the line `@reproduce_failure(...)`, by `seeds` as `STEEPEST_SEED=...`. `make test-full`
tries ten times the count that a test names, other runs a sixth of it.
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32)


def scale() -> int:
    """Return how many times as many examples as by default are tried."""
    return settings().max_examples // 100


def some_of(seeds: Sequence[int], count: int) -> Sequence[int]:
    """Return so many of the seeds, in `make test-full` all."""
    return seeds if scale() > 1 else seeds[:count]


def examples(count: int) -> settings:
    """Return hypothesis' settings for so many examples; one that fails is made as small as possible."""
    return settings(max_examples=_tried(count))


def runs(count: int) -> settings:
    """Return the settings for examples that are whole runs: one that fails is told as it is, since trying smaller ones
    would take minutes."""
    return settings(examples(count), phases=(Phase.explicit, Phase.reuse, Phase.generate))


def seeds(count: int, name: str = "seed") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that calls a test once for each of so many random numbers, as its argument of that name.

    The number of a failing call is printed, and `STEEPEST_SEED=number` in the environment has each
    test called with that number alone.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(*arguments: Any, **named: Any) -> None:
            for seed in _numbers(count):
                try:
                    test(*arguments, **named, **{name: seed})
                except BaseException:
                    sys.stderr.write(f"\nSTEEPEST_SEED={seed} repeats this\n")
                    raise

        del run.__wrapped__  # type: ignore[attr-defined]
        others = [
            parameter for parameter in signature.parameters.values() if parameter.name != name
        ]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


def _tried(count: int) -> int:
    return count * scale() if scale() > 1 else -(-count // 6)


def _numbers(count: int) -> list[int]:
    given = os.environ.get("STEEPEST_SEED")
    return [int(given)] if given else [secrets.randbits(32) for _ in range(_tried(count))]
