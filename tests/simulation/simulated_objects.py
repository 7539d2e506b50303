"""Objects of a simulated Ray: results of calls, and values that are kept, pickled as Ray does."""

from __future__ import annotations

import io
import pickle
import traceback
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import cloudpickle

from steepest.runtime.job_runtime import Call, CallRaisedError, runtime
from tests.simulation.virtual_threads import Scheduler, Waiters

_PLAIN = (int, float, bool, str, bytes, type(None))


class ByReference:
    """Something that a pickle refers to instead of holding it."""


class Store:
    """The pickles of one simulation; `scheduler`: of the threads that wait for objects."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._things: list[Any] = []  # to which pickles refer
        self._numbers: dict[Any, int] = {}

    def dump(self, value: Any) -> Any:
        """Return a value in the form in which it travels."""
        if isinstance(value, _PLAIN):
            return value
        file = io.BytesIO()
        try:
            _Pickler(file, self).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError):
            file = io.BytesIO()
            pickler = cloudpickle.Pickler(file, protocol=5)
            pickler.persistent_id = self.number_of
            pickler.dump(value)
        return _Pickled(file.getvalue())

    def load(self, value: Any) -> Any:
        """Return a copy of a value that was dumped."""
        if not isinstance(value, _Pickled):
            return value
        return _Unpickler(io.BytesIO(value.data), self._things).load()

    def number_of(self, thing: Any) -> int | None:
        """Return the number of a thing that travels by reference; None for anything else."""
        # Functions that are made by functions are among them, since pickling these takes long.
        local = isinstance(thing, types.FunctionType) and "<locals>" in thing.__qualname__
        if not local and not isinstance(thing, ByReference):
            return None
        if thing not in self._numbers:
            self._numbers[thing] = len(self._things)
            self._things.append(thing)
        return self._numbers[thing]


class Ref(Call, ByReference):
    """The result of a call, or an object of the store."""

    def __init__(self, store: Store, what: str) -> None:
        self._store, self.what = store, what
        self.ended = False
        self._value: Any = None
        self.error: BaseException | None = None
        self.waiting: Waiters = []
        self.then: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Return whether it has ended."""
        runtime().wait([self], 0)  # which takes time
        return self.ended

    def get(self, timeout: float | None = None) -> Any:
        """Return a copy of the value when it is there."""
        return runtime().get([self], timeout)[0]

    def future(self) -> Future[Any]:
        """Return the future of a copy of the value."""
        future: Future[Any] = Future()

        def finish() -> None:
            try:
                future.set_result(self.value())
            except Exception as error:  # noqa: BLE001 - the future's
                future.set_exception(error)

        if self.ended:
            finish()
        else:
            self.then.append(finish)
        return future

    def set(self, value: Any) -> None:
        """Give the reference its value, pickled unless it is plain."""
        if not self.ended:
            self._value = value
            self._finish()

    def fail(self, error: BaseException) -> None:
        """Let the call end by an error."""
        if not self.ended:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self.ended = True
        self._store.scheduler.wake(self.waiting)
        for function in self.then:
            function()
        self.then.clear()

    def value(self) -> Any:
        """Return a copy of the value; raise the error, if there is one."""
        if self.error is not None:
            raise self.error
        return self._store.load(self._value)


def task_error(error: Exception) -> BaseException:
    """Return the error of a call of a method that raised."""
    if isinstance(error, CallRaisedError):
        return error
    return CallRaisedError("".join(traceback.format_exception(error)), error)


class _Pickled:
    def __init__(self, data: bytes) -> None:
        self.data = data


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, store: Store) -> None:
        super().__init__(file, protocol=5)
        self._store = store

    def persistent_id(self, thing: Any) -> int | None:
        """Return the number of a reference or an actor."""
        return self._store.number_of(thing)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, things: Sequence[Any]) -> None:
        super().__init__(file)
        self._things = things

    def persistent_load(self, number: int) -> Any:
        """Return the thing of a number."""
        return self._things[number]
