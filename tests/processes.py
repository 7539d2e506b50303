"""A parameter server's processes and its users as real processes of this host, without Ray."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

import torch

from steepest.core.messages.message import COORDINATOR, server_peer
from steepest.core.tensors.shared_memory import BOARD_BYTES, allocate
from steepest.core.transport.channel import Address
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.errors import PeerLostError
from steepest.parameter_server.connection import Connection
from steepest.parameter_server.group import ServerGroup
from steepest.parameter_server.hosting import host_server
from tests.inside import channels_of, unsent_of, weight_buffers_of

SECONDS = 60.0
TOKEN = b"correct horse battery staple"
FIRST = 100  # index of the first user
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(  # what tests import is imported once
    ["pytest", "hypothesis", "tests.processes", "tests.socket_ends"]
)


class Child:
    """A process that does what it is told, and answers."""

    def __init__(self, body: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=_run, args=(theirs, body, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def hear(self) -> Any:
        """What it says next; raises what it raised."""
        assert self.pipe.poll(SECONDS), "waited in vain"
        said = self.pipe.recv()
        if isinstance(said, BaseException):
            raise said
        return said

    def ask(self, question: Any = None) -> Any:
        """Has it do something; what it says then."""
        self.pipe.send(question)
        return self.hear()

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        if self.process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self.process.join(SECONDS)
        assert not self.process.is_alive()
        self.pipe.close()


def _run(pipe: Pipe, body: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        with contextlib.suppress(EOFError, BrokenPipeError):  # the test is over
            body(pipe, *arguments)
    except Exception as error:  # noqa: BLE001 - raised again by the test
        traceback.print_exc()
        pipe.send(error)


class Status(NamedTuple):
    """What a server says of itself: channels, places in which it keeps weights, bytes that have not left yet."""

    channels: int
    rooms: int
    pending: int


class User:
    """What a user's process works with."""

    def __init__(
        self, group: ServerGroup, addresses: Sequence[Address], index: int, ways: str
    ) -> None:
        router = Router()
        self.arrays = group.arrays
        self.pusher = group.host_user(router, index)
        wire = WireTransport(TOKEN, group.user_peers(index), "here", router.destination, ways)
        router.use(wire)
        for address in addresses:
            router.attach(wire.connect(address))
        self.connection = Connection(
            router,
            self.pusher,
            lambda: group.host_client(router, index),
            name="it",
            timeout=SECONDS,
            max_in_flight=4,
        )

    def pull(self, span: tuple[int, int] | None = None) -> tuple[int, torch.Tensor]:
        """The version, and a copy of the one array or of a part of it."""
        wanted, pulled = self.arrays.request(
            None if span is None else [""], span, None, self.connection.recycler
        )
        return self.connection.run(lambda: self.pusher.pull(wanted), "a pull"), pulled

    def push(self, update: torch.Tensor) -> int:
        """The version that it makes."""
        memory = self.arrays.bytes_of(update, "update")
        return self.connection.run(lambda: self.pusher.push(memory), "a push", memory.values())

    def push_pull(self, update: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The version that it makes, and the array at that version."""
        memory = self.arrays.bytes_of(update, "update")
        wanted, pulled = self.arrays.request(None, None, None, self.connection.recycler)
        done = self.connection.run(
            lambda: self.pusher.push(memory, wanted), "a push", memory.values()
        )
        return done, pulled

    def empty(self) -> torch.Tensor:
        """Memory to push from, which servers read where it lies."""
        return self.arrays.request(None, None, None, self.connection.updates)[1]


def _serve(pipe: Pipe, group: ServerGroup, index: int, ways: str) -> None:
    router = Router()
    server = host_server(group, None, router, index, allocate(group.arrays.layout.nbytes))
    peers = (server_peer(0), COORDINATOR) if index == 0 else (server_peer(index),)
    wire = WireTransport(TOKEN, peers, "here", router.destination, ways)
    router.use(wire)
    pipe.send(wire.listen("127.0.0.1"))
    first = pipe.recv()
    if index:
        router.attach(wire.connect(first))
    router.start("server")

    def status() -> Status:
        return Status(channels_of(wire), weight_buffers_of(server), unsent_of(wire))

    while True:
        pipe.send(router.call(status).result(SECONDS))
        pipe.recv()


def _use(pipe: Pipe, work: Callable[..., None], group: ServerGroup, *arguments: Any) -> None:
    user, lost = User(group, *arguments), ""
    try:
        work(user, pipe)
    except PeerLostError as error:
        lost = str(error)
    user.connection.close()
    del user
    gc.collect()
    pipe.send((lost, memory_of(os.getpid())))
    pipe.recv()


class Crew:
    """Servers of one array of zeros, and users; all of them end with the test."""

    def __init__(self, group: ServerGroup, ways: str = "wire") -> None:
        self.group = group
        self.ways = ways
        self.all: list[Child] = []
        self.users = 0

    def start(self) -> None:
        """Starts the servers."""
        self.servers = [
            self.add(_serve, self.group, index, self.ways)
            for index in range(self.group.num_servers)
        ]
        self.addresses = [server.hear() for server in self.servers]
        for server in self.servers:
            server.ask(self.addresses[0])

    def add(self, body: Callable[..., None], *arguments: Any) -> Child:
        """One more process."""
        self.all.append(Child(body, *arguments))
        return self.all[-1]

    def user(self, work: Callable[[User, Pipe], None]) -> Child:
        """A user's process: does this work; its last word is whom it lost, and the shared memory that it still has."""
        self.users += 1
        return self.add(_use, work, self.group, self.addresses, FIRST + self.users, self.ways)

    @property
    def rooms(self) -> list[int]:
        """In how many places each server keeps weights."""
        return [server.ask().rooms for server in self.servers]

    def end(self) -> None:
        """Ends everybody."""
        for child in self.all:
            child.kill()


@contextlib.contextmanager
def crew_of(group: ServerGroup, ways: str = "wire") -> Iterator[Crew]:
    """A crew for the length of a block."""
    crew = Crew(group, ways)
    try:
        crew.start()
        yield crew
    finally:
        crew.end()


def until(condition: Callable[[], bool]) -> None:
    """Waits for something that others do."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"


def memory_of(pid: int) -> set[int]:
    """Our shared memory that a process maps or has a descriptor of, by inode."""
    found = set()
    with contextlib.suppress(OSError):  # it is gone, or another user's
        found |= {int(words[4]) for words in _maps(pid)}
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if "/memfd:steepest" in os.readlink(descriptor):
                    found.add(descriptor.stat().st_ino)
    return found


def made_by(pid: int) -> set[int]:
    """That of it which others only read: the process made it, and it is no board."""
    found = set()
    for words in _maps(pid):
        begin, end = (int(address, 16) for address in words[0].split("-"))
        if words[1] == "rw-s" and end - begin > BOARD_BYTES:
            found.add(int(words[4]))
    return found


def _maps(pid: int) -> list[list[str]]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split() for line in lines if "/memfd:steepest" in line]


def holders_of(memory: set[int]) -> set[int]:
    """The processes of this machine that hold some of that memory."""
    return {
        int(p.name)
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and memory_of(int(p.name)) & memory
    }
