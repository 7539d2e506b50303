"""What a probe notes of a function that trains, one file for each of its lives, and how it is read back."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from steepest.verification.summaries import TensorSummary, Variable


@dataclass
class StepRecord:
    """One step of an optimizer.

    Attributes:
        step: its number among the job's, from 1.
        optimizer: the number of its optimizer.
        epoch: in which it is.
        line: of the user's call of `step`, as ``train.py:31``.
        samples: a number for each sample since the step before, see `rows_of`; `batches` of them.
        weight: what the user has said that the batches weigh; None for as much as they have samples.
        losses: on which `backward` was called.
        settings: of the optimizers' groups, such as rates.
        gradients, weights, buffers: by name; weights are those after the step.
        left_over: whether there were gradients before the first `backward`.
        edited: whether gradients were changed between the last `backward` and the step.
        drew: whether random numbers were drawn since the batch was given.
        variables: of the user's functions, by ``function:name``, before the first batch since the step before.
        lines: where each of these functions was then.
        gathered: digests of what was gathered since the step before.
    """

    step: int
    optimizer: int
    epoch: int
    line: str
    samples: list[int]
    batches: int
    weight: float | None
    losses: list[float]
    settings: list[dict[str, Any]]
    gradients: dict[str, TensorSummary]
    left_over: bool
    edited: bool
    drew: bool
    variables: dict[str, Variable]
    lines: dict[str, str]
    gathered: list[bytes]
    seconds: float = 0.0
    weights: dict[str, TensorSummary] = field(default_factory=dict)
    buffers: dict[str, TensorSummary] = field(default_factory=dict)


@dataclass
class Facts:
    """What a function gave to `prepare`.

    Attributes:
        batch_size: of its training loader; None without a loader, or with one that has none.
        has_loader: whether there is one.
        optimizers: names of their classes.
        norms: names of modules whose forward pass depends on the other samples of a batch.
        dropouts: names of modules that drop at random.
        low_precision: whether a parameter has few bits.
        line: of the call.
    """

    batch_size: int | None
    has_loader: bool
    optimizers: list[str]
    norms: list[str]
    dropouts: list[str]
    low_precision: bool
    line: str


@dataclass
class FunctionLife:
    """What one call of the function did, in one process.

    Attributes:
        worker, workers: its number, and how many there were.
        begun: when, in nanoseconds.
        facts: None before `prepare`.
        first: the weights at `prepare`.
        steps, reports: in order; a report has the number of steps before it.
        tried: the step that it began last, whose number is that behind the last one taken here.
        notes: by kind ("warned", "opened", "loader", "size"): text and line.
        error: that the function has raised; "" for none.
        ended: where it returned, or raised; None if it was killed.
    """

    worker: int
    workers: int
    begun: int
    facts: Facts | None = None
    first: dict[str, TensorSummary] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    reports: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    tried: StepRecord | None = None
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    error: str = ""
    ended: bool = False


class RecordFile:
    """A file to which a probe appends; what is written stays when its process is killed."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file: BinaryIO = (folder / f"{name}.record").open("ab")

    def append(self, kind: str, value: Any) -> None:
        """Append one thing."""
        pickle.dump((kind, value), self._file)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lives(folder: Path) -> list[FunctionLife]:
    """Return the lives whose files lie in a folder, oldest first."""
    return sorted(map(_read, folder.glob("*.record")), key=lambda life: life.begun)


def read_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield what was appended to a file, with its kind; what a killed process has not written whole is left out."""
    with path.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            # written by this program's own processes, in a folder that only its user can enter
            yield pickle.load(file)  # noqa: S301


def _read(path: Path) -> FunctionLife:
    life = FunctionLife(0, 1, 0)
    for kind, value in read_entries(path):
        if kind == "begun":
            life.worker, life.workers, life.begun = value
        elif kind == "prepared":
            life.facts, life.first = value
        elif kind == "step":
            life.steps.append(value)
        elif kind == "tried":
            life.tried = value
        elif kind == "report":
            life.reports.append(value)
        elif kind == "ended":
            life.error, life.ended = value, True
        else:
            life.notes.append((kind, *value))
    return life


@dataclass
class Run:
    """What one run of the job has come to.

    Attributes:
        what: for people.
        lives: of its workers.
        reports: of the job, as the driver has them.
        error: with which it ended; "" for none.
        folder: where the records are.
        killed: pairs of a worker and the step in which it was killed.
    """

    what: str
    lives: list[FunctionLife]
    reports: list[dict[str, float]] = field(default_factory=list)
    error: str = ""
    folder: str = ""
    killed: Sequence[tuple[int, int]] = ()

    def steps_of(self, worker: int) -> dict[int, StepRecord]:
        """Return a worker's steps by number; of one that was taken in several lives the last."""
        return {
            each.step: each for life in self.lives if life.worker == worker for each in life.steps
        }

    def in_order(self, worker: int) -> dict[int, StepRecord]:
        """Return the steps of a worker that went through all of the job: by how many of them there were, from 1.

        Those of the job have gaps in a loop that does not step in each batch.
        """
        return dict(enumerate((each for _, each in sorted(self.steps_of(worker).items())), 1))

    @property
    def workers(self) -> list[int]:
        """The numbers of all workers."""
        return sorted({life.worker for life in self.lives})

    @property
    def length(self) -> int:
        """The number of the job's last step."""
        return max((each.step for life in self.lives for each in life.steps), default=0)

    def length_of(self, worker: int) -> int:
        """Return the number of a worker's last step; 0 where it took none."""
        return max(self.steps_of(worker), default=0)

    @property
    def facts(self) -> Facts | None:
        """What was given to `prepare`."""
        return next((life.facts for life in self.lives if life.facts is not None), None)

    def notes(self, kind: str) -> list[tuple[str, str, int]]:
        """Return the text, line and worker of all notes of a kind."""
        return [
            (t, line, life.worker) for life in self.lives for k, t, line in life.notes if k == kind
        ]
