"""A SageMaker host without SageMaker and Ray: what it reads, how hosts find each other, what a failure leaves."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steepest.cli.main import main
from steepest.errors import ConfigurationError, DeadlineError, PeerLostError, ProtocolError
from steepest.places import sagemaker, sagemaker_hosts
from steepest.places.sagemaker_hosts import (
    Follower,
    Leader,
    Lines,
    Welcome,
    follow,
    interface_address,
)
from steepest.places.sagemaker_job import in_natural_order, read_job
from steepest.places.sagemaker_nodes import missing_among
from steepest.places.sagemaker_processes import Program, command_of

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 20.0
LOCAL = "127.0.0.1"


# -- the job ---------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder such as /opt/ml on the second of eleven hosts."""
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    hosts = sorted(f"algo-{i + 1}" for i in range(11))  # as SageMaker sorts them
    resources = {"current_host": "algo-2", "hosts": hosts, "network_interface_name": "eth7"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    (config / "inputdataconfig.json").write_text('{"train": {}, "test": {}}')
    told = {"lr": "0.5", "name": '"adam"', "plain": "sgd", "sagemaker_program": '"train.py"'}
    (config / "hyperparameters.json").write_text(json.dumps(told))
    return tmp_path


def test_a_job_is_read_from_sagemakers_files(base: Path) -> None:
    job = read_job({"SAGEMAKER_BASE_DIR": str(base)})
    assert job.hosts == tuple(f"algo-{i + 1}" for i in range(11))
    assert (job.host, job.leader, job.leads, job.interface) == ("algo-2", "algo-1", False, "eth7")
    assert job.channels == {name: base / "input" / "data" / name for name in ("train", "test")}
    assert job.hyperparameters == {"lr": 0.5, "name": "adam", "plain": "sgd"}
    assert (job.model_dir, job.output_data_dir) == (base / "model", base / "output" / "data")
    assert (job.checkpoints, job.failure) == (base / "checkpoints", base / "output" / "failure")


def test_variables_come_before_files(base: Path) -> None:
    told = {
        "SAGEMAKER_BASE_DIR": str(base),
        "SM_HOSTS": '["b-10", "b-9"]',
        "SM_CURRENT_HOST": "b-9",
        "SM_NETWORK_INTERFACE_NAME": "eth1",
        "SM_CHANNELS": '["images"]',
        "SM_CHANNEL_IMAGES": "/images",
        "SM_HPS": '{"name": "7"}',
        "SM_MODEL_DIR": "/model",
        "SM_OUTPUT_DATA_DIR": "/data",
    }
    job = read_job(told)
    assert (job.hosts, job.host, job.leads) == (("b-9", "b-10"), "b-9", True)
    assert (job.interface, job.channels) == ("eth1", {"images": Path("/images")})
    assert job.hyperparameters == {"name": "7"}  # decoded already
    assert (job.model_dir, job.output_data_dir) == (Path("/model"), Path("/data"))
    expected = {name: value for name, value in told.items() if name != "SAGEMAKER_BASE_DIR"}
    assert job.variables() == expected | {"SM_HOSTS": '["b-9", "b-10"]'}


def test_the_resource_configuration_may_be_a_variable(tmp_path: Path) -> None:
    told = '{"hosts": ["x"], "current_host": "x"}'
    job = read_job({"SAGEMAKER_BASE_DIR": str(tmp_path), "SM_RESOURCE_CONFIG": told})
    assert (job.hosts, job.interface) == (("x",), "eth0")
    assert (job.channels, job.hyperparameters, job.arguments()) == ({}, {}, [])


def test_the_program_gets_hyperparameters_as_arguments(base: Path) -> None:
    words = ["--lr", "0.5", "--name", "adam", "--plain", "sgd"]
    assert read_job({"SAGEMAKER_BASE_DIR": str(base)}).arguments() == words


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "neither SM_HOSTS nor /nowhere/input/config/resourceconfig.json names the hosts"),
        ({"SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1' is not JSON"),
        ({"SM_HOSTS": '"algo-1"', "SM_CURRENT_HOST": "a"}, "give a JSON list of names of hosts"),
        (
            {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "c"},
            "'c' is none of the job's hosts: a, b",
        ),
        ({"SM_HOSTS": '["a", "b"]'}, "SM_CURRENT_HOST=None is none of the job's hosts"),
        ({"SM_RESOURCE_CONFIG": "[]"}, "SM_RESOURCE_CONFIG: give a JSON object"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a", "SM_CHANNELS": "1"}, "names of channels"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a", "SM_HPS": "["}, "SM_HPS='[' is not JSON"),
    ],
)
def test_what_sagemaker_would_not_write_is_refused(told: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_job({"SAGEMAKER_BASE_DIR": "/nowhere", **told})
    assert said in str(refused.value)


def test_numbers_in_names_are_sorted_as_numbers() -> None:
    names = ["algo-10", "algo-9", "algo-1", "10", "9x2", "9x10", "algo", "algo-9"]
    assert in_natural_order(names) == (
        "9x2", "9x10", "10", "algo", "algo-1", "algo-9", "algo-10",
    )  # fmt: skip


# -- hosts that find each other --------------------------------------------------------------------

WELCOME = Welcome("10.0.0.1:6379", "secret")


@pytest.fixture
def leader() -> Iterator[Leader]:
    """Listens for algo-2 and algo-10, both of this machine."""
    made = Leader(LOCAL, 0, ("algo-2", "algo-10"), WELCOME, lambda host: {LOCAL})
    try:
        yield made
    finally:
        made.end(0, "")


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sagemaker_hosts, "addresses_of", lambda host: {LOCAL})
    monkeypatch.setattr(sagemaker_hosts, "RETRY_SECONDS", 0.05)


