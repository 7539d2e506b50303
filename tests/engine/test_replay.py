"""What a replay must know beside the updates: successors that compress anew, and how many threads computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steepest import DistributedSGD, ResourceConfig, RunConfig
from steepest.core.config.compression import Compression, Int8, PowerSGD, TopK
from steepest.core.messages.message import Kind
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster, replay
from tests.deaths import kill_senders
from tests.modes import make, trained
from tests.random_examples import runs
from tests.reference import Task, same_bits, samples, sgd
from tests.simulation.run import Simulation, run_config

CHOICES = {"int8": Int8(16), "topk": TopK(0.1), "powersgd": PowerSGD(2)}
DEATHS = st.tuples(st.integers(0, 2), st.sampled_from([Kind.PUSH, Kind.REPORT]), st.integers(1, 12))


def wide() -> nn.Module:
    """Large enough for all three to be smaller than float32."""
    return nn.Sequential(
        nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 2)
    )


WIDE = Task(wide, sgd(momentum=0.9), samples(23, dtype=torch.float32))


def doomed(
    name: str, choice: Compression, deaths: list[tuple[int, Kind, int]], shuffle: int
) -> InProcessCluster:
    """A compressed job in which workers die as they send their n-th message of a kind, one after the other."""
    packed = {"compression": choice, "chunk_bytes": 1 << 20}
    cluster = make(name, WIDE, settings=packed, replaces=True, shuffle=shuffle)
    kill_senders(cluster, deaths)
    return cluster


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["sync", "async", "ssp-2"])
@runs(4)
@given(deaths=st.lists(DEATHS, min_size=1, max_size=3), shuffle=st.integers(0, 2**32))
def test_a_compressed_run_is_replayed_to_the_bit_whoever_dies(
    name: str, choice: str, deaths: list[tuple[int, Kind, int]], shuffle: int
) -> None:
    cluster = doomed(name, CHOICES[choice], deaths, shuffle)
    trained(cluster, 12)
    assert same_bits(replay(cluster.log(), WIDE.creator()), cluster.weights())


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of torch threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Threads(nn.Module):
    """Its gradient is the number of threads: of a sum it depends on the machine whether they change bits."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.rate * torch.get_num_threads()).expand(len(x), 1)


THREADS = Task(
    Threads, sgd(lr=0.1), samples(8, dtype=torch.float32), lambda output, target: output.mean()
)


@pytest.mark.usefixtures("threads")
def test_a_replay_computes_with_as_many_threads_as_the_run_and_gives_the_callers_back() -> None:
    weights = {}
    for count in (1, 2):
        torch.set_num_threads(count)
        cluster = make("sync", THREADS, workers=2)
        trained(cluster, 3)
        weights[count] = cluster.weights()
        torch.set_num_threads(3 - count)
        assert same_bits(replay(cluster.log(), THREADS.creator()), weights[count])
        assert torch.get_num_threads() == 3 - count
    assert weights[2]["rate"] < weights[1]["rate"]


@pytest.mark.usefixtures("threads")
def test_the_callers_threads_come_back_when_a_replay_fails() -> None:
    torch.set_num_threads(2)
    cluster = make("sync", THREADS, workers=2)
    trained(cluster, 1)
    log = cluster.log()
    torch.set_num_threads(1)
    with pytest.raises(RuntimeError, match="no such model"):
        replay(log, broken)
    assert torch.get_num_threads() == 1


def broken(worker: int, device: int) -> nn.Module:
    torch.set_num_threads(2)
    raise RuntimeError("no such model")


@pytest.mark.usefixtures("machine", "threads")
def test_the_log_of_processes_tells_their_threads() -> None:
    torch.set_num_threads(1)
    with DistributedSGD(
        THREADS.creator(),
        num_workers=1,
        run_config=RunConfig(resources=ResourceConfig(cpus_per_worker=2), keep_log=True),
    ) as trainer:
        trainer.fit(steps=3, progress=False)
        log, weights = trainer.log(), trainer.weights()
    assert log.threads == (2, 2)
    assert same_bits(replay(log, THREADS.creator()), weights)


@pytest.mark.parametrize("strategy", ["ps", "async"])
def test_a_run_that_went_on_from_a_checkpoint_is_replayed_from_there(
    strategy: str, tmp_path: Path
) -> None:
    task = Task(lambda: nn.Linear(3, 2).double(), sgd(momentum=0.9), samples(23))
    with (
        Simulation(1).running(),
        DistributedSGD(
            task.creator(), 2, strategy=strategy, run_config=run_config(keep_log=True)
        ) as trainer,
    ):
        trainer.fit(steps=7, progress=False)
        trainer.save(tmp_path)
        trainer.fit(steps=5, progress=False)
        trainer.restore(tmp_path)
        trainer.fit(steps=6, progress=False)
        log, weights = trainer.log(), trainer.weights()
    assert same_bits(replay(log, task.creator(), tmp_path), weights)
    with pytest.raises(ConfigurationError, match="checkpoint="):
        replay(log, task.creator())
    with pytest.raises(
        ConfigurationError, match="begins at version 0, the checkpoint is of version"
    ):
        replay(replace(log, start=0, commits=()), task.creator(), tmp_path)
