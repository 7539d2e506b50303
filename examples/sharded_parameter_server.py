"""Four Ray tasks add ones to 100 MB of numbers that lie in two server processes, while the driver looks on.

    python examples/sharded_parameter_server.py
    python examples/sharded_parameter_server.py --plain                       # pull and push, one after the other
    python examples/sharded_parameter_server.py --megabytes 8 --servers 3     # smaller, on more servers

Every push is added exactly once, so that in the end every number is workers times rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import ray

from steepest import ParameterServer


@ray.remote
def work_plainly(server: ParameterServer, rounds: int) -> float:
    """Pulls, makes an update, pushes it: two calls in each round, and new memory each time. Returns seconds."""
    began = time.monotonic()
    for _ in range(rounds):
        parameters = server.pull()
        update = np.ones_like(parameters)  # here one would compute something from the parameters
        server.push(update)
    return time.monotonic() - began


@ray.remote
def work(server: ParameterServer, rounds: int) -> float:
    """The same in one call for each round: pushes, and pulls the result into memory that is there already."""
    began = time.monotonic()
    parameters = server.pull()
    update = np.empty_like(parameters)
    for _ in range(rounds):
        update.fill(1.0)  # here one would compute something from the parameters
        server.push_pull(update, out=parameters)
    return time.monotonic() - began


def main(argv: Sequence[str] | None = None) -> float:
    """Runs the tasks, prints how it goes, and returns what every number is in the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=100, help="size of the array")
    parser.add_argument("--servers", type=int, default=2, help="server processes")
    parser.add_argument("--workers", type=int, default=4, help="Ray tasks")
    parser.add_argument("--rounds", type=int, default=5, help="pushes of each task")
    parser.add_argument("--plain", action="store_true", help="pull and push instead of push_pull")
    options = parser.parse_args(argv)

    task = work_plainly if options.plain else work
    zeros = np.zeros(int(options.megabytes * 1e6 / 8))
    ray.init(ignore_reinit_error=True)  # else the servers are processes of this machine alone
    with ParameterServer(zeros, num_servers=options.servers) as server:
        began = time.monotonic()
        running = [task.remote(server, options.rounds) for _ in range(options.workers)]
        seen, longest = None, 0.0
        while running:
            done, running = ray.wait(running, num_returns=len(running), timeout=0.2)
            longest = max([longest, *ray.get(done)])  # raises what a task raised
            first = server.pull(range=(0, 4))
            if seen != first[0]:
                seen = first[0]
                print(f"{time.monotonic() - began:5.1f} s  first parameters: {first}", flush=True)
        seconds = time.monotonic() - began
        final = server.pull()

    updates = options.workers * options.rounds
    if not (final == updates).all():
        raise RuntimeError(
            f"numbers from {final.min():g} to {final.max():g} instead of {updates}: updates were "
            "lost"
        )
    print(f"every parameter is {final[0]:g}, as it should be")
    print(
        f"{updates} updates of {zeros.nbytes / 1e6:g} MB in {seconds:.1f} s with the start of the "
        f"tasks; the longest task took {longest:.1f} s"
    )
    return float(final[0])


if __name__ == "__main__":
    main()
