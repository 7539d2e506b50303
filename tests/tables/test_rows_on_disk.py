"""Rows that were not used lately lie on disk, and nothing else about a table changes."""

from __future__ import annotations

import errno
import gc
import os
import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.core.config.run import DeadlineConfig
from steepest.core.messages.message import Message, Peer
from steepest.core.system import system
from steepest.core.tensors.layout import Chunk, ElementType
from steepest.errors import ConfigurationError, DeadlineError, ModelRaisedError, ResourcesError
from steepest.tables.job.row_messages import PullRows
from steepest.tables.job.row_pulls import RowPulls
from steepest.tables.job.slow_disks import SlowDisks
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.rows import row_log, tiered_rows
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.eviction import LFU, L2WeightEvict
from steepest.tables.rows.gradients import pack_keys
from steepest.tables.rows.kernels import Int32s
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.row_formats import RowFormat
from steepest.tables.rows.row_log import RowLog
from steepest.tables.rows.row_optimizers import Adagrad, Adam
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.state import TableState
from steepest.tables.rows.table import groups
from steepest.tables.rows.tiered_rows import TieredRows
from tests.inside import replay_state
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.table_jobs import trainer, words
from tests.table_tasks import mostly_long, rows_in, same_rows
from tests.table_tools import push, same, table
from tests.whole_checkpoints import all_of

WIDTH = 12
FEW = 256  # the least rows that a shard has in memory


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards have few rows in memory, and segments of few records."""
    monkeypatch.setattr(tiered_rows, "_LEAST", 4)
    monkeypatch.setattr(row_log, "_SEGMENT_BYTES", 256)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read counts as one that takes long, however fast the disk is."""
    monkeypatch.setattr(tiered_rows, "_WORTH_SECONDS", 1e-12)


def log_of(folder: Path, most: int, segment: int = 8) -> tuple[RowLog, Int32s]:
    where = np.zeros(most, np.int32)
    return RowLog(str(folder), WIDTH, most, where, segment), where


# -- the store ---------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_log_has_what_a_dict_has(tmp_path: Path, seed: int) -> None:
    """Written anew, forgotten, read, in any order; segments are cleaned, and no more of them than rows need."""
    random, most = np.random.default_rng(seed), 200
    log, where = log_of(tmp_path, most)
    log.require(most)
    taken, known = log.nbytes, {}
    for _ in range(300):
        numbers = random.permutation(most)[: random.integers(1, 60)].astype(np.int32)
        if random.random() < 0.3:
            log.forget(numbers)
            for number in numbers.tolist():
                known.pop(number, None)
        else:
            rows = random.integers(0, 256, (len(numbers), WIDTH)).astype(np.uint8)
            log.write(numbers, rows)
            known |= dict(zip(numbers.tolist(), rows, strict=True))
        assert np.flatnonzero(where).tolist() == sorted(known)
        assert len(log) == len(known)
        wanted = np.array(sorted(known), np.int32)
        found = np.empty((len(wanted), WIDTH), np.uint8)
        log.read(wanted, found)
        assert all((found[at] == known[number]).all() for at, number in enumerate(sorted(known)))
    assert log.nbytes == taken


def test_many_rows_are_read_by_several_threads(tmp_path: Path) -> None:
    log, _ = log_of(tmp_path, 5000, 64)
    log.require(5000)
    numbers = np.random.default_rng(0).permutation(5000).astype(np.int32)
    rows = np.random.default_rng(1).integers(0, 256, (5000, WIDTH)).astype(np.uint8)
    log.write(numbers, rows)
    found = np.empty_like(rows)
    log.read(numbers, found)
    assert np.array_equal(found, rows)


def test_rows_are_read_ahead_where_a_server_would_wait_for_them(tmp_path: Path) -> None:
    store = TieredRows(RowFormat(5, 5, "float32"), np.zeros(1, np.int64), 3000, str(tmp_path), 1)
    store.memory.require(3000)
    for begin in range(0, 1000, 100):
        numbers = np.arange(begin, begin + 100, dtype=np.int32)
        keys, rows = (np.zeros(100, np.int32), numbers.astype(np.int64)), np.ones((2, 100, 5))
        store.enter(numbers, keys, *rows.astype(np.float32))
    away = np.arange(20, dtype=np.int32)  # those that were entered first

    def ahead(rows: int, *seconds: float) -> bool:
        store.disk.row_seconds = 0.0
        for each in seconds:
            store.disk.note(each, 1.0)
        return bool([read.result() for read in store.read_ahead(away[:rows])])

    assert not ahead(20, 2e-7)  # the system has them in its cache
    assert ahead(20, 8e-5)
    assert ahead(3, 8e-5)
    assert not ahead(1, 8e-5)  # handing it over would take as long
    assert ahead(1, 8e-3)  # a disk that turns


