"""Jobs on processes of this machine, without Ray: weights, deaths, prints, a driver that is killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import steepest
from steepest import DistributedSGD, ResourceConfig, RunConfig, TorchModel
from steepest.core.config.run import RUNTIMES
from steepest.errors import ConfigurationError, ResourcesError
from steepest.runtime.holders import Holder, hold
from steepest.runtime.job_runtime import chosen
from steepest.runtime.machine.runtime import MachineRuntime
from steepest.testing import linear_model_creator
from tests.processes import until
from tests.reference import Task, difference

TASK = Task()
STEPS = 8
CONFIG = RunConfig(runtime="processes")  # also where a Ray of other tests runs
pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.parametrize(
    ("strategy", "workers", "dies"), [("ps", 3, None), ("ps", 2, 1), ("allreduce", 2, 0)]
)
def test_weights_are_those_of_one_process(strategy: str, workers: int, dies: int | None) -> None:
    with DistributedSGD(TASK.creator(), workers, strategy=strategy, run_config=CONFIG) as trainer:
        trainer.fit(steps=3, progress=False)
        if dies is not None:
            os.kill(trainer.foreach_worker(lambda worker: worker.pid)[dies], signal.SIGKILL)
        trainer.fit(steps=STEPS - 3, progress=False)
        assert difference(trainer.weights(), TASK.train(workers, STEPS)) < 1e-12
        causes = [event.record for event in trainer.stats().events]
        assert ["killed by SIGKILL" in each for each in causes] == [True] * (dies is not None)


def test_a_loop_of_ones_own_prints_all_that_it_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        model = torch.nn.Linear(3, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(*TASK.data)
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        model, optimizer, loader = steepest.prepare(model, optimizer, loader)
        for epoch in steepest.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            print(f"epoch {epoch}")  # noqa: T201
        print("the end")  # noqa: T201

    steepest.run(train, num_workers=2, run_config=CONFIG, progress=False)
    lines = capfd.readouterr().out.splitlines()
    for worker in (0, 1):
        own = [line for line in lines if line.startswith(f"[worker {worker}] ")]
        assert own == [f"[worker {worker}] {each}" for each in ("epoch 0", "epoch 1", "the end")]
    assert len(lines) == 6


KILLED = """
import os, signal, sys
import numpy as np
from steepest import DistributedSGD, ParameterServer
from steepest.testing import linear_model_creator

def look(worker):
    import sys
    return worker.pid, "ray" in sys.modules

# no main module's guard
with DistributedSGD(linear_model_creator(), 2) as sgd, ParameterServer(np.zeros(3), 1) as server:
    server.push(np.ones(3))
    sgd.fit(steps=2, progress="lines")
    found = sgd.foreach_worker(look)
    print(*(pid for pid, _ in found), "ray" in sys.modules or any(ray for _, ray in found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
FIRST_LINE = "2 workers and 1 server on this machine; RAY_ADDRESS or ray.init() for a cluster\n"


@pytest.mark.long
def test_processes_end_with_a_driver_that_is_killed_which_imports_no_ray() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=100
    )
    assert ended.stderr.startswith(FIRST_LINE)
    assert ended.stderr.count("on this machine") == 1
    assert ended.returncode == -signal.SIGKILL
    *pids, ray = ended.stdout.split()
    assert ray == "False"
    until(lambda: not any(map(is_there, map(int, pids))))


def test_more_workers_than_cores_share_them_which_is_said_once(
    machine: MachineRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "total", lambda: {"CPU": 2.0, "GPU": 0.0})
    with DistributedSGD(TASK.creator(), 3, run_config=CONFIG) as trainer:
        for _ in range(2):
            trainer.fit(steps=1, progress="lines")
        assert difference(trainer.weights(), TASK.train(3, 2)) < 1e-12
    said = capsys.readouterr().err
    assert said.startswith(
        "3 workers and 1 server on the 2 cores of this machine, which they share; "
    )
    assert said.count("which they share") == 1


def test_which_runtime_auto_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert [chosen(name) for name in RUNTIMES] == ["processes", "ray", "processes"]
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert chosen("auto") == "processes"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert [chosen(name) for name in RUNTIMES] == ["ray", "ray", "processes"]
    monkeypatch.delenv("RAY_ADDRESS")
    for connected in (True, False):  # as in tasks, actors, Tune's trials
        ray = SimpleNamespace(is_initialized=lambda connected=connected: connected)
        monkeypatch.setitem(sys.modules, "ray", ray)
        assert chosen("auto") == ("ray" if connected else "processes")


@pytest.mark.parametrize("strategy", ["local", "async"])
def test_no_process_imports_torchs_compiler(strategy: str) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2)

    creator = linear_model_creator()

    def create(worker: int, device: int) -> Any:
        linear = creator(worker, device)
        return TorchModel(
            linear.module, loss=torch.nn.functional.mse_loss, data=TASK.data, batch_size=2,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
            lr_scheduler=None if strategy == "local" else schedule,
        )  # fmt: skip

    with DistributedSGD(create, 2, strategy=strategy, run_config=CONFIG) as trainer:
        trainer.step()
        found = trainer.foreach_worker(lambda worker: "torch._dynamo" in sys.modules)
        assert found == [False, False]


