"""Rows of a Ray Dataset as samples: fetched block by block, each visited once per epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch

from steepest.core.data.protocol import Blocks, Indices
from steepest.errors import ConfigurationError


class RayDataset:
    """A materialized Ray Dataset whose rows are the samples, as a source.

    A batch is a dict of columns, or with `columns` a tuple of them. Numbers and arrays of one shape
    become tensors, the rest lists. In each epoch the blocks are shuffled, and the rows within each;
    so a step needs few blocks, which a worker fetches from the object store when it needs them, and
    of which it keeps the last two. All workers read the same blocks at the same time: in an epoch,
    each node fetches once the blocks that it does not hold.

    Args:
        dataset: what `ray.data.Dataset.materialize` returns. Its blocks stay in the object store as
            long as this object or a trainer's model has them.
        columns: names, in the order of the batch; by default a batch is a dict of all.

    Raises:
        ConfigurationError: the data set is not materialized or empty, or has no such column.

    Example:
        >>> dataset = ray.data.read_parquet(path).materialize()  # doctest: +SKIP
        >>> data = RayDataset(dataset, ("image", "label"))  # doctest: +SKIP
        >>> model = TorchModel(net, loss=F.cross_entropy, data=data, ...)  # doctest: +SKIP
    """

    def __init__(self, dataset: Any, columns: Sequence[str] | None = None) -> None:
        from ray.data.dataset import MaterializedDataset  # only now, because it takes seconds

        if not isinstance(dataset, MaterializedDataset):
            raise ConfigurationError(
                f"data is a {type(dataset).__name__} whose rows are not settled, and each worker "
                "would compute others: "
                "call ds.materialize() once, before the trainer is made, and give what it returns"
            )
        if isinstance(columns, str) or (columns is not None and not columns):
            raise ConfigurationError(
                f"columns={columns!r}: give one or more names, such as ('image', 'label')"
            )
        known = dataset.columns(fetch_if_missing=False)
        if known is not None and (unknown := [name for name in columns or () if name not in known]):
            raise ConfigurationError(
                f"the data set has no column {unknown[0]!r}: there are {', '.join(known[:20])}"
            )
        self._columns = None if columns is None else tuple(columns)
        bundles = list(dataset.iter_internal_ref_bundles())
        blocks_here = [
            (ref, block.num_rows)
            for b in bundles
            for ref, block in zip(b.block_refs, b.metadata, strict=True)
        ]
        self._refs = tuple(ref for ref, rows in blocks_here if rows)
        self.blocks: Blocks = tuple(rows for _, rows in blocks_here if rows)
        self._borders = np.cumsum((0, *self.blocks))
        self.size: int | None = int(self._borders[-1])
        if not self.size:
            raise ConfigurationError("the Ray Dataset is empty: give at least one row")
        self._kept: dict[int, Any] = {}

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Any]:
        """Yield a dict or tuple of columns for each share; fast in the sample plan's order."""
        for share in shares:
            blocks = np.searchsorted(self._borders, share, side="right") - 1
            runs = np.split(np.arange(len(share)), np.flatnonzero(np.diff(blocks)) + 1)
            batch = self._take(
                [(int(blocks[run[0]]), share[run] - self._borders[blocks[run[0]]]) for run in runs]
            )
            yield batch if self._columns is None else tuple(batch[name] for name in self._columns)

    def _take(self, runs: Sequence[tuple[int, Indices]]) -> dict[str, Any]:
        """Return the columns of rows, given as (block, rows of it)."""
        from ray.data.block import BlockAccessor

        parts = [
            BlockAccessor.for_block(self._fetch(block).take(rows.tolist())).to_arrow()
            for block, rows in runs
        ]
        accessor = BlockAccessor.for_block(parts[0])
        if len(parts) > 1:
            builder = accessor.builder()  # finds the type that the parts have in common
            for part in parts:
                builder.add_block(part)
            accessor = BlockAccessor.for_block(builder.build())
        return {name: _column(array) for name, array in accessor.to_batch_format("numpy").items()}

    def _fetch(self, block: int) -> Any:
        """Return Ray's accessor to these columns of one block; the last two are kept."""
        from ray.data.block import BlockAccessor

        if block not in self._kept:
            if len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            accessor = BlockAccessor.for_block(ray.get(self._refs[block]))
            if self._columns is not None:
                accessor = BlockAccessor.for_block(
                    accessor.select(list(dict.fromkeys(self._columns)))
                )
            self._kept[block] = accessor
        return self._kept[block]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}


def _column(array: np.ndarray[Any, Any]) -> Any:
    """Return a column as a tensor of numbers, or as a list of anything else."""
    if array.dtype == object and len({getattr(value, "shape", None) for value in array}) == 1:
        array = np.stack(list(array))  # lists of one length, which Arrow does not take for arrays
    if array.dtype.kind not in "biufc":
        return array.tolist()
    return torch.from_numpy(array if array.flags.writeable else array.copy())