def test_what_was_read_ahead_tells_little_of_the_disk(tmp_path: Path) -> None:
    log, _ = log_of(tmp_path, 10)
    log.note(1e-4, 1.0)
    for _ in range(10):
        log.note(2e-7)
    assert log.row_seconds > 3e-5
    for _ in range(200):
        log.note(2e-7)
    assert log.row_seconds < 1e-6
    for _ in range(4):
        log.note(1e-4)
    assert log.row_seconds > 5e-5


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    log, _ = log_of(tmp_path / "new", 10)
    assert list((tmp_path / "new").iterdir()) == []
    held = len(os.listdir("/proc/self/fd"))
    del log
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < held


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourcesError, match=r"file' cannot hold rows.*Give a table's directory="):
        log_of(tmp_path / "file", 10)


def full_disk(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Have files grow to so many bytes."""
    real = os.posix_fallocate

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if offset + length > nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, offset, length)

    monkeypatch.setattr(row_log.os, "posix_fallocate", fallocate)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float64"])
def test_rows_of_every_format_go_to_disk_and_come_back(tmp_path: Path, dtype: str) -> None:
    form = RowFormat(5, 5, dtype)
    rows = TieredRows(form, np.zeros(1, np.int64), 3000, str(tmp_path), 1, segment=32)
    plain = TieredRows(form, np.zeros(1, np.int64), 3000, str(tmp_path), 3000)
    random = np.random.default_rng(0)
    for version in range(1, 30):
        numbers = random.permutation(3000)[:400].astype(np.int32)
        keys = np.zeros(400, np.int32), numbers.astype(np.int64)
        values, slots = random.normal(size=(2, 400, 5)).astype(form.dtype)
        for each in (rows, plain):
            each.memory.require(3000)
            if version < 10:
                each.enter(numbers, keys, values, slots**2)
            else:
                held = (each._place_of[numbers] > 0) | (each._record_of[numbers] > 0)
                mine = np.where(held, numbers, -1).astype(np.int32)
                each.update(Adagrad(lr=0.1), mine, keys, values, version, None)
    known = np.flatnonzero(plain._place_of).astype(np.int32)
    assert len(known) > 2000
    assert rows.read > 3000
    assert plain.read == 0
    for mine, theirs in zip(rows.copied(known), plain.copied(known), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    found = [np.empty((len(known), 5), form.dtype) for _ in range(2)]
    rows.gather(known, found[0])
    plain.gather(known, found[1])
    assert found[0].tobytes() == found[1].tobytes()


# -- shards ------------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {"optimizer": Adam(lr=0.1)},
    {"optimizer": Adagrad(lr=0.1), "dtype": "bfloat16"},
    {"capacity": 300, "eviction": LFU(), "optimizer": Adagrad(lr=0.1)},
    {"evict": (L2WeightEvict(0.4),), "ttl": 100},
]


@pytest.mark.few(1)
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_shard_with_rows_on_disk_is_bit_for_bit_one_in_memory(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    on_disk = table(directory=str(tmp_path), memory_rows=20, **kind)
    tiered, plain = TableShard([on_disk]), TableShard([table(**kind)])
    random = np.random.default_rng(0)
    cuts: list[Any] = []
    for version in range(1, 120):
        ids = np.unique((600 * random.random(60) ** 3).astype(int))
        seen = random.integers(1, 5, len(ids)).astype(np.int32)
        gradients = random.normal(size=(len(ids), 4)).astype(np.float32)
        asked = np.zeros(80, np.int32), random.integers(0, 700, 80)
        assert np.array_equal(tiered.pull(*asked), plain.pull(*asked))
        for shard in (tiered, plain):
            shard.note_time(1000 + 3 * version)
            shard.push(np.zeros(len(ids), np.int32), ids, gradients, version, None, seen)
            if version % 10 == 0:
                shard.evict(version)
                shard.end_lives(version)
        if version % 25 == 0:
            assert same(tiered.export(), plain.export())
            assert same(tiered.export(since=version - 5), plain.export(since=version - 5))
            cuts = [(shard.export(), *shard.cut()) for shard in (tiered,)]
        for before, _, cut in cuts:  # read piece by piece while pushes go on
            part = cut.take(7)
            at = np.searchsorted(before.ids, part["ids"])
            assert np.array_equal(before.values[at], part["values"])
        if version == 60:
            state = TableState.of_arrays(tiered.export().arrays())
            tiered, cuts = TableShard([on_disk]), []
            tiered.load([state], version, plain.clock)
            again = TableShard([table(**kind)])
            again.load([state], version, plain.clock)
            plain = again
    store = tiered._blocks.store
    assert isinstance(store, TieredRows)
    assert store.read > 500


@pytest.mark.usefixtures("few")
def test_a_full_disk_is_an_error_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = TableShard([table(directory=str(tmp_path), memory_rows=8)])
    full_disk(monkeypatch, 20_000)
    said = (
        rf"table 't': directory '{tmp_path}' of .* has no room for more rows .*No space left.* "
        r"Its file has [\d,]+ bytes and wants [\d,]+; [\d,]+ are free there.*go.*on.*capacity"
    )
    before, version = shard.export(), 0
    while shard._blocks.has_room(100):
        push(shard, np.arange(100 * version, 100 * version + 100), version + 1)
        before, version = shard.export(), version + 1
    with pytest.raises(ResourcesError, match=said):
        push(shard, np.arange(100 * version, 100 * version + 100), version + 1)
    assert 0 < len(shard) == 100 * version
    assert same(shard.export(), before)
    with pytest.raises(ResourcesError, match=said):
        shard.require_room(np.zeros(500, np.int32), np.arange(10**6, 10**6 + 500))
    shard.require_room(np.zeros(100, np.int32), np.arange(100))
    for later in range(version + 1, version + 50):  # rows that are there are trained on
        push(shard, np.arange(later % 7, 100 * version, 7), later)
    assert len(shard) == 100 * version


def test_a_table_on_disk_is_a_group_by_itself(tmp_path: Path) -> None:
    how = {"directory": str(tmp_path), "memory_rows": 10}
    found = groups([table("a", **how), table("b"), table("c", **how), table("d")])
    assert [[one.name for one in group] for group in found] == [["a"], ["b", "d"], ["c"]]


@pytest.mark.parametrize(
    "how",
    [
        {"directory": "/tmp"},
        {"memory_rows": 5},
        {"memory_bytes": 10**9},
        {"directory": "", "memory_rows": 5},
        {"directory": "/tmp", "memory_rows": 5, "memory_bytes": 10**9},
    ],
)
def test_a_directory_and_the_rows_in_memory_are_given_together(how: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="of table 't': give both"):
        table(**how)
    with pytest.raises(ConfigurationError, match="memory_rows of table 't'=0"):
        table(directory="/tmp", memory_rows=0)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_memory_in_bytes_is_a_bound_of_what_a_shard_takes(tmp_path: Path, dtype: str) -> None:
    """Arrays of the rows in memory, measured: within the bound, and not a row less than it allows."""
    given = 2_000_000
    one = table(directory=str(tmp_path), memory_bytes=given, dtype=dtype)
    stores = [TableShard([one], shard=n, num_shards=2)._blocks.store for n in range(2)]
    assert all(isinstance(store, TieredRows) for store in stores)
    taken = [
        store._rows.memory._row * (len(store._marks) + len(store._passing))
        + store._numbers.nbytes
        + store._marks.nbytes
        for store in stores
        if isinstance(store, TieredRows)
    ]
    assert given - 2 * (one.form.row_bytes + 5) < sum(taken) <= given
    with pytest.raises(ConfigurationError, match=r"memory_bytes=9000 of table 't'.*give [\d,]+ or"):
        table(directory=str(tmp_path), memory_bytes=9000)
    with pytest.raises(
        ConfigurationError, match=r"of which a shard has 53,333: give .* each of its"
    ):
        words(IDS, directory=str(tmp_path), memory_bytes=160_000)(0, 0)


@pytest.mark.usefixtures("few")
def test_rows_of_ones_own_process_may_lie_on_disk(tmp_path: Path) -> None:
    found = []
    for how in ({}, {"directory": str(tmp_path), "memory_rows": 30}):
        rows = LocalRows([table(**how)], num_shards=3)
        for step in range(20):
            ids = np.arange(step, 300, 7)
            keys = np.zeros(len(ids), np.int32), ids
            rows.push(0, *keys, np.ones((len(ids), 4), np.float32), np.ones(len(ids), np.int32))
            rows.step()
        found.append(rows.pull(0, np.zeros(300, np.int32), np.arange(300)))
    assert np.array_equal(*found)


# -- jobs in simulations -----------------------------------------------------------------------------

IDS = torch.arange(240) % 67
COPIES = ParameterServerStrategy(num_servers=2, replication=2)
STRATEGIES = [
    ParameterServerStrategy(num_servers=2),
    ParameterServerStrategy(num_servers=1, mode="async"),
    AllreduceStrategy(table_staleness=2),
]


@pytest.mark.few(1)
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, STRATEGIES[0]), ids=str)
def test_a_job_with_rows_on_disk_is_that_in_memory_and_its_replay(
    tmp_path: Path, strategy: Any
) -> None:
    found = []
    how: dict[str, Any] = {"directory": str(tmp_path / "rows"), "memory_rows": 10}
    for settings in ({}, how):
        create = words(IDS, **settings)
        with trainer(create, strategy, run_config=run_config(keep_log=True)) as sgd:
            sgd.fit(steps=8, progress=False)
            sgd.save(tmp_path / "saved")
            log = sgd.log()
            export = sgd.export_table("words")
            counts = sgd.stats().tables["words"]
            assert ("read_from_disk" in counts) == bool(settings)
            if settings:
                assert 0 < counts["read_from_disk"] < counts["looked_up"]
                assert counts["bytes_on_disk"] > 0
        rows = rows_in(all_of(tmp_path / "saved"))
        state = replay_state(log, create)
        assert same_rows({n: v for n, v in state.items() if n.startswith("tables/")}, rows)
        found.append(export)
    assert torch.equal(found[0].ids, found[1].ids)
    assert torch.equal(found[0].values, found[1].values)


@pytest.mark.long
@pytest.mark.usefixtures("few")
def test_rows_on_disk_live_through_deaths_moves_and_checkpoints(tmp_path: Path) -> None:
    create = words(IDS, directory=str(tmp_path / "rows"), memory_rows=10)
    with trainer(words(IDS), COPIES) as sgd:
        sgd.fit(steps=12, progress=False)
        expected = sgd.export_table("words")
    simulation = Simulation(3)
    with quiet(), trainer(create, COPIES, simulation=simulation) as sgd:
        sgd.fit(steps=3, progress=False)
        server = next(each for each in simulation.living() if "server 1" in str(each))
        simulation.world.kill(server, "it was killed. connection error code 2.")
        system().event().wait(5.0)
        sgd.fit(steps=3, progress=False)
        sgd.resize(num_servers=3)
        sgd.save(tmp_path / "saved")
        sgd.fit(steps=2, progress=False)  # to be forgotten
        sgd.restore(tmp_path / "saved")
        sgd.set_strategy(AllreduceStrategy())
        sgd.fit(steps=3, progress=False)
        sgd.save(tmp_path / "later")
    with trainer(create, ParameterServerStrategy(num_servers=1), workers=2) as sgd:
        sgd.restore(tmp_path / "later")
        sgd.fit(steps=3, progress=False)
        found = sgd.export_table("words")
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)
    assert list((tmp_path / "rows").iterdir()) == []


@pytest.mark.usefixtures("few")
def test_a_full_disk_is_an_error_of_the_step_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(240)
    how: dict[str, Any] = {"directory": str(tmp_path), "memory_rows": 10, "shards": 1}
    with trainer(words(ids, **how)) as sgd:
        full_disk(monkeypatch, 4000)
        with pytest.raises(
            ModelRaisedError, match=r"server \d, table '.*': directory .* has no room for more"
        ):
            sgd.fit(epochs=1, progress=False)
        before = sgd.export_table("words")
        sgd.save(tmp_path / "saved")
        saved = rows_in(all_of(tmp_path / "saved"))
        assert sum(len(value) for name, value in saved.items() if name.endswith("/ids")) >= len(
            before
        )
        assert 0 < len(before) < 240
        assert sgd.evaluate((ids[-6:], torch.zeros(6))).samples == 6
        monkeypatch.undo()
        sgd.fit(epochs=1, progress=False)
        assert len(sgd.export_table("words")) == 240


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have reads of rows on disk take so long."""
    real = RowLog._read

    def read(log: RowLog, numbers: Int32s, rows: Any) -> None:
        system().event().wait(seconds)
        real(log, numbers, rows)

    monkeypatch.setattr(RowLog, "_read", read)


@pytest.mark.full
@pytest.mark.usefixtures("few")
def test_a_slow_disk_is_told_once_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = words(IDS, directory=str(tmp_path), memory_rows=10)
    with trainer(create, ParameterServerStrategy(num_servers=1)) as sgd:
        sgd.fit(steps=15, progress=False)
        slow_disk(monkeypatch, 0.6)
        sgd.fit(steps=6, progress=False)
    said = [text for text in caplog.messages if "waited" in text]
    assert len(said) == 2  # tables
    for name, text in zip(("others", "words"), sorted(said), strict=True):
        assert f"table '{name}' waited" in text
        assert f"s for the disk of server 0, directory '{tmp_path}': if that goes on" in text
    assert 1.0 < float(said[0].split("waited ")[1].split(" s")[0]) < 30.0


@pytest.mark.few(1)
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("server", [0, 1])
def test_a_deadline_names_the_disk_that_a_server_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: int
) -> None:
    """Server 0 has the coordinator beside it, which is mute then."""
    create = words(IDS, directory=str(tmp_path), memory_rows=10)
    config = run_config(deadlines=DeadlineConfig(step=20.0))
    with trainer(create, ParameterServerStrategy(num_servers=2), run_config=config) as sgd:
        sgd.fit(steps=15, progress=False)
        real_values, real_read, serving = RowPulls._values, RowLog._read, [-1]

        def values(pulls: RowPulls, wanted: Any) -> Any:
            serving[0] = pulls._server
            return real_values(pulls, wanted)

        def read(log: RowLog, numbers: Int32s, rows: Any) -> None:
            if serving[0] == server:
                system().event().wait(60.0)
            real_read(log, numbers, rows)

        monkeypatch.setattr(RowPulls, "_values", values)
        monkeypatch.setattr(RowLog, "_read", read)
        with pytest.raises(DeadlineError, match=rf"server {server} waits for the disk of dir.*tab"):
            sgd.fit(steps=20, progress=False)


