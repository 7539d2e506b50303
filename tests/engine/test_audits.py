"""Audited steps: a worker computes another one's samples, too; nothing else changes, and who is wrong is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from steepest import (
    AllreduceStrategy,
    Embedding,
    LocalStrategy,
    ParameterServerStrategy,
    RunConfig,
    Table,
)
from steepest import TorchModel as TableModel
from steepest.core.config.run import FailureConfig
from steepest.core.engine.topology import HostMap
from steepest.core.messages.message import Kind, Message
from steepest.core.models.torch import TorchModel
from steepest.core.protocol.audits import drawn, other_of
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster, linear_model_creator
from tests.modes import MODES, TOGETHER
from tests.reference import same_bits

SEED = 5
Hook = Callable[[int, torch.Tensor], torch.Tensor | None]


class Augmented(Dataset[Any]):
    """Samples that are augmented by all three random generators."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(())
        return torch.full((3,), index / 10) + noise, torch.tensor([index / 7])


class Network(nn.Module):
    """Draws random numbers, changes buffers and has a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(4, 1)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.drop(self.norm(self.first(x))))


def creator(hook: Hook | None = None, data: Any = None, norm: bool = True) -> Any:
    """Makes models of which a function may change the gradient of a parameter, given the worker's index."""

    def create(worker_index: int, device_index: int) -> TorchModel:
        module = Network()
        if not norm:
            module.norm = nn.Identity()
        if hook is not None:
            module.first.weight.register_hook(lambda gradient: hook(worker_index, gradient))
        return TorchModel(
            module,
            loss=nn.functional.mse_loss,
            data=Augmented() if data is None else data,
            batch_size=4,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9),
        )

    return create


def flipped(gradient: torch.Tensor, bit: int = 0) -> torch.Tensor:
    """Return a gradient with one bit of one element the other way round: the lowest by default."""
    found = gradient.clone()
    found.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)
    return found


class Flips:
    """Flips a bit in the gradients of a worker that have these numbers, or in all."""

    def __init__(self, worker: int, numbers: set[int] | None = None, bit: int = 0) -> None:
        self.worker, self.numbers, self.bit, self.count = worker, numbers, bit, 0

    def __call__(self, worker: int, gradient: torch.Tensor) -> torch.Tensor | None:
        if worker != self.worker:
            return None
        self.count += 1
        hit = self.numbers is None or self.count in self.numbers
        return flipped(gradient, self.bit) if hit else None


def trained(steps: int = 8, create: Any = None, workers: int = 2, **settings: Any) -> Any:
    """Return a job that has taken some steps, and its weights and buffers by worker."""
    cluster = InProcessCluster(create or creator(), num_workers=workers, seed=SEED, **settings)
    results = cluster.step(steps)
    assert len(results) == steps
    assert results[-1].version == steps
    return cluster, cluster.weights()


def states(cluster: InProcessCluster) -> list[dict[str, torch.Tensor]]:
    return [dict(each) for worker in cluster.workers for each in worker._replicas.states()]


@pytest.mark.few(8)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("mode", TOGETHER)
def test_audits_change_no_bit(mode: str, workers: int) -> None:
    (plain, weights), (audited, same) = (
        trained(workers=workers, strategy=MODES[mode], audit=share) for share in (0.0, 0.6)
    )
    assert same_bits(weights, same)
    assert not audited.differences
    for one, other in zip(states(plain), states(audited), strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 3},
        {"devices_per_worker": 2},
        {"strategy": ParameterServerStrategy(compression="int8", num_servers=2)},
        {"strategy": ParameterServerStrategy(wire_dtype="bf16", clip_norm=0.1)},
        {"strategy": AllreduceStrategy(compression="topk")},
        {
            "strategy": ParameterServerStrategy(wire_dtype="fp16"),
            "hosts": HostMap((0, 0, 1), (0,)),
            "workers": 3,
        },
        {"global_batch_size": 7, "workers": 3},
    ],
    ids=str,
)
def test_audits_change_no_bit_with(settings: dict[str, Any]) -> None:
    (_, weights), (audited, same) = (trained(**settings, audit=share) for share in (0.0, 0.6))
    assert same_bits(weights, same)
    assert not audited.differences


def test_a_worker_without_samples_is_audited() -> None:
    """The last step of an epoch has one sample."""
    data = torch.randn(13, 3), torch.randn(13, 1)
    settings: Any = {"workers": 3, "create": creator(data=data, norm=False)}
    (_, weights), (audited, same) = (trained(**settings, audit=share) for share in (0.0, 1.0))
    assert same_bits(weights, same)
    assert not audited.differences


