"""The messages of a parameter server by itself about the pushes of its users."""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Annotated, Any

from steepest.messages.fields import CULPRITS, FLAG, WORKER
from steepest.messages.gradients import Pulled
from steepest.messages.message import Kind
from steepest.messages.schema import Body, Sequence, Version, body


@body(Kind.PUSHED)
@dataclass(frozen=True)
class Pushed(Body):
    """Every chunk of a push is on its way; from a user to the coordinator.

    Attributes:
        pull: whether the user is sent the weights that the push makes, instead of `PushCommitted`.
    """

    sequence: Sequence
    pulled: Pulled
    pull: Annotated[bool, FLAG] = False


@body(Kind.PUSH_COMMITTED)
@dataclass(frozen=True)
class PushCommitted(Body):
    """A push is part of this version; from the coordinator to the user."""

    sequence: Sequence
    version: Version


@body(Kind.PUSH_REFUSED)
@dataclass(frozen=True)
class PushRefused(Body):
    """A push holds NaN or infinity, and is not applied; from the coordinator to the user."""

    sequence: Sequence
    culprits: Annotated[Row[Row[Any]], CULPRITS]


@body(Kind.USER_LEFT)
@dataclass(frozen=True)
class UserLeft(Body):
    """The channel of a user is closed, and all that came over it is staged; from a server to the coordinator."""

    worker: Annotated[int, WORKER]
