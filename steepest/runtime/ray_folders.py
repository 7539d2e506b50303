"""The place of the files of a Ray that steepest starts, if Ray's own choice fails."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from steepest.core.config.folders import private_file, private_folder
from steepest.core.config.run import environment_variable
from steepest.errors import ConfigurationError, listed

#: Environment variables of Ray's: whether a token is sent, and which; the first one counts.
MODE = "RAY_AUTH_MODE"
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_DIRECTORIES = ("RAY_TMPDIR", "TMPDIR")  # the first one counts
_USUAL = "/tmp"
_OWN = "steepest-ray"
_OTHERS = (_USUAL, "/var/tmp", "/dev/shm")
#: Bytes of a Unix socket's path, and what Ray puts between its folder and the socket's name, at the longest.
_LONGEST = 107
_INSIDE = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


@dataclass(frozen=True)
class RayFolders:
    """The place of a Ray's files.

    Attributes:
        directory: for its sockets and logs; None for its own choice.
        variables: of the environment in which it starts.
    """

    directory: str | None = None
    variables: dict[str, str] = field(default_factory=dict)


def ray_folders(others: Sequence[str] = _OTHERS) -> RayFolders:
    """Return where a Ray that starts now keeps its files: by its own choice unless that fails.

    Ray keeps sockets below RAY_TMPDIR, TMPDIR or /tmp, where their paths may be too long, and a token in the home
    directory, which may not be writable. Then they go into a folder of this user's that others cannot read.

    Args:
        others: directories in which that folder may be; the first suitable one is used.

    Raises:
        ConfigurationError: none of these is suitable.
    """
    named = next((value for name in _DIRECTORIES if (value := environment_variable(name))), _USUAL)
    does = _is_short(f"{named}/ray") and _is_writable(Path(named))
    if does and _has_token():
        return RayFolders()
    choices = dict.fromkeys([named, *others])
    own = f"/{_OWN}-{os.getuid()}/ray"  # Ray lets all users into the last one
    base = next(
        (each for each in choices if _is_short(each + own) and _is_writable(Path(each))), None
    )
    if base is None:
        raise ConfigurationError(
            f"Ray cannot keep its files in {listed(choices)}: paths there are too long for its sockets, or it may not "
            f"write there: set TMPDIR to a directory of at most {_LONGEST - len(own + _INSIDE)} characters"
        )
    folder = private_folder(Path(base), _OWN, "Ray's files, with its token,")
    variables = {} if _has_token() else {TOKENS[1]: _token_in(folder)}
    return RayFolders(None if does else f"{folder}/ray", variables)


def _is_short(folder: str) -> bool:
    """Return whether paths of Ray's sockets in a folder are not too long."""
    return len(os.fsencode(os.path.normpath(folder))) + len(_INSIDE) <= _LONGEST


def _is_writable(folder: Path) -> bool:
    """Return whether this process can write files in a folder, which is made if it is missing, as Ray does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _has_token() -> bool:
    """Return whether Ray finds a token, can keep a new one in the home directory, or needs none."""
    if environment_variable(MODE) not in (None, "token") or any(map(environment_variable, TOKENS)):
        return True
    try:
        token = Path.home() / ".ray" / "auth_token"
    except RuntimeError:  # there is no home directory
        return False
    return (token.is_file() and os.access(token, os.R_OK)) or _is_writable(token.parent)


def _token_in(folder: Path) -> str:
    """Return the path of a file with a token in a folder; a new one if there is none."""
    file = folder / "auth_token"
    if not file.exists():
        private_file(file, secrets.token_hex(32))
    return str(file)
