"""Calls of other threads that a worker runs between two steps, when weights of a version are here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class WaitingCall:
    """A call that waits until the worker has begun a generation and has the weights of a version."""

    generation: int
    version: int
    run: Callable[[], None]  # runs it
    fail: Callable[[Exception], None]  # sets the error of a call that is not run
    # run instead if a step was begun from that version; None if any later version will do
    miss: Callable[[], None] | None = None


class WaitingCalls:
    """The calls of one worker that wait, in the order in which they came."""

    def __init__(self) -> None:
        self._calls: list[WaitingCall] = []

    @property
    def are_exact(self) -> bool:
        """Whether one of them waits for exactly its version."""
        return any(call.miss is not None for call in self._calls)

    def waits_before(self, version: int) -> bool:
        """Return whether one of them waits for exactly this version, or exactly an earlier one."""
        return any(call.miss is not None and call.version <= version for call in self._calls)

    def add(self, call: WaitingCall) -> None:
        """Add a call; one for exactly its version replaces an earlier such call."""
        for earlier in [c for c in self._calls if c.miss is not None and call.miss is not None]:
            self._calls.remove(earlier)
            assert earlier.miss is not None
            earlier.miss()
        self._calls.append(call)

    def take_ready(self, generation: int, version: int, begins: int) -> list[WaitingCall]:
        """Remove and return the calls that wait no longer.

        Args:
            begins: the version from which a step is to begin, or -1.
        """
        if not self._calls:
            return []
        latest = max(version, begins)
        ready = [
            call
            for call in self._calls
            if call.generation <= generation
            and call.version <= (version if call.miss is None else latest)
        ]
        self._calls = [call for call in self._calls if call not in ready]
        return ready

    def has_ready(self, generation: int, version: int) -> bool:
        """Return whether one of them waits only for the end of the present step."""
        return any(c.generation <= generation and c.version <= version for c in self._calls)

    def fail(self, error: Exception, least_version: int = 0) -> None:
        """Remove the calls that wait for this version or a later one, and set their error."""
        failed = [call for call in self._calls if call.version >= least_version]
        self._calls = [call for call in self._calls if call.version < least_version]
        for call in failed:
            call.fail(error)


def into_future(function: Callable[[], T], future: Future[Any]) -> Callable[[], None]:
    """Return a function that calls `function`, and sets a future to its result or exception."""

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            future.set_exception(error)

    return run
