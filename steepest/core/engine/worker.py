"""A worker: computes gradients of its samples, pushes them and takes new weights, step by step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from steepest.core.engine.auditing import Auditor
from steepest.core.engine.exchange import Exchange
from steepest.core.engine.generators import about_to_change
from steepest.core.engine.incoming_weights import Key
from steepest.core.engine.replicas import Replicas, WorkerResult
from steepest.core.engine.spans import RoleSpans, SpanKind
from steepest.core.engine.step_waits import (
    AbandonedError,
    BetweenTurns,
    PausedError,
    StepAhead,
    StepWaits,
    WaitingCall,
    WaitingCalls,
    into_future,
)
from steepest.core.messages.audits import Audited
from steepest.core.messages.gradients import Report, Weights
from steepest.core.messages.membership import Failed, Grant, Join, Lease, Members
from steepest.core.messages.message import COORDINATOR, Kind, Message, Peer, Send
from steepest.core.protocol.worker_steps import Step, WorkerSteps
from steepest.core.status import Status
from steepest.core.tensors.memory import Memory
from steepest.errors import (
    MessageTooLargeError,
    ModelError,
    PeerLostError,
    describe_error,
    listed,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
_MOST_METRICS = 10_000  # all workers' fit into one message


@dataclass(frozen=True)
class _PushedShare:
    """A pushed gradient of a step. The replicas' next gradient overwrites its chunks."""

    step: Step
    result: WorkerResult
    # the arguments of each call of `ChunkReady`
    pushes: list[tuple[int, torch.Tensor, float, float, frozenset[int]]]
    more: Sequence[Any]  # see `Exchange.logged`
    audit: Audited | None  # None of steps that are not audited


@dataclass
class _LastPush:
    """The last push of a worker; before the first, of none."""

    at: float = 0.0  # when its report was sent, in seconds
    # seconds from then to the weights that followed, or to a step ahead of them
    waited: float = 0.0
    gradient: _PushedShare | None = None  # as long as it may have to be pushed again


@dataclass(slots=True)
class _Doing:
    """The work of a worker.

    Attributes:
        what: "step", "call" (of functions between two steps) or "load" (a batch ahead of time); "" for none.
        since: when it began, in seconds; for none, when the last began.
        share: of the samples, of a step or a batch.
        is_busy: whether messages wait for its end: it is a step, or such functions.
    """

    since: float
    what: Literal["step", "call", "load", ""] = ""
    share: int | None = None
    is_busy: bool = False


