# ruff: noqa: F811 - fixtures are imported, and named as arguments
"""The places where it runs: a laptop without Ray, tasks, actors, Tune trials, a running cluster, under Ctrl-C.

Each test has Ray clusters of its own, in subprocesses, all of whose processes carry a mark in their
environment: none may be left afterwards.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.page_examples import blocks_of
from tests.ray_hosts import (
    FORK,
    SECONDS,
    Place,
    place,  # noqa: F401 - a fixture
    signalled,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]


@pytest.mark.full
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two CPUs")
def test_without_ray_one_is_started_and_ended(place: Place) -> None:
    """Twice, first with Ray's notices, which are shown if asked for."""
    program = place.script(
        """
        if __name__ == "__main__":
            import logging
            from steepest import RunConfig
            settings = RunConfig(runtime="ray", verbose=True)
            with DistributedSGD(linear_model_creator(), run_config=settings):
                pass
            assert not ray.is_initialized()
            print("then")
            check(train())
            print(logging.getLogger("ray").level)
            assert not ray.is_initialized()
        """,
        forked=False,
    )
    printed = place.run(sys.executable, "-W", "error", program)
    assert "Traceback" not in printed
    before, _, after = printed.partition("then\n")
    assert "oken authentication is" in before
    assert after == f"{logging.WARNING}\n"


@pytest.mark.full
def test_the_page_about_tune_runs_as_it_stands(place: Place) -> None:
    pytest.importorskip("ray.tune", reason="pip install 'steepest[tune]'")
    (block,) = blocks_of("docs/howto/tune.md")
    path = place.directory / "page.py"
    path.write_text(f"{FORK}import ray\nray.init(num_cpus=2, include_dashboard=False)\n{block}")
    assert "best learning rate: 0.3\n" in place.run(sys.executable, str(path))


@pytest.mark.parametrize(
    ("managed", "strategy"),
    [
        pytest.param(True, "ps", id="with, ps"),
        pytest.param(False, "simple", id="without with, simple", marks=pytest.mark.full),
    ],
)
def test_ctrl_c_ends_everything(place: Place, managed: bool, strategy: str) -> None:
    program = place.script(
        f"""
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell inherit "ignore"

        class Tell(Callback):
            def on_step(self, sgd, result):
                if result.step == 5:
                    print("training", flush=True)

        def go(sgd):
            sgd.fit(steps=10_000_000, callbacks=[Tell()], progress=False)

        ray.init(num_cpus=2, include_dashboard=False)
        sgd = DistributedSGD(linear_model_creator(), num_workers=2, strategy={strategy!r})
        if {managed}:
            with sgd:
                go(sgd)
        else:
            go(sgd)
        """
    )
    # as a terminal does it
    status, output = signalled(place, program, signal.SIGINT, everybody=True)
    assert status != 0, output
    assert "KeyboardInterrupt" in output


@pytest.mark.parametrize(
    "everybody",
    [
        pytest.param(False, id="driver"),
        pytest.param(True, id="process group", marks=pytest.mark.full),
    ],
)
def test_sigterm_ends_everything_and_the_same_program_continues(
    place: Place, everybody: bool
) -> None:
    program = place.script(
        """
        from steepest import Checkpoints

        class Tell(Callback):
            def on_step(self, sgd, result):
                if result.step == first + 5:
                    print("training", flush=True)

        ray.init(num_cpus=2, include_dashboard=False)
        with DistributedSGD(linear_model_creator(), num_workers=2, checkpoints=Checkpoints("run", every=4)) as sgd:
            first = sgd.stats().step
            print("from step", first, flush=True)
            sgd.fit(steps=10_000_000, callbacks=[Tell()], progress=False)
        """
    )
    began = []
    for _ in range(2):
        status, output = signalled(place, program, signal.SIGTERM, everybody=everybody)
        # of a group Ray's processes are, and Ray may end the driver itself, see docs/explanation/not_for_us.md
        assert status in ((143, 1) if everybody else (143,)), output
        assert "Traceback" not in output
        began.append(int(re.findall(r"from step (\d+)", output)[0]))
    assert began[0] == 0
    if everybody:
        assert began[1] >= 4, "the newest checkpoint, for workers were told to end too"
    else:
        assert began[1] >= 5, "the state at SIGTERM was not kept"


@pytest.mark.full
def test_sigterm_ends_a_program_that_waits_for_a_ray_that_is_gone(place: Place) -> None:
    """Ray itself ends it after a minute, with another status."""
    program = place.script(
        """
        import re, signal
        from pathlib import Path
        from steepest.runtime.signals import end_on_sigterm

        ray.init(num_cpus=1, include_dashboard=False)
        end_on_sigterm()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            name, parent = re.match(r"\\d+ \\((.*)\\) . (\\d+)", stat.read_text()).groups()
            if name == "gcs_server" and parent == str(os.getpid()):
                os.kill(int(stat.parent.name), signal.SIGKILL)
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ray.nodes()
        """
    )
    with place.start(sys.executable, program) as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, output
    assert "Ray is gone" in output
    place.kill()  # Ray's own processes, which ask for a minute for the one that was killed


def doctor(place: Place, seconds: float) -> str:
    """What the doctor prints if it takes so many seconds; it ends with 0 if it found all well."""
    limits = f"doctor._SECONDS = {seconds}; doctor._LAST_SECONDS = {seconds * 0.9}"
    program = (
        f"{FORK}import sys; from steepest.cli import doctor, main; {limits}; sys.exit(main.main())"
    )
    return place.run(
        sys.executable, "-c", program, "doctor", status=(0,) if seconds > 50 else (0, 1)
    )


def test_the_doctor(place: Place) -> None:
    output = doctor(place, 100)  # so that a busy machine gets to the end, too
    told = output.splitlines()
    lines = [re.sub(r"^ *[0-9.]+ s  ", "", line) for line in told]
    assert all(line != timed for line, timed in zip(lines, told, strict=True))
    assert lines[0].startswith("steepest ")
    assert lines[1].startswith("importing torch ")
    assert lines[3] == "starting processes of this machine"  # it says so before it does
    lines = [line for line in lines if not line.startswith("this machine is busy")]
    assert re.fullmatch(r"starting \d workers?", lines[4])
    said = r"  (\w+) +\d workers?: one step, loss [0-9.]+: works"
    assert [re.fullmatch(said, line)[1] for line in lines[5:-3]] == [  # type: ignore[index]
        "allreduce", "local", "simple", "ps", "async", "ssp",
    ]  # fmt: skip
    assert lines[-3:-1] == ["ending", "what was tried works: all is well"]
    assert lines[-1].startswith("next: ")


@pytest.mark.parametrize(
    "seconds",
    [0.1, *(pytest.param(some, marks=pytest.mark.full) for some in (3, 5, 7))],
)
def test_the_doctor_ends_when_its_time_is_over(place: Place, seconds: float) -> None:
    output = doctor(place, seconds)
    lines = [re.sub(r"^ *[0-9.]+ s  ", "", line) for line in output.splitlines()]
    tried = [line for line in lines if line.endswith(": works")]
    if len(tried) == 6:  # a fast machine
        return
    if tried:
        assert lines.pop().startswith("next: ")
    assert re.fullmatch(rf"no time for .*\bssp: {seconds:g} s are all it takes", lines[-2])
    assert lines[-1].startswith("what was tried works" if tried else "no strategy was tried")
