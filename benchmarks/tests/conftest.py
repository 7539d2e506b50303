"""Tests of the benchmarks have what the package's have."""

from tests.conftest import *  # noqa: F403
