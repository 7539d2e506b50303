"""Evaluations in a process of their own while training goes on: whatever ends in the middle, each comes once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from steepest import (
    AllreduceStrategy,
    Callback,
    Checkpoints,
    DistributedSGD,
    EarlyStopping,
    EvaluationResult,
    FailureConfig,
    LocalStrategy,
    ParameterServerStrategy,
    StepResult,
)
from steepest.core.messages.message import worker_peer
from steepest.errors import ConfigurationError, ModelRaisedError, PeerLostError
from steepest.runtime.job_runtime import runtime
from tests.living import places_of
from tests.reference import samples
from tests.simulated_programs import TASK, quiet
from tests.simulation.run import Simulation, run_config
from tests.strikes import kill_this_process

STRATEGIES: list[Any] = [
    ParameterServerStrategy(num_servers=2, chunk_bytes=32),
    AllreduceStrategy(chunk_bytes=32),
    LocalStrategy(chunk_bytes=32),
]
HELD_OUT = samples(17)
DIED = "it was killed. connection error code 2."
STRIKES: list[Callable[[], object]] = []  # what happens when a sample of `Watched` is read
READERS: set[int] = set()  # processes that have read samples of `Watched`
SETTINGS: dict[str, Any] = {"progress": False, "evaluate_every": 5}


class Watched(Dataset[Any]):
    """The samples of `HELD_OUT`."""

    def __len__(self) -> int:
        return len(HELD_OUT[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        READERS.add(runtime().pid)
        if STRIKES:
            STRIKES.pop(0)()
        return HELD_OUT[0][index], HELD_OUT[1][index]


class Heard(Callback):
    """Notes evaluations; calls a function after a step."""

    def __init__(self, at: int = -1, what: Callable[[DistributedSGD], object] = id) -> None:
        self.steps: list[int] = []
        self._at, self._what = at, what

    def on_step(self, sgd: Any, result: StepResult) -> None:
        if result.step == self._at:
            self._at = -1
            self._what(sgd)

    def on_evaluation(self, sgd: Any, result: EvaluationResult) -> None:
        sgd.stats()  # workers are idle: anything may be called
        sgd.learning_rate  # noqa: B018
        self.steps.append(result.step)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    STRIKES.clear()
    READERS.clear()
    with quiet():
        yield


def trainer_of(strategy: Any = "ps", workers: int = 2, **failure: Any) -> DistributedSGD:
    config = run_config(failure=FailureConfig(**failure)) if failure else run_config()
    return DistributedSGD(TASK.creator(), workers, strategy=strategy, run_config=config)


def evaluations(strategy: Any = "ps", workers: int = 2) -> list[EvaluationResult]:
    """Those that workers make between the steps of a run without a disturbance."""
    with Simulation(1).running(), trainer_of(strategy, workers) as trainer:
        trainer.fit(steps=23, validation=HELD_OUT, **SETTINGS)
        return list(trainer.evaluations)


@pytest.fixture(scope="module")
def expected() -> list[EvaluationResult]:
    with quiet():
        return evaluations()


def same(result: EvaluationResult, other: EvaluationResult) -> bool:
    close = result.loss == pytest.approx(other.loss, rel=1e-12)
    return close and (result.step, result.epoch, result.samples) == (
        other.step,
        other.epoch,
        other.samples,
    )


def check(trainer: DistributedSGD, expected: list[EvaluationResult]) -> None:
    assert len(trainer.evaluations) == len(expected)
    assert all(map(same, trainer.evaluations, expected))
    rows = trainer.history.evaluations
    assert [row["step"] for row in rows] == [each.step for each in expected]


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_results_are_those_of_workers(strategy: Any, workers: int) -> None:
    """A process that is no worker finds what workers find between two steps, of the weights of those steps."""
    heard, expected = Heard(), evaluations(strategy, workers)
    with Simulation(1).running(), trainer_of(strategy, workers) as trainer:
        trainer.fit(steps=23, validation=Watched(), background=True, callbacks=[heard], **SETTINGS)
        others = {places_of(trainer)[worker_peer(i)].pid for i in range(workers)}
        assert len(READERS) == 1
        assert not READERS & others
        assert heard.steps == [5, 10, 15, 20]
        check(trainer, expected)


def test_at_the_end_of_each_epoch_with_an_early_stop() -> None:
    """`EarlyStopping` acts when the result is known: at the next evaluation."""
    with Simulation(2).running(), trainer_of() as trainer:  # 31 steps in an epoch
        stops = EarlyStopping(patience=1, min_delta=1e9)
        last = trainer.fit(
            epochs=9, validation=HELD_OUT, background=True, callbacks=[stops], progress=False
        )
        assert [result.epoch for result in trainer.evaluations] == [0, 1]
        assert last.step == 93


@pytest.mark.parametrize("deaths", [1, 3])
def test_the_death_of_the_process_is_made_good(
    deaths: int, expected: list[EvaluationResult]
) -> None:
    """Another process evaluates the same weights."""
    STRIKES.extend([kill_this_process] * deaths)
    with Simulation(1).running(), trainer_of(max_failures=3) as trainer:
        trainer.fit(steps=23, validation=Watched(), background=True, **SETTINGS)
        check(trainer, expected)
        assert len(READERS) == deaths + 1
        assert not trainer.history.events


def test_a_process_that_dies_again_and_again_ends_fit() -> None:
    STRIKES.extend([kill_this_process] * 9)
    with Simulation(1).running(), trainer_of(max_failures=1) as trainer:
        with pytest.raises(
            PeerLostError, match=r"after step 5 died .*max_failures=1\).*background=False"
        ):
            trainer.fit(steps=23, validation=Watched(), background=True, **SETTINGS)
        STRIKES.clear()
        trainer.fit(steps=2, progress=False)


def test_what_happens_to_workers_meanwhile_changes_nothing(
    expected: list[EvaluationResult],
) -> None:
    """A worker that dies, and another number of workers, while an evaluation is under way."""
    simulation = Simulation(1)
    with simulation.running(), trainer_of() as trainer:

        def kill(sgd: DistributedSGD) -> None:
            place = places_of(sgd)[worker_peer(1)]
            (victim,) = (p for p in simulation.world.living() if p.pid == place.pid)
            simulation.world.kill(victim, DIED)

        trainer.fit(
            steps=23, validation=HELD_OUT, background=True, callbacks=[Heard(6, kill)], **SETTINGS
        )
        check(trainer, expected)
        assert [row["event"] for row in trainer.history.events] == ["replaced"]
    with Simulation(1).running(), trainer_of() as trainer:
        grow = Heard(6, lambda sgd: sgd.resize(num_workers=3))
        trainer.fit(steps=23, validation=HELD_OUT, background=True, callbacks=[grow], **SETTINGS)
        assert [row["step"] for row in trainer.history.evaluations] == [5, 10, 15, 20]
        shrink = Heard(31, lambda sgd: sgd.resize(num_workers=1))
        trainer.fit(steps=20, validation=HELD_OUT, background=True, callbacks=[shrink], **SETTINGS)
        found = [(each.step, each.samples) for each in trainer.evaluations]
        assert found == [(at, 17) for at in range(5, 45, 5)]


def broken() -> None:
    raise ValueError("no such sample")


def test_an_error_of_the_users_is_shown_as_theirs() -> None:
    STRIKES.append(broken)
    with Simulation(1).running(), trainer_of() as trainer:
        with pytest.raises(
            ModelRaisedError, match="could not evaluate: ValueError: no such sample"
        ) as raised:
            trainer.fit(steps=23, validation=Watched(), background=True, **SETTINGS)
        assert "in broken" in str(raised.value.__cause__)
        assert not trainer.evaluations
        trainer.fit(steps=23, validation=Watched(), background=True, **SETTINGS)
        assert trainer.evaluations


def interrupt(sgd: DistributedSGD) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_fit_leaves_its_evaluation_to_the_next_one(
    expected: list[EvaluationResult],
) -> None:
    """Ctrl-C and `stop` wait for no evaluation; it is not lost, and its step is its own."""
    for end in (interrupt, lambda sgd: sgd.stop()):
        with Simulation(1).running(), trainer_of() as trainer:
            heard = Heard(6, end)
            try:
                trainer.fit(
                    steps=23, validation=HELD_OUT, background=True, callbacks=[heard], **SETTINGS
                )
            except KeyboardInterrupt:
                assert end is interrupt
            left = 23 - trainer.stats().step
            trainer.fit(steps=left, validation=HELD_OUT, background=True, **SETTINGS)
            check(trainer, expected)


def test_a_restored_state_has_no_evaluation_of_another_one(
    tmp_path: Any, expected: list[EvaluationResult]
) -> None:
    with Simulation(1).running(), trainer_of() as trainer:
        trainer.fit(steps=3, progress=False)
        trainer.save(tmp_path / "kept")
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(
                steps=20,
                validation=HELD_OUT,
                background=True,
                callbacks=[Heard(5, interrupt)],
                **SETTINGS,
            )
        trainer.restore(tmp_path / "kept")
        trainer.fit(steps=20, validation=HELD_OUT, background=True, **SETTINGS)
        check(trainer, expected)


def test_the_end_of_the_job_ends_it() -> None:
    simulation = Simulation(1)
    with simulation.running():
        with trainer_of() as trainer, pytest.raises(KeyboardInterrupt):
            trainer.fit(
                steps=20,
                validation=HELD_OUT,
                background=True,
                callbacks=[Heard(6, interrupt)],
                **SETTINGS,
            )
        assert not simulation.leftovers()


def test_what_it_cannot_do_is_refused(tmp_path: Any) -> None:
    best = Checkpoints(tmp_path, best="loss")
    with Simulation(1).running():
        with trainer_of() as trainer:
            with pytest.raises(ConfigurationError, match="background=True without validation="):
                trainer.fit(steps=1, background=True)
            with pytest.raises(ConfigurationError, match="background"):
                trainer.fit(steps=1, background="yes", validation=HELD_OUT)  # type: ignore[arg-type]
        with (
            DistributedSGD(TASK.creator(), 1, run_config=run_config(), checkpoints=best) as trainer,
            pytest.raises(ConfigurationError, match=r"best='loss'\): leave background=True out"),
        ):
            trainer.fit(steps=1, background=True, validation=HELD_OUT, evaluate_every=1)


@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_at_any_wait_loses_no_evaluation(
    expected: list[EvaluationResult], *, late: bool
) -> None:
    """At waits all over a `fit`, those for the evaluation and for its snapshot among them."""
    with Simulation(1).running(), trainer_of() as trainer:
        trainer.fit(steps=2, progress=False)
    at, over, whole = 3, False, 0
    ends: list[int] = []
    while not over:
        simulation = Simulation(1)
        with simulation.running(), trainer_of() as trainer:
            interruption = simulation.interrupt(at, late=late)
            left = 23
            while left:
                try:
                    trainer.fit(steps=left, validation=HELD_OUT, background=True, **SETTINGS)
                except KeyboardInterrupt:
                    assert interruption.struck
                    ends.append(len(trainer.history.steps))
                left = 23 - len(trainer.history.steps)
            interruption.forget()
            trainer.fit(steps=1, validation=HELD_OUT, background=True, **SETTINGS)
            over = not interruption.struck
            # what is due where a `fit` ends is no evaluation of the next one
            made = {each.step for each in trainer.evaluations}
            assert {each.step for each in expected} - made <= {*ends}
            check(trainer, [each for each in expected if each.step in made])
            whole += len(made) == len(expected)
        at += 11
    assert whole > 1


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_on_processes_of_this_machine() -> None:
    """Results are those of workers, also after the death of the process, which is no worker's."""
    with DistributedSGD(TASK.creator(), 2) as trainer:
        trainer.fit(steps=12, validation=HELD_OUT, background=True, **SETTINGS)
        found = list(trainer.evaluations)
        process = trainer._background._process
        runtime().end(process)
        trainer.fit(steps=8, validation=HELD_OUT, background=True, **SETTINGS)
        again = list(trainer.evaluations)
        assert trainer._background._process is not process
    assert [each.step for each in again] == [5, 10, 15, 20]
    assert again[:2] == found
    with Simulation(1).running(), trainer_of() as trainer:
        trainer.fit(steps=20, validation=HELD_OUT, **SETTINGS)
        assert all(map(same, trainer.evaluations, again))
