"""The examples as modules, for the tests of them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@contextlib.contextmanager
def imported(*names: str) -> Iterator[dict[str, Any]]:
    """Import examples inside of this context; they travel to workers as scripts do.

    That is by value: workers cannot import them. What they import from their own folder is imported
    by the driver alone, as it is when they are run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        before = set(sys.modules)
        found = {name: importlib.import_module(name) for name in names}
        for module in found.values():
            cloudpickle.register_pickle_by_value(module)
        try:
            yield found
        finally:
            for module in found.values():
                cloudpickle.unregister_pickle_by_value(module)
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
                    del sys.modules[name]
