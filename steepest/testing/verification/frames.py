"""The frames of a user's functions, among those of libraries."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

_LIBRARIES = tuple(
    {
        os.path.realpath(each) + os.sep
        for each in (
            *(
                sysconfig.get_paths()[kind]
                for kind in ("stdlib", "platstdlib", "purelib", "platlib")
            ),
            os.path.dirname(str(sys.modules["steepest"].__file__)),
        )
    }
)


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return whether a file is of the user's program: of no library, nor of Python."""
    if file.startswith("<"):
        return file.startswith("<ipython") or file == "<string>"
    return not os.path.realpath(file).startswith(_LIBRARIES)


def frames_of_user(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the frames of the calling thread that are a user's, from the innermost one outwards."""
    each = frame or sys._getframe(1)
    while each is not None:
        if is_users(each.f_code.co_filename) and not each.f_code.co_name.endswith("comp>"):
            yield each
        each = each.f_back  # type: ignore[assignment]


def line_here() -> str:
    """Return where the user's innermost function is, as ``train.py:31``; "" if there is none."""
    for frame in frames_of_user(sys._getframe(1)):
        return line_of(frame)
    return ""


def line_of(frame: FrameType) -> str:
    """Return where a frame is."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_users_class(kind: type[Any]) -> bool:
    """Return whether a class is of the user's program."""
    if kind.__module__ in ("__main__", "__mp_main__"):
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_users(file)


_MOST = 64  # functions and modules that are looked into


@dataclass(frozen=True)
class Scope:
    """Variables of a user's program that are known together.

    Attributes:
        name: of the function that has them; of the module, for what is outside of functions.
        line: where it is, as ``train.py:31``.
        variables: by name.
    """

    name: str
    line: str
    variables: Mapping[str, Any]


def scopes_of(
    frames: list[FrameType], within: Callable[[Any], Mapping[str, Any]]
) -> Iterator[Scope]:
    """Yield what frames have, and what the functions that they can call have beside: closures, globals, defaults.

    Args:
        frames: of a user's functions.
        within: returns the attributes of a user's object; none for anything else.
    """
    waiting: list[Any] = []
    for frame in frames:
        own, code, line = dict(frame.f_locals), frame.f_code, line_of(frame)
        of_module = f"<{os.path.basename(code.co_filename)}>"
        used = _globals_of(code, frame.f_globals)
        yield Scope(of_module if code.co_name == "<module>" else code.co_name, line, own)
        yield Scope(of_module, line, used)
        waiting += [*own.values(), *used.values()]
    seen: set[int] = {id(frame.f_code) for frame in frames}
    for _ in range(50 * _MOST):
        if not waiting or len(seen) > _MOST:
            return
        each = waiting.pop(0)
        if isinstance(each, MethodType):
            waiting += [each.__self__, each.__func__]
        elif isinstance(each, functools.partial):
            waiting += [each.func, *each.args]
        elif id(each) not in seen and (inner_scopes := _scopes_of(each)):
            seen.add(id(each))
            yield from inner_scopes
            waiting += (value for scope in inner_scopes for value in scope.variables.values())
        elif id(each) not in seen and (inner := within(each)):
            seen.add(id(each))
            methods = (m for m in vars(type(each)).values() if isinstance(m, FunctionType))
            waiting += [*inner.values(), *methods]


def _scopes_of(value: Any) -> list[Scope]:
    """Return the variables of a user's function, generator or module beside its locals; none for anything else."""
    if isinstance(value, FunctionType) and is_users(value.__code__.co_filename):
        code = value.__code__
        file = os.path.basename(code.co_filename)
        cells = zip(code.co_freevars, value.__closure__ or (), strict=False)
        own = {name: cell.cell_contents for name, cell in cells if _has_contents(cell)}
        defaults = value.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        own |= dict(zip(names, defaults, strict=True)) | vars(value)
        line, used = f"{file}:{code.co_firstlineno}", _globals_of(code, value.__globals__)
        return [Scope(code.co_name, line, own), Scope(f"<{file}>", line, used)]
    if isinstance(value, GeneratorType) and value.gi_frame is not None:
        frame = value.gi_frame
        if is_users(frame.f_code.co_filename):
            return [Scope(frame.f_code.co_name, line_of(frame), dict(frame.f_locals))]
    if isinstance(value, ModuleType) and is_users(getattr(value, "__file__", None) or "<none>"):
        file = os.path.basename(value.__file__ or "")
        return [Scope(f"<{file}>", f"{file}:1", dict(vars(value)))]
    return []


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # it is empty yet
        return False


def _globals_of(code: CodeType, used: Mapping[str, Any]) -> dict[str, Any]:
    """Return the globals that a function names."""
    return {name: used[name] for name in code.co_names if name in used}
