"""Published figures come out of the simulation with the schedule of those who published them."""

from __future__ import annotations

import pytest

from benchmarks.plan_published import (
    FUSED,
    HOROVOD,
    OURS,
    RAY,
    RESNET_101,
    VGG_16,
    byteps,
    byteps_hosts,
    byteps_optimum,
    horovod,
    published_profile,
    ray_sgd,
)

STORE = 1.23e-9  # seconds for a byte, as `seconds_of_store` finds
BYTES = published_profile(VGG_16, 64, 1.0).nbytes


def test_layers_add_up_to_the_models() -> None:
    sizes = [published_profile(layers, 1, 1.0).nbytes / 4e6 for layers in (RESNET_101, VGG_16)]
    assert sizes == pytest.approx([44.5, 138.3], rel=0.02)


@pytest.mark.parametrize("case", [case for case in RAY if case[2] == "simple"])
def test_a_driver_that_averages_as_published(case: tuple[int, int, str]) -> None:
    assert ray_sgd(*case, STORE) == pytest.approx(float(RAY[case]), rel=0.1)


@pytest.mark.parametrize(("case", "images"), [((2, 8, "ps"), 1661), ((4, 4, "ps"), 1764)])
def test_servers_on_two_hosts_as_published(case: tuple[int, int, str], images: float) -> None:
    assert ray_sgd(*case, STORE) == pytest.approx(images, rel=0.1)


@pytest.mark.parametrize("model", HOROVOD)
def test_a_ring_loses_what_was_published(model: str) -> None:
    # links and graphics processors of the simulation lose nothing beside: it is above what was published
    assert HOROVOD[model] < horovod(model, 16, chunk_bytes=FUSED // 16) < HOROVOD[model] + 0.1


@pytest.mark.parametrize("alone", [1, 8])
def test_the_optimum_of_hosts_that_only_sum_up(alone: int) -> None:
    hosts = byteps_hosts(8, alone)
    # of each host's bytes, a worker's machine has (n-k) parts where one that sums up has 2(n-1)
    if alone < 8:
        assert hosts.count(8) * (8 - alone) == hosts.count(0) * 2 * 7
    optimum = byteps_optimum(8, alone, BYTES)
    streamed = byteps(8, alone, chunk_bytes=4 << 20)
    assert optimum < streamed < 1.3 * optimum  # of 4 MB pieces; 1.1 of 1 MB
    committed = byteps(8, alone, OURS, chunk_bytes=4 << 20)
    # a link that carries gradients one way first, and weights the other way after, is used half of the time
    assert committed > 1.7 * streamed
