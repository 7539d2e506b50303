"""A worker: computes gradients of its samples, pushes them and takes new weights, step by step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from steepest.core.engine.auditing import Auditor
from steepest.core.engine.exchange import Exchange
from steepest.core.engine.generators import about_to_change
from steepest.core.engine.incoming_weights import Key
from steepest.core.engine.replicas import Replicas, WorkerResult
from steepest.core.engine.spans import RoleSpans, SpanKind
from steepest.core.engine.step_waits import (
    AbandonedError,
    Ahead,
    BetweenTurns,
    PausedError,
    StepWaits,
)
from steepest.core.engine.waiting_calls import WaitingCall, WaitingCalls, into_future
from steepest.core.messages.audits import Audited
from steepest.core.messages.gradients import Report
from steepest.core.messages.membership import Failed, Grant, Join, Lease, Members
from steepest.core.messages.message import COORDINATOR, Kind, Message, Peer, Send
from steepest.core.status import Status
from steepest.core.system import system
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
    """A pushed gradient of a share, computed from `version`. The replicas' next gradient overwrites its chunks."""

    share: int
    version: int
    result: WorkerResult
    # the arguments of each call of `ChunkReady`
    pushes: list[tuple[int, torch.Tensor, float, float, frozenset[int]]]
    more: Sequence[Any]  # see `Exchange.logged`
    audit: Audited | None  # None of steps that are not audited


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
        self.version = -1  # of the weights that are here whole; -1 for none
        self.generation = 0  # the newest one that the worker has begun
        # number of the share that is computed, or whose batch is loaded; None between two steps
        self.computing: int | None = None
        self._index = index
        self._replicas = replicas
        self._exchange = exchange
        self._send = send
        self._members = members
        self._incarnation = incarnation
        self._between = between
        self._auditor = auditor
        # `_is_ahead`: whether `_go_ahead` is to be called
        self._stepping = self._stopped = self._paused = self._is_ahead = False
        self._deferred: list[tuple[Peer, Message]] = []  # messages that came amid the present step
        self._calls = WaitingCalls()
        self._waits = StepWaits(between, self._a_call_waits)
        replicas.waits = self._waits.in_share if replicas.delays else None
        exchange.begin_life(incarnation, self._waits.until)
        self._reported = 0  # bytes of weights in the reports so far
        self._limit = -1  # the version up to which steps are granted
        # the shares of a lease, and the version to compute from
        self._lease: tuple[range, int] | None = None
        # the lease that is being computed, unless it came in the middle of its step
        self._begun: tuple[range, int] | None = None
        self._ahead = range(0)  # the shares that will be leased next
        self._stats = True
        self._baseline = 0  # generation since which arriving weights count
        self._floor = 0  # version at which the generation began: weights before it are out of date
        self._complete = (0, -1)
        self._pushed = (0, -1)  # generation and version of the last push
        # the last gradient, as long as it may have to be pushed again
        self._computed: _PushedShare | None = None
        self._granted = (0, -1)  # generation and version of the last lease
        self._now = system().now
        self._since = self._now()  # when the last step or call began, or the role did
        self._waited = 0.0  # seconds between the last report and the weights that followed it
        self._pushed_at = 0.0
        self._spans: RoleSpans | None = None
        self._raised = (-1, "")  # the generation in which it last failed, and the error

    def record(self, spans: RoleSpans | None) -> None:
        """Record what the worker does, see `RecordsSpans`."""
        self._spans = self._waits.spans = self._replicas.spans = spans

    @property
    def newest_generation(self) -> int:
        """The newest generation that a message has named, handled or deferred to a step's end."""
        return max(
            [self.generation, *(m.generation for _, m in self._deferred if m.kind is Kind.MEMBERS)]
        )

    def raised_before(self, generation: int) -> str | None:
        """Return the error with which the worker failed in the generation before `generation`.

        "" if it did not fail, and None while its computation may still fail. It may be called within a step.
        """
        computes = self.computing is not None and self.generation < generation
        own, error = self._raised
        if own == generation - 1:
            return error
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
        begun, computed = self._pushed, self._computed
        return (
            self.version > version
            or (begun[0] == self.generation and begun[1] >= version)
            or (computed is not None and computed.version >= version)
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
        if self._stepping and not self._is_taken_within_steps(message):
            self._deferred.append((source, message))
            self._waits.superseded |= (
                message.kind is Kind.MEMBERS and message.generation > self.generation
            )
            return
        self._take(source, message)
        if self._stepping:
            return
        self._go_on()
        self._take_deferred()

    def _is_taken_within_steps(self, message: Message) -> bool:
        """Return whether a message is acted on in the middle of a step."""
        ahead = self._waits.ahead is not None and self._replicas.leases_samples
        of_step = ahead and message.generation == self.generation
        return message.kind in self._exchange.kinds or (message.kind is Kind.LEASE and of_step)

    def _take_deferred(self) -> None:
        """Act on the messages that came in the middle of a step."""
        while self._deferred and not self._stepping:
            self._take(*self._deferred.pop(0))
            self._go_on()

    def _take(self, source: Peer, message: Message) -> None:
        """Note what a message brings, without taking a step."""
        match message.kind:
            case Kind.GRANT:
                self._take_grant(Grant.unpack(message))
            case Kind.LEASE:
                self._take_lease(Lease.unpack(message))
            case Kind.MEMBERS:
                self._begin_generation(Members.unpack(message))
            case _:
                complete, skipped = self._exchange.receive(source, message)
                if skipped is not None:
                    self._note_decision(skipped)
                if self._spans is not None and message.kind is Kind.WEIGHTS:
                    self._spans.add(SpanKind.PULL, self._now(), -1, message.version, message.chunk)
                if complete is not None:
                    self._complete = max(self._complete, complete)
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
        if begun.generation <= self.generation:
            return  # a copy
        self.generation = begun.generation
        self._limit = self._floor = begun.version
        self._lease = self._begun = None
        self._ahead = range(0)
        self._exchange.begin_generation()
        if begun.install and self._auditor is not None:
            self._auditor.forget()
        if not begun.again:  # weights or models may have changed
            self._computed = None
        if begun.reload:
            self._baseline = begun.generation
            self.version = -1
            self._take_version()
        self._run_calls()

    def _go_on(self) -> None:
        """Take a step if one is granted and its weights are here or on their way; take it again if it has paused."""
        before = self._pushed
        while True:
            self._paused = False
            self._go_once()
            if not self._paused or self._deferred:
                break
        if self._pushed != before and not self._is_ahead and self._may_go_ahead():
            self._is_ahead = True
            self._between.when_idle(self._go_ahead)

    def _go_ahead(self) -> None:
        """Begin a step whose weights are not here yet, after handling the messages that are."""
        self._is_ahead = False
        if not self._stepping:
            self._go_on()
            self._take_deferred()

    def _go_once(self) -> None:
        if self._stopped:
            return
        if self._floor <= self.version and self._complete[0] <= self.generation:
            share = self._next_share(self.version)
            if share is not None:
                self._step(share, self.version)
            elif self._may_go_ahead() and self._replicas.leases_samples:
                self._step_before_lease()
            elif self._may_go_ahead():
                self._step_before_weights(self.version + 1)

    def _step_before_weights(self, version: int) -> None:
        """Begin the step from a version, if it is granted, before the weights are here."""
        if (share := self._next_share(version)) is not None:
            self._waits.ahead = Ahead(
                version, lambda: self.version >= version, partial(self._begin_to_push, version)
            )
            self._waited = self._now() - self._pushed_at
            self._step(share, version)

    def _step_before_lease(self) -> None:
        """Begin the next leased share before its lease, or the weights that the lease names, are here."""
        shares = self._ahead if self._lease is None else self._lease[0]
        self._begun = None
        self._ahead = range(0) if self._lease is None else self._ahead
        self._replicas.leased_shares = len(shares)
        self._waited = 0.0
        self._waits.ahead = Ahead(-1, partial(self._has_lease, shares[0]), self._begin_leased)
        self._step(shares[0], self.version)

    def _has_lease(self, share: int) -> bool:
        """Return whether a share is leased, and the weights that it is computed from are here."""
        lease = self._lease
        return lease is not None and lease[0][0] == share and self.version >= lease[1]

    def _begin_leased(self) -> None:
        """Begin the push of a share whose lease has come in the middle of its step."""
        assert self._lease is not None
        (_, version), self._lease, self._begun = self._lease, None, None
        self._pushed = (self.generation, version)
        self._exchange.begin(self.generation, version, self._incarnation, is_last=True)

    def _may_go_ahead(self) -> bool:
        """Return whether a step may begin before its weights are here: its strategy has a delay, and nothing waits."""
        if self._replicas.waits is None:
            return False
        if self._replicas.leases_samples:
            comes = self._lease is not None or len(self._ahead) > 0
            has_pushed = self._pushed[0] == self.generation and self._pushed[1] >= 0
            return comes and has_pushed and not self._calls.are_exact
        if self._pushed != (self.generation, self.version):
            return False
        # a copy of its state is as of a version that is here
        meets = self._replicas.meets_before(self.version + 1)
        return not meets and not self._calls.waits_before(self.version + 1)

    def give_up(self) -> Future[None]:
        """Take no more steps, and abandon the present one if it waits for weights; return a future of its end."""
        self._stopped = True
        self._waits.superseded = True
        return self.at_version(0, -1, lambda replicas: None)

    def leave(self) -> None:
        """Fail all calls that wait: the worker has no role any more."""
        error = PeerLostError(f"worker {self._index} gets another role")
        self._calls.fail(error, least_version=-1)
        self._exchange.begin_generation()

    def lost(self, peer: Peer, reason: str) -> None:
        """Fail the calls that wait for weights, if the coordinator or a server is lost.

        The driver hears of the loss from other processes, or from Ray.
        """
        if peer.role in ("coordinator", "server"):
            self._waits.failure = PeerLostError(f"worker {self._index}: {peer} is gone ({reason})")
            self._calls.fail(self._waits.failure)

    def tick(self, now: float) -> None:
        """Do nothing: the coordinator has each step's deadline."""

    def doing(self) -> Status:
        """Return what the worker computes or waits for, see `Role.doing`."""
        share, ahead = self.computing, self._waits.ahead
        since, pushed_at = self._since, self._pushed_at
        if self._waits.calling:
            text = "runs a function between two steps"
        elif share is not None and not self._stepping:
            text = f"loads the first batch of share {share}"
        elif share is not None:
            text = f"computes share {share} from the weights of version {self._pushed[1]}"
            text += self._to_come(None if ahead is None else (self.generation, ahead.version))
        elif self._stopped:
            text = f"has version {self.version}, and takes no more steps"
        elif self.version < self._floor or self._pushed == (self.generation, self.version):
            wanted = max(self._floor, self.version + 1)
            text = f"waits for the weights of version {wanted}"
            text += self._to_come((self.generation, wanted))
            since = pushed_at or since
        else:
            text = f"has version {self.version}, and waits to be granted a step"
            since = pushed_at + self._waited if pushed_at else since
        return Status(text, self._now() - since)

    def _to_come(self, key: Key | None) -> str:
        """Return in words which weights of a version, and what else, have not come; "" for nothing."""
        lacking = listed(self._exchange.lacks(key))
        return f" (still to come: {lacking})" if lacking else ""

    # -- steps ---------------------------------------------------------------------------------

    def _take_grant(self, grant: Grant) -> None:
        if grant.generation == self.generation:
            self._stats, self._replicas.rates = grant.stats, grant.rates
            self._limit = max(self._limit, grant.limit)

    def _take_lease(self, lease: Lease) -> None:
        """Take a share of the samples for the next step, unless the message is old or a copy."""
        if lease.generation == self.generation:
            self._stats = lease.stats
            if (lease.generation, lease.version) > self._granted:  # else it is a copy
                self._granted = (lease.generation, lease.version)
                self._lease = range(lease.share, lease.share + lease.count), lease.version
                self._ahead = range(lease.ahead[0], sum(lease.ahead)) if lease.ahead else range(0)
                self._replicas.turn = lease.turn
                self._exchange.committed(lease.committed)
                counts, again = (
                    lease.committed == self._exchange.sequence,
                    self._pushed[0] != self.generation,
                )
                self._replicas.decided(counts=counts, again=again)

    def _next_share(self, version: int) -> int | None:
        """Return the number of the share to compute from the weights of a version; None if none.

        If a step was begun early and given up, the one before is not taken again: some of its weights may have been
        replaced already.
        """
        if self._pushed[0] == self.generation and self._pushed[1] >= version:
            return None
        if self._lease is not None:
            shares, needed = self._lease
            if version < needed:
                return None
            self._begun, self._lease = self._lease, None
            self._replicas.leased_shares = len(shares)
            return shares[0]
        return version * self._members + self._index if version < self._limit else None

    def _take_version(self) -> None:
        """Use the newest version whose weights are all here."""
        generation, version = self._complete
        if generation >= self._baseline and version != self.version:
            self.version = version
            if not self._stepping:
                self._waited = self._now() - self._pushed_at if self._pushed_at else 0.0
            self._replicas.weights_changed()
            if not self._stepping and (self._stopped or version >= self._limit):
                self._replicas.go_on(version)  # else a step follows, in which they go on
            self._run_calls()

    def _run_calls(self, begins: int = -1) -> bool:
        """Run the calls whose version is here, unless a step is computed; return whether any ran.

        Args:
            begins: the version from which a step is about to begin, or -1.
        """
        if self._stepping:
            return False
        ready = self._calls.take_ready(self.generation, self.version, begins)
        if not ready:
            return False
        # such a function may wait for what its models need, and no step begins meanwhile
        self._stepping, self._since = True, self._now()
        self._waits.calling = True
        self._waits.superseded = self._stopped
        self._exchange.stand_at(self.generation, self.version)
        try:
            about_to_change()
            self._replicas.go_on(self.version)
            for call in ready:
                missed = call.miss is not None and self._is_past(call.version)
                call.miss() if call.miss is not None and missed else call.run()
        finally:
            self._stepping = False
            self._waits.calling = False
            if self._spans is not None:
                self._spans.add(SpanKind.CALL, self._since, -1, self.version)
        self._replicas.forget_writes()
        if self._waits.defect is not None:
            raise self._waits.defect
        self._run_calls(begins)  # those that came while these waited
        return True

    def _step(self, share: int, version: int) -> None:
        """Take one step: compute and push a share from a version, then run calls that waited."""
        if self._calls.are_exact:
            self._run_calls(version)
        self._stepping, self._waits.superseded, self._waits.seconds = True, False, 0.0
        self.computing, self._since = share, self._now()
        if self._spans is not None and self._pushed_at:
            self._spans.add(SpanKind.WAIT, self._pushed_at, share, version, ended=self._since)
        try:
            self._compute(share, version)
        finally:
            if self._spans is not None:
                end = self._pushed_at if self._pushed_at > self._since else None
                self._spans.add(SpanKind.COMPUTE, self._since, share, version, ended=end)
            self._stepping, self._waits.ahead, self.computing = False, None, None
        self._run_calls()

    def _compute(self, share: int, version: int) -> None:
        """Compute and push the gradient of a share, then send REPORT, or FAILED with the error."""
        before, self._pushed = self._pushed, (self.generation, version)
        self._begin_to_push(version)
        if self._replicas.may_take_back:
            self._exchange.hold_back()
        self._between.finish()
        try:
            result = self._compute_once(share, version)
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
                self._computed = None
                if isinstance(error, PausedError):
                    self._pushed, self._paused = before, True
                    self._lease = self._lease or self._begun
                    return
                if not isinstance(error, AbandonedError):
                    self._replicas.batches.skip()
                self._fail(self._pushed[1], error)
                return
        if self._waits.defect is not None:
            raise self._waits.defect
        version = self._pushed[
            1
        ]  # a share that began before its lease got its version in the middle
        report = self._report(result, version)
        try:
            self._send(COORDINATOR, report.pack())
        except MessageTooLargeError as error:
            self._fail(version, error)
            return
        self._pushed_at = self._now()
        self._between.pump()
        self._replicas.look_ahead(share)
        if self._lease is None and version + 1 < self._limit:
            self._between.when_idle(partial(self._load_next, version + 1))

    def wait_within(self, has_come: Callable[[], bool]) -> None:
        """Receive messages in the middle of a step, or of a function between two steps, until `has_come` returns True.

        If a call waits for the step's end, an exception goes through the model, and the step is taken again later.
        """
        self._waits.until(has_come, "what other workers gather was not sent", pauses=True)

    def _a_call_waits(self) -> bool:
        """Return whether a call waits only for the present step's end."""
        return self._calls.has_ready(self.generation, self.version)

    def _begin_to_push(self, version: int) -> None:
        """Begin the push of a gradient that is computed from a version's weights, if these are here."""
        if self._waits.ahead is None:  # else the last push may still have to be repeated
            is_last = version + 1 >= self._limit
            self._exchange.begin(self.generation, version, self._incarnation, is_last=is_last)

    def _load_next(self, version: int) -> None:
        """Load the next step's first batch, while the weights of its version are awaited."""
        granted = version == self._pushed[1] + 1 and version < self._limit
        if granted and not self._stepping and not self._stopped:
            self._since = self._now()
            self.computing = version * self._members + self._index
            self._replicas.load_ahead(self.computing)
            if self._spans is not None:
                self._spans.add(SpanKind.LOAD, self._since, self.computing, version)
            self.computing = None

    def _report(self, result: WorkerResult, version: int) -> Report:
        """Return the report of a gradient that has been sent, computed from a version."""
        sequence = self._exchange.end()
        pulled = self._exchange.bytes_pulled - self._reported
        self._reported += pulled
        stats: dict[str, Any] = {}
        if self._stats:
            waited = self._waited + self._waits.seconds - self._replicas.batches.seconds_ahead
            timings = {**result.timings, "wait": max(waited, 0.0)}
            stats = {"loss": result.loss, "metrics": result.metrics, "timings": timings}
            stats["weights"] = dict(result.weights)
        said = self._replicas.said
        return Report(
            *(
                self.generation,
                self._incarnation,
                sequence,
                version,
                result.weight,
                result.samples,
                self._exchange.bytes_pushed,
                pulled,
            ),
            **stats,
            fragment=self._replicas.fragment,
            more=None if self._computed is None else self._computed.more or None,
            hyper=said["hyper"],
            clip=said["clip"],
            digest=said["digest"],
            notes=said["notes"],
            overflowed=said["overflowed"],
            audit=None if self._computed is None else self._computed.audit,
        )

    def _compute_once(self, share: int, version: int) -> WorkerResult:
        """Push the gradient of a share; one that was computed from the same weights is pushed again."""
        done, self._computed = self._computed, None
        if done is None or (done.share, done.version) != (share, version):
            pushes: list[Any] = []
            # before the worker's own share, whose gradient stays where servers read it
            audit = None if self._auditor is None else self._auditor.begin(version)

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
            result = self._replicas.compute(share, push, self._stats)
            self._replicas.take_back = self._replicas.watch = None
            audited = None
            if audit is not None:
                audited, result.timings["audit"] = audit.result(), audit.seconds
            # a worker without samples in this step has waited, and computed nothing
            result.timings["compute"] = max(result.timings["compute"] - self._waits.seconds, 0.0)
            more = self._exchange.logged()
            done = _PushedShare(share, self._pushed[1], result, pushes, more, audited)
        else:
            self._waits.arrive()
            for chunk in done.pushes:
                self._push(*chunk)
        self._computed = done
        return done.result

    def _push(
        self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> None:
        """Push a complete chunk, and let bytes move, except after the last one, which leaves with the report."""
        with self._waits.own_work():
            began = 0.0 if self._spans is None else self._now()
            if self._exchange.ready(chunk, payload, unit, total, absent):
                self._between.pump()
            if self._spans is not None:
                self._spans.add(
                    SpanKind.PUSH, began, self._exchange.sequence, self._pushed[1], chunk
                )

    def _fail(self, version: int, error: BaseException) -> None:
        """Send the coordinator FAILED with an error of the user's code, unless it was abandoned."""
        if isinstance(error, AbandonedError):
            log.debug("worker %d: step at version %d abandoned", self._index, version)
            return
        failed = Failed(self.generation, self._incarnation, version, **describe_error(error))
        self._raised = failed.generation, failed.error
        self._send(COORDINATOR, failed.pack())
