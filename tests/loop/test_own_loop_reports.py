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
from tests.own_loop_runs import STRATEGIES, run, without
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
    assert len({*found}) == len(found) == 2 * own
    assert [sum(worker == each for worker, _ in found) for each in range(2)] == [own, own]


def first_reports(parts: Parts, epochs: int) -> None:
    """A loop in which worker 0 reports more than the others, at the top, among the batches, and behind them."""
    for epoch in steepest.epochs(epochs):
        if steepest.rank() == 0:
            steepest.report(begins=epoch)
        for number, (x, y) in enumerate(parts.loader):
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            loss.backward()
            if steepest.rank() == 0 and number % 2 == 0:
                steepest.report(batch=number)
            steepest.report(rank=steepest.rank(), samples=len(x))
            parts.optimizer.step()
            if steepest.rank() == 0:
                steepest.report(first=number, batch=number)
            steepest.report(rank=10 + steepest.rank())
        if steepest.rank() == 0:
            steepest.report(ends=epoch)
        steepest.report(rank=20 + steepest.rank())


def rows_of_first_reports(epochs: int, batches: int) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    for epoch in range(epochs):
        rows.append({"begins": epoch})
        for number in range(batches):
            rows += [{"batch": number}] if number % 2 == 0 else []
            rows.append({"rank": 0.5, "samples": 2})
            rows += [{"first": number, "batch": number}, {"rank": 10.5}]
        rows += [{"ends": epoch}, {"rank": 20.5}]
    return rows


FIRST = Script(first_reports, data=samples(12), epochs=2)


def test_what_one_worker_alone_reports_is_mixed_with_nothing() -> None:
    assert run(FIRST, 2).reports == rows_of_first_reports(2, 3)


@pytest.mark.few(2)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", range(1, 6))
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_so_it_is_where_a_worker_dies(strategy: str, step: int, victim: int) -> None:
    """But for what the dead worker had not sent: of each row it is in, its part may be missing."""
    reports = without(FIRST, 2, victim, step, STRATEGIES[strategy]).reports
    right = rows_of_first_reports(2, 3)
    alone = [{"batch"}, {"begins"}, {"first", "batch"}, {"ends"}]
    lost = [row for row in right if row not in reports]
    assert len(lost) <= 3
    extra = [row for row in reports if row not in right]
    assert all("rank" in row and row["rank"] % 10 == 1 - victim for row in extra), extra
    assert all(set(row) in alone for row in lost if not extra)
