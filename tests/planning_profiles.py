"""Profiles of models that nobody has measured, for tests of plans."""

from __future__ import annotations

from typing import Any

import torch

from steepest.cli.planning.profile import Costs, Profile
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout

MEGABYTE = 1 << 20


def made_up(
    seconds: float = 0.1,
    *,
    layers: int = 24,
    at_end: bool = True,
    costs: Costs | None = None,
    **settings: Any,
) -> Profile:
    """A model of so many layers of 1 MB, in a pass of some seconds.

    Args:
        seconds: of a pass.
        layers: of a chunk each.
        at_end: whether all gradients are ready at the end of the pass; otherwise the forward pass takes a third,
            and each layer an equal part of the rest.
        costs, settings: as of `Profile`.
    """
    names = [f"layer{number:03}" for number in range(layers)]
    parameters = [(name, (MEGABYTE // 4,), torch.float32, True) for name in names]
    ready = {
        name: seconds if at_end else seconds * (1 - 2 / 3 * at / layers)
        for at, name in enumerate(names)
    }
    stand_in = torch.nn.Parameter(torch.zeros(1))
    spec = OptimizerSpec.read(torch.optim.SGD([stand_in], lr=0.1), {id(stand_in): names[0]})

    def layout(cut: ChunkSpec) -> ParameterLayout:
        size = cut.chunk_bytes or MEGABYTE
        return ParameterLayout.plan(parameters, chunk_bytes=size, fragments=cut.fragments)

    return Profile(
        samples=32,
        seconds=seconds,
        ready=ready,
        layout=layout,
        spec=spec,
        costs=costs or Costs(),
        **settings,
    )
