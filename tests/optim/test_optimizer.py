"""OptimizerSpec and Schedule: what is rebuilt on servers does what torch would have done in one process."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedules
from torch.optim.optimizer import register_optimizer_step_pre_hook

from steepest.core.optim.spec import OptimizerSpec, Schedule
from steepest.core.optim.torch_without_compiler import take_step
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import ConfigurationError

Factory = Callable[[Iterable[Any]], torch.optim.Optimizer]

ELEMENTWISE: dict[str, Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, betas=(0.8, 0.95)),
    "adam unfused": lambda p: torch.optim.Adam(p, lr=0.01, fused=False, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}
WHOLE: dict[str, Factory] = {
    "muon": lambda p: torch.optim.Muon(p, lr=0.02, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}
SHAPES = {"body.weight": (5, 7), "body.bias": (5,), "scale": (), "head.weight": (3, 5)}


def parameters_of(
    shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype))
        for name, s in shapes.items()
    }


def read(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], **options: Any
) -> OptimizerSpec:
    return OptimizerSpec.read(optimizer, {id(p): name for name, p in parameters.items()}, **options)


def spec_of(make: Factory, **options: Any) -> OptimizerSpec:
    parameters = parameters_of({"a": (4, 6), "b": (3, 2)})
    return read(make(parameters.values()), parameters, **options)


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_may_be_split(name: str) -> None:
    assert spec_of(ELEMENTWISE[name]).elementwise


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WHOLE)
def test_others_want_whole_tensors(name: str) -> None:
    assert not spec_of(WHOLE[name]).elementwise


@pytest.mark.parametrize("rate", [0.0, 1e-12])
@pytest.mark.parametrize(("name", "split"), [("sgd", True), ("adafactor", False)])
def test_a_tiny_learning_rate_hides_no_difference(name: str, split: bool, rate: float) -> None:
    parameters = parameters_of({"a": (4, 6)})
    optimizer = (ELEMENTWISE | WHOLE)[name](parameters.values())
    optimizer.param_groups[0]["lr"] = rate
    assert read(optimizer, parameters).elementwise is split


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_that_cannot_run_on_servers_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{name} cannot be rebuilt or stepped on a server"
    ):
        spec_of(getattr(torch.optim, name))


def test_an_optimizer_whose_constructor_hides_a_setting_is_refused() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, params: Any, power: int) -> None:
            super().__init__(params, lr=10.0**power)

    with pytest.raises(ConfigurationError, match="Odd cannot be rebuilt"):
        spec_of(lambda p: Odd(p, -2))


def test_what_is_not_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="returned Linear: return a torch.optim.Optimizer"):
        OptimizerSpec.read(torch.nn.Linear(1, 1), {})  # type: ignore[arg-type]


def test_a_parameter_of_another_module_is_refused() -> None:
    mine, foreign = parameters_of(), torch.nn.Parameter(torch.zeros(2, 9))
    with pytest.raises(
        ConfigurationError, match=r"tensor of shape \(2, 9\) that is not a parameter of the module"
    ):
        read(torch.optim.SGD([*mine.values(), foreign], lr=0.1), mine)


def test_an_optimizer_over_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no parameters"):
        read(torch.optim.SGD([{"params": []}], lr=0.1), parameters_of())


def test_groups_are_kept_by_name() -> None:
    parameters = parameters_of()
    optimizer = torch.optim.SGD(
        [
            {"params": [parameters["head.weight"], parameters["scale"]], "lr": 0.5},
            {"params": [parameters["body.weight"]], "weight_decay": 0.1},
        ],
        lr=0.1,
        momentum=0.9,
    )
    spec = read(optimizer, parameters)
    (first, first_hyper), (second, second_hyper) = spec.groups
    assert (first, second) == (("head.weight", "scale"), ("body.weight",))
    assert (first_hyper["lr"], first_hyper["weight_decay"], first_hyper["momentum"]) == (
        0.5,
        0,
        0.9,
    )
    assert (second_hyper["lr"], second_hyper["weight_decay"]) == (0.1, 0.1)
    assert spec.trainable() == {"head.weight", "scale", "body.weight"}
    assert spec.name == "SGD"


def test_a_recipe_is_plain_and_can_be_sent() -> None:
    parameters = parameters_of()
    named = torch.optim.Adam(parameters.items(), lr=torch.tensor(0.25), betas=[0.5, 0.75])  # type: ignore[arg-type]
    spec = read(named, parameters)
    assert spec.groups[0][1]["lr"] == 0.25
    assert isinstance(spec.groups[0][1]["lr"], float)
    assert spec.groups[0][1]["betas"] == (0.5, 0.75)
    assert pickle.loads(pickle.dumps(spec)) == spec
    built, _ = spec.build(list(parameters.items()))
    assert built.param_groups[0]["lr"] == 0.25


def test_reading_leaves_optimizer_parameters_and_random_state_alone() -> None:
    parameters = parameters_of()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = torch.optim.Adam(parameters.values())
    random = torch.get_rng_state()
    read(optimizer, parameters, lr_scheduler=lambda o: schedules.StepLR(o, 1))
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())
    assert torch.equal(random, torch.get_rng_state())


# -- building -------------------------------------------------------------------------------------


def train_both(
    make: Factory, dtype: torch.dtype, **plan: Any
) -> tuple[dict[str, torch.Tensor], ...]:
    """Six steps by torch on whole tensors, and by optimizers built over chunks."""
    parameters = parameters_of(plan.pop("shapes", SHAPES), dtype)
    optimizer = make(parameters.values())
    spec = read(optimizer, parameters)
    layout = ParameterLayout.plan(
        [(n, tuple(p.shape), dtype, True) for n, p in parameters.items()], **plan
    )
    buffer, gradients = layout.allocate(), layout.allocate()
    for index, entry in enumerate(layout.entries):
        layout.entry_view(buffer, index).copy_(parameters[entry.name].detach())
    servers = []
    for chunk in layout.chunks:
        views = layout.slice_views(chunk, layout.chunk_view(buffer, chunk.index))
        names = [layout.entries[piece.entry].name for piece in chunk.slices]
        built, indices = spec.build(list(zip(names, views, strict=True)))
        assert indices == [i for i, (group, _) in enumerate(spec.groups) if set(group) & set(names)]
        for view, gradient in zip(
            views, layout.slice_views(chunk, layout.chunk_view(gradients, chunk.index)), strict=True
        ):
            view.grad = gradient
        servers.append(built)
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        for index, entry in enumerate(layout.entries):
            gradient = torch.randn(entry.shape, generator=generator).to(dtype)
            layout.entry_view(gradients, index).copy_(gradient)
            parameters[entry.name].grad = gradient
        optimizer.step()
        for server in servers:
            server.step()
    views = {entry.name: layout.entry_view(buffer, i) for i, entry in enumerate(layout.entries)}
    return {name: p.detach() for name, p in parameters.items()}, views


TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}


@pytest.mark.few(20)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_split_over_chunks_equals_torch_on_whole_tensors(name: str, dtype: torch.dtype) -> None:
    whole, split = train_both(ELEMENTWISE[name], dtype, chunk_bytes=40)
    for key, value in whole.items():
        torch.testing.assert_close(
            split[key], value, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensor_optimizers_equal_torch_too(name: str) -> None:
    shapes = {"a": (5, 7), "b": (3, 4), "c": (2, 2)}
    whole, split = train_both(
        WHOLE[name], torch.float32, chunk_bytes=40, split_tensors=False, shapes=shapes
    )
    for key, value in whole.items():
        torch.testing.assert_close(split[key], value, rtol=1e-5, atol=1e-5)


def test_groups_keep_their_hyperparameters_over_chunks() -> None:
    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.AdamW(
            [{"params": [first], "lr": 0.5, "betas": (0.5, 0.5)}, {"params": rest}], lr=0.01
        )

    whole, split = train_both(make, torch.float64, chunk_bytes=40)
    for key, value in whole.items():
        torch.testing.assert_close(split[key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("choice", "fused"), [({}, True), ({"fused": False}, False), ({"foreach": True}, False)]
)
def test_fused_where_torch_has_it_and_the_user_does_not_object(
    choice: dict[str, bool], fused: bool
) -> None:
    parameters = parameters_of()
    spec = read(torch.optim.Adam(parameters.values(), **choice), parameters)  # type: ignore[arg-type]
    built, _ = spec.build(list(parameters.items()))
    assert bool(built.param_groups[0]["fused"]) is fused


def test_a_chunk_without_members_of_a_group_leaves_the_group_out() -> None:
    parameters = parameters_of()
    groups: list[dict[str, Any]] = [
        {"params": [p], "lr": 0.1 * i} for i, p in enumerate(parameters.values())
    ]
    spec = read(torch.optim.SGD(groups, lr=1.0), parameters)
    built, indices = spec.build([(name, parameters[name]) for name in ("scale", "body.bias")])
    assert indices == [1, 2]
    assert [group["lr"] for group in built.param_groups] == [0.1, 0.2]


# -- schedules ------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: schedules.StepLR(o, 3, gamma=0.5),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 8, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=0.5, total_steps=12),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "warm-up from 0": lambda o: schedules.LambdaLR(o, lambda step: min(1.0, step / 5)),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o,
        [schedules.LinearLR(o, 0.1, total_iters=4), schedules.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
}


def loop(
    make: Factory, scheduler: Callable[[torch.optim.Optimizer], Any], steps: int
) -> list[list[dict[str, Any]]]:
    """The hyperparameters of each step in the loop that everybody writes."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = make(
        [{"params": [parameter], "lr": 0.2}, {"params": [torch.nn.Parameter(torch.zeros(1, 1))]}]
    )
    stepper = scheduler(optimizer)
    found = []
    for _ in range(steps):
        found.append(
            [
                {k: copy.copy(v) for k, v in g.items() if k != "params"}
                for g in optimizer.param_groups
            ]
        )
        optimizer.step()
        stepper.step()
    return found


