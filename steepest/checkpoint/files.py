"""Checkpoints: safetensors files and a JSON manifest, replaced atomically; nothing is unpickled.

A checkpoint is a directory, or a prefix of an object store. `manifest.json` names the other files
and their SHA-256, and ends with its own; it is written last and replaced in one step, so that a
directory always holds one whole checkpoint.

    weights-*.safetensors    parameters and buffers by the user's own names, for the plain module
    optimizer-*.safetensors  optimizer state as "parameter/key", whole tensors, however split
    tables-*.safetensors     rows of embedding tables as "tables/shard/key", a part in each file: an
                             array is what all files have of it, one after the other
    replicas-*.safetensors   each replica's own buffers as "replica/buffer"
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from steepest.checkpoint.manifest import KINDS, decode_manifest, encode_manifest
from steepest.core.data.fingerprint import Fingerprint, differences
from steepest.core.optim.spec import stateful
from steepest.core.tensors.dtypes import LOOP_STATE
from steepest.core.tensors.layout import ParameterLayout
from steepest.data.storage.blocks import Progress, no_progress
from steepest.data.storage.files import storage_of
from steepest.data.storage.places import StorageError, StoragePlace, place_of
from steepest.data.storage.safetensors_file import read_some, read_tensors, write_tensors
from steepest.errors import CheckpointError, ConfigurationError, SteepestError
from steepest.tables.files.changed_rows import RowChange
from steepest.tables.files.saved_rows import (
    MANIFEST,
    ROW_FILES,
    TABLES,
    CheckpointRows,
    RowLayer,
    SavedFile,
    ShardMark,
    shards_in,
)
from steepest.tables.files.table_moves import (
    changes_of_tables,
    renamed_tables,
    require_hashes,
    require_renames,
    require_tables,
)
from steepest.validation import (
    require_choice,
    require_count,
    require_instance,
    require_seconds,
)

log = logging.getLogger(__name__)
#: A manifest of a directory that is not committed yet: its group is the stamp that its files' names have.
_COMMIT = re.compile(rf"\.{re.escape(MANIFEST)}-(\d+-[0-9a-f]{{8}})", re.ASCII)


class UnreachableError(CheckpointError):
    """The object store of a checkpoint, which may be whole, has not answered."""


class DamagedRowsError(CheckpointError):
    """A checkpoint's rows are damaged or missing; nothing of it was restored."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints that `DistributedSGD.fit` keeps, and from which a trainer continues.

    Attributes:
        path: a directory of this job's own on the driver's side, or a URL such as
            ``s3://bucket/run7``; each checkpoint is a directory in it, which
            `DistributedSGD.restore` reads as any other.
        every: steps from one to the next; the last state of each `fit` is written too.
        keep: how many whole ones stay there; older ones are deleted once a newer one is whole.
        write_timeout: seconds without any progress after which a write counts as hung: training
            goes on without that checkpoint, with a warning that names the file, and later ones are
            tried when the disk is back.
        increments: of embedding tables so many checkpoints after each whole one hold only the rows
            that have changed since the one before, which stays as long as they do.
        best: "loss", or the name of a metric: the checkpoint of the best evaluation of
            ``fit(validation=)`` is written at once, and stays beside the newest ones, see
            `DistributedSGD.best_checkpoint`. None for no such checkpoint.
        mode: "min" if less is better, "max" if more is.
        data: "new" to go on with data that differ from those of the newest checkpoint, in their
            number of samples or by their fingerprint: weights, optimizer state and step stay, and
            epochs begin anew; data that do not differ are continued. "continue" to refuse another
            number of samples.
        rename_tables: new names of embedding tables by those that they have in the newest checkpoint, see
            `DistributedSGD.restore`; a checkpoint that has the new ones is taken as it is.

    Raises:
        ConfigurationError: a value out of range.
    """

    path: str | Path
    every: int = 100
    keep: int = 3
    write_timeout: float = 600.0
    increments: int = 0
    best: str | None = None
    mode: str = "min"
    data: str = "continue"
    rename_tables: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or not str(self.path) or "\0" in str(self.path):
            raise ConfigurationError(
                f"path={self.path!r}: give the directory in which checkpoints are to be kept"
            )
        place_of(self.path)
        require_count("every", self.every)
        require_count("keep", self.keep)
        require_seconds("write_timeout", self.write_timeout)
        require_count("increments", self.increments, 0)
        require_choice("mode", self.mode, ("min", "max"))
        require_choice("data", self.data, ("continue", "new"))
        if self.best is not None:
            require_instance("best", self.best, str)
        require_renames(self.rename_tables)


class RowParts(Protocol):
    """Rows of embedding tables that come part by part while a checkpoint is written, or are written by others.

    Attributes:
        written: what a manifest says of the files that others have written, when all parts have come.
    """

    written: list[dict[str, Any]]

    def write_into(self, folder: StoragePlace, stamp: str) -> None:
        """Ask servers to write their rows to files ``tables-STAMP-...`` in a folder if they reach it.

        By default nobody does.
        """
        self.written = []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the parts, by "tables/shard/key"; further parts of an array in later ones, or in what is written.

        A part of nothing says that rows come.
        """

    def about(self) -> dict[str, Any]:
        """Return the rows' entries of `Checkpoint.about`, when all parts have come."""


