"""The messages between the users of a parameter server and its coordinator, about pushes."""

from collections.abc import Sequence as Row
from typing import Annotated, Any

from steepest.messages.fields import CULPRITS, FLAG, TEXT, WORKER
from steepest.messages.gradients import Pulled
from steepest.messages.message import Kind
from steepest.messages.schema import Body, Sequence, Version, body


@body(Kind.PUSHED)
class Pushed(Body):
    """A user pushes an update.

    The user sends it to the coordinator right before the chunks, which are PUSHes to the servers.
    """

    sequence: Sequence  # the user's count of its pushes
    pulled: Pulled  # newest version that the user has received
    # whether the user is sent the weights that the push makes, instead of a PUSH_COMMITTED
    pull: Annotated[bool, FLAG] = False


@body(Kind.PUSH_COMMITTED)
class PushCommitted(Body):
    """A push is committed.

    The coordinator sends it to the user.
    """

    sequence: Sequence
    version: Version  # that the push made


@body(Kind.PUSH_REFUSED)
class PushRefused(Body):
    """A push is not applied.

    The coordinator sends it to the user of a push that holds NaN or infinity, with
    ``nonfinite="refuse"``; and of every push since a server's optimizer has raised.
    """

    sequence: Sequence
    # (worker, array's name) for each array with NaN or infinity
    culprits: Annotated[Row[Row[Any]], CULPRITS] = ()
    # the server whose optimizer raised, and what, in words; empty if none did
    raised: Annotated[str, TEXT] = ""
    traceback: Annotated[str, TEXT] = ""  # of what it raised


@body(Kind.USER_LEFT)
class UserLeft(Body):
    """A user's channel to one server has closed, and all pushes that came over it are staged.

    The server sends it to the coordinator, which commits the pushes that are whole on all servers
    and drops the others.
    """

    worker: Annotated[int, WORKER]
