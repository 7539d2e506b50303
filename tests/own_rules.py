"""A commit rule of a user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steepest import ParameterServerStrategy
from steepest.core.protocol.commit_rules import CommitRule, Staged, Verdict


@dataclass(frozen=True)
class CommitPairs:
    """Every two staged pushes make an update, of whatever versions: K-async SGD, arXiv:1803.01113."""

    needs_all = False
    same_version = False

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Verdict:
        return Verdict(tuple(staged[:2])) if len(staged) >= 2 else Verdict()

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        return True

    def needs(self, workers: int) -> int:
        return min(2, workers)

    def pushes_per_step(self, workers: int) -> int:
        return workers

    def versions_per_step(self, workers: int) -> int:
        return workers // 2


@dataclass(frozen=True)
class CommitTwoThirds:
    """Pushes of two thirds of the workers for the present version make the next one."""

    needs_all = False
    same_version = True

    def decide(self, version: int, members: frozenset[int], staged: Sequence[Staged]) -> Verdict:
        enough = self.pushes_per_step(len(members))
        return Verdict(tuple(staged[:enough])) if len(staged) >= enough else Verdict()

    def may_go_on(self, worker: int, clocks: Mapping[int, int]) -> bool:
        return True

    def needs(self, workers: int) -> int:
        return self.pushes_per_step(workers)

    def pushes_per_step(self, workers: int) -> int:
        return max(2 * workers // 3, 1)

    def versions_per_step(self, workers: int) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class TwoThirdsStrategy(ParameterServerStrategy):
    """Two thirds of the workers' gradients of one version are an update."""

    name = "two thirds"

    @property
    def rule(self) -> CommitRule:
        return CommitTwoThirds()


@dataclass(frozen=True, kw_only=True)
class PairsStrategy(ParameterServerStrategy):
    """Every two gradients are an update."""

    name = "pairs"

    @property
    def rule(self) -> CommitRule:
        return CommitPairs()
