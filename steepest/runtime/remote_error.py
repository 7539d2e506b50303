"""How an exception of one of the job's processes travels to the driver."""

from __future__ import annotations


class RemoteError(Exception):
    """An exception of another process as text (`describe_error`), which travels although it itself may not."""

    def __init__(self, told: dict[str, str]) -> None:
        super().__init__(told)
        self.told = told

    def __str__(self) -> str:
        return self.told["error"]
