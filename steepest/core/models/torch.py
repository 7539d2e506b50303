"""TorchModel: a torch module with its loss, data and optimizer, as a `Model`."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from steepest.core.data.protocol import Source
from steepest.core.data.sources import as_source
from steepest.core.models.arguments import (
    check_functions,
    check_module,
    check_not_sparse,
    check_precision,
    check_reduction,
    chosen_buffers,
    sparse_gradient,
)
from steepest.core.models.containers import changed_parts
from steepest.core.models.loss_graph import PERHAPS, SUMMED, WEIGHED, summed_by, weighed_mean
from steepest.core.models.losses import (
    ONE_SAMPLE,
    Loss,
    Weighed,
    call,
    called_backward,
    of_one_sample,
    own_loss,
    users_line,
    weigh,
    with_parts,
)
from steepest.core.models.metric_means import told_of_no_mean
from steepest.core.models.metric_states import (
    AccumulatedMetrics,
    MetricState,
    is_metric,
    without_metrics,
)
from steepest.core.models.names import plain, plainly
from steepest.core.models.protocol import (
    Computed,
    Model,
    Ready,
    Share,
    checked_metrics,
)
from steepest.core.models.write_check import WriteCheck, holders_of
from steepest.core.optim.arriving import arriving_state
from steepest.core.optim.several import as_one
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.optim.torch_without_compiler import without_compiler
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout
from steepest.errors import ModelError

log = logging.getLogger(__name__)

_TEXTS = ("U", "T", "O")  # kinds of NumPy's dtypes: text of one length, of any, and objects
_MOST_LOOKS = 16  # losses of a model that are looked at
_DO = "return the mean, or give TorchModel(reduction='sum'), or return (loss, weight)"

LossFunction = Callable[..., Loss | tuple[Loss, float]]
Metric = Callable[[Any, Any], "float | torch.Tensor"]


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the share of rows whose largest output is at the target class.

    A metric for `TorchModel`.

    Args:
        output: (N, classes) scores.
        target: (N,) class indices.

    Returns:
        A float64 tensor without dimensions.
    """
    return (output.argmax(dim=1) == target).double().mean()


