"""`verify`: a user's function on one process, on several, with deaths, stopped and resumed, and what of it differs."""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steepest.errors import ConfigurationError
from steepest.loop.script import UserScript
from steepest.strategies.named import as_strategy
from steepest.testing.verification import explaining
from steepest.testing.verification.comparing import (
    Comparison,
    Difference,
    noisy_reports,
    noisy_variables,
    to_the_bit,
    whole_and_parts,
)
from steepest.testing.verification.frames import is_users
from steepest.testing.verification.jobs import JobRuns
from steepest.testing.verification.probe import has_lost
from steepest.testing.verification.records import Run
from steepest.testing.verification.report import VerifiedRun, VerifyReport
from steepest.testing.verification.runs import Runs, runs_of
from steepest.validation import require_choice, require_count, require_function

#: What may be asked of deaths.
DEATHS = ("some", "all", "none")
_OTHERS = 'strategy={!r}, of which no result equals that of one process: give "ps", "allreduce" or "simple"'


def verify(  # noqa: PLR0913 - keywords of a user, most of them optional
    function: Callable[..., Any],
    *,
    steps: int = 20,
    num_workers: int = 2,
    strategy: Any = "ps",
    deaths: str = "some",
    seed: int = 0,
    tables: bool = False,
    deterministic: bool = False,
    told: Callable[[str | VerifiedRun], object] | None = None,
) -> VerifyReport:
    """Run a function that trains on one process and on several, with deaths and without, and compare each step.

    All runs are on plain processes of this machine, without Ray. The plain script is compared with one worker,
    with the same
    batches; one worker with several, to rounding; a run in which a worker is killed, or which is stopped and
    resumed, with
    one in which nothing happens, to the bit.

    Args:
        function: as of `steepest.run`; a script too, see `steepest.loop.script.UserScript`; or the model creator
            of a `DistributedSGD`, of whose job the driver sees losses, rates and weights after each step.
        steps: of each run, at most.
        num_workers, strategy, seed: as of `steepest.run`; a strategy whose result is that of one process.
        deaths: "some" for one of two workers each, "all" for each worker in each step, "none".
        tables: whether rows of embedding tables are compared at the end of each run, too.
        deterministic: whether random numbers are drawn by sample in all runs, those of dropout and of data sets
            too, so that they are the same however the batch is divided. What torch's kernels drop in attention and
            recurrent modules is not dropped then.
        told: called with what runs next, and with each row when it is there.

    Returns:
        A row for each run, see `VerifyReport`.

    Raises:
        ConfigurationError: an argument is wrong.

    Example:
        >>> verify(train, num_workers=2).assert_equal()                      # doctest: +SKIP
    """
    is_job = _takes_two(function)
    if not is_job:
        require_function(function)
    require_count("steps", steps, 2)
    require_count("num_workers", num_workers)
    require_choice("deaths", deaths, DEATHS)
    chosen = as_strategy(strategy)
    if chosen.local or not chosen.rule.needs_all:
        raise ConfigurationError(_OTHERS.format(strategy))
    begun = time.perf_counter()
    tell = told or (lambda _: None)
    if is_job and (tables or deterministic):
        raise ConfigurationError(
            "tables= and deterministic= with a model creator: give a function with a loop of its own"
        )
    with runs_of(
        function, steps, strategy, seed, tell=tell, by_sample=deterministic, tables=tables
    ) as runs:
        made = _Verification(runs, num_workers, deaths, _sources(function))
        for row in made.rows_of_job(function) if is_job else made.rows():
            tell(row)
    return VerifyReport(tuple(made.found), tuple(made.notes), time.perf_counter() - begun)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function is called with two arguments, as model creators are."""
    try:
        inspect.signature(function).bind(0, 0)
    except (TypeError, ValueError):
        return False
    return True


def _sources(function: Callable[[], Any]) -> dict[str, str]:
    """Return the text of the program, and of what lies beside it, by the names of files."""
    if isinstance(function, UserScript):
        folder, own = function.folder, {os.path.basename(function.path): function.text}
    else:
        try:
            file = inspect.getsourcefile(inspect.unwrap(function)) or ""
        except TypeError:
            return {}
        folder, own = os.path.dirname(os.path.abspath(file)), {}
    sources = {}
    for path in sorted(Path(folder).glob("*.py"))[:200]:
        sources[path.name] = path.read_text(encoding="utf-8", errors="replace")
    return {**sources, **own}


@dataclass
class _Verification:
    """The rows of one verification."""

    runs: Runs
    workers: int
    deaths: str
    sources: dict[str, str]
    found: list[VerifiedRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    noisy_variables: set[str] = field(default_factory=set)
    noisy_reports: set[str] = field(default_factory=set)
    is_random: bool = False  # whether the script does not do the same twice: then no run can be compared with another
    told_of: dict[str, str] = field(default_factory=dict)  # variables that changed nothing, by name

    def rows(self) -> Iterator[VerifiedRun]:
        """Make the runs; yield each row when it is there."""
        for row in self._rows():
            self.found.append(row)
            yield row

    def _rows(self) -> Iterator[VerifiedRun]:
        many = self.runs.job(f"{self.workers} workers", self.workers)
        self.runs.learn(many)
        batch = None if many.facts is None else many.facts.batch_size
        each = "" if batch is None else f", batch {batch} each"
        name = f"{self.workers} workers{each}"
        if many.error:
            plain = self.runs.plain("the plain script")
            if plain.error:
                yield VerifiedRun("the plain script", "failed", _short(plain.error))
            causes = (*explaining.of_decisions(many, self.sources), *_where(many))
            yield VerifiedRun(name, "failed", _short(many.error), causes)
            return
        if not many.length:
            yield VerifiedRun(
                name, "failed", "no step was taken: the function returned before optimizer.step()"
            )
            return
        cuts = batch is not None or (many.facts is not None and not many.facts.has_loader)
        one = self.runs.job(
            "one worker", 1, batches=self.workers if batch else 1, keeps_batches=True
        )
        yield from self._of_one(one, None if batch is None else batch * self.workers)
        if one.error or self.is_random:
            return
        if self.workers > 1:
            yield (
                self._of_several(name, one, many)
                if cuts
                else VerifiedRun(
                    name,
                    "not compared",
                    f"{many.length} steps; a batch_sampler cuts the batches, which one process cannot have together",
                )
            )
        yield from self._of_deaths(many)
        yield self._stopped(many)
        self.notes += [*self.told_of.values(), *explaining.of_files(many)]
        self.notes += explaining.of_lengths(many)
        if all(row.verdict != "NOT EQUAL" for row in self.found):
            self.notes += explaining.of_decisions(many, self.sources)

    # -- a job with a model creator ------------------------------------------------------------

    def rows_of_job(self, creator: Callable[[int, int], Any]) -> Iterator[VerifiedRun]:
        """Make the runs of a `DistributedSGD` job; yield each row when it is there."""
        for row in self._rows_of_job(creator):
            self.found.append(row)
            yield row

    def _rows_of_job(self, creator: Callable[[int, int], Any]) -> Iterator[VerifiedRun]:
        runs = self.runs
        jobs = JobRuns(creator, runs.steps, runs.strategy, runs.seed, runs.folder, runs.deadline)

        def run(what: str, workers: int, **how: Any) -> Run:
            runs.tell(what)
            return jobs.job(what, workers, **how)

        many = run(f"{self.workers} workers", self.workers)
        if many.error or many.facts is None or many.facts.batch_size is None:
            yield VerifiedRun(many.what, "failed", _short(many.error))
            return
        batch = many.facts.batch_size
        name, whole = f"one process, batch {batch * self.workers}", batch * self.workers
        one, again = (run("one process", 1, samples=whole) for _ in range(2))
        for each in (one, again):
            if each.error:
                yield VerifiedRun(name, "failed", _short(each.error))
                return
        if (itself := to_the_bit(one, again).first) is not None:
            yield _row(
                name,
                "NOT EQUAL",
                itself,
                f"to itself: {_of(itself)}",
                [explaining.of_itself(one, again)],
            )
            return
        yield VerifiedRun(name, "equal", f"{one.length} steps; twice the same bits")
        compared = whole_and_parts(one, many)
        name = f"{self.workers} workers, batch {batch} each"
        if compared.first is None:
            yield VerifiedRun(name, "equal", _agreement(compared))
        else:
            causes = explaining.of_job(compared.first, self.workers)
            yield _row(name, "NOT EQUAL", compared.first, _of(compared.first), causes)
        stop = max(many.length * 9 // 20, 1)
        disturbed: list[tuple[str, dict[str, Any]]] = [
            (f"worker {worker} killed behind step {step}", {"kill": (worker, step)})
            for worker, step in self._kills(many.length)
        ]
        disturbed.append((f"stopped at step {stop}, resumed", {"stops_at": stop}))
        for name, how in disturbed:
            other = run(name, self.workers, **how)
            first = to_the_bit(many, other).first
            if other.error:
                yield VerifiedRun(
                    name, "NOT EQUAL", f"it ends with {_short(other.error)}", (), 0, "error"
                )
            elif first is None:
                yield VerifiedRun(name, "equal", "bits")
            else:
                yield _row(name, "NOT EQUAL", first, _of(first), [explaining.STATE_OF_MODEL])

    # -- one process ---------------------------------------------------------------------------

    def _of_one(self, one: Run, batch: int | None) -> Iterator[VerifiedRun]:
        name = "one process" + ("" if batch is None else f", batch {batch}")
        if one.error:
            yield VerifiedRun(name, "failed", _short(one.error))
            return
        if has_lost(Path(one.folder)):
            yield from self._of_unkept(name, one)
            return
        plain = self.runs.plain("the plain script", one)
        if plain.error:
            yield VerifiedRun(name, "failed", f"the plain script ends with {_short(plain.error)}")
            return
        self._learn_noise(one, plain)
        compared = whole_and_parts(plain, one, self.noisy_reports, gradients=False)
        found_first = compared.first
        if found_first is None or found_first.what == "reports":
            yield VerifiedRun(
                name, "equal", f"{one.length} steps; the plain script, and one worker"
            )
            return
        again = self.runs.plain("the plain script, again", one)
        self._learn_noise(plain, again)
        itself = to_the_bit(plain, again)
        if itself.first is not None and itself.first.what != "reports":
            cause, self.is_random = explaining.of_itself(plain, again), True
            yield _row(name, "NOT EQUAL", itself.first, f"to itself: {_of(itself.first)}", [cause])
            return
        causes = explaining.of_parts(found_first, plain, one)
        yield _row(
            name,
            "NOT EQUAL",
            found_first,
            f"one worker to the plain script: {_of(found_first)}",
            causes,
        )

    def _of_unkept(self, name: str, one: Run) -> Iterator[VerifiedRun]:
        """Compare one worker with itself, where its batches cannot be kept for the plain script."""
        again = self.runs.job(
            "one worker, again",
            1,
            batches=self.workers if one.facts and one.facts.batch_size else 1,
        )
        self._learn_noise(one, again)
        itself = to_the_bit(one, again, self.noisy_reports).first
        if again.error or itself is not None:
            self.is_random = True
            shown = _short(again.error) if itself is None else f"to itself: {_of(itself)}"
            yield VerifiedRun(name, "NOT EQUAL", shown, (explaining.of_itself(one, again),))
            return
        cause = (
            "the loader's batches are of a class that cannot be kept, or more than 512 MB: the plain script, which "
            "would read them, is not run"
        )
        yield VerifiedRun(
            name, "equal", f"{one.length} steps; one worker, twice the same bits", (cause,)
        )

    def _learn_noise(self, one: Run, again: Run) -> None:
        self.noisy_reports |= noisy_reports(one, again)

    # -- several workers -----------------------------------------------------------------------

    def _of_several(self, name: str, one: Run, many: Run) -> VerifiedRun:
        compared = whole_and_parts(one, many, self.noisy_reports)
        if compared.first is None and compared.buffers is not None:
            cause = explaining.of_buffers(compared.buffers, many)
            return VerifiedRun(name, "as expected", _agreement(compared), (cause,))
        if compared.first is None:
            rows = "".join(f", rows of {table!r}" for table in sorted(many.tables))
            return VerifiedRun(name, "equal", _agreement(compared) + rows)
        facts = many.facts
        expected = explaining.expected_causes(facts, (one, many))
        if facts is not None and not facts.has_loader:
            return self._without_loader(name, compared.first, one, many, expected)
        may_draw = bool(expected) or compared.each_once is False
        if not may_draw or compared.first.what in ("settings", "steps"):
            return self._unlike(name, compared.first, one, many)
        calm_many = self.runs.job(
            f"{self.workers} workers, random numbers by sample", self.workers, aside=True
        )
        calm_one = self.runs.job(
            "one worker, random numbers by sample", 1, aside=True, batches=self.workers
        )
        if calm_many.error or calm_one.error:
            return self._unlike(name, compared.first, one, many)
        calm = whole_and_parts(calm_one, calm_many, self.noisy_reports)
        if not expected and calm.first is not None:
            return self._unlike(name, compared.first, one, many)
        expected = expected or [
            "the data set draws random numbers (augmentation), other ones in each worker"
        ]
        if calm.first is None:
            shown = f"{_agreement(calm)}, when random numbers are drawn by sample"
            return VerifiedRun(name, "as expected", shown, tuple(expected))
        return self._unlike(name, calm.first, calm_one, calm_many)

    def _unlike(self, name: str, first: Difference, one: Run, many: Run) -> VerifiedRun:
        return _row(name, "NOT EQUAL", first, _of(first), explaining.of_parts(first, one, many))

    def _without_loader(
        self, name: str, first: Difference, one: Run, many: Run, expected: Sequence[str]
    ) -> VerifiedRun:
        causes = explaining.of_parts(first, one, many)
        if many.notes("loader") or first.what in ("settings", "steps"):
            return _row(name, "NOT EQUAL", first, _of(first), causes)
        cause = (
            "a loop without a loader makes its data by itself, on each worker other ones: one process that makes "
            "the data of all "
            "would have to be written for it"
        )
        return _row(name, "not compared", first, f"{many.length} steps", [cause, *expected[:1]])

    # -- deaths --------------------------------------------------------------------------------

    def _of_deaths(self, many: Run) -> Iterator[VerifiedRun]:
        well = 0
        for worker, step in self._kills(many.length):
            name = f"worker {worker} killed at step {step}"
            row = self._disturbed(name, many, step, kills=((worker, step),))
            if self.deaths != "all" or not row.is_well:
                yield row
            else:
                well += 1
        if self.deaths == "all" and well:
            yield VerifiedRun(f"each worker killed at each step ({well})", "equal", "bits")

    def _kills(self, length: int) -> list[tuple[int, int]]:
        """Return which workers are killed, and in which steps, of a job of so many."""
        last = self.workers - 1
        if self.deaths == "none":
            return []
        if self.deaths == "all":
            return [(w, step) for step in range(1, length + 1) for w in range(last, -1, -1)]
        some = {last: -(-length * 7 // 20), 0: -(-length * 12 // 20)}
        return list(some.items())

    def _stopped(self, many: Run) -> VerifiedRun:
        step = max(many.length * 9 // 20, 1)
        return self._disturbed(f"stopped at step {step}, resumed", many, step, stops_at=step)

    def _disturbed(self, name: str, many: Run, step: int, **how: Any) -> VerifiedRun:
        other = self.runs.job(name, self.workers, **how)
        self.noisy_variables |= noisy_variables(many, other, step)
        if other.error:
            causes = explaining.of_death(
                None, many, other, step, self.noisy_variables, self.sources
            )
            causes += [c for c in explaining.of_decisions(many, self.sources) if c not in causes]
            shown = f"it ends with {_short(other.error)}"
            return VerifiedRun(
                name, "NOT EQUAL", shown, tuple(causes) or _where(other), step, "error"
            )
        compared = to_the_bit(many, other, self.noisy_reports)
        causes_of_death = explaining.of_death(
            compared.first, many, other, step, self.noisy_variables, self.sources
        )
        if compared.first is None:
            noted = explaining.of_counters(many, other, step, self.noisy_variables, self.sources)
            for variable, text in noted.items():
                self.told_of.setdefault(variable, text)
            missing = compared.missing
            lacks = (
                ""
                if missing is None
                else f"; row {missing} of the reports lacks a part of the killed worker's"
            )
            if compared.buffers is not None:
                told_of = (explaining.of_buffers_of_successor(compared.buffers),)
                return VerifiedRun(name, "as expected", f"bits but for a buffer{lacks}", told_of)
            return VerifiedRun(name, "equal", "bits" + lacks)
        if compared.buffers is not None:
            causes_of_death.append(explaining.of_buffers_of_successor(compared.buffers))
        return _row(name, "NOT EQUAL", compared.first, _of(compared.first), causes_of_death)


def _row(
    name: str, verdict: str, first: Difference, summary: str, causes: Sequence[str]
) -> VerifiedRun:
    return VerifiedRun(name, verdict, summary, tuple(causes), first.step, first.what, first.name)


def _of(first: Difference) -> str:
    """Return a difference in words."""
    name, _, group = first.name.partition("@")
    what = {
        "settings": name if group in ("", "0") else f"{name} of group {group}",
        "reports": f"report({name}=)" if name else "reports",
        "losses": "the loss",
        "gradients": f"the gradient of {name}" if name else "the gradient",
        "steps": "the number of steps",
        "gathered": f"what is gathered at {name}",
        "draws": "random draws",
        "rows": f"the row of table {name}",
        "optimizer_state": f"the optimizer's {name}",
        "buffers": f"the buffer {name}",
    }.get(first.what, f"{first.what} of {name}" if name else first.what)
    where = f"from step {first.step}: " if first.step else ""
    values = f", {first.here} there, {first.there} here" if first.here or first.there else ""
    size = f", by {first.size:.0e} of it" if first.size > 0 else ""
    return f"{where}{what}{values}{size}"


def _agreement(compared: Comparison) -> str:
    parts = [
        f"{name} {size:.0e}" if size else f"{name} bits"
        for name, size in dict(compared.distances).items()
    ]
    if compared.each_once:
        parts.append("samples each once")
    return ", ".join(parts)


def _where(run: Run) -> tuple[str, ...]:
    """Return what workers have warned of; without that, to which step each has come."""
    lines = {f"worker {life.worker} at {life.tried.line}" for life in run.lives if life.tried}
    if warned := explaining.warnings_of(run):
        return tuple(warned)
    return (f"the step that failed: {', '.join(sorted(lines))}",) if lines else ()


def _short(error: str) -> str:
    """Return an error without its traceback, and where the user's program was."""
    said, _, trace = error.partition("\nTraceback")
    lines = [line.strip() for line in said.strip().splitlines() if line.strip()]
    text = " ".join(lines)
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    users = [f"{os.path.basename(file)}:{line}" for file, line in frames if is_users(file)]
    where = f" ({users[-1]})" if users and users[-1] not in text else ""
    return (text if len(text) <= 700 else f"{text[:300]} ... {text[-380:]}") + where