@pytest.mark.few(14)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "muon"])
def test_a_schedule_is_that_of_a_loop_in_any_order(kind: str, name: str) -> None:
    make = (ELEMENTWISE | WHOLE)[kind]
    expected = loop(make, SCHEDULERS[name], 11)
    parameters = parameters_of({"a": (2, 2), "b": (1, 1)})
    groups = [{"params": [parameters["a"]], "lr": 0.2}, {"params": [parameters["b"]]}]
    spec = read(make(groups), parameters, lr_scheduler=SCHEDULERS[name])
    schedule = Schedule(spec)
    for step in (0, 1, 2, 10, 3, 3, 9, 0, 5):
        changed = schedule.at(step)
        assert len(changed) == 2
        for (_, base), change, wanted in zip(spec.groups, changed, expected[step], strict=True):
            now = base | change
            assert {key: pytest.approx(wanted[key]) for key in now} == now
            assert all(base[key] != value for key, value in change.items())


def test_one_cycle_ships_momentum_too() -> None:
    spec = spec_of(ELEMENTWISE["adam"], lr_scheduler=SCHEDULERS["OneCycleLR"])
    assert Schedule(spec).at(2)[0].keys() == {"lr", "betas"}


def test_a_group_without_members_does_not_disturb_the_schedule() -> None:
    parameters = parameters_of({"a": (2, 2)})
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.3}, {"params": [parameters["a"]]}]
    spec = read(
        torch.optim.SGD(groups, lr=0.1),
        parameters,
        lr_scheduler=lambda o: schedules.ExponentialLR(o, 0.5),
    )
    assert [group["lr"] for group in Schedule(spec).at(1)] == [0.15, 0.05]


