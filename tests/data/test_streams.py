"""Iterable data sets are divided among replicas by position, unless they divide themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    FailureConfig,
    StepResult,
    TorchModel,
)
from steepest.core.data import streams
from steepest.core.data.sources import as_source
from steepest.core.messages.driver import Failure, Result
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster
from tests.reference import Task, difference, samples, snapshot
from tests.simulation.run import Simulation, run_config

quiet_fork = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Numbers(IterableDataset[int]):
    """Knows nothing of its place."""

    start, stop = 0, 24

    def __iter__(self) -> Iterator[int]:
        yield from range(self.start, self.stop)


class Aware(Numbers):
    """Divides itself, as Hugging Face's and WebDataset's data sets do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            yield from range(self.stop)
        else:
            yield from range(info.id, self.stop, info.num_workers)


def bounds(number: int) -> None:
    """Divide a data set in torch's other way: a `worker_init_fn`."""
    info: Any = get_worker_info()
    part = 24 // info.num_workers
    info.dataset.start, info.dataset.stop = info.id * part, (info.id + 1) * part


def one_pass(data: Any, replica: int, replicas: int, batch: int | None) -> list[list[int]]:
    """The batches of one replica until they begin again."""
    source, _ = as_source(data, batch)
    source.divide(replica, replicas)  # type: ignore[attr-defined]
    found: list[list[int]] = []
    for each in islice(source.open([]), 30):
        if [each.tolist()] == found[:1]:
            break
        found.append(each.tolist())
    return found


def test_each_replica_takes_the_next_batch() -> None:
    """As `accelerate.data_loader.IterableDatasetShard` does."""
    parts = [one_pass(Numbers(), replica, 3, 2) for replica in range(3)]
    assert parts[1] == [[2, 3], [8, 9], [14, 15], [20, 21]]
    assert sorted(i for part in parts for batch in part for i in batch) == [*range(24)]


def test_a_data_set_that_asks_for_its_part_is_respected() -> None:
    parts = [one_pass(Aware(), replica, 3, 2) for replica in range(3)]
    assert parts[1] == [[1, 4], [7, 10], [13, 16], [19, 22]]
    assert get_worker_info() is None


def test_one_replica_takes_all() -> None:
    assert [i for batch in one_pass(Aware(), 0, 1, 4) for i in batch] == [*range(24)]


def test_batches_that_a_data_set_yields_are_divided() -> None:
    class Batches(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.arange(12).split(3)

    assert one_pass(Batches(), 1, 2, None) == [[3, 4, 5], [9, 10, 11]]


@pytest.mark.few(1)
@pytest.mark.long
@quiet_fork
@pytest.mark.parametrize(
    ("data", "init"), [(Numbers(), None), (Aware(), None), (Numbers(), bounds)]
)
def test_processes_of_a_loader_have_parts_of_their_replica(data: Any, init: Any) -> None:
    def loader() -> Any:
        return DataLoader(data, batch_size=3, num_workers=2, worker_init_fn=init)

    parts = [one_pass(loader(), replica, 2, None) for replica in range(2)]
    seen = [sorted(i for batch in part for i in batch) for part in parts]
    assert sorted(seen[0] + seen[1]) == [*range(24)]
    assert len(seen[0]) == len(seen[1])


def test_a_replica_without_samples_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="samples for each replica"):
        one_pass(Numbers(), 24, 25, 2)


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(*samples(24), strict=True)


