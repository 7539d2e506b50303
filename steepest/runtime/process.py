"""The process that Ray runs for a worker or a server: a router on a thread, and calls into it."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from steepest.core.config.run import tell_frameworks_of_threads
from steepest.core.data.fingerprint import sample_hashes
from steepest.core.data.sampler import SamplePlan
from steepest.core.data.streams import StreamPlace
from steepest.core.engine.extension import Extension
from steepest.core.engine.generators import restore, states
from steepest.core.engine.hosting import (
    build_replicas,
    host_client,
    host_coordinator,
    host_server,
    host_worker,
)
from steepest.core.engine.job import Description, Job, ModelCreator
from steepest.core.engine.model_building import build_models
from steepest.core.engine.present_gpu import gpu_of
from steepest.core.engine.replicas import (
    CPU,
    Memory,
    Replicas,
    WorkerResult,
    WorkShare,
    memory_for,
)
from steepest.core.engine.server import Server
from steepest.core.engine.spans import SpanRing, record_roles
from steepest.core.engine.worker import Worker
from steepest.core.messages.gradients import Decision
from steepest.core.messages.message import (
    COORDINATOR,
    Peer,
    aggregator_peer,
    member_peer,
    server_peer,
    worker_peer,
)
from steepest.core.models.protocol import Model, overrides
from steepest.core.models.step_size import StepSize, making_models
from steepest.core.optim.arriving import ArrivingState
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.optim.torch_without_compiler import spare_compiler
from steepest.core.system import system
from steepest.core.tensors.allocator import keep_freed_memory, start_thread
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.free_memory import free_bytes, warn_if_short
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout
from steepest.core.tensors.memory import Bytes, fill
from steepest.core.tensors.shared_memory import AVAILABLE, segment_of
from steepest.core.transport.channel import Address
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.errors import PeerLostError, ShutdownError, describe_error
from steepest.extensions import EXTENSIONS
from steepest.runtime.activity import Activity, activity_of
from steepest.runtime.calls import RemoteError
from steepest.runtime.chunk_transfer import ChunkState, RetainedChunks
from steepest.runtime.job_runtime import runtime
from steepest.runtime.lease import ProcessLease
from steepest.runtime.lent_models import lent_to
from steepest.runtime.places import Place, began, processor_wait
from steepest.runtime.remote_functions import name_of, sent
from steepest.runtime.scheduling import give_way
from steepest.runtime.state_reader import read_state
from steepest.runtime.survivors import Survivor, catch_up, state_of
from steepest.runtime.tls.connections import Identity
from steepest.runtime.ways import make_transport
from steepest.runtime.worker_output import log_file, write_marks
from steepest.runtime.worker_state import WorkerState, worker_state
from steepest.strategies.aggregation.host_aggregator import host_aggregator
from steepest.strategies.collectives import operations
from steepest.strategies.collectives.members import AwaitedMember, MemberCollective
from steepest.tables.job.restored_shards import RestoredShards, use_rows
from steepest.tables.job.table_counts import table_counts

ProcessType = TypeVar("ProcessType", bound="ProcessActor")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
#: The initial state of a job: the flat weights, buffers, and the state with which the optimizer arrives.
Initial = tuple[Bytes, Tensors, ArrivingState | None]
_RESULT_SECONDS = 0.02  # the driver hears of short steps together


@dataclass(frozen=True)
class ProgramDefaults:
    """Settings that the program has in its own process, and that other processes lack unless they are set there."""

    arguments: tuple[str, ...]  # `sys.argv`
    dtype: torch.dtype  # torch's default

    @classmethod
    def of_this_process(cls) -> ProgramDefaults:
        """Return the settings of this process."""
        return cls(tuple(sys.argv), torch.get_default_dtype())

    def enter(self) -> None:
        """Apply them to this process, before any code of the user's is imported."""
        sys.argv[:] = self.arguments
        torch.set_default_dtype(self.dtype)


@dataclass(frozen=True)
class WorkerView:
    """The argument of a function given to `foreach_worker`: index, host and pid of a worker, and its replicas.

    The weights of `models` are those of the last commit.
    """

    index: int
    host: str
    pid: int
    models: tuple[Model, ...]


