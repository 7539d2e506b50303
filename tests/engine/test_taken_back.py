"""A gradient that its worker takes back before it is whole leaves no trace, in whatever order messages arrive."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest

from steepest.core.engine.topology import HostMap
from steepest.core.models.protocol import Computed, Ready
from steepest.core.models.torch import TorchModel
from tests.group_in_one_thread import late, twice
from tests.modes import MODES, TOGETHER, check, counters, make, trained
from tests.reference import Task, same_bits, sgd

PLAIN = Task(optimizer=sgd(momentum=0.9))
PLACES = {
    "one host and another": ((0, 0, 0), (1, 1)),
    "two and two": ((0, 0, 1, 1), (0, 1)),
    "three hosts": ((0, 0, 1, 1, 2), (0, 1, 2)),
}


class Doubtful(TorchModel):
    """Reports other gradients first, some of them NaN, and takes them back, perhaps twice."""

    chance = random.Random(0)
    taken_back = 0
    spoilt = 0.0  # the probability that the last gradient is NaN
    may_take_back = True

    def compute_gradients(self, batch: Any, ready: Ready, metrics: bool) -> Computed:
        """Compute them in the end."""
        entries = [i for i, entry in enumerate(self.layout.entries) if entry.trainable]
        for _ in range(self.chance.choice([0, 0, 1, 2])):
            assert self.take_back is not None
            wrong = self.chance.choice([1.0, -7.0, math.nan])
            for index in self.chance.sample(entries, self.chance.randint(1, len(entries))):
                self._gradients[self.layout.entries[index].name].fill_(wrong)
                ready(index, 3.0, True)
            type(self).taken_back += 1
            self.take_back()
        if self.chance.random() < self.spoilt:
            for index in entries:
                self._gradients[self.layout.entries[index].name].fill_(math.nan)
                ready(index, 2.0, True)
            return Computed(1.0, 2.0, 2, {})
        return super().compute_gradients(batch, ready, metrics)


@dataclass(frozen=True)
class DoubtfulTask(Task):
    """A task with such a model."""

    def creator(self) -> Any:
        """Its `model_creator`."""

        def create(worker_index: int, device_index: int) -> TorchModel:
            about = {"loss": self.loss, "data": self.data, "batch_size": self.batch_size}
            return Doubtful(self.module(), optimizer=self.optimizer, **about)

        return create


DOUBTFUL = DoubtfulTask(optimizer=PLAIN.optimizer)


def compared(name: str, seed: int, workers: int = 3, **options: Any) -> None:
    """Compare a job whose workers take gradients back with one whose workers do not."""
    Doubtful.chance, Doubtful.taken_back = random.Random(seed), 0
    doubtful = make(name, DOUBTFUL, workers, shuffle=seed, **options)
    doubtful.network.filter = twice
    if seed % 2:
        doubtful.network.lends = ()  # what was taken back arrives as it was
    trained(doubtful, 9)
    assert Doubtful.taken_back > 3
    plain = make(name, PLAIN, workers, shuffle=seed, **options)
    trained(plain, 9)
    if name in TOGETHER:
        assert same_bits(doubtful.weights(), plain.weights())
    doubtful.network.settle()
    check(doubtful, PLAIN)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODES)
def test_what_was_taken_back_leaves_no_trace(name: str, seed: int) -> None:
    compared(name, seed)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("places", PLACES)
def test_sums_of_a_host_are_voided_with_what_was_taken_back(places: str, seed: int) -> None:
    workers, servers = PLACES[places]
    hosts = HostMap(workers, servers, gathers=True)
    compared("sync", seed, len(workers), servers=len(servers), hosts=hosts)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("places", PLACES)
def test_a_sum_that_is_nan_after_all_is_left_out(places: str, seed: int) -> None:
    """Its parts come one by one then, instead of a sum that was finite."""
    workers, servers = PLACES[places]
    hosts = HostMap(workers, servers, gathers=True)
    Doubtful.chance, Doubtful.spoilt = random.Random(seed), 0.3
    options: Any = {"servers": len(servers), "hosts": hosts, "settings": {"nonfinite": "skip"}}
    try:
        cluster = make("sync", DOUBTFUL, len(workers), shuffle=seed, **options)
        cluster.network.lends = ()  # what was taken back arrives as it was
        trained(cluster, 9)
    finally:
        Doubtful.spoilt = 0.0
    assert 0 < counters(cluster)["skipped"] < 9


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["sync", "replicated", "async"])
def test_messages_may_overtake_each_other(name: str, seed: int) -> None:
    Doubtful.chance = random.Random(seed)
    cluster = make(name, DOUBTFUL, shuffle=seed)
    cluster.network.latency = late(seed)
    trained(cluster, 9)
    check(cluster, PLAIN)


@pytest.mark.few(1)
@pytest.mark.parametrize("codec", ["int8", "topk", "powersgd"])
def test_what_compression_leaves_out_of_it_is_forgotten(codec: str) -> None:
    compared("sync", 1, settings={"compression": codec})
