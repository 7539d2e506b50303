"""The messages between the members of a collective."""

from collections.abc import Mapping
from types import MappingProxyType

from steepest.core.messages.fields import Count, Text
from steepest.core.messages.message import MessageKind
from steepest.core.messages.permissions import Line, lines
from steepest.core.messages.schema import Body, body


class MemberKind(MessageKind):
    """The kinds of messages of members."""

    DATA = 48
    CONNECTED = 49
    ABORT = 50
    PART = 54


@body(MemberKind.DATA)
class Data(Body, frozen=True):
    """One tensor of a collective operation: its bytes are the payload.

    A member sends it to another member, during a call of a user's function or during a step.
    """

    generation: Count  # the membership during a step; 0 during a call
    # the sender's count of its messages to this member in this call or generation, from 0
    sequence: Count
    call: (
        Count  # number of the call of a user's function in which members take part; 0 during a step
    )
    # whether the receiver may read the payload in the sender's memory; if not, it copies it
    lent: bool = False
    # the operation of which it is, and the dtype and shape of the sender's tensor, in words
    what: Text = ""


@body(MemberKind.CONNECTED)
class Connected(Body, frozen=True):
    """A channel between two members is open.

    The member that has opened it sends it to the other one, which then sends the messages that it
    has kept for the first.
    """


@body(MemberKind.ABORT)
class Abort(Body, frozen=True):
    """The sender takes no further part in a call or generation.

    A member sends it to all others when it gives an operation up or its user's function raised;
    their operations in progress end with a `PeerLostError`.
    """

    generation: Count  # this and call: as in `Data`
    call: Count
    reason: Text = ""  # in words


@body(MemberKind.PART)
class Part(Body, frozen=True):
    """One worker's values of a gathering in a user's own loop.

    A member sends it to all others when its loop gathers; when the members change, it sends that part again, with the
    other workers' parts that it knows. A part that the receiver has changes nothing. The payload is as of
    `steepest.loop.kept.pack`; without one, the sender asks for all parts that the receiver knows.
    """

    number: Count  # of the step, or of the batch, at which the loop is
    sequence: Count  # the count of gatherings there before
    region: Count  # before or after the step, or at the end of an epoch
    owner: Count  # the rank of the worker
    # one more than the number of steps that the worker's loop has taken by then; 0 where that is not known
    steps: Count = 0


#: The messages of members, which a process accepts that hosts one.
MEMBERS: Mapping[Line, type[Body]] = MappingProxyType(
    lines({("member", "member"): (Data, Connected, Abort, Part)})
)
