# ruff: noqa: F811 - fixtures are imported, and named as arguments
"""One copy of the weights for all workers of a host: read where the server updates it, written by nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import DistributedSGD, TorchModel
from steepest.core.messages.message import COORDINATOR, Kind, worker_peer
from steepest.core.tensors import shared_memory
from steepest.core.tensors.shared_memory import allocate, forget_writes, make_writable
from steepest.errors import ConfigurationError, ModelRaisedError
from steepest.runtime.process import ProgramDefaults
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster
from tests.reference import same_bits
from tests.said import said
from tests.socket_ends import (
    Node,
    client,  # noqa: F401 - a fixture
    ends,  # noqa: F401 - a fixture
    node,  # noqa: F401 - a fixture
    server,  # noqa: F401 - a fixture
    until,
)

pytestmark = pytest.mark.skipif(not shared_memory.AVAILABLE, reason="memfd is Linux'")
PAGE = 4096


@pytest.fixture
def family() -> str:
    return "unix"


@pytest.fixture
def lent(ends: tuple[Any, Any], server: Node, client: Node) -> tuple[torch.Tensor, torch.Tensor]:
    """16 pages and what another process sees of them."""
    server.place = lambda message, size: message.payload
    memory = allocate(16 * PAGE)
    ends[0].send(said(Kind.PUSH, memory, worker_peer(0), COORDINATOR))
    until(lambda: server.messages, client, server)
    return memory, server.messages[0].payload


def test_what_a_reader_writes_is_its_own_until_it_is_forgotten(
    lent: tuple[torch.Tensor, torch.Tensor],
) -> None:
    memory, view = lent
    memory.fill_(1)
    assert make_writable(view)
    assert forget_writes(view) == []
    view[3 * PAGE + 5] = 7
    view[5 * PAGE : 7 * PAGE] = 8
    assert bool((memory == 1).all()), "nobody else sees it"
    memory.fill_(2)
    assert view[3 * PAGE + 5] == 7
    assert view[3 * PAGE] == 1, "the rest of its page is hidden too"
    assert view[4 * PAGE] == 2
    assert forget_writes(view) == [3 * PAGE, 5 * PAGE, 6 * PAGE]
    assert bool((view == 2).all())
    assert forget_writes(view) == []


def test_memory_of_this_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.ones(3 * PAGE, dtype=torch.uint8)
    assert make_writable(own)
    assert forget_writes(own) == []
    assert bool((own == 1).all())


def test_who_could_not_forget_does_not_share(
    lent: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_PAGEMAP", "/nowhere")
    assert not make_writable(lent[1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4000).double(), nn.Linear(4000, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def is_borrowed(tensor: torch.Tensor) -> bool:
    """Whether it lies in memory that another process made, which this one maps privately."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.split()[1].endswith("p") and "memfd:steepest" in line
    return False


def create(worker_index: int, device_index: int) -> TorchModel:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(24, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return TorchModel(
        Net(),
        loss=nn.functional.mse_loss,
        data=(x, y),
        batch_size=4,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9),
    )


@pytest.mark.parametrize("servers", [1, 2])
def test_workers_of_a_node_compute_on_one_copy_to_which_users_do_not_write(
    machine: None, servers: int
) -> None:
    strategy = ParameterServerStrategy(num_servers=servers)

    def look(view: Any) -> tuple[int, list[bool], ProgramDefaults]:
        parameters = [p for p in view.models[0].module.parameters() if p.numel() > 2]
        program = ProgramDefaults.of_this_process()
        return view.pid, [is_borrowed(p.data) for p in parameters], program

    def write(view: Any) -> None:
        if view.index == 1:
            view.models[0].module.last.weight.data.fill_(3.0)

    with DistributedSGD(create, num_workers=2, strategy=strategy) as sgd:
        for _ in range(3):
            sgd.step()
        looks = sgd.foreach_worker(look)
        assert len({pid for pid, _, _ in looks}) == 2
        assert all(all(borrowed) for _, borrowed, _ in looks)
        assert {program for _, _, program in looks} == {ProgramDefaults.of_this_process()}
        with pytest.raises(ConfigurationError, match=r"'write' has written to .*'last.weight'"):
            sgd.foreach_worker(write)
        for _ in range(3):
            sgd.step()
        weights = sgd.weights()
    apart = InProcessCluster(create, num_workers=2, strategy=strategy, lend=False)
    apart.step(6)
    assert same_bits(weights, apart.weights())


@pytest.mark.long
def test_what_a_step_that_failed_has_written_is_forgotten(machine: None) -> None:
    """Or it would hide what is put, and every commit that follows."""

    def put_weights(view: Any) -> None:
        module = view.models[0].module
        module.register_forward_pre_hook(
            lambda *_: setattr(module, "steps", getattr(module, "steps", 0) + 1)
        )

        def fail_once(*_: Any) -> None:
            if module.steps == 2 and view.index == 0:
                with torch.no_grad():
                    module.first.weight.fill_(9.0)
                raise ArithmeticError("after it wrote")

        module.register_forward_hook(fail_once)

    def first(view: Any) -> float:
        return float(view.models[0].module.first.weight.mean())

    with DistributedSGD(
        create, num_workers=2, strategy=ParameterServerStrategy(num_servers=1)
    ) as sgd:
        for _ in range(4):
            sgd.step()
        sgd.foreach_worker(put_weights)
        sgd.step()
        with pytest.raises(ModelRaisedError, match="after it wrote"):
            sgd.step()
        means = sgd.foreach_worker(first)
        assert means[0] == means[1] == float(sgd.weights()["first.weight"].mean())


class Stamp(nn.Module):
    """A part of the weights, each element of which counts the updates."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(300_000, dtype=torch.float64))

    def forward(self, version: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = torch.aminmax(self.count.detach())
        if low != high or version not in (None, low):
            raise AssertionError(f"torn: {float(low)} to {float(high)} where others hold {version}")
        return low.clone(), self.count.sum()


class Stamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Stamp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        version, total = None, torch.zeros((), dtype=torch.float64)
        for part in self.parts:
            version, sum_of_it = part(version)
            total = total - sum_of_it
        return total


def stamped(worker_index: int, device_index: int) -> TorchModel:
    return TorchModel(
        Stamps(),
        loss=lambda output, target: output,
        data=(torch.zeros(8, 1), torch.zeros(8, 1)),
        batch_size=1,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=1.0),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
def test_no_worker_sees_torn_weights(machine: None, workers: int, servers: int) -> None:
    """10 MB whose elements all equal the version; every forward pass looks at each of them as it begins."""
    with DistributedSGD(
        stamped, num_workers=workers, strategy=ParameterServerStrategy(num_servers=servers)
    ) as sgd:
        sgd.fit(steps=30, progress=False)
        assert all(bool((weight == 30).all()) for weight in sgd.weights().values())
