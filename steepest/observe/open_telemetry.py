"""A logger to OpenTelemetry: a run as a trace, with a span for each step and change, and its numbers as gauges."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from steepest.errors import ConfigurationError
from steepest.observe.delivery import Ending
from steepest.observe.gauges import Gauges, SetGauge
from steepest.observe.loggers import Logger, Point, load_module, logged_until

_RUN_ID = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})")
_SCOPE = "steepest"


class OpenTelemetry(Logger):
    """Log to OpenTelemetry, by the providers of traces and metrics that the program has.

    A run is a trace: a span "run", and in it a span for each step that is logged and for each change of the job,
    such as a death. A change takes as long as it stopped training. A number that loggers call "train/loss" is the
    gauge ``steepest.train.loss``; its attribute "run" is `run`. Only the first 200 names get a gauge; a warning
    says so. A program that continues from a checkpoint continues the trace.

    Needs ``pip install 'steepest[opentelemetry]'``, and an exporter, such as ``opentelemetry-exporter-otlp`` with
    ``opentelemetry-instrument python train.py``.

    Args:
        run: the name of the run, in all that it sends.
        tracer_provider, meter_provider: of the SDK; None for the program's own, which are set before `fit`.
        settings: see `Logger`.

    Raises:
        ConfigurationError: OpenTelemetry is not installed; by `fit` if the program has no providers.
    """

    def __init__(
        self,
        run: str = "steepest",
        tracer_provider: Any = None,
        meter_provider: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._trace = load_module("OpenTelemetry", "opentelemetry.trace")
        self._metrics = load_module("OpenTelemetry", "opentelemetry.metrics")
        self.key = f"OpenTelemetry {run}"
        self._run = run
        self._own_providers = tracer_provider, meter_provider
        self._span: Any = None  # of the run
        self._last = 0.0  # when the last logged step was committed
        self._gauges = Gauges(self.key, self._make_gauge)

    def new_run(self) -> None:
        """Check that the program sends traces or metrics anywhere; the first span has the run's id."""
        if all(map(_sends_nothing, self._providers())):
            raise ConfigurationError(
                "OpenTelemetry(...): the program has no provider of traces or metrics, so that nothing would be sent: "
                "start it by opentelemetry-instrument, call opentelemetry.trace.set_tracer_provider() before, or give "
                "tracer_provider= and meter_provider="
            )

    def _providers(self) -> tuple[Any, Any]:
        """Return the providers of traces and of metrics."""
        traces, metrics = self._own_providers
        return (
            self._trace.get_tracer_provider() if traces is None else traces,
            self._metrics.get_meter_provider() if metrics is None else metrics,
        )

    def open(self, run: str | None, step: int) -> tuple[str, Mapping[str, int]]:
        """Begin the run's span: the first of a trace, or one more in that of the program before."""
        traces, metrics = self._providers()
        self._tracer, self._meter = traces.get_tracer(_SCOPE), metrics.get_meter(_SCOPE)
        context, trace = None, self._trace
        if run is not None and (ids := _RUN_ID.fullmatch(run)) is not None:
            before = trace.SpanContext(int(ids[1], 16), int(ids[2], 16), True, trace.TraceFlags(1))
            context = trace.set_span_in_context(trace.NonRecordingSpan(before))
        self._span = self._tracer.start_span("run", context, attributes={"run": self._run})
        self._last = 0.0
        own = self._span.get_span_context()
        return run or f"{own.trace_id:032x}-{own.span_id:016x}", logged_until(step)

    def log(self, points: Sequence[Point]) -> None:
        """Send a span for each step and change, and set gauges to the points' last numbers."""
        last: dict[str, float] = {}
        for point in points:
            last |= point.values
            if point.kind == "step":
                self._add("step", self._last or point.time, point.time, point.values)
                self._last = point.time
            elif point.kind == "event":
                attributes = {"step": point.step, "line": point.text}
                self._add(point.event, point.time - point.seconds, point.time, attributes)
        self._gauges.set(last)

    def _add(self, name: str, began: float, ended: float, attributes: Mapping[str, Any]) -> None:
        """Send a span of the run; times are of `time.time`."""
        context = self._trace.set_span_in_context(self._span)
        all_attributes = {"run": self._run, **attributes}
        start = int(1e9 * min(began, ended))
        span = self._tracer.start_span(name, context, attributes=all_attributes, start_time=start)
        span.end(int(1e9 * ended))

    def _make_gauge(self, name: str) -> SetGauge:
        plain = re.sub(r"[^a-zA-Z0-9_./-]", "_", name).replace("/", ".")
        gauge = self._meter.create_gauge(f"steepest.{plain}", description=name)
        return partial(gauge.set, attributes={"run": self._run})

    def finish(self, how: Ending) -> None:
        """End the run's span, with how it has ended, and have all sent."""
        if self._span is None:
            return
        self._gauges.end()
        codes, ended = self._trace.StatusCode, self._span
        ended.set_attribute("ended", how)
        ended.set_status(
            codes.OK if how == "finished" else codes.ERROR, None if how == "finished" else how
        )
        ended.end()
        for provider in self._providers():
            if (flush := getattr(provider, "force_flush", None)) is not None:
                flush()


def _sends_nothing(provider: Any) -> bool:
    """Return whether a provider is one of the API's placeholders: the program has set none."""
    return type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))
