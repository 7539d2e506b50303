"""A user's own loop as a model: the engine's shares go to the loop, and its gradients to the engine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import numpy as np
import torch

from steepest.core.data.protocol import Indices
from steepest.core.data.sampler import step_seed
from steepest.core.engine.generators import seed_everything
from steepest.core.engine.optimizer_slices import assemble
from steepest.core.models.names import plain
from steepest.core.models.protocol import Computed, PastShare, Ready, Where
from steepest.core.models.step_size import StepSize, step_size
from steepest.core.optim.portable import Record
from steepest.core.optim.portable import unpack as unpack_state
from steepest.core.optim.several import as_one
from steepest.core.optim.torch_without_compiler import spare_compiler
from steepest.core.tensors.dtypes import LOOP_STATE
from steepest.core.tensors.layout import ChunkSpec
from steepest.errors import ModelError, UnfrozenError
from steepest.loop.each_epoch import EachEpochSource, Later, loaded
from steepest.loop.job_view import LoopKind
from steepest.loop.kept import pack, unpack
from steepest.loop.overlap import Overlap
from steepest.loop.parameter_places import ParameterPlaces
from steepest.loop.prepared import Batch, Progress
from steepest.loop.projected import Projected, Projection
from steepest.loop.script import UserScript
from steepest.loop.session import Session
from steepest.loop.table_rows import LoopRows
from steepest.loop.training_data import TrainingData
from steepest.loop.user_loop import UserLoop
from steepest.loop.writes import Before, LoopWrites
from steepest.observe.reports import Reported
from steepest.runtime.remote_functions import name_of
from steepest.strategies.collectives.members import MemberCollective
from steepest.tables.modules.torch_model import TorchModel

if TYPE_CHECKING:
    from steepest.tables.modules.embedding import RowSource


T = TypeVar("T")
_WRITTEN = (
    "the loop has written to the trained parameter {}, which only the optimizer of steepest.prepare() changes, because "
    "the other workers would not see it: undo it before optimizer.step(), as sharpness-aware minimisation "
    "does; give what is done to it after each step to steepest.prepare(..., project=f); or use a "
    "parametrization (torch.nn.utils.parametrize)"
)
_WRITTEN_AT_THE_END = (
    "the function has returned with other trained parameters than its last step has given: result.state_dict, and "
    "checkpoints, have those of the step"
)
log = logging.getLogger(__name__)


class LoopModel(TorchModel):
    """A worker's replica, which is trained by a loop of the user's own.

    Args:
        loop: of the user's function, in `prepare`.
        module, optimizers: that it has given there.
        project: what is done to parameters after each update, see `prepare`.
        table_shards, buffers: see `steepest.TorchModel`.
        data: of which each share is a batch of the loop's, or one of its steps.

    Attributes:
        hyper, clip_step, overflowed, take_back, digest: see `steepest.core.models.protocol`.
        rows: those of embedding tables, with the gradients that the loop has of them.
    """

    may_take_back = True
    session: Session  # of the worker, which sets it once the function has come to `prepare`
    _writes: LoopWrites

    def __init__(
        self,
        loop: UserLoop,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        data: TrainingData,
        project: Projection | None = None,
        table_shards: int = 8,
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        def chosen(own: torch.nn.Module) -> Any:
            one = optimizers[0] if len(optimizers) == 1 else list(optimizers)
            names = {id(p): plain(name) for name, p in own.named_parameters()}
            return one if project is None else Projected.of(as_one(one), names, project)

        self.loop = loop
        with _hooks_aside(optimizers):
            super().__init__(
                module,
                data=data.source,
                batch_size=data.batch_size,
                optimizer=chosen,
                table_shards=table_shards,
                buffers=buffers,
            )
        self._writes = LoopWrites(loop.steps.unseen)
        trained = {id(self._parameters[name]) for name in self.optimizer_spec.trainable()}
        self._places = ParameterPlaces(module, trained)
        self._overlap = Overlap()
        self._where = Where(0, 0, (0, 1))
        self._of_step: dict[str, torch.Tensor] = {}  # where the loop has begun its last step
        self._arrived: dict[str, torch.Tensor] | None = None  # until the loop is where they are of
        self._own_names = tuple(sorted(self.optimizer_spec.trainable()))
        self._has_buffers = any(True for _ in module.buffers())
        self._share_of: Callable[[int], PastShare | None] | None = None
        self.rows = LoopRows(loop.job.turns.ask)
        if self.tables or self.held:
            self.rows.follow(module, *optimizers, held=self.held_rows())

    def _seed(self) -> int:
        """Return the seed of the job."""
        return self.loop.job.kind.seed

    def use_rows(self, source: RowSource) -> None:
        """Have the loop use the rows of a source from now on, see `steepest.loop.table_rows`."""
        super().use_rows(self.rows.use(source))

    def on_device(self, batch: Any) -> Any:
        """Return a batch on the device of the model."""
        return self._to_device(loaded(batch)[0])

    def loaded(self, batch: Batch) -> Batch:
        """Return a batch that the loop takes with its data, on the device of the model."""
        if isinstance(batch.data, Later):  # the loop may have drawn since it was given
            self._seed_for(batch.where.step, batch.where.part[0])
        data, samples = loaded(batch.data)
        samples = batch.samples if samples is None else samples
        return Batch(self._to_device(data), batch.where, samples, batch.whole)

    def _seed_for(self, step: int, part: int) -> None:
        """Seed all generators for loading a batch, as the engine does where it loads it."""
        seed_everything(step_seed(self.loop.job.kind.seed, step, part))

    def _take_array(self, array: Any) -> Any:
        """Return an array as it is: the loop gets what the loader's `collate_fn` returned."""
        return array

    def any_batch(self) -> Any:
        """Return a batch of the first samples of the training data."""
        batch, _ = self._batch_of(np.arange(min(self.batch_size, self.data.size or 1)))
        return batch

    def _batch_of(self, share: Indices) -> tuple[Any, int]:
        """Return the batch of a share on the device of the model, and the number of its samples."""
        batch, samples = loaded(next(iter(self.data.open([share], prefetch=False))))
        return self._to_device(batch), len(share) if samples is None else samples

    def batch_before(self, step: int) -> Any:
        """Return the worker's last batch before a step of the job; another one if it had none, or is not known."""
        share = self._past_share(step - 1)
        if share is None or not share.batches:
            return self.any_batch()
        self._seed_for(step - 1, self.loop.job.rank)
        batch, _ = self._batch_of(share.batches[-1])
        return batch

    def _past_share(self, step: int) -> PastShare | None:
        return None if self._share_of is None else self._share_of(step)

    def steps_before(self, step: int) -> int:
        """Return how many steps of its epoch there are before a step; 0 where that is not known."""
        share = self._past_share(step)
        return 0 if share is None else share.before

    def meet(
        self,
        member: MemberCollective,
        wait: Callable[[Callable[[], bool]], None],
        share_of: Callable[[int], PastShare | None],
    ) -> None:
        """Gather values of all workers over a collective from now on, see `steepest.core.models.protocol.Model`."""
        self._share_of = share_of
        self.loop.gatherer.gatherings.meet(member, wait)

    def use_reader(self, read: Callable[[], list[Record]]) -> None:
        """Read the optimizer's state in this way from now on, see `steepest.core.models.protocol.Model`."""
        self.loop.steps.read_state = read

    def state_of(self, optimizer: torch.optim.Optimizer, records: list[Record]) -> dict[str, Any]:
        """Return the `state_dict()` of an optimizer of the loop's, as it would be if it had taken the job's steps.

        Args:
            optimizer: whose hyperparameters, names and hooks it has.
            records: what servers hold of the state of all parameters.
        """
        whole, of_others = assemble(self.layout, records)
        packed: dict[str, dict[str, tuple[torch.Tensor, bool]]] = {}
        for name, value in whole.items():
            parameter, _, key = name.rpartition("/")
            packed.setdefault(parameter, {})[key] = (value, name in of_others)
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        own, optimizer.state = optimizer.state, defaultdict(dict)
        try:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if (of_one := packed.get(names[id(parameter)])) is not None:
                    optimizer.state[parameter] = unpack_state(of_one)
            return type(optimizer).state_dict(optimizer)
        finally:
            optimizer.state = own

    def forget_gathered(self) -> None:
        """Drop gathered values, which may differ when they are gathered again, see `Model`."""
        if self.loop.prepared.cursor is None:
            self.loop.gatherer.gatherings.drop()
        else:  # the same is gathered again, by the same samples; and a loop that goes on from here has no other
            self.loop.gatherer.gatherings.forget_absent()

    def unfrozen(self) -> frozenset[str]:
        """Return the names of the optimizer's parameters that are not trained yet, and require a gradient by now."""
        frozen = self.optimizer_spec.trainable() - self._trainable
        return frozenset(name for name in frozen if self._parameters[name].requires_grad)

    def _unfreeze(self, names: Iterable[str]) -> None:
        """Check that the optimizer has these parameters; the loop itself decides which of them require a gradient."""
        if unknown := set(names) - self.optimizer_spec.trainable():
            raise ModelError(
                f"parameter {min(unknown)!r} was unfrozen before, and the optimizer that the function makes now leaves "
                "it out: give the optimizer all parameters, frozen ones too"
            )

    def relayout(self, cut: ChunkSpec) -> None:
        """Cut `layout` into other chunks; see `steepest.core.models.protocol.Model.relayout`."""
        if cut.unfrozen - self._trainable:
            self._overlap = Overlap()  # entries have other numbers
        super().relayout(cut)

    def names_of(self, parameters: Iterable[torch.Tensor]) -> tuple[set[str], list[torch.Tensor]]:
        """Return the names of those parameters that are the model's, and the others."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        every = list(parameters)
        own = {names[id(each)] for each in every if id(each) in names}
        return own, [each for each in every if id(each) not in names]

    @property
    def frozen(self) -> list[str]:
        """The names of the optimizer's parameters that require no gradient for now."""
        parameters = self._parameters
        return [name for name in self._own_names if not parameters[name].requires_grad]

    def freeze(self, names: Iterable[str]) -> None:
        """Have these of the optimizer's parameters require no gradient, and all others one."""
        names = set(names)
        for name in self.optimizer_spec.trainable():
            self._parameters[name].requires_grad_(name not in names)

    def _check_trained(self) -> None:
        """Raise UnfrozenError if a gradient of the step is one of a parameter that is not trained yet."""
        if len(self._trainable) == len(self._own_names):
            return
        for name in self.optimizer_spec.trainable() - self._trainable:
            if self._parameters[name].grad is not None:
                raise UnfrozenError(f"parameter {name!r} was frozen so far, and has a gradient now")

    @property
    def notes(self) -> list[Reported]:
        """What the loop has reported since the last committed step, see `steepest.core.models.protocol.Model`."""
        return self.loop.reports.notes

    @property
    def sums_samples(self) -> bool:
        """Whether the loop's losses, and so its updates, are sums over samples."""
        return self.loop.prepared.sums

    def left_out(self) -> None:
        """Have the loop's scaler know that the last step made no update."""
        self.loop.steps.is_left_out = True

    def _in_turn(self, goes_on: Callable[..., T], *arguments: Any) -> T:
        """Let the loop have a turn, in a function, on the values that an optimizer tries, if one does.

        Return what the function returns.

        Raises:
            ModelError: the loop has written to a trained parameter, or put another in its place; a warning, where
                its function has returned, as with the weights of the best epoch.
        """
        writes, trying = self._writes, self.loop.steps.trying
        begun = writes.begin()
        if trying is not None:
            trying.lay_out()
        try:
            result = goes_on(*arguments)
        except BaseException:
            self._end_turn(writes, begun)
            raise
        wrong = self._end_turn(writes, begun)
        if wrong is not None and not self.session.has_ended:
            raise ModelError(wrong)
        if wrong is not None and not self.loop.job.rank:
            log.warning(_WRITTEN_AT_THE_END)
        return result

    def _end_turn(self, writes: LoopWrites, begun: Before) -> str | None:
        """End a turn; return a description of the loop's change of a parameter, or None."""
        replaced = self._places.replaced()
        if self.loop.steps.trying is not None:
            self.loop.steps.trying.lay_aside()
            self.put_back()
        name = writes.end(begun)
        return replaced if name is None or replaced else _WRITTEN.format(repr(name))

    def expect_trials(self) -> None:
        """Expect that optimizers try values in this worker."""
        self._writes.expect()

    def put_back(self) -> None:
        """Make trained parameters views of the job's weights again."""
        assert self._vector is not None
        for index, entry in enumerate(self.layout.entries):
            if entry.trainable:
                self._parameters[entry.name].data = self.layout.entry_view(self._vector, index)

    def take_place(self, where: Where, replica: int, replicas: int) -> None:
        """Note the place of the next batch, and which of the workers this is."""
        self.session.job.take_seat(replica, replicas)
        self._where = where
        if where.empty:
            self.hyper = self.digest = None
            self.session.pass_by(where)

    def _follow(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Have gradients of a parameter collected, which may be frozen for now."""
        requires = parameter.requires_grad
        parameter.requires_grad_(True)
        super()._follow(index, parameter)
        parameter.requires_grad_(requires)

    def _hook(self, index: int, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        return self._overlap.hook(index, view)

    def _leave(
        self, index: int, parameter: torch.Tensor, gradient: torch.Tensor, view: torch.Tensor
    ) -> None:
        """Report a gradient that is as it will be at the step, as far as is known."""
        assert self._ready is not None
        self._weight = self.loop.weights.weight
        self._write(index, parameter, gradient, view, self._ready)

    def compute_gradients(self, batch: Any, ready: Ready, metrics: bool) -> Computed:
        """Let the user's loop go on with a batch up to its `optimizer.step()`, and take the gradients.

        See `steepest.core.models.protocol.Model.compute_gradients`. Where it takes no step there is no
        gradient: an update in which no worker has one changes nothing.
        """
        session, loop = self.session, self.loop
        samples, whole = (1, 1) if self._share is None else self._share
        self._begin_anew_if_undone()
        again = bool(self.tables) and session.awaits(self._where)
        taken = Batch(batch, self._where, samples, whole)
        stepped = self._in_turn(self._go_on_with, taken, ready)
        if loop.batches.taken is not None and loop.batches.taken.where == self._where:
            samples = loop.batches.taken.samples
        if not stepped:
            self.hyper, self.digest = None, loop.steps.no_step(returned=session.has_ended)
        if stepped:
            self._check_trained()
            if self.tables:
                self.rows.send(loop.steps.factor, again=again)
        self._weight = loop.weights.weight if stepped else 0.0
        left = self._overlap.left(self._weight if stepped else None)
        loop.steps.edits.are_made = self._overlap.edits.is_found
        if left is None:
            assert self.take_back is not None
            self.take_back()
        if left is None or len(left) < len(self._gradients):
            with torch.no_grad():
                self._push(ready, left or (), stepped=stepped)
        fresh = loop.reports.take_fresh()
        if stepped and self._share is None:
            samples = loop.weights.samples
        losses = loop.weights.losses.found
        loss = sum([each.item() for each in losses]) if losses else math.nan
        if loop.prepared.sums:
            loss /= max(loop.weights.samples, 1)
        return Computed(
            loss, self._weight, 0 if session.has_ended else samples, fresh if metrics else {}
        )

    def _go_on_with(self, batch: Batch, ready: Ready) -> bool:
        """Let the loop go on with a batch, and gradients leave meanwhile; return whether it has taken a step."""
        session, loop, overlap = self.session, self.loop, self._overlap
        may_leave = self.take_back is not None and loop.leaves_early
        self._ready = ready
        overlap.begin(loop.weights, loop.steps.unseen, self._leave if may_leave else None)
        try:
            stepped = session.compute(batch)
        except BaseException:
            overlap.end(raised=True)
            raise
        finally:
            self._ready = None
        overlap.end()
        return stepped

    def _begin_anew_if_undone(self) -> None:
        """Begin the loop anew, from its last state, if the step that it awaits was dealt out in another way."""
        session, loop = self.session, self.loop
        if session.is_undone(self._where):
            rounds = loop.states.rounds
            begun = (
                rounds.take_step(self._where.step)
                if loop.job.kind.together
                else rounds.take_given_up()
            )
            if begun is not None:
                state, buffers = unpack(begun.state), begun.buffers
            else:
                state, buffers = loop.states.state(), self._buffers()
            session.begin_anew(state, rounds)
            super().load_state(buffers)
        loop.states.rounds.take_given_up()

    def _take(self, gradient: torch.Tensor, out: torch.Tensor) -> None:
        if self.loop.prepared.sums:
            torch.mul(gradient, self.loop.steps.factor, out=out)
        else:
            out.copy_(gradient)

    def _push(self, ready: Ready, left: Collection[int], *, stepped: bool) -> None:
        """Report the gradients of a step; `left`: those that have left already."""
        for index, entry in enumerate(self.layout.entries):
            if entry.trainable and index not in left:
                parameter, view = self._parameters[entry.name], self._gradients[entry.name]
                held = entry.name in self.optimizer_spec.apart
                takes_part = stepped and (held or id(parameter) in self.loop.steps.stepping)
                if not takes_part or parameter.grad is None:
                    view.zero_()
                    ready(index, self._weight, False)
                else:
                    self._write(index, parameter, parameter.grad, view, ready)

    def go_on(self, version: int) -> None:
        """Let the loop go on behind `optimizer.step()` when its update is committed and all weights are here."""
        try:
            self._in_turn(self.session.committed, version)
        except ModelError as error:
            self.session.fail(error)

    def go_on_by_itself(self) -> None:
        """Let the loop go on after an `optimizer.step()` that updates this worker alone, see `Session.updated`."""
        try:
            self._in_turn(self.session.updated)
        except ModelError as error:
            self.session.fail(error)

    def go_on_together(self, version: int) -> None:
        """Let the loop go on behind the loop over its loader, see `Session.committed`; it may wait for others there."""
        self._in_turn(partial(self.session.committed, waits=True), version)

    def begin_round(self, number: int, given_up: int | None) -> None:
        """Note that a round of the worker's own updates begins, see `Session.begin_round`."""
        self.session.begin_round(number, given_up)

    def decided_before(self, number: int) -> None:
        """Note that all rounds before one are decided on, see `Session.decided_before`."""
        self.session.decided_before(number)

    def end_round(self, epoch: int | None) -> None:
        """Let the loop go on behind the last `optimizer.step()` of a round, see `Session.end_round`."""
        try:
            self._in_turn(self.session.end_round, epoch)
        except ModelError as error:
            self.session.fail(error)

    def bind(self, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Move the parameters into flat vectors; gradients that the loop has computed stay its own."""
        kept = {name: parameter.grad for name, parameter in self._parameters.items()}
        super().bind(weights, gradients)
        for name, gradient in kept.items():
            self._parameters[name].grad = gradient

    def state(self) -> dict[str, torch.Tensor]:
        """Return buffers and the like, and the state of the loop."""
        state = self.loop.states.state()
        unsent = self.loop.reports.unsent_before(state.get("reported", state["reports"]))
        state["unsent"] = self.loop.job.rank, [tuple(each) for each in unsent]
        state["gathered"] = (
            self.loop.job.size,
            self.loop.gatherer.behind_steps(self.loop.prepared.cursor),
        )
        return {**self._buffers(), LOOP_STATE: pack(state, self.loop.batches.count)}

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return buffers and the like as they are where the loop's state begins."""
        if (begun := self.loop.states.begun) is not None:
            return begun.buffers
        buffers = super().state()
        if (
            self.loop.states.is_in_step
        ):  # forward passes of a batch that is taken again have changed them
            buffers |= {name: value for name, value in self._of_step.items() if name in buffers}
        return buffers

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of buffers and the like as they are now."""
        return super().state()

    def note_buffers(self) -> None:
        """Note the buffers where the loop begins a step: a worker that takes its place from there has these."""
        if self._has_buffers:
            named = self.module.named_buffers(remove_duplicate=False)
            self._of_step = {plain(name): value.detach().cpu().clone() for name, value in named}

    def restore_buffers(self) -> None:
        """Set the buffers that have arrived, now that the loop has come to where they are of."""
        if self._arrived is not None:
            super().load_state(self._arrived)
            self._arrived = None

    def keep_buffers(self) -> None:
        """Keep the buffers as the loop has them, in place of those that have arrived."""
        self._arrived = None

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the values that `state` returned; a loop at another place of the job begins anew."""
        own = dict(state)
        packed = own.pop(LOOP_STATE, None)
        if packed is not None and not self.session.load(unpack(packed)):
            return  # forward passes of the batch in which it is are not made again
        super().load_state(own)
        self._arrived = own if self.loop.entry.arriving is not None else None

    def adopt(self, other: LoopModel) -> None:
        """Become the replica of a module that the user's function has made anew; the job's weights stay.

        Raises:
            ModelError: it is not like the one before.
        """
        before, now = (
            [(e.name, e.shape, e.dtype) for e in m.layout.entries] for m in (self, other)
        )
        other._trainable |= self._trainable & other.optimizer_spec.trainable()  # unfrozen since
        if sorted(before) != sorted(now) or self._trainable != other._trainable:
            raise ModelError(
                "the function has made another model when it began anew: let it make the same one each time"
            )
        before_rows = self.rows
        staying = (
            *("session", "loop", "layout", "optimizer_spec", "data", "batch_size"),
            *("_where", "_share_of", "_device", "_vector", "_gradients", "_overlap", "_hooks"),
        )
        vars(self).update({**vars(other), **{name: vars(self)[name] for name in staying}})
        self.optimizer_state = None
        if isinstance(self.data, EachEpochSource) and isinstance(other.data, EachEpochSource):
            self.data.inner = other.data.inner
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        for index, entry in enumerate(self.layout.entries):
            if entry.trainable and self._vector is not None:
                self._follow(index, self._parameters[entry.name])
        self.module.to(self._device)
        if self._vector is not None:
            self.move(self._vector)
        if self.tables and before_rows.source is not None:
            self.use_rows(before_rows.source)

    def advance(self, epoch: int, number: int = 0) -> Progress:
        """Let the user's function go on between two steps, see `Session.advance`."""
        return self._in_turn(self.session.advance, epoch, number)

    def copy_to_evaluate(self, number: int) -> Any:
        """Return what a call of `steepest.evaluate` has copied; None if that worker is another, or has died."""
        return self.loop.reports.take_copy(number)

    def evaluate(self, batch: Any) -> NoReturn:
        """Refuse: only the loop knows how its model is evaluated."""
        raise ModelError(
            "evaluate() with a loop of your own: evaluate in the loop, on batches of a second loader"
        )


@contextlib.contextmanager
def _hooks_aside(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Have optimizers without hooks of their steps in this context: the loop calls these, not the servers."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept = [(vars(each), name, vars(each)[name]) for each in optimizers for name in names]
    for attributes, name, _ in kept:
        attributes[name] = OrderedDict()
    try:
        yield
    finally:
        for attributes, name, hooks in kept:
            attributes[name] = hooks


@dataclass(frozen=True)
class LoopCreator:
    """Makes the model of each worker, by running the user's function up to `prepare`.

    Args:
        function: the user's.
        kind: how the job's workers train.
    """

    given_as: ClassVar[str] = "the function that trains"  # what errors call it

    function: Callable[[], Any]
    kind: LoopKind = field(default_factory=LoopKind)

    @property
    def name(self) -> str:
        """A name for errors: a script's file, or the name of the function."""
        if isinstance(self.function, UserScript):
            return os.path.basename(self.function.path)
        return f"the function {name_of(self.function)}"

    @property
    def building(self) -> str:
        """What workers do before there is a model, in words, for errors."""
        return f"run {self.name} up to steepest.prepare()"

    def __call__(self, worker_index: int, device_index: int) -> LoopModel:
        """Begin the function in a worker's process; see `steepest.core.engine.job.ModelCreator`."""
        spare_compiler()
        session = Session(self.function, worker_index, step_size().batches, self.kind)
        model: LoopModel = session.begin()
        return model

    def ahead(self) -> BegunLoop | None:
        """Begin the function where it is not known yet for which worker; None if it has ended before it needs that."""
        spare_compiler()
        session = Session(self.function, None, step_size().batches, self.kind)
        # what it has raised, it raises again in a worker
        return BegunLoop(self, session, step_size()) if session.run_ahead() else None


class BegunLoop:
    """Makes the model of one worker by a function that has begun before.

    Args:
        creator: that has begun it.
        session: of the function.
        size: of the job's steps when it was begun.
    """

    def __init__(self, creator: LoopCreator, session: Session, size: StepSize) -> None:
        self._creator, self._size = creator, size
        self._session: Session | None = session

    def __call__(self, worker_index: int, device_index: int) -> LoopModel:
        """Let the function go on as a worker's; it runs anew for further devices, and for steps of another size."""
        if step_size() != self._size:
            self.end()
        session, self._session = self._session, None
        if session is None:
            return self._creator(worker_index, device_index)
        session.job.take_seat(worker_index, self._size.batches)
        model: LoopModel = session.begin()
        return model

    def end(self) -> None:
        """End the function where it is."""
        session, self._session = self._session, None
        if session is not None:
            session.end()
