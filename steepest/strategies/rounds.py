"""Rounds of the pushes that have come in time: the commit rule, and the coordinator that waits for late ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from msgspec.structs import replace

from steepest.core.messages.gradients import Report
from steepest.core.messages.membership import Lease
from steepest.core.protocol.commit_rules import Staged, Verdict
from steepest.core.protocol.commit_state import CommitState, Outgoing
from steepest.core.protocol.coordinator import Made, Readers, Updates
from steepest.core.protocol.job_coordinator import JobCoordinator
from steepest.core.protocol.push_tracking import Reports


@dataclass(frozen=True)
class CommitQuorum:
    """Rounds of the pushes that have come in time; a late one is part of the next round.

    The version counts shares of samples, so that a step has the same number however they were divided into rounds. If
    the model has fragments, each push is of the fragment whose turn it is at its worker, and a round may mix them: a
    late push that had to wait for a round of its own fragment would make the next worker wait for its own, and so on.

    Args:
        quorum: how many pushes make a round; None for those of all workers that have begun one.
        grace: seconds for which further pushes are then waited for.
        shares: the most shares of samples that a worker is leased at a time: the fastest gets this number,
            others as many as they compute meanwhile. A version is one share.
        ahead: whether a worker is leased its next shares, too, to begin before its push is committed.

    Reference: Decoupled DiLoCo, arXiv:2604.21428.
    """

    quorum: int | None = None
    grace: float = 0.0
    shares: int = 1
    ahead: bool = False
    needs_all = False
    same_version = False

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Verdict:
        """Commit all staged pushes, ordered by worker, once they suffice, or each of `members` has pushed.

        Members are the workers from which a push may come.
        """
        chosen = tuple(sorted(staged))
        if {push.worker for push in staged} >= members:
            return Verdict(chosen)
        if self.quorum is None or len(chosen) < self.quorum:
            return Verdict()
        return Verdict(chosen)

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """Return True: a worker waits until its last push is committed."""
        return True

    def needs(self, workers: int) -> int:
        """Return 1: if fewer workers than the quorum compute, as dead ones are being replaced, these make a round."""
        return 1

    def pushes_per_step(self, workers: int) -> int:
        """Return the number of shares of a step: as many as all workers would compute at the fastest one's pace."""
        return workers * self.shares

    def versions_per_step(self, workers: int) -> int:
        """Return the number of shares in a step."""
        return workers * self.shares


class RoundCoordinator(JobCoordinator):
    """The coordinator of a job whose versions are rounds, see `CommitQuorum`.

    A round may be made of more or fewer pushes, and be made because time has passed.

    Args:
        state, updates, settings: as for `JobCoordinator`.
    """

    def __init__(self, state: CommitState, updates: Updates, **settings: Any) -> None:
        super().__init__(state, updates, **settings)
        assert isinstance(state.rule, CommitQuorum)
        self._rule = state.rule
        # the fragment, counted round and round, after that of most pushes of the last round; None before that
        self._turn: int | None = None
        # the generation and version whose pushes are enough, and since when; infinity until the time is told
        self._enough: tuple[tuple[int, int], float] = (-1, -1), math.inf

    def _tick(self) -> Outgoing:
        """Make a round whose grace is over, too."""
        out = super()._tick()
        if not self.state.schedule_behind:
            position, since = self._enough
            self._enough = position, min(since, self._now)
            out += self._decide()
        return out

    def _chosen(self, complete: Sequence[Staged]) -> Verdict:
        """Return the pushes that make a round: none while further ones are waited for."""
        busy = frozenset(self.state.leases.busy)
        verdict = self._rule.decide(self.state.version, busy, complete)
        lacks = not {push.worker for push in complete} >= busy
        waits = verdict.commit and lacks and self._rule.grace and not self._has_waited()
        return Verdict() if waits else verdict

    def _has_waited(self) -> bool:
        """Return whether the next version has had enough pushes for as long as the grace."""
        position, since = self._enough
        now = self.state.generation, self.state.version
        if position != now:
            self._enough = now, math.inf
            return False
        return self._now - since >= self._rule.grace

    def _versions_of(self, pushes: Sequence[Staged]) -> Sequence[int]:
        """Return the number of shares of each push."""
        return [len(self.state.leases.shares_of(push.worker)) for push in pushes]

    def _fragments(self, reports: Reports) -> Sequence[int]:
        """Return the parts of the model that a round changes, ascending."""
        return sorted({each.fragment for each in reports.values() if isinstance(each, Report)})

    def _committed(self, made: Made) -> tuple[Readers, Outgoing]:
        """Note paces and the next fragment, on which the next leases depend, and go on as after any commit."""
        after = accumulate(made.versions, initial=self.state.version - sum(made.versions))
        next(after)
        for push, shares, version in zip(made.pushes, made.versions, after, strict=True):
            self._add_timings(push.worker, made.reports[push.worker], version, shares)
        turns = [each.fragment for each in made.reports.values() if isinstance(each, Report)]
        self._turn = max(turns, key=turns.count) + 1 if turns else None
        return super()._committed(made)

    def _note_paces(self, made: Made, version: int) -> None:
        """Do nothing: they are noted at the commit."""

    def _leases(self, granted: int) -> Iterator[tuple[int, Lease]]:
        """Lease each worker as many shares as it computes while the fastest computes all that the rule has for it."""
        leases, most = self.state.leases, granted * self.state.pushes_per_update
        taken = leases.lease(
            self.joined, most, self._now, self._shares_wanted, ahead=self._rule.ahead
        )
        for worker, shares, following in taken:
            ahead = [following[0], len(following)] if following else ()
            lease = self._lease_of(worker, shares)
            yield worker, replace(lease, count=len(shares), ahead=ahead, turn=self._turn)

    def _shares_wanted(self, worker: int) -> int:
        """Return how many shares a worker computes while the fastest computes as many as the rule has for it."""
        most, paces = self._rule.shares, self.state.history.paces
        if most == 1 or worker not in paces:
            return most
        fastest = min(
            pace for other, pace in paces.items() if other in self.joined or other == worker
        )
        return max(1, min(most, round(most * fastest / max(paces[worker], 1e-9))))
