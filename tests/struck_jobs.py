"""Jobs in simulations whose driver is interrupted, or whose processes die, in the middle of a user's call.

What must hold afterwards is the same whatever struck, and whenever: every call works, no step is
lost or doubled, and the weights are those of one process that was never disturbed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    FailureConfig,
    LocalStrategy,
    ParameterServerStrategy,
    StepResult,
)
from steepest.checkpoint import files
from steepest.core.config.run import DeadlineConfig
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.commit_log import CommitLog
from steepest.testing.log_replay import replay
from tests.reference import Task, Weights, difference, same_bits, samples, sgd, snapshot
from tests.simulated_programs import linear
from tests.simulation.run import Interruption, Simulation, pause, run_config
from tests.simulation.simulated_processes import SimulatedProcess

SAMPLES, GLOBAL_BATCH = 60, 12
EPOCH = SAMPLES // GLOBAL_BATCH  # steps of a synchronous job
BATCH_SECONDS = 0.05
TOLERANCE = 1e-12
STARTED, SAVED = 5, 2  # steps before the call that is struck; and of the checkpoint
CPUS = (4, 4)
CHANGE_SECONDS = 30.0  # in which a change that was interrupted comes to its end
DEADLINES = DeadlineConfig(start=5.0, step=60.0, call=60.0, driver=4000.0)
DIED = "it was killed. connection error code 2."


class Alarm(Exception):  # noqa: N818 - a user's name
    """What a handler of the user's own raises, such as that of a deadline."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ctrl-c": KeyboardInterrupt,
    "sigterm": lambda: SystemExit(143),
    "alarm": Alarm,
}


def timed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error, which takes some virtual time."""
    pause(BATCH_SECONDS)
    return torch.nn.functional.mse_loss(output, target)


MOMENTUM = Task(linear, sgd(lr=0.05, momentum=0.9), samples(SAMPLES), loss=timed_loss, batch_size=4)
PLAIN = replace(MOMENTUM, optimizer=sgd(lr=0.05))  # workers have no state of their own


def timed(task: Task, seconds: float) -> Task:
    """Return a task of which a batch takes so many seconds of virtual time."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        pause(seconds)
        return torch.nn.functional.mse_loss(output, target)

    return replace(task, loss=loss)


@dataclass(frozen=True)
class Kind:
    """A strategy to train with.

    Attributes:
        strategy: makes it.
        other: of the same updates, if it is synchronous, made by other processes.
        exact: whether weights are those of one process after each step, with any number of workers.
        task: what is trained.
    """

    strategy: Callable[[], Any]
    other: Callable[[], Any]
    exact: bool = True
    task: Task = MOMENTUM

    @property
    def global_batch(self) -> int | None:
        """Samples of a step, whoever computes them."""
        return GLOBAL_BATCH if self.exact else None


def _ps(**settings: Any) -> Callable[[], Any]:
    return lambda: ParameterServerStrategy(chunk_bytes=32, **{"num_servers": 2, **settings})


def _allreduce() -> Any:
    return AllreduceStrategy(chunk_bytes=32)


KINDS = {
    "ps": Kind(_ps(), _allreduce),
    "copies": Kind(_ps(replication=2), _ps(num_servers=1)),
    "allreduce": Kind(_allreduce, _ps()),
    "groups": Kind(lambda: AllreduceStrategy(chunk_bytes=32, data_plane="gloo"), _ps()),
    "sharded groups": Kind(
        lambda: AllreduceStrategy(chunk_bytes=32, data_plane="gloo", sharded=True), _ps()
    ),
    "async": Kind(_ps(mode="async"), _ps(mode="ssp", staleness=2), exact=False, task=PLAIN),
    "ssp": Kind(_ps(mode="ssp", staleness=2), _ps(), exact=False, task=PLAIN),
    # the mean of what workers have after one batch each is what one process has after the mean
    "local": Kind(lambda: LocalStrategy(chunk_bytes=32, sync_every=1), _ps(), task=PLAIN),
}


def same(found: object, expected: object, what: str) -> None:
    """Check that what was found is what is expected; the error says both."""
    assert found == expected, f"{what} {found} instead of {expected}"


