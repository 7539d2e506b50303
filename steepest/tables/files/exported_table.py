"""An embedding table as plain tensors, for serving: ids, values, and what has changed since."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from steepest.core.tensors.dtypes import as_bytes
from steepest.data.storage.files import storage_of
from steepest.data.storage.places import place_of
from steepest.data.storage.safetensors_file import write_tensors
from steepest.errors import CheckpointError, ConfigurationError
from steepest.validation import require_choice

_FORMAT = "steepest table 1"
_TENSORS = ("ids", "values", "removed")
_SCALES = "scales"  # of rows of int8
_SAVED = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, eq=False)
class ExportedTable:
    """The rows of one embedding table at one instant, or what has changed of them since an export.

    Attributes:
        name: of the table.
        ids: (n,) int64, ascending.
        values: (n, dim), of the table's dtype, the row of each id.
        removed: (k,) int64, ascending: ids whose rows were removed since the earlier export; empty
            without one.
        version: the number of updates until this instant.
        place: the instant, for a later export of what has changed.
        base: the instant since which rows have changed; None if all rows are here.
        unknown: the value of ids without rows: that of the table's `default`, else of its `initial`, if it is a
            constant; zero where each of these ids has random values of its own in the job.

    Example:
        >>> table = ExportedTable("words", torch.tensor([3, 8]), torch.tensor([[1.0], [2.0]]))
        >>> table.embedding()(table.index(torch.tensor([8, 3, 5]))).flatten()
        tensor([2., 1., 0.])
    """

    name: str
    ids: torch.Tensor = field(repr=False)
    values: torch.Tensor = field(repr=False)
    removed: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64), repr=False
    )
    version: int = 0
    place: Sequence[Sequence[int]] = field(default=(), repr=False)
    base: Sequence[Sequence[int]] | None = field(default=None, repr=False)
    unknown: float = 0.0

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    @property
    def cursor(self) -> str:
        """The instant of these rows as a short text, for a later ``export_table(name, since=cursor)``."""
        return json.dumps([self.name, _plain(self.place)])

    def embedding(self) -> torch.nn.Embedding:
        """Return a plain module with these rows, whose input is what `index` returns.

        Returns:
            A frozen `torch.nn.Embedding` of n + 1 rows: row 0, its `padding_idx`, is for ids without
            rows, and is `unknown`; row i + 1 is that of ``ids[i]``.

        Raises:
            ConfigurationError: these are changes only.
        """
        self._require_whole("embedding()")
        first = self.values.new_full((1, self.values.shape[1]), self.unknown)
        rows = torch.cat([first, self.values])
        count, dim = rows.shape
        module = torch.nn.Embedding(count, dim, padding_idx=0, _weight=rows)
        module.weight.requires_grad_(False)
        return module

    def index(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the row numbers of ids in `embedding()`, of any shape; 0 for ids without rows.

        Raises:
            ConfigurationError: these are changes only, or the ids are no integers.
        """
        self._require_whole("index()")
        return self._places(_integers(ids)) + 1

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the values of ids of any shape; of those without rows `unknown`.

        Returns:
            The ids' shape, and the table's dimension.

        Raises:
            ConfigurationError: these are changes only, or the ids are no integers.
        """
        self._require_whole("look_up()")
        flat = _integers(ids).reshape(-1)
        places, dim = self._places(flat), self.values.shape[1]
        values = self.values.new_full((len(flat), dim), self.unknown)
        known = places >= 0
        values[known] = self.values[places[known]]
        return values.view(*ids.shape, dim)

    def updated(self, changes: ExportedTable) -> ExportedTable:
        """Return these rows with later changes.

        Args:
            changes: what ``export_table(name, since=this)`` returned: changes, or all rows where
                the changes were not known.

        Raises:
            ConfigurationError: they are of another table, or changes since another export.
        """
        self._require_whole("updated()")
        if changes.base is None and changes.name == self.name:
            return changes
        if changes.name != self.name or _plain(changes.base) != _plain(self.place):
            raise ConfigurationError(
                f"changes of table {changes.name!r} since another export than this one of "
                f"{self.name!r}, at version {self.version}: apply the changes of each export to what "
                "was given as its since="
            )
        old = self._places(torch.cat([changes.ids, changes.removed]))
        kept = torch.ones(len(self), dtype=torch.bool)
        kept[old[old >= 0]] = False
        ids, order = torch.cat([self.ids[kept], changes.ids]).sort()
        values = torch.cat([self.values[kept], changes.values])[order]
        return replace(changes, ids=ids, values=values, removed=changes.removed[:0], base=None)

    def _places(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the place of each id in `ids`, int64; -1 where there is none."""
        if not len(self):
            return torch.full_like(ids, -1)
        at = torch.searchsorted(self.ids, ids).clamp_(max=len(self) - 1)
        return torch.where(self.ids[at] == ids, at, -1)

    def save(self, path: str | Path, dtype: str | None = None) -> None:
        """Write a safetensors file with "ids", "values" and "removed"; replace it in one step.

        Args:
            path: of the file, or a URL such as ``s3://bucket/words.safetensors``.
            dtype: "float16", "bfloat16" or "int8" for fewer bytes, rounded to the nearest; None for the values' own.
                A row of int8 has its greatest absolute value / 127 in "scales", (n,) float32: `load` multiplies by
                that, and returns float32.

        Raises:
            CheckpointError: it cannot be written.
            ConfigurationError: a URL of a kind that is not known; an unknown dtype; values that are not finite or too
                large for it.
        """
        place = place_of(path)
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        if dtype is not None:
            require_choice("dtype", dtype, tuple(_SAVED))
            tensors |= _rounded(self.name, self.values, _SAVED[dtype])
        about = {
            "format": _FORMAT,
            "sha256": _digest(tensors),
            "about": json.dumps([self.name, self.version, self.place, self.base, self.unknown]),
        }
        try:
            write_tensors(place, tensors, write=storage_of(place).replace, metadata=about)
        except OSError as error:
            raise CheckpointError(f"cannot write table {self.name!r} to {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> ExportedTable:
        """Return what `save` wrote.

        Args:
            path: as of `save`.

        Raises:
            CheckpointError: the file is missing, damaged, or no such table; or it cannot be read.
            ConfigurationError: a URL of a kind that is not known.
        """
        place = place_of(path)
        try:
            with storage_of(place).on_disk(place) as copy, safe_open(copy, "pt") as file:
                about = file.metadata() or {}
                if about.get("format") != _FORMAT:
                    raise ValueError(f"its format is not {_FORMAT!r}")
                scaled = [_SCALES] if _SCALES in file.keys() else []  # noqa: SIM118 - it is no dict
                tensors = {name: file.get_tensor(name) for name in [*_TENSORS, *scaled]}
            if _digest(tensors) != about.get("sha256"):
                raise ValueError("its tensors do not have their checksum")
            if scaled:
                tensors["values"] = _scaled(tensors["values"], tensors.pop(_SCALES))
            name, version, place, base, unknown = json.loads(about["about"])
            table = cls(name, **tensors, version=version, place=place, base=base, unknown=unknown)
            table._check()
        except (
            OSError,
            SafetensorError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            raise CheckpointError(f"no whole exported table at {path}: {error}") from error
        return table

    def _check(self) -> None:
        """Check what a file said; ValueError: `save` writes no such table."""
        for name, ids in (("ids", self.ids), ("removed", self.removed)):
            if ids.dtype is not torch.int64 or ids.dim() != 1 or bool((ids[1:] <= ids[:-1]).any()):
                raise ValueError(f"its {name} are not ascending int64 in one dimension")
        values = self.values
        if values.dim() != 2 or not values.is_floating_point() or len(values) != len(self.ids):
            raise ValueError(
                f"its values are {tuple(values.shape)} of {values.dtype}, not a row of floating-point numbers for "
                f"each of {len(self.ids)} ids"
            )
        if not isinstance(self.name, str) or type(self.version) is not int or self.version < 0:
            raise ValueError("its name is no text, or its version no count")
        if not _is_place(self.place) or not (self.base is None or _is_place(self.base)):
            raise ValueError("the instant of its rows is none")
        if type(self.unknown) is not float or not math.isfinite(self.unknown):
            raise ValueError("its value of ids without rows is no number")

    def _require_whole(self, what: str) -> None:
        if self.base is not None:
            raise ConfigurationError(
                f"{what} of changes of table {self.name!r} alone: apply them first, with "
                "earlier.updated(changes)"
            )


def since_cursor(cursor: str) -> ExportedTable:
    """Return an export without rows, of the instant of a cursor; ConfigurationError: it is no cursor."""
    try:
        name, place = json.loads(cursor)
        known = isinstance(name, str) and _is_place(place)
    except (TypeError, ValueError, RecursionError):
        known = False
    if not known:
        raise ConfigurationError(
            f"since={cursor!r:.80}: give an earlier export of the table, or the cursor of one"
        )
    nothing = torch.empty(0, dtype=torch.int64)
    return ExportedTable(name, nothing, torch.empty(0, 0), place=place)


def _is_place(place: object) -> bool:
    """Return whether a value has the form of `ExportedTable.place`."""
    return isinstance(place, (list, tuple)) and all(
        isinstance(each, (list, tuple)) and [*map(type, each)] == [int, int, int] for each in place
    )


def _integers(ids: torch.Tensor) -> torch.Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise ConfigurationError(f"ids of {ids.dtype}: give integers")
    return ids.to(torch.int64)


def _plain(place: Sequence[Sequence[int]] | None) -> list[list[int]] | None:
    return None if place is None else [list(each) for each in place]


def _rounded(name: str, values: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return values in fewer bytes, with scales if they need some."""
    if not bool(values.isfinite().all()):
        raise ConfigurationError(f"table {name!r} has values that are not finite: save it as it is")
    if dtype is torch.int8:
        scales = values.float().abs().amax(dim=1) / 127 if values.numel() else values.new_empty(0)
        scales = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
        return {"values": (values.float() / scales[:, None]).round().to(dtype), _SCALES: scales}
    rounded = values.to(dtype)
    if not bool(rounded.isfinite().all()):
        raise ConfigurationError(
            f'table {name!r} has values up to {float(values.abs().max()):g}, beyond {dtype}: save it as "bfloat16"'
        )
    return {"values": rounded.contiguous()}


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return rows of int8 as float32; ValueError: the scales are none."""
    if values.dtype is not torch.int8 or values.dim() != 2 or scales.shape != values.shape[:1]:
        raise ValueError(
            f"its values are {values.dtype} with scales of shape {tuple(scales.shape)}"
        )
    if scales.dtype is not torch.float32 or not bool((scales > 0).all() & scales.isfinite().all()):
        raise ValueError("its scales are no positive numbers of float32")
    return values.float() * scales[:, None]


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in (*_TENSORS, *(name for name in tensors if name == _SCALES)):
        if tensors[name].numel():
            digest.update(as_bytes(tensors[name]).numpy().data)
    return digest.hexdigest()
