"""The history of a run: a row for each step, epoch, evaluation and event; none twice, none missing."""

from __future__ import annotations

import atexit
import dataclasses
import math
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, overload

from steepest.core.system import system
from steepest.errors import ConfigurationError
from steepest.observe.delivery import Delivery, Ending
from steepest.observe.job_record import JobRecord
from steepest.observe.reports import Reports
from steepest.observe.results import EvaluationResult, Event, StepResult


class Figures(NamedTuple):
    """The numbers of a job when a step was committed."""

    workers: int
    servers: int
    generation: int  # the number of memberships so far
    bytes_pushed: int  # this and bytes_pulled: of gradients and of weights, in this step
    bytes_pulled: int
    seconds: float  # that this program spent training until then


_RESULT = tuple(field.name for field in dataclasses.fields(StepResult))  # a page asks for each row


class _HistoryRow(NamedTuple):
    serial: int
    kind: str
    step: int
    time: float
    what: StepResult | Mapping[str, Any]  # a step's result is made a mapping when it is asked for
    figures: Figures | None

    def as_dict(self) -> dict[str, Any]:
        head = {"kind": self.kind, "time": self.time, "step": self.step}
        if isinstance(self.what, Mapping):
            return {**head, **self.what}
        assert self.figures is not None
        result = {name: getattr(self.what, name) for name in _RESULT}
        rows = {name: list(getattr(self.what, name)) for name in ("staleness", "learning_rate")}
        return head | result | rows | self.figures._asdict()


