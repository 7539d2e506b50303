"""Random schedules of saves, increments, restores, resizes, imports and kills, beside a dict of what rows are then."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steepest import (
    Checkpoints,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    TorchModel,
)
from steepest.core.engine.job import ModelCreator
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.initial import Constant
from steepest.tables.rows.row_optimizers import SGD, Adagrad
from tests.reference import sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.step_callbacks import Watch
from tests.table_tools import table

#: A step has all of them: powers of two, so that means are exact.
IDS = torch.tensor([5, 9, 5, 2, 7, 5, 1000, 9, 3, 2, 40, 41, 5, 2**40, 0, 9])
FIRST, DIM = 0.5, 3
ACTIONS = [
    *(["epoch"] * 3),
    *(["save"] * 2),
    "restore",
    "import",
    "resize",
    "kill",
    "reopen",
]
OPTIMIZERS = {"words": SGD(lr=1.0), "others": Adagrad(lr=0.25)}
#: Of each table by id: values and slots.
Rows = dict[str, dict[int, tuple[Tensor, Tensor]]]


class TwoTables(nn.Module):
    """Rows of a table with SGD and of one with Adagrad, added up."""

    def __init__(self, on_disk: dict[str, Any]) -> None:
        super().__init__()
        about = {"initial": Constant(FIRST), "dtype": "float64"} | on_disk
        self.words, self.others = (
            Embedding(table(name, DIM, optimizer=optimizer, **about))
            for name, optimizer in OPTIMIZERS.items()
        )
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.words(ids).sum(-1) + self.others(ids).sum(-1) + self.bias
        return found


def creator(shards: int, on_disk: dict[str, Any]) -> ModelCreator:
    """Two workers of it, whose step has all ids."""

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            TwoTables(on_disk),
            loss=lambda output, target: output.mean(),
            data=(IDS, torch.zeros(len(IDS))),
            batch_size=len(IDS) // 2,
            optimizer=sgd(),
            table_shards=shards,
        )

    return create


def trained(rows: Rows) -> None:
    """Do to a dict what a step does to rows."""
    optimizer = OPTIMIZERS["others"]
    assert isinstance(optimizer, Adagrad)
    for each, count in Counter(IDS.tolist()).items():
        gradient = torch.full((DIM,), count / len(IDS), dtype=torch.float64)
        first = torch.full((DIM,), FIRST, dtype=torch.float64)
        value, slots = rows["words"].get(each, (first, first[:0]))
        rows["words"][each] = value - gradient, slots
        value, slots = rows["others"].get(each, (first, 0 * first))
        slots = slots + gradient * gradient
        rows["others"][each] = (
            value - optimizer.lr * (gradient / (slots.sqrt() + optimizer.eps)),
            slots,
        )


class Schedule:
    """One job after the other over the same checkpoints, and the rows that the last one has to have.

    Args:
        seed: of what is done; with an odd one most rows are on disk.
        folder: of checkpoints.
        simulated: whether jobs are simulations; else their processes are real.
    """

    def __init__(self, seed: int, folder: Path, *, simulated: bool) -> None:
        self.random, self.folder = random.Random(seed), folder
        self.on_disk = {"directory": str(folder / "rows"), "memory_rows": 4} if seed % 2 else {}
        self.simulation = Simulation(seed, switches=10**6) if simulated else None
        self.rows: Rows = {name: {} for name in OPTIMIZERS}
        self.saved: list[tuple[Path, Rows, int]] = []
        # epochs done; and those of them that a `fit` of this job will count as its own
        self.epochs = self.ahead = 0
        self.done: list[str] = []

    @contextlib.contextmanager
    def job(self) -> Iterator[DistributedSGD]:
        """A job of a random number of servers and shards, which goes on from the newest checkpoint."""
        servers, shards = self.random.choice([1, 2, 3]), self.random.choice([1, 2, 5])
        self.done.append(f"{servers} servers, {shards} shards")
        strategy = ParameterServerStrategy(num_servers=servers)
        kept = Checkpoints(self.folder / "kept", every=1, keep=2, increments=3)
        failure = FailureConfig(snapshot_every=1)
        settings: Any = {"strategy": strategy, "checkpoints": kept}
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())
            if self.simulation is not None:
                stack.enter_context(self.simulation.running())
                settings["run_config"] = run_config(failure=failure)
            else:
                settings["run_config"] = RunConfig(failure=failure)
            yield stack.enter_context(DistributedSGD(creator(shards, self.on_disk), 2, **settings))

    def run(self, actions: int) -> None:
        """Do so many things, and compare after each."""
        left = [self.random.choice(ACTIONS) for _ in range(actions)]
        while left:
            with self.job() as trainer:
                self.ahead = self.epochs
                self.check(trainer)
                while left:
                    self.done.append(action := left.pop())
                    if action == "reopen":
                        break
                    self.do(trainer, action)
                    self.check(trainer)

    def do(self, trainer: DistributedSGD, action: str) -> None:
        """Do one thing, to the job and to the dict."""
        if action in ("epoch", "kill"):
            count = 1 + (action == "kill")
            die = Watch((trainer.stats().step + 1, lambda: self.kill(trainer)))
            trainer.fit(epochs=self.ahead + count, callbacks=[die][: count - 1], progress=False)
            self.epochs, self.ahead = self.epochs + count, 0
            for _ in range(count):
                trained(self.rows)
        elif action == "save":
            place = self.folder / f"saved {len(self.saved) % 2}"
            trainer.save(place)
            self.saved = [each for each in self.saved if each[0] != place]
            self.saved.append((place, deepcopy(self.rows), self.epochs))
        elif action == "restore" and self.saved:
            place, rows, self.epochs = self.random.choice(self.saved)
            self.rows, self.ahead = deepcopy(rows), 0
            trainer.restore(place)
        elif action == "import":
            name = self.random.choice(list(OPTIMIZERS))
            ids = self.random.sample([5, 7, 40, 77, 2**62], 2)
            values = torch.tensor([[self.random.random()] * DIM for _ in ids], dtype=torch.float64)
            trainer.import_table(name, (torch.tensor(ids), values))
            first = OPTIMIZERS[name].first_slots(DIM)
            slots = torch.tensor(first, dtype=torch.float64)
            self.rows[name] |= {
                each: (value, slots) for each, value in zip(ids, values, strict=True)
            }
        elif action == "resize":
            trainer.resize(num_servers=self.random.choice([1, 2, 3]))

    def kill(self, trainer: DistributedSGD) -> None:
        """Kill a process."""
        if self.simulation is None:
            found = sorted({process.pid for process in trainer.processes()} - {os.getpid()})
            os.kill(self.random.choice(found), signal.SIGKILL)
            return
        victim = self.random.choice(sorted(self.simulation.living(), key=str))
        self.simulation.world.kill(victim, "it was killed. connection error code 2.")

    def check(self, trainer: DistributedSGD) -> None:
        """Compare the rows of a job with those of the dict, to the bit."""
        for name, rows in self.rows.items():
            found = trainer.export_table(name)
            assert found.ids.tolist() == sorted(rows), (name, self.done)
            if not rows:
                continue
            expected = torch.stack([rows[each][0] for each in sorted(rows)])
            assert torch.equal(found.values, expected), (name, self.done)
            some = self.random.sample(sorted(rows), min(3, len(rows)))
            for row in trainer.describe_rows(name, some):
                slots = rows[row.id][1]
                assert row.slots is not None
                assert torch.equal(row.slots, slots), (name, self.done)
