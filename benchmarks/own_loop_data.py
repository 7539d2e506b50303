"""The data of ``benchmarks.own_loop``, and the loader of every contender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.models import Workload


class Rows(Dataset[Any]):
    """Arrays of which a batch is read at once."""

    def __init__(self, workload: Workload) -> None:
        self._x, self._y = workload.data()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Any:
        return self._x[index], self._y[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        rows = torch.as_tensor(indices)
        return self._x[rows], self._y[rows]


def as_it_is(batch: Any) -> Any:
    """Collate a batch that was read at once."""
    return batch


def loader(workload: Workload) -> DataLoader[Any]:
    """The loader of every contender."""
    return DataLoader(
        Rows(workload), batch_size=workload.batch_size, shuffle=True, collate_fn=as_it_is
    )
