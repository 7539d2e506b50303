"""Which step a worker takes next, by what it was granted or leased and what it has."""

from __future__ import annotations

from steepest.core.messages.membership import Grant, Lease, Members
from steepest.core.protocol.worker_steps import Step, WorkerSteps


def granted(worker: int = 1, members: int = 3, limit: int = 4) -> WorkerSteps:
    """Return the steps of a worker in generation 1, which begins with the weights of version 0."""
    steps = WorkerSteps(worker, members, leases=False)
    assert steps.begin_generation(Members(1, 0, (0, 1, 2), reload=True))
    assert steps.take_grant(Grant(1, limit))
    assert steps.next() is None  # no weights are here
    arrive(steps, 1, 0)
    return steps


def leased() -> WorkerSteps:
    steps = WorkerSteps(0, 2, leases=True)
    steps.begin_generation(Members(1, 0, (0, 1), reload=True))
    arrive(steps, 1, 0)
    return steps


def arrive(steps: WorkerSteps, generation: int, version: int) -> None:
    steps.note_weights((generation, version))
    steps.take_version()


def take(steps: WorkerSteps, step: Step | None) -> Step:
    assert step is not None
    steps.begin(step)
    return step


def test_a_step_is_taken_once_and_the_next_with_its_weights() -> None:
    steps = granted()
    assert take(steps, steps.next()) == Step(1, 0)
    assert steps.next() is None
    assert steps.follows(1) == 4  # whose first batch may be loaded
    arrive(steps, 1, 1)
    assert take(steps, steps.next()) == Step(4, 1)


def test_no_step_is_taken_beyond_what_is_granted() -> None:
    steps = granted(limit=1)
    take(steps, steps.next())
    arrive(steps, 1, 1)
    assert steps.next() is None
    assert steps.follows(1) is None
    assert not steps.take_grant(Grant(0, 9))  # of an old generation
    assert steps.next() is None
    assert steps.take_grant(Grant(1, 2))
    assert steps.next() == Step(4, 1)


def test_a_generation_voids_what_was_granted_and_asks_for_weights_of_its_own() -> None:
    steps = granted()
    take(steps, steps.next())
    assert not steps.begin_generation(Members(1, 0, (0, 1, 2), reload=True))  # a copy
    assert steps.begin_generation(Members(2, 0, (0, 1), reload=False, again=True))
    assert steps.next() is None
    steps.take_grant(Grant(2, 4))
    assert steps.next() == Step(1, 0)  # again
    assert steps.begin_generation(Members(3, 5, (0, 1), reload=True))
    steps.take_grant(Grant(3, 6))
    assert (steps.version, steps.next()) == (-1, None)
    arrive(steps, 2, 9)  # of the generation before: it does not count
    assert (steps.version, steps.next()) == (-1, None)
    arrive(steps, 3, 5)
    assert steps.next() == Step(16, 5)


def test_weights_of_a_generation_that_has_not_begun_here_wait_for_it() -> None:
    steps = granted()
    arrive(steps, 2, 1)
    assert steps.next() is None
    steps.begin_generation(Members(2, 1, (0, 1, 2), reload=True))
    steps.take_version()
    steps.take_grant(Grant(2, 2))
    assert steps.next() == Step(4, 1)


def test_a_paused_step_is_taken_again() -> None:
    steps = granted()
    step = take(steps, steps.next())
    steps.pause()
    assert steps.next() == step
    shared = leased()
    shared.take_lease(Lease(1, 0, 7))
    step = take(shared, shared.next())
    assert shared.next() is None
    shared.pause()
    assert shared.next() == step == Step(7, 0)


def test_a_lease_waits_for_the_weights_that_it_names() -> None:
    steps = leased()
    assert steps.take_lease(Lease(1, 2, 5, count=3))
    assert not steps.take_lease(Lease(1, 2, 5, count=3))  # a copy
    assert steps.next() is None
    arrive(steps, 1, 2)
    assert take(steps, steps.next()) == Step(5, 2, 3)
    assert steps.next() is None
    assert steps.limit == 0


def test_a_granted_step_begins_ahead_of_its_weights_after_a_push() -> None:
    steps = granted()
    assert steps.next_ahead() is None  # the present one comes first
    take(steps, steps.next())
    assert take(steps, steps.next_ahead()) == Step(4, 1, is_ahead=True)
    assert steps.next_ahead() is None  # one step ahead, no more
    assert steps.pushed == (1, 1)


def test_a_leased_step_begins_ahead_of_its_lease() -> None:
    steps = leased()
    steps.take_lease(Lease(1, 0, 0, ahead=(4, 2)))
    assert steps.next_ahead() is None  # nothing was pushed
    take(steps, steps.next())
    step = take(steps, steps.next_ahead())
    assert step == Step(4, 0, 2, is_ahead=True)
    assert steps.next_ahead() is None
    assert not steps.has_lease(4)
    steps.take_lease(Lease(1, 3, 4, count=2, ahead=(8, 2)))
    assert not steps.has_lease(4)  # its weights are to come
    arrive(steps, 1, 3)
    assert steps.has_lease(4)
    steps.begin_leased()
    assert steps.pushed == (1, 3)
    assert steps.next() is None
    assert steps.next_ahead() == Step(8, 3, 2, is_ahead=True)
