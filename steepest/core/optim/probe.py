"""What an optimizer's update depends on, found by trying it on small tensors.

Servers update parameters chunk by chunk. Whether they may is found out with the hyperparameters of
every parameter group, and with gradients of many sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steepest.core.optim.own_values import own_values, same, taken
from steepest.core.optim.portable import pack_all
from steepest.core.optim.torch_without_compiler import take_step
from steepest.errors import ConfigurationError

Shape = tuple[int, ...]
#: Makes an optimizer over some parameters, each with the index of its group.
Build = Callable[[list[tuple[int, torch.nn.Parameter]]], torch.optim.Optimizer]

# Sizes of gradients: norms may be clipped at any, and estimates grow from small values.
_SIZES = (1.0, 1.0, 1.0, 1e3, 1e-3, 1e6, 1e-6, 1.0, 10.0, 0.1, 1.0, 1.0)
# A rule may change for large dimensions, such as 128, or after many steps, such as 100 of warm-up:
# each of these trials is (largest dimension, sizes of gradients).
_TRIALS = ((160, _SIZES), (4, (1.0, 0.1, 10.0, 1.0) * 32))
_SHORT_TRIALS = ((6, _SIZES[:3]),)  # of optimizers that are known to have no such rules
_MOST_ELEMENTS = 1 << 15


@dataclass(frozen=True)
class Findings:
    """The dependencies of an optimizer's updates, as trials have shown them."""

    elementwise: bool  # each element's update depends on it alone: a tensor may be split
    coupled: bool  # whether a parameter's update depends on other parameters
    # keys (see `own_values`) of values that a step changes beside parameters and their state
    own: frozenset[str]


class _Copy:
    """An optimizer that `build` makes over some of the parameters, each value with the index of its group."""

    def __init__(self, build: Build, values: Sequence[tuple[int, torch.Tensor]]) -> None:
        slots = [(group, torch.nn.Parameter(value.clone())) for group, value in values]
        self.parameters = [parameter for _, parameter in slots]
        self.optimizer = build(slots)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Take a step with some gradients, which stay as they are."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        take_step(self.optimizer)


