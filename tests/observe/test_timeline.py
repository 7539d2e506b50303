"""The timeline of a job on virtual time: whose spans it has, and that they are as long as they are known to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import steepest
from steepest import DistributedSGD
from steepest.cli.main import main
from steepest.core.engine.spans import SPAN, RoleSpans, SpanKind, SpanRing
from steepest.core.messages.message import server_peer, worker_peer
from steepest.errors import ConfigurationError
from steepest.observe.timeline.recorded import RECORD, ClockReading, NodeClock
from steepest.observe.timeline.trace_file import check_target, read_trace, write_trace
from tests.observe.timed_runs import SECONDS, STEPS, creator, record
from tests.simulation.run import Simulation, run_config


def spans(events: list[dict[str, Any]], name: str, who: str) -> list[dict[str, Any]]:
    """The spans of a kind in the lane of a role."""
    lanes = {
        (e["pid"], e["tid"])
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name" and e["args"]["name"] == who
    }
    found = [e for e in events if e["ph"] == "X" and e["cat"] == name]
    return [e for e in found if (e["pid"], e["tid"]) in lanes]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_workers_spans_are_as_long_as_its_computation_and_its_wait_for_the_slowest(
    tmp_path: Path, strategy: str, workers: int
) -> None:
    events, about = record(tmp_path / "trace.json", strategy, workers)
    assert about["strategy"] == strategy
    assert about["lost_spans"] == 0
    slowest = max(SECONDS[:workers])
    for worker in range(workers):
        computed = spans(events, "compute", f"worker {worker}")
        assert [span["args"]["step"] for span in computed] == [2, 3, 4]
        lengths = [span["dur"] / 1e6 for span in computed]
        waits = spans(events, "wait", f"worker {worker}")
        inside = {
            span["args"]["step"]: sum(
                wait["dur"] / 1e6
                for wait in waits
                if span["ts"] <= wait["ts"] and wait["ts"] + wait["dur"] <= span["ts"] + span["dur"]
            )
            for span in computed
        }
        busy = [length - inside[step] for step, length in zip((2, 3, 4), lengths, strict=True)]
        assert busy == pytest.approx([SECONDS[worker]] * STEPS, abs=0.05)
        # from one step's beginning to the next it is the slowest worker's time
        begun = [span["ts"] / 1e6 + inside[span["args"]["step"]] for span in computed]
        assert np.diff(begun) == pytest.approx([slowest] * (STEPS - 1), abs=0.05)


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "async", "ssp", "simple", "local"])
def test_servers_stage_reduce_and_apply_each_step_once_for_each_chunk(
    tmp_path: Path, strategy: str
) -> None:
    events, about = record(tmp_path / "trace.json", strategy, 2)
    roles = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    servers = [role for role in roles if role.startswith("server")]
    each = 1 if about["needs_all"] else 2  # versions of a step
    for kind, count in (("stage", 2), ("reduce", each), ("apply", each)):
        found = [span for server in servers for span in spans(events, kind, server)]
        assert len(found) == STEPS * count, (kind, found)
        assert {span["args"]["step"] for span in found} == {2, 3, 4}
    pushes = [e for e in events if e["ph"] == "b" and e["name"] == "push"]
    pulls = [e for e in events if e["ph"] == "b" and e["name"] == "pull"]
    assert len(pushes) == 2 * STEPS
    assert len(pulls) >= 2 * STEPS
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "e"}
    assert all(ends[e["id"]] >= e["ts"] for e in pushes + pulls)


def test_spans_of_a_lane_lie_in_each_other_or_apart(tmp_path: Path) -> None:
    events, _ = record(tmp_path / "trace.json", "ps", 3)
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in lanes.values():
        open_until: list[float] = []
        for span in sorted(lane, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= span["ts"]:
                open_until.pop()
            end = span["ts"] + span["dur"]
            assert not open_until or end <= open_until[-1] + 0.01
            open_until.append(end)


def test_a_successor_of_a_dead_worker_is_recorded_too(tmp_path: Path) -> None:
    with (
        Simulation(seed=1, cpus=(8,)).running() as simulation,
        DistributedSGD(creator, 2, run_config=run_config()) as trainer,
        trainer.timeline(tmp_path / "trace.json"),
    ):
        trainer.fit(steps=2, progress=False)
        pid = {each.name: each.pid for each in trainer.processes()}["worker 1"]
        simulation.runtime.kill(pid)
        trainer.fit(steps=4, progress=False)
    events, _ = read_trace(tmp_path / "trace.json")
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert sum(name.startswith("worker 1") for name in names) == 2
    assert 6 in {span["args"]["step"] for span in spans(events, "compute", "worker 1")}


def test_nothing_is_recorded_before_and_after_the_block(tmp_path: Path) -> None:
    events, _ = record(tmp_path / "trace.json", "ps", 1)
    steps = {e["args"]["step"] for e in events if e["ph"] == "X" and "step" in e["args"]}
    assert steps == {2, 3, 4}


def fails(trainer: DistributedSGD, path: Path) -> None:
    with trainer.timeline(path):
        trainer.step()
        raise KeyError


def test_what_a_block_raises_is_raised_and_its_timeline_is_written(tmp_path: Path) -> None:
    with (
        Simulation(seed=1).running(),
        DistributedSGD(creator, 1, run_config=run_config()) as trainer,
    ):
        with pytest.raises(KeyError):
            fails(trainer, tmp_path / "trace.json")
        within = trainer.timeline(tmp_path / "third.json")
        with (
            trainer.timeline(tmp_path / "other.json"),
            pytest.raises(ConfigurationError, match="one is recorded at a time"),
        ):
            within.__enter__()
    events, _ = read_trace(tmp_path / "trace.json")
    assert spans(events, "compute", "worker 0")


def test_clocks_of_other_nodes_are_read_at_the_beginning_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with (
        Simulation(seed=1, cpus=(1, 1)).running(),
        DistributedSGD(creator, 2, run_config=run_config()) as trainer,
    ):
        with trainer.timeline(path):
            trainer.fit(steps=2, progress=False)
        nodes = {process.node for process in trainer.processes()}
    _, about = read_trace(path)
    assert {clock["node"] for clock in about["clocks"]} == nodes
    assert len(nodes) == 2
    readings = sorted(clock["readings"] for clock in about["clocks"])
    assert readings == [0, 2]  # the driver's own node needs none
    for clock in about["clocks"]:  # the simulation has one clock for all
        assert abs(clock["ahead_ms"]) <= clock["error_ms"]


# -- the ring ------------------------------------------------------------------------------------


def filled(ring: SpanRing, count: int) -> None:
    spans_of = RoleSpans(ring, worker_peer(3))
    for number in range(ring.count, ring.count + count):
        spans_of.add(SpanKind.PUSH, 0.0, number, 1, 2)


@pytest.mark.parametrize("count", [0, 1, 5, 7, 8, 9, 20])
def test_a_ring_returns_the_newest_spans_in_order(count: int) -> None:
    ring = SpanRing(8)
    filled(ring, count)
    told, block = ring.since(0)
    numbers = np.frombuffer(block, RECORD)["number"].tolist()
    # one place is left out that may be written to meanwhile
    assert (told, numbers) == (count, list(range(max(0, count - 7), count)))
    filled(ring, 3)
    assert np.frombuffer(ring.since(told)[1], RECORD)["number"].tolist() == list(
        range(count, count + 3)
    )


def test_a_ring_returns_nothing_where_little_is_new() -> None:
    ring = SpanRing(8)
    filled(ring, 3)
    assert ring.since(0, least=4) == (0, b"")
    assert ring.since(3) == (3, b"")


def test_a_record_is_read_as_it_is_packed() -> None:
    ring = SpanRing(2)
    RoleSpans(ring, server_peer(7)).add(SpanKind.STAGE, 1.5, 9, 8, 6, 5)
    (found,) = np.frombuffer(ring.since(0)[1], RECORD)
    assert RECORD.itemsize == SPAN.size
    assert found.tolist()[2:] == (9, 8, 6, 5, 7, 1, SpanKind.STAGE)
    assert found["began"] == 1.5


# -- clocks --------------------------------------------------------------------------------------


def test_a_clock_is_read_in_the_middle_of_a_round_trip() -> None:
    reading = ClockReading.of_trip(10.0, 103.5, 11.0)
    assert (reading.at, reading.ahead, reading.error) == (10.5, 93.0, 0.5)


def test_a_clock_that_is_ahead_and_drifts_is_set_back_along_a_line() -> None:
    clock = NodeClock([ClockReading(100.0, 50.0, 0.001), ClockReading(200.0, 51.0, 0.002)])
    own = np.array([150.0, 200.5, 251.0])
    assert clock.to_driver(own).tolist() == pytest.approx([100.0, 150.0, 200.0])
    assert (clock.error, clock.ahead) == (0.002, 50.0)
    assert NodeClock().to_driver(own).tolist() == own.tolist()


# -- files ---------------------------------------------------------------------------------------

BAD: dict[str, tuple[str, str]] = {
    "half": ('{"otherData": {"steepest": 1}, "traceEvents": [{"ph"', "no whole trace"),
    "binary": ("\x00\x01", "no whole trace"),
    "list": ("[]", "no trace of steepest"),
    "another tool": ('{"traceEvents": []}', "no trace of steepest"),
    "another version": ('{"otherData": {"steepest": 99}, "traceEvents": []}', "format 99"),
    "no events": ('{"otherData": {"steepest": 1}}', "no list of events"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, what: str) -> None:
    text, said = BAD[what]
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        read_trace(tmp_path / "trace.json")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_trace(tmp_path / "trace.json")


def _missing(folder: Path) -> Path:
    return folder / "none" / "trace.json"


@pytest.mark.parametrize("where", [_missing, lambda folder: folder, lambda folder: ""])
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_recorded(
    tmp_path: Path, where: Callable[[Path], Any]
) -> None:
    with pytest.raises(ConfigurationError, match="timeline"):
        check_target(where(tmp_path))


def test_a_trace_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [{"ph": "X"}], {})

    def failing() -> Any:
        yield {"ph": "X"}
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigurationError, match="No space left"):
        write_trace(path, failing(), {})
    assert json.loads(path.read_text())["traceEvents"] == [{"ph": "X"}]
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def loop() -> None:
    """A loop of its own, of three steps."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(12, 3), torch.ones(12, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = steepest.prepare(model, optimizer, loader)
    for _ in steepest.epochs(1):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


def test_a_loop_of_ones_own_has_a_timeline(tmp_path: Path) -> None:
    with Simulation(seed=1).running():
        steepest.run(
            loop,
            run_config=run_config(),
            timeline=tmp_path / "trace.json",
            progress=False,
        )
    events, _ = read_trace(tmp_path / "trace.json")
    steps = [span["args"]["step"] for span in spans(events, "compute", "worker 0")]
    assert steps == [1, 2, 3]


def test_a_run_whose_timeline_cannot_be_written_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(_missing(tmp_path))
    with pytest.raises(ConfigurationError, match="cannot be written there"):
        steepest.run(loop, timeline=path)
    assert main(["run", "no_such_script.py", "--timeline", path]) == 1
    assert "cannot be written there" in capsys.readouterr().err
