"""Errors of Python's that need another text in a worker, with what to do."""

from __future__ import annotations

import re
from collections.abc import Collection

from steepest.core.models.losses import ONE_SAMPLE, of_one_sample
from steepest.errors import ConfigurationError

_NO_SIGNALS = (
    "signal.signal() in the function of a worker, which runs on a thread of the worker's process, while Python sets "
    "handlers in main threads alone: set them in the program that calls steepest.run(), or under `if "
    "threading.current_thread() is threading.main_thread():`"
)
_NO_FURTHER = (
    "next() was called once too often: this worker has entered a pass over the loader behind {} of its batches, which "
    "the loop counts by itself; write `for number, batch in enumerate(loader)`, which counts them too"
)
_ORDER = (
    "steepest.prepare() returns its arguments in the order in which they were given: write `model, optimizer, loader = "
    "steepest.prepare(model, optimizer, loader)`"
)
#: What is no model, optimizer or loader, as Python says it of one that was taken for another.
_ANOTHER = re.compile(
    r"'(\w+)' object (?:is not (?:iterable|callable)|has no attribute '(?:step|zero_grad)')"
)


def explained(
    error: Exception, prepared: Collection[object], passed_by: int = 0
) -> ConfigurationError | None:
    """Return an error that says what to do about one that a user's function has raised; None where it says enough.

    Args:
        error: that the function has raised.
        prepared: what it has given to `prepare`, and got.
        passed_by: batches of a pass over the loader that it has entered behind them.
    """
    text = str(error)
    if isinstance(error, StopIteration) and passed_by:
        return ConfigurationError(_NO_FURTHER.format(passed_by))
    if isinstance(error, ValueError) and text.startswith("signal only works in main thread"):
        return ConfigurationError(_NO_SIGNALS)
    if of_one_sample(error):
        return ConfigurationError(ONE_SAMPLE)
    match = _ANOTHER.match(text) if isinstance(error, (TypeError, AttributeError)) else None
    if match and match[1] in {type(each).__name__ for each in prepared}:
        return ConfigurationError(f"{text}: {_ORDER}")
    return None
