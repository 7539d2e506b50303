"""Keras' optimizers on servers: the updates of Keras' own, to rounding."""

# ruff: noqa: I001 - keras_tools comes first: it skips the module where there is no TensorFlow

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.adapters.keras_tools import double  # noqa: F401 - a fixture

import keras
import numpy as np
import pytest
import torch
from keras import optimizers
from keras.optimizers import schedules

from steepest.errors import ConfigurationError
from steepest.adapters.keras_optimizers import read_optimizer
from steepest.core.optim.spec import Schedule

STEPS = 6
SHAPES = {"kernel": (5, 3), "bias": (3,)}

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "sgd-decay": lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "sgd-clipnorm": lambda: optimizers.SGD(0.1, clipnorm=1.5),
    "sgd-clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.3),
    "adam": lambda: optimizers.Adam(0.01),
    "adam-settings": lambda: optimizers.Adam(0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-3),
    "amsgrad": lambda: optimizers.Adam(0.01, beta_2=0.5, amsgrad=True),
    "adam-clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.5, weight_decay=0.1),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adagrad-settings": lambda: optimizers.Adagrad(0.1, 0.0, epsilon=1e-2, weight_decay=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "rmsprop-momentum": lambda: optimizers.RMSprop(0.01, rho=0.8, momentum=0.7),
    "rmsprop-centered": lambda: optimizers.RMSprop(0.01, centered=True, clipvalue=0.5),
    "rmsprop-all": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True, weight_decay=0.1),
    "nadam": lambda: optimizers.Nadam(0.01),
    "nadam-settings": lambda: optimizers.Nadam(0.01, 0.8, 0.95, 1e-3, weight_decay=0.1),
    "adamax": lambda: optimizers.Adamax(0.01),
    "adamax-settings": lambda: optimizers.Adamax(0.01, 0.8, 0.5, 1e-3, weight_decay=0.1),
    "lion": lambda: optimizers.Lion(0.01),
    "lion-settings": lambda: optimizers.Lion(0.01, 0.6, 0.7, weight_decay=0.1, clipvalue=0.5),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "adadelta-settings": lambda: optimizers.Adadelta(0.5, 0.7, 1e-3, weight_decay=0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "ftrl-settings": lambda: optimizers.Ftrl(0.1, -0.3, 0.2, 0.1, 0.2, 0.3, 0.5),
}
SCHEDULES: dict[str, Callable[[], Any]] = {
    "exponential": lambda: schedules.ExponentialDecay(0.1, 3, 0.6),
    "staircase": lambda: schedules.ExponentialDecay(0.1, 3, 0.5, staircase=True),
    "piecewise": lambda: schedules.PiecewiseConstantDecay([2, 5], [0.3, 0.2, 0.1]),
    "polynomial": lambda: schedules.PolynomialDecay(0.1, 7, 0.01, power=2.0),
    "cycle": lambda: schedules.PolynomialDecay(0.1, 3, 0.01, power=0.5, cycle=True),
    "inverse": lambda: schedules.InverseTimeDecay(0.1, 2, 0.5),
    "inverse-staircase": lambda: schedules.InverseTimeDecay(0.1, 2, 0.5, staircase=True),
    "cosine": lambda: schedules.CosineDecay(0.1, 8, alpha=0.1),
    "warmup": lambda: schedules.CosineDecay(0.0, 6, alpha=0.1, warmup_target=0.2, warmup_steps=3),
    "restarts": lambda: schedules.CosineDecayRestarts(0.1, 4, t_mul=2.0, m_mul=0.5, alpha=0.01),
    "even-restarts": lambda: schedules.CosineDecayRestarts(0.1, 4, t_mul=1.0, m_mul=0.9),
}


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    """Keras' dtype; its learning rate is rounded to it."""
    before = keras.config.floatx()
    keras.config.set_floatx(request.param)
    yield request.param
    keras.config.set_floatx(before)