def test_without_a_schedule_nothing_changes() -> None:
    assert Schedule(spec_of(ELEMENTWISE["adam"])).at(7) == [{}]


@pytest.mark.parametrize("number", [float, int, np.float32, np.float64])
def test_a_learning_rate_is_a_function_of_the_step(number: Callable[[int], float]) -> None:
    schedule = Schedule(
        spec_of(ELEMENTWISE["momentum"], learning_rate=lambda step: number(step + 1))
    )
    assert [schedule.at(step) for step in (3, 0)] == [[{"lr": 4.0}], [{"lr": 1.0}]]
    assert isinstance(schedule.at(1)[0]["lr"], float)


@pytest.mark.parametrize("value", [None, "0.1", True, float("nan"), float("inf")])
def test_a_learning_rate_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"learning_rate\(1\) returned .*: return a"):
        spec_of(ELEMENTWISE["sgd"], learning_rate=lambda step: value)


def test_schedules_that_cannot_run_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"give steepest\.ReduceOnPlateau to fit"):
        spec_of(ELEMENTWISE["sgd"], lr_scheduler=schedules.ReduceLROnPlateau)
    with pytest.raises(
        ConfigurationError, match=r"returned float: give one of torch\.optim\.lr_scheduler"
    ):
        spec_of(ELEMENTWISE["sgd"], lr_scheduler=lambda o: 0.1)
    with pytest.raises(ConfigurationError, match="both lr_scheduler= and learning_rate="):
        spec_of(
            ELEMENTWISE["sgd"], lr_scheduler=SCHEDULERS["StepLR"], learning_rate=lambda step: 0.1
        )


