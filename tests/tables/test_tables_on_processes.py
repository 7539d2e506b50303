"""Embedding tables on real processes: as in one process, and through a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    EmbeddingBag,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    Table,
    TorchModel,
    connect,
)
from steepest.checkpoint import files
from steepest.core.engine.job import ModelCreator
from steepest.data.storage.places import place_of
from steepest.tables import Adagrad
from tests.living import pids
from tests.reference import difference, same_bits
from tests.step_callbacks import Watch

pytestmark = pytest.mark.usefixtures("machine")
IDS = torch.arange(24).reshape(12, 2) % 17 * 2**50
TARGETS = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
TWO_SERVERS = ParameterServerStrategy(num_servers=2)


class Net(nn.Module):
    """The mean of a bag of words, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        table = Table("words", 4, optimizer=Adagrad(lr=0.3), dtype="float64")
        self.words, self.head = EmbeddingBag(table), nn.Linear(4, 1).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def creator(worker: int, device: int) -> TorchModel:
    return TorchModel(Net(), loss=F.mse_loss, data=(IDS, TARGETS), batch_size=6, optimizer=sgd)


@pytest.mark.long
def test_two_workers_train_as_one_process_does() -> None:
    torch.manual_seed(0)
    net = Net()
    rows, optimizer = connect(net), sgd(net)
    for _ in range(5):  # a step of two workers has all samples
        optimizer.zero_grad()
        F.mse_loss(net(IDS), TARGETS).backward()
        optimizer.step()
        rows.step()
    with DistributedSGD(creator, 2, strategy=TWO_SERVERS) as trainer:
        for _ in range(5):
            trainer.step()
        weights = {name: value.detach() for name, value in net.named_parameters()}
        assert difference(trainer.weights(), weights) < 1e-12
        expected = F.mse_loss(net(IDS), TARGETS).item()  # with the rows, too
        assert trainer.evaluate((IDS, TARGETS)).loss == pytest.approx(expected, rel=1e-12)
        counts = trainer.stats().tables["words"]
        assert (counts["rows"], counts["admitted"], counts["evicted_full"]) == (17, 17, 0)


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_rows_go_to_servers_while_a_group_adds_up_all_else(sharded: bool) -> None:
    """Over Gloo's sockets; a worker is killed, and the rows and weights are those of a run in peace."""
    strategy = AllreduceStrategy(data_plane="gloo", sharded=sharded, chunk_bytes=16)
    config = RunConfig(failure=FailureConfig(snapshot_every=3))
    found = []
    for dies in (False, True):
        with DistributedSGD(creator, 2, strategy=strategy, run_config=config) as trainer:
            victim = pids(trainer)[1]
            watch = Watch((7, lambda victim=victim: os.kill(victim, signal.SIGKILL)))
            callbacks = [watch] if dies else []
            assert trainer.fit(steps=16, callbacks=callbacks, progress=False).step == 16
            rows = trainer.export_table("words")
            found.append(trainer.weights() | {"ids": rows.ids, "values": rows.values})
            assert (victim in pids(trainer)) is not dies
    assert same_bits(*found)
    with DistributedSGD(creator, 2, strategy=TWO_SERVERS) as trainer:
        trainer.fit(steps=16, progress=False)
        expected = trainer.weights()
        assert difference({name: found[0][name] for name in expected}, expected) < 1e-12


def wide(worker: int, device: int) -> TorchModel:
    """A table of which each server has several pieces of 4 MB."""
    model = creator(worker, device)
    ids = torch.arange(60_000).reshape(-1, 2)
    targets = torch.zeros(len(ids), 1, dtype=torch.float64)
    return TorchModel(
        model.module, loss=F.mse_loss, data=(ids, targets), batch_size=15_000, optimizer=sgd
    )


