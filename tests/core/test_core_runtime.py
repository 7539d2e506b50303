"""Plain processes keep the contract of a `Runtime`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from steepest.core import ProcessRuntime, Runtime
from steepest.core.system import system
from steepest.errors import ConfigurationError
from tests.core.imported import Imported
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


def test_other_start_methods_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="start_method='fork': give one of"):
        ProcessRuntime("fork")
