"""The values that replicas change themselves: those of all replicas, and how they are merged into one state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from steepest.core.engine.replicas import Replicas
from steepest.core.tensors.dtypes import LOOP_STATE, Tensors, furthest, merge_replicas, same_bits

if TYPE_CHECKING:
    from steepest.core.engine.job import Description

#: The last part of the name of a buffer with statistics of samples: those of torch, Flax and Keras.
_STATISTIC = re.compile(
    r"(^|[./])((running|moving)_\w+|mean|var|variance|std|num_batches_tracked)$"
)
#: The dtypes in which JAX and Keras have keys and counters of random generators, which are each replica's own.
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


def merged_states(
    states: Sequence[Mapping[str, torch.Tensor]], description: Description
) -> Tensors:
    """Return one state merged from those of all replicas, which have seen equally many samples.

    Frozen parameters that a model updates are averaged, and so are running statistics, which are recognized by their
    names. Other buffers are the first replica's: the mean of two queues of keys, or of two pointers into them, is
    meaningless. `Description.merging` takes precedence.

    Args:
        states: of each replica, all with the same names.
        description: of the replicas.
    """
    mean = mean_states(
        [
            {name: state[name] for name in states[0] if not _is_of_one(name, description)}
            for state in states
        ],
        [1.0] * len(states),
    )
    return Tensors((name, mean.get(name, states[0][name])) for name in states[0])


def differing_buffers(
    states: Sequence[Mapping[str, torch.Tensor]], description: Description
) -> list[str]:
    """Return the names of buffers that `merged_states` takes from the first replica, although another's differs much.

    Names in `Description.merging` are left out.
    """
    return [
        name
        for name in states[0]
        if name not in description.merging
        and _is_of_one(name, description)
        and _differ([state[name] for state in states])
    ]


def _is_of_one(name: str, description: Description) -> bool:
    """Return whether the merged value of a name is the first replica's."""
    if (chosen := description.merging.get(name)) is not None:
        return chosen == "first"
    return (
        name != LOOP_STATE and name not in description.layout.index and not _STATISTIC.search(name)
    )


def _differ(values: Sequence[torch.Tensor]) -> bool:
    """Return whether replicas' values of a buffer differ by more than a statistic of different samples would.

    They do if one number is farther from the first replica's than the root mean square of all: the elements of a
    statistic differ by a fraction of their size, two keys of a queue by as much as their length.
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
