"""Workers that add up gradients among themselves, in simulated groups: what the modes' contract leaves out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from steepest import AllreduceStrategy, Codec, DistributedSGD, RunConfig
from steepest.core.engine.extension import Extension
from steepest.core.engine.step_errors import raise_step_error
from steepest.core.messages.driver import Failure
from steepest.core.messages.membership import GroupKey
from steepest.core.messages.message import Kind, Message, worker_peer
from steepest.core.protocol.commit_rules import CommitFirst, CommitRule
from steepest.errors import ConfigurationError, DataPlaneError
from steepest.extensions import EXTENSIONS
from steepest.runtime import process
from steepest.strategies.process_groups import reduction
from steepest.strategies.process_groups.extension import ProcessGroups
from steepest.strategies.process_groups.torch_groups import TorchGroups
from steepest.testing import InProcessCluster, linear_model_creator, replay
from steepest.testing.groups import SimulatedGroups
from tests.modes import GROUPED, Moody, check, make, settle, trained
from tests.own_loop_runs import run, without
from tests.own_loops import Script, accumulating, clipping, plain, with_closures
from tests.reference import Task, difference, perceptron, same_bits, samples, sgd
from tests.simulation.run import Simulation, run_config
from tests.strikes import later
from tests.struck_jobs import DIED

TASK = Task(optimizer=sgd(momentum=0.9))
GROUPS = AllreduceStrategy(data_plane="gloo")
SHARDED = AllreduceStrategy(data_plane="gloo", sharded=True)


class Forked(nn.Module):
    """It has a parameter that no gradient reaches, and one that only samples of one sign reach."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 2).double()
        self.never = nn.Linear(3, 2).double()
        self.sometimes = nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positive = self.sometimes(x) if float(x[0, 0]) > 0 else 0.0
        return self.always(x) + positive


@pytest.mark.few(1)
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("task", "options"),
    [
        (Task(optimizer=sgd(momentum=0.9), data=samples(23)), {}),
        (TASK, {"devices": 2}),
        (TASK, {"accumulate": 2}),
        (Task(Forked, sgd(momentum=0.9, weight_decay=0.1)), {}),
    ],
    ids=["uneven", "devices", "accumulated", "absent"],
)
def test_training_equals_servers_that_add_up_and_repeats_its_bits(
    task: Task, options: dict[str, Any], workers: int, name: str
) -> None:
    served, *grouped = [
        make(each, task, workers, shuffle=seed, **options)
        for each, seed in (("sync", None), (name, None), (name, 5))
    ]
    for cluster in (served, *grouped):
        trained(cluster, 9)
    assert difference(grouped[0].weights(), served.weights()) < 1e-14
    assert same_bits(grouped[0].weights(), grouped[1].weights())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", GROUPED)
def test_headers_may_travel_before_a_first_chunk_that_is_large(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "_WITH_HEADER", 0)
    task = Task(Forked, sgd(momentum=0.9, weight_decay=0.1), samples(23))
    served, grouped = make("sync", task), make(name, task)
    for cluster in (served, grouped):
        trained(cluster, 9)
    assert difference(grouped.weights(), served.weights()) < 1e-14
    spoilt = Task(partial(Moody, lambda gradient: gradient * math.inf), sgd())
    (failure,) = make(name, spoilt).step(1)
    assert isinstance(failure, Failure)
    assert failure.reason == "nonfinite"
    assert {worker for worker, _ in failure.culprits} == {0, 1, 2}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_up_in_their_own_dtype(dtype: torch.dtype, name: str) -> None:
    task = Task(partial(perceptron, dtype), sgd(), samples(16, dtype=dtype))
    served, grouped = make("sync", task, 2), make(name, task, 2)
    for cluster in (served, grouped):
        trained(cluster, 3)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.02}[dtype]
    assert difference(grouped.weights(), served.weights()) < tolerance


@pytest.mark.few(1)
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
@pytest.mark.parametrize("name", GROUPED)
def test_gradients_are_added_up_in_half_precision(
    name: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "_WITH_HEADER", 0)
    task = Task(partial(perceptron, torch.float32), sgd(), samples(16, dtype=torch.float32))
    half = {"settings": {"wire_dtype": (wire, None)}}
    whole, *narrow = [make(name, task, 3, **options) for options in ({}, half, half)]
    (wide, *_), (short, *_), _ = [trained(cluster, 5) for cluster in (whole, *narrow)]
    assert same_bits(narrow[0].weights(), narrow[1].weights())
    # of bfloat16's eight bits of a number, and float16's eleven, one is lost at each of three numbers
    assert 0 < difference(narrow[0].weights(), whole.weights()) < {"bf16": 1e-2, "fp16": 1e-3}[wire]
    assert short.bytes_pushed == pytest.approx(wide.bytes_pushed / 2, abs=3)


