"""Room for processes that leave a node is asked for once, and its answer is awaited."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from steepest.cluster import growth
from steepest.cluster.growth import Room


class Group:
    """A placement group. A question is answered some time after it was asked, never at once."""

    def __init__(self) -> None:
        self.asked = 0

    def ready(self) -> SimpleNamespace:
        self.asked += 1
        return SimpleNamespace(looks=0)


def test_an_answer_that_comes_late_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that is asked anew at each look, and not waited for, is never answered."""
    group = Group()
    seats = iter([5, 6])
    placement = SimpleNamespace(order=[0, 1], add=lambda room: placement.order.extend(seats))

    def wait(questions: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout == 0
        (question,) = questions
        question.looks += 1
        return (questions, []) if question.looks > 1 else ([], questions)

    monkeypatch.setattr(growth.ray, "wait", wait)
    reservation = SimpleNamespace(group=group, release=lambda: None)
    monkeypatch.setattr(growth, "ask_for_room", lambda *about: reservation)
    room = Room(SimpleNamespace(bundle={}, placement=placement), 2, ())  # type: ignore[arg-type]
    assert not room.is_there
    assert room.is_there
    assert group.asked == 1
    assert room.take() == [5, 6]
