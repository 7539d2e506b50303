"""Jobs on processes of one machine, beside the same jobs on Ray and DistributedDataParallel under torchrun.

    python -m benchmarks.one_machine                      # all of it, some minutes
    python -m benchmarks.one_machine --only start --rounds 5

``start``: seconds, and processor seconds of all processes, from a script's start to the first step of two workers, by
turns: ``steepest run`` on processes and on Ray, and ``torchrun``. ``death``: seconds without a step after a worker was
killed, without a spare. ``idle``: memory (proportional set sizes) of what a job of two workers has beside its workers
and servers. ``runs``: descriptors, threads and memory of a program after each ten jobs. ``steps``: milliseconds of a
step of the ConvNet and of the perceptron, by turns. Each of the last four is of processes and of Ray, in programs of
their own.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by every process

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.overhead import positive, progress
from benchmarks.rivals import DEADLINE

WORKERS = 2
RUNTIMES = ("processes", "ray")
_TICKS = os.sysconf("SC_CLK_TCK")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_machine", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=positive, default=3)
    options = parser.parse_args(arguments)
    for part in options.only:
        print(f"{part}:", flush=True)
        PARTS[part](options.rounds)


# -- from a script's start to its first step -----------------------------------------------------------


def start(rounds: int) -> None:
    run = [sys.executable, "-m", "steepest", "run", "benchmarks/own_loop_start.py"]
    ours = [*run, "--workers", str(WORKERS), "--no-progress"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS)]
    commands = {f"steepest run, {each}": [*ours, "--runtime", each, "--"] for each in RUNTIMES}
    commands["torchrun"] = [*torchrun, "-m", "benchmarks.one_machine_ddp"]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name in list(commands)[:: 1 if number % 2 else -1]:
            taken = _first_step(commands[name])
            if number:  # files come into the kernel's memory, modules are compiled
                found[name].append(taken)
        progress(f"start: round {number} of {rounds}")
    theirs = found["torchrun"]
    for name, times in found.items():
        seconds, used = (statistics.median(each) for each in zip(*times, strict=True))
        ratios = [mine / other for (mine, _), (other, _) in zip(times, theirs, strict=True)]
        print(
            f"  {name:26s} {seconds:6.2f} s, {used:6.2f} s of processors, "
            f"{statistics.median(ratios):.2f} of torchrun's ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def _first_step(command: list[str]) -> tuple[float, float]:
    """Run a script to its end; return the seconds to its first step, and those that its processes had used by then."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stepped, began = Path(folder, "stepped"), time.time()
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        program = subprocess.Popen(
            [*command, str(stepped)], stdout=subprocess.DEVNULL, stderr=errors
        )
        used = 0.0
        while not stepped.exists() and program.poll() is None:
            used = max(used, _used(program.pid))
            time.sleep(0.02)
        if program.wait(DEADLINE):
            errors.seek(0)
            raise RuntimeError(f"{command} has failed: {errors.read()}")
        return float(stepped.read_text()) - began, used


def _used(pid: int) -> float:
    """Return the seconds of processors that a process and its descendants have used."""
    ticks = 0
    for each in (pid, *_descendants(pid)):
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process and those below it have started, as far as they live."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = list[int](), [pid]
    while new:
        new = [each for each, parent in parents.items() if parent in new]
        found += new
    return found


# -- what is done in a program of its own, on each runtime ---------------------------------------------


def _on_each(part: str) -> Callable[[int], None]:
    def run(rounds: int) -> None:
        for name in RUNTIMES:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.one_machine_bodies", part, name, str(rounds)],
                stdout=subprocess.PIPE, text=True, timeout=20 * DEADLINE, check=True,
            )  # fmt: skip
            print(f"  {name:10s} {done.stdout.strip().splitlines()[-1]}", flush=True)

    return run


PARTS: dict[str, Callable[[int], None]] = {
    "start": start, **{part: _on_each(part) for part in ("death", "idle", "runs", "steps")},
}  # fmt: skip

if __name__ == "__main__":
    main()
