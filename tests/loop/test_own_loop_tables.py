"""Models with embedding tables in loops of users' own: as in one process, whose rows are there."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("numba", reason="embedding tables need it")

import steepest
from steepest import FailureConfig, LocalStrategy, ParameterServerStrategy
from steepest.errors import ConfigurationError, ModelRaisedError
from steepest.tables.rows.row_optimizers import SGD, Adagrad, Adam
from tests.own_loop_runs import STRATEGIES, InterruptedRunError, Interrupts, run, without
from tests.own_loops import BATCH, Parts, Script, Whole
from tests.reference import difference, same_bits, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config
from tests.table_tasks import ROWS, clicks, with_tables


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


DATA = clicks(24)
FOUND: dict[int, list[torch.Tensor]] = {}


def outputs(model: nn.Module) -> torch.Tensor:
    """What a model says of all data, which depends on all rows."""
    with torch.no_grad():
        found: torch.Tensor = model(*DATA[:-1])
    return found


def _loop(parts: Parts, epochs: int, step: Any) -> None:
    found = []
    for _ in steepest.epochs(epochs):
        for number, batch in enumerate(parts.loader):
            pause(1e-3)
            step(parts, number, *batch)
        found.append(outputs(parts.model))
    FOUND[steepest.rank()] = found


def usual(parts: Parts, number: int, *batch: torch.Tensor) -> None:
    parts.optimizer.zero_grad()
    nn.functional.mse_loss(parts.model(*batch[:-1]), batch[-1]).backward()
    parts.optimizer.step()


def adding_up(parts: Parts, number: int, *batch: torch.Tensor) -> None:
    """A step after two batches."""
    (nn.functional.mse_loss(parts.model(*batch[:-1]), batch[-1]) / 2).backward()
    if number % 2:
        parts.optimizer.step()
        parts.model.zero_grad()


def in_vain(parts: Parts, number: int, *batch: torch.Tensor) -> None:
    """A backward pass whose gradients are cleared, one that is half of a sum, and a norm that is clipped."""
    parts.model(*batch[:-1]).square().mean().backward()
    parts.optimizer.zero_grad()
    for factor in (0.3, 0.7):
        (factor * nn.functional.mse_loss(parts.model(*batch[:-1]), batch[-1])).backward()
    parts.optimizer.step()


def looking(parts: Parts, number: int, *batch: torch.Tensor) -> None:
    """Rows are looked at after each step, too."""
    usual(parts, number, *batch)
    outputs(parts.model)


def unevenly(parts: Parts, number: int, *batch: torch.Tensor) -> None:
    """A step after two batches, of which the last has fewer samples, and behind the last."""
    (nn.functional.mse_loss(parts.model(*batch[:-1]), batch[-1]) / 2).backward()
    if number % 2 or number + 1 == len(parts.loader):
        parts.optimizer.step()
        parts.optimizer.zero_grad()


def by_tokens(parts: Parts, number: int, *batch: torch.Tensor) -> None:
    """A step after two batches that say what they weigh."""
    tokens = 1 + (batch[-1][:, :1] > 0).double()
    steepest.weight(tokens.sum().item())
    errors = (parts.model(*batch[:-1]) - batch[-1]).square() * tokens
    (errors.sum() / tokens.sum()).backward()
    if number % 2 or number + 1 == len(parts.loader):
        parts.optimizer.step()
        parts.optimizer.zero_grad()


def left_out(parts: Parts, number: int, *batch: torch.Tensor) -> None:
    """No step for each second batch, whose rows are looked up."""
    loss = nn.functional.mse_loss(parts.model(*batch[:-1]), batch[-1])
    if number % 2 == 0:
        parts.optimizer.zero_grad()
        loss.backward()
        parts.optimizer.step()


def clipped(parts: Parts, number: int, *batch: torch.Tensor) -> None:
    """The norm of the whole gradient is clipped, that of rows too."""
    parts.optimizer.zero_grad()
    nn.functional.mse_loss(parts.model(*batch[:-1]), batch[-1]).backward()
    steepest.clip_grad_norm_(parts.model.parameters(), 0.2)
    parts.optimizer.step()


def masked(parts: Parts, number: int, *batch: torch.Tensor) -> None:
    """Some samples teach nothing; a worker may have none but these."""
    parts.optimizer.zero_grad()
    wanted = batch[-1][:, 0] > 0.3
    if wanted.any():
        errors = (parts.model(*batch[:-1]) - batch[-1]).square().mean(1)
        (errors * wanted).mean().backward()
    parts.optimizer.step()


def summed(parts: Parts, number: int, *batch: torch.Tensor) -> None:
    """Losses add up samples."""
    parts.optimizer.zero_grad()
    nn.functional.mse_loss(parts.model(*batch[:-1]), batch[-1], reduction="sum").backward()
    parts.optimizer.step()


@dataclass(frozen=True)
class Tabled(Script):
    """A script with tables."""

    step: Any = usual

    def __call__(self) -> None:
        """The script as steepest runs it, with few shards: each takes address space."""
        given: Any = DataLoader(TensorDataset(*self.data), batch_size=BATCH, shuffle=True)
        parts = self._parts(given)
        model, optimizer, loader = steepest.prepare(
            parts.model, parts.optimizer, given, table_shards=2, reduction=self.reduction
        )
        self.loop(Parts(model, optimizer, loader), self.epochs)

    def _parts(self, loader: Any) -> Parts:
        parts = super()._parts(loader)
        if isinstance(loader, Whole):
            steepest.prepare(
                parts.model, parts.optimizer
            )  # outside of a run it has rows of its own
        return parts


def tabled(step: Any, rows: Any, held: bool = False, **settings: Any) -> Tabled:
    about = {"optimizer": rows} | ({"num_embeddings": ROWS, "replicate": True} if held else {})
    return Tabled(
        lambda parts, epochs: _loop(parts, epochs, step),
        lambda: with_tables(**about),
        **({"optimizer": sgd(momentum=0.9), "data": DATA} | settings),
    )


SCRIPTS = {
    "usual": tabled(usual, Adagrad(lr=0.3)),
    "added up": tabled(adding_up, Adagrad(lr=0.1)),
    "in vain": tabled(in_vain, Adagrad(lr=0.3)),
    "looking": tabled(looking, Adam(lr=0.1)),
    "held": tabled(usual, Adagrad(lr=0.3), held=True),
    "unevenly": tabled(unevenly, Adam(lr=0.1), data=clicks(19)),
    "unevenly, held": tabled(unevenly, Adam(lr=0.1), held=True, data=clicks(19)),
    "tokens": tabled(by_tokens, Adagrad(lr=0.3), data=clicks(19)),
    "left out": tabled(left_out, Adam(lr=0.1), data=clicks(13)),
    "clipped": tabled(clipped, SGD(lr=0.3), data=clicks(13)),
    "clipped, held": tabled(clipped, SGD(lr=0.3), held=True, data=clicks(13)),
    "masked": tabled(masked, Adagrad(lr=0.3), data=clicks(13)),
    "sums": tabled(summed, SGD(lr=0.02), optimizer=sgd(lr=0.02), data=clicks(13), reduction="sum"),
    "held, in vain": tabled(in_vain, Adam(lr=0.1), held=True),
}


def compare(script: Script, found: Any, workers: int) -> None:
    seen = dict(FOUND)
    FOUND.clear()
    dense = {name: own for name, own in found.weights.items() if "rows_of" not in name}
    assert difference(dense, script.alone(workers)) < 1e-12
    (expected,) = FOUND.values()
    assert sorted(seen) == list(range(workers))
    for each in seen.values():
        assert len(each) == len(expected)
        assert all(map(lambda a, b: torch.allclose(a, b, atol=1e-12), each, expected))


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "groups", "sharded groups"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loop_equals_one_process(name: str, workers: int, strategy: str) -> None:
    FOUND.clear()
    compare(SCRIPTS[name], run(SCRIPTS[name], workers, STRATEGIES[strategy]), workers)


def test_rows_are_trained() -> None:
    """The test above can fail."""
    FOUND.clear()
    SCRIPTS["usual"].alone(2)
    first, *_, last = FOUND[0]
    assert (first - last).abs().max() > 1e-3


REPLICATED = ParameterServerStrategy(num_servers=2, replication=2)
GROUPS = [STRATEGIES["groups"], STRATEGIES["sharded groups"]]


def check_death(name: str, seed: int, strategy: Any = REPLICATED) -> None:
    """Check that a process that dies changes nothing."""
    FOUND.clear()
    simulation, draw = Simulation(seed), random.Random(seed)
    struck: list[Any] = []

    def kill() -> None:
        if living := simulation.living():
            struck.append(draw.choice(living))
            simulation.world.kill(struck[0], "it was killed. connection error code 2.")

    class Death(steepest.Callback):
        """Kills a process at some moment of the training."""

        def on_fit_begin(self, sgd: Any, steps: int) -> None:
            if not struck:
                simulation.at_event(draw.randrange(1, 200), kill)

        def on_fit_end(self, sgd: Any) -> None:
            simulation.forget_faults()

    failure = FailureConfig(patience=math.inf, snapshot_every=3)
    with simulation.running():
        found = steepest.run(
            SCRIPTS[name],
            num_workers=2,
            strategy=strategy,
            run_config=run_config(failure=failure),
            callbacks=[Death()],
            progress=False,
        )
        weights = dict(found.state_dict)
    seen = {rank: each[-1] for rank, each in FOUND.items()}
    FOUND.clear()
    assert difference(weights, SCRIPTS[name].alone(2)) < 1e-12, struck
    for each in seen.values():
        assert torch.allclose(each, FOUND[0][-1], atol=1e-12), struck


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["usual", "looking"])
@pytest.mark.parametrize("seed", range(2))
def test_a_process_that_dies_changes_nothing(name: str, seed: int) -> None:
    check_death(name, seed)


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("strategy", [REPLICATED, *GROUPS], ids=["ps", "groups", "sharded"])
@pytest.mark.parametrize("name", ["usual", "looking"])
def test_a_process_that_dies_at_many_moments_changes_nothing(name: str, strategy: Any) -> None:
    for seed in range(2, 4):
        check_death(name, seed, strategy)
        gc.collect()  # the address space of tables


@pytest.mark.full
def test_a_run_that_is_started_again_goes_on_and_its_rows_can_be_read(tmp_path: Path) -> None:
    rows: list[Any] = []

    class Reads(steepest.Callback):
        """Reads the rows of a table at the end."""

        def on_fit_end(self, sgd: Any) -> None:
            rows.append(sgd.export_table("users"))

    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    script = SCRIPTS["usual"]
    expected = run(script, 2, callbacks=[Reads()])
    with pytest.raises(InterruptedRunError):
        run(script, 2, checkpoints=checkpoints, callbacks=[Interrupts(5)])
    again = run(script, 2, checkpoints=checkpoints, callbacks=[Reads()])
    assert same_bits(again.weights, expected.weights)
    first, last = rows[0], rows[-1]
    assert sorted(first.ids.tolist()) == sorted(set(DATA[0].tolist()))
    assert (first.ids == last.ids).all()
    assert (first.values == last.values).all()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "strategy",
    [
        "async",
        LocalStrategy(sync_every=2),
        LocalStrategy(sync_every=2, quorum=1, outer_lr=0.5, num_servers=1),
        LocalStrategy(sync_every=2, pace="speed", num_servers=1),
    ],
)
def test_other_strategies_train_rows(strategy: Any) -> None:
    FOUND.clear()
    script = replace(SCRIPTS["usual"], epochs=6)
    found = run(script, 2, strategy)
    assert sum(row["samples"] for row in found.steps) == 6 * len(DATA[0])
    first, *_, last = FOUND[0]
    assert (last - DATA[-1]).square().mean() < (first - DATA[-1]).square().mean()


def test_rows_that_would_move_without_a_gradient_are_warned_of() -> None:
    script = tabled(masked, Adam(lr=0.1), data=clicks(13))
    with pytest.warns(UserWarning, match="'users', whose optimizer moves the rows of a batch also"):
        run(script, 3)


def frozen_beside(parts: Parts, epochs: int) -> None:
    """Rows alone are trained, by sums of gradients of two batches."""
    for parameter in parts.model.parameters():
        parameter.requires_grad_(requires_grad=False)
    _loop(parts, epochs, unevenly)


def test_a_sum_of_gradients_of_rows_alone_is_whole_after_a_death() -> None:
    script = replace(SCRIPTS["unevenly"], loop=frozen_beside)
    FOUND.clear()
    compare(script, without(script, 3, 1, 1), 3)


def scaling(parts: Parts, epochs: int) -> None:
    steepest.register(scaler=torch.amp.GradScaler("cpu"))


def test_a_scaler_is_refused() -> None:
    with pytest.raises((ConfigurationError, ModelRaisedError), match="a GradScaler with embedding"):
        run(replace(SCRIPTS["usual"], loop=scaling), 2)
