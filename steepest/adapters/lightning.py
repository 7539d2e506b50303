"""LightningModel: a LightningModule as a `Model`. Lightning itself is not imported."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from steepest.core.data.protocol import Source
from steepest.core.models.metric_states import is_metric
from steepest.core.models.protocol import Computed, Ready, Where
from steepest.core.models.scalars import describe
from steepest.core.models.step_size import step_size
from steepest.core.optim.detached_schedule import DetachedSchedule
from steepest.errors import ConfigurationError, ModelError
from steepest.tables.modules.torch_model import TorchModel
from steepest.validation import require_count

_PACKAGES = ("lightning", "pytorch_lightning")
_HOOKS = (  # besides those whose names begin with "on_"
    "backward", "configure_callbacks", "configure_gradient_clipping", "configure_model",
    "configure_sharded_model", "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad",
    "prepare_data", "setup", "teardown",
)  # fmt: skip
_NOT_OF_FIT = ("on_test_", "on_predict_")
_OF_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_OF_DATA = (
    "state_dict",
    "load_state_dict",
)  # of a data module, with prepare_data, which is not called


class LightningModel(TorchModel):
    """One replica: a LightningModule, with its own steps, optimizer and schedule.

    Of the module's methods these are called: `configure_optimizers`, `training_step`,
    `validation_step` in `evaluate`, `train_dataloader` if no data are given. `log` and `log_dict`
    make metrics: means over the batch. A metric of TorchMetrics is computed once for all samples of an
    evaluation, and for each batch in training, as one whose name ends in "loss" is. `batch_idx`
    counts the replica's batches in the epoch, or in the evaluation. A batch whose `training_step` returns
    None counts for nothing in its step; where all do, no weight changes. `on_before_batch_transfer`,
    `transfer_batch_to_device` and `on_after_batch_transfer` are called, a data module's own before the module's.
    `trainer` knows `max_epochs`, `num_training_batches` and
    `estimated_stepping_batches` where they are given; anything else asked of it is an error.

    Args:
        module: with automatic optimization.
        data: training data as `TorchModel` takes them; None for the module's `train_dataloader()`; a
            LightningDataModule for its own, after ``setup("fit")``. Its `prepare_data` is not called.
        batch_size: samples per replica and step; None with a DataLoader that has one.
        steps_per_epoch: steps of all replicas together in an epoch; needed for a schedule of
            epochs, which is Lightning's default interval, or with a frequency.
        epochs: the epochs that are going to be trained.
        ignore_hooks: names of methods that the module overrides and that need not be called.
        autocast, loss_scale, buffers: see `TorchModel`.

    Raises:
        ModelError: the module is no LightningModule, optimizes by itself, lacks a method, or
            overrides one that is not called here; also as `TorchModel`.
        ConfigurationError: what `configure_optimizers` returns is not one optimizer, with at most
            one scheduler of the step or the epoch; also as `TorchModel`.

    Example:
        >>> def model_creator(worker_index, device_index):      # doctest: +SKIP
        ...     return LightningModel(Net(lr=0.1), data=train_set, batch_size=32)
    """

    def __init__(  # noqa: PLR0913 - keywords of a user, most of them optional
        self,
        module: Any,
        *,
        data: Any = None,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        epochs: int | None = None,
        ignore_hooks: Collection[str] = (),
        autocast: torch.dtype | None = None,
        loss_scale: float = 1.0,
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        for name, value in (("steps_per_epoch", steps_per_epoch), ("epochs", epochs)):
            if value is not None:
                require_count(name, value)
        _check_module(module, ignore_hooks)
        module.trainer = _LightningTrainer(steps_per_epoch, epochs)
        _, schedule = _configured(module, steps_per_epoch)
        self._logged: dict[str, Any] = {}
        self._step = "training_step"
        self._index = {"training_step": 0, "validation_step": 0}
        self._hooks_of, data = _of_data(module, data)
        self._steps_per_epoch = steps_per_epoch
        self._per_step = step_size().samples  # None where it is as many as all batches have
        super().__init__(
            module,
            data=module.train_dataloader() if data is None else data,
            batch_size=batch_size,
            optimizer=lambda module: _configured(module, steps_per_epoch)[0],
            lr_scheduler=schedule,
            autocast=autocast,
            loss_scale=loss_scale,
            buffers=buffers,
        )

    def take_place(self, where: Where, replica: int, replicas: int) -> None:
        """Take the place of the next batch, see `steepest.core.models.protocol.Model`."""
        number, batches = where.part
        each = max(batches // replicas, 1)  # of a replica in a step
        steps = where.step
        if self._steps_per_epoch is not None:  # as its schedule counts epochs
            steps %= self._steps_per_epoch
        elif where.epoch is not None:
            whole = self._per_step or batches * self.batch_size
            steps = where.ranges[0][0] // whole if where.ranges else 0
        self._index["training_step"] = steps * each + number % each

    def source(self, data: Any, batch_size: int) -> Source:
        """Return a source of batches for `evaluate`, which begins."""
        self._index["validation_step"] = 0
        return super().source(data, batch_size)

    def compute_gradients(self, batch: Any, ready: Ready, metrics: bool) -> Computed:
        """Run the module's `training_step` and a backward pass; its hooks see the batch before and after it moves."""
        return super().compute_gradients(self._hooked(0, batch), ready, metrics)

    def _hooked(self, number: int, batch: Any, *more: Any) -> Any:
        """Return a batch as a hook of those of batches makes it, if it is overridden."""
        name = _OF_BATCHES[number]
        owner = next((each for each in self._hooks_of if _overrides(each, name)), None)
        if owner is None:
            return batch
        with torch.autocast(self._device.type, enabled=False):
            return getattr(owner, name)(batch, *more, 0)

    def loss(self, batch: Any) -> Any:
        """Return the loss of the module's step, and keep what the step logs; a step without a loss has no weight.

        Raises:
            ModelError: the step returns something else, or logs something that is no mean over a batch.
        """
        self._logged = {}
        batch = self._hooked(2, self._hooked(1, batch, self._device))
        step = getattr(self.module, self._step)
        index = self._index[self._step]
        with self._logging():
            result = step(batch, index) if _takes_index(step) else step(batch)
        self._index[self._step] = index + 1
        if result is None and self._step == "training_step":
            self._logged = {}
            return torch.zeros((), requires_grad=True), 0.0  # which no parameter has a gradient of
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if loss is None and self._step == "validation_step":
            losses = [value for name, value in self._logged.items() if name.endswith("loss")]
            loss = torch.as_tensor(losses[0]) if len(losses) == 1 else None
        if not isinstance(loss, torch.Tensor):
            raise ModelError(
                f"{self._step} returned {describe(result)}: return the batch's mean loss, or a "
                'dict with it as "loss"'
                + ("" if self._step == "training_step" else ", or log one name that ends in loss")
            )
        return loss

    def metrics(self, batch: Any) -> Mapping[str, Any]:
        """Return what the batch's step has logged."""
        return self._logged

    def evaluate(self, batch: Any) -> Computed:
        """Return the results of `validation_step`.

        Raises:
            ModelError: the module has none.
        """
        if not _overrides(self.module, "validation_step"):
            raise ModelError(f"{type(self.module).__name__} has no validation_step: write one")
        self._step = "validation_step"
        try:
            return super().evaluate(self._hooked(0, batch))
        finally:
            self._step = "training_step"

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        """Keep what the module logs here, inside of this context."""
        computed = []  # reset at the end: those of a MetricCollection may share their state

        def log(name: str, value: Any, *_: Any, reduce_fx: Any = "mean", **__: Any) -> None:
            if reduce_fx not in ("mean", "avg", torch.mean):
                raise ModelError(
                    f"log({name!r}, reduce_fx={reduce_fx!r}): what is logged is averaged over "
                    "batches, by their samples"
                )
            if self._evaluates and is_metric(value) and not name.endswith("loss"):
                self._logged[name] = value  # computed once, of the whole evaluation
                return
            if all(callable(getattr(value, method, None)) for method in ("compute", "reset")):
                computed.append(value)
                value = value.compute()
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.detach().reshape(())
            self._logged[name] = value

        module: Any = self.module
        module.log = log  # found before the class' own; `log_dict` calls it
        try:
            yield
        finally:
            del module.log
            for metric in computed:
                metric.reset()


