"""A worker's process that is killed in a loop of a user's own."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import steepest
from tests.own_loop_runs import run
from tests.own_loops import Parts, Script, plain
from tests.reference import difference, same_bits, samples, sgd
from tests.simulated_programs import quiet
from tests.strikes import kill_this_process

SCRIPT = Script(plain, optimizer=sgd(momentum=0.9), data=samples(24))
#: A batch of epoch 1, amid its six; the worker dies between its backward pass and its step.
EPOCH, BATCH = 1, 3


def dying(mark: Path, parts: Parts, epochs: int) -> None:
    """The usual loop, in which worker 1 is killed once."""
    for epoch in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            loss.backward()
            if (steepest.rank(), epoch, number) == (1, EPOCH, BATCH):
                with contextlib.suppress(FileExistsError):
                    mark.touch(exist_ok=False)
                    kill_this_process()
            parts.optimizer.step()
        steepest.report(loss=loss)


@pytest.mark.usefixtures("machine")
def test_a_worker_that_is_killed_changes_nothing(tmp_path: Path) -> None:
    """The weights have the bits of a run in which nobody dies, here a simulated one, and are those of one process."""
    script = replace(SCRIPT, loop=partial(dying, tmp_path / "died"))
    found = steepest.run(script, num_workers=2, progress=False)
    assert [event["event"] for event in found.history.events] == ["replaced"]
    with quiet():
        undisturbed = run(SCRIPT, 2)
    assert same_bits(found.state_dict, undisturbed.weights)
    assert difference(found.state_dict, SCRIPT.alone(2)) < 1e-12
    assert found.reports == undisturbed.reports
