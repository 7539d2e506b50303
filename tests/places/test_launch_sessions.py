"""A Ray of one's own for a block, and the connection to one that runs: what they yield, refuse, and leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from steepest.errors import ConfigurationError, DeadlineError
from steepest.places import existing, local, sessions
from steepest.runtime import connection
from tests.forked_workers import RAY
from tests.pairs import mostly_full
from tests.ray_hosts import (
    ROOT,
    SECONDS,
    Place,
    place,  # noqa: F401 - a fixture
    signalled,
)


class Calls:
    """Stands for Ray: notes the calls, and can raise in `init`."""

    def __init__(self) -> None:
        self.made: list[object] = []
        self.connected = False
        self.raises: BaseException | None = None

    def init(self, **settings: object) -> None:
        self.made.append(settings["address"])
        self.connected = True  # Ray's processes exist before it fails
        if self.raises is not None:
            raise self.raises

    def shutdown(self) -> None:
        self.connected = False


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", made.init)
    monkeypatch.setattr(connection, "start_template", lambda: None)  # there is no Ray to end it
    monkeypatch.setattr(ray, "shutdown", made.shutdown)
    monkeypatch.setattr(ray, "is_initialized", lambda: made.connected)
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    yield made
    assert not made.connected


@contextlib.contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """The address of something that takes one connection and answers so; None for never."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(len(sessions._PREFACE), socket.MSG_WAITALL)
                if answer is None:
                    connection.recv(1)  # until the other end closes
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


@pytest.fixture
def listening() -> Iterator[str]:
    with server(b"\0\0\x06\4\0\0\0\0\0" + b"\0\3\0\0\0\1") as address:
        yield address


class Ends:
    """Stands for a template of workers."""

    name = "none"

    def __init__(self) -> None:
        self.ended = 0

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("connected", [True, False])
def test_a_template_ends_where_no_ray_is_started(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, connected: bool
) -> None:
    """Because this process is connected already, or connects to a running cluster."""
    template: Any = Ends()
    calls.connected = connected
    if not connected:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    with connection.ray_session(template=template):
        pass
    assert template.ended == 1
    calls.connected = False


def test_a_local_ray_ends_with_its_block(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    with local(2) as address:
        assert address == "10.0.0.1:6379"
        assert calls.connected
    assert calls.made == ["local"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), OSError("of the block")])
def test_a_local_ray_ends_after_an_error_in_the_block(calls: Calls, raised: BaseException) -> None:
    with pytest.raises(type(raised)), local():
        raise raised
    assert calls.made == ["local"]


def test_a_ray_that_was_interrupted_while_it_started_is_ended(calls: Calls) -> None:
    calls.raises = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), local():
        pytest.fail("the block must not run")


def test_what_ray_raises_is_told_in_words(calls: Calls, listening: str) -> None:
    calls.raises = RuntimeError("no token")
    with (
        pytest.raises(
            ConfigurationError, match=f"could not connect to the Ray at {listening}: no token"
        ),
        existing(listening),
    ):
        pytest.fail("the block must not run")


@pytest.mark.parametrize(
    ("variables", "mode", "said"),
    [
        ({"RAY_AUTH_TOKEN_PATH": "/some/file"}, "token", "the token of RAY_AUTH_TOKEN_PATH, is it"),
        ({"RAY_AUTH_TOKEN": "a", "RAY_AUTH_TOKEN_PATH": "b"}, "token", "the token of RAY_AUTH_TOKEN, is it"),
        ({"RAY_AUTH_TOKEN": "a", "RAY_AUTH_MODE": "disabled"}, "disabled", "no token .*MODE is disabled"),
        ({"RAY_AUTH_MODE": "token"}, "token", "file .ray/auth_token in the home directory, is it"),
        ({}, None, r"no token \(RAY_AUTH_MODE is not set\): set RAY_AUTH_MODE=token, and the"),
    ],
    ids=str,
)  # fmt: skip
def test_a_token_that_is_given_is_sent_and_the_error_names_it_and_the_mode(
    calls: Calls,
    listening: str,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    mode: str | None,
    said: str,
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # is put back afterwards
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    read: list[str | None] = []
    monkeypatch.setattr(
        "steepest.runtime.connection.reload_token",
        lambda: read.append(os.environ.get("RAY_AUTH_MODE")),
    )
    calls.raises = ConnectionError(f"Failed to connect to Ray cluster at {listening}")
    with (
        pytest.raises(
            ConfigurationError, match=f"(?s)could not connect to the Ray at {listening}: .*{said}"
        ),
        existing(listening),
    ):
        pytest.fail("the block must not run")
    assert os.environ.get("RAY_AUTH_MODE") == mode
    assert read == (["token"] if "RAY_AUTH_MODE" not in variables and variables else [])


def test_an_existing_ray_is_found_by_its_address(calls: Calls, listening: str) -> None:
    with existing(listening) as address:
        assert address == "10.0.0.1:6379"
    assert calls.made == [listening]


def test_an_existing_ray_is_found_by_the_environment(
    calls: Calls, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    with existing():
        pass
    assert calls.made == [listening]


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"220"])
def test_what_is_no_control_store_is_refused(calls: Calls, answer: bytes) -> None:
    with (
        server(answer) as address,
        pytest.raises(ConfigurationError, match="is not the control store"),
        existing(address),
    ):
        pytest.fail("the block must not run")
    assert calls.made == []


