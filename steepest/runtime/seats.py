"""The seats of a job: the reserved place of each process, and those to be given back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from steepest.core.system import system
from steepest.runtime.job_runtime import CallError, Group, runtime
from steepest.runtime.room import Seat

log = logging.getLogger(__name__)
_RELEASE_SECONDS = 5.0
_FAILED_SEATS = 2  # from which on a node is not used any more


class Placement:
    """The seats of a job: every reserved bundle, by a number that it keeps."""

    def __init__(self) -> None:
        self.order: list[int] = []  # in use or free: those of worker 0, 1, ..., then the free ones
        self.left: list[int] = []  # on nodes that the job has left; to be given back
        # in which processes died too often, with the node on which they did: reserved while they
        # are there, so that no other process of the job is placed there
        self.retired: dict[int, str] = {}
        self.serving: list[int] = []  # of servers alone, on nodes without workers; stay reserved
        self._seats: dict[int, Seat] = {}
        self._nodes: dict[int, str] = {}
        self._next = 0
        self._failed: Counter[str] = Counter()  # by node: seats in which processes died too often

    def add(self, seats: Sequence[Seat], *, serves: bool = False) -> list[int]:
        """Add seats to the end of `order`, or of `serving`; return their numbers."""
        numbers = list(range(self._next, self._next + len(seats)))
        self._next += len(seats)
        self._seats |= dict(zip(numbers, seats, strict=True))
        (self.serving if serves else self.order).extend(numbers)
        self.look()
        return numbers

    def look(self) -> None:
        """Ask Ray on which nodes the seats are: Ray moves bundles when a node dies."""
        self._nodes = {number: seat.node for number, seat in self._seats.items()}

    def nodes(self, order: Sequence[int] | None = None) -> list[str]:
        """Return the node ids of seats, by default of those in `order`."""
        return [self._nodes[seat] for seat in (self.order if order is None else order)]

    @property
    def serving_nodes(self) -> set[str]:
        """Ids of the nodes with servers alone, as far as Ray has placed these."""
        return {node for node in self.nodes(self.serving) if node}

    def at(self, seat: int) -> tuple[Group, int]:
        """Return the group and bundle of a process in a seat, or beside the process in it."""
        return self._seats[seat].group, self._seats[seat].bundle

    def arranged(self, workers: int, placement: Mapping[int, int]) -> list[int]:
        """Return another order of the seats: `placement` for some workers, the first free seats for the others."""
        free = [seat for seat in self.order if seat not in placement.values()]
        return [placement[i] if i in placement else free.pop(0) for i in range(workers)] + free

    def leave(self, seat: int) -> None:
        """Take a seat out of use, because the job has left its node."""
        self.order.remove(seat)
        self.left.append(seat)

    def leave_out(self, seats: Sequence[int]) -> str:
        """Retire seats in which processes died too often; return the consequences in words."""
        failing = self.failing
        for seat in seats:
            self._failed[self._nodes[seat]] += 1
            self.order.remove(seat)
            self.retired[seat] = self._nodes[seat]
        with_node = ", and so is the node" if self.failing != failing else ""
        return f"left out from now on{with_node}" if seats else "a successor joins when it is up"

    def distrust(self, node: str) -> None:
        """Leave a node out, see `failing`, because a process on it has computed wrongly."""
        self._failed[node] += _FAILED_SEATS

    @property
    def failing(self) -> set[str]:
        """Ids of nodes that are left out: distrusted, or with two retired seats; empty if no other would remain."""
        failing = {node for node, count in self._failed.items() if count >= _FAILED_SEATS}
        living = {*runtime().nodes()} if failing else set()
        return failing if living > failing else set()

    def surplus(self, workers: int) -> list[int]:
        """Return the seats that are not needed: those on nodes that were left, and free ones.

        Retired seats are among them when Ray moves them elsewhere, since their nodes are gone.
        """
        gone = [seat for seat, node in self.retired.items() if self._seats[seat].node != node]
        free = [seat for seat in self.order[workers:] if self._seats[seat].owned]
        return [*self.left, *gone, *free]

    def give_back(self, seats: Collection[int]) -> None:
        """Give workers' seats back to Ray; processes that run there end."""
        for number in seats:
            self._seats.pop(number).give_back()
            self._nodes.pop(number)
            self.retired.pop(number, None)
        self.left = [seat for seat in self.left if seat not in seats]
        self.order = [seat for seat in self.order if seat not in seats]

    def release(self) -> None:
        """Give all reservations back, which takes at most 5 seconds.

        Ray itself waits for a minute when its control store is gone, as after a signal to a whole
        process group, and then ends this process; what was reserved there is gone too.
        """
        seats = {seat.group.id.hex(): seat for seat in self._seats.values()}  # one of each group
        self._seats, self._nodes, self.order, self.left = {}, {}, [], []
        self.retired, self.serving = {}, []

        def give_back() -> None:
            try:
                for seat in seats.values():
                    seat.give_back()
            except CallError as error:
                log.warning("Ray did not take back what workers had reserved: %s", error)

        thread = system().start(give_back, "steepest release")
        thread.join(_RELEASE_SECONDS)
        if thread.is_alive():
            log.warning(
                "Ray has not taken back what %d workers had reserved within %g s: its control "
                "store (GCS) does not answer",
                len(seats), _RELEASE_SECONDS,
            )  # fmt: skip


def spread(nodes: Sequence[str], servers: int, running: Sequence[str] = ()) -> list[int]:
    """Return, for each server that does not run yet, the seat beside which it is placed: nodes take turns.

    Example:
        >>> spread(["a", "a", "b"], 3)
        [0, 2, 0]
        >>> spread(["a", "a", "b"], 3, ["b", "a"])
        [0]
    """
    firsts = [nodes.index(node) for node in dict.fromkeys(nodes)]
    beside = [firsts[server % len(firsts)] for server in range(servers)]
    for node in running[:servers]:
        beside.remove(next((at for at in beside if nodes[at] == node), beside[0]))
    return beside
