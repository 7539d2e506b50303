"""Every mode of training, whole: the log replayed gives the weights, each share is taken once, staleness is told."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from steepest.core.engine.commit_log import Commit, CommitLog
from steepest.core.messages.driver import Failure
from steepest.core.messages.message import Kind, Message, server_peer, worker_peer
from steepest.core.optim.spec import Schedule
from steepest.core.protocol.commit_rules import CommitEach
from steepest.core.protocol.commit_state import CommitState
from steepest.core.protocol.coordinator import Updates
from steepest.core.protocol.job_coordinator import JobCoordinator
from steepest.errors import ConfigurationError
from steepest.observe.results import StepResult
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import Fault, InProcessCluster, replay
from tests.modes import (
    EACH,
    MODES,
    Moody,
    check,
    counters,
    make,
    mode,
    plus_one,
    serial,
    settle,
    shares,
    trained,
    worker_weights,
)
from tests.own_rules import PairsStrategy
from tests.pairs import grid
from tests.random_examples import seeds
from tests.reference import Task, Weights, difference, same_bits, samples, sgd
from tests.said import said


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 2)).double()


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


TASKS = {
    "momentum": Task(optimizer=sgd(momentum=0.9)),
    "adam-dropout": Task(dropout, adam),
    "schedule": Task(optimizer=sgd(momentum=0.9, weight_decay=0.01), lr_scheduler=cosine),
}
SIZES = [
    (1, 1, 1),
    (1, 2, 2),
    (2, 1, 2),
    (2, 2, 1),
    (3, 1, 1),
    (3, 2, 2),
]  # workers, devices, servers


@pytest.mark.few(12)
@grid(lambda name, task, size: name != "backup" or size[0] > 1, name=MODES, task=TASKS, size=SIZES)
@seeds(1)
def test_the_log_replayed_gives_the_weights_of_the_run_bit_for_bit(
    name: str, task: str, size: tuple[int, int, int], seed: int
) -> None:
    cluster = make(name, TASKS[task], *size, shuffle=seed)
    trained(cluster, 4)
    trained(cluster, 3)
    check(cluster, TASKS[task])


def swapped(log: CommitLog) -> list[tuple[Commit, ...]]:
    """The log with two neighbours exchanged, wherever the second could have come first."""
    return [
        (*log.commits[:at], of(one, other), of(other, one), *log.commits[at + 2 :])
        for at, (one, other) in enumerate(pairwise(log.commits))
        if all(push.pulled < one.version for push in other.pushes)
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
@seeds(1)
def test_a_replay_tells_another_order_of_updates_from_the_one_that_was(
    name: str, seed: int
) -> None:
    task = Task(optimizer=sgd(momentum=0.9), data=samples(36))
    cluster = make(name, task, shuffle=seed)
    trained(cluster, 3)
    while name in EACH and not swapped(cluster.log()):
        trained(cluster, 1)
    log, swaps = cluster.log(), swapped(cluster.log())

    def replayed(commits: tuple[Commit, ...]) -> Weights:
        return replay(CommitLog(commits, log.strategy, 3, 1, 0), task.creator())

    assert same_bits(replayed(log.commits), cluster.weights())
    assert bool(swaps) == (name in EACH), (
        "in the others each gradient is of the version before its own"
    )
    assert not any(same_bits(replayed(other), cluster.weights()) for other in swaps)
    *others, last = log.commits
    first, *rest = last.pushes
    elsewhere = replace(last, pushes=(first._replace(share=others[0].pushes[0].share), *rest))
    assert not same_bits(replayed((*others, elsewhere)), cluster.weights()), (
        "a gradient of other samples"
    )
    assert not same_bits(replayed(log.commits[:-1]), cluster.weights())
    with pytest.raises(ConfigurationError, match="begins at version 1"):
        replayed(log.commits[1:])


def of(place: Commit, pushes: Commit) -> Commit:
    """A commit with the version and the rate of one, and the pushes of another."""
    return replace(place, pushes=pushes.pushes)


# -- the same by plain torch ----------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("task", ["momentum", "schedule"])
@pytest.mark.parametrize("name", MODES)
@seeds(1)
def test_plain_torch_that_follows_the_log_gets_the_same_weights(
    name: str, task: str, seed: int
) -> None:
    cluster = make(name, TASKS[task], 3, 1, 2, shuffle=seed)
    late = 0
    for _ in range(1 if name not in EACH else 8):  # by chance all may be up to date for some steps
        trained(cluster, 8)
        log, job = cluster.log(), cluster.job
        if (late := max(chain.from_iterable(commit.staleness for commit in log.commits))) > 0:
            break
    expected = serial(TASKS[task], log, job.plan(), job.shares, job.versions_per_step)
    assert difference(cluster.weights(), expected) < 1e-12
    assert (late > 0) == (name in EACH)
    if name == "async-rate":
        assert [commit.rate for commit in log.commits] == [
            1 / max(1, *commit.staleness) for commit in log.commits
        ]
        assert min(commit.rate for commit in log.commits) < 1
    else:
        assert {commit.rate for commit in log.commits} == {1.0}


@pytest.mark.parametrize("name", EACH)
@seeds(1)
def test_a_schedule_ticks_by_step_and_not_by_update(name: str, seed: int) -> None:
    task = Task(optimizer=sgd(momentum=0.9), learning_rate=lambda step: 0.1 / (1 + step))
    cluster = make(name, task, shuffle=seed)
    results = trained(cluster, 4)
    assert [(r.version, r.step) for r in results] == [(3, 1), (6, 2), (9, 3), (12, 4)]
    log = check(cluster, task)
    rates = [(commit.hyperparameters or [{"lr": 0.1}])[0].get("lr", 0.1) for commit in log.commits]
    assert rates == [0.1 / (1 + step) for step in range(4) for _ in range(3)]
    assert Schedule(cluster.job.description.optimizer_spec).at(3)[0]["lr"] == rates[-1]


@seeds(2)
def test_a_step_with_backup_workers_is_an_update_of_the_first_gradients(seed: int) -> None:
    cluster = make("backup", shuffle=seed)
    results = trained(cluster, 6)
    assert [(r.version, r.step) for r in results] == [(n, n) for n in range(1, 7)]
    assert [len(commit.pushes) for commit in cluster.log().commits] == [2] * 6
    assert all(r.staleness == [0, 0] for r in results)


# -- samples --------------------------------------------------------------------------------------


@pytest.mark.few(4)
@grid(name=[*EACH, "sync"], workers=[1, 2, 3], devices=[1, 2])
@seeds(1)
def test_every_share_of_an_epoch_is_in_one_committed_gradient(
    name: str, workers: int, devices: int, seed: int
) -> None:
    task = TASKS["momentum"]
    cluster = make(name, task, workers, devices, shuffle=seed)
    plan = cluster.job.plan()
    assert plan is not None
    for epoch in (1, 2):
        trained(cluster, plan.steps_per_epoch)
        assert sorted(shares(check(cluster, task))) == list(
            range(epoch * plan.steps_per_epoch * workers)
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*EACH, "sync"])
@seeds(3)
def test_a_step_given_up_half_way_loses_no_share_and_repeats_none(name: str, seed: int) -> None:
    calls, when = Counter[str](), random.Random(seed).randint(1, 18)

    def raise_once(gradient: torch.Tensor) -> torch.Tensor:
        calls["all"] += 1
        if calls["all"] == when:
            raise ValueError("no luck today")
        return gradient

    task = Task(lambda: Moody(raise_once), sgd(momentum=0.9), samples(36))
    cluster = make(name, task, shuffle=seed)
    about = cluster.step(6)[-1]
    assert isinstance(about, Failure)
    assert about.reason == "raised"
    assert about.step == cluster.coordinator.version // cluster.job.versions_per_step
    for step in range(about.step + 1, 7):
        (result,) = trained(cluster, 1)
        settle(cluster)
        assert result.step == step
        assert cluster.coordinator.version == cluster.coordinator.limit == result.version
        assert result.version == step * cluster.job.versions_per_step
        assert len(result.staleness) == 3
    assert sorted(shares(check(cluster, task))) == list(range(18))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
@seeds(2)
def test_steps_taken_back_at_any_moment_go_on_where_they_stopped(name: str, seed: int) -> None:
    task, events = TASKS["momentum"], random.Random(seed).randint(30, 400)
    cluster = make(name, task, shuffle=seed)
    network, client, coordinator = cluster.network, cluster.client, cluster.coordinator
    client.ask(8, True)
    network.run_until(
        lambda: network.delivered >= events or 0 < coordinator.limit == coordinator.version,
        "some messages",
    )
    position = cluster.wait(client.revoke(), "the coordinator")
    while not client.outcomes.empty():
        client.outcomes.get()
    per_step = cluster.job.versions_per_step
    settle(cluster)
    assert coordinator.version == position.version
    for step in range(position.version // per_step + 1, position.version // per_step + 4):
        assert trained(cluster, 1)[0].step == step
        settle(cluster)
        assert coordinator.version == step * per_step
    committed = shares(check(cluster, task))
    if name != "backup":
        assert sorted(committed) == list(range(len(committed)))
    assert all(
        torch.equal(held, cluster.snapshot().weights)
        for held in worker_weights(cluster, coordinator.version)
    )


@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_call_made_before_a_worker_hears_of_a_failure_runs_when_it_does(name: str) -> None:
    """The driver may know of the new generation before the workers do."""
    cluster = make(name)
    trained(cluster, 2)
    settle(cluster)
    position = (cluster.coordinator.generation + 1, cluster.coordinator.version)
    futures = [worker.at_version(*position, lambda replicas: 7) for worker in cluster.workers]
    assert not any(future.done() for future in futures)
    cluster.wait(cluster.client.revoke(), "the coordinator")
    assert [cluster.wait(future, "the call") for future in futures] == [7] * 3


@seeds(5)
def test_with_backup_workers_what_was_dropped_comes_later_and_nothing_twice(seed: int) -> None:
    cluster = make("backup", TASKS["momentum"], shuffle=seed)
    granted: list[int] = []

    def note(message: Message) -> list[Message]:
        if message.kind is Kind.LEASE:
            granted.append(message.body.share)
        return [message]

    cluster.network.filter = note
    trained(cluster, 12)
    settle(cluster)
    committed = shares(check(cluster, TASKS["momentum"]))
    told = counters(cluster)
    again = [share for share, times in Counter(granted).items() if times > 1]
    assert told["dropped"] > 0
    assert again
    assert len(set(committed)) == len(committed) == 24
    assert len(granted) == 24 + told["dropped"]
    assert max(committed) < 24 + 3  # only what some worker holds is passed over
    assert set(again) & set(committed)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_backup_worker_may_take_longer_than_a_step_may(workers: int) -> None:
    """Its share was given to others; of those that are waited for the error names no other."""
    strategy = ParameterServerStrategy(num_servers=1, backup_workers=1)
    hangs = Fault.hang("worker", workers - 1, step=1)

    def run(*faults: Fault) -> Any:
        cluster = InProcessCluster(
            TASKS["momentum"].creator(),
            num_workers=workers,
            strategy=strategy,
            step_timeout=1.0,
            faults=faults,
        )
        cluster.network.round_seconds = 0.02
        for _ in range(60):
            (*_, last) = cluster.step(1)
            if isinstance(last, Failure):
                break
        return last, cluster.network.now

    last, seconds = run(hangs)
    assert not isinstance(last, Failure)
    assert seconds > 5.0
    last, _ = run(hangs, Fault.hang("worker", 0, step=9))
    assert (last.reason, last.awaited) == ("deadline", ["worker 0"])


@pytest.mark.parametrize("seed", range(3))
def test_what_still_counts_is_not_dealt_out_again(seed: int) -> None:
    """A rule of a user's own, with an update a step: gradients of older weights are part of later ones."""
    cluster = InProcessCluster(
        TASKS["momentum"].creator(), num_workers=3, strategy=PairsStrategy(num_servers=1),
        shuffle=seed, keep_log=True,
    )  # fmt: skip
    cluster.step(8)
    committed = [push.share for commit in cluster.log().commits for push in commit.pushes]
    assert len(set(committed)) == len(committed) == 16


