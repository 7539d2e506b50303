"""Optimizers as users write them train as in one process, and what they keep goes wherever they go."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    LocalStrategy,
    ParameterServerStrategy,
    SimpleStrategy,
    TorchModel,
)
from steepest.core.engine.chunk_store import StagedPush
from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.messages.message import PushId
from steepest.core.optim.portable import pack_all, unpack
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import ConfigurationError, ModelError, ProtocolError
from steepest.testing import InProcessCluster
from tests.reference import Task, difference, perceptron, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.unusual_optimizers import (
    Clipped,
    Counting,
    DAdaptSGD,
    LargeOnly,
    Lars,
    LateClipped,
    Preconditioned,
    Prodigy,
    Unusual,
    WithoutRate,
    Writing,
)

Factory = Callable[[nn.Module], torch.optim.Optimizer]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def lars(no_decay_first: bool) -> Factory:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [p for p in module.parameters() if p.ndim == 1]},
            {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
        ]
        return Lars(groups if no_decay_first else groups[::-1])

    return make


def two(module: Any) -> list[torch.optim.Optimizer]:
    return [Preconditioned(module[0].parameters()), Counting(module[2].parameters())]


def of(kind: Any) -> Factory:
    return lambda module: kind(module.parameters())


#: factory, whether tensors may be split, whether all parameters are updated together
KINDS: dict[str, tuple[Any, bool, bool]] = {
    "clipped": (of(Clipped), False, True),
    "clipped at a large norm": (lambda m: Clipped(m.parameters(), most=3e4), False, True),
    "prodigy": (of(Prodigy), False, True),
    "d-adaptation": (of(DAdaptSGD), False, True),
    "lars, no decay first": (lars(True), False, False),
    "lars, no decay last": (lars(False), False, False),
    "lists": (of(Preconditioned), False, False),
    "counting": (of(Counting), True, False),
    "writing": (of(Writing), True, False),
    "two": (lambda m: two(m), False, False),
}
STRATEGIES: list[tuple[Any, int]] = [
    (ParameterServerStrategy(num_servers=2, chunk_bytes=64), 2),
    (AllreduceStrategy(chunk_bytes=64), 3),
    (ParameterServerStrategy(mode="async", num_servers=2, chunk_bytes=64), 1),
    (LocalStrategy(chunk_bytes=64, sync_every=1), 1),
]


def serial(task: Task, steps: int, batch: int = 6) -> dict[str, torch.Tensor]:
    """The weights of plain torch after some steps, also with two optimizers."""

    class Both:
        def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
            self.all = optimizers
            self.param_groups = [g for each in optimizers for g in each.param_groups]

        def zero_grad(self) -> None:
            for each in self.all:
                each.zero_grad()

        def step(self) -> None:
            for each in self.all:
                each.step()

    def make(module: nn.Module) -> Any:
        made = task.optimizer(module)
        return Both(made) if isinstance(made, list) else made

    return Task(task.module, make, task.data, batch_size=batch).train(1, steps)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_they_train_as_in_one_process(name: str) -> None:
    factory, split, together = KINDS[name]
    variant = name in ("clipped at a large norm", "lars, no decay last")
    for strategy, workers in STRATEGIES[:1] if variant else STRATEGIES:
        task = Task(network, factory, samples(24), batch_size=6 // workers)
        cluster = InProcessCluster(task.creator(), num_workers=workers, strategy=strategy)
        spec, layout = cluster.job.description.optimizer_spec, cluster.job.description.layout
        assert (spec.elementwise, spec.coupled) == (split, together)
        assert (len(layout.chunks) == 1) is together
        cluster.step(9)
        assert difference(cluster.weights(), serial(task, 9)) < 1e-12, strategy


def test_a_rule_of_large_matrices_is_found() -> None:
    small, large = (nn.Linear(8, size).double() for size in (4, 130))
    wide = nn.Linear(1000, 130).double()
    for module, split in ((small, True), (large, True), (wide, False)):
        names = {id(p): name for name, p in module.named_parameters()}
        assert OptimizerSpec.read(LargeOnly(module.parameters()), names).elementwise is split


@pytest.mark.long
def test_a_rule_that_sets_in_late_is_found() -> None:
    assert read(of(LateClipped)).coupled
    with pytest.raises(ConfigurationError, match="Hoarding keeps 'found' of type set"):
        read(lambda m: Hoarding(m.parameters(), since=100))


def trainer_of(task: Task, workers: int, strategy: Any) -> DistributedSGD:
    return DistributedSGD(
        task.creator(), workers, strategy=strategy, global_batch_size=6, run_config=run_config()
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["prodigy", "two"])
def test_what_they_keep_goes_wherever_they_go(name: str, tmp_path: Path) -> None:
    task = Task(network, KINDS[name][0], samples(24), batch_size=6)
    expected = serial(task, 16)
    servers = ParameterServerStrategy(num_servers=2, chunk_bytes=64)
    with quiet(), Simulation().running():
        with trainer_of(task, 2, servers) as trainer:
            trainer.fit(steps=3, progress=False)
            trainer.resize(3)
            trainer.fit(steps=2, progress=False)
            trainer.set_strategy(AllreduceStrategy(chunk_bytes=96))
            trainer.fit(steps=3, progress=False)
            trainer.save(tmp_path / "saved")
            trainer.fit(steps=8, progress=False)
            assert difference(trainer.weights(), expected) < 1e-12
        for workers, strategy in (
            (1, ParameterServerStrategy(num_servers=3, chunk_bytes=64)),
            (3, AllreduceStrategy(chunk_bytes=32)),
            (1, LocalStrategy(sync_every=1)),
            (2, SimpleStrategy()),
        ):
            with trainer_of(task, workers, strategy) as trainer:
                trainer.fit(steps=1, progress=False)
                trainer.restore(tmp_path / "saved")
                trainer.fit(steps=8, progress=False)
                assert difference(trainer.weights(), expected) < 1e-12, strategy


@pytest.mark.long
def test_what_they_keep_survives_deaths() -> None:
    """From a snapshot, and from copies on other servers."""
    task = Task(network, two, samples(24), batch_size=6)
    expected = serial(task, 12)
    for copies in (1, 2):
        strategy = ParameterServerStrategy(num_servers=2, chunk_bytes=64, replication=copies)
        simulation = Simulation(copies)
        with quiet(), simulation.running(), trainer_of(task, 2, strategy) as trainer:
            trainer.fit(steps=7, progress=False)
            victim = next(p for p in simulation.living() if "server 0" in str(p))
            simulation.world.kill(victim, "it was killed. connection error code 2.")
            trainer.fit(steps=5, progress=False)
            assert difference(trainer.weights(), expected) < 1e-12


@pytest.mark.long
def test_workers_of_local_training_get_a_mean_of_what_has_one_form(tmp_path: Path) -> None:
    task = Task(network, of(Preconditioned), samples(24), batch_size=2)
    with quiet(), Simulation().running():
        with DistributedSGD(
            task.creator(), 2, strategy=LocalStrategy(sync_every=3), run_config=run_config()
        ) as trainer:
            trainer.fit(steps=2, progress=False)
            trainer.save(tmp_path / "saved")
        with DistributedSGD(
            task.creator(), 3, strategy=LocalStrategy(sync_every=3), run_config=run_config()
        ) as trainer:
            trainer.restore(tmp_path / "saved")
            assert trainer.fit(steps=2, progress=False).step == 4


# -- counts of steps without a gradient, and schedules --------------------------------------------


class Branch(nn.Module):
    """A module of which one half has no gradient in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return (self.first if self.passes % 2 else self.second)(x)


