"""The state with which a user's optimizer arrives, as after `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from steepest.core.optim.own_values import own_values
from steepest.core.optim.portable import pack_all
from steepest.core.optim.spec import OptimizerSpec
from steepest.errors import ConfigurationError


@dataclass(frozen=True)
class ArrivingState:
    """An optimizer's state from before the job, in the form in which checkpoints have it."""

    state: dict[str, torch.Tensor]  # whole tensors by "parameter/key"
    # names of those that stand for other values, see `steepest.core.optim.portable`
    plain: tuple[str, ...]


def arriving_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], spec: OptimizerSpec
) -> ArrivingState | None:
    """Return the state with which a user's optimizer arrives; None for one that has taken no step.

    Args:
        names: of the trained parameters, by `id(parameter)`.

    Raises:
        ConfigurationError: it cannot be carried, or is not that of its parameters.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain: list[str] = []
    for index, group in enumerate(optimizer.param_groups):
        own = {k: v for k, v in own_values(optimizer, index).items() if k in spec.own}
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state or id(parameter) not in names:
                continue
            name = names[id(parameter)]
            try:
                packed = pack_all({**state, **own})
            except TypeError as error:
                raise ConfigurationError(
                    f"{spec.name} arrives with state of {name!r} that cannot be carried: {error}"
                ) from error
            for key, (value, is_plain) in packed.items():
                if not is_plain:
                    _check_shape(
                        f"{spec.name} arrives with {key!r} of {name!r}", value, parameter, spec
                    )
                tensors[f"{name}/{key}"] = value.cpu().clone()
                plain += [f"{name}/{key}"] if is_plain else []
    return ArrivingState(tensors, tuple(plain)) if tensors else None


def _check_shape(
    what: str, value: torch.Tensor, parameter: torch.Tensor, spec: OptimizerSpec
) -> None:
    """Check that state has its parameter's shape, as torch's kernels assume; ConfigurationError otherwise."""
    torchs = spec.elementwise and spec.cls.__module__.startswith("torch.optim.")
    if torchs and value.numel() != 1 and value.shape != parameter.shape:
        raise ConfigurationError(
            f"{what}, of shape {tuple(value.shape)}, but the parameter's is {tuple(parameter.shape)}: "
            "load the state of an optimizer of the same parameters, in the same order"
        )
