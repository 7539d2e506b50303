"""The checkpoints in one directory: lists, writes and deletes them."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator

from steepest.checkpoint import files
from steepest.data.storage.blocks import Progress, no_progress
from steepest.data.storage.files import storage_of
from steepest.data.storage.places import StorageError, StoragePlace
from steepest.errors import CheckpointError, SteepestError
from steepest.tables.files.saved_rows import MANIFEST

log = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{6,})-step-\d+")


class CheckpointDirectory:
    """Checkpoints in one directory, numbered in the order of writing: ``000012-step-340``.

    Args:
        path: the directory, made if it is missing; or the prefix of an object store.
        keep: how many whole checkpoints stay.

    Raises:
        CheckpointError: the directory cannot be made.
    """

    def __init__(self, path: StoragePlace, keep: int) -> None:
        self._path = path
        self._storage = storage_of(path)
        self._keep = keep
        self._damaged: set[StoragePlace] = set()
        self._bases: dict[
            StoragePlace, StoragePlace | None
        ] = {}  # of checkpoints, those that they continue
        try:
            self._storage.make(path)
        except OSError as error:
            raise CheckpointError(f"cannot keep checkpoints in {path}: {error}") from error

    def paths(self) -> list[StoragePlace]:
        """Return the paths of all checkpoints, the oldest first; UnreachableError: storage does not answer.

        Damaged and unfinished ones too.
        """
        with self._reaching():
            folders = self._storage.folders(self._path)
        matching = [path for path in folders if _NAME.fullmatch(path.name)]
        return sorted(matching, key=_number)

    def newest_first(
        self, read: Callable[[StoragePlace], files.Checkpoint]
    ) -> Iterator[tuple[StoragePlace, files.Checkpoint]]:
        """Yield whole checkpoints with their paths, the newest first, as a function reads them.

        Those that are not whole are named in a warning.

        Raises:
            CheckpointError: some were finished, and all of those are damaged; or one cannot be read now.
        """
        for path in reversed(self.paths()):
            try:
                newest = read(path)
            except files.UnreachableError:
                raise
            except CheckpointError as error:
                self.pass_over(path, error)
            else:
                yield path, newest
        if self._damaged:
            raise CheckpointError(
                f"none of the checkpoints in {self._path} is whole: bring one back, or give "
                "another path to begin anew"
            )

    def pass_over(self, path: StoragePlace, error: CheckpointError) -> None:
        """Note that a checkpoint is not whole, and log why."""
        log.warning("passed over: %s", error)
        if self._is_finished(path):
            self._damaged.add(path)

    def of_step(self, step: int) -> StoragePlace | None:
        """Return the path of the newest whole checkpoint of a step; None if there is none."""
        of_step = [path for path in self._whole() if _step(path) == step]
        return of_step[-1] if of_step else None

    def _whole(self) -> list[StoragePlace]:
        return [
            path for path in self.paths() if self._is_finished(path) and path not in self._damaged
        ]

    def put(
        self, saved: files.Checkpoint, progress: Progress = no_progress, best: int | None = None
    ) -> tuple[StoragePlace, files.BaseLink]:
        """Write another checkpoint and, when it is whole, delete those that are too many.

        Those that one which stays continues stay too.

        Args:
            saved: the state.
            progress: called with each file that is worked on.
            best: the step of which the newest checkpoint stays too; None for none.

        Returns:
            The path of the checkpoint, and what an increment after it has as its base.

        Raises:
            CheckpointError: it cannot be written; all others stay.
            PeerLostError, ShutdownError, DeadlineError: its rows do not come; likewise.
        """
        path = self._path
        progress(path)
        try:
            number = max((_number(path) for path in self.paths()), default=0) + 1
            path = self._path / f"{number:06d}-step-{saved.about['step']}"
            link = files.write(path, saved, progress)
        except BaseException as error:
            if path != self._path:
                self._storage.remove_unfinished(path)
            if isinstance(error, OSError) and not isinstance(error, SteepestError):
                raise CheckpointError(
                    f"cannot keep a checkpoint in {self._path}: {error}"
                ) from error
            raise
        try:
            self._delete_old(best, progress)
        except files.UnreachableError as error:
            log.warning("old checkpoints stay: %s", error)
        return path, link

    def _delete_old(self, best: int | None, progress: Progress) -> None:
        """Delete checkpoints beyond the limit and unfinished ones; UnreachableError: storage does not answer."""
        newest = self._whole()[-self._keep :]
        stays = self._continued([*newest, None if best is None else self.of_step(best)])
        for old in self.paths():
            if (_number(old) < _number(newest[0]) and old not in stays) or not self._is_finished(
                old
            ):
                progress(old)
                self._delete(old)

    def _continued(self, paths: Iterable[StoragePlace | None]) -> set[StoragePlace | None]:
        """Return the paths of some checkpoints, and of those that they continue."""
        found: set[StoragePlace | None] = set()
        for path in paths:
            while path is not None and path not in found:
                found.add(path)
                path = self._base(path)
        return found

    def _base(self, path: StoragePlace) -> StoragePlace | None:
        """Return the path of the checkpoint that another one continues, if it does."""
        if path not in self._bases:
            try:
                base = files.base_of(files.about(path))
            except files.UnreachableError:
                raise
            except CheckpointError:
                base = None
            self._bases[path] = None if base is None else self._path / base.name
        return self._bases[path]

    def _is_finished(self, path: StoragePlace) -> bool:
        with self._reaching():
            return self._storage.exists(path / MANIFEST)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raise UnreachableError if an object store does not answer in a block."""
        try:
            yield
        except StorageError as error:
            raise files.UnreachableError(
                f"cannot look at the checkpoints in {self._path}: {error}"
            ) from error

    def _delete(self, path: StoragePlace) -> None:
        """Delete a checkpoint, its manifest first: half deleted it does not count as one."""
        try:
            self._storage.remove(path / MANIFEST)
            self._storage.remove_folder(path)
        except OSError as error:
            log.warning("an old checkpoint stays, half deleted: %s", error)


def _number(path: StoragePlace) -> int:
    return int(path.name.partition("-")[0])


def _step(path: StoragePlace) -> int:
    return int(path.name.rpartition("-")[2])
