"""A worker's part in audited steps: it also computes another worker's samples, without a trace in its own state."""

from __future__ import annotations

import platform
import zlib
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from steepest.core.engine.replicas import Replicas
from steepest.core.messages.audits import Audited, GradientDigest
from steepest.core.protocol.audits import drawn, other_of
from steepest.core.tensors.dtypes import Tensors, as_bytes
from steepest.core.tensors.layout import ParameterLayout


class Digest:
    """The digest of a gradient that is being computed, chunk by chunk."""

    def __init__(self, layout: ParameterLayout, state: int) -> None:
        self._layout, self._batches, self._state = layout, 0, state
        self._chunks: dict[int, tuple[int, float, float]] = {}

    def add_batch(self, batch: Any) -> None:
        """Add a batch of the samples that the gradient is computed from."""
        for leaf in tree_leaves(batch):
            self._batches = _crc(leaf, self._batches)

    def add(
        self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> None:
        """Add a complete chunk, see `ChunkReady`, before any process has changed it."""
        bits = zlib.crc32(repr((unit, total, sorted(absent))).encode())
        values = payload.view(self._layout.chunks[chunk].dtype)
        values = (torch.view_as_real(values) if values.is_complex() else values).double()
        sums = float(values.sum()) * unit, float(values.norm()) * unit
        self._chunks[chunk] = (_crc(payload, bits), *sums)

    def result(self) -> GradientDigest:
        """Return the digest; called once all chunks are added."""
        each = [self._chunks[chunk] for chunk in sorted(self._chunks)]
        bits, sums, norms = zip(*each, strict=True)
        return GradientDigest(self._batches, self._state, bits, sums, norms)


class Audit:
    """An audited step on one worker, which has computed the other worker's samples."""

    def __init__(
        self, fields: tuple[str, float, int], others: Digest, own: Digest, seconds: float
    ) -> None:
        self.own = own  # to which the worker's own gradient is to be added
        self.seconds = seconds  # that it took
        self._fields, self._others = fields, others

    def result(self) -> Audited:
        """Return what a report says of it, once the worker's own gradient is computed."""
        return Audited(*self._fields, self.own.result(), self._others.result())


class Auditor:
    """A worker's audits.

    Args:
        share: of the steps that are audited.
        members: number of workers.
        replicas: of the worker.
        pulled: the dtype in which weights come from other hosts, whose weights then differ; None for their own.
    """

    def __init__(
        self, share: float, members: int, replicas: Replicas, pulled: torch.dtype | None = None
    ) -> None:
        self._share, self._members, self._replicas = share, members, replicas
        layout, self._is_exact = replicas.layout, pulled is None
        dtypes = {layout.chunks[chunk].dtype for chunk in layout.trainable_chunks}
        dtypes |= {each for each in (replicas.models[0].reduced, pulled) if each is not None}
        self._rounding = max(torch.finfo(dtype).eps for dtype in dtypes) ** (1 / 3)
        # the last audited step, the replicas' own states before it, and how often it was computed again
        self._before: tuple[int, list[Tensors], int] = (-1, [], 0)

    def forget(self) -> None:
        """Forget the last audited step: it is decided on, or replicas have another state."""
        self._before = -1, [], 0

    def begin(self, version: int) -> Audit | None:
        """Compute another worker's samples of a step; return None if it is not audited.

        Afterwards buffers are as before the step, also in another attempt. Generators are seeded for each batch.

        Args:
            version: of the weights, which number the step.
        """
        replicas = self._replicas
        number = drawn(replicas.batches.seed, version, self._share)
        if number is None:
            return None
        step, states, attempt = self._before
        if step == version:
            attempt += 1
            replicas.load_states(states)
        else:
            states, attempt = replicas.states(), 0
        self._before = version, states, attempt
        other = other_of(replicas.worker, self._members, number, attempt)
        state = 0
        for each in states:
            for name in sorted(each):
                state = _crc(each[name], state)
        others, own = Digest(replicas.layout, state), Digest(replicas.layout, state)
        try:
            seconds = replicas.compute_other(
                version * self._members + other, others.add, others.add_batch
            )
        finally:
            replicas.load_states(states)
        alike = machine(replicas.device) if self._is_exact else ""
        return Audit((alike, self._rounding, other), others, own, seconds)


def machine(device: torch.device) -> str:
    """Return the traits that decide the bits of a device's results; "" for a GPU whose results may differ each time."""
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{_processor()}, {capability}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if not torch.are_deterministic_algorithms_enabled():
        return ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}"


@cache
def _processor() -> str:
    """Return the model of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _crc(value: Any, before: int) -> int:
    """Return the CRC-32 of a tensor, array or plain value, continued from `before`; other values leave `before`."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return before
        return zlib.crc32(as_bytes(value.detach().cpu()).numpy().data, before)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), before)
    if isinstance(value, (str, bytes, bool, int, float)):
        return zlib.crc32(repr(value).encode(), before)
    return before
