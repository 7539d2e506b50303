"""Which step a worker takes next: decided from its grants, its leases and its weights, without I/O and tensors."""

from __future__ import annotations

from dataclasses import dataclass

from steepest.core.messages.membership import Grant, Lease, Members

#: Generation and version, which only grow.
_Key = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """A step of a worker.

    Attributes:
        share: of the samples; the first of those that it computes.
        version: from whose weights it computes; of a step ahead of its lease, those that are here.
        count: of the shares that it computes.
        is_ahead: whether it begins before its weights, or its lease, are here.
    """

    share: int
    version: int
    count: int = 1
    is_ahead: bool = False


class WorkerSteps:
    """What a worker was granted or leased, what it has, and what it has pushed: hence its next step.

    Each step is taken once: `begin` says that it is, `pause` takes that back.

    Args:
        worker: its index.
        members: number of workers, each of which has one share of a granted step.
        leases: whether shares are leased one by one, rather than steps granted.

    Attributes:
        generation: the newest one that the worker has begun.
        version: of the weights that are here whole; -1 for none.
        stats: whether reports are to have loss, metrics and timings.
        pushed: generation and version of the last push, or of the one that has begun.
        floor: the version at which the generation began: weights before it are out of date.
        limit: the version up to which steps are granted, before which each step begins; of leased shares none is.
    """

    def __init__(self, worker: int, members: int, *, leases: bool) -> None:
        self.generation, self.version = 0, -1
        self.stats = True
        self.pushed: _Key = (0, -1)
        self.floor = 0
        self.limit = -1
        self._worker, self._members, self._leases = worker, members, leases
        self._lease: Lease | None = None  # until its step begins
        self._leased: _Key = (0, -1)  # generation and version of the last lease
        self._ahead = range(0)  # the shares that will be leased next
        self._counts_since = 0  # the generation since which arriving weights count
        self._complete: _Key = (0, -1)  # the newest weights that have come whole
        self._before: tuple[_Key, Lease | None] = self.pushed, None  # the last step began

    # -- what comes ----------------------------------------------------------------------------

    def take_grant(self, grant: Grant) -> bool:
        """Note a grant; return False for one of another generation."""
        if grant.generation != self.generation:
            return False
        self.stats, self.limit = grant.stats, max(self.limit, grant.limit)
        return True

    def take_lease(self, lease: Lease) -> bool:
        """Note a lease; return False for a copy, or one of another generation."""
        if lease.generation != self.generation:
            return False
        self.stats = lease.stats
        if (lease.generation, lease.version) <= self._leased:
            return False
        self._lease, self._leased = lease, (lease.generation, lease.version)
        self._ahead = range(lease.ahead[0], sum(lease.ahead)) if lease.ahead else range(0)
        return True

    def begin_generation(self, begun: Members) -> bool:
        """Begin a generation, which voids grants and leases; return False for a copy.

        If all weights are sent anew none is here, until `take_version` is called.
        """
        if begun.generation <= self.generation:
            return False
        self.generation = begun.generation
        self.limit = self.floor = begun.version
        self._lease, self._ahead = None, range(0)
        if begun.reload:
            self._counts_since, self.version = begun.generation, -1
        return True

    def note_weights(self, complete: _Key) -> None:
        """Note that all weights of a generation and version have come."""
        self._complete = max(self._complete, complete)

    def take_version(self) -> bool:
        """Use the newest version that has come whole; return whether it is another one."""
        generation, version = self._complete
        if generation < self._counts_since or version == self.version:
            return False
        self.version = version
        return True

    # -- what follows --------------------------------------------------------------------------

    def next(self) -> Step | None:
        """Return the step that is granted and whose weights are here; None if there is none."""
        is_up_to_date = self.floor <= self.version and self._complete[0] <= self.generation
        return self._of_version(self.version) if is_up_to_date else None

    def next_ahead(self) -> Step | None:
        """Return the step that can begin before its weights are here; None if there is none.

        If it is given up, the one before is not taken again: some of its weights may have been replaced already.
        """
        if self.floor > self.version or self._complete[0] > self.generation:
            return None
        if not self._leases:
            at_rest = self.pushed == (self.generation, self.version)
            step = self._of_version(self.version + 1) if at_rest else None
            return None if step is None else Step(step.share, step.version, is_ahead=True)
        lease = self._lease
        shares = self._ahead if lease is None else range(lease.share, lease.share + lease.count)
        if not shares or self.pushed[0] != self.generation or self.pushed[1] < 0:
            return None
        return Step(shares[0], self.version, len(shares), is_ahead=True)

    def _of_version(self, version: int) -> Step | None:
        """Return the step from a version's weights, if it is granted or leased and not begun."""
        if self.pushed[0] == self.generation and self.pushed[1] >= version:
            return None
        if (lease := self._lease) is not None:
            return None if version < lease.version else Step(lease.share, version, lease.count)
        if version >= self.limit:
            return None
        return Step(version * self._members + self._worker, version)

    def begin(self, step: Step) -> None:
        """Note that a step is taken."""
        self._before = self.pushed, None if step.is_ahead else self._lease
        self.pushed = self.generation, step.version
        if not step.is_ahead:
            self._lease = None
        elif self._lease is None:
            self._ahead = range(0)

    def pause(self) -> None:
        """Note that the step which has begun was left, to be taken again."""
        self.pushed, lease = self._before
        self._lease = self._lease or lease

    def has_lease(self, share: int) -> bool:
        """Return whether the lease of a step ahead is here, with the weights that it names."""
        lease = self._lease
        return lease is not None and lease.share == share and self.version >= lease.version

    def begin_leased(self) -> None:
        """Note that a step ahead has its lease now, which says the version that it is pushed for."""
        assert self._lease is not None
        self.pushed, self._lease = (self.generation, self._lease.version), None

    def follows(self, version: int) -> int | None:
        """Return the share of the next granted step, if that is from this version and not begun; None otherwise."""
        if version != self.pushed[1] + 1 or version >= self.limit:
            return None
        return version * self._members + self._worker