class Alone:
    """The same training in one process with plain PyTorch: the whole global batch in each step.

    Attributes:
        step: steps taken.
    """

    def __init__(self, task: Task, batch: int = GLOBAL_BATCH) -> None:
        torch.manual_seed(0)
        self._task = task
        self._module = task.module()
        self._optimizer = task.optimizer(self._module)
        self._plan = SamplePlan(len(task.data[0]), batch, 0)
        self.step = 0

    def at(self, step: int) -> Alone:
        """Return the training when so many steps are taken, which are no fewer than by now."""
        assert step >= self.step
        found = copy.deepcopy(self)
        while found.step < step:
            found._advance()
        return found

    def setting(self, weights: Weights) -> Alone:
        """Return the training with other weights, and the optimizer's state of these."""
        found = copy.deepcopy(self)
        with torch.no_grad():
            for name, parameter in found._module.named_parameters():
                parameter.copy_(weights[name])
        return found

    def weights(self) -> Weights:
        """Return the weights by name."""
        return snapshot(self._module)

    def _advance(self) -> None:
        index = torch.from_numpy(self._plan.share(self.step, 0, 1))
        inputs, target = (column[index] for column in self._task.data)
        self._optimizer.zero_grad()
        torch.nn.functional.mse_loss(self._module(inputs), target).backward()
        self._optimizer.step()
        self.step += 1


class Heard(Callback):
    """Notes the steps of which a callback hears, and does something in some of them."""

    def __init__(self, *then: tuple[int, Callable[[], object]]) -> None:
        self.steps: list[int] = []
        self._then = dict(then)

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.steps.append(result.step)
        if (then := self._then.pop(result.step, None)) is not None:
            then()


class StruckJob:
    """A trainer, and what it should have: steps and weights.

    Attributes:
        simulation, trainer: those that run.
        kind: its strategy.
        workers: with which it began.
        alone: the undisturbed training by one process, as far as this one is.
        saved: the checkpoint of step SAVED, and `alone` then; None before `save`.
        folder: for checkpoints.
    """

    def __init__(
        self,
        simulation: Simulation,
        trainer: DistributedSGD,
        kind: Kind,
        workers: int,
        folder: Path,
    ) -> None:
        self.simulation, self.trainer, self.kind = simulation, trainer, kind
        self.workers, self.folder = workers, folder
        self.alone = Alone(kind.task)
        self.saved = folder / "saved"
        self.saved_alone = self.alone
        self.log: CommitLog | None = None
        self.weights: Weights = {}
        self.begun: Path | None = None  # the checkpoint from which the log begins
        self.replayed = True  # whether the log has all of the run, or begins at a checkpoint
        self._numbers = itertools.count()

    # -- before --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take some steps, with a checkpoint on the way."""
        self.trainer.fit(steps=SAVED, progress=False)
        self.trainer.save(self.saved)
        self.alone = self.saved_alone = self.alone.at(SAVED)
        self.trainer.fit(steps=STARTED - SAVED, progress=False)
        self.alone = self.alone.at(STARTED)

    def process(self, name: str) -> SimulatedProcess:
        """Return the process of that role, such as "worker 1"."""
        (found,) = (each for each in self.simulation.living() if each.name == f"steepest {name}")
        return found

    def kill(self, *names: str) -> None:
        """End the processes of these roles; those that are not there are left out."""
        for process in self.simulation.living():
            if process.name.removeprefix("steepest ") in names:
                self.simulation.world.kill(process, DIED)

    # -- afterwards ----------------------------------------------------------------------------

    def expect(self, *possible: Alone) -> None:
        """Check that the job is where one of these is, and go on from there."""
        # an interrupted interruption leaves steps to be committed, or taken back, behind the call
        before, step = -1, self.trainer.stats().step
        while before != step:
            weights = self.trainer.weights()
            before, step = step, self.trainer.stats().step
        steps = {each.step for each in possible}
        assert step in steps, f"the job is at step {step}, not at one of {sorted(steps)}"
        found = [each for each in possible if each.step == step]
        if self.kind.exact:
            apart = {difference(weights, each.weights()): each for each in found}
            assert min(apart) < TOLERANCE, (
                f"weights of step {step} are {min(apart):.1e} apart from those of one process"
            )
            self.alone = apart[min(apart)]
        else:
            self.alone = found[0]

    def works(self) -> None:
        """Check that every call works, and takes as many steps as it should."""
        trainer, began = self.trainer, self.alone.step
        same(trainer.step().step, began + 1, "step() returned step")
        same(trainer.stats().step, began + 1, "step() took the job to step")
        heard = Heard()
        last = trainer.fit(steps=3, callbacks=[heard], progress=False)
        same(heard.steps, [began + 2, began + 3, began + 4], "callbacks of fit(steps=3) heard of")
        same(last.step, began + 4, "fit(steps=3) returned step")
        self.expect(self.alone.at(began + 4))
        found = trainer.evaluate(tuple(column[:7] for column in self.kind.task.data))
        same((found.step, found.samples), (began + 4, 7), "evaluate() saw step and samples")
        path = self.folder / f"check {next(self._numbers)}"
        trainer.save(path)
        same(files.about(path)["step"], began + 4, "save() wrote step")
        indices = trainer.foreach_worker(lambda view: view.index)
        same(indices, list(range(len(indices))), "foreach_worker() met workers")
        self.simulation.settle(CHANGE_SECONDS)
        count = trainer.num_workers
        indices = trainer.foreach_worker(lambda view: view.index)
        same(indices, list(range(count)), "later foreach_worker() met workers")
        same(trainer.stats().step, began + 4, "without any call the job went on to step")
        trainer.resize(count - 1 if count > 1 else 2)
        same(trainer.num_workers, count - 1 if count > 1 else 2, "workers after resize()")
        same(trainer.step().step, began + 5, "after resize() step() returned step")
        self.expect(self.alone.at(began + 5))
        rows = trainer.history.steps
        same([row["step"] for row in rows], list(range(1, began + 6)), "the history has steps")
        lacking = [row["step"] for row in rows if not (row["samples"] and row["loss"] > 0)]
        same(lacking, [], "the history has no samples or loss of steps")

    def end(self) -> None:
        """Note what is to be compared when the job has ended."""
        self.log, self.weights = self.trainer.log(), self.trainer.weights()

    def check_log(self) -> None:
        """Check that the log gives the weights, to the bit."""
        own = isinstance(self.kind.strategy(), LocalStrategy)  # what logs of several sizes have not
        if self.log is not None and self.replayed and not own:
            again = replay(self.log, self.kind.task.creator(), self.begun)
            assert same_bits(again, self.weights), "the log does not give the weights"


