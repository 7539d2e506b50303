"""One worker's side of a loop of the user's own, without a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import steepest
from steepest.core.engine.generators import seed_everything
from steepest.core.models.protocol import Where
from steepest.core.models.step_size import StepSize, making_models
from steepest.loop.job_view import LoopKind
from steepest.loop.model import LoopCreator, LoopModel
from steepest.loop.session import Session
from tests.reference import same_bits


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


ASKED: list[int | str] = []


def training() -> None:
    ASKED.append("begun")
    draws = torch.rand(1)
    ASKED.append(steepest.rank())
    module = torch.nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.add_(draws)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steepest.prepare(module, optimizer)
    ASKED.append("job")


def made(creator: Callable[[int, int], LoopModel], workers: int = 4) -> LoopModel:
    """Return what a function prepares as worker 2, and end it there."""
    with making_models(StepSize(workers, seed=5)):
        model = creator(2, 0)
    model.session.end()
    return model


def test_a_function_runs_ahead_to_where_it_asks_for_its_rank() -> None:
    """Its model has the bits of one that was made at once; it runs anew where there are other workers."""
    ASKED.clear()
    creator = LoopCreator(training, LoopKind(seed=5))
    with making_models(StepSize(4, seed=5)):
        begun, again = creator.ahead(), creator.ahead()
    assert begun is not None
    assert again is not None
    assert ASKED == ["begun", "begun"]
    seed_everything(7)  # other code draws meanwhile
    ahead = made(begun)
    assert ASKED[2:] == [2]
    assert same_bits(ahead.module.state_dict(), made(creator).module.state_dict())
    assert made(again, workers=3).session.job.size == 3
    assert ASKED[3:] == ["begun", 2, "begun", 2]
    made(begun)
    assert ASKED[7:] == ["begun", 2]


def test_a_function_that_raises_ahead_runs_anew_as_a_workers() -> None:
    def raising() -> None:
        raise RuntimeError("no such file")

    creator = LoopCreator(raising)
    assert creator.ahead() is None
    with pytest.raises(RuntimeError, match="no such file"):
        creator(0, 0)
