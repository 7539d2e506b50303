"""Process groups of torch.distributed, each on a thread of its own and without a port to meet at; those of Gloo."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from steepest.core.system import System, system
from steepest.core.transport.router import Router
from steepest.errors import ConfigurationError, DataPlaneError, DeadlineError
from steepest.strategies.process_groups.group import (
    Await,
    Broadcast,
    Gather,
    GroupPlace,
    ProcessGroup,
    Program,
    Reduce,
    Ways,
)

log = logging.getLogger(__name__)

#: Seconds for which a failure is not told: a member's death fails the group before the coordinator hears of it.
_GRACE = 5.0


class _EndedError(Exception):
    """The group was left while a program ran."""


class KeyStore(dist.Store):  # type: ignore[misc, name-defined]  # torch says nothing of its types
    """The rendezvous of one group: keys that members set travel in the job's own messages.

    Each member has all keys: its own, and those that others have sent. torch calls it on the thread that makes the
    group.

    Args:
        post: sends a key and its value to all other members; called on that thread.
        seconds: for which a key is awaited.
    """

    def __init__(self, post: Callable[[str, bytes], None], seconds: float) -> None:
        super().__init__()
        self._post, self._seconds = post, seconds
        self._values: dict[str, bytes] = {}
        self._changed = system().event()
        self._ended = False

    def take(self, key: str, value: bytes) -> None:
        """Take a value that another member has set."""
        self._values.setdefault(key, value)
        self._changed.set()

    def end(self) -> None:
        """Let no wait go on."""
        self._ended = True
        self._changed.set()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key here, and at the other members."""
        own = value.encode() if isinstance(value, str) else bytes(value)
        self.take(key, own)
        self._post(key, own)

    def get(self, key: str) -> bytes:
        """Return a key's value when it is here; DeadlineError: it does not come."""
        self.wait([key])
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of some keys."""
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Return whether all of some keys are here."""
        return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        """Return False: keys are set once, and read."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when some keys are here; DeadlineError: one does not come in time."""
        seconds = self._seconds if timeout is None else min(timeout.total_seconds(), self._seconds)
        limit = system().now() + seconds
        while not self.check(keys):
            if self._ended:
                raise _EndedError
            if (left := limit - system().now()) <= 0:
                lacking = [key for key in keys if key not in self._values]
                raise DeadlineError(
                    f"the other workers' addresses did not come within {seconds:g} s: {lacking}"
                )
            self._changed.clear()
            if not self.check(keys) and not self._ended:
                self._changed.wait(left)


