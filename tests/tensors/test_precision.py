"""Half precision on the wire: rounding, sums in float32, what does not fit, every mode."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.chunk_store import StagedPush
from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.messages.driver import Failure
from steepest.core.messages.message import PushId
from steepest.core.tensors.half_precision import WIRE_DTYPES, narrow, rounded
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import ConfigurationError
from steepest.strategies.compression.codecs import Half
from steepest.strategies.parameter_server import ParameterServerStrategy
from tests.modes import GROUPED, MODES, check, counters, make, trained
from tests.random_examples import seeds
from tests.reference import Task, difference, perceptron, samples, sgd

WIRES = pytest.mark.parametrize("wire", ["fp16", "bf16"])
FLOAT32 = Task(
    lambda: perceptron(torch.float32), sgd(momentum=0.9), samples(13, dtype=torch.float32)
)


class Scaled(nn.Module):
    """A regression whose gradient can be made as large as float32 holds."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * self.factor


@WIRES
def test_rounding_is_torchs_own(wire: str) -> None:
    dtype = WIRE_DTYPES[wire]
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 100
    out = torch.empty(2000, dtype=torch.uint8)
    assert narrow(values.view(torch.uint8), dtype, out)
    assert torch.equal(out.view(dtype), values.to(dtype))
    assert torch.equal(
        rounded(values.view(torch.uint8), dtype).view(torch.float32), values.to(dtype).float()
    )


@WIRES
@pytest.mark.parametrize("workers", [1, 3, 7])
def test_the_mean_of_equal_gradients_is_that_gradient(wire: str, workers: int) -> None:
    values = torch.rand(64, generator=torch.Generator().manual_seed(3)).to(WIRE_DTYPES[wire])
    layout = ParameterLayout.plan([("w", (64,), torch.float32, True)])
    held = ServerChunk(layout.chunks[0], layout, None, layout.chunk_view(layout.allocate(), 0))
    pushes = [PushId(worker, 0, 1) for worker in range(workers)]
    for push in pushes:
        gradient = values.view(torch.uint8), 2.0, 2.0, frozenset[int](), Half(values.dtype)
        held.staged[push] = StagedPush(frozenset([push.worker]), *gradient)
    held.reduce(pushes)
    assert held.mean is not None
    assert torch.equal(held.mean, values.float())


@pytest.mark.parametrize(
    ("value", "fits"),
    [(65504.0, True), (65505.0, False), (-7e4, False), (float("inf"), False), (float("nan"), True)],
)
def test_what_does_not_fit_into_fp16_is_known(value: float, fits: bool) -> None:
    values = torch.tensor([1.0, value]).view(torch.uint8)
    out = torch.empty(4, dtype=torch.uint8)
    assert narrow(values, torch.float16, out) is fits
    assert narrow(values, torch.bfloat16, out)
    assert fits or torch.equal(rounded(values, torch.float16), values)


def reference(
    task: Task, workers: int, steps: int, push: torch.dtype | None, pull: torch.dtype | None
) -> dict:
    """Serial training on float32 weights, with each worker's gradient and the weights it sees rounded."""
    torch.manual_seed(0)
    master, copy = task.module(), task.module()
    optimizer = task.optimizer(master)
    plan = SamplePlan(len(task.data[0]), workers * task.batch_size, 0)
    for step in range(steps):
        sums = [torch.zeros_like(p) for p in master.parameters()]
        total = 0
        for p, q in zip(master.parameters(), copy.parameters(), strict=True):
            q.data = p.data.to(pull).float() if pull is not None else p.data.clone()
        for worker in range(workers):
            index = torch.from_numpy(plan.share(step, worker, workers))
            copy.zero_grad()
            task.loss(copy(task.data[0][index]), task.data[1][index]).backward()
            for all_of_it, q in zip(sums, copy.parameters(), strict=True):
                all_of_it += len(index) * (q.grad.to(push).float() if push is not None else q.grad)
            total += len(index)
        for p, all_of_it in zip(master.parameters(), sums, strict=True):
            p.grad = all_of_it / total
        optimizer.step()
    return {name: p.detach() for name, p in master.named_parameters()}


