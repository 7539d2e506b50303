"""`optimizer.state_dict()` in a loop of a user's own is what the optimizer of one process has, or the worker's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest import LocalStrategy
from tests.own_loop_runs import STRATEGIES, Found, run, without
from tests.own_loops import Parts, Script, plain
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import pause

State = dict[str, Any]


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


#: What loops have saved: by number of steps, parameters and the optimizer's state.
SAVED: dict[int, tuple[State, State]] = {}


class Saving:
    """A loop that keeps the state of its optimizer on worker 0, after some steps and at the end of each epoch."""

    def __init__(self, every: int = 2) -> None:
        self._every = every

    def __call__(self, parts: Parts, epochs: int) -> None:
        kept = steepest.register(steps=0)
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                pause(1e-3)
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
                for scheduler in parts.schedulers:
                    scheduler.step()
                kept.steps += 1
                if kept.steps % self._every == 0 and steepest.rank() == 0:
                    self._save(kept.steps, parts)
            if steepest.rank() == 0:
                self._save(kept.steps, parts)

    def _save(self, steps: int, parts: Parts) -> None:
        state = copy.deepcopy(parts.optimizer.state_dict())
        SAVED[steps] = (copy.deepcopy(parts.model.state_dict()), state)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, amsgrad=True)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": sgd(momentum=0.9),
    "none": sgd(),
    "adam": adam,
}


def saved(optimizer: str, workers: int, strategy: Any = "ps") -> dict[int, tuple[State, State]]:
    SAVED.clear()
    run(Script(Saving(), optimizer=OPTIMIZERS[optimizer], schedule=falling), workers, strategy)
    return dict(SAVED)


def alone(optimizer: str, workers: int) -> dict[int, tuple[State, State]]:
    SAVED.clear()
    Script(Saving(), optimizer=OPTIMIZERS[optimizer], schedule=falling).alone(workers)
    return dict(SAVED)


def check_alike(
    found: dict[int, tuple[State, State]], whole: dict[int, tuple[State, State]], missing: int = 0
) -> None:
    assert len(whole.keys() - found.keys()) <= missing
    for steps, (weights, own) in found.items():
        state = whole[steps][1]
        assert difference(whole[steps][0], weights) < 1e-12
        for group, expected in zip(own["param_groups"], state["param_groups"], strict=True):
            assert group.keys() == expected.keys()
            rates = {k: pytest.approx(v) for k, v in expected.items() if k in ("lr", "initial_lr")}
            assert group == expected | rates
        assert own["state"].keys() == state["state"].keys()
        for index, values in state["state"].items():
            assert own["state"][index].keys() == values.keys()
            for key, value in values.items():
                torch.testing.assert_close(own["state"][index][key], value, rtol=0, atol=1e-12)


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_that_of_one_process(optimizer: str, workers: int) -> None:
    check_alike(saved(optimizer, workers), alone(optimizer, workers))


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "simple"])
def test_it_is_that_of_one_process_under_all_strategies(strategy: str) -> None:
    found = saved("adam", 2, STRATEGIES.get(strategy, strategy))
    check_alike(found, alone("adam", 2))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("victim", "strategy"),
    [
        *((victim, strategy) for victim in ("worker 0", "worker 1") for strategy in STRATEGIES),
        ("server 1", "ps"),
        ("server 0", "ps, two copies"),
        ("server 1", "ps, two copies"),
    ],
)
def test_it_is_that_of_one_process_where_a_process_dies(victim: str, strategy: str) -> None:
    script = Script(Saving(every=1), optimizer=adam, schedule=falling, data=samples(18))
    SAVED.clear()
    without(script, 3, victim, 2, STRATEGIES[strategy])
    found = dict(SAVED)
    SAVED.clear()
    script.alone(3)
    # what stands behind the last step() of a worker that dies is not done again
    check_alike(found, dict(SAVED), missing=int(victim == "worker 0"))


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_run_goes_on_from_it(optimizer: str) -> None:
    """A checkpoint of the user's own, made amid training, is loaded by torch and by another run."""
    weights, state = saved(optimizer, 2)[4]

    def going_on(model: nn.Module) -> torch.optim.Optimizer:
        model.load_state_dict(weights)
        found = OPTIMIZERS[optimizer](model)
        found.load_state_dict(copy.deepcopy(state))
        return found

    script = Script(plain, optimizer=going_on)
    found: Found = run(script, 2)
    assert difference(found.weights, script.alone(2)) < 1e-12


def test_each_of_several_optimizers_has_its_own() -> None:
    def script() -> None:
        torch.manual_seed(0)
        first, second = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()
        one = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
        two = torch.optim.Adam(second.parameters(), lr=0.1)
        first, second, one, two = steepest.prepare(first, second, one, two)
        for _ in steepest.epochs(3):
            x = torch.ones(1, 2, dtype=torch.float64)
            for _ in range(2):
                one.zero_grad()
                first(x).sum().backward()
                one.step()
            two.zero_grad()
            second(x).sum().backward()
            two.step()
        if steepest.rank() == 0:
            SAVED[0] = (first.state_dict(), copy.deepcopy(one.state_dict()))
            SAVED[1] = (second.state_dict(), copy.deepcopy(two.state_dict()))

    SAVED.clear()
    run(script, 2)
    found = copy.deepcopy(SAVED)
    script()
    check_alike(found, dict(SAVED))


@pytest.mark.few(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_the_workers_own_where_each_has_one(optimizer: str) -> None:
    # whole rounds alone: another would count as one for the schedule
    script = Script(Saving(), optimizer=OPTIMIZERS[optimizer], schedule=falling, data=samples(12))
    SAVED.clear()
    run(script, 1, LocalStrategy(sync_every=3, chunk_bytes=48))
    found = dict(SAVED)
    SAVED.clear()
    script.alone(1)
    check_alike(found, dict(SAVED))


def test_workers_own_states_differ() -> None:
    found: dict[int, State] = {}

    def loop(parts: Parts, epochs: int) -> None:
        plain(parts, epochs)
        found[steepest.rank()] = copy.deepcopy(parts.optimizer.state_dict())

    run(Script(loop, optimizer=adam), 2, LocalStrategy(sync_every=3))
    one, other = (found[rank]["state"][0] for rank in (0, 1))
    assert difference({"": one["exp_avg"]}, {"": other["exp_avg"]}) > 1e-6