@pytest.mark.parametrize("nonfinite", ["refuse", "pass"])
@pytest.mark.parametrize("name", GROUPED)
def test_gradients_that_do_not_fit_into_float16_are_added_up_in_float32(
    name: str, nonfinite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "_WITH_HEADER", 0)

    def large(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean() * 1e6

    task = Task(
        partial(perceptron, torch.float32), sgd(lr=1e-8), samples(16, dtype=torch.float32), large
    )
    settings = {"wire_dtype": ("fp16", None), "nonfinite": nonfinite}
    cluster = make(name, task, 3, settings=settings)
    trained(cluster, 5)
    assert difference(cluster.weights(), task.train(3, 5)) < 1e-5


@pytest.mark.parametrize("name", GROUPED)
def test_neither_gradients_nor_weights_go_between_servers_and_other_processes(name: str) -> None:
    cluster, kinds = make(name, TASK), set[Kind]()

    def look(message: Message) -> list[Message]:
        kinds.add(Kind(message.kind))
        return [message]

    cluster.network.filter = look
    trained(cluster, 1)
    assert Kind.GROUP_KEY in kinds
    kinds.clear()
    results = trained(cluster, 3)
    assert not kinds & {Kind.PUSH, Kind.HOST_PUSH, Kind.WEIGHTS}
    # as many bytes as in a ring: each of three workers sends 2 * 2/3 of the gradient, or as much weights as gradient
    size = sum(chunk.nbytes for chunk in cluster.job.description.layout.chunks if chunk.trainable)
    is_sharded = name == "sharded-groups"
    assert results[-1].bytes_pushed == pytest.approx((2 if is_sharded else 4) * size, abs=3)
    assert results[-1].bytes_pulled == (2 * size if is_sharded else 0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("strategy", "operation", "steps", "words"),
    [
        (GROUPS, 3, 0, "step 1: adding up gradients with the other 2 workers failed at chunk 3"),
        (SHARDED, 3, 0, "step 1: adding up gradients with the other 2 workers failed at chunk 3"),
        (SHARDED, 4, 0, "step 1: adding up gradients with the other 2 workers failed at chunk 3"),
        (SHARDED, 5, 0, "step 1: passing on new weights among the other 2 .* at chunk 3"),
        # the step counts, although not all have its weights
        (SHARDED, 7, 1, "step [12]: passing on new weights among the other 2 .* at chunk 1"),
    ],
)
def test_a_group_that_breaks_is_an_error_and_the_next_generation_has_another(
    strategy: AllreduceStrategy, operation: int, steps: int, words: str
) -> None:
    extensions: list[Extension] = [ProcessGroups(SimulatedGroups(broken=(1, operation)))]
    cluster = InProcessCluster(
        TASK.creator(), num_workers=3, strategy=replace(strategy, chunk_bytes=64),
        keep_log=True, extensions=extensions,
    )  # fmt: skip
    *_, failure = cluster.step(1 + steps)
    assert isinstance(failure, Failure)
    assert failure.kind == "DataPlaneError"
    assert cluster.coordinator.version == steps
    with pytest.raises(DataPlaneError, match=f"worker [012], {words}: the group"):
        raise_step_error(failure, {})
    trained(cluster, 12 - steps)
    assert difference(cluster.weights(), TASK.train(3, 12)) < 1e-12
    check(cluster, TASK)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "chunk"), [*product(["groups"], range(0, 12, 3)), *product(["sharded-groups"], [3, 7])]
)
def test_a_step_of_which_a_worker_raised_amid_its_chunks_is_taken_again(
    name: str, chunk: int
) -> None:
    moods: list[int] = []

    def mood(count: int, gradient: torch.Tensor) -> torch.Tensor:
        moods.append(count)
        if len(moods) == 2 + chunk:
            raise LookupError("this once")
        return gradient

    class Mooded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for count, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                if x.requires_grad:
                    x.register_hook(partial(mood, count))
            return x[:, :2]

    task = Task(Mooded, sgd(momentum=0.9))
    cluster = make(name, task, 3)
    failures = 0
    while (done := cluster.coordinator.version) < 6:
        failures += any(isinstance(found, Failure) for found in cluster.step(6 - done))
    assert failures == 1
    settle(cluster)
    plain = make(name, task, 3)
    trained(plain, 6)
    assert same_bits(cluster.weights(), plain.weights())


