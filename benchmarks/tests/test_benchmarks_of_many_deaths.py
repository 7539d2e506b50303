"""Benchmarks of many deaths, of goodput and of false alarms measure what they say, as small as can be."""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    compound_bodies,
    compound_deaths,
    false_alarm_bodies,
    false_alarms,
    goodput,
    goodput_rivals,
    node_deaths,
    soak,
    soak_samples,
)
from benchmarks.compound_bodies import COPIES, Case, Outcome, and_successor, at_once, progress
from benchmarks.ddp_rivals import train_with_ddp
from benchmarks.goodput import Spell, Spells
from benchmarks.job_processes import processes
from steepest import StepResult


def test_progress_is_a_step_that_was_not_taken_before() -> None:
    straight = [(1, 1.0), (2, 2.0), (3, 7.0), (4, 8.0)]
    assert progress(straight, 2.5) == (4.5, 0)
    returned = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0), (3, 6.0), (4, 10.0), (5, 10.5)]
    assert progress(returned, 3.5) == (6.5, 2)
    with pytest.raises(ValueError, match="no step"):
        progress(straight, 9.0)


def test_the_table_compares_rows_of_one_round() -> None:
    ddp, train = (
        compound_deaths.rival_of("a worker", each) for each in ("DDP by hand, forked", "T")
    )
    assert (ddp, train) == ("DDP by hand, forked, 1 of 3", "T, 1 of 3")
    assert compound_deaths.rival_of("2 of 3 workers, ps", "T") == "T, 2 of 3"
    assert compound_deaths.rival_of("a worker and a server, copies", "T") == "T, 2 of 3"
    found = {
        "a worker": [Outcome(1.0, 0, "left"), Outcome(None, 0, "PeerLostError")],
        ddp: [Outcome(4.0, 41, ""), Outcome(2.0, 41, "")],
    }
    lines = compound_deaths.table(found, 2).splitlines()
    words = ["a", "worker", "1.00", "1.00..1.00", "0.250", "0", "1", "of", "2"]
    assert lines[3].split() == [*words, "left", "|", "PeerLostError"]
    assert lines[4].split() == [*ddp.split(), "3.00", "2.00..4.00", "41", "2", "of", "2"]


def test_rows_are_of_the_sections_and_seeds_of_the_rounds() -> None:
    names = list(compound_deaths.turns_of(["deaths", "calls"]))
    assert len(names) == len(set(names)) == len(compound_bodies.CASES) + 10
    assert {"worker in save", "server in set_strategy"} <= set(names)
    assert "a node cut, back, copies" in node_deaths.turns()
    seeds: list[int] = []

    def turn(seed: int) -> Outcome:
        seeds.append(seed)
        return Outcome(0.0, 0, "")

    compound_deaths.measure({"a": turn, "b": turn}, 2)
    assert seeds == [0, 0, 1, 1]


