"""Windows of a log with offsets: each record is in one update, wherever programs end and workers die."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steepest import (
    Callback,
    Checkpoints,
    DistributedSGD,
    OffsetStream,
    StepResult,
    TorchModel,
    next_offsets,
)
from steepest.errors import CheckpointError, ConfigurationError, ModelError
from tests.reference import sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.table_tasks import mostly_long

#: By partition the records, each a number of its own; the log grows by windows.
LOG = {0: range(13), 1: range(13, 20), 7: range(20, 41)}
ENDS = [{0: 5, 1: 7, 7: 0}, {0: 13, 1: 7, 7: 12}, {0: 13, 1: 7, 7: 21}]
RECORDS = 41


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def read(partition: int, offset: int) -> Iterator[int]:
    yield from LOG[partition][offset:]


class Counts(nn.Module):
    """Each record's parameter grows by 1 for each update that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(RECORDS, dtype=torch.float64))

    def forward(self, records: Tensor) -> Tensor:
        return self.counts[records]


class Counting(TorchModel):
    def loss(self, batch: Tensor) -> Tensor:
        return -self.module(batch).sum()


class Killing(Callback):
    """Kills a worker after a step."""

    def __init__(self, simulation: Simulation, step: int) -> None:
        self._simulation, self._step = simulation, step

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step == self._step:
            victims = [p for p in self._simulation.living() if "worker" in str(p)]
            victim = victims[self._step % 2]
            self._simulation.world.kill(victim, "it was killed. connection error code 2.")


def creator(window: Any, block: int = 4) -> Any:
    def create(worker_index: int, device_index: int) -> TorchModel:
        return Counting(
            Counts(),
            data=OffsetStream(read, window, block=block),
            batch_size=2,
            optimizer=sgd(lr=1.0),
            reduction="sum",
        )

    return create


def trained(path: Path, ends: Any, callbacks: Any = (), workers: int = 2, **how: Any) -> Tensor:
    """Train on the next window of the log, as a program of one day does; return each record's count."""
    window = next_offsets(path, ends)
    kept = Checkpoints(path, every=1, keep=1000, data="new")
    settings = {"checkpoints": kept, "run_config": run_config(), **how}
    with DistributedSGD(creator(window), workers, **settings) as trainer:
        trainer.fit(epochs=1, progress=False, callbacks=[*callbacks])
        return trainer.weights()["counts"]


def of_windows(count: int) -> Tensor:
    """What the counts are after so many windows."""
    expected = torch.zeros(RECORDS, dtype=torch.float64)
    for partition, end in ENDS[count - 1].items():
        expected[list(LOG[partition][:end])] = 1
    return expected


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_windows_follow_each_other(tmp_path: Path, workers: int) -> None:
    with Simulation(1).running():
        for day, ends in enumerate(ENDS, 1):
            assert torch.equal(trained(tmp_path, ends, workers=workers), of_windows(day))
            # a program that is started again without new records
            window = next_offsets(tmp_path, ends)
            assert all(begin == end == ends[p] for p, (begin, end) in window.items())
            with pytest.raises(ConfigurationError, match="no partition has a record"):
                OffsetStream(read, window)


@pytest.mark.parametrize("strategy", mostly_long(["ps", "allreduce", "async"]))
def test_a_program_ends_after_any_step(tmp_path: Path, strategy: str) -> None:
    """Each checkpoint, with those before it, is what a program finds that is started again."""
    whole = tmp_path / "whole"
    with Simulation(1).running():
        for ends in ENDS[:2]:
            trained(whole, ends, strategy=strategy)
    found = sorted(path for path in whole.iterdir() if "-step-" in path.name)
    assert len(found) > 6
    for number in range(len(found)):
        again = tmp_path / f"again {number}"
        again.mkdir()
        for path in found[: number + 1]:
            shutil.copytree(path, again / path.name)
        with Simulation(number).running():
            counts = None
            for _ in range(3):  # the rest of the window, and what has come
                if all(begin == end for begin, end in next_offsets(again, ENDS[2]).values()):
                    break
                counts = trained(again, ENDS[2], workers=1 + number % 3, strategy=strategy)
        assert counts is not None
        assert torch.equal(counts, of_windows(3))


