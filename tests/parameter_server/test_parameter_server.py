"""ParameterServer on Ray: one contract over sockets and over actor calls."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
import torch

from steepest import ParameterServer
from steepest.core.transport.sockets import WireTransport
from steepest.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineError,
    ModelRaisedError,
    NonFiniteError,
    PeerLostError,
    ShutdownError,
    SteepestError,
)
from steepest.parameter_server import api, open_connections

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SECONDS = 60.0
SIZE = 300_000  # three chunks
TRANSPORTS = pytest.mark.parametrize(
    "transport", ["wire", pytest.param("tcp", marks=pytest.mark.long)]
)


def initial() -> dict[str, Any]:
    return {
        "w": np.zeros((SIZE // 3, 3)),
        "t": torch.zeros(7),
        "stop": torch.zeros(1, dtype=torch.int64),
    }


def ones() -> dict[str, Any]:
    return {"w": np.ones((SIZE // 3, 3)), "t": torch.ones(7)}


def value(pulled: dict[str, Any]) -> float:
    """The number that all elements are, but for those of "stop"."""
    found = {
        float(pulled["w"].min()),
        float(pulled["w"].max()),
        float(pulled["t"].min()),
        float(pulled["t"].max()),
    }
    assert len(found) == 1, f"half an update: {found}"
    return found.pop()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 2 * SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"


def pids(server: ParameterServer) -> list[int]:
    return [
        place.pid
        for place in ray.get([actor.place.remote() for actor in server._access.servers.handles])
    ]


def ends(pid: int) -> bool:
    """Whether a process ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], SECONDS)[0])
    finally:
        os.close(descriptor)


@ray.remote
def add(server: ParameterServer, times: int, waiting: bool = True) -> int:
    """Pushes ones; the process that did."""
    for _ in range(times):
        update = ones()
        if waiting:
            server.push(update)
        else:
            server.push_async(update)
            update["w"].fill(1e9)
    return os.getpid()


@ray.remote
def add_until_stopped(server: ParameterServer) -> int:
    added = 0
    while server.pull("stop")[0] == 0:
        assert server.push_pull(ones())["w"].min() >= added
        added += 1
    return added


@ray.remote
def look(servers: list[ParameterServer]) -> tuple[str, float]:
    """A handle within something else."""
    return repr(servers[0]), value(servers[0].pull())


@ray.remote
def shut_down(server: ParameterServer) -> None:
    server.shutdown()


@ray.remote(num_cpus=0)
class Holder:
    """An actor that keeps a handle."""

    def __init__(self, server: ParameterServer) -> None:
        self.server = server

    def pull(self) -> float:
        return value(self.server.pull())

    def version(self) -> int:
        return self.server.version

    def add_and_exit(self, times: int) -> None:
        for _ in range(times):
            self.server.push_async(ones())
        ray.actor.exit_actor()


