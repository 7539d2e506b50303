"""A job's processes on Ray: started in order, given their roles, watched, ended."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from steepest.core.config.job import JobConfig
from steepest.core.config.run import RunConfig
from steepest.core.engine.hosting import host_client, host_coordinator, host_server
from steepest.core.engine.job import Description, Job, ModelCreator, check_agreement, without_caches
from steepest.core.messages.message import COORDINATOR, Peer, server_peer, worker_peer
from steepest.core.models.step_size import StepSize
from steepest.core.strategies.strategy import Strategy
from steepest.core.system import system
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import check_ways
from steepest.errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ShutdownError,
)
from steepest.runtime.activity import log_report
from steepest.runtime.calls import travelling
from steepest.runtime.context import JobContext, Lineup, Member
from steepest.runtime.deaths import Deaths
from steepest.runtime.holders import Holder, hold, let_go, who_else
from steepest.runtime.job_runtime import runtime
from steepest.runtime.learning_rates import LearningRates
from steepest.runtime.lease import DriverLease
from steepest.runtime.places import Place
from steepest.runtime.process import ProcessActor, ProgramDefaults
from steepest.runtime.room import fitting, reserve, reserve_for_servers, worker_bundle
from steepest.runtime.seats import spread
from steepest.runtime.signals import end_on_sigterm, report_on_sigusr1
from steepest.runtime.unbroken import unbroken
from steepest.runtime.ways import hosts_of, make_transport
from steepest.runtime.wiring import Holdings, carry, connect_processes, connect_to, holdings
from steepest.runtime.worker_calls import WorkerCalls

T = TypeVar("T")
log = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0
_THREADS = 16


class Cluster(JobContext):
    """All processes of one job, which it starts, gives their roles, and ends.

    The constructor acquires no resource that has to be released; `begin` does.
    """

    holder: Holder

    def __init__(
        self,
        chosen: JobConfig,  # what is computed, whatever the size
        run_config: RunConfig,
    ) -> None:
        super().__init__(run_config, chosen.seed)  # refuses a bad `tls` before Ray is begun
        self.chosen = chosen
        self._program = ProgramDefaults.of_this_process()  # whose arguments its processes have too
        self.lease = DriverLease(run_config.deadlines.driver)
        self._leaving: list[
            Member
        ] = []  # without a role any more; they hold chunks until `end_leaving`
        self._seats: dict[Any, int] = {}  # in which processes run, or beside whose
        self._schedule_offset = 0
        self.rates = LearningRates(self)
        self.deaths = Deaths(self)
        self.workers = WorkerCalls(self, self.deaths)
        self.ending: list[Callable[[], None]] = []  # called before the processes end

    def begin(
        self,
        model_creator: ModelCreator,
        bounds: tuple[int, int],  # least and most workers; between them the free room decides
        strategy: Strategy,
    ) -> None:
        """Reserve resources, start the processes and connect them; return when every worker has joined.

        If it raises, the caller shuts the cluster down.

        Raises:
            ResourcesError: the cluster has no room for the workers.
            ModelRaisedError: `model_creator` raised; its traceback is the cause.
            ConfigurationError: the models differ, or the processes cannot talk as configured.
            PeerLostError, DeadlineError: a process died, or is late, while the job starts.
        """
        self.holder = Holder(f'a trainer with strategy="{strategy.name}"')
        hold(self.holder, self.run_config.runtime, verbose=self.run_config.verbose)
        self.lease.start()
        end_on_sigterm()
        report_on_sigusr1(self)
        chosen = self.chosen
        self.bundle = worker_bundle(
            chosen.devices_per_worker, chosen.gpu, self.run_config.resources.cpus_per_worker
        )
        num_workers = self._reserve(strategy, *bounds)
        self.check_ways(strategy)
        self._start(model_creator, num_workers, strategy)

    # -- starting ------------------------------------------------------------------------------

    def _reserve(self, config: Strategy, least: int, most: int) -> int:
        """Reserve room for workers, and nodes for servers alone if configured; return the number of workers."""
        hosts, limit = self.run_config.resources.serving_hosts, self.run_config.deadlines.start
        count, holder = least, self.holder
        if hosts and (config.in_workers or config.in_driver):
            raise ConfigurationError(
                f'serving_hosts={hosts} with strategy="{config.name}", which has no server '
                'processes: leave serving_hosts out, or give a strategy that has, such as "ps"'
            )
        if least < most and not hosts:  # others join where no node is wanted for servers alone
            count = max(least, min(most, fitting(self.bundle)))
        self.placement.add(reserve(count, self.bundle, limit, lambda: who_else(holder)))
        holder.workers, holder.bundle = count, self.bundle
        if hosts:
            working = {*self.placement.nodes()}
            room = reserve_for_servers(hosts, working, limit, lambda: who_else(holder))
            self.placement.add(room, serves=True)
        return count

    def _start(self, model_creator: ModelCreator, num_workers: int, config: Strategy) -> None:
        if self.chosen.extensions is not None:
            travelling("extensions", self.chosen.extensions)  # refuses what cannot be pickled
        creator = self.creator = travelling(
            getattr(model_creator, "given_as", "model_creator"), model_creator
        )
        #: what workers do then, for errors
        self.building: str = getattr(model_creator, "building", "build the model")
        cut = config.cut
        devices, seed = self.chosen.devices_per_worker, self.chosen.seed
        batches = num_workers * devices * self.chosen.accumulate
        #: of the job as it begins: later models have the same schedule
        self.size = size = StepSize(batches, self.chosen.global_batch_size)
        starting = self.starting
        starting |= {worker_peer(i): self.start_worker(i) for i in range(num_workers)}
        workers = list(starting.values())
        starting |= self.start_servers(config, num_workers)
        described: list[Description] = self.get(
            [
                runtime().call(w, "build", creator, i, devices, seed, cut, size)
                for i, w in enumerate(workers)
            ],
            self.building,
            map(worker_peer, range(num_workers)),
        )
        description = described[0]
        for i, other in enumerate(described):
            read = partial(self._sample_hashes, (0, i), workers)
            description = without_caches(description, other, read)
            check_agreement(description, other, "worker 0", f"worker {i}")
        if description.notice:
            log.warning("%s", description.notice)
        places = self.get(
            [runtime().call(actor, "place") for actor in starting.values()], "start", starting
        )
        self.members = {
            peer: Member(actor, runtime().call(actor, "watch"), place)
            for (peer, actor), place in zip(starting.items(), places, strict=True)
        }
        self.starting = {}
        self._take_up(config, description, None, fresh=True)

    def _sample_hashes(
        self, of: Collection[int], workers: Sequence[Any], length: int, numbers: list[int]
    ) -> list[list[str] | None]:
        """Return hashes of samples of some workers' data, see `steepest.core.data.fingerprint.sample_hashes`."""
        calls = [runtime().call(workers[i], "sample_hashes", length, numbers) for i in of]
        hashes: list[list[str] | None] = self.get(calls, "read samples", map(worker_peer, of))
        return hashes

    def check_ways(self, config: Strategy, seats: Sequence[int] | None = None) -> None:
        """Raise ConfigurationError if processes in some seats (by default all) lack the transport of a strategy."""
        if config.reduces and self.run_config.tls:
            raise ConfigurationError(
                f"strategy {config.name!r} with data_plane= and tls={self.run_config.tls!r:.40}: the connections of "
                "torch.distributed's process groups are not encrypted; leave data_plane= out, and gradients travel on "
                "the job's own connections, which are, or leave tls out"
            )
        if config.reduces_on_gpus and not self.chosen.gpu:
            raise ConfigurationError(
                f'strategy {config.name!r} with data_plane="nccl" and models on CPUs: NCCL adds up on GPUs alone; '
                'give gpu=True, data_plane="gloo", or leave data_plane= out'
            )
        driver, placement = runtime().node, self.placement
        serving = [] if config.in_workers else placement.nodes(placement.serving)
        check_ways(config.transport, driver, *placement.nodes(seats), *serving)

    def serving(self, config: Strategy, num_workers: int) -> int:
        """Return the number of processes that host servers only."""
        if config.in_workers or config.in_driver or num_workers == 1:
            return 0
        return self._num_servers(config, num_workers)

    def _num_servers(self, config: Strategy, num_workers: int) -> int:
        """Return the number of a job's servers; nodes of servers alone count while they are gone."""
        placement = self.placement
        working = {*placement.nodes(placement.order[:num_workers])} - placement.serving_nodes
        nodes = len(working) + len(placement.serving)
        return config.servers_for(nodes, num_workers)

    def _seats_of_servers(self, num_workers: int) -> list[int]:
        """Return the seats beside which servers may be placed, those on nodes without workers first."""
        placement = self.placement
        if not placement.serving:
            return placement.order[:num_workers]
        placement.look()  # Ray may have found another node for one that is gone
        lost = {
            member.place.node
            for peer, member in self.members.items()
            if self.deaths.is_believed(peer)
        }
        living = {*runtime().nodes()} - lost
        serving = [seat for seat in placement.serving if placement.nodes([seat])[0] in living]
        return serving + placement.order[:num_workers]

    def start_servers(self, config: Strategy, num_workers: int, first: int = 0) -> dict[Peer, Any]:
        """Start the processes that host servers only, from index `first`; return their handles without waiting."""
        served = self.serving(config, num_workers)
        members, earlier = self.members, map(server_peer, range(first))
        running = [members[peer].place.node for peer in earlier if peer in members]
        seats = self._seats_of_servers(num_workers) if served else []
        beside = zip(
            range(first, served), spread(self.placement.nodes(seats), served, running), strict=False
        )
        return {
            server_peer(i): self.start_process(str(server_peer(i)), seats[at], 0, 0)
            for i, at in beside
        }

    def start_server(self, index: int, seat: int | None = None) -> Any:
        """Start the process of one server, beside a seat's; return its handle without waiting."""
        if seat is None:
            placement, servers = self.placement, self.job.num_servers
            members = self.members.items()
            here = {each.place.node for p, each in members if self.deaths.cause(p) is None}
            seats = self._seats_of_servers(self.job.num_workers)
            there = zip(seats, placement.nodes(seats), strict=True)
            seats = [at for at, node in there if at in placement.serving or node in here] or seats
            seat = seats[spread(placement.nodes(seats), max(servers, index + 1))[index]]
        return self.start_process(str(server_peer(index)), seat, 0, 0)

    def _take_up(
        self,
        config: Strategy,
        description: Description,
        held: Holdings | None,  # None if chunks get other state
        *,
        fresh: bool,  # begin with worker 0's weights and buffers; else the caller installs state
        unfrozen: frozenset[str] = frozenset(),
    ) -> None:
        """Give all `members` their roles; return when workers have joined."""
        workers = [actor for peer, actor in self.actors.items() if peer.role == "worker"]
        chosen, num_servers = self.chosen, self._num_servers(config, len(workers))
        alike = config.in_driver or len(workers) == 1
        whole = None if description.divides else chosen.global_batch_size
        self.job = Job(
            description, config, len(workers), chosen.devices_per_worker, num_servers, chosen.seed,
            self.run_config.deadlines.step, self.run_config.keep_log,
            None if alike else hosts_of(self.places, num_servers, config), chosen.accumulate,
            self._schedule_offset, self.run_config.failure.max_failures > 0, whole,
            unfrozen, self.run_config.audit, self.run_config.audit_replaces,
        )  # fmt: skip
        self.roles_due = False
        self.plan = (self.job.plan(), chosen.seed)
        self.holder.what = f'a trainer with strategy="{config.name}"'
        self.holder.workers = len(workers)
        job = self.stored_job = runtime().put(self.job)
        binding = [runtime().call(worker, "bind", job, chosen.gpu) for worker in workers]
        self.get(binding, "bind the model", self.names(workers))
        initial = runtime().call(workers[0], "initial") if fresh else None
        self.ends, self.listening = connect_processes(self, initial)
        self._connect_driver(initial, held)

    def reform(  # noqa: PLR0915 - all that a job is, put together anew in one order
        self,
        wanted: Lineup,
        step: int,
        updates: int,
        held: Holdings | None = None,
        change: int = 0,
    ) -> None:
        """Give all processes new roles, at version 0, so that training continues at `step`.

        Afterwards `members`, `job` and `client` are those of the new membership. The caller installs
        weights, optimizer state and the sample plan, and then calls `end_leaving`. If this fails,
        `members` are either as before, or those of the new membership.

        Args:
            wanted: the processes, and the strategy.
            step: committed steps so far.
            updates: of each weight in these steps, which the schedule counts.
            held: the processes that hold each chunk; None if chunks get other state.
            change: a number that stays the same if a change is tried again, so that processes keep their chunks.

        Raises:
            ConfigurationError: processes lack the transport; nothing has changed.
            PeerLostError, DeadlineError: a process died, or is late.
        """
        config, num_workers = wanted.config, wanted.num_workers
        keep, added = wanted.keep, wanted.added
        self.placement.look()
        kept = {new: self.placement.order[old] for new, old in keep.items()}
        order = self.placement.arranged(num_workers, {**kept, **wanted.placement})
        self.check_ways(config, order[:num_workers])
        order_before, self.placement.order = self.placement.order, order
        self.extend_deadline()
        self._schedule_offset = updates - step * config.updates
        before = {worker_peer(new): worker_peer(old) for new, old in keep.items()}  # by new role
        members = self.members
        servers_before = sorted(p for p in members if p.role == "server" and p not in wanted.gone)
        free = (server_peer(i) for i in itertools.count() if server_peer(i) not in added)
        before |= dict(zip(free, servers_before, strict=False))
        kept_on = {new: members[old].actor for new, old in before.items()}
        processes = dict(sorted({**kept_on, **added}.items()))
        workers = {p: actor for p, actor in processes.items() if p.role == "worker"}
        serving = self.serving(config, num_workers)
        servers = {
            p: actor for p, actor in processes.items() if p.role == "server" and p.index < serving
        }
        started = self.start_servers(config, num_workers, len(servers))
        fresh = {**added, **started}
        try:
            fresh_places = self.get(
                [runtime().call(actor, "place") for actor in fresh.values()], "start", fresh
            )
        except BaseException:
            for actor in started.values():
                runtime().end(actor)
            self.placement.order = order_before
            raise
        self.disconnect()
        cut = replace(config.cut, unfrozen=wanted.unfrozen)
        self.begun_to_train |= wanted.unfrozen
        actors, places = (
            {**workers, **servers, **started},
            dict(zip(fresh, fresh_places, strict=True)),
        )
        known = {member.actor: member for member in members.values()}
        self._leaving += [one for actor, one in known.items() if actor not in actors.values()]
        present = set(actors.values())
        self.former += [(p, one.place) for p, one in members.items() if one.actor not in present]
        staying = {peer for peer, actor in actors.items() if actor in known}
        lives = {
            peer: members[before[peer]].life + (before[peer] in wanted.gone)
            for peer in workers
            if peer in before
        }
        # set before anything can fail, so that a process that dies from here on has its new index
        self.members = {
            peer: replace(known[actor], life=lives.get(peer, 0))
            if peer in staying
            else Member(actor, runtime().call(actor, "watch"), places[peer], lives.get(peer, 0))
            for peer, actor in actors.items()
        }
        holding = set().union(*(held or {}).values())
        holders = [each.actor for each in self._leaving if each.actor in holding]
        keep_on = [runtime().call(actor, "release", cut, -1, change) for actor in holders]
        releases = {
            peer: runtime().call(
                actor,
                "release",
                cut,
                peer.index,
                change if peer in staying and held is not None else 0,
            )
            for peer, actor in actors.items()
            if peer in staying or peer.role == "worker"
        }
        who = [*map(str, releases), *self.names(holders)]
        calls = [*releases.values(), *keep_on]
        fresh_places = self.get(calls, "let go of its roles", who, after_step=True)
        layout, spec = fresh_places[list(releases).index(worker_peer(0))]
        description = replace(self.job.description, layout=layout, optimizer_spec=spec)
        self.router = Router()
        self._take_up(config, description, held, fresh=False, unfrozen=wanted.unfrozen)

    def end_leaving(self, change: int) -> None:
        """End the processes that have no role any more; the others drop the chunks that they kept for a change."""
        for member in self._leaving:
            runtime().end(member.actor)
        self._leaving.clear()
        for member in self.members.values():
            runtime().call(member.actor, "forget", change)

    def living(self) -> dict[Any, Place]:
        """Return where each process runs that is not known to be dead, also those that only hold chunks by now."""
        dead = self.deaths.causes()
        leaving = [each for each in self._leaving if not each.watch.done()]
        members = [each for peer, each in self.members.items() if peer not in dead]
        return {each.actor: each.place for each in leaving + members}

    def unused(
        self, seats: Collection[int], coming: Collection[Any], spare: Collection[Any]
    ) -> set[int]:
        """Return the seats that no process uses, except spare processes, which can be ended.

        Servers run in workers' seats too, and a spare process that has become a worker stays where it is.
        """
        here = {*self.actors.values(), *(each.actor for each in self._leaving), *coming}
        known = here.union(spare)
        self._seats = {actor: seat for actor, seat in self._seats.items() if actor in known}
        return {*seats} - {seat for actor, seat in self._seats.items() if actor in here}

    def processes(self) -> list[Any]:
        """Return the handles of all processes, with a role or without; any thread may ask."""
        return self.lease.actors

    def in_words(self) -> str:
        """Return what processes there are, and where, in a line."""
        counts = Counter(peer.role for peer in self.members)
        shown = " and ".join(
            f"{counts[role]} {role}{'s' * (counts[role] != 1)}" for role in sorted(counts)[::-1]
        )
        here = runtime()
        if here.name != "processes":
            return f"{shown} on {here.in_words}"
        cores = here.total()["CPU"]
        asked = counts["worker"] * self.run_config.resources.cpus_per_worker
        shared = f"the {cores:g} core{'s' * (cores != 1)} of {here.in_words}, which they share"
        where = shared if asked > cores else here.in_words
        return f"{shown} on {where}; RAY_ADDRESS or ray.init() for a cluster"

    def holdings(self) -> Holdings:
        """Return, for each chunk, the processes that hold it."""
        return holdings(self.job, lambda server: self.members[self.process_of(server)].actor)

    def start_worker(self, index: int, seat: int | None = None) -> Any:
        """Start the process of a worker, by default in its own seat; return its handle without waiting."""
        cpus = self.run_config.resources.cpus_per_worker
        gpus = self.chosen.devices_per_worker if self.chosen.gpu else 0
        seat = self.placement.order[index] if seat is None else seat
        return self.start_process(str(worker_peer(index)), seat, cpus, gpus, cpus)

    def start_process(self, name: str, seat: int, cpus: int, gpus: int, threads: int = 1) -> Any:
        """Start a process in a seat or beside it; return its handle without waiting."""
        keep_memory, lease = self.run_config.resources.keep_memory, self.lease.seconds
        arguments = (
            f"steepest {name}", self.token, threads, keep_memory, lease, self.identity, self._program,
            self.chosen.extensions,
        )  # fmt: skip
        at = self.placement.at(seat)
        actor = runtime().start(ProcessActor, arguments, at, cpus=cpus, gpus=gpus, calls=_THREADS)
        self.lease.add(actor)
        self._seats[actor] = seat
        return actor

    def _connect_driver(self, initial: Any, held: Holdings | None) -> None:
        """Connect the driver's end of the job to its processes; return when workers have joined."""
        index = system().chance.randrange(1 << 31)
        peers: tuple[Peer, ...] = (Peer("client", index),)
        if self.job.strategy.in_driver:
            peers = (*peers, COORDINATOR, server_peer(0))
            self._host_in_driver(initial)
        node = runtime().node
        transport = make_transport(
            self.job, self.token, peers, node, self.router.destination, self.identity
        )
        self.router.use(transport)
        client = host_client(self.router, self.job, index)
        if hasattr(self, "client"):
            client.go_on_after(self.client)
        self.client, client.on_outcome = client, self.owner.wake
        for end in self.ends:
            self.router.attach(transport.connect(end, self.run_config.deadlines.start))
        if self.job.strategy.in_driver:
            self.ends = [transport.listen(runtime().host)]
        self.router.start("steepest driver")
        if self.job.strategy.in_driver:
            connect_to(self, self.ends, list(self.actors.values()))
        if held is not None:  # before servers send their weights to all processes that join
            carry(self, held, self.holdings())
        workers = {peer: actor for peer, actor in self.actors.items() if peer.role == "worker"}
        joins = [
            runtime().call(actor, "join", self.stored_job, self.listening)
            for actor in workers.values()
        ]
        self.get(joins, "join", workers)

    def _host_in_driver(self, initial: Any) -> None:
        """Host the coordinator and the only server in this process, see `SimpleStrategy`."""
        flat, arriving = self.job.description.layout.allocate(), None
        if initial is not None:
            (begun,) = self.get([initial], "send its weights", [worker_peer(0)])
            flat.numpy()[:], arriving = begun[0], begun[2]
        host_coordinator(self.router, self.job)
        host_server(self.router, self.job, 0, flat, arriving=arriving)

    # -- running -------------------------------------------------------------------------------

    def on_router(self, function: Callable[[], Any]) -> Any:
        """Run a function on the router's thread, which owns the client, and return its result.

        Raises:
            DeadlineError: the thread was busy for `DeadlineConfig.step` seconds.
            PeerLostError, ShutdownError: the router has ended, perhaps because a process died.
        """
        try:
            called = self.router.call(function)
            return system().result(called, self.run_config.deadlines.step)
        except ShutdownError:
            self.deaths.raise_if_dead()  # the better explanation
            raise
        except FutureTimeoutError:
            log_report(self, "the driver's router")
            raise DeadlineError(
                f"the driver's router was busy for {self.run_config.deadlines.step:g} s"
            ) from None

    def wait(self, future: Future[T], what: str) -> T:
        """Return the result of a future of the router's thread, within `DeadlineConfig.step` seconds.

        Raises:
            DeadlineError: the future is not done by then.
            PeerLostError: a process died, or gave no sign of life for `heartbeat` seconds.
        """
        limit = self.run_config.deadlines.step

        def late(_: object) -> tuple[str, str]:
            self.deaths.raise_if_dead()  # the better explanation
            return f"a wait of {limit:g} s for {what}", f"waited {limit:g} s in vain for {what}"

        for _ in self.ended([future], limit, late):
            try:
                return future.result(0)
            except PeerLostError as error:
                self.deaths.lost(self.client.lost_peer or server_peer(0), str(error))
        raise AssertionError("it ends, or is late")

    # -- ending --------------------------------------------------------------------------------

    def shutdown(self, *, dropped: bool = False) -> None:
        """End every process, and give resources back; may be called twice and at any time.

        A thread of its own does so: an exception in the caller's wait for it changes nothing.
        """
        unbroken(lambda: self._end(dropped), "steepest shutdown")

    def _end(self, dropped: bool) -> None:
        """Carry out `shutdown`."""
        self.owner.end()
        self.disconnect()
        self.lease.end()
        if runtime().is_up:
            for end in self.ending:
                end()
            processes = [*self.actors.values(), *(each.actor for each in self._leaving)]
            if not dropped:
                runtime().show_output(processes)
            for actor in processes:
                runtime().end(actor)
            self.starting, self.members = {}, {}
            self.placement.release()
        if hasattr(self, "holder"):
            let_go(self.holder, dropped=dropped)

    def disconnect(self) -> None:
        """End the driver's end of the job: its router, channels and client."""
        if self.router.transport is not None:
            self.router.stop(_CLOSE_SECONDS)
            self.router.transport.close()  # its thread did, unless it never began
        if hasattr(self, "client"):
            self.client.close()
