"""ParameterServer: shared arrays that processes pull, and push updates to."""

from __future__ import annotations

import functools
import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from steepest.core.config.run import RUNTIMES, TLSConfig, check_tls
from steepest.core.tensors.memory import Bytes
from steepest.core.tensors.shared_memory import segment_of
from steepest.core.transport.channel import TRANSPORTS, Address
from steepest.core.transport.sockets import check_ways
from steepest.errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ShutdownError,
    described_error,
    raised_by_user,
)
from steepest.parameter_server import open_connections
from steepest.parameter_server.access import Access
from steepest.parameter_server.arrays import Arrays, ArrayTree
from steepest.parameter_server.connection import Connection
from steepest.parameter_server.group import ServerGroup
from steepest.parameter_server.keeper import ServerKeeper
from steepest.parameter_server.servers import Servers, call_all
from steepest.parameter_server.watched import WatchedServers
from steepest.runtime.activity import log_report
from steepest.runtime.calls import RemoteError
from steepest.runtime.holders import Holder, hold, let_go
from steepest.runtime.job_runtime import (
    Call,
    CallRaisedError,
    LateError,
    ProcessDiedError,
    runtime,
)
from steepest.runtime.signals import report_on_sigusr1
from steepest.runtime.tls.connections import identity_of
from steepest.validation import require_choice, require_count, require_seconds

if TYPE_CHECKING:
    from steepest.core.engine.shared_state import SharedState
    from steepest.core.optim.portable import Record
    from steepest.core.optim.spec import OptimizerSpec
    from steepest.parameter_server.hosting import OptimizerFactory
    from steepest.runtime.tls.connections import Identity

T = TypeVar("T")
_START_SECONDS = 60.0  # for the servers to start, where `timeout` is shorter

# The handles of this process, by id.
_handles: WeakValueDictionary[int, ParameterServer] = WeakValueDictionary()


