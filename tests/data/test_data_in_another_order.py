"""Workers whose data come in another order than other workers' are refused, by the first sample that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

import steepest
from steepest import TorchModel
from steepest.core.data.fingerprint import described, unlike_rows
from steepest.core.data.sources import as_source
from steepest.errors import ModelError
from steepest.testing import InProcessCluster
from tests.own_loop_runs import run, without
from tests.reference import sgd
from tests.simulated_programs import quiet

FILES = [f"{number:02}.png" for number in range(12)]


class Files(Dataset[Any]):
    """Samples that are read from files."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.files[index][:2])])


class Stream(IterableDataset[Any]):
    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(name[:2])]) for name in self.files)


def difference(one: Any, other: Any) -> tuple[str, int] | None:
    first, second = (described(as_source(data, 2)[0])[1] for data in (one, other))
    unlike = unlike_rows(first, second)
    return min(((name, rows[0]) for name, rows in unlike.items()), default=None, key=lambda e: e[1])


def test_the_first_sample_that_differs_is_named() -> None:
    x = torch.arange(9.0)
    assert difference(TensorDataset(x), TensorDataset(x.clone())) is None
    other = x[[0, 1, 2, 4, 3, 5, 6, 7, 8]]
    assert difference(TensorDataset(x), TensorDataset(other)) == ("tensors 0", 3)
    assert difference(x, other) == ("column 0", 3)
    assert difference((x, x), (other, x[[0, 2, 1, 4, 3, 5, 6, 7, 8]])) == ("column 1", 1)
    moved = [f"/elsewhere/{name}" for name in FILES]
    assert difference(Files(FILES), Files(moved)) is None
    assert difference(Files(FILES), Files(FILES[::-1])) == ("files", 0)
    parts = [Files(FILES), Files(FILES[:2])], [Files(FILES), Files(FILES[1::-1])]
    assert difference(*map(ConcatDataset, parts)) == ("datasets 1.files", 0)
    order = Subset(Files(FILES), [0, 1, 2]), Subset(Files(FILES), [0, 2, 1])
    assert difference(*order) == ("indices", 1)


def test_tables_of_pandas_are_compared() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"name": FILES, "label": range(12)})
    found = [described(type("Data", (), {"contents": each})())[1] for each in (table, table[::-1])]
    assert unlike_rows(*found)["the table"][0] == 0


def reversed_on(worker: int) -> list[str]:
    return FILES[::-1] if worker == 1 else FILES


WRONG = r"sample 0 is another one in the data of worker 0.* than in those of worker 1.*sorted"


@pytest.mark.parametrize("data", [Files, Stream])
def test_workers_of_a_trainer(data: Any) -> None:
    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            nn.Linear(1, 1),
            loss=nn.functional.mse_loss,
            data=DataLoader(data(reversed_on(worker)), batch_size=2),
            optimizer=sgd(),
        )

    with pytest.raises(ModelError, match=WRONG):
        InProcessCluster(create, num_workers=2, strategy=steepest.ParameterServerStrategy())


def train(data: Dataset[Any], **prepare: Any) -> None:
    net = nn.Linear(1, 1)
    given = net, sgd()(net), DataLoader(data, batch_size=2)
    model, optimizer, loader = steepest.prepare(*given, **prepare)
    for _ in steepest.epochs(2):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()


@pytest.mark.parametrize("data", [Files, Stream])
def test_workers_of_a_loop(data: Callable[[list[str]], Dataset[Any]]) -> None:
    with quiet(), pytest.raises(ModelError, match=WRONG):
        run(lambda: train(data(reversed_on(steepest.rank()))), 2)


class Filled(Files):
    """It keeps what it has read in an array, whose rows have any values before."""

    def __init__(self, files: list[str], seed: int, reads: float = 0.0) -> None:
        super().__init__(files)
        self.cache = np.random.default_rng(seed).random(len(files), np.float32)
        self.has_read = np.zeros(len(files), bool)
        self.reads = reads

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.has_read[index]:
            self.cache[index] = float(self.files[index][:2])
            self.has_read[index] = True
        return torch.from_numpy(
            self.cache[index : index + 1] + self.reads * np.random.rand(1).astype("f")
        )


def test_an_array_that_is_filled_as_samples_are_read_is_no_order() -> None:
    """Of a worker that joins later, too."""

    def script() -> None:
        made.append(steepest.rank())
        train(Filled(FILES, seed=len(made)))

    made: list[int] = []
    with quiet():
        run(script, 3)
        without(script, 2, 1, 2)
    for reads in (0.0, 1.0):  # a sample that is another one each time says nothing of the order
        with quiet(), pytest.raises(ModelError, match=WRONG.replace(".*sorted", "")):
            run(
                lambda reads=reads: train(
                    Filled(reversed_on(0 if reads else steepest.rank()), steepest.rank(), reads)
                ),
                2,
            )


def test_replicas_of_one_worker_may_have_caches_of_their_own() -> None:
    made: list[int] = []

    def create(worker: int, device: int) -> TorchModel:
        made.append(device)
        return TorchModel(
            nn.Linear(1, 1),
            loss=lambda output, _: output.mean(),
            data=DataLoader(Filled(FILES, seed=len(made)), batch_size=2),
            optimizer=sgd(),
        )

    strategy = steepest.ParameterServerStrategy()
    InProcessCluster(create, num_workers=2, devices_per_worker=2, strategy=strategy)
    assert made == [0, 1, 0, 1]


def test_a_successor_is_refused() -> None:
    made = []

    def script() -> None:
        made.append(steepest.rank())
        train(Files(FILES if len(made) < 3 else FILES[::-1]))

    with quiet(), pytest.raises(ModelError, match="sample 0 is another one in the data of the job"):
        without(script, 2, 1, 2)


def test_what_is_no_sample_may_differ_once_training_goes_on() -> None:
    class Caching(Files):
        rank = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            self.read = np.full(3, self.rank)
            return super().__getitem__(index)

    def script() -> None:
        data = Caching(FILES)
        data.rank = steepest.rank()  # a data set may not ask for it: others read it
        train(data)

    with quiet():
        run(script, 2)
