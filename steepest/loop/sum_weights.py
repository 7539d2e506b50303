"""The weights of gradients that a loop adds up for one step, if all workers go through the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from steepest.errors import ConfigurationError


class SumWeights:
    """The weights of a sum of gradients, over one batch or several.

    A worker's part of an update weighs as much as the batches of which it is made. So the mean over the workers is
    that of one process where each worker has the same share of each batch. Where a batch is of another size than
    the first one, or the loop says what batches weigh, shares differ: then all workers' parts weigh the same, and
    each backward pass is multiplied by the share of its batch (`scale`), those before too (`rescale`).

    Args:
        total: gathers the weights of a batch on all workers, and returns their sum.

    Attributes:
        scale: the factor of the present batch's backward passes; None until the loop sets its weight.
        rescale: the factor to apply to the gradients of earlier batches now; None for none.
        by_pass: whether backward passes are multiplied by shares, and all workers' parts weigh the same.
        has_ended: whether a step has used the sum, so that the next batch begins another one.
    """

    def __init__(self, total: Callable[[float], float]) -> None:
        self._total = total
        self.scale: float | None = 1.0
        self.rescale: float | None = None
        self.by_pass, self.has_ended = False, True
        self._before = self._present = 0.0  # weights of the batches before, and of the present one
        self._alike = (
            0  # batches before of which each worker has as many samples as of the present one
        )
        # of the first and of the present batch: samples on this worker, workers, and samples on all
        self._first = self._last = 1.0, 1, 0
        self._is_said = False  # whether the loop has said what a batch of the sum weighs

    def state(self) -> list[Any]:
        """Return the values that are the same on all workers, for a worker that goes on from here."""
        return [self.by_pass, self._is_said, self.has_ended, self._first[2], self._alike]

    def load(self, state: Sequence[Any]) -> None:
        """Set what `state` returned; the weights of batches on this worker are those that it has seen.

        Raises:
            ConfigurationError: it is of an older version.
        """
        if len(state) != len(self.state()):
            raise ConfigurationError(
                "the state to go on from is that of a loop of an older version: begin with its weights, by "
                "model.load_state_dict(), and other checkpoints"
            )
        self.by_pass, self._is_said, self.has_ended, whole, self._alike = state
        self._first = *self._first[:2], whole

    def begin(
        self,
        samples: float,
        whole: int,
        size: int,
        *,
        sums: bool,
        learned: bool,
        even: bool = True,
    ) -> None:
        """Note that a batch begins.

        Args:
            samples: of the batch, on this worker.
            whole: on all of them; 0 if unknown. Then workers tell each other, unless it is dealt alike.
            size: the number of workers.
            sums: whether losses add up samples; otherwise they are means.
            learned: whether there was a backward pass in the batch before.
            even: whether batches of as many samples are dealt alike.
        """
        self.rescale, self._last = None, (samples, size, whole)
        if self.has_ended:
            self.scale, self.by_pass, self._is_said, self.has_ended = 1.0, False, False, False
            self._before, self._alike, self._present, self._first = 0.0, 0, samples, self._last
            return
        is_unknown = not (whole or even)
        if size > 1 and (self._is_said or is_unknown):
            if not self.by_pass:
                self.by_pass, self.rescale = True, self._said_share(self._present, size)
            self.scale = None if self._is_said else self._said_share(samples, size)
            return
        # A batch that was passed over weighs nothing. Where shares are alike that is the same to all, and one that a
        # worker alone has passed over, for want of anything to learn, counts.
        if self._first[2] and not self._is_said:
            self._alike += 1
        elif learned:
            self._before += self._present
        self._present = samples
        differs = whole != self._first[2] or not even
        if whole and differs and not (self.by_pass or self._is_said):
            self.by_pass = True
            self.rescale = _share(*self._first, sums=sums)
        elif not differs:
            self._first = (
                self._last
            )  # a worker that has entered behind the first batch has not seen that
        if self.by_pass:
            self.scale = _share(*self._last, sums=sums)

    def say(self, weight: float, *, passed: bool) -> None:
        """Set what the present batch weighs.

        Args:
            weight: on this worker.
            passed: whether the batch has had a backward pass.

        Raises:
            ConfigurationError: batches before have no such weight, and are of another size; or the batch has had a
                backward pass, whose gradient is added to others.
        """
        if self.by_pass and self._is_said:
            if passed:
                raise ConfigurationError(
                    "steepest.weight() behind backward(), whose gradient is added to those of batches before by what "
                    "it weighs: call it before backward()"
                )
            self.scale = self._said_share(weight, self._last[1])
            return
        if self.by_pass:
            raise ConfigurationError(
                "steepest.weight() in a batch whose gradients are added to those of batches of another size, of which "
                "the loop did not say what they weigh: call it in each batch of the sum, or in none"
            )
        self._is_said, self._present = True, weight

    def _said_share(self, weight: float, size: int) -> float:
        """Return the factor of a backward pass, given the weight of its batch on this of `size` workers."""
        whole = self._total(weight)
        return weight * size / whole if whole else 0.0

    def step(self) -> None:
        """Note that a step is taken: the next one has gradients of the present batch, as far as is known."""
        self._before, self._alike, self.has_ended = 0.0, 0, True

    @property
    def weight(self) -> float:
        """What this worker's part of the step's update weighs."""
        return 1.0 if self.by_pass else self._before + self._alike * self._last[0] + self._present

    @property
    def counts_said(self) -> bool:
        """Whether backward passes are multiplied by shares of what the loop has said that batches weigh."""
        return self.by_pass and self._is_said

    @property
    def of_sum(self) -> tuple[int, int]:
        """Of a sum over samples: a number of samples on this worker, and on all, by which its update is the sum."""
        samples, size, whole = self._last
        return (1, size) if self.by_pass else (int(samples), whole or size)


def _share(samples: float, size: int, whole: int, *, sums: bool) -> float:
    """Return by what a backward pass of a batch is multiplied where all workers' parts weigh the same."""
    if sums or not whole:
        return float(samples > 0)
    return samples * size / whole
