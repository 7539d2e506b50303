# ruff: noqa: F811 - fixtures are imported, and named as arguments
"""Shared memory when descriptors, or memory to map it, have run out: payloads go through the socket, in order."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steepest.core.engine.topology import HostMap
from steepest.core.messages.message import COORDINATOR, Kind, Message, server_peer, worker_peer
from steepest.core.tensors import shared_memory
from steepest.core.tensors.shared_memory import (
    SHARED_FROM,
    Segment,
    allocate,
    forget_writes,
    make_writable,
    segment_of,
)
from steepest.core.transport.channel import Channel
from steepest.strategies.aggregation.host_aggregator import HostAggregator
from steepest.testing import InProcessCluster, linear_model_creator
from tests.limits import limited
from tests.said import heard, said
from tests.socket_ends import (
    Node,
    client,  # noqa: F401 - a fixture
    ends,  # noqa: F401 - a fixture
    node,  # noqa: F401 - a fixture
    server,  # noqa: F401 - a fixture
    together,
    until,
)

pytestmark = pytest.mark.skipif(not shared_memory.AVAILABLE, reason="memfd is Linux'")
WORKER = worker_peer(0)


@pytest.fixture
def family() -> str:
    return "unix"


@pytest.fixture
def leaving(server: Node) -> Node:
    """A server that leaves payloads where they lie, if it can."""
    server.place = leave
    return server


def leave(message: Message, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8) if message.payload is None else message.payload


@contextlib.contextmanager
def no_memory() -> Iterator[None]:
    """A reader cannot map what it is passed."""

    def refuse(*arguments: Any, **options: Any) -> Segment:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "attach", refuse)
        yield


def message_of(payload: torch.Tensor | None, sequence: int = 1) -> Message:
    return said(Kind.PUSH, payload, WORKER, COORDINATOR, sequence=sequence)


def lendable(value: int, size: int = SHARED_FROM) -> torch.Tensor:
    return allocate(size).fill_(value)


def is_lent(message: Message, owner: torch.Tensor) -> bool:
    """Whether a payload is read where its owner writes."""
    assert message.payload is not None
    assert torch.equal(message.payload, owner)
    owner += 1
    return torch.equal(message.payload, owner)


def test_who_cannot_make_shared_memory_sends(
    ends: tuple[Channel, Channel], leaving: Node, client: Node
) -> None:
    near = ends[0]
    with limited(0):
        own, fallen_back = torch.full((SHARED_FROM,), 3, dtype=torch.uint8), allocate(SHARED_FROM)
        assert segment_of(fallen_back) is None
        near.send(message_of(own, 1))
        near.send(message_of(fallen_back, 2))
        until(lambda: len(leaving.messages) == 2, client, leaving)
    assert torch.equal(leaving.messages[0].payload, own)
    assert torch.equal(leaving.messages[1].payload, fallen_back)
    later = lendable(9)
    near.send(message_of(later, 3))
    until(lambda: len(leaving.messages) == 3, client, leaving)
    assert is_lent(leaving.messages[2], later), "it lends again as soon as it can"


@pytest.mark.parametrize("lack", [lambda: limited(0), no_memory], ids=["descriptors", "memory"])
def test_who_cannot_map_what_is_lent_is_sent_it_in_order(
    ends: tuple[Channel, Channel], leaving: Node, client: Node, lack: Any
) -> None:
    near = ends[0]
    first, second = lendable(1), lendable(2, 4 * SHARED_FROM)
    payloads = [
        None,
        first,
        second[:SHARED_FROM],
        None,
        second,
        torch.full((100,), 4, dtype=torch.uint8),
        first,
    ]
    for sequence, payload in enumerate(payloads):
        near.send(message_of(payload, sequence))
    with lack():
        until(lambda: len(leaving.messages) == len(payloads), client, leaving)
    assert [heard(message).sequence for message in leaving.messages] == list(range(len(payloads)))
    for message, payload in zip(leaving.messages, payloads, strict=True):
        assert payload is None or torch.equal(message.payload, payload)
    assert leaving.lost == []
    assert not client.transport.in_use(first)
    assert not client.transport.in_use(second)
    leaving.messages.clear()
    near.send(message_of(first))
    until(lambda: leaving.messages, client, leaving)
    assert not is_lent(leaving.messages[0], first), "from there no more is lent to it"
    client.turn()
    assert client.transport.lending._doubting == set()


def test_what_was_passed_before_descriptors_ran_out_is_lent_on(
    ends: tuple[Channel, Channel], leaving: Node, client: Node
) -> None:
    near, memory = ends[0], lendable(1)
    near.send(message_of(memory))
    until(lambda: leaving.messages, client, leaving)
    with limited(0):
        other = lendable(7)
        for payload in (memory, other):
            near.send(message_of(payload))
        until(lambda: len(leaving.messages) == 3, client, leaving)
    assert torch.equal(leaving.messages[2].payload, other)
    assert is_lent(leaving.messages[1], memory)


def test_an_owner_may_let_go_of_what_the_reader_wants_again(
    ends: tuple[Channel, Channel], leaving: Node, client: Node
) -> None:
    ends[0].send(message_of(lendable(6)))
    with limited(0):
        until(lambda: leaving.messages, client, leaving)
    assert torch.equal(
        leaving.messages[0].payload, torch.full((SHARED_FROM,), 6, dtype=torch.uint8)
    )


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["small", "lent", "own", "new"]), st.booleans(), st.booleans()),
        max_size=12,
    )
)
def test_messages_are_whole_and_in_order_whenever_descriptors_run_out(
    script: list[tuple[str, bool, bool]],
) -> None:
    """Each entry: what is sent next, whether descriptors have run out, whether the other end looks at once."""
    reader, sender = Node(COORDINATOR), Node(WORKER)
    reader.place = leave
    memory = lendable(0, 16 * SHARED_FROM)
    try:
        address = reader.transport.listen("127.0.0.1")
        near = together(lambda: sender.transport.connect(address), reader)
        for number, (what, lacking, looks) in enumerate(script):
            with limited(0) if lacking else contextlib.nullcontext():
                payload = {
                    "small": torch.empty(50, dtype=torch.uint8),
                    "lent": memory[number * SHARED_FROM :][:SHARED_FROM],
                    "own": torch.empty(SHARED_FROM, dtype=torch.uint8),
                    "new": allocate(SHARED_FROM),
                }[what].fill_(number)
                near.send(message_of(payload, number))
                if looks:
                    until(lambda: len(reader.messages) == number + 1, reader, sender)  # noqa: B023 - at once
        until(lambda: len(reader.messages) == len(script), reader, sender)
        assert [heard(message).sequence for message in reader.messages] == list(range(len(script)))
        assert all(bool((m.payload == at).all()) for at, m in enumerate(reader.messages))
    finally:
        Node.alive.clear()
        for each in (reader, sender):
            each.transport.close()


def test_what_a_reader_wrote_is_forgotten_although_it_cannot_look_where(
    ends: tuple[Channel, Channel], leaving: Node, client: Node
) -> None:
    memory = lendable(1)
    ends[0].send(message_of(memory))
    until(lambda: leaving.messages, client, leaving)
    view = leaving.messages[0].payload
    assert make_writable(view)
    view[5000] = 7
    memory.fill_(2)
    with limited(0):
        assert forget_writes(view)
    assert torch.equal(view, memory)


@pytest.mark.parametrize("shown", [True, False])
def test_a_vector_that_is_copied_when_it_is_sent_is_not_shown_to_be_shared(shown: bool) -> None:
    """Who used the copy as its own would see the weights of the beginning for ever."""
    cluster = InProcessCluster(
        linear_model_creator(), num_workers=2, hosts=HostMap((0, 0), (0,), gathers=True)
    )
    layout, sent = cluster.job.description.layout, []
    aggregator = HostAggregator(
        0, cluster.job.topology, layout.allocate(), lambda *what: sent.append(what), shown=shown
    )
    weights = said(Kind.WEIGHTS, generation=1, reload=True)
    weights.payload = aggregator.destination(
        weights, layout.chunk_view(layout.allocate(), 0).numel()
    )
    aggregator.handle(server_peer(0), weights)
    kinds = [message.kind for target, message in sent if target == worker_peer(0)]
    assert kinds == [Kind.WEIGHTS_SHARED] * shown + [Kind.WEIGHTS]
