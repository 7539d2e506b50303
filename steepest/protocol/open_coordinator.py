"""The coordinator of a parameter server by itself: anybody may push, nothing is leased or granted."""

from __future__ import annotations

from steepest.errors import ProtocolError
from steepest.messages.gradients import Discard
from steepest.messages.message import Kind, Message, Peer, PushId, worker_peer
from steepest.messages.snapshots import Install, InstallPut
from steepest.messages.users import PushCommitted, Pushed, PushRefused, UserLeft
from steepest.protocol.commit_rules import Staged
from steepest.protocol.coordinator import Coordinator, Outgoing
from steepest.protocol.push_tracking import Culprits, Reports, StagedEach


class OpenCoordinator(Coordinator):
    """Commits what is whole, of whoever pushes; for its arguments see `Coordinator`."""

    def handle(self, source: Peer, message: Message) -> Outgoing:
        """Acts on one message, see `Coordinator.handle`."""
        match message.kind:
            case Kind.USER_LEFT if source.index in self._servers:
                return self._abandon(UserLeft.unpack(message).worker, source.index)
            case Kind.PUSHED:
                return self._pushed(source.index, Pushed.unpack(message))
        return super().handle(source, message)

    def lost(self, peer: Peer, reason: str) -> Outgoing:
        """A peer's channel closed."""
        return (
            self._abandon(peer.index, None) if peer.role == "worker" else super().lost(peer, reason)
        )

    def _pushed(self, user: int, pushed: Pushed) -> Outgoing:
        if pushed.pulled > self.version:
            raise ProtocolError(
                f"PUSHED from version {pushed.pulled}, the newest is {self.version}"
            )
        self._staging.report(PushId(user, 0, pushed.sequence), pushed)
        return self._decide()

    def _go_on(self) -> Outgoing:
        return []

    def _is_over(self, worker: int, incarnation: int) -> bool:
        return False

    def _result(self, step: int) -> Outgoing:
        self._step.clear()
        return []

    def _install(self, source: Peer, asked: Install) -> Outgoing:
        self._asked[source] = asked.sequence
        self.version += 1
        self._waiting.append((source, asked.sequence))
        order = InstallPut(self.generation, self.version, self._to_install())
        return self._to_servers(order) + self._tell_installed()

    def _account(self, reports: Reports, staleness: dict[int, int], step: int) -> None:
        """A user's step is no part of a training step."""

    def _answer(
        self, chosen: tuple[Staged, ...], reports: Reports
    ) -> tuple[Outgoing, list[list[int]]]:
        answers: Outgoing = []
        readers = []
        for push in chosen:
            pushed = reports[push.worker]
            if isinstance(pushed, Pushed) and pushed.pull:
                readers.append([push.worker, push.sequence])
            else:
                answers.append(
                    (worker_peer(push.worker), PushCommitted(push.sequence, self.version).pack())
                )
        return answers, readers

    def _refuse(self, pushes: tuple[Staged, ...], culprits: Culprits) -> Outgoing:
        """Commit none of these pushes, and tell the users why."""
        self._staging.take(pushes)
        out = self._to_servers(
            Discard(self.generation, self.version, tuple(push.id for push in pushes))
        )
        out += [
            (worker_peer(push.worker), PushRefused(push.sequence, culprits).pack())
            for push in pushes
        ]
        return [*out, *self._decide()]

    def _abandon(self, worker: int, server: int | None) -> Outgoing:
        """Somebody who pushed is gone: what is not staged everywhere never will be."""
        assert isinstance(self._staging, StagedEach)
        lost = self._staging.abandon(worker, server)
        if not lost:
            return []
        return self._to_servers(Discard(self.generation, self.version, tuple(lost)))
