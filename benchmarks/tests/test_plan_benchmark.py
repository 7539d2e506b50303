"""The benchmark of plans: its cases can be had, and published hardware gives the published order."""

from __future__ import annotations

import pytest

from benchmarks.plan import (
    RESNET_101,
    VGG_16,
    Compared,
    cases,
    ps,
    published_profile,
)
from steepest.planning.events import Links
from steepest.planning.profile import Costs
from steepest.planning.simulation import make_job, predict
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.simple import SimpleStrategy


def test_errors_are_relative_to_what_was_measured() -> None:
    assert Compared("case", (2.0, 1.0, 3.0), 1.9).error == pytest.approx(-0.05)


def test_every_case_can_be_had() -> None:
    profile = published_profile(RESNET_101, 1, 0.06)
    for hosts, _, _, strategy in cases().values():
        assert make_job(profile, strategy, hosts).num_workers == hosts


def test_layers_add_up_to_the_models() -> None:
    sizes = [published_profile(layers, 1, 1.0).nbytes / 4e6 for layers in (RESNET_101, VGG_16)]
    assert sizes == pytest.approx([44.5, 138.3], rel=0.02)


def test_servers_beat_the_driver_as_published() -> None:
    costs = Costs(sent=2e-9, received=2e-9)
    profile = published_profile(RESNET_101, 64, 64 / 218, costs)
    links = Links(25e9 / 8, 5e-5)
    found = [
        predict(profile, strategy, 2, links, devices=8).samples_per_second
        for strategy in (ps(2), SimpleStrategy())
    ]
    assert found[0] > 2 * found[1]


def test_the_larger_model_scales_worse_as_published() -> None:
    links = Links(25e9 / 8, 5e-5)
    shares = [
        predict(
            published_profile(layers, 64, 64 / images), AllreduceStrategy(), 8, links, devices=4
        ).samples_per_second
        / (32 * images)
        for layers, images in ((RESNET_101, 135.0), (VGG_16, 145.0))
    ]
    assert shares[1] < 0.97 * shares[0] < shares[0] < 1