class Backend(Protocol):
    """The differences between backends of torch.distributed; used on the thread of one group.

    Attributes:
        name: for errors.
    """

    name: str

    def inside(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the thread makes the group and runs programs."""

    def make(self, store: KeyStore, place: GroupPlace) -> Any:
        """Return the group, once all members are connected; raises what torch raises."""

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor where the group can take it, perhaps a copy."""

    def finish(self, work: Any, look: Callable[[], None]) -> None:
        """Return when an operation is over, or raise why it failed.

        Args:
            work: of torch's.
            look: to be called now and then; it raises if the group is left, or the time is over.
        """

    def leave(self, group: Any) -> None:
        """Drop a group, in which an operation may be in progress."""


class GlooBackend:
    """Gloo over TCP, see `Backend`.

    It cannot be interrupted: a thread that waits for a member which lives and does nothing stays, with memory of its
    own, until the time of `GroupPlace.seconds` is over; its result is dropped.

    Args:
        host: the address at which a member listens.
    """

    name = "Gloo"

    def __init__(self, host: str) -> None:
        self._host = host

    def inside(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def make(self, store: KeyStore, place: GroupPlace) -> Any:
        """See `Backend`."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = timedelta(seconds=place.seconds)
        options._threads = 1
        return dist.ProcessGroupGloo(store, place.rank, place.size, options)

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor

    def finish(self, work: Any, look: Callable[[], None]) -> None:
        """See `Backend`; it does not look."""
        work.wait()

    def leave(self, group: Any) -> None:
        """Do nothing: connections close when nothing refers to the group."""


class TorchGroup(ProcessGroup):
    """A member's end of a group, see `ProcessGroup`; its thread makes the group and runs the programs."""

    def __init__(self, place: GroupPlace, ways: Ways, backend: Backend) -> None:
        self._place, self._ways, self._backend = place, ways, backend
        self._programs: deque[Program] = deque()
        self._signals: SimpleQueue[None] = system().queue()  # an item says: look again
        self._ended = system().event()
        self._doing = "the members meet"
        self._threads = torch.get_num_threads()
        self._store = KeyStore(self._post, place.seconds)
        system().start(self._work, f"steepest group {place.generation}")

    # -- on the router's thread ------------------------------------------------------------------

    def run(self, program: Program) -> None:
        """See `ProcessGroup`."""
        self._programs.append(program)
        self.wake()

    def wake(self) -> None:
        """See `ProcessGroup`."""
        self._signals.put(None)

    def take_key(self, key: str, value: bytes) -> None:
        """See `ProcessGroup`."""
        self._store.take(key, value)

    def end(self) -> None:
        """See `ProcessGroup`."""
        self._ended.set()
        self._store.end()
        self.wake()

    # -- on its own thread -----------------------------------------------------------------------

    def _post(self, key: str, value: bytes) -> None:
        self._ways.router.call(partial(self._ways.send_key, key, value))

    def _work(self) -> None:
        """Make the group and run programs; the group's connections close when they have ended."""
        try:
            with self._backend.inside():
                self._run_programs()
        except _EndedError:
            return
        except Exception as error:  # noqa: BLE001 - whatever torch raises; it is told
            reason = self._told(error)
        # the error is gone here, and with its frames the group: who waits for this member fails, too
        if self._ended.wait(_GRACE):
            log.debug("group of generation %d: %s", self._place.generation, reason)
        else:
            self._ways.router.call(partial(self._ways.failed, reason))

    def _told(self, error: Exception) -> Exception:
        """Return an error that also says what the group was doing."""
        text = str(error).strip().partition(". This is typically")[0]
        what = f"{self._backend.name}, while {self._doing}"
        return DataPlaneError(f"{what}: {text or type(error).__name__}")

    def _run_programs(self) -> None:
        torch.set_num_threads(self._threads)
        group = self._make()
        try:
            while True:
                self._until(lambda: bool(self._programs))
                self._drive(group, self._programs.popleft())
        finally:
            self._backend.leave(group)

    def _make(self) -> Any:
        """Return the group, once all members have told their addresses and are connected."""
        try:
            return self._backend.make(self._store, self._place)
        except Exception:
            self._raise_if_ended()  # of the store, in whatever form torch passes it on
            raise

    def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; _EndedError if the group is left."""
        self._raise_if_ended()
        while not condition():
            self._signals.get()
            self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        if self._ended.is_set():
            raise _EndedError

    def _drive(self, group: Any, program: Program) -> None:
        """Run one program to its end."""
        answer: list[torch.Tensor] | None = None
        while True:
            try:
                operation = program.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(operation, Await):
                self._until(operation.condition)
            else:
                answer = self._exchange(group, operation)
            self._raise_if_ended()

    def _exchange(
        self, group: Any, operation: Reduce | Broadcast | Gather
    ) -> list[torch.Tensor] | None:
        """Take part in an operation, and return its answer."""
        if isinstance(operation, Gather):
            self._doing = "each worker's part is gathered"
            own = self._backend.near(operation.own)
            answer = [torch.empty_like(own) for _ in range(self._place.size)]
            self._finish(group.allgather([answer], [own]))
            return [part.to(operation.own.device) for part in answer]
        self._doing = f"{operation.what} is added up"
        if isinstance(operation, Broadcast):
            self._doing = f"{operation.what} of worker {operation.root} is passed on"
        tensor = operation.total if isinstance(operation, Reduce) else operation.value
        value = self._backend.near(tensor)
        self._finish(self._begin(group, operation, value))
        if value is not tensor:
            tensor.copy_(value)
        return None

    def _begin(self, group: Any, operation: Reduce | Broadcast, value: torch.Tensor) -> Any:
        """Begin to add up or to share a tensor; return torch's work."""
        if isinstance(operation, Broadcast):
            sharing = dist.BroadcastOptions()
            sharing.rootRank = operation.root
            return group.broadcast([value], sharing)
        if operation.root is None:
            return group.allreduce([value])
        reducing = dist.ReduceOptions()
        reducing.rootRank = operation.root
        return group.reduce([value], reducing)

    def _finish(self, work: Any) -> None:
        """Return when an operation is over; _EndedError if the group is left, and the backend can be interrupted."""
        seconds = self._place.seconds
        limit = system().now() + seconds

        def look() -> None:
            self._raise_if_ended()
            if system().now() > limit:
                raise DeadlineError(f"timed out after {seconds:g} s")

        self._backend.finish(work, look)


class TorchGroups:
    """Makes Gloo groups, see `Groups`: over TCP, bound to the address at which the process listens for the job."""

    def check(self, router: Router, home: torch.device) -> None:
        """Check that this process has what a group needs.

        Raises:
            ConfigurationError: torch has no Gloo; the process is simulated; its connections are
                encrypted, which Gloo's are not.
        """
        if not (dist.is_available() and dist.is_gloo_available()):
            raise ConfigurationError(
                'data_plane="gloo": this torch has no Gloo; leave data_plane= out'
            )
        check_process("gloo", router)

    def join(self, place: GroupPlace, ways: Ways) -> ProcessGroup:
        """See `Groups`."""
        assert ways.router.transport is not None
        host = ways.router.transport.listens_at
        assert host is not None
        return TorchGroup(place, ways, GlooBackend(host))


def check_process(plane: str, router: Router) -> None:
    """Check that a process can have threads of torch's, and does not encrypt; ConfigurationError names the plane."""
    transport = router.transport
    simulated = transport is not None and transport.listens_at is None
    if simulated or not isinstance(system(), System):
        raise ConfigurationError(
            f'data_plane="{plane}" in a simulation: it waits in threads of the operating system; use '
            "steepest.testing.groups.SimulatedGroups, or leave data_plane= out"
        )
    if transport is not None and transport.encrypts:
        raise ConfigurationError(
            f'data_plane="{plane}" with tls: its connections are not encrypted; leave data_plane= out, and gradients '
            "travel on the job's own connections, which are, or leave tls out"
        )
