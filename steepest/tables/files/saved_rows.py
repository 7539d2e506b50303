"""Where the rows of a checkpoint lie, by its manifests: no file of rows is read for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save

from steepest.data.storage.files import open_file, storage_of
from steepest.data.storage.places import StoragePlace
from steepest.data.storage.safetensors_file import read_tensors
from steepest.errors import CheckpointError
from steepest.tables.files.changed_rows import RowChange

#: The file by which a folder is known as a checkpoint.
MANIFEST = "manifest.json"
#: What a manifest calls files of rows, of which there may be any number; their names begin with it.
ROW_FILES = "tables"
#: The prefix of the names of tables' shards; no parameter's name begins with it.
TABLES = "tables/"
_PART_BYTES = 16 << 20  # of a file that is sent


class ShardMark(NamedTuple):
    """The properties of a shard in a checkpoint; the manifest has the fields in this order."""

    updates: int  # the version of its rows
    seed: int  # of its first values
    clock: int = 0  # seconds since the epoch; 0 where no row has a time to live
    since: int = -1  # the version since which its rows are the changes alone; -1 where they are all

    @classmethod
    def of(cls, arrays: Mapping[str, torch.Tensor]) -> ShardMark:
        """Return the mark in a shard's arrays; CheckpointError: the version or the seed is missing."""
        known = {key: arrays[key] for key in cls._fields if key in arrays}
        is_one = all(v.numel() == 1 and v.dtype is torch.int64 for v in known.values())
        if not {"updates", "seed"} <= known.keys() or not is_one:
            raise CheckpointError("a shard of its tables has no number of updates, or no seed")
        return cls(**{key: int(value) for key, value in known.items()})


@dataclass(frozen=True)
class SavedFile:
    """A file with rows.

    Attributes:
        name: the name in the folder.
        folder: the checkpoint's; None for a file in the driver's memory, or on processes' disks.
        about: what `write_tensors` returned; nothing for a file in memory.
        shards: the numbers of the shards with rows in it; empty if they are not known.
        arrays: what a file in memory has; they do not travel with this description.
        kept: the number of the snapshot of which processes have the file; 0 for no such file.
    """

    name: str
    folder: StoragePlace | None
    about: Mapping[str, Any]
    shards: tuple[int, ...]
    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the description alone."""
        return vars(self) | {"arrays": {}}

    @property
    def key(self) -> str:
        """Its folder and name."""
        return f"{self.folder}/{self.name}"

    def has(self, shard: int) -> bool:
        """Return whether it may have rows of a shard."""
        return not self.shards or shard in self.shards

    def tensors(
        self, note: Callable[[int], object] = lambda count: None, copy: Path | None = None
    ) -> Mapping[str, torch.Tensor]:
        """Return the file's tensors.

        Args:
            note: called with the size of each block that was read.
            copy: a copy of the file to read; None to read it where it lies.

        Raises:
            ValueError, OSError: the file is damaged or missing.
        """
        if copy is not None:
            return read_tensors(copy, self.about, note) if self.about else load_file(copy)
        if self.folder is None:
            return self.arrays
        with storage_of(self.folder).on_disk(self.folder / self.name) as path:
            return read_tensors(path, self.about, note)

    def parts(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the file's bytes in blocks of shape (n,), to be sent; OSError: it cannot be read."""
        if self.folder is None:
            data = np.frombuffer(save(dict(self.arrays)), np.uint8)
            yield from (data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES))
            return
        copy = storage_of(self.folder).on_disk(self.folder / self.name)
        with copy as path, open_file(path) as file:
            while part := file.read(_PART_BYTES):
                yield np.frombuffer(part, np.uint8)


@dataclass(frozen=True)
class RowLayer:
    """The rows in one checkpoint's files: all, or those that changed since the checkpoint that it continues."""

    files: tuple[SavedFile, ...]
    marks: tuple[ShardMark, ...]  # by shard


@dataclass(frozen=True)
class CheckpointRows:
    """The rows of a checkpoint.

    Attributes:
        tables: the tables' descriptions, see `Dealing.description`.
        layers: the newest first; each but the last has the changes since the next.
        change: the function of the user's that changes the rows, see `DistributedSGD.restore`; None for none.
        now: the time of the restore in seconds since the epoch: the time since the checkpoint is no part of a row's
            time to live. None to leave lives as they are.
    """

    tables: Sequence[Sequence[Any]]
    layers: tuple[RowLayer, ...] = field(default=())
    now: int | None = None
    change: RowChange | None = None

    @property
    def marks(self) -> tuple[ShardMark, ...]:
        """The marks of the newest layer, by shard; empty without rows."""
        return self.layers[0].marks if self.layers else ()

    @property
    def groups(self) -> int:
        """The number of groups of tables."""
        return len({each[4] for each in self.tables})

    @property
    def shards(self) -> int:
        """The number of shards of each group."""
        return len(self.marks) // self.groups if self.groups else 0

    def with_group(
        self, tables: Sequence[Sequence[Any]], arrays: Mapping[str, torch.Tensor], mark: ShardMark
    ) -> CheckpointRows:
        """Return a copy with another group of as many shards, all of whose rows are in the first one.

        Args:
            tables: describe all groups.
            arrays: of the rows.
            mark: of the shards.
        """
        first, count = len(self.marks), self.shards or 1
        named = {f"{TABLES}{first}/{key}": value for key, value in arrays.items()}
        file = SavedFile(f"group-{first}", None, {}, (first,), named)
        newest = self.layers[0] if self.layers else RowLayer((), ())
        layer = RowLayer((*newest.files, file), newest.marks + count * (mark,))
        return replace(self, tables=tables, layers=(layer, *self.layers[1:]))

    def require_sound(self, path: object) -> None:
        """Check that layers have the same shards and continue each other; CheckpointError names `path` otherwise."""
        if (odd := self._odd()) is not None:
            raise CheckpointError(f"damaged checkpoint at {path}: {odd}")

    def _odd(self) -> str | None:
        """Return what contradicts, in words, or None."""
        marks = self.marks
        if any(len(layer.marks) != len(marks) for layer in self.layers):
            return "it has other shards of tables than the one that it continues"
        if marks and (not self.groups or len(marks) % self.groups):
            return f"it has {len(marks)} shards of {self.groups} groups of tables"
        for newer, older in zip(self.layers, self.layers[1:], strict=False):
            for shard, (mark, before) in enumerate(zip(newer.marks, older.marks, strict=True)):
                if mark.since not in (-1, before.updates):
                    return f"its rows of {TABLES}{shard} are not changes of these rows"
        if self.layers and any(mark.since != -1 for mark in self.layers[-1].marks):
            return "it has changes of rows alone, and names no checkpoint with the others"
        return None


def shards_in(names: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of the shards that tensors' names begin with; CheckpointError: a name has no number."""
    numbers = set()
    for name in names:
        if name.startswith(TABLES):
            number = name.removeprefix(TABLES).partition("/")[0]
            if not number.isdecimal():
                raise CheckpointError(f"it has {name!r:.80}, which is of no shard of tables")
            numbers.add(int(number))
    return tuple(sorted(numbers))
