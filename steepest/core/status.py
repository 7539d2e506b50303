"""What a role of a job does or waits for: one value, which is printed in one way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """What a role does or waits for; "" for nothing.

    Attributes:
        words: in words, such as "waits for worker 1 to join".
        seconds: for how long; None where that is not known.
        is_held_up: whether it waits for a part of its machine, such as a disk, and for no other process.
    """

    words: str = ""
    seconds: float | None = None
    is_held_up: bool = False

    def __str__(self) -> str:
        """Return words and seconds."""
        return self.words if self.seconds is None else f"{self.words}, for {self.seconds:.1f} s"
