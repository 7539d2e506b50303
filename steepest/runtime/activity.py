"""What each process of a job is doing, as text: its roles, what they wait for, its Python stack."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from steepest.core.messages.message import Peer
from steepest.core.status import Status
from steepest.core.system import system
from steepest.core.transport.router import Router
from steepest.errors import describe_stack, listed
from steepest.runtime.calls import drop_calls, last_line
from steepest.runtime.job_runtime import CallError, ProcessDiedError, runtime
from steepest.runtime.places import Place, seconds_up

log = logging.getLogger("steepest.deadlines")
_ANSWER_SECONDS = 2.0  # that a process has to answer
_REPORT_SECONDS = 4.0  # that a report takes, at most
_OWN_MODULES = (__name__, "steepest.runtime.signals")
_MOST_LINES = 40  # of one stack
_MOST_STACKS = 24  # of processes, and of the driver's threads
_MOST_CALLS = 4  # of one process
_MOST_NAMES = 16  # of processes that are listed for one stack
#: Seconds after which a router's thread is called busy; an idle one ticks in half of that.
_BUSY_SECONDS = 1.0


@dataclass(frozen=True)
class Activity:
    """The activity of one process."""

    name: str
    host: str
    pid: int
    roles: Sequence[tuple[str, Status]]  # names, and what each does or waits for
    busy: float  # seconds since the router's thread last took a message or looked at the time
    stack: str  # of the router's thread, outermost frame first
    share: int | None = None  # the number of that which the worker computes; None between two steps
    frames: str = ""  # of users' code in which the router's thread is
    calls: Sequence[str] = ()  # stacks of Ray's threads in a call of this process
    others: Sequence[str] = ()  # the innermost frames of threads of other code
    up: float | None = None  # seconds since the process began


def activity_of(
    name: str, place: Place, router: Router, share: int | None, shares: int = 1
) -> Activity:
    """Return what the calling process is doing; any thread may call this.

    Args:
        name, place, router: of the process.
        share: that its worker computes, if any.
        shares: of a step.
    """
    roles = [(str(peer), status) for peer, status in router.doing()]
    if share is not None:
        roles.append(("its share", Status(f"is of step {share // shares + 1}")))
    # threads of this library's own have names, and this one asks
    own = {each.ident for each in threading.enumerate() if each.name.startswith("steepest")}
    calls, others = _stacks_of_threads(own | {threading.get_ident()})
    stack = router.where(whole=True)
    return Activity(
        name,
        place.host,
        place.pid,
        roles,
        router.busy,
        stack,
        share,
        router.where(),
        list(calls),
        sorted({*others}),
        seconds_up(place),
    )


def _stacks_of_threads(
    without: Set[int | None],
    main: int | None = None,  # comes first, whatever code it is in
) -> tuple[dict[str, list[int]], list[str]]:
    """Return the stacks within code of steepest, each with its threads, and where each other thread is."""
    frames = {each: at for each, at in sys._current_frames().items() if each not in without}
    stacks: dict[str, list[int]] = {}
    others: list[str] = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        at: FrameType | None = frames[ident]
        for each, _ in traceback.walk_stack(
            at
        ):  # a thread that makes a report is where it was asked
            if each.f_globals.get("__name__") in _OWN_MODULES:
                at = each.f_back
        packages = (_package_of(each) for each, _ in traceback.walk_stack(at)) if at else ()
        if at is not None and (ident == main or "steepest" in packages):
            stacks.setdefault(describe_stack(at, whole=True), []).append(ident)
        else:
            code = frames[ident].f_code
            others.append(f"{code.co_name} of {_package_of(frames[ident])}")
    return stacks, others


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


class Watched(Protocol):
    """What a report needs to know of a job; its methods may be called on any thread."""

    @property
    def places(self) -> Mapping[Peer, Place]:
        """Where each process runs, by role."""

    @property
    def actors(self) -> Mapping[Peer, Any]:
        """Ray's handle of each process that has a role, by role."""

    def roles(self) -> Sequence[tuple[Peer, Status]]:
        """Return the roles in this process, and what each does or waits for, see `Router.doing`."""

    def processes(self) -> Sequence[Any]:
        """Return the handles of all processes, with a role or without."""

    def silence(self, actor: Any) -> float:
        """Return for how many seconds a process had given no sign of life when last looked at."""


def log_report(context: Watched, what: str) -> None:
    """Log what each process is doing, as a warning of `steepest.deadlines`: `what` has passed its deadline.

    To be called before the error is raised. It raises nothing, and takes 4 seconds at most.
    """
    if log.isEnabledFor(logging.WARNING):
        log.warning("a deadline has passed: %s\n%s", what, report(context))


def report(context: Watched) -> str:
    """Return what each process of a job is doing, and the driver, as text of bounded length.

    Processes with equal stacks are listed together. For a process that does not answer within 2
    seconds the text has the last sign of life and, on the driver's node, its state in the kernel. Any
    thread may call this. It raises nothing, and takes 4 seconds at most.
    """
    try:
        return _JobReport(context).text()
    except Exception as error:  # noqa: BLE001 - a report is made during failures, and must not add another
        return f"steepest cannot say what its processes are doing: {error!r}"


