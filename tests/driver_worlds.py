"""What one process would have after a driver's calls: the states in which an interrupted job may be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steepest.core.data.sampler import SamplePlan, even_share
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.tables.modules.torch_model import TorchModel
from tests.reference import samples
from tests.simulation.run import pause

Vector = NDArray[np.float64]

_CLOSE = 1e-9
_INPUTS, _OUTPUTS = 3, 2
_RATE = 0.05
_ROUND = 2  # batches of a step under local SGD
_dice = random.Random()  # of the running time of computations
_QUICK, _PLAIN, _SLOW = (1e-4, 3e-3, 3e-2), (0.05, 0.3), (30.0,)
_paces: list[tuple[float, ...]] = [*[_QUICK] * 6, *[_PLAIN] * 5, _SLOW]
_pace = [0]


@contextmanager
def paced(seed: int) -> Iterator[None]:
    """Draw the virtual time that computations take in a block from a seed."""
    _dice.seed(seed)
    _pace[0] = _dice.randrange(len(_paces))
    yield


def _timed_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    pause(_dice.choice(_paces[_pace[0]]))
    return torch.nn.functional.mse_loss(output, target)


def _timed_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    pause(_dice.choice(_paces[_pace[0]]))
    return output.mean()


class Sum(torch.nn.Module):
    """A module that returns the sum of its weights: the gradient of each is 1, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.0, 1.0, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() + 0.0 * x.sum(1)


