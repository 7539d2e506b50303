"""Minutes of training in which most processes are killed every few seconds: is anything lost, does anything grow?

    make soak                                            # ten minutes: python -m benchmarks.soak --minutes 10
    python -m benchmarks.soak --minutes 3 --strategy "ps, copies" --workers 4

A perceptron learns scikit-learn's digits. Training goes in bouts of some hundred steps. In each, at a random step, one
process or more, up to all but one of the job's (workers and servers), get SIGKILL, at once or within a second, and are
replaced before the next bout. After the first quarter of a job worker 0 is spared, in the last quarter server 0, so
that processes live long enough to be compared with themselves. Each strategy ("copies" are ``replication=2``, the
others have default settings) has an equal part of the time and a job of its own, in one driver and on one Ray cluster.
The paragraphs about dead workers are Ray's.

Meanwhile the driver gets signals: in each bout one or two SIGINT within two seconds of the step, which end the call
that it makes, after which it makes another one, and in half the calls between two bouts one; and SIGUSR1, for which a
report of what each process is doing has to come.

Under synchronous strategies the samples of the steps of each epoch must add up to the data set; steps that are taken
again, because all copies of something died at once and training continues from a snapshot, replace those before.
In addition each share of the samples must be in exactly one commit of the log, which begins anew after each bout
(`set_weights` with the weights that are there), so that it does not count as growth; after a bout of whose log a part
died with its last holder this begins anew with the next epoch. Then the driver, the servers and the workers are looked
at: memory, threads, open files, sockets; files in /dev/shm, Ray's processes, and what was logged in the bout. At the
end the median of the first third of a process' samples is compared with that of its last third. The exit status is 1
when something grows beyond the bound in the table (`soak_samples.BOUNDS`), a share was lost or repeated, an error ended
a job, or the network has not learned.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import contextlib
import io
import logging
import math
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import ray
import torch

from benchmarks.job_processes import processes
from benchmarks.overhead import positive
from benchmarks.recovery_bodies import LEARNING_RATE, Seen, digits, paced_creator
from benchmarks.soak_samples import (
    LEAST_SAMPLES,
    Log,
    Sample,
    Trend,
    holding,
    place,
    trends,
    trends_text,
)
from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
)
from steepest.core.engine.commit_log import CommitLog
from steepest.core.models.torch import accuracy
from steepest.errors import SteepestError

T = TypeVar("T")
STRATEGIES: dict[str, Any] = {
    "ps, copies": ParameterServerStrategy(num_servers=2, replication=2),
    "ps": "ps",
    "allreduce, copies": AllreduceStrategy(replication=2),
    "allreduce": "allreduce",
    "async": "async",
}
BOUT_STEPS = 300
STEP_SECONDS = 0.002
SPREAD_SECONDS = 1.0
SIGNALS_SECONDS = 2.0
SHORT_SECONDS = 0.03  # about as long as a call between two bouts
WHOLE_SECONDS = 60.0
ACCURACY = 0.9
HISTORY_ROWS = 1000  # the driver's history is full after a few bouts, and grows no more


@dataclass
class Found:
    """What one job showed."""

    strategy: str
    seconds: float = 0.0
    bouts: int = 0
    killed: int = 0
    back: int = 0
    commits: int = 0
    lost: int = 0
    twice: int = 0
    wrong: list[str] = field(default_factory=list)  # epochs without each sample once, in words
    interrupted: Counter[str] = field(default_factory=Counter)  # calls, by name
    reports: int = 0
    accuracy: float = 0.0
    error: str = ""
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))


class Steps(Callback):
    """Adds up the samples of each epoch, and kills processes after a step.

    Attributes:
        back: steps that were taken again.
        killed: names of the processes that were killed in this bout.
        reached: the last step of which is known.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.back = 0
        self.killed: list[str] = []
        self.strike: threading.Thread | None = None
        self._heard: dict[int, tuple[int | None, int]] = {}  # by step: its epoch and samples
        self.reached = 0
        self._open = 0  # the first epoch that is not forgotten
        self._when = -1
        self._victims: list[tuple[float, str]] = []
        self._signals: list[tuple[float, signal.Signals]] = []

    def begin(
        self,
        when: int,
        victims: list[tuple[float, str]],
        signals: Sequence[tuple[float, signal.Signals]] = (),
    ) -> None:
        """In this bout each of the victims dies, and the driver gets signals, some seconds after the step."""
        self._when, self._victims, self.killed, self.strike = when, victims, [], None
        self._signals = list(signals)

    def catch_up(self, sgd: DistributedSGD, until: float = math.inf) -> None:
        """Take the steps from the history of which no callback was told, after a call was interrupted.

        They were committed meanwhile, or taken again between two calls.
        """
        for row in sgd.history:
            if row["kind"] == "step" and (row["epoch"] or 0) >= self._open and row["step"] < until:
                step, what = row["step"], (row["epoch"], row["samples"])
                self.back += step <= self.reached and self._heard.get(step) != what
                self._heard[step] = what
                self.reached = max(self.reached, step)

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        if result.step > self.reached + 1:
            self.catch_up(sgd, result.step)
        for step in range(result.step, self.reached + 1):
            self._heard.pop(step, None)
            self.back += 1
        self.reached = result.step
        self._heard[result.step] = (result.epoch, result.samples)
        if result.step >= self._when and self.strike is None:
            self.strike = threading.Thread(target=self._kill)
            self.strike.start()

    def _kill(self) -> None:
        began, pids = time.monotonic(), processes()
        for delay, what in sorted([*self._victims, *self._signals], key=lambda each: each[0]):
            time.sleep(max(0.0, began + delay - time.monotonic()))
            if isinstance(what, signal.Signals):
                to_driver(what)
                continue
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(pids[what], signal.SIGKILL)
                self.killed.append(what)

    def wrong(self, epoch: int) -> list[str]:
        """The epochs before this one that did not have each sample once, with their steps; they are forgotten."""
        self._open = max(self._open, epoch)
        steps: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for step, (of, samples) in sorted(self._heard.items()):
            if of is not None and of < epoch:
                steps[of][step] = samples
                del self._heard[step]
        return [
            f"epoch {of} has {sum(each.values())} of {self.samples} samples, by step {each}"
            for of, each in steps.items()
            if sum(each.values()) != self.samples
        ]


