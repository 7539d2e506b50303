"""What a worker process shares with the driver's program: its arguments, and torch's default dtype."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Program:
    """What is a program's own in its process, and Ray's, or torch's default, in other processes."""

    arguments: tuple[str, ...]  # `sys.argv`
    dtype: torch.dtype  # torch's default

    @classmethod
    def of_this_process(cls) -> Program:
        """Return what this process has."""
        return cls(tuple(sys.argv), torch.get_default_dtype())

    def enter(self) -> None:
        """Give this process the same, before any code of the user's is imported."""
        sys.argv[:] = self.arguments
        torch.set_default_dtype(self.dtype)
