"""Search for calls of a trainer that leave it in a state that it must not be in.

    python -m tests.driver_schedules --seed 1 --count 1000

Runs so many schedules (see `driver_runs`), from the seed on, prints one line for each that fails,
with the seed that repeats it, and exits with 1 if any does. With `--short` one schedule is made
as short as it fails in the same way, and shown.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from tests.driver_runs import Failure, Run, Schedule, failure_of, shortened


def main() -> int:
    """Run the schedules that the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--count", type=int, default=100, help="schedules, of consecutive seeds")
    parser.add_argument("--short", action="store_true", help="shorten the schedule of --seed")
    parser.add_argument("--show", action="store_true", help="what each that fails has called")
    chosen = parser.parse_args()
    if chosen.short:
        return _shorten(chosen.seed)
    kinds: Counter[str] = Counter()
    began, struck, deaths = time.perf_counter(), 0, 0
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        run = Run(Schedule.drawn(seed))
        try:
            run.run()
        except Failure as failure:
            kinds[f"{failure.kind} in {failure.call}"] += 1
            print(f"seed {seed}: {_line(failure)}", flush=True)
            if chosen.show:
                print(run.schedule, *run.done, sep="\n        ", flush=True)
        struck += run.struck
        deaths += run.deaths
    seconds = time.perf_counter() - began
    print(
        f"{chosen.count} schedules, {struck} interruptions, {deaths} deaths, "
        f"{sum(kinds.values())} failures; {chosen.count / seconds:.1f} schedules per second"
    )
    for kind, count in kinds.most_common():
        print(f"{count:6} {kind}")
    return 1 if kinds else 0


def _shorten(seed: int) -> int:
    schedule = Schedule.drawn(seed)
    if failure_of(schedule) is None:
        print(f"seed {seed} does not fail")
        return 0
    schedule = shortened(schedule)
    run = Run(schedule)
    try:
        run.run()
    except Failure as failure:
        print(schedule, "as it ran:", *run.done, failure, sep="\n    ")
    return 1


def _line(failure: Failure) -> str:
    return " ".join(str(failure).split())[:400]


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of what happens
        settings = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.driver_schedules", *sys.argv[1:]],
            settings,
        )
    sys.exit(main())
