"""A script finds what stands beside it, as a file and as a module, as `python` has it; also in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from steepest.cli.main import make_parser
from steepest.cli.scripts import script_of
from steepest.errors import ConfigurationError
from steepest.loop.script import UserScript

FILES = {
    "beside.py": "NAME = 'beside'\n",
    "train.py": "import sys\nimport beside\nprint(beside.NAME, __name__, *sys.argv[1:])\n",
    "pack/__init__.py": "",
    "pack/near.py": "NAME = 'near'\n",
    "pack/train.py": (
        "import sys\nfrom pack.near import NAME\nfrom . import near\nimport beside\n"
        "print(NAME, near.NAME, beside.NAME, __name__, __package__, __spec__.name, *sys.argv[1:])\n"
    ),
    "pack/__main__.py": "from .train import NAME\nprint(NAME, __name__, __package__)\n",
}
#: What a worker's process does: it has not read the script.
ELSEWHERE = "import cloudpickle, sys; cloudpickle.loads(sys.stdin.buffer.read())()"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "elsewhere").mkdir()
    yield tmp_path
    for name in [each for each in sys.modules if each.partition(".")[0] == "pack"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        (["train.py"], "."),
        (["../train.py"], "elsewhere"),
        (["-m", "train"], "."),
        (["-m", "pack.train"], "."),
        (["-m", "pack"], "."),
    ],
    ids=str,
)
def test_a_script_runs_elsewhere_as_python_runs_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], folder: str
) -> None:
    monkeypatch.chdir(project / folder)
    own = [sys.executable, *given, "--lr", "1"]
    expected = subprocess.run(own, capture_output=True, text=True, check=True, timeout=60).stdout
    options = make_parser().parse_args(["run", "--workers", "2", *given])
    options.arguments = ["--lr", "1"]
    script = script_of(options)
    found = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        input=cloudpickle.dumps(script),
        capture_output=True,
        cwd="/",
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ).stdout.decode()
    assert found == expected
    assert "--lr 1" in found


@pytest.mark.parametrize(
    ("name", "words"),
    [("pack.missing", "no such module from"), ("missing.train", "No module named 'missing'")],
)
def test_a_module_that_is_not_there_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(project)
    with pytest.raises(ConfigurationError, match=f"cannot run -m {name}.*{words}"):
        UserScript.read_module(name)
