"""What is called in a step of a job in one thread."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

from steepest.testing import InProcessCluster


def calls_of(cluster: InProcessCluster, steps: int) -> Counter[str]:
    """The calls of the library's functions in so many steps."""
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if (event == "call" and "/steepest/" in code.co_filename) or code.co_filename == "<string>":
            calls[f"{code.co_filename.rpartition('/steepest/')[2]}:{code.co_name}"] += 1

    sys.setprofile(see)
    try:
        cluster.step(steps)
    finally:
        sys.setprofile(None)
    return Counter({who: count for who, count in calls.items() if not who.startswith("testing/")})
