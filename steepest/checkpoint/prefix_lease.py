"""A lease on a prefix of an object store: one driver at a time keeps checkpoints there.

Stores have no locks, and no driver's clock is another's. So the holder writes to its object every few
seconds, and another driver takes over only when it has itself seen no change there for a whole lease.
The objects are numbered; each is created under the condition that it is not there, and the one of
the greatest number counts, so that of two that take over at once one is refused, and a holder that
was late finds a greater number than its own.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steepest.core.system import system
from steepest.data.storage.object_storage import ObjectStorage, Patience
from steepest.data.storage.places import ObjectUrl
from steepest.errors import CheckpointError

log = logging.getLogger(__name__)
LEASES = "lease"
_RELEASED = b'{"released": true}'
_LOOKS = 10


@dataclass(frozen=True)
class LeaseTimes:
    """The times of leases, in seconds; all drivers have the same."""

    lasts: float = 60.0  # after which without a change another driver may take over
    renew: float = 15.0  # from one renewal to the next
    look: float = 2.0  # from one look at another driver's lease to the next


class PrefixLease:
    """The right to keep checkpoints in a prefix, until it is released or this process ends.

    Args:
        folder: the prefix.
        times: of the lease.
        storage: of the prefix; None for that of its scheme.
        clock, wait: the time in seconds, and what waits for so many; None for the system's.

    Raises:
        CheckpointError: another driver has it, which is named; or the store cannot be used.
    """

    def __init__(
        self,
        folder: ObjectUrl,
        times: LeaseTimes | None = None,
        storage: ObjectStorage | None = None,
        clock: Callable[[], float] | None = None,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        self._folder = folder
        self._times = times or LeaseTimes()
        # two of them, one after the other, end well before the lease
        patience = Patience(self._times.lasts / 6, self._times.lasts / 6)
        self._storage = storage or ObjectStorage.of(folder.scheme, patience)
        self._clock, self._wait = clock or system().now, wait or system().sleep
        self._token, self._count = secrets.token_hex(8), 0
        self._lost: str | None = None
        self._ended = system().event()
        self._renewing = system().lock()
        self._renewed = self._clock()
        try:
            self._number = self._take()
        except OSError as error:
            raise CheckpointError(f"cannot keep checkpoints in {folder}: {error}") from error
        system().start(self._renew_often, "steepest-lease")

    def check(self) -> None:
        """Check that the lease is held, and renew it if that is due.

        Raises:
            CheckpointError: another driver has it, or it cannot.
        """
        if self._lost is None and self._clock() - self._renewed <= self._times.lasts / 2:
            return
        try:
            self.renew()
        except OSError as error:
            raise CheckpointError(
                f"the lease on {self._folder} was not renewed for "
                f"{self._clock() - self._renewed:.0f} s, and another driver may have it: {error}"
            ) from error
        if self._lost is not None:
            raise CheckpointError(
                f"{self._lost} keeps its own checkpoints in {self._folder} now, because this process did "
                f"not renew its lease for {self._times.lasts:.0f} s: this one writes nothing more there"
            )

    def renew(self) -> None:
        """Renew the lease, unless it is lost; OSError: the store does not answer."""
        with self._renewing:
            if self._lost is not None or self._ended.is_set():
                return
            began = self._clock()
            newest = self._newest()
            if newest is not None and newest[0] > self._number:
                self._lost = _holder(newest[1])
                log.error("%s has taken over the lease on %s", self._lost, self._folder)
                return
            self._count += 1
            self._storage.put(self._object(self._number), self._content())
            self._renewed = began

    def release(self) -> None:
        """Release the lease, so that another driver can take it at once; a second call does nothing."""
        if self._ended.is_set():
            return
        with self._renewing:
            self._ended.set()
            if self._lost is not None:
                return
            try:
                self._storage.put(self._object(self._number), self._content(released=True))
            except OSError as error:
                log.warning("the lease on %s ends by itself, in a minute: %s", self._folder, error)

    def _renew_often(self) -> None:
        while not self._ended.wait(self._times.renew) and self._lost is None:
            try:
                self.renew()
            except OSError as error:
                log.warning("the lease on %s is not renewed: %s", self._folder, error)

    def _take(self) -> int:
        """Take the lease and return its number; CheckpointError: another driver has it."""
        # OSError: the store is out of use.
        newest = self._newest()
        while newest is not None and not _is_free(newest[1]):
            newest = self._awaited(*newest)
        number = 1 if newest is None else newest[0] + 1
        mine = self._object(number)
        self._renewed = self._clock()
        try:
            self._storage.create(mine, self._content())
        except FileExistsError:
            raise self._refused("another driver, which was faster by a moment,") from None
        try:
            self._count += 1
            self._storage.create(mine, self._content())
        except FileExistsError:
            pass
        else:
            log.warning(
                "%s does not create objects under conditions: let no other driver keep its own there",
                self._folder,
            )
        for old in self._storage.files(self._folder / LEASES):
            if old.name.isdecimal() and int(old.name) < number:
                self._storage.discard([old])
        return number

    def _awaited(self, number: int, held: bytes) -> tuple[int, bytes] | None:
        """Return the newest lease when it may be taken over, or there is another one."""
        # CheckpointError: it was renewed.
        holder, began = _holder(held), self._clock()
        log.warning(
            "%s has the lease on %s; if it does not renew it within %.0f s, this driver takes it over",
            holder,
            self._folder,
            self._times.lasts,
        )
        while self._clock() - began < self._times.lasts:
            self._wait(self._times.look)
            newest = self._newest()
            if newest is None or newest[0] != number or _is_free(newest[1]):
                return newest
            if newest[1] != held:
                raise self._refused(holder)
        log.warning("%s has not renewed the lease on %s", holder, self._folder)
        return number, _RELEASED

    def _newest(self) -> tuple[int, bytes] | None:
        """Return the number of the lease that counts, and what it holds; None if there is none."""
        # OSError: the store does not answer, or names objects that it has not.
        for _ in range(_LOOKS):
            leases = self._storage.files(self._folder / LEASES)
            numbers = [int(each.name) for each in leases if each.name.isdecimal()]
            if not numbers:
                return None
            try:
                return max(numbers), self._storage.read(self._object(max(numbers)))
            except FileNotFoundError:  # a newer one is there by now
                continue
        raise OSError(f"{self._folder / LEASES} lists objects that are not there")

    def _object(self, number: int) -> ObjectUrl:
        return self._folder / LEASES / f"{number:06d}"

    def _content(self, released: bool = False) -> bytes:
        lease = {
            "holder": f"process {os.getpid()} on {os.uname().nodename}",
            "life": _life(os.getpid()),
            "token": self._token,
            "count": self._count,
            "released": released,
        }
        return json.dumps(lease).encode()

    def _refused(self, holder: str) -> CheckpointError:
        return CheckpointError(
            f"cannot keep checkpoints in {self._folder}: {holder} keeps its own there, and two would "
            "delete each other's; wait for its end or call its shutdown(), or give this run another URL"
        )


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        lease = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return lease if isinstance(lease, dict) else {}


def _holder(content: bytes) -> str:
    return f"{_decoded(content).get('holder', 'another driver')}"[:300]


def _is_free(content: bytes) -> bool:
    """Return whether a lease was released, has ended, or is of a dead process of this machine."""
    lease = _decoded(content)
    if lease.get("released") is True:
        return True
    pid = _pid_here(lease.get("life"))
    return pid is not None and _life(pid) != lease["life"]


def _pid_here(life: Any) -> int | None:
    """Return the number of a process, if it can be looked for here."""
    here = _life(os.getpid())
    if isinstance(life, list) and len(life) == 4 and here and life[:2] == here[:2]:
        return life[2] if type(life[2]) is int else None
    return None


def _life(pid: int) -> list[Any] | None:
    """Return what no other process has: boot, namespace of processes, number, time of its start."""
    # None if there is no such process, or where the system does not say.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{pid}/stat").read_text()
        return [boot, os.stat("/proc/self/ns/pid").st_ino, pid, stat.rpartition(")")[2].split()[19]]
    except (OSError, IndexError):
        return None
