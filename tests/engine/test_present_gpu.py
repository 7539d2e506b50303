"""Each thread in which user code runs has the GPU of its model for its own; a stand-in of CUDA notes which it has."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from steepest import DistributedSGD
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.model_building import build_models
from steepest.core.engine.replicas import Replicas, WorkShare
from steepest.core.tensors.layout import ChunkSpec
from steepest.errors import ConfigurationError
from steepest.loop.turns import Turns
from tests.core import models
from tests.simulation.run import Simulation, run_config


class Cuda:
    """Four GPUs, of which each thread has one, at first that of number 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chosen = threading.local()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
        monkeypatch.setattr(torch.cuda, "current_device", self.current)
        monkeypatch.setattr(torch.cuda, "set_device", self.set)

    def current(self) -> int:
        return getattr(self.chosen, "number", 0)

    def set(self, device: torch.device) -> None:
        self.chosen.number = device.index


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_a_function_that_takes_turns_has_the_gpu_of_the_thread_that_drives_it(cuda: Cuda) -> None:
    turns = Turns(cuda.current, "a user's function")
    cuda.set(torch.device("cuda", 2))
    assert turns.resume().result == 2


def test_each_replica_of_a_worker_computes_on_its_own_gpu(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def computing(model: Any) -> Any:
        compute = model.compute_gradients

        def noting(*arguments: Any) -> Any:
            found.append(cuda.current())
            return compute(*arguments)

        return noting

    made, _ = build_models(models.classifier, 0, 3, 0, ChunkSpec())
    for model in made:
        model.compute_gradients = computing(model)  # type: ignore[method-assign]
    gpus = [torch.device("cuda", number) for number in (1, 2, 3)]
    # the tensors stay in the memory of the host
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **_: tensor.clone())
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)
    monkeypatch.setattr(torch, "as_tensor", lambda value, device=None: torch.tensor(value))
    replicas = Replicas(made, gpus, WorkShare(0, 1, 0))
    assert cuda.current() == 1
    replicas.use_plan(SamplePlan(models.SAMPLES, 3 * models.BATCH, 0), 0)
    replicas.compute(0, lambda *_: True, False)
    assert found == [1, 2, 3]
    assert cuda.current() == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch sees a GPU")
def test_a_job_whose_workers_see_no_gpu_is_refused_and_leaves_no_process() -> None:
    simulation = Simulation(seed=1, gpus=8)
    with simulation.running():
        with pytest.raises(ConfigurationError, match=r"worker 0, worker 1: .* give gpu=False"):
            DistributedSGD(models.classifier, 2, gpu=True, run_config=run_config())
        simulation.settle()
        assert not simulation.living()
