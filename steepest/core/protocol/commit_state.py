"""The state of a coordinator: versions, staged pushes, and how servers learn of decisions. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from steepest.core.messages.fields import RateChanges
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
from steepest.core.protocol.history import CommitHistory
from steepest.core.protocol.push_tracking import StagedEach, StagedTogether, Staging
from steepest.core.protocol.sample_leases import Leases
from steepest.errors import ProtocolError

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
        schedule: of the hyperparameters, if it has a state.
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
        self.history = CommitHistory(keep_log)  # counters, and the log if it is kept
        self.versions_per_step = rule.versions_per_step(max(len(members), 1))
        self.pushes_per_step = rule.pushes_per_step(max(len(members), 1))
        self.pushes_per_update = pushes_per_update(rule, max(len(members), 1))
        self.rates: RateChanges = ()  # learning rates that hold instead of the schedule's
        self.schedule_behind = False  # whether the schedule has not reached the open step yet
        self._schedule = schedule
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
        """Return the "ledger" and "history" that another coordinator needs to go on from here."""
        return {"ledger": self.leases.state(), "history": self.history.counts()}

    def schedule_state(self) -> dict[str, ScheduleState]:
        """Return the state of the schedule as "schedule"; empty if it has none."""
        state = None if self._schedule is None else self._schedule.state()
        return {} if state is None else {"schedule": state}
