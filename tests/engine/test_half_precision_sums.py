"""Gradients of float16 and bfloat16 parameters: the mean of them is rounded once, however many are added up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from steepest.core.engine.topology import HostMap
from steepest.strategies.process_groups import reduction
from tests.modes import make, trained
from tests.reference import Task, sgd

SIZE, WORKERS = 40, 12
#: What a job has beside a mode, and how many times a mean is rounded at the most.
WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "servers": ("sync", {}, 1),
    "allreduce": ("allreduce", {}, 1),
    "process groups": ("groups", {}, 1),
    "sharded process groups": ("sharded-groups", {}, 1),
    "aggregators": (
        "sync",
        {"hosts": HostMap((0,) * 6 + (1,) * 6, (0, 2), gathers=True), "servers": 2},
        2,
    ),
    "replicas of a worker": ("sync", {"devices": 6, "workers": 2}, 2),
    "batches of a replica": ("sync", {"accumulate": 12, "workers": 1}, 2),
    "batches, in process groups": ("groups", {"accumulate": 6, "workers": 2}, 2),
}


class Given(nn.Module):
    """Its gradient is the mean of the samples; a further parameter is of float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(SIZE, dtype=dtype))
        self.wide = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.narrow * x).sum(1).float() + (self.wide * x.float()).sum(1)


def step(way: str, gradients: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mean gradient by which a step moves each parameter, where each sample has one of `gradients`."""
    name, options, _ = WAYS[way]
    task = Task(
        lambda: Given(gradients.dtype),
        sgd(1.0),
        (gradients, torch.zeros(len(gradients))),
        loss=lambda found, target: found.mean(),
        batch_size=1,
    )
    cluster = make(name, task, **{"workers": WORKERS, **options})
    trained(cluster, 1)
    return {parameter: -value.double() for parameter, value in cluster.weights().items()}


@pytest.mark.few(10)
@pytest.mark.parametrize("with_header", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_means_are_rounded_once_and_overflow_only_where_they_do_not_fit(
    way: str, dtype: torch.dtype, with_header: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_header:
        if "groups" not in way:
            pytest.skip("only groups have headers")
        monkeypatch.setattr(reduction, "_WITH_HEADER", 0)
    half_step = torch.finfo(dtype).eps / 2 * WAYS[way][2]

    large = step(way, torch.full((WORKERS, SIZE), 30000.0, dtype=dtype))
    exact = float(torch.tensor(30000.0, dtype=dtype))
    assert large["narrow"].tolist() == [exact] * SIZE
    assert large["wide"].tolist() == [exact] * SIZE

    generator = torch.Generator().manual_seed(4)
    gradients = torch.rand(WORKERS, SIZE, generator=generator) + 0.5
    gradients[0] = 256.0  # beside which each of the others is less than bfloat16 tells apart
    gradients = gradients.to(dtype)
    expected = gradients.double().mean(0)
    found = step(way, gradients)
    assert ((found["narrow"] - expected).abs() / expected).max() <= half_step * 1.001
    assert ((found["wide"] - expected).abs() / expected).max() <= 1e-6
