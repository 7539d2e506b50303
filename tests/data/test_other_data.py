"""Training goes on with other data, and other data than a checkpoint's are told from its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from steepest import Checkpoints, DistributedSGD, IndexedStream, TorchModel
from steepest.checkpoint import files
from steepest.core.data.fingerprint import differences, fingerprint
from steepest.core.data.sources import as_source
from steepest.data.storage.places import place_of
from steepest.errors import CheckpointError, ConfigurationError
from tests.reference import Weights, difference, same_bits, samples, sgd, snapshot
from tests.simulation.run import Simulation, run_config
from tests.whole_checkpoints import all_of

Job = Callable[..., DistributedSGD]


# -- the fingerprint ------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """A data set whose samples are not there yet."""

    def __init__(self, values: Any, labels: Any, inner: Any = None) -> None:
        self.values, self.labels, self.inner = values, labels, inner
        self.itself = self

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are not asked for")


def told(before: Any, now: Any) -> list[str]:
    first, second = (fingerprint(as_source(data, 2)[0]) for data in (before, now))
    as_json = {name: list(about) for name, about in first.items()}
    assert differences(as_json, first) == []
    return differences(as_json, second)


def test_other_values_types_and_shapes_of_arrays_are_told() -> None:
    x, y = torch.arange(200.0).reshape(100, 2), np.arange(100)
    assert told((x, y), (x.clone(), y.copy())) == []
    assert told((x, y), (x, y + 1)) == ["column 1 has other values"]
    assert told((x, y), (x.double(), y)) == [
        "column 0 was float32 of shape (100, 2) and is float64 of shape (100, 2)"
    ]
    assert told((x, y), (x, y, y)) == ["column 2 is new"]
    bits = x.to(torch.bfloat16)
    assert told(bits, -bits) == ["column 0 has other values"]


def test_arrays_of_data_sets_are_told_without_asking_for_samples() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), [1, 2, 3, 4, 5, 6]
    assert told(TensorDataset(x), TensorDataset(x + 1)) == ["tensors 0 has other values"]
    assert told(Rows(x, y), Rows(x, y[::-1])) == ["labels has other values"]
    assert told(Subset(Rows(x, y), [0, 1]), Subset(Rows(-x, y), [0, 1])) == [
        "dataset.values has other values"
    ]
    assert told([{"t": "a", "n": 1}], [{"t": "b", "n": 1}]) == ["the list has other values"]
    assert told([("/old/1.png", 0)], [("/new/1.png", 0)]) == [], "a directory may be another one"


def test_data_of_any_kind_have_a_fingerprint_if_an_empty_one() -> None:
    class Odd(Rows):
        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                raise OSError("not mounted")
            return super().__getattribute__(name)

    odd: list[Any] = [
        Odd([1], [1]),
        Rows(torch.eye(3).to_sparse(), object()),
        Rows([object()], np.array([object(), "a"])),
        Rows(np.zeros((3, 0)), np.float64(1.0), Rows),
        [object(), object()],
        IndexedStream(lambda start: range(start, 6), length=6),
    ]
    for data in odd:
        assert isinstance(fingerprint(as_source(data, 1)[0]), dict)
    assert differences({}, {"a": ("float32", (1,), "00")}) == [], "an older checkpoint has none"


# -- going on -------------------------------------------------------------------------------------


def others(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = samples(count)
    return x + 1, y - 1


def job(data: Any, workers: int, batch_size: int, **options: Any) -> DistributedSGD:
    def create(worker: int, device: int) -> TorchModel:
        torch.manual_seed(3)
        return TorchModel(
            nn.Linear(3, 2).double(),
            loss=nn.functional.mse_loss,
            data=data,
            batch_size=batch_size,
            optimizer=sgd(lr=0.1, momentum=0.9),
            learning_rate=lambda step: 0.1 / (1 + step),
        )

    return DistributedSGD(create, workers, run_config=run_config(), **options)


def serially(*parts: tuple[Any, int]) -> Weights:
    """The weights after so many steps with all samples of each data set."""
    torch.manual_seed(3)
    net, step = nn.Linear(3, 2).double(), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for (x, y), steps in parts:
        for _ in range(steps):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            step += 1
    return snapshot(net)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_weights_optimizer_and_step_go_on_with_other_data(workers: int, tmp_path: Path) -> None:
    old, new = samples(24), others(48)
    with Simulation(1).running():
        with job(old, workers, 24 // workers) as sgd:
            sgd.fit(steps=2, progress=False)
            sgd.save(tmp_path / "old")
            saved = sgd.weights()
        with job(new, workers, 48 // workers) as sgd:
            before = sgd.weights()
            match = r"it has samples 24, this job has 48: .*restore\(path, data='new'\)"
            with pytest.raises(CheckpointError, match=match):
                sgd.restore(tmp_path / "old")
            with pytest.raises(ConfigurationError, match="data='other': give one of"):
                sgd.restore(tmp_path / "old", data="other")
            assert same_bits(sgd.weights(), before)
            sgd.restore(tmp_path / "old", data="new")
            assert same_bits(sgd.weights(), saved)
            results = [sgd.step(), sgd.fit(epochs=2, progress=False)]
            assert [(r.step, r.epoch, r.samples) for r in results] == [(3, 0, 48), (5, 2, 48)]
            assert results[1].learning_rate == (0.1 / 5,)
            assert difference(sgd.weights(), serially((old, 2), (new, 3))) < 1e-12
            sgd.save(tmp_path / "new")
        with job(new, 1, 48) as sgd:
            sgd.restore(tmp_path / "new")
            assert (sgd.step().step, sgd.fit(epochs=1, progress=False).epoch) == (6, 4)


def test_other_data_are_visited_once_also_when_a_worker_dies(tmp_path: Path) -> None:
    simulation = Simulation(2)

    def counting(count: int) -> DistributedSGD:
        def create(worker: int, device: int) -> TorchModel:
            return TorchModel(
                nn.Embedding(30, 1).double(),
                loss=lambda output, target: -output.mean(),
                data=(torch.arange(count), torch.arange(count)),
                batch_size=2,
                optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=4.0),
            )

        return DistributedSGD(create, 2, run_config=run_config())

    with simulation.running():
        with counting(16) as sgd:
            sgd.fit(steps=3, progress=False)
            sgd.save(tmp_path)
        with counting(28) as sgd:
            sgd.restore(tmp_path, data="new")
            before = sgd.weights()["weight"]
            sgd.fit(steps=2, progress=False)
            (victim,) = (p for p in simulation.living() if "worker 1" in str(p))
            simulation.world.kill(victim, "it was killed. connection error code 2.")
            assert sgd.fit(epochs=1, progress=False).step == 3 + 7
            visits = (sgd.weights()["weight"] - before).round().int().flatten().tolist()
            assert visits == [1] * 28 + [0] * 2


def test_a_program_goes_on_with_other_data_and_is_started_again(tmp_path: Path) -> None:
    def program(data: Any, policy: str) -> tuple[int, int | None]:
        checkpoints = Checkpoints(tmp_path, every=2, data=policy)
        with job(data, 2, 4, checkpoints=checkpoints) as sgd:
            result = sgd.fit(epochs=2, progress=False)
            return result.step, result.epoch

    old, new = samples(24), others(24)
    with Simulation(1).running():
        assert program(old, "new") == (6, 1)
        with pytest.raises(CheckpointError, match="it has samples 24, this job has 40"):
            program(samples(40), "continue")
        assert program(new, "new") == (12, 1)
        assert program(new, "new") == (12, 1), "the new data are known by now"
        assert program(samples(40), "new") == (22, 1)
    with pytest.raises(ConfigurationError, match="data='other': give one of 'continue', 'new'"):
        Checkpoints(tmp_path, data="other")


def test_a_stream_may_follow_numbered_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(*samples(10), strict=True)

    for number, (before, now) in enumerate([(samples(24), Endless()), (Endless(), samples(24))]):
        with Simulation(1).running():
            with job(before, 2, 4) as sgd:
                sgd.fit(steps=2, progress=False)
                sgd.save(tmp_path / str(number))
            with job(now, 2, 4) as sgd, caplog.at_level(logging.WARNING):
                with pytest.raises(CheckpointError, match="has samples"):
                    sgd.restore(tmp_path / str(number))
                sgd.restore(tmp_path / str(number), data="new")
                assert sgd.fit(steps=3, progress=False).step == 5
    assert "no known number of samples instead of 24 samples: epochs begin anew" in caplog.text


def test_what_differs_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, other = samples(24), others(24)

    def said(data: Any, batch_size: int, path: Path, **options: Any) -> list[str]:
        caplog.clear()
        with job(data, 2, batch_size, **options) as sgd, caplog.at_level(logging.WARNING):
            sgd.restore(path)
            assert sgd.step().step == 3
        return [r.getMessage() for r in caplog.records if "checkpoint at" in r.getMessage()]

    with Simulation(1).running():
        with job(data, 2, 4) as sgd:
            sgd.fit(steps=2, progress=False)
            sgd.save(tmp_path / "a")
        assert said(data, 4, tmp_path / "a") == []
        (words,) = said((data[0], other[1]), 4, tmp_path / "a")
        assert "column 1 has other values: they are continued" in words
        (words,) = said(data, 2, tmp_path / "a")
        assert "batches have 2 samples instead of 4, steps 4 instead of 8" in words
        assert "global_batch_size=8" in words
        assert said(data, 2, tmp_path / "a", global_batch_size=8) == []
        saved = all_of(place_of(tmp_path / "a"))
        about = {key: value for key, value in saved.about.items() if key not in ("data", "batch")}
        files.write(place_of(tmp_path / "b"), replace(saved, about=about))  # as older versions did
        assert said(other, 2, tmp_path / "b") == []
