"""What loops of users' own report: each call counts once, also where a program was killed and goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest.observe.history_file import REPORTS, read_rows
from tests.own_loop_runs import STRATEGIES, run
from tests.own_loops import Parts, Script
from tests.reference import samples
from tests.simulated_programs import quiet


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def reporting(parts: Parts, epochs: int) -> None:
    """Reports before and after each step, behind the loop over the batches, and at the end."""
    for epoch in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            loss.backward()
            steepest.report(before=loss)
            parts.optimizer.step()
            steepest.report(after=steepest.gather(loss.detach()).mean(), epoch=epoch)
        steepest.report(at_the_end=steepest.gather(loss.detach()).mean())
    steepest.report(over=torch.tensor(1.0))


SCRIPT = Script(reporting, data=samples(12), epochs=2)


def calls(folder: Path) -> list[tuple[int, int]]:
    return [(row["worker"], row["call"]) for row in read_rows(folder, REPORTS) if row]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
@pytest.mark.parametrize("workers", [2, 1])
def test_what_was_reported_before_the_program_was_killed_is_kept_with_checkpoints(
    workers: int, strategy: str, tmp_path: Path
) -> None:
    whole = run(
        SCRIPT,
        workers,
        STRATEGIES[strategy],
        checkpoints=steepest.Checkpoints(tmp_path / "run", every=1, keep=100),
    )
    assert whole.reports == run(SCRIPT, workers, STRATEGIES[strategy]).reports
    kept = sorted(each for each in (tmp_path / "run").iterdir() if "-step-" in each.name)
    for number in range(1, len(kept), 2):
        folder: Any = shutil.copytree(tmp_path / "run", tmp_path / str(number))
        for later in kept[number:]:
            shutil.rmtree(folder / later.name)
        again = run(
            SCRIPT,
            workers,
            STRATEGIES[strategy],
            checkpoints=steepest.Checkpoints(folder, every=100),
        )
        assert again.reports == whole.reports
        assert again.steps[-1]["step"] == whole.steps[-1]["step"]


@pytest.mark.few(1)
@pytest.mark.parametrize("every", [100, 1])
def test_each_call_is_sent_with_one_step(every: int, tmp_path: Path) -> None:
    """A push that carried all since the last checkpoint would grow from step to step."""
    run(SCRIPT, 2, checkpoints=steepest.Checkpoints(tmp_path / "run", every=every))
    found = calls(tmp_path / "run")
    own = 2 * (2 * 3 + 1) + 1
    assert {*found} == {(worker, call) for worker in range(2) for call in range(own)}
    assert len(found) == 2 * own
