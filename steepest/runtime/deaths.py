"""Which of a job's processes are dead, and why; a process declared dead is killed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from steepest.core.messages.message import Peer
from steepest.errors import PeerLostError, RemoteTraceback, StepError
from steepest.runtime.calls import RemoteError, end_of
from steepest.runtime.context import JobContext
from steepest.runtime.job_runtime import CallRaisedError, ProcessDiedError, runtime
from steepest.runtime.places import fetch_last_lines, kill

T = TypeVar("T")
_CLOSE_SECONDS = 5.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Death:
    """How a process ended."""

    cause: str
    traceback: str = ""  # of the Python error that ended its router, while the process lives on
    believed: bool = False  # Ray has not said so: its node may be gone too


@dataclass(frozen=True)
class _Defect:
    """A process that ended by an error of its own."""

    watch: Any  # the call that watched it
    version: int  # committed by then
    repeated: bool  # the one before it in the same seat ended so too, at the same version


class Deaths:
    """The dead of a job. Each is killed, so that its CPUs and memory are free for its successor."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._known: dict[Any, Death] = {}  # by the call that watches the process
        self._defects: dict[int, _Defect] = {}  # the last one, by seat

    def cause(self, peer: Peer) -> str | None:
        """Return why a process is dead; None while it serves. One whose router ended by an error is killed."""
        death = self._death(peer)
        return None if death is None else death.cause

    def causes(self) -> dict[Peer, str]:
        """Return the dead processes with their causes, see `cause`; Ray is asked once for all."""
        watches = self._context.watches
        unsure = [watch for watch in watches.values() if watch not in self._known]
        ended = runtime().wait(unsure, 0)
        dead = {*ended, *self._known}
        causes = {peer: self.cause(peer) for peer, watch in watches.items() if watch in dead}
        return {peer: cause for peer, cause in causes.items() if cause is not None}

    def traceback(self, peer: Peer) -> str:
        """Return the traceback of the error that ended a process' router; empty if none did."""
        death = self._death(peer) if peer in self._context.members else None
        return "" if death is None else death.traceback

    def is_believed(self, peer: Peer) -> bool:
        """Return whether a process was declared dead without word from Ray."""
        death = self._death(peer)
        return death is not None and death.believed

    def declare(self, peer: Peer, why: str) -> str:
        """Declare a process dead and kill it; it may be alive, but unreachable.

        Returns:
            The cause of its death: Ray's explanation, if there is any, or `why`.
        """
        if (cause := self.cause(peer)) is not None:
            return cause
        member = self._context.members[peer]
        self._known[member.watch] = Death(why, believed=True)
        kill(member.place, member.actor)
        return why

    def is_repeated(self, peer: Peer, seat: int) -> bool:
        """Return whether starting another process in a dead one's seat is useless.

        It is if the process ended by an error of its own, as did the one before it in the same seat,
        without a version committed in between. This end is remembered for the next call.
        """
        if not self.traceback(peer):
            return False
        watch, version = self._context.members[peer].watch, self._context.client.position.version
        before = self._defects.get(seat)
        if before is None or before.watch != watch:
            before = _Defect(watch, version, before is not None and before.version == version)
            self._defects[seat] = before
        return before.repeated

    def raise_if_dead(
        self,
        suspect: Peer | None = None,  # looked at first: its death may be the cause of the others'
        wait: float = 0.0,  # seconds that Ray has to notice a death
        *,
        replaced: Callable[[Peer], bool] = lambda peer: False,  # is its death handled elsewhere?
    ) -> None:
        """Raise PeerLostError if a process is dead that is not being replaced.

        Raises:
            PeerLostError: a process is dead; the message has its host and last lines of output.
            StepError: the driver's own router has ended by an error.
        """
        if (
            self._context.router.finished.done()
            and (error := self._context.router.finished.exception()) is not None
        ):
            raise StepError(f"the driver's router ended: {error!r}") from error
        if self._context.members:
            runtime().wait([each.watch for each in self._context.members.values()], wait, 1)
        for peer in sorted(self._context.members, key=lambda peer: peer != suspect):
            if peer in self._context.awaited or replaced(peer):
                continue
            if (cause := self.cause(peer)) is not None:
                self.raise_lost(peer, cause)

    def lost(self, peer: Peer, why: str) -> NoReturn:
        """Raise PeerLostError for a role whose channel closed, with what Ray knows of it."""
        self.raise_if_dead(process := self._context.process_of(peer), _CLOSE_SECONDS)
        self.raise_lost(process, why)

    def raise_lost(self, peer: Peer, why: str) -> NoReturn:
        """Raise PeerLostError for a process, with its place and its last lines of output."""
        where, lines, traceback = "", ["(nothing)"], self.traceback(peer)
        if (member := self._context.members.get(peer)) is not None:
            place = member.place
            where = f" on {place.host} (node {place.node[:12]}, pid {place.pid})"
            lines = fetch_last_lines(place) or lines
        text = "\n".join(f"    {line}" for line in lines)
        raise PeerLostError(
            f"{peer}{where} died: {why}; the weights of the last commit are still there unless it "
            f"held them (weights(), save()); its last lines:\n{text}"
        ) from (RemoteTraceback(traceback) if traceback else None)

    def _death(self, peer: Peer) -> Death | None:
        member = self._context.members[peer]
        watch, place = member.watch, member.place
        if watch in self._known:
            return self._known[watch]
        death = death_of(watch)
        if death is not None:
            self._known[watch] = death
            if death.traceback:
                log.warning(
                    "%s on %s (pid %d): %s; the process is killed; %s",
                    peer, place.host, place.pid, death.cause, death.traceback.rstrip(),
                )  # fmt: skip
                kill(place, member.actor)
        return death


def persistently(start: Callable[[], T], allowed: int) -> T:
    """Call a function that starts a job, again if a process dies meanwhile, and return its result."""
    for left in range(allowed, 0, -1):
        try:
            return start()
        except PeerLostError as error:
            log.warning("%s; the job is started again, %d times at most", error, left)
    return start()


def death_of(watch: Any) -> Death | None:
    """Return how an actor ended, by a call of its `Process.watch`; None while it serves."""
    ended, error = end_of(watch)
    if error is None:
        return Death("it was stopped") if ended else None
    if isinstance(error, CallRaisedError):
        if isinstance(error.cause, RemoteError):
            described = error.cause.told
            return Death(f"its router ended: {described['error']}", described["traceback"])
        return Death(f"its router ended: {error.cause}", str(error))
    if not isinstance(error, ProcessDiedError):
        raise error
    text = " ".join(str(error).split())
    if "connection error code 2" in text:
        return Death(
            "its process has ended without a word: by a signal, for want of memory, by a crash or by os._exit"
        )
    for mark in ("The actor is dead because", "Worker exits", "Worker unexpectedly exits"):
        if mark in text:
            return Death(text[text.index(mark) :].partition(" Some common causes")[0][:300])
    return Death(text[:300])
