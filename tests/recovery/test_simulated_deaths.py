"""The real trainer in one process on virtual time: any processes die at any moment, in every mode."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from steepest import DistributedSGD
from steepest.core.system import system
from steepest.runtime.answers import Answer
from steepest.tables.rows.memory import Reserved
from steepest.testing import InProcessCluster
from tests.pairs import mostly_full
from tests.random_examples import seeds, some_of
from tests.reference import same_bits
from tests.simulated_programs import TASK, Program, Run, quiet, run, told
from tests.simulation.run import Simulation, pause, run_config
from tests.simulation.virtual_primitives import Event, Queue, Thread
from tests.simulation.virtual_threads import HangError, Scheduler


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.long
@pytest.mark.parametrize("first", mostly_full(range(7000, 7060, 15), 7000))
def test_processes_may_die_at_these_moments(first: int) -> None:
    """A program ends with the steps that it asked for; with an error only if a node's room is gone for good.

    In the first case the log gives its weights to the bit, no sample is committed twice, the bits are those of an
    undisturbed run where all commits had the same members, and no process is left.
    """
    for seed in some_of(range(first, first + 15), 5):
        check_schedule(seed)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [8161, 8196])
def test_a_copy_that_was_begun_in_vain_is_not_taken_for_one(seed: int) -> None:
    """A process got a server, but not yet its chunks, when another one died: it is given them the next time."""
    check_schedule(seed)


FOUND = {
    20021: "a process that only held chunks until a change was over fell silent",
    20039: "a server died while a state was being set, and the copy of the one before was forgotten",
    20061: "some successors came up and others could not",
    20297: "a worker fell silent while another one's successor was joining",
    20310: "a worker died when all had stopped for a change, and nobody made the change",
    20650: "a process died before there was a copy of the state with which a job begins",
    30105: "a log was read while the job was put together",
    30309: "a worker alone with its server heard nobody before all its steps were made",
    30533: "a successor was stopped before it had come to life",
    30792: "the only process fell silent when another state was set",
    40321: "how slow a worker is was asked for before the others had computed anything",
    41072: "Ray gave up a node that was cut off, and the job heard of it from nobody",
    51205: "counters were asked for in the middle of a change",
    61036: "a snapshot of before another strategy counted updates as this strategy does",
    80029: "servers' successors fell silent, and survivors too, while these were awaited",
    120740: "a log had the commits of a state that was given up by a restore beside those since",
    62845: "the last holder of a chunk died after it was decided that nothing is lost",
    60174: "and were those of a coordinator that had no state yet",
    41415: "a successor that had joined, and had no weights yet, was asked for the buffers of these",
}


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("seed", FOUND, ids=lambda seed: str(seed))
def test_what_random_programs_have_found_stays_mended(seed: int) -> None:
    check_schedule(seed)


FOUND_OF_ROWS = {
    21: "a server of rows alone was pushed to before it heard of the commit",
    45: "a process whose model waited for rows between two steps could not be told to give up",
    206: "a process was stopped while a change installed a state, and no thread looked for silent ones",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", FOUND_OF_ROWS, ids=lambda seed: str(seed))
def test_what_random_programs_have_found_of_rows_stays_mended(seed: int) -> None:
    check_schedule(seed, tables=True)


@pytest.mark.long
@pytest.mark.parametrize("first", mostly_full([9000, 9008], 9000))
def test_rows_count_what_was_committed_whatever_dies(first: int) -> None:
    """Rows that count the sightings of their ids have counted each committed push once, in every mode."""
    for seed in some_of(range(first, first + 8), 1):
        check_schedule(seed, tables=True)


@pytest.mark.long
@pytest.mark.parametrize("tables", mostly_full([False, True], True))
def test_a_node_may_have_servers_alone(*, tables: bool) -> None:
    for seed in some_of(range(10, 18), 1):
        check_schedule(seed, tables=tables, serves=True)


@pytest.mark.full
@pytest.mark.parametrize("serves", [False, True])
@pytest.mark.parametrize("tables", [False, True])
@seeds(100)
def test_any_processes_may_die_at_any_moment(seed: int, tables: bool, serves: bool) -> None:
    check_schedule(seed, tables=tables, serves=serves)


@pytest.mark.long
@pytest.mark.parametrize("first", mostly_full([0, 8], 0))
def test_rounds_of_a_quorum_lose_nothing_whatever_dies(first: int) -> None:
    """No sample is committed twice, and the log gives the weights to the bit, also where workers were replaced."""
    for seed in some_of(range(first, first + 8), 1):
        check_schedule(seed, rounds=True)


def check_schedule(
    seed: int, *, tables: bool = False, serves: bool = False, rounds: bool = False
) -> None:
    """Run a random program in which random processes die, and check what must hold then."""
    try:
        run(seed, tables, serves, rounds)
    except BaseException:
        print(Program(seed, tables, serves, rounds))  # noqa: T201 - shown if the test fails
        raise


@pytest.mark.parametrize("seed", [2, 50])
def test_nothing_stays_of_a_simulation_that_has_ended(seed: int) -> None:
    """In the first processes die amid a forward pass, in the second one amid a backward pass."""
    before = weakref.WeakSet(large_objects())
    check_schedule(seed, tables=True, serves=True)
    gc.collect()
    assert not [each for each in large_objects() if each not in before]


def large_objects() -> list[Scheduler | Reserved]:
    """Return the schedulers of simulations, and the arrays of embedding tables."""
    return [each for each in gc.get_objects() if isinstance(each, (Scheduler, Reserved))]


def test_a_simulated_run_gives_the_bits_of_one_in_a_single_thread() -> None:
    straight = InProcessCluster(TASK.creator(), num_workers=3)
    straight.step(20)
    with (
        Simulation(3).running(),
        DistributedSGD(TASK.creator(), 3, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=20, progress=False)
        assert same_bits(trainer.weights(), straight.weights())


@pytest.mark.long
@seeds(3)
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    first, second = (Run(Program(seed)).run() for _ in range(2))
    assert told(first) == told(second)


def test_all_that_waits_without_end_is_told() -> None:
    simulation = Simulation(1)

    def wait() -> None:
        Event().wait()

    def hang() -> None:
        with simulation.running():
            Thread(target=wait, name="waiter").start()
            Queue[int]().get()

    told = r"nothing moves any more(.|\n)*driver: a queue(.|\n)*waiter: an event"
    with pytest.raises(HangError, match=told):
        hang()


def test_threads_of_a_dead_process_end_in_the_middle_of_what_they_do() -> None:
    simulation, reached = Simulation(1), []
    with simulation.running():
        process = simulation.world.start_process(
            simulation.world.nodes[1], lambda why, silently: None
        )

        def work() -> None:
            try:
                Event().wait()
                reached.append("after")
            finally:
                reached.append("unwound")

        process.spawn(work, "work")
        pause(1.0)
        simulation.world.kill(process, "for the test")
        assert reached == ["unwound"]
        assert not simulation.living()


def test_nothing_is_replaced_after_a_simulation() -> None:
    before = system()
    with Simulation(1).running():
        assert system() is not before
    assert system() is before


def test_threads_outside_of_a_simulation_wait_in_reality() -> None:
    """One of a test before, which hears of its process's end, would take the baton of the simulation."""
    answers: list[bool] = []
    outside = threading.Thread(
        target=lambda: answers.append(Answer[int]().wait(0.001)), daemon=True
    )
    with Simulation(1).running() as simulation:
        outside.start()
        outside.join(60)
        assert not outside.is_alive()
        assert simulation.scheduler.switches == 0
    assert answers == [False]