@dataclass(frozen=True)
class Checkpoint:
    """The state from which training continues.

    Attributes:
        weights: parameters and buffers by name.
        optimizer: state by "parameter/key", and rows of embedding tables by "tables/shard/key".
        replicas: buffers by "replica/buffer".
        about: JSON-able: step, epoch, offset, seed, samples, optimizer, flags (switches of the
            optimizer that decide which state it keeps), plain (state
            keys that stand for other values than tensors, see `steepest.core.optim.portable`),
            aliases. Also, but for older checkpoints, left (parts of epochs left over, see
            `SamplePlan`), begun (the order of begun epochs, see there), updates (number of updates
            of each weight by the model's optimizer, which its schedule counts), schedule (see
            `Schedule.state`; or None), ends (the first steps after epoch 0, 1, ...), unfrozen (see
            `Job.unfrozen`), rates (that were set instead of the schedule's, by parameter group; or
            None), data (the fingerprint of the training data), batch (samples of a batch, and of a
            step), tables (the name, dimension, dtype, optimizer and group of each embedding table),
            replicated (of those that workers hold, with the parameter instead of the group),
            offsets (by partition, of data that are a window of a log), hashes (of each table whose ids are
            texts, see `Table.hash`), evaluations, and of an increment base (see `BaseLink`).
        rows: those that are not in `optimizer` yet, and are written beside it; None for none.
        saved_rows: those that were left where they lie, see `read_apart`; None for none.
    """

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    replicas: dict[str, torch.Tensor]
    about: dict[str, Any]
    rows: RowParts | None = None
    saved_rows: CheckpointRows | None = None


