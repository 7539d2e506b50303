"""Events on virtual time: processes with one thread each, and links with a bandwidth and a latency."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from steepest.planning.profile import Costs

#: What a process does on its thread: a float is seconds of work, a function says whether to go on.
Task = Iterator[float | Callable[[], bool]]
#: Bytes on the wire for each byte of payload: headers of Ethernet, IP and TCP at an MTU of 1500.
FRAMING = 1538 / 1448
#: Up to this size a message overtakes others' payloads on a link, as another connection's segments do.
_SMALL = 16 << 10
_IDLE = 0.2  # seconds, and a round trip, after which TCP takes a stream for idle
_HEADER = 100  # bytes of a message beside its payload, about


@dataclass(frozen=True)
class Links:
    """The links of all hosts, each with the same bandwidth in each direction, joined by a switch without a limit.

    Attributes:
        bandwidth: bytes a second.
        latency: seconds from one host to another.
        framing: bytes on the wire for each byte of payload.
        window: bytes that TCP sends at first before it hears of the receiver, also after some rest.
    """

    bandwidth: float
    latency: float
    framing: float = FRAMING
    window: float = 10 * 1448


class Events:
    """What is to happen, by time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Have something happen at a time, after all that was set for the same time before."""
        self._count += 1
        heapq.heappush(self._queue, (max(time, self.now), self._count, act))

    def run(self, done: Callable[[], bool]) -> bool:
        """Let time pass until a condition holds; return whether it does, or else nothing is left to happen."""
        while not done():
            if not self._queue:
                return False
            self.now, _, act = heapq.heappop(self._queue)
            act()
        return True


class ModelledProcess:
    """One process, whose single thread works on a task of its own and on the messages that come meanwhile.

    Messages are handled in the order in which they came, while the task waits for something.

    Attributes:
        host: the number of its host.
        cursor: how far its thread has come, in virtual seconds.
        spent: the seconds in which its thread has worked.
    """

    def __init__(self, events: Events, host: int) -> None:
        self.host, self.cursor, self.spent = host, 0.0, 0.0
        self._events = events
        self._inbox: deque[Callable[[], None]] = deque()
        self._task: Task | None = None
        self._until: Callable[[], bool] | None = None
        self._is_busy = False

    def begin(self, task: Task) -> None:
        """Work on a task from now on."""
        self._task = task
        self._go()

    def deliver(self, act: Callable[[], None]) -> None:
        """Have something done on the thread, which may `spend` time with it."""
        self._inbox.append(act)
        self._go()

    def has_heard_all(self) -> bool:
        """Return whether no message waits: what a task that works on between messages waits for."""
        return not self._inbox

    def until(self, time: float) -> Callable[[], bool]:
        """Have the task go on at a time, before which the thread is free: what a task that waits for it yields."""
        self._events.at(time, self._go)
        return lambda: self._events.now >= time

    def spend(self, seconds: float) -> None:
        """Let the thread work for some seconds, within a task or what was delivered."""
        self.cursor += seconds
        self.spent += seconds

    def _go(self) -> None:
        if self._is_busy:
            return
        self._is_busy, self.cursor = True, self._events.now
        while self.cursor <= self._events.now:
            if self._task is not None and (self._until is None or self._until()):
                following = next(self._task, None)
                if following is None:
                    self._task = None
                elif isinstance(following, float | int):
                    self._until = None
                    self.spend(following)
                else:
                    self._until = following
            elif self._inbox:
                self._inbox.popleft()()
            else:
                self._is_busy = False
                return
        self._events.at(self.cursor, self._free)

    def _free(self) -> None:
        self._is_busy = False
        self._go()


class _Waiting(NamedTuple):
    """A message that waits for its sender's link."""

    source: ModelledProcess
    target: ModelledProcess
    takes: float  # seconds on a link
    arrived: Callable[[], None]


