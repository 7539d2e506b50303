"""Models that write to what they own, in processes that share memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import Callback, DistributedSGD, TorchModel
from steepest.errors import ModelError
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster
from tests.engine.own_writes import Momentum, Writer, trained
from tests.reference import same_bits

pytestmark = pytest.mark.usefixtures("machine")
WIDE = 3000  # so that weights are in shared memory


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x


def creator(module: Callable[[], nn.Module]) -> Callable[[int, int], TorchModel]:
    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            module(),
            loss=lambda output, target: output.square().mean(),
            data=data(),
            batch_size=6,
            optimizer=trained,
        )

    return create


def momentum() -> Momentum:
    torch.manual_seed(3)
    return Momentum("storage", WIDE)


def plain(steps: int) -> dict[str, torch.Tensor]:
    module = momentum()
    optimizer = trained(module)
    x, _ = data()
    for _ in range(steps):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    return {name: value.detach() for name, value in module.state_dict().items()}


def keys(view: Any) -> float:
    return float(view.models[0].module.key.bias.mean())


class Look(Callback):
    """Weights as a callback sees them while workers go on."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step(self, sgd: Any, result: Any) -> None:
        self.seen.append(float(sgd.weights()["key.bias"].mean()))


@pytest.mark.long
def test_a_momentum_encoder_trains_as_in_one_process(machine: None, tmp_path: Path) -> None:
    strategy = ParameterServerStrategy(num_servers=1)
    look = Look()
    with DistributedSGD(creator(momentum), num_workers=2, strategy=strategy) as sgd:
        assert sgd.weights()["key.bias"].mean() == plain(0)["key.bias"].mean()
        while len(set(look.seen)) < 2:  # the first callbacks may come after all of their steps
            sgd.fit(steps=4, progress=False, callbacks=[look])
        steps = len(look.seen)
        wanted = plain(steps)
        for found in (sgd.weights(), sgd.state_dict()):
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
        assert sgd.foreach_worker(keys) == [pytest.approx(float(wanted["key.bias"].mean()))] * 2
        before = sgd.state_dict()
        loss = sgd.evaluate((torch.ones(4, 3, dtype=torch.float64),) * 2).loss
        assert same_bits(sgd.state_dict(), before), "evaluating moves nothing"
        sgd.save(tmp_path)
        sgd.set_weights({"query.bias": torch.zeros(WIDE)})
        assert same_bits({"key.bias": sgd.weights()["key.bias"]}, {"key.bias": before["key.bias"]})
        sgd.set_weights({"key.bias": torch.ones(WIDE)})
        assert sgd.foreach_worker(keys) == [1.0, 1.0]
        assert same_bits(
            {"key.weight": sgd.weights()["key.weight"]}, {"key.weight": before["key.weight"]}
        )
        sgd.set_strategy("allreduce")
        assert sgd.foreach_worker(keys) == [1.0, 1.0]
        sgd.load_state_dict(before)
        assert same_bits(sgd.state_dict(), before), (
            "frozen parameters that the model writes to are loaded too"
        )
        assert sgd.foreach_worker(keys) == [pytest.approx(float(before["key.bias"].mean()))] * 2
        sgd.restore(tmp_path)
        assert same_bits(sgd.state_dict(), before)
        sgd.resize(num_workers=1)
        assert same_bits(sgd.state_dict(), before)
        sgd.set_weights({"key.bias": torch.ones(WIDE)})
        sgd.restore(tmp_path)
        assert same_bits(sgd.state_dict(), before), "at another number of workers too"
        sgd.resize(num_workers=2)
        assert same_bits(sgd.state_dict(), before)
        assert sgd.evaluate((torch.ones(4, 3, dtype=torch.float64),) * 2).loss == pytest.approx(
            loss, abs=1e-12
        )
        sgd.fit(steps=2, progress=False)
        for name, value in plain(steps + 2).items():
            torch.testing.assert_close(sgd.state_dict()[name], value, rtol=0, atol=1e-12)


class Wide(Writer):
    """Large enough for shared memory, and not compared after each pass."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(3, WIDE).double(), nn.Linear(WIDE, 4).double()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "how", ["data", *(pytest.param(how, marks=pytest.mark.long) for how in ("clamp", "storage"))]
)
def test_writing_to_shared_weights_is_refused_at_any_step(machine: None, how: str) -> None:
    def write(view: Any) -> None:
        view.models[0].module.writes = view.index == 1

    def stop(view: Any) -> None:
        view.models[0].module.writes = False

    strategy = ParameterServerStrategy(num_servers=2)
    with DistributedSGD(creator(lambda: Wide(how)), num_workers=2, strategy=strategy) as sgd:
        sgd.fit(steps=6, progress=False)
        before = sgd.weights()
        sgd.foreach_worker(write)
        with pytest.raises(
            ModelError, match=r"worker 1 on .*, step 7: .*trainable parameter 'last.weight'"
        ):
            sgd.step()
        assert same_bits(sgd.weights(), before)
        sgd.foreach_worker(stop)
        sgd.fit(steps=2, progress=False)
        found = sgd.weights()
    fine = InProcessCluster(
        creator(lambda: Wide(how)), num_workers=2, strategy=strategy, lend=False
    )
    fine.step(8)
    assert same_bits(found, fine.weights())