# -- staleness ------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
@seeds(1)
def test_log_results_and_counters_agree_about_staleness(name: str, seed: int) -> None:
    cluster = make(name, shuffle=seed)
    steps = 32 if name == "async-drop" else 8  # of which some order leaves none stale
    results = [StepResult.from_result(r, None) for r in trained(cluster, steps)]
    assert [result.step for result in results] == list(range(1, steps + 1))
    log = check(
        cluster, Task(optimizer=sgd(momentum=0.9))
    )  # which compares the log with the counters
    logged = [late for commit in log.commits for late in commit.staleness]
    assert list(chain.from_iterable(result.staleness for result in results)) == logged
    if name == "async-drop":
        assert max(logged) == 1
        assert counters(cluster)["dropped"] > 0
    elif name.startswith("ssp"):
        lead = cluster.job.config.lead  # type: ignore[union-attr]
        assert max(logged) <= 2 * (
            2 * lead + 1
        )  # of each other worker, no more pushes than it may be apart
    elif name in ("sync", "backup"):
        assert set(logged) == {0}


@pytest.mark.parametrize("name", EACH)
@seeds(1)
def test_one_worker_is_never_stale(name: str, seed: int) -> None:
    cluster = make(name, workers=1, shuffle=seed)
    trained(cluster, 6)
    assert counters(cluster)["staleness"] == [(0, 6)]


