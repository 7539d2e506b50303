"""The settings of a transformers Trainer that are followed, refused or ignored. Transformers is not imported."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

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
    ("use_liger_kernel", (False, None), "give the Trainer a model that has Liger's kernels"),
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
_OF_THE_DRIVER: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("eval_strategy", ("no",), "fit(validation=..., evaluate_every=...)"),
    ("eval_on_start", (False,), "DistributedSGD.evaluate before fit"),
    ("save_strategy", ("no",), "DistributedSGD(checkpoints=Checkpoints(path, every=...))"),
    ("push_to_hub", (False,), "model.push_to_hub after load_state_dict(sgd.state_dict())"),
)

#: Methods of a Trainer that are called here, or by those that are: what a subclass makes of them is followed.
FOLLOWED = frozenset(
    {
        "_build_accelerator_args", "_get_collator_with_removed_columns", "_get_dataloader",
        "_get_eval_sampler", "_get_num_items_in_batch", "_get_train_sampler", "_move_model_to_device",
        "_prepare_input", "_prepare_inputs", "_remove_unused_columns", "_set_signature_columns_if_needed",
        "_validate_args", "autocast_smart_context_manager", "call_model_init", "compute_loss",
        "compute_loss_context_manager", "create_accelerator_and_postprocess", "create_optimizer",
        "create_scheduler", "get_batch_samples", "get_cp_size", "get_decay_parameter_names",
        "get_eval_dataloader", "get_optimizer_cls_and_kwargs", "get_sp_size", "get_tp_size",
        "get_train_dataloader", "load_generation_config",
    }
)  # fmt: skip
#: Those that only users' code calls: an override is what it calls.
OF_USERS = frozenset(
    {
        "_finish_current_push", "_get_learning_rate", "_push_from_checkpoint", "_report_to_hp_search", "_save",
        "_tune_save_checkpoint", "add_callback", "create_model_card", "end", "get_learning_rates",
        "get_num_trainable_parameters", "get_optimizer_group", "get_test_dataloader", "hyperparameter_search",
        "init_hf_repo", "is_local_process_zero", "is_world_process_zero", "log_metrics",
        "metrics_format", "pop_callback", "predict", "push_to_hub", "remove_callback", "save_metrics",
        "save_model", "save_state",
    }
)  # fmt: skip
#: Those of evaluation, instead of which `HuggingFaceModel.evaluate` calls `compute_loss`.
OF_EVALUATION = frozenset(
    {"_evaluate", "_pad_tensors_to_max_len", "evaluate", "evaluation_loop", "prediction_step"}
)
#: Those of checkpoints, logs and counts, which have no effect: the driver says so.
WITHOUT_EFFECT = frozenset(
    {
        "_determine_best_metric", "_get_output_dir", "_issue_warnings_after_load", "_load_best_model",
        "_load_callback_state", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state",
        "_load_scaler", "_maybe_log_save_evaluate", "_save_checkpoint", "_save_optimizer_and_scheduler",
        "_save_rng_state", "_save_scaler", "_track_num_input_tokens", "floating_point_ops", "log", "num_examples",
        "store_flos",
    }
)  # fmt: skip
_STEPS = "override compute_loss, create_optimizer or create_scheduler instead"
_CLIPPING = "set max_grad_norm, or a strategy's clip_norm"
_LENGTH = "set max_steps or num_train_epochs, and give fit(steps=...) or fit(epochs=...)"
_LOOP = "fit trains, and calls callbacks=[...]; or write a loop of your own for steepest.run"
_DEVICES = "change the model before the Trainer gets it: each worker has the model on one device"
#: Those instead of which the library does its own, and what to do.
REFUSED = {
    "_clip_grad_norm": _CLIPPING, "_defer_fsdp_gradient_reduction": _DEVICES, "_finalize_training": _LOOP,
    "_get_grad_norm": _CLIPPING, "_has_mixed_mesh_grads": _CLIPPING, "_hp_search_setup": _LOOP,
    "_init_training_state": _LOOP, "_inner_training_loop": _LOOP, "_mixed_mesh_grad_norm": _CLIPPING,
    "_prepare_context_parallel_inputs": _DEVICES, "_prepare_for_training": _LOOP, "_run_epoch": _LOOP,
    "_sync_replicated_trainable_parameters": _DEVICES,
    "_update_auto_batch_size": "set per_device_train_batch_size", "_wrap_model": _DEVICES,
    "create_optimizer_and_scheduler": _STEPS, "get_total_train_batch_size": _LENGTH,
    "set_initial_training_values": _LENGTH, "train": _LOOP, "training_step": _STEPS,
}  # fmt: skip

#: Callbacks that each Trainer has, which only say when to log, and how far training has come.
_OF_EACH_TRAINER = (
    "DefaultFlowCallback", "NotebookProgressCallback", "PrinterCallback", "ProgressCallback",
)  # fmt: skip


def methods_of(kind: type) -> set[str]:
    """Return the names of the methods that a Trainer of transformers' own has."""
    names = {name for each in kind.__mro__[:-1] for name in vars(each)}
    return {n for n in names if not n.startswith("__") and callable(getattr(kind, n))}