def on_router(
    method: Callable[Concatenate[ProcessType, Parameters], Result],
) -> Callable[Concatenate[ProcessType, Parameters], Result]:
    """Run a method of a process on its router's thread; its exceptions travel as text."""

    @functools.wraps(method)
    def called(
        process: ProcessType, /, *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        with _as_text():
            run = functools.partial(method, process, *arguments, **options)
            return system().result(process.router.call(run))

    return called


class ProcessActor:
    """The body of a Ray actor: its methods are called on Ray's threads; all state lives on the router's thread."""

    def __init__(
        self,
        name: str,
        token: bytes,
        threads: int,
        keep_memory: bool = False,  # that is freed, see `steepest.core.tensors.allocator`
        lease: float | None = None,  # seconds without a word from the driver; None for ever
        identity: Identity | None = None,
        program: ProgramDefaults | None = None,  # of the driver, which users' code finds here
        extensions: Sequence[Extension] | None = None,  # None for the library's
    ) -> None:
        self._name = ""
        self._take_name(name)
        if runtime().owns_process:
            spare_compiler()
        if program is not None:
            program.enter()
        logs = dict.fromkeys(log_file(number) for number in (1, 2))
        self._place = Place(
            runtime().node,
            runtime().host,
            runtime().pid,
            tuple(log for log in logs if log),
            began(os.getpid()) if runtime().owns_process else None,
        )
        self._extensions = EXTENSIONS if extensions is None else tuple(extensions)
        self._ahead: Any = None  # makes the models as `model_creator`, which it has begun to
        self._models: list[Model] = []
        self._replicas: Replicas | None = None
        self._memory: Memory | None = None  # for the replicas, until they are bound
        self._worker: Worker | None = None
        self._servers: list[Server] = []
        self._retained = RetainedChunks()
        self._rows = RestoredShards()  # they stay whatever its roles are
        self._change = 0  # for which they are retained
        self._member: MemberCollective | None = None
        self._index = -1
        self._shares = 1  # of a step
        self._token, self._identity = token, identity
        self._spans: SpanRing | None = None  # while a timeline is recorded
        self.router = Router()
        self._use(self._idle())
        if keep_memory and runtime().owns_process and keep_freed_memory():
            self.router.start(name, start_thread)
        else:
            self.router.start(name)
        system().result(self.router.call(functools.partial(_use_threads, threads)))
        self._lease = None if lease is None else ProcessLease(name, lease)

    def __repr__(self) -> str:
        """Return the process' name, under which Ray shows the actor."""
        return self._name

    def _take_name(self, name: str) -> None:
        if name != self._name:
            self._name = name
            runtime().name_process(name)

    def _idle(self) -> WireTransport:
        """Return a transport without channels, on which the router waits for calls."""
        return runtime().transport(self._token, (), self._place.node, self.router.destination)

    def _use(self, transport: WireTransport) -> None:
        self._transport = transport
        self.router.use(transport)

    def alive(self) -> None:
        """Return, as a sign of life; also while the router is in the middle of a long step."""

    def renew_lease(self) -> None:
        """Note that the driver lives; also while the router is in the middle of a long step."""
        if self._lease is not None:
            self._lease.renew()

    def processor_use_of(self, pid: int) -> tuple[float, bool] | None:
        """Return the use of processors by a process of this node, see `processor_use`."""
        return runtime().processor_use(pid)

    def raised_before(self, generation: int) -> str | None:
        """Return the error with which the worker failed in a step that was given up, see `Worker.raised_before`."""
        return "" if self._worker is None else self._worker.raised_before(generation)

    def doing(self) -> Activity:
        """Return what the process is doing; also while the router is in the middle of a long step."""
        share = None if self._worker is None else self._worker.computing
        return activity_of(self._name, self._place, self.router, share, self._shares)

    def rows(self, method: str, *arguments: Any) -> Any:
        """Call a method of the process' shards, or of its "files", see `RestoredShards`; also during a long step."""
        with _as_text():
            return operator.attrgetter(method)(self._rows)(*arguments)

    @on_router
    def give_rows(self, number: int, *imported: Any) -> dict[int, int]:
        """Make copies of the servers' shards with imported rows, see `RestoredShards.give`."""
        held = [each for server in self._servers for each in server.chunks.values()]
        return self._rows.give(number, held, *imported)

    def lost_peers(self) -> list[Peer]:
        """Return the peers whose channels to this process have closed."""
        return list(self.router.lost_peers)

    @on_router
    def reserve(self, nbytes: int) -> None:
        """Take memory of `nbytes`, a model's size, for the servers that the process will host."""
        self._retained.vector(nbytes).zero_()
        if self._ahead is not None:
            self._ahead.end()
            self._ahead = None

    @on_router
    def prepare(
        self, model_creator: ModelCreator, size: StepSize, workers: Sequence[Place]
    ) -> None:
        """Do what is alike for all workers' models: import what they need, which unpickling `model_creator` does.

        A creator with a method `ahead` is also run, up to where it needs the worker's number, if as much memory stays
        free as a worker of this node takes.

        Args:
            model_creator: the user's.
            size: of the job's steps, with its seed.
            workers: where the job's workers are.
        """
        here = [each.pid for each in workers if each.node == self._place.node]
        ahead, free = getattr(model_creator, "ahead", None), free_bytes()
        if ahead is not None and (
            free is None or free > 2 * max(map(_resident_bytes, here or [os.getpid()]))
        ):
            with making_models(size):
                self._ahead = ahead()

    def place(self) -> Place:
        """Return where the process runs."""
        return self._place

    @on_router
    def build(
        self,
        model_creator: ModelCreator,
        worker: int,
        devices: int,
        seed: int,
        cut: ChunkSpec,
        size: StepSize,
    ) -> Description:
        """Make a worker's models, one for each device, with `seed`; return their common description."""
        self._index = worker
        self._models, description = build_models(
            self._ahead or model_creator, worker, devices, seed, cut, size, self._extensions
        )
        self._ahead = None
        warn_if_short(
            2 * description.layout.nbytes,
            f"memory for the weights and gradients of worker {worker}",
            "give fewer workers on this host, or a smaller model",
            free_bytes(),
        )
        self._memory = memory_for(description.layout)
        return description

    @on_router
    def evaluate_snapshot(
        self,
        model_creator: ModelCreator,
        job: Job,
        weights: Mapping[str, torch.Tensor],
        buffers: Tensors,
        data: Any,
    ) -> WorkerResult:
        """Return loss and metrics over data with given weights, in a process that is no member of the job.

        Args:
            model_creator: makes the model, once in this process.
            job: of which the weights are.
            weights: by name, all that the model has.
            buffers: by name.
            data: as `Replicas.evaluate` takes them.
        """
        if self._replicas is None:
            size = StepSize(1)
            self._models, description = build_models(
                model_creator, 0, 1, job.seed, job.cut, size, self._extensions
            )
            share = WorkShare(first_index=0, shares=1, seed=job.seed)
            memory = memory_for(description.layout)
            self._replicas = Replicas(self._models, [CPU], share, memory)
        replicas = self._replicas
        replicas.layout.write(replicas.weights, weights)
        replicas.models[0].load_state(buffers)
        part = replicas.evaluate(data, None, 0, 1)
        values = replicas.models[0].metric_values([part.states])
        return replace(part.result, metrics={**part.result.metrics, **values})

    @on_router
    def evaluate_copy(self, copy: Callable[[], WorkerResult]) -> WorkerResult:
        """Return what a copied evaluation returns, in a process that is no member of the job."""
        return copy()

    def sample_hashes(self, length: int, numbers: list[int]) -> list[str] | None:
        """Return hashes of samples of the models' data, see `steepest.core.data.fingerprint.sample_hashes`."""
        before = states()
        try:
            return sample_hashes(self._models[0].data, length, numbers)
        finally:
            restore(before)

    @on_router
    def bind(self, job: Job, gpu: bool) -> None:
        """Move the models into flat buffers on their devices.

        Args:
            job: the facts of the job.
            gpu: whether each replica has a GPU.

        Raises:
            ConfigurationError: torch sees none.
        """
        devices = [gpu_of(i) if gpu else CPU for i in range(len(self._models))]
        memory, self._memory = self._memory, None
        self._replicas = build_replicas(
            *(job, self._index, self._models, devices, self._replicas, memory, self._extensions),
            serves=job.servers_in_workers,
        )

    @on_router
    def release(
        self, cut: ChunkSpec, index: int, change: int
    ) -> tuple[ParameterLayout, OptimizerSpec] | None:
        """Drop all roles and connections; keep the models, if any, cut into other chunks; return layout and optimizer.

        The servers' state is kept until `forget`, if `change` is not 0. If a change is tried again, the
        state of the first try stays.
        """
        self._index = index
        self.router.clear()
        self._use(self._idle())
        if self._worker is not None:
            self._worker.leave()
        self._worker = self._member = None
        if change == 0 or change != self._change:
            self._retained = RetainedChunks(self._servers if change else ())
        self._change = change
        self._servers = []
        if change == 0 and self._replicas is not None:
            self._replicas.forget_gathered()
        for model in self._models:
            model.relayout(cut)
        if not self._models:
            return None
        return self._models[0].layout, self._models[0].optimizer_spec

    def initial(self) -> Initial:
        """Return the flat weights, the first replica's buffers, its optimizer's state, as made."""
        assert self._replicas is not None
        replicas = self._replicas
        model = replicas.models[0]
        arriving = model.optimizer_state
        if arriving is not None:
            arriving = replace(arriving, state=Tensors(arriving.state))
        return replicas.weights.cpu().numpy(), Tensors(model.state()), arriving

    @on_router
    def open(
        self,
        job: Job,
        servers: Sequence[int],
        initial: Initial | None,
        incarnation: int = 0,
    ) -> Address:
        """Host servers (the coordinator beside the first) and this process' worker; return where it listens.

        That is without host and port where it is reached by calls of `exchange`.
        """
        self._shares = job.shares
        role = server_peer(servers[0]) if self._replicas is None else worker_peer(self._index)
        self._take_name(f"steepest {role}")
        aggregators = [i for i in servers if i in job.places.aggregators]
        peers = (
            *(server_peer(index) for index in servers),
            *(aggregator_peer(index) for index in aggregators),
        )
        if 0 in servers:
            peers = (*peers, COORDINATOR)
        if self._replicas is not None:
            peers = (*peers, worker_peer(self._index), member_peer(self._index))
            # another one in each life: a client's request of some number counts once
            self._reader = system().chance.randrange(1 << 31)
            if any(overrides(model, "use_reader") for model in self._models):
                peers = (*peers, Peer("client", self._reader))
        else:
            _use_threads(1)  # also where it was started as a spare worker
        self._use(
            make_transport(
                job, self._token, peers, self._place.node, self.router.destination, self._identity
            )
        )
        if servers:
            self._host_servers(job, servers, aggregators, initial)
        if self._replicas is not None:
            self.router.call(give_way)
            self._worker = host_worker(
                self.router,
                job,
                self._index,
                self._replicas,
                incarnation=incarnation,
                extensions=self._extensions,
            )
            # the last to be hosted: it has further messages admitted
            AwaitedMember(self.router, self._index)
            if initial is not None:
                self._replicas.begin_with(initial[1])
        for model in self._models:
            model.optimizer_state = None
        return self._transport.listen(self._place.host)

    def _host_servers(
        self, job: Job, servers: Sequence[int], aggregators: Sequence[int], initial: Initial | None
    ) -> None:
        # A worker that hosts servers shares its weights with them: one copy, updated in place.
        own = self._replicas if job.strategy.in_place else None
        weights = (
            own.weights if own is not None else self._retained.vector(job.description.layout.nbytes)
        )
        if initial is not None:
            for chunk in job.description.layout.chunks:
                if not set(servers).isdisjoint(job.holders[chunk.index]):
                    part = slice(chunk.start, chunk.stop)
                    fill(weights[part], initial[0][part])
        if 0 in servers:
            host_coordinator(self.router, job, _RESULT_SECONDS)
        for index in servers:
            in_place = own is not None or index in aggregators
            arriving = None if initial is None else initial[2]
            self._servers.append(
                host_server(
                    self.router,
                    job,
                    index,
                    weights,
                    shared=in_place,
                    arriving=arriving,
                )
            )
            # the reading threads of a simulation's processes would be no part of it
            call = self.router.call if runtime().owns_process else None
            use_rows(self._servers[-1], self._rows, call)
        for index in aggregators:
            shown = segment_of(weights) is not None  # else descriptors or memory had run out
            host_aggregator(self.router, job, index, weights, shown=shown)

    @on_router
    def give(self, chunks: Sequence[int]) -> dict[int, ChunkState]:
        """Return the state of chunks that this process' servers held before `release`."""
        return self._retained.give(chunks)

    @on_router
    def take_over(self, *chunk_states: Mapping[int, ChunkState]) -> None:
        """Give this process' servers chunks that others held; they keep those that they held before `release`."""
        parts = {chunk: state for part in chunk_states for chunk, state in part.items()}
        self._retained.hand_over(self._servers, parts)

    @on_router
    def forget(self, change: int) -> None:
        """Drop the state that earlier servers held before `release`: all processes have got their parts of it."""
        if change == self._change:
            self._retained, self._change = RetainedChunks(), 0

    @on_router
    def connect(self, others: Sequence[Address], timeout: float) -> None:
        """Connect to other processes, each within `timeout` seconds."""
        for other in others:
            self.router.attach(self._transport.connect(other, timeout))

    @on_router
    def take_state(
        self,
        plan: SamplePlan | None,
        seed: int,
        state: Tensors | None,
        place: StreamPlace | None,
    ) -> None:
        """Continue with the other workers' place in the data, and their buffers, if any are given."""
        assert self._replicas is not None
        self._replicas.use_plan(plan, seed)
        self._replicas.continue_streams(place)
        if state is not None:
            self._replicas.begin_with(state)

    @on_router
    def join(self, job: Job, workers: Sequence[Address]) -> None:
        """Tell the coordinator that this process' worker is ready; install collectives among workers."""
        assert self._worker is not None
        assert self._replicas is not None
        for model in self._models:
            if overrides(model, "use_reader"):
                client = host_client(self.router, job, self._reader)
                wait = self._worker.wait_within
                model.use_reader(functools.partial(read_state, client, self._replicas, wait))
        # as `AwaitedMember` is, after all others, since it has further messages admitted
        self._member = self._member_of(job, workers, self._worker, self._transport)
        operations.install(self._member)
        self._replicas.meet(self._member, self._worker.wait_within)
        self._worker.join()

    def _member_of(
        self, job: Job, workers: Sequence[Address], worker: Worker, transport: WireTransport
    ) -> MemberCollective:
        return MemberCollective(
            self._index,
            len(workers),
            self.router,
            job.step_timeout,
            lambda other, seconds: transport.connect(workers[other], seconds),
            generation=lambda: worker.newest_generation,
            one_host=AVAILABLE
            and transport.lends
            and len({address.node for address in workers}) == 1,
        )

    def give_up(self) -> None:
        """Have the worker take no further step; return when its current step has ended."""
        if (worker := self._worker) is not None:
            with _as_text():
                system().result(system().result(self.router.call(worker.give_up)))

    @on_router
    def heard(self) -> list[Decision]:
        """Return the coordinator's latest decisions that this process' servers received."""
        return self._servers[0].decisions.recent

    @on_router
    def state_of(self, heard: Sequence[Sequence[Decision]], since: int) -> Survivor:
        """Return the state of this process' servers after they have caught up with all decisions in `heard`.

        Args:
            heard: the decisions that each process' servers received.
            since: the version after which results of steps are wanted.
        """
        for server in self._servers:
            catch_up(server, heard)
        return state_of(self._servers, since)

    def watch(self) -> None:
        """Return when the process is stopped; raise RemoteError if its router has ended by an error."""
        with _as_text():
            system().result(self.router.finished)

    def call(
        self, position: tuple[int, int], number: int, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Run a function on the replicas once they hold the weights of a generation and version; return its result."""
        assert self._worker is not None
        member = self._member

        def run(replicas: Replicas) -> Any:
            with member.call(number) if member is not None else contextlib.nullcontext():
                return function(replicas, *arguments)

        at_version = functools.partial(self._worker.at_version, *position, run)
        with _as_text():
            return system().result(system().result(self.router.call(at_version)))

    def own_state(self, generation: int, version: int | None, step: int) -> WorkerState | None:
        """Return copies of the worker's own state, see `Worker.exactly_at`.

        `version` None stands for the one between the worker's present step and its next. Return None if the
        worker has begun a step from the version already, or has another role by then: an error might have
        no reader, and Ray would print it.
        """
        worker, take = self._worker, functools.partial(worker_state, step=step)
        if worker is None:
            return None

        def begin() -> Future[WorkerState | None]:
            if version is not None:
                return worker.exactly_at(generation, version, take)
            return cast("Future[WorkerState | None]", worker.at_version(0, -1, take))

        with _as_text(), contextlib.suppress(PeerLostError, ShutdownError):
            return system().result(system().result(self.router.call(begin)))
        return None

    def view_call(
        self, position: tuple[int, int], number: int, function: Callable[[WorkerView], Any]
    ) -> Any:
        """Run a user's function on a `WorkerView`, see `call`; return its result as `sent` does."""
        return self.call(position, number, self._view, function)

    def _view(self, replicas: Replicas, function: Callable[[WorkerView], Any]) -> Any:
        view = WorkerView(self._index, self._place.host, self._place.pid, replicas.models)
        with lent_to(f"the function {name_of(function)}", replicas):
            result = function(view)
        return sent(function, result)

    def abandon(self, number: int, reason: str) -> None:
        """End a call's wait for other workers, because one of them failed."""
        if (member := self._member) is not None:
            self.router.call(functools.partial(member.abandon, number, reason))

    def counters(self) -> dict[str, Any]:
        """Return frames refused, bytes sent and resident, processor time and waits for it, rows, what servers spent.

        Also amid a step.
        """
        refused = self.router.refused + self._transport.refused
        return {
            "refused": refused,
            "bytes_sent": self._transport.bytes_sent,
            "resident": _resident_bytes(os.getpid()),
            "processor": time.process_time(),
            "waited": processor_wait(),
            "tables": table_counts(self._servers),
            "now": system().now(),
            "servers": [server.spent for server in self._servers],
        }

    def clock(self) -> float:
        """Return the time by which spans are recorded, in seconds."""
        return system().now()

    def record(self, capacity: int) -> None:
        """Record spans from now on, of which the newest `capacity` are kept; 0 to record none."""
        self._spans = SpanRing(capacity) if capacity else None
        self.router.call(functools.partial(record_roles, self.router, self._spans))

    def spans(self, number: int, least: int) -> tuple[int, bytes]:
        """Return the spans after the first `number`, see `SpanRing.since`; also during a step."""
        ring = self._spans
        return (number, b"") if ring is None else ring.since(number, least)

    def mark_output(self, token: str) -> list[str]:
        """Write marks behind what the process has printed, see `write_marks`; also during a step."""
        return write_marks(token)

    def stop(self) -> None:
        """Close every channel and end the router's thread."""
        self.router.stop()


@contextlib.contextmanager
def _as_text() -> Iterator[None]:
    """Raise errors of a block as RemoteError: users' may not be pickled, and a SystemExit would end the actor."""
    try:
        yield
    except RemoteError:
        raise
    except BaseException as error:  # noqa: BLE001 - raised again by the driver
        raise RemoteError(describe_error(error)) from None


def _use_threads(threads: int) -> None:
    """Have torch compute on this number of threads, and JAX and TensorFlow, which begin later."""
    torch.set_num_threads(threads)
    tell_frameworks_of_threads(threads)


def _resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process; 0 if the system does not tell."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
