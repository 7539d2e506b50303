"""How long the driver waits for what, and who waits for whom: slow steps, other threads, callbacks, nodes that go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import (
    Callback,
    Checkpoints,
    DistributedSGD,
    EarlyStopping,
    FailureConfig,
    LocalStrategy,
    StepResult,
)
from steepest.core.config.run import DeadlineConfig
from steepest.data.storage.files import LocalStorage
from steepest.errors import (
    DeadlineError,
    PeerLostError,
    ResourcesError,
    ShutdownError,
    SteepestError,
)
from tests.reference import Task
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config
from tests.simulation.virtual_primitives import Thread
from tests.struck_jobs import (
    ACTIONS,
    DEADLINES,
    EPOCH,
    KINDS,
    PLAIN,
    Alone,
    Heard,
    Kind,
    StruckJob,
    larger,
    running,
    timed,
)

SOON = 2.0  # seconds of virtual time in which a call returns that waits for nothing
VALIDATION = (torch.zeros(400, 3).double(), torch.zeros(400, 2).double())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


# -- steps that take longer than a start may -------------------------------------------------------

STEP_SECONDS = 40.0  # of each batch
SLOW = DeadlineConfig(start=5.0, step=400.0, call=400.0, driver=40_000.0)
assert 5 * SLOW.start < STEP_SECONDS < SLOW.step


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "what", ["worker 1", "worker 0", "server 0", "resize up", "resize down", "worker 1, resize up"]
)
@pytest.mark.parametrize("name", KINDS)
def test_what_waits_out_a_step_has_the_deadline_of_a_step(
    name: str, what: str, tmp_path: Path
) -> None:
    """Somebody dies, or another size is asked for, in the middle of a step that takes long."""
    kind = KINDS[name]
    task = timed(kind.task, STEP_SECONDS)
    with running(kind, 3, tmp_path, task=task, deadlines=SLOW) as job:
        if what == "server 0" and not any("server 0" in str(p) for p in job.simulation.living()):
            pytest.skip("there is none")

        def strike() -> None:
            for each in what.split(", "):
                if each.startswith("resize"):
                    job.trainer.resize(4 if each == "resize up" else 2)
                else:
                    job.simulation.at_time(0.3 * STEP_SECONDS, lambda each=each: job.kill(each))

        heard = Heard((2, strike))
        assert job.trainer.fit(steps=6, callbacks=[heard], progress=False).step == 6
        assert sorted(set(heard.steps)) == list(range(1, 7))
        job.expect(job.alone.at(6))
        if "resize" in what:
            assert job.trainer.num_workers == (4 if "resize up" in what else 2)
        assert job.trainer.step().step == 7
        job.end()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["async", "ssp"])
def test_a_successor_that_dies_while_another_joins_has_one_itself(
    name: str, tmp_path: Path
) -> None:
    """The other one waits out a long step to join; the job keeps its size, as it would without that."""
    kind = KINDS[name]
    failure = FailureConfig(max_failures=9, spares=0, patience=math.inf)
    task = timed(kind.task, STEP_SECONDS)
    with running(kind, 3, tmp_path, task=task, deadlines=SLOW, failure=failure) as job:

        def strike() -> None:
            job.kill("worker 1", "worker 2")
            job.simulation.at_time(0.9 * STEP_SECONDS, lambda: job.kill("worker 2"))

        heard = Heard((2, lambda: job.simulation.at_time(0.05 * STEP_SECONDS, strike)))
        assert job.trainer.fit(steps=6, callbacks=[heard], progress=False).step == 6
        assert {r["workers"] for r in job.trainer.history if r["kind"] == "step"} == {3}
        job.end()


def test_steps_of_before_a_resize_are_not_made_again_by_other_workers(tmp_path: Path) -> None:
    """Workers compute a step that `stop` has made void, longer than a copy is otherwise waited for; then one dies."""
    strategy = LocalStrategy(chunk_bytes=32, sync_every=1, num_servers=1)
    kind = Kind(lambda: strategy, KINDS["local"].other, task=PLAIN)
    task = timed(PLAIN, STEP_SECONDS)
    failure = FailureConfig(max_failures=20, heartbeat=2.0, spares=0, patience=math.inf)
    with running(kind, 3, tmp_path, task=task, deadlines=SLOW, failure=failure) as job:
        heard = Heard((2, lambda: job.simulation.at_time(1.0, job.trainer.stop)))
        last = job.trainer.fit(steps=6, callbacks=[heard], progress=False)
        assert 2 <= last.step < 6
        job.trainer.resize(2)
        job.kill("server 0")
        assert job.trainer.step().step == last.step + 1
        job.expect(job.alone.at(last.step + 1))
        rows = [row["workers"] for row in job.trainer.history if row["kind"] == "step"]
        assert rows == [3] * last.step + [2]
        job.end()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["local", "accumulate"])
def test_a_round_of_many_batches_is_waited_for_as_a_step_is(strategy: str, tmp_path: Path) -> None:
    """Each of 40 batches takes a second; a worker dies in the middle of a round."""
    kind = Kind(
        (lambda: LocalStrategy(chunk_bytes=32, sync_every=40))
        if strategy == "local"
        else KINDS["ps"].strategy,
        KINDS["ps"].strategy,
        exact=False,
        task=PLAIN,
    )
    settings: dict[str, Any] = {} if strategy == "local" else {"accumulate": 40}
    with running(kind, 3, tmp_path, task=timed(PLAIN, 1.0), deadlines=SLOW, **settings) as job:
        heard = Heard((2, lambda: job.simulation.at_time(8.0, lambda: job.kill("worker 1"))))
        assert job.trainer.fit(steps=4, callbacks=[heard], progress=False).step == 4
        job.expect(job.alone.at(4))
        assert job.trainer.num_workers == 3


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ps", "allreduce", "sharded groups"])
def test_a_change_of_strategy_waits_out_a_slow_step(name: str, tmp_path: Path) -> None:
    """Another thread asks for it while `step` is made; it takes place after it."""
    kind = KINDS[name]
    task = timed(kind.task, STEP_SECONDS)
    with running(kind, 2, tmp_path, task=task, deadlines=SLOW) as job:
        job.trainer.step()
        thread = Thread(target=lambda: job.trainer.set_strategy(kind.other()))
        job.simulation.at_time(0.3 * STEP_SECONDS, thread.start)
        assert job.trainer.step().step == 2
        thread.join()
        assert job.trainer.strategy == kind.other()
        job.expect(job.alone.at(2))
        assert job.trainer.fit(steps=2, progress=False).step == 4
        job.expect(job.alone.at(4))
        job.end()


@pytest.mark.few(1)
@pytest.mark.parametrize("action", ["resize up", "set_strategy"])
@pytest.mark.parametrize("name", ["allreduce", "sharded groups", "local"])
def test_a_change_for_which_nobody_comes_in_time_changes_nothing(
    name: str, action: str, tmp_path: Path
) -> None:
    """The call raises, the job is as it was, and the same call succeeds when processes come up again."""
    with running(KINDS[name], 2, tmp_path) as job:
        job.begin()
        world = job.simulation.world
        starts, world.starts = world.starts, (5000.0, 5000.0)
        strategy, began = job.trainer.strategy, job.simulation.scheduler.now
        with pytest.raises((ResourcesError, DeadlineError)):
            ACTIONS[action].call(job, lambda: None)
        assert job.simulation.scheduler.now - began < 10 * DEADLINES.start
        assert (job.trainer.num_workers, job.trainer.strategy) == (2, strategy)
        job.expect(job.alone)
        assert job.trainer.step().step == job.alone.step + 1
        job.expect(job.alone.at(job.alone.step + 1))
        world.starts = starts
        ACTIONS[action].call(job, lambda: None)
        assert job.trainer.num_workers == 3 or job.trainer.strategy == job.kind.other()
        job.works()
        job.end()


# -- other threads ---------------------------------------------------------------------------------


class Asked(Callback):
    """Has another thread ask for one worker more, at some moment, and notes when that returned."""

    def __init__(self, job: StruckJob, moment: str) -> None:
        self.job, self.moment = job, moment
        self.thread: Any = None
        self.took = math.inf
        self.workers: set[int] = set()

    def ask(self, after: float, callback_takes: float = 0.0) -> None:
        """Ask so many seconds from now."""
        if self.thread is not None:
            return

        def other() -> None:
            pause(after)
            began = self.job.simulation.scheduler.now
            try:
                larger(self.job)
            except ShutdownError:  # the fit has failed, which the test tells
                return
            self.took = self.job.simulation.scheduler.now - began

        self.thread = Thread(target=other)
        self.thread.start()
        pause(callback_takes)

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.workers.add(trainer.num_workers)
        if result.step == 2 and self.moment == "on_step":
            self.ask(0.1, 1.0)
        if result.step == 2 * EPOCH and self.moment in ("evaluates", "writes"):
            self.ask(0.2)

    def on_epoch_end(self, trainer: DistributedSGD, result: StepResult) -> None:
        if self.moment == "on_epoch_end":
            self.ask(0.1, 1.0)

    def on_evaluation(self, trainer: DistributedSGD, result: Any) -> None:
        if self.moment == "on_evaluation":
            self.ask(0.1, 1.0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "moment", ["on_evaluation", "on_epoch_end", "evaluates", "writes", "on_step"]
)
@pytest.mark.parametrize("name", ["ps", "allreduce", "groups", "async", "local"])
def test_resize_of_another_thread_returns_at_once_whatever_fit_does(
    name: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the worker takes part in that fit, not in the next one."""
    write = LocalStorage.write

    def slowly(self: Any, *arguments: Any) -> Any:
        pause(3.0)
        return write(self, *arguments)

    validation = VALIDATION if moment in ("evaluates", "on_evaluation") else None
    kept = None
    if moment == "writes":
        monkeypatch.setattr(LocalStorage, "write", slowly)
        kept = Checkpoints(tmp_path / "kept", every=2 * EPOCH)
    with running(KINDS[name], 2, tmp_path, checkpoints=kept) as job:
        asked = Asked(job, moment)
        steps = 12 * EPOCH
        job.trainer.fit(
            steps=steps, callbacks=[asked], progress=False,
            validation=validation, evaluate_every=2 * EPOCH if validation else None,
        )  # fmt: skip
        assert asked.thread is not None
        assert asked.took < SOON, f"resize returned after {asked.took:.1f} s"
        asked.thread.join()
        assert asked.workers == {2, 3}
        job.expect(job.alone.at(steps))
        job.end()


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", KINDS)
def test_shutdown_of_another_thread_ends_a_fit_with_an_error_that_says_so(
    name: str, seed: int, tmp_path: Path
) -> None:
    found: list[BaseException | int] = []
    with running(KINDS[name], 2, tmp_path, seed=seed) as job:
        trainer, simulation = job.trainer, job.simulation

        def other() -> None:
            about: dict[str, Any] = {"validation": VALIDATION, "evaluate_every": 5}
            try:
                found.append(trainer.fit(steps=500, progress=False, **about).step)
            except Exception as error:  # noqa: BLE001 - looked at below
                found.append(error)

        thread = Thread(target=other)
        thread.start()
        pause(0.1 + 0.23 * seed)
        began = simulation.scheduler.now
        trainer.shutdown()
        thread.join(60.0)
        assert simulation.scheduler.now - began < 10.0
        (ended,) = found
        assert isinstance(ended, ShutdownError), repr(ended)
        for call in (trainer.step, trainer.weights, trainer.stats):
            with pytest.raises(ShutdownError):
                call()


