"""The benchmark of tables trains the same rows as its rivals."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from benchmarks import embedding, embedding_disk, embedding_servers
from benchmarks.embedding_bodies import ClickModel, RowSteps
from benchmarks.namespaces import HOST

SMALL = RowSteps(features=3, batch=40, rows=100, count=2)


@pytest.fixture
def ray_runs(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray runs already."""
    monkeypatch.setattr(embedding_servers, "ray_started", lambda cpus: contextlib.nullcontext())


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


@pytest.mark.ray
@pytest.mark.usefixtures("ray_runs")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_rows_on_servers_are_trained_as_those_of_rivals() -> None:
    rows = embedding_servers.run_step(2, 3, SMALL)  # raises if values differ
    names = {row["name"] for row in rows} - {"FBGEMM"}
    assert names == {"trainer", "two processes", "torch, 26 bags", "torch, one bag", "tutorial"}
    assert all(row["over"]["min"] > 0 for row in rows)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_runs")
def test_processor_time_is_that_of_all_processes() -> None:
    two, one = embedding_servers.run_workers(1, 20, SMALL)
    assert (two["name"], one["name"]) == ("two workers", "one worker")
    assert min(two["us"], one["us"]) > 0


@pytest.mark.long
def test_hybrid_jobs_take_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_servers, "star", lambda *_: contextlib.nullcontext([HOST, HOST]))
    hybrid, ps = embedding_servers.run_hybrid(1, 5, 1000, ClickModel(batch=50, samples=10_000))
    assert (hybrid["name"], ps["name"]) == ("hybrid", "ps")
    assert min(hybrid["ms"], ps["ms"]) > 0


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_runs")
def test_clicks_are_learned() -> None:
    (row,) = embedding_servers.run_areas(ClickModel(batch=50, samples=20_000), seeds=1)
    assert 0.65 < row["hybrid"] < 0.8
    assert 0.65 < row["ps"] < 0.8


def test_rows_on_disk_are_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_disk, "BATCH", 50)
    monkeypatch.setattr(embedding_disk, "LOOK_UPS", 26 * 50)
    monkeypatch.setattr(embedding_disk, "STORED", 2000)
    monkeypatch.setattr(embedding_disk, "ASKED", 100)
    (row,) = embedding_disk.run_disk(2, 20_000, 0.5, tmp_path, False)  # raises if values differ
    assert 0 < row["look-ups in memory"] < 1
    rows = embedding_disk.run_stores(2, tmp_path)
    assert {row["name"] for row in rows} >= {"steepest"}
