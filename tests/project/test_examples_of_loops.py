"""The examples with loops of their own: alone and on workers they learn the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(params=["own_loop_digits", "reinforce"])
def example(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An example as a module; it travels to workers as a script does, which cannot import it either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        module = importlib.import_module(request.param)
        ray.cloudpickle.register_pickle_by_value(module)
        yield module
        ray.cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[request.param]


def test_alone_it_learns(example: Any) -> None:
    assert example.main([]) > 0.9


@pytest.mark.few(1)
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_on_two_workers_it_learns(example: Any) -> None:
    assert example.main(["--workers", "2"]) > 0.9
