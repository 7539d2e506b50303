"""The manifest of a checkpoint: JSON that ends with a checksum of all that stands before."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from steepest.errors import CheckpointError
from steepest.tables.files.saved_rows import ROW_FILES

FORMAT = 2
#: The greatest number, and the greatest step: a step may be an update of each worker, and updates are counted likewise.
_MOST, _MOST_STEPS = 1 << 62, 1 << 40
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxlong = 60
KINDS = ("weights", "optimizer", "replicas")


def encode_manifest(files: Mapping[str, Any], about: Mapping[str, Any]) -> bytes:
    """Return a manifest's bytes; `about`: see `Checkpoint`.

    Args:
        files: by kind ("weights", "optimizer", "replicas"): "name", "sha256" and "dtypes" of its file; a
            list of these for "tables".
    """
    text = json.dumps({"format": FORMAT, "files": files, **about}, indent=1)
    body = text.removesuffix("\n}").encode()
    return body + _seal(body)


def decode_manifest(raw: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `files` and `about` as `encode_manifest` was given them.

    Raises:
        CheckpointError: other bytes, or another format.
    """
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
    rows = files.get(ROW_FILES)
    if not isinstance(rows, list) or not all(_is_file(ROW_FILES, file) for file in rows):
        raise CheckpointError(f"it names no files of {ROW_FILES} in its directory")
    present = {key: kind for key, kind in _OPTIONAL.items() if key in content}
    for key, kind in (_REQUIRED | present).items():
        if not _fits(content.get(key), kind):
            raise CheckpointError(f"{key!r} is {_shown.repr(content.get(key, 'not there')):.100}")
    if (odd := _contradiction(content)) is not None:
        raise CheckpointError(
            f"{odd!r} is {_shown.repr(content.get(odd))}, which cannot be at step {content['step']} in epoch "
            f"{content['epoch']} of {content['samples']} samples"
        )
    return files, content


def _contradiction(about: Mapping[str, Any]) -> str | None:
    """Return the key of a value, right by itself, that cannot be beside the others; None if all can."""
    step, epoch, samples = about["step"], about["epoch"], about["samples"]
    left, ends, begun = (about.get(key, ()) for key in ("left", "ends", "begun"))
    if any(begin > end for begin, end in about.get("offsets", {}).values()):
        return "offsets"
    if list(ends) != sorted(ends) or max(ends, default=0) > step:
        return "ends"
    # An epoch has a step at least; and but for those of which parts are left over, and the present one, each has ended.
    if epoch > len(ends) + len({part[0] for part in left}) + 1:
        return "epoch"
    if samples is None:
        return None
    if about["offset"] > samples:
        return "offset"
    if 0 in about.get("batch", ()):
        return "batch"
    before = (0, 0)
    for number, begin, end in left:
        if number > epoch or not begin < end <= samples or (number, begin) < before:
            return "left"
        before = (number, end)
    for number, blocks in begun:
        sizes = blocks if isinstance(blocks, list) else ()
        if number > epoch or 0 in sizes or (sizes and sum(sizes) != samples):
            return "begun"
    return None


def _seal(body: bytes) -> bytes:
    return f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    once = dict(pairs)
    if len(once) < len(pairs):
        raise ValueError("a key stands there twice")
    return once


#: Of a number, of a step and of a seed.
_Count = Annotated[int, Meta(ge=0, lt=_MOST)]
_Step = Annotated[int, Meta(ge=0, lt=_MOST_STEPS)]
_Seed = Annotated[int, Meta(ge=0)]
_Width = Annotated[int, Meta(ge=1)]
_Numbers = dict[str, float | bool]  # as a loss may be: NaN and infinity, too


class _ManifestFile(msgspec.Struct):
    """A file of the checkpoint; its name is checked beside."""

    name: str
    sha256: str
    dtypes: dict[str, str]
    shards: list[_Count] = []


class _SavedEvaluation(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of an `EvaluationResult`."""

    loss: float
    metrics: _Numbers
    samples: _Count
    step: _Count = 0
    epoch: _Count | None = None


class _SavedResult(_SavedEvaluation, forbid_unknown_fields=True, kw_only=True):
    """The fields of a `StepResult`."""

    step: _Count
    epoch: _Count | None
    staleness: list[_Count]
    timings: _Numbers = {}
    gradient_norm: float | None = None
    learning_rate: list[float] = []


class _SavedBase(msgspec.Struct, forbid_unknown_fields=True):
    """A checkpoint in the same directory, see `files.BaseLink`."""

    name: Annotated[str, Meta(pattern=r"\A[0-9]{6,}-step-[0-9]+\Z")]
    sha256: str


def _is_file(kind: str, value: Any) -> bool:
    return _fits(value, _ManifestFile) and bool(
        re.fullmatch(rf"{kind}-[0-9a-f-]+\.safetensors", value["name"], re.ASCII)
    )


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


#: By key what the manifest must have.
_REQUIRED: dict[str, Any] = {
    "step": _Step,
    "epoch": _Step,
    "offset": _Count,
    "samples": _Count | None,
    "seed": _Seed,
    "optimizer": str,
    "flags": dict[Annotated[str, Meta(pattern=r"\.")], bool],  # see `OptimizerSpec.state_flags`
    "plain": list[str],
    "aliases": dict[str, list[str]],
}
#: By key what it may have beside that.
_OPTIONAL: dict[str, Any] = {
    "left": list[tuple[_Count, _Count, _Count]],
    "begun": list[tuple[_Count, _Count | list[_Count] | None]],
    "updates": _Step,
    "ends": list[_Step],
    "base": _SavedBase,
    # name, dimension, dtype, optimizer, group
    "tables": list[tuple[str, _Width, str, str, int]],
    # the fields of a `ShardMark`; the last is -1 where a shard's rows are all there
    "shards": list[tuple[_Seed, _Seed, _Seed, Annotated[int, Meta(ge=-1, lt=_MOST)]]],
    # dtype, shape, hash of an array, see `steepest.core.data.fingerprint`
    "data": dict[str, tuple[str, list[_Count], str]],
    "batch": tuple[_Count, _Count],
    "schedule": dict[str, Any] | None,
    "offsets": dict[str, tuple[_Count, _Count]],
    "hashes": dict[str, str],
    # name, dimension, dtype, optimizer, parameter of a table that workers hold
    "replicated": list[tuple[str, _Width, str, str, str]],
    "unfrozen": list[str],
    "rates": list[Annotated[float, Meta(ge=0, le=sys.float_info.max)]] | None,
    "evaluations": list[_SavedEvaluation],
    "ended_early": list[tuple[_Step, _Step]],
    "result": _SavedResult | None,
    "runs": dict[str, str],
    "behind": dict[str, _Count],
}
