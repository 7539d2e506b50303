"""Rows of which few are in memory beside rows that all are, see `python -m benchmarks.embedding --only disk stores`."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.embedding_rivals import RATE
from benchmarks.overhead import progress, ratios
from steepest.tables.modules.collection import EmbeddingCollection
from steepest.tables.modules.embedding import connect
from steepest.tables.rows.compilation import compile_kernels
from steepest.tables.rows.hashing import Distinct
from steepest.tables.rows.initial import Uniform
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.row_log import RowLog
from steepest.tables.rows.row_optimizers import Adagrad
from steepest.tables.rows.table import Table
from steepest.tables.rows.tiered_rows import TieredRows

FEATURES, BATCH, DIM = 26, 4096, 16
LOOK_UPS = FEATURES * BATCH
POWER = 1.05
SPREAD, MASK = 2_654_435_761, (1 << 62) - 1


class PowerLaw:
    """Ids 0 to `count` - 1, the n-th in proportion to n^-1.05, in an order that has nothing to do with the rows'."""

    def __init__(self, count: int) -> None:
        weights = np.arange(1, count + 1, dtype=np.float64) ** -POWER
        self._edges = weights.cumsum()
        self.count = count

    @property
    def nbytes(self) -> int:
        return self._edges.nbytes

    def rows_with(self, share: float) -> int:
        """Return how many of the most frequent ids have a share of all look-ups."""
        return int(np.searchsorted(self._edges, share * self._edges[-1])) + 1

    def draw(self, random: np.random.Generator) -> np.ndarray:
        drawn = random.random(LOOK_UPS) * self._edges[-1]
        ranks: np.ndarray = np.searchsorted(self._edges, drawn).clip(max=self.count - 1)
        return ranks * 7_919 % self.count  # a frequent id's row is anywhere among the others'


