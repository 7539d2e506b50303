"""What a user chooses for a job once: no change of its size or strategy changes it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from steepest.core.engine.extension import Extension
from steepest.errors import ConfigurationError
from steepest.validation import require_choice, require_count

log = logging.getLogger(__name__)
_LARGEST_SEED = 2**63 - 1  # that torch takes


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What the processes of a job compute, however many there are.

    Attributes:
        devices_per_worker, gpu, accumulate, global_batch_size, seed, extensions: as of `DistributedSGD`.

    Raises:
        ConfigurationError: a value is out of range.
    """

    devices_per_worker: int = 1
    gpu: bool = False
    accumulate: int = 1
    global_batch_size: int | None = None
    seed: int = 0
    extensions: Sequence[Extension] | None = None

    def __post_init__(self) -> None:
        require_choice("gpu", self.gpu, (False, True))
        counts = {
            name: require_count(name, getattr(self, name), least)
            for name, least in (("devices_per_worker", 1), ("accumulate", 1), ("seed", 0))
        }
        if counts["seed"] > _LARGEST_SEED:
            raise ConfigurationError(
                f"seed={self.seed}: give an integer of at most {_LARGEST_SEED}"
            )
        if self.extensions is not None and not (
            isinstance(self.extensions, Sequence)
            and all(isinstance(each, Extension) for each in self.extensions)
        ):
            raise ConfigurationError(
                f"extensions={self.extensions!r:.80}: give a sequence of "
                "steepest.core.engine.extension.Extension, see docs/explanation/extensions.md"
            )
        if self.global_batch_size is not None:
            counts["global_batch_size"] = require_count("global_batch_size", self.global_batch_size)
        for name, value in counts.items():  # NumPy's integers become Python's
            object.__setattr__(self, name, value)

    def most_of(self, num_workers: int) -> int:
        """Return how many of the workers can each get a sample of every batch, with a warning if not all can."""
        if self.global_batch_size is None:
            return num_workers
        most = self.global_batch_size // (self.devices_per_worker * self.accumulate)
        if most < num_workers:
            log.warning(
                "global_batch_size=%d has samples for %d workers: there will be no more than that",
                self.global_batch_size,
                most,
            )
        return min(num_workers, most)
