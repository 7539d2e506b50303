"""An exception at each bytecode of a call in turn, those of the standard library too, as signals raise it."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any


class Struck(BaseException):
    """What a handler of a signal raises."""


def each_moment(prepare: Callable[[], Callable[[], object]]) -> Iterator[int]:
    """Make calls that `prepare` returns, and end each one bytecode later than the one before.

    Yields the number of the bytecode after each call that was ended; ends with the first that was not.
    """
    for number in count(1):
        call, left, struck = prepare(), number, False

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left, struck
            frame.f_trace_opcodes = True
            if event == "opcode" and not struck:
                left -= 1
                if not left:
                    struck = True
                    raise Struck
            return trace

        before = sys.gettrace()
        with contextlib.suppress(Struck):
            gc.disable()  # a library's callbacks of the collector are no part of the call
            sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it once, in settrace
            sys.settrace(trace)
            try:
                call()
            finally:
                sys.settrace(before)
                gc.enable()
        if not struck:
            return
        yield number
