"""Network namespaces joined by a veth pair or a bridge, and processes that run functions in them.

    with joined() as pair, Team("pair", [Member(pair.first, serve), Member(pair.second, work)]) as
    team:
        seconds = team.turn(10)

Bytes between the namespaces take the kernel's whole TCP path, as between two hosts, on a link
without a limit. Needs root and iproute2: ``unavailable()`` says what is missing. ``one_host()`` is
in place of a pair where both ends are this host as it is, which needs neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from benchmarks import delay_line

DEADLINE = 300.0  # seconds that one wait may take
IDLE_DEADLINE = 3600.0  # seconds after which a member without orders ends by itself
JOIN_DEADLINE = 5.0
COMMAND_DEADLINE = 20.0
DIRECTORY = Path("/var/run/netns")
CLONE_NEWNET = 0x40000000


class UnavailableError(RuntimeError):
    """This machine lets nobody, or not this user, make network namespaces."""


@dataclass(frozen=True)
class Namespace:
    """One end of the link: the name of the namespace, and its device and address there."""

    name: str
    device: str
    address: str


HOST = Namespace("", "lo", "127.0.0.1")  # where this process is already


@dataclass(frozen=True)
class Pair:
    first: Namespace
    second: Namespace


def unavailable() -> str | None:
    """Why namespaces cannot be made here, or None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2 (the ip command)"
    return None


@contextlib.contextmanager
def joined() -> Iterator[Pair]:
    """Two namespaces with a veth device each; at the end both go, with whatever still runs in them.

    Raises:
        UnavailableError: no root, no iproute2, or a kernel that refuses.
    """
    if (reason := unavailable()) is not None:
        raise UnavailableError(reason)
    mark = secrets.token_hex(3)
    first, second = (
        Namespace(f"spb{mark}{end}", f"spb{end}", f"10.213.8.{i}")
        for i, end in ((1, "a"), (2, "b"))
    )
    previous = signal.signal(
        signal.SIGTERM, _leave
    )  # which would end the process and leave the namespaces
    try:
        _build(first, second)
        yield Pair(first, second)
    finally:
        for space in (first, second):
            _delete(space)
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def one_host() -> Iterator[Pair]:
    """This host as both ends: processes share memory, sockets go over loopback."""
    yield Pair(HOST, HOST)


@contextlib.contextmanager
def star(count: int, mbit: int | None = None, round_trip: float = 0.0) -> Iterator[list[Namespace]]:
    """That many namespaces on one bridge, each with a link of so many Mbit/s each way (None: no limit).

    A message from one to another, and the answer, take at least `round_trip` milliseconds. Netem
    makes that delay or, where the kernel has none, a process (`benchmarks.delay_line`); then the
    devices are of TUN, with an MTU of 9000, and there is no bridge.

    TCP's congestion control is cubic, Linux' default, whatever this machine's is.

    Raises:
        UnavailableError: no root, no iproute2, or a kernel that refuses.
    """
    if (reason := unavailable()) is not None:
        raise UnavailableError(reason)
    mark = secrets.token_hex(3)
    hub = Namespace(f"sps{mark}hub", "bridge", "")
    spaces = [Namespace(f"sps{mark}{i}", f"sp{i}", f"10.213.9.{i + 1}") for i in range(count)]
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        with contextlib.ExitStack() as stack:
            _build_star(stack, hub, spaces, mbit, round_trip)
            yield spaces
    finally:
        for space in (*spaces, hub):
            _delete(space)
        signal.signal(signal.SIGTERM, previous)


def _build_star(
    stack: contextlib.ExitStack,
    hub: Namespace,
    spaces: list[Namespace],
    mbit: int | None,
    round_trip: float,
) -> None:
    try:
        for space in (hub, *spaces):
            _ip("netns", "add", space.name)
            _ip("-n", space.name, "link", "set", "lo", "up")
        limit = _limit(hub, mbit, round_trip)
        if limit is None:
            stack.enter_context(_delay_line(spaces, mbit, round_trip))
        else:
            _bridge(hub, spaces, limit)
        for space in spaces:
            network = f"{space.address.rpartition('.')[0]}.0/24"
            route = (network, "dev", space.device, "src", space.address)
            _ip("-n", space.name, "route", "replace", *route, "congctl", "cubic")
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}") from None