def test_goodput_is_of_neighbouring_spells(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(goodput, "processes", lambda: {"worker 0": 1, "spare 0": 2})
    monkeypatch.setattr(goodput, "kill", lambda name: {name: 1})
    spells = Spells(1, every=4.0, deaths=2, chance=random.Random(0), warm=2.0)

    def train() -> None:
        for step in range(100):
            spells.on_step(None, StepResult(step, 0, 0.0, {}, 3, ()))  # type: ignore[arg-type]

    with pytest.raises(goodput.AllSpellsOverError):
        train()
    quiet, deadly = spells.spells
    assert (quiet.seconds, quiet.samples, quiet.killed, quiet.deadly) == (8.0, 24, [], False)
    assert (deadly.seconds, deadly.killed, deadly.gap) == (8.0, ["worker 0"] * 2, 1.0)
    assert goodput.goodputs([quiet, deadly]) == [1.0]
    assert "goodput 100.0%" in goodput.text("ps", [quiet, deadly], 0, 0)
    half = Spell(True, 0.0, samples=12, seconds=8.0)
    assert goodput.goodputs([quiet, half, deadly, deadly]) == [0.5, 1.0]


def test_notes_of_a_job_count_each_step_as_it_was_taken_last(tmp_path: Path) -> None:
    first = [
        "b 1.0 0 0 2 1 0 1",
        "d 1.5 1",
        "b 2.0 1 0 2 1 4 5",  # nobody knows whether this was committed
        "d 2.5 2",
        "b 2.6 2 0 2 1 0",
        "b 9.0 1 0 2 1 4 5",  # set back
        "d 9.5 2",
        "b 10.0 2 0 1 1 0 1",  # alone, in place of two
        "d 10.5 3",
    ]
    other = ["b 1.1 0 1 2 1 2 3", "d 1.4 1", "b 2.1 1 1 2 1 2 2", "b 2.7 2 1 2 1 3"]
    successor = ["b 9.1 1 1 2 1 2 2", "b 9.8 2 1 2 0 5", "b 9.9 3 1 2 1 5", "b 10.1 2 1"]
    for pid, lines in enumerate((first, other, successor)):
        (tmp_path / f"worker {pid}").write_text("\n".join(lines) + "\n" * (pid < 2))
    found = goodput_rivals.read(str(tmp_path))
    assert found.done == {0: 1.4, 1: 2.5, 2: 10.5}
    assert [found.samples(step) for step in range(3)] == [4, 4, 2]
    assert found.counts == {0: 2, 1: 2, 2: 3, 3: 1, 4: 1, 5: 1}
    assert found.uneven(samples=6) == (0, 1)
    assert found.uneven(samples=5) == (2, 1)
    assert found.in_vain == 7
    assert found.steps(1.0, 2.5) == [0]
    quiet, deadly = Spell(False, 0.0, 24, seconds=8.0), Spell(True, 0.0, 12, ["1"], 2.0, 8.0)
    words = goodput.row("torchft", [quiet, deadly], found).split()
    assert words[:6] == ["torchft", "3", "2", "50.0%", "2.00", "1"]


def test_a_loop_of_the_rivals_runs_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(goodput_rivals, "SECONDS", 0.0)
    (tmp_path / goodput_rivals.END).write_text("50")
    goodput_rivals.own_loop(str(tmp_path))
    found = goodput_rivals.read(str(tmp_path))
    assert (found.counts.total(), found.uneven(), found.in_vain) == (50 * 32, (0, 0), 0)
    assert goodput_rivals.alive(str(tmp_path)) == [os.getpid()]


def test_a_rival_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(goodput_rivals.MODULES, "torchft", ["a_module_of_no_package"])
    assert goodput.main(["--rivals", "torchft"]) == 1
    assert (
        "torchft is left out: No module named 'a_module_of_no_package'" in capsys.readouterr().out
    )


@pytest.mark.parametrize("lock", list(false_alarm_bodies.HOLDS))
def test_pythons_lock_is_held(lock: str) -> None:
    """No other thread of the process runs meanwhile."""
    lines, done = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_hold, args=(lock, done))
    process.start()
    done.close()
    assert lines.poll(60)
    assert lines.recv() >= 0.3
    process.join()


def _hold(lock: str, done: Any) -> None:
    import threading

    looked, over = [time.monotonic()], threading.Event()

    def look() -> None:
        while not over.is_set():
            looked.append(time.monotonic())

    thread = threading.Thread(target=look)
    thread.start()
    while len(looked) < 100:
        os.sched_yield()
    false_alarm_bodies.HOLDS[lock](0.3)
    over.set()
    thread.join()
    done.send(max(later - sooner for sooner, later in itertools.pairwise(looked)))


def test_samples_of_epochs_are_added_up_also_when_steps_are_taken_again() -> None:
    def wrong(*steps: tuple[int, int, int]) -> list[str]:
        book = soak.Steps(6)
        for step, epoch, samples in steps:
            book.on_step(None, StepResult(step, epoch, 0.0, {}, samples, ()))  # type: ignore[arg-type]
        return book.wrong(1)

    whole = [(1, 0, 2), (2, 0, 2), (3, 0, 2), (4, 1, 2)]
    assert wrong(*whole) == wrong(*whole[:2], *whole) == []
    assert wrong((1, 0, 2), (2, 0, 2), (3, 1, 2)) == [
        "epoch 0 has 4 of 6 samples, by step {1: 2, 2: 2}"
    ]
    assert len(wrong(*whole[:3], (4, 0, 2), (5, 1, 2))) == 1


