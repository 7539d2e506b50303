"""A loop of a user's own on many workers equals the same loop in one process on the whole batches."""

from __future__ import annotations

import math
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import steepest
from steepest import DeadlineConfig, ParameterServerStrategy
from steepest.cli.main import main
from steepest.core.data.sampler import SamplePlan
from steepest.errors import (
    ConfigurationError,
    DeadlineError,
    ModelError,
    ModelRaisedError,
    RemoteTraceback,
    raised_by_user,
)
from steepest.loop.script import UserScript
from steepest.loop.user_loop import current
from steepest.observe.history_file import read_rows
from steepest.observe.page.run_view import RunView
from steepest.runtime.calls import raise_unsendable
from steepest.testing.log_replay import replay
from tests.logged_runs import Memory
from tests.own_loop_runs import InterruptedRunError, Interrupts, run
from tests.own_loops import (
    ALIKE,
    BATCH,
    Parts,
    Script,
    adding_up,
    adversarial,
    alone,
    by_both,
    clamped,
    clipped_apart,
    meeting,
    of_some_samples,
    plain,
    rollout,
    sharpness_aware,
    without_loader,
)
from tests.reference import Task, difference, perceptron, same_bits, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


SCHEDULED = Script(
    plain,
    optimizer=sgd(momentum=0.9),
    schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
)


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "simple"])
def test_a_loop_with_a_scheduler_equals_one_process(strategy: str, workers: int) -> None:
    found = run(SCHEDULED, workers, strategy)
    assert difference(found.weights, SCHEDULED.alone(workers)) < 1e-12
    rates = [row["learning_rate"][0] for row in found.steps]
    assert rates == pytest.approx([0.1 * 0.9**step for step in range(len(rates))])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ALIKE)
def test_what_loops_do_equals_one_process(name: str) -> None:
    script = ALIKE[name]
    assert difference(run(script, 2).weights, script.alone(2)) < 1e-12


def test_a_sum_is_told_as_its_mean() -> None:
    """The history has the loss by sample, on however many workers."""
    script = ALIKE["sums"]
    torch.manual_seed(0)
    model = script.model()
    one, two = (
        run(replace(script, epochs=1), n, global_batch_size=4).steps[0]["loss"] for n in (1, 2)
    )
    x, y = (column[SamplePlan(13, 4, 0).share(0, 0, 1)] for column in script.data)
    assert one == pytest.approx(nn.functional.mse_loss(model(x), y).item() * 2)
    assert two == pytest.approx(one)


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum over samples, by hand, of their mean squares."""
    return (model(x) - y).square().mean(1).sum()


def by_itself(parts: Parts, epochs: int, loss: Any = squares) -> None:
    """Torch's function of backward passes, in place of the loss's."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            torch.autograd.backward([loss(parts.model, x, y)])
            parts.optimizer.step()


