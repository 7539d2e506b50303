"""In the process of a run: notes a training function's steps, and kills the process where the run says so."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader

from steepest.core.engine.generators import restore, states
from steepest.core.models.scalars import as_number
from steepest.errors import ConfigurationError
from steepest.loop import calls
from steepest.loop.closures import steps_in_workers
from steepest.loop.kept_values import FindClass, Form, finder, restored
from steepest.testing.verification.drawing import Draws, put_aside
from steepest.testing.verification.frames import (
    frames_of_user,
    is_users,
    is_users_class,
    line_here,
    scopes_of,
)
from steepest.testing.verification.records import EntryFile, Facts, StepRecord, read_entries
from steepest.testing.verification.summaries import (
    GatheredValue,
    TensorSummary,
    Variable,
    Variables,
    digest_of_tensor,
    gathered_value,
    of_scheduler,
    rows_of,
    size_of,
    state_of,
    summary_of,
)

#: Bytes of batches that are kept for the plain script.
_KEPT_BYTES = 1 << 29
_KEPT = "batches"  # name of the file
_FRAMES = 6


@dataclass(frozen=True)
class WatchedFunction:
    """A function that trains, watched in whatever process it runs; it is called as that is.

    Attributes:
        function: the user's.
        folder: of the records.
        steps: after which it leaves its loop.
        aside: whether to put aside what makes a batch's result more than a mean over its samples.
        by_sample: whether random numbers are drawn by sample, those of dropout too.
        kills: pairs of a worker and the step in which it is killed, once, between `backward` and the step.
        batches: how many of the script's batches are one of the training loader's.
        keeps_batches: whether to keep what the training loader gives, for the plain script.
        feed: the folder of a run that has kept it, of which this is the plain script; "" for none.
    """

    function: Callable[[], Any]
    folder: str
    steps: int
    aside: bool = False
    by_sample: bool = False
    kills: tuple[tuple[int, int], ...] = ()
    batches: int = 1
    keeps_batches: bool = False
    feed: str = ""

    def __call__(self) -> None:
        """Run the function, watched."""
        _Probe(self).run()


class _LeavesLoopError(SystemExit):
    """Ends a function as `sys.exit` does, after the last step that is of interest."""


#: The probe whose function's thread each thread is.
_local = threading.local()


class _Probe:
    """Notes what one call of the function does."""

    def __init__(self, watched: WatchedFunction) -> None:
        self._watched = watched
        self.folder = watched.folder
        self._folder = Path(watched.folder)
        self._is_plain = not calls.is_worker()
        self._rank = calls.rank()
        begun = time.time_ns()
        self._file = EntryFile(self._folder / f"worker-{self._rank}-{os.getpid()}-{begun}.record")
        self._file.append("begun", (self._rank, calls.size(), begun))
        self._feed = _Feed(Path(watched.feed), finder(watched.function)) if watched.feed else None
        self._keeper: _Keeper | None = None
        self._draws = Draws()
        self._known: set[int] = set()  # ids of what the job keeps by itself
        self._known_objects: list[Any] = []  # so that no other has their ids
        self._variables = Variables(self._is_known, is_users_class)
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._named: dict[str, torch.Tensor] = {}
        self._done = 0  # steps of the job, as far as this function knows
        self._epoch = -1
        self._is_over = False
        self._has_autocast = False
        self._sums = False
        self._schedulers: list[Any] = []
        self._lengths: list[
            tuple[int, int, str]
        ] = []  # of loaders before `prepare`: id, length, line
        self._step: StepRecord | None = None
        self._after_backward: list[tuple[int, int]] | None = None
        self._since = time.perf_counter()
        self._weight: float | None = None  # what the user has said that the present batch weighs
        self._size = 1  # samples of that
        self._begin_batches()

    def _begin_batches(self) -> None:
        """Begin to note batches of the next step."""
        self._samples: list[int] = []
        self._batches = 0
        self._losses: list[float] = []
        self._counts: list[float] = []
        self._before = 0  # losses of the batches before
        self._left_over: set[int] = (
            set()
        )  # ids of parameters with gradients before the first backward pass
        self._gathered: list[GatheredValue] = []
        self._variables_then: dict[str, Variable] = {}
        self._lines_then: dict[str, str] = {}
        self._generators = _digest_of_generators()

    def run(self) -> None:
        """Call the function; what it raises is raised."""
        if not self._is_plain:
            print_to(self._folder / f"worker-{self._rank}.txt")
        error = ""
        _local.probe = self
        try:
            with contextlib.ExitStack() as whole:
                whole.enter_context(calls.told(self))
                whole.enter_context(self._watching())
                if self._watched.aside or self._watched.by_sample:
                    drops = not self._watched.aside
                    whole.enter_context(put_aside(self._draws, drops=drops))
                self._train()
        except SystemExit as stopped:
            error = f"SystemExit: {stopped.code}"
            raise
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            _local.probe = None
            self._file.append("ended", error)
            self._file.close()
            if self._keeper is not None:
                self._keeper.close()

    def _train(self) -> None:
        """Call the function, and note what optimizers keep at its end."""
        try:
            self._watched.function()
        except SystemExit as stopped:
            if stopped.code not in (None, 0):
                raise
        if self._done and self._rank == 0:
            names = {id(value): name for name, value in self._named.items()}
            states = (state_of(each, names) for each in self._optimizers)
            self._file.append("optimizer_state", dict(part for s in states for part in s.items()))

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Note in this context also what the script does without a call of this library."""
        backward, iterate = torch.Tensor.backward, DataLoader.__iter__
        save, show = torch.save, warnings.showwarning
        enter, length = torch.autocast.__enter__, DataLoader.__len__
        _hear_of_files()
        _patch_once()
        package = vars(sys.modules["steepest"])
        run = package.get("run")
        package["run"] = _call_function  # what a script calls that starts itself
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                warnings.showwarning = self._warned  # type: ignore[assignment]
                yield
        finally:
            package.pop("run")
            if run is not None:
                package["run"] = run
            torch.Tensor.backward, DataLoader.__iter__ = backward, iterate  # type: ignore[method-assign]
            torch.save, warnings.showwarning = save, show
            torch.autocast.__enter__ = enter  # type: ignore[method-assign]
            DataLoader.__len__ = length  # type: ignore[method-assign]

    # -- what it is told of --------------------------------------------------------------------

    def calls(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the training loader by one of larger batches, if the run says so; see `CallListener`."""
        loaders = [each for each in arguments if isinstance(each, DataLoader)]
        if name != "prepare" or not loaders or self._watched.batches == 1:
            return arguments
        larger = _with_larger_batches(loaders[0], self._watched.batches)
        return tuple(larger if each is loaders[0] else each for each in arguments)

    def called(
        self, name: str, arguments: tuple[Any, ...], named: dict[str, Any], returned: Any
    ) -> Any:
        """Take note of a call, see `steepest.loop.calls.CallListener`."""
        if name == "report":
            self._reported(named)
        if name == "prepare":
            self._sums = named.get("reduction") == "sum"
        handle = getattr(self, f"_called_{name}", None)
        return returned if handle is None else handle(arguments, returned)

    def _reported(self, values: dict[str, Any]) -> None:
        numbers = {name: as_number(value) for name, value in values.items()}
        self._file.append(
            "report",
            (self._done, {n: math.nan if v is None else float(v) for n, v in numbers.items()}),
        )

    def _called_prepare(self, arguments: tuple[Any, ...], returned: Any) -> Any:
        several = returned if isinstance(returned, tuple) else (returned,)
        self._know(*arguments, *several)
        self._modules = [each for each in arguments if isinstance(each, torch.nn.Module)]
        self._optimizers = [each for each in arguments if isinstance(each, torch.optim.Optimizer)]
        self._schedulers = [
            each for each in arguments if isinstance(each, LRScheduler | ReduceLROnPlateau)
        ]
        self._name_tensors()
        loaders = [
            (g, r) for g, r in zip(arguments, several, strict=True) if isinstance(g, DataLoader)
        ]
        if loaders:
            self._watch_loader(loaders[0][1], loaders[0][0])
        in_workers = {} if self._is_plain else steps_in_workers(self._optimizers)
        for at, optimizer in enumerate(self._optimizers):
            if at in in_workers:  # its hooks are called before the update is committed
                optimizer.step = self._stepping(optimizer)  # type: ignore[method-assign]
                continue
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        if self._watched.aside or self._watched.by_sample:
            for module in (part for each in self._modules for part in each.modules()):
                if isinstance(module, torch.nn.RNNBase):
                    module.dropout = 0.0
        if self._watched.keeps_batches and self._rank == 0:
            self._keeper = _Keeper(self._folder, _length_of(loaders[0][1]) if loaders else None)
        facts = Facts(
            loaders[0][0].batch_size if loaders else None,
            bool(loaders),
            [type(each).__name__ for each in self._optimizers],
            self._names_of(_depends_on_batch),
            self._names_of(_drops),
            any(each.dtype in (torch.float16, torch.bfloat16) for each in self._named.values()),
            line_here(),
            _generators_in(loaders[0][0].dataset) if loaders else [],
        )
        for of, length, line in self._lengths:
            if loaders and of == id(loaders[0][0]):
                self.note("length", str(length), line)
        self._file.append("prepared", (facts, self._summaries(self._named)))
        self._begin_batches()
        return returned

    def _called_register(self, arguments: tuple[Any, ...], returned: Any) -> Any:
        self._know(returned, *vars(returned).values())
        return returned

    def _called_epochs(self, arguments: tuple[Any, ...], returned: Any) -> Any:
        def numbers() -> Iterator[int]:
            for number in returned:
                self._leave_if_over()
                self._epoch = number
                self._note_variables()
                self._go_on_as("epoch")
                self._begin_draws([])
                yield number

        return numbers()

    def _called_gather(self, arguments: tuple[Any, ...], returned: Any) -> Any:
        gathered = self._variables.read({"gathered": returned}).get("gathered")
        digest = "" if gathered is None else gathered.digest
        self._gathered.append(gathered_value(returned, digest, line_here()))
        return returned

    def _called_weight(self, arguments: tuple[Any, ...], returned: Any) -> Any:
        if arguments:
            self._weight = float(arguments[0])
            self._counts[self._before :] = [self._weight] * (len(self._counts) - self._before)
        return returned

    def _called_size(self, arguments: tuple[Any, ...], returned: Any) -> Any:
        if line := line_here():
            self.note("size", "", line)
        return returned

    def note_length(self, loader: DataLoader[Any], length: int) -> None:
        """Note that the user asked for the length of a loader before `prepare`."""
        if not self._known:
            self._lengths.append((id(loader), length, line_here()))

    def note_autocast(self) -> None:
        """Note that operations run in few bits."""
        if not self._has_autocast:
            self._has_autocast = True
            self.note("autocast", "", line_here())

    def note(self, kind: str, text: str, line: str) -> None:
        """Note something of a kind, and where the user's function is."""
        self._file.append(kind, (text, line))

    def _warned(self, message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        self.note("warned", str(message), f"{os.path.basename(filename)}:{lineno}")

    # -- what the job keeps --------------------------------------------------------------------

    def _know(self, *objects: Any) -> None:
        self._known_objects.extend(objects)
        self._known |= {*map(id, objects)}
        for each in objects:
            if isinstance(each, torch.nn.Module):
                self._known |= {
                    id(part) for part in (*each.modules(), *each.parameters(), *each.buffers())
                }
            if isinstance(each, LRScheduler | ReduceLROnPlateau):
                self._known.add(id(each.optimizer))

    def knows(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loader was given to `prepare`, or nothing was given yet."""
        return not self._known or id(loader) in self._known

    def _is_known(self, value: Any) -> bool:
        if id(value) in self._known or isinstance(value, DataLoader | torch.utils.data.Dataset):
            return True
        if isinstance(value, torch.optim.Optimizer):
            return True
        if isinstance(value, torch.nn.Module):
            return any(id(each) in self._known for each in value.parameters())
        return False

    def _name_tensors(self) -> None:
        several = len(self._modules) > 1
        for at, module in enumerate(self._modules):
            for name, value in module.named_parameters():
                self._named[f"{at}.{name}" if several else name] = value
        own = {*map(id, self._named.values())}
        bare = [
            p
            for o in self._optimizers
            for g in o.param_groups
            for p in g["params"]
            if id(p) not in own
        ]
        for at, value in enumerate(bare):
            self._named[f"tensor {at}"] = value

    def _names_of(self, wanted: Callable[[torch.nn.Module], bool]) -> list[str]:
        several = len(self._modules) > 1
        return [
            f"{at}.{name}" if several else name
            for at, module in enumerate(self._modules)
            for name, part in module.named_modules()
            if wanted(part)
        ]

    # -- batches -------------------------------------------------------------------------------

    def _watch_loader(self, returned: Any, given_loader: DataLoader[Any]) -> None:
        kind, probe = type(returned), self
        feed = self._feed

        def begin(loader: Any) -> Iterator[Any]:
            if feed is not None and feed.has_batches:
                return probe._fed(feed)
            return _with_batches(kind.__iter__(loader), probe._took)

        own: dict[str, Any] = {"__iter__": begin, "__module__": kind.__module__}
        if feed is not None and feed.length is not None:
            own["__len__"] = lambda _: feed.length
        object.__setattr__(returned, "__class__", type(kind.__name__, (kind,), own))

    def _fed(self, feed: _Feed) -> Iterator[Any]:
        for batch in feed.batches_of(self._epoch):
            self._took(batch)
            yield batch

    def _took(self, batch: Any) -> None:
        """Note a batch that the loop has got."""
        self._leave_if_over()
        self._note_variables()
        size = size_of(batch)
        rows = rows_of(batch, size)
        self._samples += rows or [0] * size
        self._batches += 1
        self._weight, self._size, self._before = None, size, len(self._losses)
        if self._keeper is not None:
            self._keeper.add("batch", (self._epoch, batch))
        self._go_on_as("batch")
        self._begin_draws(rows)

    def _begin_draws(self, rows: Sequence[int]) -> None:
        self._draws.begin_batch(rows)
        self._generators = _digest_of_generators()

    def _go_on_as(self, kind: str) -> None:
        """Keep the random generators' states for the plain script; in the plain script, restore them."""
        if self._keeper is not None:
            self._keeper.add(kind + " states", states())
        if self._feed is not None:
            self._feed.set_states(kind)

    # -- steps ---------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Note whether there are gradients already."""
        if not self._losses:
            gradients = ((p, p.grad) for p in self._named.values() if p.grad is not None)
            self._left_over = {id(p) for p, gradient in gradients if bool(gradient.count_nonzero())}

    def after_backward(self, loss: torch.Tensor) -> None:
        """Note a loss whose backward pass has run."""
        self._losses.append(float(loss.detach()) if loss.numel() == 1 else math.nan)
        self._counts.append(self._size if self._weight is None else self._weight)
        self._after_backward = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        gradients = (p.grad for p in self._named.values())
        return [(0, 0) if each is None else (id(each), each._version) for each in gradients]

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._leave_if_over()
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        gradients = {
            name: p.grad
            for name, p in self._named.items()
            if self._losses and id(p) in own and p.grad is not None
        }  # without a backward pass they are of the step before, and the step's closure makes its own
        self._step = StepRecord(
            step=self._done + 1,
            optimizer=next(
                (at for at, each in enumerate(self._optimizers) if each is optimizer), 0
            ),
            epoch=self._epoch,
            line=line_here(),
            samples=self._samples,
            batches=self._batches,
            weight=self._weight,
            losses=self._losses,
            counts=self._counts,
            settings=self._settings(),
            gradients=self._summaries(gradients),
            left_over=bool(own & self._left_over),
            edited=bool(self._losses) and self._after_backward != self._versions(),
            drew=self._generators != (drawn := _digest_of_generators()),
            drawn=drawn,
            sums=self._sums,
            variables=self._variables_then,
            lines=self._lines_then,
            gathered=self._gathered,
        )
        self._file.append("tried", self._step)
        for worker, step in self._watched.kills:
            if worker == self._rank and self._done + 1 >= step:
                self._die_once(step)

    def _stepping(self, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        """Return an optimizer's `step` that is noted."""
        own = optimizer.step

        @functools.wraps(own)
        def step(*arguments: Any, **named: Any) -> Any:
            self._before_step(optimizer)
            result = own(*arguments, **named)
            self._after_step()
            return result

        return step

    def _die_once(self, step: int) -> None:
        """Kill this process, unless it was killed here before."""
        with contextlib.suppress(FileExistsError):
            (self._folder / f"killed-{self._rank}-{step}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)

    def _after_step(self, *_: Any) -> None:
        step, self._step = self._step, None
        last = self._done if self._is_plain else calls.last_step()
        if step is None or last is None:  # it was committed before: this worker passes over it
            self._begin_batches()
            return
        step.step = self._done = last + 1
        step.weights = self._summaries(self._named)
        step.buffers = self._summaries(
            {
                f"{at}.{name}": b
                for at, m in enumerate(self._modules)
                for name, b in m.named_buffers()
            }
        )
        now = time.perf_counter()
        step.seconds, self._since = now - self._since, now
        self._file.append("step", step)
        self._begin_batches()
        self._go_on_as("step")
        self._generators = _digest_of_generators()
        self._is_over = step.step >= self._watched.steps

    def _leave_if_over(self) -> None:
        if self._is_over:
            raise _LeavesLoopError(0)

    def _settings(self) -> list[dict[str, Any]]:
        return [
            {
                k: v
                for k, v in group.items()
                if k != "params" and isinstance(v, bool | int | float | tuple)
            }
            for each in self._optimizers
            for group in each.param_groups
        ]

    @staticmethod
    def _summaries(named: dict[str, Any]) -> dict[str, TensorSummary]:
        dense = {n: v.to_dense() if v.is_sparse else v for n, v in named.items()}
        return {name: summary_of(value) for name, value in dense.items()}

    def _note_variables(self) -> None:
        """Note the variables with which the user's functions begin what is to be the next step."""
        if self._batches:
            return
        variables: dict[str, Variable] = {}
        frames = list(frames_of_user(sys._getframe(1)))[:_FRAMES]
        self._lines_then = {}
        for scope in scopes_of(frames, self._within):
            self._lines_then.setdefault(scope.name, scope.line)
            for name, value in self._variables.read(scope.variables).items():
                variables.setdefault(f"{scope.name}:{name}", value)
        several = len(self._schedulers) > 1
        for at, each in enumerate(self._schedulers):
            name = f"scheduler {at}" if several else "scheduler"
            variables[f"prepare:{name}"] = of_scheduler(each)
        self._variables_then = variables

    def _within(self, value: Any) -> dict[str, Any]:
        """Return the attributes of an object of the user's program; none for anything else."""
        kind = type(value)
        known = isinstance(value, type) or self._is_known(value) or not is_users_class(kind)
        return {} if known else dict(getattr(value, "__dict__", {}))


class _Keeper:
    """Keeps what a training loader gives, and the random generators, in a file."""

    def __init__(self, folder: Path, length: int | None) -> None:
        self._file = EntryFile(folder / _KEPT)
        self.add("length", length)

    def add(self, kind: str, value: Any) -> None:
        """Keep one thing, unless there is too much already, or it is of a class that cannot be kept."""
        if self._file.size >= _KEPT_BYTES:
            self._file.append("lost", None)
            return
        try:
            self._file.append(kind, value)
        except ConfigurationError:
            self._file.append("lost", None)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Feed:
    """What a keeper has kept, for the plain script.

    Attributes:
        length: batches of an epoch, as its loader says; None where it does not.
    """

    def __init__(self, folder: Path, find: FindClass) -> None:
        self._find = find
        self._batches: list[tuple[int, Form]] = []
        self._states: dict[str, list[Form]] = {}
        self.length: int | None = None
        path = folder / _KEPT
        for kind, form in read_entries(path) if path.exists() else ():
            if kind == "length":
                self.length = form
            elif kind == "batch":
                epoch, batch = form[1]
                self._batches.append((epoch, batch))
            elif kind.endswith(" states"):
                self._states.setdefault(kind.removesuffix(" states"), []).append(form)

    @property
    def has_batches(self) -> bool:
        """Whether there are any."""
        return bool(self._batches)

    def batches_of(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        for at, form in self._batches:
            if at == epoch:
                yield restored(form, None, "a batch", self._find)

    def set_states(self, kind: str) -> None:
        """Set the random generators as they were at the next event of a kind, if there is one."""
        if several := self._states.get(kind):
            restore(restored(several.pop(0), None, "the random generators", self._find))


def has_lost(folder: Path) -> bool:
    """Return whether a batch could not be kept in a folder, or was too much."""
    path = folder / _KEPT
    return path.exists() and any(kind == "lost" for kind, _ in read_entries(path))


def _call_function(function: Callable[[], Any], **_: Any) -> None:
    """Stand for `steepest.run` in a script that is verified: train in this process, and end there."""
    function()
    raise SystemExit(0)


def _with_larger_batches(loader: DataLoader[Any], times: int) -> DataLoader[Any]:
    """Return a loader like another one, whose batches have so many times the samples; itself if it cuts none."""
    if loader.batch_size is None:
        return loader
    larger, size = copy.copy(loader), loader.batch_size * times
    vars(larger)["batch_size"] = size
    if loader.batch_sampler is not None:
        vars(larger)["batch_sampler"] = BatchSampler(loader.sampler, size, loader.drop_last)
    return larger


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _generators_in(dataset: Any) -> list[str]:
    """Return the names of the random generators that a data set has."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    return [
        name for name, value in getattr(dataset, "__dict__", {}).items() if isinstance(value, kinds)
    ]


def _depends_on_batch(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training


def _drops(module: torch.nn.Module) -> bool:
    rate = getattr(module, "p", getattr(module, "dropout", 0.0))
    return (
        isinstance(rate, float)
        and rate > 0
        and ("drop" in type(module).__name__.lower() or hasattr(module, "dropout"))
    )


def _with_batches(batches: Iterator[Any], took: Callable[[Any], None]) -> Iterator[Any]:
    """Return an iterator over batches that reports each: the same object, if the loader has to recognize it."""
    kind = type(batches)

    def following(iterator: Any) -> Any:
        batch = kind.__next__(iterator)
        if batch is not None:
            took(batch)
        return batch

    try:
        object.__setattr__(
            batches, "__class__", type(kind.__name__, (kind,), {"__next__": following})
        )
    except TypeError:  # a generator
        return _told_of(batches, took)
    return batches


def _told_of(batches: Iterator[Any], took: Callable[[Any], None]) -> Iterator[Any]:
    for batch in batches:
        took(batch)
        yield batch


def _digest_of_generators() -> str:
    python, numpy, default, _ = states()
    by_python = hash((python[1], python[2] or 0.0))
    return f"{digest_of_tensor(default)} {by_python} {numpy[1][:8].tobytes().hex()} {numpy[2]}"


def print_to(path: Path) -> None:
    """Redirect what this process prints to a file."""
    sys.stdout.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)


def _here() -> _Probe | None:
    """Return the probe of the calling thread's function."""
    probe: _Probe | None = getattr(_local, "probe", None)
    return probe


def _patch_once() -> None:
    """Patch torch to report backward passes, loaders that begin, and files that are saved."""
    backward: Callable[..., Any] = torch.Tensor.backward
    iterate, save, enter = DataLoader.__iter__, torch.save, torch.autocast.__enter__
    length = DataLoader.__len__

    @functools.wraps(backward)
    def backward_told(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        probe = _here()
        if probe is None:
            return backward(self, *arguments, **named)
        probe.before_backward()
        result = backward(self, *arguments, **named)
        probe.after_backward(self)
        return result

    @functools.wraps(iterate)
    def iterate_told(self: DataLoader[Any]) -> Any:
        probe = _here()
        if probe is not None and torch.is_grad_enabled() and not probe.knows(self):
            probe.note("loader", "", line_here())
        return iterate(self)

    @functools.wraps(length)
    def length_told(self: DataLoader[Any]) -> int:
        result = length(self)
        probe = _here()
        if probe is not None and is_users(sys._getframe(1).f_code.co_filename):
            probe.note_length(self, result)
        return result

    @functools.wraps(enter)
    def enter_told(self: torch.autocast) -> Any:
        probe = _here()
        if probe is not None and self._enabled:
            probe.note_autocast()
        return enter(self)  # type: ignore[no-untyped-call]

    @functools.wraps(save)
    def save_told(value: Any, f: Any, *arguments: Any, **named: Any) -> Any:
        probe = _here()
        if probe is not None and isinstance(f, str | os.PathLike):
            probe.note("opened", os.path.abspath(f), line_here())
        return save(value, f, *arguments, **named)

    torch.Tensor.backward, DataLoader.__iter__ = backward_told, iterate_told  # type: ignore[method-assign]
    torch.save = save_told  # type: ignore[assignment]
    torch.autocast.__enter__ = enter_told  # type: ignore[method-assign]
    DataLoader.__len__ = length_told  # type: ignore[method-assign]


@functools.lru_cache(maxsize=1)
def _hear_of_files() -> None:
    """Let Python report files that are opened for writing, until this process ends."""
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or (probe := _here()) is None:
        return
    path, _, flags = arguments
    if (
        not isinstance(path, str)
        or not isinstance(flags, int)
        or not flags & (os.O_WRONLY | os.O_RDWR)
    ):
        return
    if path.startswith(("/dev/", "/proc/", probe.folder)) or "__pycache__" in path:
        return
    _local.probe = None  # what notes it is none of the user's
    try:
        if line := line_here():
            probe.note("opened", os.path.abspath(path), line)
    finally:
        _local.probe = probe
