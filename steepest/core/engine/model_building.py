"""Makes a worker's models by the user's function, and describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch

from steepest.core.data.fingerprint import described as described_data
from steepest.core.data.fingerprint import sample_hashes
from steepest.core.engine.extension import Extension
from steepest.core.engine.generators import seed_everything
from steepest.core.engine.job import Description, ModelCreator, check_agreement, without_caches
from steepest.core.engine.stores import OpaqueParts
from steepest.core.models.protocol import Model
from steepest.core.models.step_size import StepSize, making_models
from steepest.core.tensors.layout import ChunkSpec
from steepest.errors import ModelError


def build_models(
    model_creator: ModelCreator,
    worker: int,
    devices: int,
    seed: int,
    cut: ChunkSpec,
    size: StepSize | None = None,
    extensions: Sequence[Extension] = (),
) -> tuple[list[Model], Description]:
    """Make a worker's models and describe them.

    The global random state is seeded alike before each, so that initial weights do not depend on
    the number of replicas.

    Args:
        model_creator: the user's, called with the worker's and the device's index.
        worker: index of the worker.
        devices: number of the worker's devices, each of which gets a model.
        seed: of the job.
        cut: how the models' parameters are cut into chunks.
        size: of the job's steps; one batch of these models if it is not known.
        extensions: one of them may know the models' parts that are not in the flat vector.

    Raises:
        ModelError: the function returned something other than a `Model`, or two models disagree.
    """
    models: list[Model] = []
    for device in range(devices):
        seed_everything(seed)
        with making_models(replace(size or StepSize(devices), seed=seed)):
            model = model_creator(worker, device)
        if not isinstance(model, Model):
            raise ModelError(
                f"model_creator({worker}, {device}) returned {type(model).__name__}: return a "
                "steepest model, such as "
                "TorchModel(module, loss=..., data=..., batch_size=..., optimizer=...), or one of a class of your own "
                "that is a subclass of steepest.Model"
            )
        if cut != ChunkSpec():
            model.relayout(cut)
        models.append(model)
    threads = torch.get_num_threads()
    described = [
        Description(
            m.layout,
            m.optimizer_spec,
            None if m.data.size is None else _count("data.size", m.data.size),
            _count("batch_size", m.batch_size),
            getattr(m.data, "blocks", None),
            threads,
            bool(m.state()) or not all(entry.trainable for entry in m.layout.entries),
            models[0].attend,
            bool(getattr(m.data, "drop_last", False)),
            " ".join(filter(None, (getattr(m.data, "notice", ""), m.notice))),
            _opaque(m, extensions),
            clip_norm=m.clip_norm,
            divides=bool(getattr(m.data, "divides", False)),
            fingerprint=told,
            row_hashes=rows,
            sums=m.sums_samples,
            merging=dict(m.merging),
            offsets=dict(getattr(m.data, "offsets", {})),
        )
        for m, (told, rows) in ((model, described_data(model.data)) for model in models)
    ]
    first = described[0]
    for device, other in enumerate(described):
        sources = models[0].data, models[device].data
        first = without_caches(
            first, other, lambda *which, of=sources: [sample_hashes(each, *which) for each in of]
        )
        check_agreement(
            first, other, f"worker {worker} device 0", f"worker {worker} device {device}"
        )
    return models, first


def _count(name: str, value: Any) -> int:
    """Return a model's number of samples as an int; ModelError: it is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ModelError(
            f"the model's {name} is {value!r:.200}: it must be a positive number of samples"
        )
    return int(value)


def _opaque(model: Model, extensions: Sequence[Extension]) -> OpaqueParts | None:
    """Return a model's parts that are not in the flat vector, as the first extension that knows them describes them."""
    candidates = (extension.opaque(model) for extension in extensions)
    return next((parts for parts in candidates if parts is not None), None)
