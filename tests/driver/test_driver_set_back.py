"""When the only holder of something dies, a job is set back; of what calls have returned nothing is taken back."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from steepest import (
    DistributedSGD,
    FailureConfig,
    LocalStrategy,
    StepResult,
)
from steepest.errors import CheckpointError, ConfigurationError
from steepest.testing.log_replay import replay
from tests.reference import Weights, difference, same_bits
from tests.simulated_programs import quiet
from tests.struck_jobs import (
    GLOBAL_BATCH,
    KINDS,
    SAMPLES,
    TOLERANCE,
    Alone,
    Heard,
    StruckJob,
    running,
)
from tests.whole_checkpoints import all_of

STEPS = 20
SNAPSHOTS = FailureConfig(spares=0, patience=math.inf, snapshot_every=7, max_failures=20)
HOLDERS = {"ps": "server 1", "allreduce": "worker 1", "local": "worker 1", "async": "server 1"}
LOGGED = tuple(HOLDERS)  # of which logs are replayed to the bit, which those of groups are not
HOLDERS["sharded groups"] = "worker 1"
POINTS = tuple(column[:30] for column in KINDS["ps"].task.data)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def lose(job: StruckJob, name: str, *, seconds: float = 20.0) -> None:
    """End the process that alone holds something, and let the job be put together."""
    job.kill(HOLDERS[name])
    job.simulation.settle(seconds)


def evaluated(job: StruckJob) -> None:
    found = job.trainer.evaluate(POINTS)
    assert found.step == job.alone.step
    expected = torch.nn.Linear(3, 2).double()
    weights = job.alone.weights()
    expected.load_state_dict(weights)
    loss = torch.nn.functional.mse_loss(expected(POINTS[0]), POINTS[1])
    if job.kind.exact:
        assert found.loss == pytest.approx(float(loss.detach()), rel=1e-9)


def saved(job: StruckJob) -> None:
    job.trainer.save(job.folder / "after")
    found = all_of(job.folder / "after")
    assert found.about["step"] == job.alone.step
    if job.kind.exact:
        weights = {name: torch.as_tensor(each) for name, each in found.weights.items()}
        assert difference(weights, job.alone.weights()) < TOLERANCE


def read(job: StruckJob) -> None:
    weights = job.trainer.weights()
    assert job.trainer.stats().step == job.alone.step
    if job.kind.exact:
        assert difference(weights, job.alone.weights()) < TOLERANCE


def stated(job: StruckJob) -> None:
    state = job.trainer.state_dict()
    if job.kind.exact:
        assert difference(state, job.alone.weights()) < TOLERANCE


def stepped(job: StruckJob) -> None:
    assert job.trainer.step().step == job.alone.step + 1
    job.alone = job.alone.at(job.alone.step + 1)


def fitted(job: StruckJob) -> None:
    heard = Heard()
    begins = job.alone.step
    job.trainer.fit(steps=5, callbacks=[heard], progress=False)
    # those from before are no steps of this call; its own may be made again
    assert list(dict.fromkeys(heard.steps)) == list(range(begins + 1, begins + 6))
    job.alone = job.alone.at(begins + 5)


class Paused(Heard):
    """Notes the steps for which workers pause, too."""

    def __init__(self) -> None:
        super().__init__()
        self.paused: list[int] = []

    def after_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.paused.append(result.step)
        assert trainer.stats().step == result.step


def paused(job: StruckJob) -> None:
    heard = Paused()
    begins = job.alone.step
    job.trainer.fit(steps=5, callbacks=[heard], progress=False)
    assert heard.steps == heard.paused == list(range(begins + 1, begins + 6))
    job.alone = job.alone.at(begins + 5)


def resized(job: StruckJob) -> None:
    job.trainer.resize(job.workers + 1)
    assert job.trainer.num_workers == job.workers + 1


CALLS: dict[str, Callable[[StruckJob], None]] = {
    "evaluate": evaluated,
    "save": saved,
    "weights": read,
    "state_dict": stated,
    "step": stepped,
    "fit": fitted,
    "fit with pauses": paused,
    "resize": resized,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("moment", ["before", "when it begins", "during"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", HOLDERS)
def test_what_was_returned_stays(name: str, call: str, moment: str, tmp_path: Path) -> None:
    """Steps that a death between two calls has undone are made again before the next call answers."""
    with running(KINDS[name], 2, tmp_path, failure=SNAPSHOTS) as job:
        job.trainer.fit(steps=STEPS, progress=False)
        job.alone = job.alone.at(STEPS)
        if moment == "before":
            lose(job, name)
        elif moment == "when it begins":
            job.kill(HOLDERS[name])
        else:
            job.simulation.at_event(5, lambda: job.kill(HOLDERS[name]))
        CALLS[call](job)
        job.expect(job.alone)
        rows = [row["step"] for row in job.trainer.history.steps]
        assert rows == list(range(1, job.alone.step + 1))
        job.works()
        job.end()


def test_callbacks_hear_of_no_step_of_an_earlier_call(tmp_path: Path) -> None:
    """The death comes amid a `fit`, whose processes take steps of an earlier call again."""
    with running(KINDS["ps"], 2, tmp_path, failure=SNAPSHOTS) as job:
        job.trainer.fit(steps=STEPS, progress=False)
        job.alone = job.alone.at(STEPS)
        for call in (fitted, paused):
            job.simulation.at_event(5, lambda: job.kill(HOLDERS["ps"]))
            call(job)
        job.expect(job.alone)
        job.end()


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ps", "allreduce", "sharded groups"])
def test_a_program_that_ends_with_save_saves_its_last_step(name: str, tmp_path: Path) -> None:
    """The process dies at each of the events from the end of `fit` on."""
    for event in range(1, 40, 6):
        folder = tmp_path / str(event)
        with running(KINDS[name], 2, folder, failure=SNAPSHOTS) as job:
            job.trainer.fit(steps=STEPS, progress=False)
            job.simulation.at_event(event, lambda job=job: job.kill(HOLDERS[name]))
            job.trainer.save(folder / "last")
            found = all_of(folder / "last")
            assert found.about["step"] == STEPS
            weights = {key: torch.as_tensor(each) for key, each in found.weights.items()}
            expected = Alone(KINDS[name].task).at(STEPS).weights()
            assert difference(weights, expected) < TOLERANCE


# -- another strategy ------------------------------------------------------------------------------

ROUND = 4


def change_strategy(
    name: str, dies: str | None, folder: Path
) -> tuple[Weights, list[tuple[int, int]]]:
    """Train under a strategy and then in rounds; return weights, and the samples of each step."""
    with running(KINDS[name], 2, folder, failure=SNAPSHOTS) as job:
        job.trainer.fit(steps=STEPS, progress=False)
        if dies == "before":
            lose(job, name)
        job.trainer.set_strategy(LocalStrategy(sync_every=ROUND, chunk_bytes=32))
        if dies == "after":
            job.simulation.at_event(1, lambda: job.kill("worker 1"))
        job.trainer.fit(steps=10, progress=False)
        rows = [(row["step"], row["samples"]) for row in job.trainer.history.steps]
        return job.trainer.weights(), rows


@pytest.mark.few(1)
@pytest.mark.parametrize("dies", ["before", "after"])
@pytest.mark.parametrize("name", ["ps", "allreduce", "sharded groups"])
def test_undone_steps_are_made_again_as_they_were(name: str, dies: str, tmp_path: Path) -> None:
    """Under the strategy that they were made under, with as many samples, whatever was chosen since."""
    weights, rows = change_strategy(name, dies, tmp_path / "struck")
    expected, undisturbed = change_strategy(name, None, tmp_path / "undisturbed")
    assert rows == undisturbed
    assert [count for _, count in rows[: STEPS + 1]] == [GLOBAL_BATCH] * STEPS + [
        GLOBAL_BATCH * ROUND
    ]
    assert difference(weights, expected) < TOLERANCE


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ps", "allreduce", "sharded groups"])
def test_undone_steps_have_the_learning_rates_that_they_had(name: str, tmp_path: Path) -> None:
    found = []
    for dies in (True, False):
        with running(KINDS[name], 2, tmp_path / str(dies), failure=SNAPSHOTS) as job:
            job.trainer.fit(steps=STEPS - 3, progress=False)
            job.trainer.set_learning_rate(0.001)
            job.trainer.fit(steps=3, progress=False)
            job.trainer.set_learning_rate(0.02)
            if dies:
                lose(job, name)
            job.trainer.fit(steps=5, progress=False)
            rates = [row["learning_rate"] for row in job.trainer.history.steps]
            found.append((job.trainer.weights(), rates))
    (weights, rates), (expected, undisturbed) = found
    assert rates == undisturbed
    assert difference(weights, expected) < TOLERANCE


# -- the log ---------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("moments", [(30,), (10, 45), (0, 1), (59, 60)], ids=str)
@pytest.mark.parametrize("name", LOGGED)
def test_the_log_covers_the_whole_run_after_a_set_back(
    name: str, moments: tuple[int, ...], tmp_path: Path
) -> None:
    """It begins with the first step, has each sample of an epoch once, and gives the weights."""
    kind = KINDS[name]
    with running(kind, 2, tmp_path, failure=SNAPSHOTS) as job:
        if 0 in moments:
            job.kill(HOLDERS[name])
        job.trainer.step()
        struck = [(moment, lambda: job.kill(HOLDERS[name])) for moment in moments if moment]
        job.trainer.fit(steps=59, callbacks=[Heard(*struck)], progress=False)
        job.alone = job.alone.at(60)
        job.expect(job.alone)
        log, weights = job.trainer.log(), job.trainer.weights()
        job.replayed = False
    assert log.parts[0].start == 0
    for part, following in pairwise((*log.parts, None)):
        assert part is not None
        end = part.start + len(part.commits)
        assert [commit.version for commit in part.commits] == list(range(part.start + 1, end + 1))
        # under "async" a part may end amid a step, with whose number the next one begins
        assert following is None or end - following.start in ((0, 1) if name == "async" else (0,))
    epochs: dict[int, Counter[int]] = {}
    for epoch, begin, end in log.samples():
        epochs.setdefault(epoch, Counter()).update(range(begin, end))
    whole = list(epochs)[:-1]
    assert all(max(seen.values()) == 1 for seen in epochs.values())
    assert all(len(epochs[epoch]) == SAMPLES for epoch in whole)
    if name != "local":  # whose workers have a state of their own, which the log does not tell
        assert same_bits(replay(log, kind.task.creator()), weights)


# -- what is told ----------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("apart", [0.0, 0.005, 0.2])
@pytest.mark.parametrize("name", ["ps", "copies", "allreduce", "groups", "async"])
def test_each_of_several_that_die_together_is_counted_and_named(
    name: str, apart: float, tmp_path: Path
) -> None:
    victims = (1, 2, 3)
    with running(KINDS[name], 4, tmp_path, cpus=(4, 8)) as job:

        def strike() -> None:
            for number, victim in enumerate(victims):
                job.simulation.at_time(
                    apart * number, lambda victim=victim: job.kill(f"worker {victim}")
                )

        job.trainer.fit(steps=60, callbacks=[Heard((10, strike))], progress=False)
        job.simulation.settle(30.0)
        job.expect(job.alone.at(60))
        stats = job.trainer.stats()
        assert stats.num_workers == 4
        assert stats.replaced == len(victims)
        told = "\n".join(event.line for event in stats.events)
        assert {int(each) for each in re.findall(r"worker (\d)", told)} >= set(victims), told
        job.works()
        job.end()


# -- snapshots -------------------------------------------------------------------------------------


def refused_weights(trainer: DistributedSGD, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="typo"):
        trainer.set_weights({"typo": torch.zeros(2)})


def refused_state(trainer: DistributedSGD, folder: Path) -> None:
    with pytest.raises(ConfigurationError):
        trainer.load_state_dict({"typo": torch.zeros(2)})


def refused_checkpoint(trainer: DistributedSGD, folder: Path) -> None:
    with pytest.raises(CheckpointError):
        trainer.restore(folder / "nowhere")


def refused_strategy(trainer: DistributedSGD, folder: Path) -> None:
    with pytest.raises(ConfigurationError):
        trainer.set_strategy("typo")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "refused", [refused_weights, refused_state, refused_checkpoint, refused_strategy]
)
@pytest.mark.parametrize("name", HOLDERS)
def test_a_call_that_is_refused_keeps_the_snapshot(
    name: str, refused: Callable[[DistributedSGD, Path], None], tmp_path: Path
) -> None:
    """A death afterwards is no end of the job, and costs no step that was returned."""
    with running(KINDS[name], 2, tmp_path) as job:
        job.begin()
        refused(job.trainer, tmp_path)
        lose(job, name)
        assert job.trainer.step().step == job.alone.step + 1
        job.expect(job.alone.at(job.alone.step + 1))
        job.end()


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["set_weights", "load_state_dict", "restore"])
@pytest.mark.parametrize("name", ["ps", "allreduce", "sharded groups", "local"])
def test_a_death_at_once_after_a_state_was_set_keeps_that_state(
    name: str, way: str, tmp_path: Path
) -> None:
    """Also where steps were taken since: they are made again from it."""
    for steps in (0, 3):
        with running(KINDS[name], 2, tmp_path / str(steps), failure=SNAPSHOTS) as job:
            job.begin()
            other = {key: torch.full_like(w, 0.5) for key, w in job.alone.weights().items()}
            if way == "restore":
                job.trainer.restore(job.saved)
                job.alone = job.saved_alone
                job.begun = job.saved
            else:
                getattr(job.trainer, way)(other)
                job.alone = job.alone.setting(other)
                job.replayed = False
            if steps:
                job.trainer.fit(steps=steps, progress=False)
                job.alone = job.alone.at(job.alone.step + steps)
            job.kill(HOLDERS[name])
            job.expect(job.alone)
            assert job.trainer.step().step == job.alone.step + 1
            job.expect(job.alone.at(job.alone.step + 1))
            job.end()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "async"])
def test_the_log_of_a_job_that_was_set_back_begins_where_weights_were_set(
    strategy: str, tmp_path: Path
) -> None:
    """All servers die, of whose weights the driver has a copy; those before the copy are in the log too."""
    failure = FailureConfig(max_failures=9, spares=0, snapshot_every=1, patience=math.inf)
    with running(KINDS[strategy], 2, tmp_path, failure=failure) as job:
        trainer = job.trainer
        trainer.fit(steps=4, progress=False)
        trainer.set_weights(trainer.weights())
        begins = trainer.stats().version
        job.replayed = False  # the log begins with weights that it does not have
        trainer.fit(steps=6, progress=False)
        job.kill("server 0", "server 1")
        trainer.fit(steps=2, progress=False)
        versions = [c.version for part in trainer.log().parts for c in part.commits]
        assert versions == [*range(begins + 1, trainer.stats().version + 1)]
        job.end()
