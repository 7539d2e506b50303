"""Collective operations in the workers of a job: in functions, in models, and when a worker fails or dies."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    ParameterServerStrategy,
    collectives,
)
from steepest.core.models.torch import TorchModel
from steepest.errors import ModelRaisedError, PeerLostError
from steepest.testing import linear_model_creator

pytestmark = pytest.mark.usefixtures("machine")
CREATOR = linear_model_creator(
    samples=48, optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
)


def operations(view: Any) -> list[Any]:
    """Each kind once: small, large enough to be lent, and around the ring."""
    rank, size = collectives.rank(), collectives.size()
    assert rank == view.index
    large = torch.full((3_000_000,), float(rank + 1))
    found = collectives.all_reduce(large)
    assert torch.equal(large, torch.full_like(large, rank + 1.0))
    parts = collectives.all_gather(torch.tensor([rank]))
    collectives.barrier()
    coming = collectives.irecv(torch.empty(1), (rank - 1) % size)
    collectives.send(torch.tensor([float(rank)]), (rank + 1) % size)
    told = collectives.broadcast(torch.tensor([float(os.getpid())], dtype=torch.float64), src=1)
    return [
        float(found.min()),
        float(found.max()),
        torch.cat(parts).tolist(),
        float(coming.wait()),
        float(told),
    ]


STRATEGIES = {
    "ps": ParameterServerStrategy(num_servers=2),
    "allreduce": AllreduceStrategy(),
    "tcp": AllreduceStrategy(transport="tcp"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_functions_of_workers_talk_to_each_other(name: str) -> None:
    with DistributedSGD(CREATOR, num_workers=3, strategy=STRATEGIES[name]) as sgd:
        for _ in range(2):
            sgd.fit(steps=2, progress=False)
            found = sgd.foreach_worker(operations)
            pids = sgd.foreach_worker(lambda view: view.pid)
            wanted = [
                [6.0, 6.0, [0, 1, 2], float((rank - 1) % 3), float(pids[1])] for rank in range(3)
            ]
            assert found == wanted
        sums = sgd.foreach_model(lambda model: float(collectives.all_reduce(torch.ones(1))))
        assert sums == [3.0] * 3
        assert sgd.for_model(lambda model: collectives.size()) == 3

        def fail(view: Any) -> None:
            if view.index == 2:
                raise ZeroDivisionError("worker 2 has had enough")
            collectives.barrier()

        with pytest.raises(ModelRaisedError, match="has had enough"):
            sgd.foreach_worker(fail)
        assert sgd.foreach_worker(operations) == wanted  # nothing of the failed call is left
        assert sgd.step().step == 5


class Talking(TorchModel):
    """Adds up all workers' losses in every step; the second worker's third step fails."""

    steps = 0

    def compute_gradients(self, *arguments: Any, **options: Any) -> Any:
        self.steps += 1
        if collectives.rank() == 1 and self.steps == 3:
            raise ZeroDivisionError("the third step")
        self.total = float(collectives.all_reduce(torch.full((40_000,), float(self.steps)))[-1])
        return super().compute_gradients(*arguments, **options)


def make_talking(worker: int, device: int) -> TorchModel:
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    return Talking(
        torch.nn.Linear(3, 1),
        loss=torch.nn.functional.mse_loss,
        data=(x, x.sum(1, keepdim=True)),
        batch_size=4,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_models_talk_to_each_other_in_their_steps_and_a_failed_step_is_taken_again(
    strategy: str,
) -> None:
    with DistributedSGD(make_talking, num_workers=2, strategy=strategy) as sgd:
        sgd.fit(steps=2, progress=False)
        assert sgd.foreach_model(lambda model: model.total) == [4.0, 4.0]
        with pytest.raises(ModelRaisedError, match="the third step"):
            sgd.step()
        assert sgd.step().step == 3
        assert sgd.foreach_model(lambda model: model.steps) == [4, 4]
        assert sgd.foreach_model(lambda model: model.total) == [8.0, 8.0]


def test_one_worker_is_alone() -> None:
    with DistributedSGD(CREATOR) as sgd:
        assert sgd.foreach_worker(
            lambda view: collectives.all_reduce(torch.ones(2), "mean").tolist()
        ) == [[1.0, 1.0]]


def test_workers_of_a_driver_that_serves_have_them_too() -> None:
    with DistributedSGD(CREATOR, num_workers=2, strategy="simple") as sgd:
        assert sgd.foreach_worker(lambda view: collectives.rank()) == [0, 1]
        sgd.step()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_worker_that_dies_in_the_middle_ends_the_others_waits(strategy: str) -> None:
    def die(view: Any) -> None:
        collectives.barrier()
        if view.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        collectives.all_reduce(torch.ones(3_000_000))

    with DistributedSGD(CREATOR, num_workers=3, strategy=strategy) as sgd:
        sgd.step()
        with pytest.raises(PeerLostError, match="worker 1"):
            sgd.foreach_worker(die)