@pytest.mark.long
@pytest.mark.parametrize("reached", [True, False])
def test_servers_write_and_read_rows_where_they_reach_the_place(
    tmp_path: Path, reached: bool
) -> None:
    place = str(tmp_path / "saved") if reached else f"memory://saved/{tmp_path.name}"
    with DistributedSGD(wide, 2, strategy=TWO_SERVERS) as trainer:
        trainer.fit(epochs=1, progress=False)
        trainer.save(place)
        expected = trainer.export_table("words")
    saved = files.read_apart(place_of(place)).saved_rows
    assert saved is not None
    names = [each.name for each in saved.layers[0].files]
    assert len([name for name in names if name.count("-") == 4]) == (2 if reached else 0)
    with DistributedSGD(wide, 2, strategy=ParameterServerStrategy(num_servers=3)) as trainer:
        trainer.restore(place)
        found = trainer.export_table("words")
    assert len(found) == 60_000
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)


@pytest.mark.full
@pytest.mark.long
def test_a_checkpoint_continues_in_a_new_trainer(tmp_path: Path) -> None:
    with DistributedSGD(creator, 2, strategy=TWO_SERVERS) as trainer:
        trainer.fit(epochs=3, progress=False)
        trainer.save(tmp_path / "saved")
        trainer.fit(epochs=2, progress=False)
        expected, weights = trainer.evaluate((IDS, TARGETS)).loss, trainer.weights()
    with DistributedSGD(creator, 2) as trainer:  # one server
        trainer.restore(tmp_path / "saved")
        trainer.fit(epochs=2, progress=False)
        assert same_bits(trainer.weights(), weights)
        assert trainer.evaluate((IDS, TARGETS)).loss == expected


def on_disk(folder: Path) -> ModelCreator:
    """As `creator`, whose table has few rows in memory and all others in a directory."""

    def create(worker: int, device: int) -> TorchModel:
        table = Table(
            "words", 4, optimizer=Adagrad(lr=0.3), dtype="float64",
            directory=str(folder), memory_rows=8,
        )  # fmt: skip
        net = Net()
        net.words = EmbeddingBag(table)
        return TorchModel(net, loss=F.mse_loss, data=(IDS, TARGETS), batch_size=6, optimizer=sgd)

    return create


@pytest.mark.long
def test_a_killed_servers_rows_come_from_the_disk_of_another(tmp_path: Path) -> None:
    config = RunConfig(failure=FailureConfig(snapshot_every=2))
    with DistributedSGD(creator, 2, strategy=TWO_SERVERS) as trainer:
        trainer.fit(steps=16, progress=False)
        expected = trainer.export_table("words")
    create = on_disk(tmp_path)
    with DistributedSGD(create, 2, strategy=TWO_SERVERS, run_config=config) as trainer:
        trainer.fit(steps=8, progress=False)
        copy = trainer._supervisor.snapshots.taken
        assert copy is not None
        assert copy.rows is not None
        files_of_rows = copy.rows.layers[0].files
        assert any(file.kept for file in files_of_rows)
        assert not any(file.arrays for file in files_of_rows)
        server = next(p for p in trainer.processes() if (p.role, p.index) == ("server", 1))
        os.kill(server.pid, signal.SIGKILL)
        trainer.fit(steps=8, progress=False)
        found = trainer.export_table("words")
    assert same_bits({"ids": found.ids}, {"ids": expected.ids})
    assert same_bits({"values": found.values}, {"values": expected.values})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_checkpoint_is_restored_again_and_again_to_tables_on_disk(tmp_path: Path) -> None:
    """Every server reads its rows from files that are dropped when all have read them."""
    ids = torch.arange(6000).reshape(-1, 2) * 2**40

    def create(worker: int, device: int) -> TorchModel:
        table = Table("words", 4, directory=str(tmp_path / "rows"), memory_rows=800)
        net = nn.Sequential(EmbeddingBag(table), nn.Linear(4, 1))
        data = (ids, torch.zeros(len(ids), 1))
        return TorchModel(net, loss=F.mse_loss, data=data, batch_size=500, optimizer=sgd)

    with DistributedSGD(create, 2, strategy=TWO_SERVERS) as trainer:
        trainer.fit(epochs=1, progress=False)
        trainer.save(tmp_path / "saved")
        expected = trainer.export_table("words")
        assert len(expected) == 6000
        for _ in range(5):
            trainer.restore(tmp_path / "saved")
            found = trainer.export_table("words")
            assert same_bits({"ids": found.ids}, {"ids": expected.ids})
            assert same_bits({"values": found.values}, {"values": expected.values})
