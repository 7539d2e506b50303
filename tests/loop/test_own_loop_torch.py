"""What torch offers works in loops of users' own: autocast, checkpointing, compiled modules, SAM's optimizer."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import steepest
from steepest.errors import ModelError
from tests.own_loop_runs import run, without
from tests.own_loops import Parts, Script, plain
from tests.reference import difference, perceptron, samples, sgd
from tests.simulated_programs import quiet


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def in_half(parts: Parts, epochs: int) -> None:
    """Forward passes under autocast, parameters in single precision."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(parts.model(x.float()).float(), y.float())
            loss.backward()
            parts.optimizer.step()


def single() -> nn.Module:
    return perceptron(torch.float32)


def checkpointed(reentrant: bool) -> Callable[[Parts, int], None]:
    def loop(parts: Parts, epochs: int) -> None:
        first, *rest = parts.model
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                parts.optimizer.zero_grad()
                hidden = checkpoint(first, x.requires_grad_(), use_reentrant=reentrant)
                for layer in rest:
                    hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
                nn.functional.mse_loss(hidden, y).backward()
                parts.optimizer.step()

    return loop


def twice_differentiated(parts: Parts, epochs: int) -> None:
    """The gradient's norm is a part of the loss: a backward pass with create_graph=True, and one through it."""
    parameters = list(parts.model.parameters())
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            errors = (parts.model(x) - y).square().mean(dim=1)
            loss = torch.zeros((), dtype=torch.float64)
            for error in errors:
                slopes = torch.autograd.grad(error, parameters, create_graph=True)
                loss = loss + error + 0.1 * sum(each.square().sum() for each in slopes)
            (loss / len(x)).backward()
            parts.optimizer.step()


