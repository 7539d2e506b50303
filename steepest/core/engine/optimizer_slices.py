"""Optimizer state as whole tensors by "parameter/key", and as the slices of them that servers hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from steepest.core.optim.portable import Record, unpack
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import CheckpointError


def assemble(
    layout: ParameterLayout, records: Iterable[Record]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Join optimizer state to whole tensors, from the slices that servers hold.

    Args:
        layout: of the parameters.
        records: the slices, in any order; all of each tensor.

    Returns:
        State by "parameter/key", whose tensors have the shapes of the optimizer's, and the names of
        entries that are plain values, sorted.
    """
    pieces: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    plain: set[str] = set()
    for _, description, value in records:
        name = f"{description['name']}/{description['key']}"
        pieces.setdefault(name, []).append((description["start"], description["stop"], value))
        if description["plain"]:
            plain.add(name)
    whole: dict[str, torch.Tensor] = {}
    for name in list(pieces):
        parts = pieces.pop(name)
        parts.sort(key=lambda part: part[0])
        parameter = name.rpartition("/")[0]
        if (
            parameter not in layout.index
        ):  # of a store that is not of the flat vector: one after the other
            whole[name] = parts[0][2] if len(parts) == 1 else torch.cat([v for _, _, v in parts])
            continue
        entry = layout.entries[layout.index[parameter]]
        if (
            name not in plain
            and len(parts) > 1
            and all(_elementwise(v, start, stop, entry.shape) for start, stop, v in parts)
        ):
            whole[name] = torch.cat([value.reshape(-1) for _, _, value in parts]).reshape(
                entry.shape
            )
        else:  # such as a step count, the same on every slice
            whole[name] = parts[0][2].clone()
    return whole, sorted(plain)


def disassemble(
    layout: ParameterLayout, state: Mapping[str, torch.Tensor], plain: Iterable[str]
) -> list[Record]:
    """Split whole tensors of optimizer state into slices of a layout, the reverse of `assemble`.

    Args:
        layout: of the parameters; its chunks may be cut in another way than before.
        state: whole tensors by "parameter/key".
        plain: names of entries that are plain values.

    Raises:
        CheckpointError: state of an unknown or frozen parameter, or invalid state.
    """
    by_parameter: dict[str, list[tuple[str, torch.Tensor]]] = {}
    records: list[Record] = []
    for name, value in state.items():
        parameter, _, key = name.rpartition("/")
        if parameter not in layout.index or not layout.entries[layout.index[parameter]].trainable:
            raise CheckpointError(
                f"the checkpoint has optimizer state for {parameter!r}, which is not trained here"
            )
        by_parameter.setdefault(parameter, []).append((key, value))
    numbers = set(plain)
    for parameter, values in by_parameter.items():
        try:
            unpack({key: (value, f"{parameter}/{key}" in numbers) for key, value in values})
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint's optimizer state of {parameter!r} makes no sense: {error}"
            ) from error
    for chunk in layout.chunks:
        for piece in chunk.slices:
            entry = layout.entries[piece.entry]
            for key, value in by_parameter.get(entry.name, ()):
                is_plain = f"{entry.name}/{key}" in numbers
                description = {
                    "name": entry.name,
                    "key": key,
                    "start": piece.start,
                    "stop": piece.stop,
                    "plain": is_plain,
                }
                split = piece.stop - piece.start < entry.numel
                if split and not is_plain and tuple(value.shape) == entry.shape:
                    value = value.reshape(-1)[piece.start : piece.stop]
                records.append((chunk.index, description, value.clone()))
    return records


def _elementwise(value: torch.Tensor, start: int, stop: int, shape: tuple[int, ...]) -> bool:
    return tuple(value.shape) in ((stop - start,), shape) and value.numel() == stop - start
