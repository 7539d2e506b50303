"""Calls of a job's processes: which values can be sent, how calls end, and which errors the user gets."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import cloudpickle

from steepest.errors import (
    ConfigurationError,
    PeerLostError,
    described_error,
    listed,
    raised_by_user,
)
from steepest.runtime.job_runtime import (
    CallError,
    CallRaisedError,
    ProcessDiedError,
    UnreadableError,
    runtime,
)

_NAMED = 4  # processes that raised the same
#: In which the other workers, which began at the same time, come as far as one that raised.
ALIKE_SECONDS = 0.3
_DEEPEST = 20  # levels of parts within parts that are searched


class RemoteError(Exception):
    """An exception of another process as text (`describe_error`), since the exception may not be picklable."""

    def __init__(self, told: dict[str, str]) -> None:
        super().__init__(told)
        self.told = told

    def __str__(self) -> str:
        return self.told["error"]


def end_of(call: Any) -> tuple[bool, CallError | None]:
    """Return whether a call of an actor has ended, and its error; None if it has returned a result."""
    if not call.done():
        return False, None
    try:
        call.get()
    except CallError as error:
        return True, error
    return True, None


def has_answered(call: Any) -> bool:
    """Return whether a call of an actor has returned; False if it raised or has not ended."""
    return end_of(call) == (True, None)


def never_ran(call: Any) -> bool:
    """Return whether a call failed because Ray could not start the actor's process."""
    return isinstance(end_of(call)[1], ProcessDiedError)


def who_raised(error: CallRaisedError, calls: Mapping[Any, str]) -> str:
    """Return the names of the processes that raised the same error, such as "worker 0, worker 2"."""
    if calls:
        runtime().wait(calls, ALIKE_SECONDS)
    words = _words_of(error)
    names = [name for call, name in calls.items() if _words_of(end_of(call)[1]) == words]
    return listed(names, _NAMED) or "a process"


def _words_of(error: CallError | None) -> str:
    """Return the class and message of the exception that a call raised; "" if it raised none."""
    if not isinstance(error, CallRaisedError):
        return ""
    return error.cause.told["error"] if isinstance(error.cause, RemoteError) else last_line(error)


def drop_calls(calls: Iterable[Any]) -> None:
    """Give calls up, and take their errors: Ray logs an error that is never taken."""
    for call in calls:
        call.future()


def raise_remote(error: CallRaisedError, who: str, what: str) -> NoReturn:
    """Raise the error of a remote call for the user, without Ray's traceback.

    Raises:
        SteepestError: an error of ours, of its own class, with the processes' names.
        ModelRaisedError: the user's code raised; its own frames are the cause.
        ConfigurationError: an argument could not be unpickled, or a result not pickled; or only
            the driver can import a module.
        PeerLostError: the process that was to send an argument died.
    """
    cause = error.cause
    if isinstance(cause, ProcessDiedError):
        raise PeerLostError(
            f"{who} was not sent what it needs to {what}, because a process died: {last_line(error)}"
        ) from None
    if isinstance(cause, RemoteError):
        if (own := described_error(cause.told, f"{who}: ")) is not None:
            raise own
        hint = unimportable(cause.told["error"])
        words = f"{who} could not {what}: {cause.told['error']}{hint and f'; {hint}'}"
        raise raised_by_user(words, cause.told)
    if isinstance(cause, UnreadableError):
        words = last_line(error)
        raise ConfigurationError(
            unimportable(words)
            or f"{who} cannot read what it was sent to {what}: {words}: send what can be pickled, "
            "of modules that the workers have too"
        ) from None
    raise ConfigurationError(
        f"{who} could not send what came of it when asked to {what}: {type(cause).__name__}: "
        f"{cause}; return what can "
        "be pickled: numbers, text, tensors, arrays, and containers of these"
    ) from None


def unimportable(words: str) -> str:
    """Return the remedy if workers lack a module that the driver has; "" for any other error."""
    match = re.search(r"^ModuleNotFoundError: No module named '((\w+)[\w.]*)'$", words)
    if match is None:
        return ""
    name, package = match.groups()
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else [*(spec.submodule_search_locations or ())]
    if spec is not None and spec.origin is not None and spec.has_location and not places:
        places = [spec.origin]
    if not places:
        return ""
    folder = Path(places[0]).resolve().parent
    return (
        f"workers cannot import {name!r}, which the driver finds in {folder}: put that folder on "
        f'PYTHONPATH before Ray starts, or give ray.init(runtime_env={{"working_dir": "{folder}"}})'
    )


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's message."""
    return str(error).rstrip().splitlines()[-1]


def travelling(what: str, value: Any) -> Any:
    """Put an object of the user's into Ray's store; return its reference.

    Raises:
        ConfigurationError: it cannot be pickled.
    """
    try:
        return runtime().put(value)
    except CallError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's objects are pickled by methods of their own
        raise_unsendable(what, value, error)


