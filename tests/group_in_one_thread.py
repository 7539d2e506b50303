"""A parameter server's processes and its users in one thread, and what befalls their messages."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from steepest.core.engine.client import Client
from steepest.core.engine.coordinator_role import CoordinatorRole
from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.engine.shared_state import SharedState
from steepest.core.messages.message import Kind, Message, Peer
from steepest.core.transport.router import Router
from steepest.parameter_server.arrays import Arrays
from steepest.parameter_server.group import ServerGroup
from steepest.parameter_server.hosting import committed_in, host_server, read_optimizer
from steepest.parameter_server.pusher import Pusher
from steepest.runtime.chunk_transfer import RetainedChunks
from steepest.runtime.survivors import assemble, catch_up, state_of
from steepest.testing import Link, Network, server_peers
from steepest.testing.inspection import pushes_of, unanswered, undecided
from tests.inside import role_of

T = TypeVar("T")
FIRST = 100  # index of the first user


def zeros() -> dict[str, Any]:
    """Four arrays of two dtypes; with chunks of 64 bytes four of them, one with parts of two arrays."""
    return {
        "a": np.zeros((5, 3)),
        "b": torch.zeros(7, dtype=torch.float64),
        "none": np.zeros((0, 4)),
        "n": np.zeros(2, dtype=np.int64),
    }


def like(initial: Any, value: float) -> Any:
    """Arrays of one value."""
    if isinstance(initial, dict):
        return {name: like(array, value) for name, array in initial.items()}
    return (
        torch.full_like(initial, value)
        if isinstance(initial, torch.Tensor)
        else np.full_like(initial, value)
    )


def values(pulled: Any) -> set[float]:
    """All numbers that occur."""
    arrays = pulled.values() if isinstance(pulled, dict) else [pulled]
    return {float(number) for array in arrays for number in np.asarray(array).reshape(-1)}


@dataclass
class User:
    """A user's process."""

    arrays: Arrays
    pusher: Pusher
    client: Client
    router: Router
    links: list[Link]

    def push(self, update: Any) -> Future[int]:
        """Pushes."""
        return self.pusher.push(self.arrays.bytes_of(update, "update"))

    def push_pull(self, update: Any) -> tuple[Future[int], Any]:
        """Pushes, and pulls just that version; what is pulled is filled in by and by."""
        wanted, pulled = self.arrays.request(None, None, None)
        return self.pusher.push(self.arrays.bytes_of(update, "update"), wanted), pulled

    def pull(self, names: Sequence[str] | None = None, span: Any = None) -> tuple[Future[int], Any]:
        """Pulls."""
        wanted, pulled = self.arrays.request(names, span, None)
        return self.pusher.pull(wanted), pulled

    def die(self) -> None:
        """Its process is gone: what has left arrives."""
        for link in self.links:
            link.close()


