"""Numbered streams and Ray Datasets: each sample in exactly one committed step per epoch, wherever a run goes on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steepest import DistributedSGD, IndexedStream, ParameterServerStrategy, RayDataset, TorchModel
from steepest.core.data.protocol import Indices, Source
from steepest.core.data.sampler import Remaining, SamplePlan
from steepest.core.engine.job import ModelCreator
from steepest.core.messages.driver import Result
from steepest.core.messages.message import Kind
from steepest.core.strategies.strategy import Strategy
from steepest.data.sources import as_source
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster, replay
from tests.counted_streams import BATCH, LENGTH, Recorded, counting
from tests.deaths import kill_senders
from tests.inside import replicas_of
from tests.reference import difference, same_bits, samples, sgd

ASYNC = ParameterServerStrategy(mode="async")
RAYS_OWN = "ignore::DeprecationWarning:ray.data"


def trained(cluster: InProcessCluster, steps: int) -> torch.Tensor:
    """How often each sample was committed after so many steps more."""
    assert [type(result) for result in cluster.step(steps)] == [Result] * steps
    return cluster.weights()["visits"].round()


def served(
    source: Source, plan: SamplePlan, epoch: int, steps: int, replicas: int, replica: int
) -> list[int]:
    """The numbers of the samples that a replica gets in an epoch."""
    assert epoch < 2
    opened = source.open(
        plan.share(epoch * steps + step, replica, replicas) for step in range(steps)
    )
    return [int(number) for numbers, _ in opened for number in numbers]


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make()
    return str(caught.value)


# -- the order of samples ---------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 2**40))
def test_blocks_of_a_number_of_samples_stay_in_order(samples: int, block: int, seed: int) -> None:
    plan = SamplePlan(samples, 8, seed, blocks=block)
    for epoch in range(2):
        order = plan.permutation(epoch)
        assert order.dtype == np.int64
        assert sorted(order) == list(range(samples))
        assert (order // block).tolist() == [i // block for i in range(samples)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 2**40))
def test_blocks_of_given_sizes_are_visited_one_after_the_other(sizes: list[int], seed: int) -> None:
    plan = SamplePlan(sum(sizes), 8, seed, blocks=tuple(sizes))
    order = plan.permutation(1)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(sum(sizes)))
    block_of = np.repeat(np.arange(len(sizes)), sizes)[order]
    assert np.count_nonzero(np.diff(block_of)) == len(sizes) - 1


def test_orders_differ_between_epochs_and_seeds_alone() -> None:
    for blocks in (25, (20, 30, 50)):
        plan = SamplePlan(100, 8, seed=3, blocks=blocks)
        orders = [plan.permutation(0).tolist(), plan.permutation(1).tolist()]
        orders.append(replace(plan, seed=4).permutation(0).tolist())
        assert len({tuple(order) for order in orders}) == 3
        assert (
            pickle.loads(pickle.dumps(replace(plan, global_batch=5))).permutation(0).tolist()
            == orders[0]
        )
    firsts = {
        SamplePlan(100, 8, seed, blocks=(20, 30, 50)).permutation(0)[0] // 50 for seed in range(20)
    }
    assert firsts == {0, 1}, "blocks of given sizes are shuffled too"
    assert SamplePlan(100, 8, 0, blocks=1).permutation(5).tolist() == list(range(100))


# -- streams ----------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 5, 24, 1000])
@pytest.mark.parametrize(
    "strategy", [ParameterServerStrategy(), ASYNC, ParameterServerStrategy(mode="ssp")]
)
def test_each_sample_is_committed_once_per_epoch(
    workers: int, block: int, strategy: Strategy
) -> None:
    update = BATCH * workers if strategy == ParameterServerStrategy() else BATCH
    creator = counting(lambda: IndexedStream(Recorded(), LENGTH, block), update)
    for seed in range(3):
        cluster = InProcessCluster(
            creator, num_workers=workers, strategy=strategy, shuffle=seed, keep_log=True
        )
        for epoch in (1, 2):
            assert trained(cluster, LENGTH // (BATCH * workers)).tolist() == [epoch] * LENGTH
        assert same_bits(replay(cluster.log(), creator), cluster.weights())


@pytest.mark.parametrize("strategy", [ParameterServerStrategy(num_servers=1), ASYNC])
def test_a_successor_finds_its_place_in_a_stream(strategy: Strategy) -> None:
    update = BATCH if strategy == ASYNC else BATCH * 2
    creator = counting(lambda: IndexedStream(Recorded(), LENGTH, 10), update)
    cluster = InProcessCluster(creator, num_workers=2, strategy=strategy, replaces=True)
    kill_senders(cluster, [(1, Kind.PUSH, 3)])
    assert trained(cluster, 6).tolist() == [2] * LENGTH
    assert len(cluster.left) == 1


def test_replicas_and_micro_batches_divide_a_stream_too() -> None:
    made: list[Recorded] = []

    def data() -> IndexedStream:
        made.append(Recorded())
        return IndexedStream(made[-1], LENGTH, 7)

    cluster = InProcessCluster(
        counting(data, LENGTH), num_workers=1, devices_per_worker=2, accumulate=3
    )
    assert trained(cluster, 1).tolist() == [1] * LENGTH
    assert [recorded.begun for recorded in made] == [[0], [7]]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("strategy", [ParameterServerStrategy(), ASYNC])
def test_a_run_that_goes_on_elsewhere_in_mid_epoch_visits_the_rest(
    workers: int, strategy: Strategy
) -> None:
    def job(number: int) -> InProcessCluster:
        update = BATCH * number if strategy == ParameterServerStrategy() else BATCH
        creator = counting(lambda: IndexedStream(Recorded(), LENGTH, 10), update)
        return InProcessCluster(creator, num_workers=number, strategy=strategy)

    first, second = job(2), job(workers)
    before = trained(first, 2)
    plan = first.job.plan()
    assert plan is not None
    at = plan.position(2)
    assert (at.epoch, at.begin) == (0, 16)
    for worker in second.workers:
        replicas_of(worker).use_plan(second.job.plan(0, Remaining(at.epoch, at.begin)), 0)
    rest = trained(second, -(-8 // (BATCH * workers)))
    assert (rest > 0).sum() == 8
    assert torch.equal(before + (rest > 0), torch.ones(LENGTH))


def test_a_stream_is_begun_once_per_epoch_and_read_through() -> None:
    recorded = Recorded()
    stream = IndexedStream(recorded, LENGTH, block=8)
    plan = SamplePlan(LENGTH, 8, 0, blocks=8)
    found = [
        served(stream, plan, epoch, 3, 2, replica) for epoch in range(2) for replica in range(2)
    ]
    assert sorted(found[0] + found[1]) == sorted(found[2] + found[3]) == list(range(LENGTH))

    recorded = Recorded()  # what one worker of two reads
    served(IndexedStream(recorded, LENGTH, block=8), plan, 0, 3, 2, 1)
    assert recorded.begun == [0]
    assert recorded.read == list(range(LENGTH))

    recorded = Recorded()
    mine = served(IndexedStream(recorded, LENGTH, block=1), replace(plan, blocks=1), 0, 3, 2, 1)
    assert recorded.begun == [4, 12, 20], "small blocks: nothing is read for others, but it seeks"
    assert recorded.read == mine == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


def test_shares_may_come_in_any_order_and_two_blocks_are_kept() -> None:
    recorded = Recorded()
    stream = IndexedStream(recorded, LENGTH, block=6)
    shares = [[20], [19], [0, 2], [18, 23], [4], [11, 6], [12], [1]]
    opened = stream.open(np.array(share) for share in shares)
    assert [numbers.tolist() for numbers, _ in opened] == shares
    assert recorded.begun == [18, 0, 0]
    assert len(recorded.read) == 6 + 6 + 6 + 6 + 6


def test_batches_are_collated_of_a_workers_own_samples_alone() -> None:
    collated: list[int] = []

    def collate(found: list[tuple[int, int]]) -> list[int]:
        collated.extend(number for number, _ in found)
        return [number * 10 for number, _ in found]

    stream = IndexedStream(Recorded(), LENGTH, 12, collate_fn=collate)
    source, batch_size = as_source(stream, 3)
    assert source is stream
    assert (batch_size, source.size) == (3, LENGTH)
    assert list(source.open([np.array([3, 1])])) == [[30, 10]]
    assert collated == [3, 1]


class Own:
    """The least that a source of the user's own has."""

    size: int | None = 6

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Any]:
        return (share.tolist() for share in shares)


