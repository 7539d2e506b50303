"""Tables exported for serving: plain modules, changes since an earlier export, files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    ExportedTable,
    ParameterServerStrategy,
    StepResult,
)
from steepest.core.engine.optimizer_slices import assemble
from steepest.core.optim.portable import Record
from steepest.core.tensors.layout import Chunk, ElementType, ParameterLayout
from steepest.data.storage.files import storage_of
from steepest.data.storage.places import place_of
from steepest.errors import CheckpointError, ConfigurationError
from steepest.runtime.state.row_read import ArrivedRows
from steepest.runtime.state.table_export import joined_rows
from steepest.tables.files import exported_table
from steepest.tables.job import table_chunk
from steepest.tables.rows.eviction import LRU
from tests.table_jobs import FIRST, IDS, trainer, words
from tests.table_tools import table


def expected(ids: Tensor = IDS, epochs: int = 1) -> tuple[Tensor, Tensor]:
    """Ids that have rows after some epochs, and their values."""
    distinct, counts = ids.unique(return_counts=True)
    return distinct, (FIRST - epochs * counts / 6.0)[:, None].double().expand(-1, 3)


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServerStrategy(num_servers=2),
        ParameterServerStrategy(num_servers=2, replication=2),
        ParameterServerStrategy(num_servers=1, mode="async"),
        AllreduceStrategy(),
    ],
    ids=str,
)
def test_a_table_is_exported_as_a_plain_module(strategy: Any) -> None:
    with trainer(words(), strategy) as sgd:
        assert len(sgd.export_table("words")) == 0
        sgd.fit(epochs=1, progress=False)
        found = sgd.export_table("words")
        others = sgd.export_table("others")
    ids, values = expected()
    factor = 2.0 if getattr(strategy, "mode", "") == "async" else 1.0  # each worker's by itself
    assert torch.equal(found.ids, ids)
    assert torch.allclose(found.values - FIRST, factor * (values - FIRST))
    assert torch.equal(others.ids, ids + 1)
    plain = found.embedding()
    assert type(plain) is nn.Embedding
    wanted = torch.tensor([[2, 5], [6, 1000]])
    assert found.index(wanted).tolist() == [[1, 3], [0, 8]]
    assert torch.equal(plain(found.index(wanted))[0, 1], found.values[2])
    assert (plain(found.index(torch.tensor(6))) == FIRST).all()


class Reading(Callback):
    """Calls a function after each step of a `fit`, amid training."""

    def __init__(self, read: Callable[[DistributedSGD], None]) -> None:
        self.read = read

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.read(trainer)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows travel four at a time."""
    monkeypatch.setattr(table_chunk, "_PIECE_BYTES", 4 * (28 + 24))


@pytest.mark.usefixtures("small_pieces")
def test_what_is_read_amid_asynchronous_training_is_of_one_instant() -> None:
    found: list[tuple[int, float]] = []

    def read(sgd: DistributedSGD) -> None:
        rows = sgd.export_table("words")
        found.append((rows.version, float((FIRST - rows.values[:, 0]).sum())))
        snapshot = sgd._state.snapshot("state")
        optimizer, _ = assemble(sgd._job.description.layout, snapshot.records)
        values = [value[:, 0] for key, value in optimizer.items() if key.endswith("values")]
        found.append((2 * snapshot.version, float((FIRST - torch.cat(values)).sum())))

    ids = torch.randint(60, (96,), generator=torch.Generator().manual_seed(0))
    strategy = ParameterServerStrategy(num_servers=2, mode="async")
    with trainer(words(ids), strategy) as sgd:
        sgd.fit(epochs=1, callbacks=[Reading(read)], progress=False)
    versions = sorted({version for version, _ in found})
    assert len(versions) > 4
    for version, total in found:
        assert total == pytest.approx(version)  # each push takes one from each table


