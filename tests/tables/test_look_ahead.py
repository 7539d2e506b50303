"""Rows that are asked for before their batch is computed: the same numbers, or bounded staleness."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import steepest
from steepest.core.messages.driver import Failure
from steepest.errors import CheckpointError, ConfigurationError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.tables.job.delayed_rows import divided
from steepest.tables.job.exchange import ExchangeWithRows
from steepest.tables.job.job_tables import dealing_of
from steepest.tables.job.row_exchange import RowExchange
from steepest.tables.job.row_messages import RowKind
from steepest.tables.job.table_counts import table_counts
from steepest.tables.modules.embedding import EmbeddingBag
from steepest.tables.modules.id_places import IdPlaces
from steepest.tables.rows.gradients import RowGradients
from steepest.tables.rows.row_optimizers import SGD
from steepest.tables.rows.table import Table
from steepest.testing import Fault, InProcessCluster, replay
from tests.fuzzing import Recorder
from tests.inside import exchange_of
from tests.reference import same_bits
from tests.said import heard
from tests.table_tasks import installable
from tests.tables.rows_ahead import IDS, TARGETS, Net, creator, falling, row_of


def job(table_staleness: int | None, workers: int = 2, net: Any = Net, **options: Any) -> Any:
    strategy = ParameterServerStrategy(num_servers=2, table_staleness=table_staleness)
    options.setdefault("strategy", strategy)
    return InProcessCluster(creator(net), num_workers=workers, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"devices_per_worker": 2}])
def test_without_staleness_rows_that_come_beforehand_change_no_bit(
    workers: int, options: dict[str, Any]
) -> None:
    plain = job(None, workers, **options)
    ahead = job(0, workers, **options)
    recorder = Recorder(ahead.network)
    assert [r.loss for r in plain.step(8)] == [r.loss for r in ahead.step(8)]
    assert same_bits(plain.weights(), ahead.weights())
    pulls = [message for message in recorder.seen if message.kind is RowKind.PULL_ROWS]
    asked = Counter((m.source, m.target, heard(m).sequence) for m in pulls)
    batches = workers * options.get("accumulate", 1) * options.get("devices_per_worker", 1)
    # each batch of eight steps once, and those of the step that was not taken any more
    assert len(asked) <= 2 * 9 * batches
    assert any(heard(m).version == 9 - 1 for m in pulls)


def test_without_staleness_allreduce_changes_no_bit() -> None:
    plain = job(None, strategy=AllreduceStrategy())
    ahead = job(0, strategy=AllreduceStrategy(table_staleness=0))
    plain.step(5)
    ahead.step(5)
    assert same_bits(plain.weights(), ahead.weights())


@pytest.mark.few(2)
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_rows_are_as_old_as_was_allowed_and_no_older(staleness: int) -> None:
    cluster, modules = falling(staleness)
    cluster.step(7)
    for module in modules:
        versions = [-value for value in module.seen]
        assert all(step - staleness <= version <= step for step, version in enumerate(versions))
        assert versions[5] == 5 - staleness
    assert row_of(cluster) == -7  # the last of the steps pushed its own gradient as well
    cluster.step(3)
    assert row_of(cluster) == -10


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("staleness", [2, 3])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_step_that_failed_loses_no_delayed_gradient(staleness: int, worker: int) -> None:
    """Neither that of the worker that failed nor that of the other one, which pushes it again."""
    cluster, _ = falling(staleness, faults=[Fault.raises("worker", worker, step=3)])
    outcomes = cluster.step(6)
    assert isinstance(outcomes[-1], Failure)
    cluster.step(6 - (len(outcomes) - 1))
    assert row_of(cluster) == -6


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("moment", ["forward", "push", "report"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_dies_takes_only_its_own_delayed_gradient_along(
    moment: str, worker: int
) -> None:
    faults = [Fault.kill("worker", worker, step=3, at=moment)]
    cluster, _ = falling(2, faults=faults, replaces=True)
    cluster.step(6)
    assert not cluster.unmet
    assert row_of(cluster) == -6  # the mean over those that have one


def test_what_is_not_pushed_is_known_at_the_versions_that_servers_may_have() -> None:
    """The present step's, the next one, and that before, which other workers' servers may be at."""
    job = falling(2)[0].job
    dealing = dealing_of(job)
    assert dealing is not None
    rows = RowExchange(0, dealing, job.topology, lambda *_: None)
    rows.delayed.delays, rows.delayed.is_last = True, False
    key = np.zeros(1, np.int32), np.zeros(1, np.int64)

    def ready(*chunk: Any) -> None:
        """Push nothing."""

    def take(version: int) -> None:
        rows.begin(0, version)
        rows.begin_share(ready)
        rows.push(0, *key, np.full((1, 1), float(version), "f4"), np.ones(1, np.int32))
        rows.end_batch(1.0)
        rows.end_share(ready)

    def unpushed(version: int) -> float:
        packed = rows.unpushed(version)["0"].numpy()
        return float(RowGradients.unpack(packed, 1, "float32").gradients[0, 0])

    for version in (3, 4, 5):
        take(version)
    assert [unpushed(version) for version in (4, 5, 6)] == [3.0, 4.0, 5.0]
    rows.push_later(rows.unpushed(4))
    assert unpushed(4) == unpushed(5) == 3.0
    take(4)
    assert [unpushed(4), unpushed(5)] == [3.0, 4.0]


def test_gradients_of_rows_that_are_handed_on_are_checked() -> None:
    """As those of a damaged checkpoint are."""
    cluster, _ = falling(2)
    tables = dealing_of(cluster.job)
    assert tables is not None
    rows = RowGradients(
        np.zeros(2, np.int32), np.arange(2), np.full((2, 1), 3.0, "f4"), np.ones(2, np.int32)
    )
    weights = torch.tensor([2.0, 4.0], dtype=torch.float64)
    good = {"weights": weights, "0": torch.from_numpy(rows.pack())}
    first, second = divided(tables, [good, good, {}], 2)
    assert first["weights"].tolist() == second["weights"].tolist() == [2.0, 4.0]
    (only,) = divided(tables, [good, good], 1)
    found = RowGradients.unpack(only["0"].numpy(), 1, "float32")
    assert (only["weights"].tolist(), found.gradients.tolist()) == ([2.0, 8.0], [[6.0], [6.0]])
    for name, value in (
        ("weights", weights[:1]),
        ("weights", -weights),
        ("weights", weights * torch.inf),
        ("1", good["0"]),
        ("t", good["0"]),
        ("0", good["0"][1:]),
        ("0", torch.from_numpy(replace(rows, ids=np.zeros(2, np.int64)).pack())),
    ):
        with pytest.raises(CheckpointError, match="gradients of rows .* make no sense"):
            divided(tables, [good | {name: value}], 2)


def test_single_steps_push_their_own_gradients() -> None:
    """A user who asks for one step at a time finds all of it in the rows after each."""
    cluster, _ = falling(2)
    for step in range(1, 5):
        cluster.step()
        assert row_of(cluster) == -step


def test_a_pass_that_asks_for_other_rows_pulls_them_then() -> None:
    """Which rows are needed depends on chance, or on rows themselves."""

    class Changing(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            first = self.bag(ids)
            other = self.bag((ids + (first[:, :1] > 0).long()) % 31)
            return self.out(self.drop(first + other))

    plain, ahead = job(None, net=Changing), job(0, net=Changing)
    plain.step(6)
    ahead.step(6)
    assert same_bits(plain.weights(), ahead.weights())


class Shifted(Net):
    """Looks up ids that no batch has."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids * 3 + 1)


