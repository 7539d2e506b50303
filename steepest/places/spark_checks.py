"""What a Spark session and its executors must be like for Ray to run on them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from steepest.errors import ConfigurationError
from steepest.places.ray_on_spark import is_local

_MASTERS = "local[n], local-cluster[n,cores,memory], spark://host:port or yarn"


def check_session(session: Any, workers: int, cpus: int) -> None:
    """Check that a user's session is of this process, and that its master has room for the nodes."""
    # ConfigurationError says what to set.
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError:
        raise ConfigurationError(
            "Spark needs pyspark, which is not installed: pip install 'steepest[spark]'"
        ) from None
    if not isinstance(session, SparkSession):
        raise ConfigurationError(
            f"session is a {type(session).__name__}: give a pyspark.sql.SparkSession, such as "
            "SparkSession.builder.getOrCreate(); one of Spark Connect has no executors for Ray"
        )
    try:
        context = session.sparkContext
        stopped = context._jsc is None
    except (PySparkException, AttributeError) as error:
        raise ConfigurationError(f"the session has no SparkContext here: {error}") from error
    if stopped or SparkSession.getActiveSession() is None:
        raise ConfigurationError(
            "the Spark session was stopped, or belongs to another thread: make it with "
            "SparkSession.builder.getOrCreate() in the thread that opens the cluster"
        )
    master = context.master
    check_cluster(master, dict(context.getConf().getAll()))
    if is_local(master) and cpus != (task := int(context.getConf().get("spark.task.cpus", "1"))):
        raise ConfigurationError(
            f"cpus_per_worker={cpus}, but with the master {master!r} a node has as many CPUs as "
            f"Spark's tasks, {task}: set spark.task.cpus={cpus} before the session is made"
        )
    _check_room(master, context.defaultParallelism, workers, cpus)


def check_cluster(master: str, settings: Mapping[str, str]) -> None:
    """Check that Ray runs on a master, and with a session's settings; ConfigurationError says what to do instead."""
    if master.startswith("k8s://"):
        raise ConfigurationError(
            f"Spark's master is {master!r}: Ray does not run on Spark's pods here; on Kubernetes use "
            "`steepest launch kubernetes`, which needs no Spark"
        )
    if not re.match(r"local$|local\[|local-cluster\[|spark://|yarn$", master):
        raise ConfigurationError(f"Spark's master is {master!r}: Ray runs on {_MASTERS}")
    for name in ("spark.task.resource.gpu.amount", "spark.executor.resource.gpu.amount"):
        if settings.get(name, "0") not in ("0", ""):
            raise ConfigurationError(
                f"{name}={settings[name]}: Ray's nodes on Spark get no GPUs here, and would keep them from "
                "others; leave it out to train on CPUs, or train on GPUs with a Ray cluster, "
                "`steepest launch kubernetes` or `steepest launch slurm`"
            )


def _check_room(master: str, threads: int, workers: int, cpus: int) -> None:
    """Check that the nodes fit, if the master's name alone tells how many do (a local one has `threads`)."""
    match = re.match(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,", master)
    executors, cores = (int(match[1]), int(match[2])) if match else (1, threads)
    if (match or is_local(master)) and workers > (room := executors * (cores // cpus)):
        raise ConfigurationError(
            f"workers={workers} of cpus_per_worker={cpus}, but the master {master!r} has room for "
            f"{room}: ask for fewer, or start Spark with more cores"
        )


def paths_of_nodes(session: Any) -> dict[str, str]:
    """Return PATH for Ray's processes, if executors or this process do not find Ray's command.

    Raises:
        ConfigurationError: the executors' Python is of another version, or lacks Ray or steepest.
    """
    import ray
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    context = session.sparkContext
    python = f"the executors' Python ({context.pythonExec})"
    set_it = (
        "set PYSPARK_PYTHON, before the session is made, to a Python that has what this one has, on "
        f"every machine (here {sys.executable})"
    )
    try:
        node = context.parallelize([0], 1).map(_inspection()).first()
    except (PySparkException, Py4JError) as error:
        line = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"{python} cannot run a task: {set_it}; {line}") from error
    version = platform.python_version()
    if node["python"].split(".")[:2] != version.split(".")[:2]:
        raise ConfigurationError(f"{python} is {node['python']}, not {version}: {set_it}")
    if node["ray"] != ray.__version__:
        has = f"Ray {node['ray']}" if node["ray"] else "no Ray"
        raise ConfigurationError(f"{python} has {has}, not {ray.__version__}: {set_it}")
    if not node["steepest"]:
        raise ConfigurationError(f"{python} has no steepest: {set_it}")
    if node["command"] and shutil.which("ray"):
        return {}
    ways = [node["bin"], os.path.dirname(sys.executable), *node["path"].split(os.pathsep)]
    return {"PATH": os.pathsep.join(dict.fromkeys(ways))}


def _inspection() -> Callable[[int], dict[str, Any]]:
    """Return a function that describes the Python that it runs in; it needs no steepest there."""

    def inspect(_: int) -> dict[str, Any]:
        import importlib.metadata
        import importlib.util
        import os
        import platform
        import shutil
        import sys

        names: Iterable[str] = {d.metadata["Name"] for d in importlib.metadata.distributions()}
        place = os.path.dirname(sys.executable)
        if place.startswith(os.getcwd() + os.sep):  # an archive, unpacked for each executor
            place = os.path.join(".", os.path.relpath(place))
        return {
            "python": platform.python_version(),
            "ray": importlib.metadata.version("ray") if "ray" in names else None,
            "steepest": importlib.util.find_spec("steepest") is not None,
            "command": shutil.which("ray") is not None,
            "bin": place,
            "path": os.pathsep.join(os.get_exec_path()),
        }

    return inspect
