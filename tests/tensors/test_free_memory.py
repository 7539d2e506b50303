"""What memory is free, and the warning before more is taken."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from steepest import DistributedSGD
from steepest.core.tensors.free_memory import free_bytes, warn_if_short
from steepest.runtime.state import snapshots
from tests.reference import Task

MACHINE = "MemTotal:       16384 kB\nMemAvailable:    4096 kB\nSwapFree: 0 kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MACHINE)
    return tmp_path / "meminfo"


def limit(folder: Path, most: str, used: int, files: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile 500\ninactive_file {files}\nslab 3\n")


def test_the_machine_or_the_group_has_less(machine: Path, tmp_path: Path) -> None:
    assert free_bytes(machine, tmp_path / "none") == 4 << 20
    limit(tmp_path, "3000", used=2500, files=200)
    assert free_bytes(machine, tmp_path) == 700
    limit(tmp_path, str(1 << 40), used=2500, files=200)
    assert free_bytes(machine, tmp_path) == 4 << 20
    limit(tmp_path, "max", used=2500, files=200)
    assert free_bytes(machine, tmp_path) == 4 << 20
    limit(tmp_path, "3000", used=3500, files=0)
    assert free_bytes(machine, tmp_path) == 0
    assert free_bytes(tmp_path / "none", tmp_path / "none") is None


def test_a_lack_is_said_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "steepest"):
        assert not warn_if_short(10, "it", "do so", None)
        assert not warn_if_short(10, "it", "do so", 10)
        assert not caplog.records
        assert warn_if_short(3_000_000_000, "it", "do so", 1_200_000_000)
    (said,) = caplog.messages
    assert said.startswith("it takes 3.0 GB, and 1.2 GB are free here")
    assert said.endswith("do so")


@pytest.mark.usefixtures("simulated")
def test_before_a_second_copy_of_the_state_it_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "free_bytes", lambda: 100)
    with DistributedSGD(Task().creator(), num_workers=2) as trainer:
        trainer.fit(steps=50, progress=False)
    (said,) = [text for text in caplog.messages if "next copy of the job's state" in text]
    assert "FailureConfig(snapshot_every=0)" in said
