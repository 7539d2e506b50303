"""Callbacks of `fit`, and the feed of events that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steepest.observe.results import EvaluationResult, Event, StepResult


class Callback:
    """Base class of callbacks of `DistributedSGD.fit`; override the methods that you need.

    They are called on the driver, in the thread of `fit`.

    `sgd` is the trainer. Callbacks are called in the order in which they were given. An error that
    one raises ends `fit`, which raises it after `on_fit_end`.

    Attributes:
        needs_validation: whether `fit` is refused without ``validation=``, because the callback
            would have nothing to do then; False unless a class sets it.
    """

    needs_validation = False

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        """Take note that training begins; `steps` steps will be taken."""

    def on_step(self, sgd: Any, result: StepResult) -> None:
        """Take note of a committed step.

        It is called for each step of this `fit`, in order, while workers compute the next ones. So
        `DistributedSGD.weights` is of a later step here; methods that need idle workers are refused.
        Steps of this `fit` that are taken again after a death may be told of again; steps of earlier calls are
        not.
        """

    def after_step(self, sgd: Any, result: StepResult) -> None:
        """Take note of a committed step while workers are idle.

        The trainer's weights are those of this step, and all of its methods may be called. Workers
        pause after each step for it, but only if a callback overrides this method. It is called
        after `on_step` and before `on_evaluation`. A step is told of again only if it is undone by `restore`
        or by an error of the optimizer, not if it is taken again after a death.
        """

    def on_event(self, sgd: Any, event: Event) -> None:
        """Take note of a death, a resize or another event of `Stats.events`, each once, in order.

        It is called between two calls of `on_step`, or before `on_fit_end`, while workers may
        compute. Events since the last `fit` come right after `on_fit_begin`.
        """

    def on_length(self, sgd: Any, steps: int) -> None:
        """Take note that this `fit` takes `steps` steps in all, instead of as many as were told before.

        With `epochs=` their number changes when workers come or leave, since a step then covers
        another number of samples. It is called before the next `on_step`.
        """

    def on_epoch_end(self, sgd: Any, result: StepResult) -> None:
        """Take note that an epoch ended with this step.

        Workers are idle: the trainer may evaluate or save. They pause for it only if a callback
        overrides this method.
        """

    def on_evaluation(self, sgd: Any, result: EvaluationResult) -> None:
        """Take note of an evaluation of ``fit(validation=)``, each once, in order.

        It is called between two steps, before `on_epoch_end`, with workers idle: the trainer may
        save, and set the learning rate of the next step. `DistributedSGD.evaluations` has the
        result already.
        """

    def on_fit_end(self, sgd: Any) -> None:
        """Take note that training ended, also by an error.

        It is called if `on_fit_begin` returned, whatever other callbacks raise.
        """


class EventFeed:
    """The calls of `Callback.on_event`: once for each event of a job, in order; `events` grow, oldest first."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._reported = 0

    def tell(self, sgd: Any, callbacks: Sequence[Callback]) -> None:
        """Call `on_event` of all callbacks for each event since the last call; one that raises is not told again."""
        while self._reported < len(self._events):
            event = self._events[self._reported]
            self._reported += 1
            for callback in callbacks:
                callback.on_event(sgd, event)
