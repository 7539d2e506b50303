"""A loop's view of the job: the worker's side writes it, both sides read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from steepest.core.models.protocol import Where
from steepest.core.protocol.commit_rules import CommitAll, CommitRule
from steepest.loop.prepared import Ask
from steepest.loop.turns import Turns


@dataclass(frozen=True)
class LoopKind:
    """How all workers of a job train in loops of their user's own.

    Attributes:
        seed: of the job.
        rule: which workers' gradients make an update.
        local: batches of each round of updates that workers make by themselves; 0 where servers make each update.
        paced: whether a worker makes as many of them in a round as it manages.
        ahead: whether it begins a round before it is known whether the one before counts.
        together: whether every worker contributes to each update.
    """

    seed: int = 0
    rule: CommitRule = field(default_factory=CommitAll)
    local: int = 0
    paced: bool = False
    ahead: bool = False
    together: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "together", self.rule.needs_all)


class JobView:
    """What both sides of a user's own loop share, see `steepest.loop.session`.

    Args:
        turns: of the two sides' threads.
        rank: number of the worker; None for a function that runs ahead of it.
        size: number of workers.
        kind: how its workers train.

    Attributes:
        kind, size: as given.
        rank: the number of the worker. A function that runs ahead waits, where it reads it, until there is one.
        turns: as given; others where the function has begun anew.
        asked: what the function has asked for last, and waits for; None before it, and once it has ended.
        next_epoch: of the job's next step, as far as it is known.
        committed: steps of the job that are known to be.
        passed: steps of the job of which the loop has seen the end.
    """

    def __init__(self, turns: Turns, rank: int | None, size: int, kind: LoopKind) -> None:
        self.size, self.kind = size, kind
        if rank is not None:
            self.rank = rank
        self.begin_anew(turns)

    def take_seat(self, rank: int, size: int) -> None:
        """Take another rank, or a rank among another number of workers, from now on."""
        self.rank, self.size = rank, size

    def __getattr__(self, name: str) -> int:
        """Wait for the rank where there is none yet; a property would be called in each step."""
        if name != "rank":
            raise AttributeError(name)
        self.turns.ask(Ask.SEAT)
        return self.rank

    def begin_anew(self, turns: Turns) -> None:
        """Begin with a function that has not run yet."""
        self.turns = turns
        self.asked: Ask | None = None
        self.next_epoch = self.committed = self.passed = 0

    @property
    def is_prepared(self) -> bool:
        """Whether the function has called `prepare` since it began."""
        return self.asked not in (None, Ask.SEAT)

    def see(self, where: Where) -> None:
        """Note the epoch of the job's next step, from the place of a step."""
        if where.epoch is not None:
            # a step of leased shares may have a further one for this worker
            over = where.is_last and not (where.has_more or where.leased)
            self.next_epoch = max(self.next_epoch, where.epoch + over)

    def pass_by(self, where: Where, *, all_before: bool) -> None:
        """Note that the worker has no samples in the job's next step; `all_before`: the steps before are committed."""
        self.passed = max(self.passed, where.step + 1)
        if all_before:
            self.committed = max(self.committed, where.step)
        self.see(where)

    def arrive(self, steps: int) -> None:
        """Note that the loop is at the place where a number of steps are committed."""
        self.passed, self.committed = steps, max(self.committed, steps)
