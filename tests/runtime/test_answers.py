"""Answers: as futures are, and whole after an exception at each moment of a wait, as signals raise it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from steepest.runtime.answers import Answer
from tests.each_moment import each_moment

SECONDS = 30.0


def test_the_first_result_counts_and_everyone_is_told() -> None:
    answer: Answer[int] = Answer()
    told: list[int] = []
    answer.add_done_callback(lambda answer: told.append(answer.result()))
    with pytest.raises(FutureTimeoutError):
        answer.result(0.0)
    assert not answer.wait(0.0)
    threading.Thread(target=answer.set_result, args=(3,)).start()
    assert answer.result(SECONDS) == 3
    answer.set_result(4)
    answer.set_exception(KeyError())
    assert answer.exception() is None
    answer.add_done_callback(lambda answer: told.append(answer.result()))
    assert told == [3, 3]


def test_an_exception_is_raised_wherever_it_is_asked_for() -> None:
    answer: Answer[int] = Answer()
    answer.set_exception(KeyError("this"))
    for _ in range(2):
        with pytest.raises(KeyError, match="this"):
            answer.result()
    assert isinstance(answer.exception(), KeyError)


def test_a_wait_that_is_ended_at_any_moment_keeps_nobody_from_answering() -> None:
    """Of `concurrent.futures.Future` the lock stays taken after some of these moments."""
    made: list[Answer[int]] = []

    def prepare() -> Callable[[], object]:
        made.append(Answer())
        return lambda: made[-1].wait(0.001)

    for _ in each_moment(prepare):
        setter = threading.Thread(target=made[-1].set_result, args=(3,), daemon=True)
        setter.start()
        setter.join(SECONDS)
        assert made[-1].result(0.0) == 3
    assert len(made) > 10


def test_an_answer_that_comes_as_a_wait_for_it_ends_is_no_error() -> None:
    """Waits end all the time while another thread answers: each returns whether there is an answer."""
    for _ in range(300):
        answer: Answer[int] = Answer()
        setter = threading.Thread(target=answer.set_result, args=(1,))
        setter.start()
        while not answer.wait(0.0):
            pass
        setter.join(SECONDS)
        assert answer.result(0.0) == 1
