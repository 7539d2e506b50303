"""Training across slow links: local SGD in fragments, overlapped and compressed, beside synchronous strategies.

    python -m benchmarks.slow_links                # 2 and 4 hosts, 10 and 25 M, 100 Mbit/s, 100 ms
    python -m benchmarks.slow_links --hosts 2 --only local "local 4 delay int4"

Hosts are network namespaces of this machine, each with a worker, and links of ``--mbit`` each way
with a round trip of ``--round-trip`` milliseconds (`benchmarks.namespaces.star`); needs root,
iproute2 and tc. The models are perceptrons. A batch is a sleep of ``--batch`` milliseconds after a
real one of a single sample: what is measured is how long workers wait, and not how many cores this
machine has. Contenders run one after the other.

``computing`` is the share of the time in which a worker computes, on average: under local SGD all
but its waiting for weights. ``batch`` is what a batch takes then; then the bytes for a sample on all
links together, counted where they leave hosts' devices, headers included, and how many times less
that is than allreduce's. With torchft installed, its DiLoCo takes part with the same settings.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import training_bodies
from benchmarks.models import WORKLOADS, Modelled, Workload
from benchmarks.namespaces import Namespace, Orders, UnavailableError, star
from benchmarks.overhead import positive
from benchmarks.slow_link_rivals import bytes_sent, missing, torchft_team
from benchmarks.training_bodies import MLP10, job_team, take_part
from steepest.core.strategies.strategy import Strategy
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.tables.modules.torch_model import TorchModel

EVERY = 100  # batches between two exchanges of a weight
SAMPLES = 4800  # an epoch of 1, 2, 3 or 4 workers has whole rounds of `EVERY` batches
MODELS = {10: MLP10, 25: WORKLOADS["mlp"]}  # by millions of parameters


def strategies(every: int) -> dict[str, Strategy]:
    """Return what is compared, by name."""
    part, late = {"fragments": 4}, {"fragments": 4, "delay": every // 4 - 5}
    return {
        "allreduce": AllreduceStrategy(),
        "allreduce fp16": AllreduceStrategy(wire_dtype="fp16"),
        "allreduce powersgd": AllreduceStrategy(compression="powersgd"),
        "local": LocalStrategy(sync_every=every),
        "local 4": LocalStrategy(sync_every=every, **part),
        "local 4 delay": LocalStrategy(sync_every=every, **late),
        "local 4 delay int8": LocalStrategy(sync_every=every, compression="int8", **late),
        "local 4 delay int4": LocalStrategy(sync_every=every, compression="int4", **late),
        "local 4 delay int2": LocalStrategy(sync_every=every, compression="int2", **late),
        "local 4 delay int4 quorum": LocalStrategy(
            sync_every=every,
            compression="int4",
            weights_compression="int4",
            num_servers=1,
            quorum=1,
            **late,
        ),
        "torchft 4": LocalStrategy(sync_every=every, **part),  # settings of torchft's DiLoCo
        "torchft 4 delay": LocalStrategy(sync_every=every, **late),
    }


@dataclass(frozen=True)
class Slowly(Modelled):
    """A workload whose batches take some seconds."""

    workload: Workload
    seconds: float

    def small(self) -> Workload:
        """Return the workload with a sample in a batch."""
        return replace(self.workload, batch_size=1, samples=SAMPLES)

    def model(self) -> TorchModel:
        """Return the model of one worker."""
        model = self.small().model()

        def rest(*_: Any) -> None:
            time.sleep(self.seconds)

        model.module.register_forward_hook(rest)
        return model


class Counted(Orders):
    """Orders whose answers leave behind what the last turn's steps were like, and what the host has sent so far."""

    def __init__(
        self, orders: Orders, place: Path, namespace: Namespace, worker: int | None
    ) -> None:
        super().__init__(orders._pipe, orders._barrier)
        self._place, self._namespace, self._worker = place, namespace, worker

    def done(self, seconds: float) -> None:
        """Answer the last order."""
        found = training_bodies.results
        counts = {
            "samples": sum(result.samples for result in found),
            "computing": sum(result.timings["compute"] for result in found),
            "waiting": sum(result.timings["wait"] for result in found),
        }
        if found:  # in the client's process
            (self._place / "counts").write_text(json.dumps(counts))
        if self._worker is not None:  # of which each host has one
            (self._place / f"sent {self._worker}").write_text(str(bytes_sent(self._namespace)))
        super().done(seconds)


def body(orders: Orders, **settings: Any) -> None:
    """Take part in a job; its processes write what `measure` reads."""
    place = Path(settings["meeting"])
    counted = Counted(orders, place, settings["namespace"], settings["worker"])
    take_part(counted, **settings)


