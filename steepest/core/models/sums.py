"""Losses that add up the samples of a batch where a mean is expected, found in their graph."""

from __future__ import annotations

from typing import Any

import torch

#: why a sum is refused; takes the name of what adds up, and what to do
SUMMED = (
    "the loss adds up the samples of its batch ({}) and is taken for their mean, with which the "
    "updates of two workers would be half as large as those of one: {}"
)
#: what is added where it is not sure that samples are added up
PERHAPS = ", if its rows are samples"
_SUM = 2  # what torch's loss functions save for reduction="sum"
#: nodes that leave it open how their result depends on the number of samples
_TRANSPARENT = (
    "AddBackward", "SubBackward", "NegBackward", "ViewBackward", "ReshapeBackward",
    "UnsafeViewBackward", "SqueezeBackward", "UnsqueezeBackward", "ToCopyBackward",
    "CloneBackward", "AliasBackward",
)  # fmt: skip


def summed_by(loss: torch.Tensor, samples: int) -> tuple[str, bool] | None:
    """Return the operation that sums a batch's samples, so that the loss grows with them, and if that is sure."""
    # It is for torch's loss functions, not for a `sum()`, which may be over something else; None for a mean, and for a
    # batch of one. It looks at the graph from the loss to the first operations that reduce; where a division or product
    # on the way may make a mean of a sum, nothing is found.
    if samples < 2:
        return None
    nodes: list[Any] = [loss.grad_fn]
    alone = True
    while nodes:
        node = nodes.pop()
        name = node.name() if node is not None else ""
        if name.startswith(_TRANSPARENT):
            further = [each for each, _ in node.next_functions if each is not None]
            alone &= len(further) == 1
            nodes += further
        elif getattr(node, "_saved_reduction", None) == _SUM:
            rows = node._saved_self.shape[:1]
            if rows and rows[0] % samples == 0:
                return name.partition("Backward")[0], True
        elif name.startswith("SumBackward") and alone:
            sizes: Any = getattr(node, "_saved_self_sym_sizes", None)
            if sizes and sizes[0] == samples:
                return "sum()", False
    return None
