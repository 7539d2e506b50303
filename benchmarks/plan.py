"""Predictions of `steepest plan` beside measured steps, and beside what others have published of their hardware.

    python -m benchmarks.plan                        # all cases, then the published ones
    python -m benchmarks.plan --only "2 hosts, 200"  # the cases whose names begin so
    python -m benchmarks.plan --published

Hosts are network namespaces of this machine with one worker each and, of strategies that have servers, one server
each; their links are shaped (`benchmarks.namespaces.star`); needs root, iproute2 and tc. A batch is one sample of a
perceptron of 1.9 million parameters and a sleep of ``--batch`` milliseconds in its forward pass, and links are slow:
two cores could not compute, or carry bytes, for four hosts at once. So what is checked is what waits for what, over
which link, and not how fast processors are. The profile is measured by as many processes at once as a case has
workers, as all share this machine's cores; each number is the median over them. A measured figure is the median of
``--rounds`` turns. Beside it stands what workers' processes, and those of servers, take of processors in a step,
measured and predicted: other programs of a machine disturb that less.

The cases "1 host" are jobs of two workers on processes of this machine, as ``steepest plan --one-host`` predicts them:
of the ConvNet and of the perceptron. One process measures the profile just before and after, and the mean of both
predictions counts. They need no root.

The published figures are those of `benchmarks.plan_published`.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse
import functools
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.models import MLP, WORKLOADS, Workload
from benchmarks.namespaces import Member, Namespace, Orders, Team, UnavailableError, star
from benchmarks.observing import thread_seconds
from benchmarks.overhead import positive
from benchmarks.plan_published import show
from benchmarks.slow_links import Slowly
from benchmarks.training_bodies import job_team
from steepest import DistributedSGD, RunConfig, TorchModel
from steepest.cli.planning.events import Links
from steepest.cli.planning.measuring import measure
from steepest.cli.planning.profile import Costs, Profile
from steepest.cli.planning.simulation import predict
from steepest.core.strategies.strategy import Strategy
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy

MLP2 = Workload(
    "mlp2", functools.partial(MLP, hidden=750), (1024,), batch_size=1, samples=4800, steps=3
)
FRAMES = {
    False: 1514 / 1448,
    True: 9000 / 8948,
}  # of veth, which tbf counts; of the delay line's TUN
SEGMENTS = {False: 1448, True: 8948}
UNLIMITED = 1e12  # bytes a second of a link without a limit: what carries bytes is this machine's processors
_MANY_STEPS = 15  # of a turn
GOAL, LIMIT = 0.08, 0.15  # median and worst error


def ps(hosts: int, **settings: Any) -> Strategy:
    """Return a parameter server with one server on each host."""
    return ParameterServerStrategy(num_servers=hosts, **settings)


def cases() -> dict[str, tuple[int, int | None, float, Strategy]]:
    """Return hosts, Mbit/s (None: no limit), round trip in milliseconds and strategy of each case, by name."""
    allreduce = AllreduceStrategy()
    parts = LocalStrategy(sync_every=40, fragments=4)
    found: dict[str, tuple[int, int | None, float, Strategy]] = {}
    for mbit in (200, 50):
        for name, strategy in (
            ("ps", ps(2)),
            ("ps fp16", ps(2, wire_dtype="fp16")),
            ("allreduce", allreduce),
            ("allreduce int8", AllreduceStrategy(compression="int8")),
            ("async", ps(2, mode="async")),
            ("local 8", LocalStrategy()),
            ("local 40/4", parts),
        ):
            found[f"2 hosts, {mbit} Mbit/s, {name}"] = (2, mbit, 0.0, strategy)
    for name, strategy in (
        ("ps", ps(4)),
        ("allreduce", allreduce),
        ("async", ps(4, mode="async")),
        ("ssp", ps(4, mode="ssp")),
        ("local 8", LocalStrategy()),
    ):
        found[f"4 hosts, 100 Mbit/s, {name}"] = (4, 100, 0.0, strategy)
    for name, strategy in (
        ("ps", ps(2)),
        ("allreduce", allreduce),
        ("local 40/4", parts),
        ("local 40/4 delay 5", replace(parts, delay=5)),
    ):
        found[f"2 hosts, 100 Mbit/s, 40 ms, {name}"] = (2, 100, 40.0, strategy)
    for mbit, link in ((500, "500 Mbit/s"), (1000, "1 Gbit/s"), (None, "no limit")):
        for name, strategy in (
            ("ps", ps(2)),
            ("allreduce", allreduce),
            ("allreduce int8", AllreduceStrategy(compression="int8")),
            ("async", ps(2, mode="async")),
            ("local 8", LocalStrategy()),
        ):
            found[f"2 hosts, {link}, {name}"] = (2, mbit, 0.0, strategy)
    return found


def cases_of_one_host() -> dict[str, tuple[str, Strategy]]:
    """Return workload and strategy of each case of two workers on this machine, by name."""
    strategies = {
        "ps": ps(1),
        "allreduce": AllreduceStrategy(),
        "async": ps(1, mode="async"),
        "local 8": LocalStrategy(num_servers=1),
    }
    return {
        f"1 host, {model}, {name}": (model, strategy)
        for model in ("convnet", "mlp")
        for name, strategy in strategies.items()
    }


# -- measured -----------------------------------------------------------------------------------


def measured_at_once(orders: Orders, workload: Slowly, place: str) -> None:
    """Measure a profile in one of several processes, and write its numbers down."""
    orders.ready()
    for _ in orders:
        found = measure(lambda worker, device: workload.model(), batches=9)
        numbers = {
            "seconds": found.seconds,
            "loading": found.loading,
            "variation": found.variation,
            "processor": found.processor,
            "ready": dict(found.ready),
            "costs": vars(found.costs),
        }
        Path(place).write_text(json.dumps(numbers))
        orders.done(0.0)


def profile_of(spaces: Sequence[Namespace], workload: Slowly, own: Profile) -> Profile:
    """Return the medians of profiles that as many processes as there are hosts measure at once."""
    with tempfile.TemporaryDirectory() as folder:
        places = [f"{folder}/{number}" for number in range(len(spaces))]
        members = [
            Member(space, measured_at_once, {"workload": workload, "place": place})
            for space, place in zip(spaces, places, strict=True)
        ]
        with Team("measured at once", members) as team:
            team.turn(1)
        rows = [json.loads(Path(place).read_text()) for place in places]

    def median(of: str) -> Any:
        values = [row[of] for row in rows]
        if isinstance(values[0], dict):
            return {key: statistics.median(each[key] for each in values) for key in values[0]}
        return statistics.median(values)

    numbers = {
        name: median(name) for name in ("seconds", "loading", "variation", "processor", "ready")
    }
    return replace(own, costs=Costs(**median("costs")), **numbers)


@dataclass(frozen=True)
class Compared:
    """A case: seconds of a step, measured (median, least, greatest) and predicted.

    Attributes:
        workers, servers: processor seconds of a step, of all processes with workers and of those with servers alone,
            measured and predicted.
    """

    name: str
    measured: tuple[float, float, float]
    predicted: float
    workers: tuple[float, float]
    servers: tuple[float, float]

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted / self.measured[0] - 1


def compare(
    name: str, workload: Slowly, profiles: dict[int, Profile], own: Profile, rounds: int
) -> Compared:
    """Measure and predict a case; `profiles` has those of so many processes that are known already."""
    hosts, mbit, round_trip, strategy = cases()[name]
    cycle = strategy.cut.fragments
    with star(hosts, mbit, round_trip) as spaces:
        if hosts not in profiles:
            profiles[hosts] = profile_of(spaces, workload, own)
        with (
            tempfile.TemporaryDirectory() as meeting,
            job_team(spaces, Small(workload), strategy, meeting, servers=1) as team,
        ):
            team.turn(2 * cycle)
            # a turn ends when all has arrived, where others have waited before who do not wait for each other
            steps = max(3, cycle) if strategy.rule.needs_all else _MANY_STEPS
            pids, found = team.pids(), []  # servers' before workers'
            both = pids[-hosts:], pids[:-hosts]
            before = [seconds_of_processors(each) for each in both]
            for _ in range(rounds):
                found.append(max(team.turn(steps)))
            used = [
                (seconds_of_processors(each) - began) / (rounds * steps)
                for each, began in zip(both, before, strict=True)
            ]
    late = round_trip > 0
    bandwidth = UNLIMITED if mbit is None else mbit * 1e6 / 8
    links = Links(bandwidth, round_trip / 2e3, FRAMES[late], 10 * SEGMENTS[late])
    predicted = predict(profiles[hosts], strategy, hosts, links)
    middle = statistics.median(found), min(found), max(found)
    workers, servers = (used[0], predicted.of_workers), (used[1], predicted.of_servers)
    return Compared(name, middle, predicted.seconds, workers, servers)


def on_one_host(name: str, rounds: int) -> Compared:
    """Measure and predict a case of two workers on this machine."""
    model, strategy = cases_of_one_host()[name]
    workload, workers = WORKLOADS[model], 2

    def creator(worker: int, device: int) -> TorchModel:
        torch.set_num_threads(1)
        return workload.model()

    def predicted() -> tuple[float, float, float]:
        profile, cores = measure(creator, batches=24), len(os.sched_getaffinity(0))
        found = predict(profile, strategy, workers, Links(UNLIMITED, 0.0), 1, cores=cores)
        return found.seconds, found.of_workers, found.of_servers

    before_it = predicted()
    config = RunConfig(runtime="processes")
    found = []
    with DistributedSGD(creator, workers, strategy=strategy, run_config=config) as sgd:
        sgd.fit(steps=workload.steps, progress=False)
        roles = {
            each.pid: each.role for each in sorted(sgd.processes(), key=lambda each: each.role)
        }
        both = [[pid for pid, role in roles.items() if role == of] for of in ("worker", "server")]
        before = [seconds_of_processors(each) for each in both]
        for _ in range(rounds):
            began = perf_counter()
            sgd.fit(steps=workload.steps, progress=False)
            found.append((perf_counter() - began) / workload.steps)
        used = [
            (seconds_of_processors(each) - began) / (rounds * workload.steps)
            for each, began in zip(both, before, strict=True)
        ]
    middle = statistics.median(found), min(found), max(found)
    seconds, *parts = map(statistics.mean, zip(before_it, predicted(), strict=True))
    return Compared(name, middle, seconds, (used[0], parts[0]), (used[1], parts[1]))


def seconds_of_processors(pids: Sequence[int]) -> float:
    """Return the processor time of some processes so far."""
    return sum(sum(thread_seconds(pid).values()) for pid in pids)


class Small:
    """A workload whose model has a sample in a batch."""

    def __init__(self, workload: Slowly) -> None:
        self.model = workload.model


def measured(only: str, batch: float, rounds: int) -> None:
    """Print a line for each case, and the median and the worst error."""
    torch.set_num_threads(1)
    workload = Slowly(MLP2, batch / 1000)
    own = measure(lambda worker, device: workload.model(), batches=3)
    found: list[Compared] = []
    profiles: dict[int, Profile] = {}
    print(
        f"{'':38} measured ms (least to greatest)  predicted   error   load"
        "   processors ms of workers, predicted   of servers, predicted",
        flush=True,
    )
    for name in (each for each in (*cases_of_one_host(), *cases()) if each.startswith(only)):
        many = name in cases()
        each = compare(name, workload, profiles, own, rounds) if many else on_one_host(name, rounds)
        found.append(each)
        middle, least, greatest = (1000 * seconds for seconds in each.measured)
        print(
            f"{name:38} {middle:8.3g} ({least:.3g} to {greatest:.3g})".ljust(72)
            + f"{1000 * each.predicted:9.3g}  {each.error:+6.1%}  {os.getloadavg()[0]:5.1f}"
            + "".join(f"{1000 * seconds:12.1f}" for seconds in (*each.workers, *each.servers)),
            flush=True,
        )
    errors = [abs(each.error) for each in found]
    if errors:
        print(
            f"\n{len(errors)} cases: median error {statistics.median(errors):.1%} (goal {GOAL:.0%}), worst "
            f"{max(errors):.1%} (goal {LIMIT:.0%}); at most {LIMIT:.0%} in {sum(e <= LIMIT for e in errors)}"
        )
        shares = [
            sum(each.workers[1:] + each.servers[1:]) / (each.workers[0] + each.servers[0])
            for each in found
        ]
        print(
            f"processor time of all processes, predicted over measured: median {statistics.median(shares):.2f}, "
            f"{min(shares):.2f} to {max(shares):.2f}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Compare, and print tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", default="", metavar="NAME", help="the cases whose names begin so")
    parser.add_argument("--batch", type=float, default=50.0, help="milliseconds of a batch's sleep")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--published", action="store_true", help="compare with published figures alone"
    )
    options = parser.parse_args(arguments)
    if not options.published:
        try:
            measured(options.only, options.batch, options.rounds)
        except UnavailableError as error:
            print(f"not measured ({error})", flush=True)
    if options.published or not options.only:
        show()


if __name__ == "__main__":
    main()
