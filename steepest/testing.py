"""For tests: a whole job in one thread, over in-process channels, on virtual time; collectives between threads."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from steepest.client import Snapshot
from steepest.comm.channel import Event
from steepest.comm.message import Message, Peer, worker_peer
from steepest.comm.router import Router
from steepest.config import ParameterServerStrategy, StrategyConfig
from steepest.errors import DeadlineError, PeerLostError
from steepest.job import (
    Job,
    ModelCreator,
    build_models,
    build_replicas,
    check_agreement,
    host_client,
    host_coordinator,
    host_server,
    host_worker,
    make_strategy,
)
from steepest.sampler import even_share
from steepest.worker import Worker

T = TypeVar("T")


class Link:
    """One direction-aware end of an in-process channel; what is sent is copied, as a wire would."""

    def __init__(self, network: Network, name: str, peers: tuple[Peer, ...], far: InProcessTransport) -> None:
        self.name = name
        self.peers = peers
        self.pending = 0
        self.closed = False
        self._network = network
        self._far = far
        self.other: Link | None = None

    def send(self, message: Message) -> None:
        """Delivers a copy to the other end's queue."""
        if self.closed:
            return
        assert self.other is not None
        copy = Message(**{name: getattr(message, name) for name in Message.__slots__})
        if message.payload is not None:
            copy.payload = message.payload.clone()
        self._network.deliver(self._far, self.other, copy)

    def own_pending(self) -> None:
        """Nothing is pending: `send` copies."""

    def close(self) -> None:
        """Closes both ends; the other one sees it."""
        for end, owner in ((self, None), (self.other, self._far)):
            if end is not None and not end.closed:
                end.closed = True
                if owner is not None:
                    owner.inbox.append((end, None))


class InProcessTransport:
    """A `Transport` whose channels lead to other routers of the same thread."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.inbox: deque[tuple[Link, Message | None]] = deque()
        self.random: random.Random | None = None  # chooses the channel that is heard next; order within one stays
        self.speed = 1.0  # the share of its turns that it takes

    def poll(self, timeout: float) -> list[Event]:
        """The next message, if any; never waits."""
        if not self.inbox:
            return []
        link, message = self._next()
        if message is not None and message.payload is not None:
            target = self.router.destination(message, message.payload.numel())
            if target is not None:
                target.copy_(message.payload)
            message.payload = target
        return [Event(link, message, "" if message is not None else "closed")]

    def _next(self) -> tuple[Link, Message | None]:
        if self.random is not None:
            chosen = self.random.choice(list(dict.fromkeys(link for link, _ in self.inbox)))
            position = next(i for i, (link, _) in enumerate(self.inbox) if link is chosen)
            self.inbox.rotate(-position)
            found = self.inbox.popleft()
            self.inbox.rotate(position)
            return found
        return self.inbox.popleft()

    def pump(self) -> None:
        """Nothing is pending."""

    def wake(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing to close."""


class Network:
    """Routers of one thread and the links between them.

    Args:
        shuffle: a seed; processes then take their turns in random order, some rarely, and hear their channels
            in random order, so that messages of different channels overtake each other, each channel staying
            in order.
    """

    def __init__(self, shuffle: int | None = None) -> None:
        self.now = 0.0
        self.delivered = 0
        self._random = None if shuffle is None else random.Random(shuffle)
        self._transports: list[InProcessTransport] = []
        #: looks at every message before it is delivered; what it returns is delivered instead
        self.filter: Callable[[Message], Sequence[Message]] = lambda message: [message]

    def router(self) -> Router:
        """A new process."""
        router = Router()
        router.transport = transport = InProcessTransport(router)
        if self._random is not None:
            transport.random = self._random
            transport.speed = self._random.choice((0.05, 0.3, 1.0))
        self._transports.append(transport)
        return router

    def connect(self, a: Router, a_peers: tuple[Peer, ...], b: Router, b_peers: tuple[Peer, ...]) -> Link:
        """Connects two processes; returns the end that `a` holds."""
        assert isinstance(a.transport, InProcessTransport)
        assert isinstance(b.transport, InProcessTransport)
        there = Link(self, " + ".join(map(str, b_peers)), b_peers, b.transport)
        back = Link(self, " + ".join(map(str, a_peers)), a_peers, a.transport)
        there.other, back.other = back, there
        a.attach(there)
        b.attach(back)
        return there

    def deliver(self, to: InProcessTransport, link: Link, message: Message) -> None:
        """Puts a message into a process' inbox."""
        for filtered in self.filter(message):
            self.delivered += 1
            to.inbox.append((link, filtered))

    def run_until(self, done: Callable[[], bool], what: str) -> None:
        """Gives every process its turns until something holds.

        Raises:
            DeadlineError: nothing moves any more, not even when an hour of virtual time passes.
        """
        idle = 0
        while not done():
            before = self.delivered
            order = list(self._transports)
            if self._random is not None:
                self._random.shuffle(order)
            busy = any(transport.inbox for transport in order)
            for transport in order:
                if self._random is None or self._random.random() < transport.speed:
                    transport.router.turn(0.0)
            if busy or self.delivered > before:
                idle = 0
                continue
            idle += 1
            if idle > 100:
                raise DeadlineError(f"nothing moves any more while waiting for {what}")
            if idle > 2:
                self.now += 36.0
                for transport in order:
                    transport.router.tick(self.now)


