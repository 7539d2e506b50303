"""Run a program inside a SageMaker training job: one host leads, the others join it.

`steepest launch sagemaker train.py` runs in the container of each host. The leader starts Ray, waits
for the others, and runs the program; the others stay until it has ended. Each host ends with the
program's exit status, and writes the reason of a failure where SageMaker looks for it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from steepest.errors import ConfigurationError, DeadlineError, PeerLostError, SteepestError
from steepest.places.sagemaker_hosts import Leader, follow, interface_address
from steepest.places.sagemaker_job import SageMakerJob, read_job
from steepest.places.sagemaker_processes import (
    SageMakerProgram,
    adopt_orphans,
    command_of,
    end_descendants,
    ray_lives,
    start_ray,
)

__all__ = ["Job", "add_arguments", "job", "run"]

Job = SageMakerJob  # its public name
log = logging.getLogger(__name__)
REASON_CHARACTERS = 1024  # of the failure file, which SageMaker reads
_LOOK_SECONDS = 0.5
_WITHOUT_RAY_SECONDS = 60.0  # that the program has after the leader's Ray node has died


def job() -> SageMakerJob:
    """Return the SageMaker job that this process is part of; to be called by the program.

    Raises:
        ConfigurationError: this is no SageMaker training container.
    """
    return read_job(os.environ)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of the command `steepest launch sagemaker`."""
    parser.add_argument("program", help="a Python script, or another command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    parser.add_argument("--num-cpus", type=int, help="of each host for Ray; as many as it has")
    parser.add_argument("--port", type=int, default=6379, help="of Ray; the next one is used too")
    parser.add_argument(
        "--join-timeout", type=float, default=900.0, help="seconds in which all hosts must join"
    )


def run(options: argparse.Namespace) -> int:
    """Lead or join, and return the exit status of the program, on every host.

    Raises:
        ConfigurationError: this is no SageMaker container, or an option is wrong.
        DeadlineError: hosts have not joined in time (named).
        PeerLostError: the leader died or has fallen silent, or a host's Ray could not start.
    """
    logging.basicConfig(level=logging.INFO, format="steepest: %(message)s")
    job = read_job(os.environ)
    try:
        _check(options)
        address = interface_address(job.interface)
        with _Signals() as signals, _directory(signals) as directory:
            deadline = time.monotonic() + options.join_timeout
            here = _Host(job, options, signals, directory, address, deadline)
            return _lead(here) if job.leads else _join(here)
    except SystemExit as stop:  # of a signal, which is no failure
        return int(stop.code or 0)
    except BaseException as error:
        write_failure(job.failure, str(error) or type(error).__name__)
        raise


def _check(options: argparse.Namespace) -> None:
    if not 0 < options.port < 65535:
        raise ConfigurationError(f"--port {options.port}: give one from 1 to 65534")
    if not options.join_timeout > 0:
        raise ConfigurationError(f"--join-timeout {options.join_timeout}: give seconds above 0")
    if options.num_cpus is not None and options.num_cpus < 0:
        raise ConfigurationError(f"--num-cpus {options.num_cpus}: give a count from 0")
    command_of(options.program, ())


def write_failure(path: Path, reason: str) -> None:
    """Write the reason of a failure, shortened, unless the program has written its own."""
    with contextlib.suppress(OSError):  # the reason is in the log, too
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or not path.stat().st_size:
            path.write_text(shortened(reason), encoding="utf-8")


def shortened(reason: str) -> str:
    """Return a reason in `REASON_CHARACTERS`: its first line, and its end."""
    if len(reason) <= REASON_CHARACTERS:
        return reason
    first = reason.splitlines()[0][: REASON_CHARACTERS // 4]
    mark = "\n[...]\n"
    return first + mark + reason[-(REASON_CHARACTERS - len(first) - len(mark)) :]


class _Signals:
    """SIGTERM and Ctrl-C: they end what waits, and are passed on to a program that runs."""

    def __init__(self) -> None:
        self.received = 0  # the last one's number, or 0
        self.program: SageMakerProgram | None = None  # to which they are passed on
        self.held = False  # whether they are noted only

    def __enter__(self) -> _Signals:
        self._before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        for each in self._before:
            signal.signal(each, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self.program is not None:
            self.program.send_signal(number)
        elif not self.held:
            raise SystemExit(128 + number)


@contextlib.contextmanager
def _directory(signals: _Signals) -> Iterator[Path]:
    """Yield a folder for Ray's files; at the end no process of this one, nor the folder, is left."""
    adopt_orphans()
    directory = Path(tempfile.mkdtemp(prefix="steepest-"))
    try:
        yield directory
    finally:
        signals.held = True
        end_descendants()
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class _Host:
    """This host: the values that its parts share."""

    job: SageMakerJob
    options: argparse.Namespace
    signals: _Signals
    directory: Path
    address: str
    deadline: float

    def environment(self, welcome: dict[str, str]) -> dict[str, str]:
        """Return the variables of Ray and of the program; they alone hold the token."""
        return {**self.job.variables(), **os.environ, **welcome}

    def start_ray(self, welcome: dict[str, str], *arguments: str) -> None:
        """Start this host's Ray node."""
        environment = self.environment(welcome)
        # workers import what lies beside the program, which each host has at the same place
        beside = str(Path(self.options.program).resolve().parent)
        paths = [beside, *environment.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        own = [f"--node-ip-address={self.address}", f"--node-name={self.job.host}", *arguments]
        if self.options.num_cpus is not None:
            own.append(f"--num-cpus={self.options.num_cpus}")
        start_ray(own, environment, self.directory, self.deadline)


# --- the leader ---


def _lead(here: _Host) -> int:
    """Start Ray, wait for the other hosts, run the program; tell them how it ended."""
    port, others = here.options.port, here.job.hosts[1:]
    welcome = {
        "RAY_ADDRESS": f"{here.address}:{port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    log.info("%s leads %d hosts, at %s", here.job.host, len(here.job.hosts), here.address)
    here.start_ray(welcome, "--head", f"--port={port}", "--include-dashboard=false")
    hosts = Leader(here.address, port + 1, others, welcome)
    status, reason = 1, f"{here.job.host}, which leads, has failed"
    try:
        _wait_for_all(here, hosts)
        status, reason = _run_program(here, welcome)
    except SystemExit as stop:
        status, reason = int(stop.code or 0), ""
    except BaseException as error:
        reason = str(error) or type(error).__name__
        raise
    finally:
        here.signals.held = True  # what is left is short
        hosts.end(status, reason)
    if reason:
        write_failure(here.job.failure, reason)
    return status


def _wait_for_all(here: _Host, hosts: Leader) -> None:
    """Return when all hosts are nodes of Ray.

    Raises:
        DeadlineError: hosts are missing, which it names. PeerLostError: a host could not join.
    """
    while missing := hosts.missing():
        if hosts.failed:
            failures = "; ".join(f"{host}: {why}" for host, why in hosts.failed.items())
            raise PeerLostError(f"not all hosts could join. {failures}")
        if time.monotonic() > here.deadline:
            raise DeadlineError(_who_is_missing(here, hosts.silent(), missing))
        time.sleep(_LOOK_SECONDS)
    log.info("all %d hosts have joined", len(here.job.hosts))


def _who_is_missing(here: _Host, silent: list[str], out: list[str]) -> str:
    late = [host for host in out if host not in silent]
    parts = [f"{', '.join(silent)} never asked" if silent else ""]
    parts += [f"{', '.join(late)} asked, but did not become a node of Ray" if late else ""]
    return (
        f"of {len(here.job.hosts)} hosts not all have joined {here.job.host} within "
        f"{here.options.join_timeout:g} s: {'; '.join(part for part in parts if part)}. "
        "See the logs of these hosts; --join-timeout gives them longer"
    )


def _run_program(here: _Host, welcome: dict[str, str]) -> tuple[int, str]:
    """Run the program to its end; return its exit status, and the reason if it has failed.

    Hosts that die on the way are the program's business; so are signals, which it gets. Hyperparameters are its
    arguments, unless SageMaker's toolkit has passed them already.
    """
    arguments = [] if "SM_USER_ARGS" in os.environ else here.job.arguments()
    command = command_of(here.options.program, [*here.options.arguments, *arguments])
    program = SageMakerProgram(command, {"PYTHONUNBUFFERED": "1", **here.environment(welcome)})
    here.signals.program = program
    try:
        status = _wait_for(program)
    finally:
        here.signals.held, here.signals.program = True, None
        program.kill()
    if status == 0 or here.signals.received:
        return status, ""
    return status, f"{program.name} ended with exit status {status}\n{program.last_words()}".strip()


def _wait_for(program: SageMakerProgram) -> int:
    """Return the program's status; it is killed if it outlives the leader's Ray node for long."""
    lived = time.monotonic()
    while (status := program.wait(_LOOK_SECONDS)) is None:
        if ray_lives():
            lived = time.monotonic()
        elif time.monotonic() > lived + _WITHOUT_RAY_SECONDS:
            log.error("the Ray node of this host has ended, and the program runs on: it is killed")
            program.kill()
    return status


# --- the others ---


def _join(here: _Host) -> int:
    """Join the leader's Ray, and stay until the leader has ended; return its exit status."""
    job = here.job
    leader = follow(job.leader, here.options.port + 1, here.address, here.deadline)
    with contextlib.closing(leader):
        try:
            here.start_ray(leader.welcome, f"--address={leader.welcome['RAY_ADDRESS']}")
        except SteepestError as error:
            leader.fail(str(error))
            raise
        leader.joined()
        log.info("%s has joined %s", job.host, job.leader)
        # SageMaker stops all hosts at once: the leader's program wants them for its checkpoint
        here.signals.held = True
        while (ended := leader.poll(_LOOK_SECONDS)) is None:
            if here.signals.received == signal.SIGINT:
                return 130
    status, reason = ended
    if reason:
        log.error("%s: %s", job.leader, reason)
        write_failure(job.failure, f"{job.leader}: {reason}")
    return status