@dataclass(frozen=True)
class JobSignature:
    """The properties of a job that a checkpoint must have to be restored."""

    layout: ParameterLayout  # of its parameters
    optimizer: str  # its class' name
    flags: Mapping[str, bool]  # the optimizer's switches, see `OptimizerSpec.state_flags`
    samples: int | None  # of its data set
    buffers: Mapping[str, torch.Tensor]  # by name
    # of embedding tables, what a checkpoint's must be like, see `Checkpoint.about`
    tables: Sequence[Sequence[Any]] = ()
    data: Fingerprint = field(default_factory=dict)  # the fingerprint of its data, which may differ
    batch: tuple[int, int] = (0, 0)  # samples of a batch, and of a step, which may differ
    # of tables that workers hold, see `steepest.checkpoint.replicated_tables`
    replicated: Sequence[Sequence[Any]] = ()
    hashes: Mapping[str, str] = field(default_factory=dict)  # see `Checkpoint.about`
    # by partition, the window of a log that the data are; which may differ
    offsets: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def check(self, saved: Checkpoint, data: str = "continue") -> None:
        """Check that a checkpoint fits to this job; CheckpointError says in which property it does not.

        Nothing is changed.

        Args:
            data: "new" if the number of samples may differ.
        """
        for what, theirs, mine in (
            ("optimizer", saved.about["optimizer"], self.optimizer),
            ("flags", stateful(saved.about["flags"]), stateful(self.flags)),
        ):
            if theirs != mine:
                raise CheckpointError(
                    f"it has {what} {theirs}, this job has {mine}: build the optimizer as "
                    "it was, or give the checkpoint's weights alone to set_weights()"
                )
        if data != "new" and (theirs := saved.about["samples"]) != self.samples:
            if LOOP_STATE in self.buffers and None in (theirs, self.samples):
                kinds = (
                    "all workers go through the same batches",
                    "each worker has samples of its own",
                )
                there, here = kinds if theirs is None else kinds[::-1]
                raise CheckpointError(
                    f"it is of a strategy under which {there}, and under this job's {here}: give the strategy with "
                    "which it was written, or begin with its weights, by model.load_state_dict() before "
                    "steepest.prepare(), and other checkpoints"
                )
            raise CheckpointError(
                f"it has samples {theirs}, this job has {self.samples}: give the data with which it "
                "was written, or go on with others by restore(path, data='new') or "
                "Checkpoints(data='new'), with which weights, optimizer state and step stay and "
                "epochs begin anew"
            )
        if not changes_rows(saved):
            require_tables(*self._all_tables(saved))
        if data != "new" and self._has_other_offsets(saved):
            raise CheckpointError(
                f"it is of the offsets {_shown(saved.about['offsets'])}, this job's data have {_shown(self.offsets)}: "
                "give the offsets of steepest.next_offsets(path, ends), and Checkpoints(data='new')"
            )
        require_hashes(saved.about.get("hashes", {}), self.hashes)
        wanted = {entry.name: (entry.shape, entry.dtype) for entry in self.layout.entries}
        wanted |= {
            name: (tuple(buffer.shape), buffer.dtype)
            for name, buffer in self.buffers.items()
            if name != LOOP_STATE
        }
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in saved.weights.items()}
        for name in sorted(wanted.keys() | shapes.keys()):
            if name not in shapes:
                raise CheckpointError(f"it has no {name!r}")
            if name not in wanted:
                raise CheckpointError(f"it has {name!r}, the model has not")
            for what, theirs, ours in zip(
                ("shape", "dtype"), shapes[name], wanted[name], strict=True
            ):
                if theirs != ours:
                    raise CheckpointError(
                        f"{name!r} has {what} {theirs}, the model's has {ours}: build the model as it "
                        "was, with the batch size that it had where a shape follows from it"
                    )

    def _has_other_offsets(self, saved: Checkpoint) -> bool:
        """Return whether the data are another window of a log than a checkpoint's, as far as that is known."""
        theirs = {name: tuple(window) for name, window in saved.about.get("offsets", {}).items()}
        return bool(theirs and self.offsets) and theirs != dict(self.offsets)

    def require_next_offsets(self, saved: Checkpoint) -> None:
        """Check that a window of a log begins where a checkpoint's ended, and that that was trained to its end.

        Raises:
            CheckpointError: records would be left out, or trained again.
        """
        if not self._has_other_offsets(saved):
            return
        before = saved.about["offsets"]
        said = (
            f"it is of the offsets {_shown(before)}, this job's data have {_shown(self.offsets)}: "
        )
        advice = "give the offsets of steepest.next_offsets(path, ends)"
        if not is_pass_over(saved.about):
            raise CheckpointError(f"{said}the pass over the former has not ended; {advice}")
        for name, (_, end) in before.items():
            if self.offsets.get(name, (end, end))[0] != end or name not in self.offsets:
                raise CheckpointError(
                    f"{said}partition {name!r} goes on at {end}, and records would be left out or trained again; "
                    f"{advice}"
                )

    def other_data(self, saved: Checkpoint) -> list[str]:
        """Return in words how the data differ from those of a checkpoint, as far as that is known."""
        unlike = differences(saved.about.get("data", {}), self.data)
        if (theirs := saved.about["samples"]) != self.samples:
            now, before = (
                "no known number of samples" if count is None else f"{count} samples"
                for count in (self.samples, theirs)
            )
            unlike.insert(0, f"{now} instead of {before}")
        return unlike

    def other_tables(self, saved: Checkpoint) -> list[str]:
        """Return in words how embedding tables differ from those of a checkpoint, see `changes_of_tables`."""
        return [] if changes_rows(saved) else changes_of_tables(*self._all_tables(saved))

    def _all_tables(self, saved: Checkpoint) -> tuple[list[Any], list[Any]]:
        """Return the descriptions of all tables of a checkpoint, and of the job, on servers and in workers."""
        theirs = saved.about.get("tables", ()), saved.about.get("replicated", ())
        before, after = (
            [*served, *([*each[:4], -1] for each in held)]
            for served, held in (theirs, (self.tables, self.replicated))
        )
        return before, after

    def other_batches(self, saved: Checkpoint) -> list[str]:
        """Return in words how batches and steps differ from those of a checkpoint; none for one size."""
        before, now = tuple(saved.about.get("batch", self.batch)), self.batch
        if before[0] == now[0] or before[1] == now[1]:
            return []
        return [
            f"batches have {now[0]} samples instead of {before[0]}",
            f"steps {now[1]} instead of {before[1]}",
        ]


