"""The log of commits, from which a run is replayed serially."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.topology import HostMap
from steepest.core.messages.fields import RateChanges
from steepest.core.strategies.strategy import Strategy

#: By worker, the gradients that it keeps for its next push.
Unpushed = Mapping[int, Mapping[str, torch.Tensor]]


class _PushFields(NamedTuple):
    worker: int
    incarnation: int
    sequence: int
    pulled: int
    share: int
    more: tuple[Any, ...] = ()
    length: int = 1
    fragment: int = 0


class LoggedPush(_PushFields):
    """One worker's contribution to a commit.

    Attributes:
        worker, incarnation, sequence: the name of the push.
        pulled: the version whose weights it was computed from.
        share: its first share: with n shares in a step, part ``share % n`` of step ``share // n`` of
            the plan.
        length: number of its shares, from that one on.
        more: what else a replay needs, as the worker's `Exchange.logged` returned it; for example the versions of
            weights that it asked for in the middle of the step.
        fragment: the part of the model that it changes, in rounds of a quorum; else 0.
    """

    __slots__ = ()

    def __new__(
        cls,
        worker: int,
        incarnation: int,
        sequence: int,
        pulled: int,
        share: int | Sequence[int],
        *more: Any,
    ) -> LoggedPush:
        """Return the push of an entry of the coordinator's log, which ends with the values of `more`."""
        first, length, *fragment = (share, 1) if isinstance(share, int) else share
        fields = worker, incarnation, sequence, pulled, first, more, length
        return super().__new__(cls, *fields, *fragment)

    def __getnewargs__(self) -> tuple[Any, ...]:
        share = (self.share, self.length, self.fragment)
        return (*self[:4], share, *self.more)

    @property
    def shares(self) -> range:
        """The numbers of its shares."""
        return range(self.share, self.share + self.length)


@dataclass(frozen=True, slots=True)
class Commit:
    """One update of the weights.

    Attributes:
        version: the number of the weights after it.
        pushes: contributions, in the order in which they were added up.
        hyperparameters: by parameter group, those that a schedule changed; None if it changed none.
        rate: factor of the learning rate (1 unless divided by the staleness).
        skipped: whether it was left out because of NaN or infinity.
        clip: factor of the mean gradient: from clipping by its norm, or to turn the mean into a sum; else 1.
        made: number of versions that it counts as: in rounds of a quorum, the number of its pushes.
        clock: the coordinator's time, in whole seconds since the epoch, if stores keep the time; else 0.
    """

    version: int
    pushes: tuple[LoggedPush, ...]
    hyperparameters: list[dict[str, Any]] | None
    rate: float
    skipped: bool
    clip: float = 1.0
    made: int = 1
    clock: int = 0

    @classmethod
    def from_entry(cls, entry: list[Any]) -> Commit:
        """Return the commit of an entry of the coordinator's log."""
        version, pushes, *rest = entry
        return cls(version, tuple(LoggedPush(*push) for push in pushes), *rest)

    @property
    def staleness(self) -> tuple[int, ...]:
        """By contribution, the number of updates between its pull and its application."""
        return tuple(self.before - push.pulled for push in self.pushes)

    @property
    def before(self) -> int:
        """The number of the weights before it."""
        return self.version - self.made


@dataclass(frozen=True)
class CommitLog:
    """Every commit since training began, or since weights were last set or restored.

    Attributes:
        commits: in order, since the job was last put together again: in another size or strategy,
            or after a death.
        strategy, num_workers, devices_per_worker, seed: of the trainer.
        hosts: of its workers and servers, which decide the order in which gradients were added up;
            None if each has a host of its own.
        accumulate: micro-batches of each of its replicas in a step.
        start: the version before the first of these commits.
        plan: the samples of each share; None for the plan of a run's beginning.
        cuts: the number of shares of each step, and of its micro-batches.
        threads: torch threads of each worker, and of each server; None where they are not known.
        rates: learning rates that were set instead of the schedule's.
        unpushed: by worker, the gradients that it had kept for its next push when this log begins.
        earlier: the logs of the job before it was put together again, oldest first, each without
            earlier ones.
    """

    commits: tuple[Commit, ...]
    strategy: Strategy
    num_workers: int
    devices_per_worker: int
    seed: int
    hosts: HostMap | None = None
    accumulate: int = 1
    start: int = 0
    plan: SamplePlan | None = None
    cuts: tuple[int, int] = (0, 0)
    threads: tuple[int, int] | None = None
    rates: RateChanges = ()
    unpushed: Unpushed = field(default_factory=dict, repr=False)
    earlier: tuple[CommitLog, ...] = ()

    @property
    def parts(self) -> tuple[CommitLog, ...]:
        """The logs of the job's earlier forms, oldest first, and this one."""
        return (*self.earlier, self)

    def samples(self) -> Iterator[tuple[int, int, int]]:
        """Yield the samples that were committed, as (epoch, begin, end) in the order of that epoch.

        Samples of a stream, which has no epochs, are left out.
        """
        for part in self.parts:
            if part.plan is not None:
                pushes = (push for commit in part.commits for push in commit.pushes)
                for share in (share for push in pushes for share in push.shares):
                    yield from part.plan.places(share, *part.cuts)
