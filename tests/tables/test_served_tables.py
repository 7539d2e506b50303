"""Modules that serve exported tables: in place, exported, by several consumers with cursors of their own."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from torch import Tensor

from steepest import Callback, DistributedSGD, ExportedTable, ServedTable, StepResult
from steepest.errors import ConfigurationError
from steepest.tables.rows.eviction import LRU
from steepest.tables.rows.initial import Normal
from tests.example_modules import imported
from tests.simulation.run import Simulation
from tests.table_jobs import trainer, words

UNKNOWN = 0.25
ALL = torch.arange(70)


def exported(ids: list[int], unknown: float = UNKNOWN, **more: Any) -> ExportedTable:
    values = torch.tensor(ids, dtype=torch.float32)[:, None].expand(-1, 3) / 2
    return ExportedTable("t", torch.tensor(ids, dtype=torch.int64), values, unknown=unknown, **more)


@pytest.mark.parametrize("unknown", [0.0, UNKNOWN])
@pytest.mark.parametrize("ids", [[], [5], [0, 3, 2**62, 2**63 - 1]])
def test_a_module_answers_as_its_table_does(ids: list[int], unknown: float) -> None:
    table = exported(ids, unknown)
    asked = torch.tensor([[0, 3, 5], [2**62, 2**63 - 1, 4]])
    for room in (None, max(len(ids), 1)):
        served = ServedTable(table, room)
        assert torch.equal(served(asked), table.look_up(asked))
    assert len(served) == len(ids)


def test_an_exported_program_answers_and_has_what_the_module_takes_later() -> None:
    served = ServedTable(exported([2, 5], place=[[0, 1, 1]]), room=3)
    asked = torch.tensor([5, 2, 9])
    dynamic = ({0: torch.export.Dim("ids", min=2)},)
    program = torch.export.export(served, (asked,), dynamic_shapes=dynamic)
    run = program.module()
    assert torch.equal(run(asked), served(asked))
    assert torch.equal(run(torch.arange(20)), served(torch.arange(20)))
    assert served.update(exported([5, 9], base=[[0, 1, 1]], place=[[0, 1, 2]]))
    table = exported([2, 5, 9])
    assert torch.equal(served(asked), table.look_up(asked))
    assert torch.equal(run(asked), table.look_up(asked))
    removed = torch.tensor([2])
    assert served.update(
        exported([5], base=[[0, 1, 2]], place=[[0, 1, 3]], removed=removed, version=3)
    )
    assert torch.equal(run(asked), exported([5, 9]).look_up(asked))
    assert served.version == 3
    assert not served.update(exported([3, 4], base=[[0, 1, 3]], place=[[0, 1, 4]]))  # no room
    assert torch.equal(served(asked), exported([3, 4, 5, 9]).look_up(asked))
    assert len(served) == 4


def test_what_is_not_of_this_instant_is_refused() -> None:
    changes = exported([5], base=[[0, 1, 2]], place=[[0, 1, 3]])
    with pytest.raises(
        ConfigurationError, match=r"give an export without since=, and these to update\(\)"
    ):
        ServedTable(changes)
    with pytest.raises(ConfigurationError, match="room=1 for 2 rows"):
        ServedTable(exported([5, 6]), 1)
    served = ServedTable(exported([5, 6], place=[[0, 1, 1]]))
    for wrong in (
        changes,
        exported([5, 6, 7], base=[[0, 1, 2]]),
        ExportedTable("x", ALL, ALL[:, None]),
    ):
        with pytest.raises(ConfigurationError, match="since another export"):
            served.update(wrong)
    with trainer(words()) as sgd:
        for wrong_cursor in (
            "",
            "[1, 2]",
            '["words", [[1]]]',
            '["words", 3]',
            '["words", [["a", 1, 2]]]',
            3,
        ):
            with pytest.raises(ConfigurationError, match="or the cursor of one"):
                sgd.export_table("words", since=wrong_cursor)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="an export of table 'others', not of 'words'"):
            sgd.export_table("words", since=sgd.export_table("others").cursor)


def test_consumers_pull_at_their_own_pace_while_training_goes_on() -> None:
    """Each is at any moment what a whole export of then is; rows are removed meanwhile."""
    ids = torch.arange(60).repeat_interleave(2)
    settings: Any = {"capacity": 20, "eviction": LRU(), "initial": Normal()}
    consumers: dict[int, ServedTable] = {}
    removed = []

    class Pulls(Callback):
        def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
            for every in (1, 2, 5):
                if result.step == every:
                    consumers[every] = ServedTable(trainer.export_table("words"), room=40)
                elif result.step % every == 0:
                    changes = trainer.export_table("words", since=consumers[every].cursor)
                    removed.append(len(changes.removed))
                    assert consumers[every].update(changes)
                    whole = trainer.export_table("words")
                    if whole.version == consumers[every].version:
                        assert torch.equal(consumers[every](ALL), whole.look_up(ALL))

    with trainer(words(ids, **settings)) as sgd:
        sgd.fit(steps=20, callbacks=[Pulls()], progress=False)
        whole = sgd.export_table("words")
        for served in consumers.values():
            served.update(sgd.export_table("words", since=served.cursor))
            assert torch.equal(served(ALL), whole.look_up(ALL))
            assert len(served) == len(whole)
    assert sum(removed) > 10


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.long
def test_the_example_serves_while_it_trains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steepest.runtime.process.keep_freed_memory", lambda: False)
    answers: list[dict[str, Any]] = []
    address = ""

    class Asks(Callback):
        """Asks for the best items at some steps, and for what is not there."""

        def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
            nonlocal address
            if result.step == 1:
                found = re.search(r"ask (http://\S+)/top", capsys.readouterr().out)
                assert found is not None
                address = found[1]
                for wrong in ("/", "/top", "/top?user=x", f"/top?user={2**64}"):
                    with pytest.raises(HTTPError, match="404"):
                        get(address + wrong)
            if result.step % 50 == 0:
                answers.append(get(f"{address}/top?user=7"))

    with imported("serve_top10") as examples, Simulation(1).running():
        arguments = ["--port", "0", "--epochs", "12", "--every", "20"]
        examples["serve_top10"].main(arguments, [Asks()])
    versions = [answer["version"] for answer in answers]
    assert versions == sorted(versions)
    assert versions[-1] > 0
    assert len(answers[-1]["items"]) == 10
    last = json.loads(capsys.readouterr().out.rpartition("user 7: ")[2])
    assert len(last) == 10
    assert all(item % 4 == 7 % 4 for item in last)


def test_tensors_of_a_module_are_buffers_of_its_state() -> None:
    served = ServedTable(exported([2, 5]), room=4)
    assert served.state_dict().keys() == {"ids", "values", "count"}
    assert not list(served.parameters())
    again: Tensor = served(torch.tensor([5], dtype=torch.int32))
    assert again.tolist() == [[2.5, 2.5, 2.5]]
