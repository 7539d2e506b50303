"""What a loop changes in its data set, its sampler or its loader between two epochs reaches the batches of the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
)

import steepest
from steepest.core.data.sources import DatasetSource
from steepest.errors import ModelRaisedError
from tests.own_loop_runs import STRATEGIES, run, without
from tests.simulated_programs import quiet
from tests.simulation.run import pause

SAMPLES = 10
EPOCHS = 3


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


class Stamped(Dataset[Any]):
    """Samples that say in which epoch they were read, as the loop has set it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.length = SAMPLES

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[float, int]:
        return float(index), self.epoch


class Stream(IterableDataset[Any]):
    """The same, without numbers of the samples."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        return ((float(index), self.epoch) for index in range(SAMPLES))


class Sized(Stream):
    def __len__(self) -> int:
        return SAMPLES


class Told(Sampler[int]):
    """Draws the number that it was told last, in each epoch as often."""

    def __init__(self) -> None:
        self._told = 0

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter([self._told] * 6)


def script(
    make: Callable[[], DataLoader[Any]],
    change: Callable[[Any, int], None],
    right: Callable[[int, torch.Tensor, torch.Tensor], bool],
    **prepare: Any,
) -> Callable[[], None]:
    """A loop that changes its loader before each epoch; it reports how many batches are not right."""

    def train() -> None:
        net = nn.Linear(1, 1)
        given = net, torch.optim.SGD(net.parameters(), lr=0.01), make()
        model, optimizer, loader = steepest.prepare(*given, **prepare)
        for epoch in steepest.epochs(1, 1 + EPOCHS):
            change(loader, epoch)
            wrong = seen = 0
            for x, stamp in loader:
                pause(1e-3)
                wrong, seen = wrong + (not right(epoch, x, stamp)), seen + 1
                optimizer.zero_grad()
                model(x[:, None].float()).mean().backward()
                optimizer.step()
            steepest.report(wrong=wrong, seen=seen)

    return train


def none_is_wrong(reports: list[dict[str, float]]) -> bool:
    return [each["wrong"] for each in reports] == [0.0] * EPOCHS and min(
        each["seen"] for each in reports
    ) > 0


def stamp(loader: Any, epoch: int) -> None:
    loader.dataset.epoch = epoch


def of_now(epoch: int, x: torch.Tensor, stamp: torch.Tensor) -> bool:
    return bool((stamp == epoch).all())


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_data_set_that_changes_between_epochs(workers: int) -> None:
    mine = script(lambda: DataLoader(Stamped(), batch_size=2), stamp, of_now)
    assert none_is_wrong(run(mine, workers).reports)


@pytest.mark.parametrize("name", ["async", "ssp", "local"])
def test_where_workers_train_by_themselves(name: str) -> None:
    mine = script(lambda: DataLoader(Stamped(), batch_size=2), stamp, of_now)
    reports = run(
        mine, 2, steepest.LocalStrategy(sync_every=2) if name == "local" else name
    ).reports
    assert sum(each["wrong"] for each in reports) == 0
    assert reports


@pytest.mark.parametrize("data", [Stream, Sized])
def test_an_iterable_data_set(data: type[Stream]) -> None:
    mine = script(lambda: DataLoader(data(), batch_size=2), stamp, of_now)
    assert none_is_wrong(run(mine, 2).reports)


def test_what_processes_of_the_loader_read() -> None:
    mine = script(lambda: DataLoader(Stamped(), batch_size=2, num_workers=1), stamp, of_now)
    assert none_is_wrong(run(mine, 2).reports)


def test_a_loop_that_has_begun_anew_changes_its_own_data() -> None:
    mine = script(lambda: DataLoader(Stamped(), batch_size=2), stamp, of_now)
    found = without(mine, 2, 0, 4, STRATEGIES["allreduce"])
    assert none_is_wrong(found.reports)


def test_a_collate_function_that_the_loop_sets() -> None:
    def change(loader: Any, epoch: int) -> None:
        loader.collate_fn = lambda samples: (default_collate(samples)[0], torch.tensor(epoch))

    mine = script(lambda: DataLoader(Stamped(), batch_size=2), change, of_now)
    assert none_is_wrong(run(mine, 2).reports)


def test_weights_of_a_sampler() -> None:
    def change(loader: Any, epoch: int) -> None:
        loader.sampler.weights = (torch.arange(SAMPLES) == epoch).double()

    def make() -> DataLoader[Any]:
        sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
        return DataLoader(Stamped(), batch_size=2, sampler=sampler)

    mine = script(make, change, lambda epoch, x, _: bool((x == epoch).all()))
    assert none_is_wrong(run(mine, 2).reports)


@pytest.mark.parametrize("tells", [False, True])
def test_a_sampler_knows_the_epoch_that_the_loop_sees_or_tells_it(tells: bool) -> None:
    def change(loader: Any, epoch: int) -> None:
        if tells:
            loader.sampler.set_epoch(2 * epoch)

    mine = script(
        lambda: DataLoader(Stamped(), batch_size=2, sampler=Told()),
        change,
        lambda epoch, x, _: bool((x == epoch * (1 + tells)).all()),
    )
    assert none_is_wrong(run(mine, 2).reports)


def grow(loader: Any, epoch: int) -> None:
    loader.dataset.length = SAMPLES * epoch


def test_data_of_another_length_are_refused() -> None:
    mine = script(lambda: DataLoader(Stamped(), batch_size=2), grow, lambda *_: True)
    with pytest.raises(
        ModelRaisedError, match=r"had 10 samples .* and has 20 now: keep its length"
    ):
        run(mine, 2)


def test_a_sampler_draws_of_what_has_come() -> None:
    def make() -> DataLoader[Any]:
        data = Stamped()
        sampler = RandomSampler(data, replacement=True, num_samples=200)
        return DataLoader(data, batch_size=50, sampler=sampler)

    def right(epoch: int, x: torch.Tensor, _: torch.Tensor) -> bool:
        return SAMPLES * (epoch - 1) <= float(x.max()) < SAMPLES * epoch

    assert none_is_wrong(run(script(make, grow, right), 2).reports)


def test_a_grown_data_set_is_evaluated_whole() -> None:
    lengths = []

    def train() -> None:
        net, tested = nn.Linear(1, 1), Stamped()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        loaders = DataLoader(Stamped(), batch_size=2), DataLoader(tested, batch_size=2)
        model, optimizer, loader, test_loader = steepest.prepare(net, optimizer, *loaders)
        for epoch in steepest.epochs(2):
            for x, _ in loader:
                optimizer.zero_grad()
                model(x[:, None].float()).mean().backward()
                optimizer.step()
            tested.length = SAMPLES * (1 + epoch)
            seen = sum(len(x) for x, _ in test_loader)
            lengths.append(int(steepest.gather(seen).sum()))

    run(train, 2)
    assert lengths == [10, 10, 20, 20]


class Reading(Dataset[int]):
    """Samples that are the process which reads them."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        import os

        return os.getpid()