def soon() -> float:
    return time.monotonic() + SECONDS


def until(happened: Callable[[], object]) -> None:
    deadline = soon()
    while not happened():
        assert time.monotonic() < deadline


def test_hosts_join_get_the_welcome_and_hear_the_end(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert leader.missing() == ["algo-2", "algo-10"]
    hosts = [follow("algo-1", leader.port, each, LOCAL, soon()) for each in ("algo-10", "algo-2")]
    assert [host.welcome for host in hosts] == [WELCOME] * 2
    leader.wait(SECONDS)
    assert leader.missing() == []
    assert hosts[0].poll(0.01) is None
    monkeypatch.setattr(sagemaker_hosts, "PARTING_SECONDS", 0.2)  # as both ends are here
    leader.end(3, "train.py ended with exit status 3")
    for host in hosts:
        assert host.poll(SECONDS) == (3, "train.py ended with exit status 3")
        host.close()


def test_the_token_is_not_printed() -> None:
    assert "secret" not in repr(WELCOME)


def test_a_host_that_is_gone_is_missing_and_may_come_again(leader: Leader) -> None:
    for _ in range(2):
        host = follow("algo-1", leader.port, "algo-2", LOCAL, soon())
        until(lambda: leader.missing() == ["algo-10"])
        host.close()
        until(lambda: leader.missing() == ["algo-2", "algo-10"])


def test_a_host_that_cannot_join_says_why(leader: Leader) -> None:
    host = follow("algo-1", leader.port, "algo-2", LOCAL, soon())
    host.fail("no disk")
    leader.wait(SECONDS)
    assert leader.failed == {"algo-2": "no disk"}
    host.close()


@pytest.mark.parametrize("host", ["algo-1", "algo-3", ""])
def test_a_name_that_is_no_other_host_of_the_job_is_refused(leader: Leader, host: str) -> None:
    said = f"{host} could not reach algo-1, which leads, in time: {LOCAL}:{leader.port}: "
    with pytest.raises(DeadlineError, match=said):
        follow("algo-1", leader.port, host, LOCAL, time.monotonic() + 0.3)
    assert leader.missing() == ["algo-2", "algo-10"]


def test_a_stranger_learns_nothing() -> None:
    leader = Leader(LOCAL, 0, ("algo-2",), WELCOME, lambda host: {"10.0.0.2"})
    try:
        with socket.create_connection((LOCAL, leader.port), SECONDS) as link:
            assert link.recv(100) == b""
        with pytest.raises(DeadlineError):
            follow("algo-1", leader.port, "algo-2", LOCAL, time.monotonic() + 0.3)
    finally:
        leader.end(0, "")


def test_each_name_is_looked_up_until_it_resolves() -> None:
    asked = []

    def resolve(host: str) -> set[str]:
        asked.append(host)
        return {LOCAL} if len(asked) > 2 else set()

    leader = Leader(LOCAL, 0, ("algo-2",), WELCOME, resolve)
    try:
        for _ in range(2):
            follow("algo-1", leader.port, "algo-2", LOCAL, soon()).close()
    finally:
        leader.end(0, "")
    assert len(asked) == 3


def test_a_host_cannot_take_the_name_of_another() -> None:
    addresses = {"algo-2": {"127.0.0.2"}, "algo-3": {"127.0.0.3"}}
    leader = Leader(LOCAL, 0, tuple(addresses), WELCOME, addresses.__getitem__)
    try:
        with pytest.raises(DeadlineError):
            follow("algo-1", leader.port, "algo-2", "127.0.0.3", time.monotonic() + 0.3)
        follow("algo-1", leader.port, "algo-3", "127.0.0.3", soon()).close()
    finally:
        leader.end(0, "")


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\n", b"[]\n", b"x" * 20_000])
def test_noise_closes_its_own_connection_alone(leader: Leader, sent: bytes) -> None:
    host = follow("algo-1", leader.port, "algo-2", LOCAL, soon())
    with socket.create_connection((LOCAL, leader.port), SECONDS) as link:
        link.sendall(sent)
        with contextlib.suppress(ConnectionResetError):  # it has not read all
            assert link.recv(100) == b""
    assert host.poll(0.01) is None
    host.close()


def test_a_leader_whose_name_does_not_resolve_is_waited_for(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([set(), set()])
    monkeypatch.setattr(sagemaker_hosts, "addresses_of", lambda host: next(answers, {LOCAL}))
    follow("algo-1", leader.port, "algo-2", LOCAL, soon()).close()
    assert list(answers) == []
    monkeypatch.setattr(sagemaker_hosts, "addresses_of", lambda host: set())
    with pytest.raises(DeadlineError, match="could not reach algo-1.*its name does not resolve"):
        follow("algo-1", leader.port, "algo-2", LOCAL, time.monotonic() + 0.2)


def followed() -> tuple[Follower, socket.socket]:
    mine, theirs = socket.socketpair()
    return Follower("algo-1", Lines(mine), WELCOME), theirs


def test_a_leader_that_dies_or_falls_silent_or_talks_nonsense_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for sent in (b"", b"{]\n"):
        host, theirs = followed()
        theirs.sendall(sent)
        theirs.close()
        with pytest.raises(PeerLostError, match="algo-1, which leads, is gone"):
            host.poll(SECONDS)
        host.fail("too late")  # nobody hears it, which is no error
        host.close()
    monkeypatch.setattr(sagemaker_hosts, "SILENCE_SECONDS", 0.0)
    host, theirs = followed()
    with pytest.raises(DeadlineError, match="algo-1, which leads, has sent no sign of life"):
        host.poll(0.01)
    host.close()
    theirs.close()


def test_the_leader_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sagemaker_hosts, "BEAT_SECONDS", 0.01)
    leader = Leader(LOCAL, 0, ("algo-2",), WELCOME, lambda host: {LOCAL})
    with socket.create_connection((LOCAL, leader.port), SECONDS) as link:
        link.sendall(b'{"host": "algo-2"}\n')
        heard = b""
        while heard.count(b'{"beat": true}\n') < 2:
            heard += link.recv(1000)
    leader.end(0, "")


def test_a_line_without_end_is_refused() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(b"x" * 8000)
        lines = Lines(mine)
        assert lines.arrived() == []
        theirs.sendall(b"x" * 500)
        with pytest.raises(ProtocolError, match="a line of over 8192 bytes"):
            lines.arrived()


def test_a_port_in_use_is_named(leader: Leader) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot listen at {LOCAL}:{leader.port}"):
        Leader(LOCAL, leader.port, (), WELCOME)


def test_an_interface_has_an_address_or_the_error_names_those_there_are() -> None:
    assert interface_address("lo") == LOCAL
    with pytest.raises(
        ConfigurationError, match=r"'eth77' has no IPv4 address here .*give one of .*lo"
    ):
        interface_address("eth77")


def test_hosts_are_missing_until_their_nodes_live() -> None:
    nodes = [{"NodeName": "algo-1", "Alive": True}, {"NodeName": "algo-2", "Alive": False}]
    assert missing_among(nodes, ["algo-1", "algo-2", "algo-3"]) == ["algo-2", "algo-3"]


# -- processes, failures ----------------------------------------------------------------------------


def test_a_program_is_a_script_or_a_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert command_of(str(script), ["--lr", "1"]) == [sys.executable, str(script), "--lr", "1"]
    assert command_of("sh", []) == [next(p for p in ("/usr/bin/sh", "/bin/sh") if Path(p).exists())]
    for program, said in (("none.py", "no such file"), ("no-such-command", "give a Python script")):
        with pytest.raises(ConfigurationError, match=said):
            command_of(program, [])


def test_no_descendant_is_left_not_even_a_daemon() -> None:
    program = """
        import os, signal, sys
        from steepest.places.sagemaker_processes import adopt_orphans, end_descendants
        adopt_orphans()
        reading, writing = os.pipe()
        if not (child := os.fork()):
            if not os.fork():  # a daemon, whose parent is gone
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.write(writing, b"x")
                signal.pause()
            os._exit(0)
        os.waitpid(child, 0)
        os.read(reading, 1)
        os.close(writing)
        end_descendants()
        print("left:", os.read(reading, 1))  # nothing, as nobody can write any more
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "left: b''\n"


IMMUNE = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("runs", flush=True)
signal.pause()
"""


class Node:
    """Stands for the leader's Ray node, which has died or not."""

    def __init__(self, dead: bool) -> None:
        self.dead = dead

    def require_alive(self) -> None:
        if self.dead:
            raise PeerLostError("the Ray node of this host ended")


@pytest.mark.long
@pytest.mark.parametrize("dead", [True, False])
def test_a_program_that_outlives_ray_or_ctrl_c_is_killed(
    monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    monkeypatch.setattr(sagemaker, "_WITHOUT_RAY_SECONDS", 0.0)
    monkeypatch.setattr(sagemaker, "_INTERRUPTED_SECONDS", 0.0)
    received = 0 if dead else signal.SIGINT
    here = argparse.Namespace(signals=argparse.Namespace(received=received))
    program = Program([sys.executable, "-c", IMMUNE], os.environ)
    assert sagemaker._wait_for(program, here, Node(dead)) == 128 + signal.SIGKILL  # type: ignore[arg-type]


def test_a_programs_errors_pass_through_and_the_last_ones_are_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = "import sys; sys.stderr.write('x' * 9000 + 'last'); sys.exit(7)"
    program = Program([sys.executable, "-c", code], os.environ)
    assert program.wait(SECONDS) == 7
    assert program.last_words() == "x" * 4092 + "last"
    assert capfd.readouterr().err == "x" * 9000 + "last"


def test_a_program_that_fails_is_told_with_its_status_and_last_words(
    base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (base / "train.py").write_text("import sys; sys.exit(f'so it is: {sys.argv[1:]}')")
    here = argparse.Namespace(
        options=options(str(base / "train.py"), arguments=["--lr", "1"]),
        signals=argparse.Namespace(received=0),
        job=argparse.Namespace(arguments=lambda: ["--epochs", "2"]),
        environment=lambda welcome: {},
    )
    told = sagemaker._run_program(here, Node(False), None)  # type: ignore[arg-type]
    words = "so it is: ['--lr', '1', '--epochs', '2']"
    assert told == (1, f"train.py ended with exit status 1\n{words}")
    assert words in capfd.readouterr().err


def test_a_failure_is_written_once_and_short(tmp_path: Path) -> None:
    path = tmp_path / "output" / "failure"
    reason = f"train.py ended with exit status 1\n{'frames ' * 1000}ValueError: so"
    sagemaker.write_failure(path, reason)
    written = path.read_text()
    assert len(written) == sagemaker.REASON_CHARACTERS == 1024
    assert written.startswith("train.py ended with exit status 1\n[...]\n")
    assert written.endswith("ValueError: so")
    sagemaker.write_failure(path, "another")
    assert path.read_text() == written


def options(program: str, **changed: object) -> argparse.Namespace:
    usual = {"arguments": [], "num_cpus": 1, "port": 6395, "join_timeout": 5.0}
    return argparse.Namespace(program=program, **(usual | changed))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"port": 0}, "--port 0: give one from 1 to 65534"),
        ({"join_timeout": 0.0}, "--join-timeout 0.0: give seconds above 0"),
        ({"num_cpus": -1}, "--num-cpus -1: give a count from 0"),
        ({"program": "none.py"}, "none.py: no such file"),
    ],
)
def test_wrong_options_are_a_failure_that_sagemaker_shows(
    base: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object], said: str
) -> None:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(base))
    with pytest.raises(ConfigurationError, match=said):
        sagemaker.run(argparse.Namespace(**(vars(options("sh")) | changed)))
    assert said in (base / "output" / "failure").read_text()


def test_an_interface_that_is_not_there_is_a_failure_and_leaves_signals_as_they_were(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(base))
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    assert main(["launch", "sagemaker", "sh", "-c", "true"]) == 1
    assert "SM_NETWORK_INTERFACE_NAME='eth7' has no IPv4 address" in capsys.readouterr().err
    assert "'eth7'" in (base / "output" / "failure").read_text()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_elsewhere_than_in_sagemaker_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    assert main(["launch", "sagemaker", "train.py"]) == 1
    assert "this does not look like a SageMaker training container" in capsys.readouterr().err
    with pytest.raises(ConfigurationError):
        sagemaker.job()
    assert not os.listdir(tmp_path)
