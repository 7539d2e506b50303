"""Actors of a simulated Ray: started where there is room, called, killed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from steepest.runtime.job_runtime import ProcessDiedError
from tests.simulation.simulated_objects import ByReference, Ref, Store, task_error
from tests.simulation.simulated_placement import Places, Slot
from tests.simulation.simulated_processes import SimulatedProcess


class Handle(ByReference):
    """A handle of an actor."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor


class Actor:
    """An actor.

    Attributes:
        handle: by which it is called.
        process: in which it runs, once it has been placed.
        dead: why calls fail; None while Ray takes it for alive.
    """

    def __init__(
        self,
        places: Places,
        store: Store,
        body: type,
        at: tuple[Any, int],
        needs: Mapping[str, float],
        arguments: bytes,
    ) -> None:
        self._places, self._store, self._world = places, store, places.world
        self.handle = Handle(self)
        self._class, self._needs, self._arguments = body, needs, arguments
        self.group, self.index = at
        self.process: SimulatedProcess | None = None
        self.instance: Any = None
        self.dead: BaseException | None = None
        self._waiting: deque[tuple[str, Any, Ref]] = deque()  # calls before it is up
        self._pending: dict[Ref, None] = {}  # calls that have not ended
        self._running = 0
        self.slot: Slot | None = None
        self.killed = False

    @property
    def cpus(self) -> float:
        """The CPUs that it takes of its bundle."""
        return self._needs["cpus"]

    @property
    def is_dead(self) -> bool:
        """Whether Ray knows that it is dead."""
        return self.dead is not None

    # -- life ----------------------------------------------------------------------------------

    def place(self, slot: Slot) -> None:
        """Start the process where there is room."""
        world = self._world
        self.slot = slot
        slot.used += self.cpus
        assert slot.node is not None
        self.process = world.start_process(slot.node, self._died)
        self.process.name = str(self._store.load(self._arguments)[0][0])
        world.scheduler.at(world.scheduler.now + world.dice.uniform(*world.starts), self._begin)

    def _begin(self) -> None:
        process = self.process
        if process is not None and process.alive:
            process.spawn(self._construct, "start")

    def _construct(self) -> None:
        arguments, named = self._store.load(self._arguments)
        try:
            self.instance = self._class(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - it becomes the actor's death
            assert self.process is not None
            self._world.kill(self.process, f"the constructor raised {error!r}")
            return
        while self._waiting:
            self._start(*self._waiting.popleft())

    def kill(self) -> None:
        """Do what `ray.kill` does: soon, the process ends."""
        self.killed = True
        world = self._world
        if self.process is None:
            self._places.unplaced.pop(self, None)
            self.fail("The actor is dead because it was killed by `ray.kill`.")
        else:
            world.later(0.05, partial(self._kill, self.process))

    def _kill(self, process: SimulatedProcess) -> None:
        if process.alive and self._world.reaches(None, process):
            self._world.kill(process, "The actor is dead because it was killed by `ray.kill`.")

    def _died(self, why: str, silently: bool) -> None:
        world = self._world
        notice = world.node_notice if silently else world.notice
        world.later(notice, partial(self.fail, why))

    def fail(self, why: str) -> None:
        """Let Ray know that it is dead."""
        if self.dead is not None:
            return
        self.dead = ProcessDiedError(why)
        if self.slot is not None:
            self.slot.used -= self.cpus
        for ref in list(self._pending):
            ref.fail(self.dead)
        self._pending.clear()
        self._waiting.clear()
        self._places.place_actors()

    # -- calls ---------------------------------------------------------------------------------

    def call(self, name: str, arguments: tuple[Any, ...]) -> Ref:
        """Send a call; the dead, as they unwind, send none."""
        world = self._world
        world.scheduler.check()
        world.event()
        ref = Ref(self._store, f"{name} of {self.process or 'an actor that is not up'}")
        self._pending[ref] = None
        top = [isinstance(each, Ref) for each in arguments]
        sent = self._store.dump((arguments, {}))
        needed = [each for each, is_ref in zip(arguments, top, strict=True) if is_ref]
        if self.dead is not None:
            world.later(0.01, partial(self._refuse, ref))
        else:
            world.later(world.call_seconds, partial(self._await, name, sent, needed, ref))
        return ref

    def _refuse(self, ref: Ref) -> None:
        assert self.dead is not None
        self._pending.pop(ref, None)
        ref.fail(self.dead)

    def _await(self, name: str, sent: bytes, needed: list[Ref], ref: Ref) -> None:
        if self.dead is not None:
            self._refuse(ref)
            return
        for other in needed:
            if not other.ended:
                other.then.append(partial(self._await, name, sent, needed, ref))
                return
        if self.process is not None and not self._world.reaches(None, self.process):
            return  # until Ray notices
        if self.instance is None:
            self._waiting.append((name, sent, ref))
        else:
            self._start(name, sent, ref)

    def _start(self, name: str, sent: bytes, ref: Ref) -> None:
        process = self.process
        if process is not None and process.alive:
            process.spawn(partial(self._run, name, sent, ref), name)

    def _run(self, name: str, sent: bytes, ref: Ref) -> None:
        world, process = self._world, self.process
        assert process is not None
        most = self._needs["calls"]
        while self._running >= most:
            world.scheduler.block(process.threads_free, None, "a free thread of the actor")
        self._running += 1
        try:
            arguments, named = self._store.load(sent)
            values = [each.value() if isinstance(each, Ref) else each for each in arguments]
            result = self._store.dump(getattr(self.instance, name)(*values, **named))
        except Exception as error:  # noqa: BLE001 - the caller's
            end = partial(ref.fail, task_error(error))
        else:
            end = partial(ref.set, result)
        finally:
            self._running -= 1
            world.scheduler.wake_one(process.threads_free)
        world.event()
        if process.alive:
            world.later(world.call_seconds, partial(self._finish, ref, end))

    def _finish(self, ref: Ref, end: Callable[[], None]) -> None:
        process = self.process
        assert process is not None
        arrives = process.alive or self._world.dice.random() < 0.5  # else lost with the process
        if arrives and self._world.reaches(None, process):
            self._pending.pop(ref, None)
            end()
