"""Snapshots of tables with a directory lie on disks of two processes, and no rows of them in the driver."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import AllreduceStrategy, Checkpoints, FailureConfig, ParameterServerStrategy
from steepest.core.config.run import DeadlineConfig
from steepest.core.engine.job import ModelCreator
from steepest.core.engine.put_states import PutStates
from steepest.core.system import system
from steepest.errors import PeerLostError, ProtocolError
from steepest.tables.files import row_files, row_pieces
from steepest.tables.files.row_files import RowFiles
from steepest.tables.files.saved_rows import SavedFile
from steepest.tables.job.restored_shards import MADE
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.rows import tiered_rows
from steepest.tables.rows.row_optimizers import Adagrad
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.step_callbacks import Watch
from tests.table_jobs import trainer, words
from tests.table_tasks import mostly_long

IDS = torch.arange(240) % 67


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards have few rows in memory."""
    monkeypatch.setattr(tiered_rows, "_LEAST", 4)


def rows_on_disk(sgd: Any) -> tuple[set[int], list[str]]:
    """The shards of which the driver's copy has files on disks, and the names of rows' arrays in the driver."""
    (layer,) = sgd._supervisor.snapshots.taken.rows.layers
    return (
        {shard for file in layer.files if file.kept for shard in file.shards},
        [name for file in layer.files for name in file.arrays],
    )


CASES = [
    ("float64", ParameterServerStrategy(num_servers=2), "server 1"),
    ("float64", ParameterServerStrategy(num_servers=2), "server 0"),
    ("bfloat16", ParameterServerStrategy(num_servers=1), "server 0"),
    ("float64", AllreduceStrategy(), "worker 1"),
]
EVERY = run_config(failure=FailureConfig(snapshot_every=2), deadlines=DeadlineConfig(start=60.0))


def on_disk(folder: Path, **how: Any) -> ModelCreator:
    return words(IDS, directory=str(folder), memory_rows=10, **how)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", mostly_long(CASES, CASES[0]), ids=str)
def test_a_death_sets_the_job_back_to_rows_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, Any, str]
) -> None:
    dtype, strategy, who = case
    how: dict[str, Any] = {"dtype": dtype, "optimizer": Adagrad(lr=0.1)}
    with trainer(words(IDS, **how), strategy) as sgd:
        sgd.fit(steps=14, progress=False)
        expected = sgd.export_table("words")
    read, real = set[int](), SavedFile.tensors

    def tensors(file: SavedFile, *about: Any) -> Any:
        read.update(file.shards)
        return real(file, *about)

    monkeypatch.setattr(SavedFile, "tensors", tensors)
    create, simulation = on_disk(tmp_path, **how), Simulation(3)
    with quiet(), trainer(create, strategy, simulation=simulation, run_config=EVERY) as sgd:
        sgd.fit(steps=7, progress=False)
        standing, in_driver = rows_on_disk(sgd)
        assert len(standing) == 6  # shards of two tables
        assert in_driver == []
        dead = next(each for each in simulation.living() if who in str(each))
        simulation.world.kill(dead, "it was killed. connection error code 2.")
        system().event().wait(5.0)
        sgd.fit(steps=7, progress=False)
        found = sgd.export_table("words")
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.values, expected.values)
    assert read == standing
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_rows_are_on_another_node_when_one_is_lost(tmp_path: Path) -> None:
    strategy, create = ParameterServerStrategy(num_servers=2), on_disk(tmp_path)
    with trainer(words(IDS), strategy) as sgd:
        sgd.fit(steps=14, progress=False)
        expected = sgd.export_table("words")
    simulation = Simulation(1, cpus=(0, 1, 1, 1))
    with quiet(), trainer(create, strategy, simulation=simulation, run_config=EVERY) as sgd:
        sgd.fit(steps=7, progress=False)
        servers = [each for each in simulation.living() if "server" in str(each)]
        assert len({each.node for each in servers}) == 2
        simulation.world.lose(simulation.world.nodes[2], silently=False)
        sgd.fit(steps=7, progress=False)
        found = sgd.export_table("words")
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)


