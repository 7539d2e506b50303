"""Benchmarks do what they say: the network is ResNet-101, ideal is linear, jobs without Ray take their steps."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path

import pytest
import torch

from benchmarks import coordinator, gpu, own_loop, resnet101
from benchmarks.models import Workload, compute
from benchmarks.namespaces import HOST
from benchmarks.network import BYTES, OVERHEAD
from benchmarks.overhead import alternate, compare, comparison
from benchmarks.resnet import ResNet
from benchmarks.serving import floor, optimum
from benchmarks.training_bodies import STRATEGIES, job_team, make_job


@pytest.mark.parametrize(
    ("blocks", "parameters"), [((3, 4, 23, 3), 44_549_160), ((3, 4, 6, 3), 25_557_032)]
)
def test_it_is_the_network_of_the_paper(blocks: tuple[int, ...], parameters: int) -> None:
    with torch.device("meta"):
        network = ResNet(blocks)
        shapes = [tuple(stage.shape[1:]) for stage in maps(network, torch.empty(1, 3, 224, 224))]
    assert sum(p.numel() for p in network.parameters()) == parameters
    ends = [sum(blocks[: stage + 1]) - 1 for stage in range(4)]
    assert [shapes[end] for end in ends] == [
        (256, 56, 56),
        (512, 28, 28),
        (1024, 14, 14),
        (2048, 7, 7),
    ]


def maps(network: ResNet, images: torch.Tensor) -> list[torch.Tensor]:
    """What each block gives."""
    found: list[torch.Tensor] = []
    for block in network.stages:
        block.register_forward_hook(lambda module, inputs, output: found.append(output))
    network(images)
    return found


def test_a_coordinator_sends_each_worker_as_much_however_many_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent = []
    for workers in (64, 256):
        job = coordinator.CoordinatedJob(workers, 2, stats=True)
        job.ask(3)
        job.step(1)
        before = job.sent
        job.step(2)
        job.step(3)
        sent.append((job.sent - before) / workers)
    assert sent[1] == pytest.approx(sent[0], rel=0.2)
    coordinator.main(["--workers", "8", "--steps", "1"])
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "8"


TINY = Workload(
    "tiny", lambda: ResNet((1, 1), width=2, classes=10), (3, 8, 8), batch_size=2, samples=4, steps=1
)


def test_a_small_one_learns() -> None:
    network, batches = TINY.build(), TINY.batches(0)
    compute(network, batches)
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters() if p.ndim > 1
    )
    x, _ = batches.next()
    torch.testing.assert_close(network(x).exp().sum(dim=1), torch.ones(2))


def test_rates_are_images_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resnet101, "ray_started", contextlib.nullcontext)
    monkeypatch.setattr(resnet101, "measure", lambda contenders, rounds, steps: {"ps": [0.5, 0.25]})
    assert list(resnet101.rates(TINY, 3, ["ps"])) == [resnet101.Rate(3, "ps", (12.0, 24.0))]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_the_smallest_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(resnet101.SIZES, "small", TINY)
    resnet101.main(["--workers", "1", "--strategies", "allreduce", "--out", str(tmp_path)])
    with (tmp_path / "resnet101-small.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["workers"], row["strategy"], row["of ideal"]) == ("1", "allreduce", "1.00")
    assert 0 < float(row["least"]) <= float(row["images/s"]) <= float(row["greatest"])


def test_the_table_has_the_ideal_of_one_worker(tmp_path: Path) -> None:
    found = [
        resnet101.Rate(workers, strategy, (low, high))
        for workers, strategy, low, high in (
            (1, "ps", 9, 11),
            (1, "simple", 4, 6),
            (2, "ps", 10, 20),
        )
    ]
    resnet101.write(found, tmp_path / "found.csv")
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["ideal"] for row in rows] == ["10.0", "10.0", "20.0"]
    assert [row["of ideal"] for row in rows] == ["1.00", "0.50", "0.75"]


def test_contenders_take_turns_and_ratios_are_of_one_round() -> None:
    heard: list[str] = []
    times = {"a": iter([1.0, 4.0, 1.0]), "b": iter([2.0, 2.0, 1.0])}

    def turn(name: str) -> float:
        heard.append(name)
        return next(times[name])

    found = alternate({"a": lambda: turn("a"), "b": lambda: turn("b")}, rounds=3)
    assert "".join(heard) == "abbaab"
    rows = compare(found, ["b"])
    assert rows[0]["over"]["b"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    line = comparison("title", rows, {"a": "0.8 of b"}).splitlines()[3]
    assert line.split() == ["a", "1000.00", "1.00", "0.50..2.00", "0.8", "of", "b"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_without_ray_takes_its_steps(strategy: str, tmp_path: Path) -> None:
    with job_team([HOST], "convnet", strategy, str(tmp_path), workers=2) as team:
        seconds = [*team.turn(2), *team.turn(1)]
        members = len(team.pids())
    assert members == (2 if strategy == "allreduce" else 3)
    assert sum(second > 0 for second in seconds) == 2 * 2


def test_places_without_ray_are_those_of_a_trainer() -> None:
    job, _ = make_job("convnet", "allreduce", workers=4, servers=4, hosts=2, wire_dtype="fp16")
    assert job.servers_in_workers
    assert job.places.aggregators == {0: (0, 2), 1: (1, 3)}
    alone, _ = make_job("convnet", "allreduce", workers=2, servers=2, hosts=1)
    assert alone.places.aggregators == {}


def test_hosts_that_serve_alone_have_the_last_servers() -> None:
    job, _ = make_job("convnet", "ps", workers=2, servers=0, hosts=2, alone=1)
    assert (job.places.workers, job.places.servers) == ((0, 1), (2,))


@pytest.mark.parametrize("alone", [0, 1, 2, 4, 6])
def test_the_floor_of_a_step_is_what_the_busiest_link_takes(alone: int) -> None:
    hosts, mbit = 4, 1000
    model = 8 * OVERHEAD * BYTES / (mbit * 1e6)
    of_one = 2 * (hosts - 1) / hosts * model  # without further hosts both are allreduce's
    assert floor(hosts, 0, mbit) == pytest.approx(of_one) == optimum(hosts, 0, mbit)
    assert model <= optimum(hosts, alone, mbit) <= of_one <= floor(hosts, alone, mbit)
    assert optimum(hosts, hosts, mbit) == pytest.approx(model)
    assert floor(hosts, hosts, mbit) == pytest.approx(2 * model)


def test_a_loop_is_compared_with_all_rivals_and_with_fit_of_its_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = "ddp kept", "accelerate kept", "fit ps", "loop ps", "fit allreduce", "loop allreduce"
    times = {name: [1.0] for name in names}
    assert own_loop.compared("loop ps", times) == ["ddp kept", "accelerate kept", "fit ps"]
    assert own_loop.compared("accelerate kept", times) == ["ddp kept"]
    monkeypatch.setitem(own_loop.MODULES, "fabric", "no_such_module")
    assert own_loop.missing("fabric").startswith("fabric is left out")
    assert not own_loop.missing("ddp loop")


def test_the_benchmark_of_gpus_says_where_there_is_none_and_its_report_is_of_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main([])
    assert capsys.readouterr().out.startswith("not measured: torch sees no GPU here")
    lines = gpu.report("small", {name: [(0.5, 2e6), (0.25, 1e6)] for name in gpu.CONTENDERS})
    assert [line.split()[0] for line in lines.splitlines()[1:]] == ["plain", "one", "ddp", "two"]
    assert "plain: 1.000 (1.000 to 1.000)" in lines