class _Trial:
    """Copies of an optimizer that take the same steps over all parameters, over each, and over parts; see `_Copy`."""

    def __init__(self, build: Build, values: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.whole = _Copy(build, values)
        self.coupled = False
        self.elementwise = True
        self._values = values
        self._before = self._own()
        self._alone: list[_Copy] = []
        self._parts: list[list[_Copy]] = []
        try:
            self._alone = [_Copy(build, [value]) for value in values]
        except Exception:  # noqa: BLE001 - the user's optimizer, which may want all of its groups
            self.coupled = True
        try:
            self._parts = [
                [_Copy(build, [(group, part)]) for part in _in_parts(value)]
                for group, value in values
            ]
        except Exception:  # noqa: BLE001 - the user's optimizer, which may want the tensor's shape
            self.elementwise = False

    def _own(self) -> list[dict[str, Any]]:
        optimizer = self.whole.optimizer
        return [
            {key: taken(value) for key, value in own_values(optimizer, group).items()}
            for group in range(len(optimizer.param_groups))
        ]

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Take a step with all copies, and compare them; raises what the whole optimizer raises."""
        random = torch.get_rng_state()
        self.whole.step(gradients)
        torch.set_rng_state(random)  # those of one parameter draw the same numbers, one by one
        if not self.coupled:
            self.coupled = not self._agree_alone(gradients)
        if self.elementwise:
            self.elementwise = not self.coupled and self._agree_in_parts(gradients)

    def _agree_alone(self, gradients: Sequence[torch.Tensor]) -> bool:
        try:
            for copy, gradient in zip(self._alone, gradients, strict=True):
                copy.step([gradient])
        except Exception:  # noqa: BLE001 - the user's optimizer
            return False
        pairs = zip(self._alone, self.whole.parameters, strict=True)
        return all(same(taken(copy.parameters[0]), taken(expected)) for copy, expected in pairs)

    def _agree_in_parts(self, gradients: Sequence[torch.Tensor]) -> bool:
        for copies, gradient, expected in zip(
            self._parts, gradients, self.whole.parameters, strict=True
        ):
            try:
                for copy, part in zip(copies, _in_parts(gradient), strict=True):
                    copy.step([part])
            except Exception:  # noqa: BLE001 - the user's optimizer, which may want another shape
                return False
            whole = expected.detach().flatten()
            joined = torch.cat([copy.parameters[0].detach() for copy in copies])
            nothing = 1e-12 * float(whole.abs().nan_to_num().max()) if whole.numel() else 0.0
            if not torch.allclose(joined, whole, rtol=1e-9, atol=nothing, equal_nan=True):
                return False
        return True

    def changed(self) -> frozenset[str]:
        """Return the keys of values that steps have changed beside parameters and their state.

        Afterwards `elementwise` also tells whether state can be split with its parameter.

        Raises:
            TypeError: a value cannot be carried.
        """
        optimizer, changed_keys = self.whole.optimizer, set[str]()
        for group, (before, now) in enumerate(zip(self._before, self._own(), strict=True)):
            keys = {key for key, value in now.items() if not same(before.get(key), value)}
            values = own_values(optimizer, group)
            pack_all({key: values[key] for key in keys})
            changed_keys |= keys
        for key, state in optimizer.state.items():
            if not any(key is parameter for parameter in self.whole.parameters):
                raise TypeError(f"state of {key!r:.80}, which is no parameter")
            if any(_is_flat(value, key) for value, plain in pack_all(state).values() if not plain):
                self.elementwise = False
        return frozenset(changed_keys)

    def counts_alike(self, keys: frozenset[str]) -> bool:
        """Return whether the values of these keys change for each parameter alone as for all together."""
        if self.coupled:
            return False
        together = self._own()
        return all(
            same(together[group].get(key), taken(value))
            for (group, _), copy in zip(self._values, self._alone, strict=True)
            for key, value in own_values(copy.optimizer, 0).items()
            if key in keys
        )


def try_optimizer(
    name: str, groups: Sequence[Sequence[Shape]], build: Build, *, is_known: bool
) -> Findings:
    """Find out what an optimizer's updates depend on.

    Args:
        name: of the optimizer, for errors.
        groups: the shapes of the parameters of each group.
        build: makes the optimizer over parameters of these groups.
        is_known: whether it is known to couple no parameters, to have one rule for tensors of all
            sizes and for all steps, and to keep nothing but tensors and numbers.

    Raises:
        ConfigurationError: it cannot be made or stepped, or keeps a value that cannot be carried.
    """
    elementwise, coupled, own = True, False, frozenset[str]()
    for largest, sizes in _SHORT_TRIALS if is_known else _TRIALS:
        shapes = [_examples(each, largest) for each in groups]
        if not is_known:  # each group has two, which may depend on each other
            shapes = [each * (2 if len(each) == 1 else 1) for each in shapes]
        trial, changed = _tried(name, shapes, build, sizes)
        coupled |= trial.coupled or not trial.counts_alike(changed)
        elementwise &= trial.elementwise
        own |= changed
    return Findings(elementwise and not coupled, coupled, own)


def _tried(
    name: str, groups: Sequence[Sequence[Shape]], build: Build, sizes: Sequence[float]
) -> tuple[_Trial, frozenset[str]]:
    """Return a trial after steps with gradients of some sizes, and the keys of changed state; see `try_optimizer`."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(list(shape), generator=generator, dtype=torch.float64)

    values = [(group, random(shape)) for group, shapes in enumerate(groups) for shape in shapes]
    with torch.random.fork_rng(devices=[]):
        try:
            trial = _Trial(build, values)
            for size in sizes:
                trial.step([random(value.shape) * size for _, value in values])
        except Exception as error:
            raise ConfigurationError(
                f"{name} cannot be rebuilt or stepped on a server ({type(error).__name__}: {error}): "
                "use an optimizer whose step() needs no closure, takes dense gradients, and whose "
                "constructor takes its defaults"
            ) from error
    try:
        return trial, trial.changed()
    except TypeError as error:
        raise ConfigurationError(
            f"{name} keeps {error}: it would be lost in checkpoints and where servers change; keep "
            "tensors, numbers, texts, None, and lists and dicts of these"
        ) from error


def _examples(shapes: Sequence[Shape], largest: int) -> list[Shape]:
    """Return the largest shape of each number of dimensions, with dimensions cut to a size."""
    by_dimensions: dict[int, Shape] = {}
    for shape in sorted(shapes, key=math.prod):
        by_dimensions[len(shape)] = shape
    examples = []
    for shape in by_dimensions.values():
        room, cut = _MOST_ELEMENTS, []
        for size in shape:
            cut.append(max(1, min(size, largest, room)))
            room //= cut[-1]
        examples.append(tuple(cut))
    return examples if any(math.prod(shape) > 1 for shape in examples) else [*examples, (4, 6)]


def _is_flat(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether state with as many elements as a parameter has another shape than the parameter.

    If the parameter were split, it could not be distinguished from state of the parameter's shape.
    """
    return value.numel() == parameter.numel() > 1 and value.shape != parameter.shape


def _in_parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return two parts of a tensor, flattened; one of a single element."""
    flat = value.flatten()
    cut = flat.numel() // 3
    return [flat[:cut], flat[cut:]] if cut else [flat]
