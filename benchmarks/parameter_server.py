"""The parameter server beside what one would use or write in its place.

    python -m benchmarks.parameter_server                          # every table
    python -m benchmarks.parameter_server --only sharded small --rounds 3
    python -m benchmarks.parameter_server --only-rivals            # without steepest
    python -m benchmarks.parameter_server --scaling                # steepest alone, workers by servers

Tables:

``sharded``      the classic exercise: 100 MB of float64 in two shards; four Ray tasks, five times each, pull
                 all of it, make an update of ones, and push it. Rival: an actor for each shard. Ours by
                 ``push_pull`` of an update made in ``empty()``, and also of an array of the user's, and by
                 ``pull`` and ``push``. The time of the whole exercise.
``sharded-plain`` ours by ``pull`` and ``push`` beside the same tasks without a server, which copy 100 MB, fill 100 MB
                 and add them up, on memory of their own that they have had before.
``mnist_async``  the network of 1,960 parameters at batch 128, two workers, asynchronous SGD. Rivals: the
                 asynchronous loop of Ray's tutorial, its weights as tensors and as numpy arrays. "free" only
                 computes the gradients: the most that is possible.
``network-N``    N workers push 100 MB of float32 each and pull as much, between two network namespaces
                 joined by veth. Rivals: Gloo, which sends back what it received (the network alone), as one
                 message or in pieces of 4 MB; and Gloo that adds each piece first. The time of a round of
                 the slowest worker.
``host-N``       the same on one host without namespaces, where Gloo goes over loopback. Ours by ``push_pull`` of an
                 update made in ``empty()``; also with one server, and of an array of the user's. Needs no root.
``small``        push 1 kB and pull 1 kB from the driver. Rival: one actor call.

Every process has one torch thread. The contenders of a table stay alive, blocked while idle, and take turns;
odd rounds run in reverse order. A ratio is the median over rounds of our time over a rival's time in the same
round, with its range: below 1, ours is faster. Every contender checks that no update was lost.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # namespaces have no names for hosts, and torch warns of it

import argparse
import contextlib
import json
import secrets
import statistics
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks import parameter_server_bodies as bodies
from benchmarks.models import WORKLOADS
from benchmarks.namespaces import Member, Pair, UnavailableError, joined, one_host
from benchmarks.overhead import deadline, machine, positive, progress, ratios
from benchmarks.parameter_server_rivals import (
    RAY_CPUS,
    SHARDED_ROUNDS,
    SHARDED_WORKERS,
    SHARDS,
    VECTOR_BYTES,
    ActorCall,
    AsyncTutorial,
    Gloo,
    Network,
    PlainPasses,
    ShardedActors,
    doubles,
    expect,
    import_everywhere,
    ray_started,
    small,
)
from benchmarks.parameter_server_scaling import report_scaling
from benchmarks.rivals import DEADLINE, WORKERS, Contender, Local, Steepest

CONVNET = WORKLOADS["convnet"]
NETWORK_WORKERS = (1, 2, 4)
PIECES = 25  # of 4 MB; measured with 1 to 400 pieces, Gloo was fastest with 12 and 25, by little
HOST_GOAL = 0.6
PLAIN_GOAL = 1.25
OURS = "steepest"


# --- steepest ---


class Ours(Contender):
    """A contender around one ``ParameterServer``."""

    def __init__(self, name: str = OURS) -> None:
        super().__init__(name)
        self._server: Any = None
        self._pushed = 0

    @abstractmethod
    def make(self, server: Callable[..., Any]) -> Any:
        """The parameter server, made by the class given."""

    def start(self) -> None:
        from steepest import ParameterServer

        self._server = self.make(ParameterServer)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server = None


@ray.remote
def push_rounds(server: Any) -> None:
    """One worker of ``sharded``, word for word as the exercise has it."""
    for _ in range(SHARDED_ROUNDS):
        server.push(np.ones_like(server.pull()))


@ray.remote
def push_pull_rounds(server: Any) -> None:
    """The same in one round trip: the weights of the own update are the next ones, in memory that is used again."""
    weights = server.pull()
    update = np.ones_like(weights)
    for _ in range(SHARDED_ROUNDS):
        server.push_pull(update, out=weights)


@ray.remote
def in_place_rounds(server: Any) -> None:
    """The same from an update that servers read where it lies."""
    weights = server.pull()
    update = server.empty()
    for _ in range(SHARDED_ROUNDS):
        update.fill(1.0)
        server.push_pull(update, out=weights)


class OurSharded(Ours):
    def __init__(self, name: str, work: Any) -> None:
        super().__init__(name)
        self._work = work

    def make(self, server: Callable[..., Any]) -> Any:
        return server(doubles(), num_servers=SHARDS)

    def run(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            ray.get(
                [self._work.remote(self._server) for _ in range(SHARDED_WORKERS)], timeout=DEADLINE
            )
        seconds = time.perf_counter() - begin
        self._pushed += steps * SHARDED_WORKERS * SHARDED_ROUNDS
        values = self._server.pull()
        for place in (0, -1):  # one in each shard
            expect(self.name, values[place], self._pushed)
        return seconds / steps


class Floor(Local):
    """Two processes that compute gradients alone: nobody makes more updates of them."""

    def __init__(self) -> None:
        super().__init__("free", CONVNET)

    def run(self, steps: int) -> float:
        return super().run(steps) / WORKERS


class OurAsync(Steepest):
    """``strategy="async"``, where a step is one update of each worker; a unit is an update."""

    def __init__(self, name: str = OURS) -> None:
        super().__init__(name, CONVNET, "async")

    def run(self, steps: int) -> float:
        return super().run(steps) / WORKERS


class OurSmall(Ours):
    def make(self, server: Callable[..., Any]) -> Any:
        return server(small(), num_servers=1)

    def run(self, steps: int) -> float:
        update = np.ones_like(small())
        begin = time.perf_counter()
        for _ in range(steps):
            values = self._server.push_pull(update)
        seconds = time.perf_counter() - begin
        self._pushed += steps
        expect(self.name, values[-1], self._pushed)
        return seconds / steps


class OurNetwork(Network):
    """The servers in one namespace, the workers in the other, without Ray; a round is a push_pull of 100 MB.

    Two servers, as `ParameterServer` has them unless told otherwise; Gloo's only process has
    threads of its own. With ``in_place`` the update lies where servers of the same host can read
    it.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        servers: int = 2,
        place: Callable[[], AbstractContextManager[Pair]] = joined,
        in_place: bool = False,
    ) -> None:
        super().__init__(name, workers, place)
        self._servers, self._in_place = servers, in_place

    def members(self, pair: Pair) -> list[Member]:
        meeting = self._stack.enter_context(tempfile.TemporaryDirectory())
        common = {
            "servers": self._servers,
            "elements": VECTOR_BYTES // 4,
            "meeting": meeting,
            "token": secrets.token_bytes(32),
        }
        servers = [
            Member(pair.first, bodies.serve, common | {"namespace": pair.first, "index": i})
            for i in range(self._servers)
        ]
        workers = [
            Member(
                pair.second,
                bodies.work,
                common | {"namespace": pair.second, "index": i, "in_place": self._in_place},
            )
            for i in range(self.workers)
        ]
        return [*servers, *workers]


