"""Rows of histories for pages."""

from __future__ import annotations

from typing import Any


def row_of(step: int, **more: Any) -> dict[str, Any]:
    """A row of a step, of two workers."""
    return {
        "kind": "step", "time": 1000.0 + step, "step": step, "epoch": 0, "loss": 1 / step, "samples": 8,
        "metrics": {"accuracy": 0.5}, "staleness": [0, 0], "learning_rate": [0.1], "gradient_norm": 2.0,
        "timings": {"compute": 0.1}, "workers": 2, "servers": 1, "generation": 0, "bytes_pushed": 10,
        "bytes_pulled": 20, "seconds": 0.5 * step, **more,
    }  # fmt: skip