@pytest.mark.parametrize(
    ("workers", "settings", "told"),
    [
        (1, {}, False),
        (2, {}, True),
        (3, {}, True),
        (2, {"strategy": "async"}, False),
        (2, {"strategy": "local"}, False),
    ],
)
def test_a_sum_by_hand_is_told_once_where_it_is_taken_for_a_mean(
    workers: int, settings: dict[str, Any], told: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(Script(by_itself), workers, **settings)
    texts = [each for each in caught if "adds up the samples" in str(each.message)]
    assert len(texts) == told
    for each in texts:
        assert "(sum())" in str(each.message)
        assert "steepest.prepare(..., reduction='sum')" in str(each.message)
        assert each.filename == __file__


def sample_by_sample(parts: Parts, epochs: int, divided_by: int | None = None) -> None:
    """A backward pass for each sample, of a part of its loss."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            for each, right in zip(x, y, strict=True):
                loss = nn.functional.mse_loss(parts.model(each), right)
                (loss / (divided_by or len(x))).backward()
            parts.optimizer.step()


@pytest.mark.parametrize(("divided_by", "told"), [(None, False), (8, True), (4, False)])
def test_losses_of_samples_divided_by_another_number_are_told(
    divided_by: int | None, told: bool
) -> None:
    script = Script(partial(sample_by_sample, divided_by=divided_by), data=samples(16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(script, 2, global_batch_size=8)
    texts = [str(each.message) for each in caught if "for each of the" in str(each.message)]
    assert bool(texts) == told
    assert all("4 samples of a batch, with losses divided by 8" in each for each in texts)


def test_a_sum_by_hand_that_is_said_to_be_one_equals_one_process() -> None:
    script = Script(by_itself, optimizer=sgd(lr=0.01), reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = run(script, 2)
    assert difference(found.weights, script.alone(2)) < 1e-12
    assert all(math.isfinite(step["loss"]) for step in found.steps)


@pytest.mark.parametrize(
    ("workers", "strategy"), [(1, "ps"), (2, "ps"), (3, "allreduce"), (2, "simple")]
)
def test_a_batch_without_a_gradient_counts_as_zero(workers: int, strategy: str) -> None:
    """On the worker that has it, as samples do of which nothing is learned beside others in one batch."""
    lacking = []

    def loop(parts: Parts, epochs: int) -> None:
        of_some_samples(parts, epochs, lacking)

    script = Script(loop, optimizer=sgd(momentum=0.9))
    assert difference(run(script, workers, strategy).weights, script.alone(workers)) < 1e-12
    assert True in lacking
    assert False in lacking


def test_a_worker_may_learn_nothing_at_all() -> None:
    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                parts.optimizer.zero_grad()
                if steepest.rank() != 1:
                    nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()

    script = Script(loop, data=samples(4), epochs=1)
    half = Task(optimizer=sgd(0.05), data=script.data, batch_size=2)
    x, y = script.data
    first = SamplePlan(4, 4, 0).share(0, 0, 2)  # worker 0's, whose mean is half of the update
    expected = replace(half, data=(x[first], y[first])).train(1, 1)
    assert difference(run(script, 2).weights, expected) < 1e-12


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_two_optimizers_are_clipped_by_a_norm_each(workers: int) -> None:
    assert difference(run(clipped_apart, workers).weights, alone(clipped_apart, workers)) < 1e-12


def clipping_all() -> None:
    """Clips what two optimizers have by one norm."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
    prepared = steepest.prepare(model, *optimizers, DataLoader(TensorDataset(torch.ones(4, 2))))
    for _ in steepest.epochs(1):
        for (x,) in prepared[-1]:
            model(x).sum().backward()
            steepest.clip_grad_norm_(model.parameters(), 0.5)


def test_a_norm_of_no_single_update_is_refused() -> None:
    with pytest.raises(ModelRaisedError, match="call it once for each optimizer"):
        run(clipping_all, 2)
    backup = ParameterServerStrategy(num_servers=1, backup_workers=1)
    with pytest.raises(ModelRaisedError, match=r"steepest.clip_grad_norm_\(\) where not every"):
        run(ALIKE["clipping"], 3, backup)
    passing = ParameterServerStrategy(nonfinite="pass")
    script = ALIKE["clipping"]
    assert difference(run(script, 2, passing).weights, script.alone(2)) < 1e-12


def test_clipping_by_torch_is_another_thing() -> None:
    """Without the mean's norm the result is another: the test above can fail."""
    script = ALIKE["clipping"]
    assert (
        difference(run(Script(plain, optimizer=sgd(momentum=0.9)), 2).weights, script.alone(2))
        > 1e-3
    )


def from_five(parts: Parts, epochs: int) -> None:
    """Counts its epochs from five."""
    for epoch in steepest.epochs(5, 5 + epochs):
        for x, y in parts.loader:
            for group in parts.optimizer.param_groups:
                group["lr"] = 0.01 * epoch
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


def test_epochs_are_counted_from_where_the_script_counts_them(tmp_path: Path) -> None:
    script = Script(from_five, data=samples(16))
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(script, 2, checkpoints=checkpoints, callbacks=[Interrupts(6)])
    found = run(script, 2, checkpoints=checkpoints)
    assert difference(found.weights, script.alone(2)) < 1e-12
    rates = [row["learning_rate"][0] for row in found.steps]
    assert rates == pytest.approx([0.05] * 4 + [0.06] * 4 + [0.07] * 4)


def test_losses_are_in_the_history() -> None:
    found = run(SCHEDULED, 1)
    assert all(row["loss"] > 0 for row in found.steps)
    assert found.steps[-1]["loss"] == found.reports[-1]["loss"]


@pytest.mark.few(1)
def test_what_is_reported_behind_the_last_step_has_a_row(tmp_path: Path) -> None:
    """Such as the accuracy of the last epoch: in the history, its file, the page and what loggers are given."""
    script, folder = Script(reporting), tmp_path / "run"

    def once(logger: Memory) -> tuple[list[dict[str, Any]], dict[str, float]]:
        with Simulation(seed=1).running():
            found = steepest.run(
                script,
                num_workers=2,
                run_config=run_config(),
                checkpoints=steepest.Checkpoints(folder, every=5),
                callbacks=[logger],
                progress=False,
            )
            return list(found.history), found.reports[-1]

    logger = Memory()
    rows, reported = once(logger)
    last = rows[-1]
    assert (last["kind"], last["metrics"]) == ("report", reported)
    assert last["step"] == max(row["step"] for row in rows if row["kind"] == "step")
    assert list(read_rows(folder))[-1] == last
    assert logger.points[-1].values["train/seen"] == reported["seen"]
    view = RunView("run")
    view.add_all(rows)
    shown = view.curves.as_json()["values"]["metrics/seen"][0][-1]
    assert shown == pytest.approx(reported["seen"], rel=1e-5)
    assert [row for row in once(Memory())[0] if row["kind"] == "report"] == [last]


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [2, 4, 8])
@pytest.mark.parametrize("workers", [2, 1])
def test_the_same_program_continues_from_its_checkpoint(
    step: int, workers: int, tmp_path: Path
) -> None:
    """In the middle of an epoch and at its end, with the same number of workers and with another one."""
    script = Script(
        by_both, optimizer=sgd(momentum=0.9), schedule=SCHEDULED.schedule, data=samples(16)
    )
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(script, 2, checkpoints=checkpoints, callbacks=[Interrupts(step)], global_batch_size=4)
    found = run(script, workers, checkpoints=checkpoints, global_batch_size=4)
    assert difference(found.weights, script.alone(2)) < 1e-12
    rates = [row["learning_rate"][0] for row in found.steps if row["step"] > step]
    assert rates == pytest.approx([rate_of(each) for each in range(step, 12)])