def test_a_death_in_the_first_step_after_processes_with_copies_have_gone(tmp_path: Path) -> None:
    strategy, create = ParameterServerStrategy(num_servers=2), on_disk(tmp_path)
    with trainer(words(IDS), strategy) as sgd:
        sgd.fit(steps=14, progress=False)
        expected = sgd.export_table("words")
    simulation = Simulation(3)

    def die() -> None:
        dead = next(each for each in simulation.living() if "server 0" in str(each))
        simulation.world.kill(dead, "it was killed. connection error code 2.")

    with quiet(), trainer(create, strategy, simulation=simulation, run_config=EVERY) as sgd:
        sgd.fit(steps=7, progress=False)
        sgd.resize(num_servers=1)
        sgd.fit(steps=7, callbacks=[Watch((8, die))], progress=False)
        found = sgd.export_table("words")
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)


@pytest.mark.full
def test_two_deaths_at_once_leave_no_snapshot_and_say_so(tmp_path: Path) -> None:
    simulation, strategy = Simulation(3), ParameterServerStrategy(num_servers=2)
    create = on_disk(tmp_path)
    with quiet(), trainer(create, strategy, simulation=simulation, run_config=EVERY) as sgd:
        sgd.fit(steps=7, progress=False)
        for each in simulation.living():
            if "server" in str(each):
                simulation.world.kill(each, "it was killed. connection error code 2.")
        with pytest.raises(
            PeerLostError, match="of some rows of embedding tables no snapshot is left"
        ):
            sgd.fit(steps=7, progress=False)


@pytest.mark.full
@pytest.mark.long
def test_after_two_deaths_the_program_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    simulation, strategy = Simulation(3), ParameterServerStrategy(num_servers=2)
    create, kept = on_disk(tmp_path / "rows"), Checkpoints(tmp_path / "kept", every=3)
    with trainer(words(IDS), strategy) as sgd:
        sgd.fit(steps=14, progress=False)
        expected = sgd.export_table("words")
    how: dict[str, Any] = {"run_config": EVERY, "checkpoints": kept}
    with quiet(), trainer(create, strategy, simulation=simulation, **how) as sgd:
        sgd.fit(steps=7, progress=False)
        for each in simulation.living():
            if "server" in str(each):
                simulation.world.kill(each, "it was killed. connection error code 2.")
        with pytest.raises(PeerLostError, match=r"Start the program again: with checkpoints="):
            sgd.fit(steps=7, progress=False)
    with trainer(create, strategy, **how) as sgd:
        sgd.fit(steps=7, progress=False)
        assert sgd.stats().step >= 7
        sgd.fit(steps=7, progress=False)
        found = sgd.export_table("words")
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)


@pytest.mark.few(1)
@pytest.mark.parametrize("who", ["a server", "who has the copies"])
def test_a_full_disk_keeps_the_last_snapshot_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, who: str
) -> None:
    strategy = ParameterServerStrategy(num_servers=2)
    with trainer(on_disk(tmp_path), strategy, run_config=EVERY) as sgd:
        sgd.fit(steps=4, progress=False)
        for _ in range(5):  # that which is under way comes
            before = sgd._supervisor.snapshots.taken
            system().event().wait(0.5)

        taking: list[int] = []
        take = RowFiles.keep

        def counted(*arguments: Any) -> None:
            taking.append(1)
            take(*arguments)
            taking.pop()

        def pwrite(descriptor: int, data: Any, at: int) -> int:
            if bool(taking) == (who == "a server"):
                return write(descriptor, data, at)
            taking.clear()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        write = os.pwrite
        with monkeypatch.context() as patched:
            patched.setattr(RowFiles, "keep", counted)
            patched.setattr(row_files.os, "pwrite", pwrite)
            for _ in range(3):
                sgd.fit(steps=4, progress=False)
                system().event().wait(2.0)  # the next try is not at once
            assert sgd._supervisor.snapshots.taken is before
        said = [text for text in caplog.messages if "no new snapshot" in text]
        assert len(said) == 1
        assert ("gave up a snapshot" in said[0]) == (who == "a server")
        assert f"directory '{tmp_path}' of " in said[0]
        assert "No space left on device" in said[0]
        assert "more bytes are to be written" in said[0]
        for _ in range(3):
            sgd.fit(steps=4, progress=False)
            system().event().wait(2.0)
        assert sgd._supervisor.snapshots.taken is not before
        assert len(caplog.messages) == 1


