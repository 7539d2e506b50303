"""A job of the core's roles, each process of it a router's thread of this one; they talk over TCP."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from types import TracebackType

import torch

from steepest.core.engine.client import Client
from steepest.core.engine.hosting import (
    build_replicas,
    host_client,
    host_coordinator,
    host_server,
    host_worker,
)
from steepest.core.engine.job import Job, ModelCreator, check_agreement
from steepest.core.engine.model_building import build_models
from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.message import COORDINATOR, Peer, server_peer, worker_peer
from steepest.core.models.step_size import StepSize
from steepest.core.strategies.strategy import Strategy
from steepest.core.transport.channel import Address
from steepest.core.transport.loopback import HOST
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport

SECONDS = 60.0
TOKEN = b"correct horse battery staple"
CPU = torch.device("cpu")


class Joined:
    """A job that a `with` block ends.

    The first process has coordinator and client, and the servers, unless the strategy puts them into the workers.

    Args:
        creator: of the models.
        num_workers: number of worker processes.
        strategy: of the core's.
        seed: of weights and order.
    """

    def __init__(
        self, creator: ModelCreator, num_workers: int, strategy: Strategy, seed: int
    ) -> None:
        size = StepSize(num_workers)
        built = [build_models(creator, i, 1, seed, strategy.cut, size) for i in range(num_workers)]
        for worker, (_, described) in enumerate(built):
            check_agreement(built[0][1], described, "worker 0", f"worker {worker}")
        servers = strategy.servers_for(1, num_workers)
        self.job = Job(built[0][1], strategy, num_workers, 1, servers, seed, SECONDS)
        self._ending = contextlib.ExitStack()
        in_workers = strategy.in_workers
        replicas = [
            build_replicas(self.job, i, models, [CPU], serves=in_workers)
            for i, (models, _) in enumerate(built)
        ]
        self._router, first = self._process(COORDINATOR, Peer("client", 0), *(
            () if in_workers else map(server_peer, range(servers))
        ))  # fmt: skip
        host_coordinator(self._router, self.job)
        for index in () if in_workers else range(servers):
            host_server(self._router, self.job, index, replicas[0].weights.clone())
        self._client: Client = host_client(self._router, self.job, 0)
        listening = [self._started(self._router, first, [])]
        members = []
        for index, copies in enumerate(replicas):
            serving = (server_peer(index),) if in_workers else ()
            router, transport = self._process(worker_peer(index), *serving)
            if in_workers:  # it updates its slice where the model computes with it
                host_server(router, self.job, index, copies.weights, shared=True)
            members.append((router, host_worker(router, self.job, index, copies)))
            here = self._started(router, transport, listening if in_workers else listening[:1])
            listening.append(here)
        for router, member in members:
            router.call(member.join).result(SECONDS)

    def _process(self, *peers: Peer) -> tuple[Router, WireTransport]:
        """Return a router that some roles will use, and its connections."""
        router = Router()
        transport = WireTransport(TOKEN, peers, HOST, router.destination, "tcp")
        router.use(transport)
        return router, transport

    def _started(
        self, router: Router, transport: WireTransport, others: Sequence[Address]
    ) -> Address:
        """Start a process, and connect it to others; return where it listens."""
        here = transport.listen(HOST)
        self._ending.callback(transport.close)
        self._ending.callback(router.stop, SECONDS)
        router.start(f"steepest {transport.peers[0]}")
        for other in others:
            router.call(partial(_connect, router, transport, other)).result(SECONDS)
        return here

    def __enter__(self) -> Joined:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.close()

    def step(self, steps: int) -> list[Result]:
        """Take steps; return their results."""
        self._router.call(lambda: self._client.ask(steps, True)).result(SECONDS)
        found = [self._client.outcomes.get(timeout=SECONDS) for _ in range(steps)]
        results = [each for each in found if isinstance(each, Result)]
        assert len(results) == steps, found
        return results

    def fail(self) -> Failure:
        """Take a step that fails; return how."""
        self._router.call(lambda: self._client.ask(1, True)).result(SECONDS)
        found = self._client.outcomes.get(timeout=SECONDS)
        assert isinstance(found, Failure), found
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the servers' weights by name."""
        read = self._router.call(lambda: self._client.read("weights")).result(SECONDS)
        return read.result(SECONDS).named(self.job.description.layout)


def _connect(router: Router, transport: WireTransport, other: Address) -> None:
    router.attach(transport.connect(other, SECONDS))
