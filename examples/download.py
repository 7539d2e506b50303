"""Data sets of one file for the examples."""

from __future__ import annotations

import hashlib
import urllib.request
from pathlib import Path

from steepest.core.config.run import data_directory


def read(place: str, url: str, sha256: str, folder: Path | None) -> bytes | None:
    """Return the content of a file, or None where there is neither the file nor a folder for it.

    It is looked for in `folder` and in the folder that STEEPEST_DATA names. Where neither has it,
    it is downloaded into `folder`.

    Args:
        place: of the file in STEEPEST_DATA's folder, such as "tinyshakespeare/input.txt"; in
            `folder` only the name counts.
        url: where it is downloaded from.
        sha256: of the content.
        folder: the user's own; None if there is none.

    Raises:
        ValueError: the content has another checksum.
    """
    shared = data_directory()
    own = folder / Path(place).name if folder else None
    found = [path for path in (own, shared / place if shared else None) if path and path.exists()]
    if found:
        return checked(found[0].read_bytes(), sha256, str(found[0]))
    if own is None:
        return None
    with urllib.request.urlopen(url, timeout=60) as answer:
        content = checked(answer.read(), sha256, url)
    own.parent.mkdir(parents=True, exist_ok=True)
    part = own.with_suffix(".part")
    part.write_bytes(content)
    part.replace(own)  # the file appears only when it is whole
    return content


def checked(content: bytes, sha256: str, where: str) -> bytes:
    """Return the content.

    Raises:
        ValueError: it has another checksum.
    """
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{where} is damaged: its SHA-256 is not {sha256}; delete the file")
    return content
