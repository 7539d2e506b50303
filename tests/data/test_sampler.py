"""SamplePlan: an epoch visits each sample once, whatever the sizes, and any step can be computed alone."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.data.protocol import Blocks
from steepest.core.data.sampler import Remaining, SamplePlan, cut, epoch_ends, even_share, step_seed
from steepest.core.protocol.sample_leases import Ledger

sizes = st.integers(1, 60)
batches = st.integers(1, 70)
replica_counts = st.integers(1, 6)
seeds = st.integers(0, 2**40)


def whole_step(plan: SamplePlan, step: int, replicas: int = 1) -> list[int]:
    return [int(i) for replica in range(replicas) for i in plan.share(step, replica, replicas)]


@given(sizes, batches, replica_counts, seeds)
def test_an_epoch_visits_each_sample_exactly_once(
    samples: int, batch: int, replicas: int, seed: int
) -> None:
    plan = SamplePlan(samples, batch, seed)
    step = 0
    for epoch in range(3):
        seen: list[int] = []
        for _ in range(plan.steps_per_epoch):
            assert plan.position(step).epoch == epoch
            seen += whole_step(plan, step, replicas)
            step += 1
        assert sorted(seen) == list(range(samples))
        assert seen == plan.permutation(epoch).tolist(), "shares lie in order, cut contiguously"


@given(sizes, batches, replica_counts, st.integers(0, 200))
def test_shares_of_a_step_differ_by_at_most_one(
    samples: int, batch: int, replicas: int, step: int
) -> None:
    plan = SamplePlan(samples, batch, seed=1)
    lengths = [len(plan.share(step, replica, replicas)) for replica in range(replicas)]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    assert sum(lengths) == plan.position(step).end - plan.position(step).begin


@given(sizes, batches)
def test_no_step_straddles_epochs_and_all_but_the_last_are_full(samples: int, batch: int) -> None:
    plan = SamplePlan(samples, batch, seed=1)
    for step in range(3 * plan.steps_per_epoch):
        at = plan.position(step)
        assert 0 <= at.begin < at.end <= samples
        assert at.end == samples or at.end - at.begin == batch
        following = plan.position(step + 1)
        expected = (at.epoch, at.end) if at.end < samples else (at.epoch + 1, 0)
        assert (following.epoch, following.begin) == expected


@given(sizes, batches, st.integers(0, 200))
def test_an_epoch_ends_at_the_first_step_of_the_next_epoch(
    samples: int, batch: int, step: int
) -> None:
    plan = SamplePlan(samples, batch, seed=1)
    end = plan.end_of(plan.position(step).epoch)
    assert plan.position(end).epoch == plan.position(step).epoch + 1
    assert plan.position(end).begin == 0
    assert plan.position(end - 1).epoch == plan.position(step).epoch


@given(sizes, batches, seeds, st.integers(0, 100))
def test_a_restart_continues_exactly(samples: int, batch: int, seed: int, step: int) -> None:
    plan = SamplePlan(samples, batch, seed)
    at = plan.position(step)
    again = SamplePlan(samples, batch, seed, step, at.epoch, at.begin)
    for later in range(step, step + 2 * plan.steps_per_epoch + 1):
        assert again.position(later) == plan.position(later)
        assert whole_step(again, later, 2) == whole_step(plan, later, 2)
        assert again.end_of(again.position(later).epoch) == plan.end_of(plan.position(later).epoch)


@given(sizes, batches, seeds, st.integers(0, 50))
def test_a_restart_at_the_very_end_of_an_epoch_begins_the_next(
    samples: int, batch: int, seed: int, step: int
) -> None:
    plan = SamplePlan(samples, batch, seed)
    last = plan.end_of(plan.position(step).epoch) - 1
    again = SamplePlan(samples, batch, seed, last + 1, plan.position(last).epoch, samples)
    for later in range(last + 1, last + 4):
        assert again.position(later) == plan.position(later)


@given(sizes, batches, batches, seeds, st.integers(0, 50))
def test_a_restart_with_another_batch_still_visits_each_sample_once(
    samples: int, batch: int, other: int, seed: int, step: int
) -> None:
    plan = SamplePlan(samples, batch, seed)
    at = plan.position(step)
    seen = plan.permutation(at.epoch)[: at.begin].tolist()
    again = SamplePlan(samples, other, seed, step, at.epoch, at.begin)
    for later in range(step, again.end_of(again.position(step).epoch)):
        seen += whole_step(again, later, 3)
    assert sorted(seen) == list(range(samples))


# -- what was committed out of order -------------------------------------------------------------------


def going_on(
    samples: int, batch: int, seed: int, step: int, rest: Remaining, blocks: Blocks | None = None
) -> SamplePlan:
    return SamplePlan(
        samples, batch, seed, step, rest.epoch, rest.offset, blocks, rest.left, rest.begun
    )


def still_to_come(rest: Remaining, samples: int) -> dict[int, list[int]]:
    """Places in the permutations of the epochs up to that of `rest`."""
    found: dict[int, list[int]] = {epoch: [] for epoch in range(rest.epoch + 1)}
    for epoch, begin, end in (*rest.left, (rest.epoch, rest.offset, samples)):
        found[epoch] += range(begin, end)
    return found


@given(sizes, seeds, st.data())
def test_whatever_is_leased_returned_and_restarted_each_sample_comes_once_per_epoch(
    samples: int, seed: int, data: st.DataObject
) -> None:
    rest, step = Remaining(), data.draw(st.integers(0, 3))
    seen: Counter[tuple[int, int]] = Counter()
    for _ in range(
        data.draw(st.integers(1, 4))
    ):  # lives of the job, each of another size, with data cut anew
        shares, own, size = (data.draw(st.integers(1, 4)) for _ in range(3))
        parts = shares * own
        blocks = data.draw(
            st.sampled_from([None, 1, 4, 100, (samples - samples // 3, samples // 3)])
        )
        plan = going_on(samples, parts * size, seed, step, rest, blocks)
        ledger, committed = Ledger(step * shares), 0
        busy: list[int] = []
        for event in data.draw(st.lists(st.integers(0, 5), max_size=25)):
            if event < 2 or not busy:
                busy += ledger.take(1 + event)
                continue
            lease = busy.pop(event % len(busy))
            if event == 2:
                ledger.give_back(lease)
                continue
            committed += 1
            at, first = lease // shares, lease % shares * own
            mine = [
                int(i) for part in range(first, first + own) for i in plan.share(at, part, parts)
            ]
            seen.update((plan.position(at).epoch, i) for i in mine)
        for lease in busy:
            ledger.give_back(lease)
        rest = plan.remaining(ledger.following, ledger.returned, shares, parts)
        step += committed // shares
        expected = Counter(
            {(epoch, i): 1 for epoch in range(rest.epoch + 1) for i in range(samples)}
        )
        for epoch, places in still_to_come(rest, samples).items():
            expected.subtract((epoch, int(i)) for i in plan.permutation(epoch)[places])
        assert seen == +expected
        assert 0 <= rest.offset <= samples
        assert list(rest.left) == sorted(rest.left)
        assert all(part[0] <= rest.epoch and part[1] < part[2] for part in rest.left)
        assert {epoch for epoch, _ in rest.begun} <= {
            rest.epoch,
            *(epoch for epoch, _, _ in rest.left),
        }


lefts = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 59), st.integers(1, 9)), max_size=6)


@given(batches, replica_counts, seeds, lefts, st.integers(0, 60))
def test_what_is_left_over_is_dealt_out_first_and_never_two_epochs_in_a_step(
    batch: int, replicas: int, seed: int, drawn: list[tuple[int, int, int]], offset: int
) -> None:
    samples = 60
    kept = {
        (e, i)
        for e, begin, n in drawn
        for i in range(begin, min(begin + n, offset if e == 2 else samples))
    }
    left = tuple(sorted((e, i, i + 1) for e, i in kept))
    plan = SamplePlan(samples, batch, seed, 7, 2, offset, left=left)
    step = 7
    for epoch in range(4):
        wanted = [i for e, i in sorted(kept) if e == epoch] if epoch < 3 else []
        wanted += range(offset, samples) if epoch == 2 else range(samples) if epoch > 2 else ()
        got = []
        while step < plan.end_of(epoch):
            at = plan.position(step)
            assert at.epoch == epoch
            assert at.size == batch or step == plan.end_of(epoch) - 1
            got += whole_step(plan, step, replicas)
            step += 1
        assert got == plan.permutation(epoch)[wanted].tolist()
        assert plan.end_of(epoch) == step


@given(
    sizes,
    batches,
    replica_counts,
    seeds,
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 100),
)
def test_steps_of_leftovers_go_on_exactly_after_a_restart(
    samples: int, batch: int, shares: int, seed: int, first: int, second: int, gap: int
) -> None:
    size = batch * shares
    start = SamplePlan(samples, size, seed)
    plan = going_on(
        samples, size, seed, 3, start.remaining(first + 1, [gap % (first + 1)], shares, shares)
    )
    again = going_on(
        samples, size, seed, second + 3, plan.remaining((second + 3) * shares, [], shares, shares)
    )
    for step in range(second + 3, second + 12):
        assert whole_step(again, step, shares) == whole_step(plan, step, shares)


@given(sizes, batches, seeds, st.integers(0, 100))
def test_in_order_nothing_is_left_over(samples: int, batch: int, seed: int, step: int) -> None:
    plan = SamplePlan(samples, batch, seed)
    at = plan.position(step)
    begun = ((at.epoch, None),) if at.begin else ()
    assert plan.remaining(step * 3, [], 3, 6) == Remaining(at.epoch, at.begin, begun=begun)


def test_where_epochs_ended_is_remembered_over_changes_of_the_batch() -> None:
    plan = SamplePlan(10, 4, seed=0)
    ends = epoch_ends(plan, [], 7)
    assert ends == [3, 6]
    assert epoch_ends(plan, ends, 7) == ends
    other = going_on(10, 2, 0, 7, plan.remaining(7, [], 1, 1))
    assert epoch_ends(other, ends, 9) is ends  # no copy: it is asked for several times in each step
    assert ends == [3, 6]
    assert epoch_ends(other, ends, 10) == [3, 6, 10]
    early = going_on(
        10, 4, 0, 2, plan.remaining(4, [2], 1, 1)
    )  # the last step of epoch 0 is still to come
    assert early.position(2) == SamplePlan(10, 4, 0).position(2)
    assert epoch_ends(early, [], 2) == []
    assert epoch_ends(early, [], 3) == [3]


@pytest.mark.parametrize("begin", range(-1, 8))
def test_a_cut_takes_the_samples_between(begin: int) -> None:
    ranges = [(0, 2), (5, 6), (9, 13)]
    flat = [i for first, last in ranges for i in range(first, last)]
    for end in range(begin, 9):
        found = [i for first, last in cut(ranges, begin, end) for i in range(first, last)]
        assert found == flat[max(begin, 0) : max(end, 0)]


def test_a_plan_can_be_asked_in_any_order() -> None:
    forwards, backwards = SamplePlan(50, 8, seed=3), SamplePlan(50, 8, seed=3)
    there = [whole_step(forwards, step) for step in range(40)]
    back = [whole_step(backwards, step) for step in reversed(range(40))]
    assert there == back[::-1]


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    plan = SamplePlan(50, 8, seed=3)
    orders = [plan.permutation(epoch).tolist() for epoch in range(5)]
    orders += [SamplePlan(50, 8, seed).permutation(0).tolist() for seed in range(4, 9)]
    orders.append(list(range(50)))
    assert len({tuple(order) for order in orders}) == len(orders)


def test_the_same_seed_gives_the_same_permutation_on_every_machine() -> None:
    assert (
        SamplePlan(8, 3, seed=1).permutation(2).tolist()
        == SamplePlan(8, 5, seed=1).permutation(2).tolist()
    )
    assert SamplePlan(8, 3, seed=0).permutation(0).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]


def test_replacing_a_setting_forgets_what_was_computed_for_another() -> None:
    plan = SamplePlan(50, 8, seed=3)
    plan.permutation(0)
    other = replace(plan, seed=4)
    assert other.permutation(0).tolist() == SamplePlan(50, 8, seed=4).permutation(0).tolist()
    assert plan.permutation(0).tolist() == SamplePlan(50, 8, seed=3).permutation(0).tolist()


def test_two_neighbouring_epochs_are_kept_since_loaders_read_ahead() -> None:
    plan = SamplePlan(50, 8, seed=3)
    now, ahead = plan.permutation(0), plan.permutation(1)
    assert plan.permutation(0) is now
    assert plan.permutation(1) is ahead


def test_plans_are_values() -> None:
    plan = SamplePlan(50, 8, seed=3)
    plan.permutation(0)
    assert plan == SamplePlan(50, 8, seed=3) != SamplePlan(50, 8, seed=4)
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert whole_step(copy, 7) == whole_step(plan, 7)
    with pytest.raises(FrozenInstanceError):
        plan.seed = 4  # type: ignore[misc]


@given(sizes, batches, replica_counts, st.data())
def test_a_replicas_stream_of_shares_skips_empty_ones(
    samples: int, batch: int, replicas: int, data: st.DataObject
) -> None:
    replica = data.draw(st.integers(0, replicas - 1)) if batch >= replicas <= samples else 0
    plan = SamplePlan(samples, batch, seed=1)
    streamed = [share.tolist() for share in islice(plan.shares(2, replica, replicas), 5)]
    asked = [
        plan.share(step, replica, replicas).tolist()
        for step in range(2, 2 + 5 * plan.steps_per_epoch + 5)
    ]
    assert all(streamed)
    assert streamed == [share for share in asked if share][:5]


def test_shares_that_lie_side_by_side_are_left_over_as_one_part() -> None:
    plan = SamplePlan(24, 4, seed=1)
    assert plan.remaining(9, (0, 1, 2, 6), shares=2, parts=2).left == ((0, 0, 6), (0, 12, 14))


@given(sizes, batches, st.integers(1, 3), st.integers(1, 3))
def test_the_samples_of_a_share_are_those_of_its_replicas(
    samples: int, batch: int, shares: int, replicas: int
) -> None:
    plan, parts = SamplePlan(samples, batch, seed=1), shares * replicas
    for share in range(3 * shares):
        step, first = share // shares, share % shares * replicas
        mine = [i for at in range(first, first + replicas) for i in plan.share(step, at, parts)]
        assert plan.samples_of(share, shares, parts).tolist() == mine
        ranges = plan.places(share, shares, parts)
        assert [i for e, begin, end in ranges for i in plan.permutation(e)[begin:end]] == mine


def test_shares_are_64_bit_integers() -> None:
    assert SamplePlan(10, 4, seed=0).share(0, 0, 2).dtype == np.int64


@given(st.integers(0, 1000), st.integers(1, 40))
def test_even_shares_are_contiguous_and_even(count: int, parts: int) -> None:
    ranges = [even_share(count, part, parts) for part in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert {end - begin for begin, end in ranges} <= {count // parts, -(-count // parts)}


def test_step_seeds_are_distinct_and_fit_in_63_bits() -> None:
    found = {
        step_seed(seed, step, replica)
        for seed in (0, 1, 2**40)
        for step in range(200)
        for replica in range(20)
    }
    assert len(found) == 3 * 200 * 20
    assert all(0 <= seed < 2**63 for seed in found)
    assert step_seed(1, 2, 3) != step_seed(1, 3, 2) != step_seed(2, 1, 3)


@given(st.tuples(st.integers(), st.integers(0, 2**40), st.integers(0, 2**20)))
def test_a_step_seed_depends_on_its_arguments_alone(arguments: tuple[int, int, int]) -> None:
    assert step_seed(*arguments) == step_seed(*arguments)
    assert 0 <= step_seed(*arguments) < 2**63


@given(sizes, batches, replica_counts, seeds)
def test_with_drop_last_an_epoch_has_whole_steps_only(
    samples: int, batch: int, replicas: int, seed: int
) -> None:
    plan, every = SamplePlan(samples, batch, seed, drop_last=True), SamplePlan(samples, batch, seed)
    count = max(samples // batch, 1)
    assert plan.steps_per_epoch == count
    for step in range(3 * count):
        epoch, index = divmod(step, count)
        same = epoch * every.steps_per_epoch + index
        assert plan.position(step).epoch == epoch
        assert whole_step(plan, step, replicas) == whole_step(every, same, replicas)
        assert plan.position(step).size == min(batch, samples)
        assert plan.end_of(plan.position(step).epoch) == (epoch + 1) * count


@given(sizes, batches, batches, seeds, st.integers(0, 30))
def test_with_drop_last_other_sizes_go_on_with_whole_steps(
    samples: int, before: int, after: int, seed: int, step: int
) -> None:
    """What is left of an epoch is cut into whole steps; nothing in it is seen twice."""
    plan = SamplePlan(samples, before, seed, drop_last=True)
    rest = plan.remaining(step, [], 1, 1)
    assert rest.epoch == plan.position(step).epoch
    assert rest.offset == plan.position(step).begin
    again = SamplePlan(
        samples, after, seed, step, rest.epoch, rest.offset, left=rest.left, drop_last=True
    )
    if before == after:
        assert all(whole_step(again, s) == whole_step(plan, s) for s in range(step, step + 9))
    seen = Counter(plan.permutation(rest.epoch)[: rest.offset].tolist())
    steps = again.end_of(rest.epoch) - step
    left = samples - rest.offset
    assert steps == left // after or (steps == 1 and left == samples < after)
    for at in range(step, step + steps):
        assert again.position(at).size == min(after, samples)
        seen.update(whole_step(again, at))
    assert set(seen.values()) <= {1}
    assert again.position(step + steps).epoch == rest.epoch + 1
    assert again.remaining(step + steps, [], 1, 1).left == ()
