"""Limits of this process, lowered for a while."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limited(descriptors: int) -> Iterator[None]:
    """So many more descriptors than are open now may be had in this process."""
    free = [os.dup(0) for _ in range(descriptors + 1)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
