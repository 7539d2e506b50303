"""The coordinator of a parameter server by itself: anybody may push, nothing is leased or granted."""

from __future__ import annotations

from typing import Any

from steepest.messages.message import Kind, Message, Peer, worker_peer
from steepest.protocol.commit_rules import PushId, Staged
from steepest.protocol.coordinator import Coordinator, Outgoing
from steepest.protocol.push_tracking import Report, StagedEach


class OpenCoordinator(Coordinator):
    """Commits what is whole, of whoever pushes; for its arguments see `Coordinator`."""

    def handle(self, source: Peer, message: Message) -> Outgoing:
        """Acts on one message, see `Coordinator.handle`."""
        match message.kind:
            case Kind.USER_LEFT if source.index in self._servers:
                return self._abandon(int(message.values()["worker"]), source.index)
            case Kind.PUSHED:
                return self._report(source.index, message)
        return super().handle(source, message)

    def lost(self, peer: Peer, reason: str) -> Outgoing:
        """A peer's channel closed."""
        return self._abandon(peer.index, None) if peer.role == "worker" else super().lost(peer, reason)

    def _go_on(self) -> Outgoing:
        return []

    def _claim(self, push: PushId) -> bool:
        return True

    def _is_over(self, worker: int, incarnation: int) -> bool:
        return False

    def _result(self, step: int) -> Outgoing:
        self._part.clear()
        self._norms.clear()
        return []

    def _install(self, source: Peer, message: Message) -> Outgoing:
        self._asked[source] = message.sequence
        self.version += 1
        self._waiting.append((source, message.sequence))
        return self._to_servers(Kind.INSTALL_PUT, meta={"install": self._to_install()}) + self._tell_installed()

    def _answer(self, chosen: tuple[Staged, ...], reports: dict[int, Report]) -> tuple[Outgoing, list[list[int]]]:
        wanting = [push for push in chosen if reports[push.worker].meta.get("pull")]
        told: Outgoing = []
        for push in (push for push in chosen if push not in wanting):
            committed = Message(Kind.PUSH_COMMITTED, self.generation, sequence=push.sequence, version=self.version)
            told.append((worker_peer(push.worker), committed))
        return told, [[push.worker, push.sequence] for push in wanting]

    def _refuse(self, pushes: tuple[Staged, ...], why: dict[str, Any]) -> Outgoing:
        """Tells those who pushed why their push is not committed."""
        self._staging.take(pushes)
        out = self._to_servers(Kind.DISCARD, meta={"pushes": [list(push.id) for push in pushes], "readers": []})
        told = {"culprits": why["culprits"]}
        for push in pushes:
            refusal = Message(Kind.PUSH_REFUSED, self.generation, sequence=push.sequence, meta=told)
            out.append((worker_peer(push.worker), refusal))
        return [*out, *self._decide()]

    def _abandon(self, worker: int, server: int | None) -> Outgoing:
        """Somebody who pushed is gone: what is not staged everywhere never will be."""
        assert isinstance(self._staging, StagedEach)
        lost = self._staging.abandon(worker, server)
        if not lost:
            return []
        return self._to_servers(Kind.DISCARD, meta={"pushes": [list(push) for push in lost], "readers": []})