@pytest.mark.parametrize("name", EACH)
def test_one_worker_in_any_mode_is_serial_training(name: str) -> None:
    cluster = make(name, TASKS["schedule"], workers=1)
    trained(cluster, 6)
    assert difference(cluster.weights(), TASKS["schedule"].train(1, 6)) < 1e-12


# -- between steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODES)
@seeds(1)
def test_after_the_last_step_every_worker_holds_the_newest_weights(name: str, seed: int) -> None:
    cluster = make(name, shuffle=seed)
    before: list[torch.Tensor] = []
    for steps in (2, 1, 3):
        version = trained(cluster, steps)[-1].version
        weights = cluster.snapshot().weights
        assert all(torch.equal(held, weights) for held in worker_weights(cluster, version))
        assert not any(torch.equal(weights, other) for other in before)
        before.append(weights)


@pytest.mark.parametrize("name", EACH)
@seeds(1)
def test_a_step_is_as_many_updates_as_workers(name: str, seed: int) -> None:
    for workers in (1, 2, 3):
        cluster = make(name, plus_one(), workers, shuffle=seed)
        (result,) = trained(cluster, 1)
        assert (result.version, result.step) == (workers, 1)
        assert result.samples == workers
        assert len(result.staleness) == workers
        assert counters(cluster)["step"] == 1


