"""Keras' optimizers as torch optimizers: Keras' own formulas, for servers without TensorFlow."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

Group = dict[str, Any]
State = dict[str, Tensor]


#: Settings of all of Keras' optimizers.
_COMMON: Group = {"weight_decay": None, "clipnorm": None, "clipvalue": None}


class KerasRule(torch.optim.Optimizer):
    """What all of Keras' optimizers do: clip a gradient, decay the weight, then update it."""

    #: whether gradients are as they were after a step
    keeps_gradients = True
    #: whether each element is updated by itself, and tensors of all shapes by one rule, see `OptimizerSpec.elementwise`
    is_elementwise = True

    own: ClassVar[Group]  # hyperparameters of the class, `lr` among them, and their defaults

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, {**_COMMON, **self.own, **settings})

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
    def update(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """Update one parameter in place.

        Args:
            parameter: of any shape.
            gradient: of the same shape; it must not be written to.
            state: of the parameter, empty before its first update.
            group: its hyperparameters.
        """


def _clipped(gradient: Tensor, group: Group) -> Tensor:
    """Return a gradient within `clipnorm` or `clipvalue`, of which Keras allows one."""
    if group["clipnorm"]:
        norm = gradient.norm().clamp_(min=group["clipnorm"])
        return gradient.mul(group["clipnorm"]).div_(norm)
    if group["clipvalue"]:
        return gradient.clamp(-group["clipvalue"], group["clipvalue"])
    return gradient


class KerasSGD(KerasRule):
    """`keras.optimizers.SGD`."""

    own = {"lr": 0.01, "momentum": 0.0, "nesterov": False}

    def update(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
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

    own = {"lr": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False}

    def update(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
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


def _fused(parameter: Tensor, gradient: Tensor, state: State, group: Group, rate: float) -> None:
    """Update a parameter by torch's kernel, in one pass over its memory instead of seven."""
    # The kernel divides by ``sqrt(velocity / second) + eps`` and multiplies by ``lr / first``.
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
    """Return the factor by which Adam's first steps are corrected."""
    # Computed in the parameter's dtype, as Keras does: in float32 the difference is 1e-5. Keras rounds the bases to
    # float32 in any case. Half precision takes float32: 0.999 would be 1 in it.
    dtype = _wide(dtype)
    count = torch.tensor(step, dtype=dtype)
    first = 1 - _rounded(group["beta_1"], dtype).pow(count)
    second = 1 - _rounded(group["beta_2"], dtype).pow(count)
    return float(second.sqrt().div(first))


class KerasAdagrad(KerasRule):
    """`keras.optimizers.Adagrad`."""

    own = {"lr": 0.001, "initial_accumulator_value": 0.1, "epsilon": 1e-7}

    def update(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """Update one parameter in place."""
        if not state:
            begin = group["initial_accumulator_value"]
            state["accumulator"] = torch.full_like(parameter, begin)
        accumulator = state["accumulator"].addcmul_(gradient, gradient)
        root = accumulator.add(group["epsilon"]).sqrt_()
        parameter.addcdiv_(gradient, root, value=-group["lr"])


class KerasRMSprop(KerasRule):
    """`keras.optimizers.RMSprop`."""

    own = {"lr": 0.001, "rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False}

    def update(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
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


class KerasNadam(KerasRule):
    """`keras.optimizers.Nadam`: Adam with Nesterov's momentum, whose coefficient grows by step.

    Keras keeps one product of these coefficients for all variables, here each has its own.
    """

    own = {"lr": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}

    def update(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """Update one parameter in place."""
        dtype = _wide(parameter.dtype)
        if not state:
            state["step"] = torch.zeros(())
            state["u_product"] = torch.ones((), dtype=dtype)
            state["momentum"] = torch.zeros_like(parameter)
            state["velocity"] = torch.zeros_like(parameter)
        state["step"] += 1
        count = state["step"].to(dtype)
        state["u_product"] *= group["beta_1"] * (1 - 0.5 * 0.96**count)
        beta_1, beta_2, decay = (
            _rounded(v, dtype) for v in (group["beta_1"], group["beta_2"], 0.96)
        )
        now, following = (beta_1 * (1 - 0.5 * decay**step) for step in (count, count + 1))
        momentum = state["momentum"].lerp_(gradient, float(1 - beta_1))
        velocity = state["velocity"].lerp_(gradient.square(), float(1 - beta_2))
        mean = momentum.mul(float(following / (1 - state["u_product"] * following)))
        mean.add_(gradient, alpha=float((1 - now) / (1 - state["u_product"])))
        root = velocity.div(float(1 - beta_2**count)).sqrt_().add_(group["epsilon"])
        parameter.addcdiv_(mean, root, value=-group["lr"])


class KerasLion(KerasRule):
    """`keras.optimizers.Lion`: the sign of the momentum."""

    own = {"lr": 0.001, "beta_1": 0.9, "beta_2": 0.99}

    def update(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """Update one parameter in place."""
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        mixed = momentum.mul(group["beta_1"]).add_(gradient, alpha=1 - group["beta_1"])
        parameter.sub_(mixed.sign_(), alpha=group["lr"])
        momentum.mul_(group["beta_2"]).add_(gradient, alpha=1 - group["beta_2"])


class KerasAdamax(KerasRule):
    """`keras.optimizers.Adamax`: Adam with the greatest gradient instead of the second moment."""

    own = {"lr": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}

    def update(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """Update one parameter in place."""
        if not state:
            state["step"] = torch.zeros(())
            state["momentum"] = torch.zeros_like(parameter)
            state["norm"] = torch.zeros_like(parameter)
        state["step"] += 1
        dtype = _wide(parameter.dtype)
        first = 1 - _rounded(group["beta_1"], dtype) ** state["step"].to(dtype)
        momentum = state["momentum"].lerp_(gradient, 1 - group["beta_1"])
        norm = state["norm"].mul_(group["beta_2"])
        torch.maximum(norm, gradient.abs(), out=norm)
        parameter.addcdiv_(momentum, norm.add(group["epsilon"]), value=-group["lr"] / float(first))


class KerasAdadelta(KerasRule):
    """`keras.optimizers.Adadelta`."""

    own = {"lr": 0.001, "rho": 0.95, "epsilon": 1e-7}

    def update(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """Update one parameter in place."""
        if not state:
            state["accumulated_grad"] = torch.zeros_like(parameter)
            state["accumulated_delta"] = torch.zeros_like(parameter)
        rho, epsilon = group["rho"], group["epsilon"]
        squares = state["accumulated_grad"].mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
        changes = state["accumulated_delta"]
        change = changes.add(epsilon).sqrt_().mul_(gradient).div_(squares.add(epsilon).sqrt_())
        changes.mul_(rho).addcmul_(change, change, value=1 - rho)
        parameter.sub_(change, alpha=group["lr"])


class KerasFtrl(KerasRule):
    """`keras.optimizers.Ftrl`, which computes weights from its state, whatever they were."""

    own = {
        "lr": 0.001,
        "learning_rate_power": -0.5,
        "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "l2_shrinkage_regularization_strength": 0.0,
        "beta": 0.0,
    }

    def update(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """Update one parameter in place."""
        if not state:
            begin = group["initial_accumulator_value"]
            state["accumulator"] = torch.full_like(parameter, begin)
            state["linear"] = torch.zeros_like(parameter)
        rate, power = group["lr"], -group["learning_rate_power"]
        first, second = group["l1_regularization_strength"], group["l2_regularization_strength"]
        shrinkage = 2 * group["l2_shrinkage_regularization_strength"]
        accumulator, linear = state["accumulator"], state["linear"]
        before = accumulator.pow(power)
        after = accumulator.addcmul_(gradient, gradient).pow(power)
        linear.add_(gradient).add_(parameter, alpha=shrinkage)
        linear.addcmul_((after - before).div_(rate), parameter, value=-1)
        quadratic = after.div_(rate).add_(2 * second + group["beta"] / rate)
        parameter.copy_((linear.clamp(-first, first) - linear).div_(quadratic))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which factors are computed: the parameter's, but for half precision."""
    return dtype if dtype == torch.float64 else torch.float32


def _rounded(value: float, dtype: torch.dtype) -> Tensor:
    """Return a number as Keras casts it: rounded to float32 before it gets its dtype."""
    return torch.tensor(value, dtype=torch.float32).to(dtype)