def with_renamed_tables(saved: Checkpoint, names: Mapping[str, str] | None) -> Checkpoint:
    """Return a checkpoint whose embedding tables have other names: rows, slots and counts stay.

    Args:
        saved: the checkpoint.
        names: new names by old ones; one that the checkpoint has already is left out.

    Raises:
        CheckpointError: the checkpoint has no such table, or two of one name then.
    """
    if not names:
        return saved
    about = dict(saved.about)
    tables, held = (about.get(key, ()) for key in ("tables", "replicated"))
    names = renamed_tables([each[0] for each in (*tables, *held)], names)
    about["tables"], about["replicated"] = (
        [[names[each[0]], *each[1:]] for each in some] for some in (tables, held)
    )
    about["hashes"] = {names[name]: hashed for name, hashed in about.get("hashes", {}).items()}
    rows = saved.saved_rows
    return replace(
        saved,
        about=about,
        saved_rows=None if rows is None else replace(rows, tables=about["tables"]),
    )


def with_changed_rows(saved: Checkpoint, change: RowChange | None) -> Checkpoint:
    """Return a checkpoint of whose rows of tables a function makes others, see `DistributedSGD.restore`."""
    if change is None or (rows := saved.saved_rows) is None:
        return saved
    return replace(saved, saved_rows=replace(rows, change=change))


def changes_rows(saved: Checkpoint) -> bool:
    """Return whether a function of the user's changes a checkpoint's rows of tables."""
    return saved.saved_rows is not None and saved.saved_rows.change is not None


def _shown(offsets: Mapping[str, Sequence[int]]) -> str:
    """Return offsets in words, at most eight partitions."""
    words = [f"{name}: {begin} to {end}" for name, (begin, end) in [*offsets.items()][:8]]
    return ", ".join([*words, "..."] if len(offsets) > 8 else words)


