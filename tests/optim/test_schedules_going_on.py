"""Schedules that go on elsewhere: to the bit what a loop from the beginning gives, at the same cost at any step."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as schedules

from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.message import Kind, Message
from steepest.core.messages.schema import encode_body
from steepest.core.optim.json_values import from_json, to_json
from steepest.core.optim.spec import OptimizerSpec, Schedule
from steepest.runtime.survivors import assemble, catch_up, state_of
from steepest.strategies.local import LocalStrategy
from steepest.testing import InProcessCluster
from tests.modes import make, settle, trained
from tests.random_examples import runs
from tests.reference import Task, same_bits, samples
from tests.said import heard, said

Optimizer = torch.optim.Optimizer


class Warmup:
    """A function with a memory of its own, which is part of the state."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, step: int) -> float:
        self.seen += 1
        return min(1.0, (step + self.seen) / 20)


def sequential(o: Optimizer) -> Any:
    parts: list[Any] = [
        schedules.LinearLR(o, 0.1, total_iters=7),
        schedules.MultiStepLR(o, [3, 5], 0.7),
        schedules.CosineAnnealingLR(o, 11),
    ]
    return schedules.SequentialLR(o, parts, milestones=[7, 19])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(
        o, [lambda step: 0.97**step, lambda step: 1 / (1 + step)]
    ),
    "LambdaLR-numpy": lambda o: schedules.LambdaLR(
        o, lambda step: np.float32(0.5) ** np.float32(step % 3)
    ),
    "LambdaLR-object": lambda o: schedules.LambdaLR(o, Warmup()),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(
        o, lambda step: 0.97 + 0.001 * (step % 7)
    ),
    "StepLR": lambda o: schedules.StepLR(o, 3, gamma=0.7),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [3, 9, 9, 21], gamma=0.3),
    "MultiStepLR-numpy": lambda o: schedules.MultiStepLR(o, np.array([3, 9, 9, 21]), gamma=0.3),  # type: ignore[arg-type]
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.3, total_iters=9),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, total_iters=17),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.97),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, total_iters=31, power=1.7),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 8, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4, T_mult=2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(
        o, max_lr=[0.5, 0.1], total_steps=60, three_phase=True
    ),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="triangular2"),
    "CyclicLR-function": lambda o: schedules.CyclicLR(
        o, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 1 / (1 + x)
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [
            schedules.LinearLR(o, 0.5, total_iters=9),
            sequential(o),
            schedules.CyclicLR(o, 0.01, 0.1, step_size_up=3),
        ]
    ),
    "SequentialLR": sequential,
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95)),
}


def spec_of(kind: str, scheduler: Callable[[Optimizer], Any]) -> OptimizerSpec:
    a, b = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    return OptimizerSpec.read(
        OPTIMIZERS[kind]([{"params": [a], "lr": 0.2}, {"params": [b]}]),
        {id(a): "a", id(b): "b"},
        lr_scheduler=scheduler,
    )