class History(Sequence[dict[str, Any]]):
    """A run so far, as a sequence of rows, oldest first.

    A row is a dict: "kind" ("step", "epoch", "evaluation", "report" or "event"), "time" (seconds since the
    epoch, as `time.time` has it), "step" (steps committed by then), and what it tells:

    - "step": the attributes of `StepResult`, and those of `Figures`; loss and metrics are NaN and
      absent where statistics were not fetched, or died with the coordinator.
    - "epoch": "epoch", which has ended, and over its steps "steps", "samples", and the means "loss"
      and "metrics" by samples.
    - "evaluation": the attributes of `EvaluationResult`.
    - "report": "metrics", which a loop of a user's own has reported behind the last step.
    - "event": "event" (the kind of `Event`) and "line".

    When steps are taken again after a death, their rows replace those before. Evaluations are not
    made again: their rows come back with their step. A `restore` removes the rows after its step.
    Events stay. With `Checkpoints` the rows are also in the file ``history.jsonl`` beside them, and a
    program that continues from a checkpoint has those until its step.

    Memory holds the newest `RunConfig.history_rows` rows, about 1 kB each with two metrics; the file
    has all. An epoch of more steps has in its row what those rows tell.

    Args:
        events: all events of the job so far, oldest first; grows while processes die and come.
        limit: the number of rows that are kept.

    Attributes:
        runs: of each logger, the id of its run; in checkpoints.
        begun: the step from which the run continues here; 0 if it began here.
        behind: of each logger that has not passed on all rows, the step until which it has; in checkpoints.
        ended: how the last call of `fit` has ended.
        record: further rows of the run, for its page.
        reports: what loops of users' own have reported.
    """

    def __init__(self, events: Sequence[Event] = (), limit: int = 100_000) -> None:
        self.runs: dict[str, str] = {}
        self.begun = 0
        self.behind: dict[str, int] = {}
        self.ended: Ending = "finished"
        self.record = JobRecord()
        self.reports = Reports()
        self._events = events
        self._seen = 0  # of these
        self._limit = limit
        self._rows: list[_HistoryRow] = []
        self._awaited: list[_HistoryRow] = []  # evaluations after steps that are being taken again
        self._serial = 0
        self._last = -1  # the greatest step of a row that is no event
        self._cuts = 0  # how often rows were removed
        self._written = 0  # the serial of the last row in the file
        self._before = 0  # that of the last row of the program before
        self._sinks: dict[str, Delivery] = {}
        self._process = 0  # in which sinks follow
        self._lock = system().lock()

    # -- reading -------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        with self._lock:
            self._take_events()
            chosen = self._rows[index]
        return [row.as_dict() for row in chosen] if isinstance(index, slice) else chosen.as_dict()  # type: ignore[union-attr]

    def __len__(self) -> int:
        with self._lock:
            self._take_events()
            return len(self._rows)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Return the rows of a kind: "step", "epoch", "evaluation", "report" or "event"."""
        with self._lock:
            self._take_events()
            return [row.as_dict() for row in self._rows if row.kind == kind]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of steps."""
        return self.rows("step")

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The rows of epochs."""
        return self.rows("epoch")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of evaluations."""
        return self.rows("evaluation")

    @property
    def events(self) -> list[dict[str, Any]]:
        """The rows of events."""
        return self.rows("event")

    def dataframe(self, kind: str | None = None) -> Any:
        """Return a `pandas.DataFrame` of the rows; a metric has the column "metrics." and its name.

        Args:
            kind: of the rows; None for all of them.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            if error.name != "pandas":
                raise
            raise ConfigurationError(
                "history.dataframe() needs pandas, which is not installed: pip install pandas; the "
                "rows are also a sequence of dicts, such as history[-1] and history.rows('step')"
            ) from None

        return pandas.json_normalize(self[:] if kind is None else self.rows(kind))

    # -- writing -------------------------------------------------------------------------------

    def stepped(self, result: StepResult, figures: Figures, *, ends_epoch: bool | None) -> None:
        """Add a committed step; rows of this and later steps are replaced.

        Args:
            result: of the step.
            figures: of the job.
            ends_epoch: whether its epoch ends with this step, and gets a row too; None where that is known only by
                a step of the next one, or by `end`.
        """
        with self._lock:
            self._take_events()
            self._cut(result.step)
            if ends_epoch is None:
                self._end_epoch(result.epoch)
            self._add("step", result.step, system().time(), result, figures)
            if ends_epoch:
                self._add("epoch", result.step, system().time(), self._epoch(result.epoch))
            while self._awaited and self._awaited[0].step <= result.step:
                row = self._awaited.pop(0)
                self._add(row.kind, row.step, row.time, row.what)

    def _end_epoch(self, following: int | None) -> None:
        """Add the row of the last step's epoch, unless it is there, or the following step is of it."""
        last = next((row for row in reversed(self._rows) if row.kind in ("step", "epoch")), None)
        if last is None or last.kind == "epoch":
            return
        epoch = last.as_dict()["epoch"]
        if epoch not in (None, following):
            self._add("epoch", last.step, system().time(), self._epoch(epoch))

    def evaluated(self, step: int, result: EvaluationResult) -> None:
        """Add an evaluation after a number of committed steps, unless there is one with the same result."""
        with self._lock:
            self._take_events()
            values = dataclasses.asdict(dataclasses.replace(result, step=step))
            now = system().time()
            row = {"kind": "evaluation", "time": now, **values}
            same = (r for r in self._rows if r.kind == "evaluation" and r.step == step)
            if all(r.as_dict() | {"time": now} != row for r in same):
                self._add("evaluation", step, now, values)

    def reported(self, metrics: Mapping[str, float]) -> None:
        """Add what loops of a user's own have reported behind the last step."""
        with self._lock:
            self._take_events()
            step = max(self._last, self.begun)
            self._add("report", step, system().time(), {"metrics": dict(metrics)})

    def resume(
        self,
        step: int,
        runs: Mapping[str, str],
        rows: Iterable[Mapping[str, Any]] = (),
        record: Iterable[Mapping[str, Any]] = (),
        behind: Mapping[str, int] | None = None,
    ) -> None:
        """Continue from a checkpoint; rows of later steps are removed, except events.

        Args:
            step: of the checkpoint.
            runs: of the loggers, as in the checkpoint; those of this program stay.
            rows: of the program before, if this one has none yet.
            record: likewise, of `record`.
            behind: as of the attribute, in the checkpoint.
        """
        self.record.resume(step, record)
        with self._lock:
            self._cut(step + 1)
            self._awaited.clear()  # they are made again
            for row in rows:
                what = dict(row)
                self._add(what.pop("kind"), what.pop("step"), what.pop("time"), what)
                self._written = self._before = self._serial
            self.begun = step
            self.runs = {**runs, **self.runs}
            self.behind = dict(behind or {})

    def end(self) -> None:
        """Remove the rows, except events, of the last steps in which no worker had samples; end the epoch."""
        with self._lock:
            self._take_events()
            steps = (row for row in reversed(self._rows) if row.kind == "step")
            empty = [row.step for row in takewhile(lambda row: not row.as_dict()["samples"], steps)]
            if empty:
                self._cut(empty[-1])
            self._end_epoch(None)

    def _take_events(self) -> None:
        while self._seen < len(self._events):
            event = self._events[self._seen]
            self._seen += 1
            what = {"event": event.kind, "line": event.line}
            what |= {"record": event.record} if event.record else {}
            self._add("event", event.step, event.time, what)

    def _add(
        self,
        kind: str,
        step: int,
        now: float,
        what: StepResult | Mapping[str, Any],
        figures: Figures | None = None,
    ) -> None:
        self._serial += 1
        row = _HistoryRow(self._serial, kind, step, now, what, figures)
        self._rows.append(row)
        if kind != "event":
            self._last = max(self._last, step)
        if len(self._rows) > self._limit * 1.1:
            del self._rows[: -self._limit]
        for sink in self._sinks.values():
            sink.take(row.as_dict(), old=False)

    def _cut(self, step: int) -> None:
        """Remove the rows of a step and of later ones, except events; keep evaluations for later."""
        if step > self._last:
            return
        undone = [row for row in self._rows if row.kind == "evaluation" and row.step >= step]
        self._awaited = [*undone, *self._awaited]
        self._rows = [row for row in self._rows if row.kind == "event" or row.step < step]
        self._last = step - 1
        self._cuts += 1

    def _epoch(self, epoch: int | None) -> dict[str, Any]:
        """Return what the row of an epoch tells: means over its steps, by samples."""
        steps: list[dict[str, Any]] = []
        for row in reversed(self._rows):
            if row.kind == "step":
                if (step := row.as_dict())["epoch"] != epoch:
                    break
                steps.append(step)

        def mean(value: Callable[[dict[str, Any]], float | None]) -> float:
            known = [(x, s["samples"]) for s in steps if (x := value(s)) is not None]
            known = [(x, weight) for x, weight in known if not math.isnan(x)]
            total = sum(weight for _, weight in known)
            return sum(x * weight for x, weight in known) / total if total else math.nan

        names = dict.fromkeys(name for s in reversed(steps) for name in s["metrics"])
        return {
            "epoch": epoch,
            "steps": len(steps),
            "samples": sum(s["samples"] for s in steps),
            "loss": mean(lambda s: s["loss"]),
            "metrics": {name: mean(lambda s, n=name: s["metrics"].get(n)) for name in names},  # type: ignore[misc]
        }

    # -- passing on ----------------------------------------------------------------------------

    def unwritten(self) -> tuple[list[dict[str, Any]], int]:
        """Return the rows that are not in the file, and the number to give to `wrote`."""
        with self._lock:
            self._take_events()
            since = bisect_right(self._rows, self._written, key=lambda row: row.serial)
            return [row.as_dict() for row in self._rows[since:]], self._serial

    def wrote(self, number: int) -> None:
        """Note that the rows that `unwritten` returned with this number are in the file."""
        self._written = max(self._written, number)

    def since(self, number: int, most: int = 1000) -> tuple[list[dict[str, Any]], int, int]:
        """Return the rows that were added after a known one and are still in memory, oldest first.

        Args:
            number: of the last row that is known already, as this method returned it; 0 for none.
            most: the greatest number of rows to return; there may be more.

        Returns:
            The rows, the number of the last of them, and how often rows were removed so far: where
            that has changed, rows that are known already may be no more.
        """
        with self._lock:
            self._take_events()
            begin = bisect_right(self._rows, number, key=lambda row: row.serial)
            rows, cuts = self._rows[begin : begin + most], self._cuts
        return [row.as_dict() for row in rows], rows[-1].serial if rows else number, cuts

    def is_followed(self, key: str, by: Delivery | None = None) -> bool:
        """Return whether a sink of this key is given each row; `by` asks whether it is this one."""
        sink = self._sinks.get(key)
        return sink is not None and by in (None, sink)

    def follow(self, key: str, sink: Delivery) -> None:
        """Give a sink all rows that there are, and each row from now on."""
        with self._lock:
            self._take_events()
            for row in self._rows:
                sink.take(row.as_dict(), old=row.serial <= self._before)
            self._sinks[key] = sink
            self._process = os.getpid()
            _followed.add(self)

    def flush(self) -> None:
        """Have all sinks pass on soon what they were given, and note which are behind."""
        with self._lock:
            self._take_events()
            for key, sink in self._sinks.items():
                sink.flush()
                self._note(key, sink)

    def _note(self, key: str, sink: Delivery) -> None:
        self.behind.pop(key, None)
        if (step := sink.behind()) is not None:
            self.behind[key] = step

    def close(self, how: Ending | None = None) -> None:
        """Have all sinks pass on what they were given, for the last time.

        Args:
            how: the run ends; None for as the last `fit` did.
        """
        with self._lock:
            self._take_events()
            sinks, self._sinks = self._sinks, {}
            _followed.discard(self)
        for key, sink in sinks.items():
            sink.close(self.ended if how is None else how)
            self._note(key, sink)


_followed = weakref.WeakSet[History]()


@atexit.register
def close_followed() -> None:
    """Close the histories of trainers that were not shut down, where the program ends."""
    for history in list(_followed):
        if history._process == os.getpid():
            history.close()