def values(seed: int, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def by_keras(optimizer: Any, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables after the steps of Keras' own optimizer, and before them."""
    variables = {name: keras.Variable(v, name=name) for name, v in values(0, dtype).items()}
    for step in range(STEPS):
        optimizer.apply(
            [keras.ops.convert_to_tensor(v) for v in values(step + 1, dtype).values()],
            list(variables.values()),
        )
    return {name: variable.numpy() for name, variable in variables.items()}, variables


def by_rule(optimizer: Any, dtype: str, parts: int = 1) -> dict[str, torch.Tensor]:
    """The same by the rule on a server, with tensors in so many parts."""
    found = {name: keras.Variable(value, name=name) for name, value in values(0, dtype).items()}
    spec = read_optimizer(optimizer, found)
    assert spec.elementwise == (not optimizer.clipnorm)
    weights = {name: torch.from_numpy(value) for name, value in values(0, dtype).items()}
    slices = [
        (name, torch.nn.Parameter(part))
        for name, weight in weights.items()
        for part in (weight.view(-1).chunk(parts) if parts > 1 else [weight])
    ]
    built, groups = spec.build(slices)
    schedule = Schedule(spec)
    for step in range(STEPS):
        rates = schedule.at(step)
        for index, group in zip(groups, built.param_groups, strict=True):
            group.update(rates[index])
        given = {n: torch.from_numpy(v).view(-1) for n, v in values(step + 1, dtype).items()}
        for name in SHAPES:
            mine = [parameter for other, parameter in slices if other == name]
            pieces = given[name].split([parameter.numel() for parameter in mine])
            for parameter, piece in zip(mine, pieces, strict=True):
                parameter.grad = piece.view(parameter.shape).clone()
        built.step()
    return weights


def close(weights: dict[str, torch.Tensor], expected: dict[str, Any], dtype: str) -> None:
    for name, value in expected.items():
        difference = np.abs(weights[name].numpy() - value).max()
        assert difference <= {"float32": 1e-6, "float64": 1e-14}[dtype], name
        assert not np.allclose(value, values(0, dtype)[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rule_takes_the_steps_of_keras(name: str, dtype: str) -> None:
    expected, _ = by_keras(OPTIMIZERS[name](), dtype)
    close(by_rule(OPTIMIZERS[name](), dtype), expected, dtype)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "clipnorm" not in name])
def test_a_rule_takes_the_same_steps_on_parts_of_tensors(name: str) -> None:
    whole = by_rule(OPTIMIZERS[name](), "float32")
    parts = by_rule(OPTIMIZERS[name](), "float32", 3)
    assert all(torch.equal(parts[name], whole[name]) for name in SHAPES)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.usefixtures("dtype")
def test_schedules_are_those_of_keras(name: str) -> None:
    spec = read_optimizer(
        optimizers.SGD(SCHEDULES[name]()), {"w": keras.Variable(np.zeros(2), name="w")}
    )
    schedule, own = Schedule(spec), SCHEDULES[name]()
    rates = [schedule.at(step)[0]["lr"] for step in range(20)]
    expected = [float(own(keras.Variable(step, dtype="int64"))) for step in range(20)]
    assert rates == pytest.approx(expected, abs=1e-7)
    assert len(set(rates)) > 2


def test_an_optimizer_with_a_schedule_takes_the_steps_of_keras(dtype: str) -> None:
    def make() -> Any:
        return optimizers.AdamW(SCHEDULES["warmup"](), weight_decay=0.1)

    close(by_rule(make(), dtype), by_keras(make(), dtype)[0], "float32")  # in which rates are


@pytest.mark.usefixtures("double")
def test_variables_may_be_excluded_from_weight_decay() -> None:
    def make() -> Any:
        optimizer = optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    expected, _ = by_keras(make(), "float64")
    close(by_rule(make(), "float64"), expected, "float64")
    decayed, _ = by_keras(optimizers.AdamW(0.01, weight_decay=0.5), "float64")
    assert not np.allclose(decayed["bias"], expected["bias"])


class Halving(schedules.LearningRateSchedule):
    """A schedule of a user's own."""

    def __call__(self, step: Any) -> Any:
        return 0.1 / (1 + keras.ops.cast(step, "float32"))


def test_a_schedule_of_ones_own_and_a_function_of_the_step_are_taken() -> None:
    weight = {"w": keras.Variable(np.zeros(2), name="w")}
    own = Schedule(read_optimizer(optimizers.SGD(Halving()), weight))
    assert own.at(2)[0]["lr"] == pytest.approx(0.1 / 3)
    given = read_optimizer(optimizers.SGD(Halving()), weight, lambda step: 0.5 + step)
    assert Schedule(given).at(2)[0]["lr"] == 2.5


class Custom(optimizers.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Custom(0.1), "the optimizer is a Custom: give one of keras.optimizers SGD, Adam,"),
        (lambda: optimizers.Lamb(0.1), "a Lamb: give one of .* Nadam, Adamax, Lion, Adadelta,"),
        (lambda: "adam", "a str: give one of"),
        (lambda: optimizers.SGD(lambda: 0.1), "function without arguments.*LearningRateSchedule"),
        (lambda: optimizers.SGD(0.1, global_clipnorm=1.0), "give the strategy clip_norm="),
        (lambda: optimizers.SGD(0.1, use_ema=True), r"average what .*\.weights"),
        (lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2), "accumulate="),
        (lambda: optimizers.SGD(0.1, loss_scale_factor=8.0), "mixed_bfloat16"),
        (lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)), "LossScaleOptimizer: give"),
    ],
)
def test_what_servers_cannot_run_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_optimizer(make(), {"w": keras.Variable(np.zeros(2), name="w")})


def test_a_state_that_is_not_taken_over_is_told(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = optimizers.Adam(0.1)
    _, variables = by_keras(optimizer, "float32")
    read_optimizer(optimizer, variables)
    assert f"has taken {STEPS} steps before" in caplog.text


@pytest.mark.parametrize("name", ["adam", "amsgrad", "nadam", "adamax"])
def test_half_precision_follows_float32(name: str) -> None:
    weights: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        value = torch.from_numpy(values(0, "float32")["kernel"]).to(dtype)
        spec = read_optimizer(OPTIMIZERS[name](), {"w": keras.Variable(np.zeros(2), name="w")})
        parameter = torch.nn.Parameter(value)
        optimizer, _ = spec.build([("w", parameter)])
        for step in range(STEPS):
            parameter.grad = torch.from_numpy(values(step + 1, "float32")["kernel"]).to(dtype)
            optimizer.step()
        weights.append(parameter.detach().float())
    assert torch.allclose(*weights, atol=0.03)
    assert not torch.allclose(
        weights[0], torch.from_numpy(values(0, "float32")["kernel"]), atol=0.03
    )
