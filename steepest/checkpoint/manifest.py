"""The manifest of a checkpoint: JSON that ends with a checksum of all that stands before."""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

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
    if not _is_list(files.get(ROW_FILES), lambda file: _is_file(ROW_FILES, file)):
        raise CheckpointError(f"it names no files of {ROW_FILES} in its directory")
    for key, (fits, required) in _ABOUT.items():
        if (key in content or required) and not fits(content.get(key)):
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


def _is_file(kind: str, value: Any) -> bool:
    return (
        isinstance(value, dict)
        and re.fullmatch(rf"{kind}-[0-9a-f-]+\.safetensors", str(value.get("name")), re.ASCII)
        is not None
        and isinstance(value.get("sha256"), str)
        and _is_list(value.get("shards", []), _is_count)
        and _is_mapping(value.get("dtypes"), lambda dtype: isinstance(dtype, str))
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_step(value: Any) -> bool:
    return _is_count(value) and value < _MOST_STEPS


def _is_seed(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_mapping(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(fits, value.values()))


def _is_flags(value: Any) -> bool:
    """Return whether a value is switches by "GROUP.NAME", see `OptimizerSpec.state_flags`."""
    return _is_mapping(value, lambda flag: isinstance(flag, bool)) and all(
        "." in key for key in value
    )


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
    fits = isinstance(value, list) and list(map(type, value)) == list(kinds)
    return fits and value[1] > 0


def _is_replicated(value: Any) -> bool:
    """Return whether a value is (name, dimension, dtype, optimizer, parameter) of a table that workers hold."""
    kinds = (str, int, str, str, str)
    return isinstance(value, list) and list(map(type, value)) == list(kinds) and value[1] > 0


def _is_mark(value: Any) -> bool:
    """Return whether a value has the fields of a `ShardMark`; the last is -1 where a shard's rows are all there."""
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(map(_is_seed, value[:3]))
        and (value[3] == -1 or _is_count(value[3]))
    )


def _is_number(value: Any) -> bool:
    """Return whether a value is a number as a loss may be: NaN and infinity, too."""
    return isinstance(value, float) or (isinstance(value, int) and -_MOST < value < _MOST)


def _is_numbers(value: Any) -> bool:
    return _is_mapping(value, _is_number)


def _is_evaluation(value: Any) -> bool:
    """Return whether a value has the fields of an `EvaluationResult`."""
    return _has(value, _EVALUATION, ("loss", "metrics", "samples"))


def _is_result(value: Any) -> bool:
    """Return whether a value has the fields of a `StepResult`."""
    return _has(value, _RESULT, ("step", "epoch", "loss", "metrics", "samples", "staleness"))


def _has(
    value: Any, fields: Mapping[str, Callable[[Any], bool]], required: Collection[str]
) -> bool:
    return (
        isinstance(value, dict)
        and set(required) <= value.keys() <= fields.keys()
        and all(fields[name](part) for name, part in value.items())
    )


def _is_window(value: Any) -> bool:
    """Return whether a value is (begin, end) in offsets."""
    return _is_list(value, _is_count) and len(value) == 2 and value[0] <= value[1]


def _is_span(value: Any) -> bool:
    """Return whether a value is (begin, end) in steps."""
    return _is_list(value, _is_step) and len(value) == 2


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


_EVALUATION: dict[str, Callable[[Any], bool]] = {
    "loss": _is_number,
    "metrics": _is_numbers,
    "samples": _is_count,
    "step": _is_count,
    "epoch": lambda value: value is None or _is_count(value),
}
_RESULT: dict[str, Callable[[Any], bool]] = {
    **_EVALUATION,
    "staleness": lambda value: _is_list(value, _is_count),
    "timings": _is_numbers,
    "gradient_norm": lambda value: value is None or _is_number(value),
    "learning_rate": lambda value: _is_list(value, _is_number),
}
#: By key: whether a value fits, and whether the manifest must have it.
_ABOUT: dict[str, tuple[Callable[[Any], bool], bool]] = {
    "step": (_is_step, True),
    "epoch": (_is_step, True),
    "offset": (_is_count, True),
    "samples": (lambda value: value is None or _is_count(value), True),
    "seed": (_is_seed, True),
    "optimizer": (_is_name, True),
    "flags": (_is_flags, True),
    "plain": (lambda value: _is_list(value, _is_name), True),
    "aliases": (lambda value: _is_mapping(value, lambda names: _is_list(names, _is_name)), True),
    "left": (lambda value: _is_list(value, _is_part), False),
    "begun": (lambda value: _is_list(value, _is_begun), False),
    "updates": (_is_step, False),
    "ends": (lambda value: _is_list(value, _is_step), False),
    "base": (_is_base, False),
    "tables": (lambda value: _is_list(value, _is_table), False),
    "shards": (lambda value: _is_list(value, _is_mark), False),
    "data": (lambda value: _is_mapping(value, _is_array), False),
    "batch": (lambda value: _is_list(value, _is_count) and len(value) == 2, False),
    "schedule": (lambda value: value is None or isinstance(value, dict), False),
    "offsets": (lambda value: _is_mapping(value, _is_window), False),
    "hashes": (lambda value: _is_mapping(value, _is_name), False),
    "replicated": (lambda value: _is_list(value, _is_replicated), False),
    "unfrozen": (lambda value: _is_list(value, _is_name), False),
    "rates": (_is_rates, False),
    "evaluations": (lambda value: _is_list(value, _is_evaluation), False),
    "ended_early": (lambda value: _is_list(value, _is_span), False),
    "result": (lambda value: value is None or _is_result(value), False),
    "runs": (lambda value: _is_mapping(value, _is_name), False),
    "behind": (lambda value: _is_mapping(value, _is_count), False),
}