@contextlib.contextmanager
def running(
    kind: Kind,
    workers: int,
    folder: Path,
    *,
    seed: int = 1,
    task: Task | None = None,
    cpus: tuple[int, ...] = CPUS,
    failure: FailureConfig | None = None,
    deadlines: DeadlineConfig = DEADLINES,
    **settings: Any,
) -> Iterator[StruckJob]:
    """Run a job for a block; afterwards nothing of it may be left.

    Args:
        kind, workers: as of `StruckJob`.
        folder: for checkpoints.
        seed: of the simulation.
        task: instead of the kind's.
        cpus: of each node.
        failure: None for no spare processes, and all workers in every step.
        deadlines: of the job.
        settings: further ones of `DistributedSGD`.
    """
    simulation = Simulation(seed, cpus, seconds=200_000.0, switches=100_000)
    failure = failure or FailureConfig(spares=0, patience=math.inf, max_failures=20)
    config = run_config(failure=failure, deadlines=deadlines, keep_log=True)
    settings.setdefault("global_batch_size", kind.global_batch)
    with simulation.running():
        creator = (task or kind.task).creator()
        with DistributedSGD(
            creator, workers, strategy=kind.strategy(), run_config=config, **settings
        ) as trainer:
            job = StruckJob(simulation, trainer, kind, workers, folder)
            yield job
            simulation.forget_faults()
        assert not simulation.leftovers(), "processes are left"
        assert not simulation.threads(), "threads of the driver are left"
    job.check_log()


# -- calls that are struck -------------------------------------------------------------------------


@dataclass(frozen=True)
class Action:
    """A call of the trainer, and where the job may be when it is over.

    Attributes:
        call: makes it; what it is given is called at the moment from which waits are counted.
        undone: where the job may be when the call was interrupted.
        done: where it is when the call has returned.
    """

    call: Callable[[StruckJob, Callable[[], None]], object]
    undone: Callable[[StruckJob], list[Alone]]
    done: Callable[[StruckJob], list[Alone]]
    prepare: Callable[[StruckJob], object] = lambda job: None


def _same(job: StruckJob) -> list[Alone]:
    return [job.alone]


