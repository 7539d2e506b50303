"""The C library keeps what is freed: large blocks come from one heap, and are not mapped anew in each step."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from steepest.core.tensors.allocator import keep_freed_memory, on_main_arena, start_thread

PROGRAM = """
import os, resource
from concurrent.futures import Future
import torch
from steepest.core.tensors.allocator import keep_freed_memory, on_main_arena, start_thread

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def body():
    for _ in range(10):
        torch.ones(16 << 20)  # 64 MB; what glibc caches of small blocks moves the first eight
    before = faults()
    for _ in range(5):
        torch.ones(16 << 20)
    found.set_result((on_main_arena(), faults() - before))

found = Future()
if not os.fork():  # torch is imported once for both
    body()
    print("plain", *found.result(), flush=True)
    os._exit(0)
os.wait()
assert keep_freed_memory()
start_thread(body, "keeps")
print("kept", *found.result(60))
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_memory_that_is_freed_is_not_mapped_anew() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    plain, kept = (line.split() for line in done.stdout.splitlines())
    assert plain[0] == "plain"
    assert int(plain[2]) > 5 * 1000
    assert kept[:2] == ["kept", "True"], "it runs on the main arena"
    assert int(kept[2]) < 1000


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
