"""Compressed training: every strategy that has it, what it refuses, how much is learned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples.data import load_mnist
from steepest.core.config.compression import Int8, PowerSGD, TopK
from steepest.core.config.run import data_directory
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.replicas import Replicas
from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Failure
from steepest.errors import ConfigurationError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.compression.codecs import make_codec
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster
from tests.modes import check, counters, make, trained, worker_weights
from tests.pairs import grid
from tests.random_examples import seeds
from tests.reference import Task, difference, samples, sgd

CHOICES = {"topk": TopK(0.1), "int8": Int8(16), "powersgd": PowerSGD(2)}


# -- strategies -----------------------------------------------------------------------------------


def wide() -> nn.Module:
    """Large enough for all three to be smaller than float32."""
    return nn.Sequential(
        nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 2)
    )


WIDE = Task(wide, sgd(momentum=0.9), samples(23, dtype=torch.float32))
WAYS = {
    "allreduce": {"name": "replicated", "settings": {"sharded": None}},
    "ps": {"name": "sync", "settings": {}},
    "async": {"name": "async", "settings": {}},
    "ssp": {"name": "ssp-2", "settings": {}},
}


def training(way: str, choice: Any, workers: int, task: Task = WIDE, **options: Any) -> Any:
    settings = {
        **WAYS[way]["settings"],
        "compression": choice,
        "chunk_bytes": 1 << 20,
        **options.pop("settings", {}),
    }
    return make(WAYS[way]["name"], task, workers, settings=settings, **options)


@pytest.mark.few(2)
@grid(choice=CHOICES, way=WAYS, size=[(2, 1), (3, 1), (3, 2)])
@seeds(1)
def test_a_compressed_run_is_replayed_to_the_bit(
    way: str, choice: str, size: tuple[int, int], seed: int
) -> None:
    workers, devices = size
    cluster = training(way, CHOICES[choice], workers, devices=devices, shuffle=seed)
    trained(cluster, 6)
    trained(cluster, 6)
    check(cluster, WIDE)
    assert difference(cluster.weights(), WIDE.train(workers * devices, 12)) > 1e-6, (
        "nothing was compressed"
    )


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("workers", [2, 3])
def test_all_members_hold_the_same_bits_and_send_what_the_formula_says(
    workers: int, choice: str
) -> None:
    cluster = training("allreduce", CHOICES[choice], workers)
    results = trained(cluster, 5)
    weights = worker_weights(cluster, 5)
    assert all(torch.equal(weights[0], other) for other in weights[1:])
    layout, codec = cluster.job.description.layout, make_codec(CHOICES[choice])
    assert codec is not None
    size = sum(codec.size(layout, chunk) or chunk.nbytes for chunk in layout.chunks)
    assert size < layout.nbytes
    full = [result.bytes_pushed for result in results if result.samples == 2 * workers]
    assert full
    assert set(full) == {workers * (workers - 1) * size}


@pytest.mark.parametrize("way", ["allreduce", "ps"])
def test_a_rank_at_which_nothing_is_smaller_is_training_without_compression(way: str) -> None:
    cluster = training(way, PowerSGD(64), 3)
    trained(cluster, 10)
    assert difference(cluster.weights(), WIDE.train(3, 10)) < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_one_worker_and_workers_of_one_host_send_nothing_compressed(way: str) -> None:
    alone = training(way, TopK(0.01), 1)
    trained(alone, 10)
    assert difference(alone.weights(), WIDE.train(1, 10)) < 1e-5
    if way in ("allreduce", "ps"):
        servers = (0, 0, 0) if way == "allreduce" else (0, 0)
        together = training(way, TopK(0.01), 3, hosts=HostMap((0, 0, 0), servers))
        trained(together, 10)
        assert difference(together.weights(), WIDE.train(3, 10)) < 1e-5


@pytest.mark.parametrize("choice", CHOICES)
def test_beside_a_relay_each_worker_packs_its_own(choice: str) -> None:
    cluster = training("ps", CHOICES[choice], 4, hosts=HostMap((0, 0, 1, 1), (0, 1), gathers=True))
    trained(cluster, 6)
    check(cluster, WIDE)


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("way", ["allreduce", "ps"])
def test_a_failed_step_leaves_no_trace(way: str, choice: str) -> None:
    failing = {"left": 0}

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        failing["left"] -= 1
        if failing["left"] == 0:
            raise ValueError("now and then")
        return nn.functional.mse_loss(output, target)

    task = dataclasses.replace(WIDE, loss=loss)
    straight, interrupted = (
        training(way, CHOICES[choice], 3, task),
        training(way, CHOICES[choice], 3, task),
    )
    trained(straight, 8)
    trained(interrupted, 4)
    failing["left"] = 2  # the first worker has sent its part by then
    assert isinstance(interrupted.step(4)[-1], Failure)
    failing["left"] = 0
    trained(interrupted, 4)
    same = straight.weights()
    assert all(torch.equal(value, same[name]) for name, value in interrupted.weights().items())


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_skipped_step_has_left_out_is_that_of_the_step_before(way: str) -> None:
    """Gradients do not depend on the weights, so their sum is what was applied and what is left out."""
    x = torch.randn(48, 300, generator=torch.Generator().manual_seed(0))
    plan = SamplePlan(48, 4, 0)
    for share in (3, 8, 22, 23):  # each of both workers', and in async the last push of all
        x[plan.share(share // 2, share % 2, 2)[0], 0] = torch.nan  # in the first of three chunks
    task = Task(
        lambda: nn.Linear(300, 1, bias=False), sgd(1.0), (x, x), lambda output, _: output.mean()
    )
    cluster = training(way, TopK(0.1), 2, task, settings={"nonfinite": "skip", "chunk_bytes": 400})
    before = cluster.weights()["weight"]
    trained(cluster, 12)  # an epoch
    commits = cluster.log().commits
    assert sum(commit.skipped for commit in commits) == (3 if way in ("allreduce", "ps") else 4)
    shares = [push.share for commit in commits if not commit.skipped for push in commit.pushes]
    parts = [x[plan.share(share // 2, share % 2, 2)].mean(0) for share in shares]
    expected = torch.stack(parts).sum(0)
    left = [
        cluster.wait(worker.at_version(0, commits[-1].version, left_out_of), "weights")
        for worker in cluster.workers
    ]
    together = len(commits[0].pushes) == 2
    expected, kept = expected / (1 + together), sum(left) / (1 + together)
    applied = (before - cluster.weights()["weight"])[0]
    assert kept.abs().max() > 0.1
    assert (applied + kept - expected).abs().max() < 1e-5
    check(cluster, task)


def left_out_of(replicas: Replicas) -> torch.Tensor:
    assert replicas.exchange is not None
    return replicas.exchange.state(0)["compression"]["left/weight"]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("way", WAYS)
def test_nan_is_refused_by_name(way: str, choice: str) -> None:
    task = dataclasses.replace(
        WIDE, loss=lambda output, target: nn.functional.mse_loss(output, target) * float("nan")
    )
    cluster = training(way, CHOICES[choice], 2, task)
    result = cluster.step(1)[-1]
    assert isinstance(result, Failure)
    assert {name for _, name in result.culprits} == {name for name, _ in wide().named_parameters()}
    assert counters(cluster)["committed"] == 0


@pytest.mark.parametrize("way", ["allreduce", "ps", "async"])
def test_the_norm_is_that_of_what_arrives(way: str) -> None:
    cluster = training(way, TopK(0.1), 2, settings={"clip_norm": 0.01})
    results = trained(cluster, 6)
    norms = [result.gradient_norm for result in results]
    assert all(norm > 0.01 for norm in norms)
    check(cluster, WIDE)
    if way == "allreduce":  # copies do not count
        plain = training("ps", TopK(0.1), 2, settings={"clip_norm": 0.01})
        assert [result.gradient_norm for result in trained(plain, 6)] == pytest.approx(norms)


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: TopK(0), "TopK ratio=0: give a finite number from 0 to 1, but not 0"),
        (lambda: TopK(1.5), "give a finite number from 0 to 1, but not 0"),
        (lambda: TopK(float("nan")), "give a finite number from 0 to 1, but not 0"),
        (lambda: Int8(0), "Int8 block=0"),
        (lambda: PowerSGD(0), "PowerSGD rank=0"),
        (lambda: PowerSGD(1.5), "PowerSGD rank=1.5"),
        (lambda: AllreduceStrategy(compression="topk", sharded=True), "leave sharded out"),
        (lambda: AllreduceStrategy(compression="topk", wire_dtype="fp16"), "leave wire_dtype out"),
        (
            lambda: AllreduceStrategy(compression="zip"),
            "compression='zip': give one of None, 'topk', 'int8', 'int4', 'int2', 'powersgd'",
        ),
        (
            lambda: ParameterServerStrategy(compression=TopK),
            "compression=<class .*TopK'>: give one of",
        ),
        (
            lambda: ParameterServerStrategy(compression="int8", wire_dtype=("fp16", "bf16")),
            "give wire_dtype='bf16', for",
        ),
        (
            lambda: ParameterServerStrategy(wire_dtype="int8"),
            "wire_dtype='int8': give one of None, 'fp16', 'bf16'",
        ),
        (lambda: ParameterServerStrategy(wire_dtype=(TopK(), None)), "wire_dtype of pushes=TopK"),
        (
            lambda: ParameterServerStrategy(wire_dtype=("fp16", "int8")),
            "wire_dtype of pulls='int8'",
        ),
        (lambda: LocalStrategy(wire_dtype="int8"), "wire_dtype='int8'"),
        (
            lambda: ParameterServerStrategy(compression="int8", backup_workers=1),
            "nothing would be left",
        ),
        (
            lambda: ParameterServerStrategy(
                mode="async", compression=TopK(), correction="drop", staleness=1
            ),
            "nothing would be left",
        ),
    ],
)
def test_wrong_settings_are_refused(make_it: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_it()


def test_names_stand_for_settings() -> None:
    for name, kind in (("topk", TopK), ("int8", Int8), ("powersgd", PowerSGD)):
        chosen = AllreduceStrategy(compression=name)
        assert (chosen.push_format, chosen.pull_dtype, chosen.is_sharded) == (kind(), None, False)
    for wire_dtype in ("bf16", (None, "bf16")):
        both = ParameterServerStrategy(compression=Int8(64), wire_dtype=wire_dtype)  # type: ignore[arg-type]
        assert (both.push_format, both.pull_dtype) == (Int8(64), torch.bfloat16)
    half = ParameterServerStrategy(wire_dtype=("fp16", None))
    assert (half.push_format, half.pull_dtype) == ("fp16", None)
    assert AllreduceStrategy().is_sharded
    assert not AllreduceStrategy(sharded=False).is_sharded


# -- how much is learned --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.long
@pytest.mark.skipif(
    not (data_directory() or Path("/nowhere")).joinpath("mnist").is_dir(),
    reason="needs MNIST: set STEEPEST_DATA to a folder that has mnist/",
)
def test_mnist_is_learned_as_well_as_without_compression() -> None:
    digits = load_mnist()
    images, classes = (torch.from_numpy(array) for array in digits.test)

    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))

    task = Task(net, sgd(momentum=0.5), digits.train, nn.functional.cross_entropy, batch_size=100)

    def accuracy(choice: Any) -> float:
        cluster = InProcessCluster(
            task.creator(), num_workers=2, strategy=AllreduceStrategy(compression=choice)
        )
        trained(cluster, 900)
        module = net()
        module.load_state_dict(cluster.weights())
        return float((module(images).argmax(1) == classes).float().mean()) * 100

    uncompressed = accuracy(None)
    assert uncompressed > 96
    for choice in ("topk", "int8", "powersgd"):
        assert accuracy(choice) > uncompressed - 0.3, choice
