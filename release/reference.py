"""The generated part of the reference: settings, errors, commands and names, and a page for each public name.

    python -m release.reference        # writes docs/reference/api.md, settings.md, commands.md and errors.md

These pages stand in the repository, and a test compares them with what this module makes of docstrings, signatures and
parsers. The pages of single names are made for the site alone, where Sphinx shows whole docstrings.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import steepest
from steepest import errors
from steepest.cli.main import make_parser

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
#: public names by what they are for
GROUPS = {
    "Train a model": (
        "DistributedSGD", "TorchModel", "LightningModel", "HuggingFaceModel", "TensorFlowModel", "JaxModel",
        "accuracy",
    ),
    "Train in a loop of your own": (
        "run", "RunResult", "prepare", "epochs", "register", "report", "weight", "gather", "clip_grad_norm_", "rank",
        "size", "leaving", "evaluate",
    ),
    "Strategies": (
        "ParameterServerStrategy", "AllreduceStrategy", "LocalStrategy", "SimpleStrategy", "Int8", "Int4", "Int2",
        "TopK", "PowerSGD",
    ),
    "Settings of a job": (
        "RunConfig", "FailureConfig", "DeadlineConfig", "ResourceConfig", "TLSConfig", "Checkpoints",
    ),
    "Data": ("IndexedStream", "OffsetStream", "next_offsets", "RayDataset"),
    "Results": (
        "StepResult", "EvaluationResult", "Stats", "Staleness", "ProcessInfo", "Event", "History", "CommitLog",
        "Commit", "LoggedPush",
    ),
    "Callbacks and loggers": (
        "Callback", "EarlyStopping", "ReduceOnPlateau", "TensorBoard", "MLflow", "WandB", "Trackio", "Prometheus",
        "OpenTelemetry",
    ),
    "Embedding tables": (
        "Table", "Embedding", "EmbeddingBag", "EmbeddingCollection", "Bucketize", "connect", "ExportedTable",
        "ServedTable", "TableRows",
    ),
    "Shared arrays, collectives, predictions": ("ParameterServer", "ring_allreduce", "plan", "Forecast", "plan_tables"),
    "Protocols, for what you write yourself": (
        "Model", "Computed", "ParameterLayout", "OptimizerSpec", "Strategy", "Codec",
    ),
}  # fmt: skip
#: classes whose modules need an extra, which may be missing here: the extra, and the module
EXTRAS = {"JaxModel": ("jax", "steepest/adapters/jax.py")}
#: modules whose names are public, too
MODULES = ("steepest.tables", "steepest.collectives", "steepest.places", "steepest.testing")
#: what has settings, in the order of their page
CONFIGURED = (
    "DistributedSGD", "DistributedSGD.fit", "ParameterServerStrategy", "AllreduceStrategy", "LocalStrategy",
    "SimpleStrategy", "Int8", "Int4", "Int2", "TopK", "PowerSGD", "RunConfig", "FailureConfig", "DeadlineConfig",
    "ResourceConfig", "TLSConfig", "Checkpoints",
)  # fmt: skip
#: what users make and the library asks: their members are not for users
_MADE_ALONE = frozenset(
    {
        *GROUPS["Strategies"], *GROUPS["Settings of a job"], *GROUPS["Train a model"], *GROUPS["Embedding tables"],
        "EarlyStopping", "ReduceOnPlateau", "TensorBoard", "MLflow", "WandB", "Trackio", "Prometheus", "OpenTelemetry",
    }
    - {"DistributedSGD", "ExportedTable", "ServedTable"}
)  # fmt: skip
#: characters of a cell, where a sentence is not longer
_LONGEST = 280
_MADE = "<!-- made by python -m release.reference -->"


def described(found: Any) -> dict[str, str]:
    """Return what docstrings say of the arguments of a function or class, or of its base classes, by name.

    Several names that share a text each have it.
    """
    texts: dict[str, str] = {}
    for each in reversed(inspect.getmro(found)) if isinstance(found, type) else [found]:
        own = each.__dict__.get("__doc__") if isinstance(each, type) else each.__doc__
        for _, body in re.findall(
            r"^(Args|Attributes):\n((?:[ ]{4}.*\n|\n)+)", inspect.cleandoc(own or "") + "\n", re.M
        ):
            for names, text in re.findall(
                r"^[ ]{4}(\w[\w, ]*): (.*\n(?:[ ]{5,}.*\n|\n)*)", body, re.M
            ):
                texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts


def settings_page() -> str:
    """Return the page of all settings: each with its default and the beginning of what its docstring says.

    Raises:
        ValueError: a docstring does not say what a setting is.
    """
    page = (
        "# Settings\n\nThe settings of the trainer, of `fit`, of strategies, of compression, of `RunConfig` with its "
        "parts and of `Checkpoints`.\nEach has its default and the beginning of its docstring; [the page of the "
        f"name](api.md) has all of it.\n\n{_MADE}\n"
    )
    for name in CONFIGURED:
        found = operator.attrgetter(name)(steepest)
        texts = described(found)
        page += f"\n## `{name}`\n\n| setting | default | |\n|---|---|---|\n"
        for each in _in_order(inspect.signature(found).parameters, texts):
            if each.name not in texts:
                raise ValueError(f"the docstring of {name} does not say what {each.name} is")
            text = _cell(_beginning(texts[each.name]))
            page += f"| `{each.name}` | {_default(each)} | {text} |\n"
    return page


def errors_page() -> str:
    """Return the page of all errors: the tree, and when each is raised."""
    about, tree, *more = inspect.cleandoc(errors.__doc__ or "").split("\n\n")
    names = re.sub(r"^(.*?\w+Error(?: \(\w+\))?).*$", r"\1", tree, flags=re.MULTILINE)
    page = f"# Errors\n\n{about} They are in `steepest.errors`.\n\n```text\n{names}\n```\n\n"
    page += "\n\n".join(map(_joined, more)) + f"\n\n{_MADE}\n"
    for name in re.findall(r"\b(\w+Error)\b(?! ?\)|,)", re.sub(r"\(.*?\)", "", tree)):
        found = getattr(errors, name)
        bases = [each for each in found.__bases__ if each.__module__ == "builtins"]
        also = f" Also a `{bases[-1].__name__}`." if bases and bases[-1] is not Exception else ""
        paragraphs = inspect.cleandoc(found.__doc__ or "").split("\n\n")
        paragraphs[0] += also
        page += f"\n## {name}\n\n" + "\n\n".join(map(_joined, paragraphs)) + "\n"
    return page


def commands_page() -> str:
    """Return the page of the command line: each command with its arguments, from the parsers."""
    parser = make_parser()
    page = (
        "# Commands\n\nThe command `steepest`, which `python -m steepest` is, too. "
        f"`steepest COMMAND --help` says the same.\n\n{_MADE}\n"
    )
    for path, each, about in _commands(parser, "steepest"):
        arguments = [
            action
            for action in each._actions
            if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
        ]
        page += f"\n## {path}\n\n{_capital(_joined(about)).rstrip('.')}.\n"
        usage = " ".join(each.usage.split()) if each.usage else _usage(path, each, arguments)
        page += f"\n```sh\n{usage}\n```\n"
        if arguments:
            page += "\n| argument | default | |\n|---|---|---|\n"
        for action in arguments:
            page += f"| {_spelled(action)} | {_of_action(action)} | {_cell(_help(action))} |\n"
    return page


def names_page() -> str:
    """Return the page of all public names by what they are for, each with the first sentence of its docstring."""
    page = (
        "# Public names\n\nAll that `from steepest import ...` offers, and the modules beside it. Docstrings have "
        "shapes, units, errors\nand examples. [Settings](settings.md), [commands](commands.md) and "
        f"[errors](errors.md) have pages of their own.\n\n{_MADE}\n"
    )
    for group, names in GROUPS.items():
        page += f"\n## {group}\n\n| name | |\n|---|---|\n"
        for name in names:
            page += f"| `{name}` | {_cell(_about(name))} |\n"
    page += "\n## Modules\n\n| module | |\n|---|---|\n"
    for module in MODULES:
        found = importlib.import_module(module)
        names = ", ".join(f"`{each}`" for each in found.__all__)
        page += f"| `{module}` | {_cell(_summary(found))}: {names} |\n"
    return page


#: what is made of each page
PAGES: Mapping[str, Callable[[], str]] = {
    "api.md": names_page,
    "settings.md": settings_page,
    "commands.md": commands_page,
    "errors.md": errors_page,
}


#: of a class that the library fills in by other members, those for users
_MEMBERS = {"History": "rows, steps, epochs, evaluations, events, dataframe"}


def name_pages() -> dict[str, str]:
    """Return the pages of all public names and modules, as reStructuredText by file, for the site."""
    found = {}
    for name in itertools.chain(*GROUPS.values()):
        title = re.sub("_$", r"\\_", name)  # else the mark of a link
        text = _documented("steepest", name, members=name not in _MADE_ALONE)
        found[f"{name}.rst"] = f"{title}\n{'=' * len(title)}\n\n{text}"
    for module in MODULES:
        text = f".. automodule:: {module}\n"
        for name in importlib.import_module(module).__all__:
            if name != "Table":  # which has a page
                members = module != "steepest.tables" or name == "LocalRows"
                text += f"\n{_documented(module, name, members=members)}"
        found[f"{module}.rst"] = f"{module}\n{'=' * len(module)}\n\n{text}"
    return found


def _documented(module: str, name: str, *, members: bool) -> str:
    """Return the directive that shows a class, with its members or without, or a function."""
    of_class = name in EXTRAS or isinstance(getattr(importlib.import_module(module), name), type)
    text = f".. currentmodule:: {module}\n\n.. auto{'class' if of_class else 'function'}:: {name}\n"
    shown = f"   :members: {_MEMBERS.get(name, '')}".rstrip() + "\n"
    return text + (shown if of_class and members else "")


def with_links(page: str) -> str:
    """Return a page with a link from each public name that a table or heading begins with to the name's page."""
    pages = {name.removesuffix(".rst") for name in name_pages()}

    def link(found: re.Match[str]) -> str:
        start, name = found.groups()
        known = name.partition(".fit")[0]
        return f"{start}[`{name}`]({known}.rst)" if known in pages else found[0]

    return re.sub(r"^(\| |## )`([\w.]+)`", link, page, flags=re.MULTILINE)


