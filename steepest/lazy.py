"""Public names of a package, each loaded when it is first used: torch takes seconds to import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazily(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    They know its public names, and its modules and packages without an underscore. What type checkers and editors
    see stands under TYPE_CHECKING in the package itself.

    Args:
        package: its full name.
        modules: by public name the module that has it, relative to the package.
    """
    own = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name in modules:
            value = getattr(import_module(f"{package}.{modules[name]}"), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        own[name] = value  # found without this function from now on
        return value

    def names() -> list[str]:
        return [*own["__all__"], *(name for name in own if name.startswith("__"))]

    return load, names
