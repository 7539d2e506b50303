"""Checkpoints of embedding tables: into other shards, servers, strategies and capacities."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from steepest import (
    AllreduceStrategy,
    Callback,
    Checkpoints,
    DistributedSGD,
    ExportedTable,
    FailureConfig,
    ParameterServerStrategy,
    StepResult,
)
from steepest.checkpoint import files
from steepest.checkpoint.directory import CheckpointDirectory
from steepest.core.engine.optimizer_slices import assemble
from steepest.core.tensors.layout import Chunk, ElementType, ParameterLayout
from steepest.data.storage.safetensors_file import write_tensors
from steepest.errors import CheckpointError
from steepest.runtime.state import row_read
from steepest.tables.job import row_writer, table_chunk
from steepest.tables.job.row_snapshots import RowSnapshots
from steepest.tables.rows import tiered_rows
from steepest.tables.rows.admission import CBFFilter, CounterFilter
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.eviction import LRU
from steepest.tables.rows.row_optimizers import Adagrad
from steepest.tables.rows.state import TableState
from tests.reference import same_bits
from tests.simulation.run import Simulation, run_config
from tests.table_jobs import trainer, words
from tests.table_tools import push, table
from tests.table_tools import same as same_state
from tests.whole_checkpoints import all_of, newest_of


def same(one: ExportedTable, other: ExportedTable) -> bool:
    """Whether two exports have the same bits."""
    return torch.equal(one.ids, other.ids) and torch.equal(one.values, other.values)


THREE_SERVERS = ParameterServerStrategy(num_servers=3)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("strategy", "shards", "dtype"),
    [
        pytest.param(THREE_SERVERS, 5, "float64", id="ps-5"),
        pytest.param(AllreduceStrategy(), 1, "bfloat16", id="allreduce-1"),
        pytest.param(THREE_SERVERS, 1, "int8", id="ps-1", marks=pytest.mark.long),
        pytest.param(AllreduceStrategy(), 5, "float16", id="allreduce-5", marks=pytest.mark.long),
    ],
)
def test_a_job_with_other_shards_and_servers_goes_on(
    shards: int, strategy: Any, dtype: str, tmp_path: Path
) -> None:
    settings: Any = {"optimizer": Adagrad(), "dtype": dtype}
    settings |= {"admission": CounterFilter(filter_freq=2)}
    with trainer(words(**settings)) as sgd:
        sgd.fit(steps=3, progress=False)
        sgd.save(tmp_path)
        sgd.fit(steps=3, progress=False)
        expected = sgd.export_table("words")
    assert len(expected) > 0
    with trainer(words(shards=shards, **settings), strategy) as sgd:
        sgd.restore(tmp_path)
        sgd.fit(steps=3, progress=False)
        assert same(sgd.export_table("words"), expected)
        sgd.save(tmp_path / "again")
    saved = all_of(tmp_path / "again").optimizer
    names = {name.split("/")[1] for name in saved if name.startswith("tables/")}
    assert names == set(map(str, range(shards)))


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a part lies in a process' memory; servers write what they have not sent at once."""
    monkeypatch.setattr(table_chunk, "_PIECE_BYTES", 150)
    settings: Any = {"optimizer": Adagrad(), "admission": CounterFilter(filter_freq=1)}
    strategy = ParameterServerStrategy(num_servers=2)
    with trainer(words(shards=2, **settings), strategy) as sgd:
        sgd.fit(steps=3, progress=False)
        sgd.save(tmp_path / "whole")
        monkeypatch.setattr(row_read, "_PART_BYTES", 200)
        monkeypatch.setattr(row_writer, "PART_BYTES", 200)
        sgd.save(tmp_path / "parts")
        sgd.save(tmp_path / "parts")
    counts = [len(list((tmp_path / name).glob("tables-*"))) for name in ("whole", "parts")]
    assert counts[0] == 1 + 2  # the driver's, and one of each server
    assert counts[1] > 5
    whole, parts = (all_of(tmp_path / name).optimizer for name in ("whole", "parts"))
    assert same_bits(whole, parts)
    path = next((tmp_path / "parts").glob("tables-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(CheckpointError, match=path.name):
        all_of(tmp_path / "parts")


@pytest.mark.long
def test_counters_of_a_bloom_filter_go_on_in_other_shards(tmp_path: Path) -> None:
    ids = torch.arange(12).repeat_interleave(2)  # each twice in an epoch of four steps
    settings: Any = {"admission": CBFFilter(filter_freq=3, max_element_size=100)}
    with trainer(words(ids, **settings)) as sgd:
        sgd.fit(epochs=1, progress=False)
        assert len(sgd.export_table("words")) == 0
        sgd.save(tmp_path)
    for shards in (5, 2):
        with trainer(words(ids, shards=shards, **settings)) as sgd:
            sgd.restore(tmp_path)
            assert len(sgd.export_table("words")) == 0
            sgd.save(tmp_path)
            sgd.fit(epochs=1, progress=False)
            assert len(sgd.export_table("words")) == 12


@pytest.mark.long
def test_a_job_with_other_capacities_goes_on(tmp_path: Path) -> None:
    with trainer(words(shards=1)) as sgd:
        sgd.fit(steps=3, progress=False)
        sgd.save(tmp_path)
        before = sgd.export_table("words")
    with trainer(words(shards=1, capacity=5, eviction=LRU())) as sgd:
        sgd.restore(tmp_path)
        fewer = sgd.export_table("words")
        assert len(fewer) == 5 < len(before)
        assert torch.isin(fewer.ids, before.ids).all()
    with trainer(words(shards=1, capacity=7)) as sgd:
        sgd.fit(steps=1, progress=False)
        kept = sgd.export_table("words")
        with pytest.raises(
            CheckpointError, match=r"not of this job: .*'words' has 8 rows here, its capacity is 7"
        ):
            sgd.restore(tmp_path)
        assert same(sgd.export_table("words"), kept)
    with trainer(words(capacity=100)) as sgd:
        sgd.restore(tmp_path)
        assert same(sgd.export_table("words"), before)


@pytest.mark.few(1)
@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_that_servers_refuse_are_told_and_nothing_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: bool
) -> None:
    """The damage is one that no checksum shows and the driver does not look for."""
    monkeypatch.setattr(tiered_rows, "_LEAST", 4)
    where = {"directory": str(tmp_path / "rows"), "memory_rows": 10} if on_disk else {}
    with trainer(words(shards=1, **where)) as sgd:
        sgd.fit(steps=3, progress=False)
        sgd.save(tmp_path / "sound")
        found = all_of(tmp_path / "sound")
        found.optimizer["tables/0/written"] += 9
        files.write(tmp_path / "damaged", found)
        sgd.fit(steps=1, progress=False)
        before, rows = sgd.weights(), sgd.export_table("words")
        refused = r"damaged is damaged: embedding tables: written .* hold 10 to 12"
        with pytest.raises(CheckpointError, match=refused):
            sgd.restore(tmp_path / "damaged")
        assert same(sgd.export_table("words"), rows)
        assert same_bits(sgd.weights(), before)
        sgd.fit(steps=1, progress=False)


MANY = torch.randint(400, (96,), generator=torch.Generator().manual_seed(0))


def kept(path: Path, steps: int, increments: int = 3, **settings: Any) -> ExportedTable:
    """Trains up to a step with a checkpoint after each, perhaps from the newest one; returns rows."""
    checkpoints = Checkpoints(path, every=1, keep=2, increments=increments)
    create = words(MANY, optimizer=Adagrad(), **settings)
    with trainer(create, checkpoints=checkpoints) as sgd:
        sgd.fit(steps=steps, progress=False)
        return sgd.export_table("words")


def states(saved: files.Checkpoint) -> list[TableState]:
    """The rows of each shard, in order."""
    shards: dict[str, dict[str, Any]] = {}
    for name, value in saved.optimizer.items():
        _, shard, key = name.split("/")
        if key not in ("updates", "seed"):
            shards.setdefault(shard, {})[key] = value.numpy()
    return [TableState.of_arrays(arrays).sorted() for _, arrays in sorted(shards.items())]


@pytest.mark.long
def test_a_chain_of_increments_is_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_chunk, "_PIECE_BYTES", 1000)  # sent amid the next steps
    settings: Any = {"capacity": 30, "eviction": LRU()}
    directory = CheckpointDirectory(tmp_path / "a", 2)
    for steps in (3, 7, 8):
        rows = kept(tmp_path / "a", steps, **settings)
        for path in directory.paths():
            base = files.base_of(files.about(path))
            assert base is None or (tmp_path / "a" / base.name).is_dir()
    assert 2 < len(directory.paths()) <= 5  # two, and what they continue
    expected = kept(tmp_path / "b", 8, increments=0, **settings)
    assert same(rows, expected)
    (_, found), (_, whole) = newest_of(directory), newest_of(CheckpointDirectory(tmp_path / "b", 2))  # type: ignore[misc]
    assert "base" not in found.about
    assert found.optimizer.keys() == whole.optimizer.keys()
    assert all(same_state(*pair) for pair in zip(states(found), states(whole), strict=True))


