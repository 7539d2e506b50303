"""Random numbers that a user's own loop draws: the same wherever a worker dies, whose place another takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import steepest
from steepest import FailureConfig, LocalStrategy
from tests.own_loop_runs import STRATEGIES, Kills
from tests.own_loops import BATCH
from tests.reference import perceptron, same_bits, samples
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config
from tests.strikes import kill_this_process

DIED: list[Any] = []  # places where a process was killed


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    DIED.clear()
    with quiet():
        yield


class Noisy(Dataset[Any]):
    """Samples to which something is added by chance when they are read."""

    def __init__(self, count: int) -> None:
        self._columns = samples(count)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> Any:
        x, y = (column[index] for column in self._columns)
        return x + 0.1 * torch.randn_like(x), y


@dataclass
class Drawing:
    """A loop that draws wherever it can; its process dies once, where it comes to a place."""

    twice: bool = False
    among_batches: bool = True  # whether it gathers there
    batches: int = 4  # in an epoch, of all workers
    epochs: int = 2
    dies_at: tuple[Any, ...] = ()

    def _pass(self, *place: Any) -> None:
        if not DIED and self.dies_at == (steepest.rank(), *place):
            DIED.append(place)
            kill_this_process()

    def __call__(self) -> None:
        model = nn.Sequential(nn.Dropout(0.3), perceptron())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(Noisy(self.batches * BATCH), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = steepest.prepare(model, optimizer, loader)
        kept = steepest.register(scale=torch.rand(()).item())
        fixed = torch.rand(3, dtype=torch.float64)  # a successor has the same
        for epoch in steepest.epochs(self.epochs):
            torch.rand(2)
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x + 0.1 * torch.rand_like(x)), y)
                loss = (0.5 + kept.scale + fixed.sum()) * loss
                loss.backward()
                self._pass(epoch, number, "before")
                pause(1.0)
                optimizer.step()
                self._pass(epoch, number, "after")
                torch.rand(2)
                if self.twice:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
                if self.among_batches:
                    kept.scale = steepest.gather(torch.rand(1)).mean().item()
            self._pass(epoch, "behind")
            drawn = torch.rand(1)
            steepest.report(last=loss)
            pause(2.0)  # a copy of the state is made while one worker gathers
            kept.scale += steepest.gather(drawn).mean().item()
            self._pass(epoch, "gathered")
            steepest.report(drawn=drawn.item(), scale=kept.scale)


def run(script: Any, workers: int, strategy: Any, every: int = 3, strikes: Any = None) -> Any:
    simulation = Simulation(seed=1)
    settings = run_config(failure=FailureConfig(patience=math.inf, snapshot_every=every))
    with simulation.running():
        found = steepest.run(
            script,
            num_workers=workers,
            strategy=strategy,
            run_config=settings,
            progress=False,
            callbacks=[] if strikes is None else [strikes(simulation)],
        )
        return dict(found.state_dict), found.reports


PLACES = [(0, 0, "before"), (0, 1, "after"), (0, "behind"), (0, "gathered"), (1, 0, "before")]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
@pytest.mark.parametrize("twice", [False, True])
def test_a_successor_draws_what_the_dead_worker_would_have_drawn(
    strategy: str, twice: bool
) -> None:
    undisturbed, _ = run(Drawing(twice), 2, STRATEGIES[strategy])
    for victim, place in ((0, PLACES[2]), *((1, each) for each in PLACES)):
        script = Drawing(twice, dies_at=(victim, *place))
        found, _ = run(script, 2, STRATEGIES[strategy])
        assert DIED
        DIED.clear()
        assert same_bits(found, undisturbed), (victim, place)


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [1, 5])
def test_a_job_that_is_set_back_to_an_epochs_end_draws_and_reports_as_before(step: int) -> None:
    """Members of a round have all of the state: with each death all go back to the last snapshot."""
    strategy = LocalStrategy(sync_every=2, chunk_bytes=64)
    script = Drawing(among_batches=False, batches=8, epochs=4)
    undisturbed, reports = run(script, 2, strategy, 1)
    for victim in (0, 1):
        found, again = run(script, 2, strategy, 1, partial(Kills, victim=victim, step=step))
        assert same_bits(found, undisturbed)
        assert again == reports