@pytest.fixture(scope="module", params=["wire", "tcp"])
def shared(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[ParameterServer]:
    """A server that many tests push ones to."""
    with ParameterServer(
        initial(), 2, transport=request.param, timeout=SECONDS, max_in_flight=3
    ) as server:
        yield server


class TestContract:
    """What holds over any transport; numbers are relative, because the tests of a transport share its server."""

    def test_an_update_is_seen_and_makes_a_version(self, shared: ParameterServer) -> None:
        before, version = value(shared.pull()), shared.version
        assert shared.push(ones()) == version + 1 == shared.version
        pulled = shared.pull()
        assert value(pulled) == before + 1
        assert isinstance(pulled["w"], np.ndarray)
        assert isinstance(pulled["t"], torch.Tensor)
        assert value(shared.push_pull(ones())) == before + 2
        assert shared.num_servers == 2

    def test_parts_are_pulled_by_name_and_range_and_into_given_arrays(
        self, shared: ParameterServer
    ) -> None:
        whole = shared.pull()
        assert torch.equal(shared.pull("t"), whole["t"])
        assert shared.pull(["t"]).keys() == {"t"}
        piece = shared.pull("w", range=(SIZE - 2, SIZE))
        assert piece.tolist() == whole["w"].reshape(-1)[-2:].tolist()
        out = {name: np.empty_like(array) for name, array in whole.items()}
        assert shared.pull(out=out) is out
        assert value(out) == value(whole)
        assert value(shared.push_pull(ones(), out=out)) == value(whole) + 1 == value(out)

    def test_tasks_that_add_ones_lose_none_and_others_see_them_grow(
        self, shared: ParameterServer
    ) -> None:
        before = value(shared.pull())
        running = [add_until_stopped.remote(shared) for _ in range(3)]
        seen = [before]
        until(lambda: seen.append(value(shared.pull())) or len(set(seen)) > 5)
        assert seen == sorted(seen)
        shared.push({"stop": np.ones(1, dtype=np.int64)})
        added = sum(ray.get(running))
        shared.push({"stop": np.full(1, -1, dtype=np.int64)})
        assert value(shared.pull()) == before + added

    def test_a_handle_goes_to_actors_and_into_containers(self, shared: ParameterServer) -> None:
        before = value(shared.push_pull(ones()))
        holder = Holder.remote(shared)
        assert ray.get(look.remote([shared])) == (repr(shared), before)
        assert ray.get(holder.pull.remote()) == before

    def test_several_pushes_are_in_flight_and_their_arrays_may_be_changed(
        self, shared: ParameterServer
    ) -> None:
        before = value(shared.pull())
        update = ones()
        futures = []
        for _ in range(8):
            update["w"].fill(1)
            update["t"].fill_(1)
            futures.append(shared.push_async(update))
            update["w"].fill(1e9)
            update["t"].fill_(1e9)
        shared.flush()
        versions = [future.result(0) for future in futures]
        assert versions == list(range(versions[0], versions[0] + 8))
        assert value(shared.pull()) == before + 8

    def test_pushes_in_flight_outlive_the_task_that_made_them(
        self, shared: ParameterServer
    ) -> None:
        before = value(shared.pull())
        ray.get([add.remote(shared, 6, False) for _ in range(3)])
        until(lambda: value(shared.pull()) == before + 18)

    def test_pushes_in_flight_outlive_the_actor_that_made_them(
        self, shared: ParameterServer
    ) -> None:
        before = value(shared.pull())
        leaving = Holder.remote(shared).add_and_exit.remote(5)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(leaving)
        until(lambda: value(shared.pull()) == before + 5)

    def test_threads_of_one_process_share_a_handle(self, shared: ParameterServer) -> None:
        before = value(shared.pull())
        gate = threading.Barrier(4)

        def work(number: int) -> None:
            gate.wait(SECONDS)
            for count in range(5):
                assert value(shared.push_pull(ones())) > before + count
                shared.push_async(ones())

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        shared.flush()
        assert value(shared.pull()) == before + 40

    def test_what_does_not_fit_or_is_not_finite_is_refused_and_nothing_changes(
        self, shared: ParameterServer
    ) -> None:
        before = value(shared.pull())
        spoiled = ones()
        spoiled["t"][3] = float("nan")
        for push in (
            shared.push,
            shared.push_pull,
            lambda update: shared.push_async(update).result(SECONDS),
        ):
            with pytest.raises(ConfigurationError, match=r"'w' has shape \(3,\)"):
                push({"w": np.ones(3)})
            with pytest.raises(ConfigurationError, match=r"'t' is float64, not float32"):
                push({"t": np.ones(7)})
            with pytest.raises(NonFiniteError, match="nothing of it applied: 't' holds NaN"):
                push(spoiled)
        with pytest.raises(ConfigurationError, match="no array named 'x'"):
            shared.pull("x")
        assert value(shared.pull()) == before

    def test_state_may_be_kept_and_put_back(self, shared: ParameterServer) -> None:
        before = value(shared.push_pull(ones()))
        file = io.BytesIO()
        torch.save(shared.state_dict(), file)
        shared.push(ones())
        version = shared.version
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert (state["version"], value(state["arrays"])) == (version - 1, before)
        shared.load_state_dict(state)
        assert shared.version == version + 1
        assert value(shared.pull()) == before

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (
                {"arrays": {"w": torch.zeros(3)}},
                r"state holds \['w'\], this server \['stop', 't', 'w'\]",
            ),
            ({"update": "SGD"}, "state is of updates by 'SGD', this server's are by 'add'"),
            (
                {"optimizer": [[0, {"name": "w", "start": 0, "stop": 9}, torch.zeros(9)]]},
                "does not have",
            ),
        ],
    )
    def test_state_of_something_else_is_refused(
        self, shared: ParameterServer, change: Any, says: str
    ) -> None:
        before, state = shared.version, shared.state_dict()
        with pytest.raises(ConfigurationError, match=says):
            shared.load_state_dict({**state, **change})
        with pytest.raises(ConfigurationError, match="'w' has shape"):
            shared.load_state_dict({**state, "arrays": {**state["arrays"], "w": torch.zeros(3)}})
        with pytest.raises(ConfigurationError, match="'t' is float64"):
            shared.load_state_dict(
                {**state, "arrays": {**state["arrays"], "t": torch.zeros(7, dtype=torch.float64)}}
            )
        with pytest.raises(ConfigurationError, match="give what state_dict"):
            shared.load_state_dict({"arrays": state["arrays"]})
        assert shared.version == before

    def test_no_secret_is_shown(self, shared: ParameterServer) -> None:
        assert repr(shared) == f"ParameterServer(3 arrays, {SIZE + 8} elements, num_servers=2)"
        token = shared._access.token
        again = pickle.loads(pickle.dumps(shared))
        for shown in (
            repr(shared),
            repr(again),
            repr(shared._access),
            str(vars(again)),
            repr(vars(shared)),
        ):
            assert repr(token) not in shown
            assert token.hex() not in shown
        assert value(again.pull()) == value(shared.pull())