def test_a_source_of_the_users_own_is_taken_as_it_is() -> None:
    own = Own()
    assert as_source(own, 2) == (own, 2)
    assert "batch_size=None" in refused(lambda: as_source(own, None))


def numbers_from(start: int) -> Iterator[int]:
    """A stream at module level, so that it can be sent."""
    return iter(range(start, 6))


def test_a_stream_in_use_can_be_sent() -> None:
    stream = IndexedStream(numbers_from, 6, 2)
    assert next(stream.open([np.array([1])])).tolist() == [1]
    again = pickle.loads(pickle.dumps(stream))
    assert [batch.tolist() for batch in again.open([np.array([2]), np.array([1])])] == [[2], [1]]


def test_a_stream_that_raises_is_begun_again() -> None:
    fails = [True]

    def make(start: int) -> Iterator[int]:
        for number in range(start, 6):
            if number == 3 and fails.pop():
                raise OSError("the disk is busy")
            yield number

    fails = [False, True]
    stream = IndexedStream(make, 6, 2)
    assert next(stream.open([np.array([0])])).tolist() == [0]
    with pytest.raises(OSError, match="busy"):
        next(stream.open([np.array([3])]))
    assert next(stream.open([np.array([3])])).tolist() == [3]


def test_a_stream_that_is_too_short_says_so() -> None:
    stream = IndexedStream(Recorded(24), 25, 10)
    assert next(stream.open([np.array([19])]))[0].tolist() == [19]
    assert "ended before sample 24, its length is 25" in refused(
        lambda: next(stream.open([np.array([20])]))
    )


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_streams_without_a_length_or_block_are_refused(value: Any) -> None:
    assert f"length={value!r}: give an integer of at least 1" in refused(
        lambda: IndexedStream(Recorded(), value)
    )
    assert f"block={value!r}: give an integer of at least 1" in refused(
        lambda: IndexedStream(Recorded(), 6, value)
    )
    assert "make is a list: give a function" in refused(lambda: IndexedStream([1, 2], 2))  # type: ignore[arg-type]


