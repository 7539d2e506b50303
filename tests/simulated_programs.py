"""Random programs of a user, with random deaths at random moments, run by the real trainer in a simulation."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
from steepest.core.engine.commit_log import CommitLog
from steepest.errors import ConfigurationError, PeerLostError, ResourcesError, SteepestError
from steepest.testing.log_replay import replay
from tests.reference import Task, Weights, same_bits, samples, sgd
from tests.simulation.run import Simulation, pause, run_config
from tests.table_tasks import counting, expected_counts, rows_in, table_values
from tests.whole_checkpoints import all_of

SAMPLES = 61
_DEADLINES = DeadlineConfig(start=5.0, step=60.0, call=60.0, driver=40.0)
_dice = random.Random()  # of the running time of computations
_paces = ((1e-4, 3e-3, 3e-2), (0.05, 0.3))


_pace = [0]


def timed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error, which takes some virtual time."""
    pause(_dice.choice(_paces[_pace[0]]))
    return torch.nn.functional.mse_loss(output, target)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(3, 2).double()


def timed_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The output, which takes some virtual time."""
    pause(_dice.choice(_paces[_pace[0]]))
    return output


COUNTING = replace(counting(SAMPLES), loss=timed_output)
TASK = Task(
    linear,
    sgd(lr=0.01, momentum=0.9),
    samples(SAMPLES),
    loss=timed_loss,
    batch_size=1,
)


def strategies(draw: random.Random, tables: bool = False, rounds: bool = False) -> Any:
    """A strategy of any mode, cut into several chunks; with tables one that has servers; mostly one of rounds."""
    found = _any_strategy(draw)
    if rounds and draw.random() < 0.7:
        return LocalStrategy(
            sync_every=draw.choice((1, 3)),
            quorum=1,  # however many workers there are
            grace=draw.choice((None, 0.2, 3.0)),
            pace=draw.choice(("equal", "speed")),
            outer_momentum=0.5,
            delayed_nesterov=draw.choice((None, 2)),
            num_servers=draw.randint(1, 3),
            chunk_bytes=32,
        )
    while tables and isinstance(found, LocalStrategy):
        found = _any_strategy(draw)
    return found


def _any_strategy(draw: random.Random) -> Any:
    servers = draw.randint(1, 3)
    copies = draw.randint(1, servers)
    return draw.choice(
        (
            lambda: ParameterServerStrategy(num_servers=servers, chunk_bytes=32),
            lambda: ParameterServerStrategy(
                num_servers=servers, replication=copies, chunk_bytes=32
            ),
            lambda: ParameterServerStrategy(
                num_servers=servers, compression="int8", chunk_bytes=32
            ),
            lambda: ParameterServerStrategy(mode="async", num_servers=servers, chunk_bytes=32),
            lambda: ParameterServerStrategy(
                mode="ssp", staleness=2, num_servers=servers, chunk_bytes=32
            ),
            lambda: AllreduceStrategy(chunk_bytes=32),
            lambda: AllreduceStrategy(sharded=False),
            lambda: LocalStrategy(num_servers=servers, chunk_bytes=32),
            lambda: LocalStrategy(chunk_bytes=32),
        )
    )()


@dataclass
class Fault:
    """Something that happens to processes, `after` so many events from the beginning of an action.

    Attributes:
        action: number of the action; -1 while the job starts.
        kind: "kill" some processes, all of a "node", "cut" its link, or "stop" processes.
        share: by which the victims are chosen among those that run then.
    """

    action: int
    after: int
    kind: str
    share: float
    seed: int

    def strike(self, simulation: Simulation) -> None:
        draw = random.Random(self.seed)
        if self.kind in ("node", "cut"):
            if nodes := simulation.nodes():
                node = draw.choice(nodes)
                if self.kind == "cut":
                    simulation.world.cut(node)
                else:
                    simulation.world.lose(node, silently=draw.random() < 0.5)
            return
        living = simulation.living()
        count = max(1, min(round(self.share * len(living)), len(living) - 1))
        for process in draw.sample(living, min(count, len(living))):
            if self.kind == "kill":
                simulation.world.kill(process, "it was killed. connection error code 2.")
            else:
                simulation.world.stop(process)


@dataclass
class Program:
    """What a user does, and what happens meanwhile; all of it drawn from a seed.

    Attributes:
        tables: whether the model has embedding tables, which not every strategy trains.
        serves: whether a node has servers alone, and each node two CPUs.
        rounds: whether most strategies are local SGD in rounds of a quorum.
    """

    seed: int
    tables: bool = False
    serves: bool = False
    rounds: bool = False
    cpus: tuple[int, ...] = ()
    workers: int = 1
    strategy: Any = None
    failure: FailureConfig = field(default_factory=FailureConfig)
    actions: list[tuple[Any, ...]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.cpus = draw.choice(((8,), (2, 4), (2, 2, 2), (4, 4)))
        self.workers = draw.randint(1, 4)
        self.strategy = strategies(draw, self.tables, self.rounds)
        self.failure = FailureConfig(
            max_failures=20,
            spares=draw.choice((None, None, 0, 1, 2)),
            snapshot_every=draw.choice((None, None, None, 3)),
            patience=draw.choice((0.0, 0.0, math.inf, 1.0)),
        )
        kinds = ("fit", "fit", "fit", "step", "evaluate", "save", "restore", "resize", "strategy")
        kinds += ("resize in fit", "weights in fit", "servers", "weights", "state")
        self.actions = [("fit", draw.randint(5, 25))]
        for _ in range(draw.randint(1, 5)):
            kind = draw.choice(kinds)
            self.actions.append((kind, self._argument(kind, draw)))
        self.actions.append(("fit", draw.randint(3, 20)))
        several = ("kill",) * 8 + ("node", "cut", "stop")
        self.faults = [
            Fault(
                draw.randrange(1, len(self.actions)),
                draw.choice((3, 30, 300)) * draw.randint(1, 10) // 3,
                draw.choice(several),
                draw.choice((0.0, 0.3, 0.6, 1.0)),
                draw.getrandbits(32),
            )
            for _ in range(draw.randint(1, 4))
        ]
        if self.serves:
            self.cpus = (2,) * (2 + self.workers // 2 + draw.randint(0, 1))
            while self.strategy.in_workers:
                self.strategy = strategies(draw, self.tables, self.rounds)
        if draw.random() < 0.1:  # while the job starts
            after, share = draw.choice((3, 10, 30)), draw.choice((0.0, 0.5, 1.0))
            self.faults.append(Fault(-1, after, "kill", share, draw.getrandbits(32)))

    def _argument(self, kind: str, draw: random.Random) -> Any:
        if kind in ("fit", "weights in fit"):
            return draw.randint(1, 30)
        if kind in ("resize", "servers"):
            return draw.randint(1, 4 if kind == "resize" else 3)
        if kind == "resize in fit":
            return draw.randint(1, 4), draw.randint(5, 30)
        return strategies(draw, self.tables, self.rounds) if kind == "strategy" else None

    def __str__(self) -> str:
        lines = [f"cpus={self.cpus}, {self.workers} workers, {self.strategy}", f"{self.failure}"]
        for number, action in enumerate(self.actions):
            struck = [
                f"{f.kind} {f.share:g} after {f.after}" for f in self.faults if f.action == number
            ]
            lines.append(f"{action[0]} {action[1] or ''}  {'; '.join(struck)}")
        return "\n    ".join(lines)


class Steps(Callback):
    """Notes the steps whose results came, and does something in the middle."""

    def __init__(self, then: Callable[[DistributedSGD], object] | None = None) -> None:
        self.steps: list[int] = []
        self.then = then

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.steps.append(result.step)
        if self.then is not None:
            then, self.then = self.then, None
            then(trainer)


@dataclass
class Outcome:
    """How a program ended.

    Attributes:
        error: that a user has seen; None if all went well.
        gone: whether a node was gone for good, or could not be reached any more.
        asked, step: steps that the user asked for, and that are committed.
        told: the numbers of the steps whose results came.
        weights, rows, log: at the end; of rows what a checkpoint has.
        events: what the trainer told of.
        begun: the checkpoint from which the log begins; None for the beginning.
        is_set: whether the log begins where weights were set.
        leftovers: processes that run after the end.
        switches, seconds: between threads, and of virtual time.
        action: in the middle of which it ended.
        unchecked: why the log was not replayed.
    """

    error: BaseException | None = None
    gone: bool = False
    asked: int = 0
    step: int = 0
    told: list[int] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)
    rows: Weights = field(default_factory=dict)
    log: CommitLog | None = None
    events: tuple[Any, ...] = ()
    begun: Path | None = None
    is_set: bool = False
    leftovers: int = 0
    switches: int = 0
    seconds: float = 0.0
    action: str = ""
    unchecked: str = ""


class Run:
    """One run of a program."""

    def __init__(self, program: Program, faulty: bool = True) -> None:
        self.program, self.faulty = program, faulty
        self.task = COUNTING if program.tables else TASK
        self.outcome = Outcome()
        self._folder = Path(tempfile.mkdtemp(prefix="steepest-simulated-"))
        weakref.finalize(self.outcome, shutil.rmtree, self._folder)
        self._saved: int | None = None
        self._restores = 0

    def run(self) -> Outcome:
        """Run the program to its end, or to the first error that a user sees."""
        program, outcome = self.program, self.outcome
        _dice.seed(program.seed)
        _pace[0] = _dice.randrange(len(_paces))
        simulation = Simulation(program.seed, program.cpus, seconds=4000.0)
        config = run_config(failure=program.failure, deadlines=_DEADLINES, keep_log=True)
        if program.serves:
            config = replace(config, resources=replace(config.resources, serving_hosts=1))
        try:
            with simulation.running():
                self._prepare(-1, simulation)
                with DistributedSGD(
                    self.task.creator(),
                    program.workers,
                    strategy=program.strategy,
                    run_config=config,
                ) as trainer:
                    self._act(trainer, simulation)
                outcome.leftovers = len(simulation.leftovers())
        except SteepestError as error:
            outcome.error = error
        finally:
            outcome.gone = len(simulation.nodes()) < len(program.cpus) - 1
            outcome.switches = simulation.scheduler.switches
            outcome.seconds = simulation.scheduler.now - 1000.0
        return outcome

    def _act(self, trainer: DistributedSGD, simulation: Simulation) -> None:
        program, outcome = self.program, self.outcome
        for number, (kind, argument) in enumerate(program.actions):
            outcome.action = f"{number}: {kind} {argument or ''}"
            self._prepare(number, simulation)
            try:
                self._do(trainer, kind, argument)
            except ResourcesError:
                # nobody can come where a node is gone; nor can one who was stopped before it was up
                room = len(simulation.nodes()) == len(program.cpus) - 1
                stopped = any(fault.kind == "stop" for fault in program.faults)
                room = room and not (program.serves and kind == "resize")
                if kind not in ("resize", "servers", "strategy") or (room and not stopped):
                    raise
        outcome.action = "the end"
        simulation.forget_faults()
        self._fit(trainer, 3)
        outcome.step = trainer.stats().step
        outcome.weights = trainer.weights()
        outcome.log = trainer.log()
        outcome.events = trainer.stats().events
        if program.tables:
            trainer.save(self._folder / "end")
            outcome.rows = rows_in(all_of(self._folder / "end"))

    def _prepare(self, action: int, simulation: Simulation) -> None:
        """Have the faults of an action happen."""
        for fault in self.program.faults if self.faulty else ():
            if fault.action == action:
                simulation.at_event(fault.after, lambda fault=fault: fault.strike(simulation))

    def _do(self, trainer: DistributedSGD, kind: str, argument: Any) -> None:
        outcome = self.outcome
        if kind == "fit":
            self._fit(trainer, argument)
        elif kind == "step":
            outcome.asked += 1
            outcome.told.append(trainer.step().step)
        elif kind == "evaluate":
            assert trainer.evaluate(tuple(column[:7] for column in self.task.data)).samples == 7
        elif kind == "save":
            trainer.save(self._folder / "saved")
            # steps that a death has undone meanwhile are not in it
            self._saved = all_of(self._folder / "saved").about["step"]
        elif kind == "restore" and self._saved is not None:
            self._restores += 1
            outcome.begun = shutil.copytree(
                self._folder / "saved", self._folder / f"restored {self._restores}"
            )
            trainer.restore(self._folder / "saved")
            outcome.asked, outcome.is_set = self._saved, False
        elif kind == "resize":
            trainer.resize(num_workers=argument)
            assert trainer.num_workers <= argument
        elif kind == "servers":
            try:
                trainer.resize(num_servers=argument)
            except ConfigurationError:
                copies = getattr(trainer.strategy, "replication", 1)
                kind = isinstance(trainer.strategy, ParameterServerStrategy)
                assert not kind or argument < max(copies, program_copies(self.program))
        elif kind == "strategy":
            trainer.set_strategy(argument)
        elif kind == "resize in fit":
            self._fit(trainer, argument[1], lambda trainer: trainer.resize(argument[0]))
        elif kind == "weights in fit":
            self._fit(trainer, argument, lambda trainer: trainer.weights())
        elif kind == "weights":
            trainer.weights()
        elif kind == "state":
            trainer.load_state_dict(trainer.state_dict())
            outcome.begun, outcome.is_set = None, True

    def _fit(
        self,
        trainer: DistributedSGD,
        steps: int,
        then: Callable[[DistributedSGD], object] | None = None,
    ) -> None:
        watch = Steps(then)
        self.outcome.asked += steps
        before = self.outcome.asked - steps
        trainer.fit(steps=steps, callbacks=[watch], progress=False)
        self.outcome.told += watch.steps
        step = trainer.stats().step
        # a death since then may have undone some, which the next fit takes again
        undone = step < self.outcome.asked and "are lost" in str(trainer.stats().events)
        assert step == self.outcome.asked or undone, f"{steps} from {before} end at {step}"


def program_copies(program: Program) -> int:
    """Return the greatest number of copies of a chunk that a program asks for."""
    wanted = [program.strategy, *(given for kind, given in program.actions if kind == "strategy")]
    return max(getattr(strategy, "replication", 1) for strategy in wanted)


def check(program: Program, outcome: Outcome) -> None:
    """Check what must hold when a program has ended without an error."""
    assert outcome.error is None
    assert not outcome.leftovers, f"{outcome.leftovers} processes are left"
    assert outcome.step == outcome.asked
    assert outcome.log is not None
    _check_samples(outcome.log)
    if _forgets(outcome.log):
        outcome.unchecked = "a worker's own state went with it"
        return
    if outcome.is_set:
        outcome.unchecked = "weights were set"
        return
    if program.tables:
        _check_rows(outcome)
        return
    try:
        again = replay(outcome.log, TASK.creator(), outcome.begun)
    except ConfigurationError as error:
        outcome.unchecked = str(error)
        return
    assert same_bits(again, outcome.weights), "the log does not give the weights"


def _check_rows(outcome: Outcome) -> None:
    """Rows count the sightings of their ids in what was committed, since where the log begins."""
    assert outcome.log is not None
    first = outcome.log.parts[0]
    begins = not first.commits or first.commits[0].version == first.start + 1
    step = 0 if outcome.begun is None else files.about(outcome.begun)["step"]
    rule = first.strategy.rule
    if not begins or first.start != step * rule.versions_per_step(first.num_workers):
        outcome.unchecked = "the log does not begin with the run, or where it was restored"
        return
    counts, updates = expected_counts(COUNTING, outcome.log)
    values = table_values(COUNTING, outcome.rows)["rows.weight"]
    if outcome.begun is not None:
        begun = all_of(outcome.begun)
        values -= table_values(COUNTING, rows_in(begun))["rows.weight"]
        updates += float(begun.weights["updates"][0])
    error = (values - counts[:, None]).abs().max()
    assert error < 1e-9, f"rows count {error} more or less than was committed"
    assert abs(float(outcome.weights["updates"][0]) - updates) < 1e-9


def _check_samples(log: CommitLog) -> None:
    """No sample is committed twice in an epoch, and none is left out of one that has ended."""
    epochs: dict[int, list[int]] = {}
    for epoch, begin, end in log.samples():
        epochs.setdefault(epoch, []).extend(range(begin, end))
    for epoch, seen in epochs.items():
        assert len(set(seen)) == len(seen), f"samples of epoch {epoch} were taken twice"


def _forgets(log: CommitLog) -> bool:
    """Whether a worker's own state may have gone with it, which the log does not tell."""
    own = [
        part
        for part in log.parts
        if isinstance(part.strategy, LocalStrategy) or part.strategy.compression is not None
    ]
    return bool(own) and (
        len(log.parts) > 1
        or (
            own[0].strategy.rule.needs_all  # else a successor's own state begins anew
            and any(push.incarnation for commit in own[0].commits for push in commit.pushes)
        )
    )