@TRANSPORTS
def test_arrays_to_push_from_are_read_in_place_and_used_again(transport: str) -> None:
    with ParameterServer(initial(), num_servers=2, transport=transport) as server:
        update = server.empty()
        assert {name: (array.shape, array.dtype) for name, array in update.items()} == {
            name: (array.shape, array.dtype) for name, array in initial().items()
        }
        update["stop"][:] = 0
        for number in range(1, 7):
            for name in ("w", "t"):
                update[name][:] = 1.0
            if number % 3 == 0:
                assert value(server.push_pull(update)) == number
            elif number % 3 == 1:
                server.push(update)
            else:
                pushed = server.push_async(update)
            for name in ("w", "t"):
                update[name][:] = 77.0  # whoever reads it too late adds this
        assert pushed.result(SECONDS) == 5
        assert value(server.pull()) == 6
        place = update["w"].ctypes.data
        del update
        assert server.empty()["w"].ctypes.data == place


@TRANSPORTS
def test_an_optimizer_on_the_servers_equals_torch(transport: str) -> None:
    start = torch.linspace(-1, 1, SIZE)
    gradients = [torch.sin(start * number) for number in range(1, 4)]
    with ParameterServer(
        start, 1, optimizer=lambda p: torch.optim.Adam(p, lr=0.1), transport=transport
    ) as server:
        parameter = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.Adam([parameter], lr=0.1)
        for gradient in gradients:
            server.push(gradient)
            parameter.grad = gradient.clone()
            optimizer.step()
        torch.testing.assert_close(server.pull(), parameter.detach(), rtol=1e-5, atol=1e-6)
        state = server.state_dict()
        assert state["update"] == "Adam"
        moved = server.push_pull(gradients[0])
        server.load_state_dict(state)
        torch.testing.assert_close(server.push_pull(gradients[0]), moved, rtol=0, atol=0)


