"""Embedding tables in one process beside torch's, and their index beside a plain gather of rows.

    python -m benchmarks.embedding                            # all but `memory`
    python -m benchmarks.embedding --only step --rounds 20
    python -m benchmarks.embedding --only index growth --millions 1 8 50
    python -m benchmarks.embedding --only memory --millions 50     # takes 9 GB
    python -m benchmarks.embedding --only disk --millions 20 --directory /local/ssd --share 0.9

Tables:

``step``    4,096 x 26 ids by a power law, 26 tables of 100,000 rows of dimension 16, Adagrad: the forward pass,
            the backward pass and the update, with random numbers as the gradients of the output. Rivals:
            torch's `EmbeddingBag(sparse=True)` with Adagrad, 26 of them, and one for all tables; FBGEMM's
            kernel for CPUs, if installed (`pip install --no-deps fbgemm-gpu-cpu==1.8.0` for torch 2.13);
            a server as tutorials have it, a dict of rows in a Ray actor, which is in another process.
``index``   106,496 ids, uniform or by a power law, looked up in an index of so many million keys. Rivals: a gather
            of as many random rows of 64 bytes by `numpy.take` and by `torch.index_select`, and a dict.
``growth``  an index, and a shard of rows, that grow by 106,496 new ids in each call: the greatest time of a call,
            beside the median; wall clock, and of the processor. Rival: a dict.
``memory``  so many million rows of dimension 16 with Adagrad: the process' memory over values, slots and ids.
``stores``  10,000 of a million rows of 128 bytes, read and written anew at random in a file. Rivals: RocksDB and LMDB
            (`pip install rocksdict lmdb`), if installed, none of which waits for the disk.
``disk``    a step as in ``step``, of one table of so many million rows, ids by n^-1.05: as many rows in memory as have
            a share of all look-ups, the others on disk, beside all in memory. The rows must be the same at the end.
``large``   so many million rows, of which a twentieth is in memory, and steps with them, without a rival: 200 take
            14 GB of memory, with that of the law by which ids are drawn, and 40 GB of disk.

One thread each. The contenders take turns, odd rounds in reverse order, on new ids each time; a ratio is the
median over rounds of our time over a rival's in the same round, with its range: below 1, ours is faster. ``step``
checks that all have trained the same rows to the same values.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import functools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.embedding_disk import run_disk, run_large, run_stores
from benchmarks.embedding_rivals import RATE, Bags, Fbgemm, OneBag, Trained, Tutorial, make
from benchmarks.overhead import machine, positive, progress, ratios
from benchmarks.parameter_server_rivals import ray_started
from steepest.tables.modules.collection import EmbeddingCollection
from steepest.tables.modules.embedding import connect
from steepest.tables.rows.compilation import compile_kernels
from steepest.tables.rows.index import Index
from steepest.tables.rows.initial import Uniform
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.row_optimizers import Adagrad
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.table import Table

FEATURES, BATCH, DIM, ROWS = 26, 4096, 16, 100_000
LOOK_UPS = FEATURES * BATCH
Timed = dict[str, list[float]]
SPREAD = 2_654_435_761  # ids that are no small numbers; odd, so that they stay distinct
MASK = (1 << 62) - 1


def clicks(random: np.random.Generator) -> np.ndarray:
    """Ids by a power law: the n-th most frequent in proportion to n^-1.2; (features, batch)."""
    return (random.zipf(1.2, (FEATURES, BATCH)) - 1) % ROWS


# -- step ----------------------------------------------------------------------------------------


class Ours(Trained):
    """A collection of 26 tables, and their rows."""

    def __init__(self) -> None:
        tables = {
            f"f{number}": Table(
                name=f"f{number}", dim=DIM, optimizer=Adagrad(lr=RATE), initial=Uniform(-0.1, 0.1)
            )
            for number in range(FEATURES)
        }
        compile_kernels(tables.values())
        self.module = EmbeddingCollection(tables)
        self.source = LocalRows(self.module.tables)
        connect(self.module, self.source)

    def step(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        out = self.module(dict(zip(self.module._features, ids, strict=True)))
        torch.autograd.backward(list(out.values()), list(gradients))
        self.source.step()

    def fill(self) -> None:
        """Make all rows, as torch has them from the beginning."""
        for number in range(FEATURES):
            shard = self.source.shards[0][0]
            ids = np.arange(ROWS)
            zeros = np.zeros((ROWS, DIM), np.float32)
            shard.push(np.full(ROWS, number), ids, zeros, shard.version + 1)
        self.source.version = shard.version

    def values(self) -> torch.Tensor:
        """All rows, (features x rows, dim)."""
        tables = np.repeat(np.arange(FEATURES, dtype=np.int32), ROWS)
        return torch.from_numpy(self.source.pull(0, tables, np.tile(np.arange(ROWS), FEATURES)))


RIVALS: dict[str, Callable[[torch.Tensor], Trained]] = {
    "torch, 26 bags": Bags,
    "torch, one bag": OneBag,
    "FBGEMM": Fbgemm,
    "tutorial": Tutorial,
}


def run_step(rounds: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    ours = Ours()
    ours.fill()
    contenders = {"steepest": ours, **make(ours.values().view(FEATURES, ROWS, DIM), RIVALS)}
    seconds: Timed = {name: [] for name in contenders}
    for number in range(rounds + 2):
        ids = torch.from_numpy(clicks(random))
        gradients = torch.from_numpy(random.normal(size=(FEATURES, BATCH, DIM)).astype(np.float32))
        for name in turns(contenders, number):
            prepared = contenders[name].prepare(gradients)
            spent = timed(functools.partial(contenders[name].step, ids, prepared))
            if number >= 2:  # the first warm up
                seconds[name].append(spent)
    expected = ours.values()
    for name, contender in contenders.items():
        if not torch.allclose(contender.values(), expected, rtol=1e-3, atol=1e-4):
            raise RuntimeError(f"{name} trained other rows, or otherwise")
    return report("a step of 4,096 x 26 ids", seconds, "steepest")


# -- index ---------------------------------------------------------------------------------------


def ids_of(numbers: np.ndarray) -> np.ndarray:
    """Distinct ids for distinct numbers, spread over the integers."""
    return (numbers.astype(np.int64) * SPREAD) & MASK


def run_index(rounds: int, millions: list[int], with_dict: bool) -> list[dict[str, Any]]:
    found = []
    for size in millions:
        count = size * 1_000_000
        index = Index(1, count)
        for part in np.array_split(np.arange(count), max(1, count // LOOK_UPS)):
            index.insert(np.zeros(len(part), np.int32), ids_of(part), part.astype(np.int32))
        rows = np.ones((count, DIM), np.float32)
        tensor = torch.from_numpy(rows)
        known = (
            dict(zip(ids_of(np.arange(count)).tolist(), range(count), strict=True))
            if (with_dict and size <= 8)
            else None
        )
        random = np.random.default_rng(1)
        for law in ("uniform", "power law"):
            contenders = gatherers(index, rows, tensor, known)
            seconds: Timed = {name: [] for name in contenders}
            for number in range(rounds + 1):
                for name in turns(contenders, number):
                    numbers = (
                        random.integers(0, count, LOOK_UPS)
                        if law == "uniform"
                        else (random.zipf(1.2, LOOK_UPS) - 1) % count
                    )
                    argument = contenders[name][0](numbers)
                    spent = timed(functools.partial(contenders[name][1], argument))
                    if number:
                        seconds[name].append(spent)
            title = f"{LOOK_UPS:,} look-ups, {law}, {size} million keys, {index.nbytes / count:.1f} B a key"
            found += report(title, seconds, "steepest")
        del rows, tensor, index, known
    return found


def gatherers(
    index: Index, rows: np.ndarray, tensor: torch.Tensor, known: dict[int, int] | None
) -> dict[str, tuple[Callable[[np.ndarray], Any], Callable[[Any], Any]]]:
    """By name: what is prepared of row numbers, and what is timed with that."""
    tables = np.zeros(LOOK_UPS, np.int32)
    out = np.empty((LOOK_UPS, DIM), np.float32)
    target = torch.empty(LOOK_UPS, DIM)

    def look_up(ids: np.ndarray) -> None:
        if index.find(tables, ids)[1]:
            raise RuntimeError("an id is not found")

    contenders: dict[str, Any] = {
        "steepest": (ids_of, look_up),
        "numpy.take": (lambda of: of, lambda of: np.take(rows, of, axis=0, out=out, mode="clip")),
        "index_select": (
            torch.from_numpy,
            lambda of: torch.index_select(tensor, 0, of, out=target),
        ),
    }
    if known is not None:
        contenders["dict"] = (lambda of: ids_of(of).tolist(), lambda of: [known[key] for key in of])
    return contenders


# -- growth --------------------------------------------------------------------------------------


def run_growth(millions: int) -> list[dict[str, Any]]:
    count = millions * 1_000_000
    index, known = Index(1, count + LOOK_UPS), dict[int, int]()
    table = Table(name="t", dim=DIM, optimizer=Adagrad(lr=RATE))
    compile_kernels([table])
    shard = TableShard([table])
    zeros = np.zeros(LOOK_UPS, np.int32)
    gradients = np.ones((LOOK_UPS, DIM), np.float32)

    def push(ids: np.ndarray) -> None:
        shard.push(zeros, ids, gradients, shard.version + 1)

    def insert(ids: np.ndarray) -> None:
        if index.find(zeros, ids)[1] != len(ids):
            raise RuntimeError("an id is there already")
        index.insert(zeros, ids, zeros)

    contenders: dict[str, Callable[[np.ndarray], None]] = {
        "index": insert,
        "shard": push,
        "dict": lambda ids: known.update(zip(ids.tolist(), range(len(ids)), strict=True)),
    }
    found = []
    for name, call in contenders.items():
        call(ids_of(np.arange(LOOK_UPS)))
        wall, processor = [], []
        for begin in range(LOOK_UPS, count, LOOK_UPS):
            ids = ids_of(np.arange(begin, begin + LOOK_UPS))
            before = time.thread_time()
            wall.append(timed(functools.partial(call, ids)))
            processor.append(time.thread_time() - before)
        row: dict[str, Any] = {"title": f"growth to {millions} million ids", "name": name}
        for clock, times in (("wall", wall), ("processor", processor)):
            row[f"{clock} median ms"] = 1e3 * statistics.median(times)
            row[f"{clock} greatest ms"] = 1e3 * max(times)
        found.append(row)
        print(
            f"growth to {millions} million, {name}: processor {row['processor median ms']:.2f} ms a call, at most "
            f"{row['processor greatest ms']:.2f}; wall {row['wall median ms']:.2f}, at most "
            f"{row['wall greatest ms']:.2f}"
        )
    return found


# -- memory --------------------------------------------------------------------------------------


def run_memory(millions: int) -> list[dict[str, Any]]:
    table = Table(name="t", dim=DIM, optimizer=Adagrad(lr=RATE))
    compile_kernels([table])
    shard, before = TableShard([table]), resident()
    gradients = np.ones((1_000_000, DIM), np.float32)
    for million in range(millions):
        ids = ids_of(np.arange(million * 1_000_000, (million + 1) * 1_000_000))
        shard.push(np.zeros(len(ids), np.int32), ids, gradients, million + 1)
        progress(f"{million + 1} million rows")
    taken = resident() - before
    needed = len(shard) * (2 * DIM * 4 + 8)
    row = {"title": "memory", "rows": len(shard), "bytes": taken, "over": taken / needed}
    print(
        f"{len(shard):,} rows: {taken / 1e9:.2f} GB, {taken / len(shard):.1f} bytes a row, "
        f"{taken / needed:.2f} times values, slots and ids"
    )
    return [row]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- all -----------------------------------------------------------------------------------------


def turns(contenders: dict[str, Any], number: int) -> Iterator[str]:
    return iter(list(contenders) if number % 2 == 0 else list(reversed(contenders)))


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def report(title: str, seconds: Timed, ours: str, unit: str = "ms") -> list[dict[str, Any]]:
    """Print and return what each took, and our time over it."""
    factor = {"ms": 1e3, "us": 1e6}[unit]
    print(f"\n{title}: median of {len(seconds[ours])} rounds")
    found = []
    for name, times in seconds.items():
        over = ratios(seconds[ours], times)
        median, least = factor * statistics.median(times), factor * min(times)
        found.append(
            {"title": title, "name": name, unit: median, f"least {unit}": least, "over": over}
        )
        of = f"{ours} over it {over['median']:.3g} ({over['min']:.3g} to {over['max']:.3g})"
        print(f"  {name:16}{median:9.3f} {unit}, least {least:.3f}  {'' if name == ours else of}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    kinds = ("step", "index", "growth", "memory", "stores", "disk", "large")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds[:3])
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--millions", nargs="+", type=positive, default=[1, 8], metavar="N")
    parser.add_argument(
        "--with-dict", action="store_true", help="a dict of up to 8 million keys too"
    )
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--share", type=float, default=0.9, help="of look-ups, to be found in memory"
    )
    parser.add_argument("--cold", action="store_true", help="nothing of the file is cached")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    found: list[dict[str, Any]] = []
    if "step" in arguments.only:
        with ray_started(cpus=1):
            found += run_step(arguments.rounds)
    if "index" in arguments.only:
        found += run_index(arguments.rounds, arguments.millions, arguments.with_dict)
    if "growth" in arguments.only:
        found += run_growth(max(arguments.millions))
    if "memory" in arguments.only:
        found += run_memory(max(arguments.millions))
    if "stores" in arguments.only:
        found += run_stores(arguments.rounds, arguments.directory)
    if "disk" in arguments.only:
        where = arguments.share, arguments.directory, arguments.cold
        found += run_disk(arguments.rounds, max(arguments.millions) * 1_000_000, *where)
    if "large" in arguments.only:
        count = max(arguments.millions) * 1_000_000
        found += run_large(arguments.rounds, count, count // 20, arguments.directory)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
