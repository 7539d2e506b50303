"""The part of `JobRuntime` that concerns the calling process, for runtimes of real processes."""

from __future__ import annotations

import contextlib
import os
import signal

from steepest.core.messages.message import Peer
from steepest.core.transport.channel import ChannelSink
from steepest.core.transport.encryption import Encryption
from steepest.core.transport.sockets import WireTransport
from steepest.runtime import places


class OwnProcess:
    """The calling process, which is one of the operating system's."""

    owns_process = True

    @property
    def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    def exit(self, status: int) -> None:
        """End this process."""
        os._exit(status)

    def kill(self, pid: int) -> None:
        """Kill a process of this node."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)

    def processor_use(self, pid: int) -> tuple[float, bool] | None:
        """Return the use of processors by a process of this node."""
        return places.processor_use(pid)

    def processor_state(self, pid: int) -> str:
        """Return the kernel's state of a process of this node, in words."""
        return places.processor_state(pid)

    def transport(
        self,
        token: bytes,
        peers: tuple[Peer, ...],
        node: str,
        sink: ChannelSink,
        ways: str = "wire",
        encryption: Encryption | None = None,
    ) -> WireTransport:
        """Return channels through sockets and shared memory."""
        return WireTransport(token, peers, node, sink, ways, encryption=encryption)
