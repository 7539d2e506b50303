"""Messages that real runs made, changed at random, and given to a running job by somebody who has its token."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from steepest.core.messages.message import ROLES, Kind, Message, Peer
from steepest.core.tensors.memory import as_tensor, clone
from steepest.core.transport.frames import HEADER, decode_header, encode
from steepest.core.transport.router import Router
from steepest.errors import DeadlineError, ProtocolError
from steepest.strategies.collectives.messages import MemberKind
from steepest.tables.job.row_messages import RowKind
from steepest.testing import Link, Network

ODD: tuple[Any, ...] = (
    *(
        None,
        0,
        1,
        2,
        -1,
        7,
        2**31,
        2**40,
        2**62,
        2**80,
        -(2**70),
        1.5,
        -0.5,
        float("nan"),
        float("inf"),
        True,
        False,
    ),
    *(
        "",
        "x",
        "worker",
        "client",
        "server",
        "weights",
        "state",
        "standing",
        "float32",
        "bool",
        "params",
    ),
    *(
        [],
        [0],
        [-1],
        [3],
        [[5, 0, 1]],
        [["client", 5, 1]],
        ["client", 5],
        [[[]]],
        {},
        {"a": {"b": []}},
        {"lr": "x"},
    ),
)
#: What fields of a former header hold at their ends, and beyond.
NUMBERS: tuple[Any, ...] = (
    *(-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 4, 5, 99, 1000, 2**31 - 1, 2**32 - 1, 2**40),
    *(2**62 - 1, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1, 1e300, 1e-320),
)


def carried(message: Message) -> Message | None:
    """A message as it arrives over a wire; None for one that no sender could put into a frame."""
    try:
        data = encode(message)
    except (struct.error, ProtocolError, OverflowError):
        return None
    arrived, size, _ = decode_header(data)
    arrived.body = data[HEADER.size : HEADER.size + size]
    arrived.payload = None if message.payload is None else clone(message.payload)
    return arrived


class Recorder:
    """Keeps what a network delivers; its filter, in front of another one."""

    def __init__(self, network: Network) -> None:
        self.seen: list[Message] = []
        self._before = network.filter
        network.filter = self

    def __call__(self, message: Message) -> Sequence[Message]:
        if (found := carried(message)) is not None:
            self.seen.append(found)
        return self._before(message)


def copied(message: Message) -> Message:
    """A message that has arrived, with its fields in a list, which can be changed."""
    payload = None if message.payload is None else clone(message.payload)
    return replace(message, body=msgspec.msgpack.decode(message.body), payload=payload)


def changed(chance: random.Random, message: Message, peers: Sequence[Peer]) -> Message:
    """A message with something wrong in a few places, or by chance nothing."""
    found = copied(message)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        chance.choice((_number, _number, _field, _field, _field, _nested, _payload, _words, _who))(
            chance, found, peers
        )
    return found


def _number(chance: random.Random, message: Message, peers: Sequence[Peer]) -> None:
    fields: list[Any] = message.body
    if numbers := [at for at, value in enumerate(fields) if type(value) in (int, float)]:
        at = chance.choice(numbers)
        fields[at] = chance.choice((*NUMBERS, fields[at] + 1, abs(fields[at] - 1)))


def _field(chance: random.Random, message: Message, peers: Sequence[Peer]) -> None:
    fields: list[Any] = message.body
    if not fields or chance.random() < 0.05:
        fields.append(copy.deepcopy(chance.choice(ODD)))
    elif chance.random() < 0.1:
        del fields[chance.randrange(len(fields)) :]
    else:
        fields[chance.randrange(len(fields))] = copy.deepcopy(chance.choice(ODD))


def _nested(chance: random.Random, message: Message, peers: Sequence[Peer]) -> None:
    """Something inside of a list or object."""
    place: Any = message.body
    while isinstance(place, (list, dict)) and place:
        name = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[name], (list, dict)) or chance.random() < 0.3:
            place[name] = chance.choice((copy.deepcopy(chance.choice(ODD)), [place[name]]))
            return
        place = place[name]


def _payload(chance: random.Random, message: Message, peers: Sequence[Peer]) -> None:
    size = 64 if message.payload is None else message.payload.nbytes
    size = chance.choice((0, 1, size, size - 1, size + 8, 8, 16, 4096))
    message.payload = (
        torch.full((size,), chance.choice((0, 63, 127, 255)), dtype=torch.uint8)
        if size > 0
        else None
    )


def _words(chance: random.Random, message: Message, peers: Sequence[Peer]) -> None:
    """Something within a payload: an id, a number of a table or of sightings, a value."""
    if message.payload is None or message.payload.nbytes < 8:
        return
    changed = as_tensor(clone(message.payload))
    dtype = chance.choice((torch.int32, torch.int64))
    words = changed[: changed.numel() // 8 * 8].view(dtype)
    now = int(words[at := chance.randrange(len(words))])
    words[at] = chance.choice((0, 1, -1, 2**31 - 1, int(words[chance.randrange(len(words))]), ~now))
    message.payload = changed


def _who(chance: random.Random, message: Message, peers: Sequence[Peer]) -> None:
    what = chance.randrange(3)
    if what == 0:
        message.kind = chance.choice((*Kind, *RowKind, *MemberKind))
    elif what == 1:
        message.source = chance.choice(
            (*peers, Peer(chance.choice(ROLES), chance.choice((0, 1, 5, 2**31 - 1))))
        )
    else:
        message.target = chance.choice(peers)


@dataclass
class Process:
    """One process that is spoken to, and its channels' ends."""

    router: Router
    links: Sequence[Link]
    peers: Sequence[Peer]

    def refused(self) -> int:
        """How much it has refused so far."""
        return self.router.refused + self.router.transport.refused  # type: ignore[union-attr]


def processes(network: Network) -> list[Process]:
    """All of them."""
    return [Process(t.router, t.links, tuple(t.router._roles)) for t in network._transports]


def deliver(process: Process, link: Link, message: Message) -> bool:
    """Gives a process a message as over one of its channels, and time to act on it; whether it was refused."""
    before = process.refused()
    transport: Any = process.router.transport
    transport.inbox.append((link, message))
    while transport.inbox:
        process.router.turn(0.0)
    return process.refused() > before


def go_on(network: Network, rounds: int = 60) -> None:
    """Gives everybody turns; it may be that nothing more can happen."""
    end = network.rounds + rounds
    try:
        network.run_until(lambda: network.rounds >= end, "rounds")
    except DeadlineError:
        return


Disturb = Callable[[random.Random], bool]


def tell(
    chance: random.Random, network: Network, seen: Sequence[Message], stranger: Link | None
) -> tuple[bool, str]:
    """Tells somebody something like what was once said; whether that was refused, and what it was.

    Args:
        stranger: the end of the channel of one who is no part of the job, at a process of it; None
            to use the channel of the one who sends.
    """
    everybody = processes(network)
    peers = [peer for process in everybody for peer in process.peers]
    while True:
        message = carried(changed(chance, chance.choice(seen), peers))
        if message is None:
            continue
        if stranger is not None:
            if chance.random() < 0.7:
                message.source = chance.choice(stranger.peers)
            process = next(p for p in everybody if stranger in p.links)
            return deliver(process, stranger, message), str(message)
        original = message.target
        for process in everybody:
            for link in process.links:
                if original in process.peers and message.source in link.peers and not link.closed:
                    return deliver(process, link, message), str(message)