def raise_unsendable(what: str, value: Any, error: Exception) -> NoReturn:
    """Raise ConfigurationError for an object of the user's that cannot be pickled."""
    why = why_unpicklable(value, error)
    raise ConfigurationError(f"{what} cannot be sent to the workers: {why}") from None


class _PickledPart(NamedTuple):
    """An object that is pickled together with another one."""

    value: Any
    name: str = ""  # its place, such as ``data.loader`` or ``shards[3]``
    function: str = ""  # that takes it from outside, by itself or as a part of a variable
    variable: str = ""  # that variable's name
    kind: str = ""  # the class of the variable's value

    def inner(self, suffix: str, value: Any) -> _PickledPart:
        """Return a part of this part, at its name with a suffix."""
        return self._replace(value=value, name=(self.name + suffix).removeprefix("."))


def why_unpicklable(value: Any, error: BaseException) -> str:
    """Return in words why an object cannot be pickled, and the remedy; `error` is what pickling it has raised."""
    part, above = _PickledPart(value), [value]
    while len(above) < _DEEPEST:
        for inner in _parts(part):
            known = any(inner.value is each for each in above)
            if not known and (failed := _failure_of(inner.value)) is not None:
                part, error = inner, failed
                above.append(inner.value)
                break
        else:
            break
    why = str(error.__cause__ or error).strip() or type(error).__name__
    if not part.name:
        return f"{why}; make on the workers what cannot be sent"
    if part.name != part.variable:
        why = f"{part.name} is of type {type(part.value).__name__}: {why}"
    if not part.function:
        return f"{why}; make on the workers what cannot be sent"
    return (
        f"the variable {part.variable!r} of the function {part.function!r}, of type {part.kind}, "
        f"cannot be pickled ({why}); make it inside the function, so that each process has its own"
    )


def _failure_of(value: Any) -> BaseException | None:
    """Return the exception that pickling an object raises; None if it can be pickled."""
    try:
        cloudpickle.Pickler(_Nowhere(), protocol=5).dump(value)
    except Exception as error:  # noqa: BLE001 - the user's objects are pickled by methods of their own
        return error
    return None


class _Nowhere:
    """A file that keeps nothing, since the pickle of a data set may be large."""

    def write(self, data: Any) -> int:
        return len(data)


def _parts(part: _PickledPart) -> Iterator[_PickledPart]:
    """Yield the parts that are pickled with an object."""
    value = part.value
    if isinstance(value, types.FunctionType):
        yield from _variables(value)
    elif isinstance(value, types.MethodType):
        yield part.inner("", value.__func__)
        yield part.inner(".self", value.__self__)
    elif isinstance(value, (staticmethod, classmethod)):
        yield part.inner("", value.__func__)
    elif isinstance(value, functools.partial):
        yield part.inner("", value.func)
        yield from _items(part, value.args)
        yield from _items(part, value.keywords)
    elif isinstance(value, type):
        yield from _attributes(part, vars(value))
    elif isinstance(value, (tuple, list, set, frozenset, Mapping)):
        yield from _items(part, value)
    else:
        yield from _reduced(part)


def _variables(function: types.FunctionType) -> Iterator[_PickledPart]:
    """Yield the variables that a function takes from outside, and the defaults of its arguments."""
    code, variables = function.__code__, list[tuple[str, Any]]()
    for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            variables.append((free, cell.cell_contents))
    known = function.__globals__
    variables += [(name, known[name]) for name in _globals_in(code) if name in known]
    defaults = function.__defaults__ or ()
    named = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    variables += [*zip(named, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
    for name, value in variables:
        yield _PickledPart(value, name, function.__name__, name, type(value).__name__)


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the globals that a function uses, and the functions that it defines."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_in(constant)


def _items(part: _PickledPart, value: Any) -> Iterator[_PickledPart]:
    """Yield the items of a container."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in pairs:
        yield part.inner(f"[{key!r:.40}]", item)


def _attributes(part: _PickledPart, values: Mapping[str, Any]) -> Iterator[_PickledPart]:
    for name, value in values.items():
        yield part.inner(f".{name}", value)


def _reduced(part: _PickledPart) -> Iterator[_PickledPart]:
    """Yield the parts from which an object's own methods make its pickle: attributes, arguments."""
    try:
        reduced = part.value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - then the object itself cannot be pickled
        return
    if not isinstance(reduced, tuple):
        return
    _, arguments, *rest = reduced
    states = rest[:1]
    for state in states[0] if states and isinstance(states[0], tuple) else states:
        if isinstance(state, Mapping):
            yield from _attributes(part, state)
        elif state is not None:
            yield part.inner("", state)
    for argument in arguments:
        yield part.inner("", argument)
