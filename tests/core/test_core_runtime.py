"""Plain processes keep the contract of a `Runtime`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from steepest.core import ProcessRuntime, Runtime
from steepest.core.system import system
from steepest.errors import ConfigurationError, PeerLostError
from tests.core.imported import Imported
from tests.core.models import Body
from tests.core.runtime_contract import SECONDS, RuntimeContract


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