# -- callbacks -------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ps", "async", "local"])
def test_a_fit_within_a_callback_leaves_the_outer_one_its_own(name: str, tmp_path: Path) -> None:
    """`stop` ends the outer one, which goes on to count its steps."""

    class Nested(Callback):
        def __init__(self) -> None:
            self.ends: list[int] = []
            self.steps: list[int] = []

        def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
            self.steps.append(result.step)

        def on_epoch_end(self, trainer: DistributedSGD, result: StepResult) -> None:
            self.ends.append(result.step)
            if len(self.ends) == 1:
                trainer.fit(steps=2, progress=False)  # of a part of the model, say
            if len(self.ends) == 2:
                trainer.stop()

    with running(KINDS[name], 2, tmp_path) as job:
        nested = Nested()
        last = job.trainer.fit(epochs=8, callbacks=[nested], progress=False)
        assert len(nested.ends) == 2, (
            f"stop() was called at {nested.ends[1]}, fit ended at {last.step}"
        )
        assert nested.steps[-1] == last.step == job.trainer.stats().step
        job.expect(job.alone.at(last.step))
        job.works()
        job.end()


@pytest.mark.few(2)
@pytest.mark.parametrize("ends", ["stop", "raise"])
@pytest.mark.parametrize("name", KINDS)
def test_workers_do_not_run_far_ahead_of_a_slow_callback(
    name: str, ends: str, tmp_path: Path
) -> None:
    """What a callback decides at a step takes effect about a second of training later, not hundreds of steps."""
    last = 0

    class Slow(Callback):
        def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
            nonlocal last
            last = result.step
            pause(2.0 if result.step <= 10 else 0.0)
            if result.step == 10:
                if ends == "raise":
                    raise ValueError("at step 10")
                trainer.stop()

    with running(KINDS[name], 2, tmp_path, global_batch_size=None) as job:
        job.alone = Alone(KINDS[name].task, 8)
        try:
            job.trainer.fit(steps=120, callbacks=[Slow()], progress=False)
        except ValueError:
            assert ends == "raise"
        step = job.trainer.stats().step
        assert step - 10 <= 45, f"{step - 10} steps ahead, of 0.05 s each"
        if ends == "stop":
            assert last == step
        job.simulation.settle()
        assert job.trainer.stats().step == step
        assert job.trainer.step().step == step + 1
        job.expect(job.alone.at(step + 1))
        job.end()


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_ray_that_was_shut_down_before_the_trainer_leaves_no_thread(name: str) -> None:
    simulation = Simulation(1, seconds=20_000.0, switches=1_000_000)
    kind = KINDS[name]
    with simulation.running():
        simulation.runtime.connect()
        trainer = DistributedSGD(
            kind.task.creator(),
            2,
            strategy=kind.strategy(),
            run_config=run_config(deadlines=DEADLINES),
        )
        trainer.fit(steps=3, progress=False)
        simulation.runtime.shutdown()
        trainer.shutdown()
        simulation.settle(60.0)
        assert not simulation.threads()
        started = len(simulation.world.processes)
        simulation.runtime.connect()
        simulation.settle(120.0)
        assert len(simulation.world.processes) == started, "the dead trainer starts processes"
        assert not simulation.living()


