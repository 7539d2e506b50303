"""The same as SageMaker's own toolkit has it, and a run under it; make test-sagemaker installs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from steepest.places.sagemaker_job import read_job
from tests.ray_hosts import ROOT
from tests.sagemaker_hosts import DIRECT, Host, ended, job_of

pytest.importorskip("sagemaker_training", reason="needs SageMaker's toolkit: make test-sagemaker")

ASK = """
import json, os
from sagemaker_training.environment import Environment
environment = Environment()
print("ANSWER", json.dumps([environment.to_env_vars(), environment.to_cmd_args()]))
"""
TOLD = {"lr": 0.5, "name": "adam", "n": [1, 2], "deep": {"b": 1, "a": "x"}, "on": True, "x": None}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    resources = {
        "current_host": "algo-2", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0",
        "current_instance_type": "ml.m5.large", "current_instance_group": "g", "instance_groups": [],
    }  # fmt: skip
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    (config / "inputdataconfig.json").write_text('{"train": {}, "test": {}}')
    told = {name: json.dumps(value) for name, value in TOLD.items()}
    told |= {"sagemaker_program": '"train.py"', "plain": "text"}
    (config / "hyperparameters.json").write_text(json.dumps(told))
    return tmp_path


def test_arguments_and_variables_are_those_of_the_toolkit(base: Path) -> None:
    variables = {"SAGEMAKER_BASE_DIR": str(base)}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | variables,
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    (answer,) = (line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    told, words = json.loads(answer.removeprefix("ANSWER "))
    job = read_job(variables)
    assert job.arguments() == words
    assert read_job(variables | told) == job  # under the toolkit the program sees the same
    for name, value in job.variables().items():
        if value.startswith(("[", "{")):  # order and white space are free
            expected, value = json.loads(told[name]), json.loads(value)
            assert value == (sorted(expected) if name == "SM_CHANNELS" else expected), name
        else:
            assert value == told[name], name


def tell(host: Host, program: str) -> None:
    (host.base / "code" / "train.py").write_text(program)


def test_the_program_of_the_page_trains_under_the_toolkit() -> None:
    text = (ROOT / "docs" / "howto" / "sagemaker.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    with job_of(1) as hosts:
        tell(hosts[0], "\n".join(line.removeprefix("   ") for line in program.splitlines()))
        hosts[0].tell({"epochs": 1})
        output = ended(hosts[0].toolkit(), 0)
        assert "step 57 with 1 workers" in output  # of 32 of 1,797 samples
        assert (hosts[0].base / "model" / "manifest.json").exists()
        assert list((hosts[0].base / "checkpoints").glob("*-step-57"))
        assert (hosts[0].base / "output" / "success").exists()
        assert hosts[0].failure() == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((*DIRECT, "--join-timeout", "0"), "--join-timeout 0.0: give seconds above 0"),
        pytest.param(  # tests/places/test_sagemaker.py has the program's reason and status
            DIRECT, "train.py ended with exit status 1\nso it is", marks=pytest.mark.full
        ),
    ],
)
def test_the_toolkit_passes_the_status_on_and_leaves_the_reason(
    options: tuple[str, ...], says: str
) -> None:
    with job_of(1) as hosts:
        tell(hosts[0], 'raise SystemExit("so it is")')
        ended(hosts[0].toolkit(*options), 1)
        assert says in hosts[0].failure()
        assert not (hosts[0].base / "output" / "success").exists()
