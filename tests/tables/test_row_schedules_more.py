"""Random schedules of saves, increments, restores, resizes, imports and kills, beside a dict of what rows are then."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import (
    Checkpoints,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
)
from steepest.checkpoint import row_pieces
from steepest.embedding import row_writer, table_chunk
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.step_callbacks import Watch
from tests.table_jobs import FIRST, IDS, trainer, words

ACTIONS = (
    "epoch",
    "epoch",
    "epoch",
    "save",
    "save",
    "restore",
    "import",
    "resize",
    "kill",
    "reopen",
)


class Schedule:
    """One job after the other over the same checkpoints, and the rows that the last one has to have."""

    def __init__(self, seed: int, folder: Path, change: float) -> None:
        self.random, self.folder, self.change = random.Random(seed), folder, change
        self.rows: dict[int, torch.Tensor] = {}  # by id
        self.saved: list[tuple[Path, dict[int, torch.Tensor], int]] = []
        self.epochs = self.ahead = (
            0  # done; and those of them that a `fit` of this job will count as its own
        )
        self.done: list[str] = []

    @contextlib.contextmanager
    def job(self) -> Iterator[DistributedSGD]:
        """A job of a random number of servers and shards, which goes on from the newest checkpoint."""
        strategy = ParameterServerStrategy(num_servers=self.random.choice([1, 2, 3]))
        kept = Checkpoints(self.folder / "kept", every=1, keep=2, increments=3)
        config = run_config(failure=FailureConfig(snapshot_every=1))
        create = words(IDS, shards=self.random.choice([1, 2, 5]))
        self.simulation = Simulation(self.random.randrange(1000), switches=10**6)
        settings: Any = {"run_config": config, "checkpoints": kept}
        with quiet(), trainer(create, strategy, simulation=self.simulation, **settings) as sgd:
            yield sgd

    def run(self, actions: int) -> None:
        """Do so many things, and compare after each."""
        left = [self.random.choice(ACTIONS) for _ in range(actions)]
        while left:
            with self.job() as sgd:
                self.ahead = self.epochs
                self.check(sgd)
                while left:
                    self.done.append(action := left.pop())
                    if action == "reopen":
                        break
                    self.do(sgd, action)
                    self.check(sgd)

    def do(self, sgd: DistributedSGD, action: str) -> None:
        """Do one thing, to the job and to the dict."""
        if action in ("epoch", "kill"):
            watched = []
            if action == "kill":
                watched = [Watch((sgd.stats().step + 1, self.kill))]
            sgd.fit(epochs=self.ahead + 1, callbacks=watched, progress=False)
            self.epochs, self.ahead = self.epochs + 1, 0
            for each, count in Counter(IDS.tolist()).items():
                before = self.rows.get(each, torch.full((3,), FIRST, dtype=torch.float64))
                self.rows[each] = before - count * self.change
        elif action == "save":
            place = self.folder / f"saved {len(self.saved) % 2}"
            sgd.save(place)
            self.saved = [each for each in self.saved if each[0] != place]
            self.saved.append((place, dict(self.rows), self.epochs))
        elif action == "restore" and self.saved:
            place, rows, self.epochs = self.random.choice(self.saved)
            self.rows, self.ahead = dict(rows), 0
            sgd.restore(place)
        elif action == "import":
            ids = self.random.sample([5, 7, 40, 77, 2**62], 2)
            values = torch.tensor([[self.random.random()] * 3 for _ in ids], dtype=torch.float64)
            sgd.import_table("words", (torch.tensor(ids), values))
            self.rows |= dict(zip(ids, values, strict=True))
        elif action == "resize":
            sgd.resize(num_servers=self.random.choice([1, 2, 3]))

    def kill(self) -> None:
        """Kill a process."""
        victim = self.random.choice(sorted(self.simulation.living(), key=str))
        self.simulation.world.kill(victim, "it was killed. connection error code 2.")

    def check(self, sgd: DistributedSGD) -> None:
        """Compare the rows of a job with those of the dict."""
        found = sgd.export_table("words")
        assert found.ids.tolist() == sorted(self.rows), self.done
        expected = [self.rows[each] for each in found.ids.tolist()]
        if expected:
            assert torch.allclose(found.values, torch.stack(expected), rtol=0, atol=1e-12), (
                self.done
            )


def change_of_a_row() -> float:
    """By how much a step moves the row of an id that one sample has."""
    with trainer(words(IDS)) as sgd:
        sgd.fit(epochs=1, progress=False)
        found = sgd.export_table("words")
    return float(FIRST - found.look_up(torch.tensor([1000]))[0, 0])


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(20, 160))
def test_rows_are_those_of_a_dict_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(table_chunk, "_PIECE_BYTES", 150)
    monkeypatch.setattr(row_pieces, "PIECE_BYTES", 150)
    monkeypatch.setattr(row_writer, "PART_BYTES", 200)
    Schedule(seed, tmp_path, change_of_a_row()).run(12)
