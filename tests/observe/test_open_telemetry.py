"""A run in OpenTelemetry, by its SDK: one trace with steps and changes, and gauges; a program that continues, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steepest import Checkpoints, DistributedSGD, OpenTelemetry
from steepest.cli.run import tracker
from steepest.errors import ConfigurationError
from tests.logged_runs import TASK
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.step_callbacks import After

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry: make test-loggers")

import itertools

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Backend:
    """What a company has."""

    def __init__(self) -> None:
        self.exported, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.traces = TracerProvider(shutdown_on_exit=False)
        self.traces.add_span_processor(SimpleSpanProcessor(self.exported))
        self.metrics = MeterProvider([self._reader], shutdown_on_exit=False)

    def logger(self, **settings: Any) -> OpenTelemetry:
        return OpenTelemetry("digits", self.traces, self.metrics, **settings)

    def spans(self, name: str | None = None) -> list[Any]:
        found = self.exported.get_finished_spans()
        return [span for span in found if name in (None, span.name)]

    def gauges(self) -> dict[str, float]:
        data: Any = self._reader.get_metrics_data()
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return {metric.name: metric.data.data_points[-1].value for metric in metrics}


def train(backend: Backend, steps: int, run: Path | None = None, **settings: Any) -> list[Any]:
    """Train with a worker that dies after step 4; return the rows of steps."""
    simulation = Simulation(3)

    def kill() -> None:
        victims = [each for each in simulation.living() if "worker 1" in str(each)]
        simulation.world.kill(victims[0], "it was killed. connection error code 2.")

    kept = None if run is None else Checkpoints(run, every=2)
    with (
        quiet(),
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config(), checkpoints=kept) as trainer,
    ):
        callbacks = [After({4: kill}), backend.logger(**settings)]
        trainer.fit(
            steps=steps,
            callbacks=callbacks,
            progress=False,
            validation=TASK.data,
            evaluate_every=5,
        )
        return trainer.history.steps


def test_a_run_is_a_trace_with_its_steps_and_its_changes() -> None:
    backend = Backend()
    rows = train(backend, 10)
    (run,) = backend.spans("run")
    assert {span.context.trace_id for span in backend.spans()} == {run.context.trace_id}
    steps = backend.spans("step")
    assert [span.attributes["train/step"] for span in steps] == list(range(1, 11))
    assert [span.attributes["train/loss"] for span in steps] == [row["loss"] for row in rows]
    assert all(span.parent.span_id == run.context.span_id for span in steps)
    for before, after in itertools.pairwise(steps):
        assert after.start_time == before.end_time
    (death,) = backend.spans("replaced")
    assert "worker 1" in death.attributes["line"]
    assert death.end_time > death.start_time
    assert run.attributes == {"run": "digits", "ended": "finished"}
    assert run.status.is_ok
    gauges = backend.gauges()
    assert gauges["steepest.train.loss"] == rows[-1]["loss"]
    assert gauges["steepest.job.deaths"] == 1.0
    assert gauges["steepest.job.workers"] == 0.0  # none is left
    assert "steepest.evaluation.loss" in gauges


def test_some_steps_and_a_bounded_number_of_gauges(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("steepest.observe.gauges._MOST_GAUGES", 3)
    backend = Backend()
    train(backend, 10, every=5)
    assert [span.attributes["train/step"] for span in backend.spans("step")] == [5, 10]
    assert len(backend.gauges()) == 3
    assert caplog.text.count("and whatever comes later gets no gauge") <= 1


def test_a_program_that_continues_continues_the_trace(tmp_path: Path) -> None:
    backend = Backend()
    train(backend, 6, tmp_path / "run")
    (first,) = backend.spans("run")
    train(backend, 10, tmp_path / "run")
    _, second = backend.spans("run")
    assert second.context.trace_id == first.context.trace_id
    assert second.parent.span_id == first.context.span_id
    steps = [span.attributes["train/step"] for span in backend.spans("step")]
    # of those that were under way when the last checkpoint was written nobody knows whether they came
    assert sorted(set(steps)) == list(range(1, 11))
    assert steps.count(7.0) == 1


def test_a_run_that_fails_says_so() -> None:
    backend = Backend()

    def fail() -> None:
        raise ValueError("no more")

    with (
        pytest.raises(ValueError, match="no more"),
        quiet(),
        Simulation(3).running(),
        DistributedSGD(TASK.creator(), 1, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=5, callbacks=[After({3: fail}), backend.logger()], progress=False)
    (run,) = backend.spans("run")
    assert not run.status.is_ok
    assert run.attributes["ended"] == "failed"


def test_a_program_without_providers_is_told_what_to_do() -> None:
    logger = tracker("opentelemetry=digits")
    assert isinstance(logger, OpenTelemetry)
    with pytest.raises(ConfigurationError, match="start it by opentelemetry-instrument"):
        logger.new_run()
