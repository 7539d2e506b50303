"""What a worker's process runs: its model, and its roles on a router's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.extension import Extension
from steepest.core.engine.hosting import build_replicas, host_server, host_worker
from steepest.core.engine.job import Description, Job, ModelCreator
from steepest.core.engine.model_building import build_models
from steepest.core.engine.present_gpu import choose_gpu, gpu_of
from steepest.core.engine.replicas import Replicas
from steepest.core.engine.worker import Worker
from steepest.core.messages.message import Peer, server_peer, worker_peer
from steepest.core.models.protocol import Model
from steepest.core.models.step_size import StepSize
from steepest.core.optim.arriving import ArrivingState
from steepest.core.system import system
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.layout import ChunkSpec
from steepest.core.transport.channel import Address
from steepest.core.transport.loopback import HOST
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport

T = TypeVar("T")


def make_transport(token: bytes, peers: tuple[Peer, ...], router: Router) -> WireTransport:
    """Have a router send and receive over TCP, as some roles; return its transport."""
    transport = WireTransport(token, peers, HOST, router.destination, "tcp")
    router.use(transport)
    return transport


class WorkerProcess:
    """The body of a worker's process, see `Runtime`.

    It lives through several jobs: each time that a process dies, `open` gives it new roles, and it
    keeps its model. Methods run on the process' main thread; roles and models live on the router's.

    Args:
        token: the job's secret, which both ends of a connection prove to know.
        threads: with which torch computes.
        extensions: what attaches to the worker.
        device: where the model computes, as of `Settings`.
    """

    def __init__(
        self, token: bytes, threads: int, extensions: Sequence[Extension], device: str = "cpu"
    ) -> None:
        self._token = token
        self._extensions = extensions
        self._device = device
        self._models: list[Model] = []
        self._replicas: Replicas | None = None
        self._worker: Worker | None = None
        self._router = Router()
        self._transport = make_transport(token, (), self._router)
        self._router.start("steepest worker")
        self._on_router(lambda: torch.set_num_threads(threads))

    def _build_replicas(self, job: Job, index: int, before: Replicas | None) -> Replicas:
        devices, extensions = [self._device_of(index)], self._extensions
        return build_replicas(
            *(job, index, self._models, devices, before),
            extensions=extensions,
            serves=job.strategy.in_workers,
        )

    def _device_of(self, index: int) -> torch.device:
        """Return the device of a worker's model; ConfigurationError: this process sees no GPU."""
        return torch.device("cpu") if self._device == "cpu" else gpu_of(index, self._device)

    def _on_router(self, function: Callable[[], T]) -> T:
        return system().result(self._router.call(function))

    def _between_steps(self, function: Callable[[Worker], Future[T]]) -> T:
        """Return what a future of the worker's holds."""
        worker = self._worker
        assert worker is not None
        return system().result(self._on_router(lambda: function(worker)))

    def build(
        self, model_creator: ModelCreator, index: int, seed: int, cut: ChunkSpec, size: StepSize
    ) -> Description:
        """Make the model, and return what it is like; see `build_models`."""

        def build() -> Description:
            choose_gpu(self._device_of(index))  # for `.cuda()` in the creator
            self._models, found = build_models(
                model_creator, index, 1, seed, cut, size, self._extensions
            )
            return found

        return self._on_router(build)

    def initial(self, job: Job) -> tuple[bytes, Tensors, ArrivingState | None]:
        """Return the model's flat weights, its buffers, and its optimizer's state, as they were made."""

        def read() -> tuple[bytes, Tensors, ArrivingState | None]:
            model = self._models[0]
            self._replicas = self._build_replicas(job, 0, None)
            weights = self._replicas.weights.cpu().numpy().tobytes()
            return weights, Tensors(model.state()), getattr(model, "optimizer_state", None)

        return self._on_router(read)

    def open(
        self,
        job: Job,
        index: int,
        life: int,
        plan: SamplePlan,
        buffers: Tensors | None,
        fresh: bool,
    ) -> Address:
        """Take the roles of a worker in a job; the roles of an earlier job end.

        Args:
            job: in which the process takes part.
            index: of the worker.
            life: the number of processes that were this worker before.
            plan: which samples each step has.
            buffers: for the model; None to keep its own.
            fresh: whether a server here begins with the state with which the model's optimizer arrives.

        Returns:
            The address at which the process listens for the other workers.
        """
        if self._worker is not None:
            self._between_steps(Worker.give_up)
        return self._on_router(lambda: self._open(job, index, life, plan, buffers, fresh))

    def _open(
        self,
        job: Job,
        index: int,
        life: int,
        plan: SamplePlan,
        buffers: Tensors | None,
        fresh: bool,
    ) -> Address:
        if self._worker is not None:
            self._worker.leave()
        serves, peers = job.strategy.in_workers, (worker_peer(index),)
        self._router.clear()
        self._transport = make_transport(
            self._token, (*peers, server_peer(index)) if serves else peers, self._router
        )
        replicas = self._build_replicas(job, index, self._replicas)
        self._replicas = replicas
        if serves:  # it updates its slice in the very weights with which the model computes
            arriving = getattr(self._models[0], "optimizer_state", None) if fresh else None
            weights = replicas.weights
            host_server(self._router, job, index, weights, shared=True, arriving=arriving)
        self._worker = host_worker(
            self._router, job, index, replicas, incarnation=life, extensions=self._extensions
        )
        replicas.use_plan(plan, job.seed)
        if buffers is not None:
            replicas.begin_with(buffers)
        return self._transport.listen(HOST)

    def connect(self, others: Sequence[Address], seconds: float) -> None:
        """Connect to other processes, each within some seconds."""

        def connect() -> None:
            for other in others:
                self._router.attach(self._transport.connect(other, seconds))

        self._on_router(connect)

    def join(self) -> None:
        """Tell the coordinator that the worker is ready."""
        assert self._worker is not None
        self._on_router(self._worker.join)

    def states(self) -> list[Tensors]:
        """Return what the model changes itself, such as running means, between two steps."""
        return self._between_steps(lambda worker: worker.at_version(0, -1, Replicas.states))
