"""SageMaker's hosts as network namespaces, each with its own names, files and Ray; and one host as it is."""

from __future__ import annotations

import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.network_namespaces import until
from tests.sagemaker_hosts import ended, job_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]
namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and iproute2",
)


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
