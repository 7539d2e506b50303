"""Starts the runtime of a command's processes, while this process imports what it needs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import threading
from collections.abc import Iterator

from steepest.core.config.run import RUNTIMES, cluster_address


def add_runtime_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that says what runs the workers."""
    parser.add_argument(
        "--runtime",
        default="auto",
        choices=RUNTIMES,
        help="what runs the workers: Ray, or processes of this machine without Ray; auto: the latter, unless "
        "RAY_ADDRESS names a cluster",
    )


@contextlib.contextmanager
def begun(name: str) -> Iterator[None]:
    """Return a context with a runtime, by its name as in `RunConfig`."""
    from steepest.runtime.job_runtime import choose, chosen, runtime

    # Either starts a process that imports what workers need, which takes as long as this one's imports.
    if (wanted := chosen(name)) == "ray":
        with _ray():
            yield
        return
    choose(wanted)
    began = runtime().connect()
    try:
        yield
    finally:
        if began:
            runtime().shutdown()


@contextlib.contextmanager
def _ray() -> Iterator[None]:
    """Return a context that is connected to Ray."""
    from steepest.runtime.prefork.template import start_template

    # before this process imports Ray, which takes as long as the template's own imports
    template = start_template() if cluster_address() is None else None
    from steepest.runtime.connection import ray_session

    # what takes longest of all imports, while Ray's processes start: that is mostly waiting
    # The interpreter awaits it: an end amid the import, as by Ctrl-C, would be a traceback, SIGSEGV, or a hang.
    torch = threading.Thread(target=importlib.import_module, args=("torch",))
    torch.start()
    with ray_session(template=template):
        torch.join()
        yield