def members(log: CommitLog) -> dict[int, tuple[Any, ...]]:
    """By version, the members of its commit and their places."""
    return {
        commit.version: (part.strategy, part.num_workers, part.hosts, len(commit.pushes))
        for part in log.parts
        for commit in part.commits
    }


def is_comparable(program: Program, outcome: Outcome, other: Outcome) -> bool:
    """Whether all commits of a run had the same members in the same places as those of another."""
    if outcome.log is None or other.log is None:
        return False
    together = all(part.strategy.rule.needs_all for part in outcome.log.parts)
    set_by_user = any(action[0] in ("state", "restore") for action in program.actions)
    kept = not _forgets(outcome.log)
    same = members(outcome.log) == members(other.log)
    return together and kept and same and not set_by_user


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log nothing in a block: of thousands of deaths nobody reads."""
    logger = logging.getLogger("steepest")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def told(outcome: Outcome) -> tuple[Any, ...]:
    """All that can be compared of how a program ended."""
    weights = {name: value.tolist() for name, value in outcome.weights.items()}
    lines = [event.line for event in outcome.events]
    return str(outcome.error), weights, lines, outcome.told, outcome.switches, outcome.seconds


def is_true(outcome: Outcome) -> bool:
    """Whether nothing but the error with which a program ended was possible: nobody could come."""
    told = "no successor has come up"
    return outcome.gone and isinstance(outcome.error, PeerLostError) and told in str(outcome.error)


def run(
    seed: int, tables: bool = False, serves: bool = False, rounds: bool = False
) -> tuple[Program, Outcome]:
    """Run a program with its deaths, and check what must hold.

    An error that is not a true one is raised.
    """
    program = Program(seed, tables, serves, rounds)
    outcome = Run(program).run()
    if outcome.error is not None and not is_true(outcome):
        raise outcome.error
    if outcome.error is None:
        check(program, outcome)
        if program.failure.patience == math.inf:
            straight = Run(program, faulty=False).run()
            if straight.error is None and is_comparable(program, outcome, straight):
                assert same_bits(outcome.weights, straight.weights), "other bits than undisturbed"
                assert same_bits(outcome.rows, straight.rows), "other rows than undisturbed"
    return program, outcome
