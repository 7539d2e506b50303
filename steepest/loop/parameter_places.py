"""The places of a module's parameters, in which a user's loop may not put others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from steepest.core.models.names import plainly

_DO = (
    " after steepest.prepare(), and the optimizer goes on with the one that it was given: do it before the optimizer "
    "is made, and before prepare"
)


class ParameterPlaces:
    """Where a module has the parameters that optimizers were given.

    Args:
        module: the user's.
        prepared: the ids of these parameters.
    """

    def __init__(self, module: torch.nn.Module, prepared: Collection[int]) -> None:
        self._module = module
        named = plainly(module.named_parameters(remove_duplicate=False))
        self._given = {name: each for name, each in named.items() if id(each) in prepared}
        self._note()

    def _note(self) -> None:
        """Note what each module in the tree has now."""
        self._entries: list[tuple[dict[str, Any], str, Any]] = [
            (own, key, value)
            for each in self._module.modules()
            for own in (each._parameters, each._modules)
            for key, value in own.items()
        ]

    def replaced(self) -> str | None:
        """Return in words which given parameter has another one in its place; None where each is in its own."""
        for own, key, value in self._entries:
            if own.get(key) is not value:
                break
        else:
            return None
        present = plainly(self._module.named_parameters(remove_duplicate=False))
        for name, parameter in self._given.items():
            now = present.get(name)
            if now is parameter:
                continue
            if (
                now is None
            ):  # what is gone with its module stays as it is; what has another name does not
                for other, each in present.items():
                    if each is parameter:
                        return f"the loop has made {name!r} to {other!r}{_DO}"
                continue
            for other, each in self._given.items():
                if each is now:
                    return f"the loop has tied {name!r} to {other!r}{_DO}"
            return f"the loop has put another parameter in the place of {name!r}{_DO}"
        self._note()
        return None
