"""Whatever ends a user's call, and whenever, Ctrl-C or a death: every call works afterwards, and no step is lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steepest import Checkpoints, DistributedSGD
from steepest.runtime.recovery import stocktaking
from tests.pairs import pairwise
from tests.reference import difference
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.struck_jobs import (
    ACTIONS,
    CHANGE_SECONDS,
    CHANGES,
    CPUS,
    DEADLINES,
    DIED,
    ERRORS,
    KINDS,
    MOMENTUM,
    TOLERANCE,
    Alarm,
    Alone,
    Heard,
    StruckJob,
    larger,
    length,
    running,
    strike,
    timed,
)

RATIO = 0.6180339887  # its multiples are spread evenly between whole numbers
STRUCK = [
    "ctrl-c", "ctrl-c late", "ctrl-c twice", "sigterm", "sigterm late", "alarm",
    "worker 0", "worker 1", "server 0", "server 1",
    "worker 0 and ctrl-c", "worker 1 and alarm", "server 0 and sigterm",
]  # fmt: skip
WORKERS = (1, 2, 3)


def is_possible(action: str, name: str, what: str, workers: int, settles: bool) -> bool:
    """Whether there is such a process, and whether its death is to be noticed by the call at all."""
    died = what.partition(" and ")[0]
    if died.startswith("server") and (workers == 1 or name in ("allreduce", "groups", "local")):
        return False
    if died == "worker 1" and workers == 1:
        return False
    # functions of a user's own are not run twice: they raise `PeerLostError`
    return action != "foreach_worker" or not died.startswith(("worker", "server"))


def _id(value: Any) -> str:
    return str(value).replace(" ", "-")


ROWS = [
    row
    for row, chosen in pairwise([ACTIONS, KINDS, STRUCK, WORKERS, (False, True)], is_possible)
    if chosen
]
random.Random(34).shuffle(ROWS)  # what is run often has all values, not the first ones
CASES = [(*row, number * RATIO % 1.0) for number, row in enumerate(ROWS)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.few(1)
@pytest.mark.parametrize(("action", "name", "what", "workers", "settles", "place"), CASES, ids=_id)
def test_after_a_call_was_struck_every_call_works(
    action: str, name: str, what: str, workers: int, settles: bool, place: float, tmp_path: Path
) -> None:
    strike(name, workers, action, what, place, tmp_path, settles=settles)


@pytest.mark.long
def test_no_step_lacks_in_the_history_at_whichever_moment_of_one_a_death_and_ctrl_c_come(
    tmp_path: Path,
) -> None:
    events = length("copies", 2, "fit", tmp_path / "undisturbed").events
    for event in range(events // 4, events // 2):
        with running(KINDS["copies"], 2, tmp_path / str(event)) as job:
            simulation, hits = job.simulation, []

            def strike_both(job: StruckJob = job, hits: list[Any] = hits) -> None:
                job.kill("server 0")
                hits.append(job.simulation.interrupt(1, error=KeyboardInterrupt()))

            job.begin()
            simulation.at_event(event, strike_both)
            with pytest.raises(KeyboardInterrupt):
                job.trainer.fit(steps=4, progress=False)
            hits[0].forget()
            job.expect(*(job.alone.at(job.alone.step + more) for more in range(5)))
            job.works()
            job.end()


def test_a_callback_hears_once_of_a_step_whose_result_was_found_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stock is taken again where a process dies while it is taken."""
    salvage, found = stocktaking._salvage, []

    def twice(cluster: Any, holding: list[Any]) -> Any:
        before = cluster.client.outcomes.qsize()
        salvage(cluster, holding)
        state = salvage(cluster, holding)
        found.append(cluster.client.outcomes.qsize() - before)
        return state

    monkeypatch.setattr(stocktaking, "_salvage", twice)
    for event in range(64, 130, 6):
        with running(KINDS["copies"], 3, tmp_path, task=timed(MOMENTUM, 1e-3)) as job:
            job.simulation.at_event(event, lambda job=job: job.kill("server 0"))
            heard = Heard()
            job.trainer.fit(steps=12, callbacks=[heard], progress=False)
            assert heard.steps == list(range(1, 13))
            rows = job.trainer.history.steps
            assert job.trainer.stats().samples == sum(row["samples"] for row in rows)
    assert any(found)


