"""What a loop replaces after `prepare` is refused by name: an optimizer's state, parameters in their places."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader, TensorDataset

import steepest
from steepest.errors import SteepestError
from tests.own_loop_runs import run
from tests.own_loops import Parts, Script
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)).double()


def script(change: Callable[[Any, torch.optim.Optimizer], object], at: int) -> Script:
    """A loop that changes its model, or its optimizer, behind so many batches; before the first one for 0."""

    def loop(parts: Parts, epochs: int) -> None:
        if at == 0:
            change(parts.model, parts.optimizer)
        number = 0
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
                number += 1
                if number == at:
                    change(parts.model, parts.optimizer)

    return Script(loop, net, sgd(momentum=0.9))


def clears(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def another_state(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def no_momentum(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = None


def replaced(model: Any, _: Any) -> None:
    model[2].weight = nn.Parameter(torch.zeros(3, 3).double())


def another_head(model: Any, _: Any) -> None:
    model[3] = nn.Linear(3, 2).double()


def tied(model: Any, _: Any) -> None:
    model[2].weight = model[0].weight


def tied_modules(model: Any, _: Any) -> None:
    model[2] = model[0]


def another_in_its_group(_: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(3, 3).double())


def pruned(model: Any, _: Any) -> None:
    prune.identity(model[2], "weight")


def replaced_before_gathering(model: Any, _: Any) -> None:
    replaced(model, _)
    steepest.gather(torch.ones(1))


WRONG = {
    clears: "SGD.state was used after steepest.prepare",
    another_state: "SGD.state was used after steepest.prepare",
    no_momentum: "SGD.state was used after steepest.prepare",
    replaced: "another parameter in the place of '2.weight' after steepest.prepare",
    replaced_before_gathering: "another parameter in the place of '2.weight' after steepest.prepare",
    another_head: "another parameter in the place of '3.weight' after steepest.prepare",
    tied: "tied '2.weight' to '0.weight' after steepest.prepare",
    tied_modules: "tied '2.weight' to '0.weight' after steepest.prepare",
    pruned: "made '2.weight' to '2.weight_orig' after steepest.prepare",
    another_in_its_group: "the optimizer has got other parameters since steepest.prepare",
}


@pytest.mark.few(6)
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("change", WRONG)
def test_it_is_refused_by_name(change: Callable[..., object], at: int) -> None:
    if change is replaced_before_gathering:
        at = 1 + at // 3  # gather() is for loops, and behind steps that all workers see
    with pytest.raises(SteepestError, match=WRONG[change]):
        run(script(change, at), 2)


@pytest.mark.parametrize("strategy", ["local", "async"])
def test_where_workers_train_by_themselves(strategy: str) -> None:
    for change in (clears, tied):
        with pytest.raises(SteepestError, match=WRONG[change]):
            run(script(change, 3), 2, strategy)


def more(model: Any, _: Any) -> None:
    model.probe = nn.Linear(3, 3).double()  # trained by nothing
    model[2] = model[2]
    del model.probe


def without_its_head(model: Any, _: Any) -> None:
    model[2] = nn.Identity()


def copied(_: Any, optimizer: torch.optim.Optimizer) -> None:
    copy.deepcopy(optimizer)


@pytest.mark.parametrize("change", [more, without_its_head, copied])
def test_what_leaves_the_parameters_is_no_mistake(change: Callable[..., object]) -> None:
    mine = script(change, 3)
    found, wanted = run(mine, 2).weights, mine.alone(2)
    assert difference({name: found[name] for name in wanted}, wanted) < 1e-12


def test_modules_whose_weights_are_computed() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2))).double()

    mine = Script(script(copied, 3).loop, normed, sgd(momentum=0.9))
    assert difference(run(mine, 2).weights, mine.alone(2)) < 1e-12


def test_a_closure_s_optimizer_may_begin_anew() -> None:
    found = []

    def train(batch: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=2)
        loader: Any = DataLoader(TensorDataset(*samples(12)), batch_size=batch)
        model, optimizer, loader = steepest.prepare(model, optimizer, loader)
        for _ in steepest.epochs(3):
            for x, y in loader:

                def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    return loss

                optimizer.step(closure)
            optimizer.state.clear()
        found.append({name: each.detach().clone() for name, each in model.state_dict().items()})

    train(12)
    run(lambda: train(6), 2)
    assert difference(found[1], found[0]) < 1e-9
