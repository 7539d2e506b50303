"""The contract of a `Runtime`: a class of tests, derived for each implementation."""

from __future__ import annotations

import os
import re
from concurrent.futures import Future
from typing import Any

import pytest

from steepest.core import Runtime
from steepest.core.system import system
from steepest.errors import ConfigurationError, ModelRaisedError, PeerLostError
from tests.core.models import Body

SECONDS = 60.0


def is_there(pid: int) -> bool:
    """Return whether there is a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class RuntimeContract:
    """What every runtime does; a fixture `runtime` gives one, which ends after each test.

    Attributes:
        body: of the processes.
        exited, killed, unmade: what is told of the end of one that exits with status 3, is killed, or is
            not made.
    """

    body: type[Body] = Body
    exited = "^exited with code 3$"
    killed = "^killed by SIGKILL$"
    unmade = "^exited with code 1$"

    def test_calls_of_a_process_run_in_order_on_one_body(self, runtime: Runtime) -> None:
        process = runtime.start("body", self.body, 1)
        calls = [runtime.call(process, "add", number) for number in (2, 3)]

        assert [system().result(call, SECONDS) for call in calls] == [[1, 2], [1, 2, 3]]
        assert process.name == "body"
        assert not runtime.watch(process).done()

    @pytest.mark.parametrize(
        ("method", "expected", "words"),
        [
            ("raise_", ModelRaisedError, "body: KeyError: 'no such key'"),
            ("leave", ModelRaisedError, "SystemExit: leaving"),
            ("unsendable", ConfigurationError, "the result cannot be pickled"),
            ("nothing", ModelRaisedError, "no attribute 'nothing'"),
        ],
    )
    def test_what_a_method_raises_is_told_and_the_process_goes_on(
        self, runtime: Runtime, method: str, expected: type[Exception], words: str
    ) -> None:
        process = runtime.start("body", self.body, 1)

        with pytest.raises(expected, match=words):
            system().result(runtime.call(process, method), SECONDS)
        assert system().result(runtime.call(process, "add", 2), SECONDS) == [1, 2]

    def test_what_cannot_be_pickled_is_refused(self, runtime: Runtime) -> None:
        process = runtime.start("body", self.body, 1)

        with pytest.raises(ConfigurationError, match="top level of a module"):
            runtime.call(process, "add", lambda: None)

    @pytest.mark.parametrize(("method", "arguments"), [("end", (3,)), ("wait", ())])
    def test_a_death_fails_all_calls_and_has_its_cause(
        self, runtime: Runtime, method: str, arguments: tuple[Any, ...]
    ) -> None:
        process, other = runtime.start("body", self.body, 1), runtime.start("other", self.body, 5)
        calls = [runtime.call(process, method, *arguments), runtime.call(process, "add", 2)]
        system().result(runtime.call(other, "add", 6), SECONDS)
        if method == "wait":
            runtime.end(process)

        cause = system().result(runtime.watch(process), SECONDS)
        assert re.search(self.exited if method == "end" else self.killed, cause), cause
        calls.append(runtime.call(process, "add", 3))
        for call in calls:
            assert call.done()
            with pytest.raises(PeerLostError, match=f"body .* died: {re.escape(cause)}"):
                call.result()
        runtime.end(process)  # once more, which does nothing
        assert system().result(runtime.call(other, "add", 7), SECONDS) == [5, 6, 7]

    def test_a_body_that_is_not_made_ends_its_process(self, runtime: Runtime) -> None:
        process = runtime.start("body", self.body)

        cause = system().result(runtime.watch(process), SECONDS)
        assert re.search(self.unmade, cause), cause

    def test_a_wait_ends_with_a_future_or_in_time(self, runtime: Runtime) -> None:
        process = runtime.start("body", self.body, 1)
        system().result(runtime.call(process, "add", 2), SECONDS)
        never, began = runtime.call(process, "wait"), runtime.now()

        runtime.wait([never, runtime.watch(process)], 0.05)
        assert 0.05 <= runtime.now() - began < SECONDS
        assert not never.done()
        runtime.end(process)
        runtime.wait([runtime.watch(process)], SECONDS)
        assert runtime.watch(process).done()

    def test_nothing_is_left_when_a_runtime_is_closed(self, runtime: Runtime) -> None:
        processes = [runtime.start(name, self.body, 1) for name in ("one", "two")]
        for process in processes:
            system().result(runtime.call(process, "add", 2), SECONDS)

        runtime.close()
        runtime.close()
        for process in processes:
            assert runtime.watch(process).done()
            assert process.pid
            while is_there(process.pid):  # for the moment in which its memory is freed
                runtime.wait([Future()], 0.05)
