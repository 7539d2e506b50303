"""Benchmarks of deaths measure what they say: pauses, shares, gaps and growth, by hand and on real processes."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import elasticity, recovery, soak, stragglers
from benchmarks.recovery_bodies import Clock, Recovery, Seen, around, kill_worker, pause_in
from benchmarks.soak_samples import Holding, Place, holding, place, trends, trends_text
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.commit_log import Commit, CommitLog, LoggedPush
from steepest.strategies.named import as_strategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import linear_model_creator


def commit(version: int, *pushes: tuple[int, int, int]) -> Commit:
    """One of (worker, incarnation, share)."""
    logged = tuple(
        LoggedPush(worker, life, 0, version - 1, share) for worker, life, share in pushes
    )
    return Commit(version, logged, None, 1.0, False)


def test_the_pause_is_the_longest_silence_after_the_kill() -> None:
    straight = [
        (1, 1.0),
        (2, 2.0),
        (3, 2.6),
        (4, 7.0),
        (5, 8.0),
    ]  # step 3 was committed before, heard of after
    assert pause_in(straight, 2.5) == (4.5, 4.5, 0)
    returned = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 9.0), (3, 9.5), (4, 10.0)]
    assert pause_in(returned, 3.5) == (5.5, 6.5, 2)
    with pytest.raises(ValueError, match="no step"):
        pause_in(straight, 8.0)


def test_samples_that_are_missing_or_repeated_are_counted() -> None:
    def found(*shares: int) -> tuple[int, int]:
        commits = tuple(commit(n, (0, 0, share)) for n, share in enumerate(shares))
        seen = Seen(8)
        seen.add(
            CommitLog(commits, as_strategy("async"), 2, 1, 0, plan=SamplePlan(8, 4, 0), cuts=(2, 2))
        )
        seen.close(1)
        return seen.lost, seen.twice

    assert found(0, 1, 2, 3) == found(3, 1, 0, 2, 4, 4) == (0, 0)
    assert found(0, 1, 2) == (2, 0)
    assert found(0, 1, 1, 2, 3) == (0, 2)


def test_gaps_and_successors_are_found_in_the_log() -> None:
    commits = [
        commit(1, (1, 0, 0)),
        commit(2, (0, 0, 1)),
        commit(3, (0, 0, 2)),
        commit(4, (1, 1, 3)),
    ]
    found = around(
        [commits], [0.0, 1.0, 2.0, 5.0, 6.0], victim=1, killed=1.5
    )  # one more time, from before the log
    assert found == {"gap": 3.0, "successor": 4.5, "meanwhile": 2}
    anew = [commits[:2], commits[2:3], [commit(4, (1, 0, 3))]]
    assert around(anew, [0.0, 1.0, 2.0, 5.0, 6.0], victim=1, killed=1.5) == found
    assert around([commits[:3]], [1.0, 2.0, 5.0], victim=1, killed=1.5) == {"gap": 3.0}


def test_the_clock_travels_without_its_file(tmp_path: Path) -> None:
    clock = Clock(str(tmp_path), 0.5)
    assert [clock(step) for step in range(3)] == [0.5] * 3
    make, arguments = clock.__reduce__()
    assert make(*arguments)(0) == 0.5
    times = clock.commits()
    assert len(times) == 4
    assert times == sorted(times)


def test_the_table_shows_shares_that_were_lost_in_any_round() -> None:
    ours = [Recovery(1.0, 1.0, 0, 0.5, 2.0, 7, lost, 0) for lost in (0, 3, 0)]
    rival = [Recovery(8.0, 10.0, 41)] * 3
    lines = recovery.deaths_text({"ps": ours, recovery.RIVAL: rival}, workers=2).splitlines()
    assert lines[3].split() == [
        "ps",
        "1.00",
        "1.00..1.00",
        "1.00",
        "0.10",
        "0.10..0.10",
        "2.00",
        "0.50",
        "7",
        "0",
        "3,",
        "0",
    ]
    assert lines[4].split() == [recovery.RIVAL, "8.00", "8.00..8.00", "10.00", "41"]


def test_a_ratio_of_checkpoints_is_of_the_same_round() -> None:
    without = [{"step": 0.1}, {"step": 0.2}, {"step": 0.4}]
    kept = [
        {"step": 0.11, "paused for": 0.1, "written in": 0.5},
        *({"step": 0.3} | kept_for for kept_for in PAUSES),
    ]
    lines = elasticity.keeps_text({elasticity.WITHOUT: without, elasticity.KEPT: kept}).splitlines()
    assert lines[2].split()[-2:] == ["200.0", "ms"]
    assert lines[3].split()[3:7] == ["ms", "1.10", "0.75..1.50;", "paused"]
    assert lines[3].endswith("paused for 0.200 s; written in 0.600 s")


PAUSES = [{"paused for": 0.2, "written in": 0.6}, {"paused for": 0.3, "written in": 0.7}]


def test_seconds_are_read_out_of_what_was_said() -> None:
    with elasticity.told("steepest.some") as said:
        logging.getLogger("steepest.some").info(
            "%s: training paused for %.3f s, written in %.3f s", "here", 0.25, 1.5
        )
        logging.getLogger("steepest.other").warning("training paused for 9 s")
    logging.getLogger("steepest.some").warning("training paused for 9 s")
    assert elasticity.seconds_in(said, "paused for") == [0.25]
    assert elasticity.seconds_in(said, "written in") == [1.5]
    assert elasticity.seconds_in(said, "stopped for") == []


def test_what_grows_is_found() -> None:
    grows = trends("a", [Holding(300.0 + sample, 5, 10 + sample, 3) for sample in range(30)])
    assert [trend.what for trend in grows if trend.grows] == ["memory", "files"]
    assert trends_text(grows).count("GROWS") == 2
    assert not any(trend.grows for trend in trends("machine", [Place(0, 9)] * 6))
    assert trends("a", [Holding(1.0, 1, 1, 1)] * 5) == []


def test_what_this_process_holds() -> None:
    before = holding(os.getpid())
    reader, writer = os.pipe()
    try:
        after = holding(os.getpid())
    finally:
        os.close(reader)
        os.close(writer)
    assert before is not None
    assert after is not None
    assert after.files - before.files == 2
    assert (after.sockets, after.threads) == (before.sockets, before.threads)
    assert 10 < after.memory < 10_000
    assert holding(2**22 + 1) is None  # above the greatest pid
    assert place(os.getpid()).shared == sum(len(files) for _, _, files in os.walk("/dev/shm"))


def test_a_slow_worker_is_slow_and_others_are_not() -> None:
    create = stragglers.model_creator(0.1, 0.01, two_classes)
    assert [round(create(worker, 0).seconds, 3) for worker in range(4)] == [0.01, 0.01, 0.01, 0.05]
    text = recovery.straggler_text(
        {"sync": [40.0, 60.0], "sync, 1 backup": [20.0, 20.0], "async": [10.0, 18.0]}
    )
    assert text.splitlines()[5].split() == [
        "async",
        "14.0",
        "10.00..18.00",
        "0.28",
        "0.25..0.30",
        "0.5",
    ]


def two_classes() -> Any:
    """What a network can tell apart after a few steps; to train with, and to test."""
    y = torch.arange(256) % 2
    x = torch.zeros(256, 784)
    x[:, 0] = 2.0 * y - 1
    return (x, y), (x, y)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
class TestOnRay:
    """The same on real processes, as small as can be."""

    @pytest.mark.parametrize("strategy", ["ps", "async"])
    def test_a_worker_that_is_killed(self, strategy: str) -> None:
        found = kill_worker(strategy, 2, step=5, steps_after=60, seconds=0.05)
        assert found.next_step > 0
        assert (found.again, found.lost, found.twice) == (0, 0, 0)
        if strategy == "ps":
            assert found.meanwhile == 0
            assert found.gap is not None
            assert found.successor is not None
            assert found.gap > found.successor / 2 > 0  # nobody went on without it

    def test_the_slow_worker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stragglers, "LOOK_SECONDS", 0.0)
        seconds = stragglers.time_to(
            stragglers.MODES["async"], goal=0.9, seconds=0.001, load=two_classes
        )
        assert 0 < seconds < stragglers.LIMIT_SECONDS

    def test_checkpoints_and_other_sizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"EVERY": 4, "FIRST": 5, "LAST": 15}.items():
            monkeypatch.setattr(elasticity, name, value)
        found = elasticity.kept_seconds(2, True, linear_model_creator())
        assert found.keys() == {"step", "paused for", "written in"}
        assert elasticity.kept_seconds(2, False, linear_model_creator()).keys() == {"step"}
        for change in ({"num_workers": 3}, {"num_servers": 2}):
            assert elasticity.resize_seconds(2, change, linear_model_creator()) > 0
        found = elasticity.death_seconds(ParameterServerStrategy(), 0, linear_model_creator())
        assert found.keys() == {"left", "returned"}
        text = elasticity.resizes_text({"1 to 2 servers": [0.25], "of 3, ps": [found]})
        assert "0.25" in text
        assert text.count("of 3, ps") == 2

    @pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning"
    )  # Ray Train's own
    def test_ray_train_goes_back_to_its_checkpoint(self, tmp_path: Path) -> None:
        pytest.importorskip("ray.train.torch", reason="needs pandas and pyarrow")
        from benchmarks.recovery_rivals import train_with_ray

        config = {
            "network": functools.partial(torch.nn.Linear, 2, 2),
            "data": (torch.ones(9, 2), torch.ones(9).long()),
        }
        config |= {"batch": 2, "rate": 0.1, "seconds": 0.0, "steps": 60, "kill_step": 55}
        stamps, killed = train_with_ray(config, 2)
        next_step, new_step, again = pause_in(stamps, killed)
        assert again in (5, 55)  # Ray Train may not know of the checkpoint yet
        assert 0 < next_step <= new_step
        assert stamps[-1][0] == 60


def test_the_sections_are_measured_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recovery, "ray_started", lambda cpus: contextlib.nullcontext())
    monkeypatch.setitem(
        recovery.DEATHS, "worker", lambda workers: {"ps": lambda: Recovery(1.0, float(workers), 0)}
    )
    recovery.main(
        ["--only", "worker", "--rounds", "2", "--workers", "3", "--json", str(tmp_path / "found")]
    )
    found = json.loads((tmp_path / "found").read_text())
    assert [each["new_step"] for each in found["deaths"]["ps"]] == [3.0, 3.0]
    with pytest.raises(SystemExit):
        recovery.main(["--workers", "1"])


def test_jobs_of_a_soak_are_bad_when_a_share_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"lost": 0, "twice": 0, "accuracy": 1.0}

    def job(strategy: str, *rest: Any) -> soak.Found:
        return soak.Found(strategy, **found)

    monkeypatch.setattr(soak, "job", job)
    options = argparse.Namespace(minutes=1.0, strategy=["ps"], workers=2, steps=1, seed=0)
    assert soak.soak(options) == 0
    right = dict(found)
    for wrong in (
        {"lost": 1},
        {"twice": 1},
        {"accuracy": 0.5},
        {"wrong": ["epoch 0"]},
        {"error": "none"},
    ):
        found |= wrong
        assert soak.soak(options) == 1
        found = dict(right)
