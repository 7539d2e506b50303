"""Sources: whatever holds the data, a share of indices becomes the batch that its owner would expect."""

from __future__ import annotations

import logging
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from steepest.core.data.protocol import Indices, Source
from steepest.core.data.sources import as_source
from steepest.core.messages.driver import Failure
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster
from tests.reference import Task, samples

SHARES = [[2, 0], [5], [1, 3, 4]]
quiet_fork = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Squares(Dataset[tuple[int, int]]):
    def __init__(self, size: int = 6) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        assert isinstance(index, int), "datasets get Python integers"
        return index, index * index


class Records(Squares):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((2,), float(index)), "y": index}


class Many(Squares):
    """Fetches a batch at once, as Hugging Face data sets and Subset do."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        raise AssertionError("a data set with __getitems__ is asked for whole batches")

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [(i, -i) for i in indices]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def collate_sum(samples: list[tuple[int, int]]) -> tuple[int, int]:
    """A collate_fn of the user's own; at module level, so that worker processes find it."""
    return sum(x for x, _ in samples), sum(y for _, y in samples)


def first(source: Source, count: int | None = None) -> list[Any]:
    shares: list[Indices] = [np.array(share, dtype=np.int64) for share in SHARES]
    opened = source.open(shares)
    return list(opened) if count is None else [next(opened) for _ in range(count)]


def refused(data: Any, batch_size: int | None = 2) -> str:
    with pytest.raises(ConfigurationError) as caught:
        as_source(data, batch_size)
    return str(caught.value)


# -- arrays ---------------------------------------------------------------------------------------


def test_numpy_arrays_give_tuples_of_rows() -> None:
    source, batch_size = as_source((np.arange(6.0) * 10, np.arange(6)), 3)
    assert (source.size, batch_size) == (6, 3)
    batches = first(source)
    assert [x.tolist() for x, _ in batches] == [[20, 0], [50], [10, 30, 40]]
    assert [y.tolist() for _, y in batches] == SHARES
    assert all(isinstance(a, np.ndarray) for batch in batches for a in batch)


def test_tensors_give_tuples_of_rows_and_copies() -> None:
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    source, _ = as_source([x, y], 3)
    batches = first(source)
    assert [rows[1].tolist() for rows in batches] == SHARES
    assert torch.equal(batches[0][0], x[[2, 0]])
    batches[0][0].zero_()
    assert x[2].tolist() == [4, 5]


def test_one_array_alone_and_tensors_beside_arrays() -> None:
    assert [rows.tolist() for (rows,) in first(as_source(np.arange(6), 1)[0])] == SHARES
    assert [rows.tolist() for (rows,) in first(as_source(torch.arange(6), 1)[0])] == SHARES
    mixed = first(as_source((np.arange(6), torch.arange(6)), 1)[0])
    assert [(type(a), type(b)) for a, b in mixed] == [(np.ndarray, torch.Tensor)] * 3
    assert [(a.tolist(), b.tolist()) for a, b in mixed] == [(share, share) for share in SHARES]


@pytest.mark.parametrize(
    "data",
    [(np.zeros(3), np.zeros(4)), torch.zeros(0, 2), np.zeros(0), (torch.zeros(0), torch.zeros(2))],
)
def test_arrays_of_unequal_lengths_or_none_are_refused(data: Any) -> None:
    assert "data arrays have lengths" in refused(data)


@pytest.mark.parametrize(
    "data", [np.array(3.0), torch.tensor(3.0), (torch.zeros(3), torch.tensor(1.0))]
)
def test_scalars_are_refused(data: Any) -> None:
    assert "a scalar has no samples" in refused(data)


def test_a_list_of_arrays_is_taken_for_columns_only_where_it_cannot_be_samples() -> None:
    images = [torch.zeros(3, 4, 4) for _ in range(6)]
    message = refused(images)
    assert "a list of 6 arrays of 3 dimensions, which may be samples or columns" in message
    source, _ = as_source(DataLoader(images, batch_size=2), None)  # type: ignore[arg-type]
    assert first(source)[0].shape == (2, 3, 4, 4), "what the message says"
    message = refused([torch.zeros(3), torch.zeros(5)])
    assert "a list of 2 arrays of lengths 3, 5, which cannot be columns" in message
    assert len(first(as_source([torch.zeros(6, 2), torch.arange(6)], 2)[0])[0]) == 2


@pytest.mark.parametrize(
    "data",
    [([1.0, 2.0], [3.0, 4.0]), (torch.zeros(2), [0, 1]), (torch.zeros(2), None)],
)
def test_columns_that_are_no_arrays_are_refused(data: Any) -> None:
    message = refused(data)
    assert f"data is a tuple of 2, one of which is a {type(data[1]).__name__}: a tuple" in message
    samples_in_a_tuple = as_source(((1, 2), (3, 4)), 2)[0]
    assert samples_in_a_tuple.size == 2


