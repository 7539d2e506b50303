"""A worker loads the next step's first batch while it waits for that step's weights; nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.core.engine.generators import HeldGenerators, about_to_change, seed_everything
from steepest.core.engine.replicas import Replicas
from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.message import Kind, Message
from steepest.core.models.torch import TorchModel
from steepest.core.strategies.strategy import Strategy
from steepest.testing import InProcessCluster
from tests.hand_moved_clock import HandMovedClock
from tests.reference import same_bits

STRATEGIES: dict[str, Strategy] = {
    "ps": ParameterServerStrategy(num_servers=1),
    "allreduce": AllreduceStrategy(),
    "async": ParameterServerStrategy(num_servers=1, mode="async"),
}


class Noisy(Dataset[Any]):
    """Samples that are augmented by all three random generators, and note when they are read."""

    def __init__(self, happened: list[str], bad: int | None = None) -> None:
        self._happened, self._bad = happened, bad

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._happened.append("read")
        if index == self._bad:
            raise OSError(f"sample {index} is damaged")
        noise = random.random() + np.random.rand() + torch.rand(())
        return torch.full((3,), index / 10) + noise, torch.tensor([index / 7])


class Drawing(torch.optim.SGD):
    """Draws random numbers, as one that adds noise to its updates does."""

    def step(self, closure: Any = None) -> Any:
        torch.rand(1)
        return super().step(closure)


def creator(happened: list[str], data: Any = None, optimizer: Any = torch.optim.SGD) -> Any:
    def create(worker_index: int, device_index: int) -> TorchModel:
        module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        return TorchModel(
            module,
            loss=nn.functional.mse_loss,
            data=Noisy(happened) if data is None else data(),
            batch_size=2,
            optimizer=lambda m: optimizer(m.parameters(), lr=0.01),
        )

    return create


def job(
    happened: list[str], name: str = "ps", workers: int = 2, **options: Any
) -> InProcessCluster:
    made = {key: options.pop(key) for key in ("data", "optimizer") if key in options}
    return InProcessCluster(
        creator(happened, **made),
        num_workers=workers,
        strategy=STRATEGIES[name],
        **options,
    )


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", ["ps", "allreduce"])
def test_no_bit_changes_whatever_uses_the_generators_between_steps(
    name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = job([], name, workers)
    ahead.step(9)

    one_by_one = job([], name, workers)
    for _ in range(9):  # nothing is granted beyond a step, so nothing is loaded beforehand
        one_by_one.step(1)
    assert same_bits(ahead.weights(), one_by_one.weights())

    disturbed = job([], name, workers)
    load_ahead = Replicas.load_ahead

    def load_and_disturb(replicas: Replicas, number: int) -> None:
        load_ahead(replicas, number)
        about_to_change()  # as a function of the user's between two steps has it
        seed_everything(3)

    monkeypatch.setattr(Replicas, "load_ahead", load_and_disturb)
    disturbed.step(9)
    assert same_bits(ahead.weights(), disturbed.weights())


def test_an_optimizer_may_draw_random_numbers_between_a_batch_and_its_computation() -> None:
    ahead, one_by_one = (job([], optimizer=Drawing) for _ in range(2))
    ahead.step(5)
    for _ in range(5):
        one_by_one.step(1)
    assert same_bits(ahead.weights(), one_by_one.weights())


def test_the_next_batch_is_read_before_the_weights_come_and_the_last_grants_no_more() -> None:
    happened: list[str] = []
    cluster = job(happened, workers=2)

    def see(message: Message) -> list[Message]:
        if message.kind in (Kind.REPORT, Kind.COMMIT, Kind.WEIGHTS):
            happened.append(message.kind.name)
        return [message]

    cluster.network.filter = see
    happened.clear()
    cluster.step(2)
    first_report = happened.index("REPORT")
    assert "read" in happened[first_report : happened.index("WEIGHTS", first_report)]
    assert happened.count("read") == 2 * 2 * 2  # steps, workers, samples of a batch
    happened.clear()
    cluster.step(1)
    assert happened.count("read") == 2 * 2


def test_the_seconds_of_reading_are_told_as_such_also_where_they_pass_while_weights_are_awaited(
    clock: HandMovedClock,
) -> None:
    class Slow(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            clock.seconds += 0.25
            return super().__getitem__(index)

    cluster = job([], workers=1, data=lambda: Slow([]))
    began = clock.seconds
    results = [outcome for outcome in cluster.step(4) if isinstance(outcome, Result)]
    assert [result.timings["data"] for result in results] == [0.5] * 4
    assert [result.timings["wait"] for result in results] == [0.0] * 4
    assert clock.seconds - began == 4 * 0.5


def test_under_leases_nothing_is_read_beforehand() -> None:
    happened: list[str] = []
    cluster = job(happened, "async", workers=2)
    happened.clear()
    cluster.step(4)
    assert happened.count("read") == 4 * 2 * 2


def test_an_error_of_the_data_belongs_to_its_own_step() -> None:
    bad = 5
    cluster = job([], workers=2, data=lambda: Noisy([], bad))
    outcomes = cluster.step(6)
    taken = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    (failure,) = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    plan = cluster.job.plan()
    assert plan is not None
    steps = [step for step in range(6) if bad in plan.share(step, 0, 1)]
    assert len(taken) == steps[0]
    assert failure.step == steps[0]
    assert "sample 5 is damaged" in failure.error
    again = cluster.step(1)  # the step is tried again, and meets the same sample
    assert isinstance(again[0], Failure)


def test_a_stream_loses_no_batch_to_a_step_that_is_given_up() -> None:
    given: list[int] = []
    raised: list[bool] = []

    def stream() -> Any:
        class Batches:
            def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
                for number in range(1000):
                    given.append(number)
                    yield torch.full((2, 3), float(number)), torch.zeros(2, 1)

        return Batches()

    seen: list[float] = []

    class Watching(TorchModel):
        def loss(self, batch: Any) -> torch.Tensor:
            if len(seen) == 3 and not raised:
                raised.append(True)
                raise ValueError("once")
            seen.append(float(batch[0][0, 0]))
            return super().loss(batch)  # type: ignore[return-value]

    def create(worker_index: int, device_index: int) -> TorchModel:
        return Watching(
            nn.Linear(3, 1),
            loss=nn.functional.mse_loss,
            data=stream(),
            optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-6),
        )

    cluster = InProcessCluster(create, num_workers=1, strategy=STRATEGIES["ps"])
    outcomes = cluster.step(5)
    assert isinstance(outcomes[-1], Failure)
    cluster.step(3)
    assert seen == [0.0, 1.0, 2.0, 4.0, 5.0, 6.0]  # 3 was of the loss that raised
    assert given[-1] == 6


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("disturb", [False, True])
def test_who_holds_the_generators_goes_on_from_them(disturb: bool) -> None:
    seed_everything(7)
    expected = [draw(), draw()]
    seed_everything(7)
    assert draw() == expected[0]
    held = HeldGenerators()
    if disturb:
        seed_everything(8)
        other = HeldGenerators()
        seed_everything(9)
        other.go_on()
    held.go_on()
    assert draw() == expected[1]