LOOPS = {
    "checkpoint": Script(checkpointed(False), optimizer=sgd(momentum=0.9)),
    "reentrant checkpoint": Script(checkpointed(True), optimizer=sgd(momentum=0.9)),
    "double backward": Script(twice_differentiated, optimizer=sgd(momentum=0.9)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_torch_does_equals_one_process(name: str, workers: int) -> None:
    assert difference(run(LOOPS[name], workers).weights, LOOPS[name].alone(workers)) < 1e-12


def test_autocast_equals_one_process_as_far_as_half_precision_goes() -> None:
    script = Script(in_half, single, sgd(momentum=0.9), data=samples(24))
    assert difference(run(script, 1).weights, script.alone(1)) < 1e-6
    full = Script(plain, optimizer=sgd(momentum=0.9), data=samples(24))
    assert difference(full.alone(1), script.alone(1)) > 1e-4  # so it is another one
    assert difference(run(script, 2).weights, script.alone(2)) < 0.01


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules(backend: str) -> None:
    torch.compiler.reset()
    script = Script(plain, lambda: torch.compile(perceptron(), backend=backend), sgd(momentum=0.9))
    found = run(script, 2).weights
    expected = Script(plain, optimizer=sgd(momentum=0.9)).alone(2)
    assert difference(found, expected) < 1e-12


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding is one."""


def collated(rows: list[Any]) -> Encoding:
    x, y = (torch.stack(each) for each in zip(*rows, strict=True))
    return Encoding({"x": x, "y": y.numpy(), "of": [("a", 1.5)]})


SEEN: list[Any] = []


def of_encodings() -> None:
    """Each batch is what `collate_fn` returned; the loop may take things out of it."""
    model = perceptron()
    loader: Any = DataLoader(TensorDataset(*samples(12)), batch_size=6, collate_fn=collated)
    model, optimizer, loader = steepest.prepare(model, sgd()(model), loader)
    for _ in steepest.epochs(1):
        for batch in loader:
            SEEN.append((type(batch), *map(type, batch.values()), batch["of"]))
            optimizer.zero_grad()
            target = torch.from_numpy(batch.pop("y"))
            nn.functional.mse_loss(model(batch["x"]), target).backward()
            optimizer.step()


def test_a_batch_is_what_the_collate_function_returned() -> None:
    SEEN.clear()
    of_encodings()
    expected, SEEN[:] = SEEN[:1], []
    run(of_encodings, 2)
    assert expected == SEEN[:1] == [(Encoding, torch.Tensor, np.ndarray, list, [("a", 1.5)])]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as it is often written: an optimizer around another one, with two steps."""

    def __init__(self, parameters: Any, base: Any, **settings: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **settings})
        self.base_optimizer = base(self.param_groups, **settings)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(p.grad.sign() * group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base_optimizer.step()


def with_sam() -> None:
    """Only the optimizer that updates is given to `prepare`."""
    data, model = samples(16), perceptron()
    sam = Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=2)
    model, sam.base_optimizer, loader = steepest.prepare(model, sam.base_optimizer, loader)
    for _ in steepest.epochs(2):
        for x, y in loader:
            sam.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            sam.first_step()
            nn.functional.mse_loss(model(x), y).backward()
            sam.second_step()
    FOUND["with_sam"] = {name: p.detach().clone() for name, p in model.named_parameters()}


FOUND: dict[str, Any] = {}


def test_an_optimizer_around_another_one() -> None:
    """With one worker it is that of one process; with two each has the worst place of its own samples."""
    torch.manual_seed(0)
    with_sam()
    assert difference(run(with_sam, 1).weights, FOUND["with_sam"]) < 1e-12
    assert difference(without(with_sam, 2, 1, 4).weights, run(with_sam, 2).weights) < 1e-12


def clipped_by_torch(parts: Parts, epochs: int) -> None:
    """Clips by a name that was imported before the loop ran."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            clip_grad_norm_(parts.model.parameters(), 0.5)
            parts.optimizer.step()


def clipped_by_value(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            nn.utils.clip_grad_value_(parts.model.parameters(), 0.05)
            parts.optimizer.step()


CLIPPED = {clipped_by_torch: "clip_grad_norm_", clipped_by_value: "clip_grad_value_"}


@pytest.mark.parametrize("loop", CLIPPED)
def test_clipping_by_torch_is_told_that_it_sees_one_worker(loop: Any) -> None:
    with pytest.warns(UserWarning, match=CLIPPED[loop] + ".* one worker alone, of 2") as told:
        run(Script(loop), 2)
    assert [warning.filename for warning in told] == [__file__]  # once, at the user's line


@pytest.mark.parametrize("strategy", ["ps", "async", "local"])
@pytest.mark.parametrize("loop", CLIPPED)
def test_clipping_by_torch_is_right_where_a_worker_makes_its_own_update(
    loop: Any, strategy: str
) -> None:
    found = run(Script(loop), 1 if strategy == "ps" else 2, strategy)
    if strategy == "ps":
        assert difference(found.weights, Script(loop).alone(1)) < 1e-12
    assert nn.utils.clip_grad_value_ is nn.utils.clip_grad.clip_grad_value_
    assert clip_grad_norm_.__module__ == nn.utils.clip_grad._clip_grads_with_norm_.__module__


@pytest.mark.parametrize("early", [False, True])
def test_hooks_of_an_optimizer_are_called_around_its_steps(early: bool) -> None:
    """One that changes gradients before a step, and one that counts steps after it."""
    counts: list[int] = []

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    def hook(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(lambda *_: counts.append(steepest.rank()))
        return optimizer

    def late(parts: Parts, epochs: int) -> None:
        hook(parts.optimizer)
        plain(parts, epochs)

    made = sgd(momentum=0.9)
    script = Script(
        plain if early else late,
        optimizer=(lambda module: hook(made(module))) if early else made,
        data=samples(16),
    )
    expected = script.alone(2)
    steps = len(counts)
    counts.clear()
    assert difference(run(script, 2).weights, expected) < 1e-12
    assert sorted(counts) == [0] * steps + [1] * steps


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_dropped_as_by_torch(set_to_none: bool) -> None:
    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                parts.optimizer.zero_grad(set_to_none)
                for parameter in parts.model.parameters():
                    assert (parameter.grad is None) or not (set_to_none or parameter.grad.any())
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()

    script = Script(loop, optimizer=sgd(momentum=0.9))
    assert difference(run(script, 2).weights, script.alone(2)) < 1e-12


def clipped_by_a_norm(parts: Parts, gradients: list[torch.Tensor]) -> None:
    norm = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(parts.model.parameters(), 0.05, norm)


def clipped_by_hand(parts: Parts, gradients: list[torch.Tensor]) -> None:
    norm = torch.stack([each.square().sum() for each in gradients]).sum().sqrt()
    for each in gradients:
        each.mul_(min(1.0, 0.05 / float(norm)))


def clamped_anew(parts: Parts, gradients: list[torch.Tensor]) -> None:
    for parameter in parts.model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-0.01, 0.01)


def clipped_late(parts: Parts, gradients: list[torch.Tensor]) -> None:
    """Clips nothing in the first steps, though it is called."""
    late = getattr(parts.model, "steps", 0)
    parts.model.steps = late + 1  # type: ignore[assignment]
    for each in gradients:
        each.mul_(1.0 if late < 5 else float(0.01 / each.norm()))


def halved(parts: Parts, gradients: list[torch.Tensor]) -> None:
    for each in gradients:
        each.div_(2)


def left_alone(parts: Parts, gradients: list[torch.Tensor]) -> None:
    pass


def hooked(parts: Parts) -> None:
    for parameter in parts.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def hooked_steps(parts: Parts) -> None:
    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.clamp_(-0.01, 0.01)

    parts.optimizer.register_step_pre_hook(clamp)


def editing(edit: Any) -> Script:
    """A script whose gradients are changed by each worker, by a hook or between backward pass and step."""

    def loop(parts: Parts, epochs: int) -> None:
        if edit in (hooked, hooked_steps):
            edit(parts)
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                if edit not in (hooked, hooked_steps):
                    edit(parts, [p.grad for p in parts.model.parameters()])
                parts.optimizer.step()

    return Script(loop)


EDITS = {
    clipped_by_a_norm: "clip_grads_with_norm_|clip_grad_norm_",
    clipped_by_hand: "the loop changes its gradients between",
    clamped_anew: "the loop changes its gradients between",
    clipped_late: "the loop changes its gradients between",
    hooked_steps: "the loop changes its gradients between",
    hooked: "parameter '.*' has a hook",
}


@pytest.mark.parametrize("edit", EDITS)
def test_gradients_that_each_worker_changes_by_itself_are_told(edit: Any) -> None:
    with pytest.warns(UserWarning, match=EDITS[edit]) as told:
        run(editing(edit), 2)
    assert {warning.filename for warning in told} == {__file__}
    assert len(told) == 1  # by worker 0


@pytest.mark.parametrize("edit", [halved, left_alone])
def test_a_constant_factor_is_told_of_nobody(edit: Any) -> None:
    script = editing(edit)
    assert difference(run(script, 2).weights, script.alone(2)) < 1e-12


WIDE = 5000  # a model of more than is compared after each turn


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, WIDE), nn.Tanh(), nn.Linear(WIDE, 2)).double()


def through_data(weight: nn.Parameter) -> None:
    weight.data.zero_()


def through_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[:] = 0.0


def writing_late(write: Any, rank: int) -> Script:
    """A script of which one worker writes to a trained parameter, uncounted and once, long after the first steps."""

    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for number, (x, y) in enumerate(parts.loader):
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
                if number == 10 and steepest.rank() == rank:
                    write(parts.model[2].weight)

    return Script(loop, model=wide, optimizer=sgd(lr=1e-4), data=samples(64), epochs=1)


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("write", [through_data, through_numpy])
def test_an_uncounted_write_behind_a_late_step_is_found(
    write: Any, rank: int, strategy: str
) -> None:
    with pytest.raises(ModelError, match="written to the trained parameter '2.weight'"):
        run(writing_late(write, rank), 2, strategy)


def ending_with(change: Callable[[nn.Module], object]) -> Script:
    """A script that changes its model behind the loop, as it does that tests, or exports, another one."""

    def loop(parts: Parts, epochs: int) -> None:
        plain(parts, epochs)
        change(parts.model)

    return Script(loop, data=samples(8), epochs=1)


def best_weights(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [best_weights, nn.Module.half])
def test_a_function_may_return_with_another_model_which_is_told(
    change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the best epoch, say; the job's weights are those of the last step."""
    script = ending_with(change)
    with caplog.at_level(logging.WARNING, "steepest.loop.model"):
        found = run(script, 2)
    assert difference(found.weights, ending_with(lambda _: None).alone(2)) < 1e-12
    told = [each for each in caplog.messages if "result.state_dict" in each]
    assert told == [
        "the function has returned with other trained parameters than its last step has given: result.state_dict, "
        "and checkpoints, have those of the step"
    ]


def averaging(parts: Parts, epochs: int) -> None:
    """Reads weights uncounted behind each step, as those do that average them."""
    average = {name: each.data.clone() for name, each in parts.model.named_parameters()}
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()
            for name, each in parts.model.named_parameters():
                average[name].mul_(0.9).add_(each.data, alpha=0.1)


def test_reading_weights_uncounted_is_no_write() -> None:
    script = Script(averaging, model=wide, optimizer=sgd(lr=1e-4), data=samples(96), epochs=1)
    assert difference(run(script, 2).weights, script.alone(2)) < 1e-12
