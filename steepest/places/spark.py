"""Train on the executors of a Spark cluster: local, standalone, or YARN.

`cluster` runs Ray on them for a block of a program that has a Spark session; `steepest launch spark`
makes the session, too.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import runpy
import secrets
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steepest.core.config.run import environment, environment_variable
from steepest.errors import ConfigurationError
from steepest.validation import require_count

_LEAST_STORE = 75 * 1024 * 1024  # bytes, of Ray
_STORE = 100 * 1000 * 1000
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_HOOK = "RAY_ON_SPARK_START_HOOK"
_INSTALL = "pip install 'steepest[spark]'"


@contextlib.contextmanager
def cluster(
    session: Any,
    *,
    workers: int,
    cpus_per_worker: int = 1,
    memory_per_worker: int | None = None,
    object_store_memory: int = _STORE,
    directory: str = "/tmp",
) -> Iterator[str]:
    """Run Ray on a Spark cluster for the length of a block, and connect this process to it.

    Each Ray node is a Spark task that lasts as long as the block; Ray's head node, with no CPUs, is
    on this machine. After the block, also after an error, Ctrl-C or SIGTERM, Ray's processes have
    ended on this machine and are ending on the others, their temporary files are removed, and the
    Spark jobs are cancelled. The session goes on.

    Ray asks all who connect for a token: that of RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or
    ``.ray/auth_token`` in the home directory, or a new one for this block if there is none of them.
    It goes to executors inside of Spark's tasks, and is in no log and on no command line. With
    RAY_AUTH_MODE=disabled there is none.

    Args:
        session: a `pyspark.sql.SparkSession` of this process, whose master is local,
            local-cluster[...], spark://... or yarn (client mode). Its executors' Python has the same
            version and the same Ray as this one, and steepest.
        workers: number of Ray nodes.
        cpus_per_worker: of each node. With a local master it must be Spark's spark.task.cpus.
        memory_per_worker: bytes that each node offers to tasks and actors; None for a share of the
            machine's memory. Spark's executor.memory is not in it.
        object_store_memory: bytes of each node's object store, in /dev/shm.
        directory: where Ray's temporary files lie, on each machine: a short path.

    Yields:
        The address of Ray's control store, "host:port". RAY_ADDRESS has it, too, in the block.

    Raises:
        ConfigurationError: an argument, the session or the Python of its executors will not do; this
            process is connected to Ray already.
        ResourcesError: not all Ray nodes have started.

    Example:
        >>> session = SparkSession.builder.getOrCreate()  # doctest: +SKIP
        >>> with cluster(session, workers=4, cpus_per_worker=2):  # doctest: +SKIP
        ...     sgd = DistributedSGD(model_creator, num_workers=4)
    """
    import ray

    from steepest.runtime.connection import end_ray
    from steepest.runtime.signals import end_on_sigterm

    with _unconnected(
        session, workers, cpus_per_worker, memory_per_worker, object_store_memory, directory
    ) as address:
        try:
            ray.init(address=address)
            end_on_sigterm()
            yield address
        finally:
            end_ray()


@contextlib.contextmanager
def _unconnected(
    session: Any, workers: int, cpus: int, memory: int | None, store: int, directory: str
) -> Iterator[str]:
    """Run Ray on Spark; a program in the block connects by RAY_ADDRESS."""
    import ray

    from steepest.places.ray_on_spark import HOOK, Nodes, started
    from steepest.places.spark_checks import check_session, paths_of_nodes
    from steepest.runtime.ray_private import reload_token

    require_count("workers", workers)
    require_count("cpus_per_worker", cpus)
    if memory is not None:
        require_count("memory_per_worker", memory)
    require_count("object_store_memory", store, _LEAST_STORE)
    if environment_variable(_HOOK):
        raise ConfigurationError(
            f"{_HOOK} is set, but steepest needs it for a hook of its own, by which executors get "
            "Ray's token: unset it"
        )
    if ray.is_initialized():
        raise ConfigurationError(
            "this process is connected to a Ray already: leave that first (ray.shutdown())"
        )
    check_session(session, workers, cpus)
    token = _token()
    nodes = Nodes(
        count=workers,
        cpus=cpus,
        memory=memory,
        object_store_memory=store,
        directory=directory,
        environment=token | paths_of_nodes(session),
    )
    here = {_HOOK: HOOK, "RAY_ADDRESS": None, "RAY_AUTH_TOKEN_PATH": None} | token
    try:
        with environment(here):
            reload_token()
            with started(session, nodes) as address, environment({"RAY_ADDRESS": address}):
                yield address
    finally:
        reload_token()


def _token() -> dict[str, str]:
    """Return the variables that tell Ray's processes their token.

    Raises:
        ConfigurationError: RAY_AUTH_TOKEN_PATH names no file, or RAY_AUTH_MODE is none of Ray's.
    """
    mode = environment_variable("RAY_AUTH_MODE") or "token"
    if mode == "disabled":
        return {"RAY_AUTH_MODE": mode}
    if mode != "token":
        raise ConfigurationError(f"RAY_AUTH_MODE={mode!r}: set it to 'token' or 'disabled'")
    token = environment_variable("RAY_AUTH_TOKEN") or ""
    named = environment_variable("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if not token and (named or path.is_file()):
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise ConfigurationError(
                f"Ray's token cannot be read from {path}: {error.strerror}; correct "
                "RAY_AUTH_TOKEN_PATH, or unset it"
            ) from None
    return {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token or secrets.token_hex(32)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `steepest launch spark`."""
    parser.add_argument("script", help="the training program; it finds Ray by RAY_ADDRESS")
    parser.add_argument(
        "--arguments", default="", metavar="TEXT", help='of the program: --arguments="--lr 0.1"'
    )
    parser.add_argument("--master", required=True, help="local[4], spark://host:7077, yarn, ...")
    parser.add_argument("--workers", type=int, required=True, help="Ray nodes, one per Spark task")
    parser.add_argument("--cpus-per-worker", type=int, default=1, help="of a node (default 1)")
    parser.add_argument("--memory", metavar="SIZE", help="of a node, as 4g (default: a share)")
    parser.add_argument(
        "--object-store-memory", metavar="SIZE", default="100m", help="(default 100m)"
    )
    parser.add_argument("--directory", default="/tmp", help="of temporary files (default /tmp)")
    parser.add_argument(
        "--conf", action="append", default=[], metavar="KEY=VALUE", help="a setting of Spark; again"
    )


