"""Jobs whose processes are killed amid a gradient, or with their template; nothing is left of a job."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import DistributedSGD, FailureConfig, RunConfig
from steepest.core.engine.extension import Extension
from steepest.errors import ConfigurationError, ModelRaisedError
from steepest.runtime.machine.runtime import MachineRuntime
from tests.core import models
from tests.jobs_on_processes import CONFIG, trained
from tests.processes import until
from tests.reference import same_bits
from tests.step_callbacks import After

pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_worker_that_is_killed_twice_amid_a_gradient_changes_no_bit(
    strategy: str, tmp_path: Path
) -> None:
    struck = partial(models.struck, models.classifier, tmp_path, 1, [3, 2])
    found = [trained(each, 2, strategy=strategy) for each in (models.classifier, struck)]
    assert len(list(tmp_path.iterdir())) == 2
    assert same_bits(*found)


@pytest.mark.parametrize(("strategy", "visits"), [("async", {1}), ("ps", {1 / 3, 1 / 2})])
def test_each_sample_is_part_of_the_weights_once_when_a_worker_is_killed(
    strategy: str, visits: set[float], tmp_path: Path
) -> None:
    creator = partial(models.struck, models.counter, tmp_path, 2, [3])
    config = RunConfig(runtime="processes", failure=FailureConfig(spares=0))
    epochs = 0
    with DistributedSGD(creator, 3, strategy=strategy, run_config=config) as trainer:
        while not list(tmp_path.iterdir()):  # under "async" others may take its shares
            trainer.fit(epochs=1, progress=False)
            epochs += 1
        found = -trainer.weights()["weight"].flatten()
    allowed = epochs * torch.tensor(sorted(visits), dtype=torch.float64)
    assert torch.isclose(found[:, None], allowed, rtol=0, atol=1e-12).any(1).all(), found


@pytest.mark.long
def test_a_job_whose_template_is_killed_goes_on_with_another(machine: MachineRuntime) -> None:
    """A program that kills processes by their command line hits the template, with which all forks die."""

    def kill() -> None:
        assert machine._template is not None
        os.kill(machine._template._process.pid, signal.SIGKILL)

    with DistributedSGD(models.classifier, 2, seed=3, run_config=CONFIG) as trainer:
        trainer.fit(epochs=2, progress=False, callbacks=[After({5: kill})])
        assert same_bits(trainer.state_dict(), trained(models.classifier, 2))


def left() -> Counter[str]:
    """Return what this process has opened, and what is in shared memory."""
    gc.collect()
    opened = Counter(os.listdir("/dev/shm"))
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            opened[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return opened


@pytest.mark.parametrize(
    ("creator", "error", "words"),
    [
        (models.classifier, None, ""),
        (models.unmade, ModelRaisedError, "worker 1.*LookupError: there is no model for worker 1"),
        (models.unsendable(), ConfigurationError, "cannot be sent to the workers"),
    ],
)
def test_of_a_job_that_ends_or_does_not_begin_nothing_is_left(
    creator: Any,
    error: type[Exception] | None,
    words: str,
    machine: MachineRuntime,
) -> None:
    trained(models.classifier, 2, epochs=1)  # what stays for later jobs
    before = left()
    if error is None:
        trained(creator, 2, epochs=1, strategy="allreduce")
    else:
        with pytest.raises(error, match=words):
            DistributedSGD(creator, 2, run_config=CONFIG)
    assert machine._template is not None
    assert not machine._template._forks
    assert left() <= before, "of the job before some may have been closed late"


def test_the_end_of_a_job_waits_for_a_process_whose_end_is_known_but_whose_socket_is_open(
    machine: MachineRuntime,
) -> None:
    trained(models.classifier, 1, epochs=1)
    template = machine._template
    assert template is not None
    process = template.fork("a process", {})
    until(lambda: process.pid > 0)
    with process._lock:  # so that what reads from it cannot note its end
        process.kill()
        assert "SIGKILL" in process.how.result(20)
        assert template._forks, "the end of a job would not wait for it"
    template.end_forks()
    assert not template._forks
    assert process._frames.socket.fileno() == -1


def test_an_extension_that_cannot_be_pickled_is_refused() -> None:
    extension = Extension()
    extension.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="extensions cannot be sent to the workers"):
        DistributedSGD(models.classifier, 1, run_config=CONFIG, extensions=[extension])
