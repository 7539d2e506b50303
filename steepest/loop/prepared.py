"""The objects given to `prepare`, and what a user's loop and the engine hand to each other."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steepest.core.models.protocol import Where
from steepest.core.optim.several import WHICH
from steepest.loop.closures import ByClosure
from steepest.loop.cursor import Cursor
from steepest.observe.reports import Reported


class Ask(enum.Enum):
    """A request of the user's thread when it gives the turn to the worker's thread."""

    SEAT = "the worker's number"
    BEGIN = "the job, after prepare()"
    BATCH = "the next batch"
    COMMIT = "the commit of a step"
    PARTS = "what other workers gather"


class Batch(NamedTuple):
    """A batch that the engine has given, which the user's loop has yet to take."""

    data: Any  # of the source, see `steepest.loop.each_epoch.loaded`, until the loop takes it
    where: Where
    samples: int  # of the share until then
    whole: int  # samples of all workers


class TakenBatches:
    """The batches that a loop takes, and the epochs in which it does.

    Attributes:
        pending: a batch, or with `sees_all_batches` a step of the job, that the engine has given and the loop has
            yet to take.
        taken: the last batch that it took.
        stepped: whether the step of that batch was taken.
        count: how many batches the loop has taken.
        wanted: the number of epochs that the loop wants in all; None before it has come to them.
        epoch: in which it is.
        left: the last epoch that it has finished; -1 before the first.
    """

    def __init__(self) -> None:
        self.pending: Batch | None = None
        self.taken: Batch | None = None
        self.stepped = False
        self.count = 0
        self.wanted: int | None = None
        self.epoch, self.left = 0, -1


@dataclass(frozen=True)
class Progress:
    """How far a worker's function has come, for the driver.

    Attributes:
        ended: whether it has returned.
        epochs: the number of epochs that it wants in all; None before it has entered `epochs`.
        sees_all_batches: whether all workers go through the same batches, so that it counts epochs itself.
        reports: those since the last request.
        steps: the number of steps left if each batch has one; None if unknown.
        resumed: a description of the script's settings that differ from the checkpoint's.
    """

    ended: bool
    epochs: int | None
    sees_all_batches: bool
    reports: list[Reported] = field(default_factory=list)
    steps: int | None = None
    resumed: str = ""


@dataclass(frozen=True)
class Prepared:
    """The objects that a user has given to `prepare`.

    Attributes:
        model: the worker's model made of them, a `steepest.core.models.protocol.Model`.
        optimizers: those that run on servers.
        schedulers: those of all optimizers.
        cursor: where the loop is; None where workers have shares of their own.
        closures: the optimizers that step in each worker, with the indices of their stand-ins on servers.
        given: the arguments of `prepare`, which it has returned.
        sums: whether losses, and so gradients over workers, are sums over samples.
        enter: called with the number of each epoch that the loop enters, before it reads of its data.
    """

    model: Any
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[LRScheduler | ReduceLROnPlateau]
    cursor: Cursor | None = None
    closures: Sequence[tuple[int, ByClosure]] = ()
    sums: bool = False
    enter: Callable[[int], None] = lambda _: None
    given: Sequence[object] = ()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].param_groups
        several = enumerate(self.optimizers)
        return [{**group, WHICH: i} for i, each in several for group in each.param_groups]

    def set_groups(self, changed: Sequence[Mapping[str, Any]]) -> None:
        """Set the optimizer's groups to the hyperparameters that they were made with, except the changed ones."""
        spec = self.model.optimizer_spec
        groups = [group for each in self.optimizers for group in each.param_groups]
        for (_, own), now, group in zip(spec.groups, changed, groups, strict=True):
            group.update({k: v for k, v in {**own, **now}.items() if k != WHICH or k in group})

    def trained(self) -> list[list[torch.nn.Parameter]]:
        """Return the parameters that are not frozen, by optimizer."""
        return [
            [p for group in each.param_groups for p in group["params"] if p.requires_grad]
            for each in self.optimizers
        ]

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter, or row of an embedding table, has a gradient."""
        dense = any(p.grad is not None for each in self.trained() for p in each)
        return dense or bool(self.model.rows.has_gradients)

    def tell_schedulers(self) -> None:
        """Have torch's schedulers know that optimizers have stepped, in another worker: they would warn."""
        for optimizer in self.optimizers:
            vars(optimizer)["_opt_called"] = True


#: What a function has prepared that has not come to `prepare` yet.
NOTHING = Prepared(None, (), ())