def every(*quick: tuple[str, str, int], long: int) -> list[Any]:
    """Return actions, kinds and numbers of workers: those given, so many that are long, and the rest in full."""
    rows = list(itertools.product(ACTIONS, KINDS, WORKERS))
    others = [row for row in rows if row not in quick]
    middle = others[:: len(others) // long]
    return [
        *quick,
        *(
            pytest.param(*row, marks=pytest.mark.long if row in middle else pytest.mark.full)
            for row in others
        ),
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("action", "name", "workers"),
    every(("restore", "ps", 2), ("fit", "allreduce", 2), ("set_weights", "local", 1), long=6),
    ids=_id,
)
def test_an_interruption_may_come_at_every_wait(
    action: str, name: str, workers: int, tmp_path: Path
) -> None:
    """What has failed is told all at once, with the places at which the driver was."""
    waits = length(name, workers, action, tmp_path / "undisturbed").waits
    interruptions = [what for what in STRUCK if what.split()[0] in ERRORS]
    failed = []
    for wait in range(1, waits + 1):
        what = interruptions[wait % len(interruptions)]
        try:
            strike(
                name, workers, action, what, (wait - 0.5) / waits, tmp_path / str(wait),
                settles=wait % 2 == 0,
            )  # fmt: skip
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - told below
            failed.append(f"wait {wait}, {what}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} of {waits} waits:\n" + "\n".join(failed)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "action"),
    [("ps", "resize up"), ("allreduce", "set_strategy"), ("local", "set_strategy")],
    ids=_id,
)
def test_the_wait_of_a_call_is_ended_and_not_the_change(
    name: str, action: str, tmp_path: Path
) -> None:
    """Once the first new process is there, the change is made, although nobody waits for it."""
    with running(KINDS[name], 2, tmp_path) as job:
        job.begin()
        world = job.simulation.world
        before, strategy = len(world.processes), job.trainer.strategy
        hit = job.simulation.interrupt(when=lambda: len(world.processes) > before)
        with pytest.raises(KeyboardInterrupt):
            ACTIONS[action].call(job, lambda: None)
        assert hit.struck
        job.simulation.settle(CHANGE_SECONDS)
        job.expect(job.alone)
        if action == "resize up":
            assert job.trainer.num_workers == 3
        else:
            assert job.trainer.strategy == KINDS[name].other() != strategy
        job.works()
        job.end()


# -- start -----------------------------------------------------------------------------------------


def starts(name: str, workers: int, folder: Path) -> DistributedSGD:
    kind = KINDS[name]
    return DistributedSGD(
        kind.task.creator(),
        workers,
        strategy=kind.strategy(),
        global_batch_size=kind.global_batch,
        run_config=run_config(deadlines=DEADLINES),
        checkpoints=Checkpoints(folder / "kept"),
    )


def start_and_strike(
    name: str, workers: int, folder: Path, wait: int | None, how: str = "ctrl-c"
) -> int:
    """Interrupt a start at a wait; start again, and train. Return the waits of a start with None."""
    simulation = Simulation(1, CPUS, seconds=20_000.0, switches=100_000)
    with simulation.running():
        error, _, late = how.partition(" ")
        hit = simulation.interrupt(wait, error=ERRORS[error](), late=bool(late))
        try:
            trainer = starts(name, workers, folder)
        except (KeyboardInterrupt, SystemExit, Alarm):
            assert hit.struck
        else:
            waits = hit.waits
            trainer.shutdown()
            assert wait is None, f"the exception was swallowed: {hit.where}"
            return waits
        assert not simulation.leftovers(), f"processes are left: {hit.where}"
        assert not simulation.threads(), f"threads of the driver are left: {hit.where}"
        free, total = simulation.runtime.free(), simulation.runtime.total()
        assert free == total, f"CPUs are still reserved: {hit.where}"
        with starts(name, workers, folder) as trainer:
            assert trainer.fit(steps=3, progress=False).step == 3
            if KINDS[name].exact:
                expected = Alone(KINDS[name].task).at(3).weights()
                assert difference(trainer.weights(), expected) < TOLERANCE
        assert not simulation.leftovers()
        return hit.waits