class TorchModel(Model):
    """One replica: a dense torch module with its loss, data, batch size and optimizer.

    `steepest.TorchModel` is this class for modules with embedding tables, too.

    Either give `loss`, called as ``loss(module(*inputs), target)`` on batches ``(*inputs,
    target)``; or a module whose output has an attribute `loss`, as those of Hugging Face's
    transformers do, called with a batch's values by name, or in order; or subclass and write
    ``loss(batch)`` and, if wanted, ``metrics(batch)`` for batches of any form.

    Args:
        module: the network; its parameters are moved into the library's flat vectors.
        loss: returns the mean loss of a batch (for sums see `reduction`), or several by name, whose
            sum is minimised and which are metrics too; or (either of them, weight) if a batch has a
            weight other than its number of samples (tokens, say). None if the module's output has
            the loss.
        data: training data: arrays or tensors of one length, a map-style dataset, a DataLoader, or
            an iterable of batches.
        batch_size: samples per replica and step.
        optimizer: receives the module, returns a torch.optim optimizer, or a list of several over
            disjoint parameters, all of which step. State that it already has, as after
            `load_state_dict`, is taken over.
        metrics: functions of (output, target), each a mean over the batch, by name; or metrics of TorchMetrics,
            which evaluations update with (output, target) and compute once, of all samples. The target of a batch that
            is a dict is its "labels".
        lr_scheduler: receives the optimizer (of several, one with all their groups), returns a
            torch.optim.lr_scheduler; ticks once per step.
        learning_rate: instead of `lr_scheduler`: the learning rate as a function of the number of
            steps before it: 0 in the first step, whose `StepResult.step` is 1.
        autocast: torch.bfloat16 or torch.float16 to run forward passes and the loss under
            `torch.autocast`; parameters and gradients keep their dtype, and metrics receive the
            output in the reduced one.
        loss_scale: for float16, in which small gradients vanish: the loss is multiplied by it
            before the backward pass, and gradients are divided by it as they are copied. Let the
            strategy leave overflows out (``nonfinite="skip"``).
        reduction: how the loss treats the samples of a batch: "mean", or "sum" if it adds them up.
            Then an update's gradient is the sum over all samples of the step (in asynchronous modes
            of the push, under `local` of the worker's batch). The losses of results and evaluations
            are still means.
        buffers: how replicas' values are merged in `state_dict`, evaluations and the weights of checkpoints, and for a
            replica that joins: their "mean", or worker 0's ("first"). By name of a buffer, or of a frozen parameter
            that the module changes itself; or by pattern, such as ``{"*.queue": "first"}``, of which the last that
            fits counts. Other values are merged by default: the mean of frozen parameters and running statistics,
            else worker 0's.

    Attributes:
        optimizer_state: with which the optimizer arrived, until servers have it; None for none.
        merging: see `steepest.core.models.protocol.Model`.

    Raises:
        ModelError: a lazy parameter, a name used twice, nothing to train, a trained embedding with
            sparse=True.
        ConfigurationError: bad data, batch size, loss, optimizer, metrics, schedule, autocast,
            loss scale or buffers; a loss with another reduction than `reduction`; sums over data that
            choose their own batches.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
        >>> sgd = lambda module: torch.optim.SGD(module.parameters(), lr=0.1)
        >>> model = TorchModel(torch.nn.Linear(3, 2), loss=F.cross_entropy, data=(x, y),
        ...                    batch_size=4, optimizer=sgd)
        >>> [entry.name for entry in model.layout.entries]
        ['bias', 'weight']
    """

    _own_backward = ""  # the line of the user's code that called backward() in the loss
    _share: Share | None = None  # of the next batch
    _ready: Ready | None = None  # of the backward pass that runs
    _weight = 0.0  # of the present batch
    _evaluates = False  # a batch, instead of training on it
    _compares = False  # metrics of the next evaluated batch with those of its halves
    _has_no_mean = False  # among the metrics, as the notice says
    _looks = 0  # losses that were looked at
    _has_learned = False  # whether the loss of any batch has depended on a trained parameter
    #: of the layout, see `steepest.core.tensors.layout`; a subclass' model may have some
    opaque_chunks = 0

    def __init__(  # noqa: PLR0913 - keywords of a user, most of them optional
        self,
        module: torch.nn.Module,
        *,
        data: Any,
        optimizer: Callable[
            [torch.nn.Module], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
        ],
        loss: LossFunction | None = None,
        batch_size: int | None = None,
        metrics: Mapping[str, Metric] | None = None,
        lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        learning_rate: Callable[[int], float] | None = None,
        autocast: torch.dtype | None = None,
        loss_scale: float = 1.0,
        reduction: str = "mean",
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        check_module(module)
        check_functions(loss, optimizer, metrics, lr_scheduler, learning_rate)
        check_precision(autocast, loss_scale)
        self._autocast = self.reduced = autocast
        self._loss_scale = float(loss_scale)
        self.module = module
        self.data, self.batch_size = self._as_source(data, batch_size)
        self._sums = check_reduction(reduction, loss, self.data.size)
        self.merging = chosen_buffers(buffers, module)
        self._loss = loss
        self._metrics = dict(metrics or {})
        self._accumulated = AccumulatedMetrics()
        self._output: Any = None
        self._parameters = plainly(module.named_parameters())
        self._holders = plainly(holders_of(module, dict(module.named_parameters())))
        self._aliases = _aliases(module)
        self._recipe = optimizer, lr_scheduler, learning_rate
        chosen, self.optimizer_spec = self._read_optimizer()
        self._choose_trained()
        trained = {id(self._parameters[name]): name for name in self._trainable}
        self.optimizer_state = arriving_state(chosen, trained, self.optimizer_spec)
        check_not_sparse(module, set(trained))
        self.layout = self._plan(ChunkSpec())
        self._device = torch.device("cpu")
        self._vector: torch.Tensor | None = None  # the flat weights, after `bind`
        self._gradients: dict[str, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._missing: dict[int, torch.Tensor] = {}
        self._writes = WriteCheck()

    def _choose_trained(self) -> None:
        """Note which parameters are trained, and which the optimizer leaves out; ModelError: none is trained."""
        updated = self.optimizer_spec.trainable()
        wants = {name for name, p in self._parameters.items() if p.requires_grad}
        self._trainable = wants & updated
        self._untrained = wants - updated  # the optimizer leaves them out on purpose
        if not self._trainable:
            raise ModelError(
                "nothing to train: every parameter is frozen, or unknown to the optimizer, which is "
                "built over module.parameters()"
            )

    def _read_optimizer(self) -> tuple[torch.optim.Optimizer, OptimizerSpec]:
        optimizer, lr_scheduler, learning_rate = self._recipe
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        with without_compiler():
            chosen = as_one(optimizer(self.module))
        return chosen, OptimizerSpec.read(
            chosen, names, lr_scheduler=lr_scheduler, learning_rate=learning_rate
        )

    def _plan(self, cut: ChunkSpec) -> ParameterLayout:
        return ParameterLayout.plan(
            [
                (name, tuple(parameter.shape), parameter.dtype, name in self._trainable)
                for name, parameter in self._parameters.items()
            ],
            aliases=self._aliases,
            split_tensors=self.optimizer_spec.elementwise and not cut.whole,
            together=self.optimizer_spec.together,
            chunk_bytes=cut.chunk_bytes,
            fragments=cut.fragments,
            opaque_chunks=self.opaque_chunks,
            apart=self.optimizer_spec.apart,
            joined=self.optimizer_spec.joins,
        )

    # -- for subclasses ------------------------------------------------------------------------

    def loss(self, batch: Any) -> Loss | tuple[Loss, float]:
        """Return the mean loss of a batch, or several by name, or (either of them, weight).

        Override for batches of another form.
        """
        if self._loss is None:
            self._output = call(self.module, batch)
            return own_loss(self._output)
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            many = f"a {type(batch).__name__}"
            if isinstance(batch, (tuple, list)):
                many += f" of {len(batch)}"
            raise ModelError(
                f"the batch is {many}, but loss= takes batches (*inputs, target): give data with "
                "inputs and targets, or subclass TorchModel and write loss(self, batch)"
            )
        *inputs, target = batch
        self._output = self.module(*inputs)
        return self._loss(self._output, target)

    def metrics(self, batch: Any) -> Mapping[str, Any]:
        """Return means over a batch, by name.

        Called after `loss` on the same batch, without gradients.

        Each is a number: Python's, a NumPy scalar, or a tensor without dimensions. NaN and infinity
        are reported as they are. Or it is a metric of TorchMetrics that was updated with the batch: an
        evaluation computes it once, of all its samples; training steps leave it out.
        """
        if not self._metrics:
            return {}
        target = batch.get("labels") if isinstance(batch, Mapping) else batch[-1]
        values: dict[str, Any] = {}
        metric: Any
        for name, metric in self._metrics.items():
            if not is_metric(metric):
                values[name] = metric(self._output, target)
            elif self._evaluates:
                metric.to(self._device).update(self._output, target)
                values[name] = metric
        if self._evaluates and self._compares:
            self._compare_halves(target, values)
        return values

    def _compare_halves(self, target: Any, values: Mapping[str, Any]) -> None:
        """Notice a metric of the first evaluated batch that is no mean over its samples.

        A weight that the loss has given the batch is unknown of its halves.
        """
        samples = self._share.samples if self._share is not None else 0
        if samples < 2 or self._weight != samples:
            return
        self._compares = False
        functions = {n: each for n, each in self._metrics.items() if not is_metric(each)}
        if text := told_of_no_mean(functions, values, self._output, target, samples):
            self.notice, self._has_no_mean = text, True

    # -- Model ---------------------------------------------------------------------------------

    def unfrozen(self) -> frozenset[str]:
        """Return the names of frozen parameters that require a gradient by now.

        If the optimizer lacks one of them, its factory is called once more.

        Raises:
            ModelError: that optimizer lacks it, too.
        """
        frozen = self._parameters.keys() - self._trainable - self._untrained
        names = frozenset(name for name in frozen if self._now(name).requires_grad)
        if names - self.optimizer_spec.trainable():
            self._unfreeze(names)
        return names

    def _now(self, name: str) -> torch.nn.Parameter:
        """Return a parameter; the model may have put another object in a frozen one's place."""
        holder, key = self._holders[name]
        own = holder.get(key)
        return self._parameters[name] if own is None else own

    def _unfreeze(self, names: Iterable[str]) -> None:
        """Have the optimizer update more parameters; ModelError: it leaves one out, or there is none of that name."""
        for name in names:
            if name not in self._parameters:
                raise ModelError(f"there is no parameter {name!r} to unfreeze")
            self._parameters[name] = self._now(name)
            self._parameters[name].requires_grad_(True)
        if set(names) - self.optimizer_spec.trainable():
            _, self.optimizer_spec = self._read_optimizer()
        if unknown := set(names) - self.optimizer_spec.trainable():
            self._untrained |= unknown
            raise ModelError(
                f"parameter {min(unknown)!r} was unfrozen, but optimizer= leaves it out: build the "
                "optimizer over module.parameters(), which may be frozen, too"
            )

    def relayout(self, cut: ChunkSpec) -> None:
        """Cut `layout` into other chunks; see `steepest.core.models.protocol.Model.relayout`."""
        if more := cut.unfrozen - self._trainable:
            self._unfreeze(more)
            self._trainable |= more
            self._gates = None  # they wait for entries, whose places are others now
        self.layout = self._plan(cut)

    def bind(self, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Move the parameters into flat vectors; see `steepest.core.models.protocol.Model.bind`."""
        self._device, self._vector = weights.device, weights
        self.module.to(self._device)
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        with torch.no_grad():
            for index, entry in enumerate(self.layout.entries):
                parameter = self._parameters[entry.name]
                view = self.layout.entry_view(weights, index)
                view.copy_(parameter)
                parameter.grad = None
                if entry.trainable:
                    parameter.data = view
                    self._gradients[entry.name] = self.layout.entry_view(gradients, index)
                    self._follow(index, parameter)
        self._writes.watch(self.layout, self._parameters, self._holders, weights)

    def move(self, weights: torch.Tensor) -> None:
        """Make trained parameters views of another vector.

        See `steepest.core.models.protocol.Model.move`.
        """
        self._vector = weights
        with torch._C.DisableTorchFunctionSubclass():  # they may be awaited ones, of a pass
            for index, entry in enumerate(self.layout.entries):
                if entry.trainable:
                    self._parameters[entry.name].data = self.layout.entry_view(weights, index)
        self._writes.watch(self.layout, self._parameters, self._holders, weights)

    def reseat(self) -> str | None:
        """Make the trained parameters views of the weights again, if a user's function has changed that.

        Returns:
            The name of the first parameter that was no view; None if all were.
        """
        return self._writes.reseat()

    def _follow(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Collect gradients of a parameter as backward passes write them."""
        hook = self._hook(index, self._gradients[self.layout.entries[index].name])
        register = parameter.register_post_accumulate_grad_hook
        self._hooks.append(register(hook))  # type: ignore[no-untyped-call]

    def _hook(self, index: int, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        # torch keeps hooks where the garbage collector does not see them: a reference to the model,
        # which holds the parameter, would keep both for ever
        this = weakref.ref(self)

        def collect(parameter: torch.Tensor) -> None:
            model = this()
            if model is not None and model._ready is not None:
                model._collect(index, parameter, view, model._ready)
            elif model is not None:  # a backward pass of the user's own
                model._own_backward = model._own_backward or users_line()

        return collect

    def _collect(
        self, index: int, parameter: torch.Tensor, view: torch.Tensor, ready: Ready
    ) -> None:
        """Move the gradient of a layout's entry into its view of the flat vector, and report it."""
        if self._missing.pop(index, None) is None:
            name = self.layout.entries[index].name
            raise ModelError(
                f"the gradient of {name!r} was accumulated twice: leave backward() to the "
                "library, and "
                "checkpoint activations with use_reentrant=False"
            )
        gradient = parameter.grad
        assert gradient is not None
        self._write(index, parameter, gradient, view, ready)
        parameter.grad = None

    def _write(
        self,
        index: int,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        view: torch.Tensor,
        ready: Ready,
    ) -> None:
        """Copy a gradient of a layout's entry to its view of the flat vector, and report it."""
        if gradient.is_sparse:
            raise ModelError(sparse_gradient(repr(self.layout.entries[index].name), parameter))
        chunks = self.layout.chunks_of[index]
        if len(chunks) == 1 or not gradient.is_contiguous():
            self._take(gradient, view)
            ready(index, self._weight, True)
        else:  # the first part leaves while the next one is copied
            for chunk in chunks:
                where = next(
                    slice(p.start, p.stop)
                    for p in self.layout.chunks[chunk].slices
                    if p.entry == index
                )
                self._take(gradient.view(-1)[where], view.view(-1)[where])
                ready(index, self._weight, True, chunk)

    def _take(self, gradient: torch.Tensor, out: torch.Tensor) -> None:
        if self._loss_scale == 1.0:
            out.copy_(gradient)
        else:
            torch.mul(gradient, 1.0 / self._loss_scale, out=out)

    def compute_gradients(self, batch: Any, ready: Ready, metrics: bool) -> Computed:
        """Run a forward and a backward pass.

        See `steepest.core.models.protocol.Model.compute_gradients`.
        """
        try:
            return self._compute_gradients(self._to_device(batch), ready, metrics)
        finally:
            # also after a step that was given up: its graph would stay in memory beside the next one's
            self._output = None

    def _compute_gradients(self, batch: Any, ready: Ready, metrics: bool) -> Computed:
        """Run both passes of a batch on the model's device."""
        loss, parts, samples, self._weight = self._run_forward(batch)
        share = self._share or Share(samples, samples)
        # of sums over the batches that make an update, the mean by samples is to be the sum
        summed = self._sums and samples > 0
        self._run_backward(loss, ready, (share.whole or 1) / samples if summed else 1.0)
        missing, self._missing = self._missing, {}
        for index in sorted(missing):
            missing[index].zero_()
            ready(index, self._weight, False)
        numbers: dict[str, float] = {}
        if metrics:
            with torch.no_grad():
                values = without_metrics(self.metrics(batch))
                numbers = with_parts(parts, checked_metrics(values), self._per(samples))
        return Computed(loss.item() / self._per(samples), self._weight, samples, numbers)

    def _run_forward(self, batch: Any) -> Weighed:
        """Return the loss of a batch."""
        self._own_backward = ""
        try:
            with self._writes.refused(), self._mixed():
                result = self.loss(batch)
        except ValueError as error:
            if of_one_sample(error):
                raise ModelError(ONE_SAMPLE) from error
            raise
        try:
            weighed = weigh(batch, result, self._share, self._sums)
            # of a later batch it may be so on this worker alone: one with nothing to learn from
            if not weighed.loss.requires_grad and (self._own_backward or not self._has_learned):
                raise ModelError(
                    "the loss does not depend on any trainable parameter (was it detached?)"
                )
        except ModelError as error:
            if self._own_backward:
                raise ModelError(called_backward(self._own_backward)) from error
            raise
        self._has_learned = True
        alone = not isinstance(result, tuple) and weighed.loss.requires_grad
        if alone and self._looks < _MOST_LOOKS:
            self._look_at(weighed)
        return weighed

    def _look_at(self, weighed: Weighed) -> None:
        """Check of the first losses, if several batches make an update, that they are means over samples.

        The first one may not be a sum; one that is a mean by weights is warned of.

        Raises:
            ModelError: it is a sum.
        """
        if self._sums or self._share is None or self._share.whole == self._share.samples:
            return
        if not self._looks and (operation := summed_by(weighed.loss, weighed.samples)) is not None:
            name, is_certain = operation
            if is_certain:
                raise ModelError(SUMMED.format(name, _DO))
            log.warning(SUMMED.format(name, _DO) + PERHAPS)
        self._looks += 1
        if (mean := weighed_mean(weighed.loss)) is not None:
            log.warning(WEIGHED.format(mean.counted, mean.targets, mean.name))
            self._looks = _MOST_LOOKS  # told once

    def _run_backward(self, loss: torch.Tensor, ready: Ready, factor: float) -> None:
        """Compute the gradients of a loss times a factor, and call `ready` for each."""
        self._missing = {self.layout.index[name]: view for name, view in self._gradients.items()}
        for name in self._gradients:
            self._parameters[name].grad = None
        if not loss.requires_grad:
            return
        self._ready = ready
        try:
            scale = self._loss_scale * factor
            scaled = loss if scale == 1.0 else loss * scale
            scaled.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if self._own_backward and "backward through the graph a second time" in str(error):
                raise ModelError(called_backward(self._own_backward)) from error
            raise
        finally:
            self._ready = None
            for parameter in self._parameters.values():
                parameter.grad = None  # parameters that no optimizer has would accumulate theirs

    @property
    def sums_samples(self) -> bool:
        """Whether updates are sums over their samples, see `steepest.core.models.protocol.Model`."""
        return self._sums

    def _per(self, samples: int) -> int:
        """Return the number by which a loss is divided to be a mean."""
        return max(samples, 1) if self._sums else 1

    def expect(self, share: Share | None) -> None:
        """Take the numbers of samples of the next batch; see `steepest.core.models.protocol.Model`."""
        self._share = share

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Computed:
        """Return loss and metrics in evaluation mode.

        See `steepest.core.models.protocol.Model.evaluate`.
        """
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        self._evaluates = True
        try:
            batch = self._to_device(batch)
            with self._writes.refused(), self._mixed():
                result = self.loss(batch)
            loss, parts, samples, weight = weigh(batch, result, self._share, self._sums)
            self._weight = weight
            numbers = checked_metrics(self._accumulated.take(self.metrics(batch)))
            metrics = with_parts(parts, numbers, self._per(samples))
        finally:
            self._output, self._evaluates = None, False
            for module, training in modes:
                module.training = training
        return Computed(loss.item() / self._per(samples), weight, samples, metrics)

    def begin_evaluation(self) -> None:
        """Forget what metrics have accumulated; compare the first batch's with those of its halves."""
        self._accumulated.begin()
        self._compares = not self._has_no_mean

    def metric_states(self) -> dict[str, MetricState]:
        """Return what metrics have accumulated since an evaluation began, by name."""
        return self._accumulated.states()

    def metric_values(self, parts: Sequence[Mapping[str, MetricState]]) -> dict[str, float]:
        """Return the values of metrics over all that the workers have accumulated."""
        return self._accumulated.values(parts)

    @staticmethod
    def _as_source(data: Any, batch_size: int | None) -> tuple[Source, int]:
        """Return data as a source, and the batch size; a subclass may know further kinds of data."""
        return as_source(data, batch_size)

    def source(self, data: Any, batch_size: int) -> Source:
        """Return a source of batches for `evaluate`."""
        return self._as_source(data, batch_size)[0]

    def state(self) -> dict[str, torch.Tensor]:
        """Return CPU copies of persistent buffers and changed frozen parameters, by each name."""
        kept = self.module.state_dict(keep_vars=True)
        state = {
            plain(name): b.detach().cpu().resolve_conj().resolve_neg().clone()
            for name, b in self.module.named_buffers(remove_duplicate=False)
            if name in kept
        }
        for name, parameter, installed in self._frozen():
            if not _same_bits(parameter, installed):
                state[name] = parameter.detach().cpu().clone(memory_format=torch.contiguous_format)
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the values that `state` returned.

        Frozen parameters that it does not name get the installed ones.

        Raises:
            ModelError: the module has no buffer or frozen parameter of that name, or of another
                shape.
        """
        buffers = plainly(self.module.named_buffers(remove_duplicate=False))
        frozen = {name: (parameter, installed) for name, parameter, installed in self._frozen()}
        with torch.no_grad():
            for name, value in state.items():
                if name in self._trainable:
                    continue  # it was frozen when the state was taken
                if name not in buffers and name not in frozen:
                    raise ModelError(
                        f"the module has no buffer named {name!r}: was it made by another model?"
                    )
                own = buffers[name] if name in buffers else frozen[name][0]
                if own.shape != value.shape:
                    raise ModelError(
                        f"buffer {name!r} has shape {tuple(own.shape)}, the state's has "
                        f"{tuple(value.shape)}: was it made by another model?"
                    )
                if name in buffers:
                    own.copy_(value)
            for name, (parameter, installed) in frozen.items():
                value = state.get(name, installed)
                if not parameter.is_contiguous():  # it may be an expanded one
                    parameter.data = value.to(installed, copy=True)
                elif not _same_bits(parameter, value):  # saves the writing of large ones
                    parameter.copy_(value)

    def _frozen(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each frozen parameter's name, present and installed value.

        Raises:
            ModelError: it has another shape or dtype, or does not exist any more.
        """
        for index, entry in enumerate(self.layout.entries):
            if entry.trainable or self._vector is None:
                continue
            holder, key = self._holders[entry.name]
            own = holder.get(key)  # the model may have put another object there
            if own is None:
                raise ModelError(
                    f"frozen parameter {entry.name!r} is gone: let the model write to it instead"
                )
            if (tuple(own.shape), own.dtype) != (entry.shape, entry.dtype):
                raise ModelError(
                    f"frozen parameter {entry.name!r} was {entry.dtype} of shape {entry.shape}, "
                    f"the model has made it {own.dtype} of shape {tuple(own.shape)}: give it "
                    "values of the same"
                )
            yield entry.name, own, self.layout.entry_view(self._vector, index)

    def _mixed(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def _to_device(self, batch: Any) -> Any:
        """Return a batch on the replica's device: containers are copies of the same type.

        An object with tensors' methods `to` and `pin_memory` moves itself, even a tuple (torch's PackedSequence).
        """
        if isinstance(batch, torch.Tensor):
            return batch.to(self._device, non_blocking=True)
        if hasattr(batch, "to") and hasattr(batch, "pin_memory"):
            return batch.to(self._device)
        if isinstance(batch, (tuple, list, Mapping)):
            return changed_parts(batch, self._to_device)
        return self._take_array(batch) if hasattr(batch, "__array__") else batch

    def _take_array(self, array: Any) -> Any:
        """Return an array of a batch as a tensor for the module; one of texts as it is."""
        if getattr(getattr(array, "dtype", None), "kind", "") in _TEXTS:
            return array
        return torch.as_tensor(array, device=self._device)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; NaN equals NaN."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(a.element_size(), torch.int64)
    first, other = (t.detach().contiguous().view(-1).view(whole) for t in (a, b.to(a.device)))
    return torch.equal(first, other)


def _aliases(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the further names of parameters that a module has under several names, by the first name."""
    names = {id(parameter): plain(name) for name, parameter in module.named_parameters()}
    aliases: dict[str, tuple[str, ...]] = {}
    for full_name, parameter in module.named_parameters(remove_duplicate=False):
        name = plain(full_name)
        if name != (first := names[id(parameter)]):
            aliases[first] = (*aliases.get(first, ()), name)
    return aliases