@dataclass(frozen=True)
class World:
    """A state of a job.

    Attributes:
        step: steps so far.
        epoch, offset: where the next step begins in the data.
        weights, momentum: of all parameters, one after the other.
        rate: the learning rate.
        workers: their number.
        mode: how a step is made: "sync", "local", "async", or "constant" for one update of the model
            with constant gradients.
        extra: updates that workers have made of the next step, where each gradient is an update by
            itself and a call was interrupted.
    """

    step: int
    epoch: int
    offset: int
    weights: Vector
    momentum: Vector
    rate: float
    workers: int
    mode: str
    extra: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal states."""
        place = self.step, self.epoch, self.offset, self.rate, self.workers, self.mode
        return (*place, self.extra, self.weights.tobytes(), self.momentum.tobytes())


@dataclass(frozen=True)
class Family:
    """A model, and the strategies under which its weights are those of one process.

    Attributes:
        name: "sync", "local" or "async".
        count: of samples.
        global_batch: samples of one batch; None for as many as the workers make.
        momentum: of the optimizer.
        shapes: of the parameters, by name.
    """

    name: str
    count: int
    global_batch: int | None
    momentum: float
    shapes: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"weight": (_OUTPUTS, _INPUTS), "bias": (_OUTPUTS,)}
    )

    @property
    def data(self) -> tuple[torch.Tensor, ...]:
        """The inputs and targets."""
        return _data(self.count)

    def mode(self, strategy: Any) -> str:
        """Return how a world steps under a strategy."""
        if self.name == "async":
            is_async = isinstance(strategy, ParameterServerStrategy) and strategy.mode != "sync"
            return "async" if is_async else "constant"
        return self.name

    def creator(self) -> Callable[[int, int], TorchModel]:
        """Return a `model_creator`."""
        constant, momentum = self.name == "async", self.momentum

        def create(worker_index: int, device_index: int) -> TorchModel:
            module = Sum() if constant else torch.nn.Linear(_INPUTS, _OUTPUTS).double()
            return TorchModel(
                module,
                loss=_timed_mean if constant else _timed_error,
                data=self.data,
                batch_size=2 if constant else 6,
                optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=_RATE, momentum=momentum),
            )

        return create

    def begin(self, workers: int, strategy: Any) -> World:
        """Return the state before the first step."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = Sum() if self.name == "async" else torch.nn.Linear(_INPUTS, _OUTPUTS).double()
        weights = self.vector({n: p.detach() for n, p in module.named_parameters()})
        nothing = np.zeros_like(weights)
        return World(0, 0, 0, weights, nothing, _RATE, workers, self.mode(strategy))

    def some(self, seed: int) -> Vector:
        """Return random weights."""
        return np.random.default_rng(seed).normal(size=8)

    def vector(self, weights: Mapping[str, torch.Tensor]) -> Vector:
        """Return weights, one after the other."""
        return np.concatenate([weights[name].numpy().reshape(-1) for name in self.shapes])

    def named(self, vector: Vector) -> dict[str, torch.Tensor]:
        """Return weights by name."""
        found, at = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            found[name] = torch.from_numpy(vector[at : at + size].reshape(shape).copy())
            at += size
        return found

    def loss(self, weights: Vector, index: Any = slice(0, 7)) -> float:
        """Return the loss of some samples."""
        if self.name == "async":
            return float(weights.sum())
        x, y = (column[index].numpy() for column in self.data)
        return float(((_output(weights, x) - y) ** 2).mean())

    # -- steps ---------------------------------------------------------------------------------

    def after(self, world: World) -> World:
        """Return the state after one more step."""
        if self.name == "async":
            updates = world.workers - world.extra if world.mode == "async" else 1
            weights = world.weights - world.rate * updates
            return replace(world, step=world.step + 1, weights=weights, extra=0)
        assert self.global_batch is not None
        updates = _ROUND if self.name == "local" else 1
        end = min(world.offset + updates * self.global_batch, self.count)
        order = _order(self.count, world.epoch)[world.offset : end]
        place = {"epoch": world.epoch, "offset": end}
        if end == self.count:
            place = {"epoch": world.epoch + 1, "offset": 0}
        if self.name == "local":
            weights, momentum = self._round(world, order), world.momentum
        else:
            momentum = self.momentum * world.momentum + self._gradient(world.weights, order)
            weights = world.weights - world.rate * momentum
        return replace(world, step=world.step + 1, weights=weights, momentum=momentum, **place)

    def begun(self, world: World) -> list[World]:
        """Return the states in which an interrupted call may leave a job after its last whole step."""
        most = world.workers if world.mode == "async" else 1
        return [
            replace(world, weights=world.weights - world.rate * n, extra=world.extra + n)
            for n in range(most - world.extra)
        ]

    def _round(self, world: World, order: Any) -> Vector:
        """Return the mean of the workers' weights after each has trained with its samples."""
        parts, found = world.workers * _ROUND, []
        for worker in range(world.workers):
            weights = world.weights
            for part in range(worker * _ROUND, (worker + 1) * _ROUND):
                begin, end = even_share(len(order), part, parts)
                weights = weights - world.rate * self._gradient(weights, order[begin:end])
            found.append(weights)
        return np.mean(found, axis=0)

    def _gradient(self, weights: Vector, index: Any) -> Vector:
        """Return the gradient of the mean squared error over some samples."""
        x, y = (column[index].numpy() for column in self.data)
        error = 2.0 * (_output(weights, x) - y) / y.size
        return np.concatenate([(error.T @ x).reshape(-1), error.sum(0)])


def _output(weights: Vector, x: Vector) -> Vector:
    matrix, bias = weights[: _INPUTS * _OUTPUTS], weights[_INPUTS * _OUTPUTS :]
    return x @ matrix.reshape(_OUTPUTS, _INPUTS).T + bias


@lru_cache
def _data(count: int) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = samples(count, _INPUTS, _OUTPUTS)
    return found


@lru_cache
def _order(count: int, epoch: int) -> Any:
    return SamplePlan(count, 1, 0).permutation(epoch)


FAMILIES = {
    "sync": Family("sync", 31, 6, 0.9),
    "local": Family("local", 24, 6, 0.0),
    "async": Family("async", 3000, None, 0.0, {"weight": (8,)}),
}


