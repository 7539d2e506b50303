"""What this process holds of a Ray cluster: its trainers and servers that are not shut down."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field

import ray

from steepest.runtime.placement import ensure_ray

_lock = threading.RLock()
_holders: list[Holder] = []
#: Ray's id of the job with which steepest began Ray; Ray ends with the last holder that is let go.
_began: str | None = None


@dataclass(eq=False)
class Holder:
    """A trainer or parameter server that is not shut down."""

    what: str
    workers: int = 0  # how many bundles it has reserved
    bundle: dict[str, float] = field(default_factory=dict)  # resources of each
    job: str = ""  # Ray's id of this process' job

    def __str__(self) -> str:
        held = ", ".join(
            f"{name}: {amount * self.workers:g}" for name, amount in self.bundle.items()
        )
        return f"{self.what} ({held})"


def hold(what: str, *, verbose: bool = False) -> Holder:
    """Return a new holder; connect to Ray before, if need be, see `ensure_ray`."""
    global _began
    with _lock:
        if ensure_ray(verbose=verbose):
            _began = _job()
        holder = Holder(what, job=_job())
        _holders.append(holder)
        return holder


def let_go(
    holder: Holder,
    *,
    dropped: bool = False,  # never shut down: Ray goes on, which other code may use by now
) -> None:
    """Remove a holder; a second call does nothing. Ray ends with the last one, if `hold` started it."""
    global _began
    if holder not in _holders:
        return
    _holders.remove(holder)
    if dropped:  # perhaps within a garbage collection, which may come in the middle of anything
        return
    with _lock:
        if ray.is_initialized() and _began == _job() and not _others(None):
            _began = None
            ray.shutdown()


def who_else(holder: Holder) -> str:
    """Return a sentence about what else this process holds and how to free it; "" for nothing."""
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
    """Return the other holders of the present connection to Ray."""
    return [other for other in _holders if other is not holder and other.job == _job()]


def _job() -> str:
    job: str = ray.get_runtime_context().get_job_id()
    return job
