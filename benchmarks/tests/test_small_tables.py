"""The benchmark of small tables: what a step of its model calls, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import small_tables
from steepest import ParameterServerStrategy
from steepest.testing import InProcessCluster
from tests.step_calls import calls_of

STEPS = 20


@pytest.mark.parametrize(
    ("settings", "most"), [({"replicate": True}, 2000), ({"replicate": False}, 3400)]
)
def test_a_step_calls_few_functions_where_tables_are_known_to_be_small(
    settings: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_tables, "PAIRS", 10_000)
    monkeypatch.setattr(small_tables, "BATCH", 64)
    strategy = ParameterServerStrategy(num_servers=1)
    created = small_tables.model_of(settings, 2)
    cluster = InProcessCluster(created, num_workers=2, strategy=strategy)
    cluster.step(3)
    least = min((calls_of(cluster, STEPS) for _ in range(2)), key=lambda calls: calls.total())
    assert least.total() / STEPS <= most, least.most_common(20)


def test_ratios_are_those_of_a_round() -> None:
    one, other = {"wall": 2.0, "processor": 1.0}, {"wall": 4.0, "processor": 2.0}
    job = {"wall": 4.0, "processor": 3.0, "worker": 2.0, "server": 1.0}
    head, _, line = small_tables.table({"torch": [one, other], "ps": [job, job]}).splitlines()
    assert head.split()[:3] == ["ms", "a", "step"]
    assert line.split() == [
        "ps",
        "4.00",
        "1.50",
        "3.00",
        "2.25",
        "worker",
        "2.00,",
        "server",
        "1.00",
    ]
