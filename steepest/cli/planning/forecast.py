"""The result of a plan: a row for each strategy and number of workers, as a table, in words, as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from steepest.cli.planning.events import Links
from steepest.cli.planning.profile import Profile
from steepest.cli.planning.simulation import Prediction

_HEAD = (
    "strategy",
    "workers",
    "step",
    "samples/s",
    "ideal",
    "of ideal",
    "computing",
    "sent a sample",
)
_COLUMNS = (
    "strategy",
    "workers",
    "servers",
    "step_seconds",
    "samples_per_second",
    "ideal_samples_per_second",
    "efficiency",
    "computing",
    "bytes_sent_per_sample",
    "bandwidth_bytes_per_second",
    "latency_seconds",
)
_HALF = 0.5  # of the ideal, to be told
_CHUNK_UNIT = 1 << 16  # bytes, of which an advised size is a multiple
_LEAST_CHUNK = 1 << 19  # bytes of an advised chunk, unless servers would have none
_CHUNKS_EACH = (
    8  # of a server: more chunks shorten a step no further (`benchmarks.plan_published --chunks`)
)
_MANY_SERVERS = 16  # fewer have enough chunks of the usual size
_BUSY = 0.5  # of the cores, that other programs want
_WINS = 1.02  # times as many samples as another, to be better


@dataclass(frozen=True)
class Forecast:
    """Predictions for several strategies and numbers of workers.

    Attributes:
        profile: what was measured, or given.
        links: of all hosts.
        rows: of each strategy all numbers of workers, ascending.
        refused: by strategy, why there is no prediction of it.
        devices: replicas of a worker.
        cores: of the one host that all processes share; None where each worker has its own.
    """

    profile: Profile
    links: Links
    rows: tuple[Prediction, ...]
    refused: tuple[tuple[str, str], ...] = ()
    devices: int = 1
    cores: int | None = None

    @property
    def alone(self) -> float:
        """Samples a second of one process by itself, with as many devices as a worker has."""
        return self.devices * self.profile.samples / self.profile.alone

    def efficiency(self, row: Prediction) -> float:
        """Return a row's speed as a share of the speed at which its workers would compute if none ever waited."""
        return row.samples_per_second / (row.workers * self.alone)

    @property
    def strategies(self) -> list[str]:
        """The strategies, as they were given."""
        return list(dict.fromkeys(row.strategy for row in self.rows))

    def of(self, strategy: str) -> list[Prediction]:
        """Return a strategy's rows."""
        return [row for row in self.rows if row.strategy == strategy]

    def pays_with(self, strategy: str) -> list[int]:
        """Return the numbers of workers, over 1, that are faster than one process alone: from the break-even on."""
        return [
            row.workers
            for row in self.of(strategy)
            if row.workers > 1 and row.samples_per_second > self.alone
        ]

    def best(self, workers: int) -> Prediction | None:
        """Return the fastest strategy for a number of workers; of those within 2 %, the first given."""
        rows = [row for row in self.rows if row.workers == workers]
        most = max((row.samples_per_second for row in rows), default=0.0)
        return next((row for row in rows if row.samples_per_second * _WINS >= most), None)

    # -- for people ----------------------------------------------------------------------------

    def table(self) -> list[list[str]]:
        """Return the rows of a table, of which the first has the names of its columns."""
        rows = [list(_HEAD)]
        for row in self.rows:
            sent = row.sent / (row.samples_per_second * row.seconds)
            rows.append(
                [
                    row.strategy,
                    f"{row.workers:,}",
                    in_words(row.seconds),
                    f"{row.samples_per_second:,.4g}"
                    if row.samples_per_second < 1e4
                    else f"{row.samples_per_second:,.0f}",
                    f"{row.workers * self.alone:,.0f}",
                    f"{self.efficiency(row):.0%}",
                    f"{row.computing:.0%}",
                    f"{sent / 1000:,.1f} kB",
                ]
            )
        return rows

    def advice(self) -> list[str]:
        """Return sentences: from how many workers on a strategy pays, and which is the fastest for each number."""
        alike: dict[str, list[str]] = {}  # strategies by what is said of them
        for name in self.strategies:
            if said := self._pays(name):
                alike.setdefault(said, []).append(name)
        words = [f"{', '.join(names)}: {said}" for said, names in alike.items()]
        reasons: dict[str, list[str]] = {}  # strategies by why there is no prediction
        for name, why in self.refused:
            reasons.setdefault(why, []).append(name)
        words += [f"{', '.join(names)}: {why}" for why, names in reasons.items()]
        return words + self._large_chunks() + self._changes() + self._load()

    def _load(self) -> list[str]:
        """Return what has disturbed the figures: other programs while the model was measured."""
        cores = len(os.sched_getaffinity(0))
        if self.profile.load < _BUSY * cores:
            return []
        return [
            f"Measured while {self.profile.load:.2g} processes, on average over a minute, wanted one of {cores} cores: "
            "times may be too long, repeat it with nothing else running."
        ]

    def _pays(self, name: str) -> str:
        """Describe the numbers of workers with which a strategy pays; "" if it was planned for one worker only."""
        rows = [row for row in self.of(name) if row.workers > 1]
        if not rows:
            return ""
        pays, last = self.pays_with(name), rows[-1].workers
        if not pays:
            return f"of {rows[0].workers:,} to {last:,} workers no number is faster than one process alone."
        far = max((row.workers for row in rows if self.efficiency(row) >= _HALF), default=None)
        reach = (
            f"and at least half of the ideal up to {far:,}"
            if far
            else "and never half of the ideal"
        )
        until = "on" if pays[-1] == last else f"to {pays[-1]:,}"
        return f"faster than one process from {pays[0]:,} workers {until}, {reach}."

    def _large_chunks(self) -> list[str]:
        """Return which strategies have too few chunks for many servers, and the size that would give them enough."""
        alike: dict[str, list[str]] = {}  # strategies by what is said of them
        for name in self.strategies:
            rows = [
                row
                for row in self.of(name)
                if row.servers > row.chunks > 0
                or (row.servers > _MANY_SERVERS and 0 < row.chunks < _CHUNKS_EACH * row.servers)
            ]
            if not rows:
                continue
            most = max(row.servers for row in rows)
            fits = max(
                self.profile.nbytes // (_CHUNKS_EACH * most),
                min(_LEAST_CHUNK, self.profile.nbytes // most),
            )
            if size := fits // _CHUNK_UNIT * _CHUNK_UNIT:
                said = (
                    f"{rows[0].chunks:,} chunks are few for the servers of {rows[0].workers:,} workers "
                    f"and more, and some have more than others: chunk_bytes={size:,} suits {most:,} servers."
                )
                alike.setdefault(said, []).append(name)
        return [f"{', '.join(names)}: {said}" for said, names in alike.items()]

    def _changes(self) -> list[str]:
        """Describe the fastest strategy, and the numbers of workers at which another one takes over."""
        counts = sorted({row.workers for row in self.rows if row.workers > 1})
        best = [(count, row) for count in counts if (row := self.best(count)) is not None]
        if not best:
            return []
        words = [f"{best[0][1].strategy} from {best[0][0]:,} workers on"]
        words += [
            f"{now.strategy} from {count:,} on"
            for (_, before), (count, now) in pairwise(best)
            if now.strategy != before.strategy
        ]
        return [
            f"Fastest in samples a second (within 2 % the first of these): {', '.join(words)}. That ignores learning: "
            "under local, async and ssp a sample teaches less, see steepest compare."
        ]

    # -- files ---------------------------------------------------------------------------------

    def csv(self) -> str:
        """Return a line for each row, with SI units."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for row in self.rows:
            sent = row.sent / (row.samples_per_second * row.seconds)
            figures = (
                row.seconds,
                row.samples_per_second,
                row.workers * self.alone,
                self.efficiency(row),
                row.computing,
                sent,
            )
            writer.writerow(
                [
                    row.strategy,
                    row.workers,
                    row.servers,
                    *(f"{figure:.6g}" for figure in figures),
                    self.links.bandwidth,
                    self.links.latency,
                ]
            )
        return text.getvalue()


def in_words(seconds: float) -> str:
    """Return seconds with a unit for people.

    Example:
        >>> in_words(0.0123), in_words(2.5)
        ('12.3 ms', '2.5 s')
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in columns, the first to the left and the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)