@pytest.mark.parametrize(
    ("value", "words"), [("xyz", "no bytes"), ("00" * 8, "more keys of generation 9")]
)
def test_keys_that_no_correct_worker_sends_are_refused(
    value: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make("groups", TASK)
    trained(cluster, 1)
    send = cluster.worker_routers[1].sender(worker_peer(1))
    for number in range(30):
        send(worker_peer(0), GroupKey(9, str(number), value).pack())
    settle(cluster)
    trained(cluster, 2)
    assert words in caplog.text


@pytest.mark.parametrize("name", ["sync", "allreduce"])
def test_jobs_without_groups_refuse_their_keys(name: str) -> None:
    cluster = make(name, TASK)
    trained(cluster, 1)
    cluster.worker_routers[1].sender(worker_peer(1))(worker_peer(0), GroupKey(1, "0", "00").pack())
    before = cluster.worker_routers[0].refused
    settle(cluster)
    assert cluster.worker_routers[0].refused == before + (name == "allreduce")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_plane": "mpi"}, "data_plane"),
        ({"wire_dtype": "fp16", "sharded": True}, r"give wire_dtype=\('fp16', None\)"),
        ({"compression": "int8"}, "compression='int8'"),
        ({"transport": "shared"}, "transport='shared'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        AllreduceStrategy(**{"data_plane": "gloo", **settings})


@dataclass(frozen=True, kw_only=True)
class Halved(AllreduceStrategy):
    """Pushes gradients in half precision by a codec of its own."""

    @property
    def codec(self) -> Codec | None:
        return AllreduceStrategy(wire_dtype="bf16").codec


@dataclass(frozen=True, kw_only=True)
class Backed(AllreduceStrategy):
    """Commits without the last worker."""

    @property
    def rule(self) -> CommitRule:
        return CommitFirst(1)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [(Halved(data_plane="gloo"), "its codec"), (Backed(data_plane="gloo"), "its rule CommitFirst")],
)
def test_strategies_of_ones_own_that_groups_cannot_serve_are_refused(
    strategy: AllreduceStrategy, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        InProcessCluster(TASK.creator(), num_workers=2, strategy=strategy)


def test_each_worker_keeps_the_whole_state_unless_it_is_to_be_sharded() -> None:
    assert not GROUPS.is_sharded
    assert SHARDED.is_sharded
    assert GROUPS.reduces
    held = {name: make(name, TASK).servers[0].chunks for name in GROUPED}
    assert len(held["sharded-groups"]) < len(held["groups"])
    assert not AllreduceStrategy().reduces


def test_encrypted_and_simulated_jobs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    creator = linear_model_creator()
    with Simulation(1).running(), monkeypatch.context() as patch:
        patch.setattr(process, "EXTENSIONS", EXTENSIONS)  # torch's groups
        with pytest.raises(ConfigurationError, match="data_plane=.*tls=True"):
            DistributedSGD(creator, num_workers=2, strategy=GROUPS, run_config=RunConfig(tls=True))
        with pytest.raises(ConfigurationError, match="in a simulation"):
            DistributedSGD(creator, num_workers=2, strategy=GROUPS, run_config=run_config())


def strike(simulation: Simulation, name: str) -> None:
    """Kill the process of a name, if it lives."""
    for found in simulation.living():
        if found.name == name:
            simulation.world.kill(found, DIED)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(n, marks=pytest.mark.long) for n in range(4, 12))]
)
@pytest.mark.parametrize("groups", [GROUPS, SHARDED], ids=GROUPED)
def test_jobs_whose_workers_die_come_and_go_are_explained_by_their_logs(
    seed: int, groups: AllreduceStrategy
) -> None:
    dice, simulation, config = random.Random(seed), Simulation(seed), run_config(keep_log=True)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 3, strategy=groups, run_config=config) as trainer,
    ):
        step = 0
        for _ in range(4):
            trainer.fit(steps=3, progress=False)
            match dice.choice(("die", "die", "resize", "switch")):
                case "die":  # at some moment of the next steps
                    names = (f"steepest worker {index}" for index in range(trainer.num_workers))
                    name = dice.choice(list(names))
                    later(dice.uniform(0.0, 0.03), partial(strike, simulation, name))
                case "resize":
                    trainer.resize(dice.randint(1, 4))
                case "switch":
                    trainer.set_strategy(dice.choice(("ps", "allreduce")))
                    trainer.fit(steps=1, progress=False)
                    trainer.set_strategy(groups)
                    step += 1
            step += 3
        trainer.fit(steps=3, progress=False)
        assert trainer.stats().step == step + 3
        simulation.settle()  # a death between two calls would set the weights back, and not the log
        log, weights = trainer.log(), trainer.weights()
        assert difference(replay(log, TASK.creator()), weights) < 1e-12


def test_a_process_without_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    cluster = make("sync", TASK)
    with pytest.raises(ConfigurationError, match="this torch has no Gloo"):
        TorchGroups().check(cluster.client_router, torch.device("cpu"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("loop", "strategy"),
    [
        *product([plain, accumulating, clipping, with_closures], [GROUPS]),
        (accumulating, SHARDED),
        (with_closures, SHARDED),
    ],
)
def test_loops_of_ones_own_add_up_in_groups_as_on_servers(
    loop: Callable[..., None], strategy: AllreduceStrategy
) -> None:
    # with equally many batches on each worker, over which `accumulating` makes a step
    script = Script(loop, optimizer=sgd(momentum=0.9), data=samples(24))
    found = run(script, 2, strategy)
    assert difference(found.weights, run(script, 2, "ps").weights) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("strategy", [GROUPS, SHARDED], ids=GROUPED)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_loop_of_ones_own_ends_as_if_no_worker_had_died(
    victim: int, strategy: AllreduceStrategy
) -> None:
    script = Script(plain, optimizer=sgd(momentum=0.9))
    found = without(script, 2, victim, 5, strategy)
    assert difference(found.weights, script.alone(2)) < 1e-12
