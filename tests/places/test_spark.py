# ruff: noqa: F811 - fixtures are imported, and named as arguments
"""Ray on Spark: on local[n], what Ctrl-C leaves behind, and the command; what is refused; by make test-spark."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steepest.cli.main import main
from steepest.errors import ConfigurationError
from steepest.places import ray_on_spark, spark
from tests.places.spark_runs import (
    PROGRAM,
    ROOT,
    SECONDS,
    TOKEN,
    directory,  # noqa: F401 - a fixture
    environment,
    found,
    left,
    needs_spark,
)


@pytest.fixture(autouse=True)
def _deadline() -> None:
    """Let a test take longer than others may: each program here has a deadline of its own."""


@needs_spark
def test_ctrl_c_leaves_nothing_behind_and_ray_starts_again(directory: str) -> None:
    """It comes when Ray's head node has just started."""
    program = subprocess.Popen(
        [sys.executable, PROGRAM, "interrupted", directory],
        env=environment(RAY_AUTH_TOKEN=TOKEN),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        assert any("Process exit logs" in line for line in program.stdout)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        output, _ = program.communicate(timeout=SECONDS)
    finally:
        program.kill()
        program.wait()
    assert program.returncode == 0
    assert found(output) == {"left": [], "still computes": 10, "cpus": [0, 1]}
    assert left(directory) == []


@needs_spark
@pytest.mark.full  # test_spark_standalone.py has the command; the test above, nodes on local[n]
def test_the_command_runs_a_program(directory: str) -> None:
    command = "launch spark examples/sharded_parameter_server.py --master local[2] --workers 1"
    done = subprocess.run(
        [
            *(sys.executable, PROGRAM, "command", *command.split()),
            *("--cpus-per-worker", "2", "--memory", "600m", "--directory", directory),
            *("--conf", "spark.driver.memory=512m", "--conf", "spark.ui.enabled=false"),
            "--arguments=--megabytes 1 --workers 2 --rounds 1 --servers 1",
        ],
        env=environment(RAY_AUTH_MODE="disabled"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every parameter is 2, as it should be" in done.stdout
    assert left(directory) == []


# -- what needs no Spark -----------------------------------------------------------------------------


def refused(**settings: Any) -> str:
    with (
        pytest.raises(ConfigurationError) as caught,
        spark.cluster(object(), **({"workers": 1} | settings)),
    ):
        pass
    return str(caught.value)


def test_settings_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "workers=0" in refused(workers=0)
    assert "cpus_per_worker=0" in refused(cpus_per_worker=0)
    assert "memory_per_worker=-1" in refused(memory_per_worker=-1)
    assert "object_store_memory=100" in refused(object_store_memory=100)
    monkeypatch.setenv("RAY_ON_SPARK_START_HOOK", "some.Hook")
    assert "RAY_ON_SPARK_START_HOOK is set" in refused()


@needs_spark
def test_what_is_no_session_is_refused() -> None:
    assert "session is a object: give a pyspark.sql.SparkSession" in refused()


def test_without_pyspark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setitem(sys.modules, "pyspark.errors", None)
    assert "pip install 'steepest[spark]'" in refused()


def test_the_directory_must_be_short_and_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has .* characters: give one of at most 14"):
        ray_on_spark._make_root(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigurationError, match="directory='/no': No such file"):
        ray_on_spark._make_root("/no")


def test_the_token_is_rays_own_or_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    first, second = spark._token(), spark._token()
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("at home\n")
    assert spark._token()["RAY_AUTH_TOKEN"] == "at home"
    (tmp_path / "named").write_text("named")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    assert spark._token()["RAY_AUTH_TOKEN"] == "named"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "said")
    assert spark._token()["RAY_AUTH_TOKEN"] == "said"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (tmp_path / "named").unlink()
    with pytest.raises(ConfigurationError, match="cannot be read from .*named: No such file"):
        spark._token()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert spark._token() == {"RAY_AUTH_MODE": "disabled"}
    monkeypatch.setenv("RAY_AUTH_MODE", "secret")
    with pytest.raises(ConfigurationError, match="RAY_AUTH_MODE='secret': set it to 'token'"):
        spark._token()


def test_the_hook_gives_variables_and_starts_nothing_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_on_spark.Hook, "environment", {"RAY_AUTH_TOKEN": TOKEN})
    monkeypatch.setattr(ray_on_spark.Hook, "job_groups", [])
    monkeypatch.setattr(ray_on_spark.Hook, "ending", False)
    assert ray_on_spark.HOOK == "steepest.places.ray_on_spark.Hook"
    hook = ray_on_spark.Hook()
    assert hook.custom_environment_variables() == {"RAY_AUTH_TOKEN": TOKEN}
    hook.on_spark_job_created("group")
    monkeypatch.setattr(ray_on_spark.Hook, "ending", True)
    with pytest.raises(RuntimeError, match="no node starts any more"):
        hook.on_spark_job_created("another")
    assert ray_on_spark.Hook.job_groups == ["group"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("no.py --master local[1] --workers 1", "there is no program 'no.py'"),
        ("{here} --master local[1] --workers 1 --memory 4x", "--memory='4x': give a size such as"),
        ("{here} --master local[1] --workers 1 --conf a", "--conf='a': give KEY=VALUE"),
    ],
)
def test_the_command_refuses(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "spark", *options.format(here=__file__).split()]) == 1
    assert said in capsys.readouterr().err


def test_sizes_are_bytes() -> None:
    sizes = [spark._bytes_of("--memory", text) for text in ("7", "3k", "512m", "4G", "1tb")]
    assert sizes == [7, 3 << 10, 512 << 20, 4 << 30, 1 << 40]


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit", 0),
        ("import sys; sys.exit('why')", 1),
        ("import sys; assert __name__ == '__main__' and sys.argv[1:] == ['--lr', '0.1']", 0),
    ],
)
def test_a_programs_exit_status_is_the_commands(tmp_path: Path, program: str, status: int) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    argv, path = list(sys.argv), list(sys.path)
    assert spark._run_program(str(script), ["--lr", "0.1"]) == status
    assert (sys.argv, sys.path) == (argv, path)


def test_the_command_has_defaults() -> None:
    parser = argparse.ArgumentParser()
    spark.add_arguments(parser)
    options = parser.parse_args(["train.py", "--master", "yarn", "--workers", "2"])
    assert (options.cpus_per_worker, options.object_store_memory) == (1, "100m")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--master k8s://https://host:443", "Spark's master is 'k8s://https://host:443'"),
        ("--master k8s://https://host:443", "use `steepest launch kubernetes`"),
        ("--master mesos://host", "Ray runs on local[n]"),
        (
            "--master yarn --conf spark.task.resource.gpu.amount=1",
            "spark.task.resource.gpu.amount=1: Ray's nodes on Spark get no GPUs here",
        ),
        (
            "--master yarn --conf spark.executor.resource.gpu.amount=2",
            "or train on GPUs with a Ray",
        ),
    ],
)
def test_masters_and_gpus_that_ray_gets_nothing_of_are_refused_before_spark_starts(
    options: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)  # nor is Spark asked
    assert main(["launch", "spark", __file__, "--workers=1", *options.split()]) == 1
    assert said in capsys.readouterr().err
