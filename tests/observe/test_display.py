"""What `fit` shows: whole lines in log files, one live line in terminals and notebooks."""

from __future__ import annotations

import io
import logging
import math
import re
import sys
import types
from dataclasses import replace
from typing import Any

import pytest

from steepest import DistributedSGD, EvaluationResult, StepResult
from steepest.errors import ConfigurationError
from steepest.observe.display import (
    ENDLESS,
    Display,
    NotebookLine,
    ProgressBar,
    ProgressLines,
    display,
)
from steepest.testing import linear_model_creator
from tests.simulation.run import Simulation, run_config


class Trainer:
    num_workers = 3


class Stream(io.StringIO):
    """Standard error, of a terminal or of a file."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def stderr(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> Stream:
    """Puts another standard error in place, within a test: pytest has its own outside."""
    stream = Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "200"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    return stream


def step(number: int, staleness: tuple[int, ...] = (0, 0)) -> StepResult:
    return StepResult(number, number // 100, 1 / number, {"accuracy": 0.5}, 64, staleness)


def take(shown: Display, clock: list[float], steps: int, seconds: float = 0.5) -> None:
    """Takes steps of so many seconds each."""
    shown.on_fit_begin(Trainer, steps)
    for number in range(1, steps + 1):
        clock[0] += seconds
        shown.on_step(Trainer, step(number))
    shown.on_fit_end(Trainer)


def screen(text: str) -> list[str]:
    """The lines that a terminal shows of what was written to it."""
    lines, column = [""], 0
    for part in re.split("([\r\n])", text):
        if part in ("\r", "\n"):
            column = 0
            lines += [""] * (part == "\n")
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def test_a_log_file_gets_a_whole_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    file = stderr(monkeypatch, terminal=False)
    clock = [0.0]
    take(ProgressLines(clock=lambda: clock[0]), clock, steps=121)
    text = file.getvalue()
    assert "\r" not in text
    assert text.endswith("\n")
    lines = text.splitlines()
    shown = [int(re.search(r"step (\d+)", line)[1]) for line in lines]  # type: ignore[index]
    assert shown == [1, 21, 41, 61, 81, 101, 121, 121]
    assert lines[2] == (
        "epoch 0, step 41 (41/121, 00:40 left), loss 0.0244, accuracy 0.500, 128 samples/s, "
        "3 workers"
    )
    assert "(121/121, took 01:00)" in lines[-1]


def test_rates_are_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    file = stderr(monkeypatch, terminal=False)
    clock = [0.0]
    shown = ProgressLines(clock=lambda: clock[0])
    shown.on_fit_begin(Trainer, 200)
    for number in range(1, 102):
        clock[0] += 0.5 if number < 62 else 1.0
        shown.on_step(Trainer, step(number, (1, 4)))
    last = file.getvalue().splitlines()[-1]
    assert "64 samples/s" in last
    assert "01:39 left" in last
    assert "staleness 2.5" in last


@pytest.mark.parametrize("steps", [ENDLESS, 1000])
def test_of_a_run_that_ends_by_itself_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """A loop of a user's own that is left by `break`, in an epoch of so many steps."""
    file = stderr(monkeypatch, terminal=False)
    clock = [0.0]
    shown = ProgressLines(clock=lambda: clock[0])
    shown.on_fit_begin(Trainer, steps)
    for number in range(1, 4):
        clock[0] += 0.5
        shown.on_step(Trainer, step(number))
    shown.on_step(Trainer, replace(step(4), samples=0, loss=math.nan))
    shown.on_fit_end(Trainer)
    first, last = file.getvalue().splitlines()
    assert re.match(r"epoch 0, step 1( \(1/1000, .*\))?, loss 1.0000", first)
    assert re.match(r"epoch 0, step 3 \((3/1000, )?took 00:01\), loss 0.3333", last)


def test_of_a_sampler_without_end_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    file = stderr(monkeypatch, terminal=False)
    clock = [0.0]
    take(ProgressLines(clock=lambda: clock[0]), clock, steps=3)
    shown = ProgressLines(clock=lambda: clock[0])
    shown.on_fit_begin(Trainer, 10**10)
    clock[0] += 0.005
    shown.on_step(Trainer, step(1))
    assert file.getvalue().splitlines()[-1].startswith("epoch 0, step 1 (1/10000000000), loss")


def test_steps_that_are_taken_again_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    file = stderr(monkeypatch, terminal=False)
    clock = [0.0]
    shown = ProgressLines(seconds=0.0, clock=lambda: clock[0])
    shown.on_fit_begin(Trainer, 10)
    for number in (21, 22, 23, 24, 22, 23, 24, 25, 26, 27, 28, 29, 30):
        clock[0] += 1.0
        shown.on_step(Trainer, step(number))
    shown.on_fit_end(Trainer)
    counted = [re.search(r"\((\d+)/10", line)[1] for line in file.getvalue().splitlines()]  # type: ignore[index]
    assert [int(count) for count in counted] == [1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]