def _steps(count: int) -> Callable[[StruckJob], list[Alone]]:
    return lambda job: [job.alone.at(job.alone.step + n) for n in range(count + 1)]


def _last(count: int) -> Callable[[StruckJob], list[Alone]]:
    return lambda job: [job.alone.at(job.alone.step + count)]


def _simple(
    call: Callable[[StruckJob], object],
    done: Callable[[StruckJob], list[Alone]] = _same,
    undone: Callable[[StruckJob], list[Alone]] | None = None,
    prepare: Callable[[StruckJob], object] = lambda job: None,
) -> Action:
    def begin(job: StruckJob, now: Callable[[], None]) -> object:
        now()
        return call(job)

    return Action(begin, undone or (lambda job: [*_same(job), *done(job)]), done, prepare)


def larger(job: StruckJob) -> None:
    """Ask for one more worker."""
    job.trainer.resize(job.workers + 1)


def smaller(job: StruckJob) -> None:
    """Ask for a worker less; of one, for two."""
    job.trainer.resize(job.workers - 1 or 2)


def _in_fit(change: Callable[[StruckJob], object]) -> Action:
    """Return a fit of 16 steps, in whose second a callback asks for a change, which is struck."""

    def call(job: StruckJob, now: Callable[[], None]) -> None:
        def then() -> None:
            change(job)
            now()

        heard = Heard((job.alone.step + 2, then))
        job.trainer.fit(steps=16, callbacks=[heard], progress=False)

    return Action(call, _steps(16), _last(16))


class _AtEpochEnd(Callback):
    def __init__(self, then: Callable[[], object]) -> None:
        self._then: Callable[[], object] | None = then

    def on_epoch_end(self, trainer: DistributedSGD, result: Any) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


def _strategy_in_fit() -> Action:
    def call(job: StruckJob, now: Callable[[], None]) -> None:
        def then() -> None:
            now()
            job.trainer.set_strategy(job.kind.other())

        job.trainer.fit(steps=16, callbacks=[_AtEpochEnd(then)], progress=False)

    return Action(call, _steps(16), _last(16))


def _restored(job: StruckJob) -> list[Alone]:
    return [job.saved_alone]


def _save_under(strategy: Callable[[Kind], Any]) -> Callable[[StruckJob], None]:
    """Return what has the saved checkpoint be one of another strategy."""

    def save(job: StruckJob) -> None:
        trainer = job.trainer
        trainer.set_strategy(strategy(job.kind))
        trainer.step()
        job.alone = job.saved_alone = job.alone.at(job.alone.step + 1)
        job.saved = job.folder / "other"
        trainer.save(job.saved)
        trainer.set_strategy(job.kind.strategy())
        trainer.step()
        job.alone = job.alone.at(job.alone.step + 1)

    return save


def _constant(value: float) -> Weights:
    return {
        name: torch.full_like(each, value) for name, each in snapshot(MOMENTUM.module()).items()
    }


def _set(value: float) -> Callable[[StruckJob], list[Alone]]:
    return lambda job: [job.alone.setting(_constant(value))]


CHANGES = {
    "resize up": _simple(larger),
    "resize down": _simple(smaller),
    "set_strategy": _simple(lambda job: job.trainer.set_strategy(job.kind.other())),
    "restore": _simple(lambda job: job.trainer.restore(job.saved), _restored),
    "restore other": _simple(
        lambda job: job.trainer.restore(job.saved),
        _restored,
        prepare=_save_under(lambda kind: kind.other()),
    ),
    "restore local": _simple(  # processes get their roles anew
        lambda job: job.trainer.restore(job.saved),
        _restored,
        prepare=_save_under(lambda kind: LocalStrategy(chunk_bytes=32, sync_every=1)),
    ),
    "set_weights": _simple(lambda job: job.trainer.set_weights(_constant(0.5)), _set(0.5)),
    "load_state_dict": _simple(
        lambda job: job.trainer.load_state_dict(_constant(0.25)), _set(0.25)
    ),
    "resize up in fit": _in_fit(larger),
    "resize down in fit": _in_fit(smaller),
    "set_strategy in fit": _strategy_in_fit(),
}
READINGS = {
    "fit": _simple(lambda job: job.trainer.fit(steps=4, progress=False), _last(4), _steps(4)),
    "step": _simple(lambda job: job.trainer.step(), _last(1)),
    "weights": _simple(lambda job: job.trainer.weights()),
    "state_dict": _simple(lambda job: job.trainer.state_dict()),
    "log": _simple(lambda job: job.trainer.log()),
    "save": _simple(lambda job: job.trainer.save(job.folder / "struck")),
    "evaluate": _simple(
        lambda job: job.trainer.evaluate(tuple(column[:7] for column in job.kind.task.data))
    ),
    "foreach_worker": _simple(lambda job: job.trainer.foreach_worker(lambda view: view.index)),
}
ACTIONS = CHANGES | READINGS


