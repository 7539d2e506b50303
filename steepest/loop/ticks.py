"""Schedulers of a user's own loop: their steps follow those of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop


class Ticks:
    """A scheduler's steps, which follow those of the job: a worker without samples in a step misses none.

    A scheduler that is stepped once after each step of the optimizer counts the steps of the job; one that was
    ever stepped after several, as at the end of an epoch, counts calls, also at the end of an epoch of one step.
    """

    def __init__(self, loop: UserLoop, scheduler: LRScheduler | ReduceLROnPlateau) -> None:
        self._loop = loop
        own = type(scheduler)
        self._step: Callable[..., None] = partial(own.step, scheduler)
        self.at, self._batches = (
            -1,
            0,
        )  # at its last step: the last update, and the worker's batches
        self.by_step = False  # whether that was after a step of the optimizer
        self._counts_calls = False
        # an attribute of the scheduler's own would be part of its state_dict()
        ticking = {"step": lambda _, *arguments, **named: self.tick(*arguments, **named)}
        scheduler.__class__ = type(own.__name__, (own,), ticking)

    @property
    def step_own(self) -> Callable[..., None]:
        """The scheduler's own `step`."""
        return self._step

    @property
    def unticked(self) -> int | None:
        """The worker's batches since the scheduler's last step, if that counts calls; else None."""
        since = self._loop.batches.count - self._batches
        return since if self._counts_calls or since > 1 else None

    def begin(self, step: int, behind: int = 0, unticked: int | None = None) -> None:
        """Begin to count after an update.

        Args:
            step: its number.
            behind: steps that the scheduler has yet to make.
            unticked: of the scheduler whose state this one has.
        """
        for _ in range(behind):
            self._step()
        self._counts_calls = unticked is not None
        self.at, self._batches = step, self._loop.batches.count - (unticked or 0)

    def catch_up(self, update: int) -> None:
        """Step the scheduler, if it counts updates, for those up to one in which this worker had no samples."""
        while self.by_step and self.at < update:
            self.at += 1
            self._step()

    def tick(self, *arguments: Any, **named: Any) -> None:
        """Step the scheduler as often as the job has stepped, if it is stepped by step."""
        if self._loop.sees_all_batches:
            self._step(*arguments, **named)
            return
        now, batches = self._loop.at_update, self._loop.batches.count
        since = batches - self._batches
        self._counts_calls |= since > 1
        by_step = since == 1 and not (self._counts_calls or arguments or named)
        times = max(now - self.at, 0) if by_step else 1
        # where workers do not wait for each other, steps come in any order
        self.at, self._batches, self.by_step = max(now, self.at), batches, by_step
        for _ in range(times):
            self._step(*arguments, **named)


class Schedules:
    """The ticks of all schedulers of a loop.

    Args:
        loop: whose they are.
        schedulers: those given to `prepare`.
    """

    def __init__(
        self, loop: UserLoop, schedulers: Sequence[LRScheduler | ReduceLROnPlateau] = ()
    ) -> None:
        self._loop, self._given = loop, schedulers
        self._ticks = [Ticks(loop, scheduler) for scheduler in schedulers]
        # of the state that was taken, see `Ticks`
        self._ticked: list[int | None] = []
        self._unticked: list[int | None] = []

    @property
    def steps(self) -> list[Callable[[], None]]:
        """Functions that step each scheduler of `prepare` once, without counting the step."""
        return [ticks.step_own for ticks in self._ticks[: len(self._given)]]

    def add(self, registered: Iterable[object]) -> None:
        """Have the schedulers among registered objects, which were made behind `prepare`, count as the others do."""
        given = [id(each) for each in self._given]
        made = [x for x in registered if isinstance(x, LRScheduler) and id(x) not in given]
        self._ticks += [Ticks(self._loop, scheduler) for scheduler in made]

    def state(self) -> dict[str, Any]:
        """Return what `take` needs in another worker."""
        if not self._ticks:
            return {"ticked": [], "unticked": []}
        return {
            "ticked": [ticks.at if ticks.by_step else None for ticks in self._ticks],
            "unticked": [ticks.unticked for ticks in self._ticks],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Note what `state` has returned, for `begin`."""
        self._ticked, self._unticked = state["ticked"], state.get("unticked", [])

    def catch_up(self, update: int) -> None:
        """Step schedulers that count updates for one that other workers have made."""
        for ticks in self._ticks:
            ticks.catch_up(update)

    def begin(self, step: int, *, together: bool) -> None:
        """Begin to count after an update; schedulers whose state came from another worker may be behind."""
        none: list[int | None] = [None] * len(self._ticks)
        unticked = self._unticked or none
        for ticks, at, batches in zip(self._ticks, self._ticked or none, unticked, strict=True):
            if together or at is None:
                ticks.begin(step, 0 if at is None else step - at, batches)
                ticks.by_step = at is not None
            else:  # a worker's steps come in any order: it goes on from what the scheduler had counted
                ticks.begin(at, 0, batches)
                ticks.by_step = True
