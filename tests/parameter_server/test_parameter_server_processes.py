"""A parameter server of real processes under load: each pull has one version, and killed processes leave no memory."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe

import pytest
import torch

from steepest.core.messages.message import Kind, Message, Peer
from steepest.core.tensors import shared_memory
from steepest.core.tensors.memory import as_tensor
from steepest.parameter_server.arrays import Arrays
from steepest.parameter_server.group import ServerGroup
from tests.processes import Crew, User, crew_of, holders_of, made_by, memory_of, until

pytestmark = pytest.mark.skipif(not shared_memory.AVAILABLE, reason="memfd is Linux'")
SIZE = 2_000_000  # 8 MB of float32
PULLS = 30  # at least
VERSIONS = 6  # that a reader sees, at least
LARGE = 8_000_000  # more than sockets hold


def group_of(size: int) -> ServerGroup:
    """Two servers of one array of zeros."""
    return ServerGroup(Arrays.plan(torch.zeros(size), None, None), 2)


@pytest.fixture
def crew() -> Iterator[Crew]:
    """Two servers; afterwards no process of this machine holds memory of anybody's."""
    with crew_of(group_of(SIZE)) as crew:
        yield crew
        memory = set().union(*(memory_of(child.pid) for child in crew.all))
    assert memory
    assert holders_of(memory) == set()
    assert not [name for name in os.listdir("/dev/shm") if "steepest" in name]


def check(version: int, pulled: torch.Tensor) -> None:
    """Every update adds one to every element."""
    assert bool((pulled == version).all()), (
        f"torn: {pulled.unique().tolist()[:9]} at version {version}"
    )


# -- what users do -----------------------------------------------------------------------------------


def push(user: User, pipe: Pipe) -> None:
    """Pushes ones until it is told to stop, by turns from memory of its own and from memory that servers read."""
    own, lent, pushes, last = torch.ones(SIZE), user.empty(), 0, 0
    while not pipe.poll():
        if pushes % 2:
            version, pulled = user.push_pull(lent.fill_(1.0))
            check(version, pulled)
            lent.fill_(1e9)  # whoever reads it too late adds this
        else:
            version = user.push(own)
        assert version > last
        last, pushes = version, pushes + 1
        if pushes == 1:
            pipe.send("at work")
    pipe.send(pushes)


def push_as_told(user: User, pipe: Pipe) -> None:
    """Says which version its last push made."""
    pipe.send("here")
    update = torch.ones(user.arrays.layout.entries[0].numel)
    while (times := pipe.recv()) is not None:
        pipe.send([user.push(update) for _ in range(times)][-1])


def push_in_part(user: User, pipe: Pipe) -> None:
    """Pushes an update without the first chunk of each of these servers."""
    pipe.send("here")
    pusher, send = user.pusher, user.pusher._send
    left_out = {pusher._holders.index((server,)) for server in pipe.recv()}

    def send_in_part(target: Peer, message: Message) -> None:
        if message.kind is not Kind.PUSH or message.body.chunk not in left_out:
            send(target, message)

    user.pusher._send = send_in_part
    update = user.empty().fill_(1.0)
    user.pusher.push(user.arrays.bytes_of(update, "update"))
    user.connection._router.pump()
    pipe.send("pushed")
    pipe.recv()


def push_once(user: User, pipe: Pipe) -> None:
    """Says which version it made, and that it is whole."""
    version, pulled = user.push_pull(torch.ones(SIZE))
    check(version, pulled)
    pipe.send(version)


def pull(user: User, pipe: Pipe) -> None:
    """Pulls, all of it or a part, until enough other versions were among what it saw."""
    chance, versions = random.Random(os.getpid()), [0]
    while len(versions) <= PULLS or len(set(versions)) < VERSIONS:
        span = None if len(versions) % 2 else tuple(sorted(chance.sample(range(SIZE + 1), 2)))
        version, pulled = user.pull(span)
        check(version, pulled)
        assert version >= versions[-1]
        versions.append(version)
    pipe.send("has seen them")


def pull_once(user: User, pipe: Pipe) -> None:
    """Says which version it pulled, and that it is whole."""
    version, pulled = user.pull()
    check(version, pulled)
    pipe.send(version)


def pull_for_ever(user: User, pipe: Pipe) -> None:
    """Pulls and pulls."""
    number = 0
    while True:
        check(*user.pull())
        number += 1
        if number == 3:
            pipe.send("at work")


def pull_slowly(user: User, pipe: Pipe) -> None:
    """Asks for weights, and takes them when it is told to; says which version they are."""
    wanted, pulled = user.arrays.request(None, None, None)
    future = user.pusher.pull(wanted)
    user.connection._router.pump()
    pipe.send("asked")
    pipe.recv()
    version = user.connection.run(lambda: future, "a pull")
    check(version, pulled)
    pipe.send(version)


def hold(user: User, pipe: Pipe) -> None:
    """Pulls once, and keeps what it was lent; looks at it whenever it is asked to."""
    kept, destination = [], user.pusher.destination

    def keep(message: Message, size: int) -> torch.Tensor | None:
        assert message.payload is not None
        kept.append(message.payload)
        return destination(message, size)

    user.pusher.destination = keep
    version, _ = user.pull()
    while True:
        for memory in kept:
            check(version, as_tensor(memory).view(torch.float32))
        pipe.send(version)
        pipe.recv()


