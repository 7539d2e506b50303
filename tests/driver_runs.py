"""Random calls of a trainer in a simulation, interrupted at random moments while random processes die.

What must hold afterwards is known from one process that makes the same steps, see `driver_worlds`.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import math
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import steepest
from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    FailureConfig,
    LocalStrategy,
    ParameterServerStrategy,
    SimpleStrategy,
    StepResult,
)
from steepest.core.config.run import DeadlineConfig
from steepest.errors import PeerLostError
from steepest.testing.log_replay import replay
from tests.driver_worlds import FAMILIES, Family, Worlds, of_size, paced, under
from tests.reference import same_bits
from tests.simulated_programs import Fault, quiet
from tests.simulation.run import Simulation, run_config
from tests.simulation.virtual_threads import HangError
from tests.whole_checkpoints import all_of

# steps may last longer than all that a start may take
_DEADLINES = DeadlineConfig(start=5.0, step=600.0, call=600.0, driver=1e6)
_MOST_SECONDS = 3000.0  # of virtual time, that a call may take
_CPUS = (8, 8)
_PACKAGE = str(Path(steepest.__file__).parent) + "/"
_TESTING = _PACKAGE + "testing/"


# -- schedules -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interrupt:
    """An exception in the driver's main thread, in the middle of a call.

    Attributes:
        place: "wait" for one of the thread's waits, "begin" if it comes when the wait begins,
            "point" for a place in steepest's code where Python handles signals, "callback" for a
            callback that raises.
        files: of steepest, the places in which count; all where there are none.
        number: of the wait, the place or the callback's call, counted from 1.
        error: what is raised.
        again: at which of the waits after it a second KeyboardInterrupt comes; 0 for none.
    """

    place: str
    number: int
    error: type[BaseException] = KeyboardInterrupt
    again: int = 0
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        again = f", again {self.again} waits later" if self.again else ""
        return f"{self.error.__name__} at {self.place} {self.number}{again}"


class CallbackError(Exception):
    """What a callback raises."""


@dataclass(frozen=True)
class Act:
    """A call of the trainer.

    Attributes:
        kind: of the call.
        argument: for it.
        interrupt: that strikes it, if it lasts long enough.
        faults: of processes, by events from its beginning.
    """

    kind: str
    argument: Any = None
    interrupt: Interrupt | None = None
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        struck = [str(self.interrupt)] if self.interrupt else []
        struck += [f"kill {fault.share:g} after {fault.after}" for fault in self.faults]
        argument = "" if self.argument is None else f" {self.argument}"
        return f"{self.kind}{argument}" + (f"  <- {'; '.join(struck)}" if struck else "")


_KINDS = (
    *("fit",) * 5,
    *("step",) * 2,
    *("save", "restore", "resize", "strategy") * 2,
    *("set_weights", "state", "rate", "evaluate", "weights", "stats", "log"),
    *("foreach", "fit and resize", "fit and stop"),
)


@dataclass
class Schedule:
    """The calls of a driver and what strikes them, all of it drawn from a seed.

    Attributes:
        seed: of the schedule.
        family: of what is trained, and the strategies.
        workers, strategy: at the beginning.
        failure: of the run's settings.
        acts: what is called.
    """

    seed: int
    family: Family = FAMILIES["sync"]
    workers: int = 1
    strategy: Any = None
    failure: FailureConfig = field(default_factory=FailureConfig)
    acts: list[Act] = field(default_factory=list)

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        """Return the schedule of a seed."""
        draw = random.Random(seed)
        family = FAMILIES[draw.choice(("sync", "sync", "sync", "local", "async"))]
        failure = FailureConfig(
            max_failures=1000,
            spares=draw.choice((None, 0, 1)),
            snapshot_every=draw.choice((None, None, 3)),
            patience=math.inf,
        )
        found = cls(seed, family, draw.randint(1, 3), _strategy(draw, family), failure)
        deaths = draw.choice((0.0, 0.0, 0.2, 0.5))
        found.acts = [_act("start", draw, family, deaths if draw.random() < 0.3 else 0.0, 0.1)]
        found.acts += [
            _act(draw.choice(_KINDS), draw, family, deaths, 0.6) for _ in range(draw.randint(1, 6))
        ]
        found.acts.append(_act("shutdown", draw, family, 0.0, 0.1))
        return found

    def undisturbed(self) -> Schedule:
        """Return the same calls, which nothing strikes."""
        return replace(self, acts=[Act(act.kind, act.argument) for act in self.acts])

    def __str__(self) -> str:
        lines = [f"{self.family.name}, {self.workers} workers, {self.strategy}", str(self.failure)]
        return "\n    ".join([*lines, *map(str, self.acts)])


def _strategy(draw: random.Random, family: Family) -> Any:
    """Return a strategy of the family, cut into several chunks."""
    servers = draw.randint(1, 3)
    copies = draw.randint(1, servers)
    several: dict[str, tuple[Any, ...]] = {
        "sync": (
            ParameterServerStrategy(num_servers=servers, chunk_bytes=32),
            ParameterServerStrategy(num_servers=servers, replication=copies, chunk_bytes=32),
            AllreduceStrategy(chunk_bytes=32),
            AllreduceStrategy(sharded=False),
            SimpleStrategy(),
        ),
        "local": (
            LocalStrategy(sync_every=2, chunk_bytes=32),
            LocalStrategy(sync_every=2, num_servers=servers, replication=copies, chunk_bytes=32),
        ),
        "async": (
            ParameterServerStrategy(num_servers=servers, chunk_bytes=32),
            ParameterServerStrategy(
                mode="async", num_servers=servers, replication=copies, chunk_bytes=32
            ),
            ParameterServerStrategy(mode="async", num_servers=servers, chunk_bytes=32),
            ParameterServerStrategy(mode="ssp", staleness=2, num_servers=servers, chunk_bytes=32),
        ),
    }
    return draw.choice(several[family.name])


def _act(kind: str, draw: random.Random, family: Family, deaths: float, interrupts: float) -> Act:
    arguments: dict[str, Callable[[], Any]] = {
        "fit": lambda: draw.randint(1, 8),
        "fit and resize": lambda: (draw.randint(2, 8), draw.randint(1, 3)),
        "fit and stop": lambda: (draw.randint(2, 8), draw.randint(1, 4)),
        "resize": lambda: draw.randint(1, 3),
        "strategy": lambda: _strategy(draw, family),
        "set_weights": lambda: draw.getrandbits(32),
        "rate": lambda: draw.choice((0.02, 0.03, 0.07)),
    }
    argument = arguments.get(kind, lambda: None)()
    interrupt = _interrupt(kind, draw) if draw.random() < interrupts else None
    faults = [
        Fault(
            0,
            draw.choice((3, 30, 150)) * draw.randint(1, 10) // 3,
            "kill",
            draw.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
            draw.getrandbits(32),
        )
        for _ in range(draw.choice((1, 1, 2)))
        if draw.random() < deaths
    ]
    return Act(kind, argument, interrupt, tuple(faults))


#: By call, about how many waits the driver's thread has in it, and places where it handles signals.
_LENGTHS = {
    "start": (35, 3300),
    "shutdown": (4, 150),
    "fit": (12, 4000),
    "fit and resize": (60, 10_000),
    "fit and stop": (10, 3000),
    "step": (4, 1200),
    "save": (10, 1500),
    "restore": (12, 1900),
    "resize": (80, 9000),
    "strategy": (60, 9000),
    "set_weights": (8, 1000),
    "state": (16, 1900),
    "rate": (1, 42),
    "evaluate": (6, 1000),
    "weights": (2, 80),
    "stats": (6, 130),
    "log": (2, 60),
    "foreach": (3, 800),
}


def _interrupt(kind: str, draw: random.Random) -> Interrupt:
    """Return an interrupt of a call, most often at a moment that it has if no process dies."""
    place = draw.choice(("wait", "wait", "begin", "point", "callback"))
    error: type[BaseException] = draw.choice((KeyboardInterrupt,) * 4 + (SystemExit,))
    again = draw.randint(1, 5) if draw.random() < 0.15 else 0
    if place == "callback" and kind.startswith("fit"):
        return Interrupt(place, draw.randint(1, 6), draw.choice((error, CallbackError)), again)
    place = "wait" if place == "callback" else place
    most = _LENGTHS[kind][place == "point"] * draw.choice((1, 1, 3))
    number = draw.choice((draw.randint(1, most), _log_uniform(draw, most)))
    return Interrupt(place, number, error, again)


def _log_uniform(draw: random.Random, most: int) -> int:
    """Return a number from 1 to `most`, of which small ones are as likely as large ones."""
    return round(math.exp(draw.uniform(0.0, math.log(most))))


# -- interrupts ----------------------------------------------------------------------------------


@cache
def _points(code: CodeType) -> frozenset[int]:
    """Return the offsets of a function's instructions before which Python handles signals.

    It does so when a call has returned, and at the end of each turn of a loop.
    """
    found, called = set[int](), False
    for each in dis.get_instructions(code):
        if called or each.opname.startswith("JUMP_BACKWARD"):
            found.add(each.offset)
        called = each.opname.startswith("CALL")
    return frozenset(found)


class _AtPoint:
    """Raises an exception at one of the places in steepest's code where Python handles signals."""

    def __init__(self, number: int, error: type[BaseException], files: tuple[str, ...]) -> None:
        self._left, self._error, self._files = number, error, files
        self.struck, self.where = False, ""

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Count the places that the calling thread passes in a block, and raise at the chosen one."""
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it once, in settrace
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if self.struck or not name.startswith(_PACKAGE) or name.startswith(_TESTING):
            return None
        if self._files and not name.endswith(self._files):
            return None
        if (
            frame.f_code.co_name == "<genexpr>"
        ):  # what is raised while one is closed Python swallows
            return None
        self._count(frame)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._traced

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and not self.struck and frame.f_lasti in _points(frame.f_code):
            self._count(frame)
        return self._traced

    def _count(self, frame: FrameType) -> None:
        self._left -= 1
        if not self._left:
            self.struck = True
            self.where = _places(traceback.extract_stack(frame))
            raise self._error


def _places(stack: traceback.StackSummary, most: int = 6) -> str:
    """Return the functions of steepest on a stack, the innermost last."""
    found = [
        f"{Path(each.filename).name}:{each.lineno} {each.name}"
        for each in stack
        if each.filename.startswith(_PACKAGE) and not each.filename.startswith(_TESTING)
    ]
    return " > ".join(found[-most:])


class _Watch(Callback):
    """Notes the steps that `fit` shows, and does things at them."""

    def __init__(self, at: int, error: type[BaseException] | None) -> None:
        self.steps: list[int] = []
        self.then: Callable[[DistributedSGD], object] | None = None
        self.then_at = 0
        self.struck = False
        self._at, self._error = at, error

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.steps.append(result.step)
        if len(self.steps) == self._at and self._error is not None:
            self.struck = True
            raise self._error
        if len(self.steps) == self.then_at and self.then is not None:
            self.then(trainer)


# -- runs ----------------------------------------------------------------------------------------


class Failure(AssertionError):  # noqa: N818 - it is no error of the program under test
    """What does not hold.

    Attributes:
        kind: in a word or two, to count by.
        call: in which, or after which it was seen.
    """

    def __init__(self, kind: str, call: str, about: str) -> None:
        super().__init__(f"{kind} in {call}: {about}")
        self.kind, self.call = kind, call


class Run:
    """One run of a schedule.

    Attributes:
        done: what was called, and what struck it.
        struck: how many calls were interrupted.
        deaths: of processes so far.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.family = schedule, schedule.family
        self.done: list[str] = []
        self.struck = self.deaths = 0
        self._sizes: set[int] = set()  # numbers of workers that there may be from any step on
        self._stepped = 0  # deaths before the last call that took steps
        self._folder = Path(tempfile.mkdtemp(prefix="steepest-driver-"))
        self._saved = Worlds(self.family, [])
        self._worlds = Worlds(self.family, [self.family.begin(schedule.workers, schedule.strategy)])
        self._is_set = False  # whether weights were set or restored
        self._trainer: DistributedSGD | None = None
        self._simulation = Simulation(schedule.seed, _CPUS, seconds=1e5, switches=2_000_000)

    def run(self) -> None:
        """Run the schedule to its end.

        Raises:
            Failure: something does not hold that must.
        """
        try:
            with quiet(), paced(self.schedule.seed), self._simulation.running():
                self._all()
        except HangError as error:
            raise Failure("hang", self._last, str(error)) from None
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def switches(self) -> int:
        """How often threads have switched so far."""
        return self._simulation.scheduler.switches

    @property
    def _last(self) -> str:
        return self.done[-1].split(" ")[0] if self.done else "start"

    def _all(self) -> None:
        first, *acts, last = self.schedule.acts
        try:
            if not self._call(first, self._start):
                gc.collect()  # the trainer, if its constructor was about to return
                self._check_nothing_left()
                return
            for act in acts:
                self._act(act)
            self._afterwards()
        except BaseException:
            if self._trainer is not None:
                self._end_somehow()
            raise
        if not self._call(last, self._shutdown):
            self._call(Act("shutdown"), self._shutdown)
        self._check_nothing_left()

    def _end_somehow(self) -> None:
        """End the trainer after a failure, which counts rather than those that follow from it."""
        self._simulation.forget_faults()
        with contextlib.suppress(Exception, HangError):  # the failure before it is raised
            self._shutdown()

    # -- calls ---------------------------------------------------------------------------------

    def _start(self) -> None:
        schedule = self.schedule
        self._trainer = DistributedSGD(
            self.family.creator(),
            schedule.workers,
            strategy=schedule.strategy,
            global_batch_size=self.family.global_batch,
            run_config=run_config(failure=schedule.failure, deadlines=_DEADLINES, keep_log=True),
        )

    @property
    def trainer(self) -> DistributedSGD:
        assert self._trainer is not None
        return self._trainer

    def _shutdown(self) -> None:
        self.trainer.shutdown()

    def _call(self, act: Act, call: Callable[[], Any], watch: _Watch | None = None) -> bool:
        """Make a call with what strikes it; return whether it returned rather than was interrupted.

        Raises:
            Failure: it raised something else, or took too long.
        """
        simulation, self._result = self._simulation, None
        began, why = simulation.scheduler.now, act.interrupt
        for fault in act.faults:
            simulation.at_event(fault.after, lambda fault=fault: self._die(fault))
        waits = point = again = None
        if why is not None and why.place in ("wait", "begin"):
            waits = simulation.interrupt(why.number, error=why.error, late=why.place == "wait")
        elif why is not None and why.place == "point":
            point = _AtPoint(why.number, why.error, why.files)

        def struck() -> bool:
            each = (waits, point, watch)
            return any(one is not None and one.struck for one in each)

        if why is not None and why.again:
            again = _Again(simulation, struck, why.again)
        self.done.append(str(act))
        try:
            if point is not None:
                with point.armed():
                    self._result = call()
            else:
                self._result = call()
        except HangError:
            raise
        except BaseException as error:
            self._note(act, waits, point)
            expected = (why.error, KeyboardInterrupt) if why is not None else ()
            if act.kind == "foreach" and isinstance(error, PeerLostError) and self.deaths:
                return False  # a user's function is not repeated
            if not struck() or type(error) not in expected:
                kind = f"{type(error).__name__} instead" if struck() else type(error).__name__
                where = _places(traceback.extract_tb(error.__traceback__))
                raise Failure(kind, act.kind, f"{str(error)[:300]} [{where}]") from error
            self.struck += 1
            return False
        finally:
            if waits is not None:
                waits.forget()
            if again is not None:
                again.forget()
        self._note(act, waits, point)
        if struck():
            raise Failure("swallowed", act.kind, f"the interruption of {self.done[-1]} was lost")
        if simulation.scheduler.now - began > _MOST_SECONDS:
            raise Failure("slow", act.kind, f"{simulation.scheduler.now - began:.0f} s")
        return True

    def _note(self, act: Act, waits: Any, point: _AtPoint | None) -> None:
        """Add where a call was interrupted to what was done."""
        for each in (waits, point):
            if each is not None and each.struck:
                self.done[-1] += f" [{each.where}]"

    def _die(self, fault: Fault) -> None:
        self.deaths += 1
        fault.strike(self._simulation)

    def _act(self, act: Act) -> None:
        kinds: dict[str, Callable[[Act], None]] = {
            "fit": self._fit,
            "fit and resize": self._fit,
            "fit and stop": self._fit,
            "step": self._step,
            "save": self._save,
            "restore": self._restore,
            "resize": self._resize,
            "strategy": self._strategy,
            "set_weights": self._set_weights,
            "state": self._state,
            "rate": self._rate,
            "evaluate": self._evaluate,
            "weights": self._weights,
            "stats": self._stats,
            "log": self._log,
            "foreach": self._foreach,
        }
        kinds[act.kind](act)
        if not self._worlds.all:
            raise Failure(self._worlds.lost, act.kind, self._worlds.about)

    def _fit(self, act: Act) -> None:
        steps, other = act.argument if isinstance(act.argument, tuple) else (act.argument, 0)
        why = act.interrupt
        raises = why is not None and why.place == "callback"
        watch = _Watch(why.number if raises and why else 0, why.error if raises and why else None)
        if act.kind == "fit and resize":
            watch.then, watch.then_at = lambda trainer: trainer.resize(other), 1
        elif act.kind == "fit and stop":
            watch.then, watch.then_at = lambda trainer: trainer.stop(), other
        before, deaths = self._worlds.steps(), self.deaths
        returned = self._call(
            act,
            lambda: self.trainer.fit(steps=steps, callbacks=[watch], progress=False),
            watch,
        )
        if act.kind == "fit and resize" and watch.steps:
            self._sizes.add(other)
        if not returned or act.kind == "fit and stop":
            self._worlds.took(range(steps + 1), self._sizes, whole=returned)
            if not self.deaths and watch.steps:
                self._worlds.keep(lambda world: world.step >= watch.steps[-1], "steps", watch.steps)
        else:
            self._worlds.took((steps,), self._sizes)
        if returned:
            self._stepped = deaths
            self._worlds.at_step(self._result.step)
            if not self.deaths and len(before) == 1:
                first, last = before.pop(), self._result.step
                if watch.steps != [*range(first + 1, last + 1)]:
                    raise Failure("on_step", act.kind, f"from {first} to {last}: {watch.steps}")

    def _step(self, act: Act) -> None:
        deaths = self.deaths
        if self._call(act, lambda: self.trainer.step()):
            self._stepped = deaths
            self._worlds.took((1,), self._sizes)
            self._worlds.at_step(self._result.step)
        else:
            self._worlds.took((0, 1), self._sizes, whole=False)

    def _save(self, act: Act) -> None:
        path = self._folder / "saved"
        if not self._call(act, lambda: self.trainer.save(path)):
            self._saved.add(self._worlds.all)
            return
        found = all_of(path)
        self._worlds.at_step(found.about["step"], what="saved step")
        self._worlds.have(found.weights, "saved weights")
        self._saved = Worlds(self.family, self._worlds.all)

    def _restore(self, act: Act) -> None:
        path = self._folder / "saved"
        if not (path / "manifest.json").exists():  # saving it was interrupted
            return
        returned = self._call(act, lambda: self.trainer.restore(path))
        self._is_set = True
        self._worlds.restored(self._saved, either=not returned)

    def _resize(self, act: Act) -> None:
        returned = self._call(act, lambda: self.trainer.resize(act.argument))
        self._worlds.change(lambda w: of_size(w, act.argument), either=not returned)
        self._sizes = set() if returned else {*self._sizes, act.argument}
        if returned and self.trainer.num_workers != act.argument:
            raise Failure("size", act.kind, f"{self.trainer.num_workers} workers: {act}")

    def _strategy(self, act: Act) -> None:
        name = self.family.mode(act.argument)
        returned = self._call(act, lambda: self.trainer.set_strategy(act.argument))
        self._worlds.change(lambda w: under(w, name), either=not returned)
        if returned and self.trainer.strategy != act.argument:
            raise Failure("strategy", act.kind, f"{self.trainer.strategy}: {act}")

    def _set_weights(self, act: Act) -> None:
        vector = self.family.some(act.argument)
        weights = self.family.named(vector)
        returned = self._call(act, lambda: self.trainer.set_weights(weights))
        self._is_set = True
        self._worlds.change(lambda w: replace(w, weights=vector), either=not returned)

    def _state(self, act: Act) -> None:
        self._is_set = True
        self._call(act, lambda: self.trainer.load_state_dict(self.trainer.state_dict()))

    def _rate(self, act: Act) -> None:
        returned = self._call(act, lambda: self.trainer.set_learning_rate(act.argument))
        self._worlds.change(lambda w: replace(w, rate=act.argument), either=not returned)

    def _evaluate(self, act: Act) -> None:
        data = tuple(column[:7] for column in self.family.data)
        if self._call(act, lambda: self.trainer.evaluate(data)):
            self._worlds.at_step(self._result.step, what="evaluated step")
            self._worlds.lose(self._result.loss)

    def _weights(self, act: Act) -> None:
        if self._call(act, lambda: self.trainer.weights()):
            self._worlds.have(self._result, "weights")

    def _stats(self, act: Act) -> None:
        if self._call(act, lambda: self.trainer.stats()):
            step = self._result.step
            if self.deaths > self._stepped:  # until the next step a death may have undone some
                self._worlds.keep(lambda world: world.step >= step, "stats", step)
            else:
                self._worlds.at_step(step, what="stats")

    def _log(self, act: Act) -> None:
        self._call(act, lambda: self.trainer.log())

    def _foreach(self, act: Act) -> None:
        if self._call(act, lambda: self.trainer.foreach_worker(lambda view: view.index)):
            count = len(self._result)
            self._worlds.keep(lambda world: world.workers == count, "size", count)

    # -- checks --------------------------------------------------------------------------------

    def _afterwards(self) -> None:
        """Check that every call works, and that all is as in one process, when nothing strikes any more."""
        self._simulation.forget_faults()
        draw = random.Random(self.schedule.seed + 1)
        others = ["weights", "evaluate", "save", "restore", "resize", "strategy", "set_weights"]
        others += ["state", "rate", "foreach"]
        several = ["step", "stats", "weights", *draw.sample(others, 3), "fit", "stats", "weights"]
        for kind in several:
            self._act(_act(kind, draw, self.family, 0.0, 0.0))
        self._check_log()

    def _check_log(self) -> None:
        """Check that the log gives the weights, to the bit."""
        if self._call(Act("log"), lambda: self.trainer.log()):
            log = self._result
        if self._is_set or self.family.name == "local":
            return
        begins = log.parts[0].start
        if begins:
            raise Failure("log", "log", f"it begins after version {begins}")
        if not self._call(Act("weights"), lambda: self.trainer.weights()):
            return
        if not same_bits(replay(log, self.family.creator()), self._result):
            raise Failure("log", "log", "it does not give the weights")

    def _check_nothing_left(self) -> None:
        left = self._simulation.leftovers(60.0)
        if left:
            raise Failure("processes", self._last, f"left: {[process.name for process in left]}")
        if threads := self._simulation.threads():
            raise Failure("threads", self._last, f"left: {threads}")


