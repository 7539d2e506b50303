"""The values that an optimizer keeps beside the state of each parameter: in parameter groups, and in itself.

Schedule-free optimizers, Prodigy and D-Adaptation count steps in parameter groups, for example. Others
count in attributes of their own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from steepest.core.optim.portable import pack, unpack
from steepest.core.optim.several import WHICH, SeveralOptimizers
from steepest.core.optim.torch_without_compiler import without_compiler

_GROUP, _SELF = "group:", "self:"


@functools.cache
def _of_torch() -> frozenset[str]:
    """Return the names of values that any optimizer and group has, or gets from schedulers."""
    with without_compiler():
        bare = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return frozenset(vars(bare)) | {"step", "_step_count", "_opt_called", "params", "param_names"}


def _places(optimizer: torch.optim.Optimizer, index: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the dicts in which an optimizer keeps values of group `index`, each with the prefix of its keys."""
    group = optimizer.param_groups[index]
    if not isinstance(optimizer, SeveralOptimizers):
        return [(_GROUP, group), (_SELF, vars(optimizer))]
    which = group[WHICH]
    return [(_GROUP, group), (f"{_SELF}{which}.", vars(optimizer.parts[which]))]


def own_values(optimizer: torch.optim.Optimizer, index: int) -> dict[str, Any]:
    """Return the values that an optimizer keeps in a parameter group and in itself, by key."""
    return {
        prefix + name: value
        for prefix, held in _places(optimizer, index)
        for name, value in held.items()
        if name not in _of_torch()
    }


class OwnValues:
    """The values that one optimizer keeps beside the state of its parameters, and those that were set from outside.

    Args:
        optimizer: as it was made.
        hyper_of_groups: the hyperparameters with which each of its groups was made.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, hyper_of_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self._optimizer = optimizer
        self._given = [dict(hyper) for hyper in hyper_of_groups]
        # by group, the values that the optimizer has not changed itself, as they were set last
        self._set = [
            {key: taken(value) for key, value in own_values(optimizer, at).items()}
            for at in range(len(hyper_of_groups))
        ]
        self._begun = [dict(values) for values in self._set]

    def give(self, index: int, name: str, value: Any) -> None:
        """Set a group's hyperparameter, unless it is the value that was set last: the optimizer may have changed it."""
        hyper = self._given[index]
        if name not in hyper or hyper[name] != value:
            self._optimizer.param_groups[index][name] = hyper[name] = value
            self._set[index][_GROUP + name] = taken(value)

    def changed(self, index: int) -> dict[str, Any]:
        """Return the values that the optimizer has changed itself, in a group and in itself, by key."""
        before = self._set[index]
        values = own_values(self._optimizer, index)
        return {k: v for k, v in values.items() if not same(before.get(k), taken(v))}

    def load(self, index: int, values: Mapping[str, Any]) -> None:
        """Set what `changed` returned."""
        for prefix, held in _places(self._optimizer, index):
            for key, value in values.items():
                if key.startswith(prefix):
                    held[key.removeprefix(prefix)] = value

    def clear(self) -> None:
        """Undo the changes that the optimizer has made itself."""
        for index, begun in enumerate(self._begun):
            changed = self.changed(index)
            for prefix, held in _places(self._optimizer, index):
                for key in changed:
                    if key.startswith(prefix):
                        held.pop(key.removeprefix(prefix), None)
            self.load(index, {key: restored(begun[key]) for key in changed if key in begun})


def is_own(key: str) -> bool:
    """Return whether a key is one of `own_values`."""
    return key.startswith((_GROUP, _SELF))


def may_be_own(key: str) -> bool:
    """Return whether an optimizer may keep a value under a key: it must not be one of torch's own names."""
    return is_own(key) and re.sub(r"^(group:|self:(\d+\.)?)", "", key) not in _of_torch()


def group_key(name: str) -> str:
    """Return the key of a parameter group's value."""
    return _GROUP + name


def taken(value: Any) -> Any:
    """Return a snapshot of a value that can be compared; its identity if it cannot be carried."""
    try:
        return {key: (part.clone(), plain) for key, (part, plain) in pack("", value).items()}
    except TypeError:
        return id(value)


def restored(packed: Any) -> Any:
    """Return the value that `taken` was given; ValueError: it could not be carried."""
    if not isinstance(packed, dict):
        raise ValueError("the value could not be carried")
    return unpack({key: (part.clone(), plain) for key, (part, plain) in packed.items()})[""]


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal in all bits, in the form that `taken` returns."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return bool(a == b)
    return a.keys() == b.keys() and all(
        plain == b[key][1]
        and part.dtype == b[key][0].dtype
        and torch.equal(part.nan_to_num(), b[key][0].nan_to_num())
        for key, (part, plain) in a.items()
    )
