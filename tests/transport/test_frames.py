"""Frames: every message survives every cut of the stream, and nothing else gets through."""

from __future__ import annotations

import itertools
import math
import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.messages import users  # noqa: F401 - their kinds
from steepest.core.messages.gradients import Push, VersionStaged
from steepest.core.messages.message import (
    COORDINATOR,
    ROLES,
    Kind,
    Message,
    Peer,
    server_peer,
    worker_peer,
)
from steepest.core.messages.schema import MAX_BODY, encode_body
from steepest.core.transport import frames
from steepest.core.transport.frames import (
    HEADER,
    MAGIC,
    MAX_PAYLOAD,
    PROTOCOL,
    FrameReader,
    encode,
)
from steepest.errors import MessageTooLargeError, ProtocolError
from steepest.strategies.collectives.messages import MemberKind
from steepest.tables.job.row_messages import RowKind
from tests.random_examples import examples
from tests.said import heard


def message_of(kind: Kind = Kind.PUSH, size: int | None = None, *, body: Any = ()) -> Message:
    """A message whose body is any list of values: frames do not look into it."""
    payload = None if size is None else pattern(size)
    return Message(kind, list(body), payload, worker_peer(3), server_peer(1))


def pattern(size: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(seed, seed + size, dtype=torch.int64).remainder(251).to(torch.uint8)


def payload_of(message: Message) -> bytes:
    return b"" if message.payload is None else message.payload.numpy().tobytes()


def bytes_of(*messages: Message) -> bytes:
    return b"".join(encode(message) + payload_of(message) for message in messages)


def header(**changes: object) -> bytes:
    fields = {
        "magic": MAGIC, "protocol": PROTOCOL, "kind": Kind.PUSH, "source_role": 2, "source_index": 0,
        "target_role": 1, "target_index": 0, "body_size": 0, "payload_size": 0,
    }  # fmt: skip
    return HEADER.pack(*(fields | changes).values())


class Stream:
    """Hands out pieces one by one, and would block after each; then it ends or stays open."""

    def __init__(self, pieces: list[bytes], ends: bool = True) -> None:
        self.pieces = [piece for piece in pieces if piece]
        self.ends = ends
        self.pause = False

    def receive_into(self, buffer: memoryview) -> int:
        assert len(buffer) > 0, "an empty buffer would look like the end of the stream"
        if self.pause or not (self.pieces or self.ends):
            self.pause = False
            raise BlockingIOError
        if not self.pieces:
            return 0
        piece = self.pieces.pop(0)
        count = min(len(piece), len(buffer))
        buffer[:count] = piece[:count]
        self.pause = count == len(piece)
        if not self.pause:
            self.pieces.insert(0, piece[count:])
        return count


def fresh(message: Message, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def receive(pieces: list[bytes], sink=fresh) -> tuple[list[Message], Exception]:
    """What arrives until the stream ends, and how it ended."""
    reader = FrameReader(Stream(pieces).receive_into, sink)
    messages: list[Message] = []
    while True:
        try:
            messages += reader.read()
        except (EOFError, ProtocolError) as error:
            return messages, error


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(points), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def assert_same(arrived: list[Message], sent: list[Message]) -> None:
    assert [head_of(message) for message in arrived] == [head_of(message) for message in sent]
    assert [payload_of(message) for message in arrived] == [payload_of(m) for m in sent]


def head_of(message: Message) -> tuple[Any, ...]:
    """What a message has beside its payload, as it travels."""
    data = message.body if isinstance(message.body, bytes) else encode_body(message)
    return message.kind, data, message.source, message.target


# -- what is sent arrives ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*Kind, *RowKind, *MemberKind])
@pytest.mark.parametrize("body", [[], [0.5, {"näme": [1, None, "x"]}]])
@pytest.mark.parametrize("size", [None, 1, 70_000])
def test_every_kind_comes_out_as_it_went_in(kind, body, size):
    payload = None if size is None else pattern(size)
    sent = Message(kind, body, payload, Peer("client", 9), COORDINATOR)
    (arrived,), end = receive([bytes_of(sent)])
    assert_same([arrived], [sent])
    assert arrived.kind is kind
    assert msgspec.msgpack.decode(arrived.body) == body
    assert type(end) is EOFError


@pytest.mark.parametrize("role", ROLES)
def test_every_role_can_send_and_be_sent_to(role):
    sent = Message(Kind.COUNTERS, [], None, Peer(role, 5), Peer(role, 6))
    (arrived,), _ = receive([bytes_of(sent)])
    assert (arrived.source, arrived.target) == (Peer(role, 5), Peer(role, 6))


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 5e-324])
def test_floats_survive_to_the_bit(value):
    push = Push(1, 0, 1, 0, 0, value, value).pack()
    staged = VersionStaged(1, 0, -value).pack()
    for sent, names in ((push, ("unit", "total")), (staged, ("squares",))):
        sent.source, sent.target = worker_peer(3), server_peer(1)
        (arrived,), _ = receive([bytes_of(sent)])
        for name in names:
            there, here = getattr(heard(arrived), name), getattr(sent.body, name)
            assert struct.pack("<d", there) == struct.pack("<d", here)


