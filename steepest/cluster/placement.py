"""A connection to Ray, and the resources that a job reserves there for its processes."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from steepest.cluster.ray_private import free_by_node, started_here
from steepest.config.run import cluster_address
from steepest.errors import ResourcesError

log = logging.getLogger(__name__)
_NODE_LABEL = "ray.io/node-id"  # Ray gives it to each node
_SERVING = {"CPU": 1.0}  # what servers reserve on a node without workers
_RELEASE_SECONDS = 5.0
_FAILED_SEATS = 2  # from which on a node is not used any more


def ensure_ray(num_cpus: int | None = None, *, verbose: bool = False) -> bool:
    """Connect to Ray unless this process is connected.

    RAY_ADDRESS names a running cluster; without it a new one is started on this machine.

    Args:
        num_cpus: CPUs that a new cluster has at least, whatever the machine has.
        verbose: see `RunConfig`.

    Returns:
        Whether this call connected, so that its caller has to disconnect.
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

    Args:
        address: of the cluster's control store, as `RAY_ADDRESS` has it.
    """
    ray.init(address=address, logging_level=logging.WARNING)


def start_ray(num_cpus: int | None = None, *, verbose: bool = False) -> None:
    """Start a cluster on this machine, and connect to it.

    Ray asks for a token from then on: one of the environment, or of the user's home, or a new one
    that Ray keeps there.

    Args:
        num_cpus: CPUs that the cluster has at least, whatever the machine has.
        verbose: see `RunConfig`.
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


@dataclass
class Reservation:
    """Room for some workers: a placement group of their own, or the one that this process runs in.

    Attributes:
        owned: whether the group was made for the job, and is removed by `release`.
        bundles: by worker, the index of its bundle in the group, or -1 for any.
    """

    group: PlacementGroup
    owned: bool
    bundles: tuple[int, ...]

    def strategy(self, worker: int) -> PlacementGroupSchedulingStrategy:
        """Return how Ray schedules a process in the bundle of a worker."""
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.bundles[worker % len(self.bundles)]
        )

    def release(self) -> None:
        """Give the room back, if it is owned; processes that run there end."""
        if self.owned:
            remove_placement_group(self.group)


def reserve(
    workers: int, bundle: dict[str, float], timeout: float, who_else: Callable[[], str] = str
) -> Reservation:
    """Reserve room for workers, all at once, and wait for it.

    Inside a placement group that takes in what its processes start (a Ray Tune trial) its bundles
    are used; where it has more than there are workers, the first ones are left to the trial.

    Args:
        workers: how many.
        bundle: resources of each, see `worker_bundle`.
        timeout: seconds.
        who_else: returns a sentence about what else this process holds, or "".

    Raises:
        ResourcesError: there was no room in time, or can never be.
    """
    current = _group_around()
    if current is not None:
        specs = current.bundle_specs
        fitting = [
            i for i, s in enumerate(specs) if all(s.get(k, 0) >= v for k, v in bundle.items())
        ]
        if len(fitting) < workers:
            raise ResourcesError(
                f"{workers} workers need {bundle} each, but the placement group that this runs in "
                f"has the bundles {specs}: give the trial room with tune.with_resources(trainable, "
                "DistributedSGD.resources(...))"
            )
        return Reservation(current, False, tuple(fitting[-workers:]))
    check_possible(workers, bundle, ray.nodes(), may_grow())
    gc.collect()  # a trainer that was dropped may be part of a cycle, such as a traceback
    what, asked = f"{workers} workers", _asked(workers, bundle)
    return _placed(ask_for_room(workers, bundle), what, asked, timeout, who_else)


def reserve_for_servers(
    hosts: int, working: Collection[str], timeout: float, who_else: Callable[[], str] = str
) -> Reservation:
    """Reserve a CPU on each of some nodes without workers, and wait for them.

    Args:
        hosts: how many nodes.
        working: ids of those that have workers.
        timeout, who_else: as for `reserve`.

    Raises:
        ResourcesError: there were no such nodes in time, or can never be.
    """
    what = f"serving_hosts={hosts}"
    if _group_around() is not None:
        raise ResourcesError(
            f"{what} inside a placement group: it has no nodes without workers to give; leave "
            "serving_hosts out"
        )
    others = [
        node
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in working and node["Resources"].get("CPU", 0) >= 1
    ]
    if len(others) < hosts and not may_grow():
        raise ResourcesError(
            f"{what}: this Ray has {len(others)} nodes without workers, and no node will join it; "
            "connect to a larger cluster first, ray.init(address=...), or leave serving_hosts out"
        )
    asked = "1 CPU on each, where no worker is"
    room = _ask(hosts, _SERVING, working, "STRICT_SPREAD")
    return _placed(room, what, asked, timeout, who_else)


