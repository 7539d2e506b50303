"""Two optimizers, one of which adds up gradients over more batches than the other, in loops whose workers die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steepest
from steepest.loop.held_gradients import HeldGradients
from tests.own_loop_runs import STRATEGIES, InterruptedRunError, Interrupts, run, without
from tests.own_loops import ALONE, BATCH, FOUND, Whole, alone, rollout
from tests.reference import difference, perceptron, samples, sgd, snapshot
from tests.simulated_programs import quiet

#: what a worker is told that takes part in such a sum later: here what is added up depends on nothing of the others
TOLD = "a step was taken with gradients that were there before another step"
pytestmark = pytest.mark.filterwarnings(f"ignore:.*{TOLD}")


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def prepared(loader: Any) -> Any:
    torch.manual_seed(0)
    often, seldom = perceptron(), regressor()
    optimizers = [sgd(momentum=0.9)(each) for each in (often, seldom)]
    given = (often, seldom, *optimizers)
    return steepest.prepare(*given) if loader is None else steepest.prepare(*given, loader)


def over_batches(every: int, gathers: bool = False) -> Callable[[], None]:
    """One optimizer steps in each batch, and the other in some, as a count that is kept with the job says."""

    def script() -> None:
        data = samples(24)
        loader: Any = DataLoader(TensorDataset(*data), batch_size=BATCH, shuffle=True)
        if ALONE:
            loader = Whole(data, ALONE["workers"] * BATCH, 0)
        often, seldom, one, two, loader = prepared(loader)
        kept = steepest.register(count=0)
        for _ in steepest.epochs(3):
            for x, y in loader:
                kept.count += 1
                if kept.count % every == 1:
                    two.zero_grad()
                (nn.functional.mse_loss(seldom(x), y[:, :1]) / every).backward()
                if kept.count % every == 0:
                    two.step()
                one.zero_grad()
                loss = nn.functional.mse_loss(often(x), y)
                loss.backward()
                if gathers:
                    steepest.gather(loss.detach())
                one.step()
        FOUND["script"] = snapshot(nn.ModuleList([often, seldom]))

    return script


def over_rounds() -> None:
    """The same without a loader, and the one that steps often comes first."""
    often, seldom, one, two = prepared(None)
    ranks = range(ALONE["workers"]) if ALONE else [steepest.rank()]
    for number in steepest.epochs(12):
        x = torch.cat([rollout(number, rank) for rank in ranks])
        one.zero_grad()
        often(x).square().mean().backward()
        one.step()
        seldom(x).square().mean().backward()
        if number % 3 == 2:
            two.step()
            two.zero_grad()
    FOUND["over_rounds"] = snapshot(nn.ModuleList([often, seldom]))


SCRIPTS = {
    "two batches": over_batches(2),
    "four batches": over_batches(4),  # there are three in an epoch
    "gathering": over_batches(2, gathers=True),
    "rounds": over_rounds,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("step", range(1, 12))
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
def test_a_sum_is_whole_over_which_another_optimizer_has_stepped(
    script: Any, strategy: str, victim: int, step: int
) -> None:
    """The successor goes through the batches of the sum once more, without the steps that are committed."""
    found = without(script, 2, victim, step, STRATEGIES[strategy])
    assert difference(found.weights, alone(script, 2)) < 1e-12


@pytest.mark.parametrize("step", [2, 6])
def test_who_enters_such_a_sum_is_told_that_weights_are_others_now(step: int) -> None:
    with pytest.warns(UserWarning, match=TOLD):
        without(SCRIPTS["four batches"], 2, 0, step)


def test_a_run_that_goes_on_with_other_workers_amid_such_a_sum_is_told(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"global_batch_size": 4}
    kept["checkpoints"] = steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(SCRIPTS["two batches"], 2, callbacks=[Interrupts(1)], **kept)
    with pytest.warns(UserWarning, match="there are 4 workers now, another number"):
        run(SCRIPTS["two batches"], 4, **kept)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("script", "strategy", "step"),
    [("four batches", "allreduce, two copies", 2), ("gathering", "sharded groups", 9)],
)
def test_a_sum_is_whole_if_others_are_between_two_of_its_batches(
    script: str, strategy: str, step: int
) -> None:
    """They have taken the last step of one and not begun the next one."""
    found = without(SCRIPTS[script], 2, 0, step, STRATEGIES[strategy])
    assert difference(found.weights, alone(SCRIPTS[script], 2)) < 1e-12


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_two_optimizers_of_which_one_adds_up_are_those_of_one_process(
    script: Any, workers: int
) -> None:
    assert difference(run(script, workers).weights, alone(script, workers)) < 1e-12


def backward(module: nn.Module) -> None:
    module(torch.ones(1, 3, dtype=torch.float64)).sum().backward()


def test_gradients_that_are_dropped_are_no_part_of_a_sum() -> None:
    """Such as those of a discriminator, behind the backward pass of a generator's loss."""
    module = regressor()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    held = HeldGradients([optimizer])
    assert not held.begin_batch()
    backward(module)
    held.step(0)
    assert not held.holds  # they are those of the step
    backward(module)  # of something else's loss
    assert held.begin_batch()  # nothing is known yet of what the optimizer does with them
    module.zero_grad()
    backward(module)
    held.step(0)
    backward(module)
    assert not held.holds
    assert not held.begin_batch()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_to_which_a_step_adds_are_a_part_of_a_sum(set_to_none: bool) -> None:
    module = regressor()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    held = HeldGradients([optimizer])
    for _ in range(2):
        assert not held.begin_batch()
        backward(module)
        assert held.holds
        assert held.begin_batch()
        backward(module)
        assert held.awaited == {0}
        held.step(0)
        assert not held.awaited
        optimizer.zero_grad(set_to_none)
        assert not held.holds