def asked_in(net: Any, table_staleness: int | None, **options: Any) -> tuple[Any, list[Any]]:
    """A job of four steps, and the versions that were asked for by version of the weights that were there."""
    strategy = ParameterServerStrategy(num_servers=2, table_staleness=table_staleness)
    cluster = InProcessCluster(creator(net, **options), num_workers=2, strategy=strategy)
    recorder = Recorder(cluster.network)
    cluster.step(4)
    pulls = [message for message in recorder.seen if message.kind is RowKind.PULL_ROWS]
    return cluster, pulls


def test_ids_that_no_batch_has_are_told_of_where_rows_may_be_stale(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = job(1, net=Shifted)
    with caplog.at_level(logging.WARNING):
        plain.step(4)
        assert not caplog.text
        plain.step(8)
    assert caplog.text.count("a batch does not have the ids that the model looks up") == 2
    without = job(0, net=Shifted)
    without.step(12)
    assert same_bits(plain.weights(), without.weights())


def test_a_function_says_which_ids_a_batch_will_need() -> None:
    def ids_of(batch: Any) -> Any:
        return {"any name": (batch[0] * 3 + 1, None)}

    def wrong(batch: Any) -> Any:
        return batch[0] * 5

    found = [asked_in(Shifted, None, table_ids=function) for function in (None, ids_of, wrong)]
    (plain, late), (told, early), (misled, also_late) = found
    assert same_bits(plain.weights(), told.weights())
    assert same_bits(plain.weights(), misled.weights())
    assert [heard(m).version for m in late] == [heard(m).version for m in also_late]
    assert max(heard(m).version for m in early) == 4 > max(heard(m).version for m in late)


def test_all_look_ups_of_a_batch_are_one_message_to_each_server() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            how: Any = {"optimizer": SGD(lr=0.1)}
            self.bags = nn.ModuleList(
                EmbeddingBag(Table(name, dim, **how), mode="sum")
                for name, dim in (("a", 3), ("b", 3), ("c", 5))
            )
            self.out = nn.Linear(11, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            columns = ids[:, :1], ids[:, 1:], ids
            found = [bag(part) for bag, part in zip(self.bags, columns, strict=True)]
            return self.out(torch.cat(found, 1))

    _, pulls = asked_in(Twice, None)
    by_version = Counter(heard(message).version for message in pulls)
    # two workers with two servers: look-up by look-up in the first step, together afterwards
    assert 2 * 2 < by_version[0] <= 2 * 2 * 3
    assert [by_version[version] for version in (1, 2, 3)] == [2 * 2] * 3


def test_a_place_that_was_right_by_chance_is_found_anew() -> None:
    """Some batches have the same ids in two places."""
    first = IDS.clone()
    first[::9] += 1

    class Second(Net):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return super().forward(second)

    def create(table_staleness: int | None) -> InProcessCluster:
        def make(worker: int, device: int) -> steepest.TorchModel:
            return steepest.TorchModel(
                Second(),
                loss=nn.functional.mse_loss,
                data=(first, IDS, TARGETS),
                batch_size=4,
                optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
            )

        strategy = ParameterServerStrategy(num_servers=2, table_staleness=table_staleness)
        return InProcessCluster(make, num_workers=2, strategy=strategy, seed=3)

    ahead, late = create(0), create(0)
    for worker in late.workers:
        exchange = exchange_of(worker)
        assert isinstance(exchange, ExchangeWithRows)
        exchange.rows.places.is_sought = lambda at: False  # type: ignore[method-assign]
    for cluster in (ahead, late):
        cluster.step(10)
    assert same_bits(ahead.weights(), late.weights())


def test_ids_are_found_in_parts_of_a_batch() -> None:
    ids = torch.arange(24).reshape(4, 6) * 7 % 31
    jagged = torch.nested.nested_tensor([ids[0, :2], ids[1, :3]], layout=torch.jagged)
    batch = {
        "x": torch.rand(4), "ids": [ids, ids[:, :2].numpy()], "j": (jagged,),
        "lists": [[5, 6], [], [9]],
    }  # fmt: skip
    wanted = {
        "whole": (ids, ids.flatten()), "column": (ids, ids[:, 4]), "array": (ids, ids[:, :2].flatten()),
        "jagged": (ids, jagged.values()), "lists": (ids, torch.tensor([5, 6, 9])),
        "two": (ids, torch.cat([ids[:, 3], torch.tensor([5, 6, 9])])),
    }  # fmt: skip
    other = {**batch, "ids": [ids + 1, ids[:, :2].numpy()], "lists": [[8]]}
    for name, (_, flat) in wanted.items():
        places = IdPlaces()
        tables = np.zeros(len(flat), np.int32)
        places.find(0, 2, tables, flat.numpy(), batch)
        (place,) = places.known
        assert place is not None, name
        found = place.ids(batch)
        assert found is not None
        assert np.array_equal(found[1], flat.numpy()), name
        later = place.ids(other)
        assert later is not None
        if name == "two":
            assert later[1].tolist() == [*(ids[:, 3] + 1).tolist(), 8]
    places = IdPlaces()
    for _ in range(20):
        if places.is_sought(0):
            places.find(0, 0, np.zeros(4, np.int32), np.array([1, 1, 2, 99]), batch)
    assert places.is_given_up()
    assert not places.any()
    places = IdPlaces()
    places.find(0, 0, np.zeros(4, np.int32), ids[:, 4].numpy(), batch)
    (place,) = places.known
    assert place is not None
    for lacks in ({}, {"ids": 3}, {"ids": [ids[:, :2]]}, {"ids": [ids - 50]}):
        assert place.ids(lacks) is None


@pytest.mark.few(1)
@pytest.mark.parametrize("staleness", [None, 0, 1, 2])
def test_a_stream_that_ends_says_so_and_does_not_begin_anew(staleness: int | None) -> None:
    class Short:
        """Batches for three steps of one worker."""

        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            yield from zip(IDS[:12].split(4), TARGETS[:12].split(4), strict=True)
            raise ValueError("the disk is gone")

    def create(worker: int, device: int) -> steepest.TorchModel:
        return steepest.TorchModel(
            Net(),
            loss=nn.functional.mse_loss,
            data=Short(),
            batch_size=4,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )

    strategy = ParameterServerStrategy(num_servers=1, table_staleness=staleness)
    outcomes = InProcessCluster(create, strategy=strategy).step(6)
    assert len(outcomes) == 4
    assert isinstance(outcomes[-1], Failure)
    assert "the disk is gone" in str(outcomes[-1])


@pytest.mark.long
def test_a_generation_forgets_what_was_asked_for() -> None:
    plain, ahead = job(None), job(0)
    for cluster in (plain, ahead):
        cluster.step(3)
        snapshot = cluster.snapshot("state")
        cluster.step(2)
        records = [*installable(cluster, snapshot.records)]
        install = cluster.client.install(3, snapshot.weights, records, None)
        cluster.wait(install, "an install")
        cluster.step(3)
    assert same_bits(plain.weights(), ahead.weights())
    exchange = exchange_of(ahead.workers[0])
    assert isinstance(exchange, ExchangeWithRows)
    assert len(exchange.rows._awaited) <= 2


def test_a_job_without_staleness_is_replayed() -> None:
    cluster = job(0, keep_log=True)
    cluster.step(4)
    assert same_bits(replay(cluster.log(), creator()), cluster.weights())


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_a_staleness_is_a_count(wrong: Any) -> None:
    for strategy in (ParameterServerStrategy, AllreduceStrategy):
        with pytest.raises(ConfigurationError, match="table_staleness"):
            strategy(table_staleness=wrong)


def test_only_synchronous_steps_of_all_workers_have_such_a_bound() -> None:
    with pytest.raises(ConfigurationError, match="table_staleness=1 with backup_workers=1"):
        ParameterServerStrategy(backup_workers=1, table_staleness=1)
    with pytest.raises(ConfigurationError, match="it is for sync"):
        ParameterServerStrategy(mode="async", table_staleness=1)


def test_rows_are_counted_once_however_many_copies_there_are() -> None:
    cluster = job(None, strategy=ParameterServerStrategy(num_servers=3, replication=2))
    cluster.step(15)  # an epoch
    counts = table_counts(cluster.servers)["t"]
    assert counts["rows"] == counts["admitted"] == 31


def test_rows_of_a_table_that_is_not_trained_stay_and_their_gradients_do_not_travel() -> None:
    class Half(nn.Module):
        def __init__(self, trainable: bool) -> None:
            super().__init__()
            kept = Table("kept", 3, optimizer=SGD(lr=0.1), trainable=trainable)
            self.bag = EmbeddingBag(Table("t", 3, optimizer=SGD(lr=0.1)), mode="sum")
            self.kept, self.out = EmbeddingBag(kept, mode="sum"), nn.Linear(3, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.bag(ids) + self.kept(ids))

    frozen, trained = (job(None, net=partial(Half, trainable)) for trainable in (False, True))
    sent = [cluster.step(4)[-1].bytes_pushed for cluster in (frozen, trained)]
    counts = [table_counts(cluster.servers)["kept"] for cluster in (frozen, trained)]
    assert (counts[0]["rows"], counts[0]["ignored"]) == (0, 0)
    assert counts[1]["rows"] > 0
    assert sent[0] < 0.7 * sent[1]