ROWS, PAIRS = [[1.0, 2.0, 3.0]] * 4, [([1.0, 2.0], 1)] * 4


@pytest.mark.parametrize(
    "data",
    [ROWS, [ROWS, [1, 2, 3, 4]], PAIRS, tuple(PAIRS), [{"x": [1, 2], "y": 1}], [[[1, 2], 0]]],
)
def test_samples_with_lists_of_numbers_are_refused(data: Any) -> None:
    message = refused(data)
    assert (
        f"data is a {type(data).__name__} of {len(data)} whose first sample has a list" in message
    )
    assert "(torch.as_tensor(inputs), torch.as_tensor(targets))" in message


@pytest.mark.parametrize("data", [[(1.0, 2)], [1.0, 2.0], ["a", "b"], [("a", [torch.ones(2)])]])
def test_samples_of_numbers_texts_and_tensors_are_taken(data: Any) -> None:
    assert as_source(data, 1)[0].size == len(data)


# -- datasets -------------------------------------------------------------------------------------


def test_a_dataset_is_collated_as_torch_does() -> None:
    source, batch_size = as_source(Squares(), 4)
    assert (source.size, batch_size) == (6, 4)
    batches = first(source)
    assert [x.tolist() for x, _ in batches] == SHARES
    assert [y.tolist() for _, y in batches] == [[4, 0], [25], [1, 9, 16]]


def test_a_list_of_samples_is_a_dataset() -> None:
    source, _ = as_source([(i, i * i) for i in range(6)], 2)
    assert [x.tolist() for x, _ in first(source)] == SHARES


def test_dict_samples_give_dict_batches() -> None:
    batch = first(as_source(Records(), 2)[0])[0]
    assert batch.keys() == {"x", "y"}
    assert batch["x"].tolist() == [[2, 2], [0, 0]]
    assert batch["y"].tolist() == [2, 0]


def test_a_dataset_may_fetch_many_at_once() -> None:
    assert [y.tolist() for _, y in first(as_source(Many(), 2)[0])] == [[-2, 0], [-5], [-1, -3, -4]]
    subset = Subset(Squares(12), range(6, 12))
    assert [x.tolist() for x, _ in first(as_source(subset, 2)[0])] == [[8, 6], [11], [7, 9, 10]]


def test_an_empty_dataset_is_refused() -> None:
    assert "empty" in refused(Squares(0))
    assert "empty" in refused([])


def test_a_dataset_without_length_is_refused() -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    assert "Endless has no length: add __len__" in refused(Endless())


def test_a_dict_of_arrays_is_refused_with_what_to_give() -> None:
    assert "data is a dict" in refused({"x": np.zeros(3), "y": np.zeros(3)})


def test_what_holds_no_batches_is_refused() -> None:
    assert "data is a int: give arrays" in refused(7)
    assert "data is a NoneType" in refused(None)
    assert "data is a str, which has no samples: give arrays" in refused("rows.csv")
    frame = type("DataFrame", (list,), {"__module__": "pandas.core.frame"})
    assert "data is a DataFrame, which has no samples" in refused(frame([1, 2]))


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, "8", None])
def test_a_batch_size_is_a_positive_integer(batch_size: Any) -> None:
    assert f"batch_size={batch_size!r}: give an integer of at least 1" in refused(
        np.zeros(3), batch_size
    )


# -- DataLoader -----------------------------------------------------------------------------------


def test_a_loader_gives_its_batch_size_and_no_other_is_taken() -> None:
    loader = DataLoader(Squares(), batch_size=5, shuffle=True)
    assert as_source(loader, None)[1] == 5
    assert as_source(loader, 5)[1] == 5
    assert as_source(loader, None)[0].size == 6
    stream = DataLoader(Stream(), batch_size=5)
    for each in (loader, stream):
        assert "batch_size=3 beside a DataLoader with batch_size=5" in refused(each, 3)


@quiet_fork
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_collates_as_it_was_told(workers: int) -> None:
    loader = DataLoader(Squares(), batch_size=2, num_workers=workers, collate_fn=collate_sum)
    assert first(as_source(loader, None)[0]) == [(2, 4), (5, 25), (8, 26)]


@quiet_fork
def test_worker_processes_serve_endless_shares_without_touching_the_random_state() -> None:
    def endless() -> Iterator[Indices]:
        step = 0
        while True:
            yield np.array([step % 6, (step + 1) % 6])
            step += 1

    source, _ = as_source(DataLoader(Records(), batch_size=2, num_workers=2), None)
    before = torch.get_rng_state()
    opened = source.open(endless())
    assert [next(opened)["y"].tolist() for _ in range(4)] == [[0, 1], [1, 2], [2, 3], [3, 4]]
    opened.close()  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), before), (
        "a step's dropout must not depend on who opened a loader"
    )


