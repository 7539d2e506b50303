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
from steepest.errors import ConfigurationError, DeadlineError, PeerLostError
from steepest.places import sagemaker, sagemaker_hosts, sagemaker_processes
from steepest.places.sagemaker_hosts import Follower, Leader, follow, interface_address
from steepest.places.sagemaker_job import in_natural_order, read_job
from steepest.places.sagemaker_processes import SageMakerProgram, command_of, ray_lives, start_ray

ROOT = Path(__file__).resolve().parents[2]
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
    expected |= {"SM_HOSTS": '["b-9", "b-10"]', "SM_HP_NAME": "7"}
    assert job.variables().items() >= expected.items()


def test_a_program_of_script_mode_finds_the_variables_that_it_reads(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/places/test_sagemaker_toolkit.py compares them with the toolkit's own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: H200\necho GPU 1: H200\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    found = read_job({"SAGEMAKER_BASE_DIR": str(base)}).variables()
    assert found["SM_NUM_GPUS"] == "2"
    assert found["SM_NUM_CPUS"] == str(os.cpu_count())
    assert found["SM_INPUT_DIR"] == str(base / "input")
    assert found["SM_INPUT_CONFIG_DIR"] == str(base / "input" / "config")
    assert found["SM_OUTPUT_DIR"] == str(base / "output")
    assert found["SM_OUTPUT_INTERMEDIATE_DIR"] == str(base / "output" / "intermediate")
    assert (found["SM_HP_LR"], found["SM_HP_PLAIN"]) == ("0.5", "sgd")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert read_job({"SAGEMAKER_BASE_DIR": str(base)}).variables()["SM_NUM_GPUS"] == "0"


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

WELCOME = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_TOKEN": "secret"}
ADDRESSES = {"algo-2": {"127.0.0.2"}, "algo-10": {"127.0.0.10"}}


@pytest.fixture
def leader() -> Iterator[Leader]:
    """Listens for algo-2 and algo-10, both of this machine."""
    made = Leader(LOCAL, 0, tuple(ADDRESSES), WELCOME, ADDRESSES.__getitem__)
    try:
        yield made
    finally:
        made.end(0, "")


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sagemaker_hosts, "addresses_of", lambda host: {LOCAL})
    monkeypatch.setattr(sagemaker_hosts, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(sagemaker_hosts, "PARTING_SECONDS", 0.2)  # as both ends are here


def soon() -> float:
    return time.monotonic() + SECONDS


def until(happened: Callable[[], object]) -> None:
    deadline = soon()
    while not happened():
        assert time.monotonic() < deadline


def ask(leader: Leader, host: str, deadline: float | None = None) -> Follower:
    (own,) = ADDRESSES[host]
    return follow("algo-1", leader.port, own, deadline or soon())


def test_hosts_join_get_the_welcome_and_hear_the_end(leader: Leader) -> None:
    assert leader.silent() == leader.missing() == ["algo-2", "algo-10"]
    hosts = [ask(leader, each) for each in ("algo-10", "algo-2")]
    assert [host.welcome for host in hosts] == [WELCOME] * 2
    until(lambda: leader.silent() == [])
    hosts[0].joined()
    until(lambda: leader.missing() == ["algo-2"])
    hosts[1].joined()
    until(lambda: leader.missing() == [])
    assert hosts[0].poll(0.01) is None
    leader.end(3, "train.py ended with exit status 3")
    for host in hosts:
        assert host.poll(SECONDS) == (3, "train.py ended with exit status 3")
        host.close()


def test_a_host_that_is_gone_is_missing_and_may_come_again(leader: Leader) -> None:
    for _ in range(2):
        host = ask(leader, "algo-2")
        host.joined()
        until(lambda: leader.missing() == ["algo-10"])
        host.close()
        until(lambda: leader.missing() == leader.silent() == ["algo-2", "algo-10"])


def test_a_host_that_cannot_join_says_why(leader: Leader) -> None:
    host = ask(leader, "algo-2")
    host.fail("no disk")
    until(lambda: leader.failed)
    assert leader.failed == {"algo-2": "no disk"}
    host.close()


def test_a_stranger_learns_nothing(leader: Leader) -> None:
    with socket.create_connection((LOCAL, leader.port), SECONDS) as link:
        assert link.recv(100) == b""
    said = f"could not reach algo-1, which leads, in time: {LOCAL}:{leader.port}: "
    with pytest.raises(DeadlineError, match=said):
        follow("algo-1", leader.port, "127.0.0.3", time.monotonic() + 0.3)
    assert leader.silent() == ["algo-2", "algo-10"]


def test_each_name_is_looked_up_until_it_resolves() -> None:
    asked = []

    def resolve(host: str) -> set[str]:
        asked.append(host)
        return ADDRESSES[host] if len(asked) > 2 else set()

    leader = Leader(LOCAL, 0, ("algo-2",), WELCOME, resolve)
    try:
        for _ in range(2):
            ask(leader, "algo-2").close()
    finally:
        leader.end(0, "")
    assert len(asked) == 3


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\n", b"[]\n", b"x" * 20_000])
def test_noise_closes_its_own_connection_alone(leader: Leader, sent: bytes) -> None:
    host = ask(leader, "algo-2")
    own = (*ADDRESSES["algo-10"], 0)
    with socket.create_connection((LOCAL, leader.port), SECONDS, source_address=own) as link:
        link.sendall(sent)
        with contextlib.suppress(ConnectionResetError):  # it has not read all
            while link.recv(100):
                pass
    assert host.poll(0.01) is None
    host.close()


def test_a_leader_whose_name_does_not_resolve_is_waited_for(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: Iterator[set[str]] = iter([set(), set()])
    monkeypatch.setattr(sagemaker_hosts, "addresses_of", lambda host: next(answers, {LOCAL}))
    ask(leader, "algo-2").close()
    assert list(answers) == []
    monkeypatch.setattr(sagemaker_hosts, "addresses_of", lambda host: set())
    with pytest.raises(DeadlineError, match="could not reach algo-1.*its name does not resolve"):
        ask(leader, "algo-2", time.monotonic() + 0.2)


@pytest.mark.parametrize("sent", [b"", b"{]\n", b"{}\n", b'{"ended": 0, "rea'])
def test_a_leader_that_dies_or_talks_nonsense_is_an_error(sent: bytes) -> None:
    with socket.create_server((LOCAL, 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with theirs:
        theirs.sendall(json.dumps(WELCOME).encode() + b"\n" + sent)
        host = Follower("algo-1", mine)
    with pytest.raises(PeerLostError, match="algo-1, which leads, is gone"):
        host.poll(SECONDS)
    host.fail("too late")  # nobody hears it, which is no error
    host.close()


def test_what_is_not_the_leader_of_a_job_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Leader(LOCAL, 0, ("algo-2",), {"other": "service"}, ADDRESSES.__getitem__)
    try:
        with pytest.raises(DeadlineError, match="what answers is not the leader of a job"):
            ask(other, "algo-2", time.monotonic() + 0.3)
    finally:
        other.end(0, "")


def test_a_port_in_use_is_named(leader: Leader) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot listen at {LOCAL}:{leader.port}"):
        Leader(LOCAL, leader.port, (), WELCOME)


def test_an_interface_has_an_address_or_the_error_names_those_there_are() -> None:
    assert interface_address("lo") == LOCAL
    with pytest.raises(
        ConfigurationError, match=r"'eth77' has no IPv4 address here .*give one of .*lo"
    ):
        interface_address("eth77")


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


@pytest.mark.long
def test_a_program_that_outlives_ray_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sagemaker, "_WITHOUT_RAY_SECONDS", 0.0)
    program = SageMakerProgram([sys.executable, "-c", IMMUNE], os.environ)
    assert sagemaker._wait_for(program) == 128 + signal.SIGKILL


def test_ray_lives_as_long_as_its_raylet(tmp_path: Path) -> None:
    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/sleep")  # a process' name is that of its file
    assert not ray_lives()
    with subprocess.Popen([raylet, "60"]) as process:
        assert ray_lives()
        process.kill()
        until(lambda: not ray_lives())  # though nobody has waited for it


@pytest.mark.parametrize(
    ("then", "seconds", "kind"),
    [("exit 3", SECONDS, PeerLostError), ("exec sleep 60", 0.5, DeadlineError)],
)
def test_a_ray_that_does_not_start_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    then: str,
    seconds: float,
    kind: type[Exception],
) -> None:
    monkeypatch.setattr(sagemaker_processes, "_RAY", ("sh", "-c", f"echo no disk; {then}"))
    with pytest.raises(kind, match=r"Ray did not start.*: no disk"):
        start_ray([], os.environ, tmp_path, time.monotonic() + seconds)


def test_a_programs_errors_pass_through_and_the_last_ones_are_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = "import sys; sys.stderr.write('x' * 9000 + 'last'); sys.exit(7)"
    program = SageMakerProgram([sys.executable, "-c", code], os.environ)
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
    told = sagemaker._run_program(here, {})  # type: ignore[arg-type]
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
