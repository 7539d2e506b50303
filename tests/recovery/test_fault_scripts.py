"""Faults by script: each does what it says, to whom and when it says, and training is right afterwards."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from steepest.core.messages.driver import Failure
from steepest.core.messages.message import Kind, Message, server_peer, worker_peer
from steepest.errors import ConfigurationError, DeadlineError, PeerLostError
from steepest.testing import Fault, InProcessCluster, InProcessTransport, Moment, with_faults
from tests.modes import (
    EACH,
    GROUPED,
    MODES,
    check,
    counters,
    credit_kind,
    make,
    mode,
    shares,
    staged_kind,
    trained,
)
from tests.random_examples import seeds
from tests.reference import Task, Weights, same_bits, samples, sgd

TASK = Task(optimizer=sgd(momentum=0.9), data=samples(23))
STEPS = 8
BOTH = ["sync", "async"]
COMPUTING: tuple[Moment, ...] = ("forward", "backward", "push", "report")
Faults = list[Fault]


@cache
def straight(name: str = "sync", steps: int = STEPS) -> Weights:
    """What a run in peace gives."""
    cluster = make(name, TASK)
    trained(cluster, steps)
    return cluster.weights()


def right(cluster: InProcessCluster, name: str) -> None:
    """All of the script has happened, the log explains the weights, and who is synchronous was not disturbed at all."""
    assert cluster.unmet == []
    steps = counters(cluster)["step"]
    check(cluster, TASK)
    if name in ("sync", "allreduce", "replicated"):
        assert same_bits(cluster.weights(), straight(name, steps))
        assert shares(cluster.log()) == list(range(3 * steps))


def sent(cluster: InProcessCluster, worker: int) -> Counter[tuple[int, int, Kind]]:
    """Counts what a worker sends, as it is sent: by its life, its own number of the step, and the kind."""
    found: Counter[tuple[int, int, Kind]] = Counter()

    def note(message: Message) -> list[Message]:
        if message.source == worker_peer(worker):
            incarnation = getattr(message.body, "incarnation", 0)
            step = getattr(message.body, "sequence", 0) - 1
            found[incarnation, step, message.kind] += 1
        return [message]

    cluster.network.filter = note
    return found


def failure(cluster: InProcessCluster, steps: int = STEPS) -> Failure:
    last = cluster.step(steps)[-1]
    assert isinstance(last, Failure)
    return last


def pace(cluster: InProcessCluster, worker: int) -> int:
    transport = cluster.worker_routers[worker].transport
    assert isinstance(transport, InProcessTransport)
    return transport.every


def finish(cluster: InProcessCluster, steps: int = STEPS) -> None:
    """Takes the steps that are left of so many."""
    trained(cluster, steps - counters(cluster)["step"])


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("at", COMPUTING)
@pytest.mark.parametrize("name", [*BOTH, "allreduce"])
def test_a_model_raises_in_its_step_and_not_again(name: str, at: Moment) -> None:
    cluster = make(name, TASK, faults=[Fault.raises("worker", 1, step=3, at=at)])
    said = sent(cluster, 1)
    about = failure(cluster)
    assert (about.reason, about.worker) == ("raised", 1)
    assert about.error == f"RuntimeError: scripted: raise of worker 1 in step 3 at {at}"
    assert not said[0, 3, Kind.REPORT]
    assert said[0, 2, Kind.REPORT]
    if name == "sync":
        assert about.step == 3
    finish(cluster)
    right(cluster, name)


PUSHES = {"forward": "none", "backward": "none", "push": "some", "report": "all", "pull": "all"}


@pytest.mark.few(2)
@pytest.mark.parametrize("at", [*COMPUTING, "pull"])
@pytest.mark.parametrize("worker", [0, 2])
@pytest.mark.parametrize("name", BOTH)
def test_a_worker_dies_at_its_moment_and_its_successor_does_not(
    name: str, worker: int, at: Moment
) -> None:
    cluster = make(name, TASK, replaces=True, faults=[Fault.kill("worker", worker, step=3, at=at)])
    said = sent(cluster, worker)
    trained(cluster, STEPS)
    assert [(lost.worker, lost.life) for lost in cluster.left] == [(worker, 0)]
    whole = said[0, 2, Kind.PUSH]
    assert whole > 2
    pushes = said[0, 3, Kind.PUSH]
    assert PUSHES[at] == ("none" if not pushes else "all" if pushes == whole else "some")
    assert said[0, 3, Kind.REPORT] == (at == "pull")
    assert not said[0, 4, Kind.PUSH]
    assert said[1, 0, Kind.REPORT]
    right(cluster, name)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", BOTH)
def test_who_is_to_die_in_every_life_does(name: str) -> None:
    cluster = make(name, TASK, replaces=True, faults=[Fault.kill("worker", 1, step=1, life=None)])
    trained(cluster, STEPS)
    assert [lost.life for lost in cluster.left] == list(range(len(cluster.left)))
    assert len(cluster.left) >= 3
    right(cluster, name)


@pytest.mark.parametrize("name", BOTH)
def test_a_fault_of_a_later_life_waits_for_it(name: str) -> None:
    faults = [Fault.kill("worker", 1, step=2), Fault.kill("worker", 1, step=1, life=1)]
    cluster = make(name, TASK, replaces=True, faults=faults)
    assert cluster.unmet == faults
    trained(cluster, STEPS)
    assert [lost.life for lost in cluster.left] == [0, 1]
    right(cluster, name)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EACH)
def test_a_successor_takes_part_though_a_step_was_given_up_before_it_came(name: str) -> None:
    cluster = make(
        name,
        TASK,
        faults=[Fault.kill("worker", 1, step=2), Fault.raises("worker", 2, step=3)],
        replaces=True,
    )
    cluster.on_left = lambda worker: None
    assert failure(cluster).reason == "raised"
    cluster.replace(1)
    said = sent(cluster, 1)
    trained(cluster, STEPS)
    assert said[1, 1, Kind.REPORT]
    right(cluster, name)


@pytest.mark.parametrize("at", ["forward", "report"])
def test_micro_batches_and_devices_make_one_step(at: Moment) -> None:
    task = Task(optimizer=sgd(momentum=0.9), data=samples(120))
    cluster = make(
        "sync",
        task,
        2,
        2,
        accumulate=2,
        replaces=True,
        faults=[Fault.kill("worker", 1, step=2, at=at)],
    )
    said = sent(cluster, 1)
    trained(cluster, 4)
    assert said[0, 2, Kind.PUSH] == (said[0, 1, Kind.PUSH] if at == "report" else 0)
    assert not said[0, 2, Kind.REPORT]
    assert said[1, 1, Kind.REPORT]
    check(cluster, task)


@pytest.mark.few(2)
@pytest.mark.parametrize("at", [*COMPUTING, "pull"])
@pytest.mark.parametrize("name", BOTH)
def test_who_hangs_is_silent_until_healed_and_goes_on_where_it_was(name: str, at: Moment) -> None:
    cluster = make(name, TASK, step_timeout=100.0, faults=[Fault.hang("worker", 1, step=3, at=at)])
    said = sent(cluster, 1)
    about = failure(cluster)
    assert (about.reason, about.awaited) == ("deadline", ["worker 1"])
    pushes = said[0, 3, Kind.PUSH]
    assert PUSHES[at] == (
        "none" if not pushes else "all" if pushes == said[0, 2, Kind.PUSH] else "some"
    )
    assert said[0, 3, Kind.REPORT] == (at == "pull")
    failure(cluster)
    assert not said[0, 4, Kind.PUSH]
    cluster.heal()
    finish(cluster, counters(cluster)["step"] + 4)
    assert said[0, 3, Kind.PUSH] == said[0, 2, Kind.PUSH]
    assert said[0, 4, Kind.REPORT]
    right(cluster, name)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*BOTH, "allreduce"])
def test_who_hangs_for_some_rounds_is_waited_for(name: str) -> None:
    faults = [
        Fault.hang("worker", 1, step=3, at="push", rounds=500),
        Fault.hang("worker", 2, step=5, rounds=500),
    ]
    cluster = make(name, TASK, faults=faults)
    trained(cluster, STEPS)
    if name != "async":
        assert cluster.network.rounds >= 1000
    assert cluster.network.now == 0  # while somebody comes back by himself no time passes
    right(cluster, name)


@pytest.mark.parametrize("name", BOTH)
def test_who_hangs_can_be_declared_lost_and_what_it_had_to_say_is_lost_with_it(name: str) -> None:
    cluster = make(
        name,
        TASK,
        replaces=True,
        step_timeout=100.0,
        faults=[Fault.hang("worker", 1, step=3, at="backward")],
    )
    said = sent(cluster, 1)
    assert failure(cluster).reason == "deadline"
    cluster.kill(1)
    cluster.heal()
    finish(cluster, counters(cluster)["step"] + 4)
    assert not said[0, 3, Kind.PUSH]
    assert said[1, 0, Kind.REPORT]
    right(cluster, name)


def test_who_is_slow_sets_the_pace_of_a_synchronous_run_for_as_long_as_it_is() -> None:
    healthy = make("sync", TASK)
    trained(healthy, STEPS)
    cluster = make("sync", TASK, faults=[Fault.slow("worker", 1, step=2, factor=40, steps=3)])
    trained(cluster, 2)
    assert pace(cluster, 1) == 1
    trained(cluster, 2)
    assert pace(cluster, 1) == 40
    trained(cluster, 4)
    assert pace(cluster, 1) == 1
    assert cluster.network.rounds > healthy.network.rounds + 3 * 40
    right(cluster, "sync")


def test_who_is_slow_hardly_disturbs_an_asynchronous_run() -> None:
    cluster = make(
        "async", TASK, faults=[Fault.slow("worker", 1, step=2, factor=40)], step_timeout=1e9
    )
    trained(cluster, 20)
    by = Counter(push.worker for commit in cluster.log().commits for push in commit.pushes)
    assert 2 < by[1] < by[0] / 3
    assert abs(by[0] - by[2]) <= 2
    right(cluster, "async")


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "at"), [("sync", "push"), ("async", "apply"), ("sync", "pull")])
def test_a_server_that_dies_is_named(name: str, at: Moment) -> None:
    cluster = make(name, TASK, faults=[Fault.kill("server", 1, step=3, at=at)])
    with pytest.raises(PeerLostError, match="server 1 is gone"):
        cluster.step(STEPS)
    assert cluster.servers[1].version == 3 + (at == "apply")
    assert cluster.unmet == []


@pytest.mark.parametrize("name", BOTH)
def test_a_server_that_hangs_or_is_slow_is_waited_for(name: str) -> None:
    faults = [
        Fault.hang("server", 1, step=3, rounds=300),
        Fault.slow("server", 0, step=4, factor=7, steps=2),
    ]
    cluster = make(name, TASK, faults=faults)
    trained(cluster, STEPS)
    assert cluster.network.rounds > 300
    right(cluster, name)


# -- messages -------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "kind"), [("sync", Kind.PUSH), ("async", Kind.REPORT), ("async", None)]
)
def test_messages_come_twice_and_count_once(name: str, kind: Kind | None) -> None:
    cluster = make(name, TASK, faults=[Fault.duplicate("worker", 1, step=3, kind=kind)])
    said = sent(cluster, 1)
    trained(cluster, STEPS)
    for one in (Kind.PUSH, Kind.REPORT):
        assert said[0, 3, one] == said[0, 2, one] * (1 + (kind in (None, one)))
    right(cluster, name)


@pytest.mark.parametrize("name", BOTH)
def test_only_so_many_messages_to_one_peer_come_twice(name: str) -> None:
    cluster = make(
        name, TASK, faults=[Fault.duplicate("worker", 1, step=3, peer=("server", 1), count=2)]
    )
    seen = Counter[tuple[int, Any]]()

    def note(message: Message) -> list[Message]:
        if message.source == worker_peer(1) and message.kind is Kind.PUSH:
            seen[message.body.sequence - 1, message.target] += 1
        return [message]

    cluster.network.filter = note
    trained(cluster, STEPS)
    assert seen[3, server_peer(1)] == seen[2, server_peer(1)] + 2
    assert seen[3, server_peer(0)] == seen[2, server_peer(0)]
    right(cluster, name)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("role", "index", "kind"),
    [
        ("worker", 1, Kind.PUSH),
        ("worker", 1, Kind.REPORT),
        ("server", 1, "staged"),
        ("server", 0, Kind.WEIGHTS),
        ("coordinator", 0, Kind.COMMIT),
    ],
)
@pytest.mark.parametrize("name", BOTH)
def test_messages_are_late_and_those_behind_them_wait(
    name: str, role: str, index: int, kind: Kind | str
) -> None:
    said = kind if isinstance(kind, Kind) else staged_kind(name)
    rounds = 400 if name == "sync" else 60  # in which the others go on
    cluster = make(
        name, TASK, faults=[Fault.delay(role, index, step=3, kind=said, rounds=rounds, count=1)]
    )
    trained(cluster, STEPS)
    if name == "sync":
        assert cluster.network.rounds > 400
    assert cluster.unmet == []
    check(cluster, TASK)
    if name == "sync":
        right(cluster, name)


@pytest.mark.parametrize(("name", "kind"), [("sync", Kind.PUSH), ("async", Kind.REPORT)])
def test_what_is_dropped_takes_all_behind_it_along_until_the_channel_closes(
    name: str, kind: Kind
) -> None:
    cluster = make(
        name,
        TASK,
        replaces=True,
        step_timeout=100.0,
        faults=[Fault.drop("worker", 1, step=3, kind=kind)],
    )
    assert failure(cluster).reason == "deadline"
    cluster.heal()  # heals no loss
    assert failure(cluster).reason == "deadline"
    cluster.kill(1)
    finish(cluster, counters(cluster)["step"] + 4)
    right(cluster, name)


@pytest.mark.few(2)
@pytest.mark.parametrize("peer", [("server", 0), ("server", 1), None])
@pytest.mark.parametrize("name", [*BOTH, "replicated"])
def test_a_link_that_is_cut_for_some_rounds_loses_nothing(
    name: str, peer: tuple[str, int] | None
) -> None:
    cluster = make(
        name, TASK, faults=[Fault.cut("worker", 2, peer, step=3, at="backward", rounds=500)]
    )
    trained(cluster, STEPS)
    if name != "async":  # in which the others go on meanwhile
        assert cluster.network.rounds >= 500
    right(cluster, name)


@pytest.mark.parametrize(("name", "peer"), [("sync", ("server", 1)), ("async", None)])
def test_a_link_that_is_cut_for_good_ends_in_a_deadline_and_can_be_healed(
    name: str, peer: tuple[str, int] | None
) -> None:
    cluster = make(name, TASK, step_timeout=100.0, faults=[Fault.cut("worker", 1, peer, step=3)])
    assert failure(cluster).reason == "deadline"
    cluster.heal()
    finish(cluster, counters(cluster)["step"] + 4)
    right(cluster, name)


def test_what_waits_on_a_link_that_is_cut_is_lost_when_it_closes() -> None:
    cluster = make("sync", TASK, replaces=True, faults=[Fault.cut("worker", 1, step=3, at="push")])
    client = cluster.client
    client.ask(STEPS, True)
    with pytest.raises(DeadlineError, match="nothing moves any more"):
        cluster.network.run_until(
            lambda: cluster.coordinator.version > 3, "a step without worker 1"
        )
    assert cluster.network.waiting
    cluster.kill(1)
    cluster.network.run_until(lambda: not cluster.network.waiting, "it to be lost")
    assert cluster.coordinator.version == 3


# -- what is refused, and what is told ------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_fault", "about"),
    [
        (lambda: Fault.kill("driver", 0, step=1), "role='driver'.*worker, server"),
        (lambda: Fault.raises("server", 0, step=1), "role='server'"),
        (
            lambda: Fault.raises("worker", 0, step=1, at="pull"),
            "at='pull'.*forward, backward, push, report",
        ),
        (
            lambda: Fault.kill("server", 0, step=1, at="backward"),
            "at='backward'.*push, apply, pull",
        ),
        (lambda: Fault.hang("worker", 0, step=1, at="apply"), "at='apply'.*report, pull"),
        (lambda: Fault.hang("worker", -1, step=1), "index=-1"),
        (lambda: Fault.hang("worker", 1, step=-1), "step=-1"),
        (lambda: Fault.hang("worker", 1, step=1, rounds=0), "rounds=0"),
        (lambda: Fault.kill("worker", 1, step=1, life=-1), "life=-1"),
        (lambda: Fault.slow("worker", 1, step=1, factor=0.5), "factor=0.5"),
        (lambda: Fault.slow("worker", 1, step=1, factor=2, steps=0), "steps=0"),
        (lambda: Fault.duplicate("worker", 1, step=1, count=0), "count=0"),
    ],
)
def test_what_makes_no_sense_is_refused(make_fault: Any, about: str) -> None:
    with pytest.raises(ConfigurationError, match=about):
        make_fault()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "fault",
    [
        Fault.kill("worker", 3, step=1),
        Fault.cut("worker", 0, ("server", 2), step=1),
        Fault.kill("server", 2, step=0),
    ],
)
def test_a_fault_of_nobody_is_refused(fault: Fault) -> None:
    with pytest.raises(ConfigurationError, match="there is no (worker 3|server 2)"):
        make("sync", TASK, faults=[fault])


def test_what_has_not_happened_is_told() -> None:
    faults = [Fault.raises("worker", 1, step=50), Fault.duplicate("worker", 1, step=1)]
    cluster = make("sync", TASK, faults=faults)
    trained(cluster, STEPS)
    assert cluster.unmet == faults[:1]


# -- any schedule ---------------------------------------------------------------------------------


def schedule(rng: random.Random, name: str) -> Faults:
    """Some faults of all kinds that a run in that mode comes through without anybody's help."""
    found: Faults = []
    for _ in range(rng.randint(1, 6)):
        worker, step, at = rng.randrange(3), rng.randrange(6), rng.choice([*COMPUTING, "pull"])
        role, index, kinds = rng.choice(
            [
                ("worker", worker, [Kind.PUSH, Kind.REPORT]),
                ("server", rng.randrange(2), [staged_kind(name), Kind.WEIGHTS]),
                ("coordinator", 0, [Kind.COMMIT, credit_kind(name), Kind.RESULT]),
            ]
        )
        kind = rng.choice([None, *kinds])
        rounds, life = rng.choice([1, 10, 100]), rng.choice([0, 0, 1, None])
        faults = [
            Fault.duplicate(role, index, step=step, kind=kind, life=life),
            Fault.delay(role, index, step=step, kind=kind, rounds=rounds, count=3, life=life),
            Fault.slow("worker", worker, step=step, factor=rng.choice([2, 30]), steps=2, life=life),
            Fault.hang("worker", worker, step=step, at=at, rounds=rounds, life=life),
            Fault.cut(
                "worker",
                worker,
                rng.choice([None, ("server", 0)]),
                step=step,
                at=at,
                rounds=rounds,
                life=life,
            ),
            Fault.raises("worker", worker, step=step, at=rng.choice(COMPUTING), life=life or 0),
        ]
        if name not in ("allreduce", "replicated", *GROUPED):  # in which nobody is replaced
            faults += [Fault.kill("worker", worker, step=step, at=at, life=life or 0)] * 3
        found.append(rng.choice(faults))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
