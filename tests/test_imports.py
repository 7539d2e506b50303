"""What a process imports: no torch and no Ray before something needs them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import steepest


def run(program: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_alone_imports_neither_torch_nor_ray_nor_numpy() -> None:
    program = "import sys, steepest; print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    assert run(program) == "[]\n"


def test_names_and_modules_are_there_when_they_are_asked_for() -> None:
    run(
        "import steepest\n"
        "from steepest import collectives, TorchModel\n"
        "assert steepest.errors.SteepestError and steepest.collectives is collectives\n"
        "assert steepest.TorchModel is TorchModel and steepest.TorchModel.__module__ == 'steepest.models.torch'\n"
        "assert set(steepest.__all__) < set(dir(steepest))"
    )


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'steepest' has no attribute 'Trainer'"):
        _ = steepest.Trainer
    with pytest.raises(ImportError):
        from steepest import Trainer  # noqa: F401


def test_type_checkers_see_the_names_that_python_sees() -> None:
    tree = ast.parse(Path(steepest.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {(alias.asname, node.module) for node in imports for alias in node.names if alias.asname}
    assert {name for name, _ in seen} == set(steepest.__all__)
    for name, module in seen:
        assert getattr(steepest, name) is getattr(sys.modules[str(module)], name)