def tree_of_names() -> str:
    """Return the navigation of the pages of single names."""
    tree = "\n".join(sorted((name.removesuffix(".rst") for name in name_pages()), key=str.lower))
    return f"\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"


def prepare(app: Any) -> None:
    """Have Sphinx show all settings of a class that has them, those of its base classes too, as parameters."""
    from sphinx.domains.python import PyObject

    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-docstring", _with_all_settings, priority=400)  # before napoleon


def _with_all_settings(
    app: Any, kind: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """Have a docstring describe all parameters of the constructor, those too that base classes describe.

    Fields of a dataclass are parameters.
    """
    if kind != "class":
        return
    heading = "Attributes" if dataclasses.is_dataclass(found) else "Args"
    section = re.compile(rf"^{heading}:\n((?:    .*\n|\n)+)", flags=re.M)
    whole, texts = "\n".join(lines) + "\n", described(found)
    if found.__init__ is object.__init__:
        return
    taken = [each for each in inspect.signature(found).parameters if each in texts]
    if not taken:
        return
    first, blank, rest = section.sub("", whole).partition("\n\n")
    more = re.split(r"^(?=(?:Attributes|Raises|Example|Reference):)", rest, maxsplit=1, flags=re.M)
    parameters = "Args:\n" + "".join(f"    {each}: {texts[each]}\n" for each in taken) + "\n"
    lines[:] = (first + blank + more[0] + "\n" + parameters + "".join(more[1:])).split("\n")


def _in_order(
    parameters: Mapping[str, inspect.Parameter], texts: Mapping[str, str]
) -> list[inspect.Parameter]:
    """Return the parameters, those that are given by name alone in the order in which docstrings have them."""
    found = [each for each in parameters.values() if each.name != "self"]
    if any(each.kind is not each.KEYWORD_ONLY for each in found):
        return found
    order = list(texts)  # by base classes, the first one's first
    return sorted(found, key=lambda each: order.index(each.name) if each.name in texts else 0)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "to be given"
    made_anew = repr(parameter.default) == "<factory>"
    return f"`{parameter.annotation}()`" if made_anew else f"`{parameter.default!r}`"


def _about(name: str) -> str:
    if name in EXTRAS:
        extra, module = EXTRAS[name]
        classes = ast.parse((FOLDER.parent.parent / module).read_text()).body
        (found,) = [
            each for each in classes if isinstance(each, ast.ClassDef) and each.name == name
        ]
        first = _joined((ast.get_docstring(found) or "").partition("\n\n")[0]).rstrip(".")
        return f"{first}; needs `pip install 'steepest[{extra}]'`"
    return _summary(getattr(steepest, name))


def _summary(found: Any) -> str:
    return _joined(inspect.cleandoc(found.__doc__ or "").partition("\n\n")[0]).rstrip(".")


def _joined(text: str) -> str:
    return " ".join(text.split())


def _beginning(text: str) -> str:
    """Return as many whole sentences of a text as fit into a cell, at least one, without the last full stop."""
    first, *more = re.split(r"(?<=\w\w|[\w)`\"']\W)(?<! al)\. ", text)
    for each in more:
        if len(first) + len(each) > _LONGEST:
            break
        first += f". {each}"
    return _capital(first.rstrip("."))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if not text.startswith(("`", '"')) else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("``", "`")


def _commands(
    parser: argparse.ArgumentParser, path: str
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Yield the commands with their parsers and what they do, in the order of their help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help for each in action._choices_actions}
            for name, child in action.choices.items():
                about = child.description or helps.get(name) or ""
                yield f"{path} {name}", child, about
                yield from _commands(child, f"{path} {name}")


def _usage(path: str, parser: argparse.ArgumentParser, arguments: list[argparse.Action]) -> str:
    """Return how a command is called, with what has to be given."""
    needed = [each for each in arguments if each.option_strings and each.required]
    options = (
        " [options]" if len(needed) < sum(bool(each.option_strings) for each in arguments) else ""
    )
    given = "".join(f" {each.option_strings[-1]} {_value(each)}" for each in needed)
    last = "".join(f" {_value(each)}" for each in arguments if not each.option_strings)
    more = (
        " COMMAND"
        if any(isinstance(each, argparse._SubParsersAction) for each in parser._actions)
        else ""
    )
    return f"{path}{options}{given}{last}{more}"


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    return " ".join(name) if isinstance(name, tuple) else str(name)


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_value(action)}`"
    value = "" if action.nargs == 0 else f" {_value(action)}"
    return ", ".join(f"`{each}{value}`" for each in action.option_strings)


def _of_action(action: argparse.Action) -> str:
    if action.required:
        return "to be given"
    if any(
        action.default is each for each in (None, False, argparse.SUPPRESS)
    ) or action.default in ([], ""):
        return ""
    shown = (
        " ".join(map(str, action.default))
        if isinstance(action.default, (list, tuple))
        else action.default
    )
    return f"`{shown}`"


def _help(action: argparse.Action) -> str:
    if action.help in (None, argparse.SUPPRESS):
        raise ValueError(f"the argument {_spelled(action)} has no help")
    return _joined(str(action.help) % {**vars(action), "prog": "steepest"})


def main() -> None:
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())


if __name__ == "__main__":
    main()