@pytest.mark.few(1)
@pytest.mark.parametrize("eighth", range(8))
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", KINDS)
def test_a_start_that_is_interrupted_leaves_nothing(
    name: str, workers: int, eighth: int, tmp_path: Path
) -> None:
    waits = start_and_strike(name, workers, tmp_path / "counted", None)
    hows = [f"{error}{late}" for error in ERRORS for late in ("", " late")]
    chosen = range(1 + eighth, waits + 1, 8)
    quick = chosen[:: max(1, len(chosen) // 3)]  # three of each eighth
    for wait in quick:
        how = hows[wait % len(hows)]
        start_and_strike(name, workers, tmp_path / str(wait), wait, how)


@pytest.mark.few(2)
@pytest.mark.parametrize("place", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("victim", ["worker 0", "worker 1", "server 0"])
@pytest.mark.parametrize("name", KINDS)
def test_a_death_while_a_job_starts_is_answered_as_any_other(
    name: str, victim: str, place: float, tmp_path: Path
) -> None:
    """The trainer comes up, with all workers, and trains from the first step on."""
    events = 0
    for strikes in (False, True):
        simulation = Simulation(2, CPUS, seconds=20_000.0, switches=100_000)

        def kill(simulation: Simulation = simulation) -> None:
            for process in simulation.living():
                if process.name == f"steepest {victim}":
                    simulation.world.kill(process, DIED)

        with simulation.running():
            if strikes:
                simulation.at_event(1 + int(place * events), kill)
            with starts(name, 2, tmp_path / str(strikes)) as trainer:
                events = simulation.world.events
                assert trainer.fit(steps=3, progress=False).step == 3
                if KINDS[name].exact:
                    expected = Alone(KINDS[name].task).at(3).weights()
                    assert difference(trainer.weights(), expected) < TOLERANCE
                simulation.settle(CHANGE_SECONDS)
                assert trainer.num_workers == 2
            assert not simulation.leftovers()
            assert not simulation.threads()


# -- the last checkpoint ---------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("place", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("action", [name for name in CHANGES if name.endswith("in fit")])
@pytest.mark.parametrize("name", ["ps", "allreduce", "local"])
def test_who_is_ended_amid_a_change_writes_the_last_checkpoint(
    name: str, action: str, place: float, tmp_path: Path
) -> None:
    """The next start of the same program goes on from a step that callbacks had heard of, or a later one."""
    kind = KINDS[name]
    wait = 1 + int(place * length(name, 2, action, tmp_path / "undisturbed").waits)
    kept = Checkpoints(tmp_path / "kept", every=1000)
    reached = 0

    def program() -> None:
        nonlocal reached
        with running(kind, 2, tmp_path, checkpoints=kept) as job:
            job.begin()
            job.replayed = False

            def now() -> None:
                job.simulation.interrupt(wait, error=SystemExit(143))

            try:
                ACTIONS[action].call(job, now)
            finally:
                reached = job.trainer.history.steps[-1]["step"]

    with pytest.raises(SystemExit):
        program()
    with running(kind, 2, tmp_path, checkpoints=kept) as job:
        step = job.trainer.stats().step
        assert step >= reached, "the last checkpoint is missing"
        job.expect(Alone(kind.task).at(step))
        assert job.trainer.step().step == step + 1
        job.expect(job.alone.at(step + 1))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ps", "async"])
def test_a_fit_that_was_interrupted_twice_leaves_no_step_behind(name: str, tmp_path: Path) -> None:
    """The second Ctrl-C comes while the first one's end is awaited; no later call takes steps that it left."""
    for wait in (2, 3, 4, 5):  # the first wait is for the job to be whole
        with running(KINDS[name], 2, tmp_path / str(wait)) as job:
            job.begin()
            job.simulation.interrupt(wait)
            job.simulation.interrupt(wait + 1)
            with pytest.raises(KeyboardInterrupt):
                job.trainer.fit(steps=100, progress=False)
            job.simulation.forget_faults()  # where the first one was taken without another wait
            step = job.trainer.stats().step
            for _ in range(3):
                job.simulation.settle(1.0)
                assert job.trainer.stats().step == step
                step += 1
                assert job.trainer.step().step == step == job.trainer.stats().step
            job.alone = job.alone.at(step)
            job.expect(job.alone)
            job.end()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ps", "local"])
def test_a_callback_hears_of_each_step_once_after_an_interrupted_change(
    name: str, tmp_path: Path
) -> None:
    with running(KINDS[name], 2, tmp_path) as job:
        job.begin()
        first = interrupted_change(job)
        second = Heard()
        step = job.trainer.stats().step
        job.trainer.fit(steps=10, callbacks=[second], progress=False)
        assert second.steps == list(range(step + 1, step + 11))
        assert first == list(range(first[0], first[-1] + 1))
        assert first[-1] <= step
        job.expect(job.alone.at(step + 10))
        job.end()


def interrupted_change(job: StruckJob) -> list[int]:
    """Fit until a new worker joins, and interrupt that; return the steps that were heard of."""
    heard = Heard((job.alone.step + 2, lambda: larger(job)))
    before = job.simulation.living()

    def joins() -> bool:
        return bool(heard.steps) and len(job.simulation.living()) > len(before)

    job.simulation.interrupt(when=joins)
    with pytest.raises(KeyboardInterrupt):
        job.trainer.fit(steps=1000, callbacks=[heard], progress=False)
    return heard.steps
