"""Functions that the driver runs on a worker's replicas between steps."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import cloudpickle
import numpy as np
import torch

from steepest.core.engine.replicas import EvaluatedPart, Replicas
from steepest.core.models.metric_states import MetricState
from steepest.core.models.protocol import Model
from steepest.core.optim.spec import ScheduleState
from steepest.core.tensors.dtypes import LOOP_STATE, Tensors, furthest
from steepest.errors import ConfigurationError, describe_error
from steepest.runtime.lent_models import lent_to


def load_buffers(replicas: Replicas, state: Tensors) -> None:
    """Set the buffers of every replica, see `Model.load_state`."""
    for model in replicas.models:
        model.load_state(state)


def take_installed(replicas: Replicas, names: Sequence[str]) -> None:
    """Set named frozen parameters of every replica to the installed weights; other buffers stay."""
    for model in replicas.models:
        model.load_state(
            {name: value for name, value in model.state().items() if name not in names}
        )


def name_of(function: Any) -> str:
    """Return the name of a user's function, quoted, for errors."""
    return repr(
        getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
    )


@dataclass(frozen=True)
class PickledResult:
    """What a user's function has returned, pickled where it ran.

    Attributes:
        pickle: without its buffers.
        buffers: as bytes, which travel without being copied.
    """

    pickle: bytes
    buffers: list[np.ndarray[Any, Any]]

    def value(self) -> Any:
        """Return the value; errors of its own methods are raised."""
        return cloudpickle.loads(self.pickle, buffers=self.buffers)


def sent(fn: Callable[..., Any], result: Any) -> PickledResult:
    """Pickle what a user's function returned.

    Whatever the result's own methods raise is caught here; where Ray pickles what a call returned, a
    `SystemExit` leaves the caller without an answer. A reference to Ray's store in its place would leave the driver
    with a connection to this process, also when that has ended.

    Raises:
        ConfigurationError: it cannot be pickled.
    """
    try:
        buffers: list[pickle.PickleBuffer] = []
        content = cloudpickle.dumps(result, protocol=5, buffer_callback=buffers.append)
        return PickledResult(content, [_bytes_of(buffer) for buffer in buffers])
    except BaseException as error:
        why = describe_error(error.__cause__ or error)["error"]
        raise ConfigurationError(
            f"cannot send what came of it when asked to run the function {name_of(fn)}: {why}; "
            "return what can be pickled: numbers, text, tensors, arrays, and containers of these"
        ) from error


def _bytes_of(buffer: pickle.PickleBuffer) -> np.ndarray[Any, Any]:
    raw = buffer.raw()
    return np.frombuffer(raw, np.uint8) if raw.nbytes else np.empty(0, np.uint8)


def on_models(replicas: Replicas, fn: Callable[[Model], Any], name: str = "") -> PickledResult:
    """Run a user's function on every replica; return the list of its results, see `sent`."""
    with lent_to(name or f"the function {name_of(fn)}", replicas):
        results = [fn(model) for model in replicas.models]
    return sent(fn, results)


def copy_to_evaluate(replicas: Replicas, number: int) -> Any:
    """Return the copy of the evaluation that a loop's call with this number has asked for; None if it is not here."""
    return cast("Any", replicas.models[0]).copy_to_evaluate(number)


def on_first_model(replicas: Replicas, fn: Callable[[Model], Any]) -> PickledResult:
    """Run a user's function on the first replica; return its result, see `sent`."""
    with lent_to(f"the function {name_of(fn)}", replicas):
        result = fn(replicas.models[0])
    return sent(fn, result)


def unfrozen(replicas: Replicas) -> frozenset[str]:
    """Return the names of frozen parameters that the user has unfrozen, see `Model`."""
    return frozenset[str]().union(*(model.unfrozen() for model in replicas.models))


def evaluate(
    replicas: Replicas, data: Any, batch_size: int | None, parts: int, state: Tensors
) -> EvaluatedPart:
    """Return a worker's part of an evaluation, by its first replica with buffers averaged over all replicas."""
    own = replicas.models[0].state()
    replicas.models[0].load_state(state)
    try:
        return replicas.evaluate(data, batch_size, replicas.worker, parts)
    finally:
        replicas.models[0].load_state(own)


def metric_values(
    replicas: Replicas, parts: Sequence[Mapping[str, MetricState]]
) -> dict[str, float]:
    """Return metrics over what all workers have accumulated in the evaluation that has just been made."""
    return replicas.models[0].metric_values(parts)


def by_replica(flat: Mapping[str, torch.Tensor]) -> dict[int, Tensors]:
    """Return buffers by replica, from a checkpoint's tensors by "replica/buffer"."""
    states: dict[int, Tensors] = {}
    for key, value in flat.items():
        replica, _, name = key.partition("/")
        states.setdefault(int(replica), Tensors())[name] = value
    return states


def load_inner_state(
    replicas: Replicas,
    own: dict[int, dict[str, torch.Tensor]],
    mean: dict[str, torch.Tensor],
    plain: list[str],
    schedule: ScheduleState | None,
) -> None:
    """Set the state of a worker's own optimizer: from `own`, by worker, or `mean` for a worker without one there."""
    replicas.load_inner_state(own.get(replicas.worker, mean), plain, schedule)


def take_servers_weights(replicas: Replicas, names: Collection[str]) -> None:
    """Let a worker begin its next step with the servers' weights of some parameters, which have been set."""
    replicas.take_servers_weights(names)


def load_exchanged(
    replicas: Replicas,
    what: str,
    own: Mapping[int, Mapping[str, torch.Tensor]],
    other: Mapping[str, torch.Tensor],
) -> None:
    """Set a part of the state of a worker's exchange (`Exchange.state`): its `own`, or `other` for one without."""
    if replicas.exchange is not None:
        replicas.exchange.load_state(what, own.get(replicas.worker, other))


def continue_from(
    replicas: Replicas,
    plan: Any,
    seed: int,
    states: dict[int, Tensors],
    averaged: Tensors,
    total: int,  # replicas of the job; `averaged` is taken if the checkpoint has another number
) -> None:
    """Continue at a checkpoint's place in the data, with its buffers."""
    replicas.use_plan(plan, seed)
    if loops := [state[LOOP_STATE] for state in states.values() if LOOP_STATE in state]:
        averaged[LOOP_STATE] = furthest(loops)
    for index, model in enumerate(replicas.models, start=replicas.first_index):
        model.load_state(states[index] if len(states) == total else averaged)