# -- nodes that will go ----------------------------------------------------------------------------


def leaving(job: StruckJob, deaths: int, killed: list[str]) -> Callable[[], bool]:
    """Give notice to a node of the job; the first processes that come up elsewhere die as they start.

    Returns what tells whether no process of the job is on that node any more.
    """
    simulation = job.simulation
    node = job.process("worker 1").where
    before = {process.pid for process in simulation.living()}
    simulation.give_notice(node)
    seen: set[int] = set()

    def die() -> None:
        for process in simulation.living():
            if process.pid not in before | seen and len(killed) < deaths:
                seen.add(process.pid)
                killed.append(process.name)
                simulation.at_time(
                    0.005, lambda process=process: simulation.world.kill(process, "died")
                )

    def look() -> None:
        die()
        if len(killed) < deaths:
            simulation.at_time(0.01, look)

    look()
    return lambda: all(process.where is not node for process in simulation.living())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "call", "deaths"),
    [
        ("ps", "fit", 1),
        ("allreduce", "fit", 2),
        ("copies", "fit", 1),
        ("allreduce", "resize", 1),
        ("ps", "resize", 2),
        ("async", "resize", 1),
        ("ps", "idle", 2),
        ("allreduce", "idle", 1),
        ("local", "idle", 1),
        ("ps", "fit", 0),
        ("local", "fit", 1),
        ("ssp", "fit", 2),
    ],
)
def test_a_successor_that_dies_on_its_way_off_a_node_is_replaced(
    name: str, call: str, deaths: int, tmp_path: Path
) -> None:
    killed: list[str] = []
    task: Task = timed(KINDS[name].task, 0.5)
    with running(
        KINDS[name], 2, tmp_path, task=task, seed=3, cpus=(0, 4, 4, 4),
        failure=FailureConfig(spares=0, patience=math.inf, max_failures=20),
    ) as job:  # fmt: skip
        job.trainer.fit(steps=3, progress=False)
        has_left = leaving(job, deaths, killed)
        step = 3
        for _ in range(12):
            if call == "fit":
                step += 10
                assert job.trainer.fit(steps=10, progress=False).step == step
            elif call == "resize":
                job.trainer.resize(3)
                assert job.trainer.num_workers == 3
            job.simulation.settle(5.0)
            if has_left() and len(killed) == deaths:
                break
        assert len(killed) == deaths
        assert has_left(), "processes are still on the node"
        kinds = [event.kind for event in job.trainer.stats().events]
        assert "moved" in kinds, kinds
        began = job.simulation.scheduler.now
        job.trainer.resize(2 if call == "resize" else 3)
        assert job.simulation.scheduler.now - began < 60.0
        assert job.trainer.num_workers == (2 if call == "resize" else 3)
        job.expect(job.alone.at(step))
        assert job.trainer.step().step == step + 1
        job.expect(job.alone.at(step + 1))
        job.end()