def test_a_count_goes_on_where_there_is_no_gradient() -> None:
    task = Task(Branch, of(Counting), samples(24), batch_size=6)
    strategy = ParameterServerStrategy(num_servers=2, chunk_bytes=16)
    cluster = InProcessCluster(task.creator(), num_workers=1, strategy=strategy)
    cluster.step(7)
    assert difference(cluster.weights(), serial(task, 7)) < 1e-12


def test_a_step_in_which_no_push_weighs_anything_is_counted() -> None:
    module = nn.Linear(2, 1)
    names = {id(p): name for name, p in module.named_parameters()}
    layout = ParameterLayout.plan([("bias", (1,), torch.float32, True)])
    spec = OptimizerSpec.read(Counting([module.bias]), names)
    held = ServerChunk(layout.chunks[0], layout, spec, layout.chunk_view(layout.allocate(), 0))
    for _ in range(3):
        held.reduce([])
        held.apply([{}], 1.0)
    state = {about["key"]: (value, about["plain"]) for about, value in held.state()}
    assert unpack(state) == {"group:k": 3}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["prodigy", "d-adaptation", "counting"])
def test_a_schedule_leaves_alone_what_the_optimizer_counts(name: str) -> None:
    def decay(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)

    task = Task(network, KINDS[name][0], samples(24), batch_size=3, lr_scheduler=decay)
    cluster = InProcessCluster(
        task.creator(), num_workers=2, strategy=ParameterServerStrategy(num_servers=1)
    )
    cluster.step(8)
    assert difference(cluster.weights(), task.train(2, 8)) < 1e-12


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        Writing,
        Clipped,
    ],
)
def test_a_pushed_gradient_stays_as_it_is(make: Any) -> None:
    module = nn.Linear(4, 3)
    names = {id(p): name for name, p in module.named_parameters()}
    spec = OptimizerSpec.read(make(module.parameters()), names)
    parameters = [(n, tuple(p.shape), p.dtype, True) for n, p in module.named_parameters()]
    layout = ParameterLayout.plan(parameters)
    (chunk,) = layout.chunks
    held = ServerChunk(chunk, layout, spec, layout.chunk_view(layout.allocate(), 0))
    gradient = torch.ones(chunk.nbytes // 4)
    for number in range(3):
        push = PushId(0, 0, number)
        payload = gradient.view(torch.uint8)
        held.staged[push] = StagedPush(frozenset([0]), payload, 8.0, 8.0, frozenset(), None)
        held.reduce([push])
        held.apply(spec.hyperparameters([{}]), 1.0)
        assert torch.equal(gradient, torch.ones_like(gradient))


# -- refusals -------------------------------------------------------------------------------------


class Hoarding(Unusual):
    """Keeps something that cannot be carried, from some step on."""

    def __init__(self, params: Any, lr: float = 0.1, where: str = "state", since: int = 1) -> None:
        super().__init__(params, {"lr": lr, "where": where, "since": since})
        self.count = 0

    def update(self) -> None:
        self.count += 1
        for group, p, g in self.gradients():
            p.sub_(g, alpha=group["lr"])
            if self.count >= group["since"]:
                kept: Any = {
                    "state": self.state[p],
                    "group": group,
                    "attribute": vars(self),
                    "elsewhere": self.state,
                }[group["where"]]
                kept["found"] = {1, 2}


def read(factory: Factory) -> OptimizerSpec:
    module = network()
    return OptimizerSpec.read(factory(module), {id(p): n for n, p in module.named_parameters()})


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("state", "Hoarding keeps 'found' of type set"),
        ("group", "Hoarding keeps 'group:found' of type set"),
        ("attribute", "Hoarding keeps 'self:found' of type set"),
        ("elsewhere", "Hoarding keeps state of 'found', which is no parameter"),
    ],
)
def test_what_cannot_be_carried_is_refused_at_once(where: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read(lambda m: Hoarding(m.parameters(), where=where))


def test_hooks_of_a_step_are_refused() -> None:
    def hooked(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    with pytest.raises(ConfigurationError, match="SGD has hooks of its step"):
        read(hooked)


def test_parameters_of_two_dtypes_cannot_be_updated_together() -> None:
    def mixed() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4).double(), nn.Linear(4, 2))

    with pytest.raises(ModelError, match="Clipped updates each parameter by what all .* one dtype"):
        Task(mixed, of(Clipped)).creator()(0, 0)


