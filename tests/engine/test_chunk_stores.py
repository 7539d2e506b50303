"""Dense chunks keep the contract of chunks on servers."""

from __future__ import annotations

import torch
from torch import nn

from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.tensors.layout import ParameterLayout
from tests.chunk_store_contract import ChunkStoreContract

LAYOUT = ParameterLayout.plan(
    [("weight", (3, 2), torch.float32, True), ("bias", (2,), torch.float32, True)]
)
(CHUNK,) = LAYOUT.chunks


def spec(optimizer: type[torch.optim.Optimizer], **settings: float) -> OptimizerSpec:
    """A recipe for the parameters of the layout."""
    parameters = {entry.name: nn.Parameter(torch.zeros(entry.shape)) for entry in LAYOUT.entries}
    names = {id(parameter): name for name, parameter in parameters.items()}
    return OptimizerSpec.read(optimizer(parameters.values(), **settings), names)


class TestMomentum(ChunkStoreContract):
    recipe = spec(torch.optim.SGD, lr=0.5, momentum=0.5)

    def make(self) -> ServerChunk:
        weights = LAYOUT.allocate()
        LAYOUT.write(weights, {"weight": torch.arange(6.0).view(3, 2), "bias": torch.ones(2)})
        return ServerChunk(CHUNK, LAYOUT, self.recipe, LAYOUT.chunk_view(weights, CHUNK.index))

    def gradient(self, value: float) -> torch.Tensor:
        return torch.full((CHUNK.nbytes // 4,), value).view(torch.uint8)


class TestAdam(TestMomentum):
    recipe = spec(torch.optim.Adam, lr=0.5)
