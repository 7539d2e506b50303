"""Where the rows of a checkpoint lie, by its manifests: no file of rows is read for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load, save

from steepest.checkpoint.safetensors_file import read_tensors
from steepest.data.storage.files import open_file, storage_of
from steepest.data.storage.places import StoragePlace
from steepest.errors import CheckpointError

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
        if not {"updates", "seed"} <= known.keys() or any(v.numel() != 1 for v in known.values()):
            raise CheckpointError("a shard of its tables has no number of updates, or no seed")
        return cls(**{key: int(value) for key, value in known.items()})


@dataclass(frozen=True)
class SavedFile:
    """A file with rows.

    Attributes:
        name: the name in the folder.
        folder: the checkpoint's; None for a file in the driver's memory.
        about: what `write_tensors` returned.
        shards: the numbers of the shards with rows in it; empty if they are not known.
        data: the bytes of a file without a folder.
    """

    name: str
    folder: StoragePlace | None
    about: Mapping[str, Any]
    shards: tuple[int, ...]
    data: bytes = b""

    @property
    def key(self) -> str:
        """Its folder and name."""
        return f"{self.folder}/{self.name}"

    def has(self, shard: int) -> bool:
        """Return whether it may have rows of a shard."""
        return not self.shards or shard in self.shards

    def tensors(
        self, note: Callable[[int], object] = lambda count: None
    ) -> dict[str, torch.Tensor]:
        """Return the file's tensors; `note` is called with the size of each block that was read.

        Raises:
            ValueError, OSError: the file is damaged or missing.
        """
        if self.folder is None:
            return dict(load(self.data))
        with storage_of(self.folder).on_disk(self.folder / self.name) as path:
            return read_tensors(path, self.about, note)

    def parts(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the file's bytes in blocks of shape (n,), to be sent; OSError: it cannot be read."""
        if self.folder is None:
            yield np.frombuffer(self.data, np.uint8)
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
        now: the time of the restore in seconds since the epoch: the time since the checkpoint is no part of a row's
            time to live. None to leave lives as they are.
    """

    tables: Sequence[Sequence[Any]]
    layers: tuple[RowLayer, ...] = field(default=())
    now: int | None = None

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
        self, tables: Sequence[Sequence[Any]], arrays: Sequence[Mapping[str, torch.Tensor]]
    ) -> CheckpointRows:
        """Return a copy with another group, made of its shards' arrays; `tables` describe all groups."""
        first = len(self.marks)
        named = {
            f"{TABLES}{first + at}/{key}": value
            for at, each in enumerate(arrays)
            for key, value in each.items()
        }
        shards = tuple(range(first, first + len(arrays)))
        data = save(named)
        checks = {"sha256": hashlib.sha256(data).hexdigest(), "dtypes": {}}
        file = SavedFile(f"group-{first}.safetensors", None, checks, shards, data)
        newest = self.layers[0] if self.layers else RowLayer((), ())
        marks = (*newest.marks, *map(ShardMark.of, arrays))
        return replace(
            self, tables=tables, layers=(RowLayer((*newest.files, file), marks), *self.layers[1:])
        )

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
