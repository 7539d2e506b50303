"""What a probe notes of a function that trains, one file for each of its lives, and how it is read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from steepest.loop.kept import pack, unpack
from steepest.loop.kept_values import Form, finder, form_of, restored
from steepest.testing.verification.summaries import GatheredValue, TensorSummary, Variable

_LENGTH = 8  # bytes of the number of those of an entry


@dataclass
class StepRecord:
    """One step of an optimizer.

    Attributes:
        step: its number among the job's, from 1.
        optimizer: the number of its optimizer.
        epoch: in which it is.
        line: of the user's call of `step`, as ``train.py:31``.
        samples: a number for each sample since the step before, see `rows_of`; `batches` of them.
        weight: what the user has said that the last batch weighs; None for as much as it has samples.
        losses: on which `backward` was called.
        counts: the weight of each loss's batch on this worker.
        settings: of the optimizers' groups, such as rates.
        gradients, weights, buffers: by name; weights are those after the step.
        left_over: whether there were gradients before the first `backward`.
        edited: whether gradients were changed between the last `backward` and the step.
        drew: whether random numbers were drawn since the batch was given.
        variables: of the user's functions, by ``function:name``, before the first batch since the step before.
        lines: where each of these functions was then.
        gathered: since the step before.
        drawn: a digest of the random generators at the step.
        sums: whether losses add up the samples of their batch, and gradients those of the workers.
        optimizer_state: what optimizers keep, see `state_of`; of worker 0, behind its last step alone.
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
    gathered: list[GatheredValue]
    drawn: str = ""
    sums: bool = False
    counts: list[float] = field(default_factory=list)
    seconds: float = 0.0
    weights: dict[str, TensorSummary] = field(default_factory=dict)
    buffers: dict[str, TensorSummary] = field(default_factory=dict)
    optimizer_state: dict[str, TensorSummary] = field(default_factory=dict)


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
        generators: names of the random generators that the data set has by itself.
    """

    batch_size: int | None
    has_loader: bool
    optimizers: list[str]
    norms: list[str]
    dropouts: list[str]
    low_precision: bool
    line: str
    generators: list[str] = field(default_factory=list)


@dataclass
class FunctionLife:
    """What one call of the function did, in one process.

    Attributes:
        worker, workers: its number, and how many there were.
        begun: when, in nanoseconds.
        facts: None before `prepare`.
        first: the weights at `prepare`.
        steps, reports: in order; a report has the number of steps before it.
        tried: the step that it began last: one more than the last one taken here.
        notes: by kind ("warned", "opened", "loader", "size", "autocast", "length"): text and line.
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


class EntryFile:
    """A file to which things are appended; what is written stays when its process is killed."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab")

    def append(self, kind: str, value: Any) -> None:
        """Append one thing of a kind.

        Raises:
            ConfigurationError: it cannot be kept, see `form_of`.
        """
        content = pack({"kind": kind, "value": form_of(value, kind)}).numpy().tobytes()
        self._file.write(len(content).to_bytes(_LENGTH, "little") + content)
        self._file.flush()

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lives(folder: Path) -> list[FunctionLife]:
    """Return the lives whose files lie in a folder, oldest first."""
    return sorted(map(_read, folder.glob("*.record")), key=lambda life: life.begun)


def read_entries(path: Path) -> Iterator[tuple[str, Form]]:
    """Yield what was appended to a file, as `form_of` has it, with its kind.

    What a killed process has not written whole is left out.
    """
    with path.open("rb") as file:
        while len(length := file.read(_LENGTH)) == _LENGTH:
            content = bytearray(file.read(int.from_bytes(length, "little")))
            if len(content) < int.from_bytes(length, "little"):
                return
            entry = unpack(torch.frombuffer(content, dtype=torch.uint8))
            yield entry["kind"], entry["value"]


def _read(path: Path) -> FunctionLife:
    life = FunctionLife(0, 1, 0)
    find = finder(_read)
    for kind, form in read_entries(path):
        value = restored(form, None, kind, find)
        if kind == "begun":
            life.worker, life.workers, life.begun = value
        elif kind == "prepared":
            life.facts, life.first = value
        elif kind == "step":
            life.steps.append(value)
        elif kind == "optimizer_state":
            if life.steps:
                life.steps[-1].optimizer_state = value
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
    """The outcome of one run of the job.

    Attributes:
        what: for people.
        lives: of its workers.
        reports: of the job, as the driver has them.
        error: with which it ended; "" for none.
        folder: where the records are.
        killed: pairs of a worker and the step in which it was killed.
        tables: the ids and rows of embedding tables at the end, by name, where they were read.
    """

    what: str
    lives: list[FunctionLife]
    reports: list[dict[str, float]] = field(default_factory=list)
    error: str = ""
    folder: str = ""
    killed: Sequence[tuple[int, int]] = ()
    tables: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def steps_of(self, worker: int) -> dict[int, StepRecord]:
        """Return a worker's steps by number; of a step taken in several lives, the last record."""
        return {
            each.step: each for life in self.lives if life.worker == worker for each in life.steps
        }

    def in_order(self, worker: int) -> dict[int, StepRecord]:
        """Return the steps of a worker that survived the whole job, numbered from 1 without gaps.

        The job's own numbers have gaps if a loop does not step in each batch.
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

    def missing_reports(self) -> frozenset[int]:
        """Return the numbers of the report rows that may lack a killed worker's part.

        These are its last two, and the next one if the script sets weights of batches: a successor has not heard
        them.
        """
        killed = [life for life in self.lives if not life.ended]
        weighs = any(step.weight is not None for life in self.lives for step in life.steps)
        ends = [len(life.reports) for life in killed]
        return frozenset(row for end in ends for row in range(end - 2, end + weighs))

    @property
    def facts(self) -> Facts | None:
        """What was given to `prepare`."""
        return next((life.facts for life in self.lives if life.facts is not None), None)

    def notes(self, kind: str) -> list[tuple[str, str, int]]:
        """Return the text, line and worker of all notes of a kind."""
        return [
            (t, line, life.worker) for life in self.lives for k, t, line in life.notes if k == kind
        ]
