"""Keras' optimizers as torch optimizers: Keras' own formulas, for servers without TensorFlow."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

Group = dict[str, Any]
State = dict[str, torch.Tensor]


class KerasRule(torch.optim.Optimizer):
    """What all of Keras' optimizers do: clip a gradient, decay the weight, then update it.

    Args:
        params: parameters or groups of them.
        defaults: hyperparameters, among them `lr`, `weight_decay`, `clipnorm` and `clipvalue`, of
            which the last three may be None.
    """

    #: whether gradients are as they were after a step
    keeps_gradients = True

    def __init__(self, params: Iterable[Any], defaults: Group) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient; a closure is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = _clipped(parameter.grad, group)
                if group["weight_decay"] is not None:
                    parameter.sub_(parameter, alpha=group["weight_decay"] * group["lr"])
                self.update(parameter, gradient, self.state[parameter], group)

    @abstractmethod
    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group
    ) -> None:
        """Update one parameter in place.

        Args:
            parameter: of any shape.
            gradient: of the same shape; it must not be written to.
            state: of the parameter, empty before its first update.
            group: its hyperparameters.
        """


def _clipped(gradient: torch.Tensor, group: Group) -> torch.Tensor:
    """Return a gradient within `clipnorm` or `clipvalue`, of which Keras allows one."""
    if group["clipnorm"]:
        norm = gradient.norm().clamp_(min=group["clipnorm"])
        return gradient.mul(group["clipnorm"]).div_(norm)
    if group["clipvalue"]:
        return gradient.clamp(-group["clipvalue"], group["clipvalue"])
    return gradient


class KerasSGD(KerasRule):
    """`keras.optimizers.SGD`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        common = {"weight_decay": weight_decay, "clipnorm": clipnorm, "clipvalue": clipvalue}
        super().__init__(params, {**own, **common})

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group
    ) -> None:
        """Update one parameter in place."""
        if group["momentum"] == 0:
            parameter.sub_(gradient, alpha=group["lr"])
            return
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].mul_(group["momentum"]).sub_(gradient, alpha=group["lr"])
        if group["nesterov"]:
            parameter.add_(momentum, alpha=group["momentum"]).sub_(gradient, alpha=group["lr"])
        else:
            parameter.add_(momentum)


class KerasAdam(KerasRule):
    """`keras.optimizers.Adam`, and with `weight_decay` `keras.optimizers.AdamW`.

    Keras adds epsilon to the root of the uncorrected second moment, torch to the corrected one.
    """

    def __init__(  # noqa: PLR0913 - Keras' own settings
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
    ) -> None:
        own = {"lr": lr, "beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}
        common = {"weight_decay": weight_decay, "clipnorm": clipnorm, "clipvalue": clipvalue}
        super().__init__(params, {**own, "amsgrad": amsgrad, **common})

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group
    ) -> None:
        """Update one parameter in place."""
        if not state:
            state["step"] = torch.zeros(())
            state["momentum"] = torch.zeros_like(parameter)
            state["velocity"] = torch.zeros_like(parameter)
            if group["amsgrad"]:
                state["velocity_hat"] = torch.zeros_like(parameter)
        state["step"] += 1
        rate = group["lr"] * _correction(float(state["step"]), parameter.dtype, group)
        if parameter.dtype in (torch.float32, torch.float64) and parameter.is_contiguous():
            _fused(parameter, gradient, state, group, rate)
            return
        momentum = state["momentum"].lerp_(gradient, 1 - group["beta_1"])
        velocity = state["velocity"].lerp_(gradient.square(), 1 - group["beta_2"])
        if group["amsgrad"]:
            velocity = torch.maximum(state["velocity_hat"], velocity, out=state["velocity_hat"])
        parameter.addcdiv_(momentum, velocity.sqrt().add_(group["epsilon"]), value=-rate)


def _fused(
    parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group, rate: float
) -> None:
    """Update a parameter by torch's kernel, in one pass over its memory instead of seven.

    The kernel divides by ``sqrt(velocity / second) + eps`` and multiplies by ``lr / first``.
    """
    first = 1 - group["beta_1"] ** float(state["step"])
    second = 1 - group["beta_2"] ** float(state["step"])
    torch._fused_adam_(
        [parameter],
        [gradient],
        [state["momentum"]],
        [state["velocity"]],
        [state["velocity_hat"]] if group["amsgrad"] else [],
        [state["step"]],
        lr=rate * first / math.sqrt(second),
        beta1=group["beta_1"],
        beta2=group["beta_2"],
        weight_decay=0.0,
        eps=group["epsilon"] / math.sqrt(second),
        amsgrad=group["amsgrad"],
        maximize=False,
    )


def _correction(step: float, dtype: torch.dtype, group: Group) -> float:
    """Return the factor by which Adam's first steps are corrected.

    It is computed in the parameter's dtype, as Keras does: in float32 the difference is 1e-5. Keras
    rounds the bases to float32 in any case. Half precision takes float32: 0.999 would be 1 in it.
    """
    dtype = dtype if dtype == torch.float64 else torch.float32
    count = torch.tensor(step, dtype=dtype)
    first = 1 - torch.tensor(group["beta_1"]).to(dtype).pow(count)
    second = 1 - torch.tensor(group["beta_2"]).to(dtype).pow(count)
    return float(second.sqrt().div(first))


class KerasAdagrad(KerasRule):
    """`keras.optimizers.Adagrad`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
    ) -> None:
        own = {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "epsilon": epsilon}
        common = {"weight_decay": weight_decay, "clipnorm": clipnorm, "clipvalue": clipvalue}
        super().__init__(params, {**own, **common})

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group
    ) -> None:
        """Update one parameter in place."""
        if not state:
            begin = group["initial_accumulator_value"]
            state["accumulator"] = torch.full_like(parameter, begin)
        accumulator = state["accumulator"].addcmul_(gradient, gradient)
        root = accumulator.add(group["epsilon"]).sqrt_()
        parameter.addcdiv_(gradient, root, value=-group["lr"])


class KerasRMSprop(KerasRule):
    """`keras.optimizers.RMSprop`."""

    def __init__(  # noqa: PLR0913 - Keras' own settings
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
    ) -> None:
        own = {"lr": lr, "rho": rho, "momentum": momentum, "epsilon": epsilon}
        common = {"weight_decay": weight_decay, "clipnorm": clipnorm, "clipvalue": clipvalue}
        super().__init__(params, {**own, "centered": centered, **common})

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group
    ) -> None:
        """Update one parameter in place."""
        if not state:
            state["velocity"] = torch.zeros_like(parameter)
            if group["centered"]:
                state["average_gradient"] = torch.zeros_like(parameter)
            if group["momentum"] > 0:
                state["momentum"] = torch.zeros_like(parameter)
        rho = group["rho"]
        velocity = state["velocity"].mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
        denominator = velocity.add(group["epsilon"])
        if group["centered"]:
            average = state["average_gradient"].mul_(rho).add_(gradient, alpha=1 - rho)
            denominator = velocity.addcmul(average, average, value=-1).add_(group["epsilon"])
        denominator.sqrt_()
        if group["momentum"] > 0:
            momentum = state["momentum"].mul_(group["momentum"])
            parameter.sub_(momentum.addcdiv_(gradient, denominator, value=group["lr"]))
        else:
            parameter.addcdiv_(gradient, denominator, value=-group["lr"])
