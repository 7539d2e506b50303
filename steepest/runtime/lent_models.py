"""Models lent to a user's function between steps, which may read them but must not change the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from steepest.core.engine.replicas import Replicas
from steepest.core.tensors.shared_memory import forget_writes
from steepest.errors import ConfigurationError


@contextlib.contextmanager
def lent_to(function: str, replicas: Replicas) -> Iterator[None]:
    """Run a user's function on the models inside of this context.

    Afterwards the models have the job's weights and settings, whatever the function wrote to them.

    Args:
        function: its name, for errors, such as "the function 'f'".
        replicas: whose models it has.

    Raises:
        ConfigurationError: it has written to a trained parameter, or set a model's batch size or
            data.
    """
    own = [v for v in replicas.vectors if v.device.type != "cpu" or not replicas.borrows]
    # the operating system reports writes to memory that another process lends
    before = [vector.clone() for vector in own]
    try:
        yield
    finally:
        replaced = [model.reseat() for model in replicas.models]
        offsets = forget_writes(replicas.weights) if replicas.borrows else []
        for vector, values in zip(own, before, strict=True):
            if not torch.equal(vector, values):
                offsets.append(int((vector != values).nonzero()[0]))
                vector.copy_(values)
    names = [name for name in replaced if name is not None]
    names += [entry.name for offset in offsets for entry in replicas.trained_behind(offset)]
    if names:
        raise ConfigurationError(
            f"{function} has written to the trained parameter {names[0]!r}, which is "
            "undone: the servers have the weights, and a model is a copy of them; call "
            "set_weights() on the driver, or give the model these values in model_creator"
        )
    _require_settings(function, replicas)


def _require_settings(function: str, replicas: Replicas) -> None:
    """Restore the job's batch size and data of models after a user's function; ConfigurationError if it set others."""
    for model, (batch_size, data) in zip(replicas.models, replicas.settings, strict=True):
        if (now := model.batch_size) != batch_size:
            model.batch_size = batch_size
            raise ConfigurationError(
                f"{function} has set a model's batch_size to {now!r:.40}, but the "
                f"job divides its samples into batches of {batch_size}: save, and restore with "
                "a trainer whose model_creator gives the other one; evaluate(data, batch_size) "
                "takes any"
            )
        if (other := model.data) is not data:
            model.data = data
            raise ConfigurationError(
                f"{function} has set a model's data to a {type(other).__name__}, "
                "but the job has divided the samples of those that model_creator gave: save, and "
                "restore(path, data='new') with a trainer whose model_creator gives the others"
            )