def is_pass_over(about: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint, of which the manifest is given, stands behind the first pass over its data."""
    if about.get("left"):
        return False
    samples = about["samples"]
    return about["epoch"] > 0 or (samples is not None and about["offset"] >= samples)


def gather(
    owner: JobSignature,
    weights: torch.Tensor,
    optimizer: tuple[dict[str, torch.Tensor], list[str]],
    states: Sequence[Mapping[str, torch.Tensor]],
    place: Mapping[str, Any],
    apart: Mapping[str, torch.Tensor],
) -> Checkpoint:
    """Return a job's checkpoint.

    Args:
        owner: the job, with buffers averaged over its replicas.
        weights: the flat vector.
        optimizer: its state by "parameter/key", and the keys of plain values.
        states: each replica's buffers.
        place: the position in training: step, epoch, offset, left, begun, updates, schedule, ends
            and seed, see `Checkpoint.about`.
        apart: state of single processes, such as what compression left out, by keys of its own.
    """
    state, plain = optimizer
    about = {
        **place,
        "samples": owner.samples,
        "data": {name: list(about) for name, about in owner.data.items()},
        "batch": list(owner.batch),
        "optimizer": owner.optimizer,
        "flags": dict(owner.flags),
        "plain": plain,
        "tables": [list(each) for each in owner.tables],
        "replicated": [list(each) for each in owner.replicated],
        "hashes": dict(owner.hashes),
        "offsets": {name: list(window) for name, window in owner.offsets.items()},
        "aliases": {
            entry.name: list(entry.aliases) for entry in owner.layout.entries if entry.aliases
        },
    }
    replicas = {
        f"{i}/{name}": value for i, state in enumerate(states) for name, value in state.items()
    }
    buffers = {name: value for name, value in owner.buffers.items() if name != LOOP_STATE}
    named = owner.layout.named(weights) | buffers
    return Checkpoint(named, state, {**replicas, **apart}, about)


@dataclass(frozen=True)
class BaseLink:
    """A checkpoint that later ones may continue."""

    name: str  # of its directory, beside which theirs lie
    sha256: str  # of its manifest


def write(path: StoragePlace, checkpoint: Checkpoint, progress: Progress = no_progress) -> BaseLink:
    """Write a checkpoint.

    An older one at `path` stays whole until this one is, and is deleted then.

    Args:
        path: a directory, made if it does not exist; or the prefix of an object store.
        checkpoint: what to write.
        progress: called with the file that is worked on; it may raise to end the write.

    Returns:
        What an increment after it has as its base.

    Raises:
        CheckpointError: the path is a file, or cannot be written; or another process has written a
            checkpoint at the same URL meanwhile.
        PeerLostError, ShutdownError, DeadlineError: rows do not come, see `Checkpoint.rows`.
    """
    stamp = f"{checkpoint.about['step']}-{secrets.token_hex(4)}"
    files: dict[str, Any] = {}
    about = checkpoint.about
    storage = storage_of(path)
    begun: list[StoragePlace] = []
    replaced, asked = None, False  # asked for the manifest: it may be there, whatever was answered

    def written(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        file = path / f"{name}.safetensors"
        begun.append(file)
        return {"name": file.name, **write_tensors(file, tensors, progress, storage.write)}

    try:
        progress(path)
        storage.make(path)
        replaced = storage.version(path / MANIFEST)
        # read after that: if another process writes a manifest in between, the commit is refused
        old = [] if replaced is None else _names(path)
        for kind in KINDS:
            files[kind] = written(f"{kind}-{stamp}", getattr(checkpoint, kind))
        files[ROW_FILES] = []
        if (rows := checkpoint.rows) is not None:
            rows.write_into(_absolute(path), stamp)
            for part in filter(None, _with_progress(rows, path, progress)):
                entry = written(f"{ROW_FILES}-{stamp}-{len(files[ROW_FILES])}", part)
                files[ROW_FILES].append(entry | {"shards": list(shards_in(part))})
            files[ROW_FILES] += rows.written
            about = {**about, **rows.about()}
        manifest = encode_manifest(files, about)
        progress(path / MANIFEST)
        asked = True
        storage.commit(path / MANIFEST, manifest, stamp, replaced, progress)
    except BaseException as error:
        refused = isinstance(error, (FileExistsError, SteepestError))
        if not asked or refused or _is_still(path, replaced):
            storage.discard([*begun, *_written_by_others(path, stamp)])
        # of the rows that come, some are errors of the system too
        if isinstance(error, OSError) and not isinstance(error, SteepestError):
            raise CheckpointError(f"cannot write a checkpoint to {path}: {error}") from error
        raise
    _clear(path, old, progress)
    return BaseLink(path.name, hashlib.sha256(manifest).hexdigest())


def _absolute(path: StoragePlace) -> StoragePlace:
    """Return a place that means the same in processes with other working directories."""
    return path.absolute() if isinstance(path, Path) else path


def _with_progress(
    rows: RowParts, path: StoragePlace, progress: Progress
) -> Iterator[dict[str, torch.Tensor]]:
    for part in rows:
        progress(path)
        yield part


def _written_by_others(path: StoragePlace, stamp: str) -> list[StoragePlace]:
    """Return the files of rows that others have written under a stamp, as far as storage answers."""
    try:
        there = storage_of(path).files(path)
    except OSError:
        return []
    return [file for file in there if file.name.startswith(f"{ROW_FILES}-{stamp}-")]


def _is_still(path: StoragePlace, version: str | None) -> bool:
    """Return whether the manifest at a path has a version, and a commit that has raised is over."""
    storage = storage_of(path)
    try:
        return storage.certain and storage.version(path / MANIFEST) == version
    except OSError:
        return False


def _names(path: StoragePlace) -> list[str]:
    """Return the names of a checkpoint's files by its manifest; UnreachableError: storage does not answer."""
    # None for a damaged manifest, or one of another format: its files stay, since the user's may have such names.
    try:
        files, _ = _manifest(path)
    except UnreachableError:
        raise
    except CheckpointError as error:
        log.warning("its files stay: %s", error)
        return []
    return [about["name"] for about in (*(files[kind] for kind in KINDS), *files[ROW_FILES])]


def _clear(path: StoragePlace, old: Collection[str], progress: Progress) -> None:
    """Remove the files (`old`) of the last checkpoint at a path, and those of commits that a crash interrupted."""
    # Files that are neither are somebody else's, and stay, whatever their names. progress: called with each that is
    # removed.
    storage = storage_of(path)
    try:
        there = storage.files(path)
    except OSError as error:
        log.warning("files of an earlier checkpoint stay: %s", error)
        return
    commits = {file.name: found[1] for file in there if (found := _COMMIT.fullmatch(file.name))}
    for file in there:
        kind, _, rest = file.name.partition("-")
        left = kind in (*KINDS, ROW_FILES) and rest.startswith(tuple(commits.values()))
        if left or file.name in commits or file.name in old:
            progress(file)
            with contextlib.suppress(OSError):  # those that stay do no harm
                storage.remove(file)


T = TypeVar("T")


def _of_bases(
    path: StoragePlace,
    about: Mapping[str, Any],
    part: Callable[[StoragePlace, dict[str, Any], dict[str, Any]], T],
) -> Iterator[T]:
    """Yield what a function returns of the folder, files and description of each checkpoint that one continues."""
    while (base := base_of(about)) is not None:
        folder = path.parent / base.name
        try:
            files, about = _manifest(folder, base.sha256)
            yield part(folder, files, about)
        except UnreachableError:
            raise
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoint at {path} has changes since the one at {folder}, which is to be "
                f"brought back: {error}"
            ) from error