def to_driver(number: signal.Signals) -> None:
    """Send a signal to this process' main thread, whose waits it ends."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


class Interrupts:
    """Calls of a trainer that SIGINT ends, and that are made again, as by a user who goes on.

    Attributes:
        calls: how many were ended, by name.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._inside = False
        self._before = signal.signal(signal.SIGINT, self._handle)

    def end(self) -> None:
        """Give the signal back to whoever had it."""
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._inside:  # what comes between two calls is of no interest
            self._inside = False
            raise KeyboardInterrupt

    def call(self, name: str, function: Callable[[], T], after: float | None = None) -> T:
        """Return what a function returns, called until no SIGINT ends it.

        Args:
            name: to count by.
            function: makes the call.
            after: seconds, after which the first call gets one; None for none but those of others.
        """
        timer = None
        if after is not None:
            timer = threading.Timer(after, to_driver, [signal.SIGINT])
            timer.start()
        try:
            while True:
                try:
                    self._inside = True
                    found = function()
                    self._inside = False
                    return found
                except KeyboardInterrupt:
                    self.calls[name] += 1
        finally:
            self._inside = False
            if timer is not None:
                timer.join()


class Reports(io.TextIOBase):
    """Counts the reports on SIGUSR1 that are written to a stream, and passes the rest on."""

    def __init__(self, stream: Any) -> None:
        self.count = 0
        self._stream = stream

    def write(self, text: str) -> int:
        if "steepest, on SIGUSR1:" in text:
            self.count += 1
            return len(text)
        return int(self._stream.write(text))

    def flush(self) -> None:
        self._stream.flush()


