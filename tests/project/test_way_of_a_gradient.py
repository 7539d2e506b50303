"""docs/explanation/ways.md lists the files of a gradient's way: exactly those that a trace of a step passes through."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from steepest.testing import InProcessCluster, linear_model_creator
from tests.socket_jobs import running, steps

ROOT = Path(__file__).parents[2]
#: what `steepest.core.messages.schema` compiles for each kind of message
COMPILED = {"pack": "core/messages/schema.py", "unpack": "core/messages/schema.py"}


def file_of(frame: FrameType) -> str:
    """The file of the package in which a function is; empty for others."""
    code = frame.f_code
    if code.co_filename == "<string>":
        return COMPILED.get(code.co_name, "")
    path = Path(code.co_filename)
    return (
        str(path.relative_to(ROOT / "steepest")) if path.is_relative_to(ROOT / "steepest") else ""
    )


def profiler(note: Callable[[str, str], None]) -> Callable[[FrameType, str, object], None]:
    """A profile function that notes the file and name of each function that is entered or left."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "return") and (file := file_of(frame)):
            note(file, frame.f_code.co_name)

    return profile


def files_from_a_hook_to_the_update() -> list[str]:
    """The files through which two workers' gradients go in one process, in order."""
    cluster = InProcessCluster(linear_model_creator(), num_workers=2)
    cluster.step(2)
    seen: list[tuple[str, str]] = []
    sys.setprofile(profiler(lambda file, name: seen.append((file, name))))
    try:
        cluster.step(1)
    finally:
        sys.setprofile(None)
    hooks = [at for at, event in enumerate(seen) if event == ("core/models/torch.py", "collect")]
    updates = [
        at for at, event in enumerate(seen) if event == ("core/engine/server_chunk.py", "apply")
    ]
    # the last worker's backward pass begins in the middle: both have the same parameters
    way = [file for file, _ in seen[hooks[len(hooks) // 2] : updates[-1] + 1]]
    return [file for file in dict.fromkeys(way) if not file.startswith("testing/")]


def files_of_the_transport() -> set[str]:
    """The files that move the bytes of a step between processes, here threads, with sockets."""
    seen: set[str] = set()
    recording = threading.Event()

    def note(file: str, name: str) -> None:
        if recording.is_set() and file.startswith("core/transport/"):
            seen.add(file)

    threading.setprofile(profiler(note))
    try:
        with running("ps") as (router, client):
            recording.set()
            steps(router, client, 3)
            recording.clear()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return seen


def test_the_listed_way_of_a_gradient_is_the_traced_way() -> None:
    page = (ROOT / "docs" / "explanation" / "ways.md").read_text()
    (section,) = re.findall(r"## The way of a gradient\n(.*?)\n## ", page, re.DOTALL)
    listed = re.findall(r"^\d+\. `steepest/([\w/.]+)`", section, flags=re.MULTILINE)
    way, transport = files_from_a_hook_to_the_update(), files_of_the_transport()
    assert set(listed) == {*way, *transport}
    assert [file for file in listed if file in way] == way
    assert len(listed) == len(set(listed))