def test_a_payload_that_is_dropped_half_way_writes_no_more_and_the_next_message_follows():
    sent = [message_of(size=600_000), message_of(size=9)]
    data = bytes_of(*sent)
    memory = torch.zeros(600_000, dtype=torch.uint8)
    stream = Stream(cut(data, [200_000]), ends=False)
    reader = FrameReader(stream.receive_into, lambda m, n: memory if n == 600_000 else fresh(m, n))
    assert reader.read() == []
    assert memory[:190_000].equal(sent[0].payload[:190_000])
    memory.fill_(3)
    reader.drop(torch.zeros(600_000, dtype=torch.uint8))  # other memory: nothing changes
    reader.drop(memory[5:9])
    arrived = [message for _ in range(3) for message in reader.read()]
    assert [payload_of(message) for message in arrived] == [b"", payload_of(sent[1])]
    assert set(memory.tolist()) == {3}


def test_an_empty_payload_arrives_as_none():
    (arrived,), end = receive([bytes_of(message_of(size=0))])
    assert arrived.payload is None
    assert isinstance(end, EOFError)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
peers = st.builds(Peer, st.sampled_from(ROLES), st.integers(-(2**31), 2**31 - 1))
sent_messages = st.builds(
    Message,
    kind=st.sampled_from([*Kind, *RowKind, *MemberKind]),
    body=st.lists(values, max_size=4),
    payload=st.none()
    | st.builds(pattern, st.integers(0, 300) | st.integers(0, 200_000), st.integers(0, 250)),
    source=peers,
    target=peers,
)


@examples(150)
@given(sent=st.lists(sent_messages, max_size=6), data=st.data())
def test_messages_survive_every_cut_and_payloads_land_in_the_sinks_memory(sent, data):
    stream = bytes_of(*sent)
    points = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
    given: list[torch.Tensor] = []

    def sink(message: Message, size: int) -> torch.Tensor:
        given.append(fresh(message, size))
        return given[-1]

    arrived, end = receive(cut(stream, points), sink)
    assert isinstance(end, EOFError)
    assert_same(arrived, sent)
    landed = [message.payload for message in arrived if message.payload is not None]
    assert len(landed) == len(given)
    assert all(here is there for here, there in zip(landed, given, strict=True))


def test_one_byte_at_a_time_is_enough():
    sent = [
        message_of(size=5, body=[1]),
        message_of(Kind.GRANT),
        message_of(Kind.COUNTERS),
    ]
    arrived, end = receive([bytes([byte]) for byte in bytes_of(*sent)])
    assert isinstance(end, EOFError)
    assert_same(arrived, sent)


def test_values_larger_than_the_read_ahead_arrive():
    sent = [
        message_of(body=["x" * 1_000_000], size=9),
        message_of(body=["y" * 200_000]),
    ]
    arrived, _ = receive(cut(bytes_of(*sent), [10, 70_000, 400_000]))
    assert_same(arrived, sent)


def test_read_returns_what_is_complete_while_the_stream_stays_open():
    whole, half = message_of(size=100), bytes_of(message_of(size=100))[:-1]
    reader = FrameReader(Stream([bytes_of(whole) + half], ends=False).receive_into, fresh)
    assert_same(reader.read(), [whole])
    assert reader.read() == []


@pytest.mark.parametrize("size", [1, 500, 65_536, 300_000, 1_000_000])
@pytest.mark.parametrize("points", [[], [HEADER.size], [HEADER.size + 1, 3000]])
def test_a_refused_payload_is_discarded_and_only_that(size, points):
    sent = [
        message_of(size=size, body=[0]),
        message_of(size=200, body=[1]),
        message_of(size=size, body=[2]),
    ]

    def sink(message: Message, size: int) -> torch.Tensor | None:
        return fresh(message, size) if message.body == b"\x91\x01" else None

    arrived, end = receive(cut(bytes_of(*sent), points), sink)
    assert isinstance(end, EOFError)
    assert [message.body for message in arrived] == [b"\x91\x00", b"\x91\x01", b"\x91\x02"]
    assert [arrived[0].payload, arrived[2].payload] == [None, None]
    assert payload_of(arrived[1]) == payload_of(sent[1])


# -- and nothing else gets through -------------------------------------------------------------


