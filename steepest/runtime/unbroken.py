"""Lets clean-up finish even if a second Ctrl-C, or a signal, arrives in the middle of it."""

from __future__ import annotations

from collections.abc import Callable

from steepest.core.system import system


def unbroken(function: Callable[[], object], name: str) -> None:
    """Call a function on a thread of its own, and wait for it; raise what it raises.

    An exception in the caller's wait, such as Ctrl-C's, leaves the function alone: the interpreter awaits it at exit.

    Args:
        function: called once.
        name: of the thread.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)

    try:
        thread = system().start(run, name, daemon=False)
    except RuntimeError:  # the interpreter ends, and starts no threads any more
        run()
    else:
        thread.join()
    if errors:
        raise errors[0]
