"""Servers write and read the rows of a checkpoint themselves; the driver has names."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steepest import AllreduceStrategy, Checkpoints, ParameterServerStrategy
from steepest.checkpoint import files
from steepest.checkpoint.files import UnreachableError
from steepest.data.storage.files import LocalStorage
from steepest.data.storage.places import StorageError
from steepest.errors import CheckpointError
from steepest.tables.files.saved_rows import SavedFile
from steepest.tables.job import restored_shards, row_snapshots, row_writer, table_chunk
from steepest.tables.job.job_tables import dealing_of
from steepest.tables.job.restored_shards import RestoredShards, RowsWanted
from steepest.tables.rows.row_optimizers import Adagrad
from tests.reference import same_bits
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation
from tests.table_jobs import trainer, words
from tests.whole_checkpoints import all_of

IDS = torch.randint(400, (96,), generator=torch.Generator().manual_seed(0))
TWO = ParameterServerStrategy(num_servers=2)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and files are small, so that servers have many."""
    monkeypatch.setattr(table_chunk, "_PIECE_BYTES", 300)
    monkeypatch.setattr(row_writer, "PART_BYTES", 600)


def rows_of(path: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint has of tables; the time of its writing is no part of it."""
    return {n: v for n, v in all_of(path).optimizer.items() if n.startswith("tables/")}


class _Failing:
    """The file operations of checkpoints: the one of a number fails, and perhaps all after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.fails, self.later = 0, -1, False
        for owner, names in (
            (LocalStorage, ("make", "files", "version", "write", "remove", "exists")),
            (os, ("replace", "fsync")),
            (Path, ("unlink",)),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*about: Any, **named: Any) -> Any:
            self.count += 1
            if self.count == self.fails or (self.later and 0 <= self.fails < self.count):
                raise OSError("the disk is gone")
            return call(*about, **named)

        return counted

    def after(self, fails: int, *, later: bool) -> None:
        self.count, self.fails, self.later = 0, fails, later


@pytest.mark.parametrize("later", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_failure_at_each_file_operation_leaves_the_last_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    """With `later` all operations after it fail too, as after the death of a machine."""
    disk = _Failing(monkeypatch)
    outcomes = Counter[str]()
    create, long = words(IDS, shards=2, optimizer=Adagrad()), Simulation(3, switches=10**6)
    with quiet(), trainer(create, TWO, simulation=long) as sgd:
        sgd.fit(steps=4, progress=False)
        sgd.save(tmp_path / "before")
        sgd.fit(steps=4, progress=False)
        sgd.save(tmp_path / "after")
        before, after = (rows_of(tmp_path / name) for name in ("before", "after"))
        assert not same_bits(before, after)
        assert len(list((tmp_path / "after").glob("tables-*"))) > 4
        fails = 0
        while disk.count >= fails:
            fails += 1
            place = tmp_path / str(fails)
            shutil.copytree(tmp_path / "before", place)
            disk.after(fails, later=later)
            try:
                sgd.save(place)
                told = "saved"
            except CheckpointError:
                told = "refused"
            reached = disk.count
            disk.after(-1, later=False)
            found = rows_of(place)
            is_new = same_bits(found, after)
            assert is_new or same_bits(found, before)
            assert is_new or told == "refused"
            outcomes[f"{told}, {is_new}"] += 1
            disk.count = reached
            shutil.rmtree(place)
    assert outcomes["refused, False"] > 20
    assert outcomes["saved, True"] > 1  # one that cannot remove old files, say; and the last


@pytest.mark.parametrize("strategy", [TWO, AllreduceStrategy()], ids=str)
def test_servers_that_do_not_reach_the_place_send_and_are_sent_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    sent: list[str] = []
    take = RestoredShards.take_file

    def taking(restored: RestoredShards, number: int, name: str, *about: Any) -> None:
        sent.append(name)
        take(restored, number, name, *about)

    monkeypatch.setattr(RestoredShards, "take_file", taking)
    create = words(IDS, shards=2, optimizer=Adagrad())
    with trainer(create, strategy) as sgd:
        sgd.fit(steps=4, progress=False)
        sgd.save(tmp_path / "near")
        for module in (restored_shards, row_snapshots):
            monkeypatch.setattr(module, "reaches", lambda file: False)
        sgd.save(tmp_path / "far")
        assert same_bits(rows_of(tmp_path / "near"), rows_of(tmp_path / "far"))
        expected = sgd.export_table("words")
        assert len(list((tmp_path / "far").glob("tables-*"))) == 1
    assert not sent
    with trainer(create, strategy) as sgd:
        sgd.restore(tmp_path / "near")
        found = sgd.export_table("words")
    assert set(sent) == {path.name for path in (tmp_path / "near").glob("tables-*")}
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)


def test_a_server_reads_the_files_of_its_shards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = words(IDS, shards=4, optimizer=Adagrad())
    with trainer(create, ParameterServerStrategy(num_servers=4)) as sgd:
        sgd.fit(steps=8, progress=False)
        sgd.save(tmp_path)
        expected = sgd.export_table("words")
    tensors, seen = SavedFile.tensors, Counter[str]()

    def counted(file: SavedFile, *about: Any) -> Any:
        seen[file.name] += 1
        return tensors(file, *about)

    monkeypatch.setattr(SavedFile, "tensors", counted)
    with trainer(create, TWO) as sgd:
        sgd.restore(tmp_path)
        found = sgd.export_table("words")
    written = {path.name for path in tmp_path.glob("tables-*")}
    by_driver = {name for name in written if name.count("-") == 3}
    assert len(by_driver) == 1
    assert seen.keys() == written
    assert {seen[name] for name in written - by_driver} == {1}
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)


