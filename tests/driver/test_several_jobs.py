"""Several jobs at once: trainers of one process, and programs on one cluster, keep out of each other's way."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from steepest import AllreduceStrategy, DistributedSGD, ParameterServerStrategy
from tests.living import pids
from tests.page_examples import run_block
from tests.reference import Task, difference, samples, sgd

FIRST = Task(optimizer=sgd(momentum=0.9))
SECOND = Task(optimizer=sgd(lr=0.05), data=samples(20))
STRATEGIES = {"ps": ParameterServerStrategy(num_servers=2), "allreduce": AllreduceStrategy()}

PROGRAM = """
import torch
from steepest import DistributedSGD, TorchModel

torch.manual_seed({seed})
x = torch.randn(64, 3)


def create(worker, device):
    return TorchModel(
        torch.nn.Linear(3, 1), loss=torch.nn.functional.mse_loss, data=(x, x.sum(1, keepdim=True)), batch_size=4,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )


with DistributedSGD(create, num_workers=2, seed={seed}) as sgd:
    for _ in range(20):
        sgd.fit(steps=5, progress=False)
    print("done", sgd.fit(steps=1, progress=False).step, len(sgd.processes()))
"""


def interleaved(first: DistributedSGD, second: DistributedSGD) -> None:
    """Each trains 8 steps, in turns, and is what one process would be."""
    for steps in (1, 2, 3, 2):
        first.fit(steps=steps, progress=False)
        second.fit(steps=steps, progress=False)
    assert difference(first.weights(), FIRST.train(2, 8)) < 1e-12
    assert difference(second.weights(), SECOND.train(1, 8)) < 1e-12


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_trainers_of_a_process(strategy: str) -> None:
    with (
        DistributedSGD(FIRST.creator(), 2, strategy=STRATEGIES[strategy]) as first,
        DistributedSGD(SECOND.creator(), 1, strategy="ps") as second,
    ):
        interleaved(first, second)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_death_in_one_job_is_none_of_the_others() -> None:
    with (
        DistributedSGD(FIRST.creator(), 2, strategy="ps") as first,
        DistributedSGD(SECOND.creator(), 1, strategy="ps") as second,
    ):
        before = pids(second)
        first.fit(steps=1, progress=False)
        os.kill(pids(first)[1], signal.SIGKILL)
        second.fit(steps=8, progress=False)
        first.fit(steps=7, progress=False)
        assert difference(first.weights(), FIRST.train(2, 8)) < 1e-12
        assert difference(second.weights(), SECOND.train(1, 8)) < 1e-12
        assert pids(second) == before


@pytest.mark.long
@pytest.mark.ray
def test_two_programs_on_a_cluster(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()

    def run(number: int) -> str:
        return run_block(PROGRAM.format(seed=number), folders[number], address)

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(run, range(2)))
    assert [line.split()[:2] for line in said] == [["done", "101"]] * 2
