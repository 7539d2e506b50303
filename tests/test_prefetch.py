"""Forward passes that begin on the layers whose weights have come."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from steepest.engine.topology import HostMap
from steepest.engine.worker import Worker
from steepest.errors import PeerLostError, ShutdownError
from steepest.messages.driver import Failure, Result
from steepest.messages.message import COORDINATOR, Kind, Message, Peer, server_peer
from steepest.models.prefetch import Gates
from steepest.testing import InProcessCluster, Network
from steepest.testing.inspection import replicas_of
from steepest.transport.router import Router
from tests.drawn import seeds
from tests.modes import Moody, check, make, trainable, trained
from tests.reference import Task, difference, same_bits, sgd


class Raw(nn.Module):
    """Uses another module's weights, and one from a plain list, without entering anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.own = nn.Parameter(torch.randn(4, 4))
        self.listed = [self.own]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x @ self.listed[0], self.embedding.weight)


class Alternating(nn.Module):
    """Takes another way each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        if self.turn % 2:
            return F.linear(self.second(self.first(x)), self.bare.weight, self.bare.bias)
        return self.second(F.linear(self.first(x), self.bare.weight, self.bare.bias))


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(nn.Linear(4, 4), backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class CompiledFunction(nn.Module):
    """Calls its part in a function that is compiled, which no module tells."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.function = [torch.compile(lambda x: self.inner(x), backend="eager")]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function[0](x)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Asks(nn.Module):
    """Looks at its parameters' dtype and size before it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.line.weight.shape == (4, 4)
        assert self.line.weight.size(0) == 4
        return self.line(x.to(self.line.weight.dtype))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 4, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0]


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


class Uses(TorchFunctionMode):
    """Asserts that whatever is computed with has arrived."""

    def __init__(self, entries: dict[nn.Parameter, int], arrived: set[int]) -> None:
        super().__init__()
        self.entries = {id(parameter): entry for parameter, entry in entries.items()}
        self.arrived = arrived
        self.checked = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [r for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]
        if any(r.requires_grad for r in results) and func.__name__ != "__get__":
            for value in pytree.tree_leaves((args, kwargs or {})):
                if id(value) in self.entries:
                    assert self.entries[id(value)] in self.arrived, func
                    self.checked += 1
        return result


def passes(
    module: nn.Module, compute: Callable[[], Any], count: int = 4
) -> tuple[Gates, list[list[int | None]], int]:
    """Forward passes through gates; what each waited for, and how many uses were checked."""
    entries = {parameter: index for index, parameter in enumerate(module.parameters())}
    gates = Gates(module, entries)
    waited: list[list[int | None]] = []
    checked = 0
    for _ in range(count):
        arrived: set[int] = set()
        waits: list[int | None] = []

        def arrive(
            entry: int | None, arrived: set[int] = arrived, waits: list[int | None] = waits
        ) -> None:
            waits.append(entry)
            arrived.update(entries.values() if entry is None else [entry])

        with Uses(entries, arrived) as uses, gates.forward(arrive):
            compute()
        waited.append(waits)
        checked += uses.checked
    return gates, waited, checked


@pytest.mark.parametrize(
    "make_module",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        Raw,
        Asks,
        Recurrent,
        attention,
        tied,
    ],
    ids=["perceptron", "raw", "asks", "lstm", "attention", "tied"],
)
def test_nothing_is_used_before_it_has_come(make_module: Callable[[], nn.Module]) -> None:
    module = make_module()
    x = torch.randn(3, 2, 4)
    gates, waited, checked = passes(module, lambda: module(x))
    assert gates.usable
    assert waited[:2] == [[None], [None]]  # while it learns
    parameters = list(module.parameters())
    for later in waited[2:]:
        assert None not in later
        assert {*later} == {*range(len(parameters))}
    assert checked >= 4 * len(parameters)


def test_a_perceptron_waits_for_one_layer_at_a_time() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    order: list[object] = []
    module[1].register_forward_pre_hook(lambda *_: order.append("relu"))
    gates = Gates(module, {parameter: index for index, parameter in enumerate(module.parameters())})
    for _ in range(3):
        order.clear()
        with gates.forward(order.append):
            module(torch.randn(2, 4))
    assert order == [0, 1, "relu", 2, 3]


@pytest.mark.few(1)
@pytest.mark.parametrize("make_module", [Alternating, Compiled, CompiledFunction, Unused])
def test_who_cannot_be_foreseen_waits_for_everything(make_module: Callable[[], nn.Module]) -> None:
    module = make_module()
    gates, waited, _ = passes(module, lambda: module(torch.randn(3, 4)), 5)
    assert gates.usable is False
    assert waited == [[None]] * 5


def test_a_use_outside_of_every_module_is_not_foreseen() -> None:
    module = nn.Linear(4, 4)

    def compute() -> torch.Tensor:
        penalty = sum(p.square().sum() for p in module.parameters())
        return module(torch.randn(3, 4)).sum() + penalty

    gates, waited, _ = passes(module, compute)
    assert gates.usable is False
    assert waited == [[None]] * 4


def test_hooks_stay_where_they_are_needed_only() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    passes(module, lambda: module(torch.randn(2, 4)))
    assert [len(child._forward_pre_hooks) for child in module.modules()] == [0, 1, 0, 1]
    off = Unused()
    passes(off, lambda: off(torch.randn(2, 4)))
    assert not any(child._forward_pre_hooks for child in off.modules())


# -- steps that begin early ----------------------------------------------------------------------------


class Began:
    """Counts how often a process takes a turn in the middle of a step, since weights that it needs are not there yet.

    Attributes:
        meanwhile: called each time, with the process.
        waiting: whether some process is in such a turn.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        self.waiting = False
        self.meanwhile: Callable[[Router], None] = lambda router: None
        wait = Network.wait

        def waited(network: Network, router: Router) -> None:
            self.waits += 1
            self.meanwhile(router)
            self.waiting = True
            try:
                wait(network, router)
            finally:
                self.waiting = False

        monkeypatch.setattr(Network, "wait", waited)


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> Began:
    return Began(monkeypatch)


