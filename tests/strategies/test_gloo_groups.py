"""Workers that add up gradients among themselves over Gloo's sockets, some of which are killed."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from steepest import AllreduceStrategy, DistributedSGD, RunConfig
from steepest.errors import DataPlaneError
from steepest.strategies.process_groups import torch_groups
from steepest.strategies.process_groups.extension import ProcessGroups
from steepest.strategies.process_groups.group import Groups
from steepest.strategies.process_groups.torch_groups import TorchGroups
from steepest.testing import replay
from tests.core import models
from tests.group_members import SECONDS, Member, added, group, weights
from tests.jobs_on_processes import CONFIG, trained
from tests.living import pids
from tests.reference import Task, difference, same_bits, samples, sgd
from tests.standing_in_for_nccl import StandInGroups
from tests.step_callbacks import After, Kill
from tests.striking_groups import StrikingGroups

processes = pytest.mark.usefixtures("machine")


def served(workers: int) -> dict[str, torch.Tensor]:
    """Return what the library's own connections train."""
    return trained(models.classifier, workers)


@processes
@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_killed_worker_changes_no_bit_and_servers_have_the_same_weights(
    workers: int, sharded: bool, tmp_path: Path
) -> None:
    straight = weights(workers, sharded=sharded)
    struck = partial(models.struck, models.classifier, tmp_path, 1, [3, 2])
    struck = weights(workers, struck, sharded=sharded)
    assert len(list(tmp_path.iterdir())) == 2
    assert same_bits(struck, straight)
    assert difference(straight, served(workers)) < 1e-14


@processes
@pytest.mark.few(3)
@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "sharded"),
    [(0, False), (1, False), (4, False), (7, False), *((n, True) for n in (2, 9, 10, 13, 18))],
)
def test_a_death_between_two_operations_of_a_step_changes_no_bit(
    operation: int, sharded: bool, tmp_path: Path
) -> None:
    """A sharded step of nine chunks has nine to add up, one that tells whether all is finite, nine of new weights."""
    struck = weights(3, groups=StrikingGroups(tmp_path, 1, operation), sharded=sharded)
    assert list(tmp_path.iterdir())
    assert same_bits(struck, weights(3, sharded=sharded))


@processes
@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_a_backward_pass_on_another_thread_changes_no_bit(sharded: bool, tmp_path: Path) -> None:
    """Chunks are handed over, and a worker dies, while the router's thread waits for that one."""
    elsewhere = partial(models.backward_elsewhere, models.classifier)
    struck = partial(models.struck, elsewhere, tmp_path, 1, [3])
    assert same_bits(weights(3, struck, sharded=sharded), weights(3, sharded=sharded))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.long
@processes
def test_a_group_that_fails_while_all_live_is_an_error_and_the_trainer_goes_on(
    tmp_path: Path,
) -> None:
    broken = StrikingGroups(tmp_path, 1, 3, dies=False)
    with DistributedSGD(
        models.classifier, 3, seed=3, run_config=CONFIG, extensions=(ProcessGroups(broken),),
        strategy=AllreduceStrategy(data_plane="gloo", chunk_bytes=64),
    ) as trainer:  # fmt: skip
        words = (
            r"worker [012] on .*, step 1: adding up gradients with the other 2 workers failed at "
            r"chunk \d+: Gloo, while"
        )
        with pytest.raises(DataPlaneError, match=words):
            trainer.fit(epochs=2, progress=False)
        trainer.fit(epochs=2, progress=False)
        found = trainer.state_dict()
    assert same_bits(found, weights(3))


@pytest.mark.long
@processes
def test_a_worker_that_hangs_is_replaced_and_changes_no_bit() -> None:
    """The others wait for it in an operation, which its death ends."""
    with DistributedSGD(
        models.classifier, 3, seed=3, run_config=CONFIG,
        strategy=AllreduceStrategy(data_plane="gloo", chunk_bytes=64),
    ) as trainer:  # fmt: skip
        victim = pids(trainer)[1]
        hang = After({1: partial(os.kill, victim, signal.SIGSTOP)})
        trainer.fit(epochs=2, progress=False, callbacks=[hang])
        assert victim not in pids(trainer)
        found = trainer.state_dict()
    assert same_bits(found, weights(3))


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_on_ray_the_log_explains_the_weights_after_a_death_and_a_change_of_size() -> None:
    task = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(64))
    strategy = AllreduceStrategy(data_plane="gloo", chunk_bytes=64)
    run_config = RunConfig(keep_log=True)
    with DistributedSGD(
        task.creator(), num_workers=2, strategy=strategy, run_config=run_config
    ) as trainer:
        trainer.fit(steps=5, progress=False)
        assert difference(trainer.weights(), task.train(2, 5)) < 1e-12
        victim = pids(trainer)[1]
        last = trainer.fit(steps=25, callbacks=[Kill(12, [victim])], progress=False)
        assert last.step == 30
        assert victim not in pids(trainer)
        trainer.resize(3)
        trainer.fit(steps=3, progress=False)
        assert trainer.num_workers == 3
        found = replay(trainer.log(), task.creator())
        assert difference(found, trainer.weights()) < 1e-12
        trainer.set_strategy("ps")
        assert trainer.fit(steps=3, progress=False).step == 36


# -- one group ------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [TorchGroups(), StandInGroups()], ids=["Gloo", "as NCCL"])
@pytest.mark.parametrize("size", [2, 3])
def test_programs_add_up_and_gather(size: int, groups: Groups) -> None:
    with group(size, groups=groups) as members:
        for _ in range(2):
            for member in members:
                member.run(added)
        ranks = [float(rank) for rank in range(size)]
        for member in members * 2:
            expected = [[sum(ranks)] * 3] * 2, [ranks[-1]] * 3, ranks
            assert member.done.get(timeout=SECONDS) == expected


def test_a_member_that_leaves_ends_what_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_groups, "_GRACE", 0.0)
    with group(3) as members:
        for member in members:
            member.run(added)
        for member in members:
            member.done.get(timeout=SECONDS)
        for member in members[:2]:
            member.run(added)
        members[2].router.call(members[2].group.end).result(SECONDS)
        for member in members[:2]:
            text = str(member.failures.get(timeout=SECONDS))
            assert text.startswith("Gloo, while a test is added up: ")
            assert "[127.0.0.1]" in text
            assert "by peer" in text  # closed or reset
        assert members[2].failures.empty()


def test_a_member_that_does_nothing_and_one_that_never_comes_are_waited_for_some_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_groups, "_GRACE", 0.0)
    with group(2, 0.5) as members:
        members[0].run(added)
        assert "imed out" in str(members[0].failures.get(timeout=SECONDS))
    alone: list[Member] = []
    alone.append(Member(0, 2, 0.3, alone, TorchGroups()))
    text = str(alone[0].failures.get(timeout=SECONDS))
    assert "the members meet" in text
    alone[0].router.stop()
