"""What servers spent their time on between two looks at their counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from steepest.observe.page.thinning import short

#: By process: the seconds of its clock, and of each server in it the index, commits so far, and the seconds so far
#: in which it took pushes and applied commits.
Counted = Mapping[str, tuple[float, Sequence[tuple[int, int, float, float]]]]


class _ServerCounters(NamedTuple):
    """The counters of one server at a time of its process's clock; times in seconds."""

    now: float
    commits: int
    taking: float
    committing: float


class ServerTimes:
    """The means of a version, between the last two looks at which a server had made progress."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], _ServerCounters] = {}
        self._found: dict[tuple[str, int], dict[str, Any]] = {}

    def add(self, counted: Counted) -> None:
        """Add a look at the counters; a server that it lacks has ended."""
        here = {}
        for process, (now, servers) in counted.items():
            for index, *sums in servers:
                key = (process, index)
                look = _ServerCounters(now, int(sums[0]), float(sums[1]), float(sums[2]))
                before = self._before.get(key, _ServerCounters(now, look.commits, 0.0, 0.0))
                here[key] = look
                if (versions := look.commits - before.commits) > 0:
                    taking = (look.taking - before.taking) / versions
                    updating = (look.committing - before.committing) / versions
                    rest = max((now - before.now) / versions - taking - updating, 0.0)
                    self._found[key] = {
                        "server": index,
                        "versions": versions,
                        "taking": short(taking),
                        "updating": short(updating),
                        "waiting": short(rest),
                    }
                elif versions < 0:  # another server of the same name
                    self._found.pop(key, None)
        self._before = here
        self._found = {key: each for key, each in self._found.items() if key in here}

    def as_json(self) -> list[dict[str, Any]]:
        """Return for each "server": "versions" that it made, and the seconds of one: "taking", "updating", "waiting".

        Taking is receiving and reducing gradients; updating includes sending the new weights. Servers of
        which no progress was seen are left out.

        Example: ten versions within a second.

            >>> times = ServerTimes()
            >>> times.add({"server 0": (1.0, [(0, 5, 0.5, 0.25)])})
            >>> times.add({"server 0": (2.0, [(0, 15, 0.7, 0.35)])})
            >>> times.as_json()
            [{'server': 0, 'versions': 10, 'taking': 0.02, 'updating': 0.01, 'waiting': 0.07}]
        """
        return sorted(dict(self._found).values(), key=lambda each: int(each["server"]))
