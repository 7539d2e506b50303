"""Passes on the weights that one gradient leads to, among the members of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from steepest.core.messages.gradients import Weights
from steepest.core.tensors.layout import ParameterLayout
from steepest.strategies.process_groups.group import Await, Broadcast, Program
from steepest.strategies.process_groups.reduction import OwnGradient, Sums, continue_after


class MadeChunk(NamedTuple):
    """A chunk of new weights, as the own server has made it."""

    payload: torch.Tensor  # flat uint8; it is not written to before the next version is made
    skipped: bool  # whether the update was left out, because of NaN or infinity
    made: torch.Event | None = None  # on its GPU, behind what writes it, see `continue_after`


class NewWeights:
    """Passes on, once they are made, the chunks that not every worker's server holds, from the first server of each.

    A worker whose server holds a chunk has it from there. First layers come first, which lie in the last chunks: the
    next forward pass begins with them.

    Args:
        layout: of the model.
        holders: by chunk, the servers that hold it.
        worker: the rank of this member.
        size: the number of members.
        own: the gradient of this member.
        sums: memory in which the gradient was added up; that of a chunk is free once its weights are made.
        made: by version and chunk, the weights that the own server has made; those passed on are removed.
        bring: is given the root and a chunk's weights, which are lent from the sums' memory.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        holders: Sequence[Sequence[int]],
        worker: int,
        size: int,
        own: OwnGradient,
        sums: Sums,
        made: dict[tuple[int, int], MadeChunk],
        bring: Callable[[int, Weights, torch.Tensor], None],
    ) -> None:
        self._layout, self._holders, self._worker, self._size = layout, holders, worker, size
        self._own, self._sums, self._made, self._bring = own, sums, made, bring
        self.chunk = -1  # that is awaited or passed on, for errors
        self.doing = "passing on new weights among"

    def program(self) -> Program:
        """Yield the operations; see `Program`. A gradient that is computed anew has none."""
        if self._own.cancelled:
            return
        version = self._own.pulled + 1
        for chunk in reversed(self._layout.dense_chunks):
            holders = self._holders[chunk]
            if len(holders) == self._size:
                continue
            self.chunk = chunk
            memory, elements, flags = self._sums.of(chunk)
            if self._worker in holders:
                key = version, chunk
                yield Await(lambda key=key: key in self._made)  # type: ignore[misc]
                payload, skipped, made = self._made.pop(key)
                continue_after(made, elements)
                elements.copy_(payload.view(elements.dtype))
                flags.fill_(float(skipped))
            yield Broadcast(memory, holders[0], f"the new chunk {chunk}")
            if self._worker not in holders:
                self._sums.lent.add(chunk)
                weights = Weights(
                    self._own.generation,
                    0,
                    version,
                    chunk,
                    skipped=bool(flags.any()),
                )
                self._bring(holders[0], weights, elements.view(torch.uint8))
