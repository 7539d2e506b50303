"""Tensors in safetensors files, written in blocks, so that a disk that hangs is noticed.

The format is a length (8 bytes, little-endian), a JSON header and the tensors' bytes, see
https://github.com/huggingface/safetensors. It lacks some of torch's dtypes: complex numbers that it
lacks are stored as pairs of reals, other values as bytes, along one more dimension.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from steepest.core.tensors.dtypes import as_bytes
from steepest.data.storage.blocks import Blocks, Progress, no_progress, write_blocks
from steepest.data.storage.files import open_file

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
_BLOCK = 4 << 20
_READ = 1 << 20  # so that what is hashed is in a processor's cache
File = TypeVar("File")


def write_tensors(
    path: File,
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    progress: Progress = no_progress,
    write: Callable[[File, Blocks], None] = write_blocks,  # type: ignore[assignment]
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write a safetensors file, and return when it is on the disk.

    Args:
        path: the file; overwritten if it exists.
        tensors: by name, on the CPU; several are pieces of one, along its first dimension.
        progress: called with `path` before the first and after each block.
        write: writes blocks of at most 4 MB to `path`; it may begin anew.
        metadata: of the file; None for none.

    Returns:
        JSON-able: "sha256" of the file, and "dtypes" by name of what is stored as another dtype.

    Raises:
        OSError: the file cannot be written.
    """
    progress(path)
    stored = dict[str, list[torch.Tensor]]()
    dtypes = dict[str, str]()
    for name, value in tensors.items():
        pieces = [value] if isinstance(value, torch.Tensor) else value
        if (dtype := pieces[0].dtype) not in _NAMES:
            dtypes[name] = str(dtype).removeprefix("torch.")
        stored[name] = [_to_stored(piece) for piece in pieces]
    order = sorted(stored, key=lambda name: (-stored[name][0].dtype.itemsize, name))  # aligned
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name in order:
        first, *rest = stored[name]
        end = at + sum(piece.nbytes for piece in stored[name])
        shape = [len(first) + sum(map(len, rest)), *first.shape[1:]] if rest else list(first.shape)
        header[name] = {
            "dtype": _NAMES[first.dtype],
            "shape": shape,
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prologue = memoryview(len(text).to_bytes(8, "little") + text)
    in_order = (piece for name in order for piece in stored[name])
    parts = (prologue, *(as_bytes(piece).numpy().data for piece in in_order))
    digest = hashlib.sha256()

    def blocks() -> Iterator[memoryview]:
        nonlocal digest
        digest = hashlib.sha256()
        for part in parts:
            for begin in range(0, len(part), _BLOCK):
                block = part[begin : begin + _BLOCK]
                digest.update(block)
                yield block
                progress(path)

    write(path, blocks)
    progress(path)
    return {"sha256": digest.hexdigest(), "dtypes": dtypes}


def read_tensors(
    path: Path, about: Mapping[str, Any], note: Callable[[int], object] = lambda count: None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that `write_tensors` wrote.

    Args:
        path: the file.
        about: what `write_tensors` returned.
        note: called with the number of bytes of each block that was read.

    Raises:
        ValueError: the file has another checksum, or no such tensors.
        OSError: the file cannot be read.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ))
    with open_file(path) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            note(count)
    if digest.hexdigest() != about["sha256"]:
        raise ValueError("it does not have its checksum")
    try:
        return _from_stored(load_file(path), about["dtypes"])
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype unknown to safetensors
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read_some(
    path: Path, wanted: Callable[[str], bool]
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the names of a file's tensors, and those that are wanted; the rest of the file is not read.

    Raises:
        ValueError: it has no such tensors.
        OSError: the file cannot be read.
    """
    open_file(path).close()
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            return names, {name: file.get_tensor(name) for name in names if wanted(name)}
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _to_stored(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a dtype that the format has, with the same bytes."""
    if value.dtype in _NAMES:
        return value
    unit = value.dtype.to_real() if value.is_complex() else torch.uint8
    wide = (*value.shape, value.dtype.itemsize // unit.itemsize)
    return as_bytes(value).view(unit).view(wide)


def _from_stored(
    stored: Mapping[str, torch.Tensor], dtypes: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    tensors = dict(stored)
    for name, told in dtypes.items():
        dtype, value = getattr(torch, told, None), tensors.get(name)
        if (
            not isinstance(dtype, torch.dtype)
            or dtype in _NAMES
            or value is None
            or not value.dim()
        ):
            raise ValueError(f"no {name!r} of {told!r} is stored")
        unit = dtype.to_real() if dtype.is_complex else torch.uint8
        if value.dtype is not unit or value.shape[-1] * unit.itemsize != dtype.itemsize:
            raise ValueError(
                f"{name!r}, of {value.dtype} and shape {tuple(value.shape)}, holds no {told}"
            )
        tensors[name] = as_bytes(value).view(dtype).view(value.shape[:-1])
    return tensors
