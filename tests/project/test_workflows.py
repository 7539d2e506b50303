"""The workflows run what .ci/run runs, ask for no more rights than they need, and the bill of materials is whole."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from typing import Any

import yaml

from release.bill_of_materials import bill
from tests.page_examples import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def test_the_workflow_of_tests_runs_what_ci_runs() -> None:
    job = workflow("tests.yml")["jobs"]["tests"]
    run = {name for line in job["strategy"]["matrix"]["targets"] for name in line.split()}
    assert all(re.search(rf"^{name}:", MAKEFILE, flags=re.MULTILINE) for name in run)
    lines = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    made = {name for line in lines for name in line.split() if not name.startswith(".")}
    assert run >= made > {"check", "test", "test-cluster", "site"}


def test_only_the_job_that_publishes_may_and_it_builds_nothing() -> None:
    publish = workflow("publish.yml")
    assert publish["permissions"] == {"contents": "read"}
    assert publish[True] == {"push": {"tags": ["v*.*.*"]}}  # YAML reads the key `on` as true
    build, last = publish["jobs"]["build"], publish["jobs"]["publish"]
    assert last["environment"] == "release"
    assert last["permissions"] == {"id-token": "write"}
    assert not [step for step in last["steps"] if "run" in step]
    assert not [step for step in build["steps"] if "publish" in step.get("uses", "")]
    assert "secrets." not in json.dumps(publish)
    made = [step["run"] for step in build["steps"] if "run" in step]
    assert [line.split()[:2] for line in made] == [["make", "package"], ["make", "sbom"]]


def test_the_bill_of_materials_has_all_that_is_needed_and_nothing_else() -> None:
    found = bill()
    versions = {each["name"]: each["version"] for each in found["components"]}
    assert {"torch", "ray", "numpy", "safetensors", "msgspec", "pyyaml", "tqdm"} <= set(versions)
    assert not {"pytest", "ruff", "scikit-learn", "steepest"} & set(versions)
    assert all(version(name) == number for name, number in versions.items())
    known = {each["bom-ref"] for each in found["components"]}
    needed = {ref for each in found["dependencies"] for ref in each["dependsOn"]}
    assert needed == known
    assert found == bill()