def test_a_step_covers_the_next_samples_of_the_stream() -> None:
    task = Task(data=Rows(), batch_size=3)  # type: ignore[arg-type]
    cluster = InProcessCluster(task.creator(), num_workers=2)
    cluster.step(4)
    torch.manual_seed(0)
    net = task.module()
    optimizer = task.optimizer(net)
    for x, y in zip(*(column.split(6) for column in samples(24)), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    assert difference(cluster.weights(), snapshot(net)) < 1e-12


def test_the_driver_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    creator = Task(data=Rows(), batch_size=3).creator()  # type: ignore[arg-type]
    with Simulation().running(), DistributedSGD(creator, 3, run_config=run_config()):
        pass
    said = [record for record in caplog.records if "divided" in record.getMessage()]
    assert len(said) == 1
    assert said[0].name == "steepest.runtime.cluster"
    assert "Rows that chooses its own samples: samples are divided" in said[0].getMessage()


class Pairs(IterableDataset[Any]):
    """13 samples: (number, zero)."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        yield from ((number, 0) for number in range(13))


class Visits(nn.Module):
    """Its weights count how often each sample was in a committed step, for a learning rate of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.visits = nn.Parameter(torch.zeros(13, dtype=torch.float64))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.visits[numbers]


def counting(worker: int, device: int) -> TorchModel:
    return TorchModel(
        Visits(),
        loss=lambda output, target: -output.mean(),
        data=Pairs(),
        batch_size=1,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=1.0),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", AllreduceStrategy(replication=2)], ids=["ps", "all"])
def test_a_pass_goes_on_with_the_next_sample_when_workers_come_go_and_die(
    strategy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = Simulation(3, cpus=(6,))
    configured = run_config(failure=FailureConfig(patience=math.inf))
    with (
        simulation.running(),
        DistributedSGD(counting, 2, strategy=strategy, run_config=configured) as sgd,
    ):
        following = 0

        def goes_on(steps: int) -> None:
            nonlocal following
            before, workers = sgd.weights()["visits"], sgd.num_workers
            sgd.fit(steps=steps, progress=False)
            found = ((sgd.weights()["visits"] - before) * workers).round().int().tolist()
            numbers = [n % 13 for n in range(following, following + steps * workers)]
            assert found == [numbers.count(n) for n in range(13)]
            following += steps * workers

        def kill(name: str) -> None:
            (victim,) = (p for p in simulation.living() if name in str(p))
            simulation.world.kill(victim, "it was killed. connection error code 2.")

        goes_on(3)
        sgd.resize(num_workers=1)
        goes_on(5)
        sgd.resize(num_workers=3)
        goes_on(9)  # passes end in the middle of a step
        kill("worker 1")
        goes_on(4)
        kill("worker 0")
        goes_on(1)
        sgd.resize(num_workers=2)
        goes_on(10)
        sgd.save(tmp_path)
        sgd.restore(tmp_path)
        following = 0  # which begins the stream anew
        goes_on(4)


class Kill(Callback):
    """Kills a worker after some steps, while the others train."""

    def __init__(self, simulation: Simulation, steps: set[int]) -> None:
        self.simulation, self.steps = simulation, steps

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step in self.steps:
            victim = next(p for p in self.simulation.living() if "worker" in str(p))
            self.simulation.world.kill(victim, "it was killed. connection error code 2.")


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "strategy", ["simple", AllreduceStrategy(replication=3)], ids=["simple", "all"]
)
def test_a_death_amid_a_step_leaves_no_sample_out(strategy: Any, workers: int) -> None:
    simulation = Simulation(workers, cpus=(6,))
    configured = run_config(failure=FailureConfig(patience=math.inf))
    with (
        simulation.running(),
        DistributedSGD(counting, workers, strategy=strategy, run_config=configured) as sgd,
    ):
        kill = Kill(simulation, {1, 4, 11})
        sgd.fit(steps=26, callbacks=[kill], progress=False)
        visits = (sgd.weights()["visits"] * workers).round().int().tolist()
        assert visits == [2 * workers] * 13


def test_a_batch_that_raised_is_left_out() -> None:
    class Picky(TorchModel):
        def loss(self, batch: Any) -> Any:
            assert batch[0] != 2
            return super().loss(batch)

    def create(worker: int, device: int) -> TorchModel:
        one = counting(worker, device)
        one.__class__ = Picky
        return one

    cluster = InProcessCluster(create, num_workers=1)
    kinds = [type(result) for result in (*cluster.step(3), *cluster.step(2))]
    assert kinds == [Result, Result, Failure, Result, Result]
    assert cluster.weights()["visits"].tolist()[:6] == [1, 1, 0, 1, 1, 0]


@pytest.mark.few(1)
@quiet_fork
@pytest.mark.parametrize(("processes", "drop_last"), [(0, False), (0, True), (2, False)])
def test_passes_follow_each_other_in_the_order_of_the_stream(
    processes: int, drop_last: bool
) -> None:
    class Shorter(Numbers):
        stop = 14

    batches = [[*range(i, min(i + 3, 14))] for i in range(0, 12 if drop_last else 14, 3)]
    opened = []
    for replica in range(2):
        loader = DataLoader(Shorter(), batch_size=3, num_workers=processes, drop_last=drop_last)
        source: Any = as_source(loader, None)[0]
        source.divide(replica, 2)
        source.begin = 3
        opened.append(source.open([]))
    found = [next(one).tolist() for _ in range(5) for one in opened]
    assert found == (batches * 4)[3:13]


def test_a_data_set_that_asks_for_its_part_begins_it_anew() -> None:
    for replicas in (1, 2):
        source: Any = as_source(Aware(), 2)[0]
        source.divide(0, replicas)
        source.begin = 5
        assert next(source.open([])).tolist() == [0, replicas]


def test_a_replica_does_not_read_for_ever_to_where_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "_SKIP_SECONDS", -1.0)
    source: Any = as_source(Numbers(), 2)[0]
    source.divide(1, 3)
    source.begin = 5
    found = [batch.tolist() for batch in islice(source.open([]), 4)]
    assert found == [[0, 1], [6, 7], [12, 13], [18, 19]], "batches 0, 3, 6, 9 are its part"
