"""Where the time of one process goes, by parts of the core that are wrapped with a stopwatch."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from typing import Any

from steepest.core.engine.exchange import PushPull
from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.transport.frames import FrameReader
from steepest.core.transport.sockets import WireTransport
from steepest.core.transport.stream import WireChannel
from steepest.strategies.compression.gradient_compressor import GradientCompressor
from steepest.tables.modules.torch_model import TorchModel

PARTS: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    (
        "compute",
        TorchModel,
        ("compute_gradients",),
    ),  # with the copy of gradients into the flat vector
    ("push", PushPull, ("ready",)),
    ("pack", GradientCompressor, ("pack",)),
    ("send", WireChannel, ("flush",)),
    ("receive", FrameReader, ("read",)),  # with the copy of weights into the model
    ("check", ServerChunk, ("squares", "check")),
    ("reduce", ServerChunk, ("reduce",)),
    ("apply", ServerChunk, ("apply",)),
    ("wait", WireTransport, ("_select",)),
)


class Clock:
    """Seconds by part, those of a part inside another one counted there only. One thread."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._inside = [0.0]  # seconds of parts within each part that is running
        self._began = time.perf_counter()

    def install(self) -> None:
        for part, owner, names in PARTS:
            for name in names:
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds = time.perf_counter() - begin
                self._seconds[part] += seconds - self._inside.pop()
                self._inside[-1] += seconds

        return timed

    def take(self) -> dict[str, float]:
        """Seconds since the last time; "other" is the rest of them, the protocol for the most part."""
        now = time.perf_counter()
        found = dict(self._seconds)
        found["other"] = now - self._began - sum(found.values())
        self._seconds.clear()
        self._began = now
        return found


CLOCK = Clock()
