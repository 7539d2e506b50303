"""Events on virtual time: processes with one thread each, and links with a bandwidth and a latency."""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from steepest.cli.planning.profile import Costs

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
    """A queue of events in virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._stopped = False

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Schedule an action for a time, after all that were scheduled for the same time before."""
        self._count += 1
        heapq.heappush(self._queue, (max(time, self.now), self._count, act))

    def run(self) -> bool:
        """Let time pass until `stop` is called, or no event is left; return whether it was called."""
        queue, self._stopped = self._queue, False
        while not self._stopped:
            if not queue:
                return False
            self.now, _, act = heapq.heappop(queue)
            act()
        return True

    def stop(self) -> None:
        """Let `run` return after the present event."""
        self._stopped = True


class ModelledProcess:
    """One process, whose single thread works on a task of its own and on the messages that come meanwhile.

    Messages are handled in the order in which they came, while the task waits for something.

    Args:
        events: what is to happen.
        host: the number of its host.
        costs: of a message for which it had to be woken.

    Attributes:
        host: the number of its host.
        cursor: how far its thread has come, in virtual seconds.
        spent: the seconds in which its thread has worked.
    """

    def __init__(self, events: Events, host: int, costs: Costs) -> None:
        self.host, self.cursor, self.spent = host, 0.0, 0.0
        self._costs = costs
        self._events = events
        self._inbox: deque[tuple[float, Callable[[], None]]] = deque()
        self._task: Task | None = None
        self._until: Callable[[], bool] | None = None
        self._is_busy = False  # it works, or will when its thread is free

    def begin(self, task: Task) -> None:
        """Work on a task from now on."""
        self._task = task
        self._go()

    def deliver(self, seconds: float, act: Callable[[], None]) -> None:
        """Run an action on the thread after some seconds of work; it may `spend` more."""
        if self._is_busy:
            self._inbox.append((seconds, act))
            return
        if self.cursor < self._events.now:  # it slept
            self.cursor = self._events.now + self._costs.wake
            seconds += self._costs.alone
        self._inbox.append((seconds, act))
        self._go()

    @property
    def ahead(self) -> float:
        """The seconds of work that have begun and are not over; `spent` includes them."""
        return max(self.cursor - self._events.now, 0.0)

    def has_heard_all(self) -> bool:
        """Return whether no message waits; a task that works between messages yields this."""
        return not self._inbox

    def until(self, time: float) -> Callable[[], bool]:
        """Return a condition that holds from a time on; a task that yields it leaves the thread free until then."""
        self._events.at(time, self._go)
        return lambda: self._events.now >= time

    def spend(self, seconds: float) -> None:
        """Let the thread work for some seconds, within a task or a delivered action."""
        self.cursor += seconds
        self.spent += seconds

    def _go(self) -> None:
        """Work if the thread is free; otherwise, if there is something to do, as soon as it is."""
        if self._is_busy:
            return
        events, inbox, self._is_busy = self._events, self._inbox, True
        now = events.now
        if self.cursor > now:
            events.at(self.cursor, self._free)
            return
        self.cursor = now
        while True:
            if self._task is not None and (self._until is None or self._until()):
                if self.cursor > now:
                    break
                following = next(self._task, None)
                if following is None:
                    self._task = None
                elif isinstance(following, float | int):
                    self._until = None
                    self.spend(following)
                else:
                    self._until = following
            elif inbox:
                if self.cursor > now:
                    break
                seconds, act = inbox.popleft()
                self.spend(seconds)
                act()
            else:  # what is to be done next is delivered, or waits for a time
                self._is_busy = False
                return
        events.at(self.cursor, self._free)

    def _free(self) -> None:
        self._is_busy = False
        self._go()


class _MessageStream:
    """The messages from one process to another, in order."""

    def __init__(self, source: ModelledProcess, target: ModelledProcess, order: int) -> None:
        self.source, self.target = source, target
        self.order = order  # among equal streams of a link
        # the virtual time at which its last payload would end if streams shared the link
        self.shared = 0.0
        self.last = 0.0  # when its last message arrives
        self.under_way = 0  # payloads of which it is not known when they arrive


class _Waiting(NamedTuple):
    """A message that waits for its sender's link."""

    stream: _MessageStream
    size: int  # bytes of its payload
    takes: float  # seconds on a link
    handling: float  # seconds that its receiver's thread works for it
    act: Callable[[], None]


class _HostLink:
    """A host's link: what waits to leave over it, and until when it is taken."""

    def __init__(self) -> None:
        # what waits, by the virtual time at which it would begin if streams shared the link
        self.waiting: list[tuple[float, int, int, _Waiting]] = []
        self.virtual = 0.0
        self.leaves = 0.0  # when all that left has left
        self.arrives = 0.0  # when all that is to arrive so far is there
        self.is_busy = False  # something is about to leave


