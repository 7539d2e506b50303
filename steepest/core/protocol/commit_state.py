"""The state of a coordinator: versions, staged pushes, rates, counters and log, and how servers learn of them. Pure."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from steepest.core.messages.fields import RateChanges, Rates
from steepest.core.messages.gradients import CommitOrder, Decision
from steepest.core.messages.membership import Members
from steepest.core.messages.message import Message, Peer, server_peer
from steepest.core.messages.snapshots import Install
from steepest.core.optim.spec import Schedule, ScheduleState
from steepest.core.protocol.commit_rules import (
    CommitRule,
    leases_samples,
    pushes_per_update,
    stages_each,
)
from steepest.core.protocol.push_tracking import StagedEach, StagedTogether, Staging
from steepest.core.protocol.sample_leases import Leases
from steepest.core.protocol.step_summary import OpenStep
from steepest.errors import ProtocolError


def rates_at(changes: RateChanges, step: int) -> Rates:
    """Return the rates that are set for a step.

    Example:
        >>> rates_at([(5, [0.1]), (9, None)], 4), rates_at([(5, [0.1]), (9, None)], 5)
        (None, [0.1])
    """
    begun = begun_by(changes, step)
    return changes[begun - 1][1] if begun else None


def begun_by(changes: RateChanges, step: int) -> int:
    """Return how many changes, which are sorted by step, take effect at a step or before it."""
    return bisect_right(changes, step, key=lambda change: change[0])


def changes_since(changes: RateChanges, step: int) -> RateChanges:
    """Return the changes without those that another change has replaced by `step`.

    Example:
        >>> changes_since([(2, [0.3]), (5, [0.1]), (9, None)], 6)
        [(5, [0.1]), (9, None)]
    """
    begun = begun_by(changes, step)
    in_force = begun > 0 and changes[begun - 1][1] is not None
    return list(changes[begun - in_force :])


def with_rates(
    hyper: list[dict[str, Any]], changes: RateChanges, step: int
) -> list[dict[str, Any]]:
    """Return hyperparameters of a step (from 0), by parameter group, with the learning rates that are set."""
    rates = rates_at(changes, step)
    if rates is None:
        return hyper
    return [{**group, "lr": rate} for group, rate in zip(hyper, rates, strict=True)]


#: The most bytes of JSON of log entries in one answer. A single larger entry is sent all the same:
#: it fits into a message, as a commit's hyperparameters are limited (see `Schedule.at`) and each of
#: its pushes is some numbers.
LOG_PAGE = 1 << 20
#: A worker is a straggler when it computes this many times as long as the median of the others.
SLOW = 2.0


class CommitHistory:
    """The commits of one job.

    Args:
        keep_log: whether to keep each commit, for a replay.

    Attributes:
        committed: number of versions.
        skipped: number of versions that changed nothing.
        dropped: number of pushes that will never be committed.
        staleness: number of committed pushes by their staleness, in versions.
        paces: by worker, the seconds that it computes for one share of samples, as a running mean.
    """

    def __init__(self, keep_log: bool = False) -> None:
        self.committed = self.skipped = self.dropped = 0
        self.staleness: Counter[int] = Counter()
        self.paces: dict[int, float] = {}
        self._ascending: list[float] = []  # the paces
        self._slow_since: dict[int, int] = {}
        self._log: list[list[Any]] | None = [] if keep_log else None

    def add(self, entry: list[Any], staleness: Iterable[int], *, skipped: bool) -> None:
        """Count a commit, and keep its entry if the log is kept.

        Args:
            entry: see `steepest.core.engine.commit_log.Commit.from_entry`.
            staleness: of each of its pushes, in versions.
            skipped: whether the version changes nothing.
        """
        self.committed += 1
        self.skipped += skipped
        self.staleness.update(staleness)
        if self._log is not None:
            self._log.append(entry)

    def add_timings(
        self, worker: int, timings: Mapping[str, float], step: int, shares: int = 1
    ) -> None:
        """Update a worker's pace, and whether it is a straggler.

        Args:
            timings: seconds by part of its push; without "compute" nothing changes.
            step: of the push.
            shares: number of shares that the push is computed from.
        """
        if (seconds := timings.get("compute")) is not None:
            seconds /= shares
            before = self.paces.get(worker)
            if before is not None:
                del self._ascending[bisect_left(self._ascending, before)]
            pace = seconds + 0.8 * ((seconds if before is None else before) - seconds)
            self._compare(worker, pace, step)
            self.paces[worker] = pace
            insort(self._ascending, pace)

    def _compare(self, worker: int, pace: float, step: int) -> None:
        """Compare a worker's pace with the others'; if it is a straggler, note the first such step."""
        others = self._ascending
        if others and pace > SLOW * others[len(others) // 2]:
            self._slow_since.setdefault(worker, step)
        else:
            self._slow_since.pop(worker, None)

    def count_dropped(self, pushes: int) -> None:
        """Add a number of pushes that will never be committed."""
        self.dropped += pushes

    def counts(self) -> dict[str, Any]:
        """Return "committed", "skipped", "dropped" and "staleness" as `load_state` takes them."""
        counts = {"committed": self.committed, "skipped": self.skipped, "dropped": self.dropped}
        return {**counts, "staleness": sorted(self.staleness.items())}

    def load_state(self, counts: dict[str, Any]) -> None:
        """Replace the counters by those that `counts` or `counters` of another history returned."""
        self.committed = counts["committed"]
        self.skipped = counts["skipped"]
        self.dropped = counts["dropped"]
        self.staleness = Counter(dict(counts["staleness"]))

    @property
    def keeps_log(self) -> bool:
        """Whether each commit is kept."""
        return self._log is not None

    def forget_log(self) -> None:
        """Empty the log: weights were installed that earlier commits do not explain."""
        if self._log is not None:
            self._log.clear()

    def counters(self) -> dict[str, Any]:
        """Return `counts`, and the workers' speed.

        "paces" has (worker, seconds), "slow" has (straggler, the step since which it is slow).
        """
        paces, slow = sorted(self.paces.items()), sorted(self._slow_since.items())
        return {**self.counts(), "paces": paces, "slow": slow}

    def page(self, first: int) -> dict[str, Any]:
        """Return a page of the log.

        Args:
            first: index of the page's first entry.

        Returns:
            "log", the entries, and "length" of the whole log; if none is kept, only "log", which is None.
        """
        if self._log is None:
            return {"log": None}
        page: list[list[Any]] = []
        size = 0
        for index in range(first, len(self._log)):
            size += len(json.dumps(self._log[index]))
            if page and size > LOG_PAGE:
                break
            page.append(self._log[index])
        return {"log": page, "length": len(self._log)}


#: Messages in the order in which they are sent, each with its receiver.
Outgoing = list[tuple[Peer, Message]]

#: Commits from one that tells servers the state of the schedule to the next: the most steps by
#: which another coordinator may have to advance it.
SCHEDULE_EVERY = 100


class CommitState:
    """The versions of a job or parameter server, on which coordinator and membership both act.

    Args:
        members: indices of the workers of a closed job; none for an open group.
        servers: indices of all servers.
        holding: the servers that hold trainable chunks, whose staging is awaited.
        rule: decides which staged pushes become the next version.
        schedule: of the hyperparameters, if there is one.
        sets_rates: whether learning rates that a user sets hold instead of the schedule's.
        keep_log: whether to keep every commit, for a replay.
        witnessed: whether servers remember the decisions, so that these outlive this process: a
            client learns of a commit when a server in another process knows it.
    """

    def __init__(
        self,
        *,
        members: frozenset[int],
        servers: tuple[int, ...],
        holding: frozenset[int],
        rule: CommitRule,
        schedule: Schedule | None = None,
        sets_rates: bool = True,
        keep_log: bool = False,
        witnessed: bool = False,
    ) -> None:
        self.members = members
        self.servers = servers
        self.rule = rule
        self.leases_samples, self.needs_all = leases_samples(rule), rule.needs_all
        self.version = 0  # number of updates committed; with rounds of a quorum of shares
        self.generation = 0  # number of the present membership; pushes of earlier ones are void
        # the newest version that clients may learn of; infinity where no server remembers
        self.logged = 0 if witnessed else math.inf
        # the pushes that are reported or staged, and not decided on
        self.staging: Staging = (
            StagedEach(holding) if stages_each(rule) else StagedTogether(holding)
        )
        self.leases = Leases(rule, members)  # which worker computes which share of the samples
        self.open_step = OpenStep()  # the pushes that are committed and of no whole step
        self.history = CommitHistory(keep_log)  # counters, and the log if it is kept
        self.versions_per_step = rule.versions_per_step(max(len(members), 1))
        self.pushes_per_step = rule.pushes_per_step(max(len(members), 1))
        self.pushes_per_update = pushes_per_update(rule, max(len(members), 1))
        self.rates: RateChanges = ()  # learning rates that a user has set
        self.schedule_behind = False  # whether the schedule has not reached the open step yet
        self._schedule, self._sets_rates = schedule, sets_rates
        self._witnessed = witnessed
        self._decisions = 0  # that servers were sent; counted where servers remember them

    @property
    def is_witnessed(self) -> bool:
        """Whether servers remember the decisions, so that these outlive this process."""
        return self._witnessed

    @property
    def step(self) -> int:
        """Number of whole training steps that are committed."""
        return self.version // self.versions_per_step

    def is_current(self, generation: int, pulled: int) -> bool:
        """Return whether a push of a generation, made from version `pulled`, may still be committed."""
        return generation == self.generation and (pulled == self.version or stages_each(self.rule))

    def advance(self, versions: int = 1) -> None:
        """Count the versions that one commit has made."""
        self.version += versions

    def begin_generation(self, joined: Collection[int]) -> None:
        """Begin a generation of the joined workers: every staged push is void, every leased share is free."""
        self.generation += 1
        self.staging.clear()
        self.leases.clear(joined, self.version)

    def go_on_from(self, version: int) -> None:
        """Continue from a version that all servers have; called before anything else."""
        self.version = version
        self.logged = version if self._witnessed else math.inf

    def install(self, install: Install, joined: Collection[int]) -> None:
        """Continue from a client's version, ledger, counters and schedule; what it lacks begins anew.

        Staged pushes stay until the next generation begins.
        """
        self.version = install.version
        self.logged = self.version if self._witnessed else math.inf
        first = self.step * self.pushes_per_step  # the first share of that step
        if install.anew:
            self.leases.clear(joined, self.version)
            self.leases.restore([first])
        if state := install.state:
            self.leases.restore(state.get("ledger", [first]))
            if "history" in state:
                self.history.load_state(state["history"])
        self.open_step.load(state or {} if leases_samples(self.rule) else {})
        if self._schedule is not None:
            self._schedule.load_state((state or {}).get("schedule"))
            self.schedule_behind = True
        self.history.forget_log()

    def confirm(self, version: int) -> None:
        """Let clients learn of the commits up to a version, which another process knows.

        Raises:
            ProtocolError: not committed.
        """
        if version > self.version:
            raise ProtocolError(f"LOGGED of version {version}, the last is {self.version}")
        self.logged = max(self.logged, version)

    def hyperparameters(self, step: int) -> list[dict[str, Any]]:
        """Return the hyperparameters of a step that differ from the servers' own, by parameter group."""
        if self._schedule is None:
            return []
        hyper = self._schedule.at(step)
        return with_rates(hyper, self.rates, step) if self._sets_rates else hyper

    def reach_schedule(self) -> bool:
        """Advance the schedule for a fraction of a second; return whether it is up to date."""
        self.schedule_behind = self._schedule is not None and not self._schedule.reach(self.step)
        return not self.schedule_behind

    def to_servers(self, decision: Decision) -> Outgoing:
        """Return a decision as messages for every server.

        If servers remember decisions it has a number, and the state with which another coordinator can go on.
        """
        if self._witnessed:
            self._decisions += 1
            with_schedule = isinstance(decision, CommitOrder) and self.version % SCHEDULE_EVERY == 0
            schedule = (
                self.schedule_state() if with_schedule or isinstance(decision, Members) else {}
            )
            remembered: dict[str, Any] = {
                "number": self._decisions,
                "state": self.recovery_state(),
                **schedule,
            }
            decision = replace(decision, **remembered)
        return [(server_peer(server), decision.pack()) for server in self.servers]

    def log_entry(self, entry: list[Any]) -> list[Any] | None:
        """Return an entry of the log if servers are to remember it, else None."""
        return entry if self._witnessed and self.history.keeps_log else None

    def recovery_state(self) -> dict[str, Any]:
        """Return the "ledger", the "history", and the "open" step with which another coordinator goes on from here."""
        ledger = self.leases.state()
        return {"ledger": ledger, "history": self.history.counts(), **self.open_step.state()}

    def schedule_state(self) -> dict[str, ScheduleState]:
        """Return the state of the schedule as "schedule"; empty if it has none."""
        state = None if self._schedule is None else self._schedule.state()
        return {} if state is None else {"schedule": state}
