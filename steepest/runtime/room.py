"""Room for workers that a job asks of Ray: all of it or none, in pieces that are given back one by one."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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

from steepest.core.system import system
from steepest.errors import ResourcesError
from steepest.runtime.ray_private import (
    draining_nodes,
    free_by_node,
    started_here,
    wished_node,
)

_NODE_LABEL = "ray.io/node-id"  # Ray gives it to each node
_SERVING = {"CPU": 1.0}  # what servers reserve on a node without workers
_LOOK_SECONDS = 0.005
_APART_SECONDS = 3.0  # for Ray to place what fits; then another has taken the room


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


@dataclass(frozen=True)
class Seat:
    """Room for one worker: a bundle of a placement group."""

    group: PlacementGroup
    bundle: int  # its index there
    owned: bool = True  # the group was made for the job, and may be given back

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """How Ray schedules a process there."""
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.bundle
        )

    @property
    def node(self) -> str:
        """The id of the node on which Ray has it; "" while Ray has no room for it."""
        placed: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        return placed.get(self.bundle, "")

    def give_back(self) -> None:
        """Give the room back, if owned, with that of all seats of the same group; processes there end."""
        if self.owned:
            remove_placement_group(self.group)


class _Asked:
    """Placement groups that Ray was asked for, of so many bundles each."""

    def __init__(self, groups: Sequence[PlacementGroup] = (), bundles: int = 1) -> None:
        self._groups, self._bundles = list(groups), bundles

    @property
    def is_there(self) -> bool:
        """Whether all of it is there; to be asked again and again."""
        return all(map(is_placed, self._groups))

    @property
    def seats(self) -> list[Seat]:
        """The seats, when all are there."""
        return [Seat(group, at) for group in self._groups for at in range(self._bundles)]

    @property
    def names(self) -> set[str]:
        """The names of the placement groups that are asked for now."""
        return {group.id.hex() for group in self._groups}

    def release(self) -> None:
        """Give the room back."""
        for group in self._groups:
            remove_placement_group(group)


class Room(_Asked):
    """Room for some workers that was asked for: all of it is there, or none of it is kept for long.

    Ray places a placement group as a whole, and takes it back as a whole too. So that single seats
    can be given back, each is a group of its own; where there is room for all of them, they are asked
    for at once, each with the node on which it is to be. Where there is none, one group of all of
    them waits for it: two jobs that wait do not hold parts of each other's room. When that group is
    placed, it is given back for seats of their own.

    Raises:
        ResourcesError: this process runs in a placement group, which cannot grow.
    """

    def __init__(
        self, count: int, bundle: Mapping[str, float], without: Collection[str] = ()
    ) -> None:
        if group_around() is not None:
            raise ResourcesError(
                f"{count} more workers do not fit into the placement group that this runs in: give "
                "it more bundles with tune.with_resources(trainable, DistributedSGD.resources(...))"
            )
        super().__init__()
        self.began = system().now()
        self._count = count
        self._bundle = dict(bundle)
        self._without = without
        nodes = packed(count, bundle, without)
        if nodes is not None or count == 1:
            self._ask_apart(nodes or [""])
        else:
            self._ask_together()

    def _ask_apart(self, nodes: Collection[str]) -> None:
        """Ask for a seat on each of some nodes, or elsewhere if there is no room by then."""
        self._apart, self._since = True, system().now()
        self._groups = [
            _ask(1, self._bundle, self._without, "STRICT_PACK", node or None) for node in nodes
        ]

    def _ask_together(self) -> None:
        self._apart = False
        self._groups = [_ask(self._count, self._bundle, self._without, "PACK")]

    @property
    def is_there(self) -> bool:
        """Whether all of it is there; to be asked again and again."""
        placed = super().is_there
        if self._apart and placed:
            return True
        if placed:
            (group,) = self._groups
            nodes = placement_group_table(group)["bundles_to_node_id"].values()
            remove_placement_group(group)
            self._ask_apart(nodes)
        elif self._apart and self._count > 1 and system().now() - self._since > _APART_SECONDS:
            self.release()
            self._ask_together()
        return False


def reserve(
    workers: int, bundle: dict[str, float], timeout: float, who_else: Callable[[], str] = str
) -> list[Seat]:
    """Reserve room for workers, all at once, and wait for it.

    Inside a placement group that takes in what its processes start (a Ray Tune trial) its bundles
    are used; where it has more than there are workers, the first ones are left to the trial.

    Raises:
        ResourcesError: there was no room in time, or can never be.
    """
    current = group_around()
    if current is not None:
        specs = current.bundle_specs
        fits = [i for i, s in enumerate(specs) if all(s.get(k, 0) >= v for k, v in bundle.items())]
        if len(fits) < workers:
            raise ResourcesError(
                f"{workers} workers need {bundle} each, but the placement group that this runs in "
                f"has the bundles {specs}: give the trial room with tune.with_resources(trainable, "
                "DistributedSGD.resources(...))"
            )
        return [Seat(current, index, owned=False) for index in fits[-workers:]]
    check_possible(workers, bundle, ray.nodes(), may_grow())
    gc.collect()  # a trainer that was dropped may be part of a cycle, such as a traceback
    room = Room(workers, bundle)
    return _seats_in(room, f"{workers} workers", asked(workers, bundle), timeout, who_else)


def reserve_for_servers(
    hosts: int, working: Collection[str], timeout: float, who_else: Callable[[], str] = str
) -> list[Seat]:
    """Reserve a CPU on each of some nodes that have no workers, and wait for them.

    Raises:
        ResourcesError: there were no such nodes in time, or can never be.
    """
    what = f"serving_hosts={hosts}"
    if group_around() is not None:
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
    room = _Asked([_ask(hosts, _SERVING, working, "STRICT_SPREAD")], hosts)
    return _seats_in(room, what, "1 CPU on each, where no worker is", timeout, who_else)


def _seats_in(
    room: _Asked, what: str, asked_for: str, timeout: float, who_else: Callable[[], str]
) -> list[Seat]:
    """Return the seats of a room when it is there; give it back when anything raises, as after `timeout`."""
    deadline = system().now() + timeout
    try:
        while not room.is_there:
            if system().now() > deadline:
                free = summary(ray.available_resources())
                total = summary(ray.cluster_resources())
                others = _reserved_by_others(placement_group_table(), room.names)
                raise ResourcesError(
                    f"the cluster did not place {what} within {timeout:g} s: asked {asked_for}, free "
                    f"{free} of {total}{others}{who_else()}; ask for fewer, stop what holds the rest, "
                    "or add nodes"
                )
            system().sleep(_LOOK_SECONDS)
    except BaseException:
        room.release()
        raise
    return room.seats


def group_around() -> PlacementGroup | None:
    """Return the placement group whose bundles this process' own workers are to use, or None.

    A worker of Ray Train fills the bundle that it runs in, so what it starts goes elsewhere.
    """
    group = ray.util.get_current_placement_group()
    if group is None:
        return None
    captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    return group if captures else None


def is_placed(group: PlacementGroup) -> bool:
    """Return whether Ray has placed all bundles of a group."""
    return bool(placement_group_table(group).get("state") == "CREATED")


def _ask(
    count: int,
    bundle: Mapping[str, float],
    without: Collection[str],
    how: str,
    node: str | None = None,
) -> PlacementGroup:
    """Ask for a placement group of equal bundles, without waiting for it, if possible on `node`."""
    selector = {_NODE_LABEL: f"!in({','.join(sorted(without))})"}
    chosen: dict[str, Any] = {"bundle_label_selector": [selector] * count} if without else {}
    chosen |= {} if node is None else wished_node(node)
    return placement_group([dict(bundle)] * count, strategy=how, **chosen)


def _reserved_by_others(table: Mapping[str, Mapping[str, Any]], own: Collection[str]) -> str:
    """Return what other placement groups hold, in words; "" if that is nothing."""
    held: Counter[str] = Counter()
    for group, about in table.items():
        if group not in own and about["state"] == "CREATED":
            for bundle in about["bundles"].values():
                held.update(
                    {name: amount for name, amount in bundle.items() if name in ("CPU", "GPU")}
                )
    return f", placement groups hold {summary(dict(held))}" if held else ""
