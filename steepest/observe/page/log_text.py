"""The last lines of a process as a page shows them: bounded, and without what looks like a secret."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LONGEST = 1000  # characters of a line
_MOST = 64_000  # of all lines
_SECRET = re.compile(
    r"(?i)\b([\w-]*(?:token|secret|passw(?:or)?d|api[-_]?key|access[-_]?key|credential|authorization)[\w-]*"
    r"[\"']?\s*[=:]\s*[\"']?)(?:(?:bearer|basic)\s+)?[^\s,;\"'}&]+"
)
_PASSWORD = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def log_text(lines: Iterable[str]) -> str:
    """Return the last lines as text; values that are named as secrets are left out, and so are passwords of URLs.

    Example:
        >>> log_text(["epoch 1", "API_KEY=abc123 lr=0.1", "s3://me:pw@host/x"])
        'epoch 1\\nAPI_KEY=*** lr=0.1\\ns3://***@host/x\\n'
    """
    kept: list[str] = []
    room = _MOST
    for line in reversed([*lines]):
        shown = _PASSWORD.sub("***", _SECRET.sub(r"\1***", line[:_LONGEST]))
        room -= len(shown) + 1
        if room < 0:
            break
        kept.append(shown)
    return "".join(f"{line}\n" for line in reversed(kept))