@dataclass(frozen=True)
class Length:
    """How long a call takes when nothing strikes it: waits of the driver, and events."""

    waits: int
    events: int


_lengths: dict[tuple[str, int, str], Length] = {}


def length(name: str, workers: int, action: str, folder: Path) -> Length:
    """Return how long a call takes undisturbed; what it leads to is checked, too."""
    about = name, workers, action
    if about not in _lengths:
        with running(KINDS[name], workers, folder) as job:
            counted: list[tuple[Interruption, int]] = []

            def now() -> None:
                counted.append((job.simulation.interrupt(), job.simulation.world.events))

            _prepare(job, action)
            ACTIONS[action].call(job, now)
            ((waits, before),) = counted
            _lengths[about] = Length(waits.waits, job.simulation.world.events - before)
            job.expect(*_done(job, action))
            _note(job, action, interrupted=False)
            job.end()
    return _lengths[about]


def _prepare(job: StruckJob, action: str) -> None:
    job.begin()
    ACTIONS[action].prepare(job)


def _done(job: StruckJob, action: str) -> list[Alone]:
    return ACTIONS[action].done(job)


def _note(job: StruckJob, action: str, *, interrupted: bool) -> None:
    """Note from where the job's log begins now."""
    restored = not interrupted or job.trainer.stats().step == job.saved_alone.step
    if action in ("set_weights", "load_state_dict") or (
        action == "restore local" and (job.kind.exact or not restored)
    ):
        job.replayed = (
            False  # from weights that were set, or where workers had a state of their own
        )
    if action.startswith("restore") and restored:
        job.begun = job.saved


def strike(
    name: str,
    workers: int,
    action: str,
    what: str,
    place: float,
    folder: Path,
    *,
    settles: bool = False,
) -> str:
    """Have something happen in the middle of a call, and check all that must hold then.

    Args:
        name, workers: of the job; the former in KINDS.
        action: in ACTIONS.
        what: one of ERRORS, with " late" for the end of a wait instead of its begin, or " twice"
            for one more a wait later; or the process that dies, with " and ctrl-c" for that soon
            after.
        place: where in the call, from 0 to 1.
        folder: for checkpoints.
        settles: whether what was begun comes to its end before the next call.

    Returns:
        where the driver was.
    """
    long = length(name, workers, action, folder / "undisturbed")
    hits: list[Interruption] = []
    with running(KINDS[name], workers, folder / f"{what} {place:.4f}") as job:
        _prepare(job, action)
        simulation, raised = job.simulation, False
        done, undone = ACTIONS[action].done(job), ACTIONS[action].undone(job)
        wait = max(1, math.ceil(place * long.waits))
        error, _, how = what.partition(" ")

        def now() -> None:
            if error in ERRORS:
                late = how == "late"
                hits.append(simulation.interrupt(wait, error=ERRORS[error](), late=late))
                if how == "twice":
                    hits.append(simulation.interrupt(wait + 1, error=ERRORS[error]()))
                return
            victim, _, then = what.partition(" and ")
            event = max(1, math.ceil(place * long.events))
            simulation.at_event(event, lambda: job.kill(victim))
            if then:
                hits.append(simulation.interrupt(wait + 2, error=ERRORS[then]()))

        try:
            ACTIONS[action].call(job, now)
        except (KeyboardInterrupt, SystemExit, Alarm):
            raised = True
        struck = any(hit.struck for hit in hits)
        assert raised == struck, f"{hits[0].where}: raised {raised}, struck {struck}"
        for hit in hits:
            hit.forget()
        if settles:
            simulation.settle()
        job.expect(*(undone if raised else done))
        _note(job, action, interrupted=raised)
        job.works()
        job.end()
    return "; ".join(hit.where for hit in hits)