def read_apart(path: StoragePlace) -> Checkpoint:
    """Return the checkpoint at a path without its rows of tables, of which `saved_rows` has the files.

    Raises:
        CheckpointError: as `read`, but for the files of rows.
    """
    files, about = _manifest(path)
    weights, replicas, state = (
        _tensors(path, files[k]) for k in ("weights", "replicas", "optimizer")
    )
    layers = [_layer(path, files, about), *_of_bases(path, about, _layer)]
    rows = CheckpointRows(about.get("tables", ()), tuple(layers))
    rows.require_sound(path)
    state = {name: value for name, value in state.items() if not name.startswith(TABLES)}
    about = {key: value for key, value in about.items() if key not in ("base", "shards")}
    return Checkpoint(weights, state, replicas, about, saved_rows=rows if rows.marks else None)


def _layer(path: StoragePlace, files: Mapping[str, Any], about: Mapping[str, Any]) -> RowLayer:
    """Return which files of a checkpoint have rows; of an earlier release's they are looked into."""
    entries, folder = [*files[ROW_FILES], files["optimizer"]], _absolute(path)
    if "shards" in about:
        marks = [ShardMark(*each) for each in about["shards"]]
        saved_files = [
            SavedFile(each["name"], folder, each, tuple(each["shards"]))
            for each in files[ROW_FILES]
        ]
        return RowLayer(tuple(saved_files), tuple(marks))
    of_files, first = [], dict[int, dict[str, torch.Tensor]]()
    for each in entries:
        names, tensors = _some(path, each)
        if shards := shards_in(names):
            of_files.append(SavedFile(each["name"], folder, each, shards))
        for name, value in tensors.items():
            shard, _, key = name.removeprefix(TABLES).partition("/")
            first.setdefault(int(shard), {}).setdefault(key, value)
    if sorted(first) != list(range(len(first))):
        raise CheckpointError(f"damaged checkpoint at {path}: it has the shards {sorted(first)}")
    return RowLayer(tuple(of_files), tuple(ShardMark.of(first[shard]) for shard in sorted(first)))


