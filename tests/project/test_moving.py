"""The pages for those who come from other trainers: both sides run as they stand, and end with the same weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch

from tests.page_examples import blocks_of, run_block, said_by


@pytest.fixture
def address(ray_cluster: None) -> str:
    found = ray.get_runtime_context().gcs_address
    assert isinstance(found, str)
    return found


def assert_same_weights(folder: Path) -> None:
    """Compare what both sides saved; 30 steps of SGD with momentum have moved it far from its beginning."""
    theirs, ours = (
        torch.load(folder / f"{name}.pt", weights_only=True) for name in ("theirs", "ours")
    )
    assert theirs.keys() == ours.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    torch.manual_seed(0)
    begin = torch.nn.Linear(8, 16).double().weight.detach()
    assert float((theirs["0.weight"] - begin).abs().max()) > 0.1
    for name, weight in theirs.items():
        assert weight.dtype == torch.float64
        assert float((weight - ours[name]).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("page", "schedule"), [("howto/from_ddp.md", True), ("howto/from_ray_train.md", False)]
)
def test_the_loop_that_stays_ends_with_the_weights_of_plain_torch(
    page: str, schedule: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first program of ours on each page; batches of both workers are all of the data."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
    ).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5 if schedule else 1.0)
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), (x.sum(dim=1) > 0).long()).backward()
        optimizer.step()
        rates.step()
    torch.save(net.state_dict(), "theirs.pt")
    said_by(page, monkeypatch, 1)
    assert_same_weights(tmp_path)


def test_the_loop_that_stays_for_those_who_come_from_horovod_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(2):
        assert said_by("howto/from_horovod.md", monkeypatch) == "steps: 200\n"
        found.append(torch.load("weights.pt", weights_only=True))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    weight, bias = found[0]["2.weight"], found[0]["2.bias"]
    x = torch.randn(640, 8, generator=torch.Generator().manual_seed(0))
    scores = torch.tanh(x @ found[0]["0.weight"].T + found[0]["0.bias"]) @ weight.T + bias
    assert (scores.argmax(dim=1) == (x.sum(dim=1) > 0).long()).float().mean() > 0.95


@pytest.mark.full
@pytest.mark.long
@pytest.mark.ray
def test_distributed_data_parallel_and_allreduce_end_with_the_same_weights(
    tmp_path: Path, address: str
) -> None:
    theirs, _, ours = blocks_of("docs/howto/from_ddp.md")
    (tmp_path / "ddp.py").write_text(theirs)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ddp.py"]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    run_block(ours, tmp_path, address)
    assert_same_weights(tmp_path)


@pytest.mark.full
@pytest.mark.long
@pytest.mark.ray
def test_ray_train_and_steepest_end_with_the_same_weights(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, *_ = blocks_of("docs/howto/from_ray_train.md")
    run_block(theirs, tmp_path, address)
    monkeypatch.chdir(tmp_path)
    said_by("howto/from_ray_train.md", monkeypatch, 1)
    assert_same_weights(tmp_path)


@pytest.mark.full
@pytest.mark.long
@pytest.mark.ray
def test_a_trainer_runs_inside_a_train_loop_of_ray_train(tmp_path: Path, address: str) -> None:
    *_, inside = blocks_of("docs/howto/from_ray_train.md")
    assert "loss: 0.0" in run_block(inside, tmp_path, address)
