"""What simulations raise in the driver's main thread, as a handler of a signal would."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from steepest import DistributedSGD
from tests.simulated_programs import TASK, quiet
from tests.simulation.run import Simulation, pause, run_config
from tests.simulation.virtual_primitives import Condition, Event, Queue, RLock, Thread


class Ring(BaseException):
    """What a handler of the user's own raises."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.parametrize("late", [False, True])
def test_the_wait_of_a_number_is_interrupted_when_it_begins_or_is_over(*, late: bool) -> None:
    simulation = Simulation(1)
    with simulation.running():
        began = simulation.scheduler.now
        hit = simulation.interrupt(3, late=late)
        pause(10.0)
        pause(10.0)
        with pytest.raises(KeyboardInterrupt):
            pause(10.0)
        assert (hit.struck, hit.waits) == (True, 3)
        assert simulation.scheduler.now - began == pytest.approx(30.0 if late else 20.0)
        pause(1.0)
        assert hit.waits == 4


def test_a_predicate_interrupts_the_wait_in_which_it_comes_true() -> None:
    simulation = Simulation(1)
    with simulation.running():
        event, seen = Event(), []
        other = Thread(target=lambda: (pause(5.0), seen.append(1), pause(5.0), event.set()))
        other.start()
        began = simulation.scheduler.now
        hit = simulation.interrupt(when=lambda: seen, error=SystemExit(143))
        with pytest.raises(SystemExit) as raised:
            event.wait()
        assert raised.value.code == 143
        assert hit.where.startswith("an event")
        assert simulation.scheduler.now - began == pytest.approx(5.0)
        other.join()
        assert event.is_set()


def test_without_a_moment_waits_are_only_counted() -> None:
    simulation = Simulation(1)
    with simulation.running():
        hit = simulation.interrupt()
        for _ in range(4):
            pause(1.0)
        assert (hit.waits, hit.struck) == (4, False)


@pytest.mark.parametrize("late", [False, True])
def test_locks_that_an_interrupted_thread_waited_for_go_to_the_next(*, late: bool) -> None:
    simulation = Simulation(1)
    with simulation.running():
        lock, took = RLock(), Queue[str]()

        def hold() -> None:
            with lock:
                pause(5.0)

        def want() -> None:
            pause(2.0)
            with lock:
                took.put("other")

        threads = [Thread(target=hold), Thread(target=want)]
        for thread in threads:
            thread.start()
        pause(1.0)
        simulation.interrupt(1, late=late, error=Ring)
        with pytest.raises(Ring):
            lock.acquire()
        assert took.get(timeout=10.0) == "other"
        assert not lock.locked()


def test_an_interrupted_thread_leaves_a_condition_as_it_is_left_by_python() -> None:
    """The second exception comes while the lock is taken again; the thread has the lock all the same."""
    simulation = Simulation(1)
    with simulation.running():
        condition = Condition()

        def hold() -> None:
            with condition:
                pause(10.0)

        simulation.interrupt(1, error=Ring)
        with condition:
            Thread(target=hold).start()
            with pytest.raises(Ring):
                condition.wait()
        pause(1.0)
        for number in (1, 2):
            simulation.interrupt(number, error=Ring)
        with pytest.raises(Ring), condition:
            pass
        with pytest.raises(Ring):
            pause(1.0)
        pause(20.0)
        with condition:
            assert not condition.wait(1.0)


def test_what_comes_between_two_waits_is_raised_by_the_next() -> None:
    simulation = Simulation(1)
    with simulation.running():
        simulation.scheduler.throw(simulation.scheduler.main, Ring())
        with pytest.raises(Ring):
            pause(1.0)


def test_the_exception_comes_out_of_the_users_call_and_steps_go_on_afterwards() -> None:
    simulation = Simulation(1)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.step()
        hit = simulation.interrupt(3)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(steps=1000, progress=False)
        assert "trainer.py" in hit.where
        simulation.settle()
        step = trainer.stats().step
        assert trainer.step().step == step + 1
        assert simulation.threads()
    assert not simulation.threads()


def test_the_others_go_on_when_a_thread_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda about: told.append(about.exc_value))
    simulation = Simulation(1)
    with simulation.running():
        error = Ring()

        def fail() -> None:
            pause(1.0)
            raise error

        thread = Thread(target=fail)
        thread.start()
        thread.join()
        assert told == [error]
        pause(1.0)


def test_threads_of_the_driver_have_names() -> None:
    simulation = Simulation(1)
    with simulation.running():
        assert simulation.threads() == []
        thread = Thread(target=lambda: pause(3.0), name="mine")
        thread.start()
        assert simulation.threads() == ["mine"]
        thread.join()
        assert simulation.threads() == []


@pytest.mark.long
def test_notice_of_a_node_moves_its_processes_away() -> None:
    simulation = Simulation(3, cpus=(2, 2, 2))
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=3, progress=False)
        (node,) = {
            process.where.id for process in simulation.living() if "worker 1" in process.name
        }
        (leaves,) = [each for each in simulation.world.nodes if each.id == node]
        simulation.give_notice(leaves, 100.0)
        for _ in range(20):
            trainer.fit(steps=20, progress=False)
            simulation.settle(3.0)
        assert "moved" in {event.kind for event in trainer.stats().events}
        assert trainer.num_workers == 2
        assert all(process.where is not leaves for process in simulation.living())
