"""What is called of the library, such as in a step of a job in one thread."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import steepest
from steepest.testing import InProcessCluster

PACKAGE = (
    f"{Path(steepest.__file__).parent}/"  # wherever the checkout lies, and whatever it is called
)


@contextlib.contextmanager
def library_calls() -> Iterator[Counter[str]]:
    """Count the calls of the library's functions in a block, by file and name; nothing is collected meanwhile.

    A finalizer that runs whenever Python collects would be counted where it happens to run.
    """
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        file = code.co_filename
        if event == "call" and (file.startswith(PACKAGE) or file == "<string>"):
            calls[f"{file.removeprefix(PACKAGE)}:{code.co_name}"] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(see)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def calls_of(cluster: InProcessCluster, steps: int) -> Counter[str]:
    """The calls of the library's functions in so many steps."""
    with library_calls() as calls:
        cluster.step(steps)
    return Counter({who: count for who, count in calls.items() if not who.startswith("testing/")})