TASK = Task(optimizer=sgd(momentum=0.9))
HOSTS = pytest.mark.parametrize(
    "hosts",
    [None, HostMap((0, 0, 0), (0, 0), gathers=True), HostMap((0, 1, 1), (0, 1), gathers=True)],
)


@pytest.mark.few(1)
@HOSTS
@pytest.mark.parametrize("devices", [1, 2])
@seeds(1)
def test_steps_begin_early_and_change_nothing(
    began: Began, hosts: HostMap | None, devices: int, seed: int
) -> None:
    cluster = make("sync", TASK, 3, devices, hosts=hosts, shuffle=seed)
    trained(cluster, 20)
    assert began.waits > 10
    check(cluster, TASK)
    assert difference(cluster.weights(), TASK.train(3 * devices, 20)) < 1e-12


@HOSTS
def test_the_same_bits_as_when_steps_begin_late(
    began: Began, hosts: HostMap | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = make("sync", TASK, 3, hosts=hosts)
    trained(early, 10)
    waits = began.waits

    def waits_for_all(*arguments: Any, **named: Any) -> Worker:
        return Worker(*arguments, **(named | {"between": replace(named["between"], wait=None)}))

    monkeypatch.setattr("steepest.engine.hosting.Worker", waits_for_all)
    late = make("sync", TASK, 3, hosts=hosts)
    trained(late, 10)
    assert began.waits == waits > 0
    assert same_bits(early.weights(), late.weights())


@HOSTS
@seeds(1)
def test_a_failure_while_somebody_waits_for_weights(
    began: Began, hosts: HostMap | None, seed: int
) -> None:
    """Whoever has the last weights raises, in the middle of others' waiting for them: all go on together."""
    calls = [0]

    def mood(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] % 7 == 0:
            raise RuntimeError("moody")
        return gradient

    cluster = make(
        "sync", Task(lambda: Moody(mood), sgd(momentum=0.9)), 3, hosts=hosts, shuffle=seed
    )
    taken = 0
    for _ in range(25):
        taken += isinstance(cluster.step(1)[-1], Result)
    assert taken > 5
    calm = Task(lambda: Moody(lambda gradient: gradient), sgd(momentum=0.9))
    assert difference(cluster.weights(), calm.train(3, taken)) < 1e-12


def waiting_cluster(held: list[Message]) -> InProcessCluster:
    """Three workers; from now on no chunk but the first of new weights reaches worker 0."""
    cluster = make("sync", TASK, 3)
    trained(cluster, 4)

    def hold(message: Message) -> list[Message]:
        if (
            message.kind is Kind.WEIGHTS
            and message.target == Peer("worker", 0)
            and message.chunk != first
        ):
            held.append(message)
            return []
        return [message]

    first = trainable(cluster.servers[0])[-1].chunk.index
    cluster.network.filter = hold
    return cluster


def test_a_step_without_the_rest_of_its_weights_is_given_up_at_the_deadline(began: Began) -> None:
    cluster = waiting_cluster([])
    outcomes = cluster.step(2)
    assert [type(outcome) for outcome in outcomes] == [Result, Failure]
    assert outcomes[-1].reason == "deadline"
    assert "worker 0" in outcomes[-1].awaited
    assert is_idle(cluster.workers[0])


def test_a_server_that_dies_while_its_weights_are_awaited_ends_the_waiting(began: Began) -> None:
    cluster = waiting_cluster([])
    began.meanwhile = lambda router: cluster.disconnect(server_peer(1))
    with pytest.raises(PeerLostError):
        cluster.step(10)
    assert is_idle(cluster.workers[0])


def is_idle(worker: Worker) -> bool:
    """Whether it is in no step: calls wait for the end of one."""
    return worker.at_version(0, -1, lambda replicas: None).done()


def test_calls_that_come_while_weights_are_awaited_run_after_the_step(began: Began) -> None:
    cluster = make("sync", TASK, 2)
    trained(cluster, 4)
    worker, router = cluster.workers[0], cluster.worker_routers[0]
    seen: list[bool] = []

    def call(who: Router) -> None:
        if who is router and not seen:
            worker.at_version(0, 0, lambda replicas: seen.append(began.waiting))
            assert not seen

    began.meanwhile = call
    trained(cluster, 3)
    assert seen
    assert not any(seen)


def test_a_router_that_is_stopped_does_not_wait() -> None:
    router = Router()
    router.stop()
    with pytest.raises(ShutdownError):
        router.wait()


def test_messages_keep_their_order_when_a_role_waits_in_the_middle_of_one() -> None:
    cluster = make("sync", TASK, 2)
    network = cluster.network
    a, b = network.router(), network.router()
    got: list[int] = []

    class Slow:
        def destination(self, message: Message, size: int) -> None:
            return None

        def handle(self, source: Peer, message: Message) -> None:
            got.append(message.sequence)
            if message.sequence == 0:
                while len(got) < 3:
                    b.wait()
                got.append(-1)

        def lost(self, peer: Peer, reason: str) -> None:
            """Nobody leaves."""

        def tick(self, now: float) -> None:
            """Time does not matter."""

    b.host(Peer("worker", 9), Slow())
    network.connect(a, (COORDINATOR,), b, (Peer("worker", 9),))
    send = a.sender(COORDINATOR)
    for sequence in range(5):
        send(Peer("worker", 9), Message(Kind.GRANT, sequence=sequence))
    network.run_until(lambda: len(got) == 6, "all")
    assert got == [0, 1, 2, -1, 3, 4]


def test_what_a_process_has_to_say_leaves_before_its_worker_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the others would wait for as long: new weights of small models and votes are sent together, in the end."""
    cluster = make("allreduce", TASK, 2)
    unsent: set[int] = set()
    computed: list[bool] = []

    def sent(message: Message) -> list[Message]:
        if message.source is not None and message.source.role != "client":
            unsent.add(message.source.index)
        return [message]

    def watched(index: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            computed.append(index in unsent)
            return compute(*arguments)

        return run

    cluster.network.filter = sent
    for index, (worker, router) in enumerate(
        zip(cluster.workers, cluster.worker_routers, strict=True)
    ):
        monkeypatch.setattr(router.transport, "pump", functools.partial(unsent.discard, index))
        monkeypatch.setattr(
            replicas_of(worker), "compute", watched(index, replicas_of(worker).compute)
        )
    cluster.step(3)
    assert computed == [False] * 6
