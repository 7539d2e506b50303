"""What a loss makes of its batch, read off the graph of operations by which its gradient is computed."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

#: why a sum is refused; to be formatted with the operation that adds up, and what to do
SUMMED = (
    "the loss adds up the samples of its batch ({}) and is taken for their mean, with which the "
    "updates of two workers would be half as large as those of one: {}"
)
#: appended if it is not certain that samples are added up
PERHAPS = ", if its rows are samples"

#: why a mean by weights is warned of
WEIGHED = (
    "the loss is a mean over {:g} where the batch has {} targets ({}): it has class weights, or ignores some. Workers' "
    "gradients are averaged by samples, which is not one process's mean: return (loss, weight), with that number as "
    "the weight"
)

_NO_MEAN = 0.5  # a sum of three or more samples times this factor or more is not taken for a mean
_REDUCTIONS = ("none", "mean", "sum")  # as torch's loss functions number them
#: Operations on single numbers that are linear, or choose one of them.
_LINEAR = (
    *("Add", "Sub", "Rsub", "Neg", "View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze"),
    *("ToCopy", "Permute", "Clone", "Alias", "Select", "Unbind", "Where", "NanToNum", "Expand"),
)
_PRODUCTS = ("Dot", "Bmm")  # sums of squares, where both factors have a gradient
#: Operations that make one number of many, of which it is neither the sum nor the mean.
_OTHERS = (
    *("LinalgVectorNorm", "Norm", "Max", "Min", "Amax", "Amin", "Median", "Nanmedian"),
    *("Var", "Std", "Logsumexp", "Prod"),
)


class ReductionKind(enum.Enum):
    """What a reduction makes of its numbers."""

    SUM = "sum"
    MEAN = "mean"
    OTHER = "another number"


@dataclass(frozen=True)
class LossReduction:
    """An operation by which a loss makes one number of many.

    Attributes:
        name: of the operation, such as "MseLoss" or "sum()".
        kind: what it makes of them.
        rows: the length of their first dimension; 0 if they have none.
        size: how many they are.
        targets: how many they are without the dimension of classes.
        counted: of how many it is the mean; where they have weights, the sum of these.
        multiplied, divided: by what the loss multiplies and divides it.
        inside: the first function on the way to the loss that is not linear, such as "sqrt()"; "" without one.
        is_torchs: whether it is one of torch's loss functions.
    """

    name: str
    kind: ReductionKind
    rows: int
    size: int
    targets: int
    counted: float
    multiplied: float
    divided: float
    inside: str
    is_torchs: bool

    @property
    def factor(self) -> float:
        """By what the loss multiplies it."""
        return self.multiplied / self.divided

    @property
    def of_mean(self) -> float:
        """By what the loss multiplies the mean of the numbers."""
        return self.factor * (self.size if self.kind is ReductionKind.SUM else 1)


@dataclass(frozen=True)
class _Way:
    """What lies between a node and the loss, see `LossReduction`."""

    multiplied: float = 1.0
    divided: float = 1.0
    inside: str = ""


def reductions(loss: torch.Tensor) -> Iterator[LossReduction]:
    """Yield the known reductions of a loss, always in the same order for a loss that is computed in the same way.

    The search goes from the loss through operations on single numbers, to the first ones that make a number of many.

    Args:
        loss: one number, whose backward pass has not run yet.
    """
    nodes: list[tuple[Any, _Way]] = [(loss.grad_fn, _Way())]
    while nodes:
        node, way = nodes.pop()
        if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
            continue
        name = node.name().partition("Backward")[0]
        if (found := _reduction(node, name, way)) is not None:
            yield found
            continue
        further = _further(node)
        if not further or not all(_is_number(each) for each in further):
            continue
        number = _constant(node, further) if name in ("Mul", "Div") else None
        if number is not None and name == "Mul":
            way = _Way(way.multiplied * number, way.divided, way.inside)
        elif number:
            way = _Way(way.multiplied, way.divided * number, way.inside)
        elif name not in _LINEAR:
            way = _Way(way.multiplied, way.divided, way.inside or f"{name.lower()}()")
        nodes += [(each, way) for each in reversed(further)]


def _further(node: Any) -> list[Any]:
    """Return the nodes of what a node's operation was given, as far as that has a gradient."""
    return [each for each, _ in node.next_functions if each is not None]


