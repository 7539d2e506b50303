"""What workers' own loops have to have in common: where they differ, the first step says so."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest.errors import ConfigurationError, ModelError
from tests.own_loop_runs import run, without
from tests.own_loops import Parts, Script
from tests.reference import difference, perceptron, samples, sgd
from tests.simulated_programs import quiet

Loop = Callable[[Parts, int], None]


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def learn(parts: Parts, x: Any, y: Any) -> torch.Tensor:
    parts.optimizer.zero_grad()
    loss = nn.functional.mse_loss(parts.model(x), y)
    loss.backward()
    return loss.detach()


def setting(**values: Callable[[float], Any]) -> Loop:
    """A loop that sets hyperparameters by what this worker alone has found."""

    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                loss = learn(parts, x, y).item()
                for group in parts.optimizer.param_groups:
                    group.update({name: value(loss) for name, value in values.items()})
                parts.optimizer.step()

    return loop


def other(value: Any, others: Any) -> Callable[[float], Any]:
    """A value of worker 1, where the others have another one."""
    return lambda _: value if steepest.rank() == 1 else others


def plateau(parts: Parts, epochs: int) -> None:
    """A scheduler that is given a worker's own losses."""
    (scheduler,) = parts.schedulers
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            loss = learn(parts, x, y)
            parts.optimizer.step()
            scheduler.step(loss * (1 if steepest.rank() else -1))


def clipping(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            learn(parts, x, y)
            norm = 0.5 if steepest.rank() else 0.25
            steepest.clip_grad_norm_(parts.model.parameters(), norm)
            parts.optimizer.step()


def clipping_alone(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            learn(parts, x, y)
            if steepest.rank() == 1:
                steepest.clip_grad_norm_(parts.model.parameters(), 0.5)
            parts.optimizer.step()


def leaving_out(parts: Parts, epochs: int) -> None:
    """Worker 1 takes no step for its second batch."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            learn(parts, x, y)
            if number != 1 or steepest.rank() != 1:
                parts.optimizer.step()


def accumulating(parts: Parts, epochs: int) -> None:
    """Worker 1 adds up gradients of two batches, the others those of one."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            nn.functional.mse_loss(parts.model(x), y).backward()
            if number % 2 or steepest.rank() != 1:
                parts.optimizer.step()
                parts.optimizer.zero_grad()


def several(parts: Parts, epochs: int) -> None:
    """Worker 1 takes three steps in a batch, the others two."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            for _ in range(3 if steepest.rank() == 1 else 2):
                learn(parts, x, y)
                parts.optimizer.step()


def twice(parts: Parts, epochs: int) -> None:
    """Worker 1 has two backward passes in a step, the others one."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            learn(parts, x, y)
            if steepest.rank() == 1:
                parts.model(x).square().mean().backward()
            parts.optimizer.step()


def returning(parts: Parts, epochs: int) -> None:
    """Worker 1 ends its loop by what it alone has counted."""
    number = 0
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            learn(parts, x, y)
            parts.optimizer.step()
            number += 1
            if number == 3 and steepest.rank() == 1:
                return


def by_loss(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def grouped(module: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [each], "lr": 0.1} for each in module.parameters()]
    return torch.optim.SGD(groups, momentum=0.9)


#: A loop, what else the script has, and what its error says of workers 0 and 1.
DIVERGING: dict[str, tuple[Loop, dict[str, Any], str]] = {
    "lr by the loss": (
        setting(lr=lambda loss: 0.1 * loss),
        {},
        "disagree about lr: .*0 has 0.*1 has 0",
    ),
    "lr": (
        setting(lr=other(77.0, 0.1)),
        {"optimizer": sgd()},
        "about lr: worker 0 has 0.1, worker 1 has 77.0",
    ),
    "momentum": (
        setting(momentum=other(0.5, 0.9)),
        {},
        "momentum: worker 0 has 0.9, worker 1 has 0.5",
    ),
    "decay": (
        setting(weight_decay=other(1.0, 0.5)),
        {"optimizer": adam},
        "weight_decay: .*0 has 0.5, .*1 has 1.0",
    ),
    "betas": (
        setting(betas=other((0.5, 0.9), (0.9, 0.9))),
        {"optimizer": adam},
        r"betas: .*\(0.9, 0.9\).*\(0.5, 0.9\)",
    ),
    "a group": (
        setting(lr=other(0.2, 0.3)),
        {"optimizer": grouped},
        "lr of parameter group 0: .*0.3, worker 1 has 0.2",
    ),
    "plateau": (
        plateau,
        {"schedule": by_loss},
        "disagree about lr: worker 0 has 0.*, worker 1 has 0",
    ),
    "norm": (
        clipping,
        {},
        "norm by which gradients are clipped: worker 0 has 0.25, worker 1 has 0.5",
    ),
    "one norm": (clipping_alone, {}, "norm by which .*: worker 0 has no norm, worker 1 has 0.5"),
    "no step": (
        leaving_out,
        {},
        "0 is in epoch 0, batch 1 .*, worker 1 is in epoch 0, batch 2 ",
    ),
    "batches of a step": (
        accumulating,
        {},
        "0 is in epoch 0, batch 0 .*, worker 1 is in epoch 0, batch 1 ",
    ),
    "steps": (
        several,
        {},
        "0 is in epoch 0, batch 1 .* step 0 there.*, worker 1 is .* batch 0 .* step 2",
    ),
    "passes": (twice, {}, "number of backward passes in a step: worker 0 has 1, worker 1 has 2"),
    "the end": (returning, {}, "worker 0 is in epoch 0, batch 3 .*, worker 1 is behind its loop"),
}


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", DIVERGING)
def test_workers_that_differ_are_named_with_what_each_has(name: str, workers: int) -> None:
    loop, about, words = DIVERGING[name]
    script = Script(loop, data=samples(24 * workers), **about)
    with pytest.raises(ModelError, match=words) as raised:
        run(script, workers, "ps" if workers == 2 else "allreduce")
    assert re.search("gather|register|weight", str(raised.value))


def in_another_order() -> None:
    """Two optimizers, which worker 1 steps in another order than worker 0."""
    one, two = perceptron(), perceptron()
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, two))
    data = torch.utils.data.TensorDataset(*samples(16))
    one, two, first, second, loader = steepest.prepare(
        one, two, first, second, torch.utils.data.DataLoader(data, batch_size=2)
    )
    for _ in steepest.epochs(1):
        for x, y in loader:
            (one(x) + two(x) - y).square().mean().backward()
            for optimizer in (first, second) if steepest.rank() == 0 else (second, first):
                optimizer.step()
                optimizer.zero_grad()


