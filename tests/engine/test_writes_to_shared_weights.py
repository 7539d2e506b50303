"""Writes of a model to weights that a host's workers share hide no update of other chunks."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.engine.replicas import Replicas, WorkShare
from steepest.core.tensors import shared_memory
from steepest.core.tensors.layout import Chunk, ChunkSpec, ParameterLayout
from steepest.core.tensors.shared_memory import Segment, allocate, make_writable
from tests.reference import Task

PAGE = 4096
ODD = (300_003, 300_007, 300_011, 300_013)


def planned(kind: str) -> ParameterLayout:
    """Layouts of 10 MB whose tensors begin and end anywhere."""
    parameters = [(f"p{i}", (n,), torch.float64, True) for i, n in enumerate(ODD)]
    if kind == "kinds":
        parameters = [(name, shape, torch.float32 if i % 2 else torch.float64, i < 3)
                      for i, (name, shape, _, _) in enumerate(parameters)]  # fmt: skip
    return ParameterLayout.plan(
        parameters, split_tensors=kind != "whole", chunk_bytes=100_000 if kind == "asked" else None
    )


def seen_elsewhere(owner: torch.Tensor) -> torch.Tensor:
    """Memory that is lent, as another process maps it."""
    segment = shared_memory.segment_of(owner)
    assert segment is not None
    attached = Segment.attach(os.dup(segment.descriptor))
    memory: Any = (ctypes.c_uint8 * len(attached)).from_address(attached.address)
    memory.segment = attached
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.skipif(not shared_memory.AVAILABLE, reason="memfd is Linux'")
@pytest.mark.parametrize("kind", ["even", "whole", "kinds", "asked"])
def test_what_is_written_to_one_chunk_hides_no_part_of_another(kind: str) -> None:
    layout = planned(kind)
    owner = allocate(layout.nbytes)
    view = seen_elsewhere(owner)
    assert make_writable(view)
    assert len(layout.chunks) > 2
    for chunk in layout.chunks:  # the model writes to the first and last element of what has come
        of_model = layout.chunk_view(view, chunk.index)
        of_model[0] = of_model[-1] = 1
        for other in layout.chunks:
            if other.index > chunk.index:  # and then the server to what comes after it
                layout.chunk_view(owner, other.index).fill_(chunk.index + 2)
                seen = layout.chunk_view(view, other.index)
                assert bool((seen == chunk.index + 2).all()), (
                    f"{int((seen != chunk.index + 2).sum())} stale bytes"
                )


def overlaps(a: Chunk, b: Chunk) -> bool:
    return a.start // PAGE <= (b.stop - 1) // PAGE and b.start // PAGE <= (a.stop - 1) // PAGE


sizes = st.lists(st.integers(0, 400_000), min_size=1, max_size=6)
dtypes = st.lists(
    st.sampled_from((torch.float32, torch.float64, torch.bfloat16)), min_size=6, max_size=6
)


@given(sizes, dtypes, st.booleans(), st.one_of(st.none(), st.integers(4 * PAGE, 1 << 20)))
def test_no_page_holds_parts_of_two_chunks(
    sizes: list[int], kinds: list[torch.dtype], split: bool, chunk_bytes: int | None
) -> None:
    parameters = [(f"p{i}", (n,), kinds[i], i % 3 > 0) for i, n in enumerate(sizes)]
    layout = ParameterLayout.plan(parameters, split_tensors=split, chunk_bytes=chunk_bytes)
    assert layout.on_pages
    assert not any(
        overlaps(a, b) for a in layout.chunks for b in layout.chunks if a.index < b.index
    )
    whole = sum(entry.nbytes for entry in layout.entries)
    assert sum(chunk.nbytes for chunk in layout.chunks) == whole
    assert layout.nbytes - whole <= PAGE * (len(layout.chunks) + 3)


@pytest.mark.skipif(not shared_memory.AVAILABLE, reason="memfd is Linux'")
@pytest.mark.parametrize(("chunk_bytes", "shares"), [(None, True), (3000, False)])
def test_weights_whose_chunks_are_smaller_than_pages_are_not_shared(
    chunk_bytes: int | None, shares: bool
) -> None:
    wide = Task(lambda: torch.nn.Linear(3, 3000)).creator()(0, 0)
    wide.relayout(ChunkSpec(chunk_bytes))
    replicas = Replicas([wide], [torch.device("cpu")], WorkShare(first_index=0, shares=1, seed=0))
    lent = seen_elsewhere(allocate(replicas.layout.nbytes))
    assert replicas.adopt(lent) is shares
    assert (replicas.weights is lent) is shares
