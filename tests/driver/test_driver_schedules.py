"""Whatever interrupts a call of a trainer, and whichever processes die: every later call works, and nothing is lost.

`python -m tests.driver_schedules` searches on, and shortens what it finds.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from steepest import FailureConfig, ParameterServerStrategy, SimpleStrategy
from steepest.runtime import holders
from tests.driver_runs import Act, Interrupt, Run, Schedule
from tests.driver_worlds import FAMILIES
from tests.pairs import mostly_full
from tests.random_examples import seeds
from tests.simulated_programs import Fault

# what a signal raises between `open` and its `with` leaves the file to be closed by Python itself, in any program
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed file <_io.BufferedReader name='.*steepest-driver-:ResourceWarning"
)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


def check(schedule: Schedule) -> None:
    """Run a schedule, and check what must hold."""
    run = Run(schedule)
    try:
        run.run()
    except BaseException:
        print(schedule, "as it ran:", *run.done, sep="\n    ")  # noqa: T201 - shown if the test fails
        raise


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(5))
def test_calls_that_nothing_strikes_are_those_of_one_process(seed: int) -> None:
    check(Schedule.drawn(seed).undisturbed())


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [10, 11])
def test_a_file_that_was_just_opened_does_not_end_the_tests(number: int) -> None:
    """A signal arrives when `open` returns, and when the function around it does."""
    struck = Interrupt("point", number, files=("/storage/files.py",))
    acts = [Act("start"), Act("save"), Act("restore", interrupt=struck), Act("shutdown")]
    check(Schedule(1, FAMILIES["sync"], 2, SimpleStrategy(), FailureConfig(spares=0), acts))


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(5))
def test_every_call_works_after_an_interrupted_one(seed: int) -> None:
    check(Schedule.drawn(seed))


def test_a_worker_dies_before_any_has_the_first_weights() -> None:
    plain = FailureConfig(max_failures=1000, heartbeat=2.0, spares=0, patience=math.inf)
    struck = Interrupt("wait", 8, KeyboardInterrupt, again=3)
    fit = Act("fit", 4, struck, (Fault(action=0, after=1, kind="kill", share=0.3, seed=1),))
    acts = [Act("start"), fit, Act("fit", 4), Act("shutdown")]
    check(Schedule(3003495, FAMILIES["sync"], 2, SimpleStrategy(), plain, acts))


def test_a_worker_dies_just_before_a_state_is_installed() -> None:
    plain = FailureConfig(max_failures=1000, heartbeat=2.0, spares=0, patience=math.inf)
    restore = Act("restore", faults=(Fault(0, 19, "kill", 0.0, 2329330116),))
    acts = [
        Act("start"),
        Act("fit", 2),
        Act("save"),
        Act("fit", 2),
        restore,
        Act("weights"),
        Act("step"),
    ]
    strategy = ParameterServerStrategy(num_servers=2, chunk_bytes=32)
    check(Schedule(56, FAMILIES["sync"], 3, strategy, plain, [*acts, Act("shutdown")]))


def test_a_step_that_is_begun_when_stop_is_called_is_whole_when_fit_returns() -> None:
    """Where each gradient is an update by itself, also if the processes change meanwhile."""
    plain = FailureConfig(max_failures=1000, heartbeat=2.0, snapshot_every=3, patience=math.inf)
    strategy = ParameterServerStrategy(mode="async", num_servers=2, replication=2, chunk_bytes=32)
    deaths = Fault(0, 200, "kill", 1.0, 3133076485), Fault(0, 10, "kill", 0.6, 2692116682)
    weights = Act("weights", faults=deaths)
    fit = Act("fit and stop", (8, 2), faults=(Fault(0, 2, "kill", 0.6, 186855481),))
    acts = [Act("start"), Act("step"), weights, fit, Act("save"), Act("shutdown")]
    check(Schedule(4101190, FAMILIES["async"], 2, strategy, plain, acts))


def test_a_successor_that_dies_while_others_end_their_step_is_started_again() -> None:
    """The step takes longer than a start may; the job waits for all workers, so it goes on with all of them."""
    plain = FailureConfig(
        max_failures=1000, heartbeat=2.0, snapshot_every=3, patience=math.inf, spares=1
    )
    strategy = ParameterServerStrategy(mode="async", num_servers=1, chunk_bytes=32)
    deaths = Fault(0, 30, "kill", 0.3, 3188827749), Fault(0, 50, "kill", 0.6, 2938366643)
    acts = [
        Act("start"),
        Act("resize", 3),
        Act("fit and stop", (7, 2), faults=deaths),
        Act("shutdown"),
    ]
    check(Schedule(116, FAMILIES["async"], 2, strategy, plain, acts))


_COUNTED = """
from tests.driver_runs import Run, Schedule
run = Run(Schedule.drawn(5010040))
run.run()
print(run.switches)
"""


@pytest.mark.full
@pytest.mark.long
def test_a_schedule_is_the_same_in_every_process() -> None:
    """Whatever the hashes are of what sets hold: two processes die together in it."""
    found = set[str]()
    for hashes in ("0", "1"):
        settings = {**os.environ, "PYTHONHASHSEED": hashes}
        command = [sys.executable, "-c", _COUNTED]
        ran = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        found.add(ran.stdout)
    assert len(found) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(1, 6))
def test_nothing_is_left_of_a_trainer_of_which_the_constructor_was_interrupted(first: int) -> None:
    files, plain = ("/trainer.py", "/cluster.py", "/lease.py"), FailureConfig(spares=0)
    before = list(holders._holders)
    for number in itertools.count(first, 5):
        acts = [Act("start", interrupt=Interrupt("point", number, files=files)), Act("shutdown")]
        run = Run(Schedule(1, FAMILIES["sync"], 2, SimpleStrategy(), plain, acts))
        run.run()
        assert holders._holders == before
        if not run.struck:
            return


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("first", mostly_full([*range(0, 120, 20)], 20, 80))
def test_every_call_works_after_these_interrupted_ones(first: int) -> None:
    for seed in range(first, first + 20):
        check(Schedule.drawn(seed))


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
@seeds(100)
def test_every_call_works_after_any_interrupted_one(seed: int, part: int) -> None:
    check(Schedule.drawn(seed))
