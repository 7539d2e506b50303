"""The loop of `fit`: trains from one pause between two steps to the next, and calls callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from steepest.errors import ConfigurationError
from steepest.observe.display import display
from steepest.observe.progress import Callback, EventFeed
from steepest.observe.results import EvaluationResult, StepResult
from steepest.runtime.driver.background_evaluation import BackgroundEvaluation
from steepest.runtime.driver.checkpoint_manager import CheckpointManager
from steepest.validation import require_choice, require_count

_METHODS = (
    *("on_fit_begin", "on_step", "on_event", "on_length", "on_evaluation", "on_epoch_end"),
    "on_fit_end",
)

#: Takes steps until as many are committed as a function returns, with statistics or without, and
#: calls another function for each.
Train = Callable[[Callable[[], int], bool, Callable[[StepResult], None]], None]

#: Evaluates data, without a row in the history.
Evaluate = Callable[[Any], EvaluationResult]


@dataclass(frozen=True)
class FitArguments:
    """The arguments of a call of `DistributedSGD.fit`, as given."""

    steps: int | None
    epochs: int | None
    callbacks: Sequence[Callback]
    progress: bool | str
    validation: Any
    evaluate_every: int | None
    background: bool

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
        require_choice("background", self.background, (False, True))
        if self.validation is None:
            if self.evaluate_every is not None:
                raise ConfigurationError("evaluate_every= without validation=: give both")
            if self.background:
                raise ConfigurationError("background=True without validation=: give both")
            keeping.require_no_best("give fit(..., validation=data)")
            for callback in self.callbacks:
                if getattr(callback, "needs_validation", False):
                    raise ConfigurationError(
                        f"callbacks has {type(callback).__name__}(...), which acts on evaluations, and "
                        "there are none without validation=: give fit(..., validation=data)"
                    )
        if self.background:
            keeping.require_no_best(
                "leave background=True out: the state of that step is gone when it is evaluated"
            )
        epochs = self.epochs is not None, self.validation is not None and not self.evaluate_every
        if keeping.plan is None and any(epochs):
            instead = "steps=" if epochs[0] else "evaluate_every="
            raise ConfigurationError(
                f"the training data are a stream without epochs: give {instead}"
            )


class Fit:
    """One call of `DistributedSGD.fit`."""

    def __init__(
        self,
        sgd: Any,
        keeping: CheckpointManager,
        feed: EventFeed,
        train: Train,
        evaluate: Evaluate,
        asked: FitArguments,
        first_line: Callable[[], str],
        background: BackgroundEvaluation,
    ) -> None:
        asked.check(keeping)
        self._sgd = sgd
        self._keeping = keeping
        self._feed = feed
        self._train = train
        self._evaluate = evaluate
        self._data = asked.validation
        self._every = asked.evaluate_every
        self._background = background
        self._in_background = asked.background
        self._untold: list[EvaluationResult] = []  # evaluations of which no callback was told yet
        self._shown, self._first_line = display(asked.progress), first_line
        self._callbacks: list[Callback] = [*self._shown, *asked.callbacks]
        self._goal = keeping.ask(asked.steps, asked.epochs)
        self._begin = keeping.reached
        self._length = self._end() - self._begin

    def _end(self) -> int:
        """Return the number of committed steps with which it ends, as the job is now."""
        self._at = self._goal()
        return self._at

    def run(self) -> StepResult:
        """Train and call callbacks; return the last step's result."""
        keeping = self._keeping
        if self._length <= 0 and not self._evaluation_is_due:
            return keeping.result()
        with keeping.at_end(), _ended(self._sgd) as begun:
            for shown in self._shown:
                if line := self._first_line():
                    shown.say(line)
            for callback in self._callbacks:
                callback.on_fit_begin(self._sgd, max(self._length, 0))
                begun.append(callback)
            try:
                self._feed.tell(self._sgd, self._callbacks)
                self._take()
                if keeping.stopping:
                    keeping.ended_early(self._end())
            finally:
                self._feed.tell(self._sgd, self._callbacks)
        return keeping.result()

    def _take(self) -> None:
        """Train from one pause between two steps to the next."""
        keeping = self._keeping
        pausing = _overriding(self._callbacks, "on_epoch_end")
        each_step = _overriding(self._callbacks, "after_step")
        by_epoch = bool(pausing) or (self._data is not None and self._every is None)
        self._begin = keeping.reached
        self._length = self._end() - self._begin
        self._evaluate_if_due()  # where the program was interrupted before it could
        while keeping.step < self._end() and not keeping.stopping:
            pauses = [keeping.next_due()]
            pauses += [keeping.next_multiple(self._every)] if self._every else []
            pauses += [keeping.step + 1] if each_step else []
            epoch = keeping.epoch if by_epoch else None

            def until(pauses: list[int | None] = pauses, epoch: int | None = epoch) -> int:
                ends = [self._end(), *pauses, None if epoch is None else keeping.end_of(epoch)]
                return min(at for at in ends if at is not None)

            before = keeping.reached
            self._train(until, True, self._on_step)
            self._tell()
            if keeping.step > before:  # not after `stop`, or where steps of before were taken again
                for callback in each_step:
                    callback.after_step(self._sgd, keeping.result())
            self._evaluate_if_due()
            if epoch is not None and keeping.step >= keeping.end_of(epoch):
                for callback in pausing:
                    callback.on_epoch_end(self._sgd, keeping.result())
            keeping.keep_if_due()
        if not keeping.stopping:
            self._collect(waits=True)

    def _on_step(self, result: StepResult) -> None:
        self._tell()
        self._keep_results()
        for callback in self._callbacks:
            callback.on_step(self._sgd, result)

    def _tell(self) -> None:
        """Call callbacks for events, and for a changed number of steps."""
        self._feed.tell(self._sgd, self._callbacks)
        if self._at - self._begin != self._length:
            self._length = self._at - self._begin
            for callback in self._callbacks:
                callback.on_length(self._sgd, self._length)

    @property
    def _evaluation_is_due(self) -> bool:
        """Whether an evaluation is due at this step of this `fit`, and was not made, also before a death."""
        keeping = self._keeping
        done = max(keeping.begun, keeping.evaluated, self._background.step)
        if self._data is None or keeping.step <= done:
            return False
        return keeping.step % self._every == 0 if self._every else keeping.is_at_end_of_epoch

    def _evaluate_if_due(self) -> None:
        """Evaluate, keep the result, call callbacks, then keep the state if it is the best so far."""
        evaluates = self._evaluation_is_due
        self._collect(waits=evaluates)
        if not evaluates:
            return
        if self._in_background:
            self._background.begin(self._data)
            return
        step, result = self._keeping.step, self._evaluate(self._data)
        if result.step != step:
            return  # a death meanwhile has set training back: it is due again at that step
        self._keeping.add(result)
        self._untold.append(result)
        self._tell_results()
        self._keeping.keep_if_best()

    def _collect(self, *, waits: bool) -> None:
        """Take what was evaluated in the background, and call callbacks; workers are idle."""
        self._keep_results()
        if waits and (result := self._background.collect()) is not None:
            self._keep(result)
        self._tell_results()

    def _keep_results(self) -> None:
        """Keep what was evaluated in the background, and begin what loops have asked for."""
        for result in self._background.results():
            self._keep(result)

    def _keep(self, result: EvaluationResult) -> None:
        self._keeping.add(result)
        self._untold.append(result)

    def _tell_results(self) -> None:
        """Call callbacks for evaluations."""
        while self._untold:
            result = self._untold.pop(0)
            for callback in self._callbacks:
                callback.on_evaluation(self._sgd, result)


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
    """Return the callbacks that override a method, for which workers therefore pause."""
    inherited = getattr(Callback, method)
    return [c for c in callbacks if getattr(type(c), method, inherited) is not inherited]
