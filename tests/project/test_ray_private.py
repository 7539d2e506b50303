"""Private API of Ray: in one file, with an error of ours where it moved; and the names that processes get by it."""

from __future__ import annotations

import inspect
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import steepest
from steepest import (
    Callback,
    DistributedSGD,
    Event,
    FailureConfig,
    ParameterServer,
    ParameterServerStrategy,
    RunConfig,
)
from steepest.core.messages.message import Peer
from steepest.errors import ConfigurationError
from steepest.runtime import ray_private
from tests.reference import Task, samples

TASK = Task(data=samples(3000), batch_size=1)


def test_one_module_uses_private_api_of_ray() -> None:
    package = Path(inspect.getfile(steepest)).parent
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"\bray\._(?!_version)|from ray import _|from ray\.\w*\._", path.read_text())
    }
    assert users == {"runtime/ray_private.py"}


def test_what_ray_has_no_more_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_private.check()
    monkeypatch.delattr("ray._private.worker._global_node")
    wanted = rf"Ray {re.escape(ray.__version__)} has no ray\._private\.worker\._global_node, .* tested with, 2\.60"
    for ask in (
        ray_private.check,
        ray_private.started_here,
        lambda: DistributedSGD(TASK.creator(), run_config=RunConfig(runtime="ray")),
    ):
        with pytest.raises(ConfigurationError, match=wanted):
            ask()


def test_without_rays_private_api_a_warning_says_that_sigterms_status_may_be_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("ray._raylet.raise_sys_exit_with_custom_error_message")
    ray_private.keep_exit_status.__wrapped__(143)
    assert "SIGTERM may end this program with exit status 1: Ray" in caplog.text


def test_the_tested_version_is_the_one_that_is_required() -> None:
    required = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"ray>={ray_private.TESTED}"' in required
    assert ray.__version__.startswith(ray_private.TESTED)


# -- names ------------------------------------------------------------------------------------------


def title(pid: int) -> tuple[str, str]:
    """What `ps` and `top` show of a process."""
    process = Path(f"/proc/{pid}")
    return (process / "cmdline").read_bytes().rstrip(b"\0").decode(), (
        process / "comm"
    ).read_text().rstrip()


def named(role: str, index: int) -> tuple[str, str]:
    return f"ray::steepest {role} {index}", f"ray::{role} {index}"


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
class TestNames:
    def test_processes_have_names(self) -> None:
        with DistributedSGD(
            TASK.creator(), num_workers=2, strategy=ParameterServerStrategy(num_servers=1)
        ) as trainer:
            trainer.fit(steps=3, progress=False)
            places = trainer._live().places
            assert len(places) == 3
            for peer, place in places.items():
                assert title(place.pid) == named(peer.role, peer.index)
                for log in place.logs:
                    assert f":actor_name:steepest {peer}\n" in Path(log).read_text(), (
                        "which Ray shows before each line"
                    )
            seen = trainer.foreach_worker(
                lambda view: Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode()
            )
            assert seen == ["ray::steepest worker 0", "ray::steepest worker 1"], (
                "also during a call"
            )

    def test_a_worker_that_gets_another_number_is_renamed(self) -> None:
        class Look(Callback):
            pids: list[int]
            seen: list[tuple[str, str]] | None = None

            def on_step(self, trainer: DistributedSGD, result: Any) -> None:
                if result.step == 5:
                    os.kill(self.pids[0], signal.SIGKILL)

            def on_event(self, trainer: DistributedSGD, event: Event) -> None:
                if event.kind == "left":
                    self.seen = [title(pid) for pid in self.pids[1:]]

        run_config = RunConfig(failure=FailureConfig(spares=0))
        with DistributedSGD(TASK.creator(), num_workers=3, run_config=run_config) as trainer:
            look = Look()
            look.pids = trainer.foreach_worker(lambda view: view.pid)
            while look.seen is None:
                trainer.fit(steps=50, callbacks=[look], progress=False)
            assert look.seen == [named("worker", 0), named("worker", 1)]
            log = trainer._live().places[Peer("worker", 0)].logs[0]
            assert ":actor_name:steepest worker 0\n" in Path(log).read_text()

    def test_the_servers_of_a_parameter_server_have_names(self) -> None:
        with ParameterServer(np.zeros(10), num_servers=2) as server:
            server.push(np.ones(10))
            pids = [
                process.pid
                for process in ray.get(
                    [actor.place.remote() for actor in server._access.servers.handles]
                )
            ]
            assert [title(pid) for pid in pids] == [named("server", 0), named("server", 1)]