def _limit(space: Namespace, mbit: int | None, round_trip: float) -> list[str] | None:
    """What tc is told about a device (of which a message passes two there and two back); None: it cannot delay."""
    if not round_trip:
        return ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"] if mbit else []
    rate = ["rate", f"{mbit}mbit"] if mbit else []
    limit = ["netem", *rate, "delay", f"{round_trip / 4:g}ms", "limit", "10000"]
    try:
        _qdisc(space, "lo", limit)
    except subprocess.CalledProcessError:
        return None
    return limit


def _qdisc(space: Namespace, device: str, limit: list[str]) -> None:
    command = ["tc", "-n", space.name, "qdisc", "add", "dev", device, "root", *limit]
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_DEADLINE)


@contextlib.contextmanager
def _delay_line(spaces: list[Namespace], mbit: int | None, round_trip: float) -> Iterator[None]:
    """A process that delays what goes from one namespace to another."""
    tuns: list[int] = []
    try:
        with ThreadPoolExecutor(1) as inside:  # a thread that goes from namespace to namespace
            for space in spaces:
                inside.submit(enter, space.name).result()
                tuns.append(inside.submit(delay_line.open_tun, space.device).result())
    except OSError as error:
        for tun in tuns:
            os.close(tun)
        raise UnavailableError(f"no netem, and no TUN device instead: {error}") from None
    devices = [f"{tun}:{space.address}" for tun, space in zip(tuns, spaces, strict=True)]
    command = [sys.executable, "-I", delay_line.__file__, str(mbit or 0), str(round_trip / 2)]
    with subprocess.Popen([*command, *devices], stdin=subprocess.PIPE, pass_fds=tuns) as line:
        for tun in tuns:
            os.close(tun)
        try:
            for space in spaces:
                device, mtu = space.device, str(delay_line.MTU)
                _ip("-n", space.name, "addr", "add", f"{space.address}/24", "dev", device)
                _ip("-n", space.name, "link", "set", device, "mtu", mtu, "txqueuelen", "10000")
                _ip("-n", space.name, "link", "set", device, "up")
            yield
        finally:
            line.kill()


def _bridge(hub: Namespace, spaces: list[Namespace], limit: list[str]) -> None:
    """Join the namespaces by a bridge in the hub; `limit` is what tc is told about each device."""
    _ip("-n", hub.name, "link", "add", hub.device, "type", "bridge")
    _ip("-n", hub.name, "link", "set", hub.device, "up")
    for number, space in enumerate(spaces):
        port = f"port{number}"
        peer = ("peer", "name", port, "netns", hub.name)
        _ip("link", "add", space.device, "netns", space.name, "type", "veth", *peer)
        _ip("-n", space.name, "addr", "add", f"{space.address}/24", "dev", space.device)
        _ip("-n", hub.name, "link", "set", port, "master", hub.device)
        for where, device in ((hub, port), (space, space.device)):
            _ip("-n", where.name, "link", "set", device, "up")
            if limit:
                _qdisc(where, device, limit)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _build(first: Namespace, second: Namespace) -> None:
    try:
        for space in (first, second):
            _ip("netns", "add", space.name)
            _ip("-n", space.name, "link", "set", "lo", "up")
        peer = ("peer", "name", second.device, "netns", second.name)
        _ip("link", "add", first.device, "netns", first.name, "type", "veth", *peer)
        for space in (first, second):
            _ip("-n", space.name, "addr", "add", f"{space.address}/24", "dev", space.device)
            _ip("-n", space.name, "link", "set", space.device, "up")
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}") from None


