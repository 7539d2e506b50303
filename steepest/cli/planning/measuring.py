"""Measures a model in this process: its passes, parameter by parameter, and the cost of the library's own work."""

from __future__ import annotations

import os
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from steepest.cli.planning.profile import CodecCosts, Costs, Profile
from steepest.core.engine.chunk_store import StagedPush
from steepest.core.engine.client import Client
from steepest.core.engine.hosting import (
    build_replicas,
    host_client,
    host_coordinator,
    host_server,
    host_worker,
)
from steepest.core.engine.job import Job, ModelCreator
from steepest.core.engine.model_building import build_models
from steepest.core.engine.replicas import Replicas
from steepest.core.engine.server import Server
from steepest.core.engine.worker import Worker
from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.gradients import Push
from steepest.core.messages.message import Message, Peer, PushId
from steepest.core.models.step_size import StepSize
from steepest.core.status import Status
from steepest.core.system import system
from steepest.core.tensors.allocator import keep_freed_memory
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.errors import (
    ConfigurationError,
    ModelRaisedError,
    SteepestError,
    described_by,
    raised_by_user,
)
from steepest.extensions import EXTENSIONS
from steepest.loop.model import LoopModel
from steepest.strategies.compression.gradient_compressor import GradientCompressor
from steepest.strategies.parameter_server import ParameterServerStrategy

if TYPE_CHECKING:
    from steepest.cli.planning.id_samples import CountingRows, IdSample

_WARM = 3  # batches before those that count
_SECONDS = 600.0  # within which a step must end
_REPEATS = 5
_PUSHES = 4  # that are added up
_LARGE = 4 << 20  # bytes of a payload
_MESSAGES = 200
_ALONE = 24  # messages one by one
_ELSEWHERE = 8 << 20  # floats that are changed so that no cache holds anything else
_FEW = 4  # passes, of which fewer tell nothing of their variation
_QUARTILES = 1.349  # standard deviations between the quartiles of a normal distribution
_OTHERS = 6  # messages of a step of one worker beside chunks: ASK, GRANT, REPORT, VERSION_STAGED, COMMIT, RESULT
_ELEMENTS, _CHUNKS = 1 << 18, 8  # of a chunk with which a codec is measured; how many there are
_COLD = 8 << 20  # bytes of chunks that are added up: more than a processor's own caches hold


def measure(
    model_creator: ModelCreator, *, batches: int = 12, seconds: float = 30.0, seed: int = 0
) -> Profile:
    """Train a model on this process for some batches, and return the times measured.

    It is a job of one worker with the library's own roles: models, optimizer and data are used as in training.
    Each number is a median. Memory that the model frees stays with this process.

    Args:
        model_creator: as of `DistributedSGD`, or a `LoopCreator`.
        batches: to be measured, at least 1; a loop of the user's own may end before.
        seconds: after which no further batch is begun.
        seed: of the job.

    Raises:
        ConfigurationError: the model cannot be built. ModelRaisedError: it raised.
    """
    load = os.getloadavg()[0]
    keep_freed_memory()  # as workers do
    job = _MeasuredJob(model_creator, seed)
    try:
        passes = job.take(_WARM + batches, seconds)
    finally:
        job.end()
    rows = passes[_WARM:] or passes[-1:]
    model = job.model
    spec = model.optimizer_spec
    cuts: dict[ChunkSpec, ParameterLayout] = {}
    before = model.layout

    def layout(cut: ChunkSpec) -> ParameterLayout:
        if cut not in cuts:
            model.relayout(cut)
            cuts[cut], vars(model)["layout"] = model.layout, before
        return cuts[cut]

    total = statistics.median(row.seconds for row in rows)
    return Profile(
        samples=model.batch_size,
        seconds=total,
        ready=_medians(rows, before, lambda row: row.ready, total, total),
        layout=layout,
        spec=spec,
        loading=statistics.median(row.loading for row in rows),
        variation=_variation([row.seconds for row in rows]),
        load=load,
        costs=job.costs(rows),
        codec_costs=cache(measure_codec),
        holds_back=job.replicas.may_take_back,
        own_loop=isinstance(model, LoopModel),
        processor=statistics.median(row.processor for row in rows),
    )


