"""The trainers and parameter servers of this process that are not shut down, and so hold a runtime."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field

from steepest.errors import ConfigurationError
from steepest.runtime.job_runtime import choose, chosen, runtime

_lock = threading.RLock()
_holders: list[Holder] = []
#: The name of the connection that `hold` has made; it ends with the last holder that is let go.
_began: str | None = None


def _leave() -> None:
    """Let a forked child hold none of its parent's."""
    global _lock, _began
    _lock, _began = threading.RLock(), None  # another thread may have held the lock
    _holders.clear()


os.register_at_fork(after_in_child=_leave)


@dataclass(eq=False)
class Holder:
    """A trainer or parameter server that is not shut down."""

    what: str
    workers: int = 0  # how many bundles it has reserved
    bundle: dict[str, float] = field(default_factory=dict)  # resources of each
    job: str = ""  # the name of the connection

    def __str__(self) -> str:
        held = ", ".join(
            f"{name}: {amount * self.workers:g}" for name, amount in self.bundle.items()
        )
        return f"{self.what} ({held})"


def hold(holder: Holder, name: str = "auto", *, verbose: bool = False) -> None:
    """Add a new holder; connect before if necessary, see `JobRuntime.connect`.

    The caller makes the holder, and can so let it go even if this call is interrupted.

    Args:
        holder: of the caller.
        name: of the runtime, see `RunConfig`; "auto" is the runtime that this process holds already.
        verbose: see `JobRuntime.connect`.

    Raises:
        ConfigurationError: this process already holds another runtime.
    """
    global _began
    with _lock:
        wanted = runtime().name if _holders and name == "auto" else chosen(name)
        if _holders and runtime().owns_process and runtime().name != wanted:
            raise ConfigurationError(
                f"runtime={name!r} for {holder.what}, while this program holds {' and '.join(map(str, _holders))}, "
                f"which has runtime={runtime().name!r}: call shutdown() of that before, or give the same runtime"
            )
        choose(wanted)
        if runtime().connect(verbose=verbose):
            _began = runtime().job
        holder.job = runtime().job
        _holders.append(holder)


def let_go(
    holder: Holder,
    *,
    dropped: bool = False,  # never shut down: the connection goes on, which other code may use by now
) -> None:
    """Remove a holder; a second call does nothing. The connection that `hold` has made ends with the last one."""
    global _began
    if holder not in _holders:
        return
    _holders.remove(holder)
    if (
        dropped
    ):  # perhaps within a garbage collection, which may come in the middle of any other work
        return
    with _lock:
        if runtime().is_up and _began == runtime().job and not _others(None):
            _began = None
            runtime().shutdown()


def who_else(holder: Holder) -> str:
    """Return a sentence on the other holders of this process and how to end them; "" for none."""
    with _lock:
        others = [other for other in _others(holder) if other.workers]
    if not others:
        return ""
    held = "; sys.last_value may hold what no name does" if hasattr(sys, "last_value") else ""
    return (
        f"; this process holds {' and '.join(map(str, others))}: call shutdown() of what you no "
        f"longer need, in a notebook before the name is bound to the next one{held}"
    )


def _others(holder: Holder | None) -> list[Holder]:
    """Return the other holders of the present connection."""
    return [other for other in _holders if other is not holder and other.job == runtime().job]
