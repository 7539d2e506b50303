"""Rows that a server sends piece by piece, as the reader takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from steepest.core.engine.client import Client
from steepest.core.messages.message import Kind, Message, Peer, server_peer
from steepest.core.messages.snapshots import Snapshot, SnapshotEnd, StateTensor
from steepest.core.tensors.layout import Chunk, ElementType, ParameterLayout
from steepest.errors import CheckpointError, DeadlineError
from steepest.tables.job import table_chunk
from steepest.tables.job.row_snapshots import READER_SECONDS, RowSnapshots
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.rows.dealing import Dealing
from tests.hand_moved_clock import HandMovedClock
from tests.table_tools import push, table

READER = Peer("client", 0)
CHUNK = Chunk(0, ElementType.of(torch.float32), True, 0, 0, ())
END = SnapshotEnd(1, 7, 4)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> TableChunk:
    """A shard of 20 rows, which travel four at a time."""
    monkeypatch.setattr(table_chunk, "_PIECE_BYTES", 4 * (28 + 16))
    found = TableChunk(CHUNK, Dealing((table(),), 1, 0, 0))
    push(found.rows, range(20), 1)
    return found


def order(sequence: int = 7) -> Snapshot:
    return Snapshot(1, sequence, 4, READER, "state")


def test_a_reader_has_two_pieces_that_it_has_not_taken(held: TableChunk) -> None:
    sent: list[Message] = []
    snapshots = RowSnapshots(lambda peer, message: sent.append(message))
    snapshots.begin(order(), [held], END)
    waits = [m for m in sent if getattr(m.body, "waits", False)]
    assert len(waits) == 2
    assert not any(m.kind is Kind.SNAPSHOT_END for m in sent)
    for _ in range(9):  # some of them copies
        snapshots.go_on(READER, 7)
        snapshots.go_on(READER, 8)
        snapshots.go_on(Peer("client", 1), 7)
    ends = [m.kind for m in sent if m.kind is Kind.SNAPSHOT_END]
    assert ends == [sent[-1].kind]
    ids = [m.payload for m in sent if getattr(m.body, "key", "") == "ids"]
    assert torch.cat([p.view(torch.int64) for p in ids if p is not None]).tolist() == list(
        range(20)
    )


def test_what_a_lost_reader_has_not_taken_is_dropped(held: TableChunk) -> None:
    sent: list[Any] = []
    snapshots = RowSnapshots(lambda peer, message: sent.append(message))
    snapshots.begin(order(), [held], END)
    assert len(held.rows._cuts) == 1
    snapshots.lost(READER)
    assert not len(held.rows._cuts)
    before = len(sent)
    snapshots.go_on(READER, 7)
    assert len(sent) == before


def test_a_client_takes_a_read_that_was_given_up_to_its_end(held: TableChunk) -> None:
    sent: list[tuple[Peer, Message]] = []
    client = Client(
        ParameterLayout((), (CHUNK,)), [[0]], 1, lambda peer, message: sent.append((peer, message))
    )
    answers: list[Message] = []
    snapshots = RowSnapshots(lambda peer, message: answers.append(message))
    snapshots.begin(order(sequence=99), [held], END)
    for _ in range(2):
        for message in answers:
            client.handle(server_peer(0), message)
    assert {(peer, message.kind) for peer, message in sent} == {(server_peer(0), Kind.READ_ON)}
    assert {message.body.sequence for _, message in sent} == {99}


def test_a_read_takes_as_long_as_its_slowest_server_sends_and_not_as_servers_let_it_wait(
    clock: HandMovedClock,
) -> None:
    sent: list[Message] = []
    layout = ParameterLayout((), (CHUNK, replace(CHUNK, index=1)))
    client = Client(layout, [[0], [1]], 2, lambda peer, message: sent.append(message))
    future = client.read("state")
    sequence = sent.pop().body.sequence
    part = StateTensor(sequence, 1, "rows", "values", 0, 1, False, "float32", [1])
    end = SnapshotEnd(1, sequence, 4)
    client.handle(server_peer(0), end.pack())
    clock.seconds += 5.0
    client.handle(server_peer(1), part.pack(payload=torch.zeros(4, dtype=torch.uint8)))
    clock.seconds += 0.5
    client.handle(server_peer(1), end.pack())
    assert future.result(0).seconds == 0.5


def test_a_read_that_is_held_goes_on_as_its_records_are_taken(held: TableChunk) -> None:
    sent: list[Message] = []
    layout = ParameterLayout((), (CHUNK,))
    client = Client(layout, [[0]], 1, lambda peer, message: sent.append(message))
    answers: list[Message] = []

    def answer(peer: Peer, message: Message) -> None:
        answers.append(message)
        client.handle(server_peer(0), message)

    snapshots = RowSnapshots(answer)
    future = client.read("state", held=True)
    sequence = sent.pop().body.sequence
    snapshots.begin(order(sequence), [held], SnapshotEnd(1, sequence, 4))
    taken, turns = [], 0
    while not future.done():
        assert not sent
        taken.append(client.take(future))
        turns += 1
        while sent:
            snapshots.go_on(READER, sent.pop().body.sequence)
        for message in answers:  # copies change nothing
            client.handle(server_peer(0), message)
    assert turns == 2  # of five pieces two came at once, and two in each turn
    found = [record for part in (*taken, future.result().records) for record in part]
    assert [about["start"] for _, about, _ in found if about["key"] == "values"] == [
        0,
        4,
        8,
        12,
        16,
    ]


def test_a_read_that_is_given_up_is_sent_to_its_end(held: TableChunk) -> None:
    sent: list[Message] = []
    layout = ParameterLayout((), (CHUNK,))
    client = Client(layout, [[0]], 1, lambda peer, message: sent.append(message))
    snapshots = RowSnapshots(lambda peer, message: client.handle(server_peer(0), message))
    future = client.read("state", held=True)
    sequence = sent.pop().body.sequence
    snapshots.begin(order(sequence), [held], SnapshotEnd(1, sequence, 4))
    client.give_up(future, CheckpointError("given up"))
    with pytest.raises(CheckpointError):
        future.result(0)
    while sent:
        snapshots.go_on(READER, sent.pop().body.sequence)
    assert not snapshots._begun
    assert not len(held.rows._cuts)
    assert client.take(future) == []


def test_a_snapshot_that_is_not_read_on_is_dropped_and_its_reader_hears_of_it(
    held: TableChunk, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[Message] = []
    layout = ParameterLayout((), (CHUNK,))
    client = Client(layout, [[0]], 1, lambda peer, message: sent.append(message))
    snapshots = RowSnapshots(lambda peer, message: client.handle(server_peer(0), message))
    future = client.read("state", held=True)
    sequence = sent.pop().body.sequence
    snapshots.begin(order(sequence), [held], SnapshotEnd(1, sequence, 4))
    snapshots.tick(5.0)
    snapshots.tick(READER_SECONDS)
    snapshots.go_on(READER, sequence)
    snapshots.tick(READER_SECONDS + 6.0)  # the reader has read on since
    assert len(held.rows._cuts) == 1
    assert not future.done()
    snapshots.tick(2 * READER_SECONDS + 6.0)
    assert not len(held.rows._cuts)
    assert "has not read on for 1800 s" in caplog.text
    with pytest.raises(DeadlineError, match=r"server 0.* has not read on for 1800 s"):
        future.result(0)
