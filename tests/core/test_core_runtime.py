"""The contract of a `Runtime`, for every implementation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from steepest.core import ProcessRuntime, Runtime
from steepest.errors import ConfigurationError, ModelRaisedError, PeerLostError
from tests.core.models import Body

SECONDS = 60.0

IMPLEMENTATIONS: list[Callable[[], Runtime]] = [lambda: ProcessRuntime("forkserver")]


@pytest.fixture(params=IMPLEMENTATIONS)
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A runtime of each kind."""
    made = request.param()
    yield made
    made.close()


def test_calls_of_a_process_run_in_order_on_one_body(runtime: Runtime) -> None:
    process = runtime.start("body", Body, 1)
    calls = [runtime.call(process, "add", number) for number in (2, 3)]

    assert [call.result(SECONDS) for call in calls] == [[1, 2], [1, 2, 3]]
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
    runtime: Runtime, method: str, expected: type[Exception], words: str
) -> None:
    process = runtime.start("body", Body, 1)

    with pytest.raises(expected, match=words):
        runtime.call(process, method).result(SECONDS)
    assert runtime.call(process, "add", 2).result(SECONDS) == [1, 2]


def test_what_cannot_be_pickled_is_refused(runtime: Runtime) -> None:
    process = runtime.start("body", Body, 1)

    with pytest.raises(ConfigurationError, match="top level of a module"):
        runtime.call(process, "add", lambda: None)


@pytest.mark.parametrize(("method", "arguments"), [("end", (3,)), ("wait", ())])
def test_a_death_fails_all_calls_and_has_its_cause(
    runtime: Runtime, method: str, arguments: tuple[Any, ...]
) -> None:
    process, other = runtime.start("body", Body, 1), runtime.start("other", Body, 5)
    calls = [runtime.call(process, method, *arguments), runtime.call(process, "add", 2)]
    runtime.call(other, "add", 6).result(SECONDS)
    if method == "wait":
        runtime.end(process)

    cause = "exited with code 3" if method == "end" else "killed by SIGKILL"
    assert runtime.watch(process).result(SECONDS) == cause
    calls.append(runtime.call(process, "add", 3))
    for call in calls:
        assert call.done()
        with pytest.raises(PeerLostError, match=f"body .* died: {cause}"):
            call.result()
    runtime.end(process)  # once more, which does nothing
    assert runtime.call(other, "add", 7).result(SECONDS) == [5, 6, 7]


def test_a_body_that_is_not_made_ends_its_process(runtime: Runtime) -> None:
    process = runtime.start("body", Body)

    assert runtime.watch(process).result(SECONDS) == "exited with code 1"


def test_a_wait_ends_with_a_future_or_in_time(runtime: Runtime) -> None:
    process = runtime.start("body", Body, 1)
    runtime.call(process, "add", 2).result(SECONDS)
    never, began = runtime.call(process, "wait"), runtime.now()

    runtime.wait([never, runtime.watch(process)], 0.05)
    assert 0.05 <= runtime.now() - began < SECONDS
    assert not never.done()
    runtime.end(process)
    runtime.wait([runtime.watch(process)], SECONDS)
    assert runtime.watch(process).done()


def test_nothing_is_left_when_a_runtime_is_closed(runtime: Runtime) -> None:
    processes = [runtime.start(name, Body, 1) for name in ("one", "two")]
    for process in processes:
        runtime.call(process, "add", 2).result(SECONDS)

    runtime.close()
    runtime.close()
    for process in processes:
        assert runtime.watch(process).done()
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_other_start_methods_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="start_method='fork': give one of"):
        ProcessRuntime("fork")