@pytest.mark.few(12)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["sync", "allreduce"])
def test_one_bit_flipped_once_is_named_and_mended(mode: str, workers: int, number: int) -> None:
    """Odd numbers are those of another worker's samples, even ones of its own."""
    settings: Any = {"workers": workers, "strategy": MODES[mode], "audit": 1.0, "steps": 3}
    plain, weights = trained(**settings)
    wrong = workers - 1
    audited, mended = trained(create=creator(Flips(wrong, {number})), **settings)
    (found,) = audited.differences
    assert (found.worker, found.step) == (wrong, (number + 1) // 2)
    assert wrong in found.pairs[0]
    assert not found.waits
    assert same_bits(weights, mended)
    assert all(map(same_bits, states(plain), states(audited)))


def test_a_worker_that_always_computes_wrongly_is_named_by_a_third() -> None:
    audited, _ = trained(create=creator(Flips(1)), workers=3, audit=1.0, steps=4)
    assert [found.worker for found in audited.differences] == [1, 1, 1, 1]
    assert "two others have computed alike" in audited.differences[0].why


def test_of_two_workers_of_which_one_always_computes_wrongly_none_is_named() -> None:
    audited, _ = trained(create=creator(Flips(1)), workers=2, audit=1.0, steps=2)
    first, second = audited.differences
    assert (first.worker, first.pairs) == (None, ((0, 1), (1, 0)))
    assert "not known which is wrong" in first.why
    assert ["buffers" in found.why for found in (first, second)] == [False, True]


def test_a_worker_that_computes_wrongly_is_replaced_before_the_step_is_committed() -> None:
    settings: Any = {"workers": 3, "audit": 1.0, "steps": 4}
    _, weights = trained(**settings)
    flips = Flips(1)

    class Replaced(InProcessCluster):
        def replace(self, worker: int) -> None:
            flips.worker = -1
            super().replace(worker)

    cluster = Replaced(
        creator(flips), num_workers=3, seed=SEED, audit=1.0, audit_replaces=True, replaces=True
    )
    assert cluster.step(4)[-1].version == 4
    (found,) = cluster.differences
    assert (found.worker, found.waits, cluster.lives) == (1, True, [0, 1, 0])
    assert same_bits(weights, cluster.weights())


def test_what_holds_a_step_up_is_told_where_no_worker_is_replaced() -> None:
    class Idle(InProcessCluster):
        def kill(self, worker: int) -> None:
            pass

    cluster = Idle(creator(Flips(1)), num_workers=3, seed=SEED, audit=1.0, audit_replaces=True)
    (failure,) = cluster.step(1)
    assert (failure.reason, failure.awaited) == ("deadline", ["worker 1"])


def test_a_model_that_does_not_repeat_its_results_is_not_held_against_a_worker() -> None:
    generator = random.Random(1)

    def drawing(worker: int, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * generator.random()

    audited, _ = trained(create=creator(drawing), workers=3, audit=1.0, steps=2)
    assert [found.worker for found in audited.differences] == [None, None]
    assert "workers 0 and 1 and 2 did not get the same results twice" in audited.differences[0].why


def test_samples_that_are_read_differently_are_told_once() -> None:
    class Counting(Augmented):
        count = 0

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            Counting.count += 1
            return torch.full((3,), float(Counting.count)), torch.zeros(1)

    audited, _ = trained(create=creator(data=Counting()), workers=2, audit=1.0, steps=3)
    (found,) = audited.differences
    assert found.worker is None
    assert "they have read other samples" in found.why


@pytest.mark.parametrize("mode", TOGETHER)
def test_a_state_that_is_set_is_that_of_the_next_step(mode: str) -> None:
    """The job goes back to the version of the last audited step, with other buffers."""
    found = []
    for audit in (0.0, 1.0):
        cluster, _ = trained(4, workers=2, strategy=MODES[mode], audit=audit)
        before = cluster.snapshot("state")
        cluster.step(1)
        for worker in cluster.workers:
            for model in worker._replicas.models:
                model.load_state({"norm.running_mean": torch.full((4,), 7.0)})
        state = before.weights, before.records, before.state
        cluster.wait(cluster.client.install(before.version, *state), "the installation")
        cluster.step(1)
        found.append((cluster.weights(), states(cluster)))
    (weights, one), (same, other) = found
    assert same_bits(weights, same)
    assert all(map(same_bits, one, other))


@pytest.mark.parametrize("forward", [1, 2])
def test_a_death_in_an_audited_step_changes_no_bit(forward: int) -> None:
    """Worker 1 dies while it computes another's samples, or its own."""
    settings: Any = {"workers": 3, "audit": 1.0, "steps": 4}
    data = torch.randn(26, 3), torch.randn(26, 1)
    _, weights = trained(create=creator(data=data, norm=False), **settings)
    count = 0

    def dying(worker: int, gradient: torch.Tensor) -> None:
        nonlocal count
        count += worker == 1
        if worker == 1 and count == 2 + forward:
            cluster.kill(1)

    cluster = InProcessCluster(
        creator(dying, data, norm=False), num_workers=3, seed=SEED, audit=1.0, replaces=True
    )
    assert cluster.step(4)[-1].version == 4
    assert cluster.lives == [0, 1, 0]
    assert not cluster.differences
    assert same_bits(weights, cluster.weights())


def test_unlike_machines_are_compared_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steepest.core.engine.auditing.machine", lambda device: "")
    low, high = (
        trained(create=creator(Flips(0, {2}, bit)), workers=2, audit=1.0, steps=3)[0].differences
        for bit in (0, 30)
    )
    assert not low
    assert [found.worker for found in high] == [0]


def test_without_audits_no_message_is_longer_and_with_them_those_of_audited_steps() -> None:
    found: dict[float, list[set[str]]] = {}
    for share in (0.0, 0.5):
        cluster = InProcessCluster(creator(), num_workers=2, seed=SEED, audit=share)
        kept = found[share] = []

        def watch(message: Message, kept: list[set[str]] = kept) -> None:
            if message.kind is Kind.REPORT:
                kept.append({"audit"} if message.body.audit is not None else set())

        router = cluster.server_routers[0]
        handle = router._roles[next(peer for peer in router._roles if peer.role == "coordinator")]
        original = handle.handle

        def handled(
            source: Any, message: Message, original: Any = original, watch: Any = watch
        ) -> None:
            watch(message)
            original(source, message)

        handle.handle = handled  # type: ignore[method-assign]
        cluster.step(12)
    assert not any("audit" in names for names in found[0.0])
    audited = {at // 2 for at, names in enumerate(found[0.5]) if "audit" in names}
    assert audited == {step for step in range(12) if drawn(SEED, step, 0.5) is not None}
    assert 2 < len(audited) < 10


def test_audited_steps_are_as_many_as_they_should_be_and_all_pairs_meet() -> None:
    numbers = [n for step in range(20_000) if (n := drawn(3, step, 0.01)) is not None]
    assert 150 < len(numbers) < 250
    pairs = {(w, other_of(w, 4, number, 0)) for number in numbers for w in range(4)}
    assert pairs == {(a, b) for a in range(4) for b in range(4) if a != b}


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (ParameterServerStrategy(mode="async"), "do not take each step together"),
        (ParameterServerStrategy(backup_workers=1), "do not take each step together"),
        (LocalStrategy(), "do not take each step together"),
    ],
)
def test_strategies_that_cannot_be_audited_are_refused(strategy: Strategy, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        InProcessCluster(linear_model_creator(), num_workers=3, strategy=strategy, audit=0.1)


def test_streams_and_tables_are_refused() -> None:
    stream = [(torch.zeros(2, 3), torch.zeros(2, 1))]
    with pytest.raises(ConfigurationError, match="choose their own batches"):
        InProcessCluster(creator(data=iter(stream)), num_workers=2, audit=0.1)
    with pytest.raises(ConfigurationError, match="embedding tables"):
        InProcessCluster(with_table, num_workers=2, audit=0.1)


def with_table(worker_index: int, device_index: int) -> TableModel:
    return TableModel(
        nn.Sequential(Embedding(Table("ids", 2)), nn.Linear(2, 1)),
        loss=nn.functional.mse_loss,
        data=(torch.arange(8), torch.zeros(8, 1)),
        batch_size=2,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.long)])
def test_worker_processes_of_a_loader_go_on_where_they_were(persistent: bool) -> None:
    data = TensorDataset(torch.randn(48, 3), torch.randn(48, 1))
    loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=persistent)
    (_, weights), (audited, same) = (
        trained(create=creator(data=loader), audit=share) for share in (0.0, 0.5)
    )
    assert same_bits(weights, same)
    assert not audited.differences


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"audit": 1.5}, "audit=1.5: give a finite number from 0 to 1"),
        ({"audit": True}, "audit=True"),
        ({"audit_replaces": True}, "audit_replaces=True with audit=0.0"),
        (
            {"audit": 0.1, "audit_replaces": True, "failure": FailureConfig(max_failures=0)},
            "max_failures=0",
        ),
    ],
)
def test_refused_values(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RunConfig(**settings)
