"""A worker that joins while others gather: it goes through their last batch once more, without its update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from steepest.loop.kept import pack, unpack


class Joins(Protocol):
    """What is asked of a loop that stands in."""

    def last_batch(self) -> Any:
        """Return the batch of the step before."""
        ...

    def take_arrived(self, *, after_step: bool) -> None:
        """Set the state that has arrived, now that all is done that the others have done before."""
        ...

    def enter_after(self) -> None:
        """Note that the loop is behind a step, as the others are."""
        ...


class StandIn:
    """The part of a loop that does not count: one batch, whose steps and reports are left out.

    Args:
        loop: that stands in.

    Attributes:
        at: where the others gather: "after" a step, or at the "end" of an epoch; empty where the loop counts.
    """

    def __init__(self, loop: Joins) -> None:
        self.at = ""
        self._loop, self._given = loop, False

    def begin(self, at: str) -> None:
        """Stand in from now on, up to the end of a step, or of an epoch."""
        self.at, self._given = at, False

    def next_batch(self) -> tuple[Any] | None:
        """Return the batch, in a tuple, if the loop has not seen it; else end standing in and return None."""
        if self.at and not self._given:
            self._given = True
            return (self._loop.last_batch(),)
        if self.at:
            self._end()
        return None

    def step(self) -> bool:
        """Return whether a step of the optimizer is left out; the first ends standing in behind a step."""
        if not self.at:
            return False
        if self.at != "end":
            self._end()
            self._loop.enter_after()
        return True

    def _end(self) -> None:
        at, self.at = self.at, ""
        self._loop.take_arrived(after_step=at == "after")


class Whereabouts(Protocol):
    """What is asked of the gatherings of a loop."""

    among_batches: bool  # whether it has gathered elsewhere than at an epoch's end


class Marked(Protocol):
    """What is asked of a loop in which others may gather."""

    @property
    def size(self) -> int:
        """The number of workers."""
        ...

    meets: bool
    batches: int


class Boundary:
    """The state from which another worker takes part in what is gathered here.

    Args:
        loop: whose state it is.
        gatherer: of its gatherings.
        state_at: returns the state at the end of a step, or of an epoch.
    """

    def __init__(
        self, loop: Marked, gatherer: Whereabouts, state_at: Callable[..., dict[str, Any]]
    ) -> None:
        self._loop, self._gatherer, self._state_at = loop, gatherer, state_at
        self._state: torch.Tensor | dict[str, Any] | None = None

    def leave(self) -> None:
        """Have no such state from now on."""
        self._state = None

    def mark(self, at: str, whole: bool = False) -> None:
        """Keep the state from which a worker that joins takes part in what is gathered from now on.

        Args:
            at: see `steepest.loop.loop_states.LoopStates.state_at`.
            whole: whether objects that the user keeps belong to it: they may be large, and are kept in any case where
                the loop is known to gather among its batches, and at an epoch's end.
        """
        self._state = None
        loop = self._loop
        if loop.size > 1 and loop.meets:
            whole = whole or at == "end" or self._gatherer.among_batches
            state = self._state_at(at, objects=whole)
            self._state = pack(state, loop.batches) if whole else state

    def state(self, kept: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the state, None where there is none; `kept`: that of the objects that the user keeps now."""
        if self._state is None:
            return None
        if isinstance(self._state, torch.Tensor):
            return unpack(self._state)
        return {**self._state, "kept": {**kept, **self._state["kept"]}}
