"""HuggingFaceModel: a Trainer of Hugging Face's transformers as a `Model`, which does not import it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from steepest.adapters.hugging_face_trainer import (
    check_evaluation,
    check_trainer,
    notice_of,
    overridden,
    plain_loader,
)
from steepest.core.data.protocol import Source
from steepest.core.models.protocol import Computed, Ready, Where
from steepest.core.models.step_size import step_size
from steepest.core.models.torch import Metric
from steepest.core.optim.detached_schedule import DetachedSchedule
from steepest.data.drawn import Drawn, as_drawn
from steepest.errors import ConfigurationError, ModelError
from steepest.tables.modules.torch_model import TorchModel


class HuggingFaceModel(TorchModel):
    """One replica: the model, data, loss, optimizer and schedule of a `transformers.Trainer`.

    Of the Trainer these are called, so a subclass may override them: `compute_loss`, `_prepare_inputs`,
    `get_batch_samples` (which counts the predicted tokens by which batches weigh), `create_optimizer`,
    `create_scheduler`, `get_train_dataloader` with its batch size, `_get_train_sampler`, `get_eval_dataloader`,
    and what these call. A sampler is gone through once in each epoch, and what it draws is dealt out to the
    workers. `Trainer.state` knows `global_step`, `epoch` and `max_steps` while a loss is computed. `train()` is
    not called: how long to train, evaluations, checkpoints, callbacks and loggers are those of
    `DistributedSGD.fit`. `max_grad_norm` clips unless the strategy has a `clip_norm`. A schedule is as long as
    `max_steps`, or as `num_train_epochs` of the job as it begins.

    Args:
        trainer: with `train_dataset`, not trained yet.
        metrics: functions of (the model's output, labels), each a mean over the batch, by name.

    Raises:
        ConfigurationError: `TrainingArguments` ask for something that is not followed, or have a
            schedule without `max_steps` for data without a length; also as `TorchModel`.
        ModelError: it is no Trainer, or overrides a method that is not called; also as `TorchModel`.

    Example:
        >>> def model_creator(worker_index, device_index):      # doctest: +SKIP
        ...     return HuggingFaceModel(Trainer(model, args, train_dataset=train_set))
    """

    def __init__(self, trainer: Any, *, metrics: Mapping[str, Metric] | None = None) -> None:
        check_trainer(trainer)
        self._trainer = trainer
        #: read by the job, see `steepest.core.models.protocol.Model`
        self.clip_norm: float | None = trainer.args.max_grad_norm or None
        self.notice = notice_of(trainer)
        self._given = trainer.optimizer
        own_batches = "get_train_dataloader" in overridden(trainer)
        loader = plain_loader(
            trainer.get_train_dataloader(),
            None if own_batches else trainer.args.per_device_train_batch_size,
            "get_train_dataloader",
        )
        source = as_drawn(loader, self._seed())
        steps = _steps(trainer.args, source, loader.batch_size or 1)
        self._targets: dict[str, Any] = {}
        super().__init__(
            trainer.model,
            data=source,
            batch_size=loader.batch_size
            or 1,  # of a stream of batches, which are as large as they are
            optimizer=self._make_optimizer,
            lr_scheduler=_schedule(trainer, steps),
            autocast=torch.bfloat16 if trainer.args.bf16 else None,
            metrics=metrics,
        )
        trainer.is_in_train, trainer.current_gradient_accumulation_steps = True, 1
        trainer.state.max_steps = steps or 0

    def _make_optimizer(self, module: torch.nn.Module) -> Any:
        self._trainer.optimizer = self._given  # else it returns the one that it has made before
        return self._trainer.create_optimizer()

    def source(self, data: Any, batch_size: int) -> Source:
        """Return a source of batches for `evaluate`, which the Trainer's collator makes.

        Args:
            data: as the Trainer's `eval_dataset`; or a DataLoader or a source of one's own.
            batch_size: samples in a batch.
        """
        if not isinstance(data, (DataLoader, Source)):
            loader = self._trainer.get_eval_dataloader(data)
            data = as_drawn(plain_loader(loader, batch_size, "get_eval_dataloader"), self._seed())
        return super().source(data, batch_size)

    def take_place(self, where: Where, replica: int, replicas: int) -> None:
        """Set the place of training in the Trainer's state, see `steepest.core.models.protocol.Model`."""
        state = self._trainer.state
        state.global_step = where.step
        if where.epoch is not None:
            begun = where.ranges[0][0] if where.ranges else 0
            state.epoch = where.epoch + begun / (self.data.size or 1)

    def compute_gradients(self, batch: Any, ready: Ready, metrics: bool) -> Computed:
        """Run a forward and a backward pass in training mode, in which `from_pretrained` leaves no model."""
        self.module.train()
        return super().compute_gradients(batch, ready, metrics)

    def evaluate(self, batch: Any) -> Computed:
        """Return loss and metrics in evaluation mode.

        Raises:
            ModelError: the Trainer overrides a method of its evaluation.
        """
        check_evaluation(self._trainer)
        return super().evaluate(batch)

    def loss(self, batch: Any) -> Any:
        """Return the Trainer's loss, and the number of labels that are predicted.

        Raises:
            ModelError: its `get_batch_samples` made several batches of one, or none.
        """
        trainer = self._trainer
        batches, count = trainer.get_batch_samples(iter([batch]), 1, self._device)
        if len(batches) != 1:
            raise ModelError(
                f"get_batch_samples returned {len(batches)} batches of one: return as many as it was asked for"
            )
        # the Trainer moves them to the device of its arguments, which may be another one
        inputs = self._to_device(trainer._prepare_inputs(batches[0]))
        self._targets = {"labels": inputs.get("labels")}  # `compute_loss` may take them out
        with trainer.compute_loss_context_manager():
            loss, self._output = trainer.compute_loss(
                self.module, inputs, return_outputs=True, num_items_in_batch=count
            )
        return loss if count is None else (loss, float(count))

    def metrics(self, batch: Any) -> Mapping[str, Any]:
        """Return the metrics of the batch's output and labels."""
        return super().metrics(self._targets)

    def _to_device(self, batch: Any) -> Any:
        return super()._to_device(batch.batch if isinstance(batch, Drawn) else batch)


def _schedule(trainer: Any, steps: int | None) -> DetachedSchedule | None:
    """Return a Trainer's schedule, None for a learning rate that stays.

    Args:
        trainer: that makes it.
        steps: that it lasts; None if they are not known.

    Raises:
        ConfigurationError: it needs them.
    """
    args = trainer.args
    if trainer.lr_scheduler is None:
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        if kind == "constant":
            return None
        if steps is None:
            raise ConfigurationError(
                f"lr_scheduler_type={kind!r} needs to know how many steps there will be, and the data have "
                "no length: set max_steps in TrainingArguments"
            )
        trainer.create_scheduler(steps, trainer.create_optimizer())
    return DetachedSchedule(trainer.lr_scheduler)


def _steps(args: Any, source: Source, batch_size: int) -> int | None:
    """Return the steps that a Trainer would take on as many devices; None if the data have no length."""
    if args.max_steps > 0:
        return int(args.max_steps)
    if source.size is None:
        return None
    whole, rest = divmod(source.size, step_size().of(batch_size))
    steps = max(1, whole + (rest > 0 and not getattr(source, "drop_last", False)))
    return math.ceil(float(args.num_train_epochs) * steps)
