"""A coroutine: a function on a thread of its own, which takes turns with the thread that drives it."""

from __future__ import annotations

import _thread
import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from steepest.core.engine.present_gpu import choose_gpu, chosen_gpu
from steepest.core.system import system
from steepest.core.tensors.allocator import keeps_here, start_thread
from steepest.core.transport.router import runs_in_turn


@dataclass(frozen=True)
class Ended:
    """The end of the function, for the driving thread."""

    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class _Thrown:
    """The exception that is to end the function."""

    error: BaseException


class Turns:
    """Runs a function on a thread of its own; exactly one of the two threads runs at any time.

    The function begins at the first `resume`, in the context (`contextvars`) in which this was made. Its memory
    comes from where the driving thread's comes: other arenas give gradients back to the kernel in each step. So
    does its GPU: a new thread of itself would have the first one.

    Args:
        function: called once, on its own thread; it gives the turn back by `ask`.
        name: of the thread.

    Attributes:
        ended: how the function has ended; None before.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.ended: Ended | None = None
        self._function = function
        self._given: SimpleQueue[Any] = system().queue()
        self._asked: SimpleQueue[Any] = system().queue()
        self._body, self._name = functools.partial(contextvars.copy_context().run, self._run), name
        self._begun = False
        self._ident: int | None = None  # of the function's thread, once that runs
        self._gpu: torch.device | None = None  # of the thread that began it

    def resume(self, answer: Any = None) -> Any:
        """Let the function go on until it asks for something; return its request, or an `Ended`.

        Args:
            answer: the value that its `ask` returns.
        """
        if self.ended is not None:
            return self.ended
        if not self._begun:
            self._begun, self._gpu = True, chosen_gpu()
            (start_thread if keeps_here() else system().start)(self._body, self._name)
        self.show()
        try:
            self._given.put(answer)
            asked = self._asked.get()
        finally:
            del runs_in_turn[_thread.get_ident()]
        if isinstance(asked, Ended):
            self.ended = asked
        return asked

    def show(self) -> None:
        """Show the function's frames as those of the calling thread, until its next turn is over."""
        runs_in_turn[_thread.get_ident()] = lambda: self._ident

    def end(self, error: BaseException) -> None:
        """Raise an exception in the function, in its `ask`, as often as it asks for more, until it has ended."""
        if not self._begun:
            self.ended = Ended(error=error)
        while self.ended is None:
            self.resume(_Thrown(error))

    def ask(self, what: Any) -> Any:
        """Give the turn to the driving thread, on the function's thread; return what `resume` is given."""
        self._asked.put(what)
        answer = self._given.get()
        if isinstance(answer, _Thrown):
            raise answer.error
        return answer

    def _run(self) -> None:
        self._ident = _thread.get_ident()  # that of its frames, in a simulation too
        first = self._given.get()
        if isinstance(first, _Thrown):
            self._asked.put(Ended(error=first.error))
            return
        try:
            if self._gpu is not None:
                choose_gpu(self._gpu)
            ended = Ended(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again on the driving thread
            ended = Ended(error=error)
        self._asked.put(ended)
