"""The benchmark of tables trains the same rows as its rivals."""

from __future__ import annotations

import pytest

from benchmarks import embedding


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_the_contenders_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FEATURES": 3, "BATCH": 40, "ROWS": 100, "LOOK_UPS": 120}.items():
        monkeypatch.setattr(embedding, name, value)
    rows = embedding.run_step(2)  # raises if values differ
    names = {row["name"] for row in rows}
    assert names - {"FBGEMM"} == {"steepest", "torch, 26 bags", "torch, one bag", "tutorial"}
    assert all(row["over"]["min"] > 0 for row in rows)
