"""Where GPUs add gradients up themselves, weights and state lie on them: nothing of a step passes through the host."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import steepest
from steepest import AllreduceStrategy, DistributedSGD
from steepest.core.messages.driver import Failure
from steepest.core.tensors.memory import fill
from steepest.strategies.process_groups.extension import ProcessGroups
from steepest.testing import InProcessCluster, replay
from tests import own_loops
from tests.core.models import struck
from tests.gpu import models, strict_device
from tests.group_members import weights
from tests.inside import replicas_of
from tests.jobs_on_processes import trained as trained_on_processes
from tests.modes import Moody, check, make, trained
from tests.own_loop_runs import Kills
from tests.reference import Task, Weights, difference, perceptron, same_bits, samples
from tests.simulation.run import Simulation, run_config
from tests.standing_in_for_nccl import StandInGroups
from tests.table_tasks import table_task

needs_device = pytest.mark.skipif(
    models.DEVICE == "cuda" and not torch.cuda.is_available(),
    reason="needs a GPU that torch can use, or c++ and ninja for a device that stands for one",
)
needs_strict = pytest.mark.skipif(
    models.DEVICE != strict_device.NAME, reason="needs what stands for a GPU and counts its copies"
)
pytestmark = needs_device

#: on GPUs, and the same on CPUs
ON_GPUS: dict[bool, tuple[AllreduceStrategy, AllreduceStrategy]] = {
    sharded: (
        AllreduceStrategy(data_plane="nccl", sharded=sharded, chunk_bytes=64),
        AllreduceStrategy(data_plane="gloo", sharded=sharded, chunk_bytes=64),
    )
    for sharded in (False, True)
}
BOTH = pytest.mark.parametrize("sharded", [False, True])


def as_on_cpus(found: Weights, expected: Weights) -> bool:
    """Whether a GPU has found what CPUs do: to the bit where what stands for one computes with their kernels."""
    if models.DEVICE == "cuda":
        return difference(found, expected) < 1e-10
    return same_bits(found, expected)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with tensors and a count in its state."""
    return torch.optim.Adam(module.parameters(), lr=0.05)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several batches": {"accumulate": 2},
    "several models": {"devices": 2},
    "clipped": {"settings": {"clip_norm": 0.1}},
    "passed": {"settings": {"nonfinite": "pass"}},
}


@BOTH
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_training_is_as_on_cpus_and_explained_by_its_log(
    name: str, workers: int, *, sharded: bool
) -> None:
    task, settings = Task(optimizer=adam), {"settings": {}, **SETTINGS[name]}
    jobs = [
        make(
            "groups", task, workers, device=device,
            **{**settings, "settings": {**settings["settings"], "data_plane": plane, "sharded": sharded}},
        )
        for device, plane in ((models.DEVICE, "nccl"), ("cpu", "gloo"))
    ]  # fmt: skip
    for job in jobs:
        trained(job, 7)
    assert as_on_cpus(jobs[0].weights(), jobs[1].weights())
    check(jobs[0], task)


@BOTH
@pytest.mark.parametrize("workers", [1, 3])
def test_rows_of_tables_go_to_their_servers_beside_it(workers: int, *, sharded: bool) -> None:
    jobs = [
        make(
            "groups",
            table_task(),
            workers,
            device=device,
            settings={"data_plane": plane, "sharded": sharded},
        )
        for device, plane in ((models.DEVICE, "nccl"), ("cpu", "gloo"))
    ]
    for job in jobs:
        trained(job, 5)
    assert as_on_cpus(jobs[0].weights(), jobs[1].weights())


@BOTH
def test_weights_gradients_and_state_lie_on_the_gpu(*, sharded: bool) -> None:
    job = make(
        "groups", Task(optimizer=adam), 2, device=models.DEVICE,
        settings={"data_plane": "nccl", "sharded": sharded},
    )  # fmt: skip
    trained(job, 3)
    for server, worker in zip(job.servers, job.workers, strict=True):
        replicas = replicas_of(worker)
        module = replicas.models[0].module  # type: ignore[attr-defined]
        assert {each.device.type for each in module.parameters()} == {models.DEVICE}
        assert replicas.weights.device.type == models.DEVICE
        for held in server.chunks.values():
            assert (
                held.weights.untyped_storage().data_ptr()
                == replicas.weights.untyped_storage().data_ptr()
            )
            states = held._optimizer.state.values() if held._optimizer is not None else ()  # type: ignore[attr-defined]
            for state in states:
                assert state["exp_avg"].device.type == models.DEVICE