def test_optimizers_step_in_one_order() -> None:
    with pytest.raises(
        ModelError, match="worker 0 is .* of optimizer 0, worker 1 is .* of optimizer 1"
    ):
        run(in_another_order, 2)


def counting(parts: Parts, epochs: int) -> None:
    """Ends by a number that nothing keeps, which a successor counts anew."""
    number = 0
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            learn(parts, x, y)
            parts.optimizer.step()
            number += 1
            if number == 9:
                return


@pytest.mark.parametrize("victim", [0, 1])
def test_a_successor_that_counts_anew_does_not_go_on_alone(victim: int) -> None:
    script = Script(counting, data=samples(48))
    with pytest.raises(ModelError, match="disagree about the step .* its function has returned"):
        without(script, 2, victim, 3)


def forgotten(parts: Parts, epochs: int) -> None:
    """A scheduler that `prepare` was not given."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(parts.optimizer, lambda step: 0.5**step)
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            learn(parts, x, y)
            parts.optimizer.step()
            scheduler.step()


@pytest.mark.filterwarnings("ignore:a scheduler of this SGD:UserWarning")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_scheduler_that_a_successor_begins_anew_is_found(victim: int) -> None:
    with pytest.raises(
        ModelError, match="disagree about lr: .* give the scheduler to steepest.prepare"
    ):
        without(Script(forgotten, data=samples(48)), 2, victim, 3)


def by_sample(parts: Parts, epochs: int) -> None:
    """A backward pass for each sample, of which workers may have other numbers."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            for one, target in zip(x, y, strict=True):
                (nn.functional.mse_loss(parts.model(one), target) / len(x)).backward()
            parts.optimizer.step()


def by_weight(parts: Parts, epochs: int) -> None:
    """As many backward passes as the worker's samples need, whose weight the loop says."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            steepest.weight(float(len(x)))
            for _ in range(1 + steepest.rank()):
                loss = nn.functional.mse_loss(parts.model(x), y) / (1 + steepest.rank())
                loss.backward()
            parts.optimizer.step()


@pytest.mark.parametrize("loop", [by_sample, by_weight])
def test_parts_of_a_batch_may_be_as_many_as_it_has_samples(loop: Loop) -> None:
    script = Script(loop, data=samples(11))
    assert difference(run(script, 2).weights, script.alone(2)) < 1e-12


CALLS: dict[str, Callable[[], Any]] = {
    "rank": steepest.rank,
    "size": steepest.size,
    "gather": lambda: steepest.gather(torch.ones(1)),
    "report": lambda: steepest.report(loss=1.0),
    "weight": lambda: steepest.weight(1.0),
    "clip_grad_norm_": lambda: steepest.clip_grad_norm_(nn.Linear(1, 1).parameters(), 1.0),
}


def in_a_thread(call: Callable[[], Any], raised: list[BaseException]) -> Loop:
    def loop(parts: Parts, epochs: int) -> None:
        def called() -> None:
            try:
                call()
            except ConfigurationError as error:
                raised.append(error)

        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                learn(parts, x, y)
                parts.optimizer.step()
        thread = threading.Thread(target=called, name="mine")
        thread.start()
        thread.join()

    return loop


@pytest.mark.parametrize("name", CALLS)
def test_what_a_thread_of_ones_own_calls_is_refused_by_name(name: str) -> None:
    raised: list[BaseException] = []
    run(Script(in_a_thread(CALLS[name], raised), epochs=1), 2)
    assert len(raised) == 2
    assert re.match(rf"steepest.{name}\(\) in the thread 'mine'", str(raised[0]))


def with_a_head_of_its_own(parts: Parts, epochs: int) -> None:
    """A second module, which `prepare` was not given, and one that learns behind the loop."""
    head, scale = nn.Linear(2, 2).double(), torch.ones(1, requires_grad=True)
    further, last = torch.optim.SGD(head.parameters(), 0.1), torch.optim.Adam([scale], 0.1)
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            nn.functional.mse_loss(head(parts.model(x)), y).backward()
            parts.optimizer.step()
            further.step()
    scale.square().sum().backward()
    last.step()


def test_an_optimizer_that_was_not_prepared_is_warned_of_where_several_workers_train(
    recwarn: pytest.WarningsRecorder,
) -> None:
    run(Script(with_a_head_of_its_own, epochs=1), 1)
    assert not recwarn.list
    run(Script(with_a_head_of_its_own, epochs=1), 2)
    (only,) = [str(each.message) for each in recwarn.list]
    assert only.startswith(
        "SGD.step() of an optimizer that was not given to steepest.prepare(): each worker trains its 2"
    )
