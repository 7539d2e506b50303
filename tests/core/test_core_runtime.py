"""Plain processes keep the contract of a `Runtime`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from steepest.core import ProcessRuntime, Runtime
from steepest.errors import ConfigurationError
from tests.core.runtime_contract import RuntimeContract


class TestPlainProcesses(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> Iterator[Runtime]:
        made = ProcessRuntime("forkserver")
        yield made
        made.close()


def test_other_start_methods_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="start_method='fork': give one of"):
        ProcessRuntime("fork")
