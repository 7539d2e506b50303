"""The generated part of the reference: a page for each public name, and the pages that are made of the code.

The pages of names are made for the site alone, where Sphinx fills in signatures and docstrings.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import steepest

#: public names by what they are for
GROUPS = {
    "Train a model": (
        "DistributedSGD", "TorchModel", "LightningModel", "HuggingFaceModel", "TensorFlowModel", "accuracy",
    ),
    "Train in a loop of your own": (
        "run", "RunResult", "prepare", "epochs", "register", "report", "weight", "gather", "clip_grad_norm_", "rank",
        "size",
    ),
    "Strategies": (
        "ParameterServerStrategy", "AllreduceStrategy", "LocalStrategy", "SimpleStrategy", "Int8", "Int4", "Int2",
        "TopK", "PowerSGD",
    ),
    "Settings of a job": (
        "RunConfig", "FailureConfig", "DeadlineConfig", "ResourceConfig", "TLSConfig", "Checkpoints",
    ),
    "Data": ("IndexedStream", "RayDataset"),
    "Results": (
        "StepResult", "EvaluationResult", "Stats", "Staleness", "ProcessInfo", "Event", "History", "CommitLog",
        "Commit", "LoggedPush",
    ),
    "Callbacks and loggers": (
        "Callback", "EarlyStopping", "ReduceOnPlateau", "TensorBoard", "MLflow", "WandB", "Trackio", "Prometheus",
    ),
    "Embedding tables": (
        "Table", "Embedding", "EmbeddingBag", "EmbeddingCollection", "connect", "ExportedTable", "ServedTable",
    ),
    "Shared arrays, collectives, predictions": ("ParameterServer", "ring_allreduce", "plan", "Forecast"),
    "Protocols, to be implemented": (
        "Model", "Computed", "ParameterLayout", "OptimizerSpec", "Strategy", "Codec",
    ),
}  # fmt: skip
#: modules whose names are public, too, each with a page
MODULES = (
    "steepest.collectives",
    "steepest.errors",
    "steepest.places",
    "steepest.tables",
    "steepest.testing",
)
#: groups whose classes are made by users, and asked by the library alone
_MADE_ALONE = ("Strategies", "Settings of a job")


def name_pages() -> dict[str, str]:
    """Return the pages of all public names and modules, as reStructuredText by file."""
    found = {}
    for group, names in GROUPS.items():
        for name in names:
            of_class = isinstance(getattr(steepest, name), type)
            text = f".. currentmodule:: steepest\n\n.. auto{'class' if of_class else 'function'}:: {name}\n"
            if of_class and group not in _MADE_ALONE:
                text += "   :members:\n"
            title = re.sub("_$", r"\\_", name)  # else the mark of a link
            found[f"{name}.rst"] = f"{title}\n{'=' * len(title)}\n\n{text}"
    for module in MODULES:
        text = f".. automodule:: {module}\n   :members:\n   :exclude-members: Table\n"  # which has a page
        found[f"{module}.rst"] = f"{module}\n{'=' * len(module)}\n\n{text}"
    return found


def with_links(names: str) -> str:
    """Return the page of all names with a link to the page of each."""
    pages = {name.removesuffix(".rst") for name in name_pages()}

    def link(found: re.Match[str]) -> str:
        return f"[{found[0]}]({found[1]}.rst)" if found[1] in pages else found[0]

    tree = "\n".join(sorted(pages, key=str.lower))
    linked = re.sub(r"`([\w.]+)`", link, names)
    return f"{linked}\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"


def prepare(app: Any) -> None:
    """Have Sphinx show the fields of a dataclass, which its constructor takes, as parameters, others as attributes."""
    from sphinx.domains.python import PyObject

    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-docstring", _fields_as_parameters, priority=400)  # before napoleon


def _fields_as_parameters(
    app: Any, kind: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    if kind == "class" and dataclasses.is_dataclass(found):
        lines[:] = ["Args:" if line == "Attributes:" else line for line in lines]
