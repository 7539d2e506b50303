"""A function that takes turns with the thread that drives it uses that one's memory."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from steepest.core.tensors.allocator import keeps_here, start_thread
from steepest.loop.turns import Turns


@pytest.mark.parametrize("keeps", [True, False])
def test_the_function_allocates_where_the_driving_thread_does(keeps: bool) -> None:
    """Else the gradients of a large model would be mapped and zeroed anew in each step."""
    found: Future[tuple[bool, bool]] = Future()

    def drive() -> None:
        turns = Turns(keeps_here, "a user's function")
        found.set_result((keeps_here(), turns.resume().result))

    if keeps:
        start_thread(drive, "driving")
    else:
        threading.Thread(target=drive, daemon=True).start()
    assert found.result(60) == (keeps, keeps)
