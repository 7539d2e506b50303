"""The `state` of an optimizer behind `prepare`: it lies in the job's processes, and uses of it are refused."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

from steepest.errors import ConfigurationError


def changed_state(name: str) -> str:
    """Return the text of the error for an optimizer's state that a loop reads or changes after `prepare`."""
    return (
        f"{name}.state was used after steepest.prepare(), where the state lies in the job's processes, a part in each: "
        "read a copy by optimizer.state_dict(). To begin it anew, as for a warm restart, end the run, and begin "
        "another steepest.run() with the weights of result.state_dict and a new optimizer"
    )


class StateElsewhere(defaultdict[Any, Any]):
    """An empty state, of which nothing is read, and to which nothing is added.

    Args:
        name: of the optimizer's class.
    """

    def __init__(self, name: str) -> None:
        super().__init__(dict)
        self._name = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ConfigurationError(changed_state(self._name))

    __getitem__ = __setitem__ = __delitem__ = __missing__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        """Return how to make the empty state of a copy of the optimizer."""
        return defaultdict, (dict,)
