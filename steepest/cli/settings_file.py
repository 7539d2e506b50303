"""Options of a command in a file: `--config FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steepest.errors import ConfigurationError

_NOT_THERE = ("help", "config")  # options that a file cannot have


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the file."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file with these options, as in `workers: 4`; what the command line says wins",
    )


def with_file(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command, after those of its file if they name one.

    Args:
        parser: of the command.
        arguments: those after the command's name.

    Raises:
        ConfigurationError: the file cannot be read, is no mapping, or has a key that is no option.
    """
    finder = argparse.ArgumentParser(
        add_help=False
    )  # takes --conf, too, as the command's parser does
    finder.add_argument("--config")
    file = finder.parse_known_args(arguments)[0].config
    if file is None:
        return list(arguments)
    options = {
        option.removeprefix("--"): action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and action.dest not in _NOT_THERE
    }
    words: list[str] = []
    for name, value in _read(file).items():
        action = options.get(str(name).replace("_", "-"))
        if action is None:
            raise ConfigurationError(
                f"{file} has {name!r}, which is no option of {parser.prog}: give some of {', '.join(sorted(options))}"
            )
        words += _words(f"--config {file}: {name}", action, value)
    return [*words, *arguments]


def _read(file: str) -> Mapping[Any, Any]:
    """Return the mapping in a file; an empty one if the file is empty."""
    import yaml  # which takes as long as the rest of a command's start

    try:
        # as texts: of YAML's own types, 2:8 workers would be 128, a number of base 60
        content = yaml.load(Path(file).read_text(), yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {file}: {error}") from None
    if not isinstance(content, Mapping) and content:
        raise ConfigurationError(
            f"--config {file} has {type(content).__name__}: give a mapping, such as `workers: 4`"
        )
    return content or {}


def _words(where: str, action: argparse.Action, value: Any) -> list[str]:
    """Return the arguments for one option."""
    option = action.option_strings[-1]
    if action.nargs == 0:
        if value not in ("true", "false"):
            raise ConfigurationError(f"{where} is {value!r}: give true or false")
        return [option] if value == "true" else []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) and each for each in values):
        raise ConfigurationError(f"{where} is {value!r}: give a number or a text")
    if len(values) != 1 and not isinstance(action, argparse._AppendAction):
        raise ConfigurationError(f"{where} has {len(values)} values: give one")
    return [f"{option}={each}" for each in values]
