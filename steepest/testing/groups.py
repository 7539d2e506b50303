"""Process groups of a simulation: members of one thread whose operations end when all have begun them."""

from __future__ import annotations

from collections import deque
from functools import partial

import torch

from steepest.core.engine.extension import Extension
from steepest.core.transport.router import Router
from steepest.errors import DataPlaneError
from steepest.strategies.process_groups.extension import ProcessGroups
from steepest.strategies.process_groups.group import (
    Await,
    Broadcast,
    Gather,
    GroupPlace,
    Operation,
    ProcessGroup,
    Program,
    Reduce,
    Ways,
)


def simulated(extension: Extension) -> Extension:
    """Return what attaches in a simulation where an extension does on processes."""
    real = isinstance(extension, ProcessGroups) and extension.groups is None
    return ProcessGroups(SimulatedGroups()) if real else extension


class SimulatedGroups:
    """Makes the groups of one simulated job at a time, see `Groups`; tensors are added up in the order of the ranks.

    Args:
        broken: (generation, number of an exchanging operation from 0) at which groups fail although all members
            live; None for never.
    """

    def __init__(self, broken: tuple[int, int] | None = None) -> None:
        self._broken = broken
        self._meetings: dict[int, _Meeting] = {}

    def check(self, router: Router, home: torch.device) -> None:
        """Do nothing: every process can have groups."""

    def join(self, place: GroupPlace, ways: Ways) -> ProcessGroup:
        """See `Groups`."""
        fails_at = None
        if self._broken is not None and self._broken[0] == place.generation:
            fails_at = self._broken[1]
        meeting = self._meetings.get(place.generation)
        if meeting is None or not meeting.takes(place):  # it was another job's
            meeting = self._meetings[place.generation] = _Meeting(place.size, fails_at)
        meeting.joined.add(place.rank)
        return _SimulatedGroup(meeting, place, ways)


class _Meeting:
    """What the members of one generation have begun and not ended."""

    def __init__(self, size: int, fails_at: int | None) -> None:
        self.fails_at = fails_at
        self.over = False  # whether a member has left
        self.joined: set[int] = set()
        self._size = size
        self._members: dict[int, _SimulatedGroup] = {}
        self._begun: dict[int, dict[int, torch.Tensor]] = {}  # by number of an operation, by rank

    def takes(self, place: GroupPlace) -> bool:
        """Return whether a member may join."""
        return not self.over and place.size == self._size and place.rank not in self.joined

    def begin(self, number: int, member: _SimulatedGroup, tensor: torch.Tensor) -> None:
        """Note a member's part of an operation; the last one's ends it for all."""
        parts = self._begun.setdefault(number, {})
        rank = member.place.rank
        parts[rank] = tensor.clone()
        self._members[rank] = member
        if len(parts) == self._size:
            del self._begun[number]
            tensors = [parts[rank] for rank in range(self._size)]
            for other in self._members.values():
                other.ways.router.call(partial(other.resume, number, tensors))


class _SimulatedGroup(ProcessGroup):
    """A member's end, see `ProcessGroup`."""

    def __init__(self, meeting: _Meeting, place: GroupPlace, ways: Ways) -> None:
        self.place, self.ways = place, ways
        self._meeting = meeting
        self._programs: deque[Program] = deque()
        self._operation: Operation | None = None  # in progress
        self._number = 0  # of exchanging operations that have begun
        self._ended = False
        self._works = False
        self._met = {place.rank}  # members whose key is here
        ways.send_key(str(place.rank), b"here")

    def run(self, program: Program) -> None:
        """See `ProcessGroup`."""
        self._programs.append(program)
        self.wake()

    def take_key(self, key: str, value: bytes) -> None:
        """See `ProcessGroup`."""
        self._met.add(int(key))
        self.wake()

    def end(self) -> None:
        """See `ProcessGroup`."""
        self._ended = True
        self._meeting.over = True

    def wake(self) -> None:
        """Go on with the present program as far as it goes."""
        if self._works or self._ended or len(self._met) < self.place.size:
            return
        self._works = True
        try:
            while self._programs and self._can_go_on():
                self._go_on(None)
        finally:
            self._works = False

    def _can_go_on(self) -> bool:
        operation = self._operation
        return operation is None or (isinstance(operation, Await) and operation.condition())

    def resume(self, number: int, tensors: list[torch.Tensor]) -> None:
        """Give the operation in progress what all members have."""
        if self._ended or number != self._number - 1:
            return
        answer = None
        match self._operation:
            case Reduce(total, _, root):
                total.copy_(tensors[0])
                for part in tensors[1:]:
                    total += part
                if root not in (None, self.place.rank):
                    total.fill_(-1)  # it has no meaning
            case Broadcast(value, root):
                value.copy_(tensors[root])
            case Gather():
                answer = [part.clone() for part in tensors]
        self._works = True
        self._go_on(answer)
        self._works = False
        self.wake()

    def _go_on(self, answer: list[torch.Tensor] | None) -> None:
        """Let the present program take its next operation."""
        try:
            self._operation = self._programs[0].send(answer)
        except StopIteration:
            self._operation = None
            self._programs.popleft()
            return
        if isinstance(self._operation, Await):
            return
        if self._number == self._meeting.fails_at:
            self._ended = True
            self.ways.failed(DataPlaneError("the group was broken by the test"))
            return
        operation, number = self._operation, self._number
        self._number += 1
        match operation:
            case Gather(tensor) | Reduce(tensor) | Broadcast(tensor):
                self._meeting.begin(number, self, tensor)