class _LightningTrainer:
    """What the module sees as its Lightning Trainer."""

    def __init__(self, steps_per_epoch: int | None, epochs: int | None) -> None:
        if epochs is not None:
            self.max_epochs = epochs
        if steps_per_epoch is not None:
            self.num_training_batches = steps_per_epoch
        if epochs is not None and steps_per_epoch is not None:
            self.estimated_stepping_batches = epochs * steps_per_epoch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModelError(
            f"the LightningModule asks its trainer for {name!r}: there is no Lightning Trainer. "
            "max_epochs, num_training_batches and estimated_stepping_batches are known if "
            "LightningModel(epochs=, steps_per_epoch=) are given; metrics and loggers are told by "
            "self.log"
        )


def _check_module(module: Any, ignored: Collection[str]) -> None:
    """Check that a module can be trained without Lightning's Trainer."""
    name = type(module).__name__
    if (base := _base(module)) is None:
        raise ModelError(f"module is a {name}: give a LightningModule, or take TorchModel")
    if not module.automatic_optimization:
        raise ModelError(
            f"{name} has automatic_optimization=False: write loss(batch) of a TorchModel, which "
            "takes several optimizers"
        )
    for needed in ("training_step", "configure_optimizers"):
        if not _overrides(module, needed):
            raise ModelError(f"{name} has no {needed}: write one")
    others = (*_NOT_OF_FIT, *_OF_BATCHES)
    begun = (n for n in dir(base) if n.startswith("on_") and not n.startswith(others))
    not_called = [
        hook
        for hook in sorted({*begun, *_HOOKS})
        if _overrides(module, hook) and hook not in ignored
    ]
    if not_called:
        raise ModelError(
            f"{name} overrides {', '.join(not_called)}, which is not called here: do it in "
            "training_step, in model_creator or in a callback of fit (clipping: a strategy's "
            f"clip_norm); if it may be left out, give ignore_hooks={not_called}"
        )