class LinkTraffic:
    """What processes send each other: within a process, within a host, or over links.

    The messages from one process to another are a stream in order. The streams that leave a host share its link
    fairly (start-time fair queueing, Goyal et al. 1996; of equal ones each host begins with another); a payload is
    passed on as it comes, and arrives behind those that arrive there already. What waits, waits without a limit.

    Args:
        events: what is to happen.
        links: of all hosts.
        costs: of messages and bytes.
        groups: the number of hosts with workers, which come first, and of those with servers alone.
        unevenness: the largest relative deviation, drawn at random, of a payload's time on a link. Streams of TCP
            share a link by and large; exactly equal ones would find links free in turn, as no real job does.

    Attributes:
        moved: bytes of payloads that went over links, so far.
    """

    def __init__(
        self,
        events: Events,
        links: Links,
        costs: Costs,
        groups: tuple[int, int],
        unevenness: float = 0.0,
    ) -> None:
        self.moved, self._groups = 0, groups
        self._unevenness, self._random = unevenness, random.Random(0)
        self._events, self._links, self._costs = events, links, costs
        self._of_hosts: defaultdict[int, _HostLink] = defaultdict(_HostLink)
        self._streams: dict[tuple[ModelledProcess, ModelledProcess], _MessageStream] = {}
        self._count = 0

    def send(
        self,
        source: ModelledProcess,
        target: ModelledProcess,
        size: int,
        act: Callable[[], None],
        many: int = 1,
        *,
        copied: bool = False,
    ) -> None:
        """Send a payload of `size` bytes, in `many` messages, at the sender's cursor; the receiver calls `act`.

        Args:
            copied: whether the receiver copies it inside a host, too, where others read it where it lies.
        """
        if source is target:
            target.deliver(0.0, act)
            return
        costs, links = self._costs, self._links
        handling = many * costs.message
        if source.host == target.host:
            source.spend(handling)
            handling += size * costs.received if copied else 0.0
            self._events.at(source.cursor, partial(target.deliver, handling, act))
            return
        source.spend(handling + size * costs.sent)
        handling += size * costs.received
        takes = (size + many * _HEADER) * links.framing / links.bandwidth
        stream = self._streams.get((source, target))
        if stream is None:
            order = self._order(source.host, target.host)
            stream = self._streams[source, target] = _MessageStream(source, target, order)
        message = _Waiting(stream, size, takes, handling, act)
        if size > _SMALL:
            if self._unevenness:
                differs = self._unevenness * self._random.uniform(-1.0, 1.0)
                message = message._replace(takes=takes * (1.0 + differs))
            stream.under_way += 1
            self._events.at(source.cursor, partial(self._wait, message))
        elif stream.under_way:
            self._events.at(source.cursor, partial(self._overtake, message))
        else:
            self._arrive(message, source.cursor + takes + links.latency)

    def _overtake(self, message: _Waiting) -> None:
        """Send a small message, which waits for no payload of other streams."""
        self._arrive(message, self._events.now + message.takes + self._links.latency)

    def _wait(self, message: _Waiting) -> None:
        """Have a message wait for its sender's link."""
        stream = message.stream
        link = self._of_hosts[stream.source.host]
        begins = max(link.virtual, stream.shared)
        stream.shared = begins + message.takes
        self._count += 1
        heapq.heappush(link.waiting, (begins, stream.order, self._count, message))
        if link.is_busy:
            return
        if self._costs.message and link.leaves <= self._events.now:
            self._leave(link)
        else:  # without costs many may be sent at once, of which the first is no matter of chance
            link.is_busy = True
            self._events.at(link.leaves, partial(self._leave, link))

    def _order(self, host: int, target: int) -> int:
        """Return a target's turn among those of its kind: each host begins with a different one."""
        first, others = self._groups
        number = host if host < first else host - first
        return (target - number) % first if target < first else (target - first - number) % others

    def _leave(self, link: _HostLink) -> None:
        """Put the next message on a host's link."""
        link.virtual, _, _, message = heapq.heappop(link.waiting)
        now, latency = self._events.now, self._links.latency
        late = self._slow_start(message)
        link.leaves = now + message.takes
        link.is_busy = bool(link.waiting)
        if link.is_busy:
            self._events.at(link.leaves, partial(self._leave, link))
        if late:
            self._events.at(now + latency + late, partial(self._enter, message))
        else:  # all that left before has entered before
            self._enter(message, now + latency)

    def _slow_start(self, message: _Waiting) -> float:
        """Return the seconds by which a stream that was idle is late, as TCP's window grows anew from packets."""
        links, now = self._links, self._events.now
        if now - message.stream.last < _IDLE + 2 * links.latency:
            return 0.0
        window = 2 * links.latency * links.bandwidth
        if window <= links.window:
            return 0.0
        rounds = math.log2(window / links.window)
        return 2 * links.latency * rounds * min(message.takes * links.bandwidth / window, 1.0)

    def _enter(self, message: _Waiting, time: float | None = None) -> None:
        """Receive a message that begins to arrive at a time, or now, behind all that arrives there."""
        link = self._of_hosts[message.stream.target.host]
        began = self._events.now if time is None else time
        link.arrives = there = max(link.arrives, began) + message.takes
        message.stream.under_way -= 1
        self._arrive(message, there)

    def _arrive(self, message: _Waiting, time: float) -> None:
        """Have a message be there, not before an earlier one of its stream."""
        stream = message.stream
        stream.last = time = max(time, stream.last)
        self.moved += message.size
        self._events.at(time, partial(stream.target.deliver, message.handling, message.act))
