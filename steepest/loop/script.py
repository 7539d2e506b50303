"""A script with a training loop at its top level, or in `main()`, as a function that workers run."""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec

from steepest.errors import ConfigurationError


@dataclass(frozen=True)
class UserScript:
    """A program of Python, run in the process that calls it.

    It is run as ``python PATH ARGUMENTS...`` or ``python -m MODULE ARGUMENTS...`` would run it. Its text travels
    with
    it: hosts need not have the file, but for what it imports.

    Args:
        path: of the file.
        text: of the program.
        arguments: that it finds in `sys.argv`.
        folder: where its imports are looked for first.
        module: the name of the module that it is, with its packages; "" for a file.
    """

    path: str
    text: str
    arguments: tuple[str, ...] = ()
    folder: str = ""
    module: str = ""

    @classmethod
    def read(cls, path: str, arguments: Sequence[str] = ()) -> UserScript:
        """Return the script in a file; modules beside it can be imported from now on.

        Raises:
            ConfigurationError: it cannot be read, or is no Python.
        """
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
            compile(text, path, "exec")
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigurationError(f"cannot run {path}: {error}") from error
        folder = os.path.dirname(os.path.realpath(path))
        script = cls(os.path.abspath(path), text, tuple(arguments), folder)
        script._find_neighbours()
        return script

    @classmethod
    def read_module(cls, name: str, arguments: Sequence[str] = ()) -> UserScript:
        """Return the script that a module is, or the `__main__` of a package; its neighbours can be imported then.

        Raises:
            ConfigurationError: there is none of this name, seen from the current directory, or it is no Python.
        """
        folder = os.getcwd()
        cls("", "", folder=folder)._find_neighbours()
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                name = f"{name}.__main__"
                spec = importlib.util.find_spec(name)
            text = (
                None if spec is None else getattr(spec.loader, "get_source", lambda _: None)(name)
            )
            if spec is None or spec.origin is None or text is None:
                raise ConfigurationError(
                    f"cannot run -m {name}: Python finds no such module from {folder}: change to the directory that "
                    "has its first package"
                )
            compile(text, spec.origin, "exec")
        except (ImportError, SyntaxError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"cannot run -m {name}: {error}") from error
        return cls(os.path.abspath(spec.origin), text, tuple(arguments), folder, name)

    @property
    def name(self) -> str:
        """The name for titles: the module, or the file without its directories."""
        return self.module or os.path.basename(self.path)

    def _find_neighbours(self) -> None:
        """Have this process find what the script imports beside it."""
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)

    def __call__(self) -> None:
        """Run it; what it raises is raised, such as the SystemExit of `sys.exit`."""
        self._find_neighbours()
        module = types.ModuleType("__main__")
        module.__file__ = self.path
        if self.module:
            module.__spec__ = ModuleSpec(self.module, None, origin=self.path)
            module.__package__ = module.__spec__.parent
        sys.modules["__main__"], sys.argv = module, [self.path, *self.arguments]
        lines = self.text.splitlines(keepends=True)
        linecache.cache[self.path] = (len(self.text), None, lines, self.path)
        exec(compile(self.text, self.path, "exec"), vars(module))
