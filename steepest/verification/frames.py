"""The frames of a user's functions, among those of libraries."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Any

_LIBRARIES = tuple(
    {
        os.path.realpath(each) + os.sep
        for each in (
            *(
                sysconfig.get_paths()[kind]
                for kind in ("stdlib", "platstdlib", "purelib", "platlib")
            ),
            os.path.dirname(os.path.dirname(__file__)),
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
