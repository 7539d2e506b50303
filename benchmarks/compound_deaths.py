"""Several processes that die, at once or one after the other, also in a call of the trainer; beside rivals.

    python -m benchmarks.compound_deaths                         # everything, about three quarters of an hour
    python -m benchmarks.compound_deaths --only deaths rivals --rounds 5
    python -m benchmarks.compound_deaths --only nodes            # needs root and iproute2
    python -m benchmarks.compound_deaths --match 'holder' --rounds 10

Sections:

``deaths``   jobs of `DistributedSGD` whose processes are killed (SIGKILL) or stopped after 60 steps, by a plan (`CASES`
             of `benchmarks.compound_bodies`). "copies" are ``ParameterServerStrategy(num_servers=2, replication=2)``
``calls``    a worker or a server dies at a random moment of `save`, `evaluate`, `weights`, `resize` or `set_strategy`
``rivals``   the same network, data and pace under Ray Train's ``TorchTrainer`` (`benchmarks.recovery_rivals`) and under
             DistributedDataParallel, all of whose processes a script starts again from the last checkpoint
             (`benchmarks.ddp_rivals`; "forked": from a process that has imported torch). Both write a checkpoint every
             50 steps and are struck in step 192
``nodes``    three network namespaces with a raylet and two CPUs each; a node with two of four workers is killed, cut
             off, drained, and comes back: `benchmarks.node_deaths`

Every turn is a job of its own in steps of 50 ms. "pause" is the longest time from the first death on without a step
that had not been taken before; of a call, by how much the call and the step after it took longer than undisturbed. All
take turns in each round, odd rounds in reverse order; a ratio is that to a rival with as many deaths (of workers: one,
or all but one of three) in the same round. "went on" counts the rounds that did not end with an error. "then" are the
kinds of `stats().events`.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import functools
import importlib
import itertools
import json
import logging
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import compound_bodies as bodies
from benchmarks import node_deaths, recovery_bodies
from benchmarks.compound_bodies import CASES, Outcome, progress
from benchmarks.ddp_rivals import train_with_ddp
from benchmarks.overhead import alternate, machine, positive
from benchmarks.overhead import progress as announce
from benchmarks.parameter_server_rivals import ray_started
from benchmarks.recovery_rivals import train_with_ray

SECTIONS = ("deaths", "calls", "rivals", "nodes")
WORKERS = 3
RAY_TRAIN, DDP = "TorchTrainer", "DDP by hand, forked"
Turn = Callable[[int], Outcome]


def deaths() -> dict[str, Turn]:
    return {name: functools.partial(bodies.turn, case) for name, case in CASES.items()}


def calls() -> dict[str, Turn]:
    return {
        f"{victim.partition(' ')[0]} in {name}": functools.partial(bodies.call_turn, name, victim)
        for name in bodies.calls()
        for victim in ("worker 1", "server 1")
    }


def rivals() -> dict[str, Turn]:
    config = {
        "network": recovery_bodies.network,
        "data": recovery_bodies.digits()[0],
        "batch": recovery_bodies.BATCH,
        "rate": recovery_bodies.LEARNING_RATE,
        "seconds": recovery_bodies.STEP_SECONDS,
        "kill_step": recovery_bodies.KILL_STEP,
        "steps": recovery_bodies.KILL_STEP + recovery_bodies.STEPS_AFTER // 2,
    }

    def ray_train(victims: int, seed: int) -> Outcome:
        return Outcome(*progress(*train_with_ray({**config, "victims": victims}, WORKERS)), "")

    def by_hand(victims: int, warm: bool, seed: int) -> Outcome:
        dying = range(WORKERS - victims, WORKERS)
        return Outcome(*progress(*train_with_ddp(config, WORKERS, dying, warm)), "")

    turns: dict[str, Turn] = {}
    for victims in (1, 2):
        of = f"{victims} of {WORKERS}"
        turns[f"{RAY_TRAIN}, {of}"] = functools.partial(ray_train, victims)
        turns[f"{DDP}, {of}"] = functools.partial(by_hand, victims, True)
    turns[f"DDP by hand, spawned, 1 of {WORKERS}"] = functools.partial(by_hand, 1, False)
    return turns


def main(arguments: list[str] | None = None) -> None:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compound_deaths", description=description
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--match", default="", help="rows whose name this expression is found in")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every measurement to this file"
    )
    options = parser.parse_args(arguments)
    if "rivals" in options.only:
        try:
            importlib.import_module("ray.train.torch")
        except ImportError as error:
            parser.exit(1, f"Ray Train cannot be imported ({error}): pip install 'ray[train]'\n")
    torch.set_num_threads(1)
    logging.getLogger("steepest").setLevel(logging.ERROR)  # each death is a warning
    print(machine(), flush=True)
    found: dict[str, list[Outcome]] = {}
    here = {name: turn for name, turn in turns_of(options.only).items() if matches(options, name)}
    if here:
        with ray_started(2 * WORKERS):
            found = measure(here, options.rounds)
        print(table(found, options.rounds), flush=True)
    if "nodes" in options.only:
        there = {name: t for name, t in node_deaths.turns().items() if matches(options, name)}
        if there:
            nodes = measure(there, options.rounds)
            print(table(nodes, options.rounds), flush=True)
            found |= nodes
    if options.json:
        report = {name: [asdict(outcome) for outcome in each] for name, each in found.items()}
        text = json.dumps({"machine": machine(), "outcomes": report}, indent=2)
        options.json.write_text(text + "\n")


def turns_of(sections: Sequence[str]) -> dict[str, Turn]:
    makers = {"deaths": deaths, "calls": calls, "rivals": rivals}
    return {
        name: turn
        for section, maker in makers.items()
        if section in sections
        for name, turn in maker().items()
    }


def matches(options: argparse.Namespace, name: str) -> bool:
    return re.search(options.match, name) is not None


def measure(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[Outcome]]:
    """All turns, round by round, each round with a seed of its own."""
    seeds = {name: itertools.count() for name in turns}

    def turn(name: str) -> Outcome:
        outcome = turns[name](next(seeds[name]))
        announce(f"{name}: {outcome}")
        return outcome

    return alternate({name: functools.partial(turn, name) for name in turns}, rounds)


def rival_of(name: str, rival: str) -> str:
    """The row of a rival that a row of ours is compared with: with one death, or with several."""
    several = name[0].isdigit() or any(word in name for word in (" and ", "but one", "both", "two"))
    return f"{rival}, {2 if several else 1} of {WORKERS}"


def table(found: Mapping[str, Sequence[Outcome]], rounds: int) -> str:
    width = 2 + max(len(name) for name in found)
    lines = [
        "",
        f"seconds, medians of {rounds} rounds",
        f"{'':{width}}{'pause':>8}{'min..max':>14}{'over DDP':>10}{'over Ray Train':>16}"
        f"{'steps again':>13}{'went on':>9}  then",
    ]
    for name, each in found.items():
        pauses = [outcome.pause for outcome in each if outcome.pause is not None]
        line = f"{name:{width}}"
        if pauses:
            line += f"{statistics.median(pauses):8.2f}{f'{min(pauses):.2f}..{max(pauses):.2f}':>14}"
        else:
            line += f"{'':22}"
        line += f"{over(each, found.get(rival_of(name, DDP), [])):>10}"
        line += f"{over(each, found.get(rival_of(name, RAY_TRAIN), [])):>16}"
        line += f"{max(outcome.again for outcome in each):13}{f'{len(pauses)} of {len(each)}':>9}"
        then = dict.fromkeys(outcome.then for outcome in each)
        lines.append(f"{line}  {' | '.join(then)}".rstrip())
    return "\n".join(lines)


def over(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> str:
    """The median ratio of pauses in the same round; empty for the rivals themselves, and without them."""
    pairs = [
        mine.pause / other.pause
        for mine, other in zip(ours, theirs, strict=False)
        if mine.pause is not None and other.pause
    ]
    return f"{statistics.median(pairs):.3f}" if pairs and ours is not theirs else ""


if __name__ == "__main__":
    main()