def sample_ids(
    model_creator: ModelCreator, *, batches: int, seconds: float = 60.0, seed: int = 0
) -> tuple[list[IdSample], int, int | None]:
    """Train a model on this process for some batches, and count the ids that its tables are asked for.

    Args:
        model_creator, batches, seconds, seed: as of `measure`.

    Returns:
        A sample of ids for each table; the number of the data's samples counted; and that of an epoch, None if the
        data do not tell.

    Raises:
        ConfigurationError: the model cannot be built, or has no tables. ModelRaisedError: it raised.
    """

    counting: list[CountingRows] = []
    job = _MeasuredJob(model_creator, seed, counting)
    try:
        if not counting:
            raise ConfigurationError(
                "the model has no embedding tables to plan for: give one with a steepest.Embedding, or plan its steps "
                "with steepest.plan()"
            )
        passes = job.take(batches, seconds)
    finally:
        job.end()
    model, (rows,) = job.model, counting
    samples = [rows.counters[table.name].sample(len(passes)) for table in model.tables]  # type: ignore[attr-defined]
    return samples, len(passes) * model.batch_size, model.data.size


#: A pass that takes so many times the processor time of its own thread has other threads compute for it.
_SEVERAL_THREADS = 1.2


class RowCosts(NamedTuple):
    """Seconds for one worker's batch of a model with embedding tables, and what it sends.

    Attributes:
        worker: for loading and the pass, of a worker.
        server: for the rows that are asked for, the gradients and the update, of a server that has all rows.
        samples: of the batch.
        nbytes: of trained parameters that are no rows.
    """

    worker: float
    server: float
    samples: int
    nbytes: int


