"""Mixed precision: forward pass and loss under torch.autocast, as in a plain loop, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steepest.core.engine.job import ModelCreator
from steepest.core.models.torch import TorchModel
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy
from steepest.testing import InProcessCluster
from tests.inside import replicas_of
from tests.modes import trained
from tests.reference import Weights, same_bits, samples, sgd, snapshot

DATA = samples(16, inputs=4, dtype=torch.float32)
BATCH = 4
STEPS = 12


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)
    )


class Saving(nn.Module):
    """The same, whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[3:](checkpoint(self.layers[:3], x, use_reentrant=False))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    assert output.dtype is torch.bfloat16
    return nn.functional.mse_loss(output, target) + (output.T @ output).square().mean()


def creator(
    module: Callable[[], nn.Module] = network,
    optimizer: Any = None,
    autocast: torch.dtype | None = torch.bfloat16,
) -> ModelCreator:
    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            module(),
            data=DATA,
            batch_size=BATCH,
            loss=loss if autocast else lambda output, target: loss(output.bfloat16(), target),
            optimizer=optimizer or sgd(momentum=0.9, fused=False),
            metrics={"narrow": lambda output, target: float(output.dtype is torch.bfloat16)},
            autocast=autocast,
        )

    return create


def plain(cluster: InProcessCluster, module: nn.Module) -> tuple[Weights, list[float]]:
    """A plain loop over the same samples."""
    optimizer = sgd(momentum=0.9, fused=False)(module)
    plan = cluster.job.plan()
    assert plan is not None
    losses = []
    for step in range(STEPS):
        x, y = (column[torch.from_numpy(plan.share(step, 0, 1))] for column in DATA)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(module(x), y)
        value.backward()
        assert all(parameter.grad.dtype is torch.float32 for parameter in module.parameters())
        optimizer.step()
        losses.append(float(value.detach()))
    return snapshot(module), losses


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "module", [network, Saving, lambda: torch.compile(network(), backend="eager")]
)
@pytest.mark.parametrize(
    "strategy", [ParameterServerStrategy(), AllreduceStrategy(), SimpleStrategy()]
)
def test_one_worker_equals_a_plain_loop_to_the_bit(strategy: Strategy, module: Any) -> None:
    if isinstance(strategy, ParameterServerStrategy):
        strategy = ParameterServerStrategy(num_servers=2, chunk_bytes=64)
    cluster = InProcessCluster(creator(module), strategy=strategy)
    results = trained(cluster, STEPS)
    torch.manual_seed(0)
    found, losses = plain(cluster, module())
    weights = {name.replace("_orig_mod.", ""): value for name, value in found.items()}
    assert same_bits(cluster.weights(), weights)
    assert [result.loss for result in results] == losses
    assert all(result.metrics == {"narrow": 1.0} for result in results)
    wide = InProcessCluster(creator(module, autocast=None), strategy=strategy)
    trained(wide, STEPS)
    assert not same_bits(wide.weights(), weights)


def test_evaluation_is_under_autocast_too() -> None:
    cluster = InProcessCluster(creator())
    model = replicas_of(cluster.workers[0]).models[0]
    x, y = DATA
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = float(loss(model.module(x), y))  # type: ignore[attr-defined]
    computed = model.evaluate((x, y))
    assert (computed.loss, computed.metrics, computed.samples) == (expected, {"narrow": 1.0}, 16)
    assert not torch.is_autocast_enabled("cpu")


class Products(torch.optim.Optimizer):
    """Updates by products of matrices, which autocast would round."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows = parameter.grad.view(len(parameter), -1)
                    update = rows @ (rows.T @ rows + torch.eye(rows.shape[1]).to(rows))
                    parameter.sub_(update.view_as(parameter), alpha=group["lr"])


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [2, 3])
def test_servers_in_a_workers_process_update_in_full_precision(workers: int) -> None:
    """They may do so while that worker waits in the middle of its forward pass."""
    made = creator(optimizer=lambda module: Products(module.parameters()))
    apart, inside = (
        InProcessCluster(made, num_workers=workers, strategy=strategy)
        for strategy in (
            ParameterServerStrategy(num_servers=workers, chunk_bytes=64),
            AllreduceStrategy(chunk_bytes=64),
        )
    )
    for cluster in (apart, inside):
        trained(cluster, STEPS)
    assert same_bits(apart.weights(), inside.weights())


def faint(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients are too small for float16."""
    assert output.dtype is torch.float16
    return nn.functional.mse_loss(output, target) * 1e-7


def half_creator(loss_scale: float) -> ModelCreator:
    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            network(), data=DATA, batch_size=BATCH, loss=faint, optimizer=sgd(lr=1e5, fused=False),
            autocast=torch.float16, loss_scale=loss_scale,
        )  # fmt: skip

    return create


def test_small_gradients_in_float16_survive_with_a_loss_scale() -> None:
    cluster = InProcessCluster(half_creator(2.0**14))
    results = trained(cluster, STEPS)
    torch.manual_seed(0)
    module = network()
    optimizer = sgd(lr=1e5, fused=False)(module)
    plan = cluster.job.plan()
    assert plan is not None
    for step in range(STEPS):
        x, y = (column[torch.from_numpy(plan.share(step, 0, 1))] for column in DATA)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            value = faint(module(x), y)
        (value * 2.0**14).backward()
        for parameter in module.parameters():
            parameter.grad.mul_(2.0**-14)  # type: ignore[union-attr]
        optimizer.step()
        assert results[step].loss == float(value.detach())
    assert same_bits(cluster.weights(), snapshot(module))
    unscaled = InProcessCluster(half_creator(1.0))
    before = unscaled.weights()
    trained(unscaled, STEPS)
    assert torch.equal(unscaled.weights()["0.weight"], before["0.weight"])
    assert not torch.equal(cluster.weights()["0.weight"], before["0.weight"])


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_an_update_that_overflows_is_left_out(workers: int) -> None:
    strategy = ParameterServerStrategy(num_servers=1, nonfinite="skip", clip_norm=1.0)
    cluster = InProcessCluster(
        half_creator(2.0**60), num_workers=workers, strategy=strategy, keep_log=True
    )
    before = cluster.weights()
    trained(cluster, 2)
    assert [commit.skipped for commit in cluster.log().commits] == [True, True]
    assert same_bits(cluster.weights(), before)


@pytest.mark.parametrize("dtype", [torch.float32, True, "bf16"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ConfigurationError, match="give torch.bfloat16, torch.float16 or None"):
        creator(autocast=dtype)(0, 0)


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), float("nan"), True, "2"])
def test_scales_that_make_no_sense_are_refused(scale: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"loss_scale={scale!r}: give a positive number"):
        half_creator(scale)(0, 0)