def overridden(trainer: Any) -> Iterator[str]:
    """Yield the methods of transformers' own class that a subclass or an instance has replaced, in order."""
    kind = type(trainer)
    own = next((c for c in kind.__mro__ if c.__module__.startswith("transformers.")), None)
    for name in sorted(methods_of(own)) if own is not None else ():
        same = inspect.getattr_static(kind, name) is inspect.getattr_static(own, name)
        if not same or name in vars(trainer):
            yield name


def check_trainer(trainer: Any) -> None:
    """Check that a Trainer asks for nothing that would not be done.

    Raises:
        ModelError: it is no Trainer, or overrides a method that is not called.
        ConfigurationError: its arguments ask for something that is not followed.
    """
    kind = type(trainer).__name__
    if not all(hasattr(trainer, name) for name in ("args", "model", "compute_loss")):
        raise ModelError(
            f"trainer is a {kind}: give a transformers.Trainer, or take TorchModel for its model alone"
        )
    for name in overridden(trainer):
        if name not in FOLLOWED | OF_USERS | OF_EVALUATION | WITHOUT_EFFECT:
            advice = REFUSED.get(name, f"leave it out; {_STEPS}")
            raise ModelError(f"{kind} overrides {name}, which is not called here: {advice}")
    for name, allowed, advice in _NOT_FOLLOWED:
        value = getattr(trainer.args, name, allowed[0])
        if value not in allowed:
            raise ConfigurationError(
                f"TrainingArguments have {name}={value!r}, which is not followed here: "
                + advice.format(value)
            )


def check_evaluation(trainer: Any) -> None:
    """Check that a Trainer evaluates as transformers' own.

    Raises:
        ModelError: it overrides a method of evaluation.
    """
    for name in overridden(trainer):
        if name in OF_EVALUATION:
            raise ModelError(
                f"{type(trainer).__name__} overrides {name}, which is not called here: give "
                "HuggingFaceModel(metrics=...), or have a callback of fit load sgd.state_dict() into a model, and "
                "evaluate that by the Trainer"
            )


def notice_of(trainer: Any) -> str:
    """Return a notice of the user's settings that `fit` replaces; "" if there are none."""
    asked = [
        f"{name}={getattr(value, 'value', value)!r} (instead: {instead})"
        for name, nothing, instead in _OF_THE_DRIVER
        if (value := getattr(trainer.args, name, nothing[0])) not in nothing
    ]
    if getattr(trainer, "compute_metrics", None) is not None:
        asked.append("compute_metrics (instead: HuggingFaceModel(metrics=...))")
    handler = getattr(trainer, "callback_handler", None)
    names = [type(each).__name__ for each in getattr(handler, "callbacks", ())]
    if own := [name for name in names if name not in _OF_EACH_TRAINER]:
        asked.append(f"the callbacks {', '.join(own)} (instead: fit(callbacks=[...]))")
    if vain := [name for name in overridden(trainer) if name in WITHOUT_EFFECT]:
        asked.append(f"its own {', '.join(vain)} (instead: fit(callbacks=[...]))")
    what = f"{type(trainer).__name__} asks for what has no effect here: {', '.join(asked)}."
    return what if asked else ""


def plain_loader(loader: Any, batch_size: int | None, method: str) -> DataLoader[Any]:
    """Return a Trainer's loader without accelerate's wrappers.

    Args:
        loader: as the Trainer's method returned it.
        batch_size: of the result; None for the loader's.
        method: the name of that method, for errors.

    Raises:
        ModelError: it is no DataLoader, or its batches are not made of a sampler's samples.
    """
    if not isinstance(loader, DataLoader):
        raise ModelError(
            f"{method} returned a {type(loader).__name__}: return a torch.utils.data.DataLoader"
        )
    size, sampler, drop_last = loader.batch_size, loader.sampler, loader.drop_last
    batches: Any = loader.batch_sampler
    if type(batches) is BatchSampler:  # which torch makes of the three, and accelerate passes on
        size, sampler, drop_last = batches.batch_size, batches.sampler, batches.drop_last
    elif batches is not None:
        raise ModelError(
            f"{method} returned a DataLoader with a {type(batches).__name__}, whose batches cannot be dealt out to "
            "workers: give it a batch size and a sampler of samples, or write a loop of your own for steepest.run"
        )
    if (
        type(sampler).__name__ == "SeedableRandomSampler"
    ):  # accelerate's, for a RandomSampler of torch's
        drawn: Any = sampler
        sampler = RandomSampler(drawn.data_source, drawn.replacement, drawn._num_samples)
    streams = isinstance(loader.dataset, IterableDataset)
    return DataLoader(
        loader.dataset,
        batch_size=batch_size or size,
        sampler=None if streams else sampler,
        drop_last=drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory and torch.accelerator.is_available(),
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )
