"""Loggers: callbacks that pass a run's history on to TensorBoard, MLflow, Weights & Biases, Trackio."""

from __future__ import annotations

import importlib
import math
import secrets
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from steepest.data.storage.object_storage import ObjectStorage, Patience
from steepest.data.storage.places import ObjectUrl, place_of
from steepest.errors import ConfigurationError
from steepest.observe.delivery import Delivery, Ending
from steepest.observe.history import History
from steepest.observe.page.run_view import event_of
from steepest.observe.progress import Callback
from steepest.validation import require_count

_TAG = "steepest.run"  # of runs of MLflow
_EXIT_CODES = {"finished": 0, "failed": 1, "killed": 143}
_LARGE = 4 << 20  # bytes of a file of events after which another begins, at a URL
_BRIEF = Patience(call=30.0, retry=0.0)
_DEATHS = ("replaced", "left", "recovered")
_GROUPS = {
    "step": "train",
    "report": "train",
    "epoch": "epoch",
    "evaluation": "evaluation",
    "event": "event",
}


class Point(NamedTuple):
    """A row of the history in the form that loggers take."""

    kind: str
    step: int
    time: float  # seconds since the epoch, as `time.time` has it
    values: dict[str, float]  # finite numbers by name, such as "train/loss"
    text: str = ""  # of an event
    event: str = ""  # the kind of an event, as of `Event`
    seconds: float = 0.0  # for which an event stopped training