@pytest.mark.parametrize("strategy", mostly_long(["ps", "allreduce"], "ps"))
def test_a_worker_dies_at_each_step(tmp_path: Path, strategy: str) -> None:
    for step in range(1, 7):
        simulation, path = Simulation(step), tmp_path / str(step)
        with simulation.running():
            trained(path, ENDS[0], [Killing(simulation, step)], strategy=strategy)
            counts = trained(path, ENDS[1], [Killing(simulation, step)], strategy=strategy)
        assert torch.equal(counts, of_windows(2))


def test_a_window_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    def going_on(window: Any, path: Path, data: str = "new") -> None:
        kept = Checkpoints(path, data=data)
        DistributedSGD(creator(window), 2, checkpoints=kept, run_config=run_config()).shutdown()

    over = tmp_path / "over"
    with Simulation(1).running():
        trained(over, ENDS[0])
        for skipped in (6, 4):
            with pytest.raises(CheckpointError, match="partition '0' goes on at 5"):
                going_on({0: (skipped, 13), 1: (7, 7), 7: (0, 12)}, over)
        with pytest.raises(CheckpointError, match="partition '1' goes on at 7"):
            going_on({0: (5, 13), 7: (0, 12)}, over)
        with pytest.raises(CheckpointError, match=r"it is of the offsets 0: 0 to 5, .*data='new'"):
            going_on({0: (5, 10), 1: (7, 7), 7: (0, 7)}, over, "continue")
        window = next_offsets(tmp_path / "early", ENDS[0])
        kept = Checkpoints(tmp_path / "early", data="new")
        with DistributedSGD(creator(window), 2, checkpoints=kept, run_config=run_config()) as early:
            early.fit(steps=1, progress=False)
        assert next_offsets(tmp_path / "early", ENDS[1]) == window
        with pytest.raises(CheckpointError, match="the pass over the former has not ended"):
            going_on({0: (5, 13), 1: (7, 7), 7: (0, 12)}, tmp_path / "early")
    with pytest.raises(ConfigurationError, match="lacks partition '7'"):
        next_offsets(over, {0: 13, 1: 7})
    with pytest.raises(ConfigurationError, match="partition 1 ends at 3, before 7"):
        next_offsets(over, {0: 13, 1: 3, 7: 0})


def test_a_checkpoint_by_hand_has_offsets_too(tmp_path: Path) -> None:
    with Simulation(1).running():
        window = {0: (0, 13)}
        with DistributedSGD(creator(window), 2, run_config=run_config()) as trainer:
            trainer.step()
            trainer.save(tmp_path / "000001-step-1")
    assert next_offsets(tmp_path, {0: 13}) == window


def test_workers_have_one_window() -> None:
    def unlike(worker_index: int, device_index: int) -> TorchModel:
        found: TorchModel = creator({0: (worker_index, 4 + worker_index)})(0, 0)
        return found

    with Simulation(1).running(), pytest.raises(ModelError, match="offsets"):
        DistributedSGD(unlike, 2, run_config=run_config())


def test_any_record_is_found_at_once() -> None:
    drawn = np.random.default_rng(0)
    for _ in range(30):
        window = {}
        for partition in LOG:
            begin, end = sorted(drawn.integers(0, len(LOG[partition]) + 1, 2).tolist())
            window[partition] = begin, end
        if not sum(end - begin for begin, end in window.values()):
            continue
        stream = OffsetStream(read, window, block=5)
        whole = list(stream._make(0))
        assert sorted(whole) == [r for p, (b, e) in window.items() for r in LOG[p][b:e]]
        for partition, (begin, end) in window.items():  # a partition's records stay in their order
            assert [r for r in whole if r in LOG[partition]] == [*LOG[partition][begin:end]]
        for start in range(len(whole)):
            assert list(stream._make(start)) == whole[start:]


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([(0, 1)], "offsets is a list"),
        ({0: (2, 1)}, "offsets of partition 0 are"),
        ({0: 5}, "offsets of partition 0 are 5"),
        ({0: (0, 1), "0": (0, 1)}, "read alike"),
        ({0: (3, 3)}, "no partition has a record"),
    ],
)
def test_what_is_no_window_is_refused(offsets: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        OffsetStream(read, offsets)


def test_a_partition_that_ends_early_is_named() -> None:
    stream = OffsetStream(read, {1: (0, 8)}, block=8)
    with pytest.raises(ConfigurationError, match="partition 1 ended before offset 7"):
        next(stream.open([np.arange(8)]))
    with pytest.raises(ConfigurationError, match="read is a int"):
        OffsetStream(3, {1: (0, 8)})  # type: ignore[arg-type]
