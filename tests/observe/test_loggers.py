"""Loggers: one run in a tracker, in which each step is once, whatever dies."""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
import struct
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from steepest import (
    AllreduceStrategy,
    Callback,
    Checkpoints,
    DistributedSGD,
    FailureConfig,
    MLflow,
    Prometheus,
    StepResult,
    TensorBoard,
    Trackio,
    WandB,
)
from steepest.core.system import system
from steepest.data.storage.files import storage_of
from steepest.data.storage.places import place_of
from steepest.errors import ConfigurationError
from steepest.observe import delivery, history, loggers
from tests.conftest import ROOT
from tests.logged_runs import TASK, Memory
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


class Run:
    """A run of the stand-ins for wandb and trackio; it has a summary of what was logged last."""

    def __init__(self, name: str) -> None:
        self.id = self.name = name
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float] = {}
        self.tags: dict[str, str] = {}
        self.endings: list[Any] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.summary |= values
        self.logged.append((int(values.get("train/step", -1)) if step is None else step, values))

    def finish(self, exit_code: int | None = None) -> None:
        self.endings.append(exit_code)


class Tracker:
    """Stand-ins for the packages, with the methods that loggers call; the runs outlive a program."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: dict[str, Run] = {}
        for name in ("wandb", "trackio", "mlflow", "mlflow.entities"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        modules: Any = sys.modules
        modules["wandb"].init = self.wandb
        modules["trackio"].init = self.trackio
        modules["mlflow"].MlflowClient = lambda tracking_uri: self
        modules["mlflow.entities"].Metric = lambda *values: values

    def begin(self, name: str | None) -> Run:
        name = name or f"run-{len(self.runs)}"
        return self.runs.setdefault(name, Run(name))

    def wandb(self, project: str, id: str, resume: str) -> Run:
        assert resume == "allow"
        return self.begin(id)

    def trackio(self, project: str, name: str, resume: str) -> Run:
        assert resume == "allow"
        return self.begin(name)

    # -- a client of mlflow ------------------------------------------------------------------------

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment: str, run_name: str | None, tags: dict[str, str]) -> Any:
        run = self.begin(None)
        run.tags = tags
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run.id))

    def search_runs(self, experiments: list[str], text: str, max_results: int) -> list[Any]:
        found = [r for r in self.runs.values() for tag in r.tags.values() if f"'{tag}'" in text]
        assert text.startswith("tags.`steepest.run` = '")
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=r.id)) for r in found]

    def update_run(self, run: str, status: str) -> None:
        assert status == "RUNNING"

    def get_run(self, run: str) -> Any:
        return types.SimpleNamespace(data=types.SimpleNamespace(metrics=self.runs[run].summary))

    def log_batch(self, run: str, metrics: list[tuple[str, float, int, int]]) -> None:
        assert len(metrics) <= 1000
        points: dict[tuple[int, int], dict[str, float]] = {}
        for name, value, time, step in metrics:
            assert name not in points.setdefault((time, step), {})
            points[time, step][name] = value
        for (_, step), values in points.items():
            self.runs[run].log(values, step)

    def set_terminated(self, run: str, status: str) -> None:
        self.runs[run].endings.append(status)


def steps_of(run: Run) -> list[int]:
    return [step for step, values in run.logged if "train/loss" in values]


class Do(Callback):
    """Does something after a step."""

    def __init__(self, step: int, then: Callable[[], None]) -> None:
        self.step, self.then = step, then

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step == self.step:
            self.then()


def program(path: Path, steps: int, *callbacks: Callback) -> dict[str, str]:
    """Runs the same program once more; returns the ids of its loggers' runs."""
    with (
        Simulation(7).running(),
        DistributedSGD(
            TASK.creator(), 2, run_config=run_config(), checkpoints=Checkpoints(path, every=4)
        ) as trainer,
    ):
        trainer.fit(steps=steps, callbacks=callbacks, progress=False)
        trainer.evaluate(TASK.data)
        return dict(trainer.history.runs)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [MLflow, WandB, Trackio])
