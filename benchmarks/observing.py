"""What it costs to look at a job: the time of a step while its timeline is recorded, or its page is open.

    python -m benchmarks.observing                       # the ConvNet under "ps", less than four minutes
    python -m benchmarks.observing --strategy allreduce --model mlp --seconds 900 --json observing.json

One job of two workers trains in many short turns. A pair of turns, one without and one with ``timeline`` (recorded from
before the turn; the file is written after it, and is not counted) or, where plotly is installed, ``page``, whose data
another process, which rests in the turn without, fetches twice a second, lies next to each other, in the one order and
then in the other, until `--seconds` are over. Of pairs the median is told, with the interval in which it lies with 95 %
by resampling (Efron 1979):

- ``clock``: the ratio of the times of a step, which other programs of a machine disturb the most;
- ``processors``: the ratio of the processor time of all processes of the job and the driver; of a page the
  reader's own process does not count;
- of each process, the processor time of a step without, and the microseconds that are added: of all its threads, and of
  the busiest, which takes the steps.

Last stand the calls of the library's functions in a step of two workers, without and with a recorded timeline, which no
other program changes, and what that adds to the processor time of all roles in one thread (``--inside`` measures these
alone); a page makes none in processes of workers and servers but "counters", every five seconds. What a driver takes to
answer a page once is measured in this thread too: twice that is what an open page takes of each second of a processor.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, thread_time
from types import FrameType

import torch

import steepest
from benchmarks.models import WORKLOADS
from benchmarks.overhead import positive
from benchmarks.rivals import WORKERS
from steepest import DistributedSGD, TorchModel
from steepest.core.engine.spans import SpanRing, record_roles
from steepest.errors import ConfigurationError
from steepest.observe.history import Figures, History
from steepest.observe.page.run_view import Known, RunView
from steepest.observe.results import StepResult
from steepest.strategies.named import as_strategy
from steepest.testing import InProcessCluster
from steepest.testing.models import linear_model_creator

PACKAGE = f"{Path(steepest.__file__).parent}/"
#: A program that fetches the page's data as an open page does, given its address: from "on" at its input to "off".
LOOK = """
import json, select, sys, urllib.request
address, _, token = sys.argv[1].partition("#token=")
query = ""
for _ in iter(sys.stdin.readline, ""):
    said = False
    while True:
        headers = {"Authorization": f"Bearer {token}"}
        with urllib.request.urlopen(urllib.request.Request(f"{address}data{query}", headers=headers)) as answer:
            found = json.load(answer)
        curves = found["curves"]
        since = max(curves["from"] + len(curves["step"]) - 1, 0)
        query = f"?since={since}&revision={curves['revision']}&changes={found['changes']}"
        if not said:
            said = print("seen", flush=True) is None
        if select.select([sys.stdin], [], [], 0.5)[0]:
            break
    sys.stdin.readline()
    print("rests", flush=True)
