"""What TAB completes, as bash itself says."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from steepest.cli import main
from steepest.cli.completion import script
from steepest.strategies.names import STRATEGY_NAMES

BASH = shutil.which("bash")


def completed(line: str) -> set[str]:
    """The words that bash offers at the end of a line."""
    words = line.split(" ")
    asked = (
        f"{script(main.make_parser())}\n"
        f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}\n"
        '_steepest; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-u", "-c", asked], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("steepest d", {"demo", "doctor"}),
        ("steepest compare train.py --st", {"--strategies"}),
        ("steepest doctor --", {"--help"}),
        ("steepest run train.py --strategy a", {"allreduce", "async"}),
        ("steepest run --ch", {"--checkpoints"}),
        ("steepest launch slurm --no-such", set()),
        ("steepest launch s", {"sagemaker", "slurm", "spark"}),
        ("steepest completion ", {"bash", "-h", "--help"}),
    ],
)
def test_bash_offers(line: str, offered: set[str]) -> None:
    assert completed(line) == offered


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == script(main.make_parser())


def test_help_says_what_a_newcomer_does_next(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    order = [text.index(f"\n  steepest {name}") for name in ("doctor", "demo", "run", "completion")]
    assert order == sorted(order)


def test_the_command_answers_without_torch_or_ray() -> None:
    """`--help`, and what a shell completes, come at once; `steepest run` imports torch while Ray starts."""
    program = "import sys; import steepest.cli.main; print({'torch', 'ray'} & {*sys.modules})"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert answer.stdout == "set()\n", answer.stderr


def test_a_script_runs_under_each_strategy_that_has_a_name() -> None:
    for name in STRATEGY_NAMES:
        assert main.make_parser().parse_args(["run", "a.py", "--strategy", name]).strategy == name
