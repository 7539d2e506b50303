"""What a trace says: its replay against closed forms, and the sentences."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from steepest.cli.main import main
from steepest.errors import ConfigurationError
from steepest.observe.timeline.explain import explain, stragglers
from steepest.observe.timeline.parsed import parse
from steepest.observe.timeline.replay import PARTS, all_alike, replay, without_slowness
from tests.observe.hand_made_traces import (
    APPLY,
    COMMIT,
    PULL,
    REDUCE,
    REST,
    TRANSFER,
    span,
    synchronous,
    written,
)
from tests.observe.timed_runs import record
from tests.odd_values import mutated

STEPS = 6


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_replay_without_changes_takes_the_recorded_time(tmp_path: Path, workers: int) -> None:
    times = [[10.0 + 3 * worker + step for worker in range(workers)] for step in range(STEPS)]
    found = replay(parse(written(tmp_path / "t.json", synchronous(times))))
    # from the first commit to the last; the first step is not among them
    expected = [max(each) + REST for each in times[1:]]
    assert 1e3 * found.seconds == pytest.approx(sum(expected) / len(expected))
    for step, whole in zip(found.steps, expected, strict=True):
        assert step.last == workers - 1
        assert 1e3 * sum(step.parts.values()) == pytest.approx(whole)
        assert set(step.parts) == set(PARTS)


def test_parts_of_a_step_are_those_of_its_last_worker(tmp_path: Path) -> None:
    found = replay(parse(written(tmp_path / "t.json", synchronous([[10.0, 30.0]] * 3))))
    parts = {name: 1e3 * seconds for name, seconds in found.steps[0].parts.items()}
    assert parts == pytest.approx(
        {
            "idle": 0.0,
            "load": 0.0,
            "compute": 30.0,
            "push": 0.0,
            "transfer": TRANSFER + REDUCE,
            "commit": COMMIT,
            "apply": APPLY,
            "pull": PULL,
        }
    )
    assert 1e3 * found.steps[0].ahead[0] == pytest.approx(20.0)


def test_the_cost_of_a_slow_worker_is_the_replay_with_the_median_of_the_others(
    tmp_path: Path,
) -> None:
    trace = parse(written(tmp_path / "t.json", synchronous([[10.0, 30.0, 14.0]] * STEPS)))
    usual = replay(trace)
    assert 1e3 * usual.seconds == pytest.approx(30.0 + REST)
    assert 1e3 * replay(trace, without_slowness(1)).seconds == pytest.approx(14.0 + REST)
    assert 1e3 * replay(trace, without_slowness(0)).seconds == pytest.approx(30.0 + REST)
    assert 1e3 * replay(trace, all_alike).seconds == pytest.approx(14.0 + REST)
    slow = stragglers(trace, usual)
    assert slow is not None
    assert (slow.workers, 1e3 * slow.without) == ((1,), pytest.approx(14.0 + REST))


def test_two_slow_workers_of_one_node_are_found_together(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", synchronous([[10.0, 30.0, 30.0, 10.0, 12.0]] * STEPS))
    trace = parse(path)
    usual = replay(trace)
    assert replay(trace, without_slowness(1)).seconds == pytest.approx(usual.seconds)
    slow = stragglers(trace, usual)
    assert slow is not None
    assert (slow.workers, 1e3 * slow.without) == ((1, 2), pytest.approx(12.0 + REST))
    assert "If workers 1 and 2 took" in explain(path)


def test_workers_that_are_slow_in_turn_are_no_stragglers(tmp_path: Path) -> None:
    turns = [[30.0 if worker == step % 9 else 10.0 for worker in range(9)] for step in range(27)]
    path = written(tmp_path / "t.json", synchronous(turns))
    trace = parse(path)
    usual = replay(trace)
    assert 1e3 * usual.seconds == pytest.approx(30.0 + REST)
    assert 1e3 * replay(trace, all_alike).seconds == pytest.approx(10.0 + REST)
    assert stragglers(trace, usual) is None
    assert "take turns at being slow" in explain(path)


def test_a_backup_workers_gradient_is_not_awaited(tmp_path: Path) -> None:
    events = synchronous([[10.0, 12.0, 100.0]] + [[10.0, 12.0, 13.0]] * 3, needed=2)
    trace = parse(written(tmp_path / "t.json", events))
    found = replay(trace)
    # worker 2 begins each step late, and is never the second of three
    assert {step.last for step in found.steps} <= {0, 1}
    assert 1e3 * found.seconds == pytest.approx(12.0 + REST)


def test_a_servers_update_in_a_workers_process_waits_for_that_worker(tmp_path: Path) -> None:
    events = synchronous([[10.0, 30.0]] * STEPS)
    for (
        event
    ) in events:  # the server lives with worker 1, which takes pushes when its own share is done
        if event["pid"] == 99:
            event["pid"], event["tid"] = 3, 2
    for event in events:
        if event["ph"] == "X" and event["cat"] == "stage" and event["args"]["worker"] == 0:
            event["ts"] += 1e3 * 20.0
    trace = parse(written(tmp_path / "t.json", events, "allreduce"))
    assert 1e3 * replay(trace).seconds == pytest.approx(30.0 + REST)
    assert 1e3 * replay(trace, without_slowness(1)).seconds == pytest.approx(10.0 + REST)


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_run_on_virtual_time_is_replayed_as_it_was(tmp_path: Path, strategy: str) -> None:
    record(tmp_path / "trace.json", strategy, 3)  # 0.5, 2 and 0.25 seconds
    trace = parse(tmp_path / "trace.json")
    usual = replay(trace)
    assert usual.seconds == pytest.approx(2.0, abs=0.02)
    assert replay(trace, without_slowness(1)).seconds == pytest.approx(0.5, abs=0.02)
    assert {step.last for step in usual.steps} == {1}


# -- sentences -----------------------------------------------------------------------------------


def test_the_sentences_name_parts_who_is_awaited_what_it_costs_and_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "t.json", synchronous([[10.0, 30.0, 14.0]] * 11))
    assert main(["explain", str(path)]) == 0
    said = capsys.readouterr().out
    assert "10 steps of 3 workers and 1 server under 'ps': 38 ms a step" in said
    assert "30 ms (79 %) computing" in said
    assert "Worker 1 is the last in 10 of 10 steps; the others wait 18 ms for it" in said
    assert "would take 22 ms: that slowness costs 42 %" in said
    assert "backup_workers=1" in said


#: Milliseconds of computing and of what is in it; nodes; what is proposed, and what is not.
ADVICE = {
    "computing": (100.0, {}, 1, "free cores", "faster devices"),
    "computing, two nodes": (100.0, {}, 2, "more workers, or faster devices", "cores"),
    "loading": (100.0, {"load": 60.0}, 1, "DataLoader", "num_servers"),
    "moving": (2.0, {"push": 1.0}, 1, 'strategy="local"', "wire_dtype"),
    "moving, two nodes": (2.0, {"push": 1.0}, 2, "wire_dtype", "greater batches"),
}


def advice(path: Path, events: list[dict[str, Any]], **about: Any) -> str:
    last = explain(written(path / "t.json", events, **about)).splitlines()[-1]
    assert last.startswith("What would help: ")
    return last


@pytest.mark.parametrize("name", ADVICE)
def test_the_advice_is_about_the_greatest_part(tmp_path: Path, name: str) -> None:
    """Between hosts fewer bytes help, inside one where they cross no link they do not."""
    computed, inside, nodes, word, other = ADVICE[name]
    events = synchronous([[computed, computed]] * STEPS)
    for event in list(events):
        if event["ph"] == "X" and event["cat"] == "compute":
            began = event["ts"] / 1e3
            for kind, milliseconds in inside.items():
                about = {**event["args"], "chunk": 0}
                events.append(span(event["pid"], kind, began, began + milliseconds, **about))
    last = advice(tmp_path, events, nodes=nodes)
    assert word in last
    assert other not in last
    assert "num_servers" not in last  # one server has the one chunk


def test_more_servers_are_proposed_where_there_are_chunks_for_them(tmp_path: Path) -> None:
    """An update is shared chunk by chunk."""
    events = synchronous([[1.0, 1.0]] * STEPS)
    for event in events:
        if event["ph"] == "X" and event["cat"] == "apply":
            event["dur"] *= 3
    assert "1 server share 1 chunk" in advice(tmp_path, events)
    assert "smaller chunk_bytes=, and num_servers=" in advice(tmp_path, events)
    updates = [each for each in events if each["ph"] == "X" and each["cat"] == "apply"]
    others = [{**each, "args": {**each["args"], "chunk": 1}} for each in updates]
    assert "more servers share it (num_servers=)" in advice(tmp_path, events + others)


def test_a_slow_worker_of_the_only_machine_needs_no_other_one(tmp_path: Path) -> None:
    events = synchronous([[10.0, 30.0, 14.0]] * STEPS)
    assert "another machine" not in advice(tmp_path, events)
    assert "for worker 1 as much of this machine" in advice(tmp_path, events)
    assert "another machine for worker 1;" in advice(tmp_path, events, nodes=3)


def test_workers_that_do_not_wait_for_each_other_are_told_of_one_by_one(tmp_path: Path) -> None:
    events = synchronous([[10.0, 30.0]] * STEPS, needed=1)
    said = explain(written(tmp_path / "t.json", events, "async", needs_all=False))
    assert "bytes" not in said
    assert "12 shares of 2 workers and 1 server under 'async'" in said
    assert "Worker 0: 6 shares, 10 ms of work each" in said
    assert "If worker 1 were as fast as the median of the others" in said


def test_a_trace_of_no_step_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", [])
    with pytest.raises(ConfigurationError, match="no whole step"):
        explain(path)
    path = written(tmp_path / "t.json", [{"ph": "X"}])
    with pytest.raises(ConfigurationError, match="makes no sense"):
        explain(path)


@pytest.mark.parametrize("needs_all", [True, False])
def test_a_trace_with_any_value_in_it_is_explained_or_refused(
    tmp_path: Path, needs_all: bool
) -> None:
    chance, events = random.Random(0), synchronous([[10.0, 30.0]] * 3)
    refused = 0
    for _ in range(300):
        other = events.copy()
        for at in chance.sample(range(len(events)), 2):
            other[at] = mutated(chance, events[at])
        try:
            text = explain(written(tmp_path / "t.json", other, needs_all=needs_all))
        except ConfigurationError as error:
            refused += 1
            assert "no whole" in str(error)  # noqa: PT017 - most are refused, and some are not
        else:
            assert text.isprintable() or "\n" in text
            assert "nan" not in text
    assert 50 < refused < 300
    deep = '{"otherData": {"steepest": 1}, "traceEvents": ' + "[" * 100_000
    (tmp_path / "t.json").write_text(deep)
    with pytest.raises(ConfigurationError, match="no whole trace"):
        explain(tmp_path / "t.json")


def test_the_command_refuses_what_is_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half.json").write_text('{"otherData": {"st')
    assert main(["explain", str(tmp_path / "half.json")]) == 1
    assert "is no whole trace" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe.json")
    assert main(["explain", str(tmp_path / "pipe.json")]) == 1
    assert "no trace to be read (it is no regular file)" in capsys.readouterr().err