@pytest.mark.few(1)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("capacity", [None, 20])
def test_changes_make_of_an_export_a_later_one(capacity: int | None) -> None:
    settings: Any = {} if capacity is None else {"capacity": capacity, "eviction": LRU()}
    ids = torch.arange(60).repeat_interleave(2)
    with trainer(words(ids, **settings)) as sgd:
        sgd.fit(steps=4, progress=False)
        served = sgd.export_table("words")
        for _ in range(4):
            sgd.fit(steps=2, progress=False)
            changes = sgd.export_table("words", since=served)
            assert 0 < len(changes) <= 12
            assert (len(changes.removed) > 0) == (capacity is not None)
            served = served.updated(changes)
            whole = sgd.export_table("words")
            assert torch.equal(served.ids, whole.ids)
            assert torch.equal(served.values, whole.values)
        assert len(sgd.export_table("words", since=served)) == 0
        with pytest.raises(ConfigurationError, match="changes of table 'words' alone"):
            changes.embedding()
        with pytest.raises(ConfigurationError, match="since another export"):
            served.updated(changes)
        with pytest.raises(ConfigurationError, match="no embedding table 'x': there are 'words', "):
            sgd.export_table("x")
        with pytest.raises(ConfigurationError, match="an export of table 'words', not of 'others'"):
            sgd.export_table("others", since=served)


def test_after_a_restore_changes_are_the_whole_table(tmp_path: Path) -> None:
    with trainer(words()) as sgd:
        sgd.step()
        sgd.save(tmp_path)
        sgd.step()
        earlier = sgd.export_table("words")
        sgd.restore(tmp_path)
        sgd.fit(steps=3, progress=False)  # to a later version than the export's
        found, whole = sgd.export_table("words", since=earlier), sgd.export_table("words")
    assert found.base is None
    assert torch.equal(earlier.updated(found).values, whole.values)


def test_an_export_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.safetensors"
    with trainer(words()) as sgd:
        sgd.step()
        sgd.export_table("words").save(path)
        sgd.step()
        earlier = ExportedTable.load(path)  # as another process does
        changes = sgd.export_table("words", since=earlier)
        whole = sgd.export_table("words")
    assert changes.base is not None
    changes.save(tmp_path / "changes")
    found = earlier.updated(ExportedTable.load(tmp_path / "changes"))
    assert torch.equal(found.ids, whole.ids)
    assert torch.equal(found.values, whole.values)
    assert load_file(path).keys() == {"ids", "values", "removed"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["changes", "words.safetensors"]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_an_export_is_a_file_at_a_url(tmp_path: Path, scheme: str) -> None:
    url = f"memory://{tmp_path.name}" if scheme == "memory" else f"file://{tmp_path}"
    with trainer(words(), ParameterServerStrategy(num_servers=2)) as sgd:
        sgd.fit(epochs=1, progress=False)
        sgd.export_table("words").save(f"{url}/words.safetensors")
        sgd.fit(epochs=1, progress=False)
        earlier = ExportedTable.load(f"{url}/words.safetensors")
        sgd.export_table("words", since=earlier).save(f"{url}/changes")
        sgd.export_table("words", since=earlier).save(f"{url}/changes")
        whole = sgd.export_table("words")
    found = earlier.updated(ExportedTable.load(f"{url}/changes"))
    assert torch.equal(found.ids, whole.ids)
    assert torch.equal(found.values, whole.values)
    storage = storage_of(place_of(url))
    assert {file.name for file in storage.files(place_of(url))} == {"words.safetensors", "changes"}
    damaged = storage.read(place_of(f"{url}/changes"))[:-1]
    storage.write(place_of(f"{url}/changes"), lambda: iter([memoryview(damaged)]))
    for name in ("changes", "missing"):
        with pytest.raises(CheckpointError, match=f"no whole exported table at {url}/{name}"):
            ExportedTable.load(f"{url}/{name}")


def test_urls_of_other_kinds_are_refused_and_not_repeated() -> None:
    table = ExportedTable("t", torch.tensor([1]), torch.ones(1, 3))
    for use in (table.save, ExportedTable.load):
        for url in ("ftp://a/b", "s3://key:secret@a/b"):
            with pytest.raises(ConfigurationError, match="://") as caught:
                use(url)
            assert "secret" not in str(caught.value)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    ExportedTable("t", torch.tensor([1, 2]), torch.ones(2, 3)).save(path)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + b"\1", b"", b"\2\0\0\0\0\0\0\0{}"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="no whole exported table at .*t: "):
            ExportedTable.load(path)
    with pytest.raises(CheckpointError, match="no whole exported table at"):
        ExportedTable.load(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="cannot write table 't' to"):
        ExportedTable("t", torch.tensor([1]), torch.ones(1, 3)).save(tmp_path / "no" / "t")