def measure_rows(model_creator: ModelCreator, *, batches: int, seed: int = 0) -> RowCosts:
    """Train a model with embedding tables on this process for some batches; return the costs of one.

    Args:
        model_creator, batches, seed: as of `measure`.
    """
    job = _MeasuredJob(model_creator, seed)
    job.time_server()
    try:
        rows = job.take(batches, 60.0)
    finally:
        job.end()
    rows = rows[len(rows) // 4 :]  # the first ones warm up, and make rows
    server = statistics.median(row.serving for row in rows)
    worker = statistics.median(row.whole - row.serving + row.elsewhere for row in rows)
    nbytes = sum(chunk.nbytes for chunk in job.model.layout.chunks)
    return RowCosts(worker, server, job.model.batch_size, nbytes)


class _MeasuredPass:
    """The times of one batch, in seconds."""

    def __init__(self) -> None:
        self.seconds = self.loading = self.applying = self.handling = 0.0
        # processor seconds of this thread: for the step, and for the server's part of it
        self.whole = self.serving = 0.0
        self.processor = self.on_thread = 0.0  # of the pass, on all threads and on its own
        self.ready: dict[int, float] = {}

    @property
    def elsewhere(self) -> float:
        """Seconds for which the pass' thread waited for threads that computed for it; what others took is none."""
        if self.processor < _SEVERAL_THREADS * self.on_thread:
            return 0.0
        return self.seconds - self.on_thread


def _medians(
    rows: list[_MeasuredPass],
    layout: ParameterLayout,
    of: Callable[[_MeasuredPass], dict[int, float]],
    missing: float,
    total: float,
) -> dict[str, float]:
    """Return the median share of the pass, times the duration of a pass, by trained parameter."""
    medians = {}
    for index, entry in enumerate(layout.entries):
        if entry.trainable:
            shares = [of(row).get(index, missing) / max(row.seconds, 1e-9) for row in rows]
            medians[entry.name] = min(statistics.median(shares) * total, total)
    return medians


def _variation(seconds: list[float]) -> float:
    """Return the standard deviation over the median, from the quartiles, which a few late passes do not move."""
    if len(seconds) < _FEW:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / _QUARTILES / middle


class _MeasuredJob:
    """A job of one worker, whose roles are all in this thread."""

    def __init__(
        self,
        model_creator: ModelCreator,
        seed: int,
        counting: list[CountingRows] | None = None,  # to which that of a model with tables is added
    ) -> None:
        self._now = system().now
        with _own_main():
            strategy = ParameterServerStrategy(num_servers=1)
            models, description = build_models(
                model_creator, 0, 1, seed, strategy.cut, StepSize(1), EXTENSIONS
            )
        job = Job(description, strategy, 1, 1, 1, seed, _SECONDS)
        self._job, self.model = job, models[0]
        self._rows: list[_MeasuredPass] = []
        self._watch()
        if counting is not None and description.layout.opaque_chunks:
            self._count(counting)
        self._router = router = Router()
        self.replicas: Replicas = build_replicas(
            job, 0, models, [torch.device("cpu")], extensions=EXTENSIONS
        )
        self._server: Server = host_server(router, job, 0, self.replicas.weights.clone())
        host_coordinator(router, job)
        self._client: Client = host_client(router, job, 0)
        # processor seconds: of updates, and of all that the server does
        self._applying = self._serving = 0.0
        for held in self._server.gradient_stores.values():
            vars(held)["apply"] = self._timed_update(held.apply)
        self._worker: Worker = host_worker(router, job, 0, self.replicas, extensions=EXTENSIONS)
        self._worker.join()

    def _watch(self) -> None:
        """Time the model's passes from now on."""
        model, now, rows = self.model, self._now, self._rows
        compute = model.compute_gradients

        def timed(batch: Any, ready: Any, metrics: bool) -> Any:
            row, began = _MeasuredPass(), now()
            processor, on_thread = time.process_time(), time.thread_time()

            def readied(entry: int, weight: float, present: bool, chunk: int | None = None) -> None:
                row.ready[entry] = now() - began
                ready(entry, weight, present, chunk)

            computed = compute(batch, readied, metrics)
            row.seconds = now() - began
            row.processor = time.process_time() - processor
            row.on_thread = time.thread_time() - on_thread
            rows.append(row)
            return computed

        vars(model)["compute_gradients"] = timed

    def _timed_update(self, apply: Callable[..., None]) -> Callable[..., None]:
        """Return a timed version of `apply`, which updates a chunk."""

        def timed(*arguments: Any) -> None:
            began = time.thread_time()
            apply(*arguments)
            self._applying += time.thread_time() - began

        return timed

    def time_server(self) -> None:
        """Time all that the server does from now on."""
        handle = self._server.handle

        def timed(source: Peer, message: Message) -> None:
            began = time.thread_time()
            handle(source, message)
            self._serving += time.thread_time() - began

        vars(self._server)["handle"] = timed

    def _count(self, counting: list[CountingRows]) -> None:
        """Count the ids of the model's batches from now on."""
        from steepest.cli.planning.id_samples import CountingRows

        model: Any = self.model
        use, compute = model.use_rows, model.compute_gradients

        def use_counted(source: Any) -> None:
            counting[:] = counting or [CountingRows(source, model.tables)]
            use(counting[0])

        def counted(*arguments: Any) -> Any:
            counting[0].batch = len(self._rows)
            return compute(*arguments)

        vars(model).update(use_rows=use_counted, compute_gradients=counted)

    def take(self, steps: int, seconds: float) -> list[_MeasuredPass]:
        """Take some steps; return the times of each."""
        until = self._now() + seconds
        with _own_main():
            for step in range(steps):
                before = len(self._rows)
                if not self._begin(step) or not self._take_one(before):
                    break
                if self._now() > until and len(self._rows) > 1:
                    break
        if not self._rows:
            raise ModelRaisedError(
                "the function that trains ended before it took a batch: let it take one at least"
            )
        return self._rows

    def end(self) -> None:
        """End a loop of the user's own at its present batch."""
        if isinstance(self.model, LoopModel):
            with _own_main():
                self.model.session.end()

    def _begin(self, step: int) -> bool:
        """Let a loop of the user's own go on up to where it needs a batch; return whether it does."""
        model, plan = self.model, self._job.plan()
        if not isinstance(model, LoopModel):
            return True
        epoch = 0 if plan is None else plan.position(step).epoch
        advanced = self._worker.at_version(0, -1, lambda _: model.advance(epoch, step))
        self._turn_until(advanced.done)
        return not advanced.result().ended

    def _take_one(self, before: int) -> bool:
        """Take a step; return whether it had samples."""
        taking, self._applying, self._serving = self._server.spent[2], 0.0, 0.0
        began = time.thread_time()
        self._client.ask(1, True)
        self._turn_until(lambda: not self._client.outcomes.empty())
        took = time.thread_time() - began
        outcome = self._client.outcomes.get()
        if isinstance(outcome, Failure):
            raise raised_by_user(
                f"the model raised while it was measured: {outcome.error}", described_by(outcome)
            )
        assert isinstance(outcome, Result)
        if len(self._rows) == before or not outcome.samples:
            return False
        row, spent = self._rows[-1], self._server.spent
        row.loading = (outcome.timings or {}).get("data", 0.0)
        row.applying, row.serving, row.whole = self._applying, self._serving, took
        known = row.on_thread + row.loading + row.applying + spent[2] - taking
        row.handling = max(took - known, 0.0)
        return True

    def _turn_until(self, done: Callable[[], bool]) -> None:
        until = self._now() + _SECONDS
        while not done():
            self._router.turn(0.0)
            self._router.finish()
            if self._now() > until:
                raise SteepestError(f"a batch took longer than {_SECONDS:g} s")

    def costs(self, rows: list[_MeasuredPass]) -> Costs:
        """Return the costs of the work beside the passes, for each byte."""
        chunks = [*self._server.gradient_stores.values()]
        nbytes = max(sum(held.chunk.nbytes for held in chunks), 1)
        applied = statistics.median(row.applying for row in rows) / nbytes
        added, checked = self._adding([held for held in chunks if not held.is_opaque])
        transport = measure_transport()
        # a push and its weights for each chunk, and what coordinator, server, worker and client say to each other
        handled = statistics.median(row.handling for row in rows) / (2 * len(chunks) + _OTHERS)
        transport["message"] += handled / 2  # half where it is sent
        return Costs(applied=applied, added=added, checked=checked, **transport)

    def _adding(self, chunks: list[Any]) -> tuple[float, float]:
        """Return the seconds for each byte of a push that is added up, and of a sum of squares."""
        chosen, nbytes = [], 0
        for held in sorted(chunks, key=lambda held: -held.chunk.nbytes):
            if nbytes < _COLD:
                chosen.append(held)
                nbytes += held.chunk.nbytes
        pushes = [PushId(worker, 0, 1) for worker in range(_PUSHES)]
        for held in chosen:
            for push in pushes:
                held.staged[push] = StagedPush(
                    *(frozenset({push.worker}), torch.ones_like(held.weights), 1.0, 1.0),
                    *(frozenset(), None),
                )
        adding = _usual(lambda: [held.reduce(pushes) for held in chosen])
        checking = _usual(lambda: [held.squares() for held in chosen])
        for held in chosen:
            held.discard()
        return adding / (_PUSHES * nbytes), checking / nbytes


@contextmanager
def _own_main() -> Iterator[None]:
    """Put the program's own main module and arguments back, which a script replaces by its own."""
    main, arguments = sys.modules["__main__"], sys.argv
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv = main, arguments


def _usual(act: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Return the median processor time of this thread for a call, when caches hold other things, as after a pass."""
    elsewhere = torch.zeros(_ELSEWHERE)
    act()
    times = []
    for _ in range(repeats):
        elsewhere.add_(1.0)
        began = time.thread_time()
        act()
        times.append(time.thread_time() - began)
    return statistics.median(times)


def measure_codec(codec: Codec) -> CodecCosts:
    """Return the cost of packing and unpacking, for each byte of float32, on chunks of random numbers.

    There are as many chunks as processors' caches do not hold: in training each comes from memory, too.
    """
    shape = (512, _ELEMENTS // 512)
    layout = ParameterLayout.plan(
        [(f"values {number}", shape, torch.float32, True) for number in range(_CHUNKS)],
        chunk_bytes=4 * _ELEMENTS,
    )
    chunks = layout.chunks
    if codec.size(layout, chunks[0]) is None:
        return CodecCosts()
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(_ELEMENTS, generator=generator) for _ in chunks]
    compressor = GradientCompressor(layout, codec, [True] * len(chunks))

    def pack() -> list[torch.Tensor]:
        compressor.begin()
        packed = [
            compressor.pack(chunk.index, gradient.view(torch.uint8), 1.0, 1.0, frozenset())
            for chunk, gradient in zip(chunks, gradients, strict=True)
        ]
        compressor.commit()
        return packed

    pack()
    packed = pack()  # what the first has left out is added to the second

    def add() -> None:
        for chunk, payload, out in zip(chunks, packed, gradients, strict=True):
            if codec.elements is not None:
                out.add_(payload.view(codec.elements))
            else:
                codec.add(layout, chunk, [(payload, 0.5)], out)

    nbytes = sum(chunk.nbytes for chunk in chunks)
    return CodecCosts(_usual(pack) / nbytes, _usual(add) / nbytes)


class _PushSink:
    """A role that takes pushes."""

    def __init__(self) -> None:
        self.memory, self.count = torch.empty(_LARGE, dtype=torch.uint8), 0
        self.taken = threading.Event()  # a push

    def destination(self, message: Message, size: int) -> torch.Tensor:
        """Return the same memory for each payload."""
        return self.memory[:size]

    def handle(self, source: Peer, message: Message) -> None:
        """Count a message."""
        self.count += 1
        self.taken.set()

    def lost(self, peer: Peer, reason: str) -> None:
        """Do nothing."""

    def tick(self, now: float) -> None:
        """Do nothing."""

    def doing(self) -> Status:
        """Return nothing."""
        return Status()


def measure_transport() -> dict[str, float]:
    """Return the cost of messages over TCP inside this host: what `Costs` has of them, by its names.

    Processor time of the sending and of the receiving thread, so that a busy machine changes it little; "wake" is
    what a message by itself takes by the clock beyond that.
    """
    here, there, token = Router(), Router(), secrets.token_bytes(32)
    ends = Peer("worker", 0), Peer("server", 0)
    sink = _PushSink()
    there.host(ends[1], sink)
    try:
        for peer, router in zip(ends, (here, there), strict=True):
            router.use(
                WireTransport(token, (peer,), f"plan {peer.role}", router.destination, "tcp")
            )
            router.start(f"plan {peer.role}")
        assert isinstance(here.transport, WireTransport)
        assert isinstance(there.transport, WireTransport)
        address = there.call(partial(there.transport.listen, "127.0.0.1")).result(_SECONDS)
        here.attach(here.transport.connect(address))
        payload = torch.zeros(_LARGE, dtype=torch.uint8)
        both = _processor_seconds(here, there, sink, None, _MESSAGES)
        large = _processor_seconds(here, there, sink, payload, _REPEATS * 2)
        sent, received = (max(seconds, 0.0) / (_REPEATS * 2 * _LARGE) for seconds in large)
        message = sum(both) / 2 / _MESSAGES
        clock, processor = _alone(here, there, sink)
        return {
            "message": message,
            "alone": max(processor / 2 - message, 0.0),
            "wake": max(clock - processor, 0.0),
            "sent": sent,
            "received": received,
        }
    finally:
        for router in (here, there):
            router.stop()


def _alone(here: Router, there: Router, sink: _PushSink) -> tuple[float, float]:
    """Return the time by the clock, and that of both threads' processors, of a message by itself.

    Caches hold other things, and the receiver sleeps.
    """
    elsewhere, send = torch.zeros(_ELSEWHERE), here.sender(Peer("worker", 0))
    push = Push(1, 0, 1, 0, 0, 1.0, 1.0)

    def empty() -> None:
        sink.taken.set()

    def spent(act: Callable[[], None]) -> tuple[float, float]:
        began = [router.call(time.thread_time).result(_SECONDS) for router in (here, there)]
        clocks = []
        for _ in range(_ALONE):
            elsewhere.add_(1.0)
            sink.taken.clear()
            sent = time.perf_counter()
            here.call(act).result(_SECONDS)
            if not sink.taken.wait(_SECONDS):
                raise SteepestError("a message inside this host did not arrive in time")
            clocks.append(time.perf_counter() - sent)
        ended = [router.call(time.thread_time).result(_SECONDS) for router in (here, there)]
        return statistics.median(clocks), (sum(ended) - sum(began)) / _ALONE

    message, nothing = spent(lambda: send(Peer("server", 0), push.pack())), spent(empty)
    return message[0] - nothing[0], message[1] - nothing[1]


def _processor_seconds(
    here: Router, there: Router, sink: _PushSink, payload: torch.Tensor | None, count: int
) -> tuple[float, float]:
    """Return the processor time of both threads for a number of messages."""
    until, before = system().now() + _SECONDS, sink.count
    began = [router.call(time.thread_time).result(_SECONDS) for router in (here, there)]
    send = here.sender(Peer("worker", 0))

    def push() -> None:
        for sequence in range(1, count + 1):
            send(Peer("server", 0), Push(1, 0, sequence, 0, 0, 1.0, 1.0).pack(payload))

    here.call(push).result(_SECONDS)
    while sink.count < before + count:
        if system().now() > until:
            raise SteepestError("messages inside this host did not arrive in time")
        there.call(lambda: None).result(_SECONDS)
    ended = [router.call(time.thread_time).result(_SECONDS) for router in (here, there)]
    return ended[0] - began[0], ended[1] - began[1]
