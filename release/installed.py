"""Import every public module of the installed package: none may need the repository, or an extra that it does not name.

python installed.py CHECKOUT       # the folder from which nothing may be imported
"""

import importlib
import pkgutil
import sys
from pathlib import Path

import steepest
from steepest.errors import ConfigurationError

#: what an extra brings, where the module that wants it is for that framework alone
EXTRAS = {"jax", "tensorflow", "keras", "pyspark", "numba"}


def missing_extra(error: Exception) -> bool:
    """Whether an import failed for want of an extra, and said so or is known for it."""
    return "pip install 'steepest[" in str(error) or getattr(error, "name", None) in EXTRAS


def main(checkout: Path) -> None:
    home = Path(steepest.__file__).resolve()
    assert checkout not in home.parents, f"steepest was imported from {home}"
    assert (home.parent / "py.typed").exists(), "py.typed is not installed"
    names = [
        found.name
        for found in pkgutil.walk_packages(steepest.__path__, "steepest.")
        if not any(part.startswith("_") for part in found.name.split("."))
    ]
    without = []
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, ConfigurationError) as error:
            if not missing_extra(error):
                raise
            without.append(name)
    for name in steepest.__all__:
        if name not in {"TensorFlowModel"}:
            getattr(steepest, name)
    print(f"{len(names) - len(without)} modules imported, {len(without)} need an extra")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