def loop(kind: str, spec: OptimizerSpec, steps: int) -> list[str]:
    """The hyperparameters of each step in the loop that everybody writes."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1, 1))], **hyper} for _, hyper in spec.groups
    ]
    optimizer = OPTIMIZERS[kind](groups)
    assert spec.lr_scheduler is not None
    scheduler = spec.lr_scheduler(optimizer)
    found = []
    for _ in range(steps):
        now = [
            {key: group[key] for key in base}
            for (_, base), group in zip(spec.groups, optimizer.param_groups, strict=False)
        ]
        found.append(plainly(now))
        optimizer.step()
        scheduler.step()
    return found


def plainly(groups: list[dict[str, Any]]) -> str:
    """Every bit of them, as text."""
    return repr(
        [
            {k: v.item() if isinstance(v, np.generic) else v for k, v in group.items()}
            for group in groups
        ]
    )


def whole(spec: OptimizerSpec, schedule: Schedule, step: int) -> str:
    return plainly(
        [base | changed for (_, base), changed in zip(spec.groups, schedule.at(step), strict=True)]
    )


def test_every_scheduler_of_torch_that_depends_on_the_step_alone_is_here() -> None:
    tried = {name.split("-")[0] for name in SCHEDULERS}
    assert tried == set(schedules.__all__) - {"LRScheduler", "ReduceLROnPlateau"}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@runs(5)
@given(splits=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), min_size=1, max_size=4))
def test_going_on_from_a_state_is_going_on(
    kind: str, name: str, splits: list[tuple[int, int]]
) -> None:
    spec = spec_of(kind, SCHEDULERS[name])
    assert spec.schedule_id, "this state is not carried"
    expected = loop(kind, spec, 40)
    schedule = Schedule(spec)
    for split, ahead in sorted(splits):
        assert whole(spec, schedule, split) == expected[split]
        state = json.loads(json.dumps(schedule.state()))
        schedule = Schedule(spec)
        schedule.load_state(state)
        assert schedule.state() == state
        assert whole(spec, schedule, split + ahead) == expected[split + ahead]
    for step in (33, 39):
        assert whole(spec, schedule, step) == expected[step]


class Counting(schedules.ExponentialLR):
    """Counts how often any of its kind is stepped."""

    steps = 0

    def step(self, epoch: int | None = None) -> None:
        Counting.steps += 1
        super().step(epoch)


def counting(optimizer: Optimizer) -> Counting:
    return Counting(optimizer, 0.999)


@pytest.fixture
def calls() -> Iterator[Callable[[], int]]:
    """How often schedulers were stepped since it was asked last."""

    def since() -> int:
        count, Counting.steps = Counting.steps, 0
        return count

    since()
    return since


def test_a_state_of_another_schedule_is_not_taken() -> None:
    spec, other = (
        spec_of("sgd", lambda o, g=g: schedules.StepLR(o, 3, gamma=g)) for g in (0.5, 0.7)
    )
    before = Schedule(other)
    before.at(9)
    schedule = Schedule(spec)
    schedule.load_state(before.state())
    assert whole(spec, schedule, 10) == loop("sgd", spec, 11)[10]


@pytest.mark.parametrize(
    "damage", [{"groups": {"pickle": "x"}}, {"step": -3}, {"step": "9"}, {"scheduler": 3}]
)
def test_a_damaged_state_is_computed_anew(damage: dict[str, Any]) -> None:
    spec = spec_of("sgd", SCHEDULERS["StepLR"])
    before = Schedule(spec)
    before.at(9)
    state = before.state()
    assert state is not None
    schedule = Schedule(spec)
    schedule.load_state({**state, **damage})
    assert whole(spec, schedule, 10) == loop("sgd", spec, 11)[10]


class Forgetful(schedules.ExponentialLR):
    """Its state leaves out what it depends on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.bonus = 0.0
        super().__init__(optimizer, 0.9)

    def step(self, epoch: int | None = None) -> None:
        self.bonus += 0.01
        super().step(epoch)

    def get_lr(self) -> Any:
        return [rate + self.bonus for rate in super().get_lr()]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "bonus"}


