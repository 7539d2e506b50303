"""Training on a GPU: as in one process on it, with what is particular about it. `make test-gpu` runs these."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from steepest import AllreduceStrategy, DistributedSGD, LocalStrategy, ParameterServerStrategy
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.generators import seed_everything
from steepest.core.engine.host_copies import HostCopies
from steepest.core.messages.driver import Failure
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.shared_memory import allocate
from steepest.errors import DataPlaneError
from steepest.testing import InProcessCluster, replay
from tests.core.models import struck
from tests.gpu import models
from tests.jobs_on_processes import CONFIG
from tests.reference import Weights, difference, same_bits

needs_gpu = pytest.mark.skipif(
    models.DEVICE == "cuda" and not torch.cuda.is_available(),
    reason="needs a GPU that torch can use, or c++ and ninja for a device that stands for one",
)
STRATEGIES: dict[str, Strategy] = {
    "ps": ParameterServerStrategy(num_servers=1),
    "copies": ParameterServerStrategy(num_servers=2, replication=2),
    "fp16": ParameterServerStrategy(num_servers=1, wire_dtype="fp16"),
    "allreduce": AllreduceStrategy(),
    "gloo": AllreduceStrategy(data_plane="gloo"),
    "gloo, sharded": AllreduceStrategy(data_plane="gloo", sharded=True),
    "async": ParameterServerStrategy(num_servers=1, mode="async"),
    "local": LocalStrategy(sync_every=3),
    "local, delayed": LocalStrategy(sync_every=4, fragments=2, delay=1),
}
SEED = 3


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Has the GPU compute products in float32, not in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def cluster(
    name: str, workers: int, creator: Any = models.classifier, **options: Any
) -> InProcessCluster:
    """A job whose workers share the GPU, in this process."""
    return InProcessCluster(
        creator, num_workers=workers, strategy=STRATEGIES[name], seed=SEED, device=models.DEVICE,
        keep_log=True, **options,
    )  # fmt: skip


def alone(workers: int, steps: int) -> Weights:
    """Plain PyTorch on the device, on the batches of so many workers."""
    seed_everything(SEED)
    net = models.plain().to(models.DEVICE)
    x, y = models.data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    plan = SamplePlan(len(x), workers * 8, SEED)
    for step in range(steps):
        chosen = torch.from_numpy(plan.share(step, 0, 1))
        batch, target = x[chosen].double().to(models.DEVICE), y[chosen].to(models.DEVICE)
        optimizer.zero_grad()
        F.cross_entropy(net(batch), target).backward()
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in net.named_parameters()}


@needs_gpu
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", ["ps", "copies", "allreduce", "gloo", "gloo, sharded"])
def test_synchronous_strategies_equal_plain_pytorch(name: str, workers: int) -> None:
    job = cluster(name, workers)
    results = job.step(12)
    assert len(results) == 12
    found = job.weights()
    assert all(value.device.type == "cpu" for value in found.values())
    assert difference(found, alone(workers, 12)) < 1e-10


@needs_gpu
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_runs_have_the_same_bits_and_models_compute_where_they_are_to(name: str) -> None:
    jobs = [cluster(name, 2, models.noisy) for _ in range(2)]
    for job in jobs:
        job.step(9)
    assert same_bits(jobs[0].state_dict(), jobs[1].state_dict())
    for worker in jobs[0].workers:
        replicas = worker.at_version(0, -1, lambda replicas: replicas).result()
        for model in replicas.models:
            parameters = list(model.module.parameters())  # type: ignore[attr-defined]
            assert {each.device.type for each in parameters} == {models.DEVICE}


@needs_gpu
@pytest.mark.parametrize("accumulate", [2, 3])
def test_gradients_of_several_batches_are_added_up(accumulate: int) -> None:
    job = cluster("ps", 2, accumulate=accumulate)
    job.step(5)
    assert difference(job.weights(), alone(2 * accumulate, 5)) < 1e-10


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_torchs(dtype: torch.dtype) -> None:
    def creator(worker: int, device: int) -> Any:
        scale = 1024.0 if dtype is torch.float16 else 1.0
        return models.model(models.plain().float(), autocast=dtype, loss_scale=scale)

    job = cluster("ps", 1, creator)
    job.step(10)
    seed_everything(SEED)
    net = models.plain().float().to(models.DEVICE)
    x, y = models.data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    plan = SamplePlan(len(x), 8, SEED)
    for step in range(10):
        chosen = torch.from_numpy(plan.share(step, 0, 1))
        batch, target = x[chosen].to(models.DEVICE), y[chosen].to(models.DEVICE)
        optimizer.zero_grad()
        with torch.autocast(models.DEVICE, dtype=dtype):
            loss = F.cross_entropy(net(batch), target)
        loss.backward()
        optimizer.step()
    expected = {name: parameter.detach().cpu() for name, parameter in net.named_parameters()}
    assert difference(job.weights(), expected) < 0.01


@needs_gpu
def test_overflowing_gradients_are_left_out() -> None:
    def creator(worker: int, device: int) -> Any:
        return models.model(models.plain().float(), autocast=torch.float16, loss_scale=1e30)

    strategy = ParameterServerStrategy(num_servers=1, nonfinite="skip")
    job = InProcessCluster(creator, num_workers=2, strategy=strategy, device=models.DEVICE)
    before = job.weights()
    job.step(3)
    assert same_bits(job.weights(), before)


@needs_gpu
def test_a_replay_on_the_cpu_has_the_weights_to_rounding() -> None:
    """Logs are replayed where no GPU is, as states are read there."""
    job = cluster("ps", 2)
    job.step(10)
    assert difference(replay(job.log(), models.classifier), job.weights()) < 1e-10


def on_processes(creator: Any, strategy: Strategy) -> Weights:
    """What two processes train in eight steps."""
    on_gpu = models.DEVICE != "cpu"
    with DistributedSGD(
        creator, 2, gpu=on_gpu, strategy=strategy, seed=SEED, run_config=CONFIG
    ) as trainer:
        trainer.fit(steps=8, progress=False)
        return trainer.state_dict()


@needs_gpu
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", ["ps", "allreduce", "gloo", "gloo, sharded"])
def test_processes_share_a_gpu_and_a_killed_one_changes_nothing(name: str, tmp_path: Path) -> None:
    found = []
    for creator in (models.classifier, partial(struck, models.classifier, tmp_path, 1, [3])):
        found.append(on_processes(creator, STRATEGIES[name]))
    assert len(list(tmp_path.iterdir())) == 1
    assert same_bits(found[0], found[1])
    assert difference(found[0], alone(2, 8)) < 1e-10


needs_nccl = pytest.mark.skipif(
    models.DEVICE != "cuda" or not torch.distributed.is_nccl_available(), reason="needs NCCL"
)


@needs_gpu
@needs_nccl
@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each worker")
@pytest.mark.parametrize("sharded", [False, True])
def test_gpus_add_up_over_nccl_and_a_killed_process_changes_nothing(
    sharded: bool, tmp_path: Path
) -> None:
    struck_once = partial(struck, models.classifier, tmp_path, 1, [3])
    strategy = AllreduceStrategy(data_plane="nccl", sharded=sharded)
    found = [on_processes(each, strategy) for each in (models.classifier, struck_once)]
    assert len(list(tmp_path.iterdir())) == 1
    assert same_bits(found[0], found[1])
    assert difference(found[0], alone(2, 8)) < 1e-10


@needs_gpu
@needs_nccl
@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="each worker has a GPU of its own")
def test_workers_that_share_a_gpu_are_told_that_nccl_does_not_do_that() -> None:
    with pytest.raises(DataPlaneError, match="workers 0 and 1 share one GPU"):
        on_processes(models.classifier, AllreduceStrategy(data_plane="nccl"))


@needs_gpu
@pytest.mark.skipif(models.DEVICE != "cuda", reason="pinned memory is a GPU's")
def test_gradients_are_copied_to_memory_that_is_pinned_and_pinned_no_longer() -> None:
    memory = allocate(1 << 22)
    copies = HostCopies(torch.device("cuda", 0), [memory])
    assert memory.is_pinned()
    own = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    order: list[int] = []
    for number, (out, part) in enumerate(
        zip(memory.view(torch.float32).chunk(4), own.chunk(4), strict=True)
    ):
        copies.start(out, part, partial(order.append, number))
        copies.poll()
    copies.finish()
    assert order == [0, 1, 2, 3]
    assert torch.equal(memory.view(torch.float32), own.cpu())
    del copies
    assert not memory.is_pinned()


@needs_gpu
@pytest.mark.skipif(models.DEVICE != "cuda", reason="torch.compile's GPU code needs a GPU")
def test_a_compiled_module_trains() -> None:
    def creator(worker: int, device: int) -> Any:
        return models.model(torch.compile(models.plain()))  # type: ignore[arg-type]

    job = cluster("ps", 1, creator)
    job.step(5)
    weights = {name.removeprefix("_orig_mod."): value for name, value in job.weights().items()}
    assert difference(weights, alone(1, 5)) < 1e-8


@needs_gpu
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.skipif(models.DEVICE != "cuda", reason="Ray gives workers GPUs that it knows")
def test_on_ray_a_checkpoint_of_a_gpu_is_restored_without_one(tmp_path: Path) -> None:
    def creator(worker: int, device: int) -> Any:
        return models.model(models.network())

    with DistributedSGD(creator, num_workers=1, gpu=True) as trainer:
        trainer.fit(steps=4, progress=False)
        trainer.save(tmp_path / "saved")
        expected = trainer.state_dict()
    with DistributedSGD(creator, num_workers=1) as trainer:
        trainer.restore(tmp_path / "saved")
        assert same_bits(trainer.state_dict(), expected)
        trainer.fit(steps=1, progress=False)


@needs_gpu
def test_a_loss_that_calls_backward_is_told_so_where_torch_has_a_thread_for_the_pass() -> None:
    def backwards(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output, target)
        loss.backward()
        return loss.detach()

    def creator(worker: int, device: int) -> Any:
        return models.model(models.plain(), loss=backwards)

    job = cluster("ps", 1, creator)
    (failure,) = job.step(1)
    assert isinstance(failure, Failure)
    assert "the loss calls backward() itself" in failure.error
    assert "?" not in failure.error