class ParameterServer:
    """Arrays on server processes, which any number of processes, or of Ray's tasks and actors, pull and update.

    Each push is one update: it is applied on all servers or on none, at most once, in one order for
    all processes. A pull returns all arrays at one version, never a half-applied update. The object
    is a handle: pass it to tasks, actors and processes as an argument; a forked child, such as a worker of a
    DataLoader, uses it with a connection of its own. The servers end with `shutdown`. On Ray they also end when no
    process but forked children has a handle any more; else with the process that made them, or its last handle.

    Args:
        initial: a NumPy array or torch tensor (CPU, floating-point or integer) of any size and
            shape, or a dict of them by name. Arrays are cut into chunks, which are distributed over
            the servers.
        num_servers: server processes, which work in parallel.
        optimizer: builds a torch optimizer over a list of parameters; pushes are then gradients,
            each one optimizer step. None for pushes that are added to the arrays.
        replication: how many servers hold each array's chunks, at most `num_servers`. With 2 any
            server may die: no update whose push has returned is lost, and pushes in flight are
            applied once. The process that made the parameter server replaces the dead one, as long
            as it has the handle; calls of all processes wait for that.
        nonfinite: what happens to a push with NaN or infinity: "refuse" (the push raises), "skip"
            (it is left out, and makes a version that changes nothing) or "pass" (it is applied).
        transport: "wire", "shared", "unix" or "tcp": how processes communicate, as for
            `ParameterServerStrategy`. With "shared" the servers, and all processes that use them,
            must be on this node.
        tls: whether connections between hosts are encrypted, as of `RunConfig`: False, True or a
            `TLSConfig`.
        timeout: seconds that any call may take; the start of the servers may take a minute in any
            case.
        max_in_flight: asynchronous pushes of one process that can be uncommitted; one more waits
            for the first.
        runtime: what runs the servers, "auto", "ray" or "processes" of this machine, see `RunConfig`. Those of this
            machine are used by its processes alone.

    Raises:
        ConfigurationError: an argument is wrong.
        DeadlineError, PeerLostError: the servers did not come up.

    Example:
        >>> server = ParameterServer(np.zeros(1000), num_servers=2)          # doctest: +SKIP
        >>> @ray.remote                                                     # doctest: +SKIP
        ... def work(server):
        ...     for _ in range(10):
        ...         weights = server.pull()
        ...         server.push(np.ones(1000))
        >>> ray.get([work.remote(server) for _ in range(4)])                # doctest: +SKIP
        >>> server.pull()[0]                                                # doctest: +SKIP
        40.0

    Reference: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014.
    """

    def __init__(  # noqa: PLR0913 - keywords of a user, most of them optional
        self,
        initial: ArrayTree,
        num_servers: int = 2,
        *,
        optimizer: OptimizerFactory | None = None,
        replication: int = 1,
        nonfinite: str = "refuse",
        transport: str = "wire",
        tls: bool | TLSConfig = False,
        timeout: float = 60.0,
        max_in_flight: int = 8,
        runtime: str = "auto",
    ) -> None:
        require_choice("runtime", runtime, RUNTIMES)
        require_choice("nonfinite", nonfinite, ("refuse", "skip", "pass"))
        require_choice("transport", transport, TRANSPORTS)
        check_ways(transport)
        check_tls(tls)
        count = require_count("num_servers", num_servers)
        spec = None if optimizer is None else _read_optimizer(optimizer, initial)
        arrays = Arrays.plan(initial, spec, None)
        copies = _require_replication(replication, count)
        group = ServerGroup(arrays, count, nonfinite, copies)
        limits = (
            require_seconds("timeout", timeout),
            require_count("max_in_flight", max_in_flight),
        )
        patience = max(timeout, _START_SECONDS)
        identity = identity_of(tls)
        self._holder: Holder | None = Holder("a parameter server")
        self._shut_down, self._pid = False, os.getpid()
        token = secrets.token_bytes(32)
        servers: Servers | None = None
        try:
            hold(self._holder, runtime)
            servers = _start(count, copies, transport, token, identity)
            opened = _opened(servers, group, spec, arrays.bytes_of(initial, "initial"), transport)
            addresses = _get(opened, patience, "the servers to start")
            servers.announce(_get(call_all(servers, "place"), patience, "the servers to start"))
            self._access = Access(
                group, servers, tuple(addresses), token, *limits, transport, identity
            )
            _handles[id(self)] = self
            self._watched: WatchedServers | None = self._watch()
            report_on_sigusr1(self._watched)
            _get(
                _connecting(servers, self._access.addresses[:1], patience),
                patience,
                "the servers to connect",
            )
            if copies > 1:
                ServerKeeper(functools.partial(_access_of, weakref.ref(self)), spec)
        except BaseException:
            if servers is not None:
                servers.end()
            let_go(self._holder)
            raise

    # -- pull and push -------------------------------------------------------------------------

    def pull(
        self,
        names: str | Sequence[str] | None = None,
        *,
        range: tuple[int, int] | None = None,
        out: ArrayTree | None = None,
    ) -> ArrayTree:
        """Return the arrays, all at one version, in the form of `initial`: one array, or a dict.

        Args:
            names: one name for that array alone, several for a dict of those; None for all.
            range: (begin, end) for those elements of one array, flattened.
            out: arrays of the same shapes and dtypes to write to and return, which saves the time
                to allocate new ones.

        Raises:
            ConfigurationError: a name is unknown, or `range` or `out` does not fit.
            ModelRaisedError: the optimizer raised, and `load_state_dict` was not called since; its
                traceback is the cause.
            DeadlineError: no answer came within `timeout` seconds.
            PeerLostError: a server was shut down by another process, or died without a copy.
            ShutdownError: this handle is shut down.
        """
        chosen = [names] if isinstance(names, str) else names
        if chosen is not None and self._arrays.single:
            raise ConfigurationError("names= is for a dict of arrays: this server holds one array")
        wanted, pulled = self._arrays.request(chosen, range, out, self._connection().recycler)
        self._run(lambda connection: connection.pusher.pull(wanted), "a pull")
        return pulled[names] if isinstance(names, str) and range is None and out is None else pulled

    def push(self, update: ArrayTree) -> int:
        """Push an update and wait for its commit: every later pull, by any process, shows it.

        Args:
            update: arrays of the shapes and dtypes of `initial`; of a dict, some may be left out.

        Returns:
            The version that the update made.

        Raises:
            ConfigurationError: a name is unknown, or an array has another shape or dtype; nothing
                was sent.
            NonFiniteError: the update holds NaN or infinity (see `nonfinite`); nothing of it was
                applied.
            ModelRaisedError: the optimizer raised in an earlier update, and `load_state_dict` was
                not called since; nothing of this one was applied.
            DeadlineError: no answer came within `timeout` seconds; the update may still be
                committed.
            PeerLostError: a server was shut down by another process, or died without a copy.
            ShutdownError: this handle is shut down.
        """
        memory = self._owned(update)
        return self._run(
            lambda connection: connection.pusher.push(memory), "a push to be committed", memory
        )

    def push_async(self, update: ArrayTree) -> Future[int]:
        """Push an update without waiting for its commit.

        The arrays may be changed as soon as this returns. With `max_in_flight` pushes uncommitted,
        this waits for the first. When the last handle of a process is deleted, or the process ends,
        its uncommitted pushes are waited for.

        Args:
            update: as for `push`.

        Returns:
            A future of the version that the update made; it raises what the servers find, such as
            NonFiniteError.

        Raises:
            ConfigurationError, DeadlineError, PeerLostError, ShutdownError: as `push`.
        """
        memory = self._owned(update)
        if self._access.group.replication > 1:  # it may have to be sent again
            memory = {name: part.copy() for name, part in memory.items()}
        connection = self._connection()
        return connection.push_async(lambda: connection.pusher.push(memory), list(memory.values()))

    def push_pull(self, update: ArrayTree, *, out: ArrayTree | None = None) -> ArrayTree:
        """Push an update and return all arrays at the version that it makes, in one round trip.

        After a server's death, they may be of a later version.

        Args:
            update: as for `push`.
            out: as for `pull`.

        Raises:
            ModelRaisedError: the optimizer raised, in this update or an earlier one; its traceback
                is the cause.
            ConfigurationError, NonFiniteError, DeadlineError, PeerLostError, ShutdownError: as
                `push`.
        """
        memory = self._arrays.bytes_of(update, "update")
        wanted, pulled = self._arrays.request(None, None, out, self._connection().recycler)
        self._run(
            lambda connection: connection.pusher.push(memory, wanted),
            "a push to be committed",
            memory,
        )
        return pulled

    def empty(self) -> ArrayTree:
        """Return new, uninitialized arrays in the form of `initial`, for `push_pull`.

        Servers of this host read them without a copy. Fill them and give them to `push_pull`, which
        copies other arrays first. After a `DeadlineError` leave their values alone and use new
        ones: the push may still be committed.

        Example:
            >>> update = server.empty()                                      # doctest: +SKIP
            >>> update[:] = 1.0                                              # doctest: +SKIP
            >>> weights = server.push_pull(update)                           # doctest: +SKIP
        """
        return self._arrays.request(None, None, None, self._connection().updates)[1]

    def flush(self) -> None:
        """Wait until every asynchronous push of this process is committed or refused."""
        self._connection().flush()

    @property
    def version(self) -> int:
        """Number of updates committed so far."""
        return self._run(lambda connection: connection.pusher.pull({}), "the version")

    @property
    def num_servers(self) -> int:
        """Number of server processes."""
        return self._access.group.num_servers

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything at one version.

        The dict has "version", "arrays" by name, the "update" rule, and the "optimizer" state,
        empty if there is none. It consists of plain tensors in dicts and lists, as `torch.save`,
        and `torch.load` with ``weights_only=True``, take them.

        Raises:
            ModelRaisedError, DeadlineError, PeerLostError, ShutdownError: as `pull`.
        """
        snapshot: SharedState = self._run_again(
            lambda connection: connection.client.read("state"), "the state"
        )
        records = [[chunk, description, value] for chunk, description, value in snapshot.records]
        arrays = snapshot.named(self._arrays.layout)
        return {
            "version": snapshot.version,
            "update": self._arrays.rule,
            "arrays": arrays,
            "optimizer": records,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace arrays and optimizer state on all servers, which makes a new version.

        Args:
            state: what `state_dict` returned, of a parameter server of the same arrays and
                optimizer.

        Raises:
            ConfigurationError: the state is of other arrays, or of another optimizer; nothing has
                changed.
        """
        layout = self._arrays.layout
        if {"arrays", "optimizer"} - set(state):
            raise ConfigurationError(
                "state has no 'arrays' or no 'optimizer': give what state_dict() returned"
            )
        names = {entry.name for entry in layout.entries}
        if set(state["arrays"]) != names:
            raise ConfigurationError(
                f"state holds {sorted(state['arrays'])}, this server {sorted(names)}"
            )
        rule = self._arrays.rule
        if state.get("update", rule) != rule:
            raise ConfigurationError(
                f"state is of updates by {state['update']!r}, this server's are by {rule!r}"
            )
        self._arrays.bytes_of(
            state["arrays"][""] if self._arrays.single else state["arrays"], "state"
        )
        weights = layout.allocate()
        layout.write(weights, state["arrays"])
        records: list[Record] = [
            (int(chunk), dict(description), value)
            for chunk, description, value in state["optimizer"]
        ]
        slices = {
            (c.index, layout.entries[s.entry].name, s.start, s.stop)
            for c in layout.chunks
            for s in c.slices
        }
        theirs = {
            (chunk, description["name"], description["start"], description["stop"])
            for chunk, description, _ in records
        }
        if not theirs <= slices or (records and rule == "add"):
            raise ConfigurationError(
                "state is of an optimizer or of a cut into chunks that this server does not have"
            )
        self._run_again(
            lambda connection: connection.client.install(0, weights, records),
            "the state to be installed",
        )

    # -- life ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the servers, for all processes, and close this process' connection.

        A second call does nothing.

        Raises:
            SteepestError: this process was forked from one that was connected to Ray, and cannot
                end the servers; its connection is closed.
        """
        if self._shut_down:
            return
        self._close()
        self._access.servers.end()
        if self._holder is not None:
            let_go(self._holder)

    def _close(self) -> None:
        """Close this process' connection; no call uses this handle again."""
        self._shut_down, self._watched = True, None
        open_connections.close(self._access.token)

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:  # a child that leaves the block ends nothing of its parent's
            self._close()
        else:
            self.shutdown()

    def __repr__(self) -> str:
        entries = self._arrays.layout.entries
        elements = sum(entry.numel for entry in entries)
        return (
            f"ParameterServer({len(entries)} arrays, {elements} elements, "
            f"num_servers={self.num_servers})"
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _handle, (self._access,)

    def __del__(self) -> None:
        if (holder := getattr(self, "_holder", None)) is not None:
            let_go(holder, dropped=True)  # the servers end when no process has a handle of them
        access: Access | None = getattr(self, "_access", None)
        if access is None or (connection := open_connections.known(access.token)) is None:
            return
        open_connections.flush(connection)
        others = [other for other in list(_handles.values()) if other is not self]
        holds_actors = access.group.replication > 1
        if holds_actors and all(other._access.token != access.token for other in others):
            open_connections.drop(access.token)  # with it, the actors would live on

    # -- inside --------------------------------------------------------------------------------

    @property
    def _arrays(self) -> Arrays:
        """Names, shapes, dtypes and chunks of the arrays."""
        return self._access.group.arrays

    def _owned(self, update: ArrayTree) -> dict[str, Bytes]:
        """Return an update's memory, copied where servers could read it after the call."""
        memory = self._arrays.bytes_of(update, "update")
        return {
            name: part.copy() if segment_of(part) is not None else part
            for name, part in memory.items()
        }

    def _connection(self) -> Connection:
        """Return this process' connection, made now if there is none or it is closed.

        Raises:
            ShutdownError: this handle is shut down.
            PeerLostError, DeadlineError: see `Access.connect`.
        """
        if self._shut_down:
            raise ShutdownError("this parameter server is shut down: make another one")
        return open_connections.to(self._access)

    def _run(
        self,
        begin: Callable[[Connection], Future[T]],
        what: str,
        memory: Mapping[str, Bytes] | None = None,
    ) -> T:
        """Begin a request on this process' connection and wait for it, see `Connection.run`."""
        connection = self._connection()
        try:
            return connection.run(lambda: begin(connection), what, (memory or {}).values())
        except DeadlineError as error:
            log_report(self._watch(), str(error))
            raise

    def _watch(self) -> WatchedServers:
        """Return the servers' processes for a report."""
        return WatchedServers(
            self._access, functools.partial(open_connections.known, self._access.token)
        )

    def _run_again(self, begin: Callable[[Connection], Future[T]], what: str) -> T:
        """Do as `_run` for a request about the whole state, and again if a server dies meanwhile."""
        while True:
            try:
                return self._run(begin, what)
            except PeerLostError:
                if self._access.group.replication == 1:
                    raise
                self._run(lambda connection: connection.pusher.pull({}), what)  # its successor


def _handle(access: Access) -> ParameterServer:
    """Return a handle of the same servers, in the process that unpickles it."""
    server = ParameterServer.__new__(ParameterServer)
    server._access = access
    _handles[id(server)] = server
    server._shut_down, server._holder, server._pid = False, None, os.getpid()
    return server


def _start(
    count: int, copies: int, transport: str, token: bytes, identity: Identity | None
) -> Servers:
    """Start servers' processes on the runtime of this process; dead ones start again if there are copies."""
    if runtime().name == "ray":
        from steepest.parameter_server.on_ray import start_actors

        return start_actors(count, copies, transport, token, identity)
    from steepest.parameter_server.on_machine import start_processes

    return start_processes(count, token, identity)


def _opened(
    servers: Servers,
    group: ServerGroup,
    spec: OptimizerSpec | None,
    initial: Mapping[str, Bytes],
    ways: str,
) -> list[Call]:
    """Let each process host its server; return the calls."""
    call, stored = runtime().call, runtime().put(initial)
    return [
        call(handle, "open_group", group, spec, index, stored, ways)
        for index, handle in enumerate(servers.handles)
    ]


def _connecting(servers: Servers, first: Sequence[Address], seconds: float) -> list[Call]:
    """Let the other servers connect to the first one; return the calls."""
    call = runtime().call
    return [call(handle, "connect", first, seconds) for handle in servers.handles[1:]]


def _access_of(handle: weakref.ref[ParameterServer]) -> Access | None:
    """Return how to reach the servers of a handle; None if it is shut down or deleted."""
    server = handle()
    return None if server is None or server._shut_down else server._access


def _require_replication(replication: int, num_servers: int) -> int:
    """Return how many servers hold each chunk; ConfigurationError: there are too few servers."""
    copies = require_count("replication", replication)
    if copies > num_servers:
        raise ConfigurationError(
            f"replication={copies} with num_servers={num_servers}: give at least as many servers"
        )
    return copies


def _read_optimizer(optimizer: OptimizerFactory, initial: ArrayTree) -> OptimizerSpec:
    """Return the recipe of an optimizer, see `hosting.read_optimizer`; imports torch."""
    from steepest.parameter_server.hosting import read_optimizer

    return read_optimizer(optimizer, initial)


def _get(calls: list[Call], timeout: float, what: str) -> list[Any]:
    """Return the results of calls of servers within `timeout` seconds.

    Raises:
        DeadlineError: not all calls returned in time.
        PeerLostError: a server died, or raised an error that is not this library's.
        SteepestError: that a server raised.
    """
    try:
        return runtime().get(calls, timeout)
    except LateError:
        raise DeadlineError(f"waited {timeout:g} s in vain for {what}: raise timeout=") from None
    except CallRaisedError as error:
        if not isinstance(error.cause, RemoteError):
            raise
        if (own := described_error(error.cause.told, "a server: ")) is not None:
            raise own from own.__cause__
        words = f"a server failed: waited for {what}, and {error.cause}"
        raised = raised_by_user(words, error.cause.told)
        raise raised from raised.__cause__
    except ProcessDiedError as error:
        raise PeerLostError(
            f"a server died while starting: {' '.join(str(error).split())}"
        ) from error