def _some(
    path: StoragePlace, about: Mapping[str, Any]
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the names of all tensors of a file, and those tensors that are marks of shards."""

    def is_mark(name: str) -> bool:
        return name.startswith(TABLES) and name.rpartition("/")[2] in ShardMark._fields

    try:
        with storage_of(path).on_disk(path / about["name"]) as file:
            return read_some(file, is_mark)
    except StorageError as error:
        raise UnreachableError(f"cannot read the checkpoint at {path}: {error}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"damaged checkpoint at {path}: {about['name']}: {error}") from error


def about(path: StoragePlace) -> dict[str, Any]:
    """Return a manifest's description, see `Checkpoint.about`; CheckpointError: missing or damaged."""
    return _manifest(path)[1]


def base_of(about: Mapping[str, Any]) -> BaseLink | None:
    """Return the checkpoint that an increment continues; None for a whole checkpoint."""
    base = about.get("base")
    return None if base is None else BaseLink(**base)


def _manifest(
    path: StoragePlace, sha256: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a checkpoint's manifest (of that sha256, or any) holds; see `decode_manifest`."""
    # CheckpointError: it is missing, damaged, or another one.
    try:
        raw = storage_of(path).read(path / MANIFEST)
        manifest = decode_manifest(raw)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}: there is no {MANIFEST}") from None
    except StorageError as error:
        raise UnreachableError(f"cannot read the checkpoint at {path}: {error}") from error
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"damaged checkpoint at {path}: {MANIFEST}: {error}") from error
    if sha256 not in (None, hashlib.sha256(raw).hexdigest()):
        raise CheckpointError(f"another checkpoint is at {path} now")
    return manifest


def _tensors(path: StoragePlace, about: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of one file of a checkpoint; CheckpointError: it is missing or damaged."""
    try:
        with storage_of(path).on_disk(path / about["name"]) as file:
            return read_tensors(file, about)
    except StorageError as error:
        raise UnreachableError(f"cannot read the checkpoint at {path}: {error}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"damaged checkpoint at {path}: {about['name']}: {error}") from error
