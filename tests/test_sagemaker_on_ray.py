"""SageMaker's hosts as network namespaces, each with its own names, files and Ray; and one host as it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.test_nodes import ip, until
from tests.test_ray_places import AGENTS_SECONDS, ROOT, SECONDS, Place

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]
namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and iproute2",
)
PROGRAM = Path(__file__).with_name("sagemaker_program.py")
NAMES = Path("/etc/netns")  # of which `ip netns exec` mounts a namespace's own /etc/hosts
ENTRY = Path(__file__).with_name("sagemaker_entry.py")
DIRECT = (sys.executable, str(ENTRY), "launch", "sagemaker", "--num-cpus", "1")


class Host:
    """A container of SageMaker's: a folder such as /opt/ml, and a network of its own unless it is alone."""

    def __init__(self, place: Place, name: str, count: int) -> None:
        self.place, self.name = place, name
        self.started: list[subprocess.Popen[str]] = []
        self.base = place.directory / name
        self.space = f"sp{place.mark[:6]}{name}" if count > 1 else ""
        hosts = sorted(f"algo-{i + 1}" for i in range(count))
        config = self.base / "input" / "config"
        config.mkdir(parents=True)
        (self.base / "code").mkdir()
        (self.base / "output").mkdir()
        interface = "eth0" if count > 1 else "lo"
        resources = {
            "current_host": name, "hosts": hosts, "network_interface_name": interface,
            "current_instance_type": "ml.m5.large", "current_instance_group": "homogeneousCluster",
            "instance_groups": [],
        }  # fmt: skip
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        (config / "inputdataconfig.json").write_text('{"train": {"TrainingInputMode": "File"}}')
        self.tell({})
        shutil.copy(PROGRAM, self.base / "code" / "train.py")

    def tell(self, hyperparameters: dict[str, object]) -> None:
        """Sets the job's hyperparameters, as SageMaker encodes them."""
        told = {name: json.dumps(value) for name, value in hyperparameters.items()}
        (self.base / "input" / "config" / "hyperparameters.json").write_text(json.dumps(told))

    def start(self, *command: str) -> subprocess.Popen[str]:
        inside = ("ip", "netns", "exec", self.space) if self.space else ()
        self.place.environment["SAGEMAKER_BASE_DIR"] = str(self.base)
        self.started.append(self.place.start(*inside, *command))
        return self.started[-1]

    def direct(self, *options: str) -> subprocess.Popen[str]:
        """Runs the program by the entry point alone, as PID 1 would."""
        return self.start(*DIRECT, *options, str(self.base / "code" / "train.py"))

    def toolkit(self, *command: str) -> subprocess.Popen[str]:
        """Runs it as SageMaker's toolkit does, which starts a script of the folder of the code."""
        script = self.base / "code" / "start.sh"
        script.write_text(f'#!/bin/sh\nexec {" ".join(command or DIRECT)} train.py "$@"\n')
        script.chmod(0o755)
        self.place.environment["SAGEMAKER_PROGRAM"] = script.name
        return self.start(
            sys.executable, "-c", "from sagemaker_training.cli.train import main; main()"
        )

    def failure(self) -> str:
        path = self.base / "output" / "failure"
        return path.read_text() if path.exists() else ""

    def pids(self) -> list[int]:
        done = subprocess.run(
            ["ip", "netns", "pids", self.space], check=True, capture_output=True, timeout=20
        )
        return [int(pid) for pid in done.stdout.split()]

    def kill(self) -> None:
        """Ends all of its processes at once, as a host that is taken away; those too that one starts meanwhile."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Hosts(list[Host]):
    """The hosts of a job; those of several reach each other by names that are known late."""

    def __init__(self, place: Place, count: int) -> None:
        super().__init__(Host(place, f"algo-{i + 1}", count) for i in range(count))
        place.environment["TRAINING_JOB_NAME"] = "a-job"
        place.environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'examples'}"
        for name, value in (("initial_delay", 1000), ("period", 1000), ("timeout", 4000)):
            place.environment[f"RAY_health_check_{name}_ms"] = str(value)
        place.environment["RAY_health_check_failure_threshold"] = "3"
        place.environment["TMPDIR"] = str(place.directory)
        if "STEEPEST_DATA" in os.environ:
            place.environment["STEEPEST_DATA"] = os.environ["STEEPEST_DATA"]
        if count == 1:  # a name of its own that need not resolve, for the toolkit
            place.environment["SM_STUDIO_LOCAL_MODE"] = "true"
        self.switch = f"sp{place.mark[:6]}s"
        if count > 1:
            self._connect()

    def _connect(self) -> None:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for index, host in enumerate(self):
            ip("netns", "add", host.space)
            peer = ("peer", "name", f"port{index}", "netns", self.switch)
            ip("link", "add", "eth0", "netns", host.space, "type", "veth", *peer)
            ip("-n", host.space, "addr", "add", f"10.213.6.{index + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.space, "link", "set", device, "up")
            ip("-n", self.switch, "link", "set", f"port{index}", "master", "bridge", "up")
            (NAMES / host.space).mkdir(parents=True)
            (NAMES / host.space / "hosts").write_text("127.0.0.1 localhost\n")

    def resolve(self) -> None:
        """From now on the names resolve."""
        for host in self:
            with (NAMES / host.space / "hosts").open("a") as file:
                file.writelines(f"10.213.6.{i + 1} {each.name}\n" for i, each in enumerate(self))

    def close(self) -> None:
        for process in (process for host in self for process in host.started):
            if process.returncode is None:
                process.communicate(timeout=20)
        for space in (host.space for host in self):
            if space:
                shutil.rmtree(NAMES / space, ignore_errors=True)
                subprocess.run(
                    ["ip", "netns", "delete", space], check=False, capture_output=True, timeout=20
                )
        subprocess.run(
            ["ip", "netns", "delete", self.switch], check=False, capture_output=True, timeout=20
        )


@contextlib.contextmanager
def job_of(count: int) -> Iterator[Hosts]:
    """That many hosts; at the end no process of theirs is left, and none of Ray's folders."""
    place = Place()
    made = None
    try:
        made = Hosts(place, count)
        yield made
        assert place.left_after(AGENTS_SECONDS) == {}
        assert list(place.directory.glob("steepest-*")) == []
    finally:
        place.kill()
        if made is not None:
            made.close()
        shutil.rmtree(place.directory, ignore_errors=True)


def ended(process: subprocess.Popen[str], status: int) -> str:
    """The rest of its output, once it has ended with that status."""
    with process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == status, output
    return output


@pytest.mark.full
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=[namespaces, pytest.mark.full])])
def test_sigterm_leaves_a_checkpoint_from_which_the_next_run_continues(count: int) -> None:
    with job_of(count) as hosts:
        for host in hosts:
            host.tell({"wait-at": 4})
        running = [host.direct("--port", "6395") for host in hosts]
        if count > 1:
            until(running[0].stdout, "leads 2 hosts")
            hosts.resolve()
        until(running[0].stdout, "waiting at step 4")
        for process in reversed(running):  # as SageMaker stops a job: all hosts
            process.send_signal(signal.SIGTERM)
        for process in running:
            ended(process, 143)
        assert [host.failure() for host in hosts] == [""] * count  # an interruption is none
        running = [host.direct("--port", "6395") for host in hosts]
        output, *_ = [ended(process, 0) for process in running]
        assert f"on algo-1 of {count}" in output
        assert "'train':" in output
        assert "'wait-at': 4" in output
        assert "from step 4\nto step 10\n" in output
        assert "the weights of an uninterrupted run" in output
        assert (hosts[0].base / "model" / "manifest.json").exists()
        assert [host.failure() for host in hosts] == [""] * count


@pytest.mark.full
@namespaces
def test_training_goes_on_when_a_host_dies() -> None:
    with job_of(3) as hosts:
        for host in hosts:
            host.tell({"lost": 1})
        hosts.resolve()
        by_toolkit = find_spec("sagemaker_training") is not None
        running = [host.toolkit() if by_toolkit else host.direct() for host in hosts]
        seen = until(running[0].stdout, "twenty steps")
        assert "all 3 hosts have joined" in seen
        hosts[2].kill()
        output = ended(running[0], 0)
        assert "algo-3 is gone" in output
        assert "to step" in output
        ended(running[1], 0)
        assert [host.failure() for host in hosts[:2]] == ["", ""]
        assert (hosts[0].base / "model" / "manifest.json").exists()
        assert (hosts[0].base / "output" / "success").exists() == by_toolkit
        shutil.rmtree(next(hosts[0].place.directory.glob("steepest-*")))  # of the killed one


@pytest.mark.full
@namespaces
def test_all_hosts_end_with_the_programs_status_and_reason() -> None:
    with job_of(2) as hosts:
        for host in hosts:
            host.tell({"fail": 3})
        hosts.resolve()
        for process in [host.direct() for host in hosts]:
            ended(process, 3)
        reason = "train.py ended with exit status 3\nthe reason is this"
        assert [host.failure() for host in hosts] == [reason, f"algo-1: {reason}"]


@pytest.mark.full
@namespaces
def test_a_host_that_never_joins_is_named() -> None:
    with job_of(3) as hosts:
        hosts.resolve()
        running = [host.direct("--join-timeout", "15") for host in hosts[:2]]
        said = "of 3 hosts not all have joined algo-1 within 15 s: algo-3 never asked"
        assert said in ended(running[0], 1)
        assert said in hosts[0].failure()
        assert said in ended(running[1], 1)
        assert hosts[1].failure().startswith(f"algo-1: {said}")


@pytest.mark.full
@namespaces
def test_hosts_whose_leader_dies_end_with_an_error() -> None:
    with job_of(2) as hosts:
        for host in hosts:
            host.tell({"wait-at": 1})
        hosts.resolve()
        running = [host.direct() for host in hosts]
        until(running[0].stdout, "waiting at step 1")
        hosts[0].kill()
        assert "algo-1, which leads, is gone" in ended(running[1], 1)
        assert "algo-1, which leads, is gone" in hosts[1].failure()
        shutil.rmtree(next(hosts[0].place.directory.glob("steepest-*")))


@pytest.mark.full
def test_ctrl_c_ends_the_program_and_ray() -> None:
    with job_of(1) as hosts:
        hosts[0].tell({"wait-at": 2})
        running = hosts[0].direct("--port", "6395")
        until(running.stdout, "waiting at step 2")
        running.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in ended(running, 130)
        assert hosts[0].failure() == ""


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_program_runs_ends_the_wait(number: int) -> None:
    with job_of(1) as hosts:
        running = hosts[0].direct("--port", "6395")
        until(running.stdout, "leads 1 hosts")
        running.send_signal(number)
        assert "waiting" not in ended(running, 128 + number)
        assert hosts[0].failure() == ""