"""
WANTED = {"timeline": 1.02, "page": 1.01}
RESAMPLED = 2000
Interval = tuple[float, float, float]  # median, and between what it lies


@dataclass(frozen=True)
class Spent:
    """Seconds of a step.

    Attributes:
        clock: by the clock.
        processes: processor time by process.
        threads: that of its busiest thread.
    """

    clock: float
    processes: dict[str, float]
    threads: dict[str, float]


Pair = tuple[Spent, Spent]  # without, with


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observing")
    parser.add_argument("--model", choices=[*WORKLOADS], default="convnet")
    parser.add_argument("--strategy", default="ps")
    parser.add_argument(
        "--rounds", type=positive, default=1000, help="at most so many pairs of each"
    )
    parser.add_argument(
        "--seconds", type=positive, default=180, help="of the program: begin no pair after these"
    )
    parser.add_argument("--steps", type=positive, help="steps of one turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    parser.add_argument("--inside", action="store_true", help="measure in one thread alone")
    options = parser.parse_args(arguments)
    end = perf_counter() + options.seconds
    if options.inside:
        show_inside(options.strategy)
        return
    workload = WORKLOADS[options.model]
    steps = options.steps or max(workload.steps // 2, 1)

    def creator(worker_index: int, device_index: int) -> TorchModel:
        torch.set_num_threads(1)
        return workload.model()

    found: dict[str, list[Pair]] = {}
    with (
        DistributedSGD(creator, WORKERS, strategy=options.strategy) as sgd,
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as reading,
    ):
        trace = Path(folder) / "trace.json"
        off = functools.partial(spent_by, sgd, steps)
        turns: dict[str, tuple[Callable[[], Spent], Callable[[], Spent]]] = {
            "timeline": (off, functools.partial(with_timeline, sgd, steps, trace))
        }
        with contextlib.suppress(ConfigurationError):  # plotly is not installed
            reader = reading.enter_context(Reader(sgd.page().url))
            turns["page"] = (off, functools.partial(with_page, sgd, steps, reader))
        for turn in itertools.chain.from_iterable(turns.values()):
            turn()
        number = 0
        while number < options.rounds and (perf_counter() < end or not number):
            number += 1
            for name, both in turns.items():
                found.setdefault(name, []).append(pair_of(*both, number % 2 == 1))
        size = trace.stat().st_size / 1e6
    print(
        f"{options.model}, {options.strategy}, {WORKERS} workers, {number} pairs of turns of {steps} steps, "
        f"load {os.getloadavg()[0]:.0f}"
    )
    for name, pairs in found.items():
        print(table(name, pairs), flush=True)
    print(f"\nthe last trace has {size:.1f} MB")
    show_inside(options.strategy)
    if options.json:
        rows = {name: [list(map(asdict, pair)) for pair in pairs] for name, pairs in found.items()}
        options.json.write_text(json.dumps(rows) + "\n")


def show_inside(strategy: str) -> None:
    """Print what a recorded timeline adds to a step whose roles are all in this thread."""
    plain, recorded = (calls_of_a_step(strategy, recorded) for recorded in (False, True))
    print(
        f"calls of functions in a step of {WORKERS} workers: {plain:.0f}, recorded {recorded:.0f}"
    )
    added, without = added_to_a_step(strategy)
    print(
        f"processor time of such a step, all roles in one thread: {without:.0f} us, recorded {added} us"
    )
    for steps in (10, 100):
        taken = an_answer(steps)
        print(f"processor time of the driver to answer a page after {steps} new steps: {taken} us")


def pair_of(off: Callable[[], Spent], turn: Callable[[], Spent], reverse: bool) -> Pair:
    """Take both turns, the second first if `reverse`; return without, with."""
    if reverse:
        observed = turn()
        return off(), observed
    plain = off()
    return plain, turn()


# -- turns --------------------------------------------------------------------------------------


def spent_by(sgd: DistributedSGD, steps: int) -> Spent:
    """Take steps; return what one took."""
    pids = {"driver": os.getpid(), **{each.name: each.pid for each in sgd.processes()}}
    begin, before = perf_counter(), {name: thread_seconds(pid) for name, pid in pids.items()}
    sgd.fit(steps=steps, progress=False)
    clock = perf_counter() - begin
    used: dict[str, list[float]] = {}
    for name, pid in pids.items():
        after = thread_seconds(pid)
        used[name] = [(after[task] - before[name].get(task, 0.0)) / steps for task in after]
    return Spent(
        clock / steps,
        {name: sum(each) for name, each in used.items()},
        {name: max(each, default=0.0) for name, each in used.items()},
    )


def thread_seconds(pid: int) -> dict[str, float]:
    """Return the processor time of each thread of a process; of one that ends meanwhile nothing."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def with_timeline(sgd: DistributedSGD, steps: int, path: Path) -> Spent:
    with sgd.timeline(path):
        return spent_by(sgd, steps)


class Reader:
    """Another process that looks at a page, or rests, with its caches filled in either case."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-c", LOOK, url]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def say(self, word: str, answer: str) -> None:
        """Have it look ("on"), or rest ("off"); return when it does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline().strip() != answer:
            raise RuntimeError("what looks at the page has ended")


def with_page(sgd: DistributedSGD, steps: int, reader: Reader) -> Spent:
    reader.say("on", "seen")  # it has the page
    try:
        return spent_by(sgd, steps)
    finally:
        reader.say("off", "rests")


# -- statistics -----------------------------------------------------------------------------------


