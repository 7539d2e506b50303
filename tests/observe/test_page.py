"""The page of a job: its curves keep what they thin, its files are read as they are, its document holds its data."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steepest import Checkpoints, DistributedSGD, FailureConfig
from steepest.cli import main
from steepest.errors import ConfigurationError
from steepest.observe.history_file import HistoryFile
from steepest.observe.job_record import JobRecord
from steepest.observe.page import document as pages
from steepest.observe.page.run_files import WatchedRun, read_run
from steepest.observe.page.run_view import RunView
from steepest.observe.page.thinning import Curves
from steepest.observe.page.workers import WorkerTimes, scores, usual_times
from tests.logged_runs import TASK
from tests.odd_values import mutated
from tests.page_rows import row_of
from tests.simulation.run import Simulation, run_config
from tests.step_callbacks import After

# -- thinning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_thinned_curve_has_the_mean_and_the_bounds_of_its_steps(seed: int) -> None:
    chance = random.Random(seed)
    limit, steps = chance.choice([4, 9, 50]), sorted(chance.sample(range(1, 1500), 700))
    curves, values = Curves(limit), {step: chance.gauss(0, 10) for step in steps}
    unknown = set(chance.sample(steps, 40))
    for step in steps:
        value = math.nan if step in unknown else values[step]
        curves.add(step, float(step), {"a": value}, {"n": 2.0})
    told = curves.as_json()
    assert limit / 2 <= len(told["step"]) <= limit
    width = told["width"]
    assert width & (width - 1) == 0
    firsts = sorted({(step - 1) // width for step in steps})
    for at, index in enumerate(firsts):
        inside = [step for step in steps if (step - 1) // width == index]
        known = np.array([values[step] for step in inside if step not in unknown])
        mean, least, most = (column[at] for column in told["values"]["a"])
        assert (mean, least, most) == pytest.approx((known.mean(), known.min(), known.max()), 1e-5)
        assert (told["step"][at], told["steps"][at]) == (inside[-1], len(inside))
        assert told["sums"]["n"][at] == 2 * len(inside)


def test_what_is_told_later_continues_what_was_told_before() -> None:
    curves, shown, revision = Curves(16), list[Any](), None
    for step in range(1, 300):
        curves.add(step, float(step), {"a": float(step)}, {})
        if step % 7 == 0:
            since = max(len(shown) - 1, 0) if revision == curves.revision else 0
            told = curves.as_json(since)
            shown, revision = shown[:since] + told["values"]["a"][0], told["revision"]
            assert shown == curves.as_json()["values"]["a"][0]


# -- workers ---------------------------------------------------------------------------------------


def spent(step: int, workers: int, slow: float = 1.0) -> list[tuple[int, float, float, float]]:
    return [(w, 0.01, 0.1 * (slow if w == 1 else 1.0), 0.02) for w in range(workers)]


def test_a_record_has_each_workers_means_and_its_last_steps(simulated: None) -> None:
    record = JobRecord()
    for step in range(1, 31):
        record.stepped(step, 0.1 * step, spent(step, 3, slow=step))
    rows, number = record.unwritten()
    assert [row["kind"] for row in rows] == ["workers"] * len(rows)
    assert [row["first"] for row in rows] == [1, *(row["step"] + 1 for row in rows[:-1])]
    assert rows[-1]["step"] == 30
    for row in rows:
        steps = range(row["first"], row["step"] + 1)
        count, data, compute, wait = row["spent"]["1"]
        mean = 0.1 * sum(steps) / len(steps)
        assert (count, data, wait) == (len(steps), 0.01, 0.02)
        assert compute == pytest.approx(mean, rel=1e-3)
    assert ["last" in row for row in rows] == [False] * (len(rows) - 1) + [True]
    assert [step for step, _, _ in rows[-1]["last"]] == list(range(1, 31))
    record.wrote(number)
    assert record.unwritten()[0] == []


def test_a_record_of_a_long_run_is_short(simulated: None) -> None:
    record = JobRecord()
    for step in range(1, 20_001):
        record.stepped(step, 10.0 * step, spent(step, 2))
    assert len(record.unwritten()[0]) < 1000


def test_steps_that_are_taken_again_replace_those_before(simulated: None) -> None:
    record = JobRecord()
    for taken, step in enumerate((*range(1, 9), 5, 6)):
        record.stepped(step, 2.0 * (taken + 1), spent(step, 2))
    times = WorkerTimes()
    for row in record.unwritten()[0]:
        times.add(row)
    assert [row["step"] for row in times.spans] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _, _ in times.as_json()["lanes"]] == [1, 2, 3, 4, 5, 6]


def test_a_slow_worker_is_seen_in_its_scores() -> None:
    usual = {str(w): [8, 0.0, 0.1, 0.1] for w in range(4)}
    now, before = {**usual, "2": [8, 0.0, 0.4, 0.0]}, usual_times([{"spent": usual}] * 6)
    lanes = [
        [step, 0.0, [(w, 0.0, 0.4 if w == 2 else 0.1, 0.0) for w in range(4)]] for step in (1, 2)
    ]
    slow = scores(now, before, lanes)[2]
    assert (slow["others"], slow["itself"], slow["last"]) == (0.25, 0.25, 1.0)
    assert slow["cost"] == pytest.approx(0.3)
    assert {each["others"] for each in scores(now, before, lanes)} == {0.25, 1.0}
    assert scores({"0": [8, 0.0, 0.1, 0.0]}, {}, [])[0]["others"] is None


# -- files -----------------------------------------------------------------------------------------


def data_of(page: str) -> Any:
    """The data in a page."""
    (kept,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(kept)


def test_a_run_is_reported_with_its_death_its_checkpoints_and_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulation, run = Simulation(3), tmp_path / "run7"
    config = run_config(failure=FailureConfig(patience=600.0))

    def kill_worker_1() -> None:
        (victim,) = (each for each in simulation.living() if "worker 1" in str(each))
        simulation.world.kill(victim, "it was killed. connection error code 2.")

    with (
        simulation.running(),
        DistributedSGD(
            TASK.creator(), 3, run_config=config, checkpoints=Checkpoints(run, every=6)
        ) as trainer,
    ):
        trainer.fit(
            steps=20, validation=TASK.data, evaluate_every=10, progress=False,
            callbacks=[After({9: kill_worker_1})],
        )  # fmt: skip
        history, processes = trainer.history[:], trainer.processes()
    monkeypatch.setattr("steepest.cli.report.chart_script", lambda: "var Plotly = {};")
    target = tmp_path / "page.html"
    assert main.main(["report", str(run), "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: 0.0 MB\n"
    data = data_of(target.read_text())
    steps = [row for row in history if row["kind"] == "step"]
    assert data["about"]["name"] == "run7"
    assert (data["about"]["step"], data["about"]["strategy"]) == (20, "ps")
    assert data["curves"]["step"] == [row["step"] for row in steps]
    losses, wanted = data["curves"]["values"]["loss"][0], [row["loss"] for row in steps]
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert [row["step"] for row in data["evaluations"]] == [10, 20]
    assert [row["step"] for row in data["checkpoints"]][:2] == [6, 12]
    events = [row for row in history if row["kind"] == "event"]
    assert [(row["kind"], row["step"]) for row in data["events"]] == [
        (row["event"], row["step"]) for row in events
    ]
    joined = next(row for row in data["events"] if row["spent"])
    assert joined["cause"].startswith("worker 1 on ")
    assert joined["steps"] == 0
    assert [each["name"] for each in data["processes"]] == sorted(each.name for each in processes)
    assert {each["pid"] for each in data["processes"]} == {each.pid for each in processes}
    assert data["workers"]["workers"] == [0, 1, 2]
    assert data["workers"]["lanes"][-1][0] == 20
    assert {share[0] for share in data["workers"]["lanes"][-1][2]} == {0, 1, 2}


def test_a_program_that_continues_has_the_record_of_the_one_before(tmp_path: Path) -> None:
    for steps in (5, 9):
        with (
            Simulation(2).running(),
            DistributedSGD(
                TASK.creator(),
                2,
                run_config=run_config(),
                checkpoints=Checkpoints(tmp_path, every=4),
            ) as trainer,
        ):
            trainer.fit(steps=steps, progress=False)
    view = read_run(tmp_path)
    told = view.as_json()
    assert view.notes == []
    assert told["curves"]["step"] == list(range(1, 10))
    assert [row["step"] for row in told["checkpoints"]][:2] == [4, 5]
    spans = [json.loads(line) for line in (tmp_path / "job.jsonl").read_text().splitlines()]
    taken = [(row["first"], row["step"]) for row in spans if row["kind"] == "workers"]
    assert taken[0][0] == 1
    assert taken[-1][1] == 9
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(taken))


def test_a_history_that_is_half_written_is_used_as_far_as_it_is_whole(tmp_path: Path) -> None:
    lines = [json.dumps(row_of(step)) for step in (1, 2, 3)]
    bad = [
        "7",
        '{"kind": "step", "time": "x", "step": 3}',
        json.dumps(row_of(4, metrics=[1])),
        '{"kind": "st',
    ]
    (tmp_path / "history.jsonl").write_text("\n".join([*lines, *bad]))
    view = read_run(tmp_path / "history.jsonl")
    assert view.as_json()["curves"]["step"] == [1, 2, 3]
    torn, missing = view.notes
    assert torn == "history.jsonl: 4 lines are not whole, as after a crash, and left out"
    assert missing.startswith("there is no job.jsonl beside the history")


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_any_values_make_a_page_of_those_that_are_whole(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    record = JobRecord()
    record.describe(1, {"strategy": "ps", "samples": 8, "processes": [["worker 0", "n", "h", 7]]})
    for step in range(1, 9):
        record.stepped(step, float(step), spent(step, 2))
        record.kept(step, 0.1, 0.2)
    job = record.unwritten()[0]
    steps = [row_of(step, metrics={"a": 1.0}, seconds=float(step)) for step in range(1, 9)]
    marked = [
        {"kind": "evaluation", "step": 3, "time": 1.0, "loss": 0.5, "metrics": {"a": 1.0}},
        {"kind": "event", "step": 3, "time": 1.0, "event": "left", "record": "a | cause: b"},
        {"kind": "report", "step": 3, "time": 1.0, "metrics": {"a": 1.0}},
    ]
    for _ in range(60):
        for name, rows in (("history", [*steps, *marked]), ("job", job)):
            lines = [json.dumps(row) for row in rows]
            for at in chance.sample(range(1, len(rows)), 4):
                lines[at] = json.dumps(mutated(chance, rows[at]))
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        data = read_run(tmp_path).as_json()
        assert data_of(pages.document(data, "")) == json.loads(json.dumps(data))
        assert len(data["curves"]["step"]) >= 4
        assert [each["name"] for each in data["processes"]] == ["worker 0"]


def test_a_fifo_is_no_file_of_a_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history.jsonl")
    for read in (read_run, WatchedRun):
        with pytest.raises(
            ConfigurationError, match="there is no run: it is no regular file; give"
        ):
            read(tmp_path)


def test_rates_are_those_of_each_program_and_of_no_pause_between_them() -> None:
    view = RunView("a run")
    for step, seconds in (
        (3, 30.0),
        (4, 32.0),
        (5, 1.0),
        (6, 3.0),
    ):  # another program begins with 5
        view.add(row_of(step, seconds=seconds))
    sums = view.as_json()["curves"]["sums"]
    assert (sums["samples"], sums["seconds"]) == ([None, 8, 8, 8], [None, 2.0, 1.0, 2.0])


def test_a_run_that_is_not_there_or_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"nowhere: there is no run: .* give a directory of"
    ):
        read_run(tmp_path / "nowhere")
    (tmp_path / "run" / "000001-step-40").mkdir(parents=True)
    (tmp_path / "run" / "history.jsonl").touch()
    with pytest.raises(ConfigurationError, match=r"step-40: there is no run: .* give .*/run, the"):
        read_run(tmp_path / "run" / "000001-step-40")
    with pytest.raises(ConfigurationError, match="there is no run"):
        read_run(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_bytes(b"\x00\x01\n\xff\n")
    with pytest.raises(ConfigurationError, match="none of its 2 lines is a row of a history"):
        read_run(other)
    HistoryFile(tmp_path / "history.jsonl").append([row_of(1)])
    job = {"kind": "job", "time": 1.0, "step": 0, "format": 9, "steepest": "7.0.0\x1b[31m"}
    HistoryFile(tmp_path / "job.jsonl").append([job])
    with pytest.raises(
        ConfigurationError, match=r"steepest 7\.0\.0\\x1b\[31m wrote this run, in format 9"
    ):
        read_run(tmp_path)


def test_a_page_without_the_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    assert main.main(["report", str(tmp_path)]) == 1
    assert "pip install 'steepest[page]'" in capsys.readouterr().err


def test_names_cannot_end_the_script_that_holds_the_data() -> None:
    view = RunView("</script><script>alert(1)</script>")
    view.add(row_of(1, metrics={"<!--<script>": 1.0}))
    page = pages.document(view.as_json(), "")
    assert data_of(page)["about"]["name"] == view.name
    assert page.count("</script>") == 3
    assert "%S" not in page


@pytest.mark.long
def test_the_page_of_a_long_run_of_many_workers_is_small(tmp_path: Path, simulated: None) -> None:
    """What is thinned has reached its bounds long before 100,000 steps."""
    workers, record = 64, JobRecord()
    view, chance = RunView("long"), random.Random(1)
    for step in range(1, 20_001):
        view.add(
            row_of(step, loss=chance.random(), gradient_norm=chance.random(), seconds=5.0 * step)
        )
        if step % 4 == 0:
            parts = [(w, chance.random(), chance.random(), chance.random()) for w in range(workers)]
            record.stepped(step, 5.0 * step, parts)
    view.add_all(record.unwritten()[0])
    assert (
        len(pages.document(view.as_json(), "")) < 1_100_000
    )  # and the script of the charts has 4.8 MB
