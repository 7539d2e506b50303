"""The words of a job's page for its settings, whatever a user's strategy has in its fields."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.runtime.driver.job_settings import settings_of
from steepest.testing import InProcessCluster, linear_model_creator


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted(ParameterServerStrategy):
    """A strategy with a tensor, which is neither true nor false."""

    shares: torch.Tensor = field(default_factory=lambda: torch.ones(2))


def test_what_differs_from_the_defaults_is_said() -> None:
    strategy = Weighted(num_servers=2, shares=torch.zeros(2))
    settings = settings_of(
        InProcessCluster(linear_model_creator(), num_workers=2, strategy=strategy).job
    )
    assert settings["strategy"] == "Weighted(num_servers=2, shares=tensor([0., 0.]))"
    assert settings["seed"] == "0"
    plain = settings_of(
        InProcessCluster(linear_model_creator(), num_workers=2, strategy=AllreduceStrategy()).job
    )
    assert plain["strategy"] == "AllreduceStrategy()"
    assert "devices of a worker" not in plain