def test_a_program_that_holds_a_job_has_its_next_ones_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with DistributedSGD(TASK.creator(), 1, run_config=CONFIG):
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        with DistributedSGD(TASK.creator(), 1) as other:
            assert other.step().step == 1


def test_its_page_and_its_timeline_know_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepest.observe.page.server.chart_script", lambda: "var Plotly = {};")
    trace = tmp_path / "trace.json"
    with DistributedSGD(TASK.creator(), 2, run_config=CONFIG) as trainer:
        with trainer.timeline(trace):
            trainer.fit(steps=STEPS, progress=False)
        place, _, token = trainer.page().url.partition("#token=")
        asked = urllib.request.Request(f"{place}data", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            shown = json.load(answer)
        pids = {each.name: each.pid for each in trainer.processes()}
    assert shown["curves"]["step"] == list(range(1, STEPS + 1))
    assert {each["name"] for each in shown["processes"]} >= set(pids)
    names = [e["args"]["name"] for e in events_of(trace) if e["name"] == "process_name"]
    for name, pid in pids.items():
        assert f"{name} on 127.0.0.1 (pid {pid})" in names


def events_of(trace: Path) -> list[dict[str, Any]]:
    found = json.loads(trace.read_text())
    return list(found["traceEvents"] if isinstance(found, dict) else found)


def test_more_workers_than_cores_share_them_and_what_cannot_be_is_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    with DistributedSGD(TASK.creator(), 1, run_config=CONFIG) as trainer:
        trainer.fit(steps=3, progress=False)
        trainer.resize(cores + 1)
        assert trainer.step().samples == 2 * (cores + 1)
    with pytest.raises(ResourcesError, match="all that this machine has is .* with gpu=False"):
        DistributedSGD(TASK.creator(), 2, gpu=True, run_config=CONFIG)
    apart = RunConfig(runtime="processes", resources=ResourceConfig(serving_hosts=1))
    with pytest.raises(ResourcesError, match="this machine has 0 nodes without workers"):
        DistributedSGD(TASK.creator(), 2, run_config=apart)


def job_of_a_child() -> None:
    with DistributedSGD(TASK.creator(), 2, run_config=CONFIG) as trainer:
        trainer.fit(steps=STEPS, progress=False)
        assert difference(trainer.weights(), TASK.train(2, STEPS)) < 1e-12


@pytest.mark.long
def test_a_forked_child_has_jobs_of_its_own() -> None:
    with DistributedSGD(TASK.creator(), 1, run_config=CONFIG) as trainer:
        trainer.step()
        child = multiprocessing.get_context("fork").Process(target=job_of_a_child, daemon=True)
        child.start()
        child.join(100)
        assert child.exitcode == 0
        assert trainer.step().step == 2


def is_there(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_one_program_holds_jobs_of_one_runtime_at_a_time() -> None:
    with DistributedSGD(TASK.creator(), 1, run_config=CONFIG) as trainer:
        trainer.step()
        with pytest.raises(ConfigurationError, match="call shutdown\\(\\) of that before"):
            hold(Holder("another"), "ray")
    with pytest.raises(ConfigurationError, match="runtime"):
        RunConfig(runtime="threads")
