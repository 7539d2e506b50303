"""A sparse embedding is told of: its gradient is sent dense."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from steepest import DistributedSGD, TorchModel
from steepest.testing.simulation import Simulation, run_config
from tests.reference import sgd

WORDS, SIZE = 1000, 8


def creator(worker: int, device: int, sparse: bool = True, trains: bool = True) -> TorchModel:
    table = nn.Embedding(WORDS, SIZE, sparse=sparse)
    table.weight.requires_grad_(trains)
    return TorchModel(
        nn.Sequential(table, nn.Linear(SIZE, 1)),
        loss=lambda output, target: (output - target).square().mean(),
        data=(torch.arange(12), torch.ones(12, 1)),
        batch_size=2,
        optimizer=sgd(),
    )


def test_the_driver_tells_once_what_a_step_sends(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "steepest"),
        Simulation().running(),
        DistributedSGD(creator, 3, run_config=run_config()) as trainer,
    ):
        before = trainer.stats().bytes_pushed
        trainer.step()
        pushed = trainer.stats().bytes_pushed - before
    (said,) = [r.getMessage() for r in caplog.records if "sparse" in r.getMessage()]
    assert "sparse=True of '0' saves nothing here" in said
    assert f"each worker sends {WORDS * SIZE * 4:,} bytes" in said
    assert pushed == 3 * (WORDS * SIZE + SIZE + 1) * 4


@pytest.mark.parametrize(("sparse", "trains"), [(False, True), (True, False)])
def test_others_are_not_told_of(sparse: bool, trains: bool) -> None:
    assert creator(0, 0, sparse, trains).notice == ""
