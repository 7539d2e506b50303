"""The values that replicas change themselves, of all of them, and what stands for all in one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from steepest.core.engine.replicas import Replicas
from steepest.core.tensors.dtypes import LOOP_STATE, Tensors, furthest, merge_replicas, same_bits

#: The last part of the name of a buffer that has statistics of what a replica has seen: those of torch, Flax and Keras.
_STATISTIC = re.compile(
    r"(^|[./])((running|moving)_\w+|mean|var|variance|std|num_batches_tracked)$"
)


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


def merged_states(
    states: Sequence[Mapping[str, torch.Tensor]], parameters: Collection[str]
) -> Tensors:
    """Return one state that stands for those of all replicas, which have seen equally many samples.

    Frozen parameters that a model updates are averaged, and so are running statistics, which are known by their names.
    Other buffers are the first replica's: the mean of two queues of keys, or of two pointers into them, is neither.

    Args:
        states: of each replica, all with the same names.
        parameters: the names of the model's parameters.
    """
    first = set(_of_one(states[0], parameters))
    mean = mean_states(
        [{name: state[name] for name in states[0] if name not in first} for state in states],
        [1.0] * len(states),
    )
    return Tensors((name, states[0][name] if name in first else mean[name]) for name in states[0])


def differing_buffers(
    states: Sequence[Mapping[str, torch.Tensor]], parameters: Collection[str]
) -> list[str]:
    """Return the names of buffers, integers aside, of which `merged_states` has the first replica's, unlike another's.

    Integers are often the place of a generator of random numbers, which is each replica's own.
    """
    return [
        name
        for name in _of_one(states[0], parameters)
        if states[0][name].dtype.is_floating_point
        and any(not same_bits(states[0][name], state[name]) for state in states[1:])
    ]


def _of_one(names: Collection[str], parameters: Collection[str]) -> list[str]:
    """Return those names that are of no parameters, no running statistics, and not of the user's loop."""
    return [
        name
        for name in names
        if name != LOOP_STATE and name not in parameters and not _STATISTIC.search(name)
    ]


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