class Worker:
    """A worker's role: the training loop as a state machine over messages.

    It computes inside `handle`, when a message brings what was missing for a step: a grant or lease
    of the coordinator, or the last chunk of new weights. Used on the router's thread.

    Args:
        index: of the worker.
        replicas: its copies of the model.
        exchange: pushes its gradients and receives weights.
        send: sends as the worker.
        members: number of workers, each of which has one share of a granted step.
        incarnation: number of this life of the worker, from 0.
        between: has the process' router move bytes during a step.
        auditor: computes another worker's samples in some steps; None if no step is audited.
    """

    def __init__(
        self,
        index: int,
        replicas: Replicas,
        exchange: Exchange,
        send: Send,
        *,
        members: int = 1,
        incarnation: int = 0,
        between: BetweenTurns,
        auditor: Auditor | None = None,
    ) -> None:
        self._steps = WorkerSteps(index, members, leases=replicas.leases_samples)
        self._replicas = replicas
        self._exchange = exchange
        self._send = send
        self._incarnation = incarnation
        self._between = between
        self._auditor = auditor
        self._deferred: list[tuple[Peer, Message]] = []  # messages that came amid the present step
        self._calls = WaitingCalls()
        self._waits = StepWaits(between, self._a_call_waits)
        self._doing = _Doing(self._waits.now())
        self._last = _LastPush()
        self._failed: Failed | None = None  # the error that it reported last
        self._stopped = False  # whether it takes no more steps
        self._spans: RoleSpans | None = None
        replicas.waits = self._waits.in_share if replicas.delays else None
        exchange.begin_life(incarnation, self._waits.until)

    @property
    def generation(self) -> int:
        """The newest generation that the worker has begun."""
        return self._steps.generation

    @property
    def version(self) -> int:
        """The version of the weights that are here whole; -1 for none."""
        return self._steps.version

    @property
    def computing(self) -> int | None:
        """The share that is computed, or whose batch is loaded; None between two steps."""
        return self._doing.share

    def record(self, spans: RoleSpans | None) -> None:
        """Record what the worker does, see `RecordsSpans`."""
        self._spans = self._waits.spans = self._replicas.spans = spans

    @property
    def newest_generation(self) -> int:
        """The newest generation that a message has named, handled or deferred to a step's end."""
        deferred = (m.body for _, m in self._deferred)
        news = (body.generation for body in deferred if isinstance(body, Members))
        return max([self.generation, *news])

    def raised_before(self, generation: int) -> str | None:
        """Return the error with which the worker failed in the generation before `generation`.

        "" if it did not fail, and None while its computation may still fail. It may be called within a step.
        """
        computes = self.computing is not None and self.generation < generation
        failed = self._failed
        if failed is not None and failed.generation == generation - 1:
            return failed.error
        return None if computes else ""

    def join(self) -> None:
        """Send the coordinator JOIN: this worker is ready for a generation."""
        self._send(COORDINATOR, Join(self._incarnation).pack())

    def at_version(
        self, generation: int, version: int, function: Callable[[Replicas], T]
    ) -> Future[T]:
        """Run a function on the replicas as soon as they hold the weights of a version.

        It runs on the router's thread, between two steps.

        Args:
            generation: the least that must have begun.
            version: the least that must be here.
            function: called once.

        Returns:
            A future of the function's result or exception; fails with `PeerLostError` if a server
            or the coordinator is lost before.
        """
        future: Future[T] = Future()
        run = into_future(partial(function, self._replicas), future)
        self._await(WaitingCall(generation, version, run, future.set_exception))
        return future

    def exactly_at(
        self, generation: int, version: int, function: Callable[[Replicas], T]
    ) -> Future[T | None]:
        """Run a function on the replicas after the step that made a version, before the next one.

        The replicas' own state, such as buffers, is then that of this version; some of its weights
        may not be here yet. One such call waits at a time.

        Args:
            generation: the least that must have begun.
            version: any.
            function: called at most once.

        Returns:
            A future like that of `at_version`; its result is None if a step was begun from that
            version already, or another such call has replaced this one.
        """
        future: Future[T | None] = Future()
        run = into_future(partial(function, self._replicas), future)
        fail, miss = future.set_exception, partial(future.set_result, None)
        self._await(WaitingCall(generation, version, run, fail, miss))
        return future

    def _is_past(self, version: int) -> bool:
        """Return whether a step was begun from a version, or from a later one."""
        begun, gradient = self._steps.pushed, self._last.gradient
        return (
            self.version > version
            or (begun[0] == self.generation and begun[1] >= version)
            or (gradient is not None and gradient.step.version >= version)
        )

    def _await(self, call: WaitingCall) -> None:
        self._calls.add(call)
        if self._run_calls():  # weights may have come while a function waited for the exchange
            self._go_on()
            self._take_deferred()
        if self._waits.failure is not None and not self._stopped:
            self._calls.fail(self._waits.failure)

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> Memory | None:
        """Return the memory for an arriving payload, see `Exchange.destination`."""
        return self._exchange.destination(message, size)

    def handle(self, source: Peer, message: Message) -> None:
        """Act on one message, then take steps as long as nothing is missing for the next one.

        In the middle of a step only messages of the exchange are taken; others are deferred to its end.

        Raises:
            ProtocolError: a worker takes no such message.
        """
        if self._doing.is_busy and not self._is_taken_within_steps(message):
            self._deferred.append((source, message))
            self._waits.superseded |= (
                message.kind is Kind.MEMBERS and message.body.generation > self.generation
            )
            return
        self._take(source, message)
        if self._doing.is_busy:
            return
        self._go_on()
        self._take_deferred()

    def _is_taken_within_steps(self, message: Message) -> bool:
        """Return whether a message is acted on in the middle of a step."""
        ahead = self._waits.ahead is not None and self._replicas.leases_samples
        if message.kind is Kind.LEASE:
            return ahead and message.body.generation == self._steps.generation
        return message.kind in self._exchange.kinds

    def _take_deferred(self) -> None:
        """Act on the messages that came in the middle of a step."""
        while self._deferred and not self._doing.is_busy:
            self._take(*self._deferred.pop(0))
            self._go_on()

    def _take(self, source: Peer, message: Message) -> None:
        """Note what a message brings, without taking a step."""
        match message.kind:
            case Kind.GRANT:
                grant: Grant = message.body
                if self._steps.take_grant(grant):
                    self._replicas.rates = grant.rates
            case Kind.LEASE:
                self._take_lease(message.body)
            case Kind.MEMBERS:
                self._begin_generation(message.body)
            case _:
                complete, skipped = self._exchange.receive(source, message)
                if skipped is not None:
                    self._note_decision(skipped)
                if message.kind is Kind.WEIGHTS and (spans := self._spans) is not None:
                    weights: Weights = message.body
                    spans.add(SpanKind.PULL, spans.now(), -1, weights.version, weights.chunk)
                if complete is not None:
                    self._steps.note_weights(complete)
                    self._take_version()

    def _note_decision(self, skipped: bool) -> None:
        """Tell the parts that keep state of the last push whether it was left out of the new weights."""
        if self._auditor is not None:
            self._auditor.forget()
        if skipped:
            self._exchange.left_out()
            self._replicas.left_out()
        else:
            self._exchange.committed(self._exchange.sequence)
            self._replicas.decided(counts=True)

    def _begin_generation(self, begun: Members) -> None:
        """Begin a generation: earlier grants are void, and so are the weights if they are sent anew."""
        if not self._steps.begin_generation(begun):
            return
        self._exchange.begin_generation()
        if begun.install and self._auditor is not None:
            self._auditor.forget()
        if not begun.again:  # weights or models may have changed
            self._last.gradient = None
        if begun.reload:
            self._take_version()
        self._run_calls()

    def _go_on(self) -> None:
        """Take a step if one is granted and its weights are here or on their way; take it again if it has paused."""
        before = self._steps.pushed
        while self._go_once() and not self._deferred:
            pass
        if self._steps.pushed != before and self._step_ahead() is not None:
            self._between.when_idle(self._go_ahead)

    def _go_ahead(self) -> None:
        """Begin a step whose weights are not here yet, after handling the messages that are."""
        if not self._doing.is_busy:
            self._go_on()
            self._take_deferred()

    def _go_once(self) -> bool:
        """Take a step if there is one; return whether it has paused."""
        if self._stopped:
            return False
        step = self._steps.next() or self._step_ahead()
        return step is not None and self._step(step)

    def _step_ahead(self) -> Step | None:
        """Return the step that may begin before its weights are here: its strategy has a delay, and nothing waits."""
        if self._replicas.waits is None:
            return None
        step = self._steps.next_ahead()
        if step is None or self._replicas.leases_samples:
            return None if self._calls.are_exact else step
        # a copy of its state is as of a version that is here
        if self._replicas.meets_before(step.version) or self._calls.waits_before(step.version):
            return None
        return step

    def _ahead_of(self, step: Step) -> StepAhead:
        """Return what a step waits for that begins before its weights, or its lease, are here."""
        if self._replicas.leases_samples:
            has_lease = partial(self._steps.has_lease, step.share)
            return StepAhead(-1, has_lease, self._begin_leased)
        return StepAhead(step.version, lambda: self.version >= step.version, self._begin_to_push)

    def _begin_leased(self) -> None:
        """Begin the push of a share whose lease has come in the middle of its step."""
        self._steps.begin_leased()
        self._begin_to_push()

    def give_up(self) -> Future[None]:
        """Take no more steps, and abandon the present one if it waits for weights; return a future of its end."""
        self._stopped = True
        self._waits.superseded = True
        return self.at_version(0, -1, lambda replicas: None)

    def leave(self) -> None:
        """Fail all calls that wait: the worker has no role any more."""
        error = PeerLostError(f"worker {self._replicas.worker} gets another role")
        self._calls.fail(error, least_version=-1)
        self._exchange.begin_generation()

    def lost(self, peer: Peer, reason: str) -> None:
        """Fail the calls that wait for weights, if the coordinator or a server is lost.

        The driver hears of the loss from other processes, or from Ray.
        """
        if peer.role in ("coordinator", "server"):
            self._waits.failure = PeerLostError(
                f"worker {self._replicas.worker}: {peer} is gone ({reason})"
            )
            self._calls.fail(self._waits.failure)

    def tick(self, now: float) -> None:
        """Do nothing: the coordinator has each step's deadline."""

    def doing(self) -> Status:
        """Return what the worker computes or waits for, see `Role.doing`."""
        doing, last, steps, ahead = self._doing, self._last, self._steps, self._waits.ahead
        since = doing.since
        if doing.what == "call":
            text = "runs a function between two steps"
        elif doing.what == "load":
            text = f"loads the first batch of share {doing.share}"
        elif doing.what == "step":
            text = f"computes share {doing.share} from the weights of version {steps.pushed[1]}"
            text += self._to_come(None if ahead is None else (steps.generation, ahead.version))
        elif self._stopped:
            text = f"has version {steps.version}, and takes no more steps"
        elif steps.version < steps.floor or steps.pushed == (steps.generation, steps.version):
            wanted = max(steps.floor, steps.version + 1)
            text = f"waits for the weights of version {wanted}"
            text += self._to_come((steps.generation, wanted))
            since = last.at or since
        else:
            text = f"has version {steps.version}, and waits to be granted a step"
            since = last.at + last.waited if last.at else since
        return Status(text, self._waits.now() - since)

    def _to_come(self, key: Key | None) -> str:
        """Return in words which weights of a version, and what else, have not come; "" for nothing."""
        lacking = listed(self._exchange.lacks(key))
        return f" (still to come: {lacking})" if lacking else ""

    # -- steps ---------------------------------------------------------------------------------

    def _take_lease(self, lease: Lease) -> None:
        """Take a share of the samples for the next step, unless the message is old or a copy."""
        if self._steps.take_lease(lease):
            self._replicas.turn = lease.turn
            self._exchange.committed(lease.committed)
            counts = lease.committed == self._exchange.sequence
            again = self._steps.pushed[0] != self.generation
            self._replicas.decided(counts=counts, again=again)

    def _take_version(self) -> None:
        """Use the newest version whose weights are all here."""
        if not self._steps.take_version():
            return
        last, steps = self._last, self._steps
        if not self._doing.is_busy:
            last.waited = self._waits.now() - last.at if last.at else 0.0
        self._replicas.weights_changed()
        if not self._doing.is_busy and (self._stopped or steps.version >= steps.limit):
            self._replicas.go_on(steps.version)  # else a step follows, in which they go on
        self._run_calls()

    def _run_calls(self, begins: int = -1) -> bool:
        """Run the calls whose version is here, unless a step is computed; return whether any ran.

        Args:
            begins: the version from which a step is about to begin, or -1.
        """
        if self._doing.is_busy:
            return False
        ready = self._calls.take_ready(self._steps.generation, self._steps.version, begins)
        if not ready:
            return False
        # such a function may wait for what its models need, and no step begins meanwhile
        doing = self._doing
        doing.what, doing.since, doing.is_busy = "call", self._waits.now(), True
        self._waits.begin(calling=True)
        self._waits.superseded = self._stopped
        self._exchange.stand_at(self._steps.generation, self._steps.version)
        try:
            about_to_change()
            self._replicas.go_on(self.version)
            for call in ready:
                missed = call.miss is not None and self._is_past(call.version)
                call.miss() if call.miss is not None and missed else call.run()
        finally:
            doing.what, doing.is_busy = "", False
            if self._spans is not None:
                self._spans.add(SpanKind.CALL, doing.since, -1, self.version)
        self._replicas.forget_writes()
        if self._waits.defect is not None:
            raise self._waits.defect
        self._run_calls(begins)  # those that came while these waited
        return True

    def _step(self, step: Step) -> bool:
        """Take a step: compute and push its share, then run calls that waited; return whether it has paused."""
        if self._calls.are_exact:
            self._run_calls(step.version)
        last, spans = self._last, self._spans
        if step.is_ahead:
            leased = self._replicas.leases_samples
            last.waited = 0.0 if leased else self._waits.now() - last.at
        doing, began = self._doing, self._waits.now()
        doing.what, doing.since, doing.share, doing.is_busy = "step", began, step.share, True
        self._waits.begin(calling=False)
        self._waits.ahead = self._ahead_of(step) if step.is_ahead else None
        if last.at and spans is not None:
            spans.add(SpanKind.WAIT, last.at, step.share, step.version, ended=began)
        try:
            paused = self._compute(step)
        finally:
            if spans is not None:
                ended = last.at if last.at > began else None
                spans.add(SpanKind.COMPUTE, began, step.share, step.version, ended=ended)
            doing.what, doing.share, doing.is_busy, self._waits.ahead = "", None, False, None
        self._run_calls()
        return paused

    def _compute(self, step: Step) -> bool:
        """Compute and push the gradient of a step, then send REPORT, or FAILED with the error; return if it paused."""
        self._steps.begin(step)
        self._replicas.leased_shares = step.count
        if not step.is_ahead:  # else the last push may still have to be repeated
            self._begin_to_push()
        if self._replicas.may_take_back:
            self._exchange.hold_back()
        self._between.finish()
        try:
            result = self._compute_once(step)
            self._replicas.refuse_writes()
            self._replicas.require_norm()
            if len(result.metrics) > _MOST_METRICS:
                raise ModelError(
                    f"it has {len(result.metrics)} metrics, at most {_MOST_METRICS} fit: leave "
                    "some out"
                )
        except BaseException as error:  # noqa: BLE001 - the user's code may call sys.exit()
            if self._waits.defect is None:
                self._replicas.forget_writes()
                self._last.gradient = None
                if isinstance(error, PausedError):
                    self._steps.pause()
                    return True
                if not isinstance(error, AbandonedError):
                    self._replicas.batches.skip()
                self._fail(error)
                return False
        if self._waits.defect is not None:
            raise self._waits.defect
        try:
            self._send(COORDINATOR, self._report(result).pack())
        except MessageTooLargeError as error:
            self._fail(error)
            return False
        self._last.at = self._waits.now()
        self._between.pump()
        self._replicas.look_ahead(step.share)
        if step.version + 1 < self._steps.limit:
            self._between.when_idle(partial(self._load_next, step.version + 1))
        return False

    def wait_within(self, has_come: Callable[[], bool]) -> None:
        """Receive messages in the middle of a step, or of a function between two steps, until `has_come` returns True.

        If a call waits for the step's end, an exception goes through the model, and the step is taken again later.
        """
        self._waits.until(has_come, "what other workers gather was not sent", pauses=True)

    def _a_call_waits(self) -> bool:
        """Return whether a call waits only for the present step's end."""
        return self._calls.has_ready(self.generation, self.version)

    def _begin_to_push(self) -> None:
        """Begin the push of a gradient; the weights that it is computed from are here."""
        generation, version = self._steps.pushed
        is_last = version + 1 >= self._steps.limit
        self._exchange.begin(generation, version, self._incarnation, is_last=is_last)

    def _load_next(self, version: int) -> None:
        """Load the next step's first batch, while the weights of its version are awaited."""
        share = self._steps.follows(version)
        if share is None or self._doing.is_busy or self._stopped:
            return
        doing = self._doing
        doing.what, doing.since, doing.share = "load", self._waits.now(), share
        self._replicas.load_ahead(share)
        if self._spans is not None:
            self._spans.add(SpanKind.LOAD, doing.since, share, version)
        doing.what, doing.share = "", None

    def _report(self, result: WorkerResult) -> Report:
        """Return the report of the gradient that has been sent."""
        sent, gradient = self._exchange.end(), self._last.gradient
        stats: dict[str, Any] = {}
        if self._steps.stats:
            waited = self._last.waited + self._waits.seconds - self._replicas.batches.seconds_ahead
            timings = {**result.timings, "wait": max(waited, 0.0)}
            stats = {"loss": result.loss, "metrics": result.metrics, "timings": timings}
            stats["weights"] = dict(result.weights)
        said = self._replicas.said
        return Report(
            *(
                self.generation,
                self._incarnation,
                sent.sequence,
                self._steps.pushed[1],
                result.weight,
                result.samples,
                sent.bytes_pushed,
                sent.bytes_pulled,
            ),
            **stats,
            fragment=self._replicas.fragment,
            more=None if gradient is None else gradient.more or None,
            hyper=said["hyper"],
            clip=said["clip"],
            digest=said["digest"],
            notes=said["notes"],
            overflowed=said["overflowed"],
            audit=None if gradient is None else gradient.audit,
        )

    def _compute_once(self, step: Step) -> WorkerResult:
        """Push the gradient of a step; one that was computed from the same weights is pushed again."""
        done, self._last.gradient = self._last.gradient, None
        if done is None or (done.step.share, done.step.version) != (step.share, step.version):
            pushes: list[Any] = []
            # before the worker's own share, whose gradient stays where servers read it
            audit = None if self._auditor is None else self._auditor.begin(step.version)

            def push(*chunk: Any) -> None:
                pushes.append(chunk)
                if audit is not None:
                    audit.own.add(*chunk)
                self._push(*chunk)

            def take_back() -> None:
                pushes.clear()
                self._exchange.take_back()

            self._replicas.take_back = take_back
            self._replicas.watch = None if audit is None else audit.own.add_batch
            result = self._replicas.compute(step.share, push, self._steps.stats)
            self._replicas.take_back = self._replicas.watch = None
            audited = None
            if audit is not None:
                audited, result.timings["audit"] = audit.result(), audit.seconds
            # a worker without samples in this step has waited, and computed nothing
            result.timings["compute"] = max(result.timings["compute"] - self._waits.seconds, 0.0)
            more = self._exchange.logged()
            if step.is_ahead:  # its lease has said the version
                step = replace(step, version=self._steps.pushed[1])
            done = _PushedShare(step, result, pushes, more, audited)
        else:
            self._waits.arrive()
            for chunk in done.pushes:
                self._push(*chunk)
        self._last.gradient = done
        return done.result

    def _push(
        self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> None:
        """Push a complete chunk, and let bytes move, except after the last one, which leaves with the report."""
        with self._waits.own_work():
            spans = self._spans
            began = 0.0 if spans is None else spans.now()
            if self._exchange.ready(chunk, payload, unit, total, absent):
                self._between.pump()
            if spans is not None:
                version = self._steps.pushed[1]
                spans.add(SpanKind.PUSH, began, self._exchange.sequence, version, chunk)

    def _fail(self, error: BaseException) -> None:
        """Send the coordinator FAILED with an error of the user's code, unless it was abandoned."""
        version = self._steps.pushed[1]
        if isinstance(error, AbandonedError):
            log.debug("worker %d: step at version %d abandoned", self._replicas.worker, version)
            return
        self._failed = Failed(self.generation, self._incarnation, version, **describe_error(error))
        self._send(COORDINATOR, self._failed.pack())
