"""A script with a training loop at its top level, or in `main()`, as a function that workers run."""

from __future__ import annotations

import linecache
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass

from steepest.errors import ConfigurationError


@dataclass(frozen=True)
class UserScript:
    """A program of Python, run as ``python PATH ARGUMENTS...`` would run it, in the process that calls it.

    Its text travels with it: hosts need not have the file.

    Args:
        path: of the file.
        text: of the program.
        arguments: that it finds in `sys.argv`.
    """

    path: str
    text: str
    arguments: tuple[str, ...] = ()

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
        folder = os.path.dirname(os.path.abspath(path))
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return cls(os.path.abspath(path), text, tuple(arguments))

    def __call__(self) -> None:
        """Run it; what it raises is raised, such as the SystemExit of `sys.exit`."""
        module = types.ModuleType("__main__")
        module.__file__ = self.path
        sys.modules["__main__"], sys.argv = module, [self.path, *self.arguments]
        lines = self.text.splitlines(keepends=True)
        linecache.cache[self.path] = (len(self.text), None, lines, self.path)
        exec(compile(self.text, self.path, "exec"), vars(module))
