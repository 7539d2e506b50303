"""The state that one worker alone has: its replicas' buffers, and residuals of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from steepest.core.engine.job import Description
from steepest.core.engine.replica_states import merged_states
from steepest.core.engine.replicas import InnerOptimizerState, Replicas
from steepest.core.system import system
from steepest.core.tensors.dtypes import Tensors


@dataclass(frozen=True)
class WorkerState:
    """Copies of the state of one worker that no server holds."""

    # of each replica, with frozen parameters that it has changed, see `Replicas.states`
    buffers: list[Tensors]
    # of its own optimizer under local SGD; None under other strategies
    inner: InnerOptimizerState | None
    seconds: float  # that copying took, during which the worker computed nothing
    # of its exchange, by what it is of, see `Exchange.state`
    exchanged: dict[str, Tensors] = field(default_factory=dict)


def worker_state(replicas: Replicas, step: int, ledger: Sequence[int] | None = None) -> WorkerState:
    """Return copies of a worker's own state, between two steps, after `step` committed ones.

    A worker with a `ledger` (see `Replicas.settle`) takes no more steps, and some of its shares may be undone.
    """
    began = system().now()
    if ledger is not None:
        replicas.settle(ledger)
    buffers = replicas.states()
    inner = replicas.inner_state(step)
    if inner is not None:
        inner = Tensors(inner[0]), *inner[1:]
    exchanged = {} if replicas.exchange is None else replicas.exchange.state(step)
    return WorkerState(buffers, inner, system().now() - began, exchanged)


def buffers_of(
    workers: Sequence[WorkerState], installed: dict[str, torch.Tensor], description: Description
) -> tuple[dict[int, Tensors], Tensors]:
    """Return the buffers of all replicas by index, in the order of workers, and the state merged from them.

    Args:
        installed: parameters by name, as replicas have them that have not changed them.
    """
    states = [state for worker in workers for state in worker.buffers]
    names = sorted(set().union(*states))
    whole = [
        {name: state[name] if name in state else installed[name] for name in names}
        for state in states
    ]
    return dict(enumerate(states)), merged_states(whole, description)
