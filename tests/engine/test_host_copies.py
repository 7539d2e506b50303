"""Gradients that are copied from a device later: in order, whole, and none of a pass that was given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from steepest import LocalStrategy
from steepest.core.engine.host_copies import HostCopies, copies_for
from steepest.core.messages.driver import Failure
from steepest.testing import InProcessCluster
from tests.inside import replicas_of
from tests.modes import make, trained
from tests.reference import Task, same_bits, sgd


class LateCopies(HostCopies):
    """Copies each tensor as late as it may, and never more than so many between two polls."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.begun: deque[tuple[torch.Tensor, torch.Tensor, Callable[[], None]]] = deque()
        self.most = self.dropped = 0

    def start(self, out: torch.Tensor, own: torch.Tensor, then: Callable[[], None]) -> None:
        out.fill_(float("nan"))
        self.begun.append((out, own, then))
        self.most = max(self.most, len(self.begun))

    def poll(self) -> None:
        if len(self.begun) > self.each:
            self._end()

    def finish(self) -> None:
        while self.begun:
            self._end()

    def drop(self) -> None:
        self.dropped += len(self.begun)
        self.begun.clear()

    def _end(self) -> None:
        out, own, then = self.begun.popleft()
        out.copy_(own)
        then()


def on_a_device(
    name: str, task: Task, each: int, **options: Any
) -> tuple[InProcessCluster, list[LateCopies]]:
    """A job whose replicas write gradients to memory of their own, as if that were on a GPU."""
    cluster = make(name, task, **options)
    copies = []
    for worker in cluster.workers:
        replicas = replicas_of(worker)
        own = replicas.layout.allocate()
        replicas._own = [(replicas.weights, own)]
        replicas.models[0].bind(replicas.weights, own)
        late = LateCopies(each)
        replicas._copies = late
        copies.append(late)
    return cluster, copies


@pytest.mark.few(2)
@pytest.mark.parametrize("each", [0, 2, 100])
@pytest.mark.parametrize("name", ["sync", "async", "groups"])
def test_training_has_the_same_bits_however_late_copies_are(name: str, each: int) -> None:
    task = Task(optimizer=sgd(momentum=0.9))
    cluster, copies = on_a_device(name, task, each)
    trained(cluster, 9)
    plain = make(name, task)
    trained(plain, 9)
    assert same_bits(cluster.weights(), plain.weights())
    chunks = len(cluster.job.description.layout.trainable_chunks)
    assert all(late.most == min(each + 1, chunks) and late.dropped == 0 for late in copies)


LOCALS = {
    "whole": LocalStrategy(sync_every=2),
    "fragments": LocalStrategy(sync_every=2, fragments=2),
    "delay": LocalStrategy(sync_every=3, delay=1, blend=0.5),
    "delayed fragments": LocalStrategy(sync_every=4, fragments=2, delay=1),
    "rounds": LocalStrategy(sync_every=2, quorum=1, num_servers=1, fragments=2),
    "delayed rounds": LocalStrategy(sync_every=3, quorum=1, num_servers=1, delay=1),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LOCALS)
def test_a_device_has_the_workers_own_weights_wherever_these_change(name: str) -> None:
    """A model computes with a copy on its device: here one in the memory of the host, besides."""
    task = Task(optimizer=sgd(momentum=0.9))

    def trained_on(*, device: bool) -> dict[str, torch.Tensor]:
        strategy = replace(LOCALS[name], chunk_bytes=64)
        job = InProcessCluster(task.creator(), num_workers=2, strategy=strategy)
        for worker in job.workers if device else ():
            replicas = replicas_of(worker)
            replicas._devices = (torch.device("cuda", 0),)
            replicas._own = [(replicas.weights.clone(), replicas.layout.allocate())]
            replicas.models[0].bind(*replicas._own[0])
        trained(job, 7)
        return job.weights()

    assert same_bits(trained_on(device=True), trained_on(device=False))


class Sometimes(nn.Module):
    """A perceptron that raises in its third backward pass, when the gradients of its last layer are here."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(self.strike)
        return self.last(hidden)

    def strike(self, gradient: torch.Tensor) -> None:
        Sometimes.passes += 1
        if Sometimes.passes == 3:
            raise LookupError("this once")


def test_nothing_comes_of_copies_of_a_pass_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(Sometimes, sgd(momentum=0.9))
    monkeypatch.setattr(Sometimes, "passes", 0)
    cluster, (late,) = on_a_device("sync", task, 100, workers=1)
    results = cluster.step(4)
    assert isinstance(results[-1], Failure)
    assert late.begun
    trained(cluster, 4 - cluster.coordinator.version)
    assert late.dropped > 0
    plain = make("sync", task, 1)
    trained(plain, 4)
    assert same_bits(cluster.weights(), plain.weights())


def test_the_cpu_and_several_devices_have_none() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert copies_for([cpu], ()) is None
    assert copies_for([gpu, gpu], ()) is None


class Driver:
    """Stands for CUDA's: notes what is pinned, and which device is the present one meanwhile."""

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        self.present = 0
        self.last_error = 0
        self.calls: list[tuple[str, int, int]] = []
        self.refused = refused

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.present = self.present, device.index
        yield
        self.present = before

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("pin", address, self.present))
        self.last_error = 2 if address in self.refused else self.last_error
        return 2 if address in self.refused else 0

    def kernel(self, *_: int, device: torch.device) -> None:
        """Start one, and look for an error as torch does behind each."""
        error, self.last_error = self.last_error, 0
        if error:
            raise torch.AcceleratorError(f"CUDA error {error}")

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unpin", address, self.present))
        return 0


def test_memory_is_pinned_on_the_models_gpu_and_no_longer_than_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pinning on another GPU would make a context there, in each process."""
    memory = [torch.zeros(size, dtype=torch.uint8) for size in (64, 32, 0)]
    first, other, _ = (vector.data_ptr() for vector in memory)
    driver = Driver(refused=(other,))
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", driver.device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "zeros", driver.kernel)
    copies = copies_for([torch.device("cuda", 1)], memory)
    assert driver.calls == [("pin", first, 1), ("pin", other, 1)]
    assert not driver.last_error, "the model's first kernel would raise it"
    del copies
    assert driver.calls[2:] == [("unpin", first, 1)]
    assert driver.present == 0
