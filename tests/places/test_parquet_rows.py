"""Rows of Parquet files, as Spark writes them: each in one committed step per epoch, by numbers that do not change."""

from __future__ import annotations

import pickle
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from steepest import ParameterServerStrategy, TorchModel
from steepest.core.data.protocol import Source
from steepest.core.data.sampler import Remaining
from steepest.core.engine.job import ModelCreator
from steepest.core.messages.driver import Result
from steepest.core.messages.message import Kind
from steepest.core.strategies.strategy import Strategy
from steepest.data.spark import ParquetRows, from_dataframe
from steepest.data.storage.files import storage_of
from steepest.data.storage.places import place_of
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster
from tests.deaths import kill_senders
from tests.inside import replicas_of
from tests.reference import sgd

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = 24  # divides by the samples of a step of 1, 2 or 3 workers
BATCH = 4
ASYNC = ParameterServerStrategy(mode="async")


def write(folder: Path, sizes: tuple[int, ...], group: int = 100, **columns: Any) -> Path:
    """Files of so many rows, in row groups of at most `group`, with what Spark leaves beside them."""
    folder.mkdir()
    ends = np.cumsum(sizes).tolist()
    made = {"number": lambda i: i, "half": lambda i: i + 0.5} | columns
    rows = range(sum(sizes) + 1)  # one more, so that an empty file has types, too
    whole = arrow.table({name: [make(i) for i in rows] for name, make in made.items()})
    for index, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        table = whole.slice(end - size, size)
        parquet.write_table(table, folder / f"part-{index:05}.parquet", row_group_size=group)
    (folder / "_SUCCESS").touch()
    (folder / ".part-00000.parquet.crc").touch()
    return folder


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        ParquetRows(folder, **({"features": ["number"], "target": "half"} | settings))
    return str(caught.value)


class Visits(nn.Module):
    """With a learning rate of as many samples as an update has, a row's weight counts its commits."""

    def __init__(self) -> None:
        super().__init__()
        self.visits = nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.visits[features[:, 0].long()]


def counting(data: ParquetRows, samples: int) -> ModelCreator:
    def create(worker_index: int, device_index: int) -> TorchModel:
        own = pickle.loads(pickle.dumps(data))  # as it travels
        return TorchModel(
            Visits(),
            loss=lambda output, target: -output.mean(),
            data=own,
            batch_size=BATCH,
            optimizer=sgd(lr=samples),
        )

    return create


def visits(cluster: InProcessCluster, steps: int) -> list[float]:
    assert [type(result) for result in cluster.step(steps)] == [Result] * steps
    counted: list[float] = cluster.weights()["visits"].round().tolist()
    return counted


def test_batches_are_the_rows_of_those_numbers(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "rows",
        (5, 0, 7),
        3,
        pair=lambda i: [float(i), i + 0.25],
        flag=lambda i: i % 2 == 0,
    )
    data = ParquetRows(folder, features=["pair", "flag", "half"], target="number")
    assert isinstance(data, Source)
    assert (data.size, data.blocks) == (12, (3, 2, 3, 3, 1))
    shares = [[4, 2, 0, 5, 6], [11], [1, 9, 2, 7, 8]]
    for (x, y), share in zip(data.open(np.array(s) for s in shares), shares, strict=True):
        assert y.tolist() == share
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert x.tolist() == [[i, i + 0.25, i % 2 == 0, i + 0.5] for i in share]
        x.zero_()  # a copy: what is kept stays as it is
    assert len(data._kept) == 2
    assert data.__getstate__()["_kept"] == {}
    halves = ParquetRows(folder, features=["number"], target="half")
    flags = ParquetRows(folder, features=["number"], target="flag")
    assert next(halves.open([np.array([3])]))[1].dtype == torch.float32
    assert next(flags.open([np.array([3])]))[1].tolist() == [False]


def uploaded(folder: Path, url: str) -> None:
    """Copies files to a URL."""
    place = place_of(url)
    storage = storage_of(place)
    for file in folder.iterdir():
        content = file.read_bytes()
        storage.write(place / file.name, lambda content=content: iter([memoryview(content)]))


