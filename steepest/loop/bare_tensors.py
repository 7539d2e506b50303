"""Tensors that optimizers train, and no module has: a temperature, an image, weights of a formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from steepest.errors import ConfigurationError


class BareTensors(torch.nn.Module):
    """Tensors as the parameters of a module, by their numbers; they stay what they are."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for number, each in enumerate(tensors):  # register_parameter() demands another class
            self._parameters[str(number)] = cast(torch.nn.Parameter, each)


def bare_tensors(
    modules: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the tensors that optimizers train beside the parameters of modules, in their order.

    Args:
        modules, optimizers: the user's, as given to `steepest.prepare`.
        tensors: that were given too; a `torch.nn.Parameter` has to be, as it could be that of a module that was
            forgotten.

    Raises:
        ConfigurationError: such a parameter was not given, or a given tensor is no optimizer's.
    """
    known = {id(each) for module in modules for each in module.parameters()}
    trained = [each for one in optimizers for group in one.param_groups for each in group["params"]]
    bare = list({id(each): each for each in trained if id(each) not in known}.values())
    allowed = {id(each) for each in tensors}
    for each in bare:
        if isinstance(each, torch.nn.Parameter) and id(each) not in allowed:
            raise ConfigurationError(
                f"an optimizer holds a parameter of shape {tuple(each.shape)} that is not a parameter of the modules "
                "given: give the module that has it to steepest.prepare() too, or the parameter itself if none has"
            )
    trained_ids = {id(each) for each in trained}
    for each in tensors:
        if id(each) not in trained_ids:
            raise ConfigurationError(
                f"steepest.prepare() was given a tensor of shape {tuple(each.shape)} that no optimizer has: what is "
                "not trained stays as it is, and is not given"
            )
    return bare
