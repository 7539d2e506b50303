"""Training with plain processes works without the rest of the package: it is tried in a folder that has nothing else.

    python tests/core/alone.py [arguments of pytest]

What `steepest.core` and `TorchModel` import, module by module, is copied to a temporary folder, with `tests/core` and
the example, and run there: the package can import PyTorch, NumPy, msgpack and the standard library alone, nobody Ray.
Modules that are no part of the core, and are imported nevertheless, are listed with those that import them.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BEGIN = ["steepest.core", "steepest.models.torch"]  # what runs processes, and a user's models
#: The core: packages, with modules that are no part of it, and single modules.
PACKAGES = {
    "steepest.core": [],
    "steepest.data": ["fingerprint", "ray_dataset", "spark"],
    "steepest.engine": [],
    "steepest.messages": ["collective", "rows", "users"],
    "steepest.models": [],
    "steepest.optim": ["projected"],
    "steepest.protocol": ["open_group"],
    "steepest.strategies": ["local", "named", "simple"],
    "steepest.tensors": ["safetensors_file"],
    "steepest.transport": ["certificates", "tls"],
}
MODULES = ["steepest", "steepest.errors", "steepest.validation"]
#: What the package may import there; it unpickles functions of the tests, and of a program.
LIBRARIES = ["steepest", "torch", "numpy", "msgpack", "tests", "__main__", "__mp_main__"]
OTHERS = ["tests/core", "examples/core_digits.py"]

_CUSTOMIZE = f"""
import builtins, sys
found = builtins.__import__
def limited(name, globals=None, locals=None, fromlist=(), level=0):
    first = name.partition(".")[0]
    by = (globals or {{}}).get("__name__") or ""
    allowed = first in {LIBRARIES} or first in sys.stdlib_module_names
    if level == 0 and (first == "ray" or by.startswith("steepest") and not allowed):
        raise ModuleNotFoundError(f"{{by}} may not import {{name}} here", name=name)
    return found(name, globals, locals, fromlist, level)
builtins.__import__ = limited
"""
_PYTEST = "[pytest]\npythonpath = .\nmarkers = long: takes long\n"


def path_of(module: str) -> Path | None:
    """Return the file of a module or package; None if there is none."""
    base = ROOT.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def imported(module: str) -> Iterator[str]:
    """Yield the modules that a module of the package imports when it is loaded itself."""
    path = path_of(module)
    assert path is not None
    parts: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while parts:
        part = parts.pop()
        if isinstance(part, ast.ImportFrom) and (part.module or "").startswith("steepest"):
            for name in part.names:
                inner = f"{part.module}.{name.name}"
                yield inner if path_of(inner) else str(part.module)
        elif isinstance(part, ast.If) and "TYPE_CHECKING" in ast.dump(part.test):
            parts += part.orelse
        elif not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts += ast.iter_child_nodes(part)


def closure() -> dict[str, str]:
    """Return the modules that are loaded with the core, each with one that imports it."""
    found, coming = {"steepest": ""}, [(module, "") for module in BEGIN]
    while coming:
        module, by = coming.pop(0)
        if module not in found:
            found[module] = by
            package = module.rpartition(".")[0]
            coming += [(package, module), *((other, module) for other in imported(module))]
    return found


def is_core(module: str) -> bool:
    """Return whether a module is meant to be part of the core."""
    package, _, name = module.rpartition(".")
    return module in MODULES or module in PACKAGES or name not in PACKAGES.get(package, [name])


def main(arguments: list[str]) -> int:
    """Print what is loaded; return the exit status of the tests, run without all else."""
    found = closure()
    lines = {m: len(path.read_text().splitlines()) for m in found if (path := path_of(m))}
    for module in sorted(m for m in lines if not is_core(m)):
        print(f"{lines[module]:5} lines of {module}, for {found[module]}")  # noqa: T201
    rest = sum(count for module, count in lines.items() if not is_core(module))
    print(f"{sum(lines.values())} lines in {len(lines)} modules, {rest} of them no core")  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        for module in lines:
            path = path_of(module)
            assert path is not None
            _copy(path, there / path.relative_to(ROOT))
        for other in OTHERS:
            _copy(ROOT / other, there / other)
        (there / "sitecustomize.py").write_text(_CUSTOMIZE)
        (there / "pytest.ini").write_text(_PYTEST)
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", *arguments, "tests/core"]
        return subprocess.run(command, cwd=there, env=environment).returncode


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
