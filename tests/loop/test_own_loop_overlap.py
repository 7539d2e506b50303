"""Gradients of a loop that leave during the backward pass: the same bits as of those that leave at the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.core.engine.exchange import PushPull
from steepest.loop import overlap, unseen
from steepest.loop.overlap import Overlap
from tests.own_loops import (
    Parts,
    Script,
    accumulating,
    adversarial,
    clipping,
    penalised,
    plain,
    scaling,
    sharpness_aware,
    with_closures,
    with_token_weights,
)
from tests.reference import Weights, same_bits, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


@dataclass
class Found:
    """What a run has come to: weights, how many gradients left early, how often they were taken back."""

    weights: Weights
    left: int = 0
    taken_back: int = 0


def run(script: Any, workers: int, strategy: Any, *, early: bool) -> Found:
    found = Found({})

    def let_leave(self: Overlap, *about: Any) -> None:
        found.left += 1
        LET_LEAVE(self, *about)

    def take_back(self: PushPull) -> None:
        found.taken_back += 1
        TAKE_BACK(self)

    with pytest.MonkeyPatch.context() as patched, Simulation(seed=1).running():
        patched.setattr(Overlap, "_let_leave", let_leave)
        patched.setattr(PushPull, "take_back", take_back)
        patched.setattr(overlap, "_FIRST", 2 if early else 1 << 30)
        result = steepest.run(
            script,
            num_workers=workers,
            strategy=strategy,
            progress=False,
            run_config=run_config(),
        )
        found.weights = dict(result.state_dict)
    return found


LET_LEAVE, TAKE_BACK = Overlap._let_leave, PushPull.take_back
STRATEGIES: dict[str, Any] = {
    "ps": ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    "ps, two copies": ParameterServerStrategy(num_servers=2, replication=2, chunk_bytes=64),
    "ps, one server": ParameterServerStrategy(num_servers=1, chunk_bytes=64),
    "ps, packed": ParameterServerStrategy(num_servers=2, chunk_bytes=64, compression="int8"),
    "allreduce": AllreduceStrategy(chunk_bytes=64),
    "allreduce, copies": AllreduceStrategy(sharded=False, chunk_bytes=64),
}


def now_and_then(
    parts: Parts, epochs: int, change: Callable[[int, Parts, Any, Any], bool | None]
) -> None:
    """The usual loop, in which something is done to the gradients in every fifth step; False: there is no step."""
    number = 0
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            number += 1
            if number % 5 or change(number, parts, x, y) is not False:
                parts.optimizer.step()


def first(parts: Parts) -> torch.Tensor:
    gradient = next(parts.model.parameters()).grad
    assert gradient is not None
    return gradient


def twice(number: int, parts: Parts, x: Any, y: Any) -> None:
    nn.functional.mse_loss(parts.model(2 * x), y).backward()


def clipped(number: int, parts: Parts, x: Any, y: Any) -> None:
    torch.nn.utils.clip_grad_norm_(parts.model.parameters(), 0.01)


def edited(number: int, parts: Parts, x: Any, y: Any) -> None:
    first(parts)[0] = 1.0


def edited_unseen(number: int, parts: Parts, x: Any, y: Any) -> None:
    first(parts).data[0] = 1.0


def edited_as_array(number: int, parts: Parts, x: Any, y: Any) -> None:
    first(parts).detach().numpy()[0] = 1.0


def unscaled(number: int, parts: Parts, x: Any, y: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(1))
    scaler.unscale_(parts.optimizer)


def removed(number: int, parts: Parts, x: Any, y: Any) -> None:
    next(parts.model.parameters()).grad = None


def replaced(number: int, parts: Parts, x: Any, y: Any) -> None:
    parameter = next(parts.model.parameters())
    parameter.grad = torch.ones_like(parameter)


def cleared(number: int, parts: Parts, x: Any, y: Any) -> None:
    parts.optimizer.zero_grad(set_to_none=False)


def cleared_and_anew(number: int, parts: Parts, x: Any, y: Any) -> None:
    parts.optimizer.zero_grad()
    nn.functional.mse_loss(parts.model(3 * x), y).backward()


def left_out(number: int, parts: Parts, x: Any, y: Any) -> bool:
    return False


def raised(number: int, parts: Parts, x: Any, y: Any) -> bool:
    try:
        nn.functional.mse_loss(parts.model(x), y).backward()
        raise KeyError
    except KeyError:
        return number % 10 == 0


def weighed(number: int, parts: Parts, x: Any, y: Any) -> None:
    steepest.weight(0.5)


def weightless(number: int, parts: Parts, x: Any, y: Any) -> None:
    steepest.weight(0.0)


CHANGES = [
    *(twice, clipped, edited, edited_unseen, edited_as_array, unscaled, removed, replaced),
    *(cleared, cleared_and_anew, left_out, raised, weighed, weightless),
]


def zeroed_after(parts: Parts, epochs: int) -> None:
    """Gradients are cleared behind the step, in place."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()
            parts.optimizer.zero_grad(set_to_none=False)