class Logger(Callback):
    """Base class of loggers: passes a run's history on to one run of a tracker.

    From the first `fit` that it is given to on, a logger passes on all rows of the history, also those
    of `step` and `evaluate` outside of `fit`, until the trainer is shut down. The run's id is in
    checkpoints: the program that continues from one continues its run. A step that is taken again
    is logged once. All of it is done on a thread of the logger's own: training waits for no tracker, and
    one that cannot be reached, also at the start, is tried again, with a warning.

    Args:
        every: the number of steps from one logged step to the next.
        seconds: that a row waits for others before they are passed on together.

    Attributes:
        key: the name under which the run's id is in checkpoints.
    """

    key = ""

    def __init__(self, every: int = 1, seconds: float = 5.0) -> None:
        self._every = require_count("every", every)
        self._seconds = seconds
        self._history: weakref.ref[History] | None = None  # that of the run
        self._delivery: Delivery | None = None
        self._begin_run({})

    # -- what a tracker implements, for the thread -------------------------------------------------

    def new_run(self) -> str | None:
        """Return the id of a new run, where the tracker lets it be chosen; None where `open` finds it out.

        It is called where `fit` begins, on the thread of `fit`, and is in all checkpoints, also while the
        tracker is down.
        """
        return None

    def open(self, run: str | None, step: int) -> tuple[str, Mapping[str, int]]:
        """Begin a run, or continue one. If it raises, it is called again later.

        Args:
            run: the id of the run, which the tracker has or not; None for a new one, if `new_run` gives none.
            step: until which the program before has logged all; 0 for a new run.

        Returns:
            The run's id, and by kind of row ("step", "evaluation", ...) the greatest step that the
            run already has.
        """
        raise NotImplementedError

    def log(self, points: Sequence[Point]) -> None:
        """Log points, in the order of their rows. If it raises, it is called again later."""
        raise NotImplementedError

    def store(self) -> None:
        """Make logged points durable, if `log` does not. If it raises, it is called again later."""

    def finish(self, how: Ending) -> None:
        """End the run, as far as this program is concerned.

        Args:
            how: "finished"; "failed", by an error; "killed", by a signal or without `shutdown`.
        """

    # -- a callback --------------------------------------------------------------------------------

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        """Have the run opened, and follow the trainer's history, unless a logger with its key does."""
        history: History = sgd.history
        if history.is_followed(self.key):
            return
        other = None if self._history is None else self._history()
        if other is not None and other.is_followed(self.key, self._delivery):
            raise ConfigurationError(
                f"{self.key}: this logger follows another trainer, which is not shut down: shut that "
                "down before, or give each trainer a logger of its own"
            )
        if self.key not in history.runs and (run := self.new_run()) is not None:
            history.runs[self.key] = run
        step = history.behind.get(self.key, history.begun)
        self._history = weakref.ref(history)
        self._delivery = Delivery(
            self.key,
            partial(self._open, history.runs, step),
            self._take,
            self._send,
            self.finish,
            self._seconds,
            after=self._delivery,
        )
        history.follow(self.key, self._delivery)

    def on_fit_end(self, sgd: Any) -> None:
        """Pass on all rows at once."""
        if self._delivery is not None:
            self._delivery.flush()

    # -- on the thread -----------------------------------------------------------------------------

    def _open(self, runs: dict[str, str], step: int) -> None:
        """Have the run opened, and its id in checkpoints."""
        runs[self.key], done = self.open(runs.get(self.key), step)
        self._begin_run(done)

    def _begin_run(self, done: Mapping[str, int]) -> None:
        """Reset the counts for another run; `done` is what `open` returned."""
        self._points: list[Point] = []
        # by kind of row: until which step all is logged, and, but for events, the greatest step taken
        self._done: dict[str, int] = dict(done)
        self._seen: dict[str, int] = {}
        self._deaths = 0
        self._mark = (0.0, 0)  # seconds and samples, from which the rate is counted
        self._samples = 0

    def _take(self, row: Mapping[str, Any], old: bool) -> None:
        """Take a row, unless the run has it already; events of this program are new, at whichever step."""
        kind, step = row["kind"], row["step"]
        if kind == "step" and step <= self._seen.get(kind, -1):  # again, and so is what follows
            for each, last in self._seen.items():
                self._done[each] = max(last, self._done.get(each, -1))
        values = dict(_numbers(row, _GROUPS[kind]))
        if kind == "event":
            self._deaths += row["event"] in _DEATHS
        elif kind == "step":
            values |= self._rate(row) | {"job/deaths": float(self._deaths)}
        if kind != "event":
            self._seen[kind] = max(step, self._seen.get(kind, -1))
        has = step <= self._done.get(kind, -1) and (kind != "event" or old)
        if has or (kind == "step" and step % self._every):
            return
        event, seconds = "", 0.0
        if kind == "event":
            event, seconds = row["event"], event_of(row)["spent"].get("in all", 0.0)
        text = row.get("line", "")
        self._points.append(Point(kind, step, row["time"], values, text, event, seconds))

    def _send(self) -> None:
        """Pass on the points of what was taken."""
        if self._points:
            self.log(self._points)
            self._points = []
        self.store()

    def _rate(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the samples per second, if a second has passed since it was returned before."""
        self._samples += row["samples"]
        since, samples = self._mark
        now = row.get("seconds") or 0.0
        if 0.0 <= now - since < 1.0:
            return {}
        self._mark = (now, self._samples)
        if now < since:  # another program's seconds
            return {}
        return {"train/samples_per_second": (self._samples - samples) / (now - since)}


def _numbers(row: Mapping[str, Any], group: str) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a row, under the names of loggers."""
    job = ("workers", "servers", "generation", "bytes_pushed", "bytes_pulled")
    for name, value in row.items():
        if name in ("metrics", "learning_rate", "timings", "staleness"):
            values = list(value.values() if isinstance(value, Mapping) else _listed(value))
            names = list(value) if isinstance(value, Mapping) else range(len(values))
            if name == "staleness":
                if values:
                    yield f"{group}/staleness", sum(values) / len(values)
                continue
            for key, number in zip(names, values, strict=True):
                if _is_finite(number):
                    place = {"metrics": group, "timings": "seconds"}.get(name, f"{group}/{name}")
                    alone = name == "learning_rate" and len(values) == 1
                    yield place if alone else f"{place}/{key}", float(number)
        elif name not in ("time", "seconds", "samples") and _is_finite(value):
            yield f"{'job' if name in job else group}/{name}", float(value)


def logged_until(step: int) -> dict[str, int]:
    """Return a logged step for each kind of row, for a tracker that cannot be asked: all until `step`."""
    return dict.fromkeys(_GROUPS, step) if step else {}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def load_module(logger: str, *modules: str) -> Any:
    """Return the first of some modules that is installed; ConfigurationError says which, if none is."""
    missing: list[str | None] = []
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing.append(error.name)
    raise ConfigurationError(f"{logger}(...) needs the package {missing[0]}: install it")


class TensorBoard(Logger):
    """Log to a directory that TensorBoard shows, each run in a directory of its own.

    Needs tensorboard or tensorboardX. The steps of a program that died, after its last checkpoint,
    are hidden by those of the program that continues. Files of events are appended to, which no
    object store can do: at a URL they grow in a temporary directory, are uploaded as they are when
    rows are passed on, and end with 4 MB.

    Args:
        directory: of all runs, as of ``tensorboard --logdir``, or a URL such as
            ``s3://bucket/runs``.
        settings: as of `Logger`.

    Raises:
        ConfigurationError: a URL of a kind that is not known.
    """

    def __init__(self, directory: str | Path, **settings: Any) -> None:
        super().__init__(**settings)
        load_module(
            "TensorBoard", "torch.utils.tensorboard", "tensorboardX"
        )  # told here, before a job starts
        self._directory = place_of(directory)
        self.key = f"TensorBoard {self._directory}"
        self._writer: Any = None
        self._uploads: _Uploads | None = None
        self._folder = self._suffix = ""
        self._purge: int | None = None
        self._files = 0

    def new_run(self) -> str:
        """Return a directory of the run's own."""
        return str(self._directory / datetime.now().strftime("%Y-%m-%dT%H-%M-%S.%f"))

    def open(self, run: str | None, step: int) -> tuple[str, Mapping[str, int]]:
        """Open another file of events in the run's directory."""
        assert run is not None
        if isinstance(place := place_of(run), ObjectUrl):
            self._uploads = _Uploads(place)
        self._folder = run if self._uploads is None else self._uploads.folder
        self._purge, self._suffix = step + 1 if step else None, f".{step:012}"
        self._begin()
        return run, logged_until(step)

    def _begin(self) -> None:
        module = load_module("TensorBoard", "torch.utils.tensorboard", "tensorboardX")
        suffix = f"{self._suffix}.{self._files}"  # names have seconds: those of the next might be the same
        self._writer = module.SummaryWriter(
            self._folder, purge_step=self._purge, filename_suffix=suffix
        )
        self._purge, self._files = None, self._files + 1

    def log(self, points: Sequence[Point]) -> None:
        """Write scalars, and the lines of events."""
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, point.time)
            if point.text:
                self._writer.add_text("events", point.text, point.step, point.time)
        self._writer.flush()

    def store(self) -> None:
        """Upload the file of events, if it is to lie at a URL; begin another if it is large."""
        if self._uploads is not None and self._uploads.upload():
            self._writer.close()
            self._uploads.upload(done=True)
            self._begin()

    def finish(self, how: Ending) -> None:
        """Close the file."""
        self._writer.close()
        if self._uploads is not None:
            self._uploads.end()


