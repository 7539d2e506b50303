"""Workers die, or programs end, between two batches or steps of users' own loops: what stands there counts once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from tests.own_loop_runs import STRATEGIES, InterruptedRunError, Interrupts, Resizes, run, without
from tests.own_loops import (
    ALONE,
    FOUND,
    Parts,
    Script,
    accumulating,
    alone,
    clamped,
    plain,
    rollout,
)
from tests.reference import difference, perceptron, same_bits, samples, sgd, snapshot
from tests.simulated_programs import quiet


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.few(1)
@pytest.mark.parametrize("victim", ["server 0", 1])
def test_parameters_are_projected_by_the_successor_of_who_updates_them(victim: int | str) -> None:
    strategy = STRATEGIES["ps, two copies" if isinstance(victim, str) else "allreduce, two copies"]
    found = without(clamped, 2, victim, 3, strategy)
    assert difference(found.weights, alone(clamped, 2)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("step", range(2, 8))
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_worker_dies_between_batches_whose_gradients_are_added_up(
    strategy: str, victim: int, step: int
) -> None:
    """Its successor takes those that it had of the present sum again, at the places that the loop counts."""
    script = Script(accumulating, optimizer=sgd(momentum=0.9), data=samples(24))
    found = without(script, 2, victim, step, STRATEGIES[strategy])
    assert difference(found.weights, script.alone(2)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("step", range(2, 8))
@pytest.mark.parametrize("workers", [2, 4])
def test_a_program_is_started_again_between_batches_whose_gradients_are_added_up(
    step: int, workers: int, tmp_path: Path
) -> None:
    script = Script(accumulating, optimizer=sgd(momentum=0.9), data=samples(24))
    settings: dict[str, Any] = {
        "checkpoints": steepest.Checkpoints(tmp_path / "run", every=1),
        "global_batch_size": 4,
    }
    with pytest.raises(InterruptedRunError):
        run(script, 2, callbacks=[Interrupts(step)], **settings)
    assert difference(run(script, workers, **settings).weights, script.alone(2)) < 1e-12


def alternating(parts: Parts, epochs: int) -> None:
    """Another loss at each third batch of an epoch."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader, 1):
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            (loss if number % 3 else 0.1 * loss).backward()
            parts.optimizer.step()


@pytest.mark.few(2)
@pytest.mark.parametrize("step", range(2, 8))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_successor_counts_the_batches_of_an_epoch_from_where_it_enters(
    strategy: str, step: int
) -> None:
    script = Script(alternating, data=samples(24))
    found = without(script, 2, 1, step, STRATEGIES[strategy])
    assert difference(found.weights, script.alone(2)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_dead_worker_has_reported_counts(strategy: str, victim: int) -> None:
    """But for the one that it has made, or was about to, behind its last committed step."""
    script = Script(telling, data=samples(24))
    expected = [row["loss"] for row in run(script, 2, STRATEGIES[strategy]).reports]
    found = [row["loss"] for row in without(script, 2, victim, 8, STRATEGIES[strategy]).reports]
    assert len(found) == len(expected) == 18
    wrong = [n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if abs(a - b) > 1e-12]
    assert len(wrong) <= 1, wrong


def telling(parts: Parts, epochs: int) -> None:
    """Reports the loss of each batch behind its step."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            loss = nn.functional.mse_loss(parts.model(x), y)
            parts.optimizer.zero_grad()
            loss.backward()
            parts.optimizer.step()
            steepest.report(loss=loss)


def in_turns(parts: Parts, epochs: int) -> None:
    """A schedule goes on between the two steps of each batch."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            for number in range(2):
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
                if not number:
                    for scheduler in parts.schedulers:
                        scheduler.step()


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [3, 4])
def test_a_schedule_that_goes_on_between_two_steps_does_so_once(step: int, tmp_path: Path) -> None:
    """The program ends behind it, or before; started again it goes through the rest of the batch."""
    falling = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    script = Script(in_turns, optimizer=sgd(momentum=0.9), schedule=falling)
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(script, 2, checkpoints=checkpoints, callbacks=[Interrupts(step)])
    assert difference(run(script, 2, checkpoints=checkpoints).weights, script.alone(2)) < 1e-12


