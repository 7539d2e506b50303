"""What `steepest run` is told: by its options, and by a file of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from steepest.cli import run
from steepest.cli.main import main, make_parser
from steepest.cli.settings_file import with_file
from steepest.errors import ConfigurationError

SCRIPT = """
import torch, steepest
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
model, optimizer, loader = steepest.prepare(model, optimizer, DataLoader(data, batch_size=2))
for epoch in steepest.epochs(1):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        steepest.report(loss=loss, workers=steepest.size())
"""


def parser() -> argparse.ArgumentParser:
    """The parser of `steepest run` alone."""
    commands = argparse.ArgumentParser(prog="steepest").add_subparsers()
    run.add_parser(commands)
    found: argparse.ArgumentParser = commands.choices["run"]
    return found


def read(file: Path, content: str, *given: str) -> Any:
    """The options of a command with a file that has some content."""
    file.write_text(content)
    arguments = ["train.py", *given, "--config", str(file)]
    return parser().parse_args(with_file(parser(), arguments))


def test_a_file_has_options_and_the_command_line_wins(tmp_path: Path) -> None:
    content = (
        "workers: 2:4\nseed: 7\npage: true\nno_progress: false\nmax-failures: 5\n"
        "log: [tensorboard=runs, mlflow]\nstrategy: allreduce\n"
    )
    found = read(tmp_path / "job.yaml", content, "--strategy", "local", "--seed=8")
    assert (found.workers, found.strategy, found.seed) == ("2:4", "local", 8)
    assert (found.page, found.no_progress, found.max_failures) == (True, False, 5)
    assert found.log == ["tensorboard=runs", "mlflow"]
    assert read(tmp_path / "empty.yaml", "# nothing\n").workers == "1"


def test_an_option_that_is_cut_short_names_the_file_too(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("workers: 3")
    given = with_file(parser(), ["train.py", "--conf", str(tmp_path / "job.yaml")])
    assert parser().parse_args(given).workers == "3"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("worker: 4", "has 'worker', which is no option of .*run: give some of .*workers"),
        ("config: other.yaml", "has 'config', which is no option"),
        ("page: 3", "page is '3': give true or false"),
        ("workers:", "workers is '': give a number or a text"),
        ("workers: {least: 2}", "give a number or a text"),
        ("seed: [1, 2]", "seed has 2 values: give one"),
        ("[workers]", "has list: give a mapping"),
        ("workers: [", "job.yaml: while parsing"),
        ("seed: !!python/object/apply:os.getcwd []", "seed has 0 values"),
    ],
)
def test_what_a_file_cannot_have_is_refused(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        read(tmp_path / "job.yaml", content)


def test_a_file_that_is_not_there_is_said_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "train.py", "--config", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capsys.readouterr().err


def test_trackers_are_made_from_their_names(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard")
    assert run.tracker(f"tensorboard={tmp_path}").key == f"TensorBoard {tmp_path}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["tensorbord", "=runs", "csv=x"])
def test_a_tracker_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigurationError, match="give tensorboard, mlflow, wandb, trackio or opentelemetry"
    ):
        run.tracker(text)


@pytest.mark.parametrize("strategy", ["ps", "allreduce", "local", "async"])
def test_replication_is_the_strategys(strategy: str) -> None:
    options = parser().parse_args(["train.py", "--strategy", strategy, "--replication", "2"])
    assert run._strategy(options).replication == 2  # type: ignore[attr-defined]


def test_replication_where_nothing_is_held_twice_is_refused() -> None:
    options = parser().parse_args(["train.py", "--strategy", "simple", "--replication", "2"])
    with pytest.raises(ConfigurationError, match="--replication with --strategy simple"):
        run._strategy(options)


def test_the_help_fits_one_screen() -> None:
    assert len(parser().format_help().splitlines()) <= 50


@pytest.mark.long
def test_a_script_runs_as_a_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(
        "workers: 2\nstrategy: ps\nreplication: 2\nruntime: processes\nmax-failures: 1\nsnapshot-every: 0\n"
        "checkpoints: kept\nno-progress: true\n"
    )
    assert main(["run", "train.py", "--config", "job.yaml"]) == 0
    assert "workers: 2" in capsys.readouterr().out
    assert list((tmp_path / "kept").iterdir())


@pytest.mark.parametrize(
    ("more", "told"),
    [(["--checkpoints", "kept"], "goes on from kept"), ([], "begins anew, and with --checkpoints")],
)
def test_ctrl_c_says_what_the_same_command_would_do(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    told: str,
) -> None:
    def stopped(*arguments: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("steepest.loop.run.run", stopped)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["run", "train.py", "--runtime", "processes", *more]) == 130
    assert told in capsys.readouterr().err


def test_every_option_of_run_has_a_help() -> None:
    assert make_parser() is not None
    assert all(action.help for action in parser()._actions)
