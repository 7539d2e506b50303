"""Commit rules, the ledger and staging by themselves: values in, decisions out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.messages.gradients import PushStaged, Report, VersionStaged
from steepest.core.messages.message import PushId, server_peer, worker_peer
from steepest.core.protocol.commit_rules import (
    CommitAll,
    CommitEach,
    CommitFirst,
    CommitRule,
    Staged,
    Verdict,
    decided,
)
from steepest.core.protocol.push_tracking import (
    ClosedPushes,
    SequenceSet,
    StagedEach,
    StagedTogether,
)
from steepest.core.protocol.sample_leases import Leases, Ledger
from steepest.strategies.rounds import CommitQuorum
from steepest.testing.inspection import undecided
from tests.inside import ranges_of, remembered_by
from tests.random_examples import examples
from tests.step_calls import library_calls

many = examples(200)
MEMBERS = frozenset({0, 1, 2})


def push(worker: int, sequence: int = 1, pulled: int = 0) -> Staged:
    return Staged(worker, 0, sequence, pulled)


# -- rules ----------------------------------------------------------------------------------------


def test_all_waits_for_every_member_and_takes_them_in_the_order_of_workers() -> None:
    staged = [push(2), push(0, 9), push(1, 4)]
    assert CommitAll().decide(0, MEMBERS, staged[:2]) == Verdict()
    assert CommitAll().decide(0, MEMBERS, staged) == Verdict((staged[1], staged[2], staged[0]))


def test_the_first_are_enough_and_those_of_older_weights_are_dropped() -> None:
    rule = CommitFirst(1)
    old, first, second, third = push(1, 1, 4), push(2, 2, 5), push(0, 2, 5), push(1, 2, 5)
    assert decided(rule, 5, MEMBERS, [first]) == Verdict()
    assert decided(rule, 5, MEMBERS, [old, first]) == Verdict((), (old,))
    assert decided(rule, 5, MEMBERS, [first, second]) == Verdict((second, first))
    staged = [first, old, second, third]
    assert decided(rule, 5, MEMBERS, staged) == Verdict((second, first), (old,))
    assert decided(rule, 6, MEMBERS, [third]) == Verdict((), (third,))


@pytest.mark.parametrize(
    ("workers", "backup", "needed"), [(5, 2, 3), (2, 1, 1), (1, 1, 1), (3, 7, 1)]
)
def test_at_least_one_gradient_makes_a_version(workers: int, backup: int, needed: int) -> None:
    assert CommitFirst(backup).pushes_per_step(workers) == needed


def test_each_is_committed_by_itself_the_oldest_first() -> None:
    staged = [push(2, 1, 7), push(0, 1, 1), push(1)]
    for version in (7, 100):
        assert CommitEach().decide(version, MEMBERS, staged) == Verdict((staged[0],))
    assert CommitEach().decide(7, MEMBERS, []) == Verdict()


def test_what_is_too_stale_is_dropped_and_what_is_behind_it_committed() -> None:
    rule = CommitEach(drop_above=1)
    stale, edge, fresh = push(0, 1, 3), push(1, 1, 4), push(2, 1, 5)
    assert rule.decide(5, MEMBERS, [stale, edge, fresh]) == Verdict((edge,), (stale,))
    assert rule.decide(5, MEMBERS, [fresh, stale]) == Verdict((fresh,))
    assert rule.decide(5, MEMBERS, [stale]) == Verdict((), (stale,))
    assert CommitEach(drop_above=0).decide(5, MEMBERS, [stale, edge, fresh]) == Verdict(
        (fresh,), (stale, edge)
    )


def test_without_a_lead_nobody_waits_and_with_one_who_is_ahead_does() -> None:
    clocks = {0: 9, 1: 4, 2: 3}
    assert all(CommitEach().may_go_on(worker, clocks) for worker in clocks)
    allowed = {
        lead: [w for w in clocks if CommitEach(lead).may_go_on(w, clocks)] for lead in (0, 1, 5, 6)
    }
    assert allowed == {0: [2], 1: [1, 2], 5: [1, 2], 6: [0, 1, 2]}


@pytest.mark.parametrize(
    ("rule", "pushes", "versions"),
    [(CommitAll(), 4, 1), (CommitFirst(1), 3, 1), (CommitEach(), 4, 4)],
)
def test_a_step_is_as_many_gradients_as_workers_less_the_backup(
    rule: CommitRule, pushes: int, versions: int
) -> None:
    assert (rule.pushes_per_step(4), rule.versions_per_step(4)) == (pushes, versions)


RULES = [
    CommitAll(),
    CommitFirst(1),
    CommitFirst(2),
    CommitEach(),
    CommitEach(drop_above=0),
    CommitEach(drop_above=2),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", RULES, ids=repr)
@many
@given(order=st.lists(st.integers(0, 2), max_size=60))
def test_a_push_is_decided_at_most_once_and_as_the_rule_says(
    rule: CommitRule, order: list[int]
) -> None:
    version, sequence = 0, 0
    staged: list[Staged] = []
    working = dict.fromkeys(MEMBERS, 0)  # who computes, and from which version
    seen: set[PushId] = set()
    for worker in order:
        if worker not in working:  # it waits: its push is staged
            continue
        sequence += 1
        staged.append(push(worker, sequence, working.pop(worker)))
        while staged:
            commit, drop = decided(rule, version, MEMBERS, tuple(staged))
            ended = [*commit, *drop]
            assert set(ended) <= set(staged)
            assert len(set(ended)) == len(ended)
            assert not {p.id for p in ended} & seen
            seen |= {p.id for p in ended}
            staged = [p for p in staged if p not in ended]
            needed = rule.pushes_per_step(3) // rule.versions_per_step(3)
            assert len(commit) in (0, needed)
            bound = rule.drop_above if isinstance(rule, CommitEach) else 0
            if bound is not None:
                assert all(version - p.pulled <= bound for p in commit)
                assert all(version - p.pulled > bound for p in drop)
            version += bool(commit)
            working |= {p.worker: version for p in ended}
            if not commit:
                break
    assert not staged or isinstance(rule, (CommitAll, CommitFirst))
    assert len(staged) < 3


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("lead", [0, 1, 3])
@many
@given(order=st.lists(st.integers(0, 3), max_size=80))
def test_under_a_lead_clocks_stay_together_and_the_slowest_may_always_go_on(
    lead: int, order: list[int]
) -> None:
    clocks = dict.fromkeys(range(4), 0)
    for worker in order:
        if CommitEach(lead).may_go_on(worker, clocks):
            clocks[worker] += 1
        assert max(clocks.values()) - min(clocks.values()) <= lead + 1
        assert CommitEach(lead).may_go_on(min(clocks, key=clocks.__getitem__), clocks)


def test_a_quorum_makes_a_round_of_all_that_have_come() -> None:
    rule = CommitQuorum(2, grace=1.5)
    old, first, second = push(2, 1, pulled=0), push(1, 2, pulled=5), push(0, 3, pulled=5)
    assert rule.decide(5, MEMBERS, [old]) == Verdict()
    assert rule.decide(5, MEMBERS, [old, first]) == Verdict((first, old))
    assert rule.decide(5, MEMBERS, [old, first, second]) == Verdict((second, first, old))
    assert rule.decide(5, frozenset({2}), [old]) == Verdict((old,))  # nobody else computes
    assert CommitQuorum().decide(5, MEMBERS, [old, first]) == Verdict()
    assert CommitQuorum().decide(5, MEMBERS, [old, first, second]).commit == (second, first, old)
    assert (rule.pushes_per_step(3), rule.versions_per_step(3), rule.needs(3)) == (3, 3, 1)


# -- the ledger -----------------------------------------------------------------------------------


@many
@given(
    first=st.integers(0, 9),
    moves=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60),
    most=st.integers(1, 4),
)
def test_every_lease_has_one_holder_and_the_lowest_free_one_goes_out_next(
    first: int, moves: list[tuple[int, int]], most: int
) -> None:
    ledger = Ledger(first)
    out: list[int] = []
    used: set[int] = set()
    for move, which in moves:
        if move == 0:
            free = set(range(first, first + 300)) - used - set(out)
            leased = ledger.take(most)
            assert leased[0] == min(free)
            assert set(leased) <= free
            assert len(leased) == most or leased[-1] + 1 not in free
            out += leased
        elif out:
            lease = out.pop(which % len(out))
            if move == 1:
                ledger.give_back(lease)
            else:
                used.add(lease)
        assert set(ledger.returned) == set(range(first, ledger.following)) - used - set(out)
    assert list(ledger.returned) == sorted(ledger.returned)


# -- what is done with ----------------------------------------------------------------------------


@many
@given(st.lists(st.integers(1, 30), max_size=60))
def test_counted_numbers_are_those_that_were_counted(numbers: list[int]) -> None:
    counted = SequenceSet()
    for index, number in enumerate(numbers):
        counted.add(number)
        assert {n for n in range(40) if n in counted} == set(numbers[: index + 1])
    gaps = sum(b - a > 1 for a, b in pairwise(sorted(set(numbers))))
    assert len(ranges_of(counted)) == (gaps + 1 if numbers else 0)


@pytest.mark.parametrize("first", [1, 1000])
def test_counting_takes_no_memory_wherever_it_begins(first: int) -> None:
    counted = SequenceSet()
    for number in range(first, first + 500, 2):
        counted.add(number + 1)
        counted.add(number)
    assert ranges_of(counted) == [(first, first + 499)]


def test_beyond_1024_gaps_the_lowest_is_closed() -> None:
    counted = SequenceSet()
    for number in range(0, 2 * 1025, 2):
        counted.add(number)
    assert len(ranges_of(counted)) == 1024
    assert 1 in counted
    assert 3 not in counted


def test_pushes_are_done_by_worker_and_life() -> None:
    done = ClosedPushes()
    done.add(PushId(1, 0, 5))
    assert PushId(1, 0, 5) in done
    assert all(
        other not in done
        for other in (PushId(1, 0, 4), PushId(1, 0, 6), PushId(1, 1, 5), PushId(2, 0, 5))
    )
    done.add(PushId(1, 1, 2))
    done.add(PushId(2, 0, 2))
    done.forget(1)
    assert [p in done for p in (PushId(1, 0, 5), PushId(1, 1, 2), PushId(2, 0, 2))] == [
        False,
        False,
        True,
    ]
    done.clear()
    assert PushId(2, 0, 2) not in done


# -- staging --------------------------------------------------------------------------------------


def report(
    worker: int, sequence: int, pulled: int = 0, total: float = 4.0
) -> tuple[PushId, Report]:
    return PushId(worker, 0, sequence), Report(0, 0, sequence, pulled, total, worker, 0, 0)


def staged(worker: int, sequence: int, culprits: Any = ()) -> PushStaged:
    return PushStaged(0, 0, sequence, 0, worker, 0.0, culprits)


def test_together_nothing_is_complete_before_every_server_has_reduced() -> None:
    staging = StagedTogether(frozenset({0, 2}))
    staging.report(*report(1, 7, 3))
    staging.staged(0, VersionStaged(0, 0, 0.0))
    staging.staged(1, VersionStaged(0, 0, 0.0))  # it holds nothing to train
    assert staging.complete() == []
    assert staging.awaited([0, 1]) == [worker_peer(0)]
    assert staging.awaited([1]) == [server_peer(2)]
    staging.staged(2, VersionStaged(0, 0, 0.0))
    assert staging.complete() == [push(1, 7, 3)]
    assert staging.take(staging.complete()) == {1: report(1, 7, 3)[1]}
    assert staging.complete() == []
    assert staging.awaited([1]) == [worker_peer(1)]


def test_together_a_report_costs_the_same_however_many_workers_have_reported() -> None:
    staging = StagedTogether(frozenset({0}))
    reports = [report(worker, 1) for worker in range(100)]
    with library_calls() as calls:
        for each in reports:
            staging.report(*each)
    assert calls == {"core/protocol/push_tracking.py:report": 100}


def test_shares_are_out_from_their_lease_to_the_end_of_their_push() -> None:
    leases = Leases(CommitQuorum(ahead=True), {0, 1, 2})
    leases.lease({0, 1, 2}, 99, 0.0, lambda worker: worker + 1, ahead=True)
    assert leases.out == 2 * (1 + 2 + 3)
    leases.give_back([1])
    assert leases.out == 12  # its worker computes them all the same
    leases.commit([push(0)])
    assert leases.drop([push(2)]) == [3, 4, 5]
    assert leases.out == 8
    leases.lease({0}, 99, 0.0)
    assert leases.out == 8  # those that it was leased before
    leases.forget_ahead(2)
    leases.leave(1)
    assert leases.out == 3
    leases.clear({0, 1, 2}, 1)
    assert (leases.out, leases.busy) == (0, ())


def test_each_culprit_is_named_once_however_many_chunks_it_spoils() -> None:
    bad = [[1, "a"], [1, "a"], [0, "b"]]
    together = StagedTogether(frozenset({0, 1}))
    each = StagedEach(frozenset({0, 1}))
    for server in (0, 1):
        together.staged(server, VersionStaged(0, 0, 0.0, bad))
        each.staged(server, staged(1, 1, [[1, "a"], [1, "a"], [1, "b"]]))
        each.staged(server, staged(2, 1, [[2, "c"]]))
    each.report(*report(1, 1))
    assert together.culprits([]) == [(1, "a"), (0, "b")]
    assert each.culprits(each.complete()) == [(1, "a"), (1, "b")]


def test_who_is_awaited_is_the_worker_that_did_not_report_or_the_server_that_did_not_stage() -> (
    None
):
    staging = StagedEach(frozenset({0, 1}))
    staging.report(*report(1, 1))
    staging.staged(1, staged(1, 1))
    assert staging.awaited([1, 2]) == [worker_peer(2)]
    assert staging.awaited([1]) == [server_peer(0)]
    staging.clear()
    assert staging.awaited([1]) == [worker_peer(1)]


PUSHES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=5, unique=True
)


@pytest.mark.long
@many
@given(PUSHES, st.sets(st.integers(0, 2)), st.randoms(use_true_random=False))
def test_every_push_is_complete_once_in_any_order_of_words_and_copies(
    pushes: list[tuple[int, int]], holding: set[int], rng: Any
) -> None:
    staging = StagedEach(frozenset(holding))
    words: list[tuple[tuple[int, int], int]] = [(p, s) for p in pushes for s in (-1, *holding)]
    words += rng.choices(words, k=len(words))
    rng.shuffle(words)
    heard: dict[tuple[int, int], set[int]] = {p: set() for p in pushes}
    complete: list[tuple[int, int]] = []
    taken: list[tuple[int, int]] = []
    for (worker, sequence), who in words:
        if who < 0:
            staging.report(*report(worker, sequence, sequence + 5))
        else:
            staging.staged(who, staged(worker, sequence))
        heard[worker, sequence].add(who)
        complete += [p for p in pushes if heard[p] == {-1, *holding} and p not in complete]
        found = staging.complete()
        assert [(p.worker, p.sequence) for p in found] == [p for p in complete if p not in taken]
        assert all(p.pulled == p.sequence + 5 for p in found)
        if rng.random() < 0.5:
            chosen = found[: rng.randint(0, len(found))]
            by_worker = {p.worker: p for p in chosen}
            chosen = list(by_worker.values())
            assert staging.take(chosen).keys() == by_worker.keys()
            taken += [(p.worker, p.sequence) for p in chosen]
    for p in staging.complete():
        staging.take([p])
        taken.append((p.worker, p.sequence))
    assert sorted(taken) == sorted(pushes)
    assert not undecided(staging)


@many
@given(st.integers(1, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_what_a_lost_worker_left_half_way_is_never_complete_and_nothing_of_it_is_kept(
    servers: int, sequences: int, rng: Any
) -> None:
    """Each channel tells what came through it, in order, and then that it is closed."""
    holding = frozenset(range(servers))
    staging = StagedEach(holding)
    channels = {
        who: list(range(1, rng.randint(0, sequences) + 1)) for who in (None, *holding, servers)
    }
    complete = min(len(channels[who]) for who in (None, *holding))
    open_ones = list(channels)
    taken: list[int] = []
    while open_ones:
        who = rng.choice(open_ones)
        if not channels[who]:
            lost = staging.abandon(1, who)
            assert all(push_id.sequence > complete for push_id in lost)
            open_ones.remove(who)
            continue
        sequence = channels[who].pop(0)
        if who is None:
            staging.report(*report(1, sequence))
        elif who in holding:
            staging.staged(who, staged(1, sequence))
        for found in staging.complete():
            staging.take([found])
            taken.append(found.sequence)
    assert taken == list(range(1, complete + 1))
    assert not undecided(staging)
    assert not remembered_by(staging)
