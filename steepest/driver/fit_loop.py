"""The loop of `fit`: trains from one pause between two steps to the next, and calls callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from steepest.driver.checkpoint_manager import CheckpointManager, Goal
from steepest.errors import ConfigurationError
from steepest.observe.display import display
from steepest.observe.progress import Callback, EventFeed
from steepest.observe.results import EvaluationResult, StepResult
from steepest.validation import require_choice, require_count

_METHODS = (
    *("on_fit_begin", "on_step", "on_event", "on_length", "on_evaluation", "on_epoch_end"),
    "on_fit_end",
)

#: Takes steps until so many are committed as a function returns, with statistics or without, and
#: calls another function for each.
Train = Callable[[Callable[[], int], bool, Callable[[StepResult], None]], None]

#: Evaluates data, without a row in the history.
Evaluate = Callable[[Any], EvaluationResult]


@dataclass(frozen=True)
class Asked:
    """The arguments of a call of `DistributedSGD.fit`, as given."""

    steps: int | None
    epochs: int | None
    callbacks: Sequence[Callback]
    progress: bool | str
    validation: Any
    evaluate_every: int | None

    def check(self, keeping: CheckpointManager) -> None:
        """Check the arguments against each other and the job."""
        if (self.steps is None) == (self.epochs is None):
            raise ConfigurationError(
                f"steps={self.steps!r}, epochs={self.epochs!r}: give exactly one of them"
            )
        for name in ("steps", "epochs", "evaluate_every"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        check_callbacks(self.callbacks)
        require_choice("progress", self.progress, (False, True, "bar", "lines"))
        if self.validation is None:
            if self.evaluate_every is not None:
                raise ConfigurationError("evaluate_every= without validation=: give both")
            keeping.require_no_best()
            for callback in self.callbacks:
                if getattr(callback, "needs_validation", False):
                    raise ConfigurationError(
                        f"callbacks has {type(callback).__name__}(...), which acts on evaluations, and "
                        "there are none without validation=: give fit(..., validation=data)"
                    )
        epochs = self.epochs is not None, self.validation is not None and not self.evaluate_every
        if keeping.plan is None and any(epochs):
            instead = "steps=" if epochs[0] else "evaluate_every="
            raise ConfigurationError(
                f"the training data are a stream without epochs: give {instead}"
            )


def fit(
    sgd: Any,
    keeping: CheckpointManager,
    feed: EventFeed,
    train: Train,
    evaluate: Evaluate,
    asked: Asked,
) -> StepResult:
    """Train and call callbacks, see `DistributedSGD.fit`; return the last step's result."""
    asked.check(keeping)
    callbacks = [*display(asked.progress), *asked.callbacks]
    end = keeping.ask(asked.steps, asked.epochs)
    evaluating = Evaluating(sgd, keeping, evaluate, asked, callbacks)
    if (left := end() - keeping.step) <= 0 and not evaluating.is_due:
        return keeping.result()
    with keeping.at_end(), _ended(sgd) as begun:
        for callback in callbacks:
            callback.on_fit_begin(sgd, max(left, 0))
            begun.append(callback)
        try:
            feed.tell(sgd, callbacks)
            _take(sgd, keeping, feed, train, end, callbacks, evaluating)
            if keeping.stopping:
                keeping.ended_early(end())
        finally:
            feed.tell(sgd, callbacks)
    return keeping.result()


@contextlib.contextmanager
def _ended(sgd: Any) -> Iterator[list[Callback]]:
    """Yield an empty list; when the block ends, call `on_fit_end` of the callbacks put into it."""
    begun: list[Callback] = []
    with contextlib.ExitStack() as ending:
        try:
            yield begun
        finally:
            for callback in reversed(begun):  # the last one is called first
                ending.callback(callback.on_fit_end, sgd)


