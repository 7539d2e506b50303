"""The messages between the members of a collective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from steepest.messages.fields import TEXT
from steepest.messages.message import Kind
from steepest.messages.schema import Body, Generation, Header, Payload, Sequence, body

#: Number of the call of a user's function in which members are, in their generation.
Call = Annotated[int, Header("version")]


@body(Kind.DATA)
@dataclass(frozen=True)
class Data(Body):
    """What an operation sends; from a member to another.

    Attributes:
        sequence: the sender's count of what it sent this member in this call.
        lent: 0 if the payload may stay in the memory of the sender, -1 if it is to be copied.
    """

    generation: Generation
    sequence: Sequence
    call: Call
    lent: Annotated[int, Header("chunk")] = -1
    payload: Payload = field(default=None, compare=False)


@body(Kind.CONNECTED)
@dataclass(frozen=True)
class Connected(Body):
    """A channel is open; from the member that has opened it."""


@body(Kind.ABORT)
@dataclass(frozen=True)
class Abort(Body):
    """Nothing more will come in this call; from a member to all others.

    Attributes:
        reason: in words.
    """

    generation: Generation
    call: Call
    reason: Annotated[str, TEXT] = ""
