"""What a death costs: from the kill of a process to the next committed step, beside Ray Train.

    python -m benchmarks.recovery                        # every section, about twenty minutes with MNIST
    python -m benchmarks.recovery --only worker ray-train --rounds 5
    STEEPEST_DATA=/path python -m benchmarks.recovery --only straggler

Sections:

``worker``      ``DistributedSGD`` under ``"ps"`` and ``"async"``, with and without a spare process, whose last worker
                is killed (SIGKILL) when the driver hears of step 191; how long training stood still, when the successor
                was there, and from the log whether each share of the samples is in exactly one commit:
                `benchmarks.recovery_bodies`
``ray-train``   Ray Train's ``TorchTrainer`` on Gloo with the same network, data and number of workers, a checkpoint
                every 50 steps, the last worker killed by SIGKILL in step 192: `benchmarks.recovery_rivals`
``server``      the same for a server, and the coordinator beside the first, with ``replication=2`` and with
                ``snapshot_every=20``
``joining``     a worker more while training is under way: for how long the others stop: `benchmarks.elasticity`
``replication`` a step of 25 million parameters with copies of everything, and with snapshots
``checkpoints`` a step of 25 million parameters with `Checkpoints(every=50)` and without: `benchmarks.elasticity`
``resizing``    for how long training stops when 25 million parameters with momentum grow, or lose a worker
``straggler``   one of four workers five times slower: seconds to 97 % on MNIST: `benchmarks.stragglers`

The network is a perceptron of 4,810 parameters on scikit-learn's digits. Each gradient waits for 50 ms, so that a step
that is taken again costs what a middling one does, whatever the machine; in steps of 10 ms it would cost less, and Ray
Train, which looks at its workers every two seconds, would not know of the last checkpoint yet. Every turn is a job of
its own. ``worker`` and ``ray-train`` take turns in each round, odd rounds in reverse order, on one Ray cluster; a ratio
compares with ``TorchTrainer`` in the same round. "next step" is when training went on at all, "new step" when it did a
step that had not been done before. Ray Train needs pandas and pyarrow.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import functools
import importlib
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import elasticity, recovery_rivals, stragglers
from benchmarks import recovery_bodies as bodies
from benchmarks.overhead import alternate, machine, positive, ratios
from benchmarks.parameter_server_rivals import ray_started
from benchmarks.recovery_bodies import Recovery
from steepest import FailureConfig, RunConfig

RIVAL = "TorchTrainer"
WORKERS = 2
Death = Callable[[], Recovery]


def worker_deaths(workers: int) -> dict[str, Death]:
    deaths: dict[str, Death] = {}
    for strategy in ("ps", "async"):
        for name, spares in ((strategy, 0), (f"{strategy}, 1 spare", 1)):
            run_config = RunConfig(failure=FailureConfig(spares=spares), keep_log=True)
            deaths[name] = functools.partial(
                bodies.kill_worker, strategy, workers, run_config=run_config
            )
    return deaths


def rivals_deaths(workers: int) -> dict[str, Death]:
    config = {
        "network": bodies.network,
        "data": bodies.digits()[0],
        "batch": bodies.BATCH,
        "rate": bodies.LEARNING_RATE,
        "seconds": bodies.STEP_SECONDS,
        "kill_step": bodies.KILL_STEP,
        "steps": bodies.KILL_STEP + bodies.STEPS_AFTER,
    }

    def turn() -> Recovery:
        return Recovery(*bodies.pause_in(*recovery_rivals.train_with_ray(config, workers)))

    return {RIVAL: turn}


DEATHS: dict[str, Callable[[int], dict[str, Death]]] = {
    "worker": worker_deaths,
    "server": elasticity.server_deaths,
    "ray-train": rivals_deaths,
}
STRAGGLER = "straggler"
SECTIONS = [*DEATHS, STRAGGLER, *elasticity.SECTIONS]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--workers", type=positive, default=WORKERS, help="of each job whose worker is killed"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every measurement to this file"
    )
    options = parser.parse_args(arguments)
    if options.workers < 2:
        parser.error(
            "--workers 1: a worker that is alone holds the weights, and has no successor; give 2 "
            "or more"
        )
    if "ray-train" in options.only:
        try:
            importlib.import_module("ray.train.torch")
        except ImportError as error:
            parser.exit(1, f"Ray Train cannot be imported ({error}): pip install 'ray[train]'\n")
    torch.set_num_threads(1)
    measure(options)


def measure(options: argparse.Namespace) -> None:
    deaths: dict[str, Death] = {}
    for section in DEATHS:
        deaths |= DEATHS[section](options.workers) if section in options.only else {}
    found: dict[str, list[Recovery]] = {}
    seconds: dict[str, list[float]] = {}
    with ray_started(max(options.workers, stragglers.WORKERS) + 1):
        if deaths:
            found = alternate(deaths, options.rounds)
            print(deaths_text(found, options.workers), flush=True)
        if STRAGGLER in options.only:
            seconds = alternate(stragglers.turns(), options.rounds)
            print(straggler_text(seconds), flush=True)
        for section, (turns, text) in elasticity.SECTIONS.items():
            if section in options.only:
                print(text(alternate(turns(options.workers), options.rounds)), flush=True)
    if options.json:
        recoveries = {name: [asdict(recovery) for recovery in each] for name, each in found.items()}
        report = {
            "machine": machine(),
            "workers": options.workers,
            "deaths": recoveries,
            STRAGGLER: seconds,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def deaths_text(found: Mapping[str, list[Recovery]], workers: int) -> str:
    rounds = len(next(iter(found.values())))
    lines = [
        "",
        f"a process of a job of {workers} workers is killed: seconds from the kill, medians of {rounds} rounds",
        f"{'':20}{'next step':>10}{'min..max':>14}{'new step':>10}{'over train':>12}{'min..max':>14}{'successor':>11}"
        f"{'longest gap':>13}{'commits meanwhile':>19}{'steps again':>13}{'shares lost, twice':>20}",
    ]
    for name, each in found.items():
        new = [recovery.new_step for recovery in each]
        line = f"{name:20}{cell(each, 'next_step'):>10}{spread([r.next_step for r in each]):>14}"
        line += f"{statistics.median(new):10.2f}"
        if RIVAL in found and name != RIVAL:
            ratio = ratios(new, [recovery.new_step for recovery in found[RIVAL]])
            line += f"{ratio['median']:12.2f}{spread([ratio['min'], ratio['max']]):>14}"
        else:
            line += " " * 26
        line += f"{cell(each, 'successor'):>11}{cell(each, 'gap'):>13}{cell(each, 'meanwhile', '.0f'):>19}"
        line += f"{max(recovery.again for recovery in each):>13}"
        line += f"{shares_cell(each):>20}"
        lines.append(line)
    return "\n".join(lines)


def cell(each: list[Recovery], field: str, form: str = ".2f") -> str:
    values = [getattr(recovery, field) for recovery in each]
    return "" if None in values else format(statistics.median(values), form)


def shares_cell(each: list[Recovery]) -> str:
    """Sums over all rounds; one share that is lost anywhere shows."""
    lost, twice = ([getattr(recovery, name) for recovery in each] for name in ("lost", "twice"))
    return "" if None in lost else f"{sum(lost)}, {sum(twice)}"


def spread(values: list[float]) -> str:
    return f"{min(values):.2f}..{max(values):.2f}"


def straggler_text(seconds: Mapping[str, list[float]]) -> str:
    rounds = len(next(iter(seconds.values())))
    lines = [
        "",
        f"one of {stragglers.WORKERS} workers {stragglers.SLOW_FACTOR} times slower: "
        f"seconds to {stragglers.GOAL:.0%} on MNIST, medians of {rounds} rounds",
        f"{'':16}{'s':>8}{'min..max':>16}{'over sync':>11}{'min..max':>14}{'wanted':>8}",
    ]
    for name, each in seconds.items():
        line = f"{name:16}{statistics.median(each):8.1f}{spread(each):>16}"
        if name != stragglers.SYNC:
            ratio = ratios(each, seconds[stragglers.SYNC])
            line += f"{ratio['median']:11.2f}{spread([ratio['min'], ratio['max']]):>14}"
        lines.append(line + (f"{stragglers.WANTED:8.1f}" if name == stragglers.ASYNC else ""))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