@needs_strict
@BOTH
def test_no_gradient_and_no_weight_passes_through_the_host(*, sharded: bool) -> None:
    strategy = AllreduceStrategy(data_plane="nccl", sharded=sharded)
    job = InProcessCluster(
        models.classifier, num_workers=2, strategy=strategy, device=models.DEVICE
    )
    trained(job, 2)
    steps, size = 5, job.job.description.layout.nbytes
    with strict_device.copied() as found:
        trained(job, steps)
    # a batch, its loss, and of each chunk whether it is finite, and who has a gradient of it
    assert found.to_host < steps * 2 * 512
    assert found.to_device < steps * 2 * 4096
    assert size > 100_000
    through = InProcessCluster(
        models.classifier, num_workers=2, strategy=AllreduceStrategy(), device=models.DEVICE
    )
    with strict_device.copied() as found:
        trained(through, steps)
    assert found.to_host > steps * 2 * 0.99 * size
    assert found.to_device > steps * 2 * 0.99 * size


@needs_strict
@pytest.mark.parametrize("name", ["ps", "async", "ssp", "allreduce"])
def test_a_worker_alone_has_all_on_its_gpu_and_gives_it_up_where_others_join(name: str) -> None:
    def train(*, gpu: bool) -> tuple[Weights, int]:
        with (
            Simulation(seed=1, gpus=8 if gpu else 0).running(),
            DistributedSGD(
                models.classifier, 1, strategy=name, gpu=gpu, run_config=run_config()
            ) as trainer,
        ):
            trainer.fit(steps=2, progress=False)
            with strict_device.copied() as found:
                trainer.fit(steps=5, progress=False)
            trainer.resize(2)
            trainer.fit(steps=3, progress=False)
            trainer.resize(1)
            trainer.fit(steps=3, progress=False)
            return trainer.weights(), found.to_host

    (weights, passed), (expected, _) = train(gpu=True), train(gpu=False)
    assert passed < 5 * 512
    if name in ("ps", "allreduce"):  # others depend on who comes first
        assert same_bits(weights, expected)


@BOTH
def test_a_gradient_that_is_not_finite_is_refused_by_name_or_left_out(*, sharded: bool) -> None:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if spoilt else gradient

    task, plane = Task(lambda: Moody(spoil), adam), {"data_plane": "nccl", "sharded": sharded}
    for nonfinite in ("refuse", "skip"):
        spoilt = False
        job = make(
            "groups", task, 2, device=models.DEVICE, settings={**plane, "nonfinite": nonfinite}
        )
        trained(job, 2)
        before, spoilt = job.weights(), True
        (result,) = job.step(1)
        if nonfinite == "refuse":
            assert isinstance(result, Failure)
            assert (0, "first.weight") in result.culprits
            assert (1, "first.weight") in result.culprits
        assert same_bits(job.weights(), before)
        spoilt = False
        trained(job, 2)


