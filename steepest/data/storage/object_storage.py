"""Files in object stores, by fsspec: written whole, retried with a deadline, never renamed.

Errors name the URL and the step, and what the store's client says of it without anything that looks
like a credential. They have no cause, because the client's own errors may quote requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from steepest.data.storage.blocks import Blocks, Progress
from steepest.data.storage.places import ObjectUrl, StorageError
from steepest.errors import SteepestError

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Of an upload and of a download; an upload has at most 10,000 parts, so a file at most 320 GB.
PART = 32 << 20
_MOST_PAUSE = 10.0
#: Keys of AWS and of Google's interoperability, tokens, signatures, and what a name says to be secret.
_SECRET = re.compile(
    r"(?:A[KS]IA|GOOG)[A-Z0-9]{12,}|[A-Za-z0-9+/_=-]{32,}"
    r"|(?i:(?:signature|token|credential|password|secret)[\w-]*\s*[=:]\s*)[^\s&,;]+"
)


class _RefusedError(StorageError):
    """A request was refused, and would be refused again."""


_LASTING = (FileNotFoundError, FileExistsError, _RefusedError)


@dataclass(frozen=True)
class Patience:
    """How long an object store is waited for, in seconds."""

    call: float = 120.0  # for one call's answer: a listing, an object, a part of one
    retry: float = 120.0  # from the first of several failures in a row to the last
    pause: float = 0.2  # after the first failure; twice as long after each other, up to ten seconds


class ObjectStorage:
    """Files in an object store; see `Storage` for the methods.

    Stores make folders of objects' names, so there are none to make. They have no rename and no lock
    either: `commit` is one request that the store does whole or not at all, under the condition
    that what was there when the writer began, or nothing, is there still.

    Args:
        filesystem: of fsspec.
        patience: how long the store is waited for.
        clock, wait: the time in seconds, and what waits for so many; None for the system's.
    """

    certain = False

    def __init__(
        self,
        filesystem: Any,
        patience: Patience | None = None,
        clock: Callable[[], float] | None = None,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        self._filesystem = filesystem
        self._patience = patience or Patience()
        self._clock = clock or time.monotonic
        self._wait = wait or time.sleep

    @classmethod
    def of(cls, scheme: str, patience: Patience | None = None) -> ObjectStorage:
        """Return the store of a scheme, with the configuration of this process' environment."""
        return cls(filesystem(scheme, os.getpid()), patience)

    def make(self, folder: ObjectUrl) -> None:
        """Check that the store answers."""
        self._listed(folder)

    def folders(self, folder: ObjectUrl) -> list[ObjectUrl]:
        """Return the prefixes that objects in a prefix have."""
        return [folder / name for name, kind in self._listed(folder) if kind == "directory"]

    def files(self, folder: ObjectUrl) -> list[ObjectUrl]:
        """Return the objects in a prefix, without those of longer prefixes."""
        return [folder / name for name, kind in self._listed(folder) if kind != "directory"]

    def _listed(self, folder: ObjectUrl) -> list[tuple[str, str]]:
        """Return names and kinds of what is in a prefix."""
        list_once = self._once(
            "listing", folder, lambda: self._filesystem.ls(str(folder), detail=True)
        )
        try:
            entries = self._persistently(list_once)
        except FileNotFoundError:
            return []
        names = (
            (str(each["name"]).rstrip("/").rpartition("/")[2], each["type"]) for each in entries
        )
        return [(name, kind) for name, kind in names if name]

    def exists(self, file: ObjectUrl) -> bool:
        """Return whether there is such an object."""
        try:
            entry = self.attempt("looking for", file, lambda: self._filesystem.info(str(file)))
            return bool(entry["type"] != "directory")
        except FileNotFoundError:
            return False

    def version(self, file: ObjectUrl) -> str | None:
        """Return the store's own mark of what an object is; of an object in memory, when it was made."""
        try:
            entry = self.attempt("looking for", file, lambda: self._filesystem.info(str(file)))
        except FileNotFoundError:
            return None
        return str(entry.get("ETag") or entry.get("etag") or entry.get("created"))

    def read(self, file: ObjectUrl) -> bytes:
        """Return what an object holds."""
        return bytes(self.attempt("reading", file, lambda: self._filesystem.cat_file(str(file))))

    @contextlib.contextmanager
    def on_disk(self, file: ObjectUrl) -> Iterator[Path]:
        """Copy an object into a temporary file, which is removed after the block."""
        look = self._once("looking for", file, lambda: self._filesystem.info(str(file)))
        size = int(self._persistently(look)["size"])
        try:
            folder = tempfile.TemporaryDirectory(prefix="steepest-")
        except OSError as error:
            raise StorageError(f"copying {file} to a temporary directory: {error}") from error
        with folder as name:
            copy = Path(name) / file.name
            try:
                with open(copy, "wb") as target:
                    for begin in range(0, size, PART):
                        target.write(self._part(file, begin, min(begin + PART, size)))
            except (FileNotFoundError, StorageError):
                raise
            except OSError as error:
                raise StorageError(f"copying {file} to {copy}: {error}") from error
            yield copy

    def _part(self, file: ObjectUrl, begin: int, end: int) -> bytes:
        """Return the bytes of an object from one position to another."""

        def whole() -> bytes:
            part = bytes(self._filesystem.cat_file(str(file), start=begin, end=end))
            if len(part) != end - begin:
                raise OSError(f"{len(part)} of {end - begin} bytes came")
            return part

        return self._persistently(self._once("reading", file, whole))

    def write(self, file: ObjectUrl, blocks: Blocks) -> None:
        """Upload an object in parts of 32 MB, from its beginning again after a failure."""

        def upload() -> None:
            begin = self._once(
                "writing", file, lambda: self._filesystem.open(str(file), "wb", block_size=PART)
            )
            target = begin()
            try:
                for block in blocks():
                    self._once("writing", file, partial(target.write, block))()
                self._once("writing", file, target.close)()
            except BaseException:
                self._give_up(file, target)
                raise

        self._persistently(upload)

    def _give_up(self, file: ObjectUrl, target: Any) -> None:
        """End an upload so that no object comes of it, not even when its file is collected."""
        with contextlib.suppress(OSError):
            self._once("giving up", file, target.discard)()
        with contextlib.suppress(AttributeError):  # a file in memory is none that uploads
            target.closed = True

    def replace(self, file: ObjectUrl, blocks: Blocks) -> None:
        """Upload an object, which is there when its last part is; in memory it grows."""
        self.write(file, blocks)

    def commit(
        self, file: ObjectUrl, data: bytes, stamp: str, replaced: str | None, progress: Progress
    ) -> None:
        """Write an object by one request."""
        progress(file)
        if replaced is None:
            self.create(file, data)
        else:
            self.exchange(file, data, replaced)

    def put(self, file: ObjectUrl, data: bytes) -> None:
        """Write a small object by one request, whatever was there."""
        self._persistently(
            self._once("writing", file, lambda: self._filesystem.pipe_file(str(file), data))
        )

    def create(self, file: ObjectUrl, data: bytes) -> None:
        """Write a small object, by one request, unless there is one: FileExistsError; no two writers write the same."""
        create_once = self._once(
            "creating", file, lambda: self._filesystem.pipe_file(str(file), data, mode="create")
        )
        self._on_condition(file, data, create_once)

    def exchange(self, file: ObjectUrl, data: bytes, version: str) -> None:
        """Write a small object by one request, unless it is not that `version` any more: FileExistsError.

        S3 compares the version in the same request; other stores are asked just before it. No two writers write
        the same content.
        """
        condition = {"IfMatch": version} if file.scheme == "s3" else {}
        write_once = self._once(
            "replacing", file, lambda: self._filesystem.pipe_file(str(file), data, **condition)
        )

        def exchange_once() -> None:
            if self.version(file) != version:
                raise FileExistsError(
                    f"replacing {file}: another process has written or removed it meanwhile"
                )
            write_once()

        self._on_condition(file, data, exchange_once)

    def _on_condition(self, file: ObjectUrl, data: bytes, write_once: Callable[[], None]) -> None:
        """Write a small object, unless the store holds another one."""

        def attempt() -> None:
            try:
                write_once()
            except FileExistsError:
                # else an earlier attempt was done, its answer lost
                if not self.exists(file) or self.read(file) != data:
                    raise

        self._persistently(attempt)

    def remove(self, file: ObjectUrl) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._persistently(
                self._once("removing", file, lambda: self._filesystem.rm_file(str(file)))
            )

    def remove_folder(self, folder: ObjectUrl) -> None:
        """Remove all objects of a prefix."""
        with contextlib.suppress(FileNotFoundError):
            self._persistently(
                self._once(
                    "removing", folder, lambda: self._filesystem.rm(str(folder), recursive=True)
                )
            )

    def discard(self, files: list[ObjectUrl]) -> None:
        """Remove objects as long as the store answers."""
        for file in files:
            try:
                self._once("removing", file, partial(self._filesystem.rm_file, str(file)))()
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("what was not finished stays: %s", error)
                return

    def remove_unfinished(self, folder: ObjectUrl) -> None:
        """Do nothing: `discard` has removed this writer's objects, others may be another driver's."""

    def _once(self, step: str, url: ObjectUrl, call: Callable[[], T]) -> Callable[[], T]:
        """Return a function that makes a call and waits for it for as long as a call may take.

        Its errors, FileNotFoundError, FileExistsError and StorageError, name the step and the URL, and have the
        client's text without credentials.
        """

        def once() -> T:
            answer = _answer(call, self._patience.call)
            if isinstance(answer, _Raised):
                raise _told(step, url, answer.error)
            return answer[0]

        return once

    def attempt(self, step: str, url: ObjectUrl, call: Callable[[], T]) -> T:
        """Return what a call of the file system returns, made again as all are; `step`: such as "reading".

        FileNotFoundError, FileExistsError, StorageError: of the last attempt.
        """
        return self._persistently(self._once(step, url, call))

    def _persistently(self, attempt: Callable[[], T]) -> T:
        """Make attempts until one succeeds, fails for good, or `patience` has passed; raise the last one's error."""
        since, pause = None, self._patience.pause
        while True:
            try:
                return attempt()
            except (*_LASTING, SteepestError):
                raise
            except StorageError as error:
                now = self._clock()
                since = now if since is None else since
                if now + pause - since > self._patience.retry:
                    text = f"{error}, {now - since:.0f} s after its first failure"
                    raise StorageError(text) from None
                log.info("%s; the next attempt is in %.1f s", error, pause)
            self._wait(pause)
            pause = min(2 * pause, _MOST_PAUSE)