class InProcessCluster:
    """A whole job in one thread: the same state machines as on Ray, over in-process channels.

    Example:
        >>> import torch
        >>> from steepest.testing import InProcessCluster, linear_model_creator
        >>> cluster = InProcessCluster(linear_model_creator(), num_workers=2)
        >>> results = cluster.step(3)
        >>> results[-1].version
        3
    """

    def __init__(
        self,
        model_creator: ModelCreator,
        *,
        num_workers: int = 1,
        devices_per_worker: int = 1,
        strategy: StrategyConfig | None = None,
        seed: int = 0,
        shuffle: int | None = None,
        step_timeout: float = 300.0,
    ) -> None:
        config = strategy or ParameterServerStrategy(num_servers=1)
        chosen = make_strategy(config)
        self.network = Network(shuffle)
        built = [
            build_models(model_creator, worker, devices_per_worker, seed, chosen.chunk_bytes)
            for worker in range(num_workers)
        ]
        for worker, (_, described) in enumerate(built):
            check_agreement(built[0][1], described, "worker 0", f"worker {worker}")
        num_servers = chosen.num_servers(1)
        self.job = Job(
            built[0][1], config, num_workers, devices_per_worker, num_servers, seed, step_timeout=step_timeout
        )
        cpu = [torch.device("cpu")] * devices_per_worker
        replicas = [build_replicas(self.job, worker, models, cpu) for worker, (models, _) in enumerate(built)]
        self.client_router = self.network.router()
        self.server_routers = [self.network.router() for _ in range(num_servers)]
        self.servers = [
            host_server(router, self.job, index, replicas[0].weights.clone())
            for index, router in enumerate(self.server_routers)
        ]
        self.coordinator = host_coordinator(self.server_routers[0], self.job)
        self.client = host_client(self.client_router, self.job, 0)
        self.workers: list[Worker] = []
        self.worker_routers: list[Router] = []
        self.links: dict[Peer, list[Link]] = {}
        for index, copies in enumerate(replicas):
            router = self.network.router()
            self.workers.append(host_worker(router, self.job, index, copies))
            self.worker_routers.append(router)
        client_peers = (Peer("client", 0),)
        for server, router in enumerate(self.server_routers):
            peers = server_peers(server)
            self._connect(Peer("client", 0), self.client_router, client_peers, router, peers)
            for index, worker_router in enumerate(self.worker_routers):
                self._connect(worker_peer(index), worker_router, (worker_peer(index),), router, peers)
            if server:
                self._connect(Peer("server", server), router, peers, self.server_routers[0], server_peers(0))
        for worker_role in self.workers:
            worker_role.join()

    def _connect(self, near: Peer, a: Router, a_peers: tuple[Peer, ...], b: Router, b_peers: tuple[Peer, ...]) -> None:
        self.links.setdefault(near, []).append(self.network.connect(a, a_peers, b, b_peers))

    def step(self, steps: int = 1) -> list[Message]:
        """Takes steps; returns the RESULT messages, and ends early with a FAILURE.

        Raises:
            PeerLostError: a server is gone.
        """
        self.client.ask(steps, True)
        found: list[Message] = []
        while len(found) < steps:
            self.network.run_until(lambda: not self.client.outcomes.empty(), "a step")
            outcome = self.client.outcomes.get()
            if isinstance(outcome, PeerLostError):
                raise outcome
            found.append(outcome)
            if outcome.kind.name == "FAILURE":
                break
        return found

    def wait(self, future: Future[T], what: str) -> T:
        """Runs the job until a future is done."""
        self.network.run_until(future.done, what)
        return future.result()

    def snapshot(self, what: str = "weights") -> Snapshot:
        """The servers' weights, and optimizer state with "state"."""
        return self.wait(self.client.read(what), "a snapshot")

    def weights(self) -> dict[str, torch.Tensor]:
        """The servers' weights by parameter name."""
        snapshot = self.snapshot()
        layout = self.job.description.layout
        return {e.name: layout.entry_view(snapshot.weights, i).clone() for i, e in enumerate(layout.entries)}

    def disconnect(self, peer: Peer) -> None:
        """Cuts every channel of a worker, a server or the client, as its death would."""
        for link in self.links.get(peer, []):
            link.close()
        for link in (link for links in self.links.values() for link in links if peer in link.peers):
            assert link.other is not None
            link.other.close()