@pytest.mark.usefixtures("few", "slow")
def test_a_pull_that_needs_no_disk_is_answered_while_another_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads ahead end when the test lets them; `call` is the router's thread, which is the test's."""
    one, chunk = table(directory=str(tmp_path), memory_rows=200), Chunk(
        0, ElementType.of(torch.float32), True, 0, 0, ()
    )  # fmt: skip
    dealing = Dealing((one,), 1, 0, 0)
    held, sent, calls = TableChunk(chunk, dealing), list[Message](), queue.SimpleQueue[Any]()
    for version in range(1, 11):
        push(held.rows, np.arange(100 * version, 100 * version + 100), version)
    pulls = RowPulls(0, dealing, {0: held}, lambda _, m: sent.append(m))
    disks, pulls.call = SlowDisks(0, {0: held}, pulls), calls.put
    go_on, real = threading.Event(), row_log._touch

    def touch(*arguments: Any) -> int:
        assert go_on.wait(30.0)
        return real(*arguments)

    monkeypatch.setattr(row_log, "_touch", touch)
    away, here = np.arange(100, 300), np.arange(1050, 1100)
    expected = held.rows.export().values  # by id, from 100 on
    for sequence, ids in enumerate((away, here)):
        keys = torch.from_numpy(pack_keys([(np.zeros(len(ids), np.int32), ids)]))
        pull = PullRows(1, sequence, 10, [(0, len(ids), False)])
        pulls.receive(Peer("worker", sequence), pull, keys, (1, 10))
    assert [rows.body.sequence for rows in sent] == [1]  # rows on disk are still being read
    assert f"directory '{tmp_path}', table 't'" in str(disks.doing())
    go_on.set()
    calls.get(timeout=30.0)()
    assert [rows.body.sequence for rows in sent] == [1, 0]
    assert str(disks.doing()) == ""
    for rows, ids in zip(sent, (here, away), strict=True):
        assert rows.payload is not None
        assert np.array_equal(
            rows.payload.numpy().view(np.float32).reshape(-1, 4), expected[ids - 100]
        )
    go_on.clear()
    keys = torch.from_numpy(pack_keys([(np.zeros(200, np.int32), np.arange(400, 600))]))
    pulls.receive(Peer("worker", 0), PullRows(1, 2, 10, [(0, 200, False)]), keys, (1, 10))
    pulls.answer((2, 10))  # another generation
    go_on.set()
    calls.get(timeout=30.0)()
    assert len(sent) == 2
