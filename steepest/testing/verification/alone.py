"""A script in a process by itself, without workers."""

from __future__ import annotations

from pathlib import Path

from steepest.core.engine.generators import seed_everything
from steepest.testing.verification.probe import WatchedFunction, print_to


class PlainScript:
    """Runs a script in a process by itself, without workers; the process is called by `name`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, watched: WatchedFunction, seed: int) -> str:
        """Run it; return the error with which it ended, or ""."""
        print_to(Path(watched.folder) / "plain.txt")
        seed_everything(seed)
        try:
            watched()
        except SystemExit as stopped:
            return "" if stopped.code in (None, 0) else f"SystemExit: {stopped.code}"
        except Exception as error:  # noqa: BLE001 - of the user's script
            return f"{type(error).__name__}: {error}"
        return ""