class InProcessCollective:
    """A `Collective` between threads of one process: slow, simple, what others are held against.

    Make one for each member with `InProcessCollective.group`.
    """

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        self.rank = rank
        self.size = size
        self._board = board

    @classmethod
    def group(cls, size: int, deadline: float = 10.0) -> list[InProcessCollective]:
        """Members that know each other; `deadline` is in seconds."""
        board = _Board(size, deadline)
        return [cls(rank, size, board) for rank in range(size)]

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, by rank."""
        return self._board.exchange(self.rank, tensor.clone())

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum over members of this member's slice."""
        begin, end = even_share(len(vector), self.rank, self.size)
        first, *rest = [other[begin:end] for other in self._exchange(vector)]
        for other in rest:
            first = first + other
        return first

    def all_gather(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """The slices of all members, put together."""
        whole = torch.cat(self._exchange(part))
        assert len(whole) == length, "the parts are not the slices of a vector of that length"
        return whole

    def broadcast(self, vector: torch.Tensor, root: int) -> torch.Tensor:
        """The root's vector."""
        return self._exchange(vector)[root]

    def barrier(self) -> None:
        """Returns when every member has called it."""
        self._exchange(torch.empty(0))

    def abort(self, reason: str) -> None:
        """Ends every operation in progress."""
        self._board.abort(reason)


class _Board:
    """Where threads lay down tensors for each other, one round after the other."""

    def __init__(self, size: int, deadline: float) -> None:
        self._size = size
        self._deadline = deadline
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, torch.Tensor]] = {}
        self._taken: dict[int, int] = {}
        self._next = [0] * size
        self._aborted = ""

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        with self._changed:
            number = self._next[rank]
            self._next[rank] += 1
            laid = self._rounds.setdefault(number, {})
            laid[rank] = tensor
            self._changed.notify_all()
            there = self._changed.wait_for(lambda: self._aborted or len(laid) == self._size, self._deadline)
            if self._aborted:
                raise PeerLostError(f"the collective was aborted: {self._aborted}")
            if not there:
                missing = [str(other) for other in range(self._size) if other not in laid]
                raise DeadlineError(f"waited {self._deadline:g} s in vain for members {', '.join(missing)}")
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self._size:
                del self._rounds[number], self._taken[number]
            return [laid[other] for other in range(self._size)]

    def abort(self, reason: str) -> None:
        with self._changed:
            self._aborted = self._aborted or reason
            self._changed.notify_all()


def server_peers(index: int) -> tuple[Peer, ...]:
    """The roles in the process of a server: the coordinator lives beside the first."""
    own = Peer("server", index)
    return (own, Peer("coordinator", 0)) if index == 0 else (own,)


def linear_model_creator(
    *,
    samples: int = 20,
    batch_size: int = 4,
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
    **settings: Any,
) -> ModelCreator:
    """A model creator for tests: linear regression in float64 on fixed random data."""
    from steepest.models.torch import TorchModel

    def create(worker_index: int, device_index: int) -> TorchModel:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
        y = torch.randn(samples, 2, generator=generator, dtype=torch.float64)
        return TorchModel(
            torch.nn.Linear(3, 2).double(),
            loss=torch.nn.functional.mse_loss,
            data=(x, y),
            batch_size=batch_size,
            optimizer=optimizer or (lambda module: torch.optim.SGD(module.parameters(), lr=0.1)),
            **settings,
        )

    return create
