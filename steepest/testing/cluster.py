"""A whole training job in one thread, over in-process channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

from steepest.core.data.fingerprint import sample_hashes
from steepest.core.engine.client import read_log
from steepest.core.engine.commit_log import CommitLog
from steepest.core.engine.extension import Extension
from steepest.core.engine.hosting import (
    build_replicas,
    host_client,
    host_coordinator,
    host_server,
    host_worker,
)
from steepest.core.engine.job import Job, ModelCreator, check_agreement, without_caches
from steepest.core.engine.model_building import build_models
from steepest.core.engine.replica_states import all_states, merged_states
from steepest.core.engine.replicas import Replicas
from steepest.core.engine.server import Server
from steepest.core.engine.shared_state import SharedState
from steepest.core.engine.topology import HostMap
from steepest.core.engine.worker import Worker
from steepest.core.messages.driver import AuditDifference, Failure, Result, WorkerLost
from steepest.core.messages.message import Kind, Peer, aggregator_peer, server_peer, worker_peer
from steepest.core.models.protocol import Model
from steepest.core.models.step_size import StepSize
from steepest.core.strategies.strategy import Strategy
from steepest.core.transport.router import Router
from steepest.errors import ConfigurationError, PeerLostError, ProtocolError
from steepest.extensions import EXTENSIONS
from steepest.strategies.aggregation.host_aggregator import host_aggregator
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing.faults import Fault
from steepest.testing.groups import simulated
from steepest.testing.network import Link, Network
from steepest.testing.script import FaultScript

T = TypeVar("T")


class InProcessCluster:
    """A whole job in one thread: the same state machines as on Ray, over in-process channels.

    Args:
        model_creator, num_workers, devices_per_worker, accumulate, global_batch_size, strategy, seed: as of
            `DistributedSGD`.
        shuffle: see `Network`.
        step_timeout: virtual seconds that a step may take.
        keep_log: whether to keep every commit for `log`.
        lend: whether gradients and weights are read where they lie, as between processes of one
            host.
        hosts: the hosts of the workers and servers; by default each has a host of its own.
        replaces: whether the job waits for a successor of a worker that is killed, which `replace`
            starts; otherwise the death is a failure of the step.
        faults: the script, see `steepest.testing.Fault`.
        extensions: what attaches to the workers, see `docs/explanation/extensions.md`; by default all that
            the library has.
        device: on which all models compute, "cuda" for the present GPU.
        audit, audit_replaces: as of `RunConfig`; with `audit_replaces` give `replaces`, too.

    Attributes:
        left: the coordinator's reports of workers that died.
        differences: its reports of gradients that differ in audited steps.
        on_left: called with the index of each of these workers; by default `replace`.
        lives: by worker, how many processes came before the present one.

    Example:
        >>> import torch
        >>> from steepest.testing import InProcessCluster, linear_model_creator
        >>> cluster = InProcessCluster(linear_model_creator(), num_workers=2)
        >>> results = cluster.step(3)
        >>> results[-1].version
        3
    """

    def __init__(  # noqa: PLR0913, PLR0915 - what a user chooses for a job, and all of its roles
        self,
        model_creator: ModelCreator,
        *,
        num_workers: int = 1,
        devices_per_worker: int = 1,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        strategy: Strategy | None = None,
        seed: int = 0,
        shuffle: int | None = None,
        step_timeout: float = 300.0,
        keep_log: bool = False,
        lend: bool = True,
        hosts: HostMap | None = None,
        replaces: bool = False,
        faults: Sequence[Fault] = (),
        extensions: Sequence[Extension] = EXTENSIONS,
        device: str = "cpu",
        audit: float = 0.0,
        audit_replaces: bool = False,
    ) -> None:
        self._extensions = tuple(map(simulated, extensions))
        config = strategy or ParameterServerStrategy(num_servers=1)
        chosen = config
        self.network = Network(shuffle)
        self.network.lends = (
            (Kind.PUSH, Kind.HOST_PUSH, Kind.WEIGHTS, Kind.WEIGHTS_SHARED) if lend else ()
        )
        self.lives = [0] * num_workers
        self._script = FaultScript(self, faults, model_creator, accumulate * chosen.updates)
        self._creator = self._script.creator if faults else model_creator
        size = StepSize(num_workers * devices_per_worker * accumulate, global_batch_size)
        built = [
            build_models(
                self._creator, worker, devices_per_worker, seed, chosen.cut, size, self._extensions
            )
            for worker in range(num_workers)
        ]
        description = built[0][1]
        for worker, (models, described) in enumerate(built):
            sources = built[0][0][0].data, models[0].data
            description = without_caches(
                description,
                described,
                lambda *which, of=sources: [sample_hashes(each, *which) for each in of],
            )
            check_agreement(description, described, "worker 0", f"worker {worker}")
        num_servers = chosen.servers_for(1, num_workers)
        self.job = Job(
            description, config, num_workers, devices_per_worker, num_servers, seed, step_timeout,
            keep_log, hosts, accumulate, replaces=replaces, global_batch_size=global_batch_size,
            audit=audit, audit_replaces=audit_replaces,
        )  # fmt: skip
        if faults and self.job.micro_batches != accumulate:
            raise ConfigurationError(
                f"faults with global_batch_size={global_batch_size} and accumulate={accumulate}: "
                f"give accumulate={self.job.micro_batches}, as many batches as each replica computes"
            )
        self.left: list[WorkerLost] = []
        self.differences: list[AuditDifference] = []
        self.on_left: Callable[[int], None] = self.replace
        self._devices = [torch.device(device)] * devices_per_worker
        replicas = [
            self._build_replicas(worker, models) for worker, (models, _) in enumerate(built)
        ]
        self.client_router = self.network.router()
        self.server_routers = [self.network.router() for _ in range(num_servers)]
        hosted = chosen.in_workers
        self.servers: list[Server] = []
        aggregators = self.job.places.aggregators
        for index, router in enumerate(self.server_routers):
            in_place = hosted and chosen.in_place
            weights = replicas[index].weights if in_place else replicas[0].weights.clone()
            self.servers.append(
                host_server(
                    router,
                    self.job,
                    index,
                    weights,
                    shared=in_place or index in aggregators,
                    arriving=built[0][0][0].optimizer_state,
                )
            )
            if index in aggregators:
                host_aggregator(router, self.job, index, weights)
        self.coordinator = host_coordinator(self.server_routers[0], self.job)
        self.client = host_client(self.client_router, self.job, 0)
        self.workers: list[Worker] = []
        self.worker_routers: list[Router] = []
        self.links: dict[Peer, list[Link]] = {}
        for index, copies in enumerate(replicas):
            router = self.server_routers[index] if hosted else self.network.router()
            self.workers.append(
                host_worker(
                    router,
                    self.job,
                    index,
                    copies,
                    partial(self.network.wait, router),
                    extensions=self._extensions,
                )
            )
            self.worker_routers.append(router)
        self._wire()
        if faults:
            counts = {
                "worker": num_workers,
                "server": num_servers,
                "aggregator": num_servers,
                "coordinator": 1,
                "client": 1,
            }
            self._script.check(counts)
            self.network.script = self._script
            for server_role, peer in zip(
                self.servers, map(server_peer, range(num_servers)), strict=True
            ):
                self._script.watch(server_role, peer)
        for worker_role in self.workers:
            worker_role.join()

    def _wire(self) -> None:
        """Connect the processes, each channel once."""
        in_workers = self.job.strategy.in_workers
        all_to_all = bool(self.job.places.aggregators) or in_workers  # all send to all
        client_peers = (Peer("client", 0),)
        for server, router in enumerate(self.server_routers):
            peers = self._server_peers(server)
            self._connect(Peer("client", 0), self.client_router, client_peers, router, peers)
            for index, worker_router in enumerate(() if in_workers else self.worker_routers):
                self._connect(
                    worker_peer(index), worker_router, (worker_peer(index),), router, peers
                )
            for other in range(server if all_to_all else min(server, 1)):
                other_peers = self._server_peers(other)
                self._connect(
                    Peer("server", server), router, peers, self.server_routers[other], other_peers
                )

    def _build_replicas(self, worker: int, models: Sequence[Model]) -> Replicas:
        serves = self.job.strategy.in_workers
        arguments = self.job, worker, models, self._devices
        return build_replicas(*arguments, extensions=self._extensions, serves=serves)

    def kill(self, worker: int) -> None:
        """End a worker's process at once, in the middle of whatever it does."""
        self.network.remove(self.worker_routers[worker])

    def hang(self, worker: int) -> None:
        """Stop a worker's process, with its channels open, until `heal` or `kill`."""
        self.network.hang(self.worker_routers[worker])

    def heal(self) -> None:
        """Let processes that hang go on, and links that are cut carry messages again."""
        self.network.heal()

    @property
    def unmet(self) -> list[Fault]:
        """The scripted faults that have not happened yet."""
        return self._script.unmet

    def router(self, peer: Peer) -> Router:
        """Return the router of the process in which a role lives now."""
        if peer.role == "client":
            return self.client_router
        return (self.worker_routers if peer.role == "worker" else self.server_routers)[peer.index]

    def replace(self, worker: int) -> None:
        """Start another process in the place of a worker that was killed."""
        job = self.job
        self.lives[worker] += 1
        cut = job.strategy.cut
        models, _ = build_models(self._creator, worker, job.devices_per_worker, job.seed, cut)
        replicas = self._build_replicas(worker, models)
        replicas.begin_with(
            self._mean_state(index for index in range(len(self.workers)) if index != worker)
        )
        router = self.worker_routers[worker] = self.network.router()
        wait, life = partial(self.network.wait, router), self.lives[worker]
        self.workers[worker] = host_worker(
            router, job, worker, replicas, wait, incarnation=life, extensions=self._extensions
        )
        self.links[worker_peer(worker)] = []
        for server, far in enumerate(self.server_routers):
            self._connect(
                worker_peer(worker), router, (worker_peer(worker),), far, self._server_peers(server)
            )
        self.workers[worker].join()

    def _server_peers(self, index: int) -> tuple[Peer, ...]:
        """Return the roles in the process of a server."""
        peers = server_peers(index)
        if self.job.strategy.in_workers:
            peers = (*peers, worker_peer(index))
        return (*peers, aggregator_peer(index)) if index in self.job.places.aggregators else peers

    def _connect(
        self, near: Peer, a: Router, a_peers: tuple[Peer, ...], b: Router, b_peers: tuple[Peer, ...]
    ) -> None:
        self.links.setdefault(near, []).append(self.network.connect(a, a_peers, b, b_peers))

    def step(self, steps: int = 1) -> list[Result | Failure]:
        """Take steps and return their results; a failure of a step ends the list.

        Raises:
            PeerLostError: a server is dead.
            ProtocolError: the coordinator refuses the request.
            DeadlineError: nothing moves any more.
        """
        self.client.ask(steps, True)
        outcomes: list[Result | Failure] = []
        while len(outcomes) < steps:
            self.network.run_until(lambda: not self.client.outcomes.empty(), "a step")
            outcome = self.client.outcomes.get()
            assert outcome is not None
            if isinstance(outcome, (PeerLostError, ProtocolError)):
                raise outcome
            if isinstance(outcome, WorkerLost):
                self.left.append(outcome)
                self.on_left(outcome.worker)
                continue
            if isinstance(outcome, AuditDifference):
                self.differences.append(outcome)
                if outcome.waits and outcome.worker is not None:
                    self.kill(outcome.worker)
                continue
            outcomes.append(outcome)
            if isinstance(outcome, Failure):
                break
        return outcomes

    def wait(self, future: Future[T], what: str) -> T:
        """Run the job until a future is done, and return its result.

        Args:
            future: that a role of the job completes.
            what: names it in the error.

        Raises:
            DeadlineError: nothing moves any more.
        """
        self.network.run_until(future.done, what)
        return future.result()

    def log(self) -> CommitLog:
        """Return every commit; empty without `keep_log`."""
        commits = self.wait(read_log(self.client), "the log")
        job = self.job
        where = (
            job.config,
            job.num_workers,
            job.devices_per_worker,
            job.seed,
            job.hosts,
            job.micro_batches,
        )
        threads = (job.description.threads,) * 2
        return CommitLog(
            tuple(commits), *where, plan=job.plan(), cuts=(job.shares, job.parts), threads=threads
        )

    def snapshot(self, what: str = "weights") -> SharedState:
        """Return the servers' weights; with `what` "state", the optimizer's state too."""
        return self.wait(self.client.read(what), "a snapshot")

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the servers' weights by parameter name."""
        flat, layout = self.snapshot().weights, self.job.description.layout
        assert flat is not None
        return {e.name: layout.entry_view(flat, i).clone() for i, e in enumerate(layout.entries)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return `weights`, and the values that replicas change themselves, averaged over them."""
        return self.weights() | self._mean_state(range(len(self.workers)))

    def _mean_state(self, workers: Iterable[int]) -> dict[str, torch.Tensor]:
        replicas = [
            self.workers[index].at_version(0, -1, lambda replicas: replicas).result()
            for index in workers
        ]
        states = all_states(
            lambda function, *arguments: [function(each, *arguments) for each in replicas]
        )
        return merged_states(states, self.job.description) if states else {}

    def disconnect(self, peer: Peer) -> None:
        """Close every channel of a worker, a server or the client, as its death would."""
        for link in self.links.get(peer, []):
            link.close()
        for link in (link for links in self.links.values() for link in links if peer in link.peers):
            assert link.other is not None
            link.other.close()


def server_peers(index: int) -> tuple[Peer, ...]:
    """Return the roles in the process of a server: with server 0 lives the coordinator."""
    own = Peer("server", index)
    return (own, Peer("coordinator", 0)) if index == 0 else (own,)
