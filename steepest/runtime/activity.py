"""What each process of a job is doing, as text: its roles, what they wait for, its Python stack."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import ray

from steepest.errors import describe_stack, listed
from steepest.messages.message import Peer
from steepest.runtime.calls import drop_calls, last_line
from steepest.runtime.places import Place, processor_state, processor_use
from steepest.transport.router import Router

log = logging.getLogger("steepest.deadlines")
_ANSWER_SECONDS = 2.0  # that a process has to answer
_REPORT_SECONDS = 4.0  # that a report takes, at most
_OWN_MODULES = (__name__, "steepest.runtime.signals")
_MOST_LINES = 40  # of one stack
_MOST_STACKS = 24  # of processes, and of the driver's threads
_MOST_CALLS = 4  # of one process
_MOST_NAMES = 16  # of processes that are listed for one stack
#: From which on a router's thread is called busy; an idle one ticks in half of it.
_BUSY_SECONDS = 1.0


@dataclass(frozen=True)
class Activity:
    """What a process is doing."""

    name: str
    host: str
    pid: int
    roles: Sequence[tuple[str, str]]  # names, and what each does or waits for
    busy: float  # seconds since the router's thread last took a message or looked at the time
    computing: int | None  # number of the share that its worker computes
    stack: str  # of the router's thread, outermost frame first
    calls: Sequence[str] = ()  # stacks of Ray's threads in a call of this process


def activity_of(name: str, place: Place, router: Router, computing: int | None) -> Activity:
    """Return what the process is doing in which this is called, on any thread."""
    roles = [(str(peer), words) for peer, words in router.doing()]
    # threads of this library's own have names, and this one asks
    own = {each.ident for each in threading.enumerate() if each.name.startswith("steepest")}
    found, _ = _stacks_of_threads(own | {threading.get_ident()})
    calls = list(found)
    stack = router.where(whole=True)
    return Activity(name, place.host, place.pid, roles, router.busy, computing, stack, calls)


def _stacks_of_threads(
    without: Set[int | None],
    main: int | None = None,  # comes first, whatever code it is in
) -> tuple[dict[str, list[int]], int]:
    """Return which threads are in each stack that is in code of steepest, and how many others there are."""
    frames = {each: at for each, at in sys._current_frames().items() if each not in without}
    stacks: dict[str, list[int]] = {}
    for ident in sorted(frames, key=lambda ident: ident != main):
        at = _outside(frames[ident])
        if at is not None and (ident == main or _is_of_steepest(at)):
            stacks.setdefault(describe_stack(at, whole=True), []).append(ident)
    return stacks, len(frames) - sum(map(len, stacks.values()))


class Watched(Protocol):
    """What a report needs to know of a job; its methods may be called on any thread."""

    @property
    def places(self) -> Mapping[Peer, Place]:
        """Where each process runs, by role."""

    @property
    def actors(self) -> Mapping[Peer, Any]:
        """Ray's handle of each process that has a role, by role."""

    def roles(self) -> Sequence[tuple[Peer, str]]:
        """Return the roles in this process, and what each does or waits for, see `Router.doing`."""

    def processes(self) -> Sequence[Any]:
        """Return the handles of all processes, with a role or without."""

    def silence(self, actor: Any) -> float:
        """Return for how many seconds a process had given no sign of life when last looked at."""

    def share_in_words(self, share: int) -> str:
        """Return the step of which a share is, in words; "" if that is not known."""


def log_report(context: Watched, what: str) -> None:
    """Log what each process is doing, as a warning of `steepest.deadlines`: `what` has passed its deadline.

    To be called before the error is raised. It raises nothing, and takes 4 seconds at most.
    """
    if log.isEnabledFor(logging.WARNING):
        log.warning("a deadline has passed: %s\n%s", what, report(context))


def report(context: Watched) -> str:
    """Return what each process of a job is doing, and the driver, as text of bounded length.

    Processes whose stacks are equal are listed together. Of one that does not answer within 2 seconds
    the text has the last sign of life and, on the driver's node, what the kernel says of it. May be
    called on any thread. Raises nothing, and takes 4 seconds at most.
    """
    try:
        return _Report(context).text()
    except Exception as error:  # noqa: BLE001 - a report is made amid failures, of which it is to be none
        return f"steepest cannot say what its processes are doing: {error!r}"


