"""Gradients of a user's own loop that leave during its backward pass, before it calls `optimizer.step()`.

That is a guess: a second backward pass, clipping, or `zero_grad` may follow. A loop that did none of these in its
last steps is taken to do none in this one. At the step each gradient that has left is looked at. Unless all are as
they left they are taken back before they count (`steepest.core.engine.exchange.PushPull.take_back`), and
pushed as they are then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from steepest.loop.local_edits import LocalEdits
from steepest.loop.unseen import Unseen

if TYPE_CHECKING:
    from steepest.loop.step_weights import StepWeights

_FIRST, _MOST = 2, 64  # steps in a row in which a guess would have been right, before one is made
_SMALL = 1 << 16  # bytes of gradients that are compared after each guess

#: Lets an entry's gradient leave: its index, its parameter, its gradient, and the view by which it leaves.
Leave = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
#: A parameter, its gradient, and the version of that.
Seen = tuple[torch.Tensor, torch.Tensor | None, int]


class _WatchedBatch(NamedTuple):
    """The state of a batch that is watched, see `Overlap.begin`."""

    weights: StepWeights
    unseen: Unseen
    leave: Leave | None


class Overlap:
    """The gradients of one replica that leave during the user's backward passes.

    Each parameter's gradient leaves when it was accumulated as often in a batch as before the last step. The first
    guess is made after two steps in which it would have been right; each wrong one doubles that number, up to 64.

    A guess was wrong if a gradient is another tensor, or of another version, by the step; if it was accumulated
    further; if the batch weighs something else; or if the function has read what lets it change a tensor without a
    new version (`.data`, say). Values are compared too, as a check of all that: after guesses 1, 2, 4, 8 and so
    on, and after each where they are few, or on a GPU. A loop of which they are not what they were is not guessed
    at again.

    A batch is watched from `begin` to `end`; `left` says then what has left.

    Attributes:
        edits: whether the loop changes gradients behind its backward passes.
    """

    def __init__(self) -> None:
        # None while no batch is watched: torch keeps hooks where the garbage collector does not see them
        self._watched: _WatchedBatch | None = None
        self._expected: dict[
            int, int
        ] = {}  # by entry: how often it was accumulated before the last step
        self._right = 0  # steps in a row in which a guess would have been right
        self._needed = _FIRST
        self._guesses = 0  # that were made
        self._counts: dict[int, int] = {}  # as `_expected`, of the present batch
        # by entry, as it was accumulated last: parameter, gradient, its version
        self._seen: dict[int, Seen] = {}
        self._left: dict[int, torch.Tensor] = {}  # by entry: its values as they left
        self._is_guessing = False
        self._is_wrong = False
        self._never = False
        self._looks_often = True  # whether values are compared after each guess
        self._looked_at: set[int] = set()  # the entries of which that was found
        self._weight = 0.0  # with which gradients have left
        self._error: BaseException | None = None
        self.edits = LocalEdits()

    def hook(self, index: int, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Return a hook for an entry, called when its gradient was accumulated; the gradient leaves by a view."""
        return functools.partial(self._accumulated, index, view)

    def begin(self, weights: StepWeights, unseen: Unseen, leave: Leave | None) -> None:
        """Watch gradients while the user's function goes on with a batch.

        Args:
            weights: of the batch.
            unseen: notes writes that torch does not count.
            leave: lets a gradient leave; None where none may.
        """
        self._counts, self._left = {}, {}
        self._is_wrong = False
        self._is_guessing = bool(leave) and not self._never and self._right >= self._needed
        self._watched = _WatchedBatch(weights, unseen, leave)
        unseen.happened = False

    def end(self, *, raised: bool = False) -> None:
        """Stop watching; `raised`: whether the function has raised."""
        assert self._watched is not None
        unseen, self._watched = self._watched.unseen, None
        unseen.watches = False
        self._is_wrong |= unseen.happened
        if raised:
            self._seen.clear()

    def _accumulated(self, index: int, view: torch.Tensor, parameter: torch.Tensor) -> None:
        """Note that a gradient was accumulated, and let it leave if it seems to be whole."""
        if self._watched is None:
            return
        weights, unseen, leave = self._watched
        gradient, counts = parameter.grad, self._counts
        count = counts[index] = counts.get(index, 0) + 1
        self._seen[index] = parameter, gradient, 0 if gradient is None else gradient._version
        if self.edits.keeps:
            self.edits.keep(index, gradient)
        if leave is None:
            return
        if self._is_guessing and not self._is_wrong:
            weight = weights.weight
            if index in self._left or (self._left and weight != self._weight):
                self._is_wrong = True
            elif weight and gradient is not None and count == self._expected.get(index):
                self._weight = weight
                unseen.watches = False
                self._let_leave(leave, index, parameter, gradient, view)
        unseen.watches = True

    def _let_leave(
        self,
        leave: Leave,
        index: int,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        view: torch.Tensor,
    ) -> None:
        if gradient.is_sparse:
            return
        self._left[index] = view
        try:
            if torch.is_grad_enabled():  # in a pass with create_graph=True
                with torch.no_grad():
                    leave(index, parameter, gradient, view)
            else:
                leave(index, parameter, gradient, view)
        except BaseException as error:  # noqa: BLE001 - `left` raises it, not the user's backward pass
            self._is_wrong, self._error = True, error

    def left(self, weight: float | None) -> Collection[int] | None:
        """Return the entries whose gradients have left and not changed since; None if all have to be taken back.

        Raises what letting them leave has raised.

        Args:
            weight: of the step; None where the function has taken none.
        """
        seen, self._seen = self._seen, {}
        error, self._error = self._error, None
        if error is not None:
            raise error
        same = _are_same(seen.values())
        if weight is not None and (self.edits.keeps or not same):
            now = None if same else {at: parameter.grad for at, (parameter, _, _) in seen.items()}
            self.edits.end_step(now)
        right = weight is not None and not self._is_wrong and same
        if self._left and right:
            right = weight == self._weight and self._has_values(seen)
        self._learn(right)
        if right or not self._left:
            return self._left
        self._needed = min(2 * self._needed, _MOST)
        return None

    def _learn(self, right: bool) -> None:
        """Note whether a guess would have been right, or was."""
        if (
            self._counts or self._is_wrong
        ):  # else the share was asked for again: nothing has happened
            self._right = self._right + 1 if right and self._counts == self._expected else 0
            self._expected = self._counts

    def _has_values(self, seen: Mapping[int, Seen]) -> bool:
        """Return whether the gradients that have left still have their values, as far as these are compared."""
        self._guesses += 1
        often = self._guesses & (self._guesses - 1) == 0 or self._looks_often
        others = self._left.keys() != self._looked_at
        if not often and not others:
            return True
        if others:
            views = self._left.values()
            few = sum(view.nbytes for view in views) <= _SMALL
            self._looks_often = few or next(iter(views)).device.type != "cpu"
            self._looked_at = set(self._left)
        if not (often or self._looks_often):
            return True
        for index, view in self._left.items():
            if not _same_bits(seen[index][1], view):
                self._never = True
        return not self._never


def _are_same(seen: Iterable[Seen]) -> bool:
    """Return whether parameters have the gradients that they had, of the same versions."""
    for parameter, gradient, version in seen:
        if parameter.grad is not gradient or (
            gradient is not None and gradient._version != version
        ):
            return False
    return True


def _same_bits(gradient: torch.Tensor | None, view: torch.Tensor) -> bool:
    """Return whether a gradient has the values of what has left; NaN equals NaN."""
    assert gradient is not None
    if torch.equal(gradient, view):
        return True
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(view.element_size(), torch.int64)
    values = gradient.detach().reshape(-1)
    return torch.equal(values.view(whole), view.view(-1).view(whole))
