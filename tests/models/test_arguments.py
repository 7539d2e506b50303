"""Arguments that no system call or tensor could take are refused when they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray

from steepest import (
    AllreduceStrategy,
    Checkpoints,
    DeadlineConfig,
    DistributedSGD,
    FailureConfig,
    LocalStrategy,
    RunConfig,
    TorchModel,
)
from steepest.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("DeadlineConfig step", lambda: RunConfig(deadlines=DeadlineConfig(step=1e12))),
        ("DeadlineConfig start", lambda: RunConfig(deadlines=DeadlineConfig(start=10**400))),
        ("patience", lambda: RunConfig(failure=FailureConfig(patience=10**400))),
        ("outer_lr", lambda: LocalStrategy(outer_lr=10**400)),
        ("clip_norm", lambda: AllreduceStrategy(clip_norm=10**400)),
        ("path", lambda: Checkpoints("a\0b")),
        ("seed", lambda: DistributedSGD(lambda worker, device: None, seed=2**64)),  # type: ignore[arg-type, return-value]
    ],
)
def test_a_number_out_of_reach_is_refused_by_its_name(
    name: str, make: Callable[[], object]
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}="):
        make()


def test_a_long_wait_is_allowed() -> None:
    assert RunConfig(deadlines=DeadlineConfig(step=1e9)).deadlines.step == 1e9


class Builder:
    """A model creator that is no function."""

    def __call__(self, worker_index: int) -> None: ...


@pytest.mark.parametrize(
    "creator", [None, 3, lambda: None, lambda worker: None, TorchModel, Builder()]
)
def test_a_model_creator_that_cannot_be_called_is_refused_before_anything_starts(
    creator: Any,
) -> None:
    before = ray.is_initialized()
    with pytest.raises(
        ConfigurationError,
        match=r"^model_creator=.*give a function of \(worker_index, device_index\)",
    ):
        DistributedSGD(creator)
    assert ray.is_initialized() == before
