"""Schedulers that were made for another optimizer go on as they would have with their own."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch
from torch.optim import lr_scheduler as torchs

from steepest.core.optim.detached_schedule import DetachedSchedule
from steepest.core.optim.spec import OptimizerSpec, Schedule
from steepest.errors import ConfigurationError

KINDS: dict[str, Any] = {
    "function": lambda o: torchs.LambdaLR(o, [lambda n: 1 / (1 + n), lambda n: 0.9**n]),
    "one cycle": lambda o: torchs.OneCycleLR(o, max_lr=[0.3, 0.5], total_steps=16),
    "restarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=5),
    "cyclic": lambda o: torchs.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "chained": lambda o: torchs.ChainedScheduler(
        [torchs.ConstantLR(o, total_iters=4), torchs.ExponentialLR(o, gamma=0.9)]
    ),
    "sequential": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, total_iters=3), torchs.StepLR(o, 2, gamma=0.5)], milestones=[3]
    ),
}


def optimizer() -> torch.optim.SGD:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [{"params": [first], "lr": 0.2}, {"params": [second], "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def values(groups: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(group["lr"], group["momentum"]) for group in groups]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_detached_scheduler_gives_what_the_scheduler_itself_gives(kind: str, every: int) -> None:
    own = optimizer()
    scheduler = KINDS[kind](own)
    detached = ray.cloudpickle.loads(ray.cloudpickle.dumps(DetachedSchedule(scheduler, every)))
    other = optimizer()
    names = {id(p): f"p{i}" for i, g in enumerate(other.param_groups) for p in g["params"]}
    schedule = Schedule(OptimizerSpec.read(other, names, lr_scheduler=detached))
    base = [{"lr": 0.2, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9}]
    seen = []
    for step in range(14):
        found = [old | new for old, new in zip(base, schedule.at(step), strict=True)]
        assert values(found) == values(own.param_groups), step
        seen.append(values(found))
        own.step()
        if (step + 1) % every == 0:
            scheduler.step()
    assert len(set(map(str, seen))) > 2


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (torchs.ReduceLROnPlateau(optimizer()), "needs a metric: give steepest.ReduceOnPlateau"),
        (lambda optimizer: None, "the scheduler is a function"),
    ],
)
def test_what_is_no_schedule_of_the_step_is_refused(scheduler: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        DetachedSchedule(scheduler)
    with pytest.raises(ConfigurationError, match="every=0"):
        DetachedSchedule(KINDS["restarts"](optimizer()), 0)
