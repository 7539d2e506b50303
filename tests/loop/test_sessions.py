"""One worker's side of a loop of the user's own, without a job."""

from __future__ import annotations

from steepest.core.models.protocol import Where
from steepest.loop.session import Session


def test_an_epoch_whose_last_step_a_worker_has_passed_by_is_over_when_that_is_committed() -> None:
    """Another worker may die before, and its samples be dealt to this one."""
    session = Session(lambda: None, rank=1, size=3)
    session.pass_by(Where(5, 0, (1, 3), is_last=True, empty=True))
    assert session.loop.is_over
    assert not session.loop.has_seen_all
    session.committed(5)
    assert not session.loop.has_seen_all
    session.committed(6)
    assert session.loop.has_seen_all
