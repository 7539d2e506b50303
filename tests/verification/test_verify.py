"""`steepest verify` on processes of this machine: mistakes are named, and correct loops are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import TorchModel
from steepest.cli.main import main
from steepest.errors import ConfigurationError
from steepest.testing import linear_model_creator, verify
from tests.page_examples import blocks_of, run_block
from tests.pairs import mostly_full
from tests.verified_loops import BACKWARD, BEGIN, LOOP, PREPARE, STEP, loop, verified


@pytest.mark.long
def test_a_counter_that_begins_anew_in_a_successor_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counting = LOOP.replace(
        "        optimizer.step()",
        "        count += 1\n"
        "        optimizer.param_groups[0]['lr'] = 0.1 / count\n"
        "        optimizer.step()",
    )
    text = BEGIN + PREPARE + "count = 0\n" + counting
    path = tmp_path / "train.py"
    path.write_text(text)
    status, said = main(["verify", str(path), "--steps", "8", "--json"]), capsys.readouterr()
    assert status == 1
    assert said.out, said.err
    found = json.loads(said.out)
    line = 1 + text[: text.index("count += 1")].count("\n")
    assert not found["equal"]
    verdicts = {row["run"]: row["verdict"] for row in found["rows"]}
    assert verdicts == {
        "one process, batch 16": "equal",
        "2 workers, batch 8 each": "equal",
        "worker 1 killed at step 3": "NOT EQUAL",
        "worker 0 killed at step 5": "NOT EQUAL",
        "stopped at step 3, resumed": "NOT EQUAL",
    }
    # workers that disagree about a rate end the run; one that is resumed has other rates on all
    assert [row["what"] for row in found["rows"][2:]] == ["error", "error", "settings"]
    assert [row["step"] for row in found["rows"][2:]] == [3, 5, 4]
    for row in found["rows"][2:]:
        assert f"`count` (train.py:{line})" in row["causes"][0]
        assert "steepest.register" in row["causes"][0]


TWO_LOSSES = """
G, D = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
first, second = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (G, D))
G, D, first, second, loader = steepest.prepare(G, D, first, second, loader)
for epoch in steepest.epochs(2):
    for x, _ in loader:
        z = torch.randn(len(x), 2)
        second.zero_grad()
        F.softplus(D(G(z).detach())).mean().add(F.softplus(-D(x)).mean()).backward()
        second.step()
        first.zero_grad()
        F.softplus(-D(G(z))).mean().backward()
        first.step()