def test_a_stream_needs_a_batch_size() -> None:
    assert "batch_size=None" in refused(lambda: as_source(IndexedStream(Recorded(), LENGTH), None))


def test_workers_must_agree_on_blocks() -> None:
    blocks = iter([5, 6])
    creator = counting(lambda: IndexedStream(Recorded(), LENGTH, next(blocks)), BATCH)
    assert "blocks of samples 5, the other has 6" in refused(
        lambda: InProcessCluster(creator, num_workers=2)
    )


# -- Ray Datasets -----------------------------------------------------------------------------------


class Tables:
    """Ray Datasets of known blocks, made without tasks."""

    def __init__(self) -> None:
        self.data = pytest.importorskip("ray.data")
        self.arrow = pytest.importorskip("pyarrow")

    def make(self, sizes: tuple[int, ...], **columns: Callable[[int], Any]) -> Any:
        columns = {"number": lambda i: i, "zero": lambda i: 0.0} | columns
        ends = np.cumsum(sizes).tolist()
        return self.data.from_arrow(
            [
                self.arrow.table(
                    {
                        name: [make(i) for i in range(end - size, end)]
                        for name, make in columns.items()
                    }
                )
                for size, end in zip(sizes, ends, strict=True)
            ]
        )


@pytest.fixture
def tables(ray_cluster: None) -> Tables:
    return Tables()


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.filterwarnings(RAYS_OWN)
def test_batches_of_a_ray_dataset(tables: Tables) -> None:
    dataset = tables.make(
        (5, 3, 4),
        word=lambda i: f"w{i}",
        pair=lambda i: [i, i + 0.5],
        ragged=lambda i: [float(i)] * (i % 3),
        flag=lambda i: i % 2 == 0,
    )
    source, _ = as_source(dataset, 3)
    assert isinstance(source, RayDataset)
    assert (source.size, source.blocks) == (12, (5, 3, 4))
    shares = [[4, 2, 0, 5, 6], [11], [1, 9, 2, 7, 8]]
    for batch, share in zip(source.open(np.array(share) for share in shares), shares, strict=True):
        assert batch["number"].tolist() == share
        assert batch["number"].dtype == torch.int64
        assert batch["word"] == [f"w{i}" for i in share]
        assert batch["pair"].tolist() == [[i, i + 0.5] for i in share]
        assert [list(row) for row in batch["ragged"]] == [[float(i)] * (i % 3) for i in share]
        assert batch["flag"].tolist() == [i % 2 == 0 for i in share]
        batch["number"].zero_()  # a copy: the block stays as it is
    chosen = RayDataset(dataset, ("zero", "number"))
    zeros, numbers = next(chosen.open([np.array([4, 6])]))
    assert (zeros.tolist(), numbers.tolist()) == ([0, 0], [4, 6])
    assert [len(used._kept) for used in (chosen, source)] == [2, 2]
    assert source.__getstate__()["_kept"] == {}, (
        "blocks are not sent, but fetched where they are needed"
    )


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.filterwarnings(RAYS_OWN)
def test_ray_datasets_that_cannot_be_divided_are_refused(tables: Tables) -> None:
    lazy = tables.data.range(10)
    assert "call ds.materialize() once" in refused(lambda: as_source(lazy, 2))
    assert "call ds.materialize() once" in refused(lambda: RayDataset([1, 2]))
    dataset = tables.make((3, 2))
    assert "no column 'lable': there are number, zero" in refused(
        lambda: RayDataset(dataset, ("number", "lable"))
    )
    assert "columns='number': give one or more names" in refused(
        lambda: RayDataset(dataset, "number")
    )
    assert "columns=(): give one or more names" in refused(lambda: RayDataset(dataset, ()))
    assert "the Ray Dataset is empty" in refused(lambda: RayDataset(tables.make((0,))))
    assert "batch_size=None" in refused(lambda: as_source(dataset, None))