def test_no_row_is_lost_where_a_server_is_slow_to_read_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator says that a state is installed before the last server has begun."""
    install = PutStates.install

    def slow(puts: PutStates, *about: Any) -> bool:
        if puts._server:  # the coordinator is beside server 0
            system().event().wait(2.0)
        return install(puts, *about)

    monkeypatch.setattr(PutStates, "install", slow)
    strategy = ParameterServerStrategy(num_servers=2)
    with quiet(), trainer(on_disk(tmp_path / "rows", shards=2), strategy) as sgd:
        sgd.fit(steps=4, progress=False)
        sgd.save(tmp_path / "saved")
        expected = sgd.export_table("words")
        for install_again in (
            lambda: sgd.restore(tmp_path / "saved"),
            lambda: sgd.import_table("words", (expected.ids[:1], expected.values[:1])),
        ):
            install_again()
            found = sgd.export_table("words")
            assert torch.equal(found.ids, expected.ids)
            assert torch.equal(found.values, expected.values)


def test_a_server_that_cannot_load_its_rows_is_replaced_and_they_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = ParameterServerStrategy(num_servers=2)
    with quiet(), trainer(on_disk(tmp_path / "rows"), strategy) as sgd:
        sgd.fit(steps=7, progress=False)
        sgd.save(tmp_path / "saved")
        expected = sgd.export_table("words")
        end, failed = TableChunk.end_state, []

        def failing(chunk: TableChunk) -> None:
            monkeypatch.setattr(TableChunk, "end_state", end)
            failed.append(chunk)
            raise ProtocolError("a file that is damaged by now")

        monkeypatch.setattr(TableChunk, "end_state", failing)
        sgd.restore(tmp_path / "saved")
        found = sgd.export_table("words")
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.values, expected.values)
    assert len(failed) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    mostly_long(
        [("float64", 1, 1), ("float64", 2, 2), ("bfloat16", 1, 3), ("int8", 2, 1)],
        ("float64", 2, 2),
    ),
    ids=str,
)
def test_a_checkpoint_comes_to_tables_on_disk_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, int, int]
) -> None:
    dtype, copies, servers = case
    strategy = ParameterServerStrategy(num_servers=servers, replication=min(copies, servers))
    how: dict[str, Any] = {"dtype": dtype, "optimizer": Adagrad(lr=0.1), "shards": 2}
    with trainer(words(IDS, **how), strategy) as sgd:
        sgd.fit(steps=6, progress=False)
        sgd.save(tmp_path / "saved")
        sgd.fit(steps=6, progress=False)
        expected = sgd.export_table("words")
    most = 300  # bytes: a few of the 18 rows of a shard
    monkeypatch.setattr(row_pieces, "PIECE_BYTES", most)
    load, piece = TableChunk.load_state, row_pieces.state_of
    made, held, states = set[Any](), list[int](), list[weakref.ref[Any]]()

    def loading(chunk: TableChunk, about: Any, value: torch.Tensor) -> None:
        assert about["key"] == MADE
        load(chunk, about, value)

    def making(arrays: Any, begin: int = 0, end: int | None = None) -> Any:
        found = piece(arrays, begin, end)
        made.add((id(arrays), begin, end))
        states[:] = [state for state in states if state() is not None]
        states.append(weakref.ref(found))
        held.append(len(states))
        return found

    monkeypatch.setattr(TableChunk, "load_state", loading)
    monkeypatch.setattr(row_pieces, "state_of", making)
    create = on_disk(tmp_path / "rows", **how)
    with trainer(create, strategy) as sgd:
        sgd.fit(steps=1, progress=False)
        sgd.restore(tmp_path / "saved")
        assert len(made) > 2 * 2 * 2  # several of each shard of two tables
        assert max(held) <= 2
        sgd.fit(steps=6, progress=False)
        found = sgd.export_table("words")
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)
    assert list((tmp_path / "rows").iterdir()) == []
