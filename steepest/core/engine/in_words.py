"""Chunks and pushes in sentences for users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from steepest.core.messages.message import worker_peer
from steepest.errors import listed

_MOST_RANGES = 6


def chunks_in_words(chunks: Iterable[int]) -> str:
    """Return indices of chunks in words, such as "chunk 3" or "chunks 0-4, 7"; only the first of many ranges.

    Example:
        >>> chunks_in_words([7, 0, 1, 2])
        'chunks 0-2, 7'
    """
    ranges: list[list[int]] = []
    for chunk in sorted(set(chunks)):
        if ranges and chunk == ranges[-1][1] + 1:
            ranges[-1][1] = chunk
        else:
            ranges.append([chunk, chunk])
    words = [f"{first}-{last}" if first < last else f"{first}" for first, last in ranges]
    rest = sum(last - first + 1 for first, last in ranges[_MOST_RANGES:])
    shown = [*words[:_MOST_RANGES], *([f"{rest} more"] if rest else [])]
    return f"chunk{'' if shown == [words[0]] and '-' not in words[0] else 's'} {', '.join(shown)}"


def pushes_in_words(lacking: Mapping[int, Iterable[int]]) -> str:
    """Return which chunks of which workers' gradients have not come, in words.

    Args:
        lacking: by chunk, the workers whose gradients of it have not come.

    Example:
        >>> pushes_in_words({0: [0, 1], 1: [0]})
        'worker 0 (chunks 0-1), worker 1 (chunk 0)'
        >>> pushes_in_words({})
        'no worker'
    """
    by_worker: dict[int, list[int]] = {}
    for chunk, workers in lacking.items():
        for worker in workers:
            by_worker.setdefault(worker, []).append(chunk)
    return (
        listed(
            f"{worker_peer(worker)} ({chunks_in_words(chunks)})"
            for worker, chunks in sorted(by_worker.items())
        )
        or "no worker"
    )
