"""What audits cost: two jobs on processes of this machine, one with `RunConfig(audit=)` and one without, turn by turn.

    python -m benchmarks.audit                         # the ConvNet, a hundredth of the steps, about two minutes
    python -m benchmarks.audit --share 1 --steps 50    # every step

Two shares are told: that of a step's time, as a median over pairs of turns, which other programs disturb, and that of
computing, by the workers' own clocks: the seconds of audits over those of all gradients. Both jobs are to end with the
same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence

import torch

from benchmarks.models import WORKLOADS
from benchmarks.overhead import alternate, positive, ratios
from benchmarks.rivals import WORKERS
from steepest import Callback, DistributedSGD, RunConfig, StepResult


class Clock(Callback):
    """The seconds that workers spent on gradients, and on audits, and in how many steps there was one."""

    def __init__(self) -> None:
        self.computing = self.auditing = 0.0
        self.audited = 0

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        """Add a step's."""
        self.computing += result.timings["compute"]
        self.auditing += result.timings.get("audit", 0.0)
        self.audited += "audit" in result.timings


def job(model: str, share: float) -> DistributedSGD:
    """Return a job of a model, of which a share of the steps is audited."""
    workload = WORKLOADS[model]
    return DistributedSGD(
        lambda worker, device: workload.model(),
        WORKERS,
        run_config=RunConfig(runtime="processes", audit=share),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print what was measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.audit", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", choices=[*WORKLOADS], default="convnet")
    parser.add_argument("--share", type=float, default=0.01, help="of the steps (default 0.01)")
    parser.add_argument("--steps", type=positive, default=300, help="of a turn (default 300)")
    parser.add_argument("--rounds", type=positive, default=5)
    given = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        plain, audited = (
            stack.enter_context(job(given.model, share)) for share in (0.0, given.share)
        )
        clock = Clock()

        def turn(sgd: DistributedSGD) -> float:
            begun = time.perf_counter()
            sgd.fit(steps=given.steps, callbacks=[clock] if sgd is audited else [], progress=False)
            return time.perf_counter() - begun

        for each in (plain, audited):
            each.fit(steps=10, progress=False)
        times = alternate(
            {"plain": lambda: turn(plain), "audited": lambda: turn(audited)}, given.rounds
        )
        found = ratios(times["audited"], times["plain"])
        same = all(
            torch.equal(value, audited.weights()[name]) for name, value in plain.weights().items()
        )
    steps, more = given.steps * given.rounds, 100 * clock.auditing / clock.computing
    print(
        f"{given.model}, audit={given.share}: {clock.audited} of {steps} steps; {more:.2f} % more computing; "
        f"a step takes {found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f}) of its time without; "
        f"{'the same bits' if same else 'OTHER BITS'}"
    )


if __name__ == "__main__":
    main()