def test_a_run_that_has_ended_and_is_started_again_has_its_metrics(tmp_path: Path) -> None:
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    first = run(SCHEDULED, 2, checkpoints=checkpoints)
    again = run(SCHEDULED, 2, checkpoints=checkpoints)
    assert again.reports == first.reports
    assert len(first.reports) == SCHEDULED.epochs
    longer = run(replace(SCHEDULED, epochs=4), 2, checkpoints=checkpoints)
    assert longer.reports[:3] == first.reports
    assert longer.reports == run(replace(SCHEDULED, epochs=4), 2).reports


def test_rounds_of_a_run_that_has_ended_are_not_computed_again(tmp_path: Path) -> None:
    """More of them go on from there, as if there had been so many."""
    begun = list[tuple[int, int]]()

    def rounds(count: int) -> Callable[[], None]:
        def train() -> None:
            model, (x, y) = perceptron(), samples(8)
            model, optimizer = steepest.prepare(model, sgd(momentum=0.9)(model))
            for epoch in steepest.epochs(count):
                begun.append((steepest.rank(), epoch))
                for _ in range(2):
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    optimizer.step()
                steepest.report(loss=loss)

        return train

    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    first = run(rounds(3), 2, checkpoints=checkpoints)
    begun.clear()
    again = run(rounds(3), 2, checkpoints=checkpoints)
    assert not begun
    assert again.reports == first.reports
    assert same_bits(again.weights, first.weights)
    longer = run(rounds(4), 2, checkpoints=checkpoints)
    assert sorted(begun) == [(0, 3), (1, 3)]
    whole = run(rounds(4), 2)
    assert longer.reports == whole.reports
    assert same_bits(longer.weights, whole.weights)


