"""Scripted faults inside the processes of real workers and servers."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from steepest.core.engine.job import ModelCreator
from steepest.core.engine.server import Server
from steepest.core.engine.worker import Worker
from steepest.core.messages.message import Peer, worker_peer
from steepest.core.transport.router import Role, Router
from steepest.errors import ConfigurationError
from steepest.testing.faults import COMPUTING, Clock, Fault, Moment, WatchedCreator
from steepest.testing.moments import watch_server, watch_worker


def with_faults(
    model_creator: ModelCreator,
    faults: Iterable[Fault],
    lives: str | os.PathLike[str],
    *,
    batches: int = 1,
) -> ModelCreator:
    """Return a model creator whose job's processes have scripted faults, wherever they run.

    Only faults that a process can do to itself: `Fault.kill` and `Fault.hang` of workers and
    servers at any of their moments, `Fault.raises` and `Fault.slow` of workers. Faults at
    "forward", "backward", "push" and "report" of workers are done by the model, from which the
    library's own code cannot tell it; for the others the script follows the model's description to
    the processes of servers, and wraps some methods of the roles that it strikes there. Nothing is
    wrapped in other processes.

    A process does not know which life of its worker or server it is; it counts by files in `lives`:
    one, ``worker-1-life-0``, for each time that a worker's models were made, or that a server with
    a fault to come was put into a process. A line in it tells of each fault, and is written as it
    happens. A server's steps are counted from 0 again when the job is put together again because
    another process died.

    Args:
        model_creator: of the models.
        faults: in any order.
        lives: a folder that all processes see (of a file system that hosts share), empty when the
            run begins.
        batches: that each replica computes for a step: `accumulate`, or `sync_every`, or their
            product.

    Raises:
        ConfigurationError: a fault that no process can do to itself.
    """
    chosen = tuple(faults)
    for fault in chosen:
        possible = fault.what in ("kill", "hang") or (
            fault.role == "worker" and fault.what in ("raise", "slow")
        )
        if not possible or fault.rounds < math.inf:
            raise ConfigurationError(
                f"{fault} cannot happen inside a real process: give kill or hang (without rounds) "
                "of workers and servers, raises or slow of workers, or use "
                "InProcessCluster(faults=...)"
            )
    inside = _ProcessScript(chosen, Path(lives).absolute(), batches)
    return WatchedCreator(model_creator, inside.make_clock, inside.attend)


class _Life:
    """One life of a worker or server in this process."""

    def __init__(self, lives: Path, own: Peer) -> None:
        self.happened: set[Fault] = set()
        self.clock: Clock | None = None
        lives.mkdir(parents=True, exist_ok=True)
        for self.number in itertools.count():
            self._file = lives / f"{own.role}-{own.index}-life-{self.number}"
            try:
                self._file.touch(exist_ok=False)
            except FileExistsError:
                continue
            break

    def note(self, line: str) -> None:
        """Append a line to this life's file, where it stays though the process is killed."""
        with self._file.open("a") as file:
            file.write(line + "\n")


#: The lives in this process, which may be given its roles several times in one life.
_LIVES: dict[tuple[Path, Peer], _Life] = {}


@dataclass(frozen=True)
class _ProcessScript:
    """The script in one process, to which the model creator, or the job, carries it."""

    faults: tuple[Fault, ...]
    lives: Path
    batches: int

    def make_clock(self, worker: int) -> Clock:
        """Return the clock of a worker whose models are made in this process."""
        own = worker_peer(worker)
        life = _LIVES[self.lives, own] = _Life(self.lives, own)

        def reached(step: int, moment: Moment) -> None:
            if moment == "forward":
                clock.factor = max(
                    (f.factor for f in self.faults if f.slows(own, life.number, step)), default=1.0
                )
            self._reach(own, life, step, moment)

        clock = life.clock = Clock(self.batches, reached)
        return clock

    def attend(self, router: Router, own: Peer, role: Role) -> None:
        """Watch a worker or server that was put into this process, if a fault is to strike it."""
        if not any(
            own == (fault.role, fault.index) and fault.at not in _by_model(own)
            for fault in self.faults
        ):
            return
        if (life := _LIVES.get((self.lives, own))) is None:
            life = _LIVES[self.lives, own] = _Life(self.lives, own)

        def reached(step: int, moment: Moment, detail: str) -> None:
            self._reach(own, life, step, moment, detail, router.pump)

        if isinstance(role, Server):
            watch_server(role, reached)
        elif isinstance(role, Worker) and life.clock is not None:
            watch_worker(role, life.clock, reached)

    def _reach(
        self,
        own: Peer,
        life: _Life,
        step: int,
        moment: Moment,
        detail: str = "",
        flush: Callable[[], None] | None = None,
    ) -> None:
        for fault in self.faults:
            if (
                fault.at != moment
                or fault in life.happened
                or not fault.concerns(own, life.number, step)
            ):
                continue
            life.happened.add(fault)
            if flush is not None:
                flush()  # so that messages sent before the fault have left
            life.note(f"{fault} at {moment}" + (detail and f": {detail}"))
            _strike(fault)


def _by_model(own: Peer) -> tuple[Moment, ...]:
    return COMPUTING if own.role == "worker" else ()


def _strike(fault: Fault) -> None:
    """Do to this process what the fault says."""
    if fault.what == "raise":
        raise RuntimeError(f"scripted: {fault} at {fault.at}")
    if fault.what != "slow":
        os.kill(os.getpid(), signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
