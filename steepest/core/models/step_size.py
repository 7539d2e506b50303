"""The number of samples of a job's steps, and its seed, which a model may ask for while it is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class StepSize:
    """The size of a job's steps, and its seed."""

    batches: int = 1  # of all replicas together, with micro-batches
    samples: int | None = None  # in all; None for as many as these batches have
    seed: int = 0  # of the job, for initial values

    def of(self, batch_size: int) -> int:
        """Return the samples of a step, where a replica's batch has `batch_size`."""
        return self.batches * batch_size if self.samples is None else self.samples


_ONE_BATCH = StepSize()
_current: ContextVar[StepSize] = ContextVar("step_size", default=_ONE_BATCH)


@contextlib.contextmanager
def making_models(size: StepSize) -> Iterator[None]:
    """Have `step_size` return this in the block, in which models are made."""
    token = _current.set(size)
    try:
        yield
    finally:
        _current.reset(token)


def step_size() -> StepSize:
    """Return the size of the steps of the job for which a model is made; one batch if it is for none."""
    return _current.get()