# -- NaN ------------------------------------------------------------------------------------------


def poisoned(name: str, nonfinite: str, **options: Any) -> tuple[InProcessCluster, Task]:
    """A job in which worker 1's second gradient is NaN in the first layer."""
    calls = Counter[int]()

    class Sick(Moody):
        worker = -1

        def __init__(self) -> None:
            super().__init__(self.spoil)

        def spoil(self, gradient: torch.Tensor) -> torch.Tensor:
            calls[self.worker] += 1
            return (
                gradient * float("nan") if (self.worker, calls[self.worker]) == (1, 2) else gradient
            )

    task = Task(Sick, sgd(momentum=0.9), samples(36))

    def create(worker_index: int, device_index: int) -> Any:
        model = task.creator()(worker_index, device_index)
        model.module.worker = worker_index
        return model

    strategy = mode(name, nonfinite=nonfinite)
    return InProcessCluster(
        create, num_workers=3, strategy=strategy, keep_log=True, **options
    ), task


def gradients_of(worker: int, cluster: InProcessCluster) -> int:
    """How many were committed."""
    return sum(push.worker == worker for commit in cluster.log().commits for push in commit.pushes)


SURE = [
    name for name in MODES if name not in ("backup", "async-drop")
]  # whose pushes are all committed


@pytest.mark.parametrize("name", SURE)
@seeds(1)
def test_nan_that_is_refused_names_worker_and_tensor_and_changes_nothing(
    name: str, seed: int
) -> None:
    cluster, task = poisoned(name, "refuse", shuffle=seed)
    about = cluster.step(500)[-1]  # which worker 1 may hardly take part in
    assert about.reason == "nonfinite"
    assert sorted(about.culprits) == [(1, "first.bias"), (1, "first.weight")]
    weights = cluster.weights()
    assert all(bool(value.isfinite().all()) for value in weights.values())
    log = check(cluster, task)
    assert len(log.commits) == cluster.coordinator.version > 0
    trained(cluster, 2)
    log = check(cluster, task)
    assert sorted(shares(log)) == list(range(len(shares(log))))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SURE)
@seeds(1)
def test_nan_that_is_skipped_is_a_version_in_which_nothing_changes(name: str, seed: int) -> None:
    cluster, task = poisoned(name, "skip", shuffle=seed)
    weights = {0: cluster.weights()}
    coordinator, per_step = cluster.coordinator, cluster.job.versions_per_step
    steps = 0
    while steps < 6 or gradients_of(1, cluster) < 2:
        steps += 1
        trained(cluster, 1)
        weights[steps * per_step] = cluster.weights()
    trained(cluster, 1)
    log = cluster.log()
    (skipped,) = (commit for commit in log.commits if commit.skipped)
    assert 1 in [push.worker for push in skipped.pushes]
    assert coordinator.version == len(log.commits) == (steps + 1) * per_step
    assert counters(cluster)["skipped"] == 1
    assert all(bool(value.isfinite().all()) for value in cluster.weights().values())
    assert same_bits(replay(log, task.creator()), cluster.weights())
    parts = [CommitLog(log.commits[:n], log.strategy, 3, 1, 0) for n in range(len(log.commits) + 1)]
    passed = [
        replay(part, task.creator()) for part in parts[skipped.version - 1 : skipped.version + 2]
    ]
    assert same_bits(passed[0], passed[1])
    assert not same_bits(passed[1], passed[2])
    assert all(
        same_bits(replay(parts[version], task.creator()), found)
        for version, found in weights.items()
    )


