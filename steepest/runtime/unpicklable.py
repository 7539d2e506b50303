"""Why an object of a user cannot be pickled: which variable of which function, or which of its parts."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ray import cloudpickle

_DEEPEST = 20  # parts within parts that are looked at


class _Part(NamedTuple):
    """An object that is pickled together with another one."""

    value: Any
    name: str = ""  # its place, such as ``data.loader`` or ``shards[3]``
    function: str = ""  # that takes it from outside, by itself or as a part of a variable
    variable: str = ""  # that variable's name
    kind: str = ""  # the class of the variable's value

    def inner(self, suffix: str, value: Any) -> _Part:
        """Return a part of this part, at its name with a suffix."""
        return self._replace(value=value, name=(self.name + suffix).removeprefix("."))

    def variable_of(self, function: str, name: str) -> _Part:
        """Return the value of a variable that this part, a function, takes from outside."""
        return _Part(self.value, name, function, name, type(self.value).__name__)


def why_unpicklable(value: Any, error: BaseException) -> str:
    """Return in words why an object cannot be pickled, and what to do, by what pickling it has raised."""
    part, above = _Part(value), [value]
    while len(above) < _DEEPEST:
        for inner in _parts(part):
            known = any(inner.value is each for each in above)
            if not known and (failed := _error_of(inner.value)) is not None:
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


def _error_of(value: Any) -> BaseException | None:
    """Return what pickling an object raises; None if it can be pickled."""
    try:
        cloudpickle.Pickler(_Nowhere(), protocol=5).dump(value)
    except Exception as error:  # noqa: BLE001 - the user's objects are pickled by methods of their own
        return error
    return None


class _Nowhere:
    """A file that keeps nothing, since the pickle of a data set may be large."""

    def write(self, data: Any) -> int:
        return len(data)


def _parts(part: _Part) -> Iterator[_Part]:
    """Yield what is pickled with an object."""
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


def _variables(function: types.FunctionType) -> Iterator[_Part]:
    """Yield the variables that a function takes from outside."""
    name = function.__name__
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for free, cell in cells:
        try:
            yield _Part(cell.cell_contents).variable_of(name, free)
        except ValueError:
            continue  # it has no value yet
    for used in _globals_in(function.__code__):
        if used in function.__globals__:
            yield _Part(function.__globals__[used]).variable_of(name, used)
    code = function.__code__
    named = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    pairs = [*zip(named[len(named) - len(defaults) :], defaults, strict=True)]
    for argument, default in (*pairs, *(function.__kwdefaults__ or {}).items()):
        yield _Part(default).variable_of(name, argument)


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the globals that a function uses, and the functions that it defines."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_in(constant)


def _items(part: _Part, value: Any) -> Iterator[_Part]:
    """Yield the items of a container."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in pairs:
        yield part.inner(f"[{key!r:.40}]", item)


def _attributes(part: _Part, values: Mapping[str, Any]) -> Iterator[_Part]:
    for name, value in values.items():
        yield part.inner(f".{name}", value)


def _reduced(part: _Part) -> Iterator[_Part]:
    """Yield the parts of which an object's own methods make its pickle: attributes, arguments."""
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
