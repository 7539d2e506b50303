"""Checkpoints that are kept: the newest whole ones stay, and the same program goes on where it was interrupted."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from steepest import (
    Callback,
    Checkpoints,
    DistributedSGD,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
)
from steepest.checkpoint import files
from steepest.checkpoint.directory import CheckpointDirectory
from steepest.core.strategies.strategy import Strategy
from steepest.data.storage.files import LocalStorage
from steepest.errors import CheckpointError, ConfigurationError
from tests.checkpoint.kept_checkpoints import TASK, kept, undisturbed
from tests.checkpoint_contents import DAMAGES, content
from tests.conftest import ROOT
from tests.reference import same_bits, samples
from tests.step_callbacks import Stop
from tests.whole_checkpoints import all_of, newest_of


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("",), "path=''"),
        ((3,), "path=3"),
        (("here", 0), "every=0"),
        (("here", 1, 0), "keep=0"),
        (("a", 1.5), "every"),
    ],
)
def test_settings_are_checked(arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Checkpoints(*arguments)


# -- the shelf ------------------------------------------------------------------------------------------


def put(directory: CheckpointDirectory, *steps: int) -> None:
    for step in steps:
        directory.put(content(float(step), step))


def newest(path: Path) -> int | None:
    found = newest_of(CheckpointDirectory(path, 1))
    return None if found is None else int(found[1].about["step"])


def test_the_newest_stay_whatever_their_steps(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down"
    directory = CheckpointDirectory(path, 3)
    assert newest_of(directory) is None
    put(directory, 10, 20)
    assert (kept(path), newest(path)) == ([10, 20], 20)
    put(directory, 30, 40)
    (path / "users-own").mkdir()
    (path / "000001-step-7").touch()  # a file
    put(directory, 15)  # a user went back
    assert kept(path) == [30, 40, 15]
    assert newest(path) == 15
    put(CheckpointDirectory(path, 1), 16)  # another process, which keeps fewer
    assert sorted(os.listdir(path)) == ["000001-step-7", "000006-step-16", "users-own"]


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, 2)
    for step, best in ((10, 10), (20, 10), (30, 10), (40, 40), (50, 40), (60, 40)):
        directory.put(content(float(step), step), best=best)
        assert (found := directory.of_step(best)) is not None
        assert all_of(found).about["step"] == best
    assert kept(tmp_path) == [40, 50, 60]
    directory.put(content(70.0, 70), best=5)  # which is not there
    assert kept(tmp_path) == [60, 70]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over_and_said_to_be(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = CheckpointDirectory(tmp_path, 2)
    put(directory, 1, 2, 3)
    DAMAGES[damage](directory.paths()[-1])
    again = CheckpointDirectory(tmp_path, 2)
    found = newest_of(again)
    assert found is not None
    assert found[0].name == "000002-step-2"
    assert same_bits(found[1].weights, content(2.0).weights)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "000003-step-3" in record.getMessage()
    put(again, 4)  # the damaged one is not one of the two
    assert set(kept(tmp_path)) - {3} == {2, 4}
    put(again, 5)
    assert kept(tmp_path) == [4, 5]


def test_the_only_whole_one_stays_until_another_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CheckpointDirectory(tmp_path, 1)
    put(directory, 1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for step in (2, 3):
            with pytest.raises(CheckpointError, match="No space left"):
                put(directory, step)
            assert (kept(tmp_path), newest(tmp_path)) == ([1], 1)  # nothing is left of what failed
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(CheckpointError, match="No space left"):
            put(directory, 2)
    with monkeypatch.context() as patch:
        patch.setattr("steepest.data.storage.files.shutil.rmtree", full)
        put(directory, 4)
    assert (kept(tmp_path), newest(tmp_path)) == ([1, 4], 4)  # one stays half deleted
    put(directory, 5)
    assert kept(tmp_path) == [5]


def test_a_new_checkpoint_is_durable_by_its_name_before_an_older_one_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    remove, sync = LocalStorage.remove, os.fsync

    def removed(self: LocalStorage, file: Path) -> None:
        done.append(f"remove {file.parent.name}/{file.name}")
        remove(self, file)

    def synced(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append(f"sync {os.path.relpath(path, tmp_path)}")
        sync(descriptor)

    monkeypatch.setattr(LocalStorage, "remove", removed)
    monkeypatch.setattr(os, "fsync", synced)
    directory = CheckpointDirectory(tmp_path / "deep" / "run", 1)
    assert done == ["sync .", "sync deep"]
    directory.put(content(1.0, 1))
    done.clear()
    directory.put(content(2.0, 2))
    named, deleted = done.index("sync deep/run"), done.index("remove 000001-step-1/manifest.json")
    assert named < deleted


def test_what_a_crash_left_unfinished_is_passed_over_and_removed_by_the_next(
    tmp_path: Path,
) -> None:
    directory = CheckpointDirectory(tmp_path, 2)
    (tmp_path / "000001-step-1").mkdir()
    assert newest(tmp_path) is None  # killed while it wrote the first one: it begins anew
    put(directory, 2)
    assert kept(tmp_path) == [2]


def test_when_all_are_damaged_somebody_has_to_decide(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, 2)
    put(directory, 1, 2)
    for path in directory.paths():
        DAMAGES["half a file"](path)
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*another path"):
        newest_of(directory)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        CheckpointDirectory(next(path for path in directory.paths()) / files.MANIFEST, 1)  # a file


# -- jobs -----------------------------------------------------------------------------------------------


class Heard(Callback):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.begun: list[int] = []
        self.epochs = 0

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        self.begun.append(steps)

    def on_step(self, sgd: Any, result: StepResult) -> None:
        self.steps.append(result.step)

    def on_epoch_end(self, sgd: Any, result: StepResult) -> None:
        self.epochs += 1


def trainer(
    path: Path, strategy: str | Strategy = "ps", every: int = 10, **settings: Any
) -> DistributedSGD:
    checkpoints = Checkpoints(path, every, keep=2)
    return DistributedSGD(TASK.creator(), strategy=strategy, checkpoints=checkpoints, **settings)


def check_same_program(tmp_path: Path, strategy: str, error: type[BaseException]) -> None:
    """A program that an error interrupts, and that is started again, ends as an undisturbed one."""
    with pytest.raises(error), trainer(tmp_path, strategy, num_workers=2) as sgd:
        sgd.fit(steps=37, callbacks=[Stop(23, error)], progress=False)
    stopped = kept(tmp_path)
    assert stopped[0] == 20
    assert 23 <= stopped[1] <= 30  # workers were ahead of the callback, up to the next checkpoint
    heard = Heard()
    with trainer(tmp_path, strategy, num_workers=2) as sgd:
        assert sgd.fit(steps=37, callbacks=[heard], progress=False).step == 37
        assert (heard.begun, heard.steps) == (
            [37 - stopped[1]],
            list(range(stopped[1] + 1, 38)),
        )
        assert same_bits(sgd.weights(), undisturbed(37, 2, strategy))
    assert kept(tmp_path) == [30, 37] if stopped[1] < 30 else [stopped[1], 37]


class TestSimulated:
    pytestmark = [pytest.mark.long, pytest.mark.usefixtures("simulated")]

    @pytest.mark.parametrize("strategy", ["ps", "local"])
    def test_the_same_program_ends_with_the_same_bits(self, tmp_path: Path, strategy: str) -> None:
        check_same_program(tmp_path, strategy, ZeroDivisionError)

    def test_the_best_is_kept_and_each_evaluation_is_made_once(self, tmp_path: Path) -> None:
        checkpoints = Checkpoints(tmp_path, 10, keep=2, best="loss", mode="max")

        def train(sgd: DistributedSGD, *callbacks: Callback) -> None:
            asked = {"validation": samples(7), "evaluate_every": 4}
            assert sgd.fit(steps=37, callbacks=callbacks, progress=False, **asked).step == 37

        with DistributedSGD(TASK.creator(), 2, checkpoints=checkpoints) as sgd:
            with pytest.raises(ConfigurationError, match=r"give fit\(\.\.\., validation"):
                sgd.fit(steps=37, progress=False)
            with pytest.raises(ZeroDivisionError):
                train(sgd, Stop(23))
        with DistributedSGD(TASK.creator(), 2, checkpoints=checkpoints) as sgd:
            train(sgd)
            assert [result.step for result in sgd.evaluations] == list(range(4, 37, 4))
            assert same_bits(sgd.weights(), undisturbed(37, 2))
            best = max(sgd.evaluations, key=lambda result: result.loss)
            assert best.step < 30
            found = sgd.best_checkpoint
            assert found is not None
            assert kept(tmp_path) == [best.step, 30, 37]
            sgd.restore(found)
            assert sgd.stats().step == best.step == sgd.evaluations[-1].step
            assert sgd.evaluate(samples(7)) == best

    def test_what_is_done_is_not_done_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Heard()
        with trainer(tmp_path, every=100) as sgd:
            sgd.fit(epochs=2, callbacks=[heard], progress=False)
            assert (heard.epochs, heard.steps) == (2, list(range(1, 15)))
            assert sgd.step().step == 15
            sgd.fit(steps=3, progress=False)
            last = sgd.fit(epochs=1, callbacks=[heard], progress=False)
            assert last.step == 21
        assert kept(tmp_path) == [18, 21]
        with trainer(tmp_path, every=100) as sgd:
            assert "going on from step 21" in caplog.text
            heard = Heard()
            for _ in range(2):
                assert sgd.fit(epochs=1, callbacks=[heard], progress=False) == last
            assert sgd.fit(steps=4, callbacks=[heard], progress=False) == last
            assert sgd.step().step == 22
            # 18 of 21 steps were asked for, and one was taken beside
            assert sgd.fit(steps=3, callbacks=[heard], progress=False).step == 22
            assert heard.begun == []
            assert sgd.fit(steps=2, callbacks=[heard], progress=False).step == 24
            assert (heard.begun, heard.steps) == ([2], [23, 24])
            assert sgd.fit(epochs=1, callbacks=[heard], progress=False).step == 28
            assert same_bits(sgd.weights(), undisturbed(28))
            sgd.step()
        assert kept(tmp_path) == [28, 29]

    def test_epochs_are_counted_over_other_numbers_of_workers(self, tmp_path: Path) -> None:
        with trainer(tmp_path, num_workers=2) as sgd:
            sgd.fit(steps=6, progress=False)
        # in the middle of the second epoch, 8 of 13 samples seen; and when all is done
        for ends in ([6, 6 + 3, 9 + 7], [16, 16, 16]):
            with trainer(tmp_path) as sgd:
                assert [sgd.fit(epochs=1, progress=False).step for _ in range(3)] == ends

    def test_the_users_own_restore_is_not_made_up_for(self, tmp_path: Path) -> None:
        with trainer(tmp_path / "kept") as sgd:
            sgd.fit(steps=9, progress=False)
            sgd.save(tmp_path / "own")
            sgd.fit(steps=10, progress=False)
        with trainer(tmp_path / "kept") as sgd:
            saved = all_of(tmp_path / "own")
            older = {
                key: value
                for key, value in saved.about.items()
                if key not in ("format", "left", "ends")
            }
            files.write(tmp_path / "older", replace(saved, about=older))
            sgd.restore(tmp_path / "older")
            assert sgd.fit(steps=7, progress=False).step == 16
            assert same_bits(sgd.weights(), undisturbed(16))
        assert kept(tmp_path / "kept")[-1] == 16
        with trainer(tmp_path / "kept") as sgd:
            assert sgd.stats().step == 16
            sgd.set_weights({"0.bias": torch.ones(4)})
        with trainer(tmp_path / "kept") as sgd:  # that was kept
            assert (sgd.weights()["0.bias"] == 1).all()

    def test_a_damaged_one_is_not_gone_on_from(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with trainer(tmp_path) as sgd:
            sgd.fit(steps=14, progress=False)
        DAMAGES["a flipped bit"](CheckpointDirectory(tmp_path, 2).paths()[-1])
        with trainer(tmp_path) as sgd:
            assert sgd.stats().step == 10
            assert "step-14" in caplog.text
            assert "checksum" in caplog.text
            sgd.fit(steps=14, progress=False)
            assert same_bits(sgd.weights(), undisturbed(14))

    def test_one_of_another_job_is_refused(self, tmp_path: Path) -> None:
        with trainer(tmp_path) as sgd:
            sgd.fit(steps=1, progress=False)
        other = replace(TASK, data=samples(14))
        with pytest.raises(CheckpointError, match="not of this job"):
            DistributedSGD(other.creator(), 2, checkpoints=Checkpoints(tmp_path))
        with pytest.raises(ConfigurationError, match="checkpoints="):
            DistributedSGD(other.creator(), 2, checkpoints=tmp_path)  # type: ignore[arg-type]

    def test_a_write_that_fails_is_told_and_training_can_go_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        original, failing = files.write, [10, 25]

        def write(path: Path, saved: files.Checkpoint, *rest: Any) -> None:
            if saved.about["step"] in failing:
                raise CheckpointError("the disk is full")
            original(path, saved, *rest)

        monkeypatch.setattr(files, "write", write)
        with trainer(tmp_path) as sgd:
            with pytest.raises(CheckpointError, match="the disk is full"):
                sgd.fit(steps=25, progress=False)
            assert sgd.stats().step == 20
            assert kept(tmp_path) == []
            with pytest.raises(CheckpointError, match="the disk is full"):
                sgd.fit(steps=5, progress=False)
            assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
            assert "checkpoint of step 25 is not kept" in caplog.text
            failing.clear()
        assert kept(tmp_path) == [25]  # at the end it worked

    def test_what_is_committed_out_of_order_is_in_a_checkpoint(self, tmp_path: Path) -> None:
        """And it is carried over by a change of strategy."""
        backup = ParameterServerStrategy(backup_workers=1)
        seen: Counter[tuple[int, int]] = Counter()

        for workers, strategy in ((3, backup), (2, "async")):
            with trainer(
                tmp_path,
                strategy,
                num_workers=workers,
                run_config=RunConfig(keep_log=True),
                every=1000,
            ) as sgd:
                sgd.fit(
                    steps=sgd.stats().step + 5, progress=False
                )  # those of the first trainer are done
                sgd.set_strategy(backup if strategy == "async" else "ssp")
                sgd.fit(steps=4, progress=False)
                seen.update(
                    (epoch, i) for epoch, *place in sgd.log().samples() for i in range(*place)
                )
                sgd.save(tmp_path / f"with {workers}")
                rest = all_of(tmp_path / f"with {workers}").about
                expected = Counter(
                    {(epoch, i): 1 for epoch in range(rest["epoch"] + 1) for i in range(13)}
                )
                for epoch, *place in (*rest["left"], (rest["epoch"], rest["offset"], 13)):
                    expected.subtract((epoch, i) for i in range(*place))
                assert seen == +expected


class TestOverRay:
    pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

    @pytest.mark.full
    def test_the_same_program_ends_with_the_same_bits(self, tmp_path: Path) -> None:
        check_same_program(tmp_path, "allreduce", KeyboardInterrupt)

    def test_training_goes_on_while_one_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written: list[int] = []
        seen, go = Heard(), threading.Event()

        class Release(Callback):
            def on_step(self, sgd: Any, result: StepResult) -> None:
                if result.step == 20:  # then the next one is due, and waits
                    assert written == []
                    go.set()

        original = files.write

        def write(path: Path, saved: files.Checkpoint, *rest: Any) -> None:
            assert go.wait(60)
            assert threading.current_thread() is not threading.main_thread()
            original(path, saved, *rest)
            written.append(saved.about["step"])

        monkeypatch.setattr(files, "write", write)
        with trainer(tmp_path) as sgd:
            sgd.fit(steps=25, callbacks=[seen, Release()], progress=False)
            assert written == [10, 20, 25]
            assert same_bits(sgd.weights(), undisturbed(25))


PROGRAM = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from steepest import Callback, Checkpoints, DistributedSGD
from tests.checkpoint.kept_checkpoints import TASK

class Halt(Callback):
    def on_step(self, sgd, result):
        if result.step == int(sys.argv[3]):
            print("halted", flush=True)
            sys.stdin.read()

with DistributedSGD(TASK.creator(), 2, strategy=sys.argv[2], checkpoints=Checkpoints(sys.argv[1], 20)) as sgd:
    sgd.fit(epochs=20, callbacks=[Halt()], progress=False)
    sgd.fit(steps=50, callbacks=[Halt()], progress=False)
    save_file(sgd.weights(), Path(sys.argv[1]) / "weights")
    print("step", sgd.stats().step)
"""


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_killed_program_started_again_ends_with_the_same_bits(
    ray_cluster: None, tmp_path: Path, strategy: str
) -> None:
    import ray

    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    path = tmp_path / "kept"

    def start(halt: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(program), str(path), strategy, str(halt)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    begun = []
    for halt in (53, 97, -1):  # in the middle of the first fit, of the second, and never
        with start(halt) as process:
            said = ""
            assert process.stdout is not None
            for line in process.stdout:
                said += line
                if line.startswith("halted"):
                    os.kill(process.pid, signal.SIGKILL)
                    break
            code = process.wait(60)
        begun += [int(step) for step in re.findall(r"going on from step (\d+)", said)]
        assert code == (0 if halt < 0 else -signal.SIGKILL), said
    assert "step 130" in said
    assert begun[0] in (20, 40)  # what was being written may not have become whole
    assert begun[1] in (60, 80)
    assert same_bits(load_file(path / "weights"), undisturbed(130, 2, strategy))
