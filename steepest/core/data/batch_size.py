"""The batch size of data that may have one of their own."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from steepest.errors import ConfigurationError


def batch_size_of(data: Any, given: int | None) -> int | None:
    """Return the batch size that was given, else that of a DataLoader; None where there is neither.

    Raises:
        ConfigurationError: both are there, and they differ.
    """
    own = data.batch_size if isinstance(data, DataLoader) else None
    if own is not None and given is not None and given != own:
        raise ConfigurationError(
            f"batch_size={given!r} beside a DataLoader with batch_size={own}: give the DataLoader "
            "the one that is meant, and leave the other out"
        )
    return own if given is None else given