class LinkTraffic:
    """What processes send each other: within a process, within a host, or over links.

    The messages from one process to another are a stream in order. The streams that leave a host share its link fairly
    (start-time fair queueing, Goyal et al. 1996; of equal ones each host begins with another); a payload is passed on
    as it comes, and arrives behind those that arrive there already. What waits, waits without a limit.

    Args:
        events: what is to happen.
        links: of all hosts.
        costs: of messages and bytes.
        groups: the number of hosts with workers, which come first, and of those with servers alone.

    Attributes:
        moved: bytes of payloads that went over links, so far.
    """

    def __init__(self, events: Events, links: Links, costs: Costs, groups: tuple[int, int]) -> None:
        self.moved, self._groups = 0, groups
        self._events, self._links, self._costs = events, links, costs
        # by host, what waits for its link, by virtual time at which it would begin if streams shared the link
        self._waiting: defaultdict[int, list[tuple[float, int, int, _Waiting]]] = defaultdict(list)
        self._virtual: defaultdict[int, float] = defaultdict(float)
        self._shared: defaultdict[tuple[int, int], float] = defaultdict(
            float
        )  # by stream, the end of its last message
        self._count = 0
        self._busy: set[int] = set()  # hosts whose link carries something away
        self._arrives: dict[int, float] = {}  # by host, when all that is to arrive so far is there
        self._last: dict[tuple[int, int], float] = {}  # by stream, when the last message arrives

    def send(
        self,
        source: ModelledProcess,
        target: ModelledProcess,
        size: int,
        act: Callable[[], None],
        many: int = 1,
    ) -> None:
        """Send so many messages with a payload of some bytes at the sender's cursor; `act` is done by the receiver."""
        costs = self._costs
        if source is target:
            self._events.at(source.cursor, partial(target.deliver, act))
            return
        far = source.host != target.host
        source.spend(many * costs.message + (size * costs.sent if far else 0.0))

        def receive() -> None:
            target.spend(many * costs.message + (size * costs.received if far else 0.0))
            act()

        arrived = partial(target.deliver, receive)
        if not far:
            self._events.at(source.cursor, arrived)
            return
        self.moved += size
        takes = (size + many * _HEADER) * self._links.framing / self._links.bandwidth
        message = _Waiting(source, target, takes, arrived)
        leave = self._overtake if size <= _SMALL else self._wait
        self._events.at(source.cursor, partial(leave, message))

    def _overtake(self, message: _Waiting) -> None:
        """Send a small message, which waits for no payload of other streams."""
        self._arrive(message, self._events.now + message.takes + self._links.latency)

    def _wait(self, message: _Waiting) -> None:
        """Have a message wait for its sender's link."""
        host, stream = message.source.host, (id(message.source), id(message.target))
        begins = max(self._virtual[host], self._shared[stream])
        self._shared[stream] = begins + message.takes
        self._count += 1
        order = self._order(host, message.target.host)
        heapq.heappush(self._waiting[host], (begins, order, self._count, message))
        if host not in self._busy:
            self._busy.add(host)
            self._events.at(self._events.now, partial(self._leave, host))

    def _order(self, host: int, target: int) -> int:
        """Return the place of a target among those of its kind, of which each host begins with another."""
        first, others = self._groups
        number = host if host < first else host - first
        return (target - number) % first if target < first else (target - first - number) % others

    def _leave(self, host: int) -> None:
        """Put the next message on a host's link."""
        if not self._waiting[host]:
            self._busy.discard(host)
            return
        self._virtual[host], _, _, message = heapq.heappop(self._waiting[host])
        now, late = self._events.now, self._links.latency + self._slow_start(message)
        self._events.at(now + message.takes, partial(self._leave, host))
        self._events.at(now + late, partial(self._enter, message, now + message.takes + late))

    def _slow_start(self, message: _Waiting) -> float:
        """Return the seconds by which a stream that was idle is late, as TCP's window grows anew from packets."""
        links, now = self._links, self._events.now
        last = self._last.get((id(message.source), id(message.target)), 0.0)
        window = 2 * links.latency * links.bandwidth
        if now - last < _IDLE + 2 * links.latency or window <= links.window:
            return 0.0
        rounds = math.log2(window / links.window)
        return 2 * links.latency * rounds * min(message.takes * links.bandwidth / window, 1.0)

    def _enter(self, message: _Waiting, ends: float) -> None:
        """Begin to receive a message, of which the last byte comes at `ends` at the earliest."""
        host = message.target.host
        free = max(self._arrives.get(host, 0.0), self._events.now)
        self._arrives[host] = there = max(free + message.takes, ends)
        self._arrive(message, there)

    def _arrive(self, message: _Waiting, time: float) -> None:
        """Have a message be there, not before an earlier one of its stream."""
        key = id(message.source), id(message.target)
        self._last[key] = time = max(time, self._last.get(key, 0.0))
        self._events.at(time, message.arrived)
