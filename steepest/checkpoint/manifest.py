"""The manifest of a checkpoint: JSON that ends with a checksum of all that stands before."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from steepest.errors import CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"
KINDS = ("weights", "optimizer", "replicas")
#: Any number of files of rows of embedding tables.
TABLES = "tables"


def encode_manifest(files: Mapping[str, Any], about: Mapping[str, Any]) -> bytes:
    """Return a manifest's bytes; `about`: see `Checkpoint`."""
    # files: by kind ("weights", "optimizer", "replicas"): "name", "sha256" and "dtypes" of its file; a list of these
    # for "tables".
    text = json.dumps({"format": FORMAT, "files": files, **about}, indent=1)
    body = text.removesuffix("\n}").encode()
    return body + _seal(body)


def decode_manifest(raw: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `files` and `about` as `encode_manifest` was given them."""
    # CheckpointError: other bytes, or another format.
    try:
        content = json.loads(raw.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep
        raise CheckpointError(f"it is no JSON: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError("it names no format")
    if type(content["format"]) is not int or content["format"] != FORMAT:
        raise CheckpointError(
            f"it has format {content['format']!r:.50}, which another version of steepest wrote; "
            f"this one reads {FORMAT}"
        )
    size = len(_seal(b""))
    if raw[-size:] != _seal(raw[:-size]):
        raise CheckpointError("it does not have its checksum")
    del content["format"], content["sha256"]
    files = content.pop("files", None)
    for kind in KINDS:
        if not isinstance(files, dict) or not _is_file(kind, files.get(kind)):
            raise CheckpointError(f"it names no file of {kind} in its directory")
    if not _is_list(files.get(TABLES), lambda file: _is_file(TABLES, file)):
        raise CheckpointError(f"it names no files of {TABLES} in its directory")
    for key, (fits, required) in _ABOUT.items():
        if (key in content or required) and not fits(content.get(key)):
            raise CheckpointError(f"{key!r} is {content.get(key, 'not there')!r:.100}")
    return files, content


def _seal(body: bytes) -> bytes:
    return f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _is_file(kind: str, value: Any) -> bool:
    return (
        isinstance(value, dict)
        and re.fullmatch(rf"{kind}-[0-9a-f-]+\.safetensors", str(value.get("name")), re.ASCII)
        is not None
        and isinstance(value.get("sha256"), str)
        and _is_mapping(value.get("dtypes"), lambda dtype: isinstance(dtype, str))
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_mapping(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(fits, value.values()))


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_rates(value: Any) -> bool:
    return value is None or _is_list(
        value, lambda rate: type(rate) in (int, float) and 0 <= rate < math.inf
    )


def _is_part(value: Any) -> bool:
    return _is_list(value, _is_count) and len(value) == 3


def _is_table(value: Any) -> bool:
    """Return whether a value is (name, dimension, dtype, optimizer, group) of an embedding table."""
    kinds = (str, int, str, str, int)
    return isinstance(value, list) and list(map(type, value)) == list(kinds)


def _is_base(value: Any) -> bool:
    """Return whether a value names a checkpoint in the same directory, see `files.Link`."""
    return (
        _is_mapping(value, _is_name)
        and value.keys() == {"name", "sha256"}
        and re.fullmatch(r"\d{6,}-step-\d+", value["name"], re.ASCII) is not None
    )


def _is_array(value: Any) -> bool:
    """Return whether a value is (dtype, shape, hash) of an array, see `steepest.core.data.fingerprint`."""
    fits = isinstance(value, list) and len(value) == 3
    return fits and _is_name(value[0]) and _is_list(value[1], _is_count) and _is_name(value[2])


def _is_begun(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not _is_count(value[0]):
        return False
    return value[1] is None or _is_count(value[1]) or _is_list(value[1], _is_count)


#: By key: whether a value fits, and whether the manifest must have it.
_ABOUT: dict[str, tuple[Callable[[Any], bool], bool]] = {
    "step": (_is_count, True),
    "epoch": (_is_count, True),
    "offset": (_is_count, True),
    "samples": (lambda value: value is None or _is_count(value), True),
    "seed": (_is_count, True),
    "optimizer": (_is_name, True),
    "flags": (lambda value: _is_mapping(value, lambda flag: isinstance(flag, bool)), True),
    "plain": (lambda value: _is_list(value, _is_name), True),
    "aliases": (lambda value: _is_mapping(value, lambda names: _is_list(names, _is_name)), True),
    "left": (lambda value: _is_list(value, _is_part), False),
    "begun": (lambda value: _is_list(value, _is_begun), False),
    "updates": (_is_count, False),
    "ends": (lambda value: _is_list(value, _is_count), False),
    "base": (_is_base, False),
    "tables": (lambda value: _is_list(value, _is_table), False),
    "data": (lambda value: _is_mapping(value, _is_array), False),
    "batch": (lambda value: _is_list(value, _is_count) and len(value) == 2, False),
    "unfrozen": (lambda value: _is_list(value, _is_name), False),
    "rates": (_is_rates, False),
    "evaluations": (lambda value: _is_list(value, lambda row: isinstance(row, dict)), False),
    "result": (lambda value: value is None or isinstance(value, dict), False),
    "runs": (lambda value: _is_mapping(value, _is_name), False),
}
