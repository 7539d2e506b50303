"""A parameter server's servers as processes of this machine, which end with the process that has made them.

Other processes read about them on a board in that process' memory: they open it by the number of the process, and it
vanishes with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import secrets
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steepest.core.messages.message import server_peer
from steepest.errors import ConfigurationError, PeerLostError
from steepest.parameter_server.actor import ServerActor
from steepest.parameter_server.servers import THREADS, Search
from steepest.parameter_server.succession import Succession
from steepest.runtime.job_runtime import Group, runtime
from steepest.runtime.machine.parcels import Parcel, opened, packed
from steepest.runtime.machine.runtime import MachineRuntime
from steepest.runtime.places import Place, began
from steepest.runtime.tls.connections import Identity

_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class _Written:
    """The contents of a board.

    Attributes:
        pids: of the servers' processes, and when each began.
        succession: the last one.
        ended: whether the servers are to end.
    """

    pids: tuple[tuple[int, int | None], ...] = ()
    succession: Succession | None = None
    ended: bool = False


@dataclass(frozen=True)
class _Board:
    """Memory in which the process that has made the servers describes them for other processes.

    Attributes:
        machine, pid, began: that process.
        descriptor: of its memory there.
    """

    machine: str
    pid: int
    began: int | None
    descriptor: int

    def change(self, how: Callable[[_Written], _Written]) -> _Written | None:
        """Change the contents of the board; return the former ones, or None if the process is gone."""
        if self.machine != _machine():
            raise ConfigurationError(
                f"this parameter server has processes of {self.machine.partition(' ')[0]}, and this is another "
                "machine: make it where the program is connected to Ray, or with runtime='ray'"
            )
        if began(self.pid) != self.began:
            return None
        try:
            file = open(f"/proc/{self.pid}/fd/{self.descriptor}", "r+b", buffering=0)  # noqa: SIM115
        except OSError:
            return None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            data = file.read()
            before: _Written = opened(Parcel(data, (), b"")) if data else _Written()
            after = how(before)
            if after != before:
                file.seek(0)
                file.truncate()
                file.write(packed(after).pickle)
        return before

    def read(self) -> _Written | None:
        """Return the contents of the board; None if the process is gone."""
        return self.change(lambda written: written)


def _machine() -> str:
    """Return a unique name of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot}"


#: The servers that this process has made, by their boards.
_made: weakref.WeakValueDictionary[_Board, MachineServers] = weakref.WeakValueDictionary()


class MachineServers:
    """`Servers` on this machine, in the process that has made them, or in another.

    Args:
        board: describes them.
        own: the processes, if this process has made them.
    """

    names_successors = True

    def __init__(self, board: _Board, own: _Processes | None = None) -> None:
        self._board, self._own = board, own
        if own is not None:
            weakref.finalize(self, _end, board, own)

    @property
    def node(self) -> str:
        """This machine."""
        self._board.read()
        return MachineRuntime.node

    @property
    def handles(self) -> list[Any]:
        """The processes, if this one has made them."""
        own = self._own_ones
        return [] if own is None else own.handles

    @property
    def _own_ones(self) -> _Processes | None:
        """The processes, unless another process or the parent of this one has made them."""
        return self._own if os.getpid() == self._board.pid else None

    def revive(self) -> None:
        """Start the dead ones again."""
        own = self._own_ones
        assert own is not None
        written = self._board.read()
        if written is not None and not written.ended:
            own.revive()

    def end_one(self, index: int) -> None:
        """Kill one."""
        runtime().end(self.handles[index])

    def announce(self, places: Sequence[Place], succession: Succession | None = None) -> None:
        """Write the succession on the board."""
        pids = tuple((place.pid, place.began) for place in places)
        self._board.change(lambda written: replace(written, pids=pids, succession=succession))

    def search(self, token: bytes, name: str) -> _BoardSearch:
        """Return a search."""
        return _BoardSearch(token, self, name)

    def read(self) -> _Written | None:
        """Return the contents of the board; None if the process that has made the servers is gone."""
        return self._board.read()

    def end(self) -> None:
        """Kill the processes."""
        written = self._board.change(lambda before: replace(before, ended=True))
        if (own := self._own_ones) is not None:
            own.end()
            return
        for pid, start in () if written is None else written.pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                try:
                    if began(pid) == start:
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                finally:
                    os.close(descriptor)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _known, (self._board,)


def _end(board: _Board, own: _Processes) -> None:
    """End the processes after their last handle is gone, in the process that has made them."""
    if os.getpid() == board.pid:
        own.end()
        os.close(board.descriptor)


def _known(board: _Board) -> MachineServers:
    """Return the servers of a board, in the process that unpickles them."""
    made = _made.get(board) if os.getpid() == board.pid else None
    return MachineServers(board) if made is None else made


@dataclass
class _Processes:
    """The processes in the process that has made them."""

    group: Group
    token: bytes
    identity: Identity | None
    handles: list[Any] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)
    _ended: bool = False

    def start(self, index: int) -> Any:
        """Start the process of a server."""
        arguments = (f"steepest {server_peer(index)}", self.token, self.identity)
        return runtime().start(
            ServerActor, arguments, (self.group, index), cpus=0, gpus=0, calls=THREADS
        )

    def revive(self) -> None:
        """Start again the processes that have ended."""
        with self._lock:
            for index, handle in enumerate(self.handles):
                if handle.how.done() and not self._ended:
                    self.handles[index] = self.start(index)

    def end(self) -> None:
        """Kill all, and start none again."""
        with self._lock:
            self._ended = True
            for handle in self.handles:
                handle.kill()


def start_processes(count: int, token: bytes, identity: Identity | None) -> MachineServers:
    """Start the processes of `count` servers."""
    group = runtime().ask([{"CPU": 0.0}] * count, "PACK")
    own = _Processes(group, token, identity)
    own.handles = [own.start(index) for index in range(count)]
    descriptor = os.memfd_create(f"steepest board {secrets.token_hex(4)}", os.MFD_CLOEXEC)
    board = _Board(_machine(), os.getpid(), began(os.getpid()), descriptor)
    servers = _made[board] = MachineServers(board, own)
    return servers


class _BoardSearch(Search):
    """Looks at the board of the process that replaces the servers."""

    def __init__(self, token: bytes, servers: MachineServers, name: str) -> None:
        super().__init__(token, name)
        self._servers = servers

    def look(self, seconds: float) -> Succession | None:
        """Return a succession that this connection has not taken part in."""
        written = self._servers.read()
        if written is None or written.ended:
            raise PeerLostError(f"{self._name}: it was shut down or died")
        succession = written.succession
        if succession is None or succession.number <= self._number:
            time.sleep(min(seconds, _PAUSE_SECONDS))
            return None
        if succession.failure:
            raise PeerLostError(f"{self._name}: {succession.failure}")
        return succession