def ray_rows(tables: Tables) -> Callable[[], Any]:
    """Rows computed by Ray's tasks, in blocks of whatever size they have."""
    rows = tables.data.range(LENGTH, override_num_blocks=5)
    computed = rows.map_batches(
        lambda batch: {"number": batch["id"], "zero": 0.0 * batch["id"]}
    ).materialize()
    return lambda: RayDataset(computed, ("number", "zero"))


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.filterwarnings(RAYS_OWN)
@pytest.mark.parametrize("kind", [pytest.param("rows", marks=pytest.mark.full), "stream"])
def test_real_workers_visit_each_sample_once_and_go_on_in_mid_epoch(
    tables: Tables, kind: str, tmp_path: Path
) -> None:
    data = ray_rows(tables) if kind == "rows" else lambda: IndexedStream(Recorded(), LENGTH, 7)
    with DistributedSGD(counting(data, 2 * BATCH), num_workers=2) as trainer:
        trainer.fit(epochs=1, progress=False)
        assert trainer.weights()["visits"].round().tolist() == [1] * LENGTH
        trainer.fit(steps=2, progress=False)
        visits = trainer.weights()["visits"].round()
        assert sorted(visits.tolist()) == [1] * 8 + [2] * 16
        trainer.save(tmp_path)
        assert trainer.evaluate(data()).samples == LENGTH
    with DistributedSGD(counting(data, BATCH), num_workers=1) as trainer:
        trainer.restore(tmp_path)
        assert trainer.fit(steps=2, progress=False).epoch == 1
        assert trainer.weights()["visits"].round().tolist() == [2] * LENGTH
        trainer.fit(epochs=1, progress=False)
        assert trainer.weights()["visits"].round().tolist() == [3] * LENGTH
    with DistributedSGD(counting(data, BATCH), num_workers=2, strategy="async") as trainer:
        trainer.fit(epochs=2, progress=False)
        assert trainer.weights()["visits"].round().tolist() == [2] * LENGTH


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.filterwarnings(RAYS_OWN)
def test_a_batch_of_a_ray_dataset_itself_is_a_dict(tables: Tables) -> None:
    x, y = samples(20)
    dataset = tables.make((8, 8, 4), x=lambda i: x[i].tolist(), y=lambda i: y[i].tolist())

    class Fit(TorchModel):
        def loss(self, batch: Any) -> torch.Tensor:
            return nn.functional.mse_loss(self.module(batch["x"]), batch["y"])

    def create(data: Any) -> ModelCreator:
        optimizer = sgd(lr=0.1)
        return lambda worker, device: Fit(
            nn.Linear(3, 2).double(), data=data, batch_size=10, optimizer=optimizer
        )

    with DistributedSGD(create(dataset), num_workers=2) as trainer:
        trainer.fit(steps=3, progress=False)
        found = trainer.weights()
        loss = trainer.evaluate(dataset).loss
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    optimizer = sgd(lr=0.1)(module)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    assert (
        difference(found, {name: value.detach() for name, value in module.named_parameters()})
        < 1e-12
    )
    assert loss == pytest.approx(nn.functional.mse_loss(module(x), y).item(), rel=1e-12)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.filterwarnings(RAYS_OWN)
def test_a_dataset_that_each_worker_would_compute_is_refused_by_the_trainer(tables: Tables) -> None:
    lazy = tables.data.range(LENGTH)
    with pytest.raises(ConfigurationError, match="call ds.materialize"):
        DistributedSGD(counting(lambda: lazy, BATCH), num_workers=1)
