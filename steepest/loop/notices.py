"""Notices that a worker's node will be removed."""

from __future__ import annotations

import math

from steepest.core.system import system
from steepest.runtime.job_runtime import runtime

_LOOK_SECONDS = 1.0


class Notices:
    """The notices of a worker's node; the runtime is asked once a second at most."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._looked = -math.inf

    def leaving(self) -> float | None:
        """Return when this worker's node will be removed, see `steepest.leaving`."""
        now = system().now()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            at = runtime().leaving_nodes().get(runtime().node)
            self._at = math.inf if at == 0 else at
        return self._at