def median_of(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the median, and the interval in which it lies with 95 % by resampling."""
    generator = random.Random(seed)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values))) for _ in range(RESAMPLED)
    )
    edge = RESAMPLED // 40
    return statistics.median(values), medians[edge], medians[-edge - 1]


def table(name: str, pairs: Sequence[Pair]) -> str:
    """Return what pairs tell, as text."""

    def ratio(of: Callable[[Spent], float]) -> str:
        middle, low, high = median_of([of(observed) / of(plain) for plain, observed in pairs])
        return f"{middle:.3f} ({low:.3f} to {high:.3f})"

    lines = [
        f"\n{name}, wanted {WANTED[name]:.2f}",
        f"  clock       {ratio(lambda spent: spent.clock)}",
        f"  processors  {ratio(lambda spent: sum(spent.processes.values()))}",
        f"  {'':12} us/step without   added, all threads         added, busiest thread",
    ]
    for process in pairs[0][0].processes:
        without = 1e6 * statistics.median(each.processes[process] for each, _ in pairs)
        added = [
            microseconds([after[process] - before[process] for before, after in each])
            for each in (
                [(plain.processes, observed.processes) for plain, observed in pairs],
                [(plain.threads, observed.threads) for plain, observed in pairs],
            )
        ]
        lines.append(f"  {process:12} {without:15.0f}   {added[0]:26} {added[1]}")
    return "\n".join(lines)


def microseconds(seconds: Sequence[float]) -> str:
    """Return the median of some seconds as text."""
    middle, low, high = (1e6 * each for each in median_of(seconds))
    return f"{middle:+.1f} ({low:+.1f} to {high:+.1f})"


# -- calls ----------------------------------------------------------------------------------------


def one_thread(name: str, recorded: bool) -> InProcessCluster:
    """Return a job with all roles in this thread, whose timeline is recorded or not."""
    cluster = InProcessCluster(
        linear_model_creator(), num_workers=WORKERS, strategy=as_strategy(name)
    )
    if recorded:
        for router in {*cluster.server_routers, *cluster.worker_routers}:
            record_roles(router, SpanRing(1 << 12))
    cluster.step(20)
    return cluster


def calls_of_a_step(name: str, recorded: bool, steps: int = 20) -> float:
    """Return how many of the library's functions a step of all roles in one thread calls."""
    cluster = one_thread(name, recorded)
    with counted() as calls:
        cluster.step(steps)
    return calls.total() / steps


def added_to_a_step(name: str, rounds: int = 81, steps: int = 10) -> tuple[str, float]:
    """Return what recording adds to this thread's processor time of a step of all roles, and that without, in us."""
    clusters = [one_thread(name, recorded) for recorded in (False, True)]
    found = []
    for number in range(rounds):
        spent = [0.0, 0.0]
        for at in (0, 1) if number % 2 else (1, 0):
            began = thread_time()
            clusters[at].step(steps)
            spent[at] = (thread_time() - began) / steps
        found.append(spent)
    return microseconds([after - before for before, after in found]), 1e6 * statistics.median(
        before for before, _ in found
    )


def an_answer(steps: int, answers: int = 81) -> str:
    """Return what a driver's thread takes to read so many new steps of two workers and answer an open page, in us."""
    history, view, found = History(), RunView("a run"), []
    row = record = 0
    known = Known()
    for number in range(answers):
        for step in range(number * steps + 1, (number + 1) * steps + 1):
            timings = {"compute": 0.005, "data": 0.001, "wait": 0.002}
            result = StepResult(step, 0, 1 / step, {}, 128, (0, 0), timings, 2.0, (0.1,))
            spent = [(worker, 0.001, 0.005, 0.002) for worker in range(WORKERS)]
            history.stepped(result, Figures(2, 1, 0, 8000, 8000, 0.006 * step), ends_epoch=False)
            history.record.stepped(step, 0.006 * step, spent)
        began = thread_time()
        rows, row, _ = history.since(row)
        view.add_all(rows)
        rows, record = history.record.rows(record)
        view.add_all(rows)
        told = view.as_json(known, history.record.open_span())
        json.dumps(told, separators=(",", ":")).encode()
        found.append(thread_time() - began)
        curves = told["curves"]
        since = max(curves["from"] + len(curves["step"]) - 1, 0)
        known = Known(since, curves["revision"], told["changes"])
    return microseconds(found).replace("+", "")


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of the library's functions, without those of what holds a job in one thread."""
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if (
            event == "call"
            and file.startswith(PACKAGE)
            and not file.startswith(f"{PACKAGE}testing/")
        ):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(see)
    try:
        yield calls
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    main()
