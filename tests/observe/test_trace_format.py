"""A trace keeps the rules of Chrome's trace-event format, in which viewers such as Perfetto read it.

The rules are those of "Trace Event Format" (Google, 2016): the JSON object format, and of each phase the fields that it
must have.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.observe.timed_runs import record

#: Phases that may be there, with the fields that each needs beside "ph", "name", "pid" and "tid".
FIELDS = {
    "M": {"args"},
    "X": {"ts", "dur", "cat"},
    "b": {"ts", "cat", "id"},
    "e": {"ts", "cat", "id"},
}


def number_of(event: dict[str, Any], field: str) -> float:
    """A field's finite number, in microseconds from 0 on."""
    value = event[field]
    assert isinstance(value, int | float), event
    assert not isinstance(value, bool), event
    assert math.isfinite(value), event
    assert value >= 0, event
    return float(value)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "async", "local", "simple"])
def test_a_trace_keeps_the_rules_of_its_format(tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "trace.json"
    record(path, strategy, 2)

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    whole = json.loads(path.read_text(), parse_constant=refused)
    assert whole.keys() <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events = whole["traceEvents"]
    for event in events:
        assert event["ph"] in FIELDS, event
        assert event.keys() >= {"name", "pid", "tid"} | FIELDS[event["ph"]], event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        assert {type(event["pid"]), type(event["tid"])} == {int}, event  # not a bool either
        assert isinstance(event.get("args", {}), dict), event
        for field in {"ts", "dur"} & event.keys():
            number_of(event, field)
    named(events)
    paired(events)
    assert {event["ph"] for event in events} >= {"M", "X"}


def named(events: list[dict[str, Any]]) -> None:
    """Each process and lane with events has one name, given in metadata before them."""
    names = Counter(
        (event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else 0)
        for event in events
        if event["ph"] == "M"
    )
    assert {name for name, _, _ in names} <= {
        *("process_name", "process_labels", "process_sort_index"),
        *("thread_name", "thread_sort_index"),
    }
    assert set(names.values()) == {1}
    known: set[tuple[str, int, int]] = set()
    for event in events:
        if event["ph"] == "M":
            assert event["args"], event
            known.add((event["name"], event["pid"], event["tid"]))
            continue
        assert ("process_name", event["pid"], 0) in known, event
        assert ("thread_name", event["pid"], event["tid"]) in known, event


def paired(events: list[dict[str, Any]]) -> None:
    """Each asynchronous span has a beginning and, in the file and in time, an end after it."""
    begun: dict[tuple[str, Any], dict[str, Any]] = {}
    ended = set()
    for event in events:
        key = event.get("cat", ""), event.get("id")
        if event["ph"] == "b":
            assert key not in begun, event
            begun[key] = event
        elif event["ph"] == "e":
            began = begun[key]
            assert key not in ended, event
            ended.add(key)
            assert event["ts"] >= began["ts"], event
            same = ("name", "pid", "tid")
            assert [event[field] for field in same] == [began[field] for field in same], event
    assert begun.keys() == ended