class Both(nn.Module):
    """Layers in two dtypes, of which chunks have one each, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).float()).double()


def over(
    strategies: Sequence[AllreduceStrategy],
    task: Task,
    steps: int,
    kill: int | None = None,
    *,
    gpu: bool,
) -> tuple[Weights, list[str]]:
    """What a simulated job of three workers comes to, that has each strategy for some steps; one may be killed."""
    simulation = Simulation(seed=1, gpus=8 if gpu else 0)
    kills = [] if kill is None else [Kills(simulation, kill, 4)]
    config = run_config(keep_log=True)
    with (
        simulation.running(),
        DistributedSGD(
            task.creator(), 3, strategy=strategies[0], gpu=gpu, run_config=config
        ) as trainer,
    ):
        for strategy in strategies:
            if strategy is not trainer.strategy:
                trainer.set_strategy(strategy)
            trainer.fit(steps=steps, progress=False, callbacks=kills)
        assert difference(replay(trainer.log(), task.creator()), trainer.weights()) < 1e-6
        return trainer.weights(), [event.kind for event in trainer.stats().events]


needs_gpu_of_simulation = pytest.mark.skipif(
    models.DEVICE == "cpu", reason="a simulated job has a GPU, or what stands for one"
)


@needs_gpu_of_simulation
@BOTH
@pytest.mark.parametrize("victim", [None, 0, 1])
@pytest.mark.parametrize("module", [perceptron, Both])
def test_a_death_leaves_what_it_does_on_cpus(
    module: Any, victim: int | None, *, sharded: bool
) -> None:
    task = Task(module, adam, samples(50))
    found, expected = (
        over([strategy], task, 12, victim, gpu=gpu)
        for strategy, gpu in zip(ON_GPUS[sharded], (True, False), strict=True)
    )
    assert as_on_cpus(found[0], expected[0])
    assert found[1] == expected[1]
    assert bool(found[1]) == (victim is not None)


@needs_gpu_of_simulation
@BOTH
def test_the_state_comes_to_gpus_and_goes_from_them_where_the_strategy_changes(
    *, sharded: bool
) -> None:
    task = Task(optimizer=adam, data=samples(50))
    own = AllreduceStrategy(chunk_bytes=64)
    runs = [
        over([own, strategy, own, strategy], task, 3, gpu=gpu)
        for strategy, gpu in zip(ON_GPUS[sharded], (True, False), strict=True)
    ]
    assert as_on_cpus(runs[0][0], runs[1][0])


@needs_gpu_of_simulation
@BOTH
def test_what_a_gpu_saves_is_restored_without_one_and_the_other_way(
    *, sharded: bool, tmp_path: Path
) -> None:
    task = Task(optimizer=adam, data=samples(50))
    there, here = ON_GPUS[sharded]
    found: dict[bool, Weights] = {}
    for on_gpu_first in (True, False):
        chosen = [(there, True), (here, False)]
        for number, (strategy, gpu) in enumerate(chosen if on_gpu_first else chosen[::-1]):
            with (
                Simulation(seed=1, gpus=8 if gpu else 0).running(),
                DistributedSGD(
                    task.creator(), 2, strategy=strategy, gpu=gpu, run_config=run_config()
                ) as trainer,
            ):
                if number:
                    trainer.restore(tmp_path / str(on_gpu_first))
                trainer.fit(steps=5, progress=False)
                trainer.resize(3)
                trainer.fit(steps=4, progress=False)
                trainer.resize(2)
                if not number:
                    trainer.save(tmp_path / str(on_gpu_first))
                found[on_gpu_first] = trainer.weights()
    assert as_on_cpus(found[True], found[False])


@needs_gpu_of_simulation
@BOTH
@pytest.mark.parametrize("victim", [None, 1])
def test_a_loop_of_ones_own_has_its_state_there_too(victim: int | None, *, sharded: bool) -> None:
    found = []
    for strategy, gpu in zip(ON_GPUS[sharded], (True, False), strict=True):
        simulation = Simulation(seed=1, gpus=8 if gpu else 0)
        kills = [] if victim is None else [Kills(simulation, victim, 5)]
        with simulation.running():
            result = steepest.run(
                own_loops.Script(own_loops.by_hand), num_workers=2, strategy=strategy, gpu=gpu, progress=False,
                callbacks=kills, run_config=run_config(),
            )  # fmt: skip
            found.append(dict(result.state_dict))
    assert as_on_cpus(found[0], found[1])


def over_streams(creator: Any, strategy: AllreduceStrategy) -> Weights:
    """What three processes train in two epochs, whose groups have threads and streams of their own."""
    groups = (ProcessGroups(StandInGroups()),)
    return trained_on_processes(creator, 3, strategy=strategy, gpu=True, extensions=groups)


@needs_strict
@pytest.mark.long
@pytest.mark.usefixtures("machine")
@BOTH
def test_groups_on_streams_of_their_own_are_in_order_with_the_models(
    *, sharded: bool, tmp_path: Path
) -> None:
    """An access of one stream that is not behind another's ends the job; a process is killed twice."""
    killed = partial(struck, models.small, tmp_path, 1, [3, 2])
    found = [over_streams(creator, ON_GPUS[sharded][0]) for creator in (models.small, killed)]
    assert len(list(tmp_path.iterdir())) == 2
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], weights(3, models.small, sharded=sharded))


@needs_strict
@pytest.mark.long
@pytest.mark.usefixtures("machine")
@BOTH
def test_so_are_gradients_that_are_passed_on_one_by_one(*, sharded: bool) -> None:
    """Those of a step in which a sum is not finite, in memory that is made for it."""
    strategy = replace(ON_GPUS[sharded][0], nonfinite="skip")
    expected = weights(3, models.poor, sharded=sharded, nonfinite="skip")
    assert same_bits(over_streams(models.poor, strategy), expected)


def test_an_array_to_read_alone_is_written_to_a_gpu_without_a_warning() -> None:
    target = torch.zeros(8, dtype=torch.uint8).to(models.DEVICE)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fill(target, np.frombuffer(bytes(range(8)), dtype=np.uint8))
    finally:
        torch.set_warn_always(False)
    assert target.tolist() == list(range(8))
