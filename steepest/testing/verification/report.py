"""The result of a verification: a row for each run, as text, as JSON, and for a test."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

#: What a row may say: it is equal; it differs as it is meant to; it differs; it could not be run; there is nothing
#: to compare.
VERDICTS = ("equal", "as expected", "NOT EQUAL", "failed", "not compared")
_WIDTH = 118


@dataclass(frozen=True)
class VerifiedRun:
    """One run, compared with the run that it has to agree with.

    Attributes:
        run: a description of the run.
        verdict: one of `VERDICTS`.
        found: how far it agrees, or what differs first, in a few words.
        causes: why, and what to do, the likeliest first.
        step: the first step that differs, from 1; 0 for none.
        what, name: what differs in it: "settings", "losses", "gradients", "weights", "samples", "gathered",
            "reports", "steps" or "error"; and the name of the tensor, setting or report.
    """

    run: str
    verdict: str
    found: str
    causes: tuple[str, ...] = ()
    step: int = 0
    what: str = ""
    name: str = ""

    @property
    def is_well(self) -> bool:
        """Whether it shows no mistake."""
        return self.verdict not in ("NOT EQUAL", "failed")

    def lines(self, width: int) -> list[str]:
        """Return lines of text, with a number of columns for the run's name."""
        indent = " " * (width + 2 + 14)
        wrapped = textwrap.wrap(self.found, _WIDTH - len(indent)) or [""]
        lines = [f"{self.run:<{width}}  {self.verdict:<12}  {wrapped[0]}".rstrip()]
        lines += [indent + each for each in wrapped[1:]]
        for cause in self.causes:
            lines += [
                indent + each
                for each in textwrap.wrap(cause, _WIDTH - len(indent), break_long_words=False)
            ]
        return lines


@dataclass(frozen=True)
class VerifyReport:
    """The result of `steepest.testing.verify`.

    Attributes:
        rows: one for each run.
        notes: remarks about things that are no mistakes.
        seconds: the duration of all runs.
    """

    rows: Sequence[VerifiedRun]
    notes: Sequence[str] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def is_equal(self) -> bool:
        """Whether no row shows a mistake."""
        return all(row.is_well for row in self.rows)

    def assert_equal(self) -> None:
        """Raise AssertionError if a row shows a mistake: with all rows."""
        if not self.is_equal:
            raise AssertionError(f"distribution changes the result:\n{self}")

    def as_json(self) -> str:
        """Return it as JSON."""
        return json.dumps({"equal": self.is_equal, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        width = max((len(row.run) for row in self.rows), default=0)
        lines = [line for row in self.rows for line in row.lines(width)]
        for note in self.notes:
            lines += textwrap.wrap(
                f"note: {note}", _WIDTH, subsequent_indent="      ", break_long_words=False
            )
        return "\n".join(lines)