@pytest.mark.parametrize("name", SURE)
@seeds(1)
def test_nan_that_may_pass_is_applied(name: str, seed: int) -> None:
    cluster, _ = poisoned(name, "pass", shuffle=seed)
    trained(cluster, 6)
    while gradients_of(1, cluster) < 2:
        trained(cluster, 1)
    weights = cluster.weights()
    assert all(bool(weights[name].isnan().all()) for name in ("first.weight", "first.bias"))
    assert not any(commit.skipped for commit in cluster.log().commits)
    assert counters(cluster)["skipped"] == 0


# -- deadlines ------------------------------------------------------------------------------------


def swallow(cluster: InProcessCluster, *kinds: Kind) -> None:
    """What worker 1 sends of these kinds is lost from now on."""
    filtered: Callable[[Message], list[Message]] = lambda m: (  # noqa: E731
        [] if m.source == worker_peer(1) and m.kind in kinds else [m]
    )
    cluster.network.filter = filtered


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["async", "async-drop", "async-rate"])
@pytest.mark.parametrize("kinds", [(Kind.PUSH, Kind.REPORT), (Kind.REPORT,)])
def test_the_deadline_names_who_took_samples_and_never_came_back_while_others_go_on(
    name: str, kinds: tuple[Kind, ...]
) -> None:
    task = TASKS["momentum"]
    cluster = make(name, task, step_timeout=50.0)
    trained(cluster, 2)
    swallow(cluster, *kinds)
    cluster.network.round_seconds = 0.5
    last = cluster.step(1000)[-1]
    assert isinstance(last, Failure)
    assert (last.reason, last.awaited, last.seconds) == ("deadline", ["worker 1"], 50.0)
    log = check(cluster, task)
    others = [push.worker for commit in log.commits[6:] for push in commit.pushes]
    assert Counter(others).keys() == {0, 2}
    assert len(others) > 10
    assert cluster.network.now < 150
    swallow(cluster)
    trained(cluster, 4)
    log = check(cluster, task)
    assert sorted(shares(log)) == list(range(len(shares(log))))


def test_the_deadline_names_the_server_that_lacks_what_was_reported() -> None:
    cluster = make("async", step_timeout=50.0)
    trained(cluster, 1)
    far = server_peer(1)
    cluster.network.filter = lambda m: [] if (m.kind, m.source) == (Kind.PUSH_STAGED, far) else [m]
    assert cluster.step(2)[-1].awaited == ["server 1"]


def test_with_a_bound_the_others_wait_for_who_never_came_back_and_the_deadline_names_it() -> None:
    cluster = make("ssp-2", step_timeout=50.0)
    trained(cluster, 2)
    before = Counter(push.worker for commit in cluster.log().commits for push in commit.pushes)
    swallow(cluster, Kind.PUSH, Kind.REPORT)
    assert cluster.step(1000)[-1].awaited == ["worker 1"]
    after = Counter(push.worker for commit in cluster.log().commits for push in commit.pushes)
    assert after[1] == before[1]
    assert {after[0], after[2]} == {after[1] + 3}


@pytest.mark.parametrize("rule", [CommitEach(), CommitEach(lead=0)])
def test_who_has_not_joined_is_awaited(rule: CommitEach) -> None:
    state = CommitState(members=frozenset({0, 1}), servers=(0,), holding=frozenset({0}), rule=rule)
    coordinator = JobCoordinator(state, Updates(lambda step: [{}]), step_timeout=10.0)
    coordinator.handle(worker_peer(0), said(Kind.JOIN))
    coordinator.handle(("client", 0), said(Kind.ASK, sequence=1, steps=1))  # type: ignore[arg-type]
    assert coordinator.tick(0.0) == []
    ((_, failure),) = [found for found in coordinator.tick(10.0) if found[1].kind is Kind.FAILURE]
    assert "worker 1" in failure.body.awaited
