"""The core works without the rest of the package: its tests are run in a folder that has nothing else.

    python tests/core/alone.py [arguments of pytest]

`steepest/core` with the four single files below, `tests/core` and some tests of its parts are copied to a temporary
folder, and run there. The package can import PyTorch, NumPy, msgspec and the standard library alone, and nobody Ray.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Tests of the core's roles, and of rules and parts of them that need nothing else.
TESTS = [
    "tests/core", "tests/data/test_sampler.py", "tests/protocol/test_coordinator.py",
    "tests/protocol/test_coordinator_scripts.py", "tests/tensors/test_layout.py",
    "tests/transport/test_router.py",
]  # fmt: skip
PARTS = [
    "steepest/__init__.py", "steepest/errors.py", "steepest/lazy.py", "steepest/validation.py",
    "steepest/core", "tests/hand_moved_clock.py", "tests/said.py", "tests/protocol/script.py", "tests/protocol/scripts",
    *TESTS,
]  # fmt: skip
#: What the package may import there.
LIBRARIES = ["steepest", "torch", "numpy", "msgspec"]

_CUSTOMIZE = f"""
import builtins, sys
# that of a checkout that is installed would find the folders that are not here
sys.meta_path[:] = [
    each for each in sys.meta_path if not getattr(each, "__module__", "").startswith("__editable__")
]
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
_PYTEST = "[pytest]\npythonpath = .\nmarkers = long: takes long\nfilterwarnings = error\n"
_CONFTEST = """
from hypothesis import settings
from tests.hand_moved_clock import clock as clock
settings.register_profile("loaded", deadline=None)  # a machine under load is no error
settings.load_profile("loaded")
"""


def main(arguments: list[str]) -> int:
    """Return the exit status of the tests, run without all else."""
    lines = sum(
        len(path.read_text().splitlines()) for path in (ROOT / "steepest/core").rglob("*.py")
    )
    print(f"steepest/core has {lines} lines", flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        for part in PARTS:
            source, target = ROOT / part, there / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        (there / "sitecustomize.py").write_text(_CUSTOMIZE)
        (there / "pytest.ini").write_text(_PYTEST)
        (there / "tests/conftest.py").write_text(_CONFTEST)
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", *arguments, *TESTS]
        return subprocess.run(command, cwd=there, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