def _delete(space: Namespace) -> None:
    if not (DIRECTORY / space.name).exists():
        return
    inside = _ip("netns", "pids", space.name, check=False).stdout.split()
    for pid in inside:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", space.name, check=False)


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["ip", *arguments], check=check, capture_output=True, timeout=COMMAND_DEADLINE
    )


def enter(name: str) -> None:
    """Move this thread, and the threads it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    with (DIRECTORY / name).open() as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


# --- processes in namespaces, which take orders from pipes ---


class Orders:
    """A member's end: iterating waits for the numbers of rounds to do; each is answered in seconds."""

    def __init__(self, pipe: Connection, barrier: Barrier) -> None:
        self._pipe, self._barrier = pipe, barrier

    def ready(self) -> None:
        """Say that the member is set up; call it once, before waiting for orders."""
        self._pipe.send(0.0)

    def __iter__(self) -> Iterator[int]:
        while self._pipe.poll(IDLE_DEADLINE) and (rounds := self._pipe.recv()) is not None:
            self._barrier.wait(DEADLINE)  # all members begin together
            yield rounds

    def done(self, seconds: float) -> None:
        """Answer the last order."""
        self._pipe.send(seconds)

    def serve(self, step: Callable[[], object]) -> None:
        """The usual life: say ready, then for every order take that many steps and answer their time."""
        self.ready()
        for rounds in self:
            begin = time.perf_counter()
            for _ in range(rounds):
                step()
            self.done(time.perf_counter() - begin)


@dataclass(frozen=True)
class Member:
    """A function of a module that runs as ``body(orders, **settings)`` in a process inside a namespace."""

    namespace: Namespace
    body: Callable[..., None]
    settings: dict[str, Any] = field(default_factory=dict)


def _run(member: Member, barrier: Barrier, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    torch.set_num_threads(1)
    try:
        if member.namespace != HOST:
            enter(member.namespace.name)
        member.body(Orders(pipe, barrier), **member.settings)
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except Exception:  # noqa: BLE001 - whatever it is, the parent reports it
        pipe.send(traceback.format_exc())


class Team:
    """Processes in namespaces, blocked while idle, which begin each turn together at a barrier."""

    def __init__(self, name: str, members: list[Member]) -> None:
        self._name, self._members = name, members
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Team:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(len(self._members))
        for member in self._members:
            mine, theirs = context.Pipe()
            process = context.Process(target=_run, args=(member, barrier, theirs), daemon=True)
            self._pipes.append(mine)
            process.start()
            self._processes.append(process)
            theirs.close()
        self._answers()

    def turn(self, rounds: int) -> list[float]:
        """All members do ``rounds`` rounds; the seconds of each member."""
        with contextlib.suppress(ConnectionError):  # a member that died is reported below
            for pipe in self._pipes:
                pipe.send(rounds)
        return self._answers()

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        """End all processes; harmless when they never started."""
        for pipe in self._pipes:
            with contextlib.suppress(ConnectionError):  # this member has ended already
                pipe.send(None)
        end = time.monotonic() + JOIN_DEADLINE
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(JOIN_DEADLINE)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _answers(self) -> list[float]:
        """Wait for all members; the first that fails ends the wait, since the others may wait for it."""
        answers: dict[int, float] = {}
        end = time.monotonic() + DEADLINE
        while missing := [i for i in range(len(self._pipes)) if i not in answers]:
            waiting = [self._pipes[i] for i in missing]
            ready = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(
                    f"{self._name}: members {missing} gave no answer in {DEADLINE:g} s"
                )
            for i in missing:
                if self._pipes[i] in ready:
                    answers[i] = self._answer(i)
        return [answers[i] for i in range(len(self._pipes))]

    def _answer(self, member: int) -> float:
        try:
            answer = self._pipes[member].recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"{self._name}: member {member} died") from None
        if isinstance(answer, str):
            raise RuntimeError(f"{self._name}: member {member} failed\n{answer}")
        return float(answer)
