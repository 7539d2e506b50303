"""Weights that somebody is reading: new ones are made in another room, with the same result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from steepest.core.engine.server_chunk import ServerChunk, StagedPush
from steepest.core.messages.message import PushId
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.tensors.layout import ParameterLayout
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster, linear_model_creator
from tests.inside import weight_buffers_held
from tests.modes import trainable
from tests.random_examples import seeds

LAYOUT = ParameterLayout.plan(
    [("a", (3, 5), torch.float64, True), ("b", (7,), torch.float64, True)]
)


class WritesGradients(torch.optim.SGD):
    """An optimizer that is allowed to do what torch's own do not."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2.0)
        super().step()


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None] = {
    "add": None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "own": lambda parameters: WritesGradients(parameters, lr=0.1),
}


def chunk_of(optimizer: str, weights: torch.Tensor) -> ServerChunk:
    spec = None
    if (make := OPTIMIZERS[optimizer]) is not None:
        named = {
            e.name: torch.nn.Parameter(torch.zeros(e.shape, dtype=e.dtype)) for e in LAYOUT.entries
        }
        spec = OptimizerSpec.read(
            make(list(named.values())), {id(p): name for name, p in named.items()}
        )
    return ServerChunk(LAYOUT.chunks[0], LAYOUT, spec, weights)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_into_another_room_equals_one_in_place_and_leaves_the_old_weights(
    optimizer: str,
) -> None:
    size = LAYOUT.chunks[0].nbytes
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(size // 8, dtype=torch.float64, generator=generator).view(torch.uint8)
    still, moving = chunk_of(optimizer, start.clone()), chunk_of(optimizer, start.clone())
    for step in range(6):
        gradient = torch.randn(size // 8, dtype=torch.float64, generator=generator).view(
            torch.uint8
        )
        before, old = moving.weights.clone(), moving.weights
        room = torch.full((size,), 77, dtype=torch.uint8) if step % 2 else None
        for held, place in ((still, None), (moving, room)):
            push = PushId(0, 0, step)
            held.staged[push] = StagedPush(0, gradient, 1.0, 1.0, frozenset(), None)
            held.reduce([push])
            held.apply([{}], 1.0, place)
            held.forget(push)
        assert torch.equal(still.weights, moving.weights)
        assert not torch.equal(before, moving.weights)
        if room is not None:
            assert moving.weights is room
            assert torch.equal(old, before)


def test_a_gradient_is_left_as_it_is_whatever_the_optimizer_does_to_it() -> None:
    held = chunk_of("own", torch.zeros(LAYOUT.chunks[0].nbytes, dtype=torch.uint8))
    gradient = torch.ones(LAYOUT.chunks[0].nbytes // 8, dtype=torch.float64)
    held.staged[PushId(0, 0, 1)] = StagedPush(
        0, gradient.view(torch.uint8), 1.0, 1.0, frozenset(), None
    )
    held.reduce([PushId(0, 0, 1)])
    held.apply([{}], 1.0)
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert torch.allclose(held.weights.view(torch.float64), torch.tensor(-0.2, dtype=torch.float64))


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["async", "ssp", "sync"])
@seeds(1)
def test_servers_use_few_rooms_and_only_while_somebody_reads(mode: str, seed: int) -> None:
    strategy = ParameterServerStrategy(
        mode=mode, num_servers=2, staleness=2 if mode == "ssp" else None
    )
    cluster = InProcessCluster(
        linear_model_creator(), num_workers=3, strategy=strategy, shuffle=seed
    )
    rooms: list[int] = []
    for _ in range(10):
        cluster.step(30)
        rooms = [weight_buffers_held(server) for server in cluster.servers if trainable(server)]
        assert all(count <= 4 for count in rooms), "three readers and what is being made"
        if mode == "sync" or max(rooms) > 1:  # by chance nobody reads while weights change
            break
    assert (max(rooms) > 1) == (mode != "sync"), "who has new weights needs the old ones no more"