def test_reports_of_another_job_in_the_same_folder_are_left_out(tmp_path: Path) -> None:
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    (tmp_path / "run").mkdir()
    row = '{"kind": "report", "time": 0, "step": 1, "worker": 0, "call": %d, "weight": 1, "values": {"loss": 7}}'
    (tmp_path / "run" / "reports.jsonl").write_text("\n".join(row % call for call in (0, 9)) + "\n")
    found = run(SCHEDULED, 2, checkpoints=checkpoints).reports
    assert found == run(SCHEDULED, 2).reports


def rate_of(step: int) -> float:
    """The rate of `by_both` with four steps an epoch."""
    return float(0.1 * 0.9 ** (step + step // 4))


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
@pytest.mark.parametrize("script", [adversarial, without_loader, clamped])
@pytest.mark.parametrize("workers", [1, 2])
def test_several_steps_for_a_batch_equal_one_process(
    script: Any, strategy: str, workers: int
) -> None:
    """Two networks with an optimizer each; a loop without a loader, as of reinforcement learning."""
    found = run(script, workers, strategy)
    assert all(row["samples"] for row in found.steps)
    assert difference(found.weights, alone(script, workers)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("script", [adversarial, clamped])
@pytest.mark.long
def test_several_steps_for_a_batch_of_a_size_of_all_workers(script: Any) -> None:
    """The batch of all workers is as large as was said, on however many."""
    expected = alone(script, 2)
    for workers in (1, 2, 3):
        found = run(script, workers, global_batch_size=2 * BATCH)
        assert difference(found.weights, expected) < 1e-12


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_writes_to_parameters_may_be_undone_before_a_step(strategy: str) -> None:
    """Of sharpness-aware minimisation each worker's part of the batch has its own worst place nearby."""
    script = Script(sharpness_aware)
    assert difference(run(script, 1, strategy).weights, script.alone(1)) < 1e-12
    assert difference(run(script, 2, strategy).weights, script.alone(2)) < 0.1


def stuck(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for _ in parts.loader:
            pause(1000.0 if steepest.rank() else 0.1)


def test_a_loop_that_is_awaited_for_long_is_named_with_its_line() -> None:
    late = run_config(deadlines=DeadlineConfig(step=20.0))
    with pytest.raises(DeadlineError, match="still waiting for worker 1") as raised:
        run(Script(stuck), 2, run_config=late)
    assert "pause(1000.0 if steepest.rank() else 0.1)" in str(raised.value.__cause__)


class Logged(steepest.Callback):
    """Keeps the log of a run."""

    log: Any = None

    def on_fit_end(self, sgd: Any) -> None:
        self.log = sgd.log()


def registers_its_schedule(parts: Parts, epochs: int) -> None:
    """One that is made behind `prepare`."""
    parts.schedulers = (torch.optim.lr_scheduler.ExponentialLR(parts.optimizer, 0.9),)
    steepest.register(schedule=parts.schedulers[0])
    plain(parts, epochs)


@pytest.mark.parametrize(
    "script", [SCHEDULED, Script(registers_its_schedule, optimizer=sgd(momentum=0.9))]
)
def test_an_asynchronous_loop_is_replayed_to_the_bit_with_its_own_rates(script: Script) -> None:
    task = Task(optimizer=sgd(momentum=0.9), data=script.data, batch_size=BATCH)
    logged = Logged()
    found = run(script, 3, "async", callbacks=[logged], run_config=run_config(keep_log=True))
    assert same_bits(replay(logged.log, task.creator()), found.weights)
    rates = {round(c.hyperparameters[0]["lr"], 9) for c in logged.log.commits if c.hyperparameters}
    assert rates == {round(0.1 * 0.9**step, 9) for step in range(1, len(found.steps))}


def early(parts: Parts, epochs: int) -> None:
    """All return in the middle of the first epoch."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            if number == 2:
                return
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


def test_a_run_ends_where_all_functions_have_returned() -> None:
    script = Script(early)
    found = run(script, 2)
    assert [row["samples"] for row in found.steps] == [4, 4]
    assert difference(found.weights, script.alone(2)) < 1e-12


@pytest.mark.parametrize("status", [None, 0])
def test_a_loop_that_ends_by_sys_exit_has_returned(status: int | None) -> None:
    def exits(parts: Parts, epochs: int) -> None:
        plain(parts, epochs)
        sys.exit(status)

    found = run(Script(exits), 2)
    assert difference(found.weights, Script(plain).alone(2)) < 1e-12


def reporting(parts: Parts, epochs: int) -> None:
    """Reports the mean of what was seen in each epoch."""
    for epoch in steepest.epochs(epochs):
        seen = torch.zeros(0, dtype=torch.float64)
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()
            seen = torch.cat([seen, y[:, 0]])
        steepest.report(seen=seen.mean(), epoch=epoch)


def test_reports_are_means_by_samples_over_the_workers() -> None:
    script = Script(reporting, data=samples(12))  # no batch has fewer samples than workers
    found = run(script, 3)
    whole = script.data[1][:, 0].mean().item()
    assert [row["epoch"] for row in found.reports] == [0.0, 1.0, 2.0]
    assert [row["seen"] for row in found.reports] == pytest.approx([whole] * 3)


def reporting_losses(parts: Parts, epochs: int) -> None:
    """Reports the mean over tokens of each batch, of which samples have different numbers."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            tokens = (y > 0).double()
            steepest.weight(tokens.sum().item())
            errors = (parts.model(x) - y).square() * tokens
            loss = errors.sum() / tokens.sum().clamp_min(1.0)
            parts.optimizer.zero_grad()
            loss.backward()
            parts.optimizer.step()
            steepest.report(loss=loss)


def test_reports_are_means_by_what_batches_weigh() -> None:
    """So that they do not depend on how many workers take the same batches."""
    script = Script(reporting_losses, data=samples(16))
    two, four = (run(script, n, global_batch_size=4).reports for n in (2, 4))
    assert len(two) == 12
    assert [row["loss"] for row in four] == pytest.approx([row["loss"] for row in two], rel=1e-12)


def reporting_steps(parts: Parts, epochs: int) -> None:
    """Reports the number of each step, and that of the epoch at its end."""
    for epoch in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()
            steepest.report(step=4 * epoch + number)
        steepest.report(epoch=epoch)


@pytest.mark.parametrize("workers", [2, 3])
def test_reports_of_a_step_are_those_of_workers_that_have_seen_it(workers: int) -> None:
    """Of 13 samples the last step of an epoch has one: the next reports of the others are not taken for that one's."""
    found = run(Script(reporting_steps, data=samples(6 * workers + 1)), workers)
    expected: list[dict[str, float]] = []
    for epoch in range(3):
        expected += [{"step": 4 * epoch + number} for number in range(4)]
        expected.append({"epoch": epoch})
    assert found.reports == expected


def raising(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for _ in parts.loader:
            raise KeyError("mine")


def test_what_the_loop_raises_has_its_own_traceback_once() -> None:
    """No frame of the library's is in it, nor in that of the driver, but for the function that was called."""
    with pytest.raises(ModelRaisedError, match=r"raised in step 1: KeyError: 'mine'") as raised:
        run(Script(raising), 2)
    text = str(raised.value.__cause__)
    assert text.count('raise KeyError("mine")') == 1
    own = str(Path(steepest.__file__).parent)
    assert own not in text
    assert [
        Path(each.path).name for each in raised.traceback if str(each.path).startswith(own)
    ] == ["errors.py"]


def behind(parts: Parts, epochs: int) -> None:
    plain(parts, epochs)
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import nowhere", r"^worker 0, worker 1 could not run {} up to steepest.prepare\(\): "),
        ("import steepest\nfrom tests.loop.test_own_loop import *\nScript(behind)()", "could not run {}: Key"),
        ("import steepest\nfrom tests.loop.test_own_loop import *\nScript(raising)()", "raised in step 1: Key"),
    ],
)  # fmt: skip
def test_a_script_is_named_where_it_raises(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # all are as before
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (path := tmp_path / "script.py").write_text(script)
    with pytest.raises(ModelRaisedError, match=words.format(r"script\.py")) as raised:
        run(UserScript.read(str(path)), 2)
    assert f'File "{path}", line {script.count(chr(10)) + 1}' in str(raised.value.__cause__)


class NoDataError(Exception):
    """A user's."""

    def __init__(self, shard: int, *left: Any) -> None:
        super().__init__(shard, *left)
        self.shard = shard

    def __str__(self) -> str:
        return f"shard {self.shard} is empty"


def without_data(*left: Any, when: str) -> None:
    if when == "before":
        raise NoDataError(3, *left)
    model, optimizer = steepest.prepare(model := perceptron(), sgd()(model))
    for _ in steepest.epochs(1):
        if when == "in a step":
            raise NoDataError(3, *left)
        model(torch.zeros(1, 3).double()).sum().backward()
        optimizer.step()
    raise NoDataError(3, *left)


@pytest.mark.parametrize("when", ["before", "in a step", "behind"])
def test_what_a_loop_raises_is_caught_as_the_users_class(when: str) -> None:
    """And as ours, with the same attributes."""
    with pytest.raises(NoDataError, match=r"worker .*: NoDataError: shard 3 is empty") as raised:
        run(partial(without_data, when=when), 2)
    assert isinstance(raised.value, ModelRaisedError)
    assert (raised.value.shard, raised.value.args) == (3, (3,))
    assert "raise NoDataError(3, *left)" in str(raised.value.__cause__)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), str(again)) == (ModelRaisedError, str(raised.value))


def test_an_exception_that_is_not_made_of_plain_values_is_ours_alone() -> None:
    with pytest.raises(ModelRaisedError, match="NoDataError: shard 3 is empty") as raised:
        run(partial(without_data, torch.zeros(1), when="before"), 2)
    assert type(raised.value) is ModelRaisedError


@pytest.mark.parametrize(
    "kind",
    [
        '{"class": ["builtins", "KeyError"], "args": [], "attributes": {}}',
        '{"class": ["os", "system"], "args": ["true"], "attributes": {}}',
        '{"class": ["nowhere", "Error"], "args": [], "attributes": {}}',
        '{"class": ["steepest.errors", "CheckpointError"], "args": [], "attributes": {}}',
        '{"class": ["tests.loop.test_own_loop", "NoDataError"], "args": 7, "attributes": {}}',
        '{"class": 7}',
        "[]",
    ],
)
def test_no_other_class_is_made_of_what_a_process_says(kind: str) -> None:
    found = raised_by_user("it raised", {"kind": kind, "traceback": ""})
    assert type(found) is ModelRaisedError


def test_the_command_prints_the_frames_of_users_code_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> int:
        raise ModelRaisedError("worker 0 could not run it") from RemoteTraceback("line 7\n")

    monkeypatch.setattr("steepest.cli.report.run", fails)
    assert main(["report", "run", "-o", "page"]) == 1
    assert capsys.readouterr().err == "line 7\nsteepest: worker 0 could not run it\n"


def test_another_status_of_sys_exit_is_what_a_function_has_raised() -> None:
    def exits(parts: Parts, epochs: int) -> None:
        plain(parts, epochs)
        sys.exit(3)

    with pytest.raises(
        ModelRaisedError, match=r"run the function 'Script': SystemExit: 3"
    ) as raised:
        run(Script(exits), 2)
    assert "sys.exit(3)" in str(raised.value.__cause__)


def unprepared() -> None:
    """Returns before prepare."""


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def without_backward(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for _ in parts.loader:
            parts.optimizer.step()


def handling(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def by_sample(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            nn.functional.mse_loss(parts.model(x), y, reduction="none").backward()
            parts.optimizer.step()


def in_another_order(misuse: str = "iterate") -> None:
    model = perceptron()
    loader = DataLoader(TensorDataset(*samples(4)), batch_size=2)
    model, loader, optimizer = steepest.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    )
    for _ in steepest.epochs(1):
        if misuse == "iterate":
            for _ in loader:
                pass
        elif misuse == "call":
            optimizer(torch.zeros(3))
        else:
            optimizer.zero_grad()


def with_a_scaler() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steepest.prepare(model, optimizer, torch.amp.GradScaler("cpu"))


def without_step(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            nn.functional.mse_loss(parts.model(x), y).backward()


def without_step_or_loader() -> None:
    model = perceptron()
    model, _ = steepest.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in steepest.epochs(3):
        model(rollout(number, steepest.rank())).square().mean().backward()


def without_epochs(parts: Parts, epochs: int) -> None:
    for _ in range(epochs):
        for _ in parts.loader:
            pass


def prepared_again(parts: Parts, epochs: int) -> None:
    steepest.prepare(parts.model, parts.optimizer, parts.loader.loader)


def backwards(parts: Parts, epochs: int) -> None:
    steepest.epochs(5, 5)


def own_state(parts: Parts, epochs: int) -> None:
    parts.optimizer.load_state_dict({"state": {}, "param_groups": []})


def further_group(parts: Parts, epochs: int) -> None:
    parts.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def later_group(parts: Parts, epochs: int) -> None:
    parts.optimizer.add_param_group({"params": parts.model[0].parameters(), "lr": 0.01})


def known_group(parts: Parts, epochs: int) -> None:
    parts.optimizer.add_param_group({"params": parts.model[0].weight})


def of_the_last_layer(module: nn.Module) -> torch.optim.Optimizer:
    first, *_, last = module.children()
    first.requires_grad_(requires_grad=False)
    return torch.optim.SGD(last.parameters(), lr=0.1)


def writing(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            nn.functional.mse_loss(parts.model(x), y).backward()
            with torch.no_grad():
                parts.model[0].weight.clamp_(-0.01, 0.01)
            parts.optimizer.step()


def nested() -> None:
    steepest.run(unprepared)


def foreign_optimizer() -> None:
    loader = DataLoader(TensorDataset(*samples(4)), batch_size=2)
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    steepest.prepare(model, torch.optim.SGD(other.parameters(), lr=0.1), loader)


def own_sampler() -> None:
    data, model = TensorDataset(*samples(4)), torch.nn.Linear(3, 2)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 0))
    steepest.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def weighing_sums(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for _ in parts.loader:
            steepest.weight(1.0)


WRONG = {
    r"adds up the samples of its batch \(MseLoss\)": Script(adding_up),
    "global_batch_size=4 with a loop without a loader": without_loader,
    r"weight\(\) with steepest.prepare\(..., reduction='sum'\)": Script(
        weighing_sums, reduction="sum"
    ),
    "reduction='median': give 'mean' or 'sum'": Script(plain, reduction="median"),
    "returned without calling steepest.prepare": unprepared,
    "worker of a run: start a script that calls it by `python`": nested,
    "no parameter has a gradient: call loss.backward": Script(without_backward),
    r"'SGD' object is not iterable: steepest.prepare\(\) returns its arguments": in_another_order,
    r"'TrainingLoader' object is not callable: .* in the order": partial(in_another_order, "call"),
    r"'DataLoader' object has no attribute 'zero_grad': .* order": partial(
        in_another_order, "zero"
    ),
    r"a GradScaler: .*goes to steepest.register\(name=object\)": with_a_scaler,
    r"function is a module itself \(Linear\)": nn.Linear(3, 2),
    r"function=<function squares .*missing a required argument: 'model'": squares,
    r"function=3: give a function without arguments": 3,
    r"signal.signal\(\) in the function of a worker": Script(handling),
    r"a loss of shape \(2, 2\): give one number, the mean of the batch": Script(by_sample),
    r"BatchNorm got a batch of one sample.*drop_last=True": Script(plain, with_batch_norm),
    r"came to the end of epoch 0 without optimizer.step\(\)": Script(without_step),
    r"came to the end of epoch 2 without optimizer.step\(\)": without_step_or_loader,
    r"outside of steepest.epochs\(\)": Script(without_epochs),
    r"prepare\(\) was called twice": Script(prepared_again),
    r"SGD.load_state_dict\(\) after steepest.prepare\(\), where its state lies": Script(own_state),
    r"SGD.add_param_group\(\) after steepest.prepare\(\): of shape \(2,\) the model": Script(
        further_group
    ),
    "give the optimizer this group, of '0.bias' and 1 more, before prepare": Script(
        later_group, optimizer=of_the_last_layer
    ),
    "'0.weight' and 0 more are the optimizer's already: unfreeze": Script(known_group),
    "the end of epochs=5: give an integer of at least 6": Script(backwards),
    "written to the trained parameter '0.weight'": Script(writing),
    "that is not a parameter of the modules given": foreign_optimizer,
    r"has a DistributedSampler, which divides samples by itself": own_sampler,
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_use_is_told_in_words(words: str) -> None:
    with pytest.raises((ModelRaisedError, ConfigurationError, ModelError), match=words):
        run(WRONG[words], 2, **({"global_batch_size": 4} if "global" in words else {}))


def test_a_function_that_cannot_be_sent_is_called_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(what: str, value: object) -> None:
        raise_unsendable(what, value, TypeError("no"))

    monkeypatch.setattr("steepest.runtime.cluster.travelling", refuse)
    with pytest.raises(ConfigurationError, match="the function that trains cannot be sent to the"):
        run(Script(plain), 2)


@pytest.mark.usefixtures("machine")
def test_a_script_runs_by_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its loop stands at top level, it reads its arguments, and alone it gives the same."""
    path, found = Path(__file__).parent / "own_loop_script.py", tmp_path / "weights"
    command = ["run", str(path), "--workers", "2", "--global-batch-size", "4", "--no-progress"]
    assert main([*command, "--", "--lr", "0.2", "--out", str(found)]) == 0
    assert "loss: " in capfd.readouterr().out
    expected = Script(plain, optimizer=sgd(lr=0.2), data=samples(12)).alone(2)
    assert difference(torch.load(found), expected) < 1e-12


@pytest.mark.usefixtures("machine")
def test_on_ray_too() -> None:
    found = steepest.run(replace(SCHEDULED, loop=meeting), num_workers=2, progress=False)
    assert difference(found.state_dict, SCHEDULED.alone(2)) < 1e-12
    assert found.metrics["loss"] == found.reports[-1]["loss"]
    assert (found.metrics["ranks"], found.metrics["states"]) == (1.0, 4.0)
    assert len(found.history.epochs) == SCHEDULED.epochs


def test_alone_nothing_happens() -> None:
    things = torch.nn.Linear(1, 1), object()
    assert steepest.prepare(*things) == things
    assert steepest.prepare(things[1]) is things[1]
    assert list(steepest.epochs(3)) == [0, 1, 2]
    assert list(steepest.epochs(1, 4)) == [1, 2, 3]
    steepest.report(loss=1.0)
    steepest.weight(2.0)
    assert (steepest.rank(), steepest.size()) == (0, 1)
    assert current() is None


def test_torch_is_as_it_was_when_no_loop_runs() -> None:
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert not hasattr(torch.autograd.backward, "__wrapped__")
