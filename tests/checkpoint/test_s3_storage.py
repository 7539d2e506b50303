"""Checkpoints on a server that speaks S3, with s3fs; see `make test-storage`, which installs both."""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from steepest.checkpoint import files
from steepest.checkpoint.prefix_lease import LEASES, PrefixLease
from steepest.data.spark import ParquetRows
from steepest.data.storage import object_storage
from steepest.data.storage.files import storage_of
from steepest.data.storage.object_storage import ObjectStorage, Patience
from steepest.data.storage.places import ObjectUrl, StoragePlace, place_of
from steepest.errors import CheckpointError, ConfigurationError
from steepest.observe.history_file import history_file
from steepest.observe.loggers import TensorBoard
from steepest.tables.files.exported_table import ExportedTable
from tests.checkpoint.kept_checkpoints import undisturbed
from tests.checkpoint_contents import content
from tests.conftest import ROOT
from tests.storage_contract import StorageContract, holds, kept, names, whole
from tests.whole_checkpoints import all_of

s3fs = pytest.importorskip("s3fs", reason="make test-storage installs it")
moto = pytest.importorskip("moto.server", reason="make test-storage installs it")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BUCKET = "steepest-tests"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEYxx"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server with an empty bucket, and the environment in which AWS' own tools find it."""
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        object_storage.filesystem.cache_clear()
        object_storage.filesystem("s3", os.getpid()).mkdir(BUCKET)
        try:
            yield f"http://{host}:{port}"
        finally:
            object_storage.filesystem.cache_clear()
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused for no reason that is known to stay fails soon."""
    monkeypatch.setattr(object_storage, "Patience", partial(Patience, retry=2.0))


@pytest.fixture
def url(endpoint: str) -> ObjectUrl:
    """A prefix in which there is nothing."""
    found = place_of(f"s3://{BUCKET}/{secrets.token_hex(4)}/run")
    assert isinstance(found, ObjectUrl)
    return found


@pytest.fixture
def store(endpoint: str) -> Any:
    return object_storage.filesystem("s3", os.getpid())


class TestS3(StorageContract):
    @pytest.fixture
    def place(self, url: ObjectUrl) -> StoragePlace:
        return url


class Requests:
    """Requests of a kind fail from one on, so many of them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, method: str, first: int, count: int
    ) -> None:
        self.seen = 0
        original = s3fs.core._error_wrapper

        async def call(function: Any, **arguments: Any) -> Any:
            if function.__name__ == method:
                self.seen += 1
                if first <= self.seen < first + count:
                    raise ConnectionResetError("the connection is reset")
            return await original(function, **arguments)

        monkeypatch.setattr(s3fs.core, "_error_wrapper", call)