# -- values as tensors ----------------------------------------------------------------------------

VALUES: list[Any] = [
    *(None, True, False, 0, -7, 2**70, 0.1, float("inf"), "text", b"".decode(), ()),
    *([], {}, [1, 2.5, None], (1, (2, "x")), {"a": {3: [True]}, None: ()}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    again = unpack(pack_all({"key": value}))["key"]
    assert (type(again), repr(again)) == (type(value), repr(value))


def test_tensors_inside_are_carried_in_every_bit() -> None:
    inside = [
        torch.tensor([0.1, float("nan")]),
        torch.zeros(0, 3),
        torch.tensor(7, dtype=torch.int8),
    ]
    value = {"list": [inside[0], None, (inside[1],)], 3: inside[2]}
    packed = pack_all({"key": value, "own": inside[0]})
    assert packed.keys() == {"key", "own", "key:0", "key:1", "key:2"}
    found = unpack(packed)
    assert found["key"]["list"][0] is inside[0] is found["own"]
    assert found["key"]["list"][1:] == [None, (inside[1],)]
    assert found["key"][3] is inside[2]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"a": object()}, "'a' of type object"),
        ({"a": [1, {2}]}, "'a' of type list .set has no JSON"),
        ({"a": torch.zeros(2).to_sparse()}, "torch.sparse_coo"),
        ({1: 2}, "the key 1, which is no text"),
        ({"a/b": 2}, "the key 'a/b'"),
        ({"a": [torch.zeros(1)], "a:0": torch.zeros(1)}, "a part named 'a:0'"),
    ],
)
def test_what_is_no_value_is_named(values: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        pack_all(values)


def test_state_that_makes_no_sense_is_refused() -> None:
    spec = read(of(Counting))
    layout = ParameterLayout.plan([("0.bias", (6,), torch.float64, True)])
    held = ServerChunk(layout.chunks[0], layout, spec, layout.chunk_view(layout.allocate(), 0))
    about = {"name": "0.bias", "start": 0, "stop": 6, "plain": True}
    text = torch.tensor([*b'{"other": 0}'], dtype=torch.uint8)
    bad = [("n", torch.zeros(3)), ("n", torch.tensor([*b"{"], dtype=torch.uint8))]
    own = [(key, torch.tensor(1)) for key in ("group:params", "self:state", "self:0.param_groups")]
    for key, value in itertools.chain(bad, own):
        with pytest.raises(ProtocolError, match="makes no sense"):
            held.check_state({**about, "key": key}, value)
    held.load_state({**about, "key": "buffers"}, text)
    with pytest.raises(ProtocolError, match="chunk 0 that makes no sense: this is no JSON"):
        held.end_state()


def test_a_rate_that_an_optimizer_does_not_have_is_refused_before_the_first_step() -> None:
    """A strategy's correction and a model's schedule change it; without these the optimizer trains as torch's SGD."""

    def create(learning_rate: Any = None) -> Any:
        return lambda worker, device: TorchModel(
            perceptron(), loss=nn.MSELoss(), data=samples(24), batch_size=2,
            optimizer=lambda module: WithoutRate(module.parameters()), learning_rate=learning_rate,
        )  # fmt: skip

    corrected = ParameterServerStrategy(mode="async", correction="learning_rate")
    with pytest.raises(ConfigurationError, match="WithoutRate has a parameter group without one"):
        InProcessCluster(create(), num_workers=2, strategy=corrected)
    with pytest.raises(ConfigurationError, match="learning_rate= with WithoutRate"):
        create(lambda step: 0.1)(0, 0)
    cluster = InProcessCluster(create(), num_workers=2)
    cluster.step(4)
    task = Task(optimizer=sgd(0.1), data=samples(24), batch_size=2)
    assert difference(cluster.weights(), task.train(2, 4)) < 1e-12