@pytest.mark.few(5)
@WIRES
@pytest.mark.parametrize("which", ["both", "pushes", "pulls"])
@pytest.mark.parametrize("workers", [2, 3])
def test_synchronous_training_equals_serial_training_that_rounds_in_the_same_places(
    wire: str, which: str, workers: int
) -> None:
    chosen = {"both": wire, "pushes": (wire, None), "pulls": (None, wire)}[which]
    dtype = WIRE_DTYPES[wire]
    cluster = make("sync", FLOAT32, workers, settings={"wire_dtype": chosen})
    steps = (
        5  # later ones drift apart: a sum in another order may fall on the other side of a rounding
    )
    trained(cluster, steps)
    push, pull = (dtype if which != "pulls" else None), (dtype if which != "pushes" else None)
    assert difference(cluster.weights(), reference(FLOAT32, workers, steps, push, pull)) < 1e-5
    assert difference(cluster.weights(), FLOAT32.train(workers, steps)) > 2e-5, (
        "nothing was rounded"
    )


@pytest.mark.few(2)
@WIRES
@pytest.mark.parametrize("name", [name for name in MODES if name not in GROUPED])
@seeds(1)
def test_every_mode_is_replayed_to_the_bit_and_sends_half(name: str, wire: str, seed: int) -> None:
    cluster = make(name, FLOAT32, shuffle=seed, settings={"wire_dtype": wire})
    results = trained(cluster, 10)
    check(cluster, FLOAT32)
    size = sum(p.numel() for p in FLOAT32.module().parameters())
    pushes = {"backup": 2, "replicated": 3 * 2, "copies": 3 * 2}.get(name, 3)
    assert all(result.bytes_pushed <= pushes * 2 * size for result in results)
    if name == "sync":  # the first step's weights came whole
        assert all(result.bytes_pulled == 3 * 2 * size for result in results[1:])


def test_one_worker_and_other_dtypes_are_not_rounded() -> None:
    alone = make("sync", FLOAT32, 1, settings={"wire_dtype": "fp16"})
    trained(alone, 10)
    assert difference(alone.weights(), FLOAT32.train(1, 10)) < 1e-6
    double = Task(optimizer=sgd(momentum=0.9))
    cluster = make("sync", double, 2, settings={"wire_dtype": "fp16"})
    trained(cluster, 10)
    assert difference(cluster.weights(), double.train(2, 10)) < 1e-12


@pytest.mark.parametrize("name", ["sync", "async"])
def test_gradients_and_weights_that_do_not_fit_into_fp16_travel_as_they_are(name: str) -> None:
    task = Task(
        lambda: Scaled(3e4), lambda m: torch.optim.SGD(m.parameters(), lr=1e-4), FLOAT32.data
    )
    cluster = make(name, task, 2, settings={"wire_dtype": "fp16"})
    results = trained(cluster, 3)
    check(cluster, task)
    size = sum(p.numel() for p in task.module().parameters())
    assert any(result.bytes_pushed > 2 * 2 * size for result in results)
    assert all(torch.isfinite(w).all() for w in cluster.weights().values())
    assert max(float(w.abs().max()) for w in cluster.weights().values()) > 65504


@WIRES
def test_nan_is_refused_by_name_as_ever(wire: str) -> None:
    task = dataclasses.replace(FLOAT32, module=lambda: Scaled(float("nan")))
    cluster = make("sync", task, 2, settings={"wire_dtype": wire})
    result = cluster.step(1)[-1]
    assert isinstance(result, Failure)
    assert {name for _, name in result.culprits} == {"line.weight", "line.bias"}
    assert counters(cluster)["committed"] == 0


@pytest.mark.parametrize("wrong", ["fp8", ("fp16",), ("fp16", "fp32"), 16])
def test_a_wrong_dtype_is_refused_when_the_strategy_is_made(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="wire_dtype"):
        ParameterServerStrategy(wire_dtype=wrong)  # type: ignore[arg-type]
