"""The page of a live job, served by the driver."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

from steepest.core.messages.message import Peer
from steepest.core.system import system
from steepest.observe.page.addresses import KeptAddress
from steepest.observe.page.log_text import log_text
from steepest.observe.page.run_view import Known, RunView
from steepest.observe.page.server import PageServer
from steepest.observe.page.servers import ServerTimes
from steepest.runtime.activity import report
from steepest.runtime.answers_of_all import ask_all
from steepest.runtime.cluster import Cluster
from steepest.runtime.driver.training import Training
from steepest.runtime.places import MOST_LINES, Place, fetch_last_lines

log = logging.getLogger(__name__)
_MEMORY_SECONDS = 5.0  # from one look at the processes' memory to the next
_SECONDS = 0.2  # within which the rows are not read again


class JobPage:
    """The page of a job, which is served until the trainer is shut down.

    Attributes:
        url: its address, with the token: whoever has it sees the page.

    In a notebook it shows a link to itself.
    """

    def __init__(self, server: PageServer, address: KeptAddress) -> None:
        self._server, self._address = server, address
        self.url = server.url

    @property
    def where(self) -> tuple[str, int]:
        """The address and port at which it is served."""
        return self._server.host, self._server.port

    @property
    def address_file(self) -> Path:
        """A file with the whole address, which only this user can read."""
        return self._address.file

    def announce(self) -> None:
        """Log how to open it, without the token."""
        host, port = self.where
        log.warning("the page of this job: steepest watch %s:%d", host, port)

    def close(self) -> None:
        """Stop serving the page; a second call does nothing."""
        self._address.remove()
        self._server.close()

    def __repr__(self) -> str:
        return f"<the page of a job at {self._server.host}:{self._server.port}>"

    def _repr_html_(self) -> str:
        return f'<a href="{self.url}" target="_blank" rel="noopener">the page of this job</a>'


def open_page(
    cluster: Cluster, training: Training, run: Path | None, host: str, port: int
) -> JobPage:
    """Serve the page of a job until it ends; `run` is the directory of its checkpoints, if any."""
    name = run.resolve().name if run is not None else f"process {os.getpid()}"
    server = PageServer(LiveRun(cluster, training, name), host, port)
    try:
        page = JobPage(server, KeptAddress(server, run))
    except BaseException:
        server.close()
        raise
    cluster.ending.append(page.close)
    return page


def _name_of_ended(peer: Peer, place: Place) -> str:
    return f"{peer} (pid {place.pid})"  # another process has its name now


class LiveRun:
    """The data of a live job's page, read only on request: an open page costs nothing while no browser shows it."""

    def __init__(self, cluster: Cluster, training: Training, name: str) -> None:
        self._cluster, self._training = cluster, training
        self._history = training.history
        self._view = RunView(name)
        self._lock = system().lock()
        self._row = self._cuts = self._record = (
            0  # how far the history and its record have been read
        )
        self._read = -math.inf
        # by process: memory, and what it has used since the look before, of a processor and of the network in a second
        self._used: dict[str, dict[str, float]] = {}
        self._counted: dict[str, tuple[float, float, float, float]] = {}  # see `_ask`
        self._servers = ServerTimes()
        self._looked = -math.inf
        self._looking = False

    def as_json(self, known: Known) -> dict[str, Any]:
        """Return the data of the page."""
        self._look()
        with self._lock:
            if system().now() - self._read > _SECONDS:
                self._catch_up()
            span = self._history.record.open_span()
            now = {
                "live": True,
                "training": self._training.running,
                "goal": self._training.goal,
                "processes": self._processes(),
                "ended": [
                    {
                        "name": _name_of_ended(peer, at),
                        "host": at.host,
                        "node": at.node,
                        "pid": at.pid,
                    }
                    for peer, at in list(self._cluster.former)
                ],
                "servers": self._servers.as_json(),
            }
            return self._view.as_json(known, span, now)

    def stacks(self) -> str:
        """Return what each process is doing."""
        return report(self._cluster)

    def log(self, process: str) -> str:
        """Return the last lines that a process has printed."""
        places = {str(peer): at for peer, at in self._cluster.places.items()}
        places |= {_name_of_ended(peer, at): at for peer, at in list(self._cluster.former)}
        place = places.get(process)
        if place is None:
            return f"{process!r:.60} is no process of the job now: Changes of the job says what became of it"
        return log_text(fetch_last_lines(place, MOST_LINES)) or "it has printed nothing"

    def _catch_up(self) -> None:
        """Add new rows, some at a time, because training waits for the history meanwhile."""
        while True:
            rows, self._row, cuts = self._history.since(self._row)
            if cuts != self._cuts:  # steps are taken again: others than those that are known
                self._view.forget_history()
                self._row, self._cuts = 0, cuts
                continue
            self._view.add_all(rows)
            if not rows:
                break
        rows, self._record = self._history.record.rows(self._record)
        self._view.add_all(rows)
        self._read = system().now()

    def _processes(self) -> list[dict[str, Any]]:
        return [
            {
                "name": str(peer),
                "node": place.node,
                "host": place.host,
                "pid": place.pid,
                **self._used.get(str(peer), {}),
            }
            for peer, place in sorted(self._cluster.places.items())
        ]

    def _look(self) -> None:
        """Have a thread ask what the processes use, if that was long ago and none does."""
        with self._lock:
            if self._looking or system().now() - self._looked < _MEMORY_SECONDS:
                return
            self._looking, self._looked = True, system().now()
        system().start(self._ask, "steepest page memory")

    def _ask(self) -> None:
        try:
            counters = ask_all(dict(self._cluster.actors), "counters")
            counted = {
                str(peer): (each["now"], each["processor"], each["bytes_sent"], each["waited"])
                for peer, each in counters.items()
            }
            used: dict[str, dict[str, float]] = {}
            for peer, each in counters.items():
                used[str(peer)] = {"memory": each["resident"]}
                after = counted[str(peer)]
                passed, had, sent, waited = (
                    now - before
                    for now, before in zip(after, self._counted.get(str(peer), after), strict=True)
                )
                if passed > 0 and had >= 0:  # else it is another process
                    used[str(peer)] |= {
                        "processor": had / passed,
                        "sent": sent / passed,
                        "waited": max(waited, 0.0)
                        / passed,  # threads that have ended count no more
                    }
            self._used, self._counted = used, counted
            self._servers.add(
                {
                    str(peer): (each["now"], each["servers"])
                    for peer, each in sorted(counters.items())
                }
            )
        finally:
            self._looking = False