class _Again:
    """A second KeyboardInterrupt, some waits after the first."""

    def __init__(self, simulation: Simulation, struck: Callable[[], bool], waits: int) -> None:
        self._found: Any = None
        self._first = simulation.interrupt(when=lambda: False)

        def now() -> bool:
            if self._found is None and struck():
                self._found = self._first.waits
            return self._found is not None and self._first.waits >= self._found + waits

        self._second = simulation.interrupt(when=now)

    def forget(self) -> None:
        """Raise nothing from now on."""
        self._first.forget()
        self._second.forget()


def shortened(schedule: Schedule) -> Schedule:
    """Return a schedule with fewer calls and strikes, of which the run fails in the same way."""
    kind = failure_of(schedule)
    assert kind is not None, "it does not fail"
    smaller = True
    while smaller:
        smaller = False
        for acts in _fewer(schedule.acts):
            other = replace(schedule, acts=acts)
            found = failure_of(other)
            if found is not None and found.kind == kind.kind:
                schedule, smaller = other, True
                break
    return schedule


def _fewer(acts: list[Act]) -> Iterator[list[Act]]:
    """Yield lists of calls with one call, or what strikes one, left out."""
    for n in range(1, len(acts) - 1):
        yield acts[:n] + acts[n + 1 :]
    for n, act in enumerate(acts):
        plain = []
        if act.interrupt is not None:
            plain.append(replace(act, interrupt=None))
            if act.interrupt.again:
                plain.append(replace(act, interrupt=replace(act.interrupt, again=0)))
        plain += [
            replace(act, faults=act.faults[:k] + act.faults[k + 1 :])
            for k in range(len(act.faults))
        ]
        for each in plain:
            yield [*acts[:n], each, *acts[n + 1 :]]


def failure_of(schedule: Schedule) -> Failure | None:
    """Run a schedule; return what does not hold, or None."""
    try:
        Run(schedule).run()
    except Failure as failure:
        return failure
    return None
