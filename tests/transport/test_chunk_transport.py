"""Which chunks travel when servers change processes: those that change hands, once each, and by way of nobody else."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from steepest.core.messages.message import server_peer
from steepest.runtime.wiring import carry, holdings

CHUNKS = range(6)


class Process:
    """Notes what it gives, and to whom it goes."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.taken: list[int] = []

    def give(self, chunks: list[int]) -> list[int]:
        self.given.append(chunks)
        return chunks

    def take_over(self, *gifts: list[int]) -> None:
        self.taken += [chunk for gift in gifts for chunk in gift]


@pytest.fixture(autouse=True)
def _calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(process: Process, method: str, *arguments: Any) -> Any:
        return getattr(process, method)(*arguments)

    monkeypatch.setattr("steepest.runtime.wiring.runtime", lambda: SimpleNamespace(call=call))


def carried(before: dict[int, list[Process]], after: dict[int, list[Process]]) -> None:
    waited: list[str] = []

    def get(calls: list[Any], what: str, names: list[Process]) -> list[Any]:
        assert len(calls) == len(names)
        waited.append(what)
        return calls

    carry(SimpleNamespace(get=get, names=list), before, after)
    assert len(waited) == 1
    for process in {each for holders in after.values() for each in holders}:
        had = {chunk for chunk, holders in before.items() if process in holders}
        has = {chunk for chunk, holders in after.items() if process in holders}
        assert sorted(process.taken) == sorted(has - had)


def test_nothing_travels_when_servers_stay() -> None:
    a, b = Process(), Process()
    held = {chunk: [(a, b)[chunk % 2]] for chunk in CHUNKS}
    carried(held, held)
    assert a.given == b.given == []


def test_a_new_server_gets_its_share_and_no_other() -> None:
    a, b = Process(), Process()
    carried({chunk: [a] for chunk in CHUNKS}, {chunk: [(a, b)[chunk % 2]] for chunk in CHUNKS})
    assert a.given == [[1, 3, 5]]
    assert b.taken == [1, 3, 5]


def test_those_who_have_copies_share_the_work() -> None:
    a, b, c = Process(), Process(), Process()
    carried({chunk: [a, b] for chunk in CHUNKS}, {chunk: [c, a] for chunk in CHUNKS})
    assert Counter(len(chunks) for process in (a, b) for chunks in process.given) == {3: 2}
    assert sorted(c.taken) == list(CHUNKS)


def test_several_servers_of_one_process_are_one_place() -> None:
    """One worker hosts all servers; then each gets a process of its own."""
    alone, a, b = Process(), Process(), Process()
    job = SimpleNamespace(num_servers=2, holders=((0,), (1,), (0,), (1,), (0,), (1,)))
    before = holdings(job, lambda server: alone)  # type: ignore[arg-type]
    after = holdings(job, {server_peer(0): a, server_peer(1): b}.__getitem__)  # type: ignore[arg-type]
    carried({**before}, {**after})  # type: ignore[dict-item]
    assert alone.given == [[0, 2, 4], [1, 3, 5]]