class _JobReport:
    """One report, which is being made."""

    def __init__(self, context: Watched) -> None:
        self._context = context
        self._began = system().now()
        self._actors = dict(context.actors)
        self._names = {actor: str(peer) for peer, actor in self._actors.items()}
        self._places = {
            actor: context.places[peer]
            for peer, actor in self._actors.items()
            if peer in context.places
        }
        self._own: list[str] = []
        self._answers: list[Activity] = []
        self._mute: list[str] = []

    def text(self) -> str:
        """Ask all processes; return the report."""
        asking = system().start(self._ask, "steepest report")
        asking.join(_REPORT_SECONDS)
        late = f"the report was not complete within {_REPORT_SECONDS:g} s"
        lines = [
            *([late] if asking.is_alive() else []),
            *_limited(self._mute, _MOST_NAMES, "more processes do not answer"),
            *self._grouped(),
            *self._own,
        ]
        return "\n".join(lines)

    # -- the processes -------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask the processes; note their answers, and what is known of processes that do not answer."""
        try:
            self._ask_all()
        except Exception as error:  # noqa: BLE001 - what was found so far is the report
            self._own.append(f"the report is not complete: {error!r}")

    def _ask_all(self) -> None:
        actors = dict.fromkeys([*self._actors.values(), *self._context.processes()])
        if not actors or not runtime().is_up:  # a call would start Ray again
            self._own = self._driver()
            return
        here = runtime().node
        near = {actor: place.pid for actor, place in self._places.items() if place.node == here}
        before = {actor: runtime().processor_use(pid) for actor, pid in near.items()}
        calls = {actor: runtime().call(actor, "doing") for actor in actors}
        self._own = self._driver()
        left = max(self._began + _ANSWER_SECONDS - system().now(), 0.0)
        done = runtime().wait(calls.values(), left)
        for actor, call in calls.items():
            name = self._names.get(actor, "a process without a role")
            if (place := self._places.get(actor)) is not None:
                name = f"{name} on {place.host} (pid {place.pid})"
            if call not in done:
                details = self._about(actor, near.get(actor), before.get(actor))
                self._mute.append(
                    f"{name} does not answer within {_ANSWER_SECONDS:g} s{''.join(details)}"
                )
                continue
            try:
                self._answers.append(call.get(_ANSWER_SECONDS / 2))
            except ProcessDiedError:
                if actor in self._names:  # else one that was let go long ago
                    self._mute.append(f"{name} is dead")
            except CallError as error:
                self._mute.append(f"{name} cannot say what it does: {last_line(error)}")
        drop_calls(call for call in calls.values() if call not in done)

    def _about(
        self, actor: Any, pid: int | None, before: tuple[float, bool] | None
    ) -> Iterator[str]:
        """Yield what is known of a process that does not answer; its pid and usage only if it runs on this node."""
        waited = system().now() - self._began
        with contextlib.suppress(Exception):  # another thread looks for signs of life meanwhile
            silent = max(self._context.silence(actor), waited)
            yield f"; its last sign of life came {silent:.1f} s ago"
        if pid is not None:
            if state := runtime().processor_state(pid):
                yield f"; it {state}"
            after = runtime().processor_use(pid)
            if before is not None and after is not None:
                used = after[0] - before[0]
                yield f"; it used {used:.1f} s of processor time in {waited:.1f} s"

    def _grouped(self) -> list[str]:
        """Return the lines of the processes that have answered, rare stacks first."""
        stacks: dict[str, list[Activity]] = {}
        for activity in list(self._answers):
            stacks.setdefault(activity.stack, []).append(activity)
        groups = sorted(stacks.items(), key=lambda group: len(group[1]))
        lines: list[str] = []
        for stack, processes in groups[:_MOST_STACKS]:
            of_each = ["\n".join(_lines_of(process)) for process in processes]
            lines += _limited(of_each, _MOST_NAMES, "more processes, in the same place")
            lines += _indented("each of these is in:" if len(processes) > 1 else "it is in:", stack)
        rest = len(groups) - _MOST_STACKS
        return [*lines, *([f"processes in {rest} other places are left out"] if rest > 0 else [])]

    # -- the driver ----------------------------------------------------------------------------

    def _driver(self) -> list[str]:
        """Return the lines of this process: its roles, and the stacks of steepest's threads."""
        lines = [f"the driver (pid {os.getpid()}):"]
        for peer, status in self._context.roles():
            lines.append(f"    {'client' if peer.role == 'client' else peer} {status}")
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks, others = _stacks_of_threads(set(), threading.main_thread().ident)
        for stack, idents in list(stacks.items())[:_MOST_STACKS]:
            threads = [names.get(ident, "a thread") for ident in idents]
            plural = "threads" if len(threads) > 1 else "thread"
            lines += _indented(f"{plural} {listed(threads)}:", stack)
        return [*lines, *([f"    and {len(others)} threads of other code"] if others else [])]


def _lines_of(process: Activity) -> list[str]:
    """Return the line of a process, and those of its roles and calls."""
    busy = f", busy for {process.busy:.1f} s" if process.busy > _BUSY_SECONDS else ""
    up = "" if process.up is None else f", which began {process.up:.1f} s ago"
    lines = [f"{process.name} on {process.host} (pid {process.pid}){up}{busy}:"]
    lines += [f"    {role} {status}" for role, status in process.roles]
    for stack in process.calls[:_MOST_CALLS]:
        lines += _indented("a call is in:", stack)
    if process.others:
        lines.append(f"    other threads are in {listed(process.others[:_MOST_NAMES])}")
    return lines


def _limited(lines: Sequence[str], most: int, more: str) -> list[str]:
    """Return lines; of too many, the first ones and the number of the others."""
    rest = len(lines) - most
    return [*lines[:most], *([f"{rest} {more}"] if rest > 0 else [])]


def _indented(title: str, stack: str) -> list[str]:
    """Return the lines of a stack under a title; of a long one the innermost frames."""
    lines = stack.rstrip().splitlines() or ["(no Python code)"]
    left_out = len(lines) - _MOST_LINES
    if left_out > 0:
        lines = [f"[{left_out + 1} lines of outer frames]", *lines[left_out + 1 :]]
    return [f"    {title}", *(f"      {line}" for line in lines)]
