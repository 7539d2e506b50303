"""Checkpoints that earlier releases wrote are read, with the weights of plain PyTorch, and training goes on from them.

`written_by_0_1_0` was written by `write_one`, under "ps" on two servers. A release that changes the format adds a
folder and keeps this one.
"""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from steepest import DistributedSGD, ParameterServerStrategy
from steepest.checkpoint.manifest import FORMAT
from steepest.errors import CheckpointError
from steepest.tables.files.saved_rows import MANIFEST
from tests.checkpoint_contents import edit
from tests.reference import Task, difference
from tests.simulation.run import Simulation

WRITTEN = sorted(Path(__file__).parent.glob("written_by_*"))
STEPS, WORKERS = 10, 2  # 13 samples in batches of 2 by 2 workers: amid the third epoch
TASK = Task(
    optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=0.01),
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
)


def write_one(path: Path) -> None:
    """Write the checkpoint of a new release; run once, and kept."""
    strategy = ParameterServerStrategy(num_servers=2, chunk_bytes=64)
    with (
        Simulation(1).running(),
        DistributedSGD(TASK.creator(), WORKERS, strategy=strategy) as trainer,
    ):
        trainer.fit(steps=STEPS, progress=False)
        trainer.save(path)


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
@pytest.mark.parametrize("written", WRITTEN, ids=lambda path: path.name)
def test_training_goes_on_from_what_an_earlier_release_wrote(
    written: Path, strategy: str, tmp_path: Path
) -> None:
    shutil.copytree(written, tmp_path / "copy")
    trace = TASK.trace(WORKERS, STEPS + 8)
    with (
        Simulation(2).running(),
        DistributedSGD(TASK.creator(), WORKERS, strategy=strategy, seed=0) as trainer,
    ):
        trainer.restore(tmp_path / "copy")
        assert difference(trainer.weights(), trace[STEPS]) < 1e-12
        trainer.fit(steps=8, progress=False)  # with its moments, schedule and place in the data
        assert difference(trainer.weights(), trace[-1]) < 1e-12


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            {},
            "",
        ),  # older torch has none of the switches that are off by default, or says how AdamW decays
        ({"0.amsgrad": False, "0.new": False, "0.decoupled_weight_decay": False}, ""),
        ({"0.amsgrad": True}, r"it has flags \{'0.amsgrad': True\}, this job has \{\}"),
        ({"0.new": True}, r"it has flags \{'0.new': True\}"),
    ],
)
def test_switches_of_another_version_of_torch(
    theirs: dict[str, bool], message: str, tmp_path: Path
) -> None:
    shutil.copytree(WRITTEN[0], tmp_path / "copy")
    edit(tmp_path / "copy", lambda manifest: manifest | {"flags": theirs})
    with Simulation(2).running(), DistributedSGD(TASK.creator(), WORKERS) as trainer:
        with pytest.raises(CheckpointError, match=message) if message else nullcontext():
            trainer.restore(tmp_path / "copy")
        assert trainer.fit(steps=1, progress=False).step == (1 if message else STEPS + 1)


def test_the_format_of_this_release_is_kept() -> None:
    assert WRITTEN
    formats = {json.loads((path / MANIFEST).read_text())["format"] for path in WRITTEN}
    assert FORMAT in formats, f"write a checkpoint of format {FORMAT} by write_one, and keep it"
    for path in WRITTEN:
        assert sum(file.stat().st_size for file in path.iterdir()) < 50_000