# -- nobody sees a torn weight -----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("ways", ["wire", "unix", "tcp"])
def test_whoever_pulls_while_others_push_sees_one_version_and_none_goes_back(ways: str) -> None:
    with crew_of(group_of(SIZE), ways) as crew:
        pushers = [crew.user(push) for _ in range(2)]
        assert [pusher.hear() for pusher in pushers] == ["at work"] * 2
        readers = [crew.user(pull) for _ in range(3)]
        assert [reader.hear() for reader in readers] == ["has seen them"] * 3
        pushed = sum(pusher.ask() for pusher in pushers)
        assert crew.user(pull_once).hear() == pushed, "an update was lost, or applied twice"
        assert [user.hear() for user in (*readers, *pushers)] == [("", set())] * 5, (
            "who goes leaves nothing"
        )


@pytest.mark.long
@pytest.mark.parametrize("ways", ["unix", "tcp"])
def test_a_slow_reader_receives_the_version_that_it_asked_for(ways: str) -> None:
    with crew_of(group_of(LARGE), ways) as crew:
        pusher = crew.user(push_as_told)
        pusher.hear()
        reader = crew.user(pull_slowly)
        assert reader.hear() == "asked"
        until(lambda: all(server.ask().pending for server in crew.servers))
        assert pusher.ask(3) == 3
        assert crew.rooms == [2, 2], "nothing was left to send: this tests nothing"
        assert reader.ask() == 0


@pytest.mark.full
def test_what_a_reader_holds_does_not_change_and_few_rooms_are_needed(crew: Crew) -> None:
    pusher = crew.user(push_as_told)
    pusher.hear()
    version, readers = 0, []
    for number in range(1, 4):
        readers.append(crew.user(hold))
        assert readers[-1].hear() == version
        version = pusher.ask(3)
        assert [reader.ask() for reader in readers] == [0, 3, 6][:number], (
            "each looks at what it holds"
        )
        assert crew.rooms == [number + 1] * 2, "readers and what is being made"


# -- and nobody's death leaves memory behind ---------------------------------------------------------


@pytest.mark.full
@pytest.mark.long
def test_rooms_of_readers_that_are_killed_are_used_again(crew: Crew) -> None:
    pusher = crew.user(push_as_told)
    pusher.hear()
    for _ in range(3):
        readers = [crew.user(hold), crew.user(pull_for_ever)]
        for reader in readers:
            reader.hear()
        pusher.ask(5)
        for reader in readers:
            assert memory_of(reader.pid)
            reader.kill()
        for server in crew.servers:
            until(
                lambda server=server: server.ask().channels == 2
            )  # to the other server and the pusher
        pusher.ask(5)
        for server, rooms in zip(crew.servers, crew.rooms, strict=True):
            assert rooms <= 3, "two readers and what is being made"
            assert len(memory_of(server.pid) - memory_of(pusher.pid)) == rooms, (
                "and nothing of the dead"
            )


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("missing", [[0], [1], [0, 1]])
def test_what_a_pusher_left_in_part_is_dropped_everywhere(crew: Crew, missing: list[int]) -> None:
    killed, other = crew.user(push_in_part), crew.user(push_as_told)
    assert killed.hear() == other.hear() == "here"
    assert killed.ask(missing) == "pushed"
    made = made_by(killed.pid)
    until(lambda: all(memory_of(server.pid) & made for server in crew.servers))
    assert other.ask(1) == 1
    killed.kill()
    until(lambda: not holders_of(made))
    assert crew.user(push_once).hear() == 2


@pytest.mark.long
def test_a_pusher_that_is_killed_has_pushed_wholly_or_not_and_nobody_keeps_its_memory(
    crew: Crew,
) -> None:
    others = [crew.user(push), crew.user(pull_for_ever)]
    for _ in range(3):
        killed = crew.user(push)
        killed.hear()
        made = made_by(killed.pid)
        assert made
        until(lambda made=made: holders_of(made) >= {server.pid for server in crew.servers})
        killed.kill()
        until(lambda made=made: not holders_of(made))
    others[0].hear()
    pushes = others[0].ask()
    version = crew.user(push_once).hear()
    assert version >= pushes + 3 + 1, "what the dead were told of is there"


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1])
def test_of_a_server_that_is_killed_nobody_keeps_memory(crew: Crew, index: int) -> None:
    users = [crew.user(work) for work in (push, push, pull_for_ever)]
    for user in users:
        user.hear()
    killed, other = crew.servers[index], crew.servers[1 - index]
    held: set[int] = set()

    def all_held() -> bool:  # a user holds it from a pull to the next, if not at every moment
        held.update(holders_of(made_by(killed.pid)))
        return held >= {user.pid for user in users}

    until(all_held)
    made = made_by(killed.pid)
    killed.kill()
    for user in users:
        lost, memory = user.hear()
        assert "of the parameter server is gone" in lost
        assert memory == set()
    until(lambda: other.ask().channels == 0)
    assert not holders_of(made)
    rooms = other.ask().rooms
    # The coordinator lived beside server 0: what is staged whole stays, one push of each pusher,
    # which may lie in two regions of its outbox, and its board.
    assert rooms <= len(memory_of(other.pid)) <= rooms + (6 if index == 0 else 0)