def test_a_stream_cut_inside_a_frame_is_an_error_and_at_a_boundary_its_end():
    sent = [message_of(size=7, body=[1]), message_of(), message_of(size=3)]
    stream, boundaries = bytes_of(*sent), {len(bytes_of(*sent[:count])) for count in range(4)}
    for end in range(len(stream) + 1):
        arrived, error = receive([stream[:end]])
        assert isinstance(error, EOFError if end in boundaries else ProtocolError), end
        assert len(arrived) == sum(1 for boundary in boundaries if 0 < boundary <= end)


MALFORMED = {
    "magic": header(magic=b"GE"),
    "protocol": header(protocol=PROTOCOL + 1),
    "kind 0": header(kind=0),
    "kind 255": header(kind=255),
    "source role": header(source_role=len(ROLES)),
    "target role": header(target_role=255),
    "oversized body": header(body_size=MAX_BODY + 1),
    "oversized payload": header(payload_size=MAX_PAYLOAD + 1),
    "largest numbers": header(body_size=2**32 - 1, payload_size=2**64 - 1),
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_header_is_refused(frame):
    with pytest.raises(ProtocolError):
        frames.decode_header(frame)
    arrived, error = receive([frame + bytes(1000)])
    assert arrived == []
    assert isinstance(error, ProtocolError)


def test_a_body_beyond_the_limit_is_refused_by_its_sender():
    least = len(encode_body(message_of(body=["x" * (MAX_BODY // 2)]))) - MAX_BODY // 2
    with pytest.raises(
        MessageTooLargeError, match=f"PUSH .* {MAX_BODY + least} bytes .* at most {MAX_BODY} fit"
    ):
        encode(message_of(body=["x" * MAX_BODY]))
    largest = message_of(body=["x" * (MAX_BODY - least)])
    (arrived,), _ = receive([bytes_of(largest)])
    assert_same([arrived], [largest])


@pytest.mark.parametrize(
    "bad",
    [header(magic=b"GE"), header(body_size=2) + b"\x90", header()[:-1]],
    ids=["magic", "body", "cut"],
)
def test_messages_before_a_damaged_frame_arrive_however_the_stream_is_cut(bad):
    good = message_of(size=10)
    for pieces in ([bytes_of(good) + bad], [bytes_of(good), bad]):
        arrived, error = receive(pieces)
        assert_same(arrived, [good])
        assert isinstance(error, ProtocolError)


def test_messages_before_a_reset_connection_arrive():
    stream = Stream(
        [bytes_of(message_of(body=[5], size=1 << 17))]
    )  # its end fills a buffer: there may be more

    def receive_into(buffer: memoryview) -> int:
        if not stream.pieces:
            raise ConnectionResetError
        return stream.receive_into(buffer)

    reader = FrameReader(receive_into, fresh)
    assert [message.body for message in reader.read()] == [b"\x91\x05"]
    assert reader.failed
    with pytest.raises(ConnectionResetError):
        reader.read()


def test_a_sink_that_refuses_ends_the_stream():
    def sink(message: Message, size: int) -> torch.Tensor:
        raise ProtocolError(f"{size} bytes are not expected")

    arrived, error = receive([bytes_of(message_of(Kind.GRANT), message_of(size=MAX_BODY))], sink)
    assert [message.kind for message in arrived] == [Kind.GRANT]
    assert "4194304 bytes" in str(error)


def judged(message: Message, size: int) -> torch.Tensor | None:
    """A sink as roles have them: expects small payloads, discards some, refuses the rest."""
    if size > 1 << 16:
        raise ProtocolError("larger than expected")
    return fresh(message, size) if size % 2 else None


def peak_of(pieces: list[bytes], sink) -> int:
    """The most memory that reading took; anything but ProtocolError and EOFError is raised."""
    tracemalloc.start()
    try:
        receive(pieces, sink)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sink", [judged, lambda message, size: None])
def test_a_payload_that_is_announced_only_takes_no_memory(sink):
    assert peak_of([header(payload_size=MAX_PAYLOAD) + bytes(10)], sink) < 1 << 20


@examples(200)
@given(
    data=st.binary(max_size=400),
    lead=st.sampled_from([b"", MAGIC, header()[:5], header(body_size=9)]),
)
def test_random_bytes_are_refused_at_little_cost(data, lead):
    assert peak_of([lead + data], judged) < 8 << 20


@examples(300)
@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits_never_raise_anything_else_nor_cost_much(flips):
    stream = bytearray(
        bytes_of(message_of(size=51, body=[[0.5, "x"]]), message_of(), message_of(size=30))
    )
    for position, bit in flips:
        stream[position % len(stream)] ^= 1 << bit
    assert peak_of([bytes(stream)], judged) < 8 << 20
