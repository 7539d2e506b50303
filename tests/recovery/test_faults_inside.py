"""Faults inside the processes of servers and workers: each happens when it is said to, in the middle of its work."""

from __future__ import annotations

import os
import re
import signal
from functools import cache
from pathlib import Path

import pytest
import torch

from steepest.core.engine.job import Job
from steepest.core.engine.model_building import build_models
from steepest.core.engine.server import Server
from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.tensors.layout import ChunkSpec
from steepest.errors import PeerLostError
from steepest.runtime.survivors import assemble, catch_up, state_of
from steepest.testing import Fault, InProcessCluster, Moment, processes, replay, with_faults
from tests.inside import exchange_of
from tests.modes import make, mode, salvaged_weights, trainable, trained
from tests.reference import Task, Weights, same_bits, samples, sgd

TASK = Task(optimizer=sgd(momentum=0.9), data=samples(24))
STEPS = 6
MODES = ["sync", "async"]


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What processes send themselves; they live on."""
    sent: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid()
        sent.append(number)

    monkeypatch.setattr(processes.os, "kill", kill)
    return sent


def inside(name: str, fault: Fault, lives: Path) -> InProcessCluster:
    """A job whose processes have that fault, all of them this one."""
    creator = with_faults(TASK.creator(), [fault], lives)
    return InProcessCluster(creator, num_workers=3, strategy=mode(name), keep_log=True)


SAID: dict[tuple[str, Moment], str] = {
    ("server", "push"): r"chunk \d+ has come from worker \d",
    ("server", "apply"): r"chunks \[\d.*\] are updated, \[\d.*\] are not",
    ("server", "pull"): r"chunk \d+ has left for worker \d",
    ("worker", "pull"): r"chunk \d+ of version \d+ is here, others are not",
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("role", "at"), SAID)
@pytest.mark.parametrize("name", [*MODES, "copies", "allreduce"])
def test_a_process_kills_itself_once_at_its_moment(
    name: str, role: str, at: Moment, tmp_path: Path, kills: list[int]
) -> None:
    cluster = inside(name, Fault.kill(role, 1, step=6, at=at), tmp_path)
    trained(cluster, 1)
    assert kills == []
    trained(cluster, STEPS)
    assert kills == [signal.SIGKILL]
    (line,) = (tmp_path / f"{role}-1-life-0").read_text().splitlines()
    assert re.fullmatch(rf"kill of {role} 1 in step 6 at {at}: {SAID[role, at]}", line)
    assert same_bits(
        replay(cluster.log(), TASK.creator()), cluster.weights()
    )  # nothing was changed by watching


def test_who_is_to_stop_does(tmp_path: Path, kills: list[int]) -> None:
    trained(inside("sync", Fault.hang("server", 0, step=2, at="apply"), tmp_path), STEPS)
    assert kills == [signal.SIGSTOP]


def test_a_server_that_gets_its_role_again_in_one_process_is_in_the_same_life(
    tmp_path: Path, kills: list[int]
) -> None:
    faults = [Fault.kill("server", 1, step=1), Fault.kill("server", 1, step=1, life=1)]
    creator = with_faults(TASK.creator(), faults, tmp_path)
    for _ in range(2):
        trained(InProcessCluster(creator, num_workers=2, strategy=mode("sync")), 3)
    assert kills == [signal.SIGKILL]
    assert [path.name for path in tmp_path.glob("server-*")] == ["server-1-life-0"]


def test_what_no_fault_is_about_is_not_wrapped(tmp_path: Path) -> None:
    cluster = inside("sync", Fault.kill("server", 1, step=10**6, at="apply"), tmp_path)
    other, watched = cluster.servers
    assert "handle" in vars(watched)
    assert "handle" not in vars(other)
    assert all("apply" in vars(held) for held in trainable(watched))
    assert not any("apply" in vars(held) for held in trainable(other))
    assert not any("receive" in vars(exchange_of(worker)) for worker in cluster.workers)


def test_a_job_without_faults_has_nobody_to_attend_it() -> None:
    _, described = build_models(TASK.creator(), 0, 1, 0, ChunkSpec())
    assert described.attend is None


# -- in one thread --------------------------------------------------------------------------------


@cache
def straight(version: int) -> Weights:
    cluster = make("sync", TASK)
    trained(cluster, version)
    return cluster.weights()


def updates(server: Server, job: Job) -> list[int]:
    """Of each of a server's chunks, how many updates it has had, found by its weights."""
    layout = job.description.layout
    flats = []
    for version in range(STEPS + 1):
        flat = layout.allocate()
        for index, entry in enumerate(layout.entries):
            layout.entry_view(flat, index).copy_(straight(version)[entry.name])
        flats.append(flat)

    def of(held: ServerChunk) -> int:
        same = [
            torch.equal(layout.chunk_view(flat, held.chunk.index), held.weights) for flat in flats
        ]
        assert same.count(True) == 1
        return same.index(True)

    return [of(held) for held in trainable(server)]


@pytest.mark.few(2)
@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("name", ["sync", "copies"])
def test_a_server_dies_with_half_an_update_made(name: str, server: int) -> None:
    cluster = make(name, TASK, faults=[Fault.kill("server", server, step=3, at="apply")])
    with pytest.raises(PeerLostError, match=f"server {server} is gone"):
        cluster.step(STEPS)
    assert cluster.unmet == []
    torn = sorted(updates(cluster.servers[server], cluster.job))
    half = (len(torn) + 1) // 2
    assert torn == [3] * (len(torn) - half) + [4] * half
    assert 0 < half < len(torn)
    if name == "copies":
        other = cluster.servers[1 - server]
        catch_up(other, [list(other.decisions.recent)])
        found = assemble(len(cluster.job.holders), {1 - server: state_of([other])})
        assert found is not None
        assert found.version in (3, 4)
        assert same_bits(salvaged_weights(cluster, found), straight(found.version))


def test_a_server_that_stops_with_half_an_update_made_goes_on() -> None:
    cluster = make("sync", TASK, faults=[Fault.hang("server", 1, step=3, at="apply", rounds=300)])
    trained(cluster, STEPS)
    assert cluster.unmet == []
    assert cluster.network.rounds > 300
    assert same_bits(cluster.weights(), straight(STEPS))
