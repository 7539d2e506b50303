"""Rows of a Spark DataFrame as samples: written to Parquet once, then read by their numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from steepest.core.data.protocol import Blocks, Indices
from steepest.data.storage.object_storage import ObjectStorage, filesystem
from steepest.data.storage.places import ObjectUrl, StoragePlace, place_of
from steepest.errors import ConfigurationError
from steepest.validation import require_count

T = TypeVar("T")
_NUMBERS = r"tinyint|smallint|int|bigint|float|double|boolean"


class ParquetRows:
    """Rows of a directory of Parquet files as samples, each visited once per epoch; a source.

    A sample's number is its place in the files, which are taken in the order of their names; so it
    is the same on every machine, and whenever a program continues. The files must not change. In
    each epoch row groups are shuffled, and the rows within each; a worker reads a row group when it
    needs it, and keeps the last two in memory.

    A batch is ``(features, target)``: features of shape (samples, widths of the columns together) in
    float32, and the target, (samples,) or (samples, width), in float32, or in int64 for integers and
    bool for booleans.

    Args:
        directory: that all workers' machines can read under this name, or a URL: ``s3://``,
            ``gs://`` and ``file://`` as those of checkpoints, ``hdfs://`` as pyarrow knows it,
            ``memory://`` for data of this process alone.
        features: names of columns of numbers, or of arrays of numbers that have one length.
        target: the name of such a column.

    Raises:
        ConfigurationError: pyarrow is not installed; there are no files or no rows, no such column,
            values that are no numbers or are missing. Later, in a step: a file was removed or
            changed, arrays differ in length.

    Example:
        >>> data = ParquetRows("/shared/clicks", features=["age", "income"], target="clicked")
        ... # doctest: +SKIP
    """

    def __init__(self, directory: str | Path, *, features: Sequence[str], target: str) -> None:
        self._features, self._target = _checked_columns(features, target)
        self._directory = _Directory(directory)
        self._groups: list[tuple[str, int]] = []
        rows: list[int] = []
        for name in self._directory.file_names():
            try:
                counts = self._check_file(name)
            except OSError as error:
                raise ConfigurationError(f"cannot read {name}: {error}") from error
            self._groups += [(name, group) for group, count in enumerate(counts) if count]
            rows += [count for count in counts if count]
        if not rows:
            raise ConfigurationError(
                f"{self._directory}: the files have no rows: give at least one"
            )
        self.blocks: Blocks = tuple(rows)
        self._borders = np.cumsum((0, *rows))
        self.size: int | None = int(self._borders[-1])
        self._kept: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Any]:
        """Yield features and target for each share; fast in the sample plan's order."""
        for share in shares:
            blocks = np.searchsorted(self._borders, share, side="right") - 1
            runs = np.split(np.arange(len(share)), np.flatnonzero(np.diff(blocks)) + 1)
            parts = []
            for run in runs:
                block = int(blocks[run[0]])
                features, target = self._read(block)
                rows = share[run] - self._borders[block]
                parts.append((features[rows], target[rows]))
            yield tuple(
                torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True)
            )

    def _check_file(self, name: str) -> list[int]:
        """Return the rows of a file's row groups.

        Raises:
            ConfigurationError: a column is missing, has no numbers, or lacks the value of a row.
        """

        def check(file: Any) -> list[int]:
            schema, metadata = file.schema_arrow, file.metadata
            for column in self._columns:
                if column not in schema.names:
                    raise ConfigurationError(
                        f"{name} has no column {column!r}: there are {', '.join(schema.names[:20])}"
                    )
                _check_type(column, str(schema.field(column).type))
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            for group in groups:
                for number in range(group.num_columns):
                    chunk = group.column(number)
                    if chunk.path_in_schema.split(".")[0] in self._columns and (
                        chunk.statistics is not None and chunk.statistics.null_count
                    ):
                        raise _null(chunk.path_in_schema.split(".")[0], name)
            return [group.num_rows for group in groups]

        return self._directory.read(name, check)

    @property
    def _columns(self) -> list[str]:
        return list(dict.fromkeys((*self._features, self._target)))

    def _read(self, block: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return features and target of a row group; the last two are kept.

        Raises:
            ConfigurationError: the file was removed or changed, a value is missing, or arrays differ in length.
        """
        import pyarrow

        if block not in self._kept:
            name, group = self._groups[block]
            try:
                table = self._directory.read(
                    name, lambda file: file.read_row_group(group, columns=self._columns)
                )
            except (OSError, pyarrow.ArrowException) as error:
                raise ConfigurationError(
                    f"{name} was readable when training began, and now is not: {error}; give a "
                    "directory that every machine of the cluster has under this name"
                ) from error
            expected = int(self._borders[block + 1] - self._borders[block])
            if table.num_rows != expected:
                raise ConfigurationError(
                    f"{name} was changed: row group {group} has {table.num_rows} rows, and had "
                    f"{expected}; write new rows to another directory"
                )
            columns = {c: _values(c, name, table.column(c)) for c in self._columns}
            wide = [columns[c].reshape(expected, -1) for c in self._features]
            if len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            self._kept[block] = (
                np.concatenate(wide, axis=1).astype(np.float32),
                _as_target(columns[self._target]),
            )
        return self._kept[block]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}


def from_dataframe(
    frame: Any,
    *,
    features: Sequence[str],
    target: str,
    directory: str | Path,
    rows_per_block: int = 10_000,
) -> ParquetRows:
    """Write a Spark DataFrame to Parquet, once, and return its rows as training data.

    Spark computes the frame in this call and never again, so that its rows have the same numbers in
    every epoch, on every worker, and in a program that continues; such a program opens what was
    written with `ParquetRows`.

    Args:
        frame: a `pyspark.sql.DataFrame`.
        features: as `ParquetRows` has them.
        target: likewise.
        directory: to be made by Spark: a path that all machines of the cluster have, or a URL as
            `ParquetRows` has them, which Spark must know too (as ``s3a://`` it does).
        rows_per_block: rows of a file at most: those that are shuffled, and read, together.

    Raises:
        ConfigurationError: the directory is there already, a column is missing or holds no numbers,
            a value is missing, or this machine does not see what Spark has written.

    Example:
        >>> data = from_dataframe(frame, features=["x"], target="y", directory="/shared/rows")
        ... # doctest: +SKIP
    """
    chosen, target = _checked_columns(features, target)
    require_count("rows_per_block", rows_per_block)
    columns = list(dict.fromkeys((*chosen, target)))
    types = dict(getattr(frame, "dtypes", ()))
    if not hasattr(frame, "write"):
        raise ConfigurationError(f"frame is a {type(frame).__name__}: give a pyspark.sql.DataFrame")
    for column in columns:
        if column not in types:
            raise ConfigurationError(
                f"the frame has no column {column!r}: there are {', '.join(list(types)[:20])}"
            )
        if not re.fullmatch(rf"({_NUMBERS})|array<({_NUMBERS})>", types[column]):
            raise ConfigurationError(_no_numbers(column, types[column]))
    where = _Directory(directory)
    if str(where).startswith("memory://"):
        raise ConfigurationError(
            f"directory={str(directory)!r} is the memory of this process, in which Spark's executors "
            "cannot write: give a path or URL that all machines of the cluster reach"
        )
    if where.exists():
        raise ConfigurationError(
            f"directory={str(directory)!r} is there already: open what was written there with "
            "ParquetRows, or give another"
        )
    url = str(directory) if "://" in str(directory) else Path(directory).absolute().as_uri()
    writer = frame.select(*columns).write.mode("errorifexists")
    writer.option("maxRecordsPerFile", rows_per_block).parquet(url)
    return ParquetRows(directory, features=chosen, target=target)


def _checked_columns(features: Sequence[str], target: str) -> tuple[tuple[str, ...], str]:
    """Return the names of the columns, if they are names."""
    if isinstance(features, str) or not features or not all(isinstance(f, str) for f in features):
        raise ConfigurationError(f"features={features!r}: give one or more names, such as ['age']")
    if not isinstance(target, str):
        raise ConfigurationError(f"target={target!r}: give the name of a column")
    return tuple(features), target


class _Directory:
    """A directory of Parquet files: on this machine, in an object store, or in HDFS, where pyarrow reads."""

    # ConfigurationError: a URL of another kind, see `place_of`.

    def __init__(self, path: str | Path) -> None:
        self._given = str(path)
        hdfs = re.match(r"(hdfs|viewfs)://", self._given) is not None
        self._place: StoragePlace | None = None if hdfs else place_of(path)

    def __str__(self) -> str:
        return self._given if self._place is None else str(self._place)

    def exists(self) -> bool:
        """Return whether it is there; ConfigurationError: it cannot be looked for."""
        system, path = self._open()
        entry = self._listed(lambda: system.get_file_info(path))
        return bool(entry.type.name != "NotFound")

    def file_names(self) -> list[str]:
        """Return its Parquet files' paths in the order of names.

        Raises:
            ConfigurationError: none, or they cannot be listed.
        """
        system, path = self._open()
        from pyarrow import fs

        selector = fs.FileSelector(path, allow_not_found=True)
        entries = self._listed(lambda: system.get_file_info(selector))
        names = sorted(f.path for f in entries if re.fullmatch(r"[^._].*\.parquet", f.base_name))
        if not names:
            raise ConfigurationError(
                f"{self} has no Parquet files that this machine can see: give a directory that all "
                "machines of the cluster share, since executors write to it and workers read from it"
            )
        return names

    def read(self, name: str, use: Callable[[Any], T]) -> T:
        """Return what a function makes of an open file; it may be called again.

        Raises:
            OSError, pyarrow.ArrowException: the file is unreadable.
        """
        from pyarrow import parquet

        def opened() -> T:
            system, _ = self._open()
            with parquet.ParquetFile(name, filesystem=system) as file:
                return use(file)

        return self._asked(opened)

    def _open(self) -> tuple[Any, str]:
        """Return pyarrow's file system of this process, and the path in it."""
        try:
            import pyarrow
            from pyarrow import fs
        except ImportError:
            raise ConfigurationError(
                "Parquet files need pyarrow, which is not installed: pip install 'steepest[spark]'"
            ) from None
        if isinstance(self._place, ObjectUrl):
            handler = fs.FSSpecHandler(filesystem(self._place.scheme, os.getpid()))
            return fs.PyFileSystem(handler), self._place.path
        if self._place is not None:
            return fs.LocalFileSystem(), str(self._place.absolute())
        try:
            system, path = fs.FileSystem.from_uri(self._given)
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigurationError(f"pyarrow cannot open {self._given!r}: {error}") from error
        return system, path

    def _listed(self, call: Callable[[], T]) -> T:
        try:
            return self._asked(call)
        except OSError as error:
            raise ConfigurationError(f"cannot look for Parquet files in {self}: {error}") from error

    def _asked(self, call: Callable[[], T]) -> T:
        """Return what a call returns; to an object store it has a deadline and is made again."""
        if isinstance(self._place, ObjectUrl):
            storage = ObjectStorage.of(self._place.scheme)
            return storage.attempt("reading", self._place, call)
        return call()


def _check_type(column: str, kind: str) -> None:
    number = r"u?int\d+|float|double|halffloat|bool"
    if not re.fullmatch(
        rf"({number})|(large_|fixed_size_)?list<[^:]+: ({number})[^>]*>(\[\d+\])?", kind
    ):
        raise ConfigurationError(_no_numbers(column, kind))


def _no_numbers(column: str, kind: str) -> str:
    return (
        f"column {column!r} is of type {kind}: give numbers, booleans, or arrays of them; make numbers "
        "of texts and times first, and arrays of ML vectors with pyspark.ml.functions.vector_to_array"
    )


def _null(column: str, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"column {column!r} has no value in some row of {name}: fill such rows, or leave them out, "
        "with frame.fillna or frame.dropna, before they are written"
    )


def _values(column: str, name: str, values: Any) -> npt.NDArray[Any]:
    """Return a column as an array, (rows,) or (rows, width)."""
    array = values.combine_chunks()
    if array.null_count:
        raise _null(column, name)
    if not hasattr(array, "flatten") or not str(array.type).startswith(("list", "large", "fixed")):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    flat = array.flatten()
    if flat.null_count:
        raise _null(column, name)
    widths = set(array.value_lengths().to_pylist())
    if len(widths) > 1:
        raise ConfigurationError(
            f"column {column!r} has arrays of {min(widths)} to {max(widths)} numbers in {name}: give "
            "arrays of one length"
        )
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(array), -1)


def _as_target(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return targets in a type that losses take."""
    if values.dtype.kind == "b":
        return values
    return values.astype(np.int64 if values.dtype.kind in "iu" else np.float32)