def over_the_end(parts: Parts, epochs: int) -> None:
    """A step of the optimizer after each fifth batch of all epochs, of which each has six; one counts batches twice."""
    kept = steepest.register(count=0)
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            nn.functional.mse_loss(parts.model(x), y).backward()
            kept.count += 1
            if kept.count % 5 == 0:
                parts.optimizer.step()
                parts.optimizer.zero_grad()
        steepest.gather(torch.ones(1))
        for scheduler in parts.schedulers:
            scheduler.step()


def gathering(parts: Parts, epochs: int) -> None:
    """A step after each third batch, and a gathering after each batch."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader, 1):
            loss = nn.functional.mse_loss(parts.model(x), y)
            loss.backward()
            steepest.gather(loss.detach())
            if number % 3 == 0:
                parts.optimizer.step()
                parts.optimizer.zero_grad()


def rounds() -> None:
    """Gradients of three rounds are added up for a step, without a loader."""
    policy = perceptron()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    policy, optimizer = steepest.prepare(policy, optimizer)
    ranks = range(ALONE["workers"]) if ALONE else [steepest.rank()]
    for number in steepest.epochs(12):
        x = torch.cat([rollout(number, rank) for rank in ranks])
        policy(x).square().mean().backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    FOUND["rounds"] = snapshot(policy)


SUMS = [accumulating, over_the_end, gathering]


@pytest.mark.few(1)
@pytest.mark.parametrize("step", range(1, 4))
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("function", SUMS)
def test_a_sum_of_gradients_is_whole_where_a_batch_may_have_any_number_of_steps(
    function: Any, strategy: str, victim: int, step: int
) -> None:
    falling = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    script = Script(function, data=samples(24), schedule=falling)
    found = without(script, 2, victim, step, STRATEGIES[strategy])
    assert difference(found.weights, script.alone(2)) < 1e-12


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_sum_of_gradients_over_rounds_is_whole(strategy: str, victim: int) -> None:
    found = without(rounds, 2, victim, 2, STRATEGIES[strategy])
    assert difference(found.weights, alone(rounds, 2)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("to", [1, 3])
@pytest.mark.parametrize("function", [plain, *SUMS])
def test_a_loop_of_another_number_of_workers_begins_its_sum_anew(function: Any, to: int) -> None:
    """Its batches stay as large as the job was told; all workers take those of the present sum again."""
    script = Script(function, data=samples(24))
    found = run(script, 2, callbacks=[Resizes(2, to)], global_batch_size=4)
    assert [event["event"] for event in found.events] == ["resized"]
    assert difference(found.weights, script.alone(2)) < 1e-12


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_batches_of_all_workers_stay_as_large_where_a_job_is_set_back(strategy: str) -> None:
    script = Script(plain, data=samples(24))
    found = without(script, 2, 1, 4, STRATEGIES[strategy], global_batch_size=4)
    assert {row["samples"] for row in found.steps} == {4}
    assert difference(found.weights, script.alone(2)) < 1e-12


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_drawn_between_two_epochs_changes_no_batch(workers: int) -> None:
    """A loader over test data draws a seed when it is begun; by then the next batch may be there."""

    def dropping(parts: Parts, epochs: int, drawn: int) -> None:
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(nn.functional.dropout(x)), y).backward()
                parts.optimizer.step()
            torch.rand(drawn)

    found = [run(Script(partial(dropping, drawn=n)), workers).weights for n in (0, 5)]
    assert same_bits(found[0], found[1])


def annealed(parts: Parts, epochs: int) -> None:
    """Multiplies the rate by hand before each step, where the step is taken again if a worker dies."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            for group in parts.optimizer.param_groups:
                group["lr"] *= 0.9
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


@pytest.mark.few(1)
def test_what_is_set_by_hand_before_a_step_is_set_once() -> None:
    """By a worker that takes the place of the one whose values count, too."""
    script = Script(annealed, data=samples(24), optimizer=sgd(momentum=0.9))
    undisturbed = run(script, 2)
    for step in (1, 3):
        assert same_bits(without(script, 2, 0, step).weights, undisturbed.weights)