@pytest.mark.parametrize("persistent", [False, True])
def test_processes_of_a_loader_stay_where_it_says_so(persistent: bool) -> None:
    loader = DataLoader(Reading(), num_workers=1, persistent_workers=persistent)
    source, share = DatasetSource(loader.dataset, loader), torch.arange(2).numpy()
    found = {int(each[0]) for _ in range(3) for each in source.open([share, share])}
    assert len(found) == (1 if persistent else 3)


class Ranked(Dataset[Any]):
    """Samples that say which worker has read them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[float, int, int]:
        return float(index), steepest.rank(), steepest.size()


def test_a_data_set_knows_the_worker_that_reads_it_ahead() -> None:
    found = list[tuple[int, int, int]]()

    def train() -> None:
        model = nn.Linear(1, 1)
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Ranked(), 2)
        model, optimizer, loader = steepest.prepare(model, optimizer, loader)
        for _ in steepest.epochs(2):
            for x, ranks, sizes in loader:
                pause(1e-3)
                found.extend((steepest.rank(), *each) for each in zip(ranks, sizes, strict=True))
                optimizer.zero_grad()
                model(x.float()[:, None]).square().mean().backward()
                optimizer.step()

    run(train, 2)
    assert len(found) == 2 * SAMPLES
    assert {(mine, int(rank), int(size)) for mine, rank, size in found} == {(0, 0, 2), (1, 1, 2)}
