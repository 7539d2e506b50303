"""The values that replicas change themselves, of all of them, and their mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from steepest.core.engine.replicas import Replicas
from steepest.core.tensors.dtypes import LOOP_STATE, Tensors, furthest, merge_replicas


def all_states(call: Callable[..., list[list[Tensors]]]) -> list[Tensors]:
    """Return each replica's state, all with the same names."""
    # call: calls a function of `Replicas` on all workers, with arguments for it, and returns the results by worker.
    states = [state for part in call(Replicas.states) for state in part]
    names = sorted(set().union(*states))
    if all(len(state) == len(names) for state in states):
        return states
    # Not all replicas have changed the same frozen parameters.
    states = [state for part in call(Replicas.states, names) for state in part]
    return [Tensors((name, state[name]) for name in names) for state in states]


def mean_states(states: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float]) -> Tensors:
    """Return one state merged from replicas', by weight (`steepest.core.tensors.dtypes.merge_replicas`)."""
    return Tensors(
        (
            name,
            furthest(state[name] for state in states)
            if name == LOOP_STATE
            else merge_replicas([state[name] for state in states], weights),
        )
        for name in states[0]
    )
