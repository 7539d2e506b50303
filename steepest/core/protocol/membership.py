"""The policy of a coordinator on membership: which processes push, and how they are answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from steepest.core.messages.message import Message, Peer
from steepest.core.protocol.commit_rules import Staged
from steepest.core.protocol.commit_state import CommitState, Outgoing
from steepest.core.protocol.push_tracking import Reports
from steepest.core.status import Status

#: (worker, sequence) of the workers that are sent new weights, and of the push that these answer;
#: sequence 0 where they answer none.
Readers = list[list[int]]


class Made(NamedTuple):
    """The pushes of which a version was made."""

    pushes: tuple[Staged, ...]  # in the order in which they are added up
    reports: Reports  # of these, by worker
    staleness: Mapping[int, int]  # of these, by worker
    norm: float | None  # of the gradient; None where it is not known
    skipped: bool  # whether the version leaves them out, because of NaN or infinity
    versions: int = 1  # as how many versions it counts


class Membership(Protocol):
    """The processes that push: a closed job's workers, or an open group's users."""

    @property
    def state(self) -> CommitState:
        """Versions and staged pushes, which the coordinator acts on too."""

    @property
    def torn(self) -> Mapping[str, Any] | None:
        """About the server whose optimizer raised in a committed update; None while servers are whole.

        The fields of a `Failure`. Nothing is committed meanwhile.
        """

    @property
    def limit(self) -> int:
        """The version up to which steps are granted; the present version when none is."""

    def handle(self, source: Peer, message: Message) -> Outgoing:
        """Act on a message about membership or steps; return the messages to send.

        A request of a client arrives here once, however often the client sent it.

        Raises:
            ProtocolError: none for this membership.
        """

    def report(self, source: Peer, message: Message) -> bool:
        """Stage the report of a push; return whether it may complete one.

        Raises:
            ProtocolError: it contradicts what is known.
        """

    def lost(self, peer: Peer, reason: str) -> Outgoing:
        """Act on the loss of a peer, whose channel closed for `reason`; return the messages to send."""

    def tick(self, now: float) -> Outgoing:
        """Give up overdue steps; return the messages to send; `now`: in seconds on the caller's clock."""

    def doing(self) -> Status:
        """Return what is waited for; any thread may ask while decisions are made."""

    def is_over(self, worker: int, incarnation: int) -> bool:
        """Return whether the process that made a push is no member any more."""

    def committed(self, made: Made) -> tuple[Readers, Outgoing]:
        """Take note that pushes became the present version.

        Returns:
            The workers that are sent the new weights, and the messages to send after the commit.
        """

    def settle(self) -> Outgoing:
        """Count the pushes committed since the last call, and return the results of their steps."""

    def known(self) -> Outgoing:
        """Return the answers that waited until another server knows their version, and are due."""

    def dropped(self, pushes: tuple[Staged, ...]) -> tuple[Readers, Outgoing]:
        """Take note that pushes will never be committed; return as `committed`."""

    def audit(self) -> tuple[Outgoing, bool]:
        """Compare what workers report of a step, which is staged; return messages, and whether it may be committed."""

    def refuse(self, pushes: tuple[Staged, ...], reason: str, about: Mapping[str, Any]) -> Outgoing:
        """Commit none of some pushes, which are not staged any more afterwards.

        Args:
            pushes: that the rule chose for the next version.
            reason: "nonfinite", "schedule", "unlike", or "optimizer" for `torn`.
            about: the fields of a `Failure` that say more.
        """