class GroupInOneThread:
    """Servers that hold some arrays, and users."""

    def __init__(
        self,
        initial: Any = None,
        servers: int = 3,
        users: int = 2,
        *,
        shuffle: int | None = None,
        optimizer: Any = None,
        nonfinite: str = "refuse",
        chunk_bytes: int = 64,
        replication: int = 1,
    ) -> None:
        initial = zeros() if initial is None else initial
        self.initial = initial
        self.network = Network(shuffle)
        spec = None if optimizer is None else read_optimizer(optimizer, initial)
        self.arrays = Arrays.plan(initial, spec, chunk_bytes)
        self.group = ServerGroup(self.arrays, servers, nonfinite, replication)
        self._spec = spec
        self._committed: dict[tuple[int, int], int] = {}
        weights = self.arrays.layout.allocate()
        for name, memory in self.arrays.bytes_of(initial, "initial").items():
            entry = self.arrays.layout.entries[self.arrays.layout.index[name]]
            weights[entry.offset : entry.offset + entry.nbytes] = torch.from_numpy(memory)
        self._open(weights, 0)
        self.users: list[User] = []
        for _ in range(users):
            self.join()

    def _open(self, weights: torch.Tensor, version: int) -> None:
        """Processes of all servers, connected to the first."""
        self.routers = [self.network.router() for _ in range(self.group.num_servers)]
        self.servers = [
            host_server(self.group, self._spec, router, i, weights.clone(), version)
            for i, router in enumerate(self.routers)
        ]
        for i, router in enumerate(self.routers[1:], 1):
            self.network.connect(router, server_peers(i), self.routers[0], server_peers(0))
        role = role_of(self.routers[0], Peer("coordinator", 0))
        assert isinstance(role, CoordinatorRole)
        self.coordinator = role.coordinator

    def replace(self, dead: int) -> None:
        """A server is dead: the others agree, all go on with its successor, and users find them."""
        alive = [server for i, server in enumerate(self.servers) if i != dead]
        for router in self.routers:
            self.network.remove(router)
            router.clear()
        heard = [server.decisions.recent for server in alive]
        for server in alive:
            catch_up(server, heard)
            self._committed |= committed_in(server.decisions.recent)
        found = assemble(
            len(self.group.holders), {n: state_of([server]) for n, server in enumerate(alive)}
        )
        assert found is not None
        assert found.holders is not None
        kept = [RetainedChunks([server]) for server in alive]
        self._open(self.arrays.layout.allocate(), found.version)
        for server in self.servers:
            sources = {chunk: found.holders[chunk][0] for chunk in server.chunks}
            given = {c: kept[source].give([c])[c] for c, source in sources.items()}
            RetainedChunks().hand_over([server], given)
        for user in self.users:
            before, index = user.pusher.index, user.pusher.index + 1000
            self.network.remove(user.router)
            user.router = self.network.router()
            self.group.rehost_user(user.pusher, user.router, index)
            user.client, user.links = self._connect(user.router, index)
            user.pusher.resume(self._committed, before)

    def _connect(self, router: Router, index: int) -> tuple[Client, list[Link]]:
        """A user's client, and its channels to all servers."""
        client, peers = self.group.host_client(router, index), self.group.user_peers(index)
        return client, [
            self.network.connect(router, peers, r, server_peers(i))
            for i, r in enumerate(self.routers)
        ]

    def join(self, index: int | None = None) -> User:
        """One more user."""
        router = self.network.router()
        index = FIRST + len(self.users) if index is None else index
        pusher = self.group.host_user(router, index)
        client, links = self._connect(router, index)
        self.users.append(User(self.arrays, pusher, client, router, links))
        return self.users[-1]

    def wait(self, future: Future[T], what: str = "a future") -> T:
        """Runs everybody until a future is done."""
        self.network.run_until(future.done, what)
        return future.result()

    def turn(self) -> None:
        """Gives everybody a turn."""
        rounds = self.network.rounds
        self.network.run_until(lambda: self.network.rounds > rounds, "a round")

    def settle(self) -> None:
        """Runs everybody until no message is on its way."""
        self.network.settle()

    def pull(self, user: int = 0) -> tuple[int, Any]:
        """Version and arrays, as somebody pulls them."""
        future, pulled = self.users[user].pull()
        return self.wait(future, "a pull"), pulled

    def value(self, user: int = 0) -> float:
        """The number that every element is, which is the version too, as somebody pulls them."""
        version, pulled = self.pull(user)
        assert values(pulled) == {version}
        return version

    def state(self) -> SharedState:
        """Everything."""
        return self.wait(self.users[0].client.read("state"), "the state")

    @property
    def chunks(self) -> list[ServerChunk]:
        """All chunks of all servers."""
        return [held for server in self.servers for held in server.chunks.values()]

    def idle(self) -> bool:
        """Whether nothing is kept of any push: not on servers, not at the coordinator, not at users."""
        asking = [user.pusher for user in self.users if not user.links[0].closed]
        return not (
            any(map(pushes_of, self.servers))
            or undecided(self.coordinator)
            or any(map(unanswered, asking))
        )


# -- what befalls messages ---------------------------------------------------------------------------


def twice(message: Message) -> list[Message]:
    """Every message comes twice."""
    return [message, replace(message)]


class Replayed:
    """Pushes and reports are followed by older ones of the same user to the same server."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._old: dict[tuple[Peer | None, Peer | None], list[Message]] = defaultdict(list)
        self.count = 0

    def __call__(self, message: Message) -> list[Message]:
        if message.kind not in (Kind.PUSH, Kind.PUSHED, Kind.PUSH_STAGED):
            return [message]
        old = self._old[message.source, message.target]
        old.append(message)
        again = self._random.sample(old, min(len(old), self._random.randrange(3)))
        self.count += len(again)
        return [replace(message), *map(replace, again)]


class Reordered:
    """The chunks of each push reach each server in another order."""

    def __init__(self, crowd: GroupInOneThread, seed: int) -> None:
        self._random = random.Random(seed)
        self._sizes = Counter(crowd.group.owners)
        self._held: dict[Any, list[Message]] = defaultdict(list)

    def __call__(self, message: Message) -> list[Message]:
        if message.kind is not Kind.PUSH:
            return [message]
        assert message.target is not None
        held = self._held[message.source, message.target, message.body.sequence]
        held.append(message)
        if len(held) < self._sizes[message.target.index]:
            return []
        self._random.shuffle(held)
        return held


def late(seed: int) -> Callable[[Message], int]:
    """Some messages take long."""
    chance = random.Random(seed)
    return lambda message: chance.choice((0, 0, 0, 3, 40))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9)),
    "whole": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
