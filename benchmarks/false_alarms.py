"""Minutes in which processes look dead and are not: is one of them given up?

    python -m benchmarks.false_alarms --minutes 30
    python -m benchmarks.false_alarms --minutes 5 --lock sleeping

Six workers and two servers of `DistributedSGD(..., strategy="ps")`, eight processes on however few processors there
are, train a perceptron with default settings (`heartbeat` is 2 s). Now and then

- a worker, or the process of the coordinator, holds Python's lock for ten seconds in one call of C code, which computes
  (with ``--lock sleeping`` it sleeps instead, which no neighbour can tell from a process that hangs);
- the driver is stopped for five seconds (SIGSTOP and SIGCONT by this process, which is outside of the job).

Nothing dies, so that an event is a false alarm. The exit status is 1 when there was one.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import argparse
import multiprocessing
import signal
import sys
import time

from benchmarks.false_alarm_bodies import HOLDS, Alarms, Seen, drive
from benchmarks.overhead import machine

ANSWER_SECONDS = 120.0


def watch(alarms: Alarms) -> tuple[Seen, int]:
    """Runs the driver, and stops it now and then.

    Returns:
        What it saw, and how often it was stopped.

    Raises:
        RuntimeError: the driver died.
    """
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    driver = multiprocessing.get_context("spawn").Process(target=drive, args=(alarms, theirs))
    driver.start()
    theirs.close()
    pauses = 0
    try:
        assert mine.poll(ANSWER_SECONDS), "the driver did not begin to train"
        mine.recv()
        end = time.monotonic() + 60 * alarms.minutes
        while time.monotonic() + alarms.pause_every + alarms.paused < end:
            if mine.poll(alarms.pause_every):
                break  # it died
            _pause(driver.pid, alarms.paused)
            pauses += 1
        if not mine.poll(60 * alarms.minutes + ANSWER_SECONDS):
            raise RuntimeError("the driver gives no answer")
        return mine.recv(), pauses
    except EOFError:
        raise RuntimeError("the driver died; what it said is above") from None
    finally:
        driver.join(ANSWER_SECONDS)
        if driver.is_alive():
            driver.kill()


def _pause(pid: int | None, seconds: float) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def text(alarms: Alarms, seen: Seen, pauses: int) -> str:
    held = ", ".join(f"{name} {count}" for name, count in sorted(seen.holds.items()))
    lines = [
        f"{alarms.minutes:g} minutes, {alarms.workers} workers and {alarms.servers} servers: {seen.steps:,} steps; "
        f"the longest time without one {seen.gap:.1f} s",
        f"Python's lock held for {alarms.held:g} s, {alarms.lock}: {held or 'never'}",
        f"the driver stopped for {alarms.paused:g} s: {pauses} times",
        f"given up: {len(seen.events)} (processes replaced: {seen.replaced})",
    ]
    return "\n".join([*lines, *seen.events])


def main(arguments: list[str] | None = None) -> int:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.false_alarms", description=description
    )
    parser.add_argument("--minutes", type=float, default=Alarms.minutes)
    parser.add_argument("--lock", choices=list(HOLDS), default=Alarms.lock)
    options = parser.parse_args(arguments)
    alarms = Alarms(minutes=options.minutes, lock=options.lock)
    print(machine(), flush=True)
    seen, pauses = watch(alarms)
    print(text(alarms, seen, pauses))
    return 1 if seen.events or seen.replaced else 0


if __name__ == "__main__":
    sys.exit(main())
