"""What calls take along and return: messages packed, unpacked and put in order."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from steepest.errors import ProtocolError
from steepest.messages.message import Message
from steepest.transport.frames import HEADER, Sink, decode_header, decode_meta

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
#: What a call returns: a head and messages (no bytes at all when there are none), and the payloads that are not small.
Parcel = tuple[bytes, list[Bytes]]
NOTHING: Parcel = (b"", [])
#: Head of a call: the caller's key, the call's number, and what it is; Ray takes long for every further argument.
CALL_HEAD = struct.Struct("<QQB")
HELLO, SAY, END = range(3)  # followed by the caller's peers as JSON; by messages; by nothing
#: Head of an answer: its number, and whether more will follow unasked.
ANSWER_HEAD = struct.Struct("<Q?")
#: A payload below that follows its message's header.
SMALL_BYTES = 100_000


def unpack(text: memoryview, payloads: Sequence[Bytes], sink: Sink) -> list[Message]:
    """Messages from a call or an answer; payloads are copied to where the sink says.

    Raises:
        ProtocolError: a header makes no sense, or does not go with its payload.
    """
    messages = []
    following = iter(payloads)
    while text:
        if len(text) < HEADER.size:
            raise ProtocolError("a header that is cut off")
        message, meta_size, size = decode_header(text)
        text = text[HEADER.size :]
        if meta_size:
            message.meta = decode_meta(text[:meta_size])
            text = text[meta_size:]
        if size:
            if size < SMALL_BYTES:
                payload: Bytes | None = np.frombuffer(text[:size], dtype=np.uint8)
                text = text[size:]
            else:
                payload = next(following, None)
            if payload is None or payload.nbytes != size:
                raise ProtocolError(f"{message.kind.name} without its payload of {size} bytes")
            message.payload = sink(message, size)
            if message.payload is not None:
                message.payload.numpy()[:] = payload
        messages.append(message)
    return messages


class InOrder(Generic[T]):
    """Gives things back in the order of their numbers, each once."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def put(self, number: int, thing: T) -> list[T]:
        """Takes one thing; returns those whose turn it is."""
        if number >= self._next:
            self._early.setdefault(number, thing)
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready
