"""SageMaker's hosts on this one: processes, or network namespaces with names of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.network_namespaces import ip
from tests.ray_hosts import AGENTS_SECONDS, ROOT, SECONDS, Place

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
