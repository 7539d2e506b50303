"""Which samples belong to which replica in which step: a pure function of seed and step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from steepest.data import Blocks, Indices

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Position:
    """Where a step lies: its epoch, and the samples [begin, end) of that epoch's permutation."""

    epoch: int
    begin: int
    end: int


@dataclass(frozen=True)
class SamplePlan:
    """The epoch's permutation dealt out in steps, and each step cut evenly over the replicas.

    A step takes the next `global_batch` samples of the permutation of (seed, epoch); the last one of an
    epoch takes what is left, so that no step straddles epochs and each sample is seen once per epoch.

    Args:
        samples: in the data set.
        global_batch: workers x devices x micro-batches x batch size.
        seed: of the whole job.
        start_step, start_epoch, start_offset: the step from which this plan holds, and where in the data
            it begins; other than zero after a restore.
        blocks: of samples that are read together, so that a step touches few: a number of samples for blocks that
            come in order, or the sizes of blocks that are shuffled too; samples are shuffled within their block.

    Example:
        >>> plan = SamplePlan(samples=10, global_batch=4, seed=0)
        >>> [plan.position(step).end for step in range(4)]
        [4, 8, 10, 4]
    """

    samples: int
    global_batch: int
    seed: int
    start_step: int = 0
    start_epoch: int = 0
    start_offset: int = 0
    blocks: Blocks | None = None
    _cache: dict[int, Indices] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in a whole epoch."""
        return -(-self.samples // self.global_batch)

    def position(self, step: int) -> Position:
        """The epoch and range of a step (`step` >= `start_step`)."""
        since = step - self.start_step
        first = -(-(self.samples - self.start_offset) // self.global_batch)
        if since < first:
            epoch, begin = self.start_epoch, self.start_offset + since * self.global_batch
        else:
            ahead, index = divmod(since - first, self.steps_per_epoch)
            epoch, begin = self.start_epoch + 1 + ahead, index * self.global_batch
        return Position(epoch, begin, min(begin + self.global_batch, self.samples))

    def epoch_end(self, step: int) -> int:
        """The first step of the epoch after that of `step`."""
        position = self.position(step)
        return step + -(-(self.samples - position.begin) // self.global_batch)

    def permutation(self, epoch: int) -> Indices:
        """The order of the samples in an epoch."""
        if epoch not in self._cache:
            if len(self._cache) > 1:  # two are kept: loaders read ahead into the next epoch
                del self._cache[next(iter(self._cache))]
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            self._cache[epoch] = _shuffled(generator, self.samples, self.blocks).astype(np.int64, copy=False)
        return self._cache[epoch]

    def share(self, step: int, replica: int, replicas: int) -> Indices:
        """The samples of one replica in one step; shares differ by at most one sample."""
        position = self.position(step)
        begin, end = even_share(position.end - position.begin, replica, replicas)
        return self.permutation(position.epoch)[position.begin + begin : position.begin + end]

    def shares(self, step: int, replica: int, replicas: int, count: int = 1) -> Iterator[Indices]:
        """The non-empty shares of one replica (of `count` from that one on) from a step on, without end."""
        while True:
            for one in range(replica, replica + count):
                share = self.share(step, one, replicas)
                if len(share):
                    yield share
            step += 1


def _shuffled(generator: np.random.Generator, samples: int, blocks: Blocks | None) -> Indices:
    if blocks is None:
        return generator.permutation(samples)
    if isinstance(blocks, int):
        whole = samples - samples % blocks
        rows = generator.permuted(np.arange(whole).reshape(-1, blocks), axis=1)
        return np.concatenate([rows.reshape(-1), whole + generator.permutation(samples - whole)])
    begins = np.cumsum((0, *blocks))
    return np.concatenate([begins[b] + generator.permutation(blocks[b]) for b in generator.permutation(len(blocks))])


def even_share(count: int, part: int, parts: int) -> tuple[int, int]:
    """The `part`-th of `parts` contiguous ranges of range(count), sizes differing by at most one."""
    size, rest = divmod(count, parts)
    begin = part * size + min(part, rest)
    return begin, begin + size + (part < rest)


def step_seed(seed: int, step: int, replica: int) -> int:
    """A seed for the random state of one replica in one step, so that a step can be repeated.

    SplitMix64 (Steele, Lea & Flood, 2014) over the three numbers; 63 bits.
    """
    state = seed & _MASK
    for value in (step, replica):
        state = (state + 0x9E3779B97F4A7C15 * (2 * value + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
