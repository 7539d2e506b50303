"""A checkpoint of large embedding tables saved and restored, beside plain files of the same bytes on the same disk.

    python -m benchmarks.table_files                                # 5 million rows of dimension 16, three rounds
    python -m benchmarks.table_files --millions 20 --rounds 1 --folder /data
    python -m benchmarks.table_files --reshard                      # rows of 8 shards to 4, 16 and 64

Rows have Adagrad's sums; two servers and two workers run as plain processes of this machine. A round is, in this order:
plain files of 64 MB written (each synced) and read; `save`; `restore` in a new program. Files leave the page cache
before they are read. The ratio is that of `save`, or `restore`, over the plain files of the round: median, least,
greatest. `restore` needs a job without rows: the start of its processes is not in it, nor the second in which each
loads compiled code for rows, since it restores a checkpoint without rows before. ``servers`` is the processor time
of the job's other processes meanwhile, in seconds, ``memory`` what the first use of as many bytes of memory takes in
one process: rows take a tenth more, and the host of a virtual machine may have to find memory that it had taken back.

``driver_bytes`` is the greatest resident memory of the driver's process during the call, ``more`` what that is above
the memory it had before.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import json
import mmap
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.embedding_checkpoints import memory
from benchmarks.overhead import machine, positive, progress, ratios
from steepest import (
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    TorchModel,
)
from steepest.runtime.places import processor_use
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.hashing import deal
from steepest.tables.rows.initial import Uniform
from steepest.tables.rows.row_optimizers import Adagrad
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.table import Table, spread_of

DIM, FEATURES, BATCH, FILE = 16, 64, 4096, 64 << 20
SPREAD = 2_654_435_761  # ids that are no small numbers


class Rows(nn.Module):
    """The sums of rows of all ids, each once."""

    def __init__(self) -> None:
        super().__init__()
        table = Table("rows", DIM, optimizer=Adagrad(lr=0.01), initial=Uniform(-0.1, 0.1))
        self.rows = Embedding(table)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, numbers: Tensor) -> Tensor:
        ids = (numbers[:, None] * FEATURES + torch.arange(FEATURES)) * SPREAD
        return self.rows(ids).sum((1, 2)) + self.bias


def job(rows: int) -> DistributedSGD:
    samples = rows // FEATURES

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            Rows(),
            loss=lambda output, target: output.mean(),
            data=(torch.arange(samples), torch.zeros(samples)),
            batch_size=min(BATCH, samples // 2),
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )

    quiet = RunConfig(failure=FailureConfig(snapshot_every=0))
    return DistributedSGD(
        create, 2, strategy=ParameterServerStrategy(num_servers=2), run_config=quiet
    )


def timed(call: Any) -> dict[str, float]:
    """Return the seconds of a call, and this process' greatest memory in it."""
    Path("/proc/self/clear_refs").write_text("5")  # its greatest resident memory begins anew
    before, began = memory("VmRSS"), time.perf_counter()
    call()
    seconds, most = time.perf_counter() - began, memory("VmHWM")
    return {"seconds": seconds, "driver_bytes": most, "more": most - before}


def forget(folder: Path) -> int:
    """Have files leave the page cache; return their bytes."""
    size = 0
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size += path.stat().st_size
    return size


def plain(folder: Path, size: int) -> dict[str, float]:
    """Return the seconds in which plain files of so many bytes are written, and read."""
    block = np.random.default_rng(0).bytes(4 << 20)
    began, names = time.perf_counter(), []
    for at in range(0, size, FILE):
        names.append(folder / f"{at}.bin")
        with names[-1].open("wb", buffering=0) as file:
            for begin in range(at, min(at + FILE, size), len(block)):
                file.write(block[: size - begin])
            os.fsync(file.fileno())
    written = time.perf_counter() - began
    forget(folder)
    began, buffer = time.perf_counter(), bytearray(len(block))
    for name in names:
        with name.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        name.unlink()
    return {"write": written, "read": time.perf_counter() - began}


