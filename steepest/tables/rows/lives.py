"""How long rows live that no push has, by wall clock."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError
from steepest.tables.rows.blocks import FREE, Blocks
from steepest.tables.rows.kernels import Int32s, Int64s, kernel

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MOST = 2**31 - 1  # 68 years
#: The part of a table's time to live after which rows are looked at again.
_LOOKS = 16


def seconds_of(name: str, ttl: str | int) -> int:
    """Return a time to live in seconds: "90s", "15m", "12h", "7d", "2w", or a whole number of seconds.

    Raises:
        ConfigurationError: it is no such time; the message begins with `name`.
    """
    seconds = -1
    if isinstance(ttl, int) and not isinstance(ttl, bool):
        seconds = ttl
    elif isinstance(ttl, str) and (found := re.fullmatch(r"(\d{1,10})([smhdw])", ttl)):
        seconds = int(found[1]) * _SECONDS[found[2]]
    if not 0 < seconds <= _MOST:
        raise ConfigurationError(
            f"{name}={ttl!r:.40}: give a whole number of seconds, or a text such as '90s', '15m', '12h', '7d' or "
            f"'2w', from 1 second to {_MOST}"
        )
    return seconds


@kernel
def _ended(
    now: int,
    lives: Int64s,
    tables: npt.NDArray[np.int16],
    written: Int64s,
    until: npt.NDArray[np.uint32],
    ended: Int32s,
) -> int:
    """Write the rows whose life has ended, and begin the lives that are not known; return how many have ended."""
    count = 0
    for number in range(len(written)):
        life = lives[tables[number]]
        if written[number] == FREE or not life:
            continue
        if until[number] == 0:
            until[number] = now + life
        elif np.int64(until[number]) < now:
            ended[count] = number
            count += 1
    return count


class RowLives:
    """The lives of a shard's rows, of which `Blocks.until` has the ends.

    Attributes:
        clock: the time at the last push, in whole seconds since the epoch; 0 if it is not known.
    """

    def __init__(self, lives: Sequence[int]) -> None:
        """Take the time to live of each table's rows in seconds, 0 for those that stay."""
        self._seconds: Int64s = np.array(lives, np.int64)
        ending = [life for life in lives if life]
        self._period = max(min(ending) // _LOOKS, 1) if ending else 0
        self.clock = 0

    @property
    def any(self) -> bool:
        """Whether rows of some table do not stay."""
        return self._period > 0

    def note_time(self, seconds: int) -> bool:
        """Note the time of the next push; return whether rows are to be looked at after it."""
        before, self.clock = self.clock, max(self.clock, seconds)
        return self.any and before // self._period != self.clock // self._period

    def renew(self, numbers: Int32s, tables: Int32s, lives: Int32s | None, blocks: Blocks) -> None:
        """Begin the lives of rows anew, where a number is not negative.

        Args:
            numbers, tables: (n,), of rows.
            lives: (n,), of seconds, after which rows end that would end earlier; 0 for as long as their table says;
                None for that with all.
            blocks: of the rows.
        """
        if blocks.until is None or not self.clock:
            return
        known = numbers >= 0
        rows, own = numbers[known], self._seconds[tables[known]]
        life = own if lives is None else np.where(lives[known] > 0, lives[known], own)
        until = np.where(own, self.clock + life, 0)
        if lives is not None:  # another feature may have had them for longer
            until = np.maximum(until, np.where(own, blocks.until[rows], 0))
        blocks.until[rows] = until

    def ended(self, blocks: Blocks) -> Int32s:
        """Return the numbers of the rows whose life is over."""
        if blocks.until is None:
            return np.empty(0, np.int32)
        top = blocks.top
        rows = np.empty(top, np.int32)
        known = blocks.tables[:top], blocks.written[:top], blocks.until[:top]
        ended: Int32s = rows[: _ended(self.clock, self._seconds, *known, rows)]
        return ended
