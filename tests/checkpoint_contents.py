"""Checkpoints with known contents, ways of damaging them, and layouts to restore them into."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steepest.checkpoint.files import (
    MANIFEST,
    Checkpoint,
)
from steepest.core.tensors.layout import ParameterLayout


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.decode = nn.Linear(3, 3)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(3, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decode(torch.relu(self.norm(self.encode(x)))))


def about(step: int = 3) -> dict[str, Any]:
    return {
        "step": step, "epoch": 0, "offset": 12, "samples": 16, "seed": 0, "optimizer": "torch.optim.Adam",
        "plain": [], "aliases": {}, "flags": {},
    }  # fmt: skip


def content(value: float = 1.0, step: int = 3) -> Checkpoint:
    return Checkpoint(
        {"w": torch.full((3,), value)}, {"w/exp_avg": torch.full((3,), -value)}, {}, about(step)
    )


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Writes the manifest anew, with a checksum that is right."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["sha256"]
    manifest = change(manifest) or manifest
    body = json.dumps(manifest, indent=1).removesuffix("\n}").encode()
    digest = hashlib.sha256(body).hexdigest()
    (path / MANIFEST).write_bytes(body + f',\n "sha256": "{digest}"\n}}\n'.encode())


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "no manifest": lambda path: (path / MANIFEST).unlink(),
    "an empty manifest": lambda path: (path / MANIFEST).write_text(""),
    "half a manifest": lambda path: (path / MANIFEST).write_text(
        (path / MANIFEST).read_text()[:50]
    ),
    "a manifest of bytes": lambda path: (path / MANIFEST).write_bytes(b"\x80\x04\x95"),
    "a manifest that is a list": lambda path: (path / MANIFEST).write_text("[1]"),
    "another format": lambda path: edit(path, lambda m: m.update(format=1)),
    "no format": lambda path: edit(path, lambda m: m.pop("format") and None),
    "no files": lambda path: edit(path, lambda m: m.pop("files") and None),
    "files that are a list": lambda path: edit(path, lambda m: m.update(files=[1])),
    "one file too few": lambda path: edit(path, lambda m: m["files"].pop("optimizer") and None),
    "a file without checksum": lambda path: edit(
        path, lambda m: m["files"]["weights"].pop("sha256") and None
    ),
    "no step": lambda path: edit(path, lambda m: [m.pop("step"), None][1]),
    "a flipped bit": lambda path: flip(next(path.glob("weights-*"))),
    "half a file": lambda path: os.truncate(next(path.glob("optimizer-*")), 20),
    "a missing file": lambda path: next(path.glob("replicas-*")).unlink(),
}


def layouts() -> list[ParameterLayout]:
    parameters = [(name, tuple(p.shape), p.dtype, True) for name, p in Tied().named_parameters()]
    parameters.append(("frozen", (5,), torch.float64, False))
    return [ParameterLayout.plan(parameters, chunk_bytes=size) for size in (8, 40, 64, 1 << 20)]
