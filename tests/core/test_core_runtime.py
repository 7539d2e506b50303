"""Plain processes keep the contract of a `Runtime`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver

import pytest

from steepest.core import ProcessRuntime, Runtime
from steepest.core.system import system
from steepest.errors import ConfigurationError, PeerLostError
from tests.core.imported import Imported
from tests.core.models import Body
from tests.core.runtime_contract import SECONDS, RuntimeContract, is_there


class TestPlainProcesses(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> Iterator[Runtime]:
        made = ProcessRuntime()
        yield made
        made.close()


def test_a_forked_child_has_torch_and_what_workers_run_before_it_is_made() -> None:
    runtime = ProcessRuntime()
    child = runtime.start("child", Imported)

    for module in ("torch", "steepest.core.worker_process"):
        assert system().result(runtime.call(child, "before", module), SECONDS)

    runtime.close()


def test_children_that_have_been_reaped_and_others_are_ended_alike() -> None:
    """The fork server reaps a child before this process has noticed its end."""

    class Late(ProcessRuntime):
        """Notices no end until it is asked to."""

        def start_thread(self, run: Callable[[], None], name: str) -> None:
            late.append((run, name)) if name.startswith("from ") else super().start_thread(
                run, name
            )

    late: list[tuple[Callable[[], None], str]] = []
    runtime = Late()
    children = [runtime.start(f"child {number}", Body, number) for number in range(3)]
    for child in children[:2]:
        os.kill(child.pid, signal.SIGKILL)
    limit = time.monotonic() + SECONDS
    while any(is_there(child.pid) for child in children[:2]):
        assert time.monotonic() < limit
        os.sched_yield()

    runtime.end(children[0])
    for run, name in late:
        ProcessRuntime.start_thread(runtime, run, name)
    runtime.close()

    assert [runtime.watch(child).result(SECONDS) for child in children] == ["killed by SIGKILL"] * 3


@pytest.mark.long
def test_a_child_that_is_killed_with_its_fork_server_did_not_exit_by_itself() -> None:
    """A program that kills processes by their command line hits the fork server with all its children."""
    runtime = ProcessRuntime()
    child = runtime.start("child", Body, 1)
    call = runtime.call(child, "wait")
    server: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGKILL)
    runtime.end(child)
    with pytest.raises(PeerLostError, match="or was killed together with the fork server"):
        system().result(call, SECONDS)
    successor = runtime.start("successor", Body, 1)
    assert system().result(runtime.call(successor, "add", 2), SECONDS) == [1, 2]
    runtime.close()


def test_other_start_methods_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="start_method='fork': give one of"):
        ProcessRuntime("fork")
