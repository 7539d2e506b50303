"""Places where checkpoints lie: directories, and prefixes of object stores, by their URLs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

from steepest.errors import ConfigurationError

#: By scheme: the one that is used for it, and what must be installed for it, if anything.
_SCHEMES = {
    "s3": ("s3", "s3fs", "pip install 'steepest[storage]'"),
    "s3a": ("s3", "s3fs", "pip install 'steepest[storage]'"),
    "gs": ("gs", "gcsfs", "pip install gcsfs"),
    "gcs": ("gs", "gcsfs", "pip install gcsfs"),
    "memory": ("memory", "fsspec", "pip install fsspec"),
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://(.*)", re.DOTALL)
_HIDDEN = re.compile(r"://.*@|[?#].*", re.DOTALL)


@dataclass(frozen=True)
class ObjectUrl:
    """A prefix or an object of an object store."""

    scheme: str  # such as "s3"
    path: str  # bucket and key, without slashes at its ends

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> ObjectUrl:
        """The prefix in which it lies."""
        return ObjectUrl(self.scheme, self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> ObjectUrl:
        return ObjectUrl(self.scheme, f"{self.path}/{name}" if self.path else name)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"


StoragePlace = Path | ObjectUrl


class StorageError(OSError):
    """An object store has refused a request, or has not answered it in time."""


def place_of(where: str | os.PathLike[str]) -> StoragePlace:
    """Return the place that a user names.

    Args:
        where: a path, or a URL: ``s3://bucket/folder``, ``gs://bucket/folder``,
            ``memory://folder`` (of this process alone), or ``file:///folder``, which is that path.

    Raises:
        ConfigurationError: a URL of another kind, with credentials or a query, or for which a
            package is missing.
    """
    if not isinstance(where, str):
        local = Path(where)
        if local.parts and local.parts[0] in {f"{scheme}:" for scheme in _SCHEMES}:
            raise ConfigurationError(f"{local!r} was a URL: give it as a str, not as a Path")
        return local
    if (match := _URL.fullmatch(where)) is None:
        return Path(where)
    scheme, rest = match[1].lower(), match[2]
    shown = _HIDDEN.sub(lambda hidden: "://...@" if hidden[0][0] == ":" else "?...", where)
    if scheme == "file":
        if not rest.removeprefix("localhost").startswith("/"):
            raise ConfigurationError(f"{shown!r}: give file:///path, or the path itself")
        return Path(unquote(rest.removeprefix("localhost")))
    if scheme not in _SCHEMES:
        raise ConfigurationError(
            f"{shown!r}: give a path, or a URL with s3://, gs://, memory:// or file://"
        )
    if shown != where:
        raise ConfigurationError(
            f"{shown!r} has credentials or a query: give the URL alone; credentials are found where the "
            "cloud's own tools find them, see docs/howto/storage.md"
        )
    scheme, package, install = _SCHEMES[scheme]
    path = rest.lstrip("/") if scheme == "memory" else rest
    parts = path.rstrip("/").split("/")
    if ":" in parts[0] or any(part in ("", ".", "..") or not part.isprintable() for part in parts):
        raise ConfigurationError(f"{shown!r}: give a bucket and the names of folders, each once")
    if scheme != "memory" and len(parts) < 2:
        raise ConfigurationError(f"{shown!r}: give a folder in the bucket, {shown}/run7")
    if find_spec(package) is None:
        raise ConfigurationError(f"{scheme}:// needs {package}, which is not installed: {install}")
    return ObjectUrl(scheme, "/".join(parts))