@seeds(2)
def test_whatever_happens_the_log_explains_the_weights(name: str, seed: int) -> None:
    rng = random.Random(seed)
    faults = schedule(rng, name)
    cluster = make(name, TASK, faults=faults, shuffle=rng.choice([None, seed]), replaces=True)
    raised = 0
    while (left := STEPS - counters(cluster)["step"]) > 0:
        last = cluster.step(left)[-1]
        if isinstance(last, Failure):
            assert last.reason == "raised"
            raised += 1
    assert raised <= sum(fault.what == "raise" for fault in faults)
    assert len(cluster.left) <= sum(fault.what == "kill" for fault in faults)
    check(cluster, TASK)
    assert counters(cluster)["committed"] == STEPS * cluster.job.versions_per_step
    if name in ("sync", "allreduce", "replicated"):
        assert same_bits(cluster.weights(), straight(name))
    if name in EACH and name != "async-drop":
        assert sorted(shares(cluster.log())) == list(range(3 * STEPS))


# -- inside a worker's process --------------------------------------------------------------------


def test_lives_are_counted_by_files(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    faults = [
        Fault.raises("worker", 1, step=2),
        Fault.raises("worker", 1, step=1, at="push", life=1),
    ]
    for life, step in enumerate([2, 1]):
        cluster = InProcessCluster(
            with_faults(TASK.creator(), faults, lives), num_workers=3, strategy=mode("sync")
        )
        about = failure(cluster)
        assert (about.worker, about.step) == (1, step)
        trained(cluster, STEPS - step)
        assert same_bits(cluster.weights(), straight())
        assert len(list(lives.iterdir())) == 3 * (life + 1)
    trained(InProcessCluster(with_faults(TASK.creator(), faults, lives), num_workers=3), STEPS)


def test_a_slow_process_sleeps_in_proportion_to_what_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    own, elsewhere = threading.get_ident(), time.sleep

    def noted(seconds: float) -> None:
        if threading.get_ident() == own:
            slept.append(seconds)
        else:  # the clock of an earlier test's job beats on a thread of its own
            elsewhere(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    monkeypatch.setattr(
        time, "perf_counter", iter(range(10**6)).__next__
    )  # whatever is looked at takes a second
    faults = [Fault.slow("worker", 0, step=1, factor=5, steps=2)]
    cluster = InProcessCluster(with_faults(TASK.creator(), faults, tmp_path), num_workers=2)
    trained(cluster, 1)
    assert not slept
    trained(cluster, 1)
    assert len(slept) >= 5  # two layers' weights and biases, and the end
    assert min(slept) >= 4
    assert all(seconds % 4 == 0 for seconds in slept)
    trained(cluster, 1)
    before = len(slept)
    trained(cluster, 3)
    assert len(slept) == before


@pytest.mark.parametrize(
    "fault",
    [
        Fault.slow("server", 0, step=1, factor=2),
        Fault.duplicate("worker", 0, step=1),
        Fault.cut("worker", 0, step=1),
        Fault.cut("server", 0, step=1),
        Fault.hang("worker", 0, step=1, rounds=5),
    ],
)
def test_what_a_process_cannot_do_to_itself_is_refused(fault: Fault, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot happen inside a real process"):
        with_faults(TASK.creator(), [fault], tmp_path)