@pytest.mark.parametrize(
    "sampler",
    [SubsetRandomSampler([0, 1]), WeightedRandomSampler([0.5] * 6, 6), iter([1, 2]), [3, 4]],
)
def test_a_loader_with_a_sampler_of_its_own_is_refused(sampler: Any) -> None:
    message = refused(DataLoader(Squares(), batch_size=2, sampler=sampler))
    assert f"({type(sampler).__name__})" in message
    assert "leave sampler= and batch_sampler= out" in message


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_loader_with_a_batch_sampler_or_without_batches_is_refused(
    batch_size: int | None,
) -> None:
    batches = BatchSampler(SequentialSampler(Squares()), 2, drop_last=False)
    assert "BatchSampler" in refused(DataLoader(Squares(), batch_sampler=batches), batch_size)
    assert "batch_size=None" in refused(DataLoader(Squares(), batch_size=None), batch_size)


@pytest.mark.parametrize("options", [{"replacement": True}, {"num_samples": 3}])
def test_sampling_with_replacement_or_in_part_is_refused(options: dict[str, Any]) -> None:
    loader = DataLoader(Squares(), batch_size=2, sampler=RandomSampler(Squares(), **options))
    assert "with replacement or a part" in refused(loader)


def test_drop_last_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "steepest"):
        source, _ = as_source(DataLoader(Squares(), batch_size=4, drop_last=True), None)
    assert source.size == 6
    assert source.drop_last
    assert not caplog.text


@pytest.mark.parametrize("workers", [1, 2])
def test_with_drop_last_no_batch_is_smaller(workers: int) -> None:
    """One sample is left over, of which BatchNorm cannot take the variance."""
    task = Task(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(),
        data=samples(9),
        batch_size=8 // workers,
    )

    def creator(worker: int, device: int) -> Any:
        model = task.creator()(worker, device)
        loader = DataLoader(TensorDataset(*task.data), batch_size=8 // workers, drop_last=True)
        model.data, model.batch_size = as_source(loader, None)
        return model

    cluster = InProcessCluster(creator, num_workers=workers)
    assert [result.samples for result in cluster.step(4)] == [8] * 4
    *_, failed = InProcessCluster(task.creator(), num_workers=workers).step(2)
    assert isinstance(failed, Failure)
    assert "drop_last=True" in failed.error


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [Stream(), {4: 0, 5: 0}.keys(), range(4)])
def test_streams_and_datasets_are_told_apart(data: Any) -> None:
    expected = 4 if isinstance(data, range) else None
    assert as_source(data, 2)[0].size == expected


def test_an_iterable_is_begun_again_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    class Batches:
        begun = 0

        def __iter__(self) -> Iterator[int]:
            Batches.begun += 1
            return iter([Batches.begun * 10, Batches.begun * 10 + 1])

    with caplog.at_level(logging.WARNING, "steepest"):
        source, batch_size = as_source(Batches(), None)
    assert (source.size, batch_size) == (None, 1)
    assert "Batches that chooses its own samples" in source.notice
    assert not caplog.text
    assert first(source, 5) == [10, 11, 20, 21, 30]


def test_an_iterable_dataset_is_a_stream_of_batches() -> None:
    source, batch_size = as_source(Stream(), None)
    assert (source.size, batch_size) == (None, 1)
    assert first(source, 5) == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_loader_over_an_iterable_dataset_batches_it(batch_size: int | None) -> None:
    source, found = as_source(DataLoader(Stream(), batch_size=batch_size), None)
    assert (source.size, found) == (None, batch_size or 1)
    batches = [batch.tolist() if batch_size else batch for batch in first(source, 3)]
    assert batches == ([[0, 1, 2], [3], [0, 1, 2]] if batch_size else [0, 1, 2])


def test_a_generator_that_ends_cannot_be_begun_again() -> None:
    opened = as_source((i for i in range(2)), None)[0].open([])
    assert [next(opened), next(opened)] == [0, 1]
    with pytest.raises(ConfigurationError, match="can be begun again"):
        next(opened)


def test_tuples_of_samples_with_names_stay_so() -> None:
    point = namedtuple("point", "x y")
    (batch, *_) = first(as_source([point(i, -i) for i in range(6)], 2)[0])
    assert batch.y.tolist() == [-2, 0]


def test_a_tensor_dataset_gives_the_rows_of_its_arrays() -> None:
    x, y = torch.randn(6, 2), torch.arange(6)
    rows = first(as_source(TensorDataset(x, y), 2)[0])
    for (a, b), (c, d) in zip(rows, first(as_source((x, y), 2)[0]), strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_an_iterable_dataset_of_samples_is_batched_by_the_batch_size() -> None:
    source, batch_size = as_source(Stream(), 3)
    assert (batch_size, source.size) == (3, None)
    assert [batch.tolist() for batch in first(source, 3)] == [[0, 1, 2], [3], [0, 1, 2]]
