"""Gradients go through what loops of users' own gather; and nobody waits for a worker that does not come by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest.errors import ConfigurationError, ModelRaisedError
from tests.own_loop_runs import STRATEGIES, run, without
from tests.own_loops import Parts, Script
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import pause


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def contrastive(parts: Parts, epochs: int) -> None:
    """Each sample is compared with all of the whole batch, as SimCLR does; then all with all."""
    scale = parts.model[0].weight
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            pause(1e-3)
            own = parts.model(x)
            found = steepest.gather({"all": own, "targets": y, "mean": own.mean() * len(x)})
            everything, targets = found["all"], found["targets"]
            errors = own @ everything.T - y @ targets.T
            mean = found["mean"].sum() / (len(everything) * own.shape[1])
            loss = errors.square().mean() + everything.std(dim=0, correction=0).sum() * mean
            (loss + 0.1 * scale.square().sum()).backward()
            parts.optimizer.step()


def several(parts: Parts, epochs: int) -> None:
    """The same with two steps for a batch, and weights by hand."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            for _ in range(2):
                parts.optimizer.zero_grad()
                own = parts.model(x)
                steepest.weight(3.0 * len(x))
                everything, targets = steepest.gather((own, y))
                (own @ everything.T - y @ targets.T).square().mean().backward()
                parts.optimizer.step()


CONTRASTIVE = Script(contrastive, optimizer=sgd(lr=0.02, momentum=0.5))
SEVERAL = Script(several, optimizer=sgd(lr=0.02, momentum=0.5), data=samples(12))


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("script", [CONTRASTIVE, SEVERAL], ids=["one step", "several"])
def test_gradients_are_those_of_one_process(script: Script, workers: int) -> None:
    """The last batch is not full: a worker has fewer samples, or none."""
    assert difference(run(script, workers).weights, script.alone(workers)) < 1e-12


@pytest.mark.few(3)
@pytest.mark.parametrize("victim", [1, 2, 0])
@pytest.mark.parametrize("step", [5, 1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["allreduce", "ps", "allreduce, two copies", "groups"])
def test_a_worker_dies(strategy: str, step: int, victim: int) -> None:
    """Also behind the last batch but one: who has ended the loop by then has gathered in it, and says so."""
    script = replace(CONTRASTIVE, epochs=2)
    found = without(script, 3, victim, step, STRATEGIES[strategy])
    assert difference(found.weights, script.alone(3)) < 1e-12


def test_what_needs_no_gradient_has_none() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert steepest.gather(x) is x
    with torch.no_grad():
        assert not steepest.gather(x).requires_grad
    assert not steepest.gather(x.detach()).requires_grad


def now_and_then(parts: Parts, epochs: int) -> None:
    """Gathers in the last step of epochs alone, which not all workers see; later in all steps."""
    for epoch in steepest.epochs(epochs):
        seen = 0
        for number, (x, y) in enumerate(parts.loader):
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            if number == 3 or epoch == 2:
                seen += len(steepest.gather(y))
            loss.backward()
            parts.optimizer.step()
            if number == 3:
                seen += int(steepest.gather(len(x)).sum())
        # where worker 1 sees that step, its samples count after it alone
        assert seen in ([0, 2] if epoch == 0 else [2, 4] if epoch == 1 else [14, 16])


def test_a_worker_that_misses_a_step_is_not_awaited() -> None:
    script = Script(now_and_then)
    assert difference(run(script, 2).weights, script.alone(2)) < 1e-12


def gathering(when: Any) -> Any:
    """A loop that gathers at some places, which may be others on each worker."""

    def loop(parts: Parts, epochs: int) -> None:
        for epoch in steepest.epochs(epochs):
            for x, y in parts.loader:
                if when("before"):
                    steepest.gather(len(x))
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
                if when("after"):
                    steepest.gather(len(x))
            if when("end") and epoch < 2:
                steepest.gather(len(x))
        if when("last"):
            steepest.gather(1)

    return loop


#: Where worker 1 gathers, and where the others do.
UNLIKE: dict[str, tuple[set[str], set[str]]] = {
    "one before": ({"before"}, set()),
    "all but one before": (set(), {"before"}),
    "one after": ({"after"}, set()),
    "one at the end": ({"end"}, set()),
    "elsewhere": ({"before"}, {"after"}),
    "all but one at the end": (set(), {"end"}),
    "one behind the loop": ({"last"}, set()),
    "all but one behind the loop": (set(), {"last"}),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", UNLIKE)
def test_workers_that_gather_at_unlike_places_are_told_at_once(name: str, workers: int) -> None:
    one, others = UNLIKE[name]

    def when(where: str) -> bool:
        return where in (one if steepest.rank() == 1 else others)

    script = Script(gathering(when), data=samples(6 * workers))
    words = r"steepest.gather\(\) was called by worker .* did not"
    with pytest.raises((ModelRaisedError, ConfigurationError), match=words):
        run(script, workers)


def of_unlike_forms(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, _ in parts.loader:
            steepest.gather({"a": len(x)} if steepest.rank() else {"b": len(x)})


def test_workers_that_gather_unlike_values_are_told_so() -> None:
    with pytest.raises(ModelRaisedError, match="values of different structures"):
        run(Script(of_unlike_forms), 2)