class Evaluating:
    """The evaluations of one `fit`: when each is due, and what becomes of it."""

    def __init__(
        self,
        sgd: Any,
        keeping: CheckpointManager,
        evaluate: Evaluate,
        asked: Asked,
        callbacks: Sequence[Callback],
    ) -> None:
        self._sgd = sgd
        self._keeping = keeping
        self._evaluate = evaluate
        self._data = asked.validation
        self._every = asked.evaluate_every
        self._callbacks = callbacks

    @property
    def by_epoch(self) -> bool:
        """Whether one is due at the end of each epoch."""
        return self._data is not None and self._every is None

    def next_due(self) -> int | None:
        """Return with how many committed steps the next one is due; None without a fixed number."""
        return None if self._every is None else self._keeping.next_multiple(self._every)

    @property
    def is_due(self) -> bool:
        """Whether one is due at this step of this `fit`, and was not made, also before a death."""
        keeping = self._keeping
        if self._data is None or keeping.step <= max(keeping.begun, keeping.evaluated):
            return False
        return keeping.step % self._every == 0 if self._every else keeping.is_at_end_of_epoch

    def evaluate_if_due(self) -> None:
        """Evaluate, keep the result, call callbacks, then keep the state if it is the best so far.

        The result of another step than the one at which it was due, because a death meanwhile has
        set training back, is passed over: it is due again when that step is taken again.
        """
        if not self.is_due:
            return
        step, result = self._keeping.step, self._evaluate(self._data)
        if result.step != step:
            return
        self._keeping.add(result)
        for callback in self._callbacks:
            callback.on_evaluation(self._sgd, result)
        self._keeping.keep_if_best()


def check_callbacks(callbacks: object) -> None:
    """Check that `callbacks` is a list of objects that have all methods of a `Callback`."""
    if not isinstance(callbacks, Sequence):
        raise ConfigurationError(f"callbacks={callbacks!r}: give a list of callbacks")
    for callback in callbacks:
        if isinstance(callback, type):
            raise ConfigurationError(
                f"callbacks has the class {callback.__name__}: give {callback.__name__}(...)"
            )
        lacking = [name for name in _METHODS if not callable(getattr(callback, name, None))]
        if lacking:
            raise ConfigurationError(
                f"callbacks has {callback!r}, which has no {lacking[0]}(): derive it from "
                "steepest.Callback"
            )


def _overriding(callbacks: Sequence[Callback], method: str) -> list[Callback]:
    """Return the callbacks that override a method, for which workers pause then."""
    inherited = getattr(Callback, method)
    return [c for c in callbacks if getattr(type(c), method, inherited) is not inherited]


def _take(
    sgd: Any,
    keeping: CheckpointManager,
    feed: EventFeed,
    train: Train,
    end: Goal,
    callbacks: Sequence[Callback],
    evaluating: Evaluating,
) -> None:
    begin, length = keeping.step, end() - keeping.step

    def tell() -> None:
        """Tell callbacks of events, and of another number of steps where these have changed it."""
        nonlocal length
        feed.tell(sgd, callbacks)
        if end.at - begin != length:
            length = end.at - begin
            for callback in callbacks:
                callback.on_length(sgd, length)

    def on_step(result: StepResult) -> None:
        tell()
        for callback in callbacks:
            callback.on_step(sgd, result)

    pausing = _overriding(callbacks, "on_epoch_end")
    each_step = _overriding(callbacks, "after_step")
    evaluating.evaluate_if_due()  # where the program was interrupted before it could
    while keeping.step < end() and not keeping.stopping:
        next_step = keeping.step + 1 if each_step else None
        pauses = keeping.next_due(), evaluating.next_due(), next_step
        epoch = keeping.epoch if pausing or evaluating.by_epoch else None

        def until(pauses: tuple[int | None, ...] = pauses, epoch: int | None = epoch) -> int:
            ends = [end(), *pauses, None if epoch is None else keeping.end_of(epoch)]
            return min(at for at in ends if at is not None)

        before = keeping.step
        train(until, True, on_step)
        tell()
        if keeping.step > before:  # not after `stop`, or a death that has set it back
            for callback in each_step:
                callback.after_step(sgd, keeping.result())
        evaluating.evaluate_if_due()
        if epoch is not None and keeping.step >= keeping.end_of(epoch):
            for callback in pausing:
                callback.on_epoch_end(sgd, keeping.result())
        keeping.keep_if_due()