class Opaque(schedules.ExponentialLR):
    """Its state has no JSON."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.secret = object()
        super().__init__(optimizer, 0.9)


@pytest.mark.parametrize("scheduler", [Forgetful, Opaque])
def test_what_cannot_be_carried_is_computed_from_its_beginning(
    scheduler: Callable[[Optimizer], Any],
) -> None:
    spec = spec_of("sgd", scheduler)
    assert not spec.schedule_id
    schedule = Schedule(spec)
    assert whole(spec, schedule, 9) == loop("sgd", spec, 10)[9]
    assert schedule.state() is None


@pytest.mark.parametrize(
    "value",
    [
        (1, [2.5, None, True]),
        {3: (0.1,), "a": {}},
        Counter({3: 2}),
        math.inf,
        -math.inf,
        np.float32(0.1),
        np.int64(7),
        (1 << 64) - 1,
        -(1 << 70),
        np.uint64((1 << 64) - 1),
    ],
)
def test_values_come_back_from_json_and_messages_as_they_were(value: Any) -> None:
    message = said(Kind.SNAPSHOT_END, state={"schedule": {"value": to_json(value)}})
    message.body = encode_body(message)
    for text in (
        json.loads(json.dumps(to_json(value))),
        heard(message).state["schedule"]["value"],
    ):
        found = from_json(text)
        assert (type(found), repr(found)) == (type(value), repr(value))


@pytest.mark.parametrize("value", [object(), {1: [lambda: 0]}, torch.zeros(1), np.zeros(2), 1j])
def test_what_has_no_json_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="has no JSON"):
        to_json(value)


@pytest.mark.parametrize(
    "text", [{}, {"a": 1, "b": 2}, {"pickle": "x"}, {"numpy": ["object_", 1]}, {"dict": 3}]
)
def test_what_is_no_json_of_a_value_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="no JSON of a value"):
        from_json(text)


# -- whole jobs -----------------------------------------------------------------------------------


def grouped(module: torch.nn.Module) -> Optimizer:
    return torch.optim.SGD(
        [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(module.parameters())]
    )


def task_of(scheduler: Callable[[Optimizer], Any]) -> Task:
    return Task(optimizer=grouped, data=samples(23), lr_scheduler=scheduler)


def rates(cluster: InProcessCluster) -> list[Any]:
    return [commit.hyperparameters for commit in cluster.log().commits]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sync", "async", "allreduce"])
@runs(3)
@given(
    split=st.integers(1, 25),
    scheduler=st.sampled_from(sorted(set(SCHEDULERS) - {"OneCycleLR", "LambdaLR"})),
)
def test_another_coordinator_goes_on_with_the_same_hyperparameters(
    name: str, split: int, scheduler: str
) -> None:
    task = task_of(SCHEDULERS[scheduler])
    straight = make(name, task)
    trained(straight, split + 5)
    before, after = make(name, task), make(name, task, workers=3)
    trained(before, split)
    found = before.snapshot("state")
    assert found.state["schedule"]["step"] <= split
    after.wait(
        after.client.install(found.version, found.weights, found.records, found.state),
        "the installation",
    )
    trained(after, 5)
    assert rates(after) == rates(straight)[found.version :]


def test_going_on_costs_the_same_at_any_step(calls: Callable[[], int]) -> None:
    task = task_of(counting)
    for split in (5, 100):
        before, after = make("sync", task), make("sync", task)
        trained(before, split)
        found = before.snapshot("state")
        calls()
        after.wait(
            after.client.install(found.version, found.weights, found.records, found.state),
            "the installation",
        )
        trained(after, 2)
        assert calls() <= 4


@pytest.mark.long
def test_who_takes_over_from_a_dead_coordinator_has_a_short_way(
    calls: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = 25
    monkeypatch.setattr("steepest.core.protocol.commit_state.SCHEDULE_EVERY", every)
    task = task_of(counting)
    before, after = make("copies", task), make("copies", task)
    trained(before, 3 * every + 20)
    settle(before)
    survivor = before.servers[1]
    catch_up(survivor, [server.decisions.recent for server in before.servers])
    found = assemble(len(before.job.holders), {1: state_of([survivor])})
    assert found is not None
    calls()
    after.wait(
        after.client.install(found.version, before.snapshot().weights, [], found.state),
        "the installation",
    )
    trained(after, 2)
    assert calls() <= every + 2
    straight = make("copies", task)
    trained(straight, found.version + 2)
    assert rates(after) == rates(straight)[found.version :]


@pytest.mark.full
@pytest.mark.long
def test_a_long_way_is_gone_in_parts(calls: Callable[[], int]) -> None:
    spec = spec_of("sgd", counting)
    schedule, parts = Schedule(spec), []
    calls()
    while not schedule.reach(25_000):
        parts.append(calls())
    assert max(parts) <= 10_001  # torch takes one itself
    assert sum(parts) + calls() == 25_001
    assert whole(spec, schedule, 25_000) == whole(spec, Schedule(spec), 25_000)


@pytest.mark.full
@pytest.mark.long
def test_while_a_schedule_has_a_long_way_nobody_is_blamed() -> None:
    """Time passes when nothing moves: here more than a step may take."""
    task = task_of(counting)
    cluster = make("sync", task, step_timeout=60.0)
    cluster.wait(
        cluster.client.install(45_000, cluster.snapshot().weights, None), "the installation"
    )
    before = cluster.network.now
    trained(cluster, 1)
    assert cluster.network.now - before > 60.0
    assert rates(cluster) == [
        [{"lr": group["lr"]} for group in Schedule(cluster.job.server_spec).at(45_000)]
    ]


class Fading(schedules.ExponentialLR):
    """Raises at its tenth step."""

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= 9:
            raise RuntimeError("spent")
        super().step(epoch)


def test_a_schedule_that_raises_fails_each_step_from_there_on() -> None:
    cluster = make("sync", task_of(lambda o: Fading(o, 0.9)))
    assert [type(result) for result in cluster.step(10)] == [Result] * 10
    for _ in range(2):
        (failure,) = cluster.step(1)
        assert (type(failure), failure.reason) == (Failure, "schedule")
        assert "spent" in failure.error


# -- local SGD ------------------------------------------------------------------------------------


def local_job(task: Task, workers: int, every: int) -> InProcessCluster:
    return InProcessCluster(
        task.creator(), num_workers=workers, strategy=LocalStrategy(sync_every=every)
    )


def inner(cluster: InProcessCluster, worker: int, step: int) -> Any:
    return json.loads(json.dumps(cluster.workers[worker]._replicas.inner_state(step)[2]))  # type: ignore[attr-defined]


@runs(5)
@given(
    split=st.integers(1, 9),
    every=st.integers(1, 4),
    scheduler=st.sampled_from(sorted(set(SCHEDULERS) - {"OneCycleLR", "LambdaLR"})),
)
@example(split=4, every=3, scheduler="ConstantLR")  # it is back at the recipe's rate by then
def test_workers_of_local_training_go_on_to_the_same_weights(
    split: int, every: int, scheduler: str
) -> None:
    task = task_of(SCHEDULERS[scheduler])
    straight, before, after = (local_job(task, 2, every) for _ in range(3))
    trained(straight, split + 3)
    trained(before, split)
    found = before.snapshot("state")
    first = before.job.plan()
    assert first is not None
    plan = after.job.plan(
        split, first.remaining(split * before.job.shares, [], before.job.shares, before.job.parts)
    )
    for index, worker in enumerate(after.workers):
        state, plain, _ = before.workers[index]._replicas.inner_state(split)  # type: ignore[attr-defined]
        worker._replicas.load_inner_state(state, plain, inner(before, index, split))  # type: ignore[attr-defined]
        worker._replicas.use_plan(plan, 0)
    after.wait(after.client.install(split, found.weights, found.records), "the installation")
    trained(after, 3)
    assert same_bits(after.weights(), straight.weights())


def test_a_round_that_is_taken_again_does_not_begin_anew(calls: Callable[[], int]) -> None:
    cluster = local_job(task_of(counting), 2, 5)
    trained(cluster, 20)
    lost: list[Message] = []

    def lose(message: Message) -> list[Message]:
        if message.kind is Kind.PUSH and not lost:
            lost.append(message)
            return []
        return [message]

    cluster.network.filter = lose
    calls()
    (failure,) = cluster.step(1)
    assert isinstance(failure, Failure)
    trained(cluster, 1)
    assert calls() <= 40  # from the beginning: 100 and more in each worker
    assert inner(cluster, 0, 21)["step"] == 21 * 5 - 1


def test_the_state_after_a_round_that_was_given_up_is_that_before_it() -> None:
    cluster = local_job(task_of(counting), 2, 5)
    trained(cluster, 3)
    cluster.network.filter = lambda message: [] if message.kind is Kind.PUSH else [message]
    (failure,) = cluster.step(1)
    assert isinstance(failure, Failure)
    assert inner(cluster, 0, 3)["step"] <= 15
