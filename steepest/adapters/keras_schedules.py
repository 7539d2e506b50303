"""Keras' learning-rate schedules as functions of the step, for processes without TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Rate = Callable[[int], float]
_Formula = Callable[[Mapping[str, Any], np.float32], Any]


@dataclass(frozen=True)
class KerasSchedule:
    """One of `keras.optimizers.schedules`, by Keras' formula, in float32 as there.

    Args:
        name: the class' name, one of `SCHEDULES`.
        config: what its `get_config` returns.

    Example:
        >>> halving = {"initial_learning_rate": 0.5, "decay_steps": 2, "decay_rate": 0.5}
        >>> KerasSchedule("ExponentialDecay", {**halving, "staircase": False})(4)
        0.125
    """

    name: str
    config: Mapping[str, Any]

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        numbers = {
            key: np.float32(value) if isinstance(value, (int, float)) else value
            for key, value in self.config.items()
            if not isinstance(value, bool)
        }
        return float(SCHEDULES[self.name]({**self.config, **numbers}, np.float32(step)))


def _exponential(config: Mapping[str, Any], step: Any) -> Any:
    power = step / config["decay_steps"]
    if config["staircase"]:
        power = np.floor(power)
    return config["initial_learning_rate"] * np.power(config["decay_rate"], power)


def _inverse_time(config: Mapping[str, Any], step: Any) -> Any:
    part = step / config["decay_steps"]
    if config["staircase"]:
        part = np.floor(part)
    return config["initial_learning_rate"] / (1 + config["decay_rate"] * part)


def _piecewise(config: Mapping[str, Any], step: Any) -> Any:
    passed = sum(step > boundary for boundary in config["boundaries"])
    return np.float32(config["values"][passed])


def _polynomial(config: Mapping[str, Any], step: Any) -> Any:
    steps, end = config["decay_steps"], config["end_learning_rate"]
    if config["cycle"]:
        steps = steps * (np.ceil(step / steps) if step else 1)
    else:
        step = min(step, steps)
    scale = np.power(1 - step / steps, config["power"])
    return (config["initial_learning_rate"] - end) * scale + end


def _cosine(config: Mapping[str, Any], step: Any) -> Any:
    begin, target = config["initial_learning_rate"], config["warmup_target"]
    if target is not None:
        warmup = config["warmup_steps"]
        if step < warmup:
            return (target - begin) * (step / warmup) + begin
        step, begin = step - warmup, target
    part = min(step, config["decay_steps"]) / config["decay_steps"]
    return begin * _cosine_factor(config["alpha"], part)


def _cosine_restarts(config: Mapping[str, Any], step: Any) -> Any:
    part, growth = step / config["first_decay_steps"], config["t_mul"]
    if growth == 1:
        restarts = np.floor(part)
        part = part - restarts
    else:
        restarts = np.floor(np.log(1 - part * (1 - growth)) / np.log(growth))
        begun = (1 - np.power(growth, restarts)) / (1 - growth)
        part = (part - begun) / np.power(growth, restarts)
    height = np.power(config["m_mul"], restarts)
    return config["initial_learning_rate"] * _cosine_factor(config["alpha"], part, height)


def _cosine_factor(alpha: Any, part: Any, height: Any = 1) -> Any:
    wave = np.float32(0.5) * height * (1 + np.cos(np.float32(np.pi) * part))
    return (1 - alpha) * wave + alpha


#: The schedules whose formulas are known here, by the class' name.
SCHEDULES: dict[str, _Formula] = {
    "ExponentialDecay": _exponential,
    "InverseTimeDecay": _inverse_time,
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": _polynomial,
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _cosine_restarts,
}
