"""Loops of users' own whose workers add up gradients over Gloo's sockets, where workers are killed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import steepest
from steepest import AllreduceStrategy, Checkpoints
from tests.own_loop_runs import InterruptedRunError, Interrupts, Resizes
from tests.own_loops import Parts, Script
from tests.reference import difference, same_bits, samples, sgd
from tests.strikes import kill_this_process


@dataclass(frozen=True)
class Death:
    """A batch between whose backward pass and step worker 1 is killed, once."""

    mark: Path
    epoch: int = 1
    batch: int = 3

    def strike(self, epoch: int, batch: int) -> None:
        if (steepest.rank(), epoch, batch) == (1, self.epoch, self.batch):
            with contextlib.suppress(FileExistsError):
                self.mark.touch(exist_ok=False)
                kill_this_process()


def dying(death: Death | None, parts: Parts, epochs: int) -> None:
    for epoch in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            loss.backward()
            if death is not None:
                death.strike(epoch, number)
            parts.optimizer.step()
        steepest.report(loss=loss)


SCRIPT = Script(partial(dying, None), optimizer=sgd(momentum=0.9), data=samples(24))
GLOO = AllreduceStrategy(data_plane="gloo", chunk_bytes=64)


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_killed_worker_changes_nothing(workers: int, sharded: bool, tmp_path: Path) -> None:
    strategy = replace(GLOO, sharded=sharded)
    straight = steepest.run(SCRIPT, num_workers=workers, strategy=strategy, progress=False)
    script = replace(SCRIPT, loop=partial(dying, Death(tmp_path / "died")))
    found = steepest.run(script, num_workers=workers, strategy=strategy, progress=False)
    assert [event["event"] for event in found.history.events] == ["recovered"]
    assert same_bits(found.state_dict, straight.state_dict)
    assert difference(found.state_dict, SCRIPT.alone(workers)) < 1e-12
    assert found.reports == straight.reports


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_is_resized_struck_interrupted_and_goes_on_from_its_checkpoint(
    sharded: bool, tmp_path: Path
) -> None:
    """Two workers become three, one of which is killed; the program ends after step 9, and two workers go on."""
    whole = replace(SCRIPT, data=samples(48))  # four steps in each epoch, of twelve samples
    script = replace(whole, loop=partial(dying, Death(tmp_path / "died", batch=2)))

    def run(workers: int, *callbacks: steepest.Callback) -> steepest.RunResult:
        return steepest.run(
            script, num_workers=workers, strategy=replace(GLOO, sharded=sharded), global_batch_size=12,
            checkpoints=Checkpoints(tmp_path / "run", every=1), callbacks=callbacks, progress=False,
        )  # fmt: skip

    with pytest.raises(InterruptedRunError):
        run(2, Resizes(2, 3), Interrupts(9))
    found = run(2)
    assert {"resized", "recovered"} <= {event["event"] for event in found.history.events}
    assert (tmp_path / "died").exists()
    assert [row["step"] for row in found.history.steps] == list(range(1, 13))
    assert difference(found.state_dict, whole.alone(6)) < 1e-12
