"""Keeps a job's processes as wanted: observes, takes stock, decides and applies, until nothing is left to do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn

from steepest.core.engine.client import Client
from steepest.core.messages.driver import AuditDifference, WorkerLost
from steepest.core.messages.message import Peer
from steepest.core.strategies.strategy import Strategy
from steepest.core.system import system
from steepest.errors import (
    DeadlineError,
    ModelError,
    ModelRaisedError,
    PeerLostError,
    ResourcesError,
    ShutdownError,
    StepError,
)
from steepest.runtime.cluster import Cluster
from steepest.runtime.context import change_log
from steepest.runtime.diagnostics import update_error
from steepest.runtime.owner import Moment, Owner, owned
from steepest.runtime.recovery.applying import Applying
from steepest.runtime.recovery.change import Change
from steepest.runtime.recovery.decision import Impossible, Source, Transition, World, decide
from steepest.runtime.recovery.growth import Wanted
from steepest.runtime.recovery.joining import Joining
from steepest.runtime.recovery.observation import NOTICE_SECONDS, Observation
from steepest.runtime.recovery.stocktaking import find_dead, take_stock
from steepest.runtime.recovery.telling import tell
from steepest.runtime.recovery.wishes import Wishes
from steepest.runtime.state.snapshots import Snapshots
from steepest.runtime.state.transfer import StateTransfer

log = logging.getLogger(__name__)
_SHORT_SECONDS = 0.02  # between two looks while processes start
_LONG_SECONDS = 1.0
_UNEXPLAINED = 3  # failures of one change for which no death of a member is found

#: Whether a change can be made when the workers have stopped, or cannot wait for that.
Due = Literal["soon", "now"]
#: The client and the calls that watch processes: they differ after each change.
Processes = tuple[Client, set[Any]]


class Supervisor:
    """Makes all changes of a job's processes: after deaths, and at the user's request.

    Everything here runs on the owner's thread. It looks at the processes between requests, and
    while it waits in one; it starts what is missing, has successors join, and makes changes
    between steps.
    """

    def __init__(self, cluster: Cluster, transfer: StateTransfer, bounds: tuple[int, int]) -> None:
        least, most = bounds
        exact = least == most
        wanted = Wanted(cluster.job.config, 1 if exact else least, most, exact)
        self.owner: Owner = cluster.owner
        self.replaced = 0  # dead processes that have a successor, or were left out
        # the number of steps whose results a user has; those of them that a death undoes are taken again
        self.promised = 0
        self.changes = 0
        # whether a user's call receives the results of the steps that are being taken
        self.in_call = False
        # takes the undone steps again; set by `Training`
        self.make_up: Callable[[], None] = lambda: None
        self.snapshots = Snapshots(cluster, transfer)
        self.observation = Observation(cluster, self.snapshots, wanted)
        self._wishes = Wishes(cluster, self.observation)
        self._cluster = cluster
        self._transfer = transfer
        self._joining = Joining(cluster, self.observation)
        self._applying = Applying(cluster, transfer, self.observation)
        self._looked = 0.0
        self._due: Due | None = None  # as found by the last look
        self._trained = 0.0  # seconds
        self._error: Exception | None = None  # of a look between requests, for whoever calls next
        # of a user's optimizer that made an update in part, which was undone, for whoever looks next
        self._mistake: ModelRaisedError | None = None
        self._doing: Literal["", "looking", "joining", "changing"] = ""  # to the job's processes
        self._change: Change | None = None  # that has begun, and is not applied
        transfer.give_roles_anew = self.await_whole
        cluster.meanwhile = self._look_meanwhile
        cluster.ending.append(self._end)

    def start(self) -> None:
        """Let the owner's thread look after the job from now on."""
        self.owner.look = self._look_when_idle
        self.owner.start()

    def _look_when_idle(self) -> float:
        """Make the changes that are due while nothing is asked for; return seconds until the next look."""
        if self._error is None:  # the user sees the error first
            try:
                self._make_whole()
            except ShutdownError:
                raise
            except Exception as error:  # noqa: BLE001 - raised by the next call of a user
                self._error = error
        return self.pause

    @property
    def wanted(self) -> Strategy:
        """The strategy that is wanted; the job may have fewer servers for a while."""
        return self.observation.wanted.config

    @owned(Moment.ANY)
    def want(self, config: Strategy, workers: int | None = None) -> None:
        """Ask for another strategy, or number of servers or workers, see `Wishes.want`."""
        self._looked = 0.0
        self._wishes.want(config, workers)

    def _look_meanwhile(self) -> None:
        """Check whether a process has become silent, while calls are waited for."""
        if self._cluster.client.torn is not None and not self._doing:
            raise PeerLostError("servers send no weights: the optimizer raised")
        changing = self.is_changing
        silent, others = self.observation.ask_for_signs(changing=changing)
        silent += others if self._doing else []
        if silent:
            raise PeerLostError(f"{', '.join(silent)} gave no sign of life")
        if not self._doing and self._is_time() and not self._cluster.deaths.causes():
            self._doing = "looking"
            try:
                self._start_missing()
            finally:
                self._doing = ""

    # -- looking ---------------------------------------------------------------------------------

    def look(self, trained: float = 0.0) -> Due | None:
        """Return the change that is due, see `_look`; to be called often."""
        self._trained = trained
        self.snapshots.remember()
        self.raise_kept()
        return self._look(patient=False)

    def _look(self, *, patient: bool) -> Due | None:
        """Start missing processes, and let those join that can; return the change that is still due."""
        if self._cluster.client.torn is not None or self._change is not None:
            return "now"
        if self._is_time():
            self._due = self._find_due(patient=patient)
        return self._due

    def _find_due(self, *, patient: bool) -> Due | None:
        observation = self.observation
        observation.fill_reserve(self._trained)
        observation.ask_for_signs()
        dead = observation.dead()
        observation.tell_job(dead)
        world = self._look_at(dead, patient=patient)
        if world.stuck:
            return "now"
        decision = self._decided(world, dead)
        if decision is None:
            return None
        if isinstance(decision, Impossible):
            self._raise_impossible(decision)
        if not dead:
            # undone steps are taken again first, with the processes as they were; a wish comes next
            return "soon" if world.leaving or not self.is_behind else None
        self._doing = "joining"
        try:
            with self.owner.to_its_end():
                joined = self._joining.join(decision, dead)
        finally:
            self._doing = ""
        if joined is None:
            return "now"
        self.replaced += joined
        self._looked = 0.0
        return None

    @property
    def pause(self) -> float:
        """Seconds between two looks: few while processes start."""
        observation = self.observation
        if list(observation.starting) or observation.growth.asks_for_room:
            return _SHORT_SECONDS
        return min(_LONG_SECONDS, self._cluster.run_config.failure.heartbeat / 6)

    def _is_time(self) -> bool:
        if system().now() - self._looked < self.pause:
            return False
        self._looked = system().now()
        return True

    def _look_at(self, dead: Mapping[Peer, str], *, patient: bool) -> World:
        """Start missing processes, and return what is then known of all."""
        observation = self.observation
        if dead:
            worn_out = observation.worn_out(dead)
            successors = {peer: why for peer, why in dead.items() if peer not in worn_out}
            observation.start_successors(successors, cold=all(map(observation.is_plain, dead)))
            observation.tell_who_is_awaited()
        else:
            self._start_missing()
        return observation.world(dead, patient=patient)

    def _start_missing(self) -> None:
        """Start further processes; those that cannot be had are no longer wanted."""
        try:
            self.observation.start_missing()
        except (ResourcesError, ModelError, StepError) as error:
            if isinstance(error, (PeerLostError, DeadlineError)):
                raise
            log.warning("%s", error)
            self._wishes.refuse(error)

    def _decided(self, world: World, dead: Mapping[Peer, str]) -> Transition | Impossible | None:
        """Return the decision; if the job cannot continue, with all that the user should know."""
        decided = decide(world, self.observation.target(world))
        if not isinstance(decided, Impossible) or decided.peer is None:
            return decided
        allowed = self._cluster.run_config.failure.max_failures
        often = f": FailureConfig(max_failures={allowed}) allows no more"
        slow = f"; {self.observation.starting.patience:g} s were waited: add nodes"
        why = decided.why + (often if decided.peer in world.worn_out else "")
        why += slow if decided.peer in world.late - world.worn_out else ""
        return replace(decided, why=f"{dead[decided.peer]} ({why})")

    def _raise_impossible(self, impossible: Impossible) -> NoReturn:
        """Raise PeerLostError, because the job cannot continue."""
        if impossible.peer is None:
            raise PeerLostError(impossible.why)
        self._cluster.deaths.raise_lost(impossible.peer, impossible.why)

    def hear(self, lost: WorkerLost) -> None:
        """Take the coordinator's report that a worker is dead."""
        self.observation.hear(lost)
        self._looked = 0.0

    def hear_difference(self, difference: AuditDifference) -> None:
        """Take the coordinator's report that gradients of an audited step differ."""
        self.observation.hear_difference(difference)
        self._looked = 0.0

    def suspects(self, peer: Peer, why: str, client: Client) -> bool:
        """Note that a role's channel has closed; return False if its process cannot be replaced.

        Nothing is noted if the job was reassembled meanwhile: other processes have the roles.
        """
        if self._cluster.client is not client:
            return True
        process = self._cluster.process_of(peer)
        if not self.observation.can_replace(process):
            return False
        self._begin_change().suspect = process, why
        return True

    # -- changing --------------------------------------------------------------------------------

    def _begin_change(self) -> Change:
        """Return the change in progress; begin one if there is none."""
        if self._change is None:
            self._change = Change.of(self._cluster, self.observation.leaving.in_words)
        return self._change

    def change(self, *, patient: bool = False) -> None:
        """Reassemble the job as decided; once more whenever a process dies meanwhile."""
        cluster = self._cluster
        change = self._begin_change()
        cluster.stand(change.step)
        self._doing = "changing"
        try:
            with self.owner.amid_change():
                applied = self._apply(change, patient=patient)
        except BaseException as error:
            passed = system().now() - change.began
            change_log.info(
                "change at step %d | not made in %.2f s: %s", change.step, passed, error
            )
            self.observation.starting.give_up(self.observation.starting.instead.values())
            if not change.has_begun:
                self._change = None
                cluster.stand(None)
            raise
        finally:
            self._doing, self._looked, self._due = "", 0.0, None
        self._change = None
        cluster.stand(None)
        if applied:
            self._conclude(change)

    def _conclude(self, change: Change) -> None:
        """Note the consequences of a change that was applied, and log it."""
        cluster, torn = self._cluster, change.client.torn
        self.changes += 1
        if torn is not None:
            self._mistake = update_error(torn, change.places, cluster.step)
            self.promised = min(self.promised, cluster.step)  # those undone are not made again
        cluster.await_successors(())
        self._joining = Joining(cluster, self.observation)
        self._wishes.end_if_granted()
        alike = change.job.versions_per_step == cluster.job.versions_per_step
        now = cluster.client.position.version
        now = now if alike else change.job.version_of(cluster.step)
        self.replaced += sum(applied.replaced for applied in change.applied)
        tell(cluster, change, self.changes, max(change.version - now, 0))
        if any(s.cause for applied in change.applied for s in applied.joined.values()):
            self.observation.fill_reserve()

    def _apply(self, change: Change, *, patient: bool) -> bool:
        """Find the dead, take stock, decide and apply; return whether anything had to be done."""
        cluster, observation, unexplained = self._cluster, self.observation, 0
        dead = self._see(change)
        while True:
            in_vain = observation.in_vain(dead)
            change.said |= {cluster.members[p].watch: self._said(change, p, dead[p]) for p in dead}
            cluster.await_successors(dead)
            try:
                outcome = self._try(change, dead, patient=patient)
            except (PeerLostError, DeadlineError) as error:
                observation.starting.joined(cluster.actors.values())
                change.suspect = self._suspect_of(change.said, error)
                dead = self._see(change)
                known = {cluster.members[peer].watch for peer in dead} <= change.said.keys()
                if known and observation.in_vain(dead) == in_vain:
                    unexplained += 1  # perhaps of a process that had no role yet
                    if isinstance(error, DeadlineError) or unexplained > _UNEXPLAINED:
                        raise
                continue
            if isinstance(outcome, Impossible):
                self._raise_impossible(outcome)
            return outcome

    def _see(self, change: Change) -> dict[Peer, str]:
        """Return the dead, and why they died, see `find_dead`."""
        suspect, change.suspect = change.suspect, None
        with change.part("seeing"):
            return find_dead(self._cluster, suspect)

    def _try(self, change: Change, dead: Mapping[Peer, str], *, patient: bool) -> bool | Impossible:
        """Take stock unless that was done, decide, apply; return whether anything had to be done, or `Impossible`."""
        cluster, observation = self._cluster, self.observation
        change.state = self._transfer.pending or change.state
        with change.part("starting"):
            world = self._look_at(dead, patient=patient)
        if cluster.client.torn is not None or change.has_begun:  # all stand still
            world = replace(world, stuck=True)
        elif not isinstance(decided := self._decided(world, dead), Transition):
            return decided or False
        if change.state is None:
            # after deaths the job goes on as it was: another strategy, if one is wanted, comes next
            as_it_was = dead or world.leaving
            config = cluster.job.config if as_it_was else observation.wanted.config
            with change.part("taking stock"), observation.starting.unwatched():
                if not (as_it_was or change.halted):
                    # steps of before are never made again in the form that comes now
                    self.snapshots.ensure_present(cluster.meanwhile)
                change.state = take_stock(
                    cluster, self._transfer, self.snapshots, change, dead, config
                )
        whole = change.state.is_held_by(cluster.living()) and not observation.lacks_buffers(dead)
        world = replace(world, whole=whole)
        transition = self._decided(world, dead) or _as_it_is(world)
        if isinstance(transition, Impossible):
            return transition
        copy = self.snapshots.taken
        if transition.source == "snapshot" and not change.state.copied and copy is not None:
            change.state = copy
        cluster.signs.forget()
        with change.part("applying"):
            self._applying.apply(change, transition, world, dead)
        return True

    def _said(self, change: Change, peer: Peer, why: str) -> str:
        """Return what is logged of a dead process, by the name that it had when the change began."""
        if peer in self.observation.worn_out([peer]) and not self.observation.is_distrusted(peer):
            allowed = self._cluster.run_config.failure.max_failures
            why += f"; it had {allowed} successors, FailureConfig(max_failures={allowed}) gives it no more"
        member = self._cluster.members[peer]
        return f"{change.names.get(member.watch, peer)} on {member.place.host} ({why})"

    def _suspect_of(self, said: Collection[Any], error: Exception) -> tuple[Peer, str] | None:
        """Return the process whose closed channel ended a change, and why; None if none did."""
        cluster = self._cluster
        lost = cluster.client.lost_peer
        if lost is not None and self._transfer.pending is None:
            process = cluster.process_of(lost)
            if cluster.watches.get(process) not in said:
                return process, str(error)
        others = [watch for watch in cluster.watches.values() if watch not in said]
        if others and isinstance(error, PeerLostError):
            self.owner.attend(NOTICE_SECONDS, calls=others, number=1)
        return None

    # -- between steps ---------------------------------------------------------------------------

    @owned(Moment.FREE)
    def await_whole(self, *, asked: bool = False) -> None:
        """Return when no process is dead, and what the user has asked for is there, or was refused.

        Steps that a death has undone are repeated first.
        """
        changes = self.changes
        with self.owner.for_caller():
            while not self._is_settled(asked=asked):
                starts = [call for start in self.observation.starting for call in start.building]
                self.owner.attend(_SHORT_SECONDS, calls=starts or None)
        if self.changes != changes:
            self.snapshots.ensure()  # there may be none of a strategy that has not had any
        self.raise_kept()

    def raise_kept(self) -> None:
        """Raise, once, that an optimizer raised and the job was set back, or what an idle look raised."""
        mistake, self._mistake = self._mistake, None
        if mistake is not None:
            raise mistake
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _is_settled(self, *, asked: bool) -> bool:
        """Make due changes; return whether nothing is left to wait for."""
        self._error, self._looked = None, 0.0  # what has failed fails again
        self._make_whole()
        return not self.observation.dead() and self._wishes.are_granted(asked=asked)

    def _make_whole(self) -> None:
        """Make due changes, and repeat the steps that are undone."""
        while True:
            if self._look(patient=True) is not None:
                self.change(patient=True)
            elif self.is_behind and self._mistake is None and not self.observation.dead():
                with self.owner.to_its_end():
                    self.make_up()
            else:
                return
            self._looked = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether steps that calls have returned are undone."""
        return self._cluster.step < self.promised

    @property
    def is_amid_change(self) -> bool:
        """Whether a change is in progress."""
        return self._change is not None and self._change.has_begun

    def is_readable(self) -> bool:
        """Return whether the job's state can be read, or never can be, as `look` will report."""
        still = self._change is None and (self.in_call or not self.is_behind)
        return self._error is not None or still

    @property
    def is_changing(self) -> bool:
        """Whether the job is being reassembled."""
        return self._doing == "changing"

    def processes(self) -> Processes:
        """Return what differs after each change of the job's processes."""
        return self._cluster.client, {*self._cluster.watches.values()}

    @owned(Moment.ANY)
    def has_died_since(self, before: Processes) -> bool:
        """Return whether a process is dead, or a channel has closed; the next change handles it."""
        torn = before[0].torn is not None
        known = torn or self._change is not None
        self._looked = 0.0
        if known or self.processes() != before:
            return True
        if (peer := before[0].lost_peer) is not None:
            return self.suspects(peer, "its channel closed", before[0])
        self.owner.attend(NOTICE_SECONDS, calls=[*self._cluster.watches.values()], number=1)
        return bool(self.observation.dead()) or self.processes() != before

    @property
    def lacks_copies(self) -> bool:
        """Whether the job goes on with fewer servers than are wanted."""
        job, observation = self._cluster.job, self.observation
        servers = sum(peer.role == "server" for peer in self._cluster.members)
        return servers < self._cluster.serving(observation.wanted.config, job.num_workers)

    def _end(self) -> None:
        """End the processes that are no part of the job, for its shutdown."""
        self.observation.growth.cancel()
        self.observation.leaving.end()
        self.observation.starting.give_up(list(self.observation.starting))
        self.observation.reserve.end()


def _as_it_is(world: World) -> Transition:
    """Return the transition that changes nothing, to finish a change whose cause is gone."""
    source: Source = "processes" if world.whole else "snapshot"
    return Transition(source, frozenset(), frozenset(), world.workers, world.servers)