@TRANSPORTS
def test_after_a_shutdown_nobody_waits_in_vain(transport: str) -> None:
    with ParameterServer(initial(), 1, transport=transport, timeout=SECONDS) as server:
        server.push(ones())
        assert ray.get(look.remote([server])) == (repr(server), 1)
        running = pids(server)
        copy = pickle.loads(pickle.dumps(server))
    server.shutdown()
    for call in (
        server.pull,
        lambda: server.push(ones()),
        lambda: server.version,
        server.flush,
        server.state_dict,
    ):
        with pytest.raises(ShutdownError, match="shut down"):
            call()
    with pytest.raises(ShutdownError):
        server.push_async(ones())
    assert repr(server).startswith("ParameterServer(3 arrays")
    assert all(map(ends, running))
    with pytest.raises(
        PeerLostError, match="parameter server of 1 servers: cannot .*it was shut down or died"
    ):
        copy.pull()
    for _ in range(3):  # in processes that were connected, and in others
        with pytest.raises(PeerLostError, match="it was shut down or died"):
            ray.get(look.remote([copy]))


@TRANSPORTS
def test_a_server_that_is_killed_is_named_at_once(transport: str) -> None:
    with ParameterServer(initial(), 2, transport=transport, timeout=SECONDS) as server:
        server.push(ones())
        os.kill(pids(server)[1], signal.SIGKILL)
        begun = time.monotonic()
        for call in (
            server.pull,
            lambda: server.push(ones()),
            lambda: server.version,
            server.flush,
        ):
            with pytest.raises(
                PeerLostError,
                match=r"server 1 of the parameter server is gone .* shut down or died",
            ):
                call()
        with pytest.raises(PeerLostError, match="server 1"):
            server.push_async(ones()).result(SECONDS)
        assert time.monotonic() - begun < SECONDS / 2
        with pytest.raises(PeerLostError, match="shut down or died"):
            ray.get(look.remote([server]))


