"""Rows of embedding tables in fewer bytes beside rows of float32: what they cost, and what they learn.

    python -m benchmarks.embedding_formats                                  # all
    python -m benchmarks.embedding_formats --only memory --millions 5
    python -m benchmarks.embedding_formats --only adult clicks --rounds 5
    python -m benchmarks.embedding_formats --only adult --kinds "int8 gradients" "bfloat16 gradients"

``memory``  so many million rows of dimension 16 with row-wise Adagrad: the process' memory, bytes a row.
``step``    106,496 ids by a power law among 2.6 million rows of dimension 16, row-wise Adagrad: a pull as a worker gets
            it, and a push of gradients of the distinct ones. Formats take turns, odd rounds in reverse order.
``adult``   the test AUC of the network of ``examples/wide_and_deep.py`` after one pass in one process, by seed; the
            data is read from STEEPEST_DATA.
``clicks``  the same of the network of ``benchmarks.embedding_servers``, of a million clicks.

A ratio is the median over rounds of a format's time over that of float32 in the same round. Differences of AUC are to
float32 with the same seed: the same first values but for their rounding, and the same batches.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import functools
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.clicks import Clicks, auc
from benchmarks.embedding import DIM, LOOK_UPS, ids_of, report, resident, timed, turns
from benchmarks.embedding_bodies import ClickNetwork
from benchmarks.overhead import machine, positive, progress
from steepest.tables.modules.collection import EmbeddingCollection
from steepest.tables.modules.embedding import connect, tables_of
from steepest.tables.rows.compilation import compile_kernels
from steepest.tables.rows.hashing import Distinct
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.row_optimizers import RowWiseAdagrad
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.table import Table

EXAMPLES = Path(__file__).parent.parent / "examples"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "int8"},
    "bfloat16, slots too": {"dtype": "bfloat16", "slots_dtype": "bfloat16"},
    "int8, bfloat16 slots": {"dtype": "int8", "slots_dtype": "bfloat16"},
}
#: How gradients travel, of rows of float32.
GRADIENTS: dict[str, dict[str, Any]] = {
    f"{name} gradients": {"gradient_dtype": name} for name in ("bfloat16", "float16", "int8")
}
Row = dict[str, Any]
#: Logits of samples, and the training of a network on batches of so many.
Trained = Callable[[nn.Module], float]


def shard_of_rows(how: dict[str, Any], count: int) -> TableShard:
    """So many rows of one table."""
    table = Table("t", DIM, optimizer=RowWiseAdagrad(lr=0.1), **how)
    compile_kernels([table])
    shard = TableShard([table])
    for begin in range(0, count, 1_000_000):
        ids = ids_of(np.arange(begin, min(begin + 1_000_000, count)))
        gradients = np.ones((len(ids), DIM), np.float32)
        shard.push(np.zeros(len(ids), np.int32), ids, gradients, shard.version + 1)
    return shard


def run_memory(millions: int) -> list[Row]:
    found: list[Row] = []
    for name, how in FORMATS.items():
        shard_of_rows(how, 1)
        gc.collect()
        before = resident()
        shard = shard_of_rows(how, millions * 1_000_000)
        each = (resident() - before) / len(shard)
        found.append({"title": "memory", "name": name, "rows": len(shard), "bytes a row": each})
        over = each / found[0]["bytes a row"]
        print(f"{len(shard):,} rows, {name}: {each:.1f} bytes a row, {over:.3f} of float32")
        del shard
    return found


def run_step(rounds: int) -> list[Row]:
    count, random = 2_600_000, np.random.default_rng(0)
    shards = {name: shard_of_rows(how, count) for name, how in FORMATS.items()}
    zeros = np.zeros(LOOK_UPS, np.int32)

    def step(shard: TableShard, ids: np.ndarray, gradients: np.ndarray) -> None:
        form = shard.tables[0].form
        sent = np.empty((len(ids), form.sent_bytes), np.uint8)
        shard.pull_sent(zeros[: len(ids)], ids, sent)
        form.received(sent.reshape(-1))
        shard.push(zeros[: len(ids)], ids, gradients[: len(ids)], shard.version + 1)

    seconds: dict[str, list[float]] = {name: [] for name in shards}
    for number in range(rounds + 2):
        ids = Distinct(zeros, ids_of((random.zipf(1.2, LOOK_UPS) - 1) % count)).ids
        if number == 0:
            progress(f"{len(ids):,} distinct ids of {LOOK_UPS:,}")
        gradients = random.normal(size=(LOOK_UPS, DIM)).astype(np.float32)
        for name in turns(shards, number):
            spent = timed(functools.partial(step, shards[name], ids, gradients))
            if number >= 2:  # the first warm up
                seconds[name].append(spent)
    found: list[Row] = []
    for name in FORMATS:
        mine = {name: seconds[name], "float32": seconds["float32"]}
        found += report(f"a step of {name}", mine, name)
    return found


# -- areas ---------------------------------------------------------------------------------------


def formatted(module: nn.Module, how: dict[str, Any]) -> None:
    """Give a network's embeddings tables of another format."""
    for part in module.modules():
        if isinstance(part, EmbeddingCollection):
            part.tables = tuple(replace(table, **how) for table in part.tables)
            by_name = {table.name: table for table in part.tables}
            part._features = {name: by_name[of.name] for name, of in part._features.items()}