@pytest.mark.parametrize("lacks", [0, 2])
def test_steps_of_which_an_interrupted_call_did_not_hear_are_in_the_history(lacks: int) -> None:
    rows = [{"kind": "step", "step": n, "epoch": n // 4, "samples": 2} for n in range(1, 6)]
    history = [{"kind": "event"}, *(row for row in rows if row["step"] != lacks)]
    book, trainer = soak.Steps(6), SimpleNamespace(history=history)
    for step in (1, 5):
        book.on_step(trainer, StepResult(step, step // 4, 0.0, {}, 2, ()))  # type: ignore[arg-type]
    assert book.back == 0
    assert len(book.wrong(1)) == (1 if lacks else 0)
    book.on_step(trainer, StepResult(4, 1, 0.0, {}, 2, ()))  # type: ignore[arg-type]
    assert book.back == 2


def test_a_call_that_a_signal_ends_is_made_again_and_signals_between_calls_end_nothing() -> None:
    before, tries = signal.getsignal(signal.SIGINT), [2]
    interrupts = soak.Interrupts()
    try:

        def call() -> str:
            if tries[0]:
                tries[0] -= 1
                soak.to_driver(signal.SIGINT)
                threading.Event().wait(60.0)
            return "found"

        assert interrupts.call("fit", call) == "found"
        soak.to_driver(signal.SIGINT)
        assert interrupts.calls == {"fit": 2}
    finally:
        interrupts.end()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.long
def test_ddp_goes_back_to_its_checkpoint() -> None:
    data = (torch.ones(9, 2), torch.ones(9).long())
    config = {"network": functools.partial(torch.nn.Linear, 2, 2), "data": data, "batch": 2}
    config |= {"rate": 0.1, "seconds": 0.001, "steps": 110, "kill_step": 60}
    stamps, killed = train_with_ddp(config, 2, [1], warm=True)
    reached = max(step for step, when in stamps if when <= killed)
    pause, again = progress(stamps, killed)
    assert pause > 0
    assert again >= reached - 50
    assert stamps[-1][0] == 110


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
class TestOnRay:
    """The same on real processes."""

    @pytest.mark.parametrize(
        "plan",
        [at_once("worker 1", "server 1"), and_successor("worker 1")],
        ids=["pair", "successor"],
    )
    def test_deaths_by_plan(self, plan: Any) -> None:
        found = compound_bodies.turn(Case(plan, COPIES), seconds=0.001)
        assert found.pause is not None, found
        assert found.pause > 0
        assert found.again == 0
        assert found.then

    def test_a_death_in_a_call(self) -> None:
        found = compound_bodies.call_turn("save", "worker 1", seconds=0.001)
        assert found.pause is not None, found

    def test_goodput(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(goodput, "WANTED", 0.0)
        spells = Spells(1, every=1.0, deaths=1, chance=random.Random(0), warm=0.0)
        assert goodput.measure("ps", spells, seconds=0.001) == (0, 0)
        found = spells.spells
        assert [spell.deadly for spell in found] == [False, True]
        assert len(found[1].killed) == 1
        assert all(rate > 0 for rate in goodput.goodputs(found))

    def test_a_soak_of_three_bouts(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(soak, "ACCURACY", 0.2)
        for module in (soak, soak_samples):
            monkeypatch.setattr(module, "LEAST_SAMPLES", 3)
        options = argparse.Namespace(
            minutes=0.0, strategy=["ps, copies"], workers=2, steps=40, seed=0
        )
        soak.soak(options)
        said = capsys.readouterr().out
        assert "3 bouts, " in said
        assert "epochs without each sample once 0" in said
        assert "ended by" not in said
        assert "log of a bout" in said


@pytest.mark.long
@pytest.mark.cluster
def test_nobody_is_given_up_while_the_driver_pauses() -> None:
    alarms = false_alarm_bodies.Alarms(
        minutes=0.1, workers=2, servers=1, held=0.5, every=2.0, paused=0.5, pause_every=1.0
    )
    seen, pauses = false_alarms.watch(alarms)
    assert pauses >= 1
    assert sum(seen.holds.values()) >= 3
    assert seen.events == (), false_alarms.text(alarms, seen, pauses)


def test_a_job_that_is_not_here_has_no_processes() -> None:
    assert processes() == {}
    with pytest.raises(KeyError):
        compound_bodies.kill("worker 0", number=signal.SIGCONT)
