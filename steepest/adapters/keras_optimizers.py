"""Keras' optimizers as recipes: read off the Keras object, to be run by servers without Keras."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import torch

from steepest.adapters.keras_rules import (
    KerasAdadelta,
    KerasAdagrad,
    KerasAdam,
    KerasAdamax,
    KerasFtrl,
    KerasLion,
    KerasNadam,
    KerasRMSprop,
    KerasRule,
    KerasSGD,
)
from steepest.adapters.keras_schedules import SCHEDULES, KerasSchedule
from steepest.core.optim.spec import OptimizerSpec
from steepest.errors import ConfigurationError

log = logging.getLogger(__name__)

_COMMON = ("weight_decay", "clipnorm", "clipvalue")
_ADAM = ("beta_1", "beta_2", "epsilon", "amsgrad", *_COMMON)
#: By Keras' class: the rule that servers run, and the names of its settings, which are Keras' own.
_RULES: dict[type, tuple[type[KerasRule], tuple[str, ...]]] = {
    keras.optimizers.SGD: (KerasSGD, ("momentum", "nesterov", *_COMMON)),
    keras.optimizers.Adam: (KerasAdam, _ADAM),
    keras.optimizers.AdamW: (KerasAdam, _ADAM),
    keras.optimizers.Adagrad: (
        KerasAdagrad,
        ("initial_accumulator_value", "epsilon", *_COMMON),
    ),
    keras.optimizers.RMSprop: (
        KerasRMSprop,
        ("rho", "momentum", "epsilon", "centered", *_COMMON),
    ),
    keras.optimizers.Nadam: (KerasNadam, ("beta_1", "beta_2", "epsilon", *_COMMON)),
    keras.optimizers.Adamax: (KerasAdamax, ("beta_1", "beta_2", "epsilon", *_COMMON)),
    keras.optimizers.Lion: (KerasLion, ("beta_1", "beta_2", *_COMMON)),
    keras.optimizers.Adadelta: (KerasAdadelta, ("rho", "epsilon", *_COMMON)),
    keras.optimizers.Ftrl: (
        KerasFtrl,
        (
            "learning_rate_power",
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "l2_shrinkage_regularization_strength",
            "beta",
            *_COMMON,
        ),
    ),
}
#: What Keras rounds to float32, whatever dtype it computes in, besides the weight decay.
_ROUNDED: dict[type[KerasRule], set[str]] = {
    KerasSGD: {"momentum"},
    KerasAdagrad: {"initial_accumulator_value"},
    KerasFtrl: {"initial_accumulator_value"},
    KerasLion: {"beta_1", "beta_2"},
}
#: Settings that belong elsewhere, and what to do.
_ELSEWHERE = {
    "global_clipnorm": "the norm is of all servers' gradients together: give the strategy "
    "clip_norm=, such as ParameterServerStrategy(clip_norm=1.0)",
    "gradient_accumulation_steps": "give DistributedSGD(accumulate=)",
    "use_ema": "servers keep no averages of weights: leave it out, and average what "
    "DistributedSGD.weights() returns after each step()",
    "loss_scale_factor": "gradients are not scaled: use the policy 'mixed_bfloat16', which needs "
    "no scaling",
}


def read_optimizer(
    optimizer: Any,
    variables: Mapping[str, Any],
    learning_rate: Callable[[int], float] | None = None,
) -> OptimizerSpec:
    """Return the recipe of a Keras optimizer.

    Args:
        optimizer: of Keras; it is not changed, and the state that it may have is not used.
        variables: the Keras variables to train, by name.
        learning_rate: a function of the step, instead of the optimizer's own.

    Raises:
        ConfigurationError: an optimizer, or a setting of it, that servers cannot run.
    """
    if type(optimizer) not in _RULES:
        raise ConfigurationError(
            f"the optimizer is a {type(optimizer).__name__}: give one of keras.optimizers "
            f"{', '.join(cls.__name__ for cls in _RULES)}"
        )
    rate, own_schedule = _learning_rate(optimizer)
    name = type(optimizer).__name__
    for setting, advice in _ELSEWHERE.items():
        if value := getattr(optimizer, setting):
            raise ConfigurationError(f"{name}({setting}={value}): {advice}")
    if int(optimizer.iterations) > 0:
        log.warning(
            "the %s has taken %s steps before: its state (moments, position in a schedule) is not "
            "taken over, training begins with a new one",
            name,
            int(optimizer.iterations),
        )
    rule, settings = _RULES[type(optimizer)]
    hyper = {"lr": rate, **{setting: getattr(optimizer, setting) for setting in settings}}
    for setting in ("weight_decay", *_ROUNDED.get(rule, ())):
        if hyper[setting] is not None:
            hyper[setting] = float(np.float32(hyper[setting]))
    parameters = {name: torch.nn.Parameter(torch.zeros(())) for name in variables}
    groups: dict[bool, list[torch.nn.Parameter]] = {}
    for name, variable in variables.items():
        decays = optimizer.weight_decay is not None and optimizer._use_weight_decay(variable)
        groups.setdefault(decays, []).append(parameters[name])
    made: Any = rule  # each rule takes its own settings
    built = made(
        [
            {"params": members, **({} if decays else {"weight_decay": None})}
            for decays, members in groups.items()
        ],
        **hyper,
    )
    names = {id(parameter): name for name, parameter in parameters.items()}
    spec = OptimizerSpec.read(built, names, learning_rate=learning_rate or own_schedule)
    # a tensor's norm is not known to servers that hold parts of it
    return replace(spec, elementwise=spec.elementwise and not optimizer.clipnorm)


def _learning_rate(optimizer: Any) -> tuple[float, Callable[[int], float] | None]:
    """Return an optimizer's first learning rate, and its schedule, if any."""
    # ConfigurationError: a function without arguments.
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        name = type(rate).__name__
        if type(rate) is getattr(keras.optimizers.schedules, name, None) and name in SCHEDULES:
            schedule = KerasSchedule(name, rate.get_config())
            return schedule(0), schedule
        return float(rate(0)), _Own(rate)
    if callable(rate) and not hasattr(rate, "numpy"):
        raise ConfigurationError(
            "the learning rate is a function without arguments, of which no process knows when it "
            "changes: give a LearningRateSchedule, or a function of the step as learning_rate="
        )
    return float(optimizer.learning_rate.numpy()), None


class _Own:
    """A schedule of the user's own class; processes that ask for its rates need TensorFlow."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def __call__(self, step: int) -> float:
        return float(self._schedule(step))