def test_rows_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, url = write(tmp_path / "rows", (7, 12, 5), 5), f"memory://{secrets.token_hex(4)}/rows"
    uploaded(folder, url)
    for where in (url, folder.as_uri()):
        data = ParquetRows(where, features=["number"], target="half")
        cluster = InProcessCluster(counting(data, BATCH * 2), num_workers=2, shuffle=1)
        assert visits(cluster, ROWS // (BATCH * 2)) == [1] * ROWS
    data = ParquetRows(url, features=["number"], target="half")
    place, opened, down = (
        place_of(url),
        MemoryFileSystem._open,
        [OSError("reset"), OSError("reset")],
    )

    def flaky(self: Any, *arguments: Any, **more: Any) -> Any:
        if down:
            raise down.pop()
        return opened(self, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "_open", flaky)
        assert next(data.open([np.array([3])]))[1].tolist() == [3.5]
        assert down == []
        down[:] = [PermissionError("denied to AKIAIOSFODNN7EXAMPLE")]
        with pytest.raises(ConfigurationError, match=f"reading {url}.*denied") as caught:
            next(data.open([np.array([12])]))
        assert "AKIA" not in str(caught.value)
    storage_of(place).remove_folder(place)
    with pytest.raises(ConfigurationError, match=f"{url}: FileNotFoundError"):
        next(data.open([np.array([20])]))
    assert f"{url} has no Parquet files" in refused(url)  # type: ignore[arg-type]


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("strategy", [ParameterServerStrategy(), ASYNC])
def test_each_row_is_committed_once_per_epoch(
    tmp_path: Path, workers: int, strategy: Strategy
) -> None:
    data = ParquetRows(write(tmp_path / "rows", (7, 12, 5), 5), features=["number"], target="half")
    update = BATCH if strategy == ASYNC else BATCH * workers
    for seed in range(3):
        cluster = InProcessCluster(
            counting(data, update), num_workers=workers, strategy=strategy, shuffle=seed
        )
        for epoch in (1, 2):
            assert visits(cluster, ROWS // (BATCH * workers)) == [epoch] * ROWS


@pytest.mark.parametrize("strategy", [ParameterServerStrategy(num_servers=1), ASYNC])
def test_each_row_is_committed_once_where_a_worker_dies(tmp_path: Path, strategy: Strategy) -> None:
    data = ParquetRows(write(tmp_path / "rows", (7, 12, 5), 5), features=["number"], target="half")
    creator = counting(data, BATCH if strategy == ASYNC else BATCH * 2)
    cluster = InProcessCluster(creator, num_workers=2, strategy=strategy, replaces=True)
    kill_senders(cluster, [(1, Kind.PUSH, 3)])
    assert visits(cluster, 6) == [2] * ROWS
    assert len(cluster.left) == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_that_opens_the_files_again_in_mid_epoch_visits_the_rest(
    tmp_path: Path, workers: int
) -> None:
    folder = write(tmp_path / "rows", (7, 12, 5), 5)

    def job(number: int) -> InProcessCluster:
        data = ParquetRows(folder, features=["number"], target="half")
        return InProcessCluster(counting(data, BATCH * number), num_workers=number)

    first, second = job(2), job(workers)
    before = visits(first, 2)
    plan = first.job.plan()
    assert plan is not None
    at = plan.position(2)
    for worker in second.workers:
        replicas_of(worker).use_plan(second.job.plan(0, Remaining(at.epoch, at.begin)), 0)
    rest = visits(second, -(-8 // (BATCH * workers)))
    assert [b + (r > 0) for b, r in zip(before, rest, strict=True)] == [1] * ROWS


# -- what is refused ---------------------------------------------------------------------------------


def test_columns_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "rows",
        (4,),
        word=lambda i: f"w{i}",
        words=lambda i: [f"w{i}"],
        part=lambda i: {"x": i},
    )
    for column in ("word", "words", "part"):
        said = refused(folder, features=["number", column])
        assert f"column {column!r} is of type " in said
        assert "vector_to_array" in said
    assert "has no column 'no': there are number, half" in refused(folder, target="no")
    assert "features='number': give one or more names" in refused(folder, features="number")
    assert "features=[]" in refused(folder, features=[])
    assert "target=3: give the name" in refused(folder, target=3)


def test_missing_values_are_refused_at_once(tmp_path: Path) -> None:
    holes = {"hole": lambda i: None if i == 5 else i, "pairs": lambda i: [i, None if i == 5 else 1]}
    folder = write(tmp_path / "rows", (4, 4), **holes)
    for column in holes:
        said = refused(folder, features=[column])
        assert said.startswith(f"column '{column}' has no value in some row of ")
        assert "part-00001.parquet" in said
        assert "frame.dropna" in said


def test_arrays_of_several_lengths_are_refused_where_they_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "rows", (4,), ragged=lambda i: [1.0] * (1 + i))
    data = ParquetRows(folder, features=["ragged"], target="number")
    with pytest.raises(ConfigurationError, match="'ragged' has arrays of 1 to 4 numbers in .*part"):
        next(data.open([np.array([0])]))


def test_files_that_change_or_go_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "rows", (4, 4))
    data = ParquetRows(folder, features=["number"], target="half")
    write(tmp_path / "others", (3, 5))
    (tmp_path / "others" / "part-00000.parquet").replace(folder / "part-00000.parquet")
    with pytest.raises(ConfigurationError, match="was changed: row group 0 has 3 rows, and had 4"):
        next(data.open([np.array([0])]))
    (folder / "part-00001.parquet").unlink()
    with pytest.raises(
        ConfigurationError, match="part-00001.parquet was readable .* every machine"
    ):
        next(data.open([np.array([7])]))


def test_a_directory_without_rows_is_refused(tmp_path: Path) -> None:
    assert "has no Parquet files that this machine can see" in refused(tmp_path / "none")
    assert "the files have no rows" in refused(write(tmp_path / "rows", (0,)))
    for url in ("nowhere://x/y", "s3://key:secret@x/y"):
        assert f"{url[:4]}" in (said := refused(url))  # type: ignore[arg-type]
        assert "secret" not in said
    assert "pyarrow cannot open 'hdfs" in refused("hdfs://nowhere:1/x")  # type: ignore[arg-type]


class Frame:
    """What of a Spark DataFrame is asked before Spark is."""

    write: Any = None

    def __init__(self, **types: str) -> None:
        self.dtypes = list(types.items())


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        ([1], "frame is a list: give a pyspark.sql.DataFrame"),
        (Frame(y="int"), "the frame has no column 'x': there are y"),
        (Frame(x="vector", y="int"), "column 'x' is of type vector: give numbers"),
        (Frame(x="array<string>", y="int"), "column 'x' is of type array<string>"),
        (Frame(x="array<double>", y="int"), "is there already: open what was written there with"),
    ],
)
def test_frames_are_refused_before_spark_computes(tmp_path: Path, frame: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        from_dataframe(frame, features=["x"], target="y", directory=tmp_path)
    with pytest.raises(ConfigurationError, match="rows_per_block=0"):
        from_dataframe(frame, features=["x"], target="y", directory=tmp_path, rows_per_block=0)