# -- a program that is started again ---------------------------------------------------------------


class Dies(Exception):  # noqa: N818 - the end of a program
    """The program is killed."""


class Ends(Callback):
    """Stops a fit at one step, and ends the program at another."""

    def __init__(self, stops: int | None, dies: int | None) -> None:
        self.stops, self.dies = stops, dies

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step == self.dies:
            raise Dies
        if result.step == self.stops:
            trainer.stop()


def program(folder: Path, dies: int | None, *, early: bool) -> list[int]:
    """Train in two parts, of which the first is ended before its time; return the steps at which they end."""
    found: list[int] = []
    kept = Checkpoints(folder / "kept", every=5)
    try:
        with running(KINDS["ps"], 2, folder, checkpoints=kept) as job:
            job.replayed = False
            for epochs in (8, 3):
                ends: list[Callback] = [Ends(10 if epochs == 8 and not early else None, dies)]
                if early:  # after three evaluations, at the end of the third epoch
                    ends.append(EarlyStopping("loss", patience=2, min_delta=1e9))
                last = job.trainer.fit(
                    epochs=epochs,
                    callbacks=ends,
                    progress=False,
                    validation=tuple(column[:8] for column in VALIDATION) if early else None,
                )
                found.append(last.step)
            job.alone = Alone(KINDS["ps"].task).at(found[-1])
            job.expect(job.alone)
    except Dies:
        found.append(-1)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dies", [12, 17, 23])