class _Report:
    """One report, which is being made."""

    def __init__(self, context: Watched) -> None:
        self._context = context
        self._began = time.monotonic()
        self._actors = dict(context.actors)
        self._names = {actor: str(peer) for peer, actor in self._actors.items()}
        self._places = {
            actor: context.places[peer]
            for peer, actor in self._actors.items()
            if peer in context.places
        }
        self._own: list[str] = []
        self._answers: dict[Any, Activity] = {}
        self._mute: dict[Any, str] = {}

    def text(self) -> str:
        """Ask all processes; return the report."""
        asking = threading.Thread(target=self._ask, name="steepest report", daemon=True)
        asking.start()
        asking.join(_REPORT_SECONDS)
        late = [f"the report was not complete within {_REPORT_SECONDS:g} s"]
        mute = list(self._mute.values())
        rest = len(mute) - _MOST_NAMES
        more = [f"{rest} more processes do not answer"] if rest > 0 else []
        lines = [
            *(late if asking.is_alive() else []),
            *mute[:_MOST_NAMES],
            *more,
            *self._grouped(list(self._answers.values())),
            *self._own,
        ]
        return "\n".join(lines)

    # -- the processes -------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask the processes; note answers, and what is known of those that give none."""
        try:
            self._ask_all()
        except Exception as error:  # noqa: BLE001 - what was found so far is the report
            self._own.append(f"the report is not complete: {error!r}")

    def _ask_all(self) -> None:
        actors = dict.fromkeys([*self._actors.values(), *self._context.processes()])
        if not actors or not ray.is_initialized():  # else a call would begin Ray anew
            self._own = self._driver()
            return
        here = ray.get_runtime_context().get_node_id()
        near = {actor: place for actor, place in self._places.items() if place.node == here}
        before = {actor: processor_use(place.pid) for actor, place in near.items()}
        calls = {actor: actor.doing.remote() for actor in actors}
        self._own = self._driver()
        left = max(self._began + _ANSWER_SECONDS - time.monotonic(), 0.0)
        _, owing = ray.wait(list(calls.values()), num_returns=len(calls), timeout=left)
        for actor, call in calls.items():
            name = self._name(actor)
            if call in owing:
                self._mute[actor] = self._about(actor, before.get(actor))
                continue
            try:
                self._answers[actor] = ray.get(call, timeout=_ANSWER_SECONDS / 2)
            except ray.exceptions.RayActorError:
                if actor in self._names:  # else one that was let go long ago
                    self._mute[actor] = f"{name} is dead"
            except ray.exceptions.RayError as error:
                self._mute[actor] = f"{name} cannot say what it does: {last_line(error)}"
        drop_calls(owing)

    def _name(self, actor: Any) -> str:
        """Return the name of a process, with the place where it runs if that is known."""
        name = self._names.get(actor, "a process without a role")
        place = self._places.get(actor)
        return name if place is None else f"{name} on {place.host} (pid {place.pid})"

    def _about(self, actor: Any, before: tuple[float, bool] | None) -> str:
        """Return what is known of a process that does not answer; `before`: its use of processors when it was asked."""
        waited = time.monotonic() - self._began
        words = [f"{self._name(actor)} does not answer within {_ANSWER_SECONDS:g} s"]
        with contextlib.suppress(Exception):  # another thread looks for signs of life meanwhile
            silent = max(self._context.silence(actor), waited)
            words.append(f"its last sign of life came {silent:.1f} s ago")
        place = self._places.get(actor)
        if place is not None and place.node == ray.get_runtime_context().get_node_id():
            if state := processor_state(place.pid):
                words.append(f"it {state}")
            after = processor_use(place.pid)
            if before is not None and after is not None:
                words.append(
                    f"it used {after[0] - before[0]:.1f} s of processor time in {waited:.1f} s"
                )
        return "; ".join(words)

    def _grouped(self, found: Sequence[Activity]) -> list[str]:
        """Return the lines of the processes that have answered; the fewer share a stack, the earlier."""
        stacks: dict[str, list[Activity]] = {}
        for activity in found:
            stacks.setdefault(activity.stack, []).append(activity)
        groups = sorted(stacks.items(), key=lambda group: len(group[1]))
        lines: list[str] = []
        for stack, processes in groups[:_MOST_STACKS]:
            for process in processes[:_MOST_NAMES]:
                lines += self._lines_of(process)
            rest = len(processes) - _MOST_NAMES
            lines += [f"{rest} more processes, in the same place"] if rest > 0 else []
            lines += _indented("each of these is in:" if len(processes) > 1 else "it is in:", stack)
        rest = len(groups) - _MOST_STACKS
        return [*lines, *([f"processes in {rest} other places are left out"] if rest > 0 else [])]

    def _lines_of(self, process: Activity) -> list[str]:
        """Return the line of a process, and those of its roles."""
        busy = f", busy for {process.busy:.1f} s" if process.busy > _BUSY_SECONDS else ""
        lines = [f"{process.name} on {process.host} (pid {process.pid}){busy}:"]
        for role, words in process.roles:
            lines.append(f"    {role} {words}")
        if process.computing is not None:
            with contextlib.suppress(Exception):  # the job is being put together
                step = self._context.share_in_words(process.computing)
                lines += [f"    its share is of {step}"] if step else []
        for stack in process.calls[:_MOST_CALLS]:
            lines += _indented("a call is in:", stack)
        return lines

    # -- the driver ----------------------------------------------------------------------------

    def _driver(self) -> list[str]:
        """Return the lines of this process: its roles, and the stacks of steepest's threads."""
        lines = [f"the driver (pid {os.getpid()}):"]
        for peer, words in self._context.roles():
            lines.append(f"    {'client' if peer.role == 'client' else peer} {words}")
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks, others = _stacks_of_threads(set(), threading.main_thread().ident)
        for stack, idents in list(stacks.items())[:_MOST_STACKS]:
            threads = [names.get(ident, "a thread") for ident in idents]
            plural = "threads" if len(threads) > 1 else "thread"
            lines += _indented(f"{plural} {listed(threads)}:", stack)
        return [*lines, *([f"    and {others} threads of other code"] if others else [])]


def _outside(frame: FrameType) -> FrameType | None:
    """Return the frame that has called for the report, if one has; otherwise the frame that is given."""
    at: FrameType | None = frame
    each: FrameType | None = frame
    while each is not None:
        if each.f_globals.get("__name__") in _OWN_MODULES:
            at = each.f_back
        each = each.f_back
    return at


def _is_of_steepest(frame: FrameType | None) -> bool:
    """Return whether a thread is in code of steepest, or in code that this has called."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "steepest":
            return True
        frame = frame.f_back
    return False


def _indented(title: str, stack: str) -> list[str]:
    """Return the lines of a stack under a title; of a long one the innermost frames."""
    lines = stack.rstrip().splitlines() or ["(no Python code)"]
    left_out = len(lines) - _MOST_LINES
    if left_out > 0:
        lines = [f"[{left_out + 1} lines of outer frames]", *lines[left_out + 1 :]]
    return [f"    {title}", *(f"      {line}" for line in lines)]