def test_what_takes_a_connection_and_says_nothing_is_a_deadline(calls: Calls) -> None:
    with (
        server(None) as address,
        pytest.raises(DeadlineError, match=f"nothing at {address} answered within 0.1 s"),
        existing(address, timeout=0.1),
    ):
        pytest.fail("the block must not run")
    assert calls.made == []


def test_a_ray_that_uses_tls_is_not_asked_in_plain_words(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with server(b"") as address, existing(address):
        pass
    assert calls.made == [address]


@pytest.mark.parametrize(
    "address",
    [
        "auto", "ray://10.0.0.1:10001", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", ":6379",
        "fd00::1", "fd00::1:6379", "[fd00::1]",
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(calls: Calls, address: str) -> None:
    with (
        pytest.raises(
            ConfigurationError, match=f"must be 'host:port'.* not '{re.escape(address)}'"
        ),
        existing(address),
    ):
        pytest.fail("the block must not run")
    assert calls.made == []


def test_without_an_address_existing_says_what_to_give(calls: Calls) -> None:
    with pytest.raises(ConfigurationError, match="RAY_ADDRESS is not set"), existing():
        pytest.fail("the block must not run")


def test_an_address_where_nothing_listens_is_refused_at_once(calls: Calls) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with (
        pytest.raises(ConfigurationError, match=rf"no Ray at 127\.0\.0\.1:{port}: .*refused"),
        existing(f"127.0.0.1:{port}"),
    ):
        pytest.fail("the block must not run")
    assert calls.made == []


def test_an_address_of_ipv6(calls: Calls) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            port = server.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    with (
        pytest.raises(ConfigurationError, match=rf"no Ray at \[::1\]:{port}: .*refused"),
        existing(f"[::1]:{port}"),
    ):
        pytest.fail("the block must not run")


def test_an_address_that_does_not_answer_is_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(address: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", late)
    with pytest.raises(DeadlineError, match=r"nothing at 10\.0\.0\.1:6379 answered within 3 s"):
        sessions._knock("10.0.0.1", 6379, 3.0)


def test_a_process_that_is_connected_already_is_refused(calls: Calls) -> None:
    with (
        local(),
        pytest.raises(
            ConfigurationError, match=r"connected to the Ray at 10\.0\.0\.1:6379 already"
        ),
        local(),
    ):
        pytest.fail("the block must not run")
    assert calls.made == ["local"]


@pytest.mark.parametrize(
    "settings",
    [{"workers": 0}, {"workers": 1.5}, {"cpus_per_worker": 0}, {"verbose": "no"}],
)
def test_what_is_no_number_of_workers_is_refused(calls: Calls, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError), local(**settings):  # type: ignore[arg-type]
        pytest.fail("the block must not run")
    assert calls.made == []


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="looks in /proc")


@pytest.mark.full
@pytest.mark.cluster
@needs_proc
def test_trainers_use_the_local_ray_and_its_processes_end(place: Place) -> None:  # noqa: F811
    place.environment["RAY_ADDRESS"] = "10.255.255.1:6379"  # is not asked
    place.python(
        """
        from steepest.places import local
        workers = os.cpu_count() + 1
        try:
            with local(workers) as address:
                assert ray.cluster_resources()["CPU"] == workers
                assert ray.get_runtime_context().gcs_address == address
                check(train())
                assert ray.is_initialized()  # it is the block's, not the trainer's
                raise OSError("of the block")
        except OSError:
            assert not ray.is_initialized()
        """
    )


@pytest.mark.full
@pytest.mark.cluster
def test_a_local_ray_keeps_processes_for_a_job_that_has_reserved_their_cpus(place: Place) -> None:  # noqa: F811
    place.python(
        """
        import threading
        from pathlib import Path
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as At
        from steepest.places import local

        class Process:
            def answer(self):
                return os.getpid()

        @ray.remote(num_cpus=0, runtime_env={"env_vars": {"ASKED_FOR": "yes"}})
        def asked_for():
            return os.environ["ASKED_FOR"]

        ray._private.ray_constants.SETUP_WORKER_FILENAME = "setup_worker.py"  # not that of the tests
        with local(2):
            node = ray._private.worker._global_node
            assert "raylet" in node.all_processes
            assert not {"monitor", "dashboard"} & node.all_processes.keys()
            count = int(ray.cluster_resources()["CPU"])
            group = placement_group([{"CPU": 1}] * count)
            assert group.wait(60)
            threading.Event().wait(3.0)  # by default Ray ends them after one second
            body = ray.remote(num_cpus=1)(Process)
            actors = [body.options(scheduling_strategy=At(group, i)).remote() for i in range(count)]
            ray.get([actor.answer.remote() for actor in actors], timeout=60)
            log = Path(node.get_logs_dir_path(), "raylet.out").read_text()
            assert log.count("Started worker process") == count, log
            assert ray.get(asked_for.remote(), timeout=60) == "yes"
        """
    )


@pytest.mark.cluster
@needs_proc
@pytest.mark.parametrize("number", mostly_full([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_ends_the_local_ray(place: Place, number: signal.Signals) -> None:  # noqa: F811
    program = place.script(
        """
        import signal
        from steepest.places import local
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with local(1):
            print("training", flush=True)
            signal.pause()
        """
    )
    status, output = signalled(place, program, number, everybody=number == signal.SIGINT)
    assert status == (143 if number == signal.SIGTERM else -signal.SIGINT), output


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Place, str]]:
    """A Ray of two CPUs that wants a token, which the site's programs have; and its address."""
    site = Place()
    site.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": site.mark * 2}
    start = ["start", "--head", "--port=0", "--num-cpus=2", "--include-dashboard=false", "--block"]
    try:
        with site.start(sys.executable, *RAY, *start) as cluster:
            try:
                assert cluster.stdout is not None
                printed: list[str] = []
                address = None
                while address is None:
                    printed.append(cluster.stdout.readline())
                    assert printed[-1], "".join(printed)
                    address = re.search(r"--address='([0-9.]+:\d+)'", printed[-1])
                yield site, address[1]
                assert cluster.poll() is None, "the cluster must outlive trainers and blocks"
            finally:
                site.kill()
    finally:
        shutil.rmtree(site.directory, ignore_errors=True)


@pytest.mark.full
@pytest.mark.cluster
@needs_proc
def test_a_trainer_finds_a_running_cluster_by_ray_address(running: tuple[Place, str]) -> None:
    site, address = running
    site.environment["RAY_ADDRESS"] = address
    try:
        output = site.python(
            """
            with DistributedSGD(linear_model_creator(), num_workers=2) as sgd:
                sgd.fit(steps=5, progress=False)
                check(sgd.weights())
                assert ray.cluster_resources()["CPU"] == 2
                print("address", ray.get_runtime_context().gcs_address)
            assert not ray.is_initialized()
            """
        )
    finally:
        del site.environment["RAY_ADDRESS"]
    assert f"address {address}" in output


@pytest.mark.cluster
@needs_proc
def test_an_existing_ray_outlives_the_block_and_wants_its_token(
    running: tuple[Place, str],
) -> None:
    site, address = running
    del site.environment["RAY_AUTH_MODE"]  # a token that is given is sent all the same
    try:
        output = site.python(
            f"""
            from steepest.places import existing
            with existing({address!r}) as address:
                assert address == {address!r}
                check(train())
            assert not ray.is_initialized()
            os.environ["RAY_ADDRESS"] = address  # a trainer finds it by itself
            check(train())
            assert not ray.is_initialized()
            print("trained")
            """
        )
    finally:
        site.environment["RAY_AUTH_MODE"] = "token"
    assert "trained" in output
    token = site.environment["RAY_AUTH_TOKEN"]
    site.environment["RAY_AUTH_TOKEN"] = "f" * 32
    del site.environment["RAY_AUTH_MODE"]
    try:
        output = site.python(
            f"""
            from steepest.errors import ConfigurationError
            from steepest.places import existing
            try:
                with existing({address!r}):
                    print("let in")
            except ConfigurationError as error:
                assert "f" * 32 not in str(error)
                print("refused:", error)
            """
        )
    finally:
        site.environment |= {"RAY_AUTH_TOKEN": token, "RAY_AUTH_MODE": "token"}
    assert "refused: could not connect to the Ray at" in output
    assert "the token of RAY_AUTH_TOKEN, is it the cluster's? (RAY_AUTH_MODE is token)" in output


INTERRUPTED = ROOT / "tests" / "places" / "interrupted_program.py"


def interrupted(site: Place, name: str) -> None:
    """Ten steps of MNIST, in which a worker and then the program are killed; then what is left of them."""
    site.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    with site.start(sys.executable, str(INTERRUPTED), name) as process:
        first, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL, first
    assert "from step 0\n" in first
    assert "after step 7, 1 replaced\n" in first
    second = site.run(sys.executable, str(INTERRUPTED), name)
    (begun,) = re.findall(r"from step (\d+)\n", second)
    assert 4 <= int(begun) <= 10  # workers go on while a callback runs
    assert second.endswith("to step 10\nthe weights of an uninterrupted run\n"), second


@pytest.mark.full
@pytest.mark.cluster
@needs_proc
def test_a_killed_run_on_a_local_ray_is_resumed(place: Place) -> None:  # noqa: F811
    interrupted(place, "local")


@pytest.mark.full
@pytest.mark.cluster
@needs_proc
def test_a_killed_run_on_an_existing_ray_is_resumed(running: tuple[Place, str]) -> None:
    site, address = running
    site.environment["RAY_ADDRESS"] = address
    try:
        interrupted(site, "existing")
    finally:
        del site.environment["RAY_ADDRESS"]
