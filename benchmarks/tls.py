"""What TLS between hosts costs: one tensor of 100 MB reduced by two hosts, plain and encrypted.

    python -m benchmarks.tls                       # a link without a limit, 10 and 1 Gbit/s
    python -m benchmarks.tls --mbit 0 --rounds 9

Hosts are network namespaces of this machine (root and iproute2 needed, and tc for a limit), with
one process each. Both jobs stay alive, blocked while idle, and take turns; odd rounds run in
reverse order. A ratio is the median over rounds of the time of one over the other's, with its
range. On a link without a limit, processors are all that is measured, and those of both hosts are
this machine's.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse
import contextlib
import functools
import tempfile

from benchmarks import all_reduce_bodies
from benchmarks.namespaces import Team, UnavailableError, star
from benchmarks.overhead import alternate, compare, comparison, positive


def measure(mbit: int | None, rounds: int, calls: int) -> str:
    """The table of one link: milliseconds of a call, plain and under TLS."""
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(star(2, mbit))
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        found = all_reduce_bodies.secured(spaces, *folders)
        for team in found.values():
            stack.enter_context(team)
            team.turn(1)

        def turn(team: Team) -> float:
            return max(team.turn(calls)) / calls

        times = alternate(
            {name: functools.partial(turn, team) for name, team in found.items()}, rounds
        )
    where = "a link without a limit" if mbit is None else f"{mbit} Mbit/s"
    title = f"all_reduce of 100 MB, 2 hosts, {where}, median of {rounds} rounds of {calls}"
    return comparison(title, compare(times, ["plain"]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tls", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--mbit", type=int, nargs="+", default=[0, 10_000, 1_000], help="0: no limit"
    )
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--calls", type=positive, default=3)
    options = parser.parse_args(arguments)
    try:
        for mbit in options.mbit:
            print(measure(mbit or None, options.rounds, options.calls), flush=True)
    except UnavailableError as error:
        print(f"not measured: {error}")


if __name__ == "__main__":
    main()
