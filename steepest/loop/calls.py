"""What a loop of a user's own calls: `prepare`, `epochs`, `report` and the like; alone they do nothing."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from steepest.core.models.step_size import step_size
from steepest.errors import ConfigurationError
from steepest.loop.bare_tensors import BareTensors, bare_tensors
from steepest.loop.closures import ByClosure, needs_closure, steps_in_workers
from steepest.loop.cursor import Cursor, Steps
from steepest.loop.each_epoch import EachEpochSource
from steepest.loop.evaluations import ask, copied
from steepest.loop.gathering import alone
from steepest.loop.kept import Kept
from steepest.loop.loaders import EvaluationLoader, TrainingLoader
from steepest.loop.model import LoopModel
from steepest.loop.own_buffers import tell_of_own_buffers
from steepest.loop.prepared import Prepared
from steepest.loop.streamed import StreamCursor
from steepest.loop.table_rows import clip_alone, connect_alone
from steepest.loop.training_data import TrainingData, training_data
from steepest.loop.user_loop import UserLoop, calling, current, seen_from
from steepest.validation import require_count, require_evaluation

_ORDER = (
    "steepest.prepare(model, optimizer, loader), and schedulers and further loaders as there are"
)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_listeners = threading.local()


class CallListener(Protocol):
    """Hears of a training function's calls of this module."""

    def calls(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take note that a function is about to be called; return the positional arguments to call it with."""
        ...

    def called(
        self, name: str, arguments: tuple[Any, ...], named: dict[str, Any], returned: Any
    ) -> Any:
        """Take note that a call has ended; return the value that the caller gets."""
        ...


@contextlib.contextmanager
def told(listener: CallListener) -> Iterator[None]:
    """Report the calling thread's calls to a listener in this context, in a worker and alone."""
    before = getattr(_listeners, "one", None)
    _listeners.one = listener
    try:
        yield
    finally:
        _listeners.one = before


def last_step() -> int | None:
    """Return the number, from 0, of the job's step that the calling function's last `optimizer.step()` took.

    None if there is none: before the first one, outside of `steepest.run`, or if the worker passed over a step
    that was committed before it came.
    """
    loop = current()
    return None if loop is None else loop.steps.last


def is_worker() -> bool:
    """Return whether the calling function runs in a worker."""
    return current() is not None


def _told(function: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(function)
    def call(*arguments: _P.args, **named: _P.kwargs) -> _R:
        listener: CallListener | None = getattr(_listeners, "one", None)
        if listener is None:
            return function(*arguments, **named)
        listened: Any = listener.calls(function.__name__, arguments)
        returned: _R = listener.called(
            function.__name__, listened, named, function(*listened, **named)
        )
        return returned

    return call


@_told
def prepare(
    *objects: Any,
    project: Callable[[str, torch.Tensor], object] | None = None,
    reduction: str = "mean",
    table_shards: int = 8,
    buffers: Mapping[str, str] | None = None,
) -> Any:
    """Share a model, its optimizer, schedulers and loaders with the job's other workers.

    Call it once, before the loop. Outside of `steepest.run` it returns what it is given; the rows of embedding
    tables (`steepest.Embedding`) are in this process then, and change with each step of the optimizer.

    In a worker the optimizer's `step` returns when the update of all workers' gradients is committed, and the new
    weights are here. Schedulers that are stepped after each of its steps count the steps of the job.

    The first loader yields this worker's share of the samples of each step. Each sample comes once per epoch,
    whichever workers die or join. Further loaders are for evaluations in the loop: a pass over one gives each
    worker its share of the samples, and `gather` joins what the workers find. A loader that you do not give stays
    as it is: each worker reads all of it.

    Args:
        objects: torch modules, torch optimizers over their parameters, a DataLoader of the training data;
            schedulers of the optimizers, and further DataLoaders. Tensors that an optimizer trains and no module
            has count as those of one more module, the last; give them only if they are a `torch.nn.Parameter`. A
            batch may have any number of steps, as many on each worker. With several optimizers each step updates
            the parameters of its own optimizer alone.
        project: called as ``project(name, values)`` after each update of a parameter, where the update is made. It
            changes the values in place, each by itself, such as ``values.clamp_(-0.01, 0.01)``; it may be given a
            part of them. Names are those of the module, or "0.weight" and "1.weight" of several. Without
            `steepest.run` it is not called.
        reduction: what the loss does with the samples of a batch: "mean", or "sum" if it adds them up. With "sum"
            the gradients of all workers are added up too.
        table_shards: parts into which the rows of embedding tables are dealt, see `TorchModel`.
        buffers: the value that stands for all workers' values of a buffer, such as
            ``{"queue": "first", "codes": "mean"}``, see `TorchModel`. Names are those of the module, or "0.queue"
            and "1.queue" of several.

    Returns:
        The same objects in the same order, a single one by itself; loaders are replaced by others.

    Raises:
        ConfigurationError: there is no module or no optimizer; an optimizer has other parameters; the sampler of a
            loader has no length, or divides samples itself; or an object cannot be shared.
    """
    loop = calling("prepare")
    modules = [each for each in objects if isinstance(each, torch.nn.Module)]
    optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
    schedulers = [each for each in objects if isinstance(each, (LRScheduler, ReduceLROnPlateau))]
    if loop is None:
        connect_alone(modules, optimizers)
        return objects[0] if len(objects) == 1 else objects
    if loop.job.is_prepared:
        raise ConfigurationError(
            "steepest.prepare() was called twice: give it everything in one call, before the loop; a further training, "
            "such as another fold's, is another steepest.run(function), in a script that is started by `python`"
        )
    loaders = [each for each in objects if isinstance(each, DataLoader)]
    tensors = [each for each in objects if isinstance(each, torch.Tensor)]
    _check_given(objects, (*modules, *optimizers, *schedulers, *loaders, *tensors))
    if bare := bare_tensors(modules, optimizers, tensors):
        modules.append(BareTensors(bare))
    _check_enough(modules, optimizers, schedulers)
    servers, closures = _at_servers(loop, optimizers, reduction)
    module = modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules)
    _check_reduction(reduction, loaders)
    data = None if not loaders else training_data(loaders[0], loop)
    cursor = _cursor(loop, optimizers, data)
    shares = _shares(loop, data, loaders, alike=cursor is None)
    model = LoopModel(loop, module, servers, shares, project, table_shards, buffers)
    _check_tables(model, alike=len(servers) == 1 and data is not None and not closures)
    # where workers do not wait for each other, each reads all of a further loader
    further = loaders[1:] if loop.job.kind.together else []
    made: dict[int, Any] = {id(each): EvaluationLoader(each, loop) for each in further}
    if data is not None:
        whole = cursor.whole_batch(loop.job.size) if cursor else step_size().of(data.batch_size)
        made[id(loaders[0])] = TrainingLoader(loaders[0], loop, data.size, whole)
    returned = tuple(made.get(id(each), each) for each in objects)
    sums, enter = reduction == "sum", (lambda _: None) if data is None else data.enter
    of_user = (*objects, *returned)
    if loop.job.size > 1 and not loop.job.rank:  # the others' modules do the same
        tell_of_own_buffers(modules, buffers or ())
    loop.prepare(Prepared(model, servers, schedulers, cursor, closures, sums, enter, of_user))
    return returned[0] if len(returned) == 1 else returned


def _shares(
    loop: UserLoop, data: TrainingData | None, loaders: Sequence[DataLoader[Any]], *, alike: bool
) -> TrainingData:
    """Return training data whose shares are the loop's batches; if steps are not `alike`, its steps."""
    if alike and data is not None and data.source is not None:
        return TrainingData(data.batch_size, EachEpochSource(data.source))
    batch_size = 1 if data is None else data.batch_size
    return TrainingData(batch_size, Steps(loaders[0].dataset if loaders else None, loop.load_ahead))


def _at_servers(
    loop: UserLoop, optimizers: Sequence[torch.optim.Optimizer], reduction: str
) -> tuple[list[torch.optim.Optimizer], list[tuple[int, ByClosure]]]:
    """Return the servers' optimizers, and the workers', each with the index of its stand-in on servers."""
    in_workers = steps_in_workers(optimizers)
    if in_workers and (loop.job.kind.local or not (loop.job.kind.together and reduction == "mean")):
        first = optimizers[min(in_workers)]
        why = (
            "whose step() needs a closure"
            if needs_closure(first)
            else "which shares parameters with another one"
        )
        raise ConfigurationError(
            f"{type(first).__name__}, {why}, where workers do not wait for each other, or with reduction='sum': it "
            'steps by the mean over all workers; give strategy="ps" or "allreduce", and a loss that is a mean'
        )
    every = [in_workers[at].updates if at in in_workers else o for at, o in enumerate(optimizers)]
    servers = list({id(each): each for each in every}.values())
    number = {id(each): at for at, each in enumerate(servers)}
    closures = [(number[id(each.updates)], each) for each in in_workers.values()]
    return servers, closures


def _check_given(objects: Sequence[Any], known: Sequence[Any]) -> None:
    """Check that each object is of a known kind; else ConfigurationError."""
    for each in objects:
        if not any(each is one for one in known):
            kept = (
                "; what else is to be kept with the job's state goes to steepest.register(name=object)"
                if hasattr(each, "state_dict")
                else ""
            )
            raise ConfigurationError(
                f"steepest.prepare() was given a {type(each).__name__}: give {_ORDER}{kept}"
            )


def _check_reduction(reduction: str, loaders: Sequence[DataLoader[Any]]) -> None:
    """Check the `reduction` of losses; ConfigurationError: it is not known, or does not fit the loader."""
    if reduction not in ("mean", "sum"):
        raise ConfigurationError(f"reduction={reduction!r:.80}: give 'mean' or 'sum'")
    if reduction == "sum" and loaders and loaders[0].batch_size is None:
        raise ConfigurationError(
            "reduction='sum' with a loader that has a batch_sampler, or batch_size=None: the number of samples in "
            "a whole step is unknown; divide the loss by the samples of the batch, and leave reduction out"
        )


def _check_enough(
    modules: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[LRScheduler | ReduceLROnPlateau],
) -> None:
    """Check that a module, an optimizer and those of schedulers were given.

    Raises:
        ConfigurationError: one is missing.
    """
    for what, objects in (("a torch.nn.Module", modules), ("a torch.optim.Optimizer", optimizers)):
        if not objects:
            raise ConfigurationError(f"steepest.prepare() was not given {what}: give {_ORDER}")
    for scheduler in schedulers:
        if not any(scheduler.optimizer is each for each in optimizers):
            raise ConfigurationError(
                f"steepest.prepare() was given a {type(scheduler).__name__} of another optimizer: give that optimizer "
                "beside it"
            )


def _check_tables(model: LoopModel, *, alike: bool) -> None:
    """Check that a model with embedding tables is in a loop with a step for each batch; else ConfigurationError."""
    if model.tables and not alike:
        raise ConfigurationError(
            f"embedding tables ({model.tables[0].name!r}) in a loop with several optimizers, without a loader, or with "
            "step(closure): give one optimizer that needs no closure, and a loader"
        )


def _cursor(
    loop: UserLoop, optimizers: Sequence[torch.optim.Optimizer], data: TrainingData | None
) -> Cursor | None:
    """Return the place in the batches that all workers go through; None where each has its own shares."""
    if not loop.job.kind.together or loop.job.kind.local:
        _check_alone(loop, optimizers, data)
        return None
    whole = step_size().samples
    if data is None:
        if whole is not None:
            raise ConfigurationError(
                f"global_batch_size={whole} with a loop without a loader, which makes its data itself: leave it out, "
                "and let each worker make its part of them, by steepest.size()"
            )
        return Cursor(None, 1, loop.job.kind.seed)
    if data.source is None:
        assert data.stream is not None
        return StreamCursor(data.stream, loop.job.kind.seed, whole)
    return Cursor(data.source, data.batch_size, loop.job.kind.seed, whole)


def _check_alone(
    loop: UserLoop, optimizers: Sequence[torch.optim.Optimizer], data: TrainingData | None
) -> None:
    """Check that a worker can go through shares of its own: one optimizer, a step for each; else ConfigurationError."""
    if len(optimizers) > 1:
        what = "several optimizers"
    elif data is None:
        what = "a loop without a loader"
    elif data.size is None:
        what = "an iterable data set without __len__"
    else:
        return
    if loop.job.kind.local:
        raise ConfigurationError(
            f'{what} with strategy="local": each batch of a loader is one update of the worker\'s own there, of a '
            'single optimizer; give strategy="ps" or "allreduce"'
        )
    raise ConfigurationError(
        f"{what} where workers do not wait for each other: all of them are to take the same steps; give "
        'strategy="ps" or "allreduce"'
    )


@_told
def register(**objects: Any) -> Any:
    """Keep objects with the job's state: in snapshots, in checkpoints, and for workers that join later.

    Call it before `epochs`, which gives a worker that joins the values that the others have. You need not register
    what you gave `prepare`.

    An object may differ from worker to worker, such as a hidden state. A run that goes on from a checkpoint gives
    each worker its own value; the replacement of a dead worker gets another worker's.

    Args:
        objects: by name: anything with `state_dict` and `load_state_dict`, such as a GradScaler or a module that
            has the mean of weights; numbers and text, such as a best accuracy; tensors, arrays, lists, dicts,
            sets, deques, random generators, and objects of plain Python classes, in each other too. They stay the
            same objects: your script goes on with its own variable.

    Returns:
        An object with these as attributes. To change a number or a text, set the attribute.

    Raises:
        ConfigurationError: an object cannot be kept; the message names it and the way to it. Or `register` is
            called twice, or in the loop.

    Example:
        >>> kept = register(best=0.0)
        >>> kept.best = max(kept.best, 0.7)
        >>> kept.best
        0.7
    """
    loop = calling("register")
    return Kept(objects) if loop is None else loop.register(objects)


@_told
def epochs(count: int, end: int | None = None) -> Iterable[int]:
    """Return the numbers of the epochs of a loop: from 0 to `count` - 1, or from `count` to `end` - 1.

    A worker that joins a job later begins with the epoch in which the job is; the loader yields the rest of that
    epoch. Outside of `steepest.run` it is ``range(count)``, or ``range(count, end)``.

    Args:
        count: the number of epochs; with `end`, the number of the first one.
        end: one more than the number of the last epoch, at least `count`.

    Example:
        >>> list(epochs(3)), list(epochs(1, 3))
        ([0, 1, 2], [1, 2])
    """
    if end is None:
        first, count = 0, require_count("epochs", count)
    else:
        first = require_count("the first epoch", count, 0)
        count = require_count("the end of epochs", end, first + 1) - first
    loop = calling("epochs")
    return range(first, first + count) if loop is None else loop.epochs(count, first)


@_told
def report(**values: Any) -> None:
    """Report numbers, such as a loss, to the driver, which takes their means over the workers by samples.

    A value counts with the samples that this worker has taken since its last report, or with the weight that
    `weight` gave them. Workers do not wait for each other. Outside of `steepest.run` nothing happens.

    Args:
        values: numbers, or tensors without dimensions, by name.
    """
    if (loop := calling("report")) is not None:
        loop.report(values)


def evaluate(function: Callable[..., Any], *arguments: Any) -> dict[str, float] | None:
    """Evaluate a copy of the model, or of anything else, in a process of its own, while training goes on.

    All workers call it at the same place of the loop. The worker with rank 0 copies the function, its arguments and
    all that it refers to, such as the model, as they are now; loaders given to `prepare` are copied as loaders of
    all samples. The process has no GPU, and tensors are copied to the memory of the CPU. What the function returns
    becomes a row of the history with the number of steps before the call, and goes to `Callback.on_evaluation`;
    the end of `steepest.run` waits for it. Evaluations are made one after the other: a call while one is under way
    waits in the driver, and training with it.

    If the process dies, another one evaluates the copy again. If worker 0 dies before the driver has the copy, or
    if the program ends, the evaluation is left out.

    Outside of `steepest.run` the copy is evaluated at once, in this process.

    Args:
        function: returns numbers by name, among which "loss" is the evaluation's loss. Gradients are off in it.
        arguments: of the function.

    Returns:
        The numbers, outside of `steepest.run`; None in a worker.

    Raises:
        ConfigurationError: something cannot be copied; the model has embedding tables; a worker calls it before
            `epochs`; or outside of `steepest.run` the function returns no numbers. In a worker `steepest.run` raises
            what the function raises.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> evaluate(lambda model, data: {"parameters": model.weight.numel() + len(data)}, model, [1, 2])
        {'parameters': 4.0}
    """
    require_evaluation(function, arguments)
    if (loop := calling("evaluate")) is None:
        return copied(function, arguments).values()
    ask(loop, function, arguments)
    return None


@_told
def weight(value: float) -> None:
    """Set the weight of the present batch in means over workers and batches, such as its number of tokens.

    By default a batch weighs as much as it has samples. The loss has to be the mean over the same weight. Outside
    of `steepest.run` nothing happens.

    Args:
        value: zero or more.
    """
    if (loop := calling("weight")) is not None:
        loop.weights.say(value)


def clip_grad_norm_(parameters: Any, max_norm: float) -> torch.Tensor:
    """Clip the gradient of the whole batch by its norm, as `torch.nn.utils.clip_grad_norm_` does in one process.

    Call it between backward() and step(). What is clipped is the mean over the workers, where it is applied;
    torch's own function would clip each worker's gradient by itself. Outside of `steepest.run` it is torch's, with
    the rows of embedding tables.

    Args:
        parameters: all that an optimizer trains: with several, each call is for the next step of one.
        max_norm: the greatest norm.

    Returns:
        The norm of this worker's own gradient.

    Raises:
        ConfigurationError: `parameters` are not all of one optimizer's; `max_norm` is not positive; or the
            strategy has backup workers.
    """
    loop = calling("clip_grad_norm_")
    if loop is None:
        return clip_alone(parameters, max_norm)
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return loop.steps.clip_norm(tensors, max_norm)


@_told
def gather(value: Any) -> Any:
    """Return the values of all workers, joined: the same on each of them.

    All workers call it equally often in the same order, and it waits for the last one. Workers may give any number
    of rows, zero too. With one worker, and outside of `steepest.run`, it returns what it is given, with numbers as
    tensors of one row.

    Tensors are joined along their first dimension, by the workers' ranks. If each worker gives a row for each
    sample that it has had in this batch, or in this pass of a loader for evaluations, rows are in the order of the
    samples. The gradient of the mean of all workers' losses goes through it.

    Args:
        value: tensors, arrays, numbers, lists of numbers or texts; metrics of TorchMetrics, instead of each of
            which it returns one over all workers' samples; dicts, lists and tuples of these.

    Raises:
        ConfigurationError: the value is of another form, or not of the same form on all workers; it is called
            before `epochs`; or workers do not wait for each other (``strategy="async"``, rounds of a quorum or a
            pace).

    Example:
        >>> gather({"right": 7, "scores": torch.zeros(3, 2)})["right"]
        tensor([7])
    """
    loop = calling("gather")
    return alone(value) if loop is None else loop.gatherer.gather(value)


def rank() -> int:
    """Return the number of this worker, from 0; 0 outside of `steepest.run`.

    Example:
        >>> rank(), size()
        (0, 1)
    """
    return _of("rank", 0)


@_told
def leaving() -> float | None:
    """Return when this worker's node will be removed; None if no removal is announced, and outside of `steepest.run`.

    A cloud announces it, or an administrator; the job then starts a worker elsewhere, which goes on in this one's
    place after some step. The runtime is asked once a second at most. Workers may hear of it at different steps,
    and those of other nodes never: to have all workers act on it, `gather` each one's value.

    Returns:
        The seconds of `time.time` at that moment; `math.inf` if none was said.

    Example:
        >>> leaving() is None
        True
    """
    loop = calling("leaving")
    return None if loop is None else loop.notices.leaving()


@_told
def size() -> int:
    """Return the number of workers; 1 outside of `steepest.run`. It may change while the job runs."""
    return _of("size", 1)


def _of(name: str, alone: int) -> int:
    loop = seen_from(name)
    number: int = alone if loop is None else getattr(loop.job, name)
    return number