@pytest.mark.parametrize(
    "odd",
    [
        {"ids": torch.ones(2, 2, dtype=torch.int64)},
        {"ids": torch.tensor([1.0, 2.0])},
        {"ids": torch.tensor([5, 1])},
        {"ids": torch.tensor([1, 1])},
        {"removed": torch.tensor([3, 2])},
        {"values": torch.zeros(1, 3)},
        {"values": torch.zeros(2)},
        {"values": torch.zeros(2, 3, dtype=torch.int8)},
        {"name": 5},
        {"version": "x"},
        {"place": "x"},
        {"place": [[1, 2]]},
        {"base": 7},
        {"unknown": "x"},
        {"unknown": math.nan},
    ],
)
def test_a_file_of_what_is_no_table_is_refused(tmp_path: Path, odd: dict[str, Any]) -> None:
    """Its checksum is right: somebody else's program has written it."""
    good: dict[str, Any] = {"name": "t", "ids": torch.tensor([1, 2]), "values": torch.zeros(2, 3)}
    ExportedTable(**{**good, **odd}).save(tmp_path / "t")
    with pytest.raises(CheckpointError, match="no whole exported table at .*t: "):
        ExportedTable.load(tmp_path / "t")


def test_a_file_with_a_deep_description_and_a_fifo_are_refused(tmp_path: Path) -> None:
    tensors = {
        "ids": torch.tensor([1]),
        "values": torch.zeros(1, 3),
        "removed": torch.tensor([], dtype=torch.int64),
    }
    about = {
        "format": exported_table._FORMAT,
        "sha256": exported_table._digest(tensors),
        "about": "[" * 100_000,
    }
    save_file(tensors, tmp_path / "deep", about)
    os.mkfifo(tmp_path / "pipe")
    for name in ("deep", "pipe"):
        with pytest.raises(CheckpointError, match=f"no whole exported table at .*{name}: "):
            ExportedTable.load(tmp_path / name)


def test_ids_of_any_integers_have_numbers() -> None:
    empty = ExportedTable("t", torch.empty(0, dtype=torch.int64), torch.empty(0, 3))
    assert empty.index(torch.tensor([[1]])).tolist() == [[0]]
    assert empty.embedding()(torch.tensor([0])).tolist() == [[0.0] * 3]
    one = ExportedTable("t", torch.tensor([7]), torch.ones(1, 3))
    assert one.index(torch.tensor([7, 2**31 - 1], dtype=torch.int32)).tolist() == [1, 0]
    with pytest.raises(ConfigurationError, match="ids of torch.float32: give integers"):
        one.index(torch.tensor([7.0]))


def test_parts_of_two_servers_may_come_in_any_order() -> None:
    def record(chunk: int, key: str, start: int, *values: float) -> Record:
        dtype = torch.float32 if key == "values" else torch.int64
        value = torch.tensor(values, dtype=dtype)
        about = {
            "name": f"tables/{chunk}",
            "key": key,
            "start": start,
            "stop": start,
            "plain": False,
        }
        return chunk, about, value[:, None] if key == "values" else value

    chunks = (Chunk(at, ElementType.of(torch.float32), True, 0, 0, ()) for at in range(3))
    layout = ParameterLayout((), tuple(chunks))
    shards = [
        [record(chunk, key, 0, chunk) for key in ("life", "seed", "updates")]
        + [record(chunk, "removed_ids", 0)]
        + [record(chunk, "ids", at, 10 * chunk + at) for at in range(3)]
        + [record(chunk, "values", at, 10 * chunk + at) for at in range(3)]
        for chunk in (1, 2)
    ]
    for records in (shards[0] + shards[1], shards[1][:7] + shards[0] + shards[1][7:]):
        found = joined_rows(table(), ArrivedRows.of(layout, records), None)
        assert found.ids.tolist() == [10, 11, 12, 20, 21, 22]
        assert found.values.flatten().tolist() == found.ids.tolist()