@ray.remote
def push_ones(server: ParameterServer, count: int) -> None:
    futures = [server.push_async(np.ones(SIZE)) for _ in range(count // 3)]
    for _ in range(count // 3):
        server.push(np.ones(SIZE))
        assert len({*server.push_pull(np.ones(SIZE))}) == 1
    assert len({future.result(SECONDS) for future in futures}) == count // 3


@pytest.mark.long
def test_with_copies_any_server_may_die_and_every_handle_finds_its_successor() -> None:
    with ParameterServer(np.zeros(SIZE), 2, replication=2, timeout=SECONDS) as server:
        stale = Holder.remote(server)
        assert ray.get(stale.version.remote(), timeout=SECONDS) == 0
        for death in (0, 1):
            work = [push_ones.remote(server, 30) for _ in range(2)]
            until(lambda death=death: server.version >= death * 61 + 10)
            os.kill(pids(server)[death], signal.SIGKILL)
            server.push(np.ones(SIZE))
            ray.get(work, timeout=SECONDS)
        assert {*server.pull()} == {122}
        assert ray.get(stale.version.remote(), timeout=SECONDS) == 122
        assert server.state_dict()["version"] == 122
        running = pids(server)
    assert all(map(ends, running))
    with pytest.raises(PeerLostError):
        ray.get(stale.version.remote(), timeout=SECONDS)


@pytest.mark.few(1)
@pytest.mark.long
@TRANSPORTS
def test_a_server_that_is_stopped_ends_in_a_deadline_and_goes_on_later(transport: str) -> None:
    size = 3_000_000  # more than sockets hold
    with ParameterServer(np.zeros(size), 1, transport=transport, timeout=2) as server:
        server.push(np.ones(size))
        (pid,) = pids(server)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(
                DeadlineError, match="parameter server of 1 servers: waited 2 s in vain for a pull"
            ):
                server.pull()
            update = np.ones(size)
            with pytest.raises(DeadlineError, match="in vain for a push to be committed"):
                server.push(update)
            update.fill(1e9)  # it is the caller's again
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: server.version == 2)
        pulled = server.pull()
        assert (pulled.min(), pulled.max()) == (2, 2)


def in_a_forked_child(server: ParameterServer) -> None:
    for _ in range(20):
        server.push(np.ones(SIZE))
    assert len({*server.pull()}) == 1
    with pytest.raises(SteepestError, match="cannot end the servers"):
        copy.copy(server).shutdown()
    server.push_async(np.ones(SIZE))  # and ends


@TRANSPORTS
def test_a_forked_child_has_a_connection_of_its_own_and_its_parent_is_not_harmed(
    transport: str,
) -> None:
    with ParameterServer(np.zeros(SIZE), 2, transport=transport, timeout=SECONDS) as server:
        server.push(np.ones(SIZE))
        child = multiprocessing.get_context("fork").Process(
            target=in_a_forked_child, args=(server,), daemon=True
        )
        child.start()
        for version in range(20):
            assert server.push(np.ones(SIZE)) >= version + 2
        child.join(SECONDS)
        assert child.exitcode == 0
        assert {*server.pull()} == {42}


def test_who_does_not_know_the_secret_cannot_connect() -> None:
    with ParameterServer(np.zeros(3), 1, timeout=SECONDS) as server:
        peers = server._access.group.user_peers(5)
        stranger = WireTransport(bytes(32), peers, "elsewhere", lambda channel, message, size: None)
        try:
            with pytest.raises(AuthenticationError, match="different tokens"):
                stranger.connect(server._access.addresses[0], SECONDS)
        finally:
            stranger.close()
        assert server.push(np.ones(3)) == 1


@TRANSPORTS
def test_servers_end_when_nobody_has_a_handle_any_more(transport: str) -> None:
    server = ParameterServer(initial(), 1, transport=transport, timeout=SECONDS)
    other = pickle.loads(pickle.dumps(server))
    server.push(ones())
    del server
    gc.collect()
    assert value(other.push_pull(ones())) == 2
    running = [os.pidfd_open(pid) for pid in pids(other)]
    del other
    # what a connection by calls consists of refers to itself
    until(lambda: gc.collect() >= 0 and len(select.select(running, [], [], 0.1)[0]) == 1)
    for descriptor in running:
        os.close(descriptor)


def test_connections_to_servers_that_are_gone_are_closed_when_another_is_opened() -> None:
    first = ParameterServer(initial(), 1, timeout=SECONDS)
    assert value(first.pull()) == 0
    connection = open_connections.known(first._access.token)
    assert connection is not None
    running = pids(first)
    ray.get(shut_down.remote(first))
    assert all(map(ends, running))
    with ParameterServer(np.zeros(3), 1, timeout=SECONDS) as second:
        assert second.pull().tolist() == [0, 0, 0]
    assert open_connections.known(first._access.token) is None
    assert connection.closed


class NotHereError(Exception):
    """A user's."""


class OnlyAtHome(torch.optim.Optimizer):
    """It can be made in one process alone."""

    def __init__(self, parameters: Any, home: int) -> None:
        if os.getpid() != home:
            raise NotHereError(home)
        super().__init__(parameters, {"home": home})

    def step(self, closure: Any = None) -> None: ...  # type: ignore[override]


def test_what_an_optimizer_raises_on_a_server_is_caught_as_the_users_class() -> None:
    home = os.getpid()
    with pytest.raises(NotHereError, match="NotHereError") as raised:
        ParameterServer(np.zeros(3), optimizer=lambda p: OnlyAtHome(p, home))
    assert isinstance(raised.value, ModelRaisedError)
    assert "raise NotHereError(home)" in str(raised.value.__cause__)


def test_servers_that_do_not_start_in_time_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_START_SECONDS", 0.001)
    with pytest.raises(
        DeadlineError, match="waited 0.001 s in vain for the servers to start: raise timeout="
    ):
        ParameterServer(initial(), 1, timeout=0.001)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"initial": [1.0]}, "initial is a list"),
        ({"num_servers": 0}, "num_servers=0: give an integer of at least 1"),
        ({"num_servers": 1.5}, "num_servers=1.5"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore': give one of 'refuse', 'skip', 'pass'"),
        (
            {"transport": "mpi"},
            "transport='mpi': give one of 'wire', 'shared', 'unix', 'tcp'",
        ),
        ({"timeout": 0}, "timeout=0: give a positive number of seconds"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"max_in_flight": 0}, "max_in_flight=0"),
        ({"optimizer": "sgd"}, "optimizer= is a str"),
        ({"optimizer": lambda p: None}, "returned NoneType"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        ParameterServer(**{"initial": np.zeros(3), **arguments})