def test_an_increment_has_the_rows_that_were_changed(tmp_path: Path) -> None:
    kept(tmp_path, 4)
    _, first, *_, last = CheckpointDirectory(tmp_path, 2).paths()
    for path in (next(path.glob("tables-*")) for path in (first, last)):
        rows = [v for name, v in load_file(path).items() if name.endswith("/ids")]
        assert 0 < sum(map(len, rows)) <= 12  # of two tables, six samples


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "damage",
    [
        "file",
        pytest.param("missing", marks=pytest.mark.long),
        pytest.param("another", marks=pytest.mark.long),
    ],
)
def test_without_a_link_the_checkpoint_before_is_taken(damage: str, tmp_path: Path) -> None:
    kept(tmp_path, 4)
    directory = CheckpointDirectory(tmp_path, 2)
    _, before, middle, last = directory.paths()
    if damage == "missing":
        shutil.rmtree(middle)
    elif damage == "file":
        path = next(middle.glob("tables-*"))
        path.write_bytes(path.read_bytes()[:-1] + b"\7")
    else:
        files.write(middle, all_of(middle))  # whole, and not what the newest continues
        before = middle
    said = "does not have its checksum" if damage == "file" else "has changes since the one at"
    with pytest.raises(CheckpointError, match=said):
        all_of(last)
    found = newest_of(directory)
    assert found is not None
    assert found[0] == before
    rows = kept(tmp_path, 6)
    with trainer(words(MANY, optimizer=Adagrad())) as sgd:
        sgd.fit(steps=6, progress=False)
        assert same(rows, sgd.export_table("words"))