# --- the tables ---


@dataclass(frozen=True)
class Table:
    """What is measured with whom: a turn is ``steps`` units, shown as ``show`` makes of the seconds of one.

    ``wanted`` holds the goals for the ratio over some of the rivals.
    """

    name: str
    title: str
    unit: str
    show: Callable[[float], float]
    steps: int
    rivals: Callable[[], list[Contender]]
    ours: Callable[[], Contender]
    ray: bool = True
    wanted: dict[str, float] = field(default_factory=dict)


def network(workers: int) -> Table:
    def rivals() -> list[Contender]:
        return [
            Gloo("gloo", workers, 1, add=False),
            Gloo("gloo pieces", workers, PIECES, add=False),
            Gloo("gloo pieces+add", workers, PIECES, add=True),
        ]

    return Table(
        name=f"network-{workers}",
        title=f"push and pull 100 MB between two namespaces, {workers} worker{'s' * (workers > 1)}",
        unit="s/round",
        show=lambda seconds: seconds,
        steps=4,
        rivals=rivals,
        ours=lambda: OurNetwork(OURS, workers),
        ray=False,
    )


def host(workers: int) -> Table:
    def rivals() -> list[Contender]:
        return [
            Gloo("gloo", workers, 1, add=False, place=one_host),
            Gloo("gloo pieces", workers, PIECES, add=False, place=one_host),
            Gloo("gloo pieces+add", workers, PIECES, add=True, place=one_host),
            OurNetwork("ours, 1 server", workers, servers=1, place=one_host, in_place=True),
            OurNetwork("ours, array", workers, place=one_host),
        ]

    return Table(
        name=f"host-{workers}",
        title=f"push and pull 100 MB inside one host, {workers} worker{'s' * (workers > 1)}",
        unit="s/round",
        show=lambda seconds: seconds,
        steps=4,
        rivals=rivals,
        ours=lambda: OurNetwork(OURS, workers, place=one_host, in_place=True),
        ray=False,
        wanted={"gloo": HOST_GOAL},
    )


