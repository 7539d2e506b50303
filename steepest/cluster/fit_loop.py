"""The loop of `fit`: trains from one pause between two steps to the next, and calls callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from steepest.cluster.checkpoint_manager import CheckpointManager
from steepest.config.validation import require_choice, require_count
from steepest.errors import ConfigurationError
from steepest.observe.display import display
from steepest.observe.progress import Callback, EventFeed
from steepest.observe.results import StepResult

_METHODS = ("on_fit_begin", "on_step", "on_event", "on_length", "on_epoch_end", "on_fit_end")

#: Takes steps until so many are committed as a function returns, with statistics or without, and
#: calls another function for each.
Train = Callable[[Callable[[], int], bool, Callable[[StepResult], None]], None]


def fit(
    sgd: Any,
    keeping: CheckpointManager,
    feed: EventFeed,
    train: Train,
    steps: int | None,
    epochs: int | None,
    callbacks: Sequence[Callback],
    progress: bool | str,
) -> StepResult:
    """Train and call callbacks, see `DistributedSGD.fit`; return the last step's result.

    Args:
        sgd: the trainer, which callbacks are given.
        keeping: its checkpoints.
        feed: tells callbacks of events.
        train: takes steps.
        steps, epochs, callbacks, progress: as of `DistributedSGD.fit`.

    Raises:
        ConfigurationError: an argument is not as documented; nothing has been trained.
        StepError: a step failed. What a callback raises is raised too.
        CheckpointError: a checkpoint could not be written.
    """
    if (steps is None) == (epochs is None):
        raise ConfigurationError(f"steps={steps!r}, epochs={epochs!r}: give exactly one of them")
    require_count("steps", steps) if epochs is None else require_count("epochs", epochs)
    check_callbacks(callbacks)
    require_choice("progress", progress, (False, True, "bar", "lines"))
    callbacks = [*display(progress), *callbacks]
    if epochs is not None and keeping.plan is None:
        raise ConfigurationError("the training data are a stream without epochs: give steps=")
    end = keeping.ask(steps, epochs)
    if (left := end() - keeping.step) <= 0:
        return keeping.result()
    with keeping.at_end():
        for callback in callbacks:
            callback.on_fit_begin(sgd, left)
        try:
            feed.tell(sgd, callbacks)
            _take(sgd, keeping, feed, train, end, callbacks)
        finally:
            try:
                feed.tell(sgd, callbacks)
            finally:
                for callback in callbacks:
                    callback.on_fit_end(sgd)
    return keeping.result()


def check_callbacks(callbacks: object) -> None:
    """Check that `callbacks` is a list of objects that have all methods of a `Callback`.

    Raises:
        ConfigurationError: it is not.
    """
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


def _take(
    sgd: Any,
    keeping: CheckpointManager,
    feed: EventFeed,
    train: Train,
    end: Callable[[], int],
    callbacks: Sequence[Callback],
) -> None:
    begin, length = keeping.step, end() - keeping.step

    def tell() -> None:
        """Tell callbacks of events, and of another number of steps where these have changed it."""
        nonlocal length
        feed.tell(sgd, callbacks)
        if end() - begin != length:
            length = end() - begin
            for callback in callbacks:
                callback.on_length(sgd, length)

    def on_step(result: StepResult) -> None:
        tell()
        for callback in callbacks:
            callback.on_step(sgd, result)

    pausing = [
        c for c in callbacks if getattr(type(c), "on_epoch_end", None) is not Callback.on_epoch_end
    ]
    while keeping.step < end():
        pause, epoch = keeping.next_due(), keeping.epoch if pausing else None

        def until(pause: int | None = pause, epoch: int | None = epoch) -> int:
            ends = [end(), pause, None if epoch is None else keeping.end_of(epoch)]
            return min(at for at in ends if at is not None)

        train(until, True, on_step)
        tell()
        if epoch is not None and keeping.step >= keeping.end_of(epoch):
            for callback in pausing:
                callback.on_epoch_end(sgd, keeping.result())
        keeping.keep_if_due()