def _is_number(node: Any) -> bool:
    """Return whether a node's operation has given a single number."""
    return all(math.prod(each.shape) == 1 for each in node._input_metadata)


def _constant(node: Any, further: list[Any]) -> float | None:
    """Return the number that a multiplication or division has beside what has a gradient; None without one."""
    number = getattr(node, "_saved_other", None)
    if len(further) > 1 or number is None:
        return None
    if isinstance(number, torch.Tensor) and number.numel() != 1:
        return None
    return float(number)


def _reduction(node: Any, name: str, way: _Way) -> LossReduction | None:
    """Return the reduction that a node is; None if it is none that is known."""
    is_torchs, kind = False, ReductionKind.OTHER
    if name in ("Sum", "Nansum", "Mean"):
        kind = ReductionKind.MEAN if name == "Mean" else ReductionKind.SUM
        sizes = getattr(node, "_saved_self_sym_sizes", None)
        shape = tuple(node._saved_self.shape if sizes is None else sizes)
    elif (reduction := getattr(node, "_saved_reduction", 0)) and hasattr(node, "_saved_self"):
        is_torchs, kind = True, ReductionKind(_REDUCTIONS[reduction])
        shape = tuple(node._saved_self.shape)
    elif name in _PRODUCTS and _is_number(node) and len(_further(node)) > 1:
        kind, shape = ReductionKind.SUM, tuple(node._saved_self.squeeze().shape)
    elif name in _OTHERS and _is_number(node):
        shape = tuple(node._saved_self.shape)
    else:
        return None
    size = targets = math.prod(shape)
    if name.startswith("NllLoss"):
        targets = math.prod(shape[:1] + shape[2:]) if len(shape) > 1 else 1
    counted: float = size
    if (
        kind is ReductionKind.MEAN
        and (weight := getattr(node, "_saved_total_weight", None)) is not None
    ):
        counted = float(weight)
    return LossReduction(
        name if is_torchs else f"{name.removeprefix('Linalg').lower()}()",
        kind,
        shape[0] if shape else 0,
        size,
        targets,
        counted,
        way.multiplied,
        way.divided,
        way.inside,
        is_torchs,
    )


def weighted(parts: torch.Tensor, gradient: torch.Tensor) -> LossReduction | None:
    """Return the reduction that a backward pass of several numbers is; None if these have gradients of their own.

    Args:
        parts: the numbers.
        gradient: with which their backward pass begins.
    """
    factor = float(gradient.flatten()[0])
    if not bool((gradient == factor).all()):
        return None
    rows, size = len(parts), parts.numel()
    name = "backward(gradient)"
    return LossReduction(name, ReductionKind.SUM, rows, size, size, size, factor, 1.0, "", False)


def summed_by(loss: torch.Tensor, samples: int) -> tuple[str, bool] | None:
    """Return the operation that sums a batch's samples, so that the loss grows with them, and whether that is certain.

    It is certain for torch's loss functions, not for a `sum()`, which may be over other elements. Return None for a
    mean, and for a batch of one sample. A factor may turn the sum into a mean; with three samples or more a factor of
    a half or more does not, but then the result is not certain.
    """
    if samples < 2:
        return None
    every = list(reductions(loss))
    for each in every:
        if each.kind is not ReductionKind.SUM or each.inside:
            continue
        is_scaled = each.factor != 1
        if is_scaled and (samples == 2 or abs(each.factor) < _NO_MEAN):
            continue
        if each.is_torchs and each.rows and each.rows % samples == 0:
            return each.name, not is_scaled
        if not each.is_torchs and each.rows == samples and len(every) == 1:
            return each.name, False
    return None


def weighed_mean(loss: torch.Tensor) -> LossReduction | None:
    """Return the mean that a loss takes over another number than that of its targets; None without one."""
    for each in reductions(loss):
        is_mean = each.kind is ReductionKind.MEAN
        if is_mean and not math.isclose(each.counted, each.targets, rel_tol=1e-5):
            return each
    return None
