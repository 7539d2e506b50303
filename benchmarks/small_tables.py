"""A small model of tables beside plain torch: GMF with 16 factors on data of the size of MovieLens-1M.

    python -m benchmarks.small_tables                         # plain torch, and two workers with "ps" and "async"
    python -m benchmarks.small_tables --steps 500 --rounds 3 --only torch ps "ps replicated"

6,040 users, 3,706 items, 200,000 pairs by a power law, each with 4 drawn negatives; 2,048 pairs a step, Adagrad for
rows, SGD for the weights of the factors. Contenders:

``torch``             one process, `torch.nn.Embedding`, `torch.optim.Adagrad`: dense gradients
``torch sparse``      the same with sparse gradients
``fbgemm``            the same with FBGEMM's kernels for rows, whose backward pass updates them; it needs
                      `pip install --no-deps fbgemm-gpu-cpu==1.8.0` beside torch 2.13, in an environment of its own
``ps``, ``async``     two workers and one server, rows on the server
``ps one shard``      the same with the number of each table's rows told, so that a table has one shard instead of eight
``... replicated``    the same with tables that workers hold as weights

Times are of one step, of 2,048 pairs, in milliseconds: by the wall clock, and of the processor in all processes
together, also by kind of process. An asynchronous step is two updates of half as many
pairs. The contenders take
turns, odd rounds in reverse order; a ratio is the median over rounds of a contender's time over that of ``torch`` in
the same round. On a machine that does other things at the same time, processor time says more.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import contextlib
import importlib
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
from torch.nn.functional import logsigmoid

from benchmarks.job_processes import processes
from benchmarks.overhead import positive
from steepest import DistributedSGD, Embedding, Table, TorchModel
from steepest.tables import Adagrad, Normal

USERS, ITEMS, FACTORS, NEGATIVES, PAIRS, BATCH = 6040, 3706, 16, 4, 200_000, 2048
RATE = 0.1
TICKS = os.sysconf("SC_CLK_TCK")
Spent = dict[
    str, float
]  # milliseconds a step: "wall", "processor", and the processor's by kind of process


class Pairs(torch.utils.data.Dataset[Any]):
    """Pairs that were seen, each with items that are drawn anew; a batch is drawn by one call."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.users = torch.randint(USERS, (PAIRS,), generator=generator)
        self.items = (torch.rand(PAIRS, generator=generator) ** 3 * ITEMS).long()

    def __len__(self) -> int:
        return PAIRS

    def __getitems__(self, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = torch.as_tensor(numbers)
        drawn = torch.randint(ITEMS, (len(wanted), NEGATIVES))
        return self.users[wanted], torch.cat([self.items[wanted, None], drawn], 1)


def as_it_is(batch: Any) -> Any:
    return batch


class Gmf(torch.nn.Module):
    """Generalised matrix factorisation (He et al., "Neural collaborative filtering", 2017)."""

    def __init__(self, users: torch.nn.Module, items: torch.nn.Module) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.factors = torch.nn.Linear(FACTORS, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        both = self.users(users)[:, None] * self.items(items)
        scores: torch.Tensor = self.factors(both)[..., 0]
        return scores


def loss_of(module: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss of BPR of a batch."""
    scores = module(*batch)
    return -logsigmoid(scores[:, :1] - scores[:, 1:]).mean()


class Model(TorchModel):
    """GMF of tables."""

    def loss(self, batch: Any) -> torch.Tensor:
        return loss_of(self.module, batch)


def model_of(settings: dict[str, Any], workers: int) -> Any:
    def create(worker_index: int, device_index: int) -> Model:
        how = {"optimizer": Adagrad(lr=RATE), "initial": Normal(std=0.1), **settings}
        named = {"users": USERS, "items": ITEMS}
        if "replicate" in settings:
            tables = [Table(name, FACTORS, num_embeddings=n, **how) for name, n in named.items()]
        else:
            tables = [Table(name, FACTORS, **how) for name in named]
        data = torch.utils.data.DataLoader(
            Pairs(), batch_size=BATCH // workers, shuffle=True, collate_fn=as_it_is
        )
        return Model(
            Gmf(*map(Embedding, tables)),
            data=data,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=RATE),
        )

    return create


class Contender(Protocol):
    """What takes steps."""

    def turn(self, steps: int) -> Spent:
        """Take steps; return what one of them took."""

    def end(self) -> None:
        """End its processes."""


class FbgemmRows(torch.nn.Module):
    """Rows that FBGEMM looks up as bags of one id, and updates in the backward pass as torch's Adagrad does."""

    def __init__(self, count: int) -> None:
        super().__init__()
        of = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        table = count, FACTORS, common.EmbeddingLocation.HOST, of.ComputeDevice.CPU
        adagrad = configs.EmbOptimType.EXACT_ADAGRAD
        self.rows = of.SplitTableBatchedEmbeddingBagsCodegen(
            [table], optimizer=adagrad, learning_rate=RATE, eps=1e-10
        )
        torch.nn.init.normal_(self.rows.split_embedding_weights()[0], std=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rows(ids.reshape(-1), torch.arange(ids.numel() + 1))
        return found.reshape(*ids.shape, FACTORS)


class Plain:
    """One process of plain torch."""

    def __init__(self, *, sparse: bool = False, fbgemm: bool = False) -> None:
        torch.manual_seed(0)
        sizes = USERS, ITEMS
        self.optimizers: list[torch.optim.Optimizer] = []
        if fbgemm:
            self.module = Gmf(*map(FbgemmRows, sizes))
        else:
            self.module = Gmf(*(torch.nn.Embedding(n, FACTORS, sparse=sparse) for n in sizes))
            rows = [*self.module.users.parameters(), *self.module.items.parameters()]
            for parameter in rows:
                torch.nn.init.normal_(parameter, std=0.1)
            self.optimizers.append(torch.optim.Adagrad(rows, lr=RATE))
        self.optimizers.append(torch.optim.SGD(self.module.factors.parameters(), lr=RATE))
        self.loader = torch.utils.data.DataLoader(
            Pairs(), batch_size=BATCH, shuffle=True, collate_fn=as_it_is, drop_last=True
        )
        self.batches = iter(self.loader)

    def turn(self, steps: int) -> Spent:
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            if (batch := next(self.batches, None)) is None:
                self.batches = iter(self.loader)
                batch = next(self.batches)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss_of(self.module, batch).backward()
            for optimizer in self.optimizers:
                optimizer.step()
        wall, processor = time.perf_counter() - begin, time.process_time() - cpu
        return {"wall": 1e3 * wall / steps, "processor": 1e3 * processor / steps}

    def end(self) -> None:
        """Do nothing."""


class Job:
    """A job of steepest on Ray."""

    def __init__(self, strategy: str, settings: dict[str, Any], workers: int = 2) -> None:
        self.updates = 1 if strategy == "ps" else workers
        self.sgd = DistributedSGD(
            model_of(settings, workers), workers, strategy=strategy, gpu=False
        )

    def turn(self, steps: int) -> Spent:
        before, begin = seconds_by_process(), time.perf_counter()
        self.sgd.fit(steps=steps, progress=False)
        wall, after = time.perf_counter() - begin, seconds_by_process()
        spent = {"wall": 1e3 * wall / steps, "processor": 0.0}
        for name in sorted(
            after.keys() & before.keys()
        ):  # not those of which a start is in the figures
            seconds = after[name]
            took = 1e3 * (seconds - before[name]) / steps
            spent["processor"] += took
            kind = name.split(" ")[0]
            spent[kind] = spent.get(kind, 0.0) + took
        return spent

    def end(self) -> None:
        self.sgd.shutdown()


def seconds_by_process() -> dict[str, float]:
    """Return the processor time of this process, and of the processes of jobs."""
    found = {"driver": time.process_time()}
    for name, pid in processes().items():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[name] = (int(stat[11]) + int(stat[12])) / TICKS
    return found


REPLICATED = {"replicate": True}
CONTENDERS: dict[str, Any] = {
    "torch": Plain,
    "torch sparse": lambda: Plain(sparse=True),
    "fbgemm": lambda: Plain(fbgemm=True),
    "ps": lambda: Job("ps", {}),
    "async": lambda: Job("async", {}),
    "ps one shard": lambda: Job("ps", {"replicate": False}),  # as their number of rows is told
    "ps replicated": lambda: Job("ps", REPLICATED),
    "async replicated": lambda: Job("async", REPLICATED),
}


def measure(names: list[str], steps: int, rounds: int) -> dict[str, list[Spent]]:
    """Return what a step of each contender took in each round."""
    found: dict[str, list[Spent]] = {name: [] for name in names}
    for round_number in range(rounds):
        for name in names if round_number % 2 == 0 else reversed(names):
            contender: Contender = CONTENDERS[name]()
            try:
                contender.turn(20)
                found[name].append(contender.turn(steps))
            finally:
                contender.end()
            print(name, {k: round(v, 2) for k, v in found[name][-1].items()}, flush=True)
    return found


def table(found: dict[str, list[Spent]]) -> str:
    """Return medians over rounds, and ratios to ``torch``, as a table."""
    lines = [f"{'ms a step':18}{'wall':>8}{'ratio':>8}{'processor':>11}{'ratio':>8}  by process"]
    for name, spent in found.items():
        line = f"{name:18}"
        for what, width in (("wall", 8), ("processor", 11)):
            ratio = statistics.median(
                own[what] / torchs[what] for own, torchs in zip(spent, found["torch"], strict=True)
            )
            line += f"{statistics.median(each[what] for each in spent):{width}.2f}{ratio:8.2f}"
        kinds = [kind for kind in spent[0] if kind not in ("wall", "processor")]
        each = (f"{kind} {statistics.median(s[kind] for s in spent):.2f}" for kind in kinds)
        lines.append(f"{line}  {', '.join(each)}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small_tables", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--rounds", type=positive, default=5)
    usual = [name for name in CONTENDERS if name != "fbgemm"]
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=usual)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = list(dict.fromkeys(["torch", *options.only]))
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    print(table(measure(names, options.steps, options.rounds)))
    ray.shutdown()


if __name__ == "__main__":
    main()
