"""Loggers and the packages themselves: each step once, after a set-back and a death; see `make test-loggers`.

A program loses a worker, which sets it back, and is killed; it is started again, and once more. What
it logged is read with the package's own reader.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

STEPS = list(range(1, 31))
EVALUATIONS = [4, 8, 12, 16, 20, 24, 28, 30]
Logged = dict[str, list[int]]


def start(kind: str, folder: Path, *last: int) -> subprocess.CompletedProcess[str]:
    own = {
        "PYTHONPATH": str(ROOT),
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_SILENT": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    return subprocess.run(
        [sys.executable, "-m", "tests.observe.logged_program", kind, str(folder), *map(str, last)],
        env=os.environ | own, cwd=ROOT, text=True, capture_output=True, timeout=120,
    )  # fmt: skip


def run(kind: str, folder: Path) -> dict[str, Any]:
    """Runs the program until it is killed, and twice more; returns its history and runs."""
    killed = start(kind, folder, 18)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = []
    for _ in range(2):
        ended = start(kind, folder)
        assert ended.returncode == 0, ended.stderr
        (printed,) = (line for line in ended.stdout.splitlines() if line.startswith('{"rows"'))
        found.append(json.loads(printed))
    assert found[0] == found[1]
    rows = found[0]["rows"]
    assert (rows["step"], rows["evaluation"]) == (STEPS, EVALUATIONS)
    assert len(rows["event"]) >= 1, "nobody died"
    return dict(found[0])


def check(logged: Logged, rows: Logged) -> None:
    """Checks that all rows of a history were logged once; an epoch may have ended before a set-back."""
    assert sorted(logged["train"]) == STEPS
    assert sorted(logged["evaluation"]) == EVALUATIONS
    assert sorted(logged["event"]) == sorted(rows["event"])
    assert len(set(logged["epoch"])) == len(logged["epoch"])
    assert set(logged["epoch"]) >= set(rows["epoch"])


@pytest.mark.filterwarnings("ignore")  # of the packages, about each other
def test_tensorboard(tmp_path: Path) -> None:
    module = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(module, reason="needs tensorboard: make test-loggers")
    pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard: make test-loggers")
    found = run("tensorboard", tmp_path)
    (directory,) = (tmp_path / "runs").iterdir()
    assert found["runs"] == {f"TensorBoard {tmp_path / 'runs'}": str(directory)}
    read = reader.EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    groups = ("train", "evaluation", "epoch", "event")
    check({g: [e.step for e in read.Scalars(f"{g}/step")] for g in groups}, found["rows"])
    assert [event.step for event in read.Scalars("job/deaths")] == STEPS
    texts = read.Tensors("events/text_summary")
    assert [event.step for event in texts] == found["rows"]["event"]


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path) -> None:
    for name in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(name, reason=f"needs {name}: make test-loggers")
    from mlflow import MlflowClient

    found = run("mlflow", tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("digits")
    (one,) = client.search_runs([experiment.experiment_id])
    assert list(found["runs"].values()) == [one.data.tags["steepest.run"]]
    assert one.info.status == "FINISHED"

    def steps(name: str) -> list[int]:
        return [metric.step for metric in client.get_metric_history(one.info.run_id, name)]

    check({g: steps(f"{g}/step") for g in ("train", "evaluation", "epoch", "event")}, found["rows"])
    assert sorted(steps("job/deaths")) == sorted(steps("train/loss")) == STEPS


def records(path: Path) -> Iterator[bytes]:
    """Yields the records of a file that W&B writes offline: a LevelDB log with a header of its own."""
    content, at, record = path.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of the block
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or its last part
            yield record
            record = b""


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path: Path) -> None:
    reason = "needs wandb: make test-loggers"
    proto: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason=reason)
    found = run("wandb", tmp_path)
    (name,) = found["runs"].values()
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) == len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    logged: Logged = {group: [] for group in ("train", "evaluation", "epoch", "event")}
    summary: dict[str, Any] = {}
    for content in records(files[-1]):
        record = proto.Record.FromString(content)
        for item in record.history.item:
            group, _, key = (item.key or "/".join(item.nested_key)).partition("/")
            if key == "step":
                logged[group].append(json.loads(item.value_json))
        for item in record.summary.update:
            summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    check(logged, found["rows"])
    # which a run that is online is asked for
    assert (summary["train/step"], summary["evaluation/step"]) == (30, 30)


def test_trackio(tmp_path: Path) -> None:
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("needs trackio: make test-loggers")
    found = run("trackio", tmp_path)
    names, logs = read_trackio(tmp_path)
    assert names == list(found["runs"].values())
    groups = ("train", "evaluation", "epoch", "event")
    check(
        {g: [int(log[f"{g}/step"]) for log in logs if f"{g}/step" in log] for g in groups},
        found["rows"],
    )


def read_trackio(folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """The names of a project's runs, and what the first one has; in a process that has read no other folder's."""
    program = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s\n"
        "names = [record['name'] for record in s.get_run_records('digits')]\n"
        "print(json.dumps([names, s.get_logs('digits', names[0])]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True,
        env=os.environ | {"TRACKIO_DIR": str(folder / "trackio")},
    ).stdout  # fmt: skip
    names, logs = json.loads(output.splitlines()[-1])
    return names, logs


EXPORTING = """
import json, sys, time, urllib.request
import ray
from steepest import DistributedSGD, Prometheus
from tests.observe.logged_program import TASK
from tests.reference import samples

ray.init(
    address="local", num_cpus=4, include_dashboard=False,
    _system_config={"metrics_report_interval_ms": 1000},
)
names, found, until = set(sys.argv[1:]), {}, time.monotonic() + 90
with DistributedSGD(TASK.creator(), num_workers=2) as sgd:
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    while names - found.keys() and time.monotonic() < until:
        sgd.fit(
            steps=100, callbacks=[Prometheus("digits", seconds=0.0)], progress=False,
            validation=samples(17), evaluate_every=50,
        )
        for line in urllib.request.urlopen(url, timeout=30).read().decode().splitlines():
            if line.startswith("ray_steepest_") and 'run="digits"' in line:
                found[line.partition("{")[0]] = float(line.rpartition(" ")[2])
ray.shutdown()
print(json.dumps(found))
"""


@pytest.mark.cluster
def test_rays_nodes_export_what_the_dashboard_shows() -> None:
    for name in ("aiohttp", "opencensus", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs ray[default], {name} is missing: make test-loggers")
    dashboard = json.loads((ROOT / "docs" / "grafana_dashboard.json").read_text())
    shown = [t["expr"].partition("{")[0] for panel in dashboard["panels"] for t in panel["targets"]]
    assert len(shown) > 10
    exporting = subprocess.run(
        [sys.executable, "-c", EXPORTING, *shown], cwd=ROOT, text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=150,
    )  # fmt: skip
    assert exporting.returncode == 0, exporting.stderr
    found = json.loads(exporting.stdout.splitlines()[-1])
    assert set(shown) <= found.keys()
    assert found["ray_steepest_job_workers"] == 2
    assert found["ray_steepest_train_step"] > 0