class Trained:
    """A collection of 26 features that share a table, and its rows."""

    def __init__(self, count: int, **settings: Any) -> None:
        self.table = Table(
            "t", DIM, optimizer=Adagrad(lr=RATE), initial=Uniform(-0.1, 0.1), **settings
        )
        compile_kernels([self.table])
        self.module = EmbeddingCollection({f"f{number}": self.table for number in range(FEATURES)})
        self.source = LocalRows([self.table])
        connect(self.module, self.source)
        begun = time.perf_counter()
        for begin in range(0, count, 1_000_000):
            ids = ids_of(np.arange(begin, min(begin + 1_000_000, count)))
            zeros = np.zeros((len(ids), DIM), np.float32)
            keys = np.zeros(len(ids), np.int32), ids
            self.source.push(0, *keys, zeros, np.ones(len(ids), np.int32))
            self.source.step()
            progress(f"{begin + len(ids):,} rows after {time.perf_counter() - begun:.0f} s")

    @property
    def store(self) -> TieredRows | None:
        store = self.source.shards[0][0]._blocks.store
        return store if isinstance(store, TieredRows) else None

    def step(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        out = self.module({f"f{number}": of for number, of in enumerate(ids)})
        torch.autograd.backward(list(out.values()), list(gradients))
        self.source.step()


def ids_of(numbers: np.ndarray) -> np.ndarray:
    """Distinct ids for distinct numbers, spread over the integers."""
    return (numbers.astype(np.int64) * SPREAD) & MASK


def forget_cached(store: TieredRows) -> None:
    """Have the system's cache forget the file, so that the next reads are the disk's."""
    log = store._log
    os.fsync(log._file)
    mapped = log._records.base
    while isinstance(mapped, np.ndarray):
        mapped = mapped.base
    mapped = mapped.obj if isinstance(mapped, memoryview) else mapped
    mapped.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(log._file, 0, 0, os.POSIX_FADV_DONTNEED)


def run_disk(
    rounds: int, count: int, share: float, directory: Path, cold: bool
) -> list[dict[str, Any]]:
    """Time steps with as many rows in memory as have a share of all look-ups, and with all of them."""
    # cold: whether the system's cache has none of the file's pages when a step begins.
    law, random = PowerLaw(count), np.random.default_rng(0)
    few = law.rows_with(share)
    on_disk = Trained(count, directory=str(directory), memory_rows=few)
    contenders = {"on disk": on_disk, "in memory": Trained(count)}
    store = on_disk.store
    assert store is not None
    seconds, processor = ({name: [] for name in contenders} for _ in range(2))
    found = distinct = looked_up = 0
    for number in range(rounds + 40):
        ids = ids_of(law.draw(random))
        gradients = torch.from_numpy(random.normal(size=(FEATURES, BATCH, DIM)).astype(np.float32))
        batch = torch.from_numpy(ids.reshape(FEATURES, BATCH))
        if number >= 40:  # those before bring to memory what is asked for often
            keys = Distinct(np.zeros(LOOK_UPS, np.int32), ids)
            rows, _ = on_disk.source.shards[0][0]._index.find(keys.tables, keys.ids)
            here = store._place_of[rows] > 0
            found += int(keys.counts[here].sum())
            distinct += int(here.sum())
            looked_up += len(rows)
        order = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for name in order:
            if cold and name == "on disk" and number >= 40:
                forget_cached(store)
            begun, before = time.perf_counter(), time.process_time()
            contenders[name].step(batch, gradients)
            if number >= 40:
                seconds[name].append(time.perf_counter() - begun)
                processor[name].append(time.process_time() - before)
    keys = np.zeros(100_000, np.int32), ids_of(random.integers(0, count, 100_000))
    if not np.array_equal(*(each.source.pull(0, *keys) for each in contenders.values())):
        raise RuntimeError("rows on disk are others than those in memory")
    over, work = (ratios(of["on disk"], of["in memory"]) for of in (seconds, processor))
    row = {
        "title": f"{count:,} rows, {few:,} in memory"
        + (", nothing of the file cached" if cold else ""),
        "ms": {name: 1e3 * statistics.median(times) for name, times in seconds.items()},
        "over": over,
        "processor over": work,
        "look-ups in memory": found / (rounds * LOOK_UPS),
        "distinct rows in memory": distinct / looked_up,
        "bytes on disk": store.nbytes_on_disk,
    }
    print(
        f"{row['title']}: {100 * row['look-ups in memory']:.1f} % of look-ups, {100 * distinct / looked_up:.1f} % of "
        f"{looked_up // rounds:,} distinct rows of a step found there; {store.nbytes_on_disk / 1e9:.2f} GB on disk\n"
        f"  a step takes {row['ms']['on disk']:.1f} ms, all in memory {row['ms']['in memory']:.1f}: "
        f"{over['median']:.2f} times ({over['min']:.2f} to {over['max']:.2f}); processor time "
        f"{work['median']:.2f} times ({work['min']:.2f} to {work['max']:.2f})"
    )
    return [row]


def run_large(rounds: int, count: int, few: int, directory: Path) -> list[dict[str, Any]]:
    """Make so many rows of which few are in memory, and take steps with them; no rival holds as many."""
    law, random = PowerLaw(count), np.random.default_rng(0)
    begun = time.perf_counter()
    one = Trained(count, directory=str(directory), memory_rows=few)
    made, anonymous = time.perf_counter() - begun, resident("RssAnon") - law.nbytes
    store = one.store
    assert store is not None
    seconds, waited, shares = [], [], []
    for _ in range(rounds):
        batch = torch.from_numpy(ids_of(law.draw(random)).reshape(FEATURES, BATCH))
        gradients = torch.from_numpy(random.normal(size=(FEATURES, BATCH, DIM)).astype(np.float32))
        before = store.looked_up, store.read, store.disk.seconds, time.perf_counter()
        one.step(batch, gradients)
        seconds.append(time.perf_counter() - before[3])
        waited.append(store.disk.seconds - before[2])
        shares.append((store.read - before[1]) / (store.looked_up - before[0]))
    row = {
        "title": f"{count:,} rows, {few:,} in memory",
        "seconds to make": made,
        "bytes of memory": anonymous,
        "bytes on disk": store.nbytes_on_disk,
        "seconds": statistics.median(seconds),
        "seconds of the disk": statistics.median(waited),
        "read from disk": statistics.median(shares),
    }
    print(
        f"{row['title']}: made in {made:.0f} s, {anonymous / 1e9:.2f} GB of memory, "
        f"{store.nbytes_on_disk / 1e9:.2f} GB on disk; a step {row['seconds']:.2f} s, of which the disk "
        f"{row['seconds of the disk']:.2f}, which read {100 * row['read from disk']:.0f} % of its rows"
    )
    return [row]


def resident(what: str) -> int:
    """Return bytes of this process' memory of a kind that the kernel tells."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{what}:")[1].split()[0]) << 10


# -- stores --------------------------------------------------------------------------------------

STORED, ASKED, WIDTH = 1_000_000, 10_000, 128
#: Reads rows by number to an array, and writes them anew.
Store = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray, np.ndarray], None]]


def our_log(directory: str) -> Store:
    log = RowLog(directory, WIDTH, STORED, np.zeros(STORED, np.int32))
    log.require(STORED)
    out = np.empty((ASKED, WIDTH), np.uint8)

    def read(numbers: np.ndarray) -> np.ndarray:
        log.read(numbers, out)
        return out

    return read, log.write


def rocksdb(directory: str) -> Store:
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    known = rocksdict.Rdict(directory + "/rocksdb", options)

    def write(numbers: np.ndarray, rows: np.ndarray) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys_of(numbers), rows, strict=True):
            batch.put(key, row.tobytes())
        known.write(batch)

    return lambda numbers: joined(known.get(keys_of(numbers))), write


def lmdb(directory: str) -> Store:
    import lmdb

    known = lmdb.open(
        directory + "/lmdb", map_size=4 << 30, sync=False, metasync=False, writemap=True
    )

    def read(numbers: np.ndarray) -> np.ndarray:
        with known.begin() as transaction:
            return joined([row for _, row in transaction.cursor().getmulti(keys_of(numbers))])

    def write(numbers: np.ndarray, rows: np.ndarray) -> None:
        items = [(key, row.tobytes()) for key, row in zip(keys_of(numbers), rows, strict=True)]
        with known.begin(write=True) as transaction:
            transaction.cursor().putmulti(items)

    return read, write


def keys_of(numbers: np.ndarray) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in numbers.tolist()]


def joined(rows: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, WIDTH)


def run_stores(rounds: int, directory: Path) -> list[dict[str, Any]]:
    """Time reads and writes of rows in several stores, which must have the same rows."""
    random, found = np.random.default_rng(0), []
    stores: dict[str, Store] = {}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for name, make in (("steepest", our_log), ("RocksDB", rocksdb), ("LMDB", lmdb)):
            try:
                stores[name] = make(folder)
            except ImportError:
                print(f"{name} is not installed")
        rows = random.integers(0, 256, (STORED, WIDTH)).astype(np.uint8)
        for _, write in stores.values():
            for begin in range(0, STORED, ASKED):
                part = slice(begin, begin + ASKED)
                write(np.arange(begin, begin + ASKED, dtype=np.int32), rows[part])
        seconds: dict[str, dict[str, list[float]]] = {
            kind: {name: [] for name in stores} for kind in ("read", "written")
        }
        for number in range(rounds + 1):
            numbers = random.permutation(STORED)[:ASKED].astype(np.int32)
            rows[numbers] = random.integers(0, 256, (ASKED, WIDTH))
            names = list(stores) if number % 2 == 0 else list(reversed(stores))
            for name in names:
                read, write = stores[name]
                begun = time.perf_counter()
                write(numbers, rows[numbers])
                between = time.perf_counter()
                if not np.array_equal(read(numbers), rows[numbers]):
                    raise RuntimeError(f"{name} has other rows")
                if number:
                    seconds["written"][name].append(between - begun)
                    seconds["read"][name].append(time.perf_counter() - between)
    for kind, times in seconds.items():
        for name, of in times.items():
            over = ratios(times["steepest"], of)
            found.append({"title": f"rows {kind}", "name": name, "over": over})
            print(
                f"10,000 rows {kind}, {name}: {1e3 * statistics.median(of):.1f} ms, steepest over it "
                f"{over['median']:.3f} ({over['min']:.3f} to {over['max']:.3f})"
            )
    return found
