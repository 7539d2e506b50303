"""The random generators that a process has once: Python's, NumPy's, torch's default ones of all devices.

They are seeded for each batch. If the next batch is loaded ahead of time, its computation goes on
from the generators as loading left them: code that uses them in between has them saved first.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

#: The states of Python's, NumPy's and torch's generator, and of those of the GPUs in use.
States = tuple[Any, Any, torch.Tensor, list[torch.Tensor]]


class HeldGenerators:
    """The generators as they are now, saved only if other code is about to change them: that takes 50 microseconds."""

    def __init__(self) -> None:
        about_to_change()
        self._saved: States | None = None
        _set_holder(self)

    def save(self) -> None:
        """Save the generators, which are about to change."""
        self._saved = states()

    def go_on(self) -> None:
        """Set the generators to what they were."""
        if self._saved is None:
            _set_holder(None)
        else:
            restore(self._saved)


# goes on from the generators as they are
_holder: HeldGenerators | None = None


def _set_holder(holder: HeldGenerators | None) -> None:
    global _holder
    _holder = holder


def about_to_change() -> None:
    """Save the generators for their holder, if they have one; call this before any other use of them."""
    holder = _holder
    if holder is not None:
        _set_holder(None)
        holder.save()


def seed_everything(seed: int) -> None:
    """Seed all generators; NumPy takes the lowest 32 bits."""
    about_to_change()
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def states() -> States:
    """Return the generators' states."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state(), gpus


def restore(saved: States) -> None:
    """Set the generators' states."""
    about_to_change()
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    torch.default_generator.set_state(saved[2])
    if saved[3]:
        torch.cuda.set_rng_state_all(saved[3])