"""
CORRECT = {
    "adam, a schedule, clipping, a gather": loop(
        (BACKWARD, BACKWARD + "        steepest.clip_grad_norm_(model.parameters(), 0.5)\n"),
        (STEP, STEP + "        scheduler.step()\n"),
        (
            "    steepest.report(loss=loss)",
            "    steepest.report(loss=steepest.gather(loss).mean())",
        ),
        before="optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n"
        "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)\n",
        prepare="model, optimizer, scheduler, loader = steepest.prepare(model, optimizer, scheduler, loader)\n",
    ),
    "gradients of two batches": loop(
        ("for x, y in", "for number, (x, y) in"),
        ("in loader", "in enumerate(loader)"),
        ("        optimizer.zero_grad()\n", ""),
        (
            STEP,
            "        if number % 2:\n            optimizer.step()\n            optimizer.zero_grad()\n",
        ),
    ),
    "two networks, and noise": BEGIN + TWO_LOSSES,
    "dropout and batch normalization": loop(
        before="model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    ),
}
WRONG = {
    "multiplied by the number of workers": (
        loop((BACKWARD, "        (loss * steepest.size()).backward()\n")),
        "2 workers, batch 8 each",
        "2 times that of one process",
    ),
    "the rate of a larger batch": (
        loop(before="optimizer.param_groups[0]['lr'] *= steepest.size()\n"),
        "2 workers, batch 8 each",
        "scaled by steepest.size() at train.py:12",
    ),
    "a rate by one worker's loss": (
        loop((BACKWARD, BACKWARD + "        optimizer.param_groups[0]['lr'] = 0.1 * loss.item()\n")),
        "2 workers, batch 8 each",
        "workers disagree about lr",
    ),
    "a scheduler that is not given": (
        loop(
            (STEP, STEP + "        scheduler.step()\n"),
            before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)\n",
        ),
        "stopped at step 3, resumed",
        "`scheduler` (train.py:12), a StepLR, went on in the others and began anew in the successor: give it to "
        "steepest.prepare(",
    ),
    "a loader that is not given": (
        loop(prepare="model, optimizer = steepest.prepare(model, optimizer)\n"),
        "2 workers",
        "was not given to steepest.prepare(): each worker reads all of it",
    ),
    "a count that is reported": (
        loop(("report(loss=loss)", "report(seen=float(len(x)))")),
        "2 workers, batch 8 each",
        "a sum or a count over a worker's own samples",
    ),
    "what is drawn without a seed": (
        loop((BACKWARD, "        (loss * (1 + torch.rand((), generator=drawn))).backward()\n"),
             before="drawn = torch.Generator()\ndrawn.seed()\n"),
        "one process, batch 16",
        "does not do the same twice",
    ),
    "a generator of its own": (
        loop((BACKWARD, "        (loss * (1 + torch.rand((), generator=drawn))).backward()\n"),
             before="drawn = torch.Generator().manual_seed(3)\n"),
        "worker 0 killed at step 5",
        "`drawn` (train.py:12), a random generator of the script's own, began anew",
    ),
    "an early stop by one worker's loss": (
        loop((STEP, STEP + "        if loss < 0.55:\n            raise SystemExit(0)\n")),
        "2 workers, batch 8 each",
        "workers disagree about the step that they take",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CORRECT)
def test_correct_loops_are_equal(tmp_path: Path, name: str) -> None:
    found = verified(tmp_path, CORRECT[name])
    found.assert_equal()
    killed = (
        "as expected" if "normalization" in name else "equal"
    )  # each worker's running statistics
    assert [row.verdict for row in found.rows[2:]] == [killed, killed, "equal"]
    expects = "noise" in name or "dropout" in name
    assert found.rows[1].verdict == ("as expected" if expects else "equal")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", mostly_full(WRONG, *list(WRONG)[1:])
)  # the first is in test_what_differs, too
def test_mistakes_are_named(tmp_path: Path, name: str) -> None:
    text, run, said = WRONG[name]
    found = verified(tmp_path, text, steps=12 if "count" in name else 8)
    with pytest.raises(AssertionError, match="distribution changes the result"):
        found.assert_equal()
    (row,) = (each for each in found.rows if each.run == run)
    # workers that disagree end the run themselves
    assert row.verdict == ("failed" if "disagree" in said else "NOT EQUAL")
    assert any(said in each for each in (row.found, *row.causes)), str(found)


@pytest.mark.long
def test_files_that_all_workers_write_and_counters_that_change_nothing_are_notes(
    tmp_path: Path,
) -> None:
    writes = f"    open({str(tmp_path / 'log.txt')!r}, 'a').close()\n    steepest.report(loss=loss)"
    text = loop(
        ("    steepest.report(loss=loss)", writes),
        (STEP, STEP + "        seen += len(x)\n"),
        before="seen = 0\n",
    )
    found = verified(tmp_path, text)
    found.assert_equal()
    assert sorted(note.split(" ")[0] for note in found.notes) == [
        str(tmp_path / "log.txt"),
        "`seen`",
    ]


TABLES = """
data = TensorDataset(torch.randint(0, 30, (96, 2)), (x[:, 0] > 0).long())
table = steepest.Embedding(steepest.Table("users", 6))
model = nn.Sequential(table, nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, shuffle=True)
"""


@pytest.mark.long
@pytest.mark.full
def test_rows_of_tables_and_dropout_by_sample_are_those_of_one_process(tmp_path: Path) -> None:
    found = verified(tmp_path, loop(before=TABLES), tables=True, deterministic=True)
    assert [row.verdict for row in found.rows] == ["equal"] * 5
    assert found.rows[1].found.endswith("rows of 'users'")
    assert found.notes == ()


@pytest.mark.long
def test_the_pages_example_runs_as_it_stands(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/howto/verify.md")
    lines = run_block(block, tmp_path).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "one process, batch 16",
        "2 workers, batch 8 each",
        "worker 1 killed at step 3",
        "worker 0 killed at step 4",
        "stopped at step 2, resumed",
    ]


def by_worker(worker_index: int, device_index: int) -> Any:
    """A model whose loss depends on its worker."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(output, target) * (1 + worker_index)

    data = (torch.arange(96.0).reshape(24, 4) / 96, torch.ones(24, 1))
    return TorchModel(
        torch.nn.Linear(4, 1),
        loss=loss,
        data=data,
        batch_size=4,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )


@pytest.mark.long
@pytest.mark.parametrize("creator", [linear_model_creator(), by_worker])
def test_a_job_with_a_model_creator(creator: Any) -> None:
    found = verify(creator, steps=6)
    verdicts = {row.run.split(",")[0]: row.verdict for row in found.rows}
    assert verdicts == {
        "one process": "equal",
        "2 workers": "NOT EQUAL" if creator is by_worker else "equal",
        "worker 1 killed behind step 3": "equal",
        "worker 0 killed behind step 4": "equal",
        "stopped at step 2": "equal",
    }
    if creator is by_worker:
        assert "depend on worker_index" in found.rows[1].causes[0]


def test_a_job_takes_neither_tables_nor_numbers_by_sample() -> None:
    for chosen in ({"tables": True}, {"deterministic": True}):
        with pytest.raises(ConfigurationError, match="give a function with a loop of its own"):
            verify(linear_model_creator(), **chosen)


def test_strategies_with_other_results_are_refused() -> None:
    for strategy in ("local", "async"):
        with pytest.raises(ConfigurationError, match='give "ps", "allreduce" or "simple"'):
            verify(print, strategy=strategy)