class Worlds:
    """The states in which a job may be, after calls of which some were interrupted.

    Attributes:
        all: the states.
        lost, about: when there is none any more: what did not hold, and how.
        earlier: states in which it was before, to explain what is seen.
    """

    def __init__(self, family: Family, worlds: Iterable[World]) -> None:
        self.family = family
        self.all = _distinct(worlds)
        self.lost = self.about = ""
        self.earlier: list[World] = []

    def steps(self) -> set[int]:
        """Return the numbers of steps that there may have been."""
        return {world.step for world in self.all}

    def add(self, worlds: Iterable[World]) -> None:
        """Allow further states."""
        self.all = _distinct([*self.all, *worlds])

    def took(
        self, counts: Iterable[int], resized: Iterable[int] = (), *, whole: bool = True
    ) -> None:
        """Take steps, one of some numbers of them.

        What workers had made of a step before may be a part of the first one, or none: none if the
        job has changed since.

        Args:
            counts: how many.
            whole: whether no worker has begun the step after them.
            resized: numbers of workers of which there may be one from any of these steps on.
        """
        wanted = set(counts)
        self.earlier += self.all
        found: list[World] = []
        now = _distinct([*self.all, *(replace(world, extra=0) for world in self.all)])
        for count in range(max(wanted) + 1):
            if resized:
                now = _distinct([*now, *(_other(w, n, w.mode) for w in now for n in resized)])
            if count in wanted:
                found += now if whole else [each for w in now for each in self.family.begun(w)]
            now = [self.family.after(world) for world in now]
        found += [_other(world, n, world.mode) for world in found for n in resized]
        self.all = _distinct(found)

    def change(self, change: Callable[[World], World], *, either: bool) -> None:
        """Change the state; with `either` it may have been left as it was."""
        changed = [change(world) for world in self.all]
        self.earlier += self.all
        self.all = _distinct([*self.all, *changed] if either else changed)

    def restored(self, saved: Worlds, *, either: bool) -> None:
        """Restore a saved state; with `either` all may have been left as it was."""
        found = [_other(old, new.workers, new.mode) for old in saved.all for new in self.all]
        self.all = _distinct([*self.all, *found] if either else found)

    # -- what is seen --------------------------------------------------------------------------

    def keep(self, holds: Callable[[World], bool], what: str, seen: object) -> None:
        """Leave out the states of which something does not hold."""
        kept = [world for world in self.all if holds(world)]
        if not kept and self.all:
            self.lost = what
            states = [f"step {w.step}, {w.workers} workers, {w.mode}" for w in self.all[:12]]
            self.about = f"saw {seen}, where there may be {states}"
        self.all = kept

    def at_step(self, step: int, what: str = "steps") -> None:
        """Leave out the states of other steps."""
        self.keep(lambda world: world.step == step, what, step)

    def have(self, weights: Mapping[str, torch.Tensor], what: str) -> None:
        """Leave out the states with other weights."""
        vector = self.family.vector(weights)
        before = self.all
        self.keep(lambda world: _close(world.weights, vector), what, "other weights")
        if not self.all and before:
            self.about += self._nearest(before, vector)

    def _nearest(self, worlds: list[World], vector: Vector) -> str:
        """Return which steps from a state of now or before would give the weights, or how far they are."""
        for world in (*worlds, *self.earlier):
            ahead = world
            for _ in range(12):
                if _close(ahead.weights, vector):
                    return f"; they are those of step {ahead.step} from step {world.step} on"
                ahead = self.family.after(ahead)
        nearest = min(float(np.abs(world.weights - vector).max()) for world in worlds)
        return f"; they differ by {nearest:.2g}"

    def lose(self, loss: float) -> None:
        """Leave out the states with another loss of the first samples."""
        self.keep(lambda world: abs(self.family.loss(world.weights) - loss) < _CLOSE, "loss", loss)


def of_size(world: World, workers: int) -> World:
    """Return a state with another number of workers."""
    return _other(world, workers, world.mode)


def under(world: World, mode: str) -> World:
    """Return a state under another strategy."""
    return _other(world, world.workers, mode)


def _other(world: World, workers: int, mode: str) -> World:
    """Return a state with other workers; what they have made of a step is no part of the next one then."""
    same = (workers, mode) == (world.workers, world.mode)
    return replace(world, workers=workers, mode=mode, extra=world.extra if same else 0)


def _close(weights: Vector, others: Vector) -> bool:
    return bool(np.abs(weights - others).max() < _CLOSE)


def _distinct(worlds: Iterable[World]) -> list[World]:
    return list({world.key: world for world in worlds}.values())
