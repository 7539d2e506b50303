"""A run that goes on from a checkpoint with its data cut in another way, or after local training, goes on exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from steepest import DistributedSGD, IndexedStream, LocalStrategy
from steepest.checkpoint import files
from steepest.core.strategies.strategy import Strategy
from tests.counted_streams import BATCH, LENGTH, Recorded, counting
from tests.reference import Task, difference, samples, sgd
from tests.whole_checkpoints import all_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("simulated")]


class Numbered(Dataset[Any]):
    """The same samples as `Recorded` streams, all shuffled."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> tuple[int, int]:
        return number, 0


def stream(block: int) -> Callable[[], Any]:
    return lambda: IndexedStream(Recorded(), LENGTH, block)


def visits(trainer: DistributedSGD) -> list[int]:
    return [round(count) for count in trainer.weights()["visits"].tolist()]


def older(path: Path) -> Path:
    """A checkpoint as earlier versions wrote it."""
    saved = all_of(path)
    assert {"begun", "updates"} <= saved.about.keys()
    told = {
        key: value
        for key, value in saved.about.items()
        if key not in ("format", "begun", "updates")
    }
    files.write(path.parent / "older", replace(saved, about=told))
    return path.parent / "older"


@pytest.mark.parametrize(
    ("before", "after"),
    [(stream(7), stream(5)), (Numbered, stream(6))],
    ids=["other blocks", "another source"],
)
def test_an_epoch_ends_in_the_order_in_which_it_was_begun(
    tmp_path: Path,
    before: Callable[[], Any],
    after: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with DistributedSGD(counting(before, 2 * BATCH), num_workers=2) as first:
        first.fit(epochs=1, progress=False)
        first.save(tmp_path / "end")
        first.fit(steps=1, progress=False)
        assert sorted(visits(first)) == [1] * 16 + [2] * 8
        first.save(tmp_path / "middle")
        with DistributedSGD(counting(after, BATCH), num_workers=1) as second:
            second.restore(tmp_path / "end")
            assert not caplog.records
            second.save(tmp_path / "same end")
            about = all_of(tmp_path / "same end").about
            assert (about["step"], about["epoch"], about["offset"]) == (3, 1, 0)
            assert not about["left"]
            assert not about["begun"]
            second.restore(tmp_path / "middle")
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            assert "epoch 1 ends in the order in which it was begun" in record.getMessage()
            second.fit(steps=1, progress=False)
            second.set_strategy("simple")
            second.fit(steps=1, progress=False)
            assert sorted(visits(second)) == [1] * 8 + [2] * 16
            second.save(tmp_path / "later")
            second.fit(steps=2, progress=False)
            assert visits(second) == [2] * LENGTH
            second.fit(epochs=1, progress=False)
            assert visits(second) == [3] * LENGTH
        for path in (tmp_path / "later", older(tmp_path / "middle")):
            first.restore(path)
            first.fit(epochs=1, progress=False)
            assert visits(first) == [2] * LENGTH
        assert len(caplog.records) == 1


def rate(step: int) -> float:
    return 0.3 * 0.9**step


SCHEDULED = Task(optimizer=sgd(momentum=0.5), data=samples(64), learning_rate=rate)
LOCAL = LocalStrategy(sync_every=4)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("ps", 1), ("simple", 2), ("async", 1), (LocalStrategy(sync_every=2), 2)],
)
def test_the_schedule_goes_on_after_local_training(
    tmp_path: Path, strategy: str | Strategy, workers: int
) -> None:
    """A step of local training is several updates; a checkpoint tells how many there were."""
    with DistributedSGD(SCHEDULED.creator(), num_workers=workers) as trainer:
        trainer.fit(steps=3, progress=False)
        trainer.set_strategy(LOCAL)
        trainer.fit(steps=2, progress=False)
        trainer.save(tmp_path / "saved")
        trainer.set_strategy(strategy)
        trainer.fit(steps=2, progress=False)
        expected = trainer.weights()
        trainer.set_strategy(LOCAL)
        trainer.fit(steps=1, progress=False)
        trainer.set_strategy(strategy)
        trainer.restore(tmp_path / "saved")
        assert trainer.stats().step == 5
        trainer.fit(steps=2, progress=False)
        assert difference(trainer.weights(), expected) < 1e-12
        trainer.restore(older(tmp_path / "saved"))
        trainer.fit(steps=2, progress=False)
        assert difference(trainer.weights(), expected) < 1e-12
