"""Rows that count how often their ids were in what was committed: each push counts once, whatever happens."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from steepest import ParameterServerStrategy, TorchModel
from steepest.core.messages.driver import Result
from steepest.core.messages.message import Kind, Message
from steepest.errors import ConfigurationError
from steepest.tables.job.row_messages import RowKind
from steepest.tables.rows.gradients import RowGradients, added, weighted
from steepest.tables.rows.push_form import Chance, GroupForm, PushForm
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.table import Table
from steepest.testing import Fault, InProcessCluster
from tests.deaths import doomed
from tests.modes import EACH, check_counts, make, settle, trained
from tests.random_examples import seeds
from tests.reference import sgd
from tests.table_tasks import (
    DIM,
    ROWS,
    Sightings,
    counting,
    expected_counts,
    mostly_long,
    rows_of,
    table_task,
    table_values,
)

STEPS = 6
TASK = counting(23)


def counted(cluster: InProcessCluster, *, exactly: bool = True) -> None:
    """Rows and dense weights hold what was committed, each push once."""
    log = cluster.log()
    check_counts(cluster, log)
    rows = rows_of(cluster)
    values = table_values(TASK, rows)["rows.weight"]
    expected, updates = expected_counts(TASK, log)
    if exactly:
        assert torch.equal(values, expected[:, None].expand(ROWS, DIM))
        seen = np.zeros(ROWS)
        for shard in range(TASK.table_shards):
            ids = rows[f"tables/{shard}/ids"].numpy()
            seen[ids] = rows[f"tables/{shard}/sightings"].numpy()
            assert rows[f"tables/{shard}/updates"].tolist() == [len(log.commits)]
        assert seen.tolist() == expected.tolist()
        assert set(cluster.weights()["updates"].tolist()) == {updates}
    else:
        assert torch.allclose(values, expected[:, None].expand(ROWS, DIM), rtol=1e-12, atol=0)


def takes_all(cluster: InProcessCluster, steps: int = STEPS) -> None:
    """The job takes so many steps, whatever fails meanwhile."""
    taken = 0
    while taken < steps:
        taken += sum(isinstance(found, Result) for found in cluster.step(steps - taken))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", mostly_long(EACH, "async-drop", "async-rate", "ssp-0"))
@seeds(1)
def test_each_push_counts_once(name: str, seed: int) -> None:
    cluster = make(name, TASK, servers=1 + seed % 3, shuffle=seed)
    trained(cluster, STEPS)
    counted(cluster, exactly=name != "async-rate")


@pytest.mark.parametrize("workers", [3, 4])
def test_sums_of_gradients_that_come_first_are_those_of_what_is_committed(workers: int) -> None:
    """Of rows as of dense weights: each counts its sightings."""

    def create(worker: int, device: int) -> TorchModel:
        return TorchModel(
            Sightings(), loss=lambda output, target: output, reduction="sum", data=TASK.data,
            batch_size=2, optimizer=sgd(lr=1.0), table_shards=TASK.table_shards,
        )  # fmt: skip

    strategy = ParameterServerStrategy(num_servers=2, backup_workers=1)
    cluster = InProcessCluster(
        create, num_workers=workers, strategy=strategy, shuffle=workers, keep_log=True
    )
    cluster.step(STEPS)
    log, expected = cluster.log(), torch.zeros(ROWS, dtype=torch.float64)
    assert log.plan is not None
    for place in log.samples():
        ids = TASK.data[0][torch.from_numpy(log.plan.samples_at(*place))]
        expected += torch.bincount(ids.flatten(), minlength=ROWS).double()
    values = table_values(TASK, rows_of(cluster))["rows.weight"]
    assert torch.allclose(values, expected[:, None].expand(ROWS, DIM), rtol=1e-12, atol=0)


def repeated(cluster: InProcessCluster) -> None:
    """Everything that is said of pushes and rows is said twice."""
    before = cluster.network.filter

    def twice(message: Message) -> list[Message]:
        kinds = (
            Kind.PUSH,
            Kind.REPORT,
            RowKind.PULL_ROWS,
            RowKind.ROWS,
            Kind.COMMIT,
            Kind.PUSH_STAGED,
        )
        found = list(before(message))
        return found * 2 if message.kind in kinds else found

    cluster.network.filter = twice


@pytest.mark.few(1)
@pytest.mark.parametrize("name", mostly_long(["async", "async-drop", "ssp-2"], "async"))
@seeds(1)
def test_repetitions_count_once(name: str, seed: int) -> None:
    cluster = make(name, TASK, shuffle=seed)
    repeated(cluster)
    trained(cluster, STEPS)
    counted(cluster)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", mostly_long(EACH, "async", "ssp-2"))
@seeds(1)
def test_pushes_of_the_dead_count_once_or_not_at_all(name: str, seed: int) -> None:
    rng = random.Random(seed)
    kinds = [RowKind.PULL_ROWS, Kind.PUSH, Kind.REPORT]
    deaths = [(rng.randrange(3), rng.choice(kinds), rng.randint(1, 9)) for _ in range(3)]
    cluster = doomed(name, deaths, shuffle=seed, creator=TASK.creator())
    trained(cluster, STEPS)
    trained(cluster, STEPS)
    counted(cluster, exactly=name != "async-rate")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", mostly_long(["async", "async-drop", "ssp-0", "ssp-2"], "ssp-0"))
def test_pushes_of_steps_that_raised_count_once_or_not_at_all(name: str) -> None:
    for fault in (Fault.raises("worker", 1, step=2), Fault.kill("worker", 1, step=2, at="push")):
        cluster = make(name, TASK, faults=[fault], replaces=True)
        takes_all(cluster)
        counted(cluster)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sync", "async"])
def test_memory_of_pushes_of_many_sizes_is_given_back(name: str) -> None:
    """Each batch has other rows: memory that was kept for each size that ever came would grow for ever."""
    cluster = make(name, TASK, lend=False)
    trained(cluster, 3 * STEPS)
    settle(cluster)
    for server in cluster.servers:
        for held in server.gradient_stores.values():
            if held.chunk.is_opaque:
                assert len(held._buffers) <= len(cluster.workers)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_weighted_sum_is_that_of_scaled_parts_to_the_bit(count: int, dtype: str) -> None:
    random = np.random.default_rng(count)
    parts = []
    for at in range(count):
        ids = random.permutation(30)[:20].astype(np.int64)
        seen = random.integers(1, 2**31 - 1, 20).astype(np.int32)
        lives = None if at else random.integers(0, 9, 20).astype(np.int32)
        gradients = random.normal(size=(20, 3)).astype(dtype)
        parts.append(RowGradients((ids % 2).astype(np.int32), ids, gradients, seen, lives))
    factors = [0.3, 1.0, 0.7][:count]
    expected = added([part.times(f) for part, f in zip(parts, factors, strict=True)])
    assert (
        weighted(parts, factors).pack(lives=True).tobytes() == expected.pack(lives=True).tobytes()
    )
    for lives in (False, True):
        some = expected.taken(slice(3, 11)).pack(lives=lives)
        assert (
            RowGradients.unpack(some, 3, dtype, lives=lives).pack(lives=lives).tobytes()
            == some.tobytes()
        )


@pytest.mark.parametrize("tables", [[[1], [0], [2, 3]], [[0, 2], [1]], [[0], [1], [0]], [[0], []]])
def test_a_sum_is_that_of_a_dict_whether_parts_share_tables_or_not(tables: list[list[int]]) -> None:
    random = np.random.default_rng(0)
    parts, expected = [], dict[tuple[int, int], list[float]]()
    for number, own in enumerate(tables):
        drawn = random.permutation(24)[:15] if own else np.empty(0, np.int64)
        keys = [(own[key % len(own)], int(key)) for key in drawn]
        gradients = random.integers(-9, 9, (len(keys), 1)).astype(np.float32)
        seen = random.integers(1, 9, len(keys)).astype(np.int32)
        lives = None if number else random.integers(0, 9, len(keys)).astype(np.int32)
        of = np.array([table for table, _ in keys], np.int32)
        ids = np.array([id for _, id in keys], np.int64)
        parts.append(RowGradients(of, ids, gradients, seen, lives))
        for at, key in enumerate(keys):
            total = expected.setdefault(key, [0, 0, 0])
            total[0] += float(gradients[at, 0])
            total[1] += int(seen[at])
            total[2] = max(total[2], 0 if lives is None else int(lives[at]))
    found = added(parts)
    assert found.lives is not None
    columns = found.gradients[:, 0], found.sightings, found.lives
    keys = zip(found.tables.tolist(), found.ids.tolist(), strict=True)
    values = zip(*(column.tolist() for column in columns), strict=True)
    assert [(key, list(value)) for key, value in zip(keys, values, strict=True)] == [
        *expected.items()
    ]


def test_the_rows_of_a_server_are_one_push_whatever_groups_and_shards_it_has() -> None:
    task = table_task()
    cluster = make("sync", task, servers=3)
    pushed, before = list[Message](), cluster.network.filter

    def noted(message: Message) -> Any:
        pushed.extend([message] if message.kind is Kind.PUSH else [])
        return before(message)

    cluster.network.filter = noted
    trained(cluster, 2)
    topology = cluster.job.topology
    opaque = set(topology.layout.opaque_chunks)
    together = [set(chunks) for first, chunks in topology.pushed.items() if first in opaque]
    assert len(opaque) > len(together) == 3
    assert set.union(*together) == opaque
    of_rows = [m.body.chunk for m in pushed if m.body.chunk in opaque]
    assert len(of_rows) == 2 * len(cluster.workers) * len(together)


@pytest.mark.parametrize("wrong", ["size", "negative", "shard", "twice"])
def test_a_push_of_rows_that_makes_no_sense_is_refused(wrong: str) -> None:
    tables = Table("a", 3), Table("b", 1, dtype="float64", ttl="1d")
    form = PushForm([GroupForm([table], 0) for table in tables])
    one = RowGradients(*(np.arange(n, dtype=t) for n, t in ((5, np.int32), (5, np.int64))),
                       np.ones((5, 3), np.float32), np.ones(5, np.int32))  # fmt: skip
    packed = form.pack([one, None], lambda size: np.empty(size, np.uint8), Chance(0, 0))
    assert form.fits(len(packed))
    assert [len(part) for part in form.unpack(packed)] == [5, 0]
    assert form.unpack(packed)[0].pack().tobytes() == one.pack().tobytes()
    spread, holds = Spread.evenly(5, 2), np.ones(2, np.bool_)
    names = list("abcde")
    one.require(names, holds, spread)
    if wrong == "size":
        packed = np.append(packed, np.zeros(8, np.uint8))
    elif wrong == "negative":
        packed[:16].view(np.int64)[:] = [-5, 10]
    elif wrong == "shard":
        holds[0] = False
    else:
        one.tables[1], one.ids[1] = one.tables[0], one.ids[0]
    check = partial(form.unpack, packed)
    if wrong in ("shard", "twice"):
        check = partial(one.require, names, holds, spread)
    with pytest.raises(ConfigurationError):
        check()