TABLES = (
    Table(
        name="sharded",
        title=f"100 MB of float64 in {SHARDS} shards, {SHARDED_WORKERS} tasks x {SHARDED_ROUNDS} pulls and pushes",
        unit="s",
        show=lambda seconds: seconds,
        steps=1,
        rivals=lambda: [
            ShardedActors("actors"),
            OurSharded("ours, pull+push", push_rounds),
            OurSharded("ours, push_pull", push_pull_rounds),
        ],
        ours=lambda: OurSharded(OURS, in_place_rounds),
    ),
    Table(
        name="sharded-plain",
        title="the same by pull and push of an ordinary array",
        unit="s",
        show=lambda seconds: seconds,
        steps=1,
        rivals=lambda: [PlainPasses("passes")],
        ours=lambda: OurSharded(OURS, push_rounds),
        wanted={"passes": PLAIN_GOAL},
    ),
    Table(
        name="mnist_async",
        title=f"asynchronous SGD, 1,960 parameters, batch {CONVNET.batch_size}, {WORKERS} workers",
        unit="updates/s",
        show=lambda seconds: 1 / seconds,
        steps=CONVNET.steps,
        rivals=lambda: [
            AsyncTutorial("tutorial", CONVNET, arrays=False),
            AsyncTutorial("tutorial+numpy", CONVNET, arrays=True),
            Floor(),
        ],
        ours=OurAsync,
    ),
    *(network(workers) for workers in NETWORK_WORKERS),
    *(host(workers) for workers in NETWORK_WORKERS),
    Table(
        name="small",
        title="push and pull 1 kB from the driver",
        unit="us",
        show=lambda seconds: 1e6 * seconds,
        steps=1000,
        rivals=lambda: [ActorCall("actor call")],
        ours=OurSmall,
    ),
)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    if options.scaling:
        report_scaling(options.rounds)
        return
    reports = []
    for table in TABLES:
        if table.name.startswith(tuple(options.only)):
            reports.append(measure(table, options.rounds, options.only_rivals))
            print(text(reports[-1]), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine(), "reports": reports}, indent=2) + "\n"
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parameter_server", description=__doc__.split("\n")[0]
    )
    names = ", ".join(table.name for table in TABLES)
    parser.add_argument(
        "--only", nargs="+", metavar="PREFIX", default=[""], help=f"tables by name: {names}"
    )
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--only-rivals", action="store_true", help="leave steepest out")
    parser.add_argument(
        "--scaling", action="store_true", help="steepest alone: 1 to 8 workers by 1 to 8 servers"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every measurement to this file"
    )
    options = parser.parse_args(arguments)
    if not any(table.name.startswith(tuple(options.only)) for table in TABLES):
        parser.error(f"no table begins with {' or '.join(options.only)}; there are {names}")
    return options


def measure(table: Table, rounds: int, only_rivals: bool) -> dict[str, Any]:
    """Take turns; the measurements of one table, ready for JSON."""
    contenders = table.rivals() + ([] if only_rivals else [table.ours()])
    notes: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if table.ray:
            stack.enter_context(ray_started(RAY_CPUS))
            with deadline("Ray's processes"):
                import_everywhere(RAY_CPUS)
        alive = [c for c in contenders if started(c, stack, notes)]
        for contender in alive:
            turn(contender, table.steps)  # memory is touched and processes are started
        times: dict[str, list[float]] = {c.name: [] for c in alive}
        for number in range(rounds):
            for contender in alive if number % 2 == 0 else reversed(alive):
                times[contender.name].append(turn(contender, table.steps))
            progress(f"{table.name}: round {number + 1} of {rounds}")
    return summarize(table, rounds, times, notes)


def started(contender: Contender, stack: contextlib.ExitStack, notes: dict[str, str]) -> bool:
    """Start a contender; False, with a note, when it does not exist yet or not on this machine."""
    try:
        with deadline(contender.name):
            stack.enter_context(contender)
    except (ImportError, NotImplementedError, UnavailableError) as error:
        notes[contender.name] = f"not measured: {error}"
        return False
    return True


def turn(contender: Contender, steps: int) -> float:
    with deadline(contender.name):
        return contender.run(steps)


def summarize(
    table: Table, rounds: int, times: dict[str, list[float]], notes: dict[str, str]
) -> dict[str, Any]:
    return {
        "table": table.name,
        "title": f"{table.name}: {table.title}, median of {rounds} rounds",
        "unit": table.unit,
        "rounds": rounds,
        "steps": table.steps,
        "notes": notes,
        "contenders": [
            {
                "name": name,
                "shown": [table.show(each) for each in seconds],
                "ours_over": ratios(times[OURS], seconds)
                if OURS in times and name != OURS
                else None,
                "wanted": table.wanted.get(name),
                "seconds": seconds,
            }
            for name, seconds in times.items()
        ],
    }


def text(report: dict[str, Any]) -> str:
    heads = f"{report['unit']:>11}{'min..max':>18}{'ours/this':>11}{'min..max':>14}{'wanted':>8}"
    lines = ["", report["title"], f"{'':17}{heads}"]
    for row in report["contenders"]:
        values, ratio = row["shown"], row["ours_over"]
        spread = f"{min(values):.4g}..{max(values):.4g}"
        line = f"{row['name']:17}{statistics.median(values):11.4g}{spread:>18}"
        if ratio is not None:
            spread = f"{ratio['min']:.2f}..{ratio['max']:.2f}"
            line += f"{ratio['median']:11.2f}{spread:>14}" + (
                f"{row['wanted']:8.2f}" if row["wanted"] else ""
            )
        lines.append(line)
    lines += [f"{name:17}{note}" for name, note in report["notes"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