def uploads(store: Any) -> list[Any]:
    """Uploads that were begun and neither finished nor given up."""
    return list(store.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", []))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 5 MB, the least that S3 takes."""
    monkeypatch.setattr(object_storage, "PART", 5 << 20)


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_fails_midway_is_done_again(
    url: ObjectUrl, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch, "upload_part", 2, 1)
    saved = whole(1.0, 4 << 20)
    files.write(url, saved)
    assert requests.seen == 4  # two parts, twice
    assert torch.equal(all_of(url).weights["w"], saved.weights["w"])
    assert uploads(store) == []


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_keeps_failing_leaves_the_last_checkpoint_and_nothing_else(
    url: ObjectUrl, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(url, content(1.0, 1))
    monkeypatch.setattr(ObjectStorage, "of", lambda scheme: ObjectStorage(store, Patience(retry=0)))
    with monkeypatch.context() as patch:
        Requests(patch, "upload_part", 2, 99)
        with pytest.raises(CheckpointError, match=f"writing {url}/weights.*reset") as caught:
            files.write(url, whole(2.0, 4 << 20))
    assert SECRET not in str(caught.value)
    assert holds(url, 1.0)
    assert len(names(url)) == 4
    assert uploads(store) == []


def test_a_lost_race_is_found_out_and_the_winner_stays(url: ObjectUrl) -> None:
    def other(file: object) -> None:
        if "manifest" in str(file):
            files.write(url, content(1.0, 1))

    with pytest.raises(CheckpointError, match=f"cannot write a checkpoint to {url}: creating"):
        files.write(url, content(2.0, 2), other)
    assert holds(url, 1.0)
    assert len(names(url)) == 4


def test_of_two_who_replace_at_once_the_store_refuses_one(
    url: ObjectUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked before either has written."""
    files.write(url, content(1.0, 1))
    first = storage_of(url).version(url / "manifest.json")
    files.write(url, content(2.0, 2))
    monkeypatch.setattr(ObjectStorage, "version", lambda self, file: first)
    with pytest.raises(CheckpointError, match=f"cannot write a checkpoint to {url}: replacing"):
        files.write(url, content(3.0, 3))
    assert holds(url, 2.0)
    assert len(names(url)) == 4


def test_an_exported_table_by_url(url: ObjectUrl) -> None:
    table = ExportedTable("t", torch.tensor([1, 2]), torch.ones(2, 3))
    table.save(f"{url}/t.safetensors")
    found = ExportedTable.load(f"{url}/t.safetensors")
    assert torch.equal(found.embedding().weight, table.embedding().weight)
    with pytest.raises(CheckpointError, match=f"{url}/u") as caught:
        ExportedTable.load(f"{url}/u")
    with pytest.raises(CheckpointError, match="no-such-bucket-is-here") as refused:
        table.save("s3://no-such-bucket-is-here/t")
    assert not any(SECRET in str(each.value) for each in (caught, refused))


def test_rows_of_parquet_files_by_url(url: ObjectUrl, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table(
        {"x": [float(i) for i in range(12)], "y": list(range(12))}
    )
    for number in range(2):
        file = tmp_path / f"part-{number}.parquet"
        parquet.write_table(table.slice(6 * number, 6), file, row_group_size=4)
        data = file.read_bytes()
        storage_of(url).write(url / file.name, lambda data=data: iter([memoryview(data)]))
    rows = pickle.loads(pickle.dumps(ParquetRows(str(url), features=["x"], target="y")))
    assert (rows.size, rows.blocks) == (12, (4, 2, 4, 2))
    (found,) = rows.open([np.array([3, 11, 0, 7])])
    assert (found[0].flatten().tolist(), found[1].tolist()) == ([3, 11, 0, 7], [3, 11, 0, 7])
    with pytest.raises(ConfigurationError, match="no-such-bucket-is-here") as caught:
        ParquetRows("s3://no-such-bucket-is-here/rows", features=["x"], target="y")
    assert SECRET not in str(caught.value)


def test_tensorboards_files_by_url(url: ObjectUrl) -> None:
    pytest.importorskip("tensorboardX")
    logger = TensorBoard(str(url), seconds=0.0)
    run, _ = logger.open(logger.new_run(), 0)
    assert run.startswith(f"{url}/")
    for step in (1, 2):
        row = {"kind": "step", "step": step, "time": 1.0, "samples": 4, "loss": 0.5}
        logger._take(row, old=False)
        logger._send()
        (file,) = storage_of(url).files(place_of(run))  # tensorboardX' thread may write to it later
    logger.finish("finished")
    assert storage_of(url).read(file).count(b"train/loss") == 2


def test_two_leases_exclude_each_other(url: ObjectUrl, caplog: pytest.LogCaptureFixture) -> None:
    first = PrefixLease(url)

    def renew(seconds: float) -> None:
        first.renew()

    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* keeps its own there"):
        PrefixLease(url, wait=renew)
    first.release()
    PrefixLease(url).release()
    assert names(url / LEASES) == ["000002"]
    assert "under conditions" not in caplog.text


def test_a_bucket_that_is_not_there_is_named(endpoint: str) -> None:
    missing = place_of("s3://no-such-bucket-is-here/run")
    with pytest.raises(CheckpointError, match="s3://no-such-bucket-is-here/run"):
        PrefixLease(missing)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no-such-bucket-is-here/run.*bucket"):
        files.write(missing, content())


def test_without_credentials_the_error_says_where_they_are_found(
    url: ObjectUrl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    fresh = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    monkeypatch.setattr(ObjectStorage, "of", lambda scheme: ObjectStorage(fresh))
    with pytest.raises(CheckpointError, match=r"cloud's own tools.*docs/howto/storage\.md"):
        files.write(url, content())


PROGRAM = """
    import contextlib, json, sys
    from steepest import Callback, Checkpoints, DistributedSGD
    from tests.simulation.run import Simulation, run_config
    from tests.checkpoint.kept_checkpoints import TASK

    simulated = sys.argv[3] == "simulated"
    where = Simulation(1).running() if simulated else contextlib.nullcontext()
    settings = {"run_config": run_config()} if simulated else {}

    class Halt(Callback):
        def on_step(self, sgd, result):
            if result.step == int(sys.argv[2]):
                print("halted", flush=True)
                sys.stdin.read()

    kept = Checkpoints(sys.argv[1], every=5, keep=2)
    with where, DistributedSGD(TASK.creator(), checkpoints=kept, **settings) as sgd:
        begun = sgd.stats().step
        sgd.fit(steps=23, callbacks=[Halt()], progress=False)
        weights = {name: value.tolist() for name, value in sgd.weights().items()}
    print(json.dumps([begun, weights]))
"""


@pytest.mark.parametrize("where", ["simulated", pytest.param("ray", marks=pytest.mark.full)])
def test_a_job_that_is_killed_continues_from_its_url(
    url: ObjectUrl, tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    own = {"PYTHONPATH": str(ROOT)}
    if where == "ray":
        request.getfixturevalue("ray_cluster")
        own["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address

    def start(halt: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(program), str(url), str(halt), where], env=os.environ | own, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    with start(13) as killed:
        assert killed.stdout is not None
        said = ""
        for line in killed.stdout:
            said += line
            if line.startswith("halted"):
                break
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL, said
    with start(0) as again:  # at once: the lease is of a dead process
        said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    told = re.search(rf"going on from step (\d+), the checkpoint at {url}/", said)
    assert told is not None, said
    begun = int(told[1])
    assert begun in (5, 10)  # what was being written may not have become whole
    assert SECRET not in said
    first, weights = json.loads(said.splitlines()[-1])
    expected = {name: value.tolist() for name, value in undisturbed(23).items()}
    assert (first, weights) == (begun, expected)
    assert kept(url) == [20, 23]
    rows = history_file(url).resume(99)
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 24))
    assert json.loads(storage_of(url).read(url / LEASES / "000002"))["released"] is True
