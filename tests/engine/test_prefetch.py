"""Forward passes that begin before all weights are here, and wait for each that they read."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from steepest.core.engine.step_waits import apart_from_models
from steepest.core.engine.topology import HostMap
from steepest.core.engine.worker import Worker
from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.message import COORDINATOR, Kind, Message, Peer, server_peer
from steepest.core.models import prefetch
from steepest.core.models.prefetch import AwaitedParameter, Gates
from steepest.core.transport.router import Router
from steepest.errors import PeerLostError, ShutdownError
from steepest.testing import InProcessCluster, Network
from steepest.testing.inspection import replicas_of
from tests.modes import Moody, check, make, trainable, trained
from tests.random_examples import seeds
from tests.reference import Task, difference, same_bits, samples, sgd

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


class Net(nn.Module):
    """Two layers, and one more that its forward pass does not enter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def penalised(net: Net, x: torch.Tensor) -> torch.Tensor:
    penalty = sum(p.square().sum() for p in net.parameters())
    return net(x).sum() + penalty


def by_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    def output(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(net, weights, (x,)).sum()

    return torch.func.grad(output)(dict(net.named_parameters()))["second.weight"]


def saved(net: Net, x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)(x)


def made_of_a_copy(net: Net, x: torch.Tensor) -> torch.Tensor:
    made = type(net.bare.weight)(torch.ones(4, 4))
    assert type(made) is nn.Parameter
    return x @ made @ net.bare.weight


#: what a pass computes from parameters, in its order
READS: dict[str, Callable[[Net, torch.Tensor], Any]] = {
    "layers": lambda net, x: net(x),
    "the weight of a layer that is not entered": lambda net, x: F.linear(net(x), net.bare.weight),
    "a layer's function alone": lambda net, x: net.bare.forward(x),
    "a penalty of all": penalised,
    "a list": lambda net, x: torch.cat([net.second.weight, net.bare.weight]),
    "a function of autograd": lambda net, x: Doubled.apply(x, net.bare.weight),
    "a custom operator": lambda net, x: torch.ops.aten.mm.default(x, net.bare.weight),
    "gradients": by_gradient,
    "a closure": lambda net, x: torch.func.vmap(lambda row: net.bare.weight @ row)(x),
    "a row each": lambda net, x: torch.func.vmap(lambda row: row.sum())(net.bare.weight),
    "a tangent": lambda net, x: torch.func.jvp(net.bare, (x,), (x,))[1],
    "data": lambda net, x: net.bare.weight.data + 0,
    "another array": lambda net, x: torch.tensor(net.bare.weight.detach().numpy().copy()),
    "numbers": lambda net, x: torch.tensor(net.bare.weight.tolist()),
    "one number": lambda net, x: torch.tensor(net.bare.weight[0, 0].item()),
    "text": lambda net, x: torch.tensor(len(repr(net.bare.bias).split("nan"))),
    "a copy": lambda net, x: copy.deepcopy(net)(x),
    "a file": saved,
    "its class": made_of_a_copy,
    "without gradients": torch.inference_mode()(lambda net, x: net.bare(x) + net.second.bias),
    "autocast": torch.autocast("cpu", torch.bfloat16)(lambda net, x: x @ net.bare.weight),
    "a thread": lambda net, x: in_a_thread(lambda: net.bare.weight @ x.T),
}


def in_a_thread(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests of this process have compiled."""
    monkeypatch.setattr(prefetch, "_has_compiled", lambda: False)


class Weights:
    """Weights of a module on their way: its parameters are NaN until they have arrived.

    Attributes:
        waits: the arguments of `arrive`, one after the other.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.gates = Gates(module, {p: index for index, p in enumerate(self.parameters)})
        self._values = [p.detach().clone() for p in self.parameters]
        self._memory = [p.detach() for p in self.parameters]
        self.waits: list[int | None] = []

    def arrive(self, entry: int | None) -> None:
        """What a worker gives to its model."""
        self.waits.append(entry)
        self._come(entry)

    def _come(self, entry: int | None) -> None:
        with apart_from_models():
            for index in range(len(self._values)) if entry is None else [entry]:
                self._memory[index].copy_(self._values[index])

    def passed(self, compute: Callable[[], Any]) -> Any:
        """What a pass computes that begins before any weights are here."""
        self.waits.clear()
        for memory in self._memory:
            memory.fill_(math.nan)
        with self.gates.forward(self.arrive):
            found = compute()
        assert not any(type(p) is AwaitedParameter or "_gates" in vars(p) for p in self.parameters)
        self._come(None)
        return found


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whatever_is_read_has_come(
    read: Callable[[Net, torch.Tensor], Any], nothing_compiled: None
) -> None:
    net, x = Net(), torch.randn(3, 4)
    expected = read(net, x)
    weights = Weights(net)
    for _ in range(2):
        assert torch.equal(weights.passed(lambda: read(net, x)), expected)
        assert None not in weights.waits


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


@pytest.mark.parametrize(
    "make_module", [attention, tied, normed, lambda: nn.LSTM(4, 4, num_layers=2)]
)
def test_each_weight_of_a_module_is_waited_for_once(
    make_module: Callable[[], nn.Module], nothing_compiled: None
) -> None:
    module, x = make_module(), torch.randn(3, 2, 4)
    expected = module(x)
    weights = Weights(module)
    found = weights.passed(lambda: module(x))
    assert sorted(weights.waits) == list(range(len(weights.parameters)))
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert torch.equal(a, b)


def flat(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else [t for o in output for t in flat(o)]


def test_a_way_that_changes_is_followed_in_each_pass(nothing_compiled: None) -> None:
    net, x = Net(), torch.randn(3, 4)
    weights = Weights(net)
    ways = [READS["layers"], READS["layers"], READS["layers"], penalised, READS["a list"]]
    for way in ways:
        expected = way(net, x)
        assert torch.equal(weights.passed(lambda way=way: way(net, x)), expected)


def test_a_perceptron_waits_for_one_layer_at_a_time(nothing_compiled: None) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    weights = Weights(module)
    module[1].register_forward_pre_hook(lambda *_: weights.waits.append(-1))
    for _ in range(2):
        weights.passed(lambda: module(torch.randn(2, 4)))
        assert weights.waits == [0, 1, -1, 2, 3]


def test_nothing_is_left_of_a_pass_that_raises(nothing_compiled: None) -> None:
    net = Net()
    with pytest.raises(RuntimeError, match="shapes"):
        Weights(net).passed(lambda: net.first(torch.randn(2, 7)))
    assert all(type(p) is nn.Parameter for p in net.parameters())
    assert net.first(torch.ones(4)).shape == (4,)


def compiled_inside() -> nn.Module:
    net = Net()
    net.forward = torch.compile(net.forward, backend="eager")  # type: ignore[method-assign]
    return net


def traced_inside() -> nn.Module:
    net = Net()
    net.forward = torch.jit.trace(net.first, torch.ones(3, 4))  # type: ignore[method-assign]
    return net


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make_module",
    [lambda: torch.compile(Net(), backend="eager"), compiled_inside, traced_inside],
)
def test_compiled_code_waits_for_everything(make_module: Callable[[], nn.Module]) -> None:
    module, x = make_module(), torch.randn(3, 4)
    expected = module(x)
    weights = Weights(module)
    assert torch.equal(weights.passed(lambda: module(x)), expected)
    assert weights.waits[0] is None


def test_a_scripted_module_waits_for_everything_when_it_is_entered(nothing_compiled: None) -> None:
    net, x = Net(), torch.randn(3, 4)
    weights = Weights(net)
    scripted = torch.jit.script(net.first)
    expected = scripted(x)
    assert torch.equal(weights.passed(lambda: scripted(x)), expected)
    whole = nn.Sequential(scripted)
    assert Weights(whole).passed(lambda: whole(x)).isfinite().all()


def test_a_server_that_works_during_a_pass_is_apart_from_it() -> None:
    """What a pass has set of torch does not reach the updates that are made while it waits."""
    weight = torch.zeros(3)

    def update(row: torch.Tensor) -> torch.Tensor:
        with apart_from_models():
            weight.add_(torch.ones(3))  # in a transformation, torch refuses it
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_inference_mode_enabled()
        return row

    with torch.autocast("cpu", torch.bfloat16):
        torch.func.grad(lambda x: update(x).sum())(torch.ones(3))
        torch.func.vmap(update)(torch.ones(2, 3))
    with torch.inference_mode():
        update(torch.ones(3))
    assert weight.tolist() == [3.0] * 3


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


class Warmed(nn.Module):
    """Reads its last layer first, from its fourth pass on: a penalty after a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8).double(), nn.Linear(8, 2).double()
        self.passes = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        self.passes += 1
        penalty = torch.tanh(self.second.weight).square().mean() if self.passes > 3 else 0.0
        return self.second(torch.tanh(self.first(x))), penalty


def warmed_loss(output: tuple[torch.Tensor, torch.Tensor | float], target: Any) -> torch.Tensor:
    return F.mse_loss(output[0], target) + output[1]


@pytest.mark.parametrize("mode", ["sync", "copies", "allreduce", "replicated"])
def test_a_model_that_changes_its_way_trains_as_one_process_does(
    mode: str, began: Began, nothing_compiled: None
) -> None:
    task = Task(Warmed, sgd(0.2), samples(12), warmed_loss)
    cluster = make(mode, task, 2, lend=False)
    trained(cluster, 9)
    assert began.waits > 5
    assert difference(cluster.weights(), task.train(2, 9)) < 1e-12


@pytest.mark.parametrize("workers", [1, 2])
def test_the_module_is_the_users_between_steps(workers: int, nothing_compiled: None) -> None:
    cluster = make("sync", TASK, workers)
    trained(cluster, 5)
    (model, *_) = replicas_of(cluster.workers[0]).models
    plain, x = TASK.module(), torch.ones(1, 3, dtype=torch.float64)
    expected = model.module(x)  # type: ignore[attr-defined]
    assert repr(model.module) == repr(plain)  # type: ignore[attr-defined]
    for child in model.module.modules():  # type: ignore[attr-defined]
        assert not child._forward_pre_hooks
        assert not any(type(p) is AwaitedParameter for p in child.parameters())
    for again in (saved, lambda m, x: copy.deepcopy(m)(x), lambda m, x: torch.jit.script(m)(x)):
        assert torch.equal(again(model.module, x), expected)  # type: ignore[attr-defined]


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


@pytest.mark.few(2)
@HOSTS
def test_the_same_bits_as_when_steps_begin_late(
    began: Began, hosts: HostMap | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = make("sync", TASK, 3, hosts=hosts)
    trained(early, 10)
    waits = began.waits

    def waits_for_all(*arguments: Any, **named: Any) -> Worker:
        return Worker(*arguments, **(named | {"between": replace(named["between"], wait=None)}))

    monkeypatch.setattr("steepest.core.engine.hosting.Worker", waits_for_all)
    late = make("sync", TASK, 3, hosts=hosts)
    trained(late, 10)
    assert began.waits == waits > 0
    assert same_bits(early.weights(), late.weights())


@pytest.mark.few(1)
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