def test_a_pause_and_steps_that_are_undone_do_not_change_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a node's death, say: 40 seconds without a step, and the last 30 steps again."""
    file = stderr(monkeypatch, terminal=False)
    clock = [0.0]
    shown = ProgressLines(seconds=1.0, clock=lambda: clock[0])
    shown.on_fit_begin(Trainer, 100_000)

    def steps(begin: int, end: int, seconds: float) -> list[str]:
        already = len(file.getvalue().splitlines())
        for number in range(begin, end):
            clock[0] += seconds
            shown.on_step(Trainer, step(number))
        return file.getvalue().splitlines()[already:]

    assert "16:10 left)" in steps(1, 3000, 0.01)[-1]
    clock[0] += 40.0
    told = steps(2970, 4000, 0.01)
    assert len(told) == 11
    assert all("16:" in line or "15:5" in line for line in told), told
    slow = steps(4000, 4005, 20.0)  # no pause: the third one is believed
    assert re.search(r"5\d\d:\d\d:\d\d left", slow[-1]), slow


def test_an_evaluation_is_shown_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    file = stderr(monkeypatch, terminal=False)
    shown = ProgressLines(seconds=0.0, clock=lambda: 0.0)
    shown.on_fit_begin(Trainer, 2)
    shown.on_step(Trainer, step(1))
    shown.on_evaluation(Trainer, EvaluationResult(0.25, {"accuracy": 0.75}, 10))
    shown.on_step(Trainer, step(2))
    first, second = file.getvalue().splitlines()
    assert "validation" not in first
    assert "validation loss 0.2500, validation accuracy 0.750" in second


def test_in_a_terminal_one_line_stays_and_what_is_logged_is_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = stderr(monkeypatch, terminal=True)
    clock = [0.0]
    shown = ProgressBar(clock=lambda: clock[0])
    shown.on_fit_begin(Trainer, 40)
    for number in range(1, 41):
        clock[0] += 0.5
        shown.on_step(Trainer, step(number))
        if number == 20:
            logging.getLogger("steepest.runtime.recovery").warning("worker 1 died")
    shown.on_fit_end(Trainer)
    sys.stderr.write("after\n")
    lines = screen(terminal.getvalue())
    assert lines[0] == "worker 1 died"
    assert lines[1].startswith("100%|##########| epoch 0, step 40 (40/40, took 00:20), loss")
    assert lines[2:] == ["after", ""]


def test_handlers_are_as_before_when_fit_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr(monkeypatch, terminal=True)
    before = list(logging.root.handlers)
    clock = [0.0]
    take(ProgressBar(clock=lambda: clock[0]), clock, 3)
    assert logging.root.handlers == before


def test_a_notebook_has_one_line_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[list[str]] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            outputs[-1].append(data["text/plain"])

    def show(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        outputs.append([data["text/plain"]])
        return Handle()

    ipython: Any = types.ModuleType("IPython")
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = show
    ipython.get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    (shown,) = display(True)
    assert isinstance(shown, NotebookLine)
    clock = [0.0]
    shown._clock = lambda: clock[0]
    take(shown, clock, 5)
    take(shown, clock, 5)
    assert len(outputs) == 2  # cells
    assert all("step 5 (5/5, took 00:02)" in cell[-1] for cell in outputs)


def test_a_terminal_gets_a_bar_and_anything_else_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = stderr(monkeypatch, terminal=True)

    def kinds(progress: bool | str) -> list[type]:
        return [type(shown) for shown in display(progress)]

    assert kinds(True) == [ProgressBar]
    assert kinds("lines") == [ProgressLines]
    assert kinds(False) == []
    monkeypatch.setenv("TERM", "dumb")
    assert kinds(True) == [ProgressLines]
    monkeypatch.setenv("TERM", "xterm")
    terminal.terminal = False
    assert kinds(True) == [ProgressLines]
    assert kinds("bar") == [ProgressBar]


def test_fit_takes_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    file = stderr(monkeypatch, terminal=False)
    with (
        Simulation(1).running(),
        DistributedSGD(linear_model_creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=3)
        assert "(3/3, took 00:00), loss" in file.getvalue()
        assert "\r" not in file.getvalue()
        trainer.fit(steps=3, progress="bar")
        assert "100%|" in file.getvalue()
        with pytest.raises(ConfigurationError, match="progress='dots': give one of"):
            trainer.fit(steps=3, progress="dots")
