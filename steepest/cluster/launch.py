"""A job's processes on Ray: started in order, watched, called, ended."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import ray

from steepest.cluster.chunk_transport import Holdings, carry, holdings
from steepest.cluster.deaths import Deaths
from steepest.cluster.diagnostics import (
    raise_lost,
    travelling,
)
from steepest.cluster.held_resources import hold, let_go, who_else
from steepest.cluster.placement import Placement, fitting, reserve, spread, worker_bundle
from steepest.cluster.process import Place, Process, by_calls, hosts_of, make_transport, ways_of
from steepest.cluster.ray_private import check as check_ray
from steepest.cluster.worker_calls import WorkerCalls, results_of
from steepest.cluster.worker_replacement import Successors
from steepest.config.run import RunConfig
from steepest.config.strategies import StrategyConfig
from steepest.data.sampler import SamplePlan
from steepest.engine.client import Client
from steepest.engine.job import (
    Description,
    Job,
    ModelCreator,
    check_agreement,
    host_client,
    host_coordinator,
    host_server,
)
from steepest.engine.strategy import make_strategy
from steepest.errors import (
    DeadlineError,
    ShutdownError,
    StepError,
)
from steepest.messages.message import COORDINATOR, Peer, server_peer, worker_peer
from steepest.observe.results import Event
from steepest.transport.channel import Address
from steepest.transport.connect import connect
from steepest.transport.ray_calls import Callee, threads_for
from steepest.transport.router import Router
from steepest.transport.sockets import check_ways

if TYPE_CHECKING:
    from steepest.cluster.recovery import Recovery

log = logging.getLogger(__name__)

#: Processes may take this many times `DeadlineConfig.start` to import, build the model and connect.
_UP_FACTOR = 4.0
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_THREADS = 16
_PAUSE_SECONDS = 0.05  # in `simple` workers only answer


@functools.cache
def _actor_class() -> Any:
    """Made once: Ray keeps each for ever."""
    return ray.remote(Process)


class Cluster:
    """All processes of one job.

    Attributes:
        client: the driver's end; use it through `on_router`.
        places: where each process runs, by role.
        plan: which samples belong to whom, and the seed, for workers that come later.
        actors, watches: Ray's handles of them, and calls that return when they end.
        lives: of each worker, the one that it is in.
        events: what happened to processes.
        deaths: who is dead, and why.
        successors: replaces workers that died.
    """

    client: Client
    job: Job

    def __init__(
        self,
        model_creator: ModelCreator,
        bounds: tuple[int, int],
        devices_per_worker: int,
        gpu: bool,
        strategy: StrategyConfig,
        seed: int,
        run_config: RunConfig,
        accumulate: int = 1,
    ) -> None:
        check_ray()
        self.holder = hold(f'a trainer with strategy="{strategy.name}"')
        self.run_config = run_config
        self._deadline = time.monotonic() + run_config.deadlines.start * (1 + _UP_FACTOR)
        self.actors: dict[Peer, Any] = {}
        self.watches: dict[Peer, Any] = {}
        self.placement = Placement()
        self._token = secrets.token_bytes(32)
        self._router = Router()
        self._schedule_offset = 0
        self.places: dict[Peer, Place] = {}
        self.plan: tuple[SamplePlan | None, int] = (None, seed)
        self.lives: Counter[int] = Counter()
        self.events: list[Event] = []
        self.deaths = Deaths(self)
        self.successors = Successors(self)
        self.workers = WorkerCalls(self)
        self.recovery: Recovery | None = None
        try:
            bundle = self.bundle = worker_bundle(
                devices_per_worker, gpu, run_config.resources.cpus_per_worker
            )
            least, most = bounds
            num_workers = least if least == most else max(least, min(most, fitting(bundle)))
            self.placement.add(
                reserve(
                    num_workers, bundle, run_config.deadlines.start, lambda: who_else(self.holder)
                )
            )
            self.holder.workers, self.holder.bundle = num_workers, bundle
            check_ways(
                ways_of(strategy), ray.get_runtime_context().get_node_id(), *self.placement.nodes()
            )
            self._start(
                model_creator, num_workers, devices_per_worker, gpu, strategy, seed, accumulate
            )
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
        creator = self.creator = travelling("model_creator", model_creator)
        cut = make_strategy(config).cut
        self.gpu, self._devices, self._seed, self._accumulate = gpu, devices, seed, accumulate
        self.actors |= {worker_peer(i): self.start_worker(i) for i in range(num_workers)}
        workers = list(self.actors.values())
        self.actors |= self.start_servers(config, num_workers)
        described: list[Description] = self.get(
            [w.build.remote(creator, i, devices, seed, cut) for i, w in enumerate(workers)],
            "build the model",
            *map(worker_peer, range(num_workers)),
        )
        for i, other in enumerate(described):
            check_agreement(described[0], other, "worker 0", f"worker {i}")
        self._take_up(config, described[0], None, fresh=True)

    def _serving(self, config: StrategyConfig, num_workers: int) -> int:
        """How many processes are servers only."""
        strategy = make_strategy(config)
        if strategy.in_workers or strategy.in_driver or num_workers == 1:
            return 0
        return strategy.num_servers(len(set(self.placement.nodes()[:num_workers])), num_workers)

    def start_servers(
        self, config: StrategyConfig, num_workers: int, first: int = 0
    ) -> dict[Peer, Any]:
        """Starts the processes that are servers only, from one on."""
        served = self._serving(config, num_workers)
        callers = num_workers + served if by_calls(config) else 0
        there = [
            self.places[peer].node for peer in map(server_peer, range(first)) if peer in self.places
        ]
        beside = zip(
            range(first, served),
            spread(self.placement.nodes()[:num_workers], served, there),
            strict=False,
        )
        return {
            server_peer(i): self.start_process(str(server_peer(i)), at, 0, 0, callers)
            for i, at in beside
        }

    def start_server(self, index: int, seat: int | None = None) -> Any:
        """Starts the process of a server where one was, or beside another place."""
        at = spread(self.placement.nodes()[: self.job.num_workers], self.job.num_servers)[index]
        at = at if seat is None else self.placement.order.index(seat)
        return self.start_process(str(server_peer(index)), at, 0, 0, 0)

    def _take_up(
        self,
        config: StrategyConfig,
        description: Description,
        held: Holdings | None,
        *,
        fresh: bool,
    ) -> None:
        """Gives the processes that there are their roles."""
        workers = [actor for peer, actor in self.actors.items() if peer.role == "worker"]
        servers = [actor for peer, actor in self.actors.items() if peer.role == "server"]
        strategy = make_strategy(config)
        num_servers = strategy.num_servers(
            len(set(self.placement.nodes()[: len(workers)])), len(workers)
        )
        places = self.get([actor.place.remote() for actor in self.actors.values()], "start")
        self.places = dict(zip(self.actors, places, strict=True))
        alike = by_calls(config) or len(workers) == 1
        self.job = Job(
            description, config, len(workers), self._devices, num_servers, self._seed, self.run_config.deadlines.step,
            self.run_config.keep_log, None if alike else hosts_of(self.places, num_servers, config),
            self._accumulate, self._schedule_offset, self.run_config.failure.max_failures > 0,
        )  # fmt: skip
        self.plan = (self.job.plan(), self._seed)
        self.holder.what, self.holder.workers = (
            f'a trainer with strategy="{config.name}"',
            len(workers),
        )
        job = self.stored_job = ray.put(self.job)
        self.get([w.bind.remote(job, self.gpu) for w in workers], "bind the model")
        initial = (
            workers[0].initial.remote() if fresh else None
        )  # else they are installed afterwards
        for peer, actor in self.actors.items():
            if peer not in self.watches:
                self.watches[peer] = actor.watch.remote()
        self._client_index = secrets.randbelow(1 << 31)
        self._wire(workers, servers, job, initial, held)

    def reform(  # noqa: PLR0915 - all that a job is, put together anew in one order
        self,
        config: StrategyConfig,
        step: int,
        keep: Mapping[int, int],
        added: Mapping[Peer, Any],
        num_workers: int,
        placement: Mapping[int, int] | None = None,
        held: Holdings | None = None,
        gone: Collection[Peer] = (),
    ) -> None:
        """Gives all processes other roles, at version 0, which goes on at a step.

        Args:
            config: the strategy.
            keep: the workers that stay: their numbers by those that they get.
            added: new processes, of workers whose models are built, or in place of those that died.
            num_workers: how many there are from now on.
            seats: places of new ones; otherwise they have the first that are free.
            held: where all chunks are, for those who will hold them; None if they get others.
            gone: servers in whose places there is nobody, unless somebody is added; the next ones
                move up.

        Raises:
            ConfigurationError: processes cannot talk in that way; nothing has changed.
        """
        self.placement.look()
        kept = {new: self.placement.order[old] for new, old in keep.items()}
        order = self.placement.arranged(num_workers, {**kept, **(placement or {})})
        check_ways(
            ways_of(config),
            ray.get_runtime_context().get_node_id(),
            *self.placement.nodes(order[:num_workers]),
        )
        self.placement.order = order
        self.successors.forget()
        self.extend_deadline()
        self._schedule_offset = self.job.updates_before(step) - step * make_strategy(config).updates
        before = {worker_peer(new): worker_peer(old) for new, old in keep.items()}  # who was who
        there = sorted(
            p for p in self.actors if p.role == "server" and (p not in gone or p in added)
        )
        before |= {server_peer(index): peer for index, peer in enumerate(there)}
        all_of_them = dict(
            sorted({**{new: self.actors[old] for new, old in before.items()}, **added}.items())
        )
        workers = {p: actor for p, actor in all_of_them.items() if p.role == "worker"}
        serving = (
            0 if by_calls(config) else self._serving(config, num_workers)
        )  # callers' threads are few elsewhere
        servers = {
            p: actor for p, actor in all_of_them.items() if p.role == "server" and p.index < serving
        }
        started = self.start_servers(config, num_workers, len(servers))
        try:
            self.get([actor.place.remote() for actor in started.values()], "start")
        except BaseException:
            for actor in started.values():
                ray.kill(actor, no_restart=True)
            raise
        self.disconnect()
        cut, actors, watches, lives = (
            make_strategy(config).cut,
            self.actors,
            self.watches,
            self.lives,
        )
        self.actors = {**workers, **servers, **started}
        staying = {
            p: before[p]
            for p, actor in self.actors.items()
            if p in before and actors[before[p]] is actor
        }
        leaving = [actor for peer, actor in actors.items() if peer not in staying.values()]
        try:
            holding = set().union(*(held or {}).values())
            keep_on = [actor.release.remote(cut, -1, True) for actor in leaving if actor in holding]
            releases = [
                self.actors[peer].release.remote(cut, peer.index, held is not None)
                for peer in staying
            ]
            layout, *_ = self.get([*releases, *keep_on], "let go of its roles")
            self.watches = {new: watches[old] for new, old in staying.items()}
            self.lives = Counter({p.index: lives[before[p].index] for p in workers if p in before})
            self._router = Router()
            self._take_up(config, replace(self.job.description, layout=layout), held, fresh=False)
        finally:
            for actor in leaving:
                ray.kill(actor, no_restart=True)

    def holdings(self) -> Holdings:
        """Which processes have each chunk."""
        return holdings(self.job, lambda server: self.actors[self.process_of(server)])

    def start_worker(self, index: int, seat: int | None = None) -> Any:
        """Starts the process of a worker, in its own place unless another one is given."""
        cpus, gpus = self.run_config.resources.cpus_per_worker, self._devices if self.gpu else 0
        beside = index if seat is None else self.placement.order.index(seat)
        return self.start_process(str(worker_peer(index)), beside, cpus, gpus, 1, cpus)

    def start_process(
        self, name: str, beside: int, cpus: int, gpus: int, callers: int, threads: int = 1
    ) -> Any:
        """Starts a process beside a worker, with so many callers, and torch threads."""
        made = _actor_class().options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_concurrency=_THREADS + threads_for(callers),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=self.placement.strategy(beside),
        )
        return made.remote(
            f"steepest {name}", self._token, threads, self.run_config.resources.keep_memory
        )

    def _wire(
        self, workers: list[Any], servers: list[Any], job: Any, initial: Any, held: Holdings | None
    ) -> None:
        """Opens every process and connects them; each channel is opened from the side of fewer servers."""
        in_driver = self.job.strategy.in_driver
        hosting = [] if in_driver else servers or workers
        count = self.job.num_servers
        dealt = [list(range(count))] if len(hosting) == 1 else [[i] for i in range(count)]
        opened: list[Address] = self.get(
            [
                actor.open.remote(job, numbers, initial)
                for actor, numbers in zip(hosting, dealt, strict=not in_driver)
            ],
            "open the servers",
        )
        timeout = self.run_config.deadlines.start
        others = [w for w in workers if w not in hosting]
        opening = [w.open.remote(job, [], initial, self.lives[i]) for i, w in enumerate(others)]
        opened += self.get(opening, "open the workers")
        ends: list[Address | Callee] = list(opened)
        if by_calls(self.job.config):
            pause = _PAUSE_SECONDS if in_driver else 0.0
            ends = [
                Callee(end.peers, actor, pause)
                for end, actor in zip(opened, [*hosting, *others], strict=True)
            ]
        if not in_driver:
            ends = ends[: len(hosting)]
            everybody = (
                bool(self.job.places.aggregators) or self.job.servers_in_workers
            )  # all have something to say to all
            earlier = [ends[: i if everybody else 1] for i in range(1, len(hosting))]
            calls = [
                s.connect.remote(to, timeout) for s, to in zip(hosting[1:], earlier, strict=True)
            ]
            self.get(calls, "connect the servers")
            self.get([w.connect.remote(ends, timeout) for w in others], "connect the workers")
        peers: tuple[Peer, ...] = (Peer("client", self._client_index),)
        if in_driver:
            peers = (*peers, COORDINATOR, server_peer(0))
            self._host_in_driver(initial)
        node = ray.get_runtime_context().get_node_id()
        transport = make_transport(self.job, self._token, peers, node, self._router.destination)
        self._router.use(transport)
        self.client = host_client(self._router, self.job, self._client_index)
        for end in ends:
            self._router.attach(connect(transport, end, timeout))
        self._router.start("steepest driver")
        if held is not None:  # before servers send what they have to all who join
            carry(held, self.holdings(), self.get)
        self.ends, self.listening = ends, opened[len(hosting) :] if others else opened
        self.get(
            [w.join.remote(job, self.listening) for w in workers],
            "join",
            *map(worker_peer, range(len(workers))),
        )

    def _host_in_driver(self, initial: Any) -> None:
        flat = self.job.description.layout.allocate()
        if initial is not None:
            flat.numpy()[:] = self.get([initial], "send its weights")[0][0]
        host_coordinator(self._router, self.job)
        host_server(self._router, self.job, 0, flat)

    def extend_deadline(self) -> None:
        """Processes may take their time to start from now on."""
        self._deadline = time.monotonic() + self.run_config.deadlines.start * (1 + _UP_FACTOR)

    def get(self, refs: list[Any], what: str, *peers: Peer) -> list[Any]:
        """Return what calls return that end before the starting deadline, see `results_of`."""
        return results_of(
            refs, what, peers, self._deadline, self.run_config.deadlines.start * (1 + _UP_FACTOR)
        )

    # -- running -------------------------------------------------------------------------------

    def on_router(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the thread that owns the client."""
        try:
            return self._router.call(function).result(self.run_config.deadlines.step)
        except ShutdownError:
            self.raise_if_dead()  # the better explanation
            raise
        except FutureTimeoutError:
            raise DeadlineError(
                f"the driver's router was busy for {self.run_config.deadlines.step:g} s"
            ) from None

    def counters(self) -> dict[Peer, dict[str, int]]:
        """Counters of all processes that answer."""
        refs = {actor.counters.remote(): peer for peer, actor in self.actors.items()}
        answered, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_CLOSE_SECONDS)
        counters: dict[Peer, dict[str, int]] = {}
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # dead
                counters[refs[ref]] = ray.get(ref)
        return counters

    def raise_if_dead(
        self,
        suspect: Peer | None = None,
        wait: float = 0.0,
        *,
        replaced: Callable[[Peer], bool] = lambda peer: False,
    ) -> None:
        """Raises PeerLostError for a process that died, the suspect first; gives Ray some seconds to notice.

        Args:
            replaced: whether the death of a process is mended, or raised, elsewhere.
        """
        if (
            self._router.finished.done()
            and (error := self._router.finished.exception()) is not None
        ):
            raise StepError(f"the driver's router ended: {error!r}") from error
        if self.watches:
            ray.wait(list(self.watches.values()), timeout=wait)
        for peer in sorted(self.watches, key=lambda peer: peer != suspect):
            if peer.role == "worker" and peer.index in {
                *self.successors.starting,
                *self.successors.moved,
            }:
                continue  # it is being replaced
            if replaced(peer):
                continue
            if (cause := self.deaths.cause(peer)) is not None:
                self.raise_lost(peer, cause)

    def lost(self, peer: Peer, why: str) -> NoReturn:
        """Raises PeerLostError for a peer whose channel closed, with what Ray knows of it."""
        self.raise_if_dead(process := self.process_of(peer), _CLOSE_SECONDS)
        self.raise_lost(process, why)

    def process_of(self, peer: Peer) -> Peer:
        """The process that a role lives in."""
        if peer in self.actors or not self.actors:
            return peer
        if server_peer(0) in self.actors:
            return server_peer(0)
        return worker_peer(
            peer.index if worker_peer(peer.index) in self.actors and self.job.num_workers > 1 else 0
        )

    def raise_lost(self, peer: Peer, why: str) -> NoReturn:
        """See `supervision.raise_lost`."""
        raise_lost(peer, self.places.get(peer), why, self.deaths.traceback(peer))

    @property
    def step(self) -> int:
        """Steps committed, as far as the driver has heard."""
        return self.job.step_of(self.client.position.version)

    def note(self, kind: str, line: str) -> None:
        """Tells the user in one line what happened, and keeps it."""
        self.events.append(Event(time.time(), kind, self.step, line))
        log.warning("%s", line)

    @property
    def replaced(self) -> int:
        """How many processes died and were replaced."""
        return self.successors.count + (self.recovery.count if self.recovery is not None else 0)

    def mend(self) -> None:
        """See `Successors.mend`, and `Recovery.recover`."""
        if self.recovery is not None:
            self.recovery.look()
        self.successors.mend()
        if self.recovery is not None and self.successors.moved:
            self.recovery.look()

    # -- ending --------------------------------------------------------------------------------

    def shutdown(self, *, dropped: bool = False) -> None:
        """Ends every process; safe to call twice and at any time.

        Args:
            dropped: because nobody has the trainer any more.
        """
        self.disconnect()
        if ray.is_initialized():
            self.successors.end()
            for actor in self.actors.values():
                ray.kill(actor, no_restart=True)
            self.actors.clear()
            self.placement.release()
        let_go(self.holder, dropped=dropped)

    def disconnect(self) -> None:
        """Ends the driver's own end of the job."""
        if self._router.transport is not None:
            self._router.stop(_CLOSE_SECONDS)
            self._router.transport.close()  # its thread did, unless it never began
        if hasattr(self, "client"):
            self.client.close()