def test_a_program_that_had_ended_a_fit_early_ends_at_the_same_step_when_started_again(
    dies: int, tmp_path: Path, *, early: bool
) -> None:
    """Of the steps that the first fit was asked for, those after its end are not made the second time."""
    undisturbed = program(tmp_path / "one", None, early=early)
    assert undisturbed[0] == (15 if early else 10)
    assert program(tmp_path / "two", dies, early=early)[-1] == -1
    again = program(tmp_path / "two", None, early=early)
    assert again[-1] == undisturbed[-1], f"ends at {again} instead of {undisturbed}"


@pytest.mark.parametrize("error", [PeerLostError, DeadlineError])
def test_a_call_is_made_once_more_where_a_loss_was_no_death(
    error: type[SteepestError], tmp_path: Path
) -> None:
    """Workers may hear amid it of a change before it, and give up what they wait for; but not again and again."""
    made: list[int] = []

    def call() -> int:
        made.append(len(made))
        if len(made) < 3:
            raise error("what was awaited did not come")
        return len(made)

    with running(KINDS["ps"], 2, tmp_path) as job:
        with pytest.raises(error):
            job.trainer._calls.surviving(call)
        assert made == [0, 1] if error is PeerLostError else made == [0]
        made[:] = [0, 1] if error is DeadlineError else [0]
        assert job.trainer._calls.surviving(call) == 3