def trained(
    module: nn.Module, how: dict[str, Any], seed: int, optimizer: Any, batches: Any, loss: Any
) -> None:
    """Train a network in this process; its rows begin with a seed."""
    formatted(module, how)
    rows = LocalRows(tables_of(module), seed=seed)
    connect(module, rows)
    for batch in batches:
        optimizer.zero_grad()
        loss(module, batch).backward()
        optimizer.step()
        rows.step()


def adult(how: dict[str, Any], seed: int) -> float:
    sys.path.insert(0, str(EXAMPLES))
    from adult import load
    from wide_and_deep import Network

    train, (ids, numbers, labels) = load(None)
    torch.manual_seed(seed)
    module = Network()
    order = torch.randperm(len(train[0]))
    batches = [[column[part] for column in train] for part in order.split(128)[:-1]]

    def loss(network: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(network(*batch[:2]), batch[2])

    trained(module, how, seed, torch.optim.SGD(module.parameters(), lr=0.1), batches, loss)
    with torch.no_grad():
        scores = module.eval()(ids, numbers)
    return auc(scores.numpy(), labels.numpy())


def clicks(how: dict[str, Any], seed: int) -> float:
    torch.manual_seed(seed)
    module, samples, size = ClickNetwork(DIM), 1_000_000, 4096
    data = Clicks(samples)
    shares = (np.arange(at, at + size) for at in range(0, samples - size, size))

    def loss(network: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(network(*batch[:2]), batch[2])

    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    trained(module, how, seed, optimizer, data.open(shares), loss)
    test = data.samples(samples, samples + 200_000)
    with torch.no_grad():
        scores = module.eval()(torch.from_numpy(test.ids), torch.from_numpy(test.numbers))
    return auc(scores.numpy(), test.labels)


def run_areas(
    name: str, area: Callable[[dict[str, Any], int], float], rounds: int, kinds: Iterable[str]
) -> list[Row]:
    found: list[Row] = []
    for kind, how in (FORMATS | GRADIENTS).items():
        if kind not in kinds:
            continue
        areas = []
        for seed in range(rounds):
            areas.append(area(how, seed))
            progress(f"{name}, {kind}, seed {seed}: {areas[-1]:.4f}")
        found.append({"title": name, "name": kind, "areas": areas})
        wide = found[0]["areas"]
        less = [mine - theirs for mine, theirs in zip(areas, wide, strict=True)]
        print(
            f"{name}, {kind}: test AUC {statistics.mean(areas):.4f}, over float32 "
            f"{statistics.mean(less):+.4f} ({min(less):+.4f} to {max(less):+.4f})"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    kinds = ("memory", "step", "adult", "clicks")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--rounds", type=positive, default=15, help="seeds, of areas")
    every = [*FORMATS, *GRADIENTS]
    parser.add_argument("--kinds", nargs="+", choices=every, default=every, help="of areas")
    parser.add_argument("--millions", type=positive, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = dict.fromkeys(["float32", *arguments.kinds])
    found: list[Row] = []
    if "memory" in arguments.only:
        found += run_memory(arguments.millions)
    if "step" in arguments.only:
        found += run_step(arguments.rounds)
    if "adult" in arguments.only:
        found += run_areas("Adult", adult, arguments.rounds, chosen)
    if "clicks" in arguments.only:
        found += run_areas("clicks", clicks, arguments.rounds, chosen)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
