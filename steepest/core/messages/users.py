"""The messages between the users of a parameter server and its coordinator, and the table of all its messages."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import Annotated, Any

from steepest.core.messages.fields import CULPRITS, FLAG, TEXT, WORKER, ZERO, ZERO_OR_ONE, Schema
from steepest.core.messages.gradients import Logged, Pulled, Push, PushStaged
from steepest.core.messages.membership import Failed
from steepest.core.messages.message import Kind
from steepest.core.messages.permissions import COMMON, Line, Sayings, lines
from steepest.core.messages.schema import Body, Sequence, Version, body, limited
from steepest.core.messages.snapshots import InstallPut, Read, SnapshotEnd


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
    culprits: Annotated[Seq[Seq[Any]], CULPRITS] = ()
    # the server whose optimizer raised, and what, in words; empty if none did
    raised: Annotated[str, TEXT] = ""
    # this, traceback and kind: see `steepest.errors.describe_error`
    error: Annotated[str, TEXT] = ""
    traceback: Annotated[str, TEXT] = ""
    kind: Annotated[str, TEXT] = ""


@body(Kind.USER_LEFT)
class UserLeft(Body):
    """A user's channel to one server has closed, and all pushes that came over it are staged.

    The server sends it to the coordinator, which commits the pushes that are whole on all servers
    and drops the others.
    """

    worker: Annotated[int, WORKER]


_OPEN: Sayings = {
    ("worker", "coordinator"): (Pushed, Read),
    ("server", "coordinator"): (PushStaged, UserLeft, Logged, Failed),
    ("server", "worker"): (SnapshotEnd,),
    ("coordinator", "worker"): (PushCommitted, PushRefused),
    ("coordinator", "server"): (InstallPut,),
}
#: A user has one life and no generation, and pushes a chunk once or not at all.
_USERS_PUSH = limited(
    Push.SCHEMA,
    {"generation": ZERO, "incarnation": ZERO, "weight": ZERO_OR_ONE, "total": ZERO_OR_ONE},
)
#: The messages of a parameter server by itself. Its users have the role of workers, and know
#: nothing of each other, or of clients.
OPEN: Mapping[Line, Schema] = MappingProxyType(
    {**lines(COMMON, _OPEN), (Kind.PUSH, "worker", "server"): _USERS_PUSH}
)
