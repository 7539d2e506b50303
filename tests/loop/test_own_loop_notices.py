"""A loop hears that its node will go: of a simulated node with notice, and of this machine by SIGUSR2."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import steepest
from steepest.runtime.job_runtime import runtime
from steepest.runtime.machine.notice import Notice
from steepest.runtime.machine.runtime import MachineRuntime
from tests.own_loops import Parts, Script, plain
from tests.reference import samples, sgd
from tests.simulation.run import Simulation, pause, run_config

SECONDS = 500.0
SCRIPT = Script(plain, optimizer=sgd(), data=samples(24))


def step(parts: Parts, x: object, y: object) -> None:
    parts.optimizer.zero_grad()
    nn.functional.mse_loss(parts.model(x), y).backward()  # type: ignore[arg-type]
    parts.optimizer.step()


@pytest.mark.few(2)
@pytest.mark.parametrize("seconds", [SECONDS, None])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_worker_hears_when_its_node_goes(workers: int, seconds: float | None) -> None:
    """The workers of the node that has notice hear of it, those of others and successors elsewhere do not."""
    simulation = Simulation(1, cpus=(2, 2, 2))
    last = workers - 1
    heard: list[tuple[str, float | None]] = []

    def loop(parts: Parts, epochs: int) -> None:
        for epoch in steepest.epochs(epochs):
            for number, (x, y) in enumerate(parts.loader):
                pause(1.5)
                if epoch == 1 and steepest.rank() == last and not heard:
                    assert steepest.leaving() is None
                    node = simulation.world.here_node()
                    simulation.give_notice(node, seconds)
                    heard.append((node.id, None))
                    while steepest.leaving() is None:  # it may have moved away by the next batch
                        pause(0.5)
                    heard.append((runtime().node, steepest.leaving()))
                elif heard and number == 1:
                    heard.append((runtime().node, steepest.leaving()))
                step(parts, x, y)

    with simulation.running():
        steepest.run(
            replace(SCRIPT, loop=loop, epochs=8),
            num_workers=workers,
            progress=False,
            run_config=run_config(),
        )
    (node, _), *after = heard
    there = {at for where, at in after if where == node}
    assert len(there) == 1
    (at,) = there
    assert at is not None
    assert (at == math.inf) if seconds is None else (at < math.inf)
    elsewhere = {at for where, at in after if where != node}
    assert elsewhere == {None}  # a successor took over, and stays


def announcing(mark: Path, parts: Parts, epochs: int) -> None:
    """The usual loop, in which worker 0 signals the program; all end it together when one has heard."""
    for epoch in steepest.epochs(epochs):
        for x, y in parts.loader:
            step(parts, x, y)
        if epoch == 1 and steepest.rank() == 0:
            os.kill(int(mark.read_text()), signal.SIGUSR2)
        told = steepest.gather([float(steepest.leaving() is not None)])
        steepest.report(told=float(max(told)))
        if max(told):
            return


@pytest.fixture
def announced(machine: MachineRuntime) -> Iterator[None]:
    """The session's machine, to which no notice is given after the test."""
    yield
    machine._notice._memory[:] = bytes(1)


@pytest.mark.long
@pytest.mark.usefixtures("announced")
def test_a_machine_is_announced_to_go_by_a_signal(tmp_path: Path) -> None:
    """SIGUSR2 to the program reaches the loops of its processes, which end together."""
    mark = tmp_path / "program"
    mark.write_text(str(os.getpid()))
    script = replace(SCRIPT, loop=partial(announcing, mark), epochs=2_000)
    found = steepest.run(script, num_workers=2, progress=False)
    told = [report["told"] for report in found.reports]
    assert told[-1] == 1.0
    assert not any(told[:-1])
    assert len(told) < 2_000


def test_a_notice_is_seen_where_its_memory_is_shared() -> None:
    first = Notice()
    second = Notice(os.dup(first.descriptor))
    assert not second.is_given
    first.give()
    first.give()
    assert second.is_given
    assert first.is_given


def test_alone_no_node_goes() -> None:
    assert steepest.leaving() is None