def twice_each(parts: Parts, epochs: int) -> None:
    """Two backward passes for each step."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            for half in (0.5, 1.5):
                nn.functional.mse_loss(parts.model(half * x), y).backward()
            parts.optimizer.step()


def never_cleared(parts: Parts, epochs: int) -> None:
    """Gradients are added up for ever."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


class Halves(nn.Module):
    """Two networks, of which one is used every third time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        out: torch.Tensor = self.a(x)
        return out if self.count % 3 else out + self.b(x)


def changed(change: Any) -> Callable[[Parts, int], None]:
    return lambda parts, epochs: now_and_then(parts, epochs, change)


OPTIMIZER = sgd(lr=0.02, momentum=0.9)
LEAVES: dict[str, Any] = {  # a loop, and whether its gradients leave early, in some steps at least
    **{each.__name__: (Script(changed(each), optimizer=OPTIMIZER), True) for each in CHANGES},
    "plain": (Script(plain, optimizer=OPTIMIZER), True),
    "accumulating": (Script(accumulating, data=samples(24)), True),
    "clipping the whole": (Script(clipping), True),
    "scaling": (Script(scaling), False),
    "token weights": (Script(with_token_weights), True),
    "sharpness aware": (Script(sharpness_aware), True),
    "closures": (Script(with_closures), True),
    "penalised": (Script(penalised), True),
    "zeroed after": (Script(zeroed_after), True),
    "twice each": (Script(twice_each), True),
    "never cleared": (Script(never_cleared, optimizer=sgd(lr=0.001)), True),
    "halves": (Script(plain, model=Halves, data=samples(24)), False),
    "two optimizers": (adversarial, False),
}
TAKEN_BACK = {each.__name__ for each in CHANGES}


@pytest.mark.filterwarnings("ignore:torch.nn.utils.clip_grad_norm_")  # told once, rightly
@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loop", LEAVES)
def test_what_leaves_early_counts_as_it_is_at_the_step(
    loop: str, strategy: str, workers: int
) -> None:
    """The same bits as of a run in which nothing leaves before the step."""
    script, leaves = LEAVES[loop]
    late = run(script, workers, STRATEGIES[strategy], early=False)
    early = run(script, workers, STRATEGIES[strategy], early=True)
    assert late.left == late.taken_back == 0
    assert (early.left > 0) == leaves
    assert (early.taken_back > 0) == (loop in TAKEN_BACK)
    assert same_bits(early.weights, late.weights)


def test_torch_is_as_it_was_when_no_loop_runs() -> None:
    before = [vars(torch.Tensor).get(name) for name in unseen._OF_TENSORS]
    run(LEAVES["plain"][0], 1, "ps", early=True)
    assert [vars(torch.Tensor).get(name) for name in unseen._OF_TENSORS] == before
    assert not any(hasattr(getattr(torch, name), "__wrapped__") for name in unseen._OF_TORCH)


@pytest.mark.parametrize("name", unseen._OF_TENSORS)
def test_what_may_write_unseen_is_noted_on_the_thread_that_reads_it(name: str) -> None:
    tensor, seen, other = torch.zeros(3), unseen.Unseen(), unseen.Unseen()
    with unseen.noted(seen):
        read = getattr(tensor, name)
        assert not seen.happened
        seen.watches = True
        tensor.mul_(2).sum()
        assert not seen.happened
        read = getattr(tensor, name)
        if callable(read) and name not in ("apply_", "map_"):
            read()
        elif callable(read):
            read(*[tensor] * (name == "map_"), lambda x, *y: x)
        assert seen.happened
        assert not other.happened
        tensor.data = torch.ones(3)
    assert tensor.data.sum() == 3


class Weighing:
    """Stands for what a step weighs."""

    def __init__(self) -> None:
        self.weight, self.unseen = 1.0, unseen.Unseen()


@pytest.mark.parametrize("guess", range(1, 7))
def test_a_write_that_torch_does_not_count_is_seen_without_comparing_values(
    guess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are compared after some guesses only, where there are many."""
    monkeypatch.setattr(overlap, "_SMALL", 0)
    parameter, view = nn.Parameter(torch.zeros(8)), torch.zeros(8)
    found, session = Leaving(), Weighing()
    watching = Overlap()
    parameter.register_post_accumulate_grad_hook(watching.hook(0, view))
    for number in range(-2, guess + 1):  # two steps to learn from, and the first of all
        with unseen.noted(session.unseen):
            watching.begin(session, session.unseen, found.leave)
            parameter.grad = None
            (parameter.sum() * number).backward()
            if number == guess:
                assert parameter.grad is not None
                parameter.grad.data[3] = 7.0
            watching.end()
        left = watching.left(1.0)
    assert found.count == guess
    assert left is None


class Leaving:
    """Lets gradients leave to a vector."""

    count = 0

    def leave(
        self, index: int, parameter: torch.Tensor, gradient: torch.Tensor, view: torch.Tensor
    ) -> None:
        """Copy it."""
        self.count += 1
        view.copy_(gradient)
