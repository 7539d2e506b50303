"""The program that a place runs: its file, its arguments, and the name that is made of it."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steepest.errors import ConfigurationError

_LONGEST_NAME = 40  # characters: Ray and Kubernetes make longer names of it


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python program and its arguments; `script`: the file's path, here or where it will run."""

    script: str
    arguments: tuple[str, ...] = ()

    def command(self, script: str | None = None) -> str:
        """Return the program's command line for a shell, with the file where `script` says, if elsewhere."""
        return shlex.join(["python", script or self.script, *self.arguments])


def add_program_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the options that name a program, which may be left out if `optional`, and the file to write."""
    parser.add_argument("script", nargs="?" if optional else None, help="the training program")
    parser.add_argument(
        "--arguments", default="", metavar="TEXT", help='of the program: --arguments="--lr 0.1"'
    )
    parser.add_argument("--name", help="of the job (default: the script's)")
    parser.add_argument(
        "--output", metavar="FILE", help="where to write (default: standard output)"
    )


def program_of(options: argparse.Namespace, *, exists: bool = True) -> Program:
    """Return the program that options name.

    Raises:
        ConfigurationError: no such file, if it must exist, or no shell words.
    """
    if exists and not Path(options.script).is_file():
        raise ConfigurationError(
            f"there is no program {options.script!r}: give the path of a Python file"
        )
    try:
        arguments = tuple(shlex.split(options.arguments))
    except ValueError as error:
        raise ConfigurationError(
            f"--arguments={options.arguments!r} cannot be divided into words as a shell does: {error}"
        ) from None
    return Program(script=options.script, arguments=arguments)


def job_name(options: argparse.Namespace, default: str = "") -> str:
    """Return a job's name: --name, or one made of the script's, or `default` without a script.

    Raises:
        ConfigurationError: --name is not made of small letters, digits and hyphens, or is too long.
    """
    if options.name is None:
        made = re.sub(r"[^a-z0-9]+", "-", Path(options.script or default).stem.lower())
        return re.sub(r"^[^a-z]+", "", made)[:_LONGEST_NAME].strip("-") or "steepest"
    name: str = options.name
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > _LONGEST_NAME:
        raise ConfigurationError(
            f"--name={name!r}: give small letters, digits and hyphens, a letter first, "
            f"{_LONGEST_NAME} at most"
        )
    return name


def pairs_of(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return "KEY=VALUE" texts, given with an option, as a mapping.

    Raises:
        ConfigurationError: one has no "=" or no key.
    """
    for text in texts:
        if not re.fullmatch(r"[^=\s]+=\S*", text):
            raise ConfigurationError(f"{option}={text!r}: give KEY=VALUE")
    return dict(text.split("=", 1) for text in texts)


def write(text: str, output: str | None) -> None:
    """Write a text to a file, or to standard output where none is named.

    Raises:
        ConfigurationError: it cannot be written.
    """
    if output is None:
        sys.stdout.write(text)
        return
    try:
        Path(output).write_text(text)
    except OSError as error:
        raise ConfigurationError(f"--output={output!r} cannot be written: {error}") from None
