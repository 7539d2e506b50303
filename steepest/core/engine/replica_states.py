"""The values that replicas change themselves, of all of them, and what stands for all in one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from steepest.core.engine.replicas import Replicas
from steepest.core.tensors.dtypes import LOOP_STATE, Tensors, furthest, merge_replicas, same_bits

if TYPE_CHECKING:
    from steepest.core.engine.job import Description

#: The last part of the name of a buffer that has statistics of what a replica has seen: those of torch, Flax and Keras.
_STATISTIC = re.compile(
    r"(^|[./])((running|moving)_\w+|mean|var|variance|std|num_batches_tracked)$"
)
#: What JAX and Keras have keys and counters of generators of random numbers in, which are each replica's own.
_OF_GENERATORS = (torch.uint32, torch.uint64)


def all_states(call: Callable[..., list[list[Tensors]]]) -> list[Tensors]:
    """Return each replica's state, all with the same names.

    Args:
        call: calls a function of `Replicas` on all workers, with arguments for it, and returns the results
            by worker.
    """
    states = [state for part in call(Replicas.states) for state in part]
    names = sorted(set().union(*states))
    if all(len(state) == len(names) for state in states):
        return states
    # Not all replicas have changed the same frozen parameters.
    states = [state for part in call(Replicas.states, names) for state in part]
    return [Tensors((name, state[name]) for name in names) for state in states]


def merged_states(states: Sequence[Mapping[str, torch.Tensor]], about: Description) -> Tensors:
    """Return one state that stands for those of all replicas, which have seen equally many samples.

    Frozen parameters that a model updates are averaged, and so are running statistics, which are known by their names.
    Other buffers are the first replica's: the mean of two queues of keys, or of two pointers into them, is neither.
    What the model says of a name (`Description.merging`) goes before.

    Args:
        states: of each replica, all with the same names.
        about: the replicas.
    """
    mean = mean_states(
        [
            {name: state[name] for name in states[0] if not _is_of_one(name, about)}
            for state in states
        ],
        [1.0] * len(states),
    )
    return Tensors((name, mean.get(name, states[0][name])) for name in states[0])


def differing_buffers(
    states: Sequence[Mapping[str, torch.Tensor]], about: Description
) -> list[str]:
    """Return the names of buffers of which `merged_states` has the first replica's, quite unlike another's.

    None of them is one that the model has said so of.
    """
    return [
        name
        for name in states[0]
        if name not in about.merging
        and _is_of_one(name, about)
        and _differ([state[name] for state in states])
    ]


def _is_of_one(name: str, about: Description) -> bool:
    """Return whether the first replica's value of a name stands for all replicas'."""
    if (chosen := about.merging.get(name)) is not None:
        return chosen == "first"
    return name != LOOP_STATE and name not in about.layout.index and not _STATISTIC.search(name)


def _differ(values: Sequence[torch.Tensor]) -> bool:
    """Return whether replicas' values of a buffer differ by more than those of one statistic of different samples do.

    Numbers do where one is farther from the first replica's than the root mean square of all: the elements of a
    statistic differ by a part of their size, two keys of a queue by as much as they are long.
    """
    first = values[0]
    if first.dtype in _OF_GENERATORS or all(same_bits(first, other) for other in values[1:]):
        return False
    if not first.is_floating_point() or any(other.shape != first.shape for other in values):
        return True
    try:
        every = torch.stack([value.double() for value in values])
    except (NotImplementedError, TypeError):  # packed bits
        return True
    size = every.square().mean().sqrt()
    return not bool((every - every[0]).abs().max() <= size)  # of NaN and infinity, too


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