class _Uploads:
    """Files in a temporary directory, `folder`, that are uploaded to a prefix."""

    def __init__(self, prefix: ObjectUrl) -> None:
        self._prefix = prefix
        self._kept = tempfile.TemporaryDirectory(prefix="steepest-")
        self.folder = self._kept.name

    def upload(self, done: bool = False) -> bool:
        """Upload all files there, once; return whether one is large.

        Args:
            done: whether the files are complete, and are removed.

        Raises:
            OSError: the store is out of reach; try again.
        """
        storage = ObjectStorage.of(self._prefix.scheme, _BRIEF)
        large = False
        for file in sorted(Path(self.folder).iterdir()):
            content = file.read_bytes()
            storage.put(self._prefix / file.name, content)
            large = large or len(content) > _LARGE
            if done:
                file.unlink()
        return large

    def end(self) -> None:
        """Upload all files for the last time, and remove the directory.

        Raises:
            OSError: the store cannot be reached.
        """
        with self._kept:
            self.upload()


class MLflow(Logger):
    """Log to a run of MLflow, which has its id in checkpoints as the tag "steepest.run".

    Args:
        experiment: its name; made if it does not exist.
        uri: of the tracking server, or of a database, such as "sqlite:///mlflow.db"; None for MLflow's
            own setting.
        run_name: of a new run; None for one that MLflow chooses.
        settings: as of `Logger`.
    """

    def __init__(
        self,
        experiment: str = "steepest",
        uri: str | None = None,
        run_name: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        load_module("MLflow", "mlflow")  # told here, before a job starts
        self.key = " ".join(["MLflow", *([uri] if uri else []), experiment])
        self._experiment, self._uri, self._name = experiment, uri, run_name
        self._client: Any = None
        self._run = ""

    def new_run(self) -> str:
        """Return a tag for the run."""
        return secrets.token_hex(8)

    def open(self, run: str | None, step: int) -> tuple[str, Mapping[str, int]]:
        """Continue the run with this tag, and ask which steps it has; begin it if there is none."""
        assert run is not None
        self._client = load_module("MLflow", "mlflow").MlflowClient(tracking_uri=self._uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = (
            self._client.create_experiment(self._experiment)
            if experiment is None
            else experiment.experiment_id
        )
        runs = self._client.search_runs([number], f"tags.`{_TAG}` = '{run}'", max_results=1)
        if not runs:
            made = self._client.create_run(number, run_name=self._name, tags={_TAG: run})
            self._run = made.info.run_id
            return run, {}
        self._run = runs[0].info.run_id
        self._client.update_run(self._run, status="RUNNING")
        return run, _steps(self._client.get_run(self._run).data.metrics)

    def log(self, points: Sequence[Point]) -> None:
        """Log the points' numbers with one request."""
        metric = load_module("MLflow", "mlflow.entities").Metric
        metrics = [
            metric(name, value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self, how: Ending) -> None:
        """Tell MLflow that the run has ended, and how."""
        self._client.set_terminated(self._run, status=how.upper())


class WandB(Logger):
    """Log to a run of Weights & Biases.

    Offline, where a run cannot be asked which steps it has, the directory of each program has the
    whole history: synchronize the last one only.

    Args:
        project: its name; None for the one that wandb chooses.
        init: more arguments of ``wandb.init``, such as ``{"entity": ..., "config": ...}``.
        settings: as of `Logger`.
    """

    def __init__(
        self, project: str | None = None, init: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        load_module("WandB", "wandb")  # told here, before a job starts
        self.key = f"WandB {project or ''}".rstrip()
        self._project, self._init = project, dict(init or {})
        self._run: Any = None

    def new_run(self) -> str:
        """Return the id that `init` has, or a new one."""
        return str(self._init.get("id") or secrets.token_hex(4))

    def open(self, run: str | None, step: int) -> tuple[str, Mapping[str, int]]:
        """Begin a run, or continue it and look which steps its summary has."""
        which = {"id": run, "resume": "allow"}
        module = load_module("WandB", "wandb")
        self._run = module.init(project=self._project, **(self._init | which))
        for group in dict.fromkeys(_GROUPS.values()):
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")
        for group in ("job", "seconds"):
            self._run.define_metric(f"{group}/*", step_metric="train/step")
        return self._run.id, _steps(self._run.summary)

    def log(self, points: Sequence[Point]) -> None:
        """Log each point; its step is one of its numbers."""
        for point in points:
            self._run.log(point.values)

    def finish(self, how: Ending) -> None:
        """Upload the remaining points, and tell how the run has ended."""
        self._run.finish(exit_code=_EXIT_CODES[how])


class Trackio(Logger):
    """Log to a run of Trackio.

    Args:
        project: its name.
        init: more arguments of ``trackio.init``, such as ``{"space_id": ...}``.
        settings: as of `Logger`.
    """

    def __init__(
        self, project: str, init: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        load_module("Trackio", "trackio")  # told here, before a job starts
        self.key = f"Trackio {project}"
        self._project, self._init = project, dict(init or {})
        self._run: Any = None

    def new_run(self) -> str:
        """Return the name that `init` has, or a new one."""
        return str(self._init.get("name") or f"steepest-{secrets.token_hex(4)}")

    def open(self, run: str | None, step: int) -> tuple[str, Mapping[str, int]]:
        """Begin a run, or continue it and look which steps it has, if it is on this machine."""
        which = {"name": run, "resume": "allow"}
        module = load_module("Trackio", "trackio")
        self._run = module.init(self._project, **(self._init | which))
        return self._run.name, self._logged(step)

    def _logged(self, step: int) -> dict[str, int]:
        """Return by kind of row the greatest step that the run has; elsewhere that of the checkpoint."""
        try:
            storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
            if not self._run._is_local:
                return logged_until(step)
            rows_by_name = {
                f"{group}/step": storage.get_metric_values(
                    self._project, self._run.name, f"{group}/step", run_id=self._run.id
                )
                for group in _GROUPS.values()
            }
        except (ImportError, AttributeError, TypeError):  # another version, without these methods
            return logged_until(step)
        return _steps({name: rows[-1]["value"] for name, rows in rows_by_name.items() if rows})

    def log(self, points: Sequence[Point]) -> None:
        """Log each point."""
        for point in points:
            self._run.log(point.values, step=point.step)

    def finish(self, how: Ending) -> None:
        """Send what is left; Trackio's runs have no status."""
        self._run.finish()


def _steps(logged: Any) -> dict[str, int]:
    """Return by kind of row the greatest step that a run has, which is logged as a number."""
    steps = {kind: logged.get(f"{group}/step") for kind, group in _GROUPS.items()}
    return {kind: int(step) for kind, step in steps.items() if step is not None}
