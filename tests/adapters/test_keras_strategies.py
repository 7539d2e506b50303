"""The page from TensorFlow: its code runs, and TensorFlow's strategies end with the weights of those here."""

# ruff: noqa: I001 - keras_tools comes first: it skips the module where there is no TensorFlow

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.adapters.keras_tools import compute_in

import numpy as np
import pytest

from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.adapters.tensorflow import TensorFlowModel
from steepest.testing import InProcessCluster

PAGE = Path(__file__).parent / "tensorflow_strategies.md"
OURS = Path(__file__).parents[2] / "docs" / "howto" / "from_tensorflow.md"
COMMON, MIRRORED, MULTI_WORKER, SERVERS = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL
)
SAVE = (
    "\nimport numpy\nfor name in models: numpy.savez(f'{name}.npz', *models[name].get_weights())\n"
)

pytestmark = pytest.mark.long


def start(program: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    (script := folder / "program.py").write_text(program)
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(program: str, folder: Path, **environment: str) -> str:
    process = start(program, folder, **environment)
    printed, _ = process.communicate(timeout=150)
    assert process.returncode == 0, printed[-4000:]
    return printed


def arrays(file: Path) -> list[np.ndarray]:
    with np.load(file) as found:
        return [found[name] for name in found.files]


def ours(strategy: Any, workers: int) -> list[np.ndarray]:
    """The page's model, trained here."""
    page: dict[str, Any] = {}
    exec(compile(COMMON, str(PAGE), "exec"), page)

    def create(worker_index: int, device_index: int) -> TensorFlowModel:
        data = page["x"], page["y"]
        return TensorFlowModel(page["network"](), data=data, batch_size=64 // workers)

    compute_in("float32")
    cluster = InProcessCluster(create, num_workers=workers, strategy=strategy)
    cluster.step(5)
    weights = cluster.weights()
    names = [f"{layer}/{kind}" for layer in ("dense", "dense_1") for kind in ("kernel", "bias")]
    return [weights[name].numpy() for name in names]


def close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert np.abs(mine - theirs).max() < 1e-6 * np.abs(theirs).max()


@pytest.mark.full  # the script below has MirroredStrategy, too
def test_mirrored_central_storage_and_one_device_end_with_our_weights(tmp_path: Path) -> None:
    run(COMMON + MIRRORED + SAVE, tmp_path)
    close(ours(AllreduceStrategy(), 2), arrays(tmp_path / "allreduce.npz"))
    close(ours(ParameterServerStrategy(num_servers=1), 2), arrays(tmp_path / "ps.npz"))
    close(ours(ParameterServerStrategy(), 1), arrays(tmp_path / "one.npz"))


@pytest.mark.full
def test_multi_worker_mirrored_ends_with_our_weights(tmp_path: Path) -> None:
    ports = [socket.create_server(("localhost", 0)) for _ in range(2)]
    workers = [f"localhost:{port.getsockname()[1]}" for port in ports]
    for port in ports:
        port.close()
    processes = []
    for index in range(2):
        (folder := tmp_path / str(index)).mkdir()
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        program = COMMON + MULTI_WORKER + SAVE
        processes.append(start(program, folder, TF_CONFIG=json.dumps(config)))
    printed = [process.communicate(timeout=150)[0][-4000:] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    expected = arrays(tmp_path / "0" / "allreduce.npz")
    close(arrays(tmp_path / "1" / "allreduce.npz"), expected)
    close(ours(AllreduceStrategy(), 2), expected)


@pytest.mark.full
def test_parameter_servers_end_with_our_weights(tmp_path: Path) -> None:
    run(COMMON + SERVERS + SAVE, tmp_path)
    close(ours(ParameterServerStrategy(mode="async"), 1), arrays(tmp_path / "async.npz"))


def test_a_keras_script_changes_by_ten_lines_and_ends_with_the_same_weights(
    simulated: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # workers are threads of this process, whose memory is left as it is
    monkeypatch.setattr("steepest.runtime.process.keep_freed_memory", lambda: False)
    compute_in("float32")
    (diff,) = re.findall(r"```diff\n(.*?)```", OURS.read_text(), flags=re.DOTALL)
    lines = diff.splitlines()
    assert sum(line.startswith("+") for line in lines) <= 10
    found = []
    for sign in "-+":
        program = "\n".join(line[1:] for line in lines if line[:1] in (" ", sign))
        exec(compile(program, str(OURS), "exec"), names := {"__name__": "__main__"})
        assert "accuracy" in capsys.readouterr().out
        found.append(names["weights"])
    close(found[1], found[0])
