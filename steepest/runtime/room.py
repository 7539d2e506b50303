"""Room for workers that a job asks of its runtime: all of it or none, in pieces that are given back one by one."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from steepest.core.system import system
from steepest.errors import ResourcesError
from steepest.runtime.job_runtime import Group, runtime

_SERVING = {"CPU": 1.0}  # what servers reserve on a node without workers
_LOOK_SECONDS = 0.005
_APART_SECONDS = 3.0  # for Ray to place what fits; then another has taken the room


def worker_bundle(devices: int, gpu: bool, cpus: int) -> dict[str, float]:
    """Return the resources that one worker reserves, by Ray's names."""
    bundle = {"CPU": float(cpus)}
    if gpu:
        bundle["GPU"] = float(devices)
    return bundle


def require_possible(workers: int, bundle: Mapping[str, float]) -> None:
    """Raise ResourcesError unless workers would fit if all nodes were free, or nodes may join."""
    here = runtime()
    if not here.shares:
        counted, number = bundle, workers
    else:  # one has to fit
        counted, number = {name: each for name, each in bundle.items() if name != "CPU"}, 1
    if counted:
        check_possible(number, counted, here.nodes().values(), here.may_grow, here.in_words)


def check_possible(
    workers: int,
    bundle: Mapping[str, float],
    nodes: Iterable[Mapping[str, float]],
    grows: bool,
    here: str = "this Ray",
) -> None:
    """Raise ResourcesError unless workers fit into so many nodes, or more may join; `here`: what has them."""
    totals = list(nodes)
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
        f"and all that {here} has is {total}, {fit} workers' worth, which no node will join; ask "
        f"for fewer workers,{gpu}{share} or connect to "
        "a larger cluster first: ray.init(address=...)"
    )


def asked(workers: int, bundle: Mapping[str, float]) -> str:
    """Return the resources that so many workers reserve, in words."""
    return "{" + ", ".join(f"{name}: {value * workers:g}" for name, value in bundle.items()) + "}"


def _fits(bundle: Mapping[str, float], without: Collection[str]) -> dict[str, int]:
    """Return how many bundles fit now on each node that is neither left out nor about to go."""
    left_out = {*without, *runtime().leaving_nodes()}
    return {
        node: int(min(free.get(name, 0.0) // amount for name, amount in bundle.items() if amount))
        for node, free in runtime().free_by_node().items()
        if node not in left_out
    }


def fitting(bundle: Mapping[str, float], without: Collection[str] = ()) -> int:
    """Return how many workers the cluster could place now, none of them on some nodes."""
    return sum(_fits(bundle, without).values())


def packed(
    workers: int, bundle: Mapping[str, float], without: Collection[str] = ()
) -> list[str] | None:
    """Return a node for each worker, on few nodes; None if they do not all fit now."""
    fits, nodes = _fits(bundle, without), list[str]()
    for node in sorted(fits, key=fits.__getitem__, reverse=True):
        nodes += [node] * min(fits[node], workers - len(nodes))
    return nodes if len(nodes) == workers else None


def summary(resources: Mapping[str, float]) -> str:
    """Return the CPUs and GPUs among resources, in words."""
    shown = [
        f"{name}: {resources.get(name, 0):g}"
        for name in ("CPU", "GPU")
        if name in resources or name == "CPU"
    ]
    return "{" + ", ".join(shown) + "}"


@dataclass(frozen=True)
class Seat:
    """Room for one worker: a bundle of a placement group."""

    group: Group
    bundle: int  # its index there
    owned: bool = True  # the group was made for the job, and may be given back

    @property
    def node(self) -> str:
        """The id of the node where Ray has placed it; "" while Ray has no room for it."""
        return runtime().bundles(self.group).get(self.bundle, "")

    def give_back(self) -> None:
        """Give back its group, if owned, with all seats in it; processes there end."""
        if self.owned:
            runtime().give_back(self.group)


class _AskedRoom:
    """Placement groups that Ray was asked for, each with its number of bundles."""

    def __init__(self, groups: Sequence[Group] = (), bundles: int = 1) -> None:
        self._groups, self._bundles = list(groups), bundles

    @property
    def is_there(self) -> bool:
        """Whether all of it is there; to be asked again and again."""
        return all(map(runtime().is_placed, self._groups))

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
            runtime().give_back(group)


class Room(_AskedRoom):
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
        if runtime().group_around() is not None:
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
        """Ask for a seat on each of some nodes, or elsewhere if a node has no room any more."""
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
            nodes = runtime().bundles(group).values()
            runtime().give_back(group)
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
    current = runtime().group_around()
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
    require_possible(workers, bundle)
    if runtime().owns_process:
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
    if runtime().group_around() is not None:
        raise ResourcesError(
            f"{what} inside a placement group: it has no nodes without workers to give; leave "
            "serving_hosts out"
        )
    others = [
        node
        for node, has in runtime().nodes().items()
        if node not in working and has.get("CPU", 0) >= 1
    ]
    if len(others) < hosts and not runtime().may_grow:
        raise ResourcesError(
            f"{what}: {runtime().in_words} has {len(others)} nodes without workers, and no node will join it; "
            "connect to a larger cluster first, ray.init(address=...), or leave serving_hosts out"
        )
    room = _AskedRoom([_ask(hosts, _SERVING, working, "STRICT_SPREAD")], hosts)
    return _seats_in(room, what, "1 CPU on each, where no worker is", timeout, who_else)


def _seats_in(
    room: _AskedRoom, what: str, asked_for: str, timeout: float, who_else: Callable[[], str]
) -> list[Seat]:
    """Return the seats of a room when it is there; give it back on any error, such as a timeout."""
    deadline = system().now() + timeout
    try:
        while not room.is_there:
            if system().now() > deadline:
                free = summary(runtime().free())
                total = summary(runtime().total())
                others = _reserved_by_others(runtime().reserved(room.names))
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


def _ask(
    count: int,
    bundle: Mapping[str, float],
    without: Collection[str],
    how: str,
    node: str | None = None,
) -> Group:
    """Ask for a group of equal bundles, without waiting for it, if possible on `node`."""
    return runtime().ask([dict(bundle)] * count, how, without, node)


def _reserved_by_others(bundles: Iterable[Mapping[str, float]]) -> str:
    """Return the resources that other groups hold, in words; "" for none."""
    held: Counter[str] = Counter()
    for bundle in bundles:
        held.update({name: amount for name, amount in bundle.items() if name in ("CPU", "GPU")})
    return f", placement groups hold {summary(dict(held))}" if held else ""