def test_a_program_started_again_continues_its_run(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker(monkeypatch)
    died = Do(10, lambda: shutil.copytree(tmp_path / "one", tmp_path / "two", dirs_exist_ok=True))
    (name,) = program(tmp_path / "one", 10 if kind is not Trackio else 8, kind("p"), died).values()
    if kind is Trackio:  # it cannot be asked which steps it has: all until the checkpoint
        shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert program(tmp_path / "two", 18, kind("p")) == {f"{kind.__name__} p": name}
    (run,) = tracker.runs.values()
    assert steps_of(run) == list(range(1, 19))
    assert run.endings == [{MLflow: "FINISHED", WandB: 0, Trackio: None}[kind]] * 2
    last = [values for step, values in run.logged if "evaluation/loss" in values][-1]
    assert last["evaluation/step"] == 18
    assert {"evaluation/first", "evaluation/loss"} <= last.keys()
    values = dict(run.logged[3][1])
    assert values.pop("train/samples_per_second", 1.0) > 0
    assert values.keys() == {
        "train/step", "train/epoch", "train/loss", "train/first", "train/staleness",
        "train/gradient_norm", "train/learning_rate", "seconds/compute", "seconds/data", "seconds/wait", "job/workers",
        "job/servers", "job/generation", "job/bytes_pushed", "job/bytes_pulled", "job/deaths",
    }  # fmt: skip


def scalars(path: Path) -> tuple[dict[str, list[int]], list[str]]:
    """Steps by tag that TensorBoard shows of a directory, and its texts: later files hide steps."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: list[tuple[int, str, str]] = []
    for file in sorted(path.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            if event.session_log.status == SessionLog.START:
                shown = [found for found in shown if found[0] < event.step]
            for value in event.summary.value:
                texts = b"".join(value.tensor.string_val).decode()
                shown.append((event.step, value.tag, texts))
    tags: dict[str, list[int]] = {}
    for step, tag, _ in shown:
        tags.setdefault(tag, []).append(step)
    return tags, [text for _, _, text in shown if text]


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    died = Do(10, lambda: shutil.copytree(tmp_path / "one", tmp_path / "two", dirs_exist_ok=True))
    first = program(tmp_path / "one", 10, TensorBoard(tmp_path / "tb"), died)
    assert program(tmp_path / "two", 18, TensorBoard(tmp_path / "tb")) == first
    (run,) = (tmp_path / "tb").iterdir()
    tags, _ = scalars(run)
    assert tags["train/loss"] == list(range(1, 19))
    assert tags["evaluation/loss"] == [18]
    manifest = json.loads((max((tmp_path / "two").glob("0*")) / "manifest.json").read_text())
    assert manifest["runs"] == {f"TensorBoard {tmp_path / 'tb'}": str(run)}


def copied(url: str, folder: Path) -> Path:
    """The files of events at a URL, in a directory."""
    place = place_of(url)
    for file in storage_of(place).files(place):
        folder.mkdir(exist_ok=True)
        (folder / file.name).write_bytes(storage_of(place).read(file))
    return folder


@pytest.mark.few(1)
@pytest.mark.parametrize("large", [4 << 20, 2000])
def test_tensorboard_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    pytest.importorskip("tensorboardX")
    monkeypatch.setattr(loggers, "_LARGE", large)
    url = f"memory://{secrets.token_hex(4)}/tb"
    died = Do(10, lambda: shutil.copytree(tmp_path / "one", tmp_path / "two", dirs_exist_ok=True))
    program(tmp_path / "one", 10, TensorBoard(url, seconds=0.0), died)
    program(tmp_path / "two", 18, TensorBoard(url, seconds=0.0))
    manifest = json.loads((max((tmp_path / "two").glob("0*")) / "manifest.json").read_text())
    run = manifest["runs"][f"TensorBoard {url}"]
    assert run.startswith(f"{url}/")
    folder = copied(run, tmp_path / "tb")
    assert (len(list(folder.iterdir())) > 2) == (large == 2000)
    tags, _ = scalars(folder)
    assert tags["train/loss"] == list(range(1, 19))


def test_tensorboard_uploads_later_what_a_store_has_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboardX")
    url = f"memory://{secrets.token_hex(4)}/tb"
    down = [OSError("down, with AKIAIOSFODNN7EXAMPLE")] * 3
    put = MemoryFileSystem.pipe_file

    def pipe_file(self: Any, path: str, value: bytes, **more: Any) -> None:
        if down:
            raise down.pop()
        put(self, path, value, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    caplog.set_level(logging.WARNING, "steepest")
    (run,) = program(tmp_path / "run", 6, TensorBoard(url, seconds=0.0)).values()
    assert down == []
    assert caplog.text.count("cannot log, tries again later") == 1
    assert "AKIA" not in caplog.text
    assert scalars(copied(run, tmp_path / "tb"))[0]["train/loss"] == list(range(1, 7))


@pytest.mark.parametrize(
    "given", ["ftp://a/b", "s3://key:wJalrXUtnFEMI@bucket/runs", "s3://bucket", "hdfs://a/b"]
)
def test_tensorboard_refuses_other_urls_at_once(given: str) -> None:
    with pytest.raises(ConfigurationError, match="://") as caught:
        TensorBoard(given)
    assert "wJal" not in str(caught.value)


def test_a_checkpoint_by_hand_has_the_run_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    for steps in (5, 7):
        with (
            Simulation(9).running(),
            DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
        ):
            if steps == 7:
                trainer.restore(tmp_path / "saved")
            trainer.fit(steps=steps, callbacks=[TensorBoard(tmp_path / "tb")], progress=False)
            trainer.save(tmp_path / "saved")
    (run,) = (tmp_path / "tb").iterdir()
    assert scalars(run)[0]["train/loss"] == list(range(1, 13))


def test_steps_that_are_taken_again_after_a_death_are_logged_once() -> None:
    simulation, logger = Simulation(3), Memory(seconds=0.0)
    config = run_config(failure=FailureConfig(snapshot_every=5))

    def kill() -> None:
        simulation.world.kill(simulation.living()[-1], "it was killed. connection error code 2.")

    with (
        simulation.running(),
        DistributedSGD(
            TASK.creator(), 3, strategy=AllreduceStrategy(), run_config=config
        ) as trainer,
    ):
        trainer.fit(steps=30, callbacks=[logger, Do(13, kill)], progress=False)
        trainer.step()
        lines = [event.line for event in trainer.stats().events]
    assert Counter(logger.steps) == Counter(range(1, 32))
    assert [point.text for point in logger.points if point.kind == "event"] == lines
    assert logger.points[-1].values["job/deaths"] >= 1


def test_what_a_continuing_program_does_before_its_first_fit_is_logged(tmp_path: Path) -> None:
    class Continued(Memory):
        def open(self, run: str | None, step: int) -> tuple[str, dict[str, int]]:
            kinds = ("step", "epoch", "evaluation", "event")
            return "here", {} if run is None else dict.fromkeys(kinds, step)

    first, second, simulation = Continued(), Continued(), Simulation(11)
    with (
        Simulation(10).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=5, callbacks=[first], progress=False)
        trainer.save(tmp_path / "saved")
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.restore(tmp_path / "saved")
        (victim,) = (p for p in simulation.living() if "worker 1" in str(p))
        simulation.world.kill(victim, "it was killed. connection error code 2.")
        for _ in range(3):
            trainer.step()
        assert {event.step for event in trainer.stats().events} >= {5}
        trainer.fit(steps=5, callbacks=[second], progress=False)
        events = [(e.step, e.line) for e in trainer.stats().events]
    assert first.steps + second.steps == list(range(1, 14))
    assert [(p.step, p.text) for p in second.points if p.kind == "event"] == events


def test_a_second_logger_of_the_same_run_adds_nothing() -> None:
    first, second = Memory(every=2), Memory()
    with (
        Simulation(4).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=5, callbacks=[first], progress=False)
        trainer.fit(steps=5, callbacks=[second], progress=False)
    assert first.steps == [2, 4, 6, 8, 10]
    assert second.steps == []


def test_a_logger_of_two_trainers_has_all_steps_of_each() -> None:
    logger = Memory()
    with Simulation(4).running():
        with DistributedSGD(TASK.creator(), 2, run_config=run_config()) as first:
            first.fit(steps=5, callbacks=[logger], progress=False)
            with (
                DistributedSGD(TASK.creator(), 2, run_config=run_config()) as second,
                pytest.raises(ConfigurationError, match="a logger of its own"),
            ):
                second.fit(steps=1, callbacks=[logger], progress=False)
        with DistributedSGD(TASK.creator(), 2, run_config=run_config()) as third:
            third.fit(steps=7, callbacks=[logger], progress=False)
    assert logger.steps == [*range(1, 6), *range(1, 8)]


def test_a_tracker_that_cannot_be_reached_gets_everything_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where it is down at the start; one warning says so, and one that it is back."""
    logger = Memory(seconds=0.0)
    logger.fails = True
    caplog.set_level(logging.WARNING, "steepest")
    with (
        Simulation(5).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=50, callbacks=[logger], progress=False)
        assert logger.points == []
        logger.fails = False
    assert logger.steps == list(range(1, 51))
    assert caplog.text.count("cannot log, tries again later") == 1
    assert "ConnectionError('no route')" in caplog.text
    assert caplog.text.count("logs again; 0 rows were dropped") == 1


class Slow(Memory):
    """Takes an hour to open a run, or to log, and fails then, if told to."""

    def __init__(self, opening: bool, fails: bool) -> None:
        super().__init__(seconds=0.0)
        self.opening, self.fails = opening, fails

    def log(self, points: Any) -> None:
        pause(0.0 if self.opening else 3600.0)
        super().log(points)

    def open(self, run: str | None, step: int) -> tuple[str, dict[str, int]]:
        pause(3600.0 if self.opening else 0.0)
        return super().open(run, step) if self.opening else ("here", {})


def seconds_of(steps: int, *callbacks: Callback) -> float:
    """The virtual seconds that `fit` takes for so many steps."""
    with (
        Simulation(6).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        begun = system().now()
        trainer.fit(steps=steps, callbacks=callbacks, progress=False)
        return system().now() - begun


@pytest.mark.parametrize("opening", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_training_does_not_wait_for_a_tracker(
    opening: bool, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "steepest")
    slow = Slow(opening, fails)
    assert seconds_of(12, slow) == pytest.approx(seconds_of(12), rel=0.5)
    assert re.search("does not answer; 1[0-9] rows may be missing", caplog.text)


def test_the_oldest_rows_are_dropped_where_too_many_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "_MOST_ROWS", 10)
    logger = Memory(seconds=0.0)
    logger.fails = True
    caplog.set_level(logging.WARNING, "steepest")
    with (
        Simulation(5).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=30, callbacks=[logger], progress=False)
        logger.fails = False
    kept = [point.step for point in logger.points]
    assert kept == sorted(kept)
    assert logger.steps[-1] == 30
    assert len(logger.points) <= 10
    assert "10 rows wait, of which the oldest are dropped from now on" in caplog.text
    assert re.search(r"Memory: \d\d rows have not arrived", caplog.text)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [MLflow, WandB, TensorBoard])
def test_a_run_whose_tracker_was_down_is_continued_as_the_same_run(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id is in checkpoints, with the step until which the tracker has all."""
    tracker = Tracker(monkeypatch)
    make = partial(kind, str(tmp_path / "tb") if kind is TensorBoard else "p", seconds=0.0)
    down = True

    class Down(kind):  # type: ignore[misc]
        def log(self, points: Any) -> None:
            if down and points[-1].step > 3:
                raise ConnectionError("no route")
            super().log(points)

    Down.__name__ = kind.__name__
    first = program(tmp_path / "run", 10, Down(*make.args, **make.keywords))
    down = False
    assert program(tmp_path / "run", 18, make()) == first
    if kind is TensorBoard:
        (run,) = (tmp_path / "tb").iterdir()
        steps = scalars(run)[0]["train/loss"]
    else:
        (found,) = tracker.runs.values()
        steps = steps_of(found)
    assert steps == list(range(1, 19))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (None, "FINISHED", 0),
        (RuntimeError("boom"), "FAILED", 1),
        (KeyboardInterrupt(), "KILLED", 143),
        (SystemExit(143), "KILLED", 143),
        (SystemExit(3), "FAILED", 1),
        (SystemExit(0), "FINISHED", 0),
    ],
)
@pytest.mark.few(6)
@pytest.mark.parametrize("where", ["fit", "block"])
def test_trackers_are_told_how_a_run_has_ended(
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException | None,
    status: str,
    code: int,
    where: str,
) -> None:
    tracker = Tracker(monkeypatch)

    class Raises(Callback):
        def on_epoch_end(self, sgd: Any, result: StepResult) -> None:
            if error is not None:
                raise error

    trackers = [MLflow("p"), WandB("p")]
    with Simulation(9).running():
        trainer = DistributedSGD(TASK.creator(), 2, run_config=run_config())
        try:
            if where == "block":
                with trainer:
                    trainer.fit(steps=2, callbacks=trackers, progress=False)
                    if error is not None:
                        raise error
            else:
                trainer.fit(epochs=1, callbacks=[*trackers, Raises()], progress=False)
        except BaseException as raised:
            if raised is not error:
                raise
        trainer.shutdown()
    assert sorted(str(run.endings) for run in tracker.runs.values()) == [
        f"['{status}']",
        f"[{code}]",
    ]


def test_a_run_ends_with_its_program_where_nobody_shuts_the_trainer_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = Tracker(monkeypatch)
    with Simulation(9).running():
        trainer = DistributedSGD(TASK.creator(), 2, run_config=run_config())
        trainer.fit(steps=5, callbacks=[MLflow("p")], progress=False)
        history.close_followed()
        (run,) = tracker.runs.values()
        assert (steps_of(run), run.endings) == ([1, 2, 3, 4, 5], ["FINISHED"])
        trainer.shutdown()
    assert len(run.endings) == 1


def test_a_run_that_failed_and_went_on_well_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(monkeypatch)

    def stop() -> None:
        raise RuntimeError("boom")

    with (
        Simulation(9).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        with pytest.raises(RuntimeError, match="boom"):
            trainer.fit(steps=5, callbacks=[MLflow("p"), Do(2, stop)], progress=False)
        trainer.fit(steps=5, progress=False)
    (run,) = tracker.runs.values()
    assert run.endings == ["FINISHED"]


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (partial(WandB, "p"), "wandb"),
        (MLflow, "mlflow"),
        (partial(Trackio, "p"), "trackio"),
        (partial(TensorBoard, "logs"), "torch.utils.tensorboard"),
    ],
)
def test_a_package_that_is_missing_is_named_before_a_job_starts(
    monkeypatch: pytest.MonkeyPatch, make: Any, package: str
) -> None:
    for name in (package, "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=rf"\(\.\.\.\) needs the package {package}"):
        make()


def test_learning_rates_are_logged_by_group() -> None:
    logger = Memory()
    row = {"kind": "step", "step": 1, "time": 0.0, "samples": 4, "seconds": 0.5}
    logger._take(row | {"learning_rate": 0.1}, old=False)
    logger._take(row | {"learning_rate": [0.1], "step": 2}, old=False)
    logger._take(row | {"learning_rate": (0.1, 0.2), "step": 3}, old=False)
    logger._take(row | {"learning_rate": {"head": 0.1, "body": 0.2}, "step": 4}, old=False)
    logger._take(row | {"learning_rate": None, "step": 5}, old=False)
    logger._send()
    rate = "train/learning_rate"
    assert [{k: v for k, v in p.values.items() if rate in k} for p in logger.points] == [
        {rate: 0.1},
        {rate: 0.1},
        {f"{rate}/0": 0.1, f"{rate}/1": 0.2},
        {f"{rate}/head": 0.1, f"{rate}/body": 0.2},
        {},
    ]


def test_prometheus_has_the_last_values_that_the_dashboard_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gauges: dict[str, list[float]] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert name not in gauges
            assert re.fullmatch("[a-z_]+", name)
            assert tag_keys == ("run",)
            self.values = gauges[name] = []

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert tags == {"run": "digits"}
            self.values.append(value)

    metrics: Any = types.ModuleType("ray.util.metrics")
    metrics.Gauge = Gauge
    monkeypatch.setitem(sys.modules, "ray.util.metrics", metrics)
    with (
        Simulation(8).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        logger = Prometheus("digits", seconds=1e9)
        trainer.fit(steps=5, callbacks=[logger], progress=False)
        found = trainer.evaluate(TASK.data)
        assert gauges["steepest_train_step"] == [5]
        assert gauges["steepest_job_workers"] == [2]
    assert gauges["steepest_evaluation_loss"] == [found.loss]
    assert gauges["steepest_job_workers"][-1] == 0
    gauges |= {"steepest_train_samples_per_second": [], "steepest_train_learning_rate": []}
    dashboard = json.loads((ROOT / "docs" / "grafana_dashboard.json").read_text())
    shown = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    names = {re.match(r"ray_(\w+)\{run=", text)[1] for text in shown}  # type: ignore[index]
    assert names <= gauges.keys()


def test_prometheus_has_so_many_gauges_whatever_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A name with a step in it would be a series of its own for ever; the tag has the run's name alone."""
    tags: set[tuple[str, str]] = set()

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert tag_keys == ("run",)
            self.name = name

        def set(self, value: float, tags: dict[str, str], all=tags) -> None:  # type: ignore[no-untyped-def]
            all.add((self.name, *tags.values()))

    metrics: Any = types.ModuleType("ray.util.metrics")
    metrics.Gauge = Gauge
    monkeypatch.setitem(sys.modules, "ray.util.metrics", metrics)
    caplog.set_level(logging.WARNING, "steepest")
    logger = Prometheus("digits")
    for step in range(1000):
        row = {"kind": "report", "step": step, "time": 0.0, "metrics": {f"loss_{step}": 1.0}}
        logger._take(row, old=False)
        logger._send()
    assert len(tags) == 200
    assert {run for _, run in tags} == {"digits"}
    assert "under names that stay" in caplog.text
    assert caplog.text.count("gets no gauge") == 1
