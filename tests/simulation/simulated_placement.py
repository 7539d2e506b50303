"""Room on a simulated Ray's nodes: placement groups, and the actors that wait for their places."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from tests.simulation.simulated_objects import Store
from tests.simulation.simulated_processes import Node, World


class Placed(Protocol):
    """An actor, as far as its place is concerned."""

    slot: Slot | None
    group: Group
    index: int

    @property
    def cpus(self) -> float:
        """The CPUs that it takes of its bundle."""

    @property
    def is_dead(self) -> bool:
        """Whether Ray knows it to be dead."""

    def place(self, slot: Slot) -> None:
        """Start in a bundle."""

    def kill(self) -> None:
        """End, soon."""

    def fail(self, why: str) -> None:
        """Be dead for Ray."""


class Slot:
    """A bundle of a placement group.

    Attributes:
        node: on which it is; None while there is no room for it.
        size: its CPUs.
        used: those that actors have.
    """

    def __init__(self, size: float) -> None:
        self.size, self.used = size, 0.0
        self.node: Node | None = None


class Group:
    """A placement group."""

    def __init__(
        self, slots: list[Slot], avoid: frozenset[str], apart: bool, wish: str | None
    ) -> None:
        self.slots, self.avoid, self.apart, self.wish = slots, avoid, apart, wish
        self.bundle_specs = [{"CPU": slot.size} for slot in slots]
        self.is_placed = False
        self.removed = False

    @property
    def id(self) -> Group:
        """The group itself, by which `hex` returns a name."""
        return self

    def hex(self) -> str:
        """Return the group's name."""
        return f"{id(self):x}"


class Places:
    """The nodes' CPUs, placement groups and actors of a simulation.

    Args:
        world: the nodes.
        store: of references.

    Attributes:
        actors: all that were ever started.
        unplaced: actors that wait for room.
    """

    def __init__(self, world: World, store: Store) -> None:
        self.world = world
        self.actors: list[Any] = []
        self.unplaced: dict[Placed, None] = {}
        self._store = store
        self.groups: list[Group] = []
        world.on_node_loss = self._node_lost

    def start(self, actor: Placed) -> None:
        """Start an actor as soon as there is room."""
        self.actors.append(actor)
        self.unplaced[actor] = None
        self.place_actors()

    def free(self) -> float:
        """Return the CPUs that no placement group holds."""
        return sum(free["CPU"] for free in self.free_by_node().values())

    def free_by_node(self) -> dict[str, dict[str, float]]:
        """Return what `free` counts, by the nodes' ids."""
        living = [node for node in self.world.nodes if node.known_alive]
        return {node.id: {"CPU": float(self._free(node)), **self.world.further} for node in living}

    def ask(
        self,
        bundles: Sequence[Mapping[str, float]],
        apart: bool,
        without: Collection[str],
        wish: str | None,
    ) -> Group:
        """Reserve room for bundles, together, as soon as there is any."""
        slots = [Slot(bundle["CPU"]) for bundle in bundles]
        group = Group(slots, frozenset(without), apart, wish)
        self.groups.append(group)
        self.world.later(0.05, self._place_groups)
        return group

    def give_back(self, group: Group) -> None:
        """Give a group's room back; what runs there ends."""
        group.removed = True
        if group in self.groups:
            self.groups.remove(group)
        for actor in self.actors:
            if actor.slot in group.slots and not actor.is_dead:
                actor.kill()
        self.world.later(0.05, self._place_groups)

    def _free(self, node: Node) -> float:
        return node.cpus - sum(
            slot.size for group in self.groups for slot in group.slots if slot.node is node
        )

    def _place_groups(self) -> None:
        for group in self.groups:
            missing = [slot for slot in group.slots if slot.node is None]
            allowed = [n for n in self.world.nodes if n.known_alive and n.id not in group.avoid]
            if group.apart:
                taken = [slot.node for slot in group.slots]
                allowed = [node for node in allowed if node not in taken]
            found: list[Node] = []
            free = {node: self._free(node) for node in allowed}
            for slot in missing:
                best = max(allowed, key=lambda node: free[node], default=None)
                # packed: the first with room
                for node in sorted(allowed, key=lambda node: node.id != group.wish):
                    if free[node] >= slot.size:
                        best = node
                        break
                if best is None or free[best] < slot.size:
                    break
                free[best] = 0 if group.apart else free[best] - slot.size
                found.append(best)
            if len(found) == len(missing):
                for slot, node in zip(missing, found, strict=True):
                    slot.node, slot.used = node, 0.0
                group.is_placed = True
        self.place_actors()

    def place_actors(self) -> None:
        """Start actors whose bundles have room."""
        for actor in list(self.unplaced):
            if actor.group.removed:
                del self.unplaced[actor]
                actor.fail("The actor is dead because its placement group was removed.")
                continue
            slot = actor.group.slots[actor.index]
            has_room = slot.node is not None and slot.size - slot.used >= actor.cpus
            if has_room and slot.node is not None and slot.node.known_alive:
                del self.unplaced[actor]
                actor.place(slot)

    def _node_lost(self, node: Node) -> None:
        """Have Ray notice that a node is gone: its bundles are placed elsewhere, if there is room."""
        for group in self.groups:
            for slot in group.slots:
                if slot.node is node:
                    slot.node = None
        self._place_groups()
