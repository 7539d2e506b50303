"""A few steps of a job on virtual time: the library's coordinator, with modelled workers, servers and links."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from steepest.cli.planning.events import Events, Links, LinkTraffic, ModelledProcess
from steepest.cli.planning.profile import Profile
from steepest.cli.planning.roles import (
    ModelledPush,
    ModelledServer,
    ModelledWorker,
    SendingSchedule,
    Sizes,
)
from steepest.core.engine.hosting import make_coordinator
from steepest.core.engine.job import Description, Job
from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import AskForSteps
from steepest.core.messages.membership import Join
from steepest.core.messages.message import Kind, Message, Peer, worker_peer
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError, DeadlineError
from steepest.strategies.rounds import RoundCoordinator

_CLIENT = Peer("client", 0)
_NEVER = 1e18  # seconds after which a step is given up
_SAMPLES = 1 << 40  # of the data, which no plan uses up
_OWN_SCHEDULE = SendingSchedule()
_UNEVENNESS = 0.2  # of streams, where workers do not wait for each other
_SEVERAL, _MANY = 24, 256  # workers, from which on fewer steps are taken


@dataclass(frozen=True)
class Prediction:
    """The predicted speed and traffic of a job.

    Attributes:
        strategy, workers, servers: of the job; servers in workers' or the driver's process count too.
        seconds: of a step.
        samples_per_second: of all workers together.
        computing: share of the time in which a worker computes, on average.
        sent: bytes of payloads that go over links in a step, of all hosts together.
        beside: processor seconds of a step, of all processes together, beside passes and loading.
        of_workers, of_servers: processor seconds of a step, of all processes with workers together, and of those
            with servers alone: all that they compute, load, send, receive and apply.
        chunks: into which the trained parameters are cut; servers beyond as many hold nothing.
    """

    strategy: str
    workers: int
    servers: int
    seconds: float
    samples_per_second: float
    computing: float
    sent: float
    beside: float = 0.0
    chunks: int = 0
    of_workers: float = 0.0
    of_servers: float = 0.0


def make_job(
    profile: Profile,
    strategy: Strategy,
    workers: int,
    servers: int | None = None,
    *,
    apart: bool = False,
    devices: int = 1,
    together: bool = False,
) -> Job:
    """Return the job of which steps are predicted.

    Args:
        profile: of the model.
        strategy: of the job.
        workers: each on a host of its own.
        servers: processes, of a strategy that has them; None for its default on that number of nodes.
        apart: whether each server has a host of its own; otherwise they are dealt to the workers' hosts in turn.
        devices: replicas of a worker.
        together: whether all processes share one host.

    Raises:
        ConfigurationError: the strategy does not allow these numbers, or cannot be predicted.
    """
    strategy.check_workers(workers)
    local, rule = strategy.local, strategy.rule
    if local and not rule.needs_all and (strategy.delay or strategy.cut.fragments > 1):
        raise ConfigurationError(
            f"a plan of rounds (quorum= or pace=) with delay={strategy.delay} and fragments={strategy.cut.fragments}: "
            "what a round carries then depends on who is late, which no plan knows; leave delay and fragments out"
        )
    if servers is not None and not strategy.in_workers and not strategy.in_driver:
        strategy = strategy.with_servers(servers)
    count = strategy.servers_for(1 if together else workers, workers)
    if workers == 1 and not strategy.in_driver:  # one process has all
        count = 1
    first = workers if apart and not strategy.in_workers and workers > 1 else 0
    where = [index if first else index % workers for index in range(count)]
    hosts = HostMap(tuple(range(workers)), tuple(first + host for host in where))
    if together:
        hosts = HostMap((0,) * workers, (0,) * count)
    described = Description(profile.layout(strategy.cut), profile.spec, _SAMPLES, profile.samples)
    if described.layout.opaque_chunks:
        raise ConfigurationError(
            "a plan of a model with embedding tables: which rows a batch needs depends on the data, and no plan knows "
            "it; `steepest plan --tables` says what rows need, and how long a step takes"
        )
    return Job(described, strategy, workers, devices, count, 0, _NEVER, hosts=hosts)


def predict(
    profile: Profile,
    strategy: Strategy,
    workers: int,
    links: Links,
    servers: int | None = None,
    *,
    apart: bool = False,
    devices: int = 1,
    cores: int | None = None,
) -> Prediction:
    """Predict the steps of a job; arguments and errors as of `make_job`.

    Args:
        cores: of the one host that all processes share; None for a host for each worker.
    """
    shares = cores is not None
    job = make_job(
        profile, strategy, workers, servers, apart=apart, devices=devices, together=shares
    )
    prediction = predict_job(job, profile, links)
    return prediction if cores is None else _sharing(prediction, cores, profile)


def _sharing(prediction: Prediction, cores: int, profile: Profile) -> Prediction:
    """Return the prediction of a job whose processes share cores, from one in which each has its own.

    Passes that want more cores than there are take as much longer, and no step takes less than the processor time
    of all processes on all cores.
    """
    computed = prediction.computing * prediction.seconds  # of a worker
    wanted = prediction.workers * (1.0 if profile.occupied == 0 else profile.occupied)
    stretch = 1.0 if profile.on_device else max(wanted / cores, 1.0)
    spent = prediction.of_workers + prediction.of_servers
    seconds = max(prediction.seconds + (stretch - 1.0) * computed, spent / cores)
    return replace(
        prediction,
        seconds=seconds,
        samples_per_second=prediction.samples_per_second * prediction.seconds / seconds,
        computing=min(computed * stretch / seconds, 1.0),
    )


def predict_job(
    job: Job, profile: Profile, links: Links, schedule: SendingSchedule = _OWN_SCHEDULE
) -> Prediction:
    """Predict the steps of a job of `make_job`, or of one whose processes are elsewhere; errors as of `make_job`."""
    simulated = Simulation(job, profile, links, schedule)
    strategy, workers = job.strategy, job.num_workers
    few = (4, 12) if job.needs_all else (8, 48)  # which differ more where nobody waits
    begun, counted = (
        job.description.layout.fragments * each
        for each in ((1, 1) if workers >= _MANY else (2, 4) if workers >= _SEVERAL else few)
    )
    # where workers go on before a step has ended the last one is not as the others: none follows
    flows = strategy.delay > 0 or not job.needs_all
    simulated.run(begun + counted + flows, begun + counted)
    ends = simulated.ends
    began, ended = ends[begun], ends[begun + counted]
    seconds, computed, moved, beside, of_workers, of_servers = (
        (after - before) / counted for before, after in zip(began, ended, strict=True)
    )
    if not seconds > 0:
        raise ConfigurationError(
            "a step takes no time at all: the profile says so of each of its parts"
        )
    samples = job.global_batch / seconds
    share = min(computed / (seconds * workers), 1.0)
    chunks = len(job.description.layout.trainable_chunks)
    return Prediction(
        strategy.name,
        workers,
        job.num_servers,
        seconds,
        samples,
        share,
        moved,
        beside,
        chunks,
        of_workers,
        of_servers,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let the garbage collector rest: events are many and form no cycles, and it took two thirds of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Simulation:
    """The processes of one job."""

    def __init__(
        self,
        job: Job,
        profile: Profile,
        links: Links,
        schedule: SendingSchedule = _OWN_SCHEDULE,
    ) -> None:
        self._schedule = schedule
        self._events = Events()
        alone = len(set(job.places.servers) - set(job.places.workers))
        groups = job.num_workers, alone
        self._traffic = LinkTraffic(
            self._events, links, profile.costs, groups, 0.0 if job.needs_all else _UNEVENNESS
        )
        self._coordinator = make_coordinator(job)
        hosts = job.places
        sizes = Sizes(job, profile)
        # by step, from 0: when it has ended; until then the seconds computed, bytes moved, seconds beside passes, and
        # processor seconds of workers' processes and of the others
        self.ends: dict[int, tuple[float, ...]] = {0: (0.0,) * 6}
        self._last = 0  # the step with which `run` ends
        costs = profile.costs
        # where all contribute to each step the workers of a host read the servers' own weights
        self._has_copies = job.servers_in_workers or not job.needs_all or bool(job.strategy.local)
        processes = [ModelledProcess(self._events, host, costs) for host in hosts.workers]
        serving = job.servers_in_workers
        holding = self._coordinator.holding | {0}  # others take no time and send nothing
        self._workers = [
            ModelledWorker(
                index, job, profile, sizes, process, schedule, serves=serving and index in holding
            )
            for index, process in enumerate(processes)
        ]
        self._servers = [
            ModelledServer(
                index,
                job,
                profile,
                sizes,
                processes[index] if serving else ModelledProcess(self._events, host, costs),
                schedule,
            )
            for index, host in enumerate(hosts.servers)
        ]
        for worker in self._workers:
            worker.to_coordinator, worker.to_server = self._to_coordinator, self._to_server
        for server in self._servers:
            server.to_coordinator, server.to_worker = self._to_coordinator, self._to_worker
        self._on_device, self._occupied = profile.on_device, profile.occupied
        others = [server.process for server in self._servers]
        self._processes = list(dict.fromkeys([*processes, *others]))
        state = self._coordinator.state
        state.servers = tuple(sorted(holding))

    def run(self, steps: int, until: int | None = None) -> None:
        """Let some steps pass; `until`: the step with whose end to stop, the last one by default."""
        self._carry_out(self._coordinator.handle(_CLIENT, AskForSteps(0, 1, steps).pack()))
        for worker in self._workers:
            joined = self._coordinator.handle(worker_peer(worker.index), Join(0).pack())
            self._carry_out(joined)
            worker.process.begin(worker.life())
        self._last = steps if until is None else until
        with _uncollected():
            ended = self._events.run()
        if not ended:
            doing = self._coordinator.doing()
            raise DeadlineError(f"the simulated job comes to a halt: the coordinator {doing}")

    # -- messages ------------------------------------------------------------------------------

    @property
    def _beside(self) -> ModelledProcess:
        """The process in which the coordinator is."""
        return self._servers[0].process

    def _to_coordinator(self, source: ModelledProcess, peer: Peer, message: Message) -> None:
        act = partial(self._decide, peer, message)
        self._traffic.send(source, self._beside, 0, act)

    def _decide(self, peer: Peer, message: Message) -> None:
        decided = self._coordinator.decide(peer, message)
        self._carry_out(decided + self._coordinator.settle())
        if isinstance(self._coordinator, RoundCoordinator):
            self._look()

    def _look(self) -> None:
        """Tell the coordinator the time, now and when a round has waited long enough."""
        self._tick()
        if grace := getattr(self._coordinator.state.rule, "grace", 0.0):
            self._events.at(self._events.now + grace, self._tick)

    def _tick(self) -> None:
        self._carry_out(self._coordinator.tick(self._events.now))

    def _carry_out(self, decided: list[tuple[Peer, Message]]) -> None:
        """Send the coordinator's messages."""
        for peer, message in decided:
            if peer.role == "client":
                self._note(message)
                continue
            role: ModelledWorker | ModelledServer
            role = (self._workers if peer.role == "worker" else self._servers)[peer.index]
            if message.kind is Kind.COMMIT and peer.index == 0 and self._schedule.installs:
                self._tell_workers(message.body.version)
            self._traffic.send(self._beside, role.process, 0, partial(role.handle, message))

    def _tell_workers(self, version: int) -> None:
        """Tell all workers that a version is committed."""
        for worker in self._workers:
            self._traffic.send(self._beside, worker.process, 0, partial(worker.install, version))

    def _note(self, message: Message) -> None:
        """Note the end of a step."""
        if message.kind is Kind.RESULT:
            step = len(self.ends)
            workers, on_device = self._workers, self._on_device
            ahead = 0.0 if on_device else sum(worker.process.ahead for worker in workers)
            computed = sum(worker.computed for worker in workers) - ahead
            spent = sum(process.spent - process.ahead for process in self._processes)
            on_threads = 0.0 if on_device else computed
            beside = spent - on_threads + sum(worker.beside for worker in workers)
            # a pass takes its process' time, and perhaps more or fewer processors than one
            in_workers = sum(worker.process.spent - worker.process.ahead for worker in workers)
            passes = sum(worker.passes for worker in workers) - ahead
            passes *= 0.0 if on_device else self._occupied - 1.0
            processors = in_workers + passes, spent - in_workers
            self.ends[step] = (
                self._beside.cursor, computed, self._traffic.moved, beside, *processors,
            )  # fmt: skip
            if step == self._last:
                self._events.stop()

    def _to_server(self, source: ModelledProcess, server: int, push: ModelledPush) -> None:
        role = self._servers[server]
        act, many = partial(role.take_push, push), len(push.chunks)
        self._traffic.send(source, role.process, push.size, act, many)

    def _to_worker(
        self, source: ModelledProcess, server: int, worker: int, version: int, chunk: int, size: int
    ) -> None:
        role = self._workers[worker]
        act = partial(role.take_weights, version, chunk, size)
        self._traffic.send(source, role.process, size, act, copied=self._has_copies)
