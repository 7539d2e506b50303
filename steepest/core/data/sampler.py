"""The samples of each replica in each step, as a pure function of seed and step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from steepest.core.data.protocol import DRAWN, Blocks, Indices

_MASK = (1 << 64) - 1
_NONE: Indices = np.zeros(0, dtype=np.int64)

#: Parts [begin, end) of an epoch's permutation, one after the other.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DataPosition:
    """The place of a step in the data: an epoch, and parts of that epoch's permutation.

    It has at least one part, and several only if samples were left over, see `SamplePlan`.
    """

    epoch: int
    ranges: Ranges

    @property
    def begin(self) -> int:
        """The begin of the first part."""
        return self.ranges[0][0]

    @property
    def end(self) -> int:
        """The end of the last part."""
        return self.ranges[-1][1]

    @property
    def size(self) -> int:
        """The number of samples."""
        return _length(self.ranges)


@dataclass(frozen=True, slots=True)
class Remaining:
    """The samples still to come: a `SamplePlan`'s start_epoch, start_offset, left and begun.

    `begun` has all epochs that are partly done.
    """

    epoch: int = 0
    offset: int = 0
    left: tuple[tuple[int, int, int], ...] = ()
    begun: tuple[tuple[int, Blocks | None], ...] = ()


@dataclass(frozen=True)
class SamplePlan:
    """The epochs' permutations cut into steps, and each step cut evenly over the replicas.

    A step takes the next `global_batch` samples of the permutation of (seed, epoch); the last one
    of an epoch takes the rest, so that no step straddles epochs and each sample is seen once per
    epoch.

    If shares were committed out of order, a plan that continues begins with the samples that are
    left over: those of earlier epochs by themselves, those of `start_epoch` together with its rest.

    Args:
        samples: in the data set.
        global_batch: workers x devices x micro-batches x batch size.
        seed: of the whole job.
        start_step, start_epoch, start_offset: the first step of this plan, and its place in the
            data; other than zero after a restore.
        blocks: of samples that are read together, so that a step needs few blocks: a number of
            samples for blocks that come in order, or the sizes of blocks that are shuffled too;
            samples are shuffled within their block. With `DRAWN` an epoch's are numbered from
            ``epoch * samples`` on, in order.
        left: parts (epoch, begin, end) of the permutations of `start_epoch`, up to `start_offset`,
            and of epochs before it, that are still to come; disjoint, in order.
        begun: (epoch, blocks) for epochs that keep the order in which they were begun, with other
            `blocks`.
        drop_last: whether samples at the end of an epoch that do not fill a step are left out of
            it. An epoch of fewer samples than `global_batch` has one step.

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
    left: tuple[tuple[int, int, int], ...] = ()
    begun: tuple[tuple[int, Blocks | None], ...] = ()
    drop_last: bool = False
    _cache: dict[int, Indices] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in a whole epoch."""
        return self._steps(self.samples)

    def _steps(self, samples: int) -> int:
        """Return the number of steps that `samples` samples of an epoch make."""
        if not self.drop_last:
            return -(-samples // self.global_batch)
        return samples // self.global_batch or int(samples == self.samples)

    @cached_property
    def _begun(self) -> tuple[tuple[int, Ranges, int], ...]:
        """The epochs with samples left over: (epoch, their parts, number of steps) of each."""
        parts: dict[int, list[tuple[int, int]]] = {}
        for epoch, begin, end in (*self.left, (self.start_epoch, self.start_offset, self.samples)):
            if begin < end:
                parts.setdefault(epoch, []).append((begin, end))
        return tuple(
            (e, tuple(ranges), self._steps(_length(ranges))) for e, ranges in parts.items()
        )

    def reaching(self, step: int) -> SamplePlan | None:
        """Return a plan that also has a step before this plan's first one, in the same epoch; None if unknown.

        Example:
            >>> plan = SamplePlan(samples=10, global_batch=4, seed=0, start_step=7, start_epoch=2, start_offset=4)
            >>> plan.reaching(6).position(6).ranges, plan.reaching(5)
            (((0, 4),), None)
        """
        if step >= self.start_step:
            return self
        offset = self.start_offset - (self.start_step - step) * self.global_batch
        if offset < 0 or self.left:
            return None
        return replace(self, start_step=step, start_offset=offset)

    def position(self, step: int) -> DataPosition:
        """Return the epoch and samples of a step (`step` >= `start_step`)."""
        since = step - self.start_step
        for epoch, ranges, steps in self._begun:
            if since < steps:
                return DataPosition(
                    epoch, cut(ranges, since * self.global_batch, (since + 1) * self.global_batch)
                )
            since -= steps
        ahead, index = divmod(since, self.steps_per_epoch)
        begin = index * self.global_batch
        return DataPosition(
            self.start_epoch + 1 + ahead, ((begin, min(begin + self.global_batch, self.samples)),)
        )

    def end_of(self, epoch: int) -> int:
        """Return the first step after an epoch's; `start_step` if this plan has none of them."""
        begun = sum(steps for number, _, steps in self._begun if number <= epoch)
        return self.start_step + begun + max(epoch - self.start_epoch, 0) * self.steps_per_epoch

    def permutation(self, epoch: int) -> Indices:
        """Return the (samples,) indices of the samples in the order of an epoch."""
        if self._blocks(epoch) == DRAWN:
            return self._numbers(epoch, 0, self.samples)
        if epoch not in self._cache:
            if len(self._cache) > 1:  # two are kept: loaders read ahead into the next epoch
                del self._cache[next(iter(self._cache))]
            generator = np.random.Generator(
                np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
            )
            self._cache[epoch] = _shuffled(generator, self.samples, self._blocks(epoch)).astype(
                np.int64, copy=False
            )
        return self._cache[epoch]

    def _blocks(self, epoch: int) -> Blocks | None:
        return dict(self.begun).get(epoch, self.blocks)

    def share(self, step: int, replica: int, replicas: int) -> Indices:
        """Return the sample indices of one replica in one step; sizes differ by at most one."""
        position = self.position(step)
        ranges = cut(position.ranges, *even_share(position.size, replica, replicas))
        samples = [self.samples_at(position.epoch, begin, end) for begin, end in ranges]
        return samples[0] if len(samples) == 1 else np.concatenate([_NONE, *samples])

    def samples_at(self, epoch: int, begin: int, end: int) -> Indices:
        """Return the indices of the samples at the places from `begin` up to `end` of an epoch's order."""
        if self._blocks(epoch) == DRAWN:  # an epoch may have more of these than memory has
            return self._numbers(epoch, begin, end)
        return self.permutation(epoch)[begin:end]

    def _numbers(self, epoch: int, begin: int, end: int) -> Indices:
        """Return numbers that continue from epoch to epoch."""
        return np.arange(epoch * self.samples + begin, epoch * self.samples + end, dtype=np.int64)

    def shares(
        self, step: int, replica: int, replicas: int, count: int = 1, end: int | None = None
    ) -> Iterator[Indices]:
        """Yield the non-empty shares of one replica from a step on.

        Args:
            step: the first step.
            replica: the number of the replica, or of the first of its micro-batches.
            replicas: number of parts of a step.
            count: number of micro-batches of the replica.
            end: the step before which they end; None for no end.
        """
        while end is None or step < end:
            for one in range(replica, replica + count):
                share = self.share(step, one, replicas)
                if len(share):
                    yield share
            step += 1

    def samples_of(self, share: int, shares: int, parts: int) -> Indices:
        """Return the sample indices of a share, in their order.

        For the arguments see `remaining`.
        """
        each = parts // shares
        first = share % shares * each
        samples = [self.share(share // shares, at, parts) for at in range(first, first + each)]
        return np.concatenate(samples)

    def places(self, share: int, shares: int, parts: int) -> list[tuple[int, int, int]]:
        """Return the samples of a share as (epoch, begin, end) parts of epochs' permutations.

        For the arguments see `remaining`.
        """
        at, first = self.position(share // shares), share % shares * (parts // shares)
        begin, _ = even_share(at.size, first, parts)
        _, end = even_share(at.size, first + parts // shares - 1, parts)
        return [(at.epoch, *part) for part in cut(at.ranges, begin, end)]

    def remaining(
        self, following: int, returned: Iterable[int], shares: int, parts: int
    ) -> Remaining:
        """Return the samples that are still to come after some commits.

        Share ``n`` is part ``n % shares`` of step ``n // shares``, as
        `steepest.core.protocol.sample_leases` counts them.

        Args:
            following: all shares below this number are committed, except `returned`, and none from
                it on.
            returned: numbers of the shares below `following` that are not committed.
            shares: pushes that make one step.
            parts: replicas (and micro-batches) over which a step is cut; a multiple of `shares`.
        """
        step = -(-following // shares)
        left: list[tuple[int, int, int]] = []
        for share in (*returned, *range(following, step * shares)):
            left += self.places(share, shares, parts)
        epoch, offset = self.start_epoch, self.samples
        since = step - self.start_step
        for number, ranges, steps in self._begun:
            if since < steps:
                rest = cut(ranges, since * self.global_batch, self.samples)
                left += [(number, *bounds) for bounds in rest]
            since = max(since - steps, 0)
        if step >= self.end_of(self.start_epoch):
            here = self.position(step)
            epoch, offset = here.epoch, here.begin
        left = _merged(left)
        while left:  # a part that ends where the rest begins belongs to the rest
            if left[-1][0] == epoch and left[-1][2] == offset:
                offset = left.pop()[1]
            elif left[-1][0] == epoch - 1 and offset == 0:
                epoch, offset = epoch - 1, self.samples  # nothing of the next epoch is committed
            else:
                break
        begun = {part[0] for part in left} | ({epoch} if 0 < offset < self.samples else set())
        return Remaining(
            epoch, offset, tuple(left), tuple((e, self._blocks(e)) for e in sorted(begun))
        )


def epoch_ends(plan: SamplePlan, ends: list[int], step: int) -> list[int]:
    """Bring the ends of epochs up to date, and return them: a fit calls this several times for each step.

    Args:
        plan: the present plan.
        ends: the first steps after epoch 0, 1, ..., for the epochs that had ended at the previous
            call, in order. Ends beyond `step` are removed, since training was set back; ends since
            then are appended.
        step: committed so far.
    """
    del ends[bisect_right(ends, step) :]
    while (end := plan.end_of(len(ends))) <= step:
        ends.append(end)
    return ends


def cut(ranges: Iterable[tuple[int, int]], begin: int, end: int) -> Ranges:
    """Return the samples from the `begin`-th up to the `end`-th of consecutive ranges.

    Example:
        >>> cut([(0, 4), (6, 9)], 2, 5)
        ((2, 4), (6, 7))
    """
    parts = []
    for first, last in ranges:
        a, b = max(first + begin, first), min(first + end, last)
        if a < b:
            parts.append((a, b))
        begin, end = begin - (last - first), end - (last - first)
    return tuple(parts)


def _length(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in ranges)


def _merged(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return ranges in order, with neighbours joined and empty ones left out."""
    merged: list[tuple[int, int, int]] = []
    for epoch, begin, end in sorted(ranges):
        if merged and merged[-1][0] == epoch and merged[-1][2] == begin:
            merged[-1] = (epoch, merged[-1][1], end)
        elif begin < end:
            merged.append((epoch, begin, end))
    return merged


def _shuffled(generator: np.random.Generator, samples: int, blocks: Blocks | None) -> Indices:
    if blocks is None:
        return generator.permutation(samples)
    if isinstance(blocks, int):
        whole = samples - samples % blocks
        rows = generator.permuted(np.arange(whole).reshape(-1, blocks), axis=1)
        return np.concatenate([rows.reshape(-1), whole + generator.permutation(samples - whole)])
    begins = np.cumsum((0, *blocks))
    return np.concatenate(
        [begins[b] + generator.permutation(blocks[b]) for b in generator.permutation(len(blocks))]
    )


def even_share(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return (begin, end) of the `part`-th of `parts` contiguous ranges of range(count).

    Their sizes differ by at most one.
    """
    size, rest = divmod(count, parts)
    begin = part * size + min(part, rest)
    return begin, begin + size + (part < rest)


def step_seed(seed: int, step: int, replica: int) -> int:
    """Return a seed for the random state of a replica in a step, so that a step can be repeated.

    SplitMix64 (Steele, Lea & Flood, 2014) over the three numbers; 63 bits.
    """
    state = seed & _MASK
    for value in (step, replica):
        state = (state + 0x9E3779B97F4A7C15 * (2 * value + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
