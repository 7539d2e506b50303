"""The steps of the optimizers of a user's own loop: what `optimizer.step()` and the like do behind `prepare`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from steepest.core.messages.fields import NO_STEP, RETURNED, StepDigest
from steepest.core.optim.portable import Record
from steepest.core.protocol.commit_rules import (
    NO_NORM,
    knows_norms,
    pushes_per_update,
)
from steepest.errors import ConfigurationError
from steepest.loop.closures import NO_GRADIENT, SCHEDULED, ByClosure, mark_of, step_by_closure
from steepest.loop.held_gradients import HeldGradients
from steepest.loop.local_edits import EditWarnings
from steepest.loop.losses import line_of_user
from steepest.loop.prepared import NOTHING, Ask, Prepared
from steepest.loop.state_elsewhere import StateElsewhere, changed_state
from steepest.loop.table_rows import Errand
from steepest.loop.ticks import Schedules
from steepest.loop.unseen import Unseen
from steepest.validation import require_positive

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop


class _AtPrepare(NamedTuple):
    """The objects given to `prepare`, to notice later changes."""

    groups: list[list[int]] = []  # ids of the parameters of all optimizers' groups
    stepped_by: list[set[int]] = []  # the same by optimizer
    shared: frozenset[int] = frozenset()  # ids of optimizers whose step() is that of all workers

    @classmethod
    def of(cls, prepared: Prepared) -> _AtPrepare:
        """Return that of what was prepared."""
        groups = [each.param_groups for each in prepared.optimizers]
        stepped_by = [{id(p) for group in each for p in group["params"]} for each in groups]
        users = [by.optimizer for _, by in prepared.closures]
        shared = frozenset(id(each) for each in (*prepared.optimizers, *users))
        return cls(_groups_of(prepared.optimizers), stepped_by, shared)


class _FirstGradient:
    """Whether a worker has had a gradient in a step; until then, the parameters' values in its first step.

    In a single step it may lack one that others have, as after a batch with nothing to learn from.

    Attributes:
        is_here: whether it has had one.
    """

    def __init__(self) -> None:
        self.is_here = False
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(self, prepared: Prepared) -> None:
        """Look for a gradient at a step."""
        if prepared.has_gradients:
            self.is_here, self._before = True, []
        elif not self._before:
            trained = [parameter for each in prepared.trained() for parameter in each]
            self._before = [(each, each.detach().clone()) for each in trained]

    def lacks(self) -> bool:
        """Return whether no worker has had a gradient: there were steps, and no parameter has changed."""
        return bool(self._before) and all(torch.equal(*each) for each in self._before)


class LoopSteps:
    """The steps of one loop's optimizers.

    Args:
        loop: whose they are.

    Attributes:
        held: gradients that are kept from batch to batch, for later steps.
        schedules: schedulers' steps.
        unseen: writes to gradients that torch does not count.
        changed: right behind a step, by parameter group: what differs from the optimizer as `prepare` was given
            it.
        lacks_batches: whether the loop was entered where others may have taken batches of their next step.
        clips: by optimizer, the clipping of its next step.
        is_left_out: whether that step's update was left out.
        last: the number of the job's step that the last call was, from 0; None where it was passed over.
        stepping: ids of the parameters of the optimizer that steps, or stepped last.
        trying: the optimizer whose step by a closure is under way.
        read_state: reads the state of the job's optimizer, on the worker's thread.
        edits: warnings of gradients that the loop changes.
    """

    def __init__(self, loop: UserLoop) -> None:
        self._loop = loop
        self._prepared = _AtPrepare()
        self.unseen = Unseen()
        self.trying: ByClosure | None = None
        self.read_state: Callable[[], list[Record]] | None = None
        self.edits = EditWarnings(loop)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin with a function that has not run yet."""
        self.held = HeldGradients()
        self.schedules = Schedules(self._loop)
        self.changed: list[dict[str, Any]] | None = None
        self.lacks_batches = False
        self.clips: dict[int, float] = {}
        self.is_left_out = False
        self.last: int | None = None
        self.stepping: set[int] = set()
        self._first = _FirstGradient()

    def take_over(self, prepared: Prepared) -> None:
        """Redirect the user's calls of optimizers to this object."""
        has_rows = self._has_rows if prepared.model.tables else None
        self.held = HeldGradients(prepared.optimizers, has_rows)
        self.schedules = Schedules(self._loop, prepared.schedulers)
        self._prepared = _AtPrepare.of(prepared)
        for index, each in enumerate(prepared.optimizers):
            optimizer: Any = each
            name = type(optimizer).__name__
            optimizer.add_param_group = partial(self._refuse_group, name)
            optimizer.step = self._step_function(index)
            optimizer._step_supports_amp_scaling = False  # else gradients come here multiplied
            if getattr(optimizer.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad:
                optimizer.zero_grad = partial(drop_gradients, each)
            optimizer.state = StateElsewhere(name)
            optimizer.state_dict = partial(self._optimizer_state, each)
            optimizer.load_state_dict = partial(_refuse_state, name)
        for index, by in prepared.closures:
            user: Any = by.optimizer
            user.add_param_group = partial(self._refuse_group, type(user).__name__)
            push = partial(self.step, index, {id(parameter) for parameter in by.parameters})
            user.step = step_by_closure(self._loop, self, by, push)

    def _has_rows(self) -> bool:
        """Return whether there are gradients of embedding tables' rows since the last step."""
        return bool(self._loop.prepared.model.rows.has_gradients)

    def _refuse_group(self, name: str, param_group: Mapping[str, Any]) -> None:
        """Refuse parameters that an optimizer gets after `prepare`, with an error that says what to do instead."""
        params = param_group["params"]
        named = self._loop.prepared.model.names_of(
            [params] if isinstance(params, torch.Tensor) else params
        )
        own, others = named
        if others:
            shapes = ", ".join(str(tuple(each.shape)) for each in others)
            do = (
                f"of shape {shapes:.200} the model that prepare() was given has none: give it a module that has all "
                "parameters, and the optimizer this group, before"
            )
        elif own - self._loop.prepared.model.optimizer_spec.trainable():
            do = (
                f"give the optimizer this group, of {min(own)!r} and {len(own) - 1} more, before prepare(), with its "
                "learning rate, and freeze the parameters until then (requires_grad_(False)); in the loop, unfreeze "
                "them in place of this call"
            )
        else:
            do = (
                f"{min(own, default='')!r} and {max(len(own) - 1, 0)} more are the optimizer's already: unfreeze them "
                "(requires_grad_(True)), and set their group's values in optimizer.param_groups"
            )
        raise ConfigurationError(f"{name}.add_param_group() after steepest.prepare(): {do}")

    def _step_function(self, index: int) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None) -> Any:
            if closure is None:
                return self.step(index)
            with torch.enable_grad():
                loss = closure()
            self.step(index)
            return loss

        optimizer = self._loop.prepared.optimizers[index]

        def found(*arguments: Any, **named: Any) -> Any:
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                return with_hooks(optimizer, step, *arguments, **named)
            return step(*arguments, **named)

        vars(found)[SCHEDULED] = mark_of(optimizer)
        return found

    def end_trial(self) -> None:
        """Note that no optimizer tries values any more, see `steepest.loop.closures.step_by_closure`."""
        self.trying = None
        self._loop.prepared.model.put_back()

    def check_may_step(self) -> None:
        """Check that the loop is where it may take a step; else ConfigurationError."""
        if self._loop.prepared.cursor is None and (
            self._loop.batches.taken is None or self._loop.batches.stepped
        ):
            raise ConfigurationError(
                "optimizer.step() was called "
                + (
                    "before the first batch"
                    if self._loop.batches.taken is None
                    else "twice for one batch"
                )
                + ": where workers do not wait for each other, or train by themselves, each step takes the next batch "
                'of the loader; strategy="ps" and "allreduce" let a batch have any number of steps'
            )
        cursor = self._loop.prepared.cursor
        if cursor is not None and cursor.has_loader and not cursor.place.passes:
            raise ConfigurationError(
                "optimizer.step() before the first batch of an epoch: call it in the loop over the loader that "
                "steepest.prepare() has returned, or behind it"
            )
        if self._loop.batches.wanted is None:
            raise ConfigurationError(
                "optimizer.step() outside of steepest.epochs(): write `for epoch in steepest.epochs(n)` around the "
                "loop, so that a worker that joins later knows where the job is"
            )

    def check_any_taken(self, epoch: int) -> None:
        """Check, at the end of an epoch, that the loop trains; else ConfigurationError.

        It does not if it has backward passes and no step, or steps without a gradient on any worker.
        """
        if self._first.lacks():
            raise ConfigurationError(NO_GRADIENT.format(f" up to the end of epoch {epoch}"))
        if not self.stepping and self._loop.weights.losses.found:
            raise ConfigurationError(
                f"the loop called loss.backward() and came to the end of epoch {epoch} without optimizer.step(): "
                "nothing is trained; call optimizer.step() after loss.backward(), at least once in an epoch"
            )

    def _check_parameters(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check that optimizers have the parameters that they had at `prepare`; else ConfigurationError."""
        if _groups_of(optimizers) != self._prepared.groups:
            raise ConfigurationError(
                "the optimizer has got other parameters since steepest.prepare(): give it all of them before, frozen "
                "ones too"
            )

    def step(self, index: int = 0, stepping: set[int] | None = None) -> None:
        """Push the gradients of an optimizer's parameters; return when the update is committed.

        Args:
            index: of the optimizer that servers have.
            stepping: the ids of those of its parameters that are updated; None for all.
        """
        loop, prepared = self._loop, self._loop.prepared
        optimizer = prepared.optimizers[index]
        vars(optimizer)["_opt_called"] = True  # else a scheduler would warn
        clip = self.clips.pop(index, None)
        self.last = None
        if loop.passes_over_step(index):
            return
        self.check_may_step()
        self._check_parameters(prepared.optimizers)
        if type(optimizer.state) is not StateElsewhere:
            raise ConfigurationError(changed_state(type(optimizer).__name__))
        if not self._first.is_here:
            self._first.look(prepared)
        if loop.weights.losses.looks.is_looking:
            loop.weights.losses.end_part()
        loop.begin_step()
        if prepared.model.tables:
            self._look_at_losses(prepared)
        changed = prepared.model.optimizer_spec.changed(prepared.groups)
        prepared.model.hyper, self.changed = changed if any(changed) else None, changed
        self.stepping = self._prepared.stepped_by[index] if stepping is None else stepping
        self.is_left_out = False
        prepared.model.clip_step = clip
        prepared.model.digest = self._digest(index)
        loop.job.turns.ask(Ask.COMMIT)
        self.lacks_batches = False
        prepared.model.clip_step = None
        if self.edits.are_made or self.edits.epoch != loop.batches.epoch:
            self.edits.look()
        self.last = loop.at_step
        loop.end_step(index)
        self.changed = None

    def _look_at_losses(self, prepared: Prepared) -> None:
        """Warn, at a step, of no loss where rows of embedding tables move without a gradient of their own."""
        loop, tables = self._loop, prepared.model.tables
        if loop.weights.losses.found or not (loop.has_samples and self.averages):
            return
        if moving := [each.name for each in tables if each.optimizer.moves_by_itself]:
            warnings.warn(
                f"worker {loop.job.rank}: optimizer.step() without backward(), of a model with the embedding "
                f"table {moving[0]!r}, whose optimizer moves the rows of a batch also where their gradient is zero: "
                "one process would move those of this batch, too, if another worker's part has something to learn; "
                "call backward() on a loss that is multiplied by 0",
                stacklevel=line_of_user(),
            )

    def _digest(self, index: int) -> StepDigest:
        """Return the values in which all workers' loops have to agree in the step of an optimizer."""
        loop = self._loop
        cursor, taken, passes = (
            loop.prepared.cursor,
            loop.batches.taken,
            len(loop.weights.losses.found),
        )
        # a loop may go through its batch in parts, as many as it has samples, or as the weight that it says is made of
        alike = (
            loop.weights.own is None and loop.weights.samples * loop.job.size == loop.weights.whole
        )
        known = alike and passes and not (self.lacks_batches or self.trying)
        if cursor is not None:
            batch, step = cursor.place.batch - 1, cursor.place.step
        else:
            batch, step = 0 if taken is None else taken.where.step, 0
        return StepDigest(loop.batches.epoch, batch, step, index, passes if known else None)

    def no_step(self, *, returned: bool) -> StepDigest | None:
        """Return the digest of an update in which the loop takes no step; `returned`: because its function has."""
        if returned:
            return StepDigest(None, None, None, RETURNED)
        taken = self._loop.batches.taken
        return taken and StepDigest(self._loop.batches.epoch, taken.where.step, 0, NO_STEP)

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, which servers have, or the worker, as the optimizer itself would."""
        records = self._loop.job.turns.ask(Errand(self._read_state))
        state: dict[str, Any] = self._loop.prepared.model.state_of(optimizer, records)
        return state

    def _read_state(self) -> list[Record]:
        """Return the optimizer's state as the job's processes have it; on the worker's thread."""
        assert self.read_state is not None
        return self.read_state()  # another one than before, where the job's processes have changed

    def clip_norm(self, parameters: Iterable[torch.Tensor], most: float) -> torch.Tensor:
        """Have the mean gradient of all workers clipped by its norm; return the norm of this worker's gradient."""
        prepared = self._loop.prepared
        clipped = {id(parameter) for parameter in parameters if parameter.requires_grad}
        if prepared is not NOTHING:  # rows in weights have an optimizer of their own
            clipped -= set(map(id, prepared.model.held_rows()))
        by_optimizer = prepared.trained()
        if prepared.closures:
            raise ConfigurationError(
                "steepest.clip_grad_norm_() with an optimizer whose step() needs a closure, or which shares parameters "
                "with another one: it sees the mean gradient of all workers by itself; leave clipping out"
            )
        of_one = [{id(p) for p in each} for each in by_optimizer]
        if clipped not in of_one:
            if len(of_one) > 1:
                raise ConfigurationError(
                    "steepest.clip_grad_norm_() was given other parameters than one optimizer has: each optimizer's "
                    "step is an update, whose gradient has a norm by itself; call it once for each optimizer, with "
                    "all of its parameters"
                )
            raise ConfigurationError(
                "steepest.clip_grad_norm_() was given a part of the parameters: the norm is that of the whole "
                "gradient; give model.parameters()"
            )
        if not knows_norms(self._loop.job.kind.rule, self._loop.job.size):
            raise ConfigurationError(NO_NORM.format("steepest.clip_grad_norm_()"))
        index = of_one.index(clipped)
        self.clips[index] = require_positive("max_norm", most)
        return torch.nn.utils.get_total_norm(
            [p.grad for p in by_optimizer[index] if p.grad is not None]
        )

    def scaled_step(self, step: Callable[[], Any], *, overflowed: bool) -> tuple[Any, bool]:
        """Take a step under a scaler, with the others, also where the scaler would leave it out.

        Args:
            step: that of an optimizer.
            overflowed: whether there is NaN or infinity in this worker's gradients.

        Returns:
            What it returns, and whether the update was left out: then one worker had such gradients.
        """
        model = self._loop.prepared.model
        model.overflowed, self.is_left_out = overflowed, False
        try:
            return step(), self.is_left_out
        finally:
            model.overflowed = False  # the next step may be under no scaler

    def are_for_all(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer's step is made of all workers' gradients."""
        kind = self._loop.job.kind
        return kind.together and not kind.local and id(optimizer) in self._prepared.shared

    @property
    def averages(self) -> bool:
        """Whether an update is made of the mean of several workers' gradients."""
        return (
            pushes_per_update(self._loop.job.kind.rule, self._loop.job.size) > 1
            and not self._loop.job.kind.local
        )

    @property
    def factor(self) -> float:
        """The factor of a step's gradients that makes their mean by samples the sum over samples."""
        loop = self._loop
        together = loop.prepared.cursor is not None
        samples, whole = (
            loop.weights.sum.of_sum if together else (loop.weights.samples, loop.weights.whole or 1)
        )
        return whole / samples if loop.prepared.sums and samples else 1.0


def _groups_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[int]]:
    """Return the ids of the parameters of optimizers' groups."""
    groups = []
    for each in optimizers:
        for group in each.param_groups:
            groups.append([*map(id, group["params"])])
    return groups


def drop_gradients(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """Do the same as torch's `zero_grad`, without the 0.1 ms that it spends on a profiler."""
    if not set_to_none or torch._C._autograd._profiler_enabled():
        torch.optim.Optimizer.zero_grad(optimizer, set_to_none)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def with_hooks(
    optimizer: torch.optim.Optimizer, step: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Take a step of an optimizer between its hooks, as `torch.optim.Optimizer` does; return its result."""
    arguments_now: Any = (optimizer, *arguments)
    for before in tuple(optimizer._optimizer_step_pre_hooks.values()):
        if (others := before(optimizer, arguments_now, named)) is not None:
            arguments_now, named = others
    result = step(*arguments_now[1:], **named)
    for after in tuple(optimizer._optimizer_step_post_hooks.values()):
        after(optimizer, arguments_now, named)
    return result


def _refuse_state(name: str, *_: object, **__: object) -> None:
    raise ConfigurationError(
        f"{name}.load_state_dict() after steepest.prepare(), where its state lies in the job's processes, a part in "
        "each: load it before; steepest.run(..., checkpoints=) goes on with it when the same program is started again"
    )