@cache
def filesystem(scheme: str, process: int) -> Any:
    """Return fsspec's file system of a scheme, without its cache; `process`: a child has connections of its own."""
    import fsspec

    return fsspec.filesystem(scheme, use_listings_cache=False)


@dataclass(frozen=True)
class _Raised:
    """The error of a call."""

    error: BaseException


def _answer(call: Callable[[], T], seconds: float) -> tuple[T] | _Raised:
    """Return what a call returns; it runs on a thread, which is left behind if it takes too long."""
    answers: list[tuple[T] | _Raised] = []

    def run() -> None:
        try:
            answers.append((call(),))
        except BaseException as error:  # noqa: BLE001 - clients raise what they like; it is raised by whoever waits
            answers.append(_Raised(error))

    thread = threading.Thread(target=run, name="steepest-storage", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else _Raised(TimeoutError(f"no answer for {seconds:g} s"))


def _told(step: str, url: ObjectUrl, error: BaseException) -> OSError:
    """Return an error with a client's message, without what looks like a credential."""
    if isinstance(error, SteepestError):
        raise error
    said = _SECRET.sub("...", str(error))[:300]
    text = f"{step} {url}: {type(error).__name__}" + (f": {said}" if said else "")
    codes = _codes(error)
    if isinstance(error, FileExistsError) or codes & {"412", "PreconditionFailed"}:
        return FileExistsError(text)
    if isinstance(error, FileNotFoundError) or "404" in codes:
        return FileNotFoundError(text)
    kind = type(error).__name__
    if isinstance(error, PermissionError) or codes & {"401", "403"} or "Credential" in kind:
        return _RefusedError(
            f"{text}; credentials are found where the cloud's own tools find them, see docs/howto/storage.md"
        )
    if isinstance(error, (ValueError, TypeError, ImportError)) or kind == "ParamValidationError":
        return _RefusedError(text)
    return StorageError(text)


def _codes(error: BaseException) -> set[str]:
    """Return the store's codes of an error and of what caused it."""
    codes: set[str] = set()
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            codes.add(str(response.get("Error", {}).get("Code")))
        codes.add(str(getattr(each, "code", None)))
    return codes