def test_state_flags_name_the_switches_that_change_what_is_kept() -> None:
    spec = spec_of(lambda p: torch.optim.Adam(p, amsgrad=True))
    assert spec.state_flags()["0.amsgrad"] is True
    assert not any("fused" in key or "foreach" in key for key in spec.state_flags())


WITHOUT_COMPILER = """
import sys
import torch
from steepest.core.models.torch import TorchModel
from steepest.testing import InProcessCluster

names = sys.argv[1:]
def creator(worker, device):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return TorchModel(module, loss=torch.nn.functional.mse_loss, data=(torch.randn(8, 3), torch.randn(8, 2)),
                      batch_size=2, optimizer=lambda m: getattr(torch.optim, names[0])(m.parameters()))

while names:
    cluster = InProcessCluster(creator, num_workers=2)
    cluster.step(3)
    names.pop(0)
assert "torch._dynamo" not in sys.modules
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
assert "torch._dynamo" in sys.modules, "torch has become lazier: steepest.core.optim.torch_without_compiler can go"
"""


SPARED = """
import sys
import torch
from steepest.core.optim.torch_without_compiler import spare_compiler

spare_compiler()
spare_compiler()
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
def cleared():
    weight.sum().backward()
    optimizer.zero_grad()
    return weight.grad is None
optimizer.load_state_dict(optimizer.state_dict())
assert cleared() and "torch._dynamo" not in sys.modules
import torch._dynamo
assert cleared() and cleared()
compiled = torch.compile(lambda x: (x * weight).sum(), backend="eager")
assert compiled(torch.ones(1)) == 1 and cleared()
plain = torch.optim.Optimizer.zero_grad.__wrapped__
assert plain.__dynamo_disable.__module__.startswith("torch."), plain.__dynamo_disable
"""


@pytest.mark.full
@pytest.mark.long
def test_a_users_optimizer_is_made_without_torchs_compiler_until_that_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPARED], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_torchs_optimizers_run_without_its_compiler() -> None:
    names = [
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "NAdam",
        "RAdam",
        "Adafactor",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER, *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_a_step_is_torchs_own_with_hooks_and_for_other_optimizers() -> None:
    calls: list[str] = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append("own")
            return super().step(closure)

    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    take_step(Own([parameter], lr=0.5))
    assert calls == ["own"]
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("hook"))
    try:
        take_step(torch.optim.SGD([parameter], lr=0.25))
    finally:
        handle.remove()
    assert calls == ["own", "hook"]
    take_step(torch.optim.SGD([parameter], lr=0.125))
    assert calls == ["own", "hook"]
    assert torch.equal(parameter.detach(), torch.full((3,), 0.125))
    assert parameter.requires_grad
