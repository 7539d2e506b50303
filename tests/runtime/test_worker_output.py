"""What workers print is on the driver's terminal before they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from ray._private import ray_logging, worker

from steepest.runtime import ray_private
from steepest.runtime.worker_output import PrintedLines

WORKER = """
import sys
from steepest.runtime.worker_output import write_marks
print(":actor_name:a worker", file=sys.stderr)
print("epoch 1", "accuracy 0.5", sep="\\n", end="")
marks = write_marks("token")
print(*marks, file=open(sys.argv[1], "w"))
"""
SCRIPT = """
import sys, torch, steepest
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.rand(8, 2), batch_size=2)
model, optimizer, loader = steepest.prepare(model, optimizer, loader)
for epoch in steepest.epochs(2):
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    print("epoch", epoch)
print("to standard error", file=sys.stderr)
print("accuracy", end="")
"""


def test_lines_before_a_mark_are_shown_when_it_has_come_and_the_mark_is_not(tmp_path: Path) -> None:
    """A file in which there is nothing but Ray's own lines gets none."""
    out, told = tmp_path / "out", tmp_path / "marks"
    with out.open("w") as file, (tmp_path / "err").open("w") as errors:
        command = [sys.executable, "-c", WORKER, str(told)]
        subprocess.run(command, stdout=file, stderr=errors, check=True)
    marks, shown = told.read_text().split(), list[dict[str, Any]]()
    assert len(marks) == 1
    assert (tmp_path / "err").read_text() == ":actor_name:a worker\n"
    arrived = PrintedLines(shown.append)
    assert not arrived.wait(marks, 0)
    data = {"pid": 7, "lines": out.read_text().splitlines()}
    sender = Thread(target=arrived, args=(data,))
    sender.start()
    assert arrived.wait(marks, 10)
    sender.join()
    assert shown == [{"pid": 7, "lines": ["epoch 1", "accuracy 0.5"]}]
    arrived({"lines": data["lines"][-1:]})
    assert shown[1:] == [{"lines": ["accuracy 0.5"]}]
    assert arrived.wait([], 0)


def test_rays_handler_of_lines_is_preceded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, shown = ray_logging.WorkerStandardStreamDispatcher(), list[Any]()
    monkeypatch.setattr(worker, "global_worker_stdstream_dispatcher", dispatcher)
    assert ray_private.printed_lines() is None  # log_to_driver=False
    dispatcher.add_handler("ray_print_logs", shown.append)
    arrived = ray_private.printed_lines()
    assert arrived is not None
    assert ray_private.printed_lines() is arrived
    dispatcher.emit({"lines": ["a line"]})
    assert shown == [{"lines": ["a line"]}]
    monkeypatch.delattr(worker, "global_worker_stdstream_dispatcher")
    assert ray_private.printed_lines() is None


@pytest.mark.parametrize("asked", [None, "1"])
def test_the_same_line_of_two_workers_is_shown_twice(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the environment asks for less."""
    monkeypatch.setattr(ray_logging, "RAY_DEDUP_LOGS", True)
    monkeypatch.delenv("RAY_DEDUP_LOGS", raising=False)
    if asked is not None:
        monkeypatch.setenv("RAY_DEDUP_LOGS", asked)
    ray_private.show_repeated_lines()
    once = ray_logging.LogDeduplicator(5, None, None)
    batches = [
        once.deduplicate({"ip": "", "pid": pid, "lines": ["loss falls"]}) for pid in range(2)
    ]
    lines = [line for found in batches for batch in found for line in batch["lines"]]
    assert lines == ["loss falls"] * (2 if asked is None else 1)


@pytest.mark.cluster
def test_what_a_script_prints_last_is_shown(tmp_path: Path) -> None:
    """As much as each of two workers prints at its end, and before."""
    (script := tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "steepest", "run", str(script), "--workers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": ""}
    ended = subprocess.run(
        [*command, "--no-progress"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    for line in ("epoch 0", "epoch 1", "accuracy"):
        assert ended.stdout.count(line) == 2, ended.stdout
    assert ended.stderr.count("to standard error") == 2
    assert "steepest_printed" not in ended.stdout + ended.stderr