def first_use(size: int) -> float:
    """Return the seconds in which so many bytes of memory are used for the first time, in huge pages."""
    began = time.perf_counter()
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1
    return time.perf_counter() - began


def run(rows: int, rounds: int, folder: Path) -> dict[str, Any]:
    saved, bare = folder / "checkpoint", folder / "plain"
    bare.mkdir()
    found: dict[str, list[dict[str, float]]] = {"plain": [], "save": [], "restore": []}
    with job(rows) as sgd:
        sgd.fit(epochs=1, progress=False)
        progress(f"{rows:,} rows are made")
        sgd.save(saved)
        size = forget(saved)
        for _ in range(rounds):
            found["plain"].append(plain(bare, size))
            found["save"].append(timed(lambda: sgd.save(saved)))
            forget(saved)
            program = [sys.executable, "-m", "benchmarks.table_files", "--restored", str(saved)]
            answer = subprocess.run(
                [*program, "--rows", str(rows)], check=True, stdout=subprocess.PIPE
            ).stdout
            found["restore"].append(json.loads(answer.splitlines()[-1]))
            found["plain"][-1]["memory"] = first_use(size)
            progress(str({name: each[-1] for name, each in found.items()}))

    def ratio(of: str, way: str) -> dict[str, float]:
        seconds = [each["seconds"] for each in found[of]]
        return ratios(seconds, [each[way] for each in found["plain"]])

    compared = {"save": ratio("save", "write"), "restore": ratio("restore", "read")}
    return {"bytes": size, "ratios": compared, **found}


def restored(rows: int, folder: Path) -> dict[str, float]:
    """Return what `restore` takes; the rows that are there then are counted."""
    with job(rows) as sgd:
        sgd.save(folder.parent / "nothing")
        sgd.restore(folder.parent / "nothing")
        pids = {process.pid for process in sgd.processes()} - {os.getpid()}
        before = [processor_use(pid) for pid in pids]
        forget(folder)
        found = timed(lambda: sgd.restore(folder))
        used = zip([processor_use(pid) for pid in pids], before, strict=True)
        found["servers"] = sum(b[0] - a[0] for b, a in used if a is not None and b is not None)
        there = sgd.stats().tables["rows"]["rows"]
    if there != rows // FEATURES * FEATURES:
        raise AssertionError(f"{there} rows instead of {rows}")
    return found


def resharded(rows: int) -> list[dict[str, Any]]:
    """Return the seconds in which rows of 8 shards come into others, all of them in this process."""
    table = Table("rows", DIM, optimizer=Adagrad(lr=0.01))
    ids = np.random.default_rng(0).integers(0, 1 << 62, rows)
    tables, found = np.zeros(rows, np.int32), []
    order, bounds = deal(tables, ids, spread_of((table,), 8))
    assert order is not None
    states = []
    for at in range(8):
        shard, mine = (
            TableShard([table], shard=at, num_shards=8),
            ids[order[bounds[at] : bounds[at + 1]]],
        )
        shard.push(tables[: len(mine)], mine, np.zeros((len(mine), DIM), np.float32), 1)
        states.append(shard.export())
    for number in (4, 16, 64):
        began, count = time.perf_counter(), 0
        for at in range(number):
            shard = TableShard([table], shard=at, num_shards=number)
            shard.load(states, 1)
            count += int(shard.rows_of().sum())
        assert count == rows
        found.append({"shards": number, "seconds": time.perf_counter() - began})
        progress(str(found[-1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--millions", type=float, default=5, help="of rows")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--reshard", action="store_true", help="rows of 8 shards to others instead")
    parser.add_argument("--restored", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.restored:
        print(json.dumps(restored(given.rows, given.restored)))
        return
    rows = int(given.millions * 1_000_000)
    report = {"machine": machine(), "rows": rows}
    if given.reshard:
        print(json.dumps(report | {"resharded": resharded(rows)}, indent=1))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        print(json.dumps(report | run(rows, given.rounds, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
