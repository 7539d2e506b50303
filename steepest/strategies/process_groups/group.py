"""Process groups as a worker uses them: programs of operations in which all members take part."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import torch

from steepest.core.transport.router import Router


@dataclass(frozen=True, eq=False)
class Gather:
    """Each member gives a tensor of one shape and dtype; the answer is a list of all of them, by rank."""

    own: torch.Tensor


@dataclass(frozen=True, eq=False)
class Reduce:
    """The members' tensors are added up, in place, with the same bits at each of them; the answer is None.

    With a root, that member alone has the sum, and the others' tensors are left undefined.
    """

    total: torch.Tensor
    what: str  # is added up, for errors
    root: int | None = None


@dataclass(frozen=True, eq=False)
class Broadcast:
    """The members' tensors, of one shape and dtype, become that of the root, in place; the answer is None."""

    value: torch.Tensor
    root: int
    what: str  # is shared, for errors


@dataclass(frozen=True, eq=False)
class Await:
    """Nothing is exchanged until a condition of this process holds; the answer is None."""

    # it comes to hold on the router's thread, which calls `ProcessGroup.wake` then
    condition: Callable[[], bool]


Operation = Gather | Reduce | Broadcast | Await
#: What a member does: all members of a group run the same exchanging operations, in the same order.
Program = Generator[Operation, list[torch.Tensor] | None, None]


@dataclass(frozen=True)
class GroupPlace:
    """A member's place in the group of a generation."""

    generation: int
    rank: int  # the worker's index
    size: int  # the number of workers
    seconds: float  # after which an operation that waits for others fails
    home: torch.device  # where most tensors lie of which operations are


@dataclass(frozen=True)
class Ways:
    """The functions by which a member's group reaches its worker."""

    router: Router  # of the process
    # sends every other member a key of the rendezvous with its value; on the router's thread
    send_key: Callable[[str, bytes], None]
    # takes the error that ended the group although its generation goes on; on the router's thread
    failed: Callable[[Exception], None]


class ProcessGroup(Protocol):
    """One member's end of the process group of one generation.

    Its methods are called on the router's thread, and return at once. Programs run one after the other, perhaps on a
    thread of the group's own; after an error of one, or `end`, none runs on.
    """

    def run(self, program: Program) -> None:
        """Run a program when those before it have ended."""

    def wake(self) -> None:
        """Check again a condition that a program awaits."""

    def take_key(self, key: str, value: bytes) -> None:
        """Take a value of the rendezvous that another member has set."""

    def end(self) -> None:
        """Leave the group: operations in progress fail, here and at the other members, without a report."""


class Groups(Protocol):
    """A maker of process groups; pickled into every process of a job."""

    def check(self, router: Router, home: torch.device) -> None:
        """Check that a process can have groups of tensors at `home`; ConfigurationError says why not."""

    def join(self, place: GroupPlace, ways: Ways) -> ProcessGroup:
        """Return a member's end of a group, which forms as the other members join."""