def test_a_checkpoint_without_marks_of_shards_is_looked_into(tmp_path: Path) -> None:
    """So are those of before."""
    create = words(IDS, shards=2, optimizer=Adagrad())
    with trainer(create, TWO) as sgd:
        sgd.fit(steps=4, progress=False)
        sgd.save(tmp_path / "new")
        whole = all_of(tmp_path / "new")
        files.write(tmp_path / "old", whole)  # all rows beside the optimizer's state, and no marks
        assert "shards" not in files.about(tmp_path / "old")
        expected = sgd.export_table("words")
        sgd.fit(steps=4, progress=False)
        sgd.restore(tmp_path / "old")
        found = sgd.export_table("words")
        sgd.save(tmp_path / "again")
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)
    assert same_bits(rows_of(tmp_path / "new"), rows_of(tmp_path / "again"))


@pytest.mark.parametrize("sent", [False, True])
def test_a_store_that_does_not_answer_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    """No older checkpoint is taken in place of the newest one."""
    create = words(IDS, shards=2, optimizer=Adagrad())
    kept = Checkpoints(tmp_path, every=4)
    with trainer(create, TWO, checkpoints=kept) as sgd:
        sgd.fit(steps=8, progress=False)
        expected = sgd.export_table("words")

    def silent(*about: Any) -> Any:
        raise StorageError("no answer within 120 s")

    with monkeypatch.context() as patch:
        patch.setattr(SavedFile, "parts" if sent else "tensors", silent)
        if sent:
            patch.setattr(restored_shards, "reaches", lambda file: False)
        with (
            pytest.raises(UnreachableError, match="no answer"),
            trainer(create, TWO, checkpoints=kept),
        ):
            pass
    with trainer(create, TWO, checkpoints=kept) as sgd:
        assert sgd.stats().step == 8
        assert torch.equal(sgd.export_table("words").values, expected.values)


def test_damaged_rows_are_passed_over_for_the_checkpoint_before(tmp_path: Path) -> None:
    create = words(IDS, shards=2, optimizer=Adagrad())
    kept = Checkpoints(tmp_path, every=4)
    with trainer(create, TWO, checkpoints=kept) as sgd:
        sgd.fit(steps=8, progress=False)
        expected = sgd.export_table("words")
    newest = sorted(tmp_path.glob("0*"))[-1]
    for path in newest.glob("tables-*"):
        path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with trainer(create, TWO, checkpoints=kept) as sgd:
        assert sgd.stats().step == 4
        sgd.fit(steps=8, progress=False)
        assert torch.equal(sgd.export_table("words").values, expected.values)


def test_an_id_with_two_rows_is_damage(tmp_path: Path) -> None:
    with trainer(words(IDS, shards=2, optimizer=Adagrad()), TWO) as sgd:
        sgd.fit(steps=4, progress=False)
        sgd.save(tmp_path / "sound")
        found = all_of(tmp_path / "sound")
        ids = found.optimizer["tables/0/ids"]
        ids[1] = ids[0]
        files.write(tmp_path / "damaged", found)
        before = sgd.export_table("words")
        with pytest.raises(
            CheckpointError, match=r"damaged: embedding tables: id \d+ of table '\w+' has two"
        ):
            sgd.restore(tmp_path / "damaged")
        assert torch.equal(sgd.export_table("words").values, before.values)


@pytest.mark.parametrize("dealt", [False, True])
def test_a_file_is_read_once_and_leaves_the_cache_after_its_last_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dealt: bool
) -> None:
    with trainer(words(IDS, shards=5), TWO) as sgd:
        sgd.fit(steps=4, progress=False)
        sgd.save(tmp_path / "saved")
        dealing = dealing_of(sgd._cluster.job)
    assert dealing is not None
    read, dropped, real = list[str](), list[Path](), SavedFile.tensors

    def tensors(file: SavedFile, *about: Any) -> Any:
        read.append(file.name)
        return real(file, *about)

    monkeypatch.setattr(SavedFile, "tensors", tensors)
    monkeypatch.setattr(restored_shards, "drop_cached", dropped.append)
    saved = files.read_apart(tmp_path / "saved").saved_rows
    assert saved is not None
    wanted = RowsWanted(-1, dealing.chunks[::2], dealing, saved, dealt=dealt)
    assert not any(RestoredShards().read(wanted))
    assert len(read) == len(set(read)) > 2
    # others read the same files where rows are dealt; of the last two a piece may be in use
    names = [file.name for file in dropped]
    assert len(names) == len(set(names)) == (0 if dealt else len(read) - 2)


def test_files_that_are_sent_have_no_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a process that is killed meanwhile leaves nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shards, before = RestoredShards(), set(os.listdir("/proc/self/fd"))
    for at, part in ((0, b"some"), (4, b" bytes")):
        shards.take_file(-1, "tables-1.safetensors", at, np.frombuffer(part, np.uint8))
    file = shards.files.find(-1, "tables-1.safetensors")
    assert file is not None
    assert file.path.read_bytes() == b"some bytes"
    del file
    assert not list(tmp_path.iterdir())
    shards.drop(-1)
    assert set(os.listdir("/proc/self/fd")) == before
