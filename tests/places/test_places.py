"""The page about places to run does what it says: its programs run, its commands write what places take."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import ray

from steepest.cli.main import main
from tests.page_examples import ROOT, blocks_of, run_block
from tests.ray_hosts import (
    FORK,
    Place,
    place,  # noqa: F401 - a fixture
)

PAGE = "docs/howto/places.md"
PAGES = tuple(
    f"docs/howto/{name}.md" for name in ("kubernetes", "spot_nodes", "kubernetes_values", "slurm")
)


def commands() -> list[str]:
    """Lines of the pages' shell examples."""
    text = "".join((ROOT / page).read_text() for page in PAGES)
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    blocks = [block.replace("\\\n", " ") for block in blocks]
    for block in blocks:
        assert len(block.splitlines()) <= 3, "three commands from a fresh machine"
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_the_program_for_all_places_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEEPEST_CHECKPOINTS", str(tmp_path / "kept"))
    address = ray.get_runtime_context().gcs_address
    assert "learned: True" in run_block(blocks_of(PAGE)[0], tmp_path, address)
    assert list((tmp_path / "kept").glob("*/manifest.json"))


@pytest.mark.full
@pytest.mark.cluster
def test_the_example_of_a_ray_for_a_block_runs_as_it_stands(place: Place) -> None:  # noqa: F811
    path = place.directory / "page.py"
    path.write_text(FORK + blocks_of(PAGE)[1])
    printed = place.run(sys.executable, str(path))
    assert "ps 5\n" in printed
    assert "allreduce 5\n" in printed


def test_each_launch_command_of_the_pages_writes_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(blocks_of(PAGE)[0])
    (values,) = re.findall(r"```yaml\n(.*?)```", (ROOT / PAGES[2]).read_text(), flags=re.DOTALL)
    (tmp_path / "values.yaml").write_text(values)
    words = [shlex.split(line) for line in commands() if line.startswith("steepest ")]
    places = []
    for command in words:
        assert main(command[1:]) == 0
        places.append(command[2])
        assert (tmp_path / command[command.index("--output") + 1]).stat().st_size > 0
    assert places == ["kubernetes"] * 3 + ["slurm"]
    applied = {line.split()[-1] for line in commands() if line.startswith(("kubectl", "sbatch"))}
    assert applied == {"job.yaml", "job.sh"}
