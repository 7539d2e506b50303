"""The same loop under several strategies in turn, each for a bounded time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import steepest
from steepest.cli import main
from steepest.loop.comparison import try_strategy
from steepest.observe.comparison import TriedStrategy
from tests.own_loop_runs import run
from tests.reference import perceptron, samples
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config

EPOCHS = 50


def train() -> None:
    """A loop that takes a tenth of a second for each batch."""
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.utils.data.TensorDataset(*samples(12))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader = steepest.prepare(model, optimizer, loader)
    for _ in steepest.epochs(EPOCHS):
        for x, y in loader:
            pause(0.1)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


def tried(strategy: str, seconds: float, workers: int = 2, **chosen: Any) -> TriedStrategy:
    with quiet(), Simulation(seed=1).running():
        return try_strategy(
            train, strategy, seconds, num_workers=workers, **{"run_config": run_config(), **chosen}
        )


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "local", "async"])
def test_a_strategy_is_tried_for_so_long_as_was_said(strategy: str) -> None:
    trial = tried(strategy, 3.0)
    assert (trial.ended, trial.failed) == ("after 3 s", False)
    steps = [row for row in trial.rows if row["kind"] == "step"]
    took = steps[-1]["time"] - steps[0]["time"]  # virtual; results of steps come in bursts
    assert 3.0 <= took < (5.0 if strategy == "local" else 3.5)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_until_then_it_is_the_run_that_it_would_be(workers: int) -> None:
    trial = tried("ps", 1.0, workers)
    with quiet():
        whole = run(train, workers).steps
    found = [(row["step"], row["loss"]) for row in trial.rows if row["kind"] == "step"]
    assert 1 < len(found) < len(whole)
    assert found == [(row["step"], row["loss"]) for row in whole[: len(found)]]


def test_a_run_that_ends_before_is_told_so() -> None:
    trial = tried("ps", 1e6)
    assert (trial.ended, trial.failed) == ("by itself", False)
    samples_seen = sum(row["samples"] for row in trial.rows if row["kind"] == "step")
    assert samples_seen == 12 * EPOCHS


def test_a_strategy_that_the_job_refuses_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def simulated(function: Any, strategy: str, seconds: float, **chosen: Any) -> TriedStrategy:
        assert chosen.pop("num_workers") == 2
        assert chosen.pop("run_config").runtime == "auto"
        return tried(strategy, seconds, **chosen)

    monkeypatch.setattr("steepest.loop.comparison.try_strategy", simulated)
    monkeypatch.setattr("steepest.cli.compare.begun", lambda runtime: quiet())
    monkeypatch.setattr("steepest.cli.compare.chart_script", lambda: "var Plotly = {};")
    script, page, table = (tmp_path / name for name in ("train.py", "a.html", "a.csv"))
    script.write_text("")
    command = ["compare", str(script), "--strategies", "async,ps", "--minutes", "0.05"]
    command += ["--global-batch-size", "4", "-o", str(page), "-o", str(table)]
    assert main.main(command) == 0
    out = capsys.readouterr().out
    assert "global_batch_size=4 under 'async'" in out
    assert "Take ps: it is the only one that has trained." in out
    found = re.search(r'id="data">(.*?)</script>', page.read_text())
    assert found is not None
    data = json.loads(found[1])
    assert [row[0] for row in data["rows"]] == ["async", "ps"]
    assert data["rows"][0][-1].startswith("ConfigurationError: global_batch_size=4")
    assert data["runs"][0]["curves"] is None
    lines = table.read_text().splitlines()
    assert data["runs"][1]["curves"]["step"] == [int(line.split(",")[1]) for line in lines[1:]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--strategies", "ps,nosuch"], "strategy='nosuch': give one of"),
        (["--strategies", ","], "--strategies: give at least one"),
        (["--minutes", "0"], "--minutes 0.0: give a number above 0"),
        (["--minutes", "nan"], "--minutes nan: give a number above 0"),
        (["--workers", "0"], "--workers 0: give a number from 1 on"),
        (["--seeds", "0"], "--seeds 0: give a number from 1 on"),
        (["--validation", "right:most"], "--validation right:most: give the name"),
        (["-o", "a.pdf"], "a.pdf: give a name that ends with one of .html, .csv, .png"),
        (["-o", "no/such/a.csv"], "no/such is no directory"),
        (["-o", "a.csv"], "cannot run no_script.py"),
    ],
)
def test_bad_input_is_told_before_anything_starts(
    given: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(runtime: str) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr("steepest.cli.compare.begun", start)
    assert main.main(["compare", "no_script.py", *given]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "extra"), [("html", "steepest[page]"), ("png", "steepest[bench]")]
)
def test_what_a_page_and_a_picture_need_is_told_before_anything_starts(
    ending: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("cli.files", "observe.page.document"):
        monkeypatch.setattr(f"steepest.{module}.find_spec", lambda name: None)
    assert main.main(["compare", __file__, "-o", f"a.{ending}"]) == 1
    assert f"pip install '{extra}'" in capsys.readouterr().err


def test_each_strategy_runs_with_each_seed_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[tuple[str, int]] = []

    def simulated(function: Any, strategy: str, seconds: float, **chosen: Any) -> TriedStrategy:
        runs.append((strategy, chosen["seed"]))
        return tried(strategy, 1.0, seed=chosen["seed"])

    monkeypatch.setattr("steepest.loop.comparison.try_strategy", simulated)
    monkeypatch.setattr("steepest.cli.compare.begun", lambda runtime: quiet())
    script, table = tmp_path / "train.py", tmp_path / "a.csv"
    script.write_text("")
    command = ["compare", str(script), "--strategies", "ps,allreduce", "--seeds", "2"]
    assert main.main([*command, "--seed", "5", "-o", str(table)]) == 0
    assert runs == [("ps", 5), ("allreduce", 5), ("ps", 6), ("allreduce", 6)]
    out = capsys.readouterr().out
    assert "allreduce, seed 6: up to 2 minutes" in out
    assert "means over 2 seeds" in out
