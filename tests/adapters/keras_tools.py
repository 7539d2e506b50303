"""What the tests of Keras models share; a module that imports it is skipped without TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
pytest.importorskip(
    "tensorflow", reason="needs TensorFlow: make test-tensorflow installs it", exc_type=ImportError
)

import keras


def compute_in(dtype: str) -> None:
    """Have Keras' layers and losses compute in a dtype."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


@pytest.fixture
def double() -> Iterator[None]:
    """Keras computes in float64."""
    compute_in("float64")
    yield
    compute_in("float32")
