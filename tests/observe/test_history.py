"""The history of a run: each step once, whatever happens to processes, and in a file beside checkpoints."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steepest import (
    AllreduceStrategy,
    Callback,
    Checkpoints,
    DistributedSGD,
    EvaluationResult,
    Event,
    FailureConfig,
    ParameterServerStrategy,
    StepResult,
)
from steepest.errors import ConfigurationError
from steepest.observe.history import Figures, History
from steepest.observe.history_file import HistoryFile
from tests.logged_runs import TASK
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config

FIGURES = Figures(2, 1, 0, 10, 20, 0.5)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


class Heard(Callback):
    """Keeps the last result of each step, and does something after one of them."""

    def __init__(self, at: int = -1, then: Any = None) -> None:
        self.results: dict[int, StepResult] = {}
        self.calls = 0
        self.at, self.then = at, then

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.calls += 1
        for step in [step for step in self.results if step >= result.step]:
            del self.results[step]
        self.results[result.step] = result
        if result.step == self.at and self.then is not None:
            then, self.then = self.then, None
            then(trainer)


def step(number: int, loss: float = 1.0, epoch: int = 0) -> StepResult:
    return StepResult(number, epoch, loss, {"accuracy": loss / 2}, 4, (0,), {"data": 0.1}, 2.0)


def add(history: History, *numbers: int, loss: float = 1.0) -> None:
    for number in numbers:
        history.stepped(step(number, loss), FIGURES, ends_epoch=False)


def places(history: Any) -> list[tuple[str, int]]:
    return [(row["kind"], row["step"]) for row in history]


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_has_what_a_result_has() -> None:
    history = History()
    history.stepped(step(1, 0.5), FIGURES, ends_epoch=False)
    row = history[0]
    assert row.pop("time") > 0
    assert row == {
        "kind": "step", "step": 1, "epoch": 0, "loss": 0.5, "metrics": {"accuracy": 0.25},
        "samples": 4, "staleness": [0], "timings": {"data": 0.1}, "gradient_norm": 2.0,
        "workers": 2, "servers": 1, "generation": 0, "bytes_pushed": 10, "bytes_pulled": 20,
        "learning_rate": [], "seconds": 0.5,
    }  # fmt: skip


def test_steps_that_are_taken_again_replace_their_rows_and_events_stay() -> None:
    events: list[Event] = []
    history = History(events)
    add(history, 1, 2, 3)
    history.evaluated(3, EvaluationResult(0.5, {}, 8))
    add(history, 4, 5)
    history.evaluated(5, EvaluationResult(0.4, {}, 8))
    events.append(Event(1.0, "recovered", 3, "two updates are lost"))
    add(history, 4, loss=7.0)
    assert places(history) == [
        ("step", 1), ("step", 2), ("step", 3), ("evaluation", 3), ("event", 3), ("step", 4),
    ]  # fmt: skip
    assert history.steps[-1]["loss"] == 7.0


def test_an_epoch_has_the_means_of_its_steps_by_samples() -> None:
    history = History()
    add(history, 1, loss=9.0)
    for number, loss, count in ((2, 1.0, 4), (3, 4.0, 2), (4, math.nan, 6)):
        metrics = {} if math.isnan(loss) else {"accuracy": loss}
        result = StepResult(number, 1, loss, metrics, count, ())
        history.stepped(result, FIGURES, ends_epoch=number == 4)
    (row,) = history.epochs
    del row["time"]
    assert row == {
        "kind": "epoch", "step": 4, "epoch": 1, "steps": 3, "samples": 12, "loss": 2.0,
        "metrics": {"accuracy": 2.0},
    }  # fmt: skip


def test_a_data_frame_has_a_column_for_each_number() -> None:
    pandas = pytest.importorskip("pandas")
    history = History()
    add(history, 1, 2)
    history.evaluated(2, EvaluationResult(0.5, {"accuracy": 0.9}, 8))
    frame = history.dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert frame[frame.kind == "step"]["metrics.accuracy"].tolist() == [0.5, 0.5]
    assert history.dataframe("evaluation")["metrics.accuracy"].tolist() == [0.9]


def test_a_data_frame_without_pandas_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigurationError, match="pip install pandas"):
        History().dataframe()


def test_the_newest_rows_are_kept() -> None:
    history = History(limit=100)
    add(history, *range(1, 500))
    assert 100 <= len(history) <= 110
    assert [row["step"] for row in history.steps][-100:] == list(range(400, 500))


# -- runs ------------------------------------------------------------------------------------------

STRATEGIES: list[Any] = [
    ParameterServerStrategy(num_servers=1),
    ParameterServerStrategy(num_servers=2, replication=2),
    ParameterServerStrategy(mode="async", num_servers=1),
    AllreduceStrategy(),
]


def compare(trainer: DistributedSGD, heard: Heard, steps: int) -> None:
    """Checks that the history has each step once, as it was heard of last."""
    rows = trainer.history.steps
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        result = heard.results[row["step"]]
        assert repr((row["loss"], row["metrics"])) == repr((result.loss, result.metrics))  # NaN
        assert (row["epoch"], row["samples"]) == (result.epoch, result.samples)
    events = [
        Event(r["time"], r["event"], r["step"], r["line"], r.get("record", ""))
        for r in trainer.history.events
    ]
    assert events == list(trainer.stats().events)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("role", ["worker", "server"])
def test_each_step_is_there_once_after_a_death(strategy: Any, role: str) -> None:
    simulation = Simulation(3, cpus=(4, 4))
    heard = Heard()
    failure = FailureConfig(snapshot_every=5)

    def kill(trainer: DistributedSGD) -> None:
        found = [p for p in simulation.living() if role in str(p)] or simulation.living()
        simulation.world.kill(found[-1], "it was killed. connection error code 2.")

    heard.at, heard.then = 13, kill
    with (
        simulation.running(),
        DistributedSGD(
            TASK.creator(), 3, strategy=strategy, run_config=run_config(failure=failure)
        ) as trainer,
    ):
        trainer.fit(steps=30, callbacks=[heard], progress=False)
        trainer.fit(steps=30, callbacks=[heard], progress=False)  # asynchronous steps go fast
        compare(trainer, heard, 60)
        assert trainer.history.events


def test_workers_that_join_and_steps_one_by_one_are_in_it() -> None:
    heard = Heard(6, lambda sgd: sgd.resize(3))
    with (
        Simulation(4).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=40, callbacks=[heard], progress=False)
        heard.on_step(trainer, trainer.step())
        result = trainer.evaluate(TASK.data)
        compare(trainer, heard, 41)
        workers = [row["workers"] for row in trainer.history.steps]
        assert workers == sorted(workers)
        assert set(workers) == {2, 3}
        (row,) = trainer.history.evaluations
        assert (row["step"], row["loss"], row["samples"]) == (41, result.loss, 24)


def test_steps_that_were_committed_while_a_callback_raised_are_in_it() -> None:
    def stop(trainer: DistributedSGD) -> None:
        raise KeyError("enough")

    with (
        Simulation(5).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        with pytest.raises(KeyError):
            trainer.fit(steps=40, callbacks=[Heard(3, stop)], progress=False)
        assert [row["step"] for row in trainer.history.steps] == list(
            range(1, trainer.stats().step + 1)
        )
        # by a clock of training that has counted each second once
        assert trainer.history.steps[-1]["seconds"] <= trainer.stats().seconds


def test_each_epoch_has_a_row() -> None:
    with (
        Simulation(6).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(epochs=3, progress=False)
        rows = trainer.history.epochs
        assert [(r["epoch"], r["step"], r["samples"]) for r in rows] == [
            (0, 6, 24), (1, 12, 24), (2, 18, 24),
        ]  # fmt: skip
        losses = [r["loss"] for r in trainer.history.steps[:6]]
        assert rows[0]["loss"] == pytest.approx(sum(losses) / 6)


# -- the file --------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]


def test_the_file_is_cut_back_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    file, history = HistoryFile(path), History()
    add(history, 1, 2, 3, 4, loss=math.nan)
    rows, number = history.unwritten()
    file.append(rows)
    history.wrote(number)
    add(history, 3, loss=7.0)
    file.append(history.unwritten()[0])
    assert places(lines(tmp_path)) == [("step", 1), ("step", 2), ("step", 3)]
    assert [row["loss"] for row in lines(tmp_path)] == [None, None, 7.0]
    with open(path, "a") as torn:
        torn.write('{"kind": "step", "st')
    assert places(HistoryFile(path).resume(2)) == [("step", 1), ("step", 2)]
    assert places(lines(tmp_path)) == [("step", 1), ("step", 2)]
    untouched = path.stat()
    assert places(HistoryFile(path).resume(2, newest=1)) == [("step", 2)]
    assert (
        path.stat().st_ino == untouched.st_ino
    )  # nothing was to be removed: it is not written anew
    assert HistoryFile(path).resume(0) == lines(tmp_path) == []


def test_a_long_file_is_cut_at_any_place_without_its_lines_being_written_anew(
    tmp_path: Path,
) -> None:
    path = tmp_path / "history.jsonl"
    written = []
    for number in range(1, 2501):
        kind = "event" if number % 100 == 0 else "step"
        # no spaces after colons: as no line is that was written anew
        written.append(f'{{"kind":"{kind}","step":{number},"time":0.5}}\n')
    written[1700] = '{"kind": "st\n'
    path.write_text("".join(written) + "7,8\n" + '{"kind":"event","step":9,"time":1}')
    rows = HistoryFile(path).resume(1600, newest=12)
    steps = [*range(1600, 2501, 100), 9]
    assert [row["step"] for row in rows] == [1599, *steps]
    events = [written[number - 1] for number in steps[1:-1]]
    end = '{"kind":"event","step":9,"time":1}\n'
    assert path.read_text() == "".join([*written[:1600], *events, end])
    file = HistoryFile(path)
    file.resume(1600)
    file.append([{"kind": "step", "step": 1550, "time": 2.0}])
    again = file.resume(1600)
    assert next(iter(again[0])) is next(iter(again[1]))  # rows share their keys' memory
    assert [row["step"] for row in again[-12:]] == [*steps, 1550]
    assert [row["step"] for row in again if row["kind"] == "step"][-2:] == [1549, 1550]


def run(path: Path, steps: int, heard: Heard) -> list[dict[str, Any]]:
    """Runs the same program once more; returns its history at the end."""
    with (
        Simulation(7).running(),
        DistributedSGD(
            TASK.creator(), 2, run_config=run_config(), checkpoints=Checkpoints(path, every=4)
        ) as trainer,
    ):
        trainer.fit(steps=steps, callbacks=[heard], progress=False)
        trainer.evaluate(TASK.data)
        return trainer.history[:]


def same(row: dict[str, Any]) -> dict[str, Any]:
    """What is the same in every run; the first step pulls weights that later ones get unasked."""
    return {
        k: v
        for k, v in row.items()
        if k not in ("time", "timings", "seconds", "generation", "bytes_pulled")
    }


def test_the_same_program_started_again_continues_the_history(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "one", 18, Heard())
    run(tmp_path / "two", 9, Heard())
    # lines of a program that was killed after a checkpoint
    last = max((tmp_path / "two").glob("0*"))
    assert last.name.endswith("-step-9")
    with open(tmp_path / "two" / "history.jsonl", "a") as file:
        file.write(json.dumps({"kind": "step", "step": 10, "time": 0.0}) + '\n{"kind": "st')
    history = run(tmp_path / "two", 18, Heard())
    evaluation = history.pop(
        next(i for i, row in enumerate(history) if row["kind"] == "evaluation")
    )
    assert evaluation["step"] == 9
    assert list(map(same, history)) == list(map(same, undisturbed))
    written = lines(tmp_path / "two")
    written.remove(next(row for row in written if row["kind"] == "evaluation"))
    assert list(map(same, written)) == list(map(same, undisturbed))
