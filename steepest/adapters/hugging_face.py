"""HuggingFaceModel: a Trainer of Hugging Face's transformers as a `Model`, which does not import it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from steepest.core.data.protocol import Source
from steepest.core.models.step_size import step_size
from steepest.core.models.torch import Metric
from steepest.core.optim.detached_schedule import DetachedSchedule
from steepest.embedding.torch_model import TorchModel
from steepest.errors import ConfigurationError, ModelError

#: Arguments that are not followed, the values that need not be, and what to do.
_NOT_FOLLOWED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("gradient_accumulation_steps", (1,), "give accumulate={} to DistributedSGD, and 1 here"),
    ("fp16", (False, None), "set bf16=True, or train in float32"),
    (
        "activation_checkpointing",
        (False, None),
        "call activation_checkpointing_enable of the model",
    ),
    ("gradient_checkpointing", (False, None), "call activation_checkpointing_enable of the model"),
    ("neftune_noise_alpha", (0, None), "leave it out"),
    ("torch_compile", (False, None), "give the Trainer a model that torch.compile returned"),
    ("auto_find_batch_size", (False, None), "choose per_device_train_batch_size"),
    (
        "load_best_model_at_end",
        (False,),
        "give checkpoints=Checkpoints(path, best=...) to DistributedSGD, and load sgd.best_checkpoint",
    ),
    ("group_by_length", (False,), "leave it out: samples come in an order of the library's own"),
    (
        "train_sampling_strategy",
        ("random",),
        "leave it out: samples come in an order of the library's own",
    ),
    ("deepspeed", (None,), "stay with DeepSpeed where a model needs several GPUs"),
    ("fsdp", (None, "", [], False), "stay with FSDP where a model needs several GPUs"),
)
#: Arguments that are for the driver, the values with which nothing is asked for, and who does it.
_OF_THE_DRIVER: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("eval_strategy", ("no",), "fit(validation=..., evaluate_every=...)"),
    ("save_strategy", ("no",), "DistributedSGD(checkpoints=Checkpoints(path, every=...))"),
)


class HuggingFaceModel(TorchModel):
    """One replica: the model, data, loss, optimizer and schedule of a `transformers.Trainer`.

    Of the Trainer these are called: `compute_loss`, `get_batch_samples` (which counts the predicted
    tokens by which batches weigh), `create_optimizer`, `create_scheduler`, `get_train_dataloader`,
    `get_eval_dataloader`; so a subclass may override them. `train()` is not called: how long to train, evaluations,
    checkpoints and loggers are those of `DistributedSGD.fit`. `max_grad_norm` clips unless the strategy has a
    `clip_norm`. A schedule is as long as `max_steps`, or as `num_train_epochs` of the job as it begins.

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
        if not all(hasattr(trainer, name) for name in ("args", "model", "compute_loss")):
            raise ModelError(
                f"trainer is a {type(trainer).__name__}: give a transformers.Trainer, or take "
                "TorchModel for its model alone"
            )
        own = next(
            (c for c in type(trainer).__mro__ if c.__module__.startswith("transformers.")), None
        )
        for name in ("training_step", "create_optimizer_and_scheduler"):
            if own is not None and getattr(type(trainer), name) is not getattr(own, name):
                raise ModelError(
                    f"{type(trainer).__name__} overrides {name}, which is not called here: override "
                    "compute_loss, create_optimizer or create_scheduler instead"
                )
        for name, allowed, advice in _NOT_FOLLOWED:
            value = getattr(trainer.args, name, allowed[0])
            if value not in allowed:
                raise ConfigurationError(
                    f"TrainingArguments have {name}={value!r}, which is not followed here: "
                    + advice.format(value)
                )
        self._trainer = trainer
        #: read by the job, see `steepest.core.models.protocol.Model`
        self.clip_norm: float | None = trainer.args.max_grad_norm or None
        self.notice = _notice(trainer)
        self._given = trainer.optimizer
        loader = trainer.get_train_dataloader()
        super().__init__(
            trainer.model,
            data=DataLoader(  # without the Trainer's sampler
                loader.dataset,
                batch_size=trainer.args.per_device_train_batch_size,
                collate_fn=loader.collate_fn,
                num_workers=trainer.args.dataloader_num_workers,
                drop_last=trainer.args.dataloader_drop_last,
            ),
            optimizer=self._make_optimizer,
            lr_scheduler=_schedule(trainer, loader.dataset),
            autocast=torch.bfloat16 if trainer.args.bf16 else None,
            metrics=metrics,
        )

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
            data = DataLoader(loader.dataset, batch_size=batch_size, collate_fn=loader.collate_fn)
        return super().source(data, batch_size)

    def loss(self, batch: Any) -> Any:
        """Return the Trainer's loss, and the number of labels that are predicted."""
        _, count = self._trainer.get_batch_samples(iter([batch]), 1, self._device)
        loss, self._output = self._trainer.compute_loss(
            self.module, dict(batch), return_outputs=True, num_items_in_batch=count
        )
        return loss if count is None else (loss, float(count))


def _notice(trainer: Any) -> str:
    """Return what the user has asked for that `fit` does instead, or an empty text."""
    asked = [
        f"{name}={getattr(value, 'value', value)!r} (instead: {instead})"
        for name, nothing, instead in _OF_THE_DRIVER
        if (value := getattr(trainer.args, name, nothing[0])) not in nothing
    ]
    if getattr(trainer, "compute_metrics", None) is not None:
        asked.append("compute_metrics (instead: HuggingFaceModel(metrics=...))")
    what = f"{type(trainer).__name__} asks for what has no effect here: {', '.join(asked)}."
    return what if asked else ""


def _schedule(trainer: Any, dataset: Any) -> DetachedSchedule | None:
    """Return a Trainer's schedule, None for a learning rate that stays; ConfigurationError: it cannot be made."""
    args = trainer.args
    if trainer.lr_scheduler is None:
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        if kind == "constant":
            return None
        trainer.create_scheduler(_steps(args, kind, dataset), trainer.create_optimizer())
    return DetachedSchedule(trainer.lr_scheduler)


def _steps(args: Any, kind: str, dataset: Any) -> int:
    """Return the steps a schedule lasts: as many as the Trainer takes on as many devices."""
    # ConfigurationError: unknown.
    if args.max_steps > 0:
        return int(args.max_steps)
    try:
        samples = len(dataset)
    except TypeError:
        raise ConfigurationError(
            f"lr_scheduler_type={kind!r} needs to know how many steps there will be, and the data have "
            "no length: set max_steps in TrainingArguments"
        ) from None
    size = step_size().of(args.per_device_train_batch_size)
    whole, rest = divmod(samples, size)
    steps = max(1, whole + (rest > 0 and not args.dataloader_drop_last))
    return math.ceil(float(args.num_train_epochs) * steps)