@dataclass(frozen=True)
class Figures:
    """Of a contender.

    Attributes:
        computing: share of the time in which workers compute.
        batch: seconds of a batch.
        sent: bytes on the links for each sample.
    """

    computing: float
    batch: float
    sent: float


def measure(spaces: list[Namespace], strategy: Strategy, workload: Slowly, batches: int) -> Figures:
    """Train for so many batches after a cycle of exchanges that does not count."""
    cycle = strategy.cut.fragments  # in which each weight is exchanged once
    steps = -(-batches // (strategy.updates * cycle)) * cycle
    with (
        tempfile.TemporaryDirectory() as meeting,
        job_team(spaces, workload, strategy, meeting, body=body) as team,
    ):
        team.turn(cycle)
        before = _sent(Path(meeting))
        took = max(team.turn(steps))
        counts = json.loads((Path(meeting) / "counts").read_text())
        sent = _sent(Path(meeting)) - before
    computing = counts["computing"] / steps
    if strategy.local:  # to which a worker's own updates belong
        computing = took - counts["waiting"] / steps
    return Figures(computing / took, computing / strategy.updates, sent / counts["samples"])


def _sent(meeting: Path) -> int:
    """Return the bytes that have left all hosts so far."""
    return sum(int(path.read_text()) for path in meeting.glob("sent *"))


def measure_torchft(
    spaces: list[Namespace], strategy: LocalStrategy, workload: Slowly, batches: int
) -> Figures:
    """The same for torchft with these settings."""
    steps = -(-batches // strategy.sync_every) * strategy.fragments
    settings = (workload.small(), workload.seconds, strategy.sync_every, strategy.delay)
    with (
        tempfile.TemporaryDirectory() as meeting,
        torchft_team(spaces, *settings, meeting) as team,
    ):
        team.turn(strategy.fragments)
        took = max(team.turn(steps))
        found = [json.loads(path.read_text()) for path in Path(meeting).glob("counts *")]
    computing = statistics.mean(each["computing"] for each in found)
    sent, samples = (sum(each[name] for each in found) for name in ("bytes", "samples"))
    return Figures(computing / took, computing / strategy.updates, sent / samples)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table for each number of hosts."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_links", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--hosts", type=positive, nargs="+", default=[2, 4])
    parser.add_argument(
        "--millions", type=int, nargs="+", choices=MODELS, default=list(MODELS), help="parameters"
    )
    parser.add_argument("--mbit", type=positive, default=100)
    parser.add_argument("--round-trip", type=float, default=100.0, help="in milliseconds")
    parser.add_argument("--batch", type=float, default=100.0, help="milliseconds of a batch")
    parser.add_argument("--sync-every", type=positive, default=EVERY)
    parser.add_argument("--batches", type=positive, default=2 * EVERY, help="of local SGD")
    parser.add_argument("--only", nargs="+", choices=list(strategies(EVERY)))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for hosts, millions in itertools.product(options.hosts, options.millions):
        try:
            table(hosts, MODELS[millions], options)
        except UnavailableError as error:
            print(f"not measured ({error})", flush=True)
            return


def table(hosts: int, workload: Workload, options: argparse.Namespace) -> None:
    """Measure all contenders on so many hosts, and print a line for each."""
    print(
        f"\n{hosts} hosts, {options.mbit} Mbit/s, {options.round_trip:g} ms, batches of "
        f"{options.batch:g} ms, {workload.parameters():,} parameters, "
        f"sync_every={options.sync_every}, load {os.getloadavg()[0]:.1f}\n"
        f"{'':22} computing  batch/ms  KB a sample  times less",
        flush=True,
    )
    most: float | None = None
    slowly = Slowly(workload, options.batch / 1000)
    for name, strategy in strategies(options.sync_every).items():
        if options.only and name not in options.only:
            continue
        batches = options.batches if strategy.local else 3
        with star(hosts, options.mbit, options.round_trip) as spaces:
            if name.startswith("torchft") and isinstance(strategy, LocalStrategy):
                if text := missing():
                    print(text, flush=True)
                    continue
                found = measure_torchft(spaces, strategy, slowly, batches)
            else:
                found = measure(spaces, strategy, slowly, batches)
        most = found.sent if name == "allreduce" else most
        less = f"{most / found.sent:10.1f}" if most else ""
        print(
            f"{name:22} {found.computing:8.1%} {1000 * found.batch:9.0f} {found.sent / 1000:12,.1f} {less}",
            flush=True,
        )


if __name__ == "__main__":
    main()
