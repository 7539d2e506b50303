"""What a Ray that steepest starts is without, and how its workers begin."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import ray
from ray._private import node, ray_constants, services
from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
)

from steepest.runtime import no_agent, ray_private
from steepest.runtime.prefork import worker_start
from steepest.runtime.ray_private import small_ray

RAYS = Path(ray.__file__).parent / "_private" / "workers"
WORKER = str(RAYS / "default_worker.py")
PLAIN = ["--language=PYTHON", "--serialized-runtime-env-context={}"]


def test_what_is_left_out_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_constants, "SETUP_WORKER_FILENAME", "setup_worker.py")
    build = services._build_python_executable_command_memory_profileable
    own = node.Node.start_monitor, node.Node.start_api_server, build
    with small_ray():
        assert Path(ray_constants.SETUP_WORKER_FILENAME) == Path(worker_start.__file__)
        build = services._build_python_executable_command_memory_profileable
        assert not {node.Node.start_monitor, node.Node.start_api_server, build} & {*own}
    assert ray_constants.SETUP_WORKER_FILENAME == "setup_worker.py"
    build = services._build_python_executable_command_memory_profileable
    assert own == (node.Node.start_monitor, node.Node.start_api_server, build)


def test_a_ray_without_the_private_api_starts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(node.Node, "start_monitor")
    monkeypatch.delattr(services, "_build_python_executable_command_memory_profileable")
    with small_ray():
        assert not hasattr(node.Node, "start_monitor")
        assert node.Node.start_api_server(None, include_dashboard=False) is None


def test_a_program_that_another_has_set_up_workers_with_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_constants, "SETUP_WORKER_FILENAME", "/another.py")
    with small_ray():
        assert ray_constants.SETUP_WORKER_FILENAME == "/another.py"


def test_the_agent_alone_is_preceded_by_a_program(tmp_path: Path) -> None:
    with small_ray():
        build = services._build_python_executable_command_memory_profileable
        assert build("dashboard_agent", str(tmp_path)) == [sys.executable, no_agent.__file__]
        assert build("runtime_env_agent", str(tmp_path)) == [sys.executable, "-u"]
    assert ray_constants.PROCESS_TYPE_DASHBOARD_AGENT == ray_private._AGENT


def test_ports_are_written_where_a_raylet_reads_them(tmp_path: Path) -> None:
    one = "ab" * 28
    no_agent.write_ports(str(tmp_path), one)
    names = (
        METRICS_AGENT_PORT_NAME,
        METRICS_EXPORT_PORT_NAME,
        DASHBOARD_AGENT_LISTEN_PORT_NAME,
    )
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}_{one}" for name in names}
    assert {path.read_text() for path in tmp_path.iterdir()} == {"-1"}
    assert ray._raylet.wait_for_persisted_port(str(tmp_path), one, names[0], 1000, 10) == -1


def test_where_the_agent_has_something_to_serve_it_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []

    def execute(path: str, arguments: list[str]) -> None:
        started.extend((path, arguments))
        raise SystemExit

    monkeypatch.setattr(os, "execv", execute)
    with pytest.raises(SystemExit):
        no_agent.main(["agent.py", "--node-id=abc", "--head"])
    assert started == [
        sys.executable,
        [sys.executable, "-u", "agent.py", "--node-id=abc", "--head"],
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([WORKER, "--a=b", *PLAIN], [WORKER, "--a=b"]),
        (["-s", WORKER, "--language=PYTHON", "--a=b"], ["-s", WORKER, "--a=b"]),
        (
            [WORKER, '--serialized-runtime-env-context={"env_vars": {"A": "b"}}', PLAIN[0]],
            [
                str(RAYS / "setup_worker.py"),
                WORKER,
                '--serialized-runtime-env-context={"env_vars": {"A": "b"}}',
                PLAIN[0],
            ],
        ),
    ],
)
def test_a_worker_begins_at_once_unless_an_environment_is_asked_for(
    given: list[str], expected: list[str]
) -> None:
    assert worker_start.command(given) == expected
