"""States that clients put on a server part by part, which are installed as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from steepest.core.engine.chunk_store import HeldChunk
from steepest.core.engine.optimizer_records import state_tensor
from steepest.core.messages.message import Message, Peer, Send
from steepest.core.messages.snapshots import Put, PutReceived, PutState, ReplaceState
from steepest.core.optim.portable import Record
from steepest.errors import ProtocolError

_MOST_PUTS = 16  # states of one client that are not installed
# all states that are not installed may have 64 times the bytes of the weights, and 1 GiB more
_TIMES = 64
_ALWAYS = 1 << 30


@dataclass(slots=True)
class _ArrivingPut:
    """A state that a client puts, as far as it has come: weights by chunk, optimizer state."""

    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    state: list[tuple[int, dict[str, Any], torch.Tensor]] = field(default_factory=list)
    replaces_state: bool = False


class PutStates:
    """The states that clients have put on one server and that are not installed yet.

    Args:
        server: its index, for errors.
        send: sends as the server.
        make_way: called before a chunk's weights change; returns the memory for the new ones, or None for
            in place.
        checked: whether an optimizer step is tried before a state may be installed.
    """

    def __init__(
        self,
        server: int,
        chunks: Mapping[int, HeldChunk],
        send: Send,
        make_way: Callable[[HeldChunk], torch.Tensor | None],
        *,
        checked: bool,
    ) -> None:
        self._server = server
        self._chunks = chunks
        self._send = send
        self._make_way = make_way
        self._checked = checked
        self._puts: dict[tuple[Peer, int], _ArrivingPut] = {}  # by client and request
        self._installed: dict[Peer, int] = {}  # the last request of each client
        self._lost: set[Peer] = set()  # lost clients, whose states may still be installed

    def __len__(self) -> int:
        """Return the number of states that have come, whole or in part, and are not installed."""
        return len(self._puts)

    def make_room(self, size: int) -> None:
        """Check that there is room for a part of `size` bytes; ProtocolError: all parts together are too large.

        An optimizer's state may be many times as large as the weights. States of lost clients are dropped if room
        is short.
        """
        dense = [held for held in self._chunks.values() if not held.is_opaque]
        most = _TIMES * sum(held.chunk.nbytes for held in dense) + _ALWAYS
        if self._held() + size > most:
            self._drop_lost()
        if (held := self._held()) + size > most:
            raise ProtocolError(
                f"{size} bytes beside {held} of states that are not installed: server {self._server} takes {most}"
            )

    def _held(self) -> int:
        """Return the bytes of all states."""
        return sum(
            sum(payload.nbytes for payload in put.weights.values())
            + sum(value.nbytes for _, _, value in put.state)
            for put in self._puts.values()
        )

    def _drop_lost(self) -> None:
        """Drop the states of clients that are lost."""
        self._puts = {key: put for key, put in self._puts.items() if key[0] not in self._lost}
        self._lost.clear()

    def receive(self, source: Peer, message: Message) -> None:
        """Keep a part of a state; answer its client, unless that state is installed already.

        Raises:
            ProtocolError: the chunk is not held here, no optimizer step can be taken from the state, or the client
                has put too many states.
        """
        part: Put | PutState | ReplaceState = message.body
        if part.sequence <= self._installed.get(source, 0):
            return
        self._keep(source, part, message.payload)
        self._send(source, PutReceived(part.sequence, part.number).pack())

    def _keep(
        self, source: Peer, part: Put | PutState | ReplaceState, payload: torch.Tensor | None
    ) -> None:
        """Add a part to its state; ProtocolError: see `receive`."""
        match part:
            case Put():
                if payload is None or part.chunk not in self._chunks:
                    raise ProtocolError(
                        f"PUT of {payload} for chunk {part.chunk} at server {self._server}"
                    )
                self._put_of(source, part).weights[part.chunk] = payload
            case PutState():
                value = state_tensor(part.about, payload)
                if (held := self._chunks.get(part.chunk)) is None:
                    raise ProtocolError(
                        f"optimizer state for chunk {part.chunk}: server {self._server} does not "
                        "hold it"
                    )
                held.check_state(part.about, value)
                put = self._put_of(source, part)
                if put.replaces_state:
                    raise ProtocolError("optimizer state after REPLACE_STATE, its last message")
                put.state.append((part.chunk, part.about, value))
            case ReplaceState():
                put = self._put_of(source, part)
                try:
                    self._try(put)
                except ProtocolError:
                    del self._puts[source, part.sequence]
                    raise
                put.replaces_state = True

    def _put_of(self, source: Peer, part: Put | PutState | ReplaceState) -> _ArrivingPut:
        """Return the state that a message is a part of; ProtocolError: this is one state too many."""
        key = (source, part.sequence)
        if key not in self._puts and sum(other == source for other, _ in self._puts) >= _MOST_PUTS:
            raise ProtocolError(
                f"{source} has put {_MOST_PUTS} states that it has not had installed"
            )
        if source in self._lost or key not in self._puts:
            self._drop_lost()
            self._puts[key] = _ArrivingPut()
        return self._puts[key]

    def _try(self, put: _ArrivingPut) -> None:
        """Try an optimizer step from a state that was put, for opaque chunks in any case; ProtocolError: it fails."""
        tried = [index for index, held in self._chunks.items() if self._checked or held.is_opaque]
        parts: dict[int, list[tuple[dict[str, Any], torch.Tensor]]] = {at: [] for at in tried}
        for at, description, value in put.state:
            if at in parts:
                parts[at].append((description, value))
        for index in tried:
            self._chunks[index].try_state(parts[index])

    def install(self, client: Peer, sequence: int) -> bool:
        """Install the state that a client has put under a request's number; do nothing if no part has come.

        Return whether weights and optimizer state are all new. Weights that are being read stay as they are, in
        other memory.
        """
        put = self._puts.pop((client, sequence), None)
        if put is None:
            return False
        if client not in self._lost:
            self._installed[client] = sequence
        self._puts = {
            key: other for key, other in self._puts.items() if key[0] != client or key[1] > sequence
        }
        for index, payload in put.weights.items():
            held = self._chunks[index]
            if (buffer := self._make_way(held)) is not None:
                held.move(buffer)
            held.weights.copy_(payload)
            held.weights_set()
        if put.replaces_state:
            try:
                self._replace_state(put.state)
            except ProtocolError as error:
                # It was accepted, and others install theirs: refused now, the server would go on without its part.
                raise AssertionError(
                    f"server {self._server} cannot load a state that it has accepted: {error}"
                ) from error
        return put.replaces_state

    def _replace_state(self, state: Iterable[Record]) -> None:
        """Give all chunks a state in place of what they have."""
        for held in self._chunks.values():
            held.clear_state()
        for index, description, value in state:
            self._chunks[index].load_state(description, value)
        for held in self._chunks.values():
            held.end_state()

    def lost(self, peer: Peer) -> None:
        """Note that a client's channel is closed: its successor numbers requests from one again."""
        self._installed.pop(peer, None)
        self._lost |= {source for source, _ in self._puts if source == peer}
