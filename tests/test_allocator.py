"""The C library keeps what is freed: large blocks come from one heap, and are not mapped anew in each step."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from steepest.allocator import keep_freed_memory, on_main_arena, start_thread

PROGRAM = """
import resource, sys
from concurrent.futures import Future
import torch
from steepest.allocator import keep_freed_memory, on_main_arena, start_thread

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def body():
    for _ in range(5):
        torch.ones(16 << 20)  # 64 MB, at one address or another
    before = faults()
    for _ in range(5):
        torch.ones(16 << 20)
    found.set_result((on_main_arena(), faults() - before))

found = Future()
if sys.argv[1] == "keep":
    assert keep_freed_memory()
    start_thread(body, "keeps")
else:
    body()
print(*found.result(60))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_memory_that_is_freed_is_not_mapped_anew() -> None:
    found = {}
    for how in ("keep", "plain"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=120
        )
        on_main, faults = done.stdout.split()
        found[how] = int(faults)
        assert how == "plain" or on_main == "True"
    assert found["plain"] > 5 * 1000
    assert found["keep"] < 1000


def test_one_thread_runs_the_body_and_the_others_end() -> None:
    ran: list[str] = []
    done: Future[bool] = Future()

    def body() -> None:
        ran.append(threading.current_thread().name)
        done.set_result(on_main_arena())

    before = threading.active_count()
    thread = start_thread(body, "chosen")
    done.result(60)
    thread.join(60)
    assert ran == ["chosen"]
    for other in threading.enumerate():
        if other.name == "chosen":
            other.join(60)
    assert threading.active_count() <= before


def test_elsewhere_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
    assert on_main_arena(), "so that nobody looks for another thread"
