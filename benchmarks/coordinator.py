"""What the coordinator costs a step: its processor time for each of tens to thousands of workers, without sockets.

    python -m benchmarks.coordinator
    python -m benchmarks.coordinator --workers 1024 4096 --servers 8 --steps 20

The coordinator of a job decides each step of so many workers by itself. All messages to it are packed before, and are
read and checked as those of other processes; all that it sends is packed. What moves the bytes is not in the figures.
The garbage collector leaves alone what was there before, as in the processes of a job.
``statistics`` are losses, timings and one metric in each report, as `fit` asks for them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator

from benchmarks.overhead import positive
from steepest.core.engine.coordinator_role import CoordinatorRole
from steepest.core.messages.driver import AskForSteps
from steepest.core.messages.fields import Limits
from steepest.core.messages.gradients import Report, VersionStaged
from steepest.core.messages.membership import Join
from steepest.core.messages.message import COORDINATOR, Message, Peer, server_peer, worker_peer
from steepest.core.messages.permissions import TRAINING, MessageCheck
from steepest.core.messages.schema import Body
from steepest.core.protocol.commit_rules import CommitAll
from steepest.core.protocol.commit_state import CommitState
from steepest.core.protocol.coordinator import Updates
from steepest.core.protocol.job_coordinator import JobCoordinator
from steepest.core.transport.frames import HEADER, decode_header, encode

WORKERS, SERVERS, STEPS, SAMPLES = (64, 256, 1024, 4096), 2, 10, 32
GOAL = 20  # microseconds of a step for each worker
_CLIENT = Peer("client", 0)
_TIMINGS = {"data": 0.001, "compute": 0.1, "wait": 0.01}


class CoordinatedJob:
    """A coordinator, and what the other processes of its job send.

    Args:
        workers, servers: their numbers.
        stats: whether reports have statistics.
    """

    def __init__(self, workers: int, servers: int, *, stats: bool) -> None:
        members = range(workers)
        state = CommitState(
            members=frozenset(members),
            servers=tuple(range(servers)),
            holding=frozenset(range(servers)),
            rule=CommitAll(),
        )
        coordinator = JobCoordinator(state, Updates(lambda step: [{"lr": 0.1}]), step_timeout=60.0)
        self._workers, self._servers, self._stats = workers, servers, stats
        self._coordinator = coordinator
        self._check = MessageCheck(TRAINING, Limits(workers, servers))
        self._role = CoordinatorRole(coordinator, self._send)
        self.sent = 0  # bytes
        for worker in members:
            self._handle(self._framed(worker_peer(worker), Join(0)))

    def _send(self, target: Peer, message: Message) -> None:
        message.source, message.target = COORDINATOR, target
        self.sent += len(encode(message))

    def _framed(self, source: Peer, body: Body) -> bytes:
        message = body.pack()
        message.source, message.target = source, COORDINATOR
        return encode(message)

    def _handle(self, frame: bytes) -> None:
        """Read a message as the transport and the router do, and act on it."""
        message, _, _ = decode_header(frame)
        message.body = frame[HEADER.size :]
        self._check.check(message)
        assert message.source is not None
        self._role.handle(message.source, message)

    def ask(self, steps: int) -> None:
        """Ask for steps."""
        request = AskForSteps(self._coordinator.state.generation, 1, steps, self._stats)
        self._handle(self._framed(_CLIENT, request))

    def _frames(self, number: int) -> Iterator[bytes]:
        """Yield the messages of the step with this number, counted from 1."""
        state = self._coordinator.state
        more = {"loss": 0.5, "metrics": {"accuracy": 0.5}, "timings": _TIMINGS}
        for worker in range(self._workers):
            report = Report(
                *(state.generation, 0, number, state.version, float(SAMPLES)),
                *(SAMPLES, 1 << 20, 1 << 20),
                **(more if self._stats else {}),
            )
            yield self._framed(worker_peer(worker), report)
        for server in range(self._servers):
            staged = VersionStaged(state.generation, state.version, 1.0)
            yield self._framed(server_peer(server), staged)

    def step(self, number: int) -> float:
        """Take the step with this number, from 1; return the coordinator's seconds of processor time."""
        frames, version = list(self._frames(number)), self._coordinator.version
        began = time.process_time()
        for frame in frames:
            self._handle(frame)
        seconds = time.process_time() - began
        assert self._coordinator.version == version + 1
        return seconds


def measure(workers: int, servers: int, steps: int, *, stats: bool) -> float:
    """Return the median of the coordinator's microseconds of a step for each worker."""
    job = CoordinatedJob(workers, servers, stats=stats)
    job.ask(steps + 2)
    job.step(1)
    job.step(2)
    gc.collect()
    gc.freeze()
    return 1e6 * statistics.median(job.step(3 + i) for i in range(steps)) / workers


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coordinator",
        description=__doc__.split("\n")[0] if __doc__ else "",
    )
    parser.add_argument("--workers", type=positive, nargs="+", default=WORKERS, metavar="N")
    parser.add_argument("--servers", type=positive, default=SERVERS, metavar="N")
    parser.add_argument("--steps", type=positive, default=STEPS, metavar="N")
    options = parser.parse_args(arguments)
    print(f"microseconds of processor time for a worker and step, at most {GOAL} wanted")
    print(f"{'workers':>8}{'plain':>9}{'statistics':>12}")
    for workers in options.workers:
        figures = [
            measure(workers, options.servers, options.steps, stats=stats) for stats in (False, True)
        ]
        print(f"{workers:>8,}{figures[0]:>9.1f}{figures[1]:>12.1f}", flush=True)


if __name__ == "__main__":
    main()