def run(options: argparse.Namespace) -> int:
    """Run a program on a Spark cluster of the options' master; return its exit status.

    The program finds the session by `SparkSession.getActiveSession()`.

    Raises:
        ConfigurationError: an option is wrong, or as `cluster` raises it.
        ResourcesError: as `cluster` raises it.
    """
    from steepest.places.spark_checks import check_cluster

    if not Path(options.script).is_file():
        raise ConfigurationError(
            f"there is no program {options.script!r}: give the path of a Python file"
        )
    memory = None if options.memory is None else _bytes_of("--memory", options.memory)
    store = _bytes_of("--object-store-memory", options.object_store_memory)
    settings = {"spark.ui.showConsoleProgress": "false"}
    if re.match(r"local(\[|$)", options.master):
        settings["spark.task.cpus"] = str(options.cpus_per_worker)
    for text in options.conf:
        if not re.fullmatch(r"[^=\s]+=.*", text):
            raise ConfigurationError(f"--conf={text!r}: give KEY=VALUE")
        settings.update([text.split("=", 1)])
    check_cluster(options.master, settings)  # before pods or machines are taken
    python = environment_variable("PYSPARK_PYTHON") or sys.executable
    with environment({"PYSPARK_PYTHON": python}):
        session = _session(options.master, Path(options.script).stem, settings)
        try:
            with _unconnected(
                session, options.workers, options.cpus_per_worker, memory, store, options.directory
            ):
                return _run_program(options.script, shlex.split(options.arguments))
        finally:
            session.stop()


def _session(master: str, name: str, settings: dict[str, str]) -> Any:
    """Return a new Spark session; ConfigurationError: pyspark is not installed, or Spark does not start."""
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError:
        raise ConfigurationError(
            f"Spark needs pyspark, which is not installed: {_INSTALL}"
        ) from None
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except (PySparkException, RuntimeError, OSError) as error:
        raise ConfigurationError(
            f"Spark did not start with --master={master!r}: {error}"
        ) from error


def _bytes_of(option: str, text: str) -> int:
    """Return a size such as 512m or 4g in bytes."""
    match = re.fullmatch(r"(\d+)([kmgt]?)b?", text.lower())
    if match is None:
        raise ConfigurationError(f"{option}={text!r}: give a size such as 512m or 4g")
    return int(match[1]) * _UNITS[match[2]]


def _run_program(script: str, arguments: list[str]) -> int:
    """Run a program in this process as Python would; return its exit status."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [script, *arguments], [str(Path(script).resolve().parent), *path]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if not ended.code:
            return 0
        if isinstance(ended.code, int):
            return int(ended.code)
        sys.stderr.write(f"{ended.code}\n")
        return 1
    finally:
        from steepest.runtime.connection import end_ray

        end_ray()
        sys.argv, sys.path = argv, path
    return 0
