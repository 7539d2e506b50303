"""Jobs on processes of this machine, without Ray: weights, deaths, prints, a driver that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

import steepest
from steepest import DistributedSGD, RunConfig
from steepest.errors import ConfigurationError
from steepest.runtime.holders import hold
from steepest.runtime.job_runtime import using
from steepest.runtime.machine.runtime import MachineRuntime
from tests.processes import until
from tests.reference import Task, difference

TASK = Task()
STEPS = 8
CONFIG = RunConfig(runtime="processes")


@pytest.fixture(autouse=True, scope="module")
def own_runtime() -> Any:
    """One template for all tests here; the runtime of others is that of this process again afterwards."""
    machine = MachineRuntime()
    with using(machine):
        yield
    machine.close()


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
from steepest import DistributedSGD, RunConfig
from steepest.testing import linear_model_creator

with DistributedSGD(linear_model_creator(), 2, run_config=RunConfig(runtime="processes")) as sgd:
    sgd.step()
    print(*sgd.foreach_worker(lambda worker: worker.pid), "ray" in sys.modules, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_with_a_driver_that_is_killed_which_imports_no_ray() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert ended.returncode == -signal.SIGKILL
    *pids, ray = ended.stdout.split()
    assert ray == "False"
    until(lambda: not any(map(is_there, map(int, pids))))


def is_there(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_one_program_holds_jobs_of_one_runtime_at_a_time() -> None:
    with DistributedSGD(TASK.creator(), 1, run_config=CONFIG) as trainer:
        trainer.step()
        with pytest.raises(ConfigurationError, match="call shutdown\\(\\) of that before"):
            hold("another", "ray")
    with pytest.raises(ConfigurationError, match="runtime"):
        RunConfig(runtime="threads")