class Then(Callback):
    """Does things after some steps, each once."""

    def __init__(self, then: dict[int, Callable[[], object]]) -> None:
        self.then = then

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.then.pop(result.step, lambda: None)()


@pytest.mark.full
@pytest.mark.long
def test_a_server_dies_while_it_sends_the_rows_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(table_chunk, "_PIECE_BYTES", 500)
    simulation, go_on = Simulation(3), RowSnapshots.go_on
    stuck, begun = [], Counter[Any]()

    def first_pieces(*one: Any) -> None:
        begun[one] += 1
        if not stuck or begun[one] <= 2:
            go_on(*one)

    monkeypatch.setattr(RowSnapshots, "go_on", first_pieces)

    def kill() -> None:
        stuck.clear()
        (victim,) = (p for p in simulation.living() if "server 1" in str(p))
        simulation.world.kill(victim, "it was killed. connection error code 2.")

    then = Then({7: lambda: stuck.append(1), 11: kill})
    settings: Any = {
        "strategy": ParameterServerStrategy(num_servers=2, replication=2),
        "run_config": run_config(failure=FailureConfig(snapshot_every=0)),
    }
    checkpoints = Checkpoints(tmp_path, every=8)
    with trainer(words(MANY), simulation=simulation, checkpoints=checkpoints, **settings) as sgd:
        sgd.fit(steps=14, callbacks=[then], progress=False)
        rows = sgd.export_table("words")
    assert "the checkpoint of step 8 is not kept, training goes on" in caplog.text
    assert [path.name for path in CheckpointDirectory(tmp_path, 3).paths()] == ["000001-step-14"]
    with trainer(words(MANY)) as sgd:
        sgd.fit(steps=14, progress=False)
        expected = sgd.export_table("words")
        sgd.restore(tmp_path / "000001-step-14")
        assert same(sgd.export_table("words"), expected)
    assert same(rows, expected)


def test_rows_that_a_failed_checkpoint_does_not_take_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_chunk, "_PIECE_BYTES", 500)
    with trainer(words(MANY)) as sgd:
        sgd.fit(steps=8, progress=False)
        monkeypatch.setattr(sgd._state, "buffers", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sgd.save(tmp_path)
        monkeypatch.undo()
        sgd.step()
        assert not sgd._training.cluster.client._reads
        sgd.save(tmp_path)


def test_changes_of_a_row_in_a_hundred_take_a_hundredth_of_the_bytes(tmp_path: Path) -> None:
    count, every = 20_000, 100
    dealing = Dealing((table(dim=16, optimizer=Adagrad()),), 1, 0, 0)
    chunk = Chunk(0, ElementType.of(torch.float32), True, 0, 0, ())
    held = table_chunk.TableChunk(chunk, dealing)
    push(held.rows, range(count), 1)
    push(held.rows, range(0, count, every), 2)
    sizes = []
    for base in (None, (held.rows.life, 1)):
        records = [(0, about, value) for part in held.pieces(None, base) for about, value in part]
        state, _ = assemble(ParameterLayout((), ()), records)
        write_tensors(tmp_path / "rows", state)
        sizes.append((tmp_path / "rows").stat().st_size)
    assert sizes[1] < 0.02 * sizes[0]
