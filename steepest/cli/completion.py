"""The command `steepest completion SHELL`, which prints a script for tab completion.

The script is made of the parsers of the command itself, so that it knows each option, and runs no Python when TAB
is pressed.
"""

from __future__ import annotations

import argparse
import sys

SHELLS = ("bash",)
_HOW = """\
# Tab completion of the `steepest` command, for bash 4 or later. To have it in each new shell:
#   steepest completion bash > ~/.local/share/bash-completion/completions/steepest
"""
_FUNCTION = """\
_steepest() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} path="" word words
  COMPREPLY=()
  # the subcommands before the cursor, as far as there are any; what follows -- is the script's own
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    if [[ $word == -- ]]; then COMPREPLY=($(compgen -f -- "$current")); return; fi
    case "$path $word" in
{commands}
    esac
  done
  case "$path $previous" in
{choices}
  esac
  case "$path" in
{words}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  # values of options, and what is not an option, may be files
  if [[ $current != -* && ${{#COMPREPLY[@]}} == 0 ]]; then COMPREPLY=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _steepest steepest
"""


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], whole: argparse.ArgumentParser
) -> None:
    """Add the command; `whole`: the parser of all commands, which the script completes."""
    description = "print a script for tab completion, whose first lines say where to put it"
    parser = commands.add_parser("completion", help=description, description=description)
    parser.add_argument("shell", choices=SHELLS, help="whose completion it is")

    def run(_: argparse.Namespace) -> int:
        sys.stdout.write(script(whole))
        return 0

    parser.set_defaults(call=run)


def script(parser: argparse.ArgumentParser) -> str:
    """Return the script for tab completion in bash; `parser` is that of the whole command."""
    commands, choices, words = list[str](), list[str](), list[str]()
    _collect(parser, "", commands, choices, words)
    function = _FUNCTION.format(
        commands="\n".join(commands), choices="\n".join(choices), words="\n".join(words)
    )
    return _HOW + function


def _collect(
    parser: argparse.ArgumentParser,
    path: str,
    commands: list[str],
    choices: list[str],
    words: list[str],
) -> None:
    """Add the shell's cases for a command and its subcommands."""
    known: list[str] = []
    for action in parser._actions:
        known += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                commands.append(f'      "{path} {name}") path="{path} {name}";;')
                _collect(child, f"{path} {name}", commands, choices, words)
        values = [str(value) for value in action.choices or ()]
        if action.option_strings and values:
            options = "|".join(f'"{path} {option}"' for option in action.option_strings)
            reply = f'COMPREPLY=($(compgen -W "{" ".join(values)}" -- "$current"))'
            choices.append(f"    {options}) {reply}; return;;")
        elif not action.option_strings:
            known += values
    words.append(f'    "{path}") words="{" ".join(known)}";;')
