"""A connection to Ray, and the room that the cluster has for workers."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ray

from steepest.config.run import cluster_address, environment_variable, set_environment
from steepest.errors import ConfigurationError, ResourcesError
from steepest.runtime.ray_private import (
    draining_nodes,
    free_by_node,
    reload_token,
    started_here,
)

#: Environment variables of Ray's: whether a token is sent, and which; the first one counts.
_MODE = "RAY_AUTH_MODE"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def ensure_ray(num_cpus: int | None = None, *, verbose: bool = False) -> bool:
    """Connect to Ray unless this process is connected; return whether this call did.

    RAY_ADDRESS names a running cluster; without it a new one is started on this machine.
    """
    if ray.is_initialized():
        return False
    if (address := cluster_address()) is not None:
        connect(address)
    else:
        start_ray(num_cpus, verbose=verbose)
    return True


def connect(address: str) -> None:
    """Connect this process to a running cluster.

    Ray sends no token unless RAY_AUTH_MODE says so; a token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH
    is to be sent, so RAY_AUTH_MODE is set to "token" then, if it is not set.

    Raises:
        ConfigurationError: the cluster does not let this process in.
    """
    named = [name for name in _TOKENS if environment_variable(name)]
    mode = environment_variable(_MODE)
    if named and not mode:
        mode = "token"
        set_environment({_MODE: mode})
        reload_token()
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except ConnectionError as error:  # Ray says why on standard error only
        sent = (
            f"the token of {named[0] if named else 'the file .ray/auth_token in the home directory'}, "
            "is it the cluster's?"
            if mode == "token"
            else "no token"
        )
        raise ConfigurationError(
            f"could not connect to the Ray at {address}: {error}. A cluster that asks for a token lets in "
            f"who has it; this process has sent {sent} ({_MODE} is {mode or 'not set'}): set "
            f"{_MODE}=token, and the cluster's token as {' or '.join(_TOKENS)}"
        ) from error


def start_ray(num_cpus: int | None = None, *, verbose: bool = False) -> None:
    """Start a cluster on this machine, with `num_cpus` at least, and connect to it.

    Ray asks for a token from then on: one of the environment, or of the user's home, or a new one
    that Ray keeps there.
    """
    cpus = num_cpus if num_cpus is not None and (os.cpu_count() or 1) < num_cpus else None
    # "local": not what an earlier `ray start` on this machine left, which may be dead and is
    # asked for minutes
    level = logging.WARNING if verbose else logging.ERROR
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=level)
    logging.getLogger("ray").setLevel(logging.WARNING)  # what it warns of later is heard


@contextlib.contextmanager
def ray_session(num_cpus: int | None = None) -> Iterator[None]:
    """Connect to Ray for the length of a block, and disconnect if the block connected."""
    began = ensure_ray(num_cpus)
    try:
        yield
    finally:
        if began:
            ray.shutdown()


def describe_cluster() -> str:
    """Return version, nodes and free resources of the connected cluster, in a line."""
    free, total = ray.available_resources(), ray.cluster_resources()
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    shown = ", ".join(
        f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("CPU", "GPU")
    )
    return f"Ray {ray.__version__}, {nodes} nodes, free: {shown}"


def free_cpus() -> int:
    """Return the number of whole CPUs that are free now."""
    return int(ray.available_resources().get("CPU", 0))


def worker_bundle(devices: int, gpu: bool, cpus: int) -> dict[str, float]:
    """Return the resources that one worker reserves, by Ray's names."""
    bundle = {"CPU": float(cpus)}
    if gpu:
        bundle["GPU"] = float(devices)
    return bundle


def check_possible(
    workers: int, bundle: Mapping[str, float], nodes: Sequence[Mapping[str, Any]], grows: bool
) -> None:
    """Raise ResourcesError unless workers would fit if all nodes were free, or nodes may join."""
    totals = [node["Resources"] for node in nodes if node["Alive"]]
    fit = sum(
        int(min(total.get(name, 0.0) // amount for name, amount in bundle.items()))
        for total in totals
    )
    if fit >= workers or grows:
        return
    total = summary(dict(sum((Counter(total) for total in totals), Counter[str]())))
    gpu = (
        " with gpu=False,"
        if bundle.get("GPU") and not any(total.get("GPU") for total in totals)
        else ""
    )
    share = (
        f" let them share cores (ray.init(num_cpus={workers * bundle['CPU']:g}) before),"
        if set(bundle) == {"CPU"}
        else ""
    )
    never_fit = "worker never fits" if workers == 1 else "workers never fit"
    raise ResourcesError(
        f"{workers} {never_fit}: asked {asked(workers, bundle)}, each worker's on one node, "
        f"and all that this Ray has is {total}, {fit} workers' worth, which no node will join; ask "
        f"for fewer workers,{gpu}{share} or connect to "
        "a larger cluster first: ray.init(address=...)"
    )


def may_grow() -> bool:
    """Return whether nodes may join the cluster: not if this process has started Ray for itself."""
    return not started_here()


def asked(workers: int, bundle: Mapping[str, float]) -> str:
    """Return the resources that so many workers reserve, in words."""
    return "{" + ", ".join(f"{name}: {value * workers:g}" for name, value in bundle.items()) + "}"


def _fits(bundle: Mapping[str, float], without: Collection[str]) -> dict[str, int]:
    """Return how many bundles fit now on each node that is not left out and will not go."""
    left_out = {*without, *draining_nodes()}
    return {
        node: int(min(free.get(name, 0.0) // amount for name, amount in bundle.items() if amount))
        for node, free in free_by_node().items()
        if node not in left_out
    }


def fitting(bundle: Mapping[str, float], without: Collection[str] = ()) -> int:
    """Return how many workers the cluster could place now, none of them on some nodes."""
    return sum(_fits(bundle, without).values())


def packed(
    workers: int, bundle: Mapping[str, float], without: Collection[str] = ()
) -> list[str] | None:
    """Return a node for each worker, on few nodes; None if they do not all fit now."""
    fits, found = _fits(bundle, without), list[str]()
    for node in sorted(fits, key=fits.__getitem__, reverse=True):
        found += [node] * min(fits[node], workers - len(found))
    return found if len(found) == workers else None


def summary(resources: Mapping[str, float]) -> str:
    """Return CPUs and GPUs of some resources, in words."""
    shown = [
        f"{name}: {resources.get(name, 0):g}"
        for name in ("CPU", "GPU")
        if name in resources or name == "CPU"
    ]
    return "{" + ", ".join(shown) + "}"
