"""The messages between the users of a parameter server and its coordinator, and the table of all its messages."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from steepest.core.messages.fields import Condition, Count, Culprits, Text, WorkerIndex
from steepest.core.messages.gradients import Logged, Push, PushStaged
from steepest.core.messages.membership import Failed
from steepest.core.messages.message import Kind
from steepest.core.messages.permissions import COMMON, Line, Sayings, lines
from steepest.core.messages.schema import Body, body
from steepest.core.messages.snapshots import InstallPut, Read, SnapshotEnd


@body(Kind.PUSHED)
class Pushed(Body, frozen=True):
    """A user pushes an update.

    The user sends it to the coordinator right before the chunks, which are PUSHes to the servers.
    """

    sequence: Count  # the user's count of its pushes
    pulled: Count  # newest version that the user has received
    # whether the user is sent the weights that the push makes, instead of a PUSH_COMMITTED
    pull: bool = False


@body(Kind.PUSH_COMMITTED)
class PushCommitted(Body, frozen=True):
    """A push is committed.

    The coordinator sends it to the user.
    """

    sequence: Count
    version: Count  # that the push made


@body(Kind.PUSH_REFUSED)
class PushRefused(Body, frozen=True):
    """A push is not applied.

    The coordinator sends it to the user of a push that holds NaN or infinity, with
    ``nonfinite="refuse"``; and of every push since a server's optimizer has raised.
    """

    sequence: Count
    # (worker, array's name) for each array with NaN or infinity
    culprits: Culprits = ()
    # the server whose optimizer raised, and what, in words; empty if none did
    raised: Text = ""
    # this, traceback and kind: see `steepest.errors.describe_error`
    error: Text = ""
    traceback: Text = ""
    kind: Text = ""


@body(Kind.USER_LEFT)
class UserLeft(Body, frozen=True):
    """A user's channel to one server has closed, and all pushes that came over it are staged.

    The server sends it to the coordinator, which commits the pushes that are whole on all servers
    and drops the others.
    """

    worker: WorkerIndex


_OPEN: Sayings = {
    ("worker", "coordinator"): (Pushed, Read),
    ("server", "coordinator"): (PushStaged, UserLeft, Logged, Failed),
    ("server", "worker"): (SnapshotEnd,),
    ("coordinator", "worker"): (PushCommitted, PushRefused),
    ("coordinator", "server"): (InstallPut,),
}
_Zero = Annotated[int, Condition("0", lambda value, limits: value == 0)]
_ZeroOrOne = Annotated[float, Condition("0 or 1", lambda value, limits: value in (0, 1))]


class UsersPush(Push, frozen=True):
    """A push of a user, who has one life and no generation, and pushes a chunk once or not at all."""

    generation: _Zero
    incarnation: _Zero
    unit: _ZeroOrOne = 0.0
    total: _ZeroOrOne = 0.0


#: The messages of a parameter server by itself. Its users have the role of workers, and know
#: nothing of each other, or of clients.
OPEN: Mapping[Line, type[Body]] = MappingProxyType(
    {**lines(COMMON, _OPEN), (Kind.PUSH, "worker", "server"): UsersPush}
)
