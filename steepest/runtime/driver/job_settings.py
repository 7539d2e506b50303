"""What a job was told to do, and by which versions, in words for its page."""

from __future__ import annotations

import platform
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch

from steepest.core.engine.job import Job
from steepest.runtime.job_runtime import runtime

_MOST = 400  # characters of a value


def settings_of(job: Job) -> dict[str, str]:
    """Return the settings of a job by name, as its page shows them; those that are at their default are left out."""
    layout = job.description.layout
    trained = sum(entry.numel for entry in layout.entries if entry.trainable)
    frozen = sum(entry.numel for entry in layout.entries) - trained
    settings: dict[str, Any] = {
        "strategy": _in_words(job.config),
        "optimizer": _optimizer(job),
        "parameters": f"{trained:,}" + (f" and {frozen:,} frozen" if frozen else ""),
        "samples": job.description.samples,
        "samples of a step": job.global_batch,
        "seed": job.seed,
        "devices of a worker": job.devices_per_worker if job.devices_per_worker > 1 else None,
        "batches added up": job.accumulate if job.accumulate > 1 else None,
        "audited share of steps": job.audit or None,
        "runs on": runtime().name,
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }
    return {name: _short(value) for name, value in settings.items() if value not in (None, "")}


def _optimizer(job: Job) -> str:
    """Return the name of the optimizer, and the hyperparameters of its first group that differ from the class's."""
    spec = job.description.optimizer_spec
    _, hyper = spec.groups[0]
    said = ", ".join(
        f"{name}={value!r}"
        for name, value in hyper.items()
        if isinstance(value, (bool, int, float, tuple, list)) and value
    )
    more = f" and {len(spec.groups) - 1} further groups" if len(spec.groups) > 1 else ""
    return f"{spec.name}({said}){more}"


def _in_words(config: Any) -> str:
    """Return a settings object as a user would write it."""
    if not is_dataclass(config) or isinstance(config, type):
        return repr(config)
    said = []
    for each in fields(config):
        value = getattr(config, each.name)
        default = each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        if each.init and repr(value) != repr(
            default
        ):  # tensors, of a user's own, have no one truth
            said.append(f"{each.name}={value!r}")
    return f"{type(config).__name__}({', '.join(said)})"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]} ..."