class Said(logging.Handler):
    """Counts what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = self.bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.lines, self.bytes = self.lines + 1, self.bytes + len(text)

    def take(self) -> Log:
        """What was logged since the last time."""
        log, self.lines, self.bytes = Log(self.lines, self.bytes / 1024), 0, 0
        return log


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--strategy", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES)[:3]
    )
    parser.add_argument("--workers", type=positive, default=3)
    parser.add_argument(
        "--steps", type=positive, default=BOUT_STEPS, help="of one bout, in which processes die"
    )
    parser.add_argument("--seed", type=int, default=0, help="of who dies when")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("steepest").propagate = False  # each death is a warning
    settings: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    ray.init(address="local", num_cpus=2 * options.workers, **settings)
    try:
        return soak(options)
    finally:
        ray.shutdown()


def soak(options: argparse.Namespace) -> int:
    """A job for each strategy; prints what they showed; the exit status."""
    chance = random.Random(options.seed)
    seconds = 60 * options.minutes / len(options.strategy)
    everywhere: dict[str, list[Sample]] = defaultdict(list)
    good = True
    for strategy in options.strategy:
        good &= report(job(strategy, options.workers, options.steps, seconds, chance, everywhere))
    print("\nthe whole run")
    whole = [trend for who, each in everywhere.items() for trend in trends(who, each)]
    print(trends_text(whole), flush=True)
    return 0 if good and not grown(whole) else 1


def job(
    strategy: str,
    workers: int,
    steps: int,
    seconds: float,
    chance: random.Random,
    everywhere: dict[str, list[Sample]],
) -> Found:
    """One job, with deaths in each bout, for about so many seconds and as many bouts as growth can be told from.

    Args:
        everywhere: takes the samples of what outlives the job.
    """
    train, test = digits()
    found, said = Found(strategy), Said()
    creator = paced_creator(train, _constant, STEP_SECONDS, {"accuracy": accuracy})
    run_config = RunConfig(
        failure=FailureConfig(max_failures=1_000_000), keep_log=True, history_rows=HISTORY_ROWS
    )
    logging.getLogger("steepest").addHandler(said)
    began, interrupts = time.monotonic(), Interrupts()
    stderr, sys.stderr = sys.stderr, Reports(sys.stderr)
    try:
        with DistributedSGD(
            creator, num_workers=workers, strategy=STRATEGIES[strategy], run_config=run_config
        ) as trainer:
            bouts = Bouts(trainer, found, len(train[0]), steps, chance, interrupts, sys.stderr)
            while time.monotonic() - began < seconds or found.bouts < LEAST_SAMPLES:
                bouts.take((time.monotonic() - began) / seconds if seconds else 1.0)
                _look(found.samples, everywhere)
                everywhere["log of a bout"].append(said.take())
            found.accuracy = trainer.evaluate(test).metrics["accuracy"]
    except SteepestError as error:
        found.error = f"{type(error).__name__}: {error}"
    finally:
        sys.stderr = stderr
        interrupts.end()
        logging.getLogger("steepest").removeHandler(said)
    found.seconds = time.monotonic() - began
    return found


def _constant(step: int) -> float:
    return LEARNING_RATE


class Bouts:
    """Bouts of one job, and the book of its samples."""

    def __init__(
        self,
        trainer: DistributedSGD,
        found: Found,
        samples: int,
        steps: int,
        chance: random.Random,
        interrupts: Interrupts,
        reports: Reports,
    ) -> None:
        self._interrupts, self._reports = interrupts, reports
        self._trainer, self._found, self._length, self._chance = trainer, found, steps, chance
        self._steps, self._seen = Steps(samples), Seen(samples)
        self._workers = trainer.num_workers
        self._synchronous = found.strategy != "async"

    def take(self, part: float) -> None:
        """Some steps in which processes die, more until all are replaced, and the log of them.

        Args:
            part: of the job's time that is over.
        """
        trainer, found, steps = self._trainer, self._found, self._steps
        at = trainer.stats()
        when = at.step + self._chance.randint(1, max(1, self._length - 20))
        steps.begin(when, self._victims(part), self._signals())
        back, reports = steps.back, self._reports.count
        until = time.monotonic() + WHOLE_SECONDS
        last = self._fit(self._length)
        while steps.strike is None or steps.strike.is_alive() or not self._whole():
            last = self._fit(20)
            if time.monotonic() > until:
                raise SteepestError(f"{trainer.num_workers} workers after {WHOLE_SECONDS:g} s")
        while self._reports.count == reports:
            time.sleep(0.01)
            if time.monotonic() > until:
                raise SteepestError(f"no report on SIGUSR1 within {WHOLE_SECONDS:g} s")
        found.bouts, found.killed = found.bouts + 1, found.killed + len(steps.killed)
        log = self._between("log", trainer.log)
        part = steps.back > back or log.parts[0].start > at.version
        self._account(log, last.epoch or 0, part)
        found.back = steps.back
        weights = self._between("weights", trainer.weights)
        self._between("set_weights", lambda: trainer.set_weights(weights))  # the log begins anew
        found.interrupted, found.reports = self._interrupts.calls, self._reports.count

    def _fit(self, count: int) -> StepResult:
        """Take so many steps at least: after an interrupt as many again."""

        def fit() -> StepResult:
            trainer, steps = self._trainer, self._steps
            trainer.stats()  # when what was interrupted has come to its end
            steps.catch_up(trainer)
            return trainer.fit(steps=count, callbacks=[steps], progress=False)

        return self._interrupts.call("fit", fit)

    def _between(self, name: str, function: Callable[[], T]) -> T:
        """Make a call between two bouts, in which SIGINT may come."""
        after = self._chance.choice([None, self._chance.uniform(0.0, SHORT_SECONDS)])
        return self._interrupts.call(name, function, after)

    def _signals(self) -> list[tuple[float, signal.Signals]]:
        """Which signals the driver gets, and how many seconds after the first death."""
        numbers = [signal.SIGUSR1, *[signal.SIGINT] * self._chance.randint(1, 2)]
        return [(self._chance.uniform(0.0, SIGNALS_SECONDS), number) for number in numbers]

    def _victims(self, part: float) -> list[tuple[float, str]]:
        """Who dies, and how many seconds after the first."""
        names = sorted(name for name in processes() if not name.startswith("spare"))
        spared = [] if part < 0.25 else ["worker 0"] if part < 0.75 else ["server 0"]
        mortal = [name for name in names if name not in spared]
        dying = self._chance.sample(
            mortal, self._chance.randint(1, min(len(mortal), len(names) - 1))
        )
        spread = self._chance.choice([0.0, SPREAD_SECONDS])
        return sorted((self._chance.uniform(0.0, spread), name) for name in dying)

    def _whole(self) -> bool:
        return self._trainer.num_workers == self._workers

    def _account(self, log: CommitLog, epoch: int, part: bool) -> None:
        """Look at the bout's samples; at those of the log unless that is only a part of the bout."""
        found, seen = self._found, self._seen
        found.commits += sum(len(part.commits) for part in log.parts)
        if self._synchronous:
            found.wrong += self._steps.wrong(epoch)
        if part:
            seen.begin_after(epoch)
            return
        seen.add(log)
        seen.close(epoch - 1)  # asynchronous workers may be at the one before
        found.lost, found.twice = seen.lost, seen.twice


def _look(samples: dict[str, list[Sample]], everywhere: dict[str, list[Sample]]) -> None:
    """One sample of everything that is alive; a process that was replaced is another one."""
    for name, pid in processes().items():
        if (held := holding(pid)) is not None:
            samples[f"{name} (pid {pid})"].append(held)
    driver = holding(os.getpid())
    assert driver is not None
    everywhere["driver"].append(driver)
    everywhere["machine"].append(place(os.getpid()))


def report(found: Found) -> bool:
    """Prints what a job showed; whether all is well."""
    print(
        f"\n{found.strategy}: {found.seconds:.0f} s, {found.bouts} bouts, {found.killed} processes "
        f"killed, {sum(found.interrupted.values())} calls interrupted "
        f"({', '.join(f'{name} {n}' for name, n in found.interrupted.most_common())}), "
        f"{found.reports} reports; {found.commits:,} updates, {found.back} of them again, accuracy "
        f"{found.accuracy:.1%}; samples lost {found.lost}, committed twice {found.twice}; epochs "
        f"without each sample once {len(found.wrong)}"
    )
    print(*found.wrong, sep="\n")
    if found.error:
        print(f"ended by {found.error}")
    each = [
        trend for who, samples in sorted(found.samples.items()) for trend in trends(who, samples)
    ]
    print(trends_text(each), flush=True)
    well = not (found.lost or found.twice or found.wrong or found.error)
    return well and found.accuracy >= ACCURACY and not grown(each)


def grown(found: list[Trend]) -> bool:
    return any(trend.grows for trend in found)


if __name__ == "__main__":
    sys.exit(main())
