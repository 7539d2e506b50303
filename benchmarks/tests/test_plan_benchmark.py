"""The benchmark of plans: its cases can be had, and errors are relative."""

from __future__ import annotations

import pytest

from benchmarks.plan import Compared, cases, cases_of_one_host
from benchmarks.plan_published import RESNET_101, published_profile
from steepest.cli.planning.simulation import make_job


def test_errors_are_relative_to_what_was_measured() -> None:
    assert Compared("case", (2.0, 1.0, 3.0), 1.9, (0.1, 0.1), (0.0, 0.0)).error == pytest.approx(
        -0.05
    )


def test_every_case_can_be_had() -> None:
    profile = published_profile(RESNET_101, 1, 0.06)
    for hosts, _, _, strategy in cases().values():
        assert make_job(profile, strategy, hosts).num_workers == hosts
    for _, strategy in cases_of_one_host().values():
        assert make_job(profile, strategy, 2, 1, together=True).num_workers == 2