def _placed(
    reservation: Reservation, what: str, asked: str, timeout: float, who_else: Callable[[], str]
) -> Reservation:
    """Return a reservation when Ray has placed it.

    Raises:
        ResourcesError: it was not placed in time.
    """
    group = reservation.group
    try:
        ray.get(group.ready(), timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        free = _summary(ray.available_resources())
        total = _summary(ray.cluster_resources())
        groups = _reserved_by_others(placement_group_table(), group.id.hex())
        remove_placement_group(group)
        raise ResourcesError(
            f"the cluster did not place {what} within {timeout:g} s: asked {asked}, free {free} of "
            f"{total}{groups}{who_else()}; ask for fewer, stop what holds the rest, or add nodes"
        ) from None
    except BaseException:
        remove_placement_group(group)
        raise
    return reservation


def check_possible(
    workers: int, bundle: Mapping[str, float], nodes: Sequence[Mapping[str, Any]], grows: bool
) -> None:
    """Check that workers would fit if all nodes were free.

    Args:
        workers: how many.
        bundle: resources of each.
        nodes: as `ray.nodes` returns them.
        grows: whether nodes may still join, in which case anything fits.

    Raises:
        ResourcesError: they would not.
    """
    totals = [node["Resources"] for node in nodes if node["Alive"]]
    fit = sum(
        int(min(total.get(name, 0.0) // amount for name, amount in bundle.items()))
        for total in totals
    )
    if fit >= workers or grows:
        return
    total = _summary(dict(sum((Counter(total) for total in totals), Counter[str]())))
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
        f"{workers} {never_fit}: asked {_asked(workers, bundle)}, each worker's on one node, "
        f"and all that this Ray has is {total}, {fit} workers' worth, which no node will join; ask "
        f"for fewer workers,{gpu}{share} or connect to "
        "a larger cluster first: ray.init(address=...)"
    )


def may_grow() -> bool:
    """Return whether nodes may join the cluster: not if this process has started Ray for itself."""
    return not started_here()


def _group_around() -> PlacementGroup | None:
    """Return the placement group whose bundles this process' own workers are to use, or None.

    A worker of Ray Train fills the bundle that it runs in, so what it starts goes elsewhere.
    """
    group = ray.util.get_current_placement_group()
    if group is None:
        return None
    captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    return group if captures else None


def _reserved_by_others(table: Mapping[str, Mapping[str, Any]], own: str) -> str:
    """Return what other placement groups hold, in words; "" if that is nothing."""
    held: Counter[str] = Counter()
    for group, about in table.items():
        if group != own and about["state"] == "CREATED":
            for bundle in about["bundles"].values():
                held.update(
                    {name: amount for name, amount in bundle.items() if name in ("CPU", "GPU")}
                )
    return f", placement groups hold {_summary(dict(held))}" if held else ""


def _asked(workers: int, bundle: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {value * workers:g}" for name, value in bundle.items()) + "}"


def fitting(bundle: dict[str, float], without: Collection[str] = ()) -> int:
    """Return how many workers the cluster could place now, none of them on some nodes."""
    return sum(
        int(min(free.get(name, 0.0) // amount for name, amount in bundle.items() if amount))
        for node, free in free_by_node().items()
        if node not in without
    )


def ask_for_room(
    workers: int, bundle: dict[str, float], without: Collection[str] = ()
) -> Reservation:
    """Ask for room for workers, all at once, without waiting for it.

    Args:
        workers: how many.
        bundle: resources of each.
        without: ids of nodes that are not to be used.

    Raises:
        ResourcesError: this process runs in a placement group, which cannot grow.
    """
    if _group_around() is not None:
        raise ResourcesError(
            f"{workers} more workers do not fit into the placement group that this runs in: give "
            "it more bundles with tune.with_resources(trainable, DistributedSGD.resources(...))"
        )
    return _ask(workers, bundle, without, "PACK")


def _ask(count: int, bundle: dict[str, float], without: Collection[str], how: str) -> Reservation:
    selector = {_NODE_LABEL: f"!in({','.join(sorted(without))})"}
    chosen = {"bundle_label_selector": [selector] * count} if without else {}
    group = placement_group([bundle] * count, strategy=how, **chosen)
    return Reservation(group, True, tuple(range(count)))


def nodes_of(reservation: Reservation) -> tuple[str, ...]:
    """Return the id of each worker's node; the room must have been placed."""
    placed: dict[int, str] = placement_group_table(reservation.group)["bundles_to_node_id"]
    return tuple(placed[bundle] for bundle in reservation.bundles)


class Placement:
    """The seats of a job: every reserved bundle, by a number that it keeps.

    Attributes:
        order: seats in use or free: those of worker 0, 1, ... first, then the free ones.
        retired: seats that are not used any more; they stay reserved, so that no other process of
            the job is placed there.
        serving: seats of servers alone, on nodes without workers.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.retired: list[int] = []
        self.serving: list[int] = []
        self._reservations: list[Reservation] = []
        self._seats: list[tuple[Reservation, int]] = []  # each with its number among these
        self._nodes: list[str] = []
        self._failed: Counter[str] = Counter()  # by node: seats in which processes died too often

    def add(self, reservation: Reservation, *, serves: bool = False) -> None:
        """Add the seats of a reservation to the end of `order`, or of `serving`."""
        self._reservations.append(reservation)
        seats = self.serving if serves else self.order
        seats += range(len(self._seats), len(self._seats) + len(reservation.bundles))
        self._seats += [(reservation, worker) for worker in range(len(reservation.bundles))]
        self.look()

    def look(self) -> None:
        """Ask Ray on which nodes the seats are: Ray moves bundles when a node dies."""
        self._nodes = [node for reservation in self._reservations for node in nodes_of(reservation)]

    def nodes(self, order: Sequence[int] | None = None) -> list[str]:
        """Return the node ids of seats, by default of those in `order`."""
        return [self._nodes[seat] for seat in (self.order if order is None else order)]

    @property
    def serving_nodes(self) -> set[str]:
        """Ids of the nodes of servers alone, as far as Ray has found any."""
        return {node for node in self.nodes(self.serving) if node}

    def strategy(self, seat: int) -> PlacementGroupSchedulingStrategy:
        """Return how Ray schedules a process in a seat, or beside who has it."""
        reservation, number = self._seats[seat]
        return reservation.strategy(number)

    def arranged(self, workers: int, placement: Mapping[int, int]) -> list[int]:
        """Return another order of the seats.

        Args:
            workers: how many there will be.
            placement: seats of some workers, by index; the others get the first that are free.
        """
        free = [seat for seat in self.order if seat not in placement.values()]
        return [placement[i] if i in placement else free.pop(0) for i in range(workers)] + free

    def retire(self, seat: int) -> None:
        """Take a seat out of use."""
        self.order.remove(seat)
        self.retired.append(seat)

    def leave_out(self, seats: Sequence[int]) -> str:
        """Retire seats in which processes died too often; return what follows from it, in words."""
        failing = self.failing
        for seat in seats:
            self._failed[self._nodes[seat]] += 1
            self.retire(seat)
        with_node = ", and so is the node" if self.failing != failing else ""
        return f"left out from now on{with_node}" if seats else "a successor joins when it is up"

    @property
    def failing(self) -> set[str]:
        """Ids of nodes on which two seats or more were left out, where no process is placed.

        Empty if no other node would remain.
        """
        found = {node for node, count in self._failed.items() if count >= _FAILED_SEATS}
        return (
            found
            if found and {node["NodeID"] for node in ray.nodes() if node["Alive"]} > found
            else set()
        )

    def release(self) -> None:
        """Give all reservations back, which takes at most 5 seconds.

        Ray itself waits for a minute when its control store is gone, as after a signal to a whole
        process group, and then ends this process; what was reserved there is gone too.
        """
        reservations = self._reservations
        self._reservations, self._seats, self.order, self.serving = [], [], [], []

        def give_back() -> None:
            try:
                for reservation in reservations:
                    reservation.release()
            except ray.exceptions.RayError as error:
                log.warning("Ray did not take back what workers had reserved: %s", error)

        thread = threading.Thread(target=give_back, name="steepest release", daemon=True)
        thread.start()
        thread.join(_RELEASE_SECONDS)
        if thread.is_alive():
            log.warning(
                "Ray has not taken back what %d workers had reserved within %g s: its control "
                "store (GCS) does not answer",
                sum(len(reservation.bundles) for reservation in reservations),
                _RELEASE_SECONDS,
            )


def spread(nodes: Sequence[str], servers: int, running: Sequence[str] = ()) -> list[int]:
    """Return, for each server, the seat beside which it is placed: nodes take turns.

    Args:
        nodes: of the seats.
        servers: how many there will be.
        running: nodes of the servers that run already, for which nothing is returned.

    Example:
        >>> spread(["a", "a", "b"], 3)
        [0, 2, 0]
        >>> spread(["a", "a", "b"], 3, ["b", "a"])
        [0]
    """
    firsts = [nodes.index(node) for node in dict.fromkeys(nodes)]
    beside = [firsts[server % len(firsts)] for server in range(servers)]
    for node in running[:servers]:
        beside.remove(next((at for at in beside if nodes[at] == node), beside[0]))
    return beside


def _summary(resources: Mapping[str, float]) -> str:
    shown = [
        f"{name}: {resources.get(name, 0):g}"
        for name in ("CPU", "GPU")
        if name in resources or name == "CPU"
    ]
    return "{" + ", ".join(shown) + "}"