def _of_data(module: Any, data: Any) -> tuple[tuple[Any, ...], Any]:
    """Return who may override hooks of batches, and the training data, of a data module its own."""
    # ModelError: it overrides what is not called.
    if _base(data, "LightningDataModule") is None:
        return (module,), data
    name = type(data).__name__
    if not_called := [hook for hook in _OF_DATA if _overrides(data, hook)]:
        raise ModelError(
            f"{name} overrides {', '.join(not_called)}, which is not called here: leave it out; the place in the data "
            "is a checkpoint's"
        )
    data.setup("fit")
    return (data, module), data.train_dataloader()


def _base(module: Any, name: str = "LightningModule") -> type | None:
    """Return Lightning's own class of a name among those of a module, or None."""
    for cls in type(module).__mro__:
        if cls.__name__ == name and cls.__module__.split(".")[0] in _PACKAGES:
            return cls
    return None


def _overrides(module: Any, name: str) -> bool:
    """Return whether a module, or a data module, has a method of its own of that name."""
    own = getattr(type(module), name, None)
    base = _base(module) or _base(module, "LightningDataModule")
    return own is not None and own is not getattr(base, name, None)


def _takes_index(step: Any) -> bool:
    try:
        inspect.signature(step).bind(None, 0)
    except TypeError:
        return False
    return True


def _configured(
    module: Any, steps_per_epoch: int | None
) -> tuple[torch.optim.Optimizer, DetachedSchedule | None]:
    """Return the optimizer that `configure_optimizers` makes, and its schedule, if any."""
    # ConfigurationError: anything else.
    configured = module.configure_optimizers()
    optimizers: Any = configured
    schedules: Any = []
    if isinstance(configured, Mapping):
        optimizers, schedules = configured.get("optimizer"), configured.get("lr_scheduler", [])
    elif (
        isinstance(configured, (list, tuple))
        and len(configured) == 2
        and isinstance(configured[0], list)
    ):
        optimizers, schedules = configured
    one = optimizers[0] if isinstance(optimizers, (list, tuple)) and optimizers else optimizers
    several = isinstance(optimizers, (list, tuple)) and len(optimizers) > 1
    if several or not isinstance(one, torch.optim.Optimizer):
        what = f"{len(optimizers)} optimizers" if several else describe(one)
        raise ConfigurationError(
            f"configure_optimizers returned {what}: return one optimizer, or a dict with "
            "optimizer and lr_scheduler"
        )
    schedules = schedules if isinstance(schedules, (list, tuple)) else [schedules]
    if len(schedules) > 1:
        raise ConfigurationError(
            f"configure_optimizers returned {len(schedules)} schedulers: put them into one, such "
            "as torch.optim.lr_scheduler.SequentialLR"
        )
    return one, _schedule(module, schedules[0], steps_per_epoch) if schedules else None


def _schedule(module: Any, chosen: Any, steps_per_epoch: int | None) -> DetachedSchedule:
    """Return a scheduler, or Lightning's dict with one, as a schedule of training steps."""
    settings = chosen if isinstance(chosen, Mapping) else {"scheduler": chosen}
    scheduler, every = settings.get("scheduler"), settings.get("frequency", 1)
    by_epoch = settings.get("interval", "epoch") == "epoch"
    if isinstance(scheduler, ReduceLROnPlateau) or not (by_epoch or every != 1):
        return DetachedSchedule(scheduler, keep=(module,))  # type: ignore[arg-type]
    if steps_per_epoch is None:
        when = "per epoch" if by_epoch else f"in {every} steps of each epoch"
        raise ConfigurationError(
            f"{type(scheduler).__name__} is stepped once {when}: give "
            "LightningModel(steps_per_epoch=), the steps of all replicas together, or return "
            '{"scheduler": ..., "interval": "step"}'
        )
    if by_epoch:
        return DetachedSchedule(scheduler, every * steps_per_epoch, keep=(module,))  # type: ignore[arg-type]
    return DetachedSchedule(scheduler, every, steps_per_epoch, keep=(module,))  # type: ignore[arg-type]
