"""Memory of the host as arrays and tensors."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from steepest.core.tensors.memory import fill


def test_an_array_to_read_alone_is_written_without_a_warning() -> None:
    """Torch warns of a tensor over one, once in a process; Ray's store gives such arrays."""
    source = np.frombuffer(bytes(range(8)), dtype=np.uint8)
    target = torch.zeros(8, dtype=torch.uint8)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fill(target, source)
    finally:
        torch.set_warn_always(False)
    assert target.tolist() == list(range(8))
