"""The timeline of a job: spans are recorded in its processes, fetched by the driver, and written at the end."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from steepest.core.engine.spans import SPAN, SpanRing, record_roles
from steepest.core.system import system
from steepest.core.transport.router import Router
from steepest.errors import ConfigurationError
from steepest.observe.timeline.recorded import (
    ClockReading,
    DriverSpan,
    JobShape,
    NodeClock,
    ProcessSpans,
    RecordedJob,
)
from steepest.observe.timeline.trace_file import write_trace
from steepest.runtime.answers_of_all import ask_all
from steepest.runtime.cluster import Cluster
from steepest.runtime.driver.training import Training
from steepest.runtime.job_runtime import CallError, LateError, ProcessDiedError, runtime

log = logging.getLogger(__name__)
_CAPACITY = 1 << 16  # spans of a process between two looks: 2.9 MB
_LOOK_SECONDS, _FETCH_SECONDS = 0.5, 2.0
_TRIPS = 8  # there and back to a node, to read its clock
_TRIP_SECONDS = 2.0
_MOST_SPANS = 4_000_000  # of all processes, in the driver's memory: 176 MB


class Timeline:
    """Records what the processes of a job do, from its making to `end`.

    Args:
        cluster: the job.
        training: its steps.
        path: the file that `end` writes.
    """

    def __init__(self, cluster: Cluster, training: Training, path: Path) -> None:
        self._cluster, self._path = cluster, path
        job = cluster.job
        self._job = RecordedJob(
            JobShape(job.config.name, job.needs_all, job.shares, job.versions_per_step),
            system().now(),
            [],
            {},
            [],
            runtime().host,
            os.getpid(),
        )
        self._known: dict[Any, ProcessSpans] = {}  # by the handle of the process
        # of servers in this process
        self._own = ProcessSpans("the driver's server", runtime().node, runtime().host, os.getpid())
        self._ring = SpanRing(_CAPACITY)
        self._router: Router | None = None
        self._fetched = 0  # spans
        self._ending = system().event()
        self._stepped = system().now()
        self._training = training
        training.on_count = self._count
        self._look()
        self._thread = system().start(self._watch, "steepest timeline")

    # -- the driver's own spans ------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Record a call of the trainer's."""
        began = system().now()
        try:
            yield
        finally:
            self._job.driver.append(DriverSpan(name, began, system().now(), "calls"))

    def _count(self, step: int) -> None:
        """Record that the driver has heard of a step."""
        now = system().now()
        self._job.driver.append(DriverSpan(f"step {step}", self._stepped, now, "steps", step))
        self._stepped = now

    # -- the processes' --------------------------------------------------------------------------

    def _watch(self) -> None:
        fetched = system().now()
        while not self._ending.wait(_LOOK_SECONDS):
            new = any(actor not in self._known for actor in self._cluster.actors.values())
            if new or system().now() - fetched >= _FETCH_SECONDS:
                self._look()
                fetched = system().now()

    def _look(self, least: int = _CAPACITY // 2) -> None:
        """Have new processes record, and fetch the spans of the others if there are many."""
        actors, places = self._cluster.actors, self._cluster.places
        actors = {peer: actor for peer, actor in actors.items() if peer in places}
        if self._router is not self._cluster.router:  # another one after some changes of the job
            self._router = self._cluster.router
            self._router.call(partial(record_roles, self._router, self._ring))
        new = {peer: actor for peer, actor in actors.items() if actor not in self._known}
        for peer in ask_all(new, "record", lambda peer: (_CAPACITY,)):
            place = places[peer]
            if place.node not in self._job.clocks:
                self._job.clocks[place.node] = NodeClock()
                self._read_clock(place.node, actors[peer])
            spans = ProcessSpans(str(peer), place.node, place.host, place.pid)
            self._known[actors[peer]] = spans
            self._job.processes.append(spans)
        known = {peer: actor for peer, actor in actors.items() if actor in self._known}
        answers = ask_all(known, "spans", lambda peer: (self._known[actors[peer]].count, least))
        self._add(self._own, *self._ring.since(self._own.count, least))
        for peer, (count, block) in answers.items():
            self._add(self._known[actors[peer]], count, block)

    def _add(self, process: ProcessSpans, count: int, block: bytes) -> None:
        """Keep the fetched spans of a process, as long as there is room."""
        new = len(block) // SPAN.size
        if self._fetched + new > _MOST_SPANS:
            block, new = b"", 0
        process.lost += count - process.count - new
        process.count = count
        self._fetched += new
        if block:
            process.blocks.append(block)

    def _read_clock(self, node: str, actor: Any) -> None:
        """Compare a node's clock with this one's: the fastest of several round trips tells most."""
        if node == runtime().node:
            return  # processes of one machine have one clock
        readings, now = [], system().now
        with contextlib.suppress(ProcessDiedError, CallError, LateError):
            for _ in range(_TRIPS):
                sent = now()
                reading = runtime().call(actor, "clock").get(_TRIP_SECONDS)
                readings.append(ClockReading.of_trip(sent, reading, now()))
        if readings:
            best = min(readings, key=lambda each: each.error)
            self._job.clocks[node].readings.append(best)

    # -- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """Fetch the rest, stop recording, and write the file; ConfigurationError: it cannot be written."""
        self._training.on_count = None
        self._ending.set()
        self._thread.join()
        self._look(1)
        actors, nodes = dict(self._cluster.actors), set()
        for actor in actors.values():
            node = self._known[actor].node if actor in self._known else None
            if node is not None and node not in nodes:
                nodes.add(node)
                self._read_clock(node, actor)
        ask_all(actors, "record", lambda peer: (0,))
        if (router := self._router) is not None:
            router.call(partial(record_roles, router, None))
        if self._own.blocks:
            self._job.processes.append(self._own)
        count = write_trace(self._path, self._job.events(), self._job.about())
        lost = sum(each.lost for each in (self._own, *self._known.values()))
        if lost:
            log.warning(
                "the timeline %s lacks %d spans, for which there was no room", self._path, lost
            )
        log.info(
            "timeline: %s has %d events; open it at https://ui.perfetto.dev", self._path, count
        )


@contextlib.contextmanager
def recorded(timeline: Timeline, release: Callable[[], None]) -> Iterator[None]:
    """Record a block, and write the file also if the block raises."""
    try:
        yield
    except BaseException:
        try:
            timeline.end()
        except ConfigurationError as error:
            log.warning("%s", error)
        finally:
            release()
        raise
    try:
        timeline.end()
    finally:
        release()
