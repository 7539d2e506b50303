"""The coordinator of a parameter server by itself: users push, nothing is leased or granted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from steepest.core.messages.gradients import Discard
from steepest.core.messages.membership import Failed, Members
from steepest.core.messages.message import Kind, Message, Peer, PushId, worker_peer
from steepest.core.messages.snapshots import Install, Installed, InstallPut
from steepest.core.messages.users import PushCommitted, Pushed, PushRefused
from steepest.core.protocol.commit_rules import Staged
from steepest.core.protocol.commit_state import CommitState, Outgoing
from steepest.core.protocol.coordinator import Coordinator, Made, Readers, Updates
from steepest.core.protocol.push_tracking import StagedEach
from steepest.core.status import Status
from steepest.errors import ProtocolError, described_by, listed


class OpenCoordinator(Coordinator):
    """Users that come and leave, and know nothing of each other.

    A user speaks as a worker whose index the servers do not know beforehand.

    Args:
        state: without members, and with a rule that commits each push by itself and drops none.
        nonfinite: "refuse", "skip" or "pass" updates with NaN or infinity.
    """

    def __init__(self, state: CommitState, nonfinite: str) -> None:
        assert isinstance(state.staging, StagedEach)
        super().__init__(state, Updates(nonfinite=nonfinite))
        self._installed = 0  # the version that a client installed last
        self._staging = state.staging
        # Answers that wait until another server knows the version, oldest first.
        self._answers: deque[tuple[int, Peer, Message]] = deque()

    def _take(self, source: Peer, message: Message) -> Outgoing:
        """Act on USER_LEFT or FAILED of a server, or INSTALL of a client."""
        match message.kind:
            case Kind.FAILED if source.index in self.state.servers:
                return self._update_failed(source, message.body)
            case Kind.USER_LEFT if source.index in self.state.servers:
                return self._abandon(message.body.worker, source.index)
            case Kind.INSTALL:
                return self._install(source, message.body)
            case _:
                raise ProtocolError(
                    f"the coordinator of a parameter server does not take {message.kind.name} "
                    f"from {source}"
                )

    def _report(self, source: Peer, message: Message) -> bool:
        """Stage PUSHED of a user."""
        if message.kind is not Kind.PUSHED:
            raise ProtocolError(
                f"the coordinator of a parameter server takes no report of {source}"
            )
        pushed: Pushed = message.body
        if pushed.pulled > self.state.version:
            raise ProtocolError(
                f"PUSHED from version {pushed.pulled}, the newest is {self.state.version}"
            )
        self._staging.report(PushId(source.index, 0, pushed.sequence), pushed)
        return True

    def _lost(self, peer: Peer, reason: str) -> Outgoing:
        """Discard what a lost user cannot complete, or everything when a server is lost."""
        if peer.role == "worker":
            return self._abandon(peer.index, None)
        if peer.role != "server":
            return []
        state = self.state
        state.begin_generation(())
        return state.to_servers(Members(state.generation, state.version, [], reload=True))

    def doing(self) -> Status:
        """Return which pushes are not complete."""
        version, open_ = self.state.version, self._staging.awaited_by_push()
        if not open_:
            return Status(f"waits for pushes; version {version} is committed")
        words = [
            f"push {push.sequence} of {worker_peer(push.worker)} lacks {listed(peers)}"
            for push, peers in open_
        ]
        return Status(f"waits to commit version {version + 1}: {listed(words)}")

    def _is_over(self, worker: int, incarnation: int) -> bool:
        """Return False: a user's push is committed even if the user has left since."""
        return False

    def _committed(self, made: Made) -> tuple[Readers, Outgoing]:
        """Answer each user: with the new weights if it asked for them, else with the version.

        If servers have copies, each is answered with the version, and only when another server knows
        it, so that it outlives this process.
        """
        answers: Outgoing = []
        readers: Readers = []
        for push in made.pushes:
            pushed = made.reports[push.worker]
            pull = isinstance(pushed, Pushed) and pushed.pull
            if pull:
                readers.append((push.worker, push.sequence))
            if not pull or self.state.is_witnessed:
                committed = PushCommitted(push.sequence, self.state.version)
                answers += self._when_known(worker_peer(push.worker), committed.pack())
        return readers, answers

    def _when_known(self, peer: Peer, answer: Message) -> Outgoing:
        """Return an answer about the present version, or keep it until `_known`."""
        if self.state.version <= self.state.logged:
            return [(peer, answer)]
        self._answers.append((self.state.version, peer, answer))
        return []

    def _known(self) -> Outgoing:
        """Return the answers about versions that another server now knows."""
        answers: Outgoing = []
        while self._answers and self._answers[0][0] <= self.state.logged:
            answers.append(self._answers.popleft()[1:])
        return answers

    def _dropped(self, pushes: tuple[Staged, ...]) -> tuple[Readers, Outgoing]:
        """Fail: no message tells a user of a dropped push, so the rule must drop none."""
        raise AssertionError(f"the rule of an open group dropped {pushes}")

    def _refuse(
        self, pushes: tuple[Staged, ...], reason: str, details: Mapping[str, Any]
    ) -> Outgoing:
        """Let servers discard pushes, and tell each user why: NaN or infinity, or servers without a common version."""
        assert reason in ("nonfinite", "optimizer"), reason
        self._staging.take(pushes)
        out = self._discard([push.id for push in pushes])
        for push in pushes:
            refused = PushRefused(push.sequence, details.get("culprits", ()))
            if reason == "optimizer":
                raised = f"{details['peer']}: its optimizer raised: {details['error']}"
                described = {name: details[name] for name in ("error", "traceback", "kind")}
                refused = replace(refused, raised=raised, **described)
            out.append((worker_peer(push.worker), refused.pack()))
        return out

    def _update_failed(self, server: Peer, failed: Failed) -> Outgoing:
        """Refuse all pushes from now on, unless a client has installed another state since."""
        if self.torn is None and failed.version > self._installed:
            self.torn = {"peer": server, **described_by(failed)}
        return []

    def _install(self, client: Peer, install: Install) -> Outgoing:
        """Install the state that a client has put, as the next version."""
        self.state.advance()
        generation, version = self.state.generation, self.state.version
        if install.anew:
            self.torn, self._installed = None, version
        order = InstallPut(generation, version, [(*client, install.sequence)])
        installed = Installed(generation, install.sequence, version)
        return [*self.state.to_servers(order), *self._when_known(client, installed.pack())]

    def _abandon(self, user: int, server: int | None) -> Outgoing:
        """Discard the pushes that a user can no longer complete, see `StagedEach.abandon`."""
        lost = self._staging.abandon(user, server)
        return self._discard(lost) if lost else []

    def _discard(self, pushes: list[PushId]) -> Outgoing:
        """Return the messages by which servers discard pushes."""
        return self.state.to_servers(
            Discard(self.state.generation, self.state.version, tuple(pushes))
        )
