"""A job's processes on Ray: started in order, watched, called, ended."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Any, NoReturn

import ray

from steepest.client import Client
from steepest.comm.channel import Address
from steepest.comm.message import COORDINATOR, Message, Peer, server_peer, worker_peer
from steepest.comm.router import Router
from steepest.comm.shared import AVAILABLE
from steepest.comm.wire import check_ways
from steepest.config import RunSettings, StrategyConfig
from steepest.errors import (
    DeadlineError,
    PeerLostError,
    ShutdownError,
    SteepestError,
)
from steepest.hosts import Hosts
from steepest.job import (
    Description,
    Job,
    ModelCreator,
    check_agreement,
    host_client,
    host_coordinator,
    host_server,
    make_strategy,
)
from steepest.replicas import mean_states
from steepest.runtime import tasks
from steepest.runtime.calls import Callee, threads_for
from steepest.runtime.placement import Room, ensure_ray, nodes_of, reserve, spread, worker_bundle
from steepest.runtime.process import Place, Process, by_calls, connect, make_transport, ways_of
from steepest.runtime.supervision import cause_of_death, fetch_last_lines, raise_remote, travelling
from steepest.sampler import SamplePlan
from steepest.strategies.protocol import Strategy

log = logging.getLogger(__name__)

#: Processes may take this many times `start_timeout` to import, build the model and connect.
_UP_FACTOR = 4.0
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_THREADS = 16
_PAUSE_SECONDS = 0.05  # in `simple` workers only answer


class Cluster:
    """All processes of one job.

    Attributes:
        client: the driver's end; use it through `on_router`.
        places: where each process runs, by role.
        plan: which samples belong to whom, and the seed, for workers that come later.
        replaced: how many workers died and have a successor.
    """

    client: Client
    job: Job

    def __init__(
        self,
        model_creator: ModelCreator,
        num_workers: int,
        devices_per_worker: int,
        gpu: bool,
        strategy: StrategyConfig,
        seed: int,
        settings: RunSettings,
        accumulate: int = 1,
    ) -> None:
        self._began_ray = ensure_ray()
        self._settings = settings
        self._deadline = time.monotonic() + settings.start_timeout * (1 + _UP_FACTOR)
        self._actors: dict[Peer, Any] = {}
        self._watches: dict[Peer, Any] = {}
        self._room: Room | None = None
        self._token = secrets.token_bytes(32)
        self._router = Router()
        self._schedule_offset = 0
        self._numbers = itertools.count(1)  # of calls
        self.places: dict[Peer, Place] = {}
        self.plan: tuple[SamplePlan | None, int] = (None, seed)
        self.replaced = 0
        self._lives: Counter[int] = Counter()  # of each worker, the one that it is in
        self._mending = False
        try:
            bundle = worker_bundle(devices_per_worker, gpu, settings.cpus_per_worker)
            self._room = reserve(num_workers, bundle, settings.start_timeout)
            self._nodes = nodes_of(self._room)
            check_ways(ways_of(strategy), ray.get_runtime_context().get_node_id(), *self._nodes)
            self._start(model_creator, num_workers, devices_per_worker, gpu, strategy, seed, accumulate)
        except BaseException:
            self.shutdown()
            raise

    # -- starting ------------------------------------------------------------------------------

    def _start(
        self,
        model_creator: ModelCreator,
        num_workers: int,
        devices: int,
        gpu: bool,
        config: StrategyConfig,
        seed: int,
        accumulate: int,
    ) -> None:
        creator = self._creator = travelling(model_creator)
        cut = make_strategy(config).cut
        cpus, gpus = self._settings.cpus_per_worker, devices if gpu else 0
        for i in range(num_workers):
            self._actors[worker_peer(i)] = self._actor(worker_peer(i), i, cpus, gpus, 1)
        workers = list(self._actors.values())
        self._actors |= self._servers(config, num_workers)
        described: list[Description] = self._get(
            [w.build.remote(creator, i, devices, seed, cut) for i, w in enumerate(workers)],
            "build the model",
            *map(worker_peer, range(num_workers)),
        )
        for i, other in enumerate(described):
            check_agreement(described[0], other, "worker 0", f"worker {i}")
        self._gpu, self._devices, self._seed, self._accumulate = gpu, devices, seed, accumulate
        self._take_up(config, described[0], fresh=True)

    def _servers(self, config: StrategyConfig, num_workers: int) -> dict[Peer, Any]:
        """Starts the processes that are servers only."""
        strategy = make_strategy(config)
        served = strategy.num_servers(len(set(self._nodes)), num_workers)
        if strategy.in_workers or strategy.in_driver or num_workers == 1:
            served = 0
        callers = num_workers + served if by_calls(config) else 0
        beside = enumerate(spread(self._nodes, served))
        return {server_peer(i): self._actor(server_peer(i), at, 0, 0, callers) for i, at in beside}

    def _take_up(self, config: StrategyConfig, description: Description, *, fresh: bool) -> None:
        """Gives the processes that there are their roles."""
        workers = [actor for peer, actor in self._actors.items() if peer.role == "worker"]
        servers = [actor for peer, actor in self._actors.items() if peer.role == "server"]
        strategy = make_strategy(config)
        num_servers = strategy.num_servers(len(set(self._nodes)), len(workers))
        places = self._get([actor.place.remote() for actor in self._actors.values()], "start")
        self.places = dict(zip(self._actors, places, strict=True))
        alike = by_calls(config) or len(workers) == 1
        self.job = Job(
            description, config, len(workers), self._devices, num_servers, self._seed, self._settings.step_timeout,
            self._settings.keep_log, None if alike else self._hosts(num_servers, strategy, config),
            self._accumulate, self._schedule_offset, self._settings.max_failures > 0,
        )  # fmt: skip
        self.plan = (self.job.plan(), self._seed)
        job = self._stored_job = ray.put(self.job)
        self._get([w.bind.remote(job, self._gpu) for w in workers], "bind the model")
        initial = workers[0].initial.remote(fresh)
        for peer, actor in self._actors.items():
            if peer not in self._watches:
                self._watches[peer] = actor.watch.remote()
        self._client_index = secrets.randbelow(1 << 31)
        self._wire(workers, servers, job, initial)

    def switch(self, config: StrategyConfig, step: int) -> None:
        """Another strategy for the same workers, at version 0, which goes on at a step; servers are new ones.

        Raises:
            ConfigurationError: processes cannot talk in that way; nothing has changed.
        """
        check_ways(ways_of(config), ray.get_runtime_context().get_node_id(), *self._nodes)
        self._deadline = time.monotonic() + self._settings.start_timeout * (1 + _UP_FACTOR)
        self._schedule_offset = self.job.updates_before(step) - step * make_strategy(config).updates
        job, servers = self.job, self._servers(config, self.job.num_workers)
        try:
            self._get([actor.place.remote() for actor in servers.values()], "start")
        except BaseException:
            for actor in servers.values():
                ray.kill(actor, no_restart=True)
            raise
        self._disconnect()
        workers = [actor for peer, actor in self._actors.items() if peer.role == "worker"]
        cut = make_strategy(config).cut
        layouts = self._get([w.release.remote(cut) for w in workers], "let go of its roles")
        for peer in [peer for peer in self._actors if peer.role == "server"]:
            del self._watches[peer]
            ray.kill(self._actors.pop(peer), no_restart=True)
        self._actors |= servers
        self._router = Router()
        description = replace(job.description, layout=layouts[0])
        self._take_up(config, description, fresh=False)

    def _hosts(self, num_servers: int, strategy: Strategy, config: StrategyConfig) -> Hosts:
        """Which processes share a node; over TCP everywhere none does, as far as the others are concerned."""
        nodes: dict[str, int] = {}

        def number(peer: Peer) -> int:
            node = str(peer) if ways_of(config) == "tcp" else self.places[peer].node
            return nodes.setdefault(node, len(nodes))

        workers = tuple(number(peer) for peer in self.places if peer.role == "worker")
        servers = workers if strategy.in_workers else tuple(number(server_peer(i)) for i in range(num_servers))
        gathers = AVAILABLE and ways_of(config) in ("wire", "shared")
        if strategy.in_workers and len(nodes) == 1:
            gathers = False  # each member updates its own weights, and nothing has to cross
        return Hosts(workers, servers, gathers)

    def _actor(self, peer: Peer, index: int, cpus: int, gpus: int, callers: int) -> Any:
        assert self._room is not None
        made = ray.remote(Process).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_concurrency=_THREADS + threads_for(callers),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=self._room.strategy(index),
        )
        return made.remote(f"steepest {peer}", self._token, max(cpus, 1), self._settings.keep_memory)

    def _wire(self, workers: list[Any], servers: list[Any], job: Any, initial: Any) -> None:
        """Opens every process and connects them; each channel is opened from the side of fewer servers."""
        in_driver = self.job.strategy.in_driver
        hosting = [] if in_driver else servers or workers
        dealt: list[list[int]] = [[i] for i in range(self.job.num_servers)]
        if len(hosting) == 1:
            dealt = [list(range(self.job.num_servers))]
        opened: list[Address] = self._get(
            [actor.open.remote(job, held, initial) for actor, held in zip(hosting, dealt, strict=not in_driver)],
            "open the servers",
        )
        timeout = self._settings.start_timeout
        others = [w for w in workers if w not in hosting]
        opening = [w.open.remote(job, [], initial, self._lives[i]) for i, w in enumerate(others)]
        opened += self._get(opening, "open the workers")
        ends: list[Address | Callee] = list(opened)
        if by_calls(self.job.config):
            ends = [Callee(end.peers, actor) for end, actor in zip(opened, [*hosting, *others], strict=True)]
        if not in_driver:
            ends = ends[: len(hosting)]
            everybody = bool(self.job.places.relays) or self.job.servers_in_workers  # all have something to say to all
            earlier = [ends[: i if everybody else 1] for i in range(1, len(hosting))]
            calls = [s.connect.remote(to, timeout) for s, to in zip(hosting[1:], earlier, strict=True)]
            self._get(calls, "connect the servers")
            self._get([w.connect.remote(ends, timeout) for w in others], "connect the workers")
        peers: tuple[Peer, ...] = (Peer("client", self._client_index),)
        if in_driver:
            peers = (*peers, COORDINATOR, server_peer(0))
            self._host_in_driver(initial)
        node = ray.get_runtime_context().get_node_id()
        transport = make_transport(self.job, self._token, peers, node, self._router.destination)
        self._router.transport = transport
        self.client = host_client(self._router, self.job, self._client_index)
        for end in ends:
            self._router.attach(connect(transport, end, timeout, _PAUSE_SECONDS if in_driver else 0.0))
        self._router.start("steepest driver")
        self._ends, self._listening = ends, opened[len(hosting) :] if others else opened
        self._get(
            [w.join.remote(job, self._listening) for w in workers], "join", *map(worker_peer, range(len(workers)))
        )

    def _host_in_driver(self, initial: Any) -> None:
        weights, _ = self._get([initial], "send its weights")[0]
        flat = self.job.description.layout.allocate()
        flat.numpy()[:] = weights
        host_coordinator(self._router, self.job)
        host_server(self._router, self.job, 0, flat)

    def _get(self, refs: list[Any], what: str, *peers: Peer) -> list[Any]:
        """Waits for calls (to these peers, if they are given) within the starting deadline.

        Raises:
            ModelRaisedError: the user's code raised; its traceback is the cause.
            PeerLostError: a process died.
            DeadlineError: it takes too long.
        """
        try:
            results: list[Any] = ray.get(refs, timeout=max(self._deadline - time.monotonic(), 0.1))
        except ray.exceptions.GetTimeoutError:
            _, waiting = ray.wait(refs, num_returns=len(refs), timeout=0)
            names = ", ".join(str(peers[refs.index(ref)]) for ref in waiting) if peers else str(len(waiting))
            raise DeadlineError(
                f"{names} of {len(refs)} processes did not {what} within "
                f"{self._settings.start_timeout * (1 + _UP_FACTOR):g} s: raise RunSettings(start_timeout=...)"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise_remote(error, f"a worker could not {what}")
        except ray.exceptions.RayActorError as error:
            raise PeerLostError(f"a process died before it could {what}: {' '.join(str(error).split())}") from error
        return results

    # -- running -------------------------------------------------------------------------------

    def on_router(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the thread that owns the client."""
        try:
            return self._router.call(function).result(self._settings.step_timeout)
        except ShutdownError:
            self.raise_if_dead()  # the better explanation
            raise
        except FutureTimeoutError:
            raise DeadlineError(f"the driver's router was busy for {self._settings.step_timeout:g} s") from None

    def call_workers(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        workers: list[int] | None = None,
        view: bool = False,
    ) -> list[Any]:
        """Runs a function on workers as soon as they hold the last committed weights.

        Args:
            arguments: the same for all; objects are put into Ray's store once.
            workers: which; all by default.
            view: give the function a `WorkerView` instead of the replicas.

        Raises:
            What the function raises; PeerLostError, DeadlineError.
        """
        if not self._mending:
            self.mend()
        position = (self.client.position.generation, self.client.position.version)
        stored = [ray.put(argument) for argument in arguments]
        chosen = range(self.job.num_workers) if workers is None else workers
        actors = [self._actors[worker_peer(i)] for i in chosen]
        number = next(self._numbers)
        refs = [(a.view_call if view else a.call).remote(position, number, function, *stored) for a in actors]
        waiting = dict(zip(refs, chosen, strict=True))
        deadline = time.monotonic() + self._settings.call_timeout
        try:
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=min(_LOOK_SECONDS, self._settings.call_timeout))
                for ref in done:
                    ray.get(ref)  # raises what it raised, without waiting for the others
                    del waiting[ref]
                if not done:
                    self.raise_if_dead()
                    if time.monotonic() > deadline:
                        silent = ", ".join(str(worker_peer(i)) for i in waiting.values())
                        raise DeadlineError(
                            f"{silent} did not answer within {self._settings.call_timeout:g} s at version {position[1]}"
                        )
            results: list[Any] = ray.get(refs)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PeerLostError):
                self.raise_if_dead(wait=_CLOSE_SECONDS)  # the better explanation
            raise_remote(error, "a worker could not run the function")
        except ray.exceptions.RayActorError:
            self.raise_if_dead(wait=_CLOSE_SECONDS)
            raise
        finally:
            for i in waiting.values():
                actors[list(chosen).index(i)].abandon.remote(number, "another worker failed, or the driver gave up")
        return results

    def counters(self) -> dict[Peer, dict[str, int]]:
        """Counters of all processes that answer."""
        refs = {actor.counters.remote(): peer for peer, actor in self._actors.items()}
        answered, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_CLOSE_SECONDS)
        counters: dict[Peer, dict[str, int]] = {}
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # dead
                counters[refs[ref]] = ray.get(ref)
        return counters

    def raise_if_dead(self, suspect: Peer | None = None, wait: float = 0.0) -> None:
        """Raises PeerLostError for a process that died, the suspect first; gives Ray some seconds to notice."""
        if self._router.finished.done() and (error := self._router.finished.exception()) is not None:
            raise SteepestError(f"the driver's router ended: {error!r}") from error
        if self._watches:
            ray.wait(list(self._watches.values()), timeout=wait)
        for peer in sorted(self._watches, key=lambda peer: peer != suspect):
            cause = cause_of_death(self._watches[peer])
            if cause is not None:
                self._raise_lost(peer, cause)

    def lost(self, peer: Peer, why: str) -> NoReturn:
        """Raises PeerLostError for a peer whose channel closed, with what Ray knows of it."""
        process = self._process_of(peer)
        self.raise_if_dead(process, _CLOSE_SECONDS)
        self._raise_lost(process, why)

    def _process_of(self, peer: Peer) -> Peer:
        if peer in self._actors or not self._actors:
            return peer
        if server_peer(0) in self._actors:
            return server_peer(0)
        return worker_peer(peer.index if worker_peer(peer.index) in self._actors and self.job.num_workers > 1 else 0)

    def _raise_lost(self, peer: Peer, why: str) -> NoReturn:
        place = self.places.get(peer)
        where, lines = "", ["(nothing)"]
        if place is not None:
            where = f" on {place.host} (node {place.node[:12]}, pid {place.pid})"
            lines = fetch_last_lines(place) or lines
        text = "\n".join(f"    {line}" for line in lines)
        raise PeerLostError(
            f"{peer}{where} died: {why}; the weights of the last commit are still there unless it held them "
            f"(weights(), save()); its last lines:\n{text}"
        )

    def mend(self, left: Message | None = None) -> None:
        """Gives workers that died a successor each, where that can be; training goes on when they have joined.

        Args:
            left: the coordinator's word that one is gone.

        Raises:
            PeerLostError: it cannot be, or not again. Whatever its successor raises when it is made.
        """
        if not self.job.workers_are_replaced:
            return
        said = left.values() if left is not None else {}
        for index in range(self.job.num_workers):
            suspected = said.get("worker") == index and said["life"] == self._lives[index]
            watch = self._watches[worker_peer(index)]
            if suspected:
                ray.wait([watch], timeout=_CLOSE_SECONDS)
            cause = cause_of_death(watch)
            if cause is None and suspected:  # it lives, out of reach: nothing that it still says may count
                ray.kill(self._actors[worker_peer(index)], no_restart=True)
                cause = str(said["why"])
            if cause is not None:
                self._mending = True
                try:
                    self._succeed(index, cause)
                finally:
                    self._mending = False

    def _succeed(self, index: int, cause: str) -> None:
        """Another process takes the place of a worker that is dead."""
        peer, began = worker_peer(index), time.monotonic()
        if self._lives[index] >= self._settings.max_failures:
            allowed = f"RunSettings(max_failures={self._settings.max_failures})"
            self._raise_lost(peer, f"{cause} (it had {self._lives[index]} successors, {allowed} gives it no more)")
        self._lives[index] += 1
        self._deadline = began + self._settings.start_timeout * (1 + _UP_FACTOR)
        old, life, before = self.places[peer], self._lives[index], self._actors[peer]
        cpus, gpus = self._settings.cpus_per_worker, self._devices if self._gpu else 0
        actor = self._actors[peer] = self._actor(peer, index, cpus, gpus, 1)
        try:
            build = actor.build.remote(self._creator, index, self._devices, self._seed, self.job.strategy.cut)
            described, place = self._get([build, actor.place.remote()], "build the model again", peer, peer)
            check_agreement(self.job.description, described, "the job", str(peer))
            if place.node != old.node:
                self._raise_lost(peer, f"{cause}; its successor has come up on another node, {place.node[:12]}")
            alive = [i for i in range(self.job.num_workers) if cause_of_death(self._watches[worker_peer(i)]) is None]
            states = [state for part in self.call_workers(tasks.states, workers=alive) for state in part]
            mean = mean_states(states, [1.0] * len(states)) if states else None
            job = self._stored_job
            self._get([actor.bind.remote(job, self._gpu)], "bind the model again")
            (address,) = self._get([actor.open.remote(job, [], None, life)], "open a worker again")
            self._get([actor.take_state.remote(*self.plan, mean)], "take the others' state")
            self._get([actor.connect.remote(self._ends, self._settings.start_timeout)], "connect a worker again")
        except BaseException:
            ray.kill(actor, no_restart=True)
            self._actors[peer] = before
            raise
        self._watches[peer], self.places[peer], self._listening[index] = actor.watch.remote(), place, address
        joining = [self._actors[worker_peer(i)] for i in (*alive, index)]
        self._get([each.join.remote(job, self._listening) for each in joining], "join again")
        self.replaced += 1
        log.warning(
            "%s on %s (pid %d) died in step %d: %s; pid %d has taken its place after %.1f s; the step is taken again, "
            "no update and no sample is lost",
            peer, old.host, old.pid, self.client.position.version // self.job.versions_per_step + 1, cause, place.pid,
            time.monotonic() - began,
        )  # fmt: skip

    # -- ending --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ends every process; safe to call twice and at any time."""
        self._disconnect()
        if ray.is_initialized():
            for actor in self._actors.values():
                ray.kill(actor, no_restart=True)
            self._actors.clear()
            if self._room is not None:
                self._room.release()
                self._room = None
            if self._began_ray:
                ray.shutdown()
        self._began_ray = False

    def _disconnect(self) -> None:
        if self._router.transport is not None:
            self._router.stop(_CLOSE_SECONDS)
            self._router.transport.close()  # its thread did, unless it never began
        if hasattr(self, "client"):
            self.client.close()
